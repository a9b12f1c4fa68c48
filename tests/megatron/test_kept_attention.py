"""Attention that Megatron's recomputation keeps: the gradients of a step, and what it sends."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from burst_plugin import Strategy
from burst_plugin.activations import host_memory, pages
from burst_plugin.megatron import install
from tests.megatron.test_model_parity import DEEPSEEK, GPT_OSS, MTP, TWO_LAYERS
from tests.support.megatron_gpt import GptRun, StepResult, build, forward_backward, full_grads, leave, random_tokens
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron

CP2 = replace(TWO_LAYERS, cp=2, cp_comm_type="burst")
RUNS = {
    "tp2_cp2": replace(CP2, tp=2, sequence_parallel=True),
    "pp2_cp2": replace(CP2, pp=2),
    "cp4_2x2": replace(CP2, cp=4, hierarchical=(2, 2)),
    "gpt_oss": replace(GPT_OSS, cp=2, cp_comm_type="burst"),
    "experts, latent attention": replace(DEEPSEEK, cp=2),
    "mtp": replace(MTP, cp=2, cp_comm_type="burst"),
}


def _step(rank: int, run: GptRun) -> tuple[StepResult, Any]:
    """Run a step on four microbatches; return its results and the bytes that this rank sent."""
    model = build(run)
    try:
        loss = forward_backward(model, run, random_tokens(run, microbatches=4))
        ((cp,),) = [install(run.strategy).contexts()]
        assert cp.traffic() == cp.expected_traffic()
        return StepResult(loss, full_grads(model, run)), cp.traffic()
    finally:
        leave()


def _on_ranks(run: GptRun, recompute: str, share: float | str) -> list[tuple[StepResult, Any]]:
    asked = replace(run, recompute=recompute, strategy=Strategy(keep_attention=share))
    return run_ranks(_step, run.tp * run.pp * run.cp, asked)


@functools.cache
def _plain(name: str) -> list[tuple[StepResult, Any]]:
    return _on_ranks(RUNS[name], "none", "none")


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", RUNS)
def test_a_step_sends_no_more_than_without_recomputation(name: str, recompute: str) -> None:
    kept = _on_ranks(RUNS[name], recompute, "all")
    for (result, sent), (expected, sent_plainly) in zip(kept, _plain(name), strict=True):
        assert sent == sent_plainly
        assert result.loss == pytest.approx(expected.loss, rel=1e-6)
        for parameter, grad in result.grads.items():
            error = (grad - expected.grads[parameter]).norm()
            assert error <= 1e-6 * expected.grads[parameter].norm(), parameter


@pytest.mark.parametrize("name", ["tp2_cp2", "pp2_cp2", "mtp"])
def test_what_is_kept_may_wait_on_the_host(name: str) -> None:
    with mock.patch.object(host_memory, "LEAST_BYTES", 1), mock.patch.object(pages, "PAGE_BYTES", 64):
        parked = run_ranks(_parked, RUNS[name].tp * RUNS[name].pp * RUNS[name].cp, RUNS[name])
    for (result, sent, parked_bytes), (expected, sent_plainly) in zip(parked, _plain(name), strict=True):
        assert sent == sent_plainly
        assert parked_bytes > 0
        for parameter, grad in result.grads.items():
            error = (grad - expected.grads[parameter]).norm()
            assert error <= 1e-6 * expected.grads[parameter].norm(), parameter


def _parked(rank: int, run: GptRun) -> tuple[StepResult, Any, int]:
    """Run a step with everything on the host; return also how many bytes went there, all of which came back."""
    found, sent = _step(rank, replace(run, recompute="full", strategy=Strategy(keep_attention="all", offload=True)))
    memory = host_memory.BY_DEVICE[torch.device("cpu")]
    assert memory.parked_bytes == memory.fetched_bytes
    if run.config.get("mtp_num_layers"):  # whose layers are not counted
        assert memory.expected_bytes < memory.pool.nbytes
    else:
        assert memory.expected_bytes == memory.pool.nbytes, "the host was asked for what was taken"
    return found, sent, memory.parked_bytes


@pytest.mark.parametrize("name", ["tp2_cp2", "pp2_cp2"])
def test_a_host_without_room_is_refused_by_the_first_layer(name: str) -> None:
    run = replace(RUNS[name], recompute="full", strategy=Strategy(keep_attention="all", offload=True))
    with (
        mock.patch.object(host_memory, "LEAST_BYTES", 1),
        mock.patch.object(pages, "PAGE_BYTES", 64),
        mock.patch.object(pages, "available_bytes", return_value=100_000),
        mock.patch.dict(host_memory.BY_DEVICE, clear=True),  # ranks are forked, with what other tests made
    ):
        assert run_ranks(_refused, 4, run) == [0] * 4, "bytes that were parked all the same"


def _refused(rank: int, run: GptRun) -> int:
    """Return how many bytes a rank has parked when a step is refused."""
    model = build(run)
    try:
        if run.pp == 1 or rank in (0, 1):  # the others would wait for these
            with pytest.raises(MemoryError, match=r"for each of 4 ranks.*use a shorter sequence"):
                forward_backward(model, run, random_tokens(run, microbatches=4))
    finally:
        leave()
    return sum(memory.parked_bytes for memory in host_memory.BY_DEVICE.values())


def test_a_share_is_kept() -> None:
    plain, twice = _on_ranks(CP2, "full", "all"), _on_ranks(CP2, "full", "none")
    for (result, sent), (expected, least), (_, most) in zip(_on_ranks(CP2, "full", 0.5), plain, twice, strict=True):
        counts = [sum(n for link in each.values() for n in link.values()) for each in (least, sent, most)]
        assert counts == sorted(counts)
        assert counts[0] < counts[2]
        for parameter, grad in result.grads.items():
            error = (grad - expected.grads[parameter]).norm()
            assert error <= 1e-6 * expected.grads[parameter].norm(), parameter
