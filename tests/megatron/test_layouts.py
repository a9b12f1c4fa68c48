"""Layouts other than Megatron's zigzag, of sequences and of packed documents: models against one rank, and parts."""

from __future__ import annotations

import contextlib
import io
import sys
import types
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from burst_plugin import Causal, Documents, Strategy, Topology
from burst_plugin.assignment import balance
from burst_plugin.megatron import cpu, install, packed_indices
from burst_plugin.megatron.batches import layouts
from burst_plugin.megatron.layers import building
from burst_plugin.megatron.registry import Registry
from burst_plugin.ring.routes import RouteTable
from burst_plugin.sequence.layout import LAYOUTS, Tokens, positions
from tests.megatron.test_model_parity import DEEPSEEK, LLAMA_PACKED, MTP, TWO_LAYERS, _step, check_equal
from tests.support.core_attentions import WrittenOut
from tests.support.megatron_gpt import (
    GptRun,
    StepResult,
    batches,
    build,
    cut_batch,
    join,
    leave,
    loss_of,
    packed_forward_step,
    random_tokens,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron


def over(run: GptRun, layout: str, **sizes: Any) -> GptRun:
    """The same model over 2 nodes of 2 ranks, or as `sizes` say."""
    sizes = sizes or {"cp": 4, "hierarchical": (2, 2)}
    return replace(run, cp_comm_type="burst", core=None, strategy=Strategy(layout=layout), **sizes)


def check_over(run: GptRun, one: GptRun, step: Any = None) -> None:
    results = run_ranks(_step, run.tp * run.pp * run.cp, run, step)
    check_equal(results, _on_one_rank(one, step))


_known: dict[str, StepResult] = {}


def _on_one_rank(run: GptRun, step: Any) -> StepResult:
    key = f"{run} {step}"
    if key not in _known:
        (_known[key],) = run_ranks(_step, 1, run, step)
    return _known[key]


# -------------------------------------------------------------------------------------------------- whole sequences


@pytest.mark.parametrize("layout", ["striped", "contiguous"])
@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({}, {}),
        ({"config": {"rotary_interleaved": True}}, {"cp": 2, "tp": 2, "sequence_parallel": True}),
        ({"positions": "learned_absolute"}, {"cp": 2, "pp": 2}),
        ({"positions": "yarn"}, {"cp": 2}),
    ],
    ids=["rope_cp4_2x2", "interleaved_tp2_cp2", "learned_pp2_cp2", "yarn_cp2"],
)
def test_sequences_equal_one_rank(changes: dict[str, Any], sizes: dict[str, Any], layout: str) -> None:
    one = replace(TWO_LAYERS, **changes)
    check_over(over(one, layout, **sizes), one)


def test_auto_leaves_sequences_in_zigzag() -> None:
    assert Registry(Strategy(layout="auto")).tokens_of_batch(64, 2) == Tokens(64, layout="zigzag")
    check_over(over(TWO_LAYERS, "auto", cp=2), TWO_LAYERS)


def test_mla_equals_the_definition() -> None:
    check_over(over(DEEPSEEK, "striped"), replace(DEEPSEEK, core=WrittenOut))


def test_any_length_that_ranks_hold_equally_many_tokens_of() -> None:
    odd = replace(TWO_LAYERS, seq_length=36)  # zigzag would want a multiple of 8
    check_over(over(odd, "striped"), odd)


def first_tokens_masked(data: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
    """A microbatch of which every rank has as many tokens to predict as it has tokens after the next to predict."""
    batch = next(data)
    batch["loss_mask"][:, :4] = 0
    batch = cut_batch(batch)
    mask = batch["loss_mask"]
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=mask)
    return output, partial(loss_of, mask)


def test_multi_token_prediction_equals_megatron_on_one_rank() -> None:
    check_over(over(MTP, "striped"), MTP, first_tokens_masked)


def _with_positions_of_zigzag(rank: int, run: GptRun) -> StepResult:
    from burst_plugin.megatron.batches.layouts import LayoutHooks

    LayoutHooks.rotary_embedding = lambda cuts, original, *args: original(*args)  # type: ignore[assignment]
    return _step(rank, run)


def test_positions_of_another_layout_would_be_noticed() -> None:
    results = run_ranks(_with_positions_of_zigzag, 4, over(TWO_LAYERS, "striped"))
    assert abs(results[0].loss - _on_one_rank(TWO_LAYERS, None).loss) > 1e-4


def _cut_elsewhere(rank: int, kind: str) -> tuple[str, torch.Tensor]:
    """Return what is said of a batch in zigzag, and the losses of one that was cut by the layout."""
    from megatron.core.packed_seq_params import PackedSeqParams

    model = build(replace(over(TWO_LAYERS, "striped", cp=2), microbatch_size=1))
    starts = (0, 64) if kind == "sequence" else (0, 16, 64)
    rows = positions(LAYOUTS["zigzag"].runs(rank, 2, Tokens(64, starts)))
    offsets = torch.tensor(starts, dtype=torch.int32)
    params = None if kind == "sequence" else PackedSeqParams("thd", *[offsets] * 4, 48, 48)
    held = torch.where(rows < 16, rows, rows - 16) if kind == "documents" else rows
    with pytest.raises(ValueError) as error:  # noqa: PT011
        model(rows[None], held[None], None, labels=rows[None], packed_seq_params=params)
    rows = torch.arange(rank, 64, 2)
    losses = model(rows[None], rows[None], None, labels=rows[None], packed_seq_params=params)
    return str(error.value), losses.detach()


@pytest.mark.parametrize("kind", ["sequence", "documents", "documents, positions of the whole"])
def test_batches_that_were_cut_in_zigzag_elsewhere_are_refused(kind: str) -> None:
    for said, losses in run_ranks(_cut_elsewhere, 2, kind):
        assert "this batch has been cut in zigzag, but layout='striped'" in said
        assert losses.shape == (1, 32)
        assert losses.isfinite().all()


def _cut_elsewhere_later(rank: int) -> str:
    """Return what is said of documents in zigzag after one document, which "auto" would cut in zigzag as well."""
    from megatron.core.packed_seq_params import PackedSeqParams

    model = build(replace(over(TWO_LAYERS, "auto", cp=2), microbatch_size=1))

    def run(*starts: int) -> None:
        rows, offsets = positions(LAYOUTS["zigzag"].runs(rank, 2, Tokens(64, starts))), torch.tensor(starts).int()
        held = rows - offsets[torch.searchsorted(offsets, rows, right=True) - 1]
        params = PackedSeqParams("thd", *[offsets] * 4, 64, 64)
        model(rows[None], held[None], None, labels=rows[None], packed_seq_params=params)

    run(0, 64)
    run(0, 64)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        run(0, 8, 16, 40, 48, 64)
    return str(error.value)


def test_a_batch_that_auto_cuts_in_zigzag_too_does_not_vouch_for_later_ones() -> None:
    for said in run_ranks(_cut_elsewhere_later, 2):
        assert "this batch has been cut in zigzag, but layout='auto'" in said


def _padded(rank: int, padding: int) -> list[str]:
    """Return what is said of two batches in zigzag, of which the first has `padding` tokens at its end."""
    model = build(replace(over(TWO_LAYERS, "striped", cp=2), microbatch_size=1))
    rows, said = positions(LAYOUTS["zigzag"].runs(rank, 2, Tokens(64))), []
    for count in (padding, 0):
        at = torch.where(rows < 64 - count, rows, 1)  # as processors of transformers number padding
        try:
            model(rows[None], at[None], None, labels=rows[None])
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_batch_with_positions_of_padding_does_not_vouch_for_later_ones() -> None:
    for first, second in run_ranks(_padded, 2, 24):
        assert not first
        assert "this batch has been cut in zigzag, but layout='striped'" in second


def test_all_ranks_refuse_a_batch_that_one_of_them_sees_to_be_in_zigzag() -> None:
    for first, _ in run_ranks(_padded, 2, 4):  # on rank 0
        assert "this batch has been cut in zigzag, but layout='striped'" in first


def _untold(rank: int, layout: str, kind: str, package_cuts: bool) -> str:
    """Return what is said of a batch in zigzag whose positions do not tell so; `package_cuts` is whether others were.

    Embeddings are cut by models with images, documents and whole positions come from frameworks for rollouts.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    model = build(replace(over(TWO_LAYERS, layout, cp=2), microbatch_size=1)).module
    starts = (0, 64) if kind == "embeddings" else (0, 8, 24, 64)
    rows = positions(LAYOUTS["zigzag"].runs(rank, 2, Tokens(64, starts)))
    offsets = torch.tensor(starts, dtype=torch.int32)
    given: dict[str, Any] = {"position_ids": None, "input_ids": rows[None]}
    if kind == "embeddings":
        given |= {"input_ids": None, "decoder_input": model.embedding(rows[None], rows[None])}
    else:
        given["packed_seq_params"] = PackedSeqParams("thd", *[offsets] * 4, 40, 40)
    if kind == "whole positions":
        given["position_ids"] = torch.arange(48).view(2, 24)
    if package_cuts:
        packed_indices(starts, 2, rank)
    try:
        model(attention_mask=None, labels=rows[None], **given)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("layout", "kind", "said"),
    [
        ("striped", "embeddings", "position_ids=None does not tell; cut it by megatron.core"),
        ("auto", "embeddings", ""),  # sequences are in zigzag then
        ("auto", "documents", "position_ids=None does not tell; cut it by megatron.core"),
        ("striped", "whole positions", "position_ids [2, 24] are not those of input_ids [1, 32], which does not"),
        ("zigzag", "documents", ""),
    ],
)
def test_batches_that_other_code_cuts_without_telling_how_need_zigzag(layout: str, kind: str, said: str) -> None:
    for refusal in run_ranks(_untold, 2, layout, kind, False):
        assert said in refusal
        assert bool(refusal) == bool(said)
        assert not said or refusal.startswith(f"layout='{layout}' is not supported with a batch that other code has")


@pytest.mark.parametrize("kind", ["embeddings", "documents"])
def test_positions_may_be_left_out_of_batches_that_this_package_cuts(kind: str) -> None:
    assert run_ranks(_untold, 2, "striped", kind, True) == ["", ""]


def _seen_batches(rank: int) -> tuple[int, list[str]]:
    """Return how often ranks compared batches of the layout, and what other models say of batches in zigzag."""
    run = replace(over(TWO_LAYERS, "striped", cp=2), microbatch_size=1)
    model, said = build(run), []
    rows = torch.arange(rank, 64, 2)
    compared = mock.Mock(wraps=torch.distributed.all_reduce)
    of_layouts = types.SimpleNamespace(all_reduce=compared, ReduceOp=torch.distributed.ReduceOp)
    with mock.patch.object(layouts, "dist", of_layouts):
        for at in (torch.ones_like(rows), *[rows] * 5):
            model(rows[None], at[None], None, labels=rows[None])
    rows = positions(LAYOUTS["zigzag"].runs(rank, 2, Tokens(64)))
    for made_again in (False, True):
        if made_again:
            leave()
            other = build(run)
        else:
            other = copy(model.module)
        with pytest.raises(ValueError) as error:  # noqa: PT011
            other(rows[None], rows[None], None, labels=rows[None])
        said.append(str(error.value))
    return compared.call_count, said


def test_each_model_is_looked_at_until_its_batches_tell_how_they_are_cut() -> None:
    for comparisons, said in run_ranks(_seen_batches, 2):
        assert comparisons == 3, "of the first batch whether it was cut, and of two how"
        for text in said:
            assert "this batch has been cut in zigzag, but layout='striped'" in text


def _not_cut(rank: int, kind: str) -> str:
    """Return what is said of a batch that was cut in no way, or into consecutive tokens."""
    model = build(replace(over(TWO_LAYERS, "zigzag", cp=2), microbatch_size=1))
    rows = torch.arange(32) + (rank * 32 if kind == "consecutive" else 0)
    if kind == "alike":
        model(torch.full((1, 32), 7), rows[None], None, labels=rows[None])
        return ""
    try:
        model(rows[None], rows[None], None, labels=rows[None])
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("kind", ["whole", "consecutive", "alike"])
def test_batches_that_were_not_cut_are_refused(kind: str) -> None:
    first, second = run_ranks(_not_cut, 2, kind)
    if kind == "whole":
        assert "this batch has not been cut for context_parallel_size=2: all ranks have the same 32 tokens" in first
        assert first == second
    elif kind == "consecutive":
        assert "this batch has been cut into consecutive tokens, but layout='zigzag'" in first
        assert first == second
    else:
        assert (first, second) == ("", "")


def _of_unlike_sizes(rank: int) -> str:
    """Return what is said of a layer whose configuration knows no context parallelism, in groups of 2."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_layer import TransformerLayer

    config = copy(build(over(TWO_LAYERS, "zigzag", cp=2)).config)
    config.context_parallel_size = 1
    with pytest.raises(ValueError) as error:  # noqa: PT011
        TransformerLayer(config, get_gpt_layer_local_spec().submodules)
    return str(error.value)


def test_one_size_of_context_parallelism_is_given_twice() -> None:
    for said in run_ranks(_of_unlike_sizes, 2):
        assert "has context_parallel_size=1, but the context-parallel group has 2 ranks: give initialize" in said


# ------------------------------------------------------------------------------------------------- packed documents

# 13, 2, 24 and 9 tokens; of the last 5 are real.
STARTS, REAL = (0, 13, 15, 39, 48), (0, 13, 15, 39, 44)

packed_step = partial(packed_forward_step, starts=STARTS, real=REAL)  # zigzag does not take such lengths


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the layout "auto" assigns even a few tokens in chunks: sending them costs nothing."""
    for price in ("SENT_INTER", "SENT_INTRA", "VISITED"):
        monkeypatch.setattr(balance, price, 0)
    table, mask = RouteTable(Topology(2, 2), Strategy()), Causal() & Documents(STARTS)
    assert balance.choose_tokens(table, STARTS[-1], mask, alike=True).holders


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("layout", ["striped", "auto"])
def test_documents_of_any_length_equal_the_definition(layout: str) -> None:
    check_over(over(LLAMA_PACKED, layout), replace(LLAMA_PACKED, core=WrittenOut), packed_step)


@pytest.mark.usefixtures("chunks")
def test_documents_with_mla_and_recomputation_equal_the_definition() -> None:
    run = replace(DEEPSEEK, seq_length=48, microbatch_size=1, per_token_loss=True)
    check_over(replace(over(run, "auto"), recompute="full"), replace(run, core=WrittenOut), packed_step)


# ------------------------------------------------------------------------------------------------------------ parts


SEEN = torch.ones(1, 1, 48, 48).tril()


class Group:
    """A process group that is not there."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def _rotated(rank: int, fused: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return rotary embeddings for each of four ranks beside their rows of that of the whole, of documents too."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.common.embeddings.rotary_pos_embedding import (
        MultimodalRotaryEmbedding,
        RotaryEmbedding,
    )

    cpu.enable(force=True)
    install(Strategy(layout="striped"))
    if fused:
        rope_utils.fused_apply_rotary_pos_emb = lambda t, freqs, interleaved: rope_utils._apply_rotary_pos_emb_bshd(
            t, freqs, rotary_interleaved=interleaved
        )
    config = types.SimpleNamespace(
        apply_rope_fusion=fused, rotary_interleaved=False, multi_latent_attention=False, mrope_section=None
    )
    one, plain, visual = Group(1, 0), RotaryEmbedding(8, 1.0), MultimodalRotaryEmbedding(8, 1.0)
    at = torch.randint(9, (3, 2, 48))
    x, offsets = torch.randn(48, 2, 8), torch.tensor(STARTS, dtype=torch.int32)
    whole = (plain(48, cp_group=one), visual(at, [1, 1, 2], cp_group=one))
    freqs = plain(24, packed_seq=True, cp_group=one)
    parts = [
        rope_utils._apply_rotary_pos_emb_bshd(part[:, None], freqs[: len(part)]) for part in x.split([13, 2, 24, 9])
    ]
    rotated, found = torch.cat(parts).squeeze(1), []
    for number in range(4):
        group, rows = Group(4, number), torch.arange(number, 48, 4)
        got = rope_utils.apply_rotary_pos_emb(x[rows], freqs, config, cu_seqlens=offsets, cp_group=group)
        found += [
            (plain(48, cp_group=group), whole[0][rows]),
            (visual(at, [1, 1, 2], cp_group=group), whole[1][rows]),
            (got, rotated[rows]),
        ]
    return found


@pytest.mark.parametrize("fused", [False, True])
def test_positions_are_those_of_a_ranks_own_tokens(fused: bool) -> None:
    (found,) = run_ranks(_rotated, 1, fused)
    assert len(found) == 3 * 4
    for got, expected in found:
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def _cut_as_since_0_18(rank: int, has_te: bool) -> list[dict[str, torch.Tensor]]:
    """Return what Megatron's functions of later releases, or stand-ins, give behind the plugin on the second rank."""
    from megatron.core import utils

    def in_zigzag(batch: dict[str, Any], cp_group: Any) -> dict[str, Any]:
        raise AssertionError("Megatron's own function cuts in zigzag")

    utils.tex = object() if has_te else None
    utils.get_pretrain_batch_on_this_cp_rank = in_zigzag
    utils.get_sft_batch_on_this_cp_rank = in_zigzag
    cpu.enable(force=True)
    install(Strategy(layout="striped"))
    whole = {"tokens": torch.arange(48)[None], "labels": None, "attention_mask": SEEN, "cu_seqlens": None}
    offsets = {"cu_seqlens": torch.tensor([REAL]), "cu_seqlens_padded": torch.tensor([STARTS])}
    return [
        utils.get_pretrain_batch_on_this_cp_rank(dict(whole), cp_group=Group(2, 1)),
        utils.get_sft_batch_on_this_cp_rank({**whole, **offsets}, cp_group=Group(2, 1)),
    ]


@pytest.mark.parametrize("has_te", [False, True])
def test_batches_of_later_releases_are_cut_by_the_layout(has_te: bool) -> None:
    ((of_sequences, of_documents),) = run_ranks(_cut_as_since_0_18, 1, has_te)
    rows = list(range(1, 48, 2))
    assert of_sequences["tokens"].tolist() == of_documents["tokens"].tolist() == [rows]
    assert torch.equal(of_sequences["attention_mask"], SEEN[:, :, rows])
    assert of_documents["cu_seqlens"].tolist() == [list(REAL)]


def _rolled(rank: int, layout: str) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return a rank's tokens, rolled, their sum as that is returned, and those of the whole; of documents as well."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_model
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import multi_token_prediction

    join(over(TWO_LAYERS, layout))
    group, whole = parallel_state.get_context_parallel_group(), torch.arange(1, 49).view(1, 48)
    of_sequence = cut_batch({"tokens": whole})["tokens"] - 1
    packed = PackedSeqParams("thd", *[torch.tensor(REAL)] * 2, *[torch.tensor(STARTS)] * 2)
    found = []
    for rows, params in ((of_sequence[0], None), (packed_indices(STARTS, 4, rank), packed)):
        expected, _ = multi_token_prediction.roll_tensor(whole.clone(), packed_seq_params=params)
        for module in (multi_token_prediction, gpt_model):
            if hasattr(module, "roll_tensor"):  # until 0.16 the latter, too
                got, total = module.roll_tensor(whole[:, rows], cp_group=group, packed_seq_params=params)
                found.append((got, total, expected[:, rows]))
    return found


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("layout", ["contiguous", "auto"])
def test_what_token_prediction_rolls_is_rolled_as_a_whole(layout: str) -> None:
    for found in run_ranks(_rolled, 4, layout):
        assert len(found) in (2, 4)
        for got, total, expected in found:
            assert got.shape == (1, 12)
            assert torch.equal(got, expected)
            assert total == got.sum()


EVEN_STARTS = (0, 16, 24, 48)  # in zigzag every document is cut over four ranks on its own
HIDDEN = (2, 3, 48)  # two histories, of hidden states of three numbers
Roll = tuple[str, torch.Tensor, torch.Tensor]  # what was rolled, what came out, and what one rank has of it


def _rolled_with_gradients(rank: int, layout: str) -> list[Roll]:
    """Roll hidden states of sequences, of documents, and of documents that are cut as one; return gradients, too."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import multi_token_prediction

    join(over(TWO_LAYERS, layout))
    group, whole = parallel_state.get_context_parallel_group(), torch.randn(HIDDEN, generator=torch.manual_seed(0))
    upstream = torch.randn(HIDDEN, generator=torch.manual_seed(1))
    of_sequence = cut_batch({"tokens": torch.arange(48)[None]})["tokens"][0]
    starts = EVEN_STARTS if layout == "zigzag" else STARTS
    packed = PackedSeqParams("thd", *[torch.tensor(starts)] * 4)
    rows_of = {"sequence": of_sequence, "documents": packed_indices(starts, 4, rank)}
    if layout == "zigzag":
        rows_of["documents as one"] = of_sequence
    rolls: list[Roll] = []
    for kind, rows in rows_of.items():
        params = None if kind == "sequence" else packed
        one, own = whole.clone().requires_grad_(), whole[..., rows].clone().requires_grad_()
        expected, _ = multi_token_prediction.roll_tensor(one, packed_seq_params=params)
        expected.backward(upstream)
        with mock.patch.multiple(layouts, cuts_documents_as_one=lambda kind=kind: kind == "documents as one"):
            rolled, _ = multi_token_prediction.roll_tensor(own, cp_group=group, packed_seq_params=params)
        rolled.backward(upstream[..., rows])
        assert one.grad is not None
        assert own.grad is not None
        rolls += [
            (kind, rolled.detach(), expected[..., rows].detach()),
            (f"{kind}, grad", own.grad, one.grad[..., rows]),
        ]
    return rolls


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous", "auto"])
def test_hidden_states_are_rolled_with_the_gradient_of_one_rank(layout: str) -> None:
    for rolls in run_ranks(_rolled_with_gradients, 4, layout):
        assert len(rolls) == (6 if layout == "zigzag" else 4)
        for kind, rolled, expected in rolls:
            assert torch.equal(rolled, expected), kind


def _rolled_without_sum(rank: int) -> list[Any]:
    join(over(TWO_LAYERS, "striped", cp=2))
    cuts, seen = layouts.LayoutHooks(Registry(Strategy(layout="striped"))), torch.tensor([[True, False, True, True]])

    def roll_tensor(
        tensor: Any,
        shifts: int = -1,
        dims: int = -1,
        cp_group: Any = None,
        packed_seq_params: Any = None,
        return_sum: bool = True,
    ) -> Any:
        raise AssertionError("Megatron's own function rolls in zigzag")

    group = torch.distributed.group.WORLD
    return [
        cuts.roll(roll_tensor, seen[:, rank::2], cp_group=group, return_sum=return_sum)
        for return_sum in (True, False)
    ]


def test_sums_of_what_is_rolled_are_left_out_on_request() -> None:
    for rank, ((rolled, total), (again, nothing)) in enumerate(run_ranks(_rolled_without_sum, 2)):
        assert rolled.tolist() == again.tolist() == [[[False, True], [True, False]][rank]]
        assert total == 1
        assert nothing is None


def _mixed_hidden_states(rank: int) -> list[str]:
    """Return what is said of hidden states that Megatron rolls inside ranks that hold other tokens than in zigzag."""
    from burst_plugin.megatron.layers.building import refuse_local_rolls

    join(over(TWO_LAYERS, "striped", cp=2))
    config = types.SimpleNamespace(mtp_hsm=True, sequence_parallel=True)
    cuts, group = layouts.LayoutHooks(Registry(Strategy(layout="striped"))), torch.distributed.group.WORLD

    def in_own_tokens(packed_seq_params: Any, local_seq_length: int, cp_group: Any, tp_group: Any) -> None:
        """Stand in for Megatron's function of main."""

    said = []
    for call in (
        lambda: refuse_local_rolls(config, "striped"),
        lambda: cuts.local_documents(in_own_tokens, None, 4, cp_group=group, tp_group=None),
    ):
        with pytest.raises(ValueError, match=r"mtp_hsm=True") as error:
            call()
        said.append(str(error.value))
    refuse_local_rolls(config, "zigzag")
    return said


def test_hidden_states_that_megatron_rolls_inside_ranks_need_zigzag() -> None:
    for of_sequences, of_documents in run_ranks(_mixed_hidden_states, 2):
        assert "with sequence_parallel=True is not supported with layout='striped'" in of_sequences
        assert "mtp_hsm=True on packed documents is not supported with layout='striped'" in of_documents


def _refused(rank: int) -> list[str]:
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
    from megatron.core.transformer.spec_utils import ModuleSpec

    run = over(TWO_LAYERS, "striped", cp=2)
    build(run)
    config = types.SimpleNamespace(context_parallel_size=2, cp_comm_type=["p2p", "burst"])
    mixer = types.SimpleNamespace(self_attention=ModuleSpec(module=torch.nn.Linear))
    found = []
    for call in (
        lambda: building.refuse_other_attention(config, "striped"),
        lambda: building.refuse_other_mixers(config, "striped", mixer),
        lambda: cut_batch(next(batches(random_tokens(replace(run, seq_length=33))))),
        lambda: YarnRotaryEmbedding(8).get_cached_cos_sin(8, packed_seq=True),
        lambda: packed_indices((0, 5, 7), 2, rank),
    ):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            call()
        found.append(str(error.value))
    building.refuse_other_attention(config, "zigzag")
    building.refuse_other_mixers(config, "zigzag", mixer)
    return found


def test_what_relies_on_zigzag_is_refused_by_name() -> None:
    for found in run_ranks(_refused, 2):
        assert found[0].startswith("layout='striped' needs cp_comm_type='burst' in all layers, got ['p2p', 'burst']")
        assert found[1].startswith("Linear layers are not supported with layout='striped'")
        assert "tokens [2, 33] has 33 tokens, expected a multiple of 2 " in found[2]
        assert "apply_rope_fusion=True of multi-latent attention is not supported with packed documents" in found[3]
        assert found[4].startswith("packed documents of 7 tokens are not a multiple of context_parallel_size=2")


def test_other_mixers_are_refused_where_documents_are_cut_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = types.SimpleNamespace(self_attention=torch.nn.Linear)
    config = types.SimpleNamespace(hybrid_context_parallel=False)
    args = types.SimpleNamespace(dataloader_inter_document_masking=True, sft=True)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", types.SimpleNamespace(_GLOBAL_ARGS=args))
    building.refuse_other_mixers(config, "zigzag", mixer)
    args.sft = False
    with pytest.raises(ValueError, match="Linear layers are not supported with --dataloader-inter-document-masking"):
        building.refuse_other_mixers(config, "zigzag", mixer)


def _announced(rank: int, layout: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        build(over(TWO_LAYERS, layout, cp=2))
    return printed.getvalue()


@pytest.mark.parametrize("layout", ["zigzag", "auto"])
def test_the_layout_that_is_printed_is_the_one_that_was_asked_for(layout: str) -> None:
    """Batches without packed documents are cut in zigzag with auto, too, which would look as if it were ignored."""
    said, nothing = run_ranks(_announced, 2, layout)
    assert f", layout {layout}\n" in said
    assert "layout" not in nothing
