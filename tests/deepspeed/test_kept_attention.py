"""Attention that checkpoints keep, under ZeRO and with DeepSpeed's own checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import deepspeed
import peft
import pytest
import torch

import burst_plugin
import burst_plugin.deepspeed as burst
from burst_plugin.activations import host_memory, pages
from burst_plugin.activations.host_memory import HostMemory
from tests.support.deepspeed_run import Result, Run, draw, stop, train
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.deepspeed

BATCHES = draw(2)


def _trained(rank: int, run: Run) -> Result:
    return train(run, BATCHES)


def _with_lora(model: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


@pytest.mark.parametrize("share", ["all", 0.5])
@pytest.mark.parametrize(("stage", "lora"), [(0, False), (1, False), (2, False), (3, False), (2, True)])
def test_gradients_are_those_without_recomputation(stage: int, lora: bool, share: float | str) -> None:
    run = Run(stage=stage, accumulation=2, prepare=_with_lora if lora else None)
    kept = replace(run, checkpointing=True, block={"keep_attention": share})
    for result, expected in zip(run_ranks(_trained, 2, kept), run_ranks(_trained, 2, run), strict=True):
        assert result.losses == pytest.approx(expected.losses, rel=1e-6)
        for name, grad in result.grads.items():
            assert (grad - expected.grads[name]).norm() <= 1e-6 * expected.grads[name].norm(), name


@pytest.mark.parametrize(("stage", "lora", "head_chunk"), [(0, False, 0), (3, False, 0), (2, True, 0), (3, False, 2)])
def test_what_is_kept_may_wait_on_the_host(stage: int, lora: bool, head_chunk: int) -> None:
    block: dict[str, Any] = {"head_chunk": head_chunk}
    run = Run(stage=stage, accumulation=2, prepare=_with_lora if lora else None, block=block)
    kept = replace(run, checkpointing=True, block=block | {"keep_attention": "all", "offload": True})
    with mock.patch.object(host_memory, "LEAST_BYTES", 1), mock.patch.object(pages, "PAGE_BYTES", 64):
        found = run_ranks(_parked, 2, kept)
    for (result, parked), expected in zip(found, run_ranks(_trained, 2, run), strict=True):
        assert parked > 0
        for name, grad in result.grads.items():
            assert (grad - expected.grads[name]).norm() <= 1e-6 * expected.grads[name].norm(), name


def _parked(rank: int, run: Run) -> tuple[Result, int]:
    with mock.patch.dict(host_memory.BY_DEVICE, {torch.device("cpu"): HostMemory(torch.device("cpu"))}):
        result = train(run, BATCHES)
        memory = host_memory.BY_DEVICE[torch.device("cpu")]
        assert memory.parked_bytes == memory.fetched_bytes
        assert memory.pool.nbytes == memory.expected_bytes, "the host was asked for what was taken"
        return result, memory.parked_bytes


def test_a_host_without_room_is_refused_before_the_first_layer() -> None:
    """Two ranks of two layers: rows of 32 hidden, and as much of attention with lse of 4 heads, in float32."""
    run = Run(stage=3, checkpointing=True, block={"keep_attention": "all", "offload": True})
    tokens = 2 * 32 // 2
    of_a_rank = 2 * tokens * 4 * (32 + 32 + 4)
    with (
        mock.patch.object(host_memory, "LEAST_BYTES", 1),
        mock.patch.object(pages, "PAGE_BYTES", 64),
        mock.patch.object(pages, "available_bytes", return_value=2 * of_a_rank - 1),
    ):
        assert run_ranks(_refused, 2, run) == [0] * 2, "pages that were made all the same"


def _refused(rank: int, run: Run) -> int:
    """Return how many pages a rank has made when a step is refused."""
    device = torch.device("cpu")
    with mock.patch.dict(host_memory.BY_DEVICE, {device: HostMemory(device)}):
        with pytest.raises(MemoryError, match=r"for each of 2 ranks.*use a shorter sequence"):
            train(run, BATCHES)
        return host_memory.BY_DEVICE[device].pool.made


class _Own(torch.nn.Module):
    """Attention in one of DeepSpeed's own checkpoints."""

    def __init__(self, checkpoint: Any) -> None:
        super().__init__()
        self.qkv, self.checkpoint = torch.nn.Linear(32, 96), checkpoint

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 8)).unbind(2)
        return burst_plugin.burst_attention(q, k, v, burst.context()).flatten(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.checkpoint(self.attend, x)


def _own_checkpoints(rank: int, kind: str, share: str) -> tuple[torch.Tensor, int]:
    """Return the gradient of a weight, and the bytes that a step sends."""
    burst.install()
    torch.manual_seed(0)
    module = deepspeed.runtime.activation_checkpointing.checkpointing
    checkpoint = {
        "none": lambda function, x: function(x),
        "reentrant": module.checkpoint,
        "not reentrant": module.non_reentrant_checkpoint,
    }[kind]
    model = _Own(checkpoint)
    engine = _engine(model, share)
    x = burst.context().shard(torch.randn(1, 16, 32)).requires_grad_()
    engine.module(x).square().sum().backward()
    grad, sent = model.qkv.weight.grad, burst.context().traffic()
    stop(engine)
    return grad, sum(n for link in sent.values() for n in link.values())


def _engine(model: torch.nn.Module, share: str) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "burst_attention": {"enabled": True, "keep_attention": share},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    return engine


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_deepspeeds_own_checkpoints(kind: str) -> None:
    plain = run_ranks(_own_checkpoints, 2, "none", "none")
    twice = run_ranks(_own_checkpoints, 2, kind, "none")
    once = run_ranks(_own_checkpoints, 2, kind, "all")
    for (expected, least), (_, most), (grad, sent) in zip(plain, twice, once, strict=True):
        assert torch.equal(grad, expected)
        assert least == sent < most
