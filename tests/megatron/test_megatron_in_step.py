"""Megatron's ranks that are out of step are told so by themselves, with both places, before a wrong number."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin import ContextParallel
from tests.support.megatron_gpt import GptRun, batches, build, forward_step, leave, random_tokens
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron

RUN = GptRun(layers=2, hidden=32, heads=4, groups=2, ffn=32, cp=4, cp_comm_type="burst", seq_length=32)
FAULTS = ("step", "call", "doubled call", "backward")
STEPS, AT_FAULT = 4, 3


@contextlib.contextmanager
def _calls_of_second_layer(model: Any, times: int) -> Iterator[None]:
    """Its core attention is called so many times."""
    core = model.module.decoder.layers[1].self_attention.core_attention
    original = core.forward

    def forward(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = torch.zeros(*query.shape[:2], RUN.hidden)
        for _ in range(times):
            out = original(query, *args, **kwargs)
        return out

    with mock.patch.object(core, "forward", forward):
        yield


def _step(model: Any, tokens: Tensor, fault: str) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    times = {"call": 0, "doubled call": 2}.get(fault, 1)
    with _calls_of_second_layer(model, times):
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches(tokens),
            model=[model],
            num_microbatches=len(tokens),
            seq_length=RUN.seq_length,
            micro_batch_size=tokens.shape[1],
            forward_only=fault == "backward",
        )


def _noted(outs: dict[str, Tensor], original: Callable[..., Any]) -> Callable[..., Any]:
    """`burst_attention`, whose outputs are noted by microbatch, layer and batch."""

    def attention(*args: Any, tag: tuple[object, ...], **kwargs: Any) -> Any:
        out = original(*args, tag=tag, **kwargs)
        outs[", ".join(str(item) for item in tag if not str(item).startswith(("forward step", "call")))] = (
            out.detach()
        )
        return out

    return attention


def _out_of_step(rank: int) -> list[tuple[str, float, bool]]:
    """Of every fault in every step: what is said, after how many seconds, and whether all outputs were right."""
    from burst_plugin.megatron.layers import core_attention

    truth: dict[str, Tensor] = {}
    found = []
    for fault, at in [("", 0), *((fault, at) for fault in FAULTS for at in range(STEPS - 1))]:
        outs: dict[str, Tensor] = {}
        model, said, start = build(RUN), "nothing", time.monotonic()
        with mock.patch.object(core_attention, "burst_attention", _noted(outs, core_attention.burst_attention)):
            try:
                for step in range(STEPS):
                    here = fault if (rank, step) == (AT_FAULT, at) else ""
                    if here != "step":
                        _step(model, random_tokens(RUN, seed=step), here)
            except ValueError as error:
                said = str(error)
        truth = truth or outs
        right = all(torch.equal(out, truth[key]) for key, out in outs.items())
        found.append((said, time.monotonic() - start, right))
        leave()
    return found


def test_a_rank_that_is_out_of_step_is_named_with_both_places_before_a_wrong_number() -> None:
    for first, *of_rank in run_ranks(_out_of_step, 4, timeout_s=60.0):
        assert first[0] == "nothing"
        for number, (said, seconds, right) in enumerate(of_rank):
            fault = FAULTS[number // 3]
            assert said.startswith("ranks are at different places: rank 3: before "), (fault, said)
            there, elsewhere = said.split("; rank 0, 1, 2: ")
            places = {
                "step": ("forward pass", "layer 1, batch ", "forward pass", "layer 1, batch "),
                "call": ("the loss", "", "forward pass", "microbatch 0, layer 2"),
                "doubled call": ("forward pass", "layer 2, call 2 of it", "the loss", ""),
                "backward": ("forward pass", "microbatch 1, layer 1", "backward pass", "microbatch 0, layer 2"),
            }[fault]
            assert places[0] in there, (fault, said)
            assert places[1] in there, (fault, said)
            assert places[2] in elsewhere, (fault, said)
            assert places[3] in elsewhere, (fault, said)
            assert seconds < 8.0
            assert right, "a wrong number left attention"


def _backward_left_out_at_last(rank: int) -> str:
    """Of the only microbatch of the last step, after which rank 3 goes on to other collectives."""
    model = build(RUN)
    try:
        _step(model, random_tokens(RUN, microbatches=1), "backward" if rank == AT_FAULT else "")
        dist.barrier()
    except ValueError as error:
        return str(error)
    finally:
        leave()
    return "nothing"


def test_a_backward_pass_left_out_is_noticed_at_the_end_of_megatrons_schedule() -> None:
    for said in run_ranks(_backward_left_out_at_last, 4, timeout_s=40.0):
        assert "rank 3: before the end of a forward-backward pass; rank 0, 1, 2: before the backward pass of " in said


def _rings_in_another_order(rank: int) -> list[str]:
    """Two groups that microbatches bring, of which rank 3 takes the second first in one step."""
    from megatron.core.packed_seq_params import PackedSeqParams

    said = []
    model = build(RUN)
    core = model.module.decoder.layers[0].self_attention.core_attention
    q, k = torch.randn(8, 1, 4, 8, requires_grad=True), torch.randn(8, 1, 2, 8)
    for at in range(3):
        groups = [dist.new_group([0, 1, 2, 3]) for _ in range(2)]
        try:
            for step in range(STEPS):
                for group in reversed(groups) if (rank, step) == (AT_FAULT, at) else groups:
                    own = PackedSeqParams("sbhd", max_seqlen_q=32, max_seqlen_kv=32, local_cp_size=4, cp_group=group)
                    core(q, k, k, None, packed_seq_params=own).sum().backward()
        except ValueError as error:
            said.append(str(error))
    leave()
    return said


def test_rings_of_microbatches_in_another_order_are_told_apart() -> None:
    for said in run_ranks(_rings_in_another_order, 4, timeout_s=50.0):
        assert len(said) == 3, said
        for text in said:
            assert text.startswith("ranks are at different places: rank 3: "), text
            assert "group" in text


def test_what_ranks_did_on_other_rings_does_not_make_them_unlike() -> None:
    """One of them also has an encoder, on a ring of its own, of whose forward steps the other does not know."""
    from burst_plugin.megatron.identity import Identity

    here, there, decoder, other = Identity(), Identity(), ContextParallel(), ContextParallel()
    encoder, first, second = (torch.nn.Identity() for _ in range(3))
    tags = []
    for identity, has_encoder in ((here, True), (there, False)):
        seen = []
        for microbatch in range(2):
            if has_encoder:
                identity.begin_forward_step(microbatch)
                identity.of_call(other, encoder, 1, False)
            identity.begin_forward_step(microbatch)
            for layer, number in ((first, 1), (second, 2), (second, 2)):
                seen.append([str(x) for x in identity.of_call(decoder, layer, number, False)])
        tags.append(seen)
    assert tags[0] == tags[1]
    assert len({tuple(tag) for tag in tags[0]}) == 6, "each has an identity of its own"
