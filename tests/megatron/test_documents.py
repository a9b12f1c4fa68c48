"""`--reset-attention-mask`: documents of pretraining batches, against masks of all pairs on one rank."""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from burst_plugin import Causal, Documents, PerRow, Strategy, Topology
from burst_plugin.assignment import balance
from burst_plugin.megatron import identity
from burst_plugin.megatron.batches.documents import hook_skipped_steps
from burst_plugin.megatron.batches.packed import layout_of
from burst_plugin.megatron.registry import Registry
from burst_plugin.ring import connections
from burst_plugin.ring.routes import RouteTable
from burst_plugin.sequence.layout import positions
from tests.megatron.test_model_parity import DEEPSEEK, MTP, TWO_LAYERS, check_equal
from tests.support.core_attentions import WrittenOut
from tests.support.megatron_gpt import (
    GptRun,
    StepResult,
    batches,
    build,
    cut_batch,
    forward_backward,
    full_grads,
    join,
    loss_of,
    random_tokens,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron

EOD = 7
# Where documents end, by microbatch and row; one ends with the sequence.
ENDS = (((4, 5, 30, 47), (11, 40, 63)), ((33,), (0, 20, 21, 22, 50)))


def documents(run: GptRun) -> torch.Tensor:
    """Tokens [2, B, S + 1] with end-of-document tokens."""
    tokens = random_tokens(run)
    tokens[tokens == EOD] += 1
    for microbatch, rows in zip(tokens, ENDS, strict=True):
        for row, ends in zip(microbatch, rows, strict=False):
            row[list(ends)] = EOD
    return tokens


def parse(**changes: Any) -> None:
    """Leave parsed arguments where Megatron's training scripts leave theirs."""
    given = {"reset_attention_mask": True, "context_parallel_size": 2, "cp_comm_type": ["burst"], **changes}
    module = argparse.Namespace(_GLOBAL_ARGS=argparse.Namespace(**given))
    sys.modules["megatron.training.global_vars"] = module  # type: ignore[assignment]


def with_documents(tokens: torch.Tensor, *, masks: bool, reset: bool) -> Iterator[dict[str, torch.Tensor]]:
    """Batches as Megatron's loader gives them with these flags, and `--eod-mask-loss`, or without masks [S, S]."""
    from megatron.core.datasets import gpt_dataset

    for batch in batches(tokens):
        made = [
            gpt_dataset._get_ltor_masks_and_position_ids(row, EOD, reset, True, True, masks)
            for row in batch["tokens"]
        ]
        batch["loss_mask"] = torch.stack([loss_mask for _, loss_mask, _ in made])
        batch["position_ids"] = torch.stack([ids for _, _, ids in made])
        if masks:
            batch["attention_mask"] = torch.stack([mask for mask, _, _ in made])
        else:
            length = batch["tokens"].shape[1]
            bounds = torch.full((len(made), length + 1), length, dtype=torch.int32)
            for row, tokens_of_row in zip(bounds, batch["tokens"], strict=True):
                ends = (tokens_of_row == EOD).nonzero().flatten() + 1
                row[0], row[1 : len(ends) + 1] = 0, ends
            batch["burst_documents"] = bounds
        yield batch


def step(data: Iterator[dict[str, torch.Tensor]] | None, model: Any, *, read: Any) -> tuple[torch.Tensor, Any]:
    """What `pretrain_gpt.py` does for a microbatch: stages between the first and the last get none.

    `read` gives the batches that other ranks of tensor parallelism broadcast to this one.
    """
    from megatron.core import parallel_state

    if not parallel_state.is_pipeline_first_stage() and not parallel_state.is_pipeline_last_stage():
        return model(None, None, None), None
    batch = next(data or read)
    batch.pop("burst_documents", None)
    batch = cut_batch(batch)
    mask = batch.get("attention_mask")
    output = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"], loss_mask=batch["loss_mask"])
    return output, partial(loss_of, batch["loss_mask"])


def _run(rank: int, run: GptRun, reset: bool) -> StepResult:
    from megatron.core import parallel_state

    spread = run.cp > 1
    if spread:
        parse(context_parallel_size=run.cp)
    make, tokens = partial(with_documents, masks=not spread, reset=reset), documents(run)
    model = build(run)
    reads = parallel_state.get_tensor_model_parallel_rank() == 0 and (
        parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()
    )
    here = partial(step, read=make(tokens))
    loss = forward_backward(model, run, tokens, here, make if reads else lambda tokens: None)
    return StepResult(loss, full_grads(model, run))


def over(run: GptRun, layout: str, **sizes: Any) -> GptRun:
    """The same model over 2 nodes of 2 ranks, or as `sizes` say."""
    sizes = sizes or {"cp": 4, "hierarchical": (2, 2)}
    return replace(run, cp_comm_type="burst", core=None, strategy=Strategy(layout=layout), **sizes)


def check_over(run: GptRun, one: GptRun, reset: bool = False) -> None:
    (reference,) = run_ranks(_run, 1, one, reset)
    check_equal(run_ranks(_run, run.tp * run.pp * run.cp, run, reset), reference)


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the layout "auto" assigns even a few tokens in chunks: sending them costs nothing."""
    for price in ("SENT_INTER", "SENT_INTRA", "VISITED"):
        monkeypatch.setattr(balance, price, 0)
    table = RouteTable(Topology(2, 2), Strategy())
    for rows in ENDS:
        mask = PerRow(tuple(Documents((0, *(end + 1 for end in ends if end < 63), 64)) for ends in rows))
        assert balance.choose_tokens(table, 64, Causal() & mask, alike=True).holders


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("layout", ["zigzag", "striped", "auto"])
def test_documents_are_kept_apart_as_by_masks(layout: str, per_token: bool) -> None:
    one = replace(TWO_LAYERS, per_token_loss=per_token)
    check_over(over(one, layout), one)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"layers": 3}, {"cp": 2, "pp": 3}),
        ({"recompute": "full"}, {"cp": 2, "tp": 2, "pp": 2, "sequence_parallel": True}),
        ({"positions": "yarn"}, {}),
    ],
    ids=["pp3", "tp2_pp2_recomputed", "yarn"],
)
def test_all_stages_and_tensor_ranks_know_the_documents(changes: dict[str, Any], sizes: dict[str, Any]) -> None:
    one = replace(TWO_LAYERS, **changes)
    check_over(over(one, "auto", **sizes), replace(one, recompute="none"))


@pytest.mark.usefixtures("chunks")
def test_learned_positions_begin_again_with_every_document() -> None:
    one = replace(TWO_LAYERS, positions="learned_absolute")
    check_over(over(one, "auto", cp=2, pp=2), one, reset=True)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("per_token", [False, True])
def test_multi_token_prediction(per_token: bool) -> None:
    one = replace(MTP, per_token_loss=per_token)
    check_over(over(one, "auto"), one)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(
    ("recompute", "sizes"), [("full", {"cp": 2, "pp": 2}), ("selective", {})], ids=["pp2", "cp4"]
)
def test_mla_with_experts_recomputed(recompute: str, sizes: dict[str, Any]) -> None:
    """The first stage of a pipeline recomputes a microbatch after it has read the next one."""
    check_over(replace(over(DEEPSEEK, "auto", **sizes), recompute=recompute), replace(DEEPSEEK, core=WrittenOut))


# ------------------------------------------------------------------------------------------------------ drawn batches


def drawn_ends(random: Random, length: int) -> tuple[int, ...]:
    """Draw where documents begin, of log-normal lengths."""
    starts = [0]
    while starts[-1] < length:
        starts.append(min(length, starts[-1] + max(1, round(random.lognormvariate(2, 1)))))
    return tuple(starts)


def definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: list[tuple[int, ...]]) -> torch.Tensor:
    """Causal attention inside documents in float64, [B, S, H, D]."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    at = torch.arange(q.shape[1])
    of = torch.stack([torch.searchsorted(torch.tensor(row), at, right=True) for row in rows])
    apart = (of[:, :, None] != of[:, None]) | (at[:, None] < at)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(apart[:, None], -torch.inf).softmax(-1), v)


def _drawn(rank: int, ranks: int, layout: str, packed: bool) -> float:
    """Return the largest error of ten batches: outputs and gradients of one core attention."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    parse(context_parallel_size=ranks, reset_attention_mask=not packed, dataloader_inter_document_masking=packed)
    model = build(replace(TWO_LAYERS, cp=ranks, cp_comm_type="burst", strategy=Strategy(layout=layout)))
    core = model.module.decoder.layers[0].self_attention.core_attention
    registry, worst = core.registry, 0.0
    assert parallel_state.get_context_parallel_world_size() == ranks
    for number in range(10):
        random, generator = Random(number), torch.Generator().manual_seed(number)
        length, batch = 2 * ranks * random.randint(4, 12), 1 if packed else 2
        rows = [drawn_ends(random, length) for _ in range(batch)]
        q, k, v, grad = (torch.randn(batch, length, h, 8, generator=generator).double() for h in (8, 4, 4, 8))
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        expected = definition(*whole, rows)
        expected.backward(grad)
        if packed:
            offsets = torch.tensor(rows[0], dtype=torch.int32)
            tokens = registry.packed_tokens(rows[0], ranks)
            given: dict[str, Any] = {"packed_seq_params": PackedSeqParams("thd", *[offsets] * 4, length, length)}
        else:
            longest = max(map(len, rows))
            filled = [[*row, *[length] * (longest - len(row))] for row in rows]
            given = {"attention_mask": torch.tensor(filled, dtype=torch.int32)}
            with registry.documents.recomputing(tuple(rows)):
                tokens = registry.tokens_of_batch(length, ranks)
        at = positions(layout_of(tokens).runs(rank, ranks, tokens))
        cut = [(x[0, at] if packed else x[:, at].transpose(0, 1)).requires_grad_() for x in (q, k, v)]
        out = core(*cut, **given)
        part = grad[:, at].flatten(2)
        out.backward(part[0] if packed else part.transpose(0, 1))
        got = [(x[None] if packed else x.transpose(0, 1)) for x in (out.detach(), *(x.grad for x in cut))]
        wanted = [expected.detach().flatten(2), *(x.grad for x in whole)]
        worst = max(worst, *((a - b[:, at]).abs().max().item() for a, b in zip(got, wanted, strict=True)))
    return worst


@pytest.mark.parametrize("packed", [False, True], ids=["end_of_document_tokens", "packed"])
@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous", "auto"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ten_drawn_batches_equal_float64(ranks: int, layout: str, packed: bool) -> None:
    assert max(run_ranks(_drawn, ranks, ranks, layout, packed)) < 1e-12


# --------------------------------------------------------------------------------------------------------- bad input


def _refused(rank: int) -> list[str]:
    """Return what each call says that cannot be right."""
    from burst_plugin.megatron.batches.documents import BatchReading

    parse()
    model = build(replace(TWO_LAYERS, cp=2, cp_comm_type="burst", strategy=Strategy(layout="auto")))
    core = model.module.decoder.layers[0].self_attention.core_attention
    q, k = torch.randn(8, 1, 8, 8), torch.randn(8, 1, 4, 8)

    def with_bounds(*rows: list[int]) -> None:
        core(q, k, k, attention_mask=torch.tensor(rows, dtype=torch.int32))

    found = []
    for call in (
        lambda: with_bounds([0, 24]),
        lambda: with_bounds([0, 24, 16]),
        lambda: with_bounds([4, 16]),
        lambda: core(q, k, k, attention_mask=torch.tensor([[0, 16]])),
        lambda: core(q, k, k),
        lambda: model(torch.zeros(1, 32, dtype=torch.int64), torch.arange(32)[None], None),
        lambda: next(BatchReading(iter([{"tokens": q}]), lambda bounds: None)),
    ):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            call()
        found.append(str(error.value))
    return found


def test_what_cannot_be_right_is_one_clear_error_on_every_rank() -> None:
    for found in run_ranks(_refused, 2):
        assert "ends at 24, but the sequence has 16 tokens over all ranks" in found[0]
        assert "document 1 runs from 24 to 16" in found[1]
        assert "must begin with 0" in found[2]
        assert "this model does not hand on where documents begin" in found[3]
        assert "this model does not hand on where documents begin" in found[4]
        assert "is for models that Megatron's schedules run" in found[5]
        assert "this one does not say where documents begin" in found[6]


def _after_a_pass(rank: int) -> str:
    """Return what a model says that is called without a schedule when one has run it."""
    run = replace(TWO_LAYERS, layers=1, cp=2, cp_comm_type="burst")
    parse()
    model, make = build(run), partial(with_documents, masks=False, reset=False)
    forward_backward(model, run, documents(run), partial(step, read=None), make)
    batch = cut_batch(next(batches(random_tokens(run, seed=1))))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return str(error.value)


def test_a_model_outside_of_schedules_does_not_get_the_latest_documents() -> None:
    for found in run_ranks(_after_a_pass, 2):
        assert "is for models that Megatron's schedules run" in found


def _two_in_a_step(rank: int, in_turn: bool) -> str:
    """Return what a forward step says that reads two batches, and then runs the model on each; or in turn."""

    def both(data: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
        if in_turn:
            outputs = [step(data, model, read=None) for _ in range(2)]
        else:
            outputs = [step(iter([batch]), model, read=None) for batch in [next(data), next(data)]]
        return outputs[0][0] + outputs[1][0], outputs[1][1]

    run = replace(TWO_LAYERS, layers=1, cp=2, cp_comm_type="burst")
    parse()
    model, tokens = build(run), documents(run)

    def make(once: torch.Tensor) -> Iterator[dict[str, torch.Tensor]]:
        return with_documents(tokens, masks=False, reset=False)

    try:
        forward_backward(model, run, tokens[:1], both, make)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(("in_turn", "said"), [(True, "nothing"), (False, "has read two batches before it ran a")])
def test_a_step_of_two_batches_runs_each_before_it_reads_the_next(in_turn: bool, said: str) -> None:
    for found in run_ranks(_two_in_a_step, 2, in_turn):
        assert said in found


def test_stages_behind_in_evaluation_still_find_their_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage deletes bounds that all stages have read: a backward pass shows it, evaluation does not."""
    registry, store = Registry(None), dist.HashStore()
    monkeypatch.setattr(
        dist.distributed_c10d, "_get_default_store", lambda: types.SimpleNamespace(clone=lambda: store)
    )
    sizes = {"pipeline_model_parallel_world_size": 4, "pipeline_model_parallel_rank": 0, "data_parallel_rank": 0}
    for name, size in (sizes | {"tensor_model_parallel_world_size": 1}).items():
        monkeypatch.setattr(parallel_state, f"get_{name}", lambda size=size, **_: size)

    def run_pass(**_: Any) -> None:
        schedules.set_current_microbatch(None, 0)
        registry.documents.keep(registry.identity, torch.tensor([[0, 5, 8]], dtype=torch.int32))

    schedules = types.SimpleNamespace(**{name: run_pass for name in dir(identity.schedules) if "backward" in name})
    schedules.set_current_microbatch = lambda model, microbatch: None
    monkeypatch.setattr(identity, "schedules", schedules)
    monkeypatch.setattr(identity, "functions_that_cut", tuple)
    identity.hook_schedules(registry)

    def kept(*forward_only: bool) -> list[int]:
        """Return the passes whose bounds are in the store after these further passes."""
        for each in forward_only:
            schedules.forward_backward_pipelining_without_interleaving(forward_only=each)
        return [each for each in range(1, 11) if store.check([f"burst_plugin/documents/0/{each}/0"])]

    assert kept(False, False, False) == [2, 3]
    assert kept(True, True, True, True) == [3, 4, 5, 6, 7]
    assert kept(False) == [3, 4, 5, 6, 7, 8], "the last stage may still be in the first pass of evaluation"
    assert kept(False) == [8, 9]


class Tokenizer:
    """What Megatron asks a tokenizer for."""

    eod, pad, vocab_size = 0, 5000, 128
    unique_identifiers = {"class": "Tokenizer"}  # noqa: RUF012 - Megatron reads it as a plain attribute


def _read_twice(rank: int) -> tuple[Any, torch.Tensor]:
    """Megatron's own samples, and a batch that is read again, as when a step is run again to look for faults.

    Return where documents of its rows begin, as they were read the second time, and its tokens.
    """
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset, MockGPTLowLevelDataset
    from megatron.core.datasets.utils import Split

    from burst_plugin.megatron import install
    from burst_plugin.megatron.batches.documents import BatchReading, rows_of

    parse()
    install(Strategy(layout="auto"))
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=2048,
        split="1,0,0",
        tokenizer=Tokenizer(),  # type: ignore[arg-type]
        reset_position_ids=False,
        reset_attention_mask=True,
        eod_mask_loss=True,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
    )
    indices = np.arange(1000)
    dataset = MockGPTDataset(MockGPTLowLevelDataset(Tokenizer()), None, indices, 10, Split.train, config)  # type: ignore[arg-type]
    batch = torch.utils.data.default_collate([dataset[0], dataset[1]])
    kept: list[Any] = []
    for _ in range(2):
        assert "burst_documents" not in next(BatchReading(iter([batch]), kept.append))
    return rows_of(kept[1]), batch["tokens"]


def test_samples_say_where_documents_begin() -> None:
    ((rows, tokens),) = run_ranks(_read_twice, 1)
    assert len(rows) == 2
    for starts, row in zip(rows, tokens, strict=True):
        assert starts == (0, *((row == Tokenizer.eod).nonzero().flatten() + 1).tolist(), 2048)
        assert len(starts) > 3


def test_steps_that_scripts_skip_leave_their_batches_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are cut again once the step is skipped, and without the flag."""
    batch = {"tokens": torch.zeros(1, 8)}
    training: Any = types.ModuleType("megatron.training.training")

    def cut(batch: dict[str, torch.Tensor], cp_group: Any = None) -> Any:
        raise ValueError("no schedule is running")

    training.get_batch_on_this_cp_rank = cut
    training.dummy_train_step = lambda batches: training.get_batch_on_this_cp_rank(next(batches), cp_group=None)
    monkeypatch.setitem(sys.modules, training.__name__, training)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", training)
    hook_skipped_steps()
    parse()
    assert training.dummy_train_step(iter([batch])) is batch
    assert training.get_batch_on_this_cp_rank is cut
    parse(reset_attention_mask=False)
    with pytest.raises(ValueError, match="no schedule"):
        training.dummy_train_step(iter([batch]))


def _stages_on(rank: int, nodes: str) -> str:
    """Return the error of making groups of two stages of two ranks each, on these nodes, a letter for each rank."""
    with mock.patch.object(connections, "node_id", return_value=nodes[rank]):
        try:
            join(replace(TWO_LAYERS, cp=2, pp=2, cp_comm_type="burst", strategy=Strategy(layout="auto")))
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(("nodes", "differ"), [("AABB", False), ("AABC", True)])
def test_stages_that_lie_differently_on_nodes_are_an_error_on_every_rank(nodes: str, differ: bool) -> None:
    """Each would choose other tokens for its ranks, and train on other ones than the stage before it."""
    for error in run_ranks(_stages_on, 4, nodes):
        assert ("tensor-parallel ranks differ: 1x2 (nodes x ranks per node), 2x1 (nodes" in error) is differ
        assert bool(error) is differ
