"""Megatron's sparse attention (DSA) on rings, against Megatron's own on one rank: gradients, losses, selections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from burst_plugin import Strategy
from burst_plugin.megatron.sparse import sparse_attention
from tests.megatron.test_model_parity import DEEPSEEK, check_equal
from tests.support.megatron_gpt import (
    GptRun,
    StepResult,
    build,
    forward_backward,
    full_grads,
    leave,
    packed_forward_step,
    random_tokens,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron

DENSE = {name: value for name, value in DEEPSEEK.config.items() if "moe" not in name}
SPARSE = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 16,  # with few heads many scores are 0, equals among which Megatron takes any
    "dsa_indexer_head_dim": 8,
    "dsa_indexer_topk": 12,
    "dsa_indexer_loss_coeff": 0.5,
    "dsa_indexer_use_sparse_loss": True,
}
RUN = replace(DEEPSEEK, config={**DENSE, **SPARSE})
OVER_ALL_KEYS = {**RUN.config, "dsa_indexer_use_sparse_loss": False}
TP2 = {"tp": 2, "sequence_parallel": True}
# Runs of Megatron's own with sequences on one rank, and of rings. All are of 4 ranks; data-parallel ranks have the
# same batch.
REFERENCES: dict[str, dict[str, Any]] = {
    "selected": {},
    "all keys": {"config": OVER_ALL_KEYS},
    "tensor parallel": {"tp": 2},
    "sequence parallel": TP2,
    "per token": {"per_token_loss": True},
    "not trained": {"config": {**RUN.config, "dsa_indexer_loss_coeff": 0.0}},
}
RINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "2 nodes of 2": ("selected", {"cp": 4, "hierarchical": (2, 2)}),
    "over all keys": ("all keys", {"cp": 4, "config": OVER_ALL_KEYS}),
    "sequence parallel": ("sequence parallel", {"cp": 2, "recompute": "full", **TP2}),
}
MORE_RINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "2 ranks": ("selected", {"cp": 2}),
    "recomputed": ("selected", {"cp": 4, "recompute": "full"}),
    "tensor parallel": ("tensor parallel", {"cp": 2, "tp": 2}),
    "per token": ("per token", {"cp": 4, "per_token_loss": True}),
    "distributed optimizer": ("selected", {"cp": 2, "distributed_optimizer": True}),
    "not trained": ("not trained", {"cp": 2, "config": {**RUN.config, "dsa_indexer_loss_coeff": None}}),
}
if sparse_attention.SINCE_0_19:  # since 0.19 layers refuse one of these, and have hidden states in checkpoints
    del MORE_RINGS["tensor parallel"]
    MORE_RINGS["core attention recomputed"] = ("selected", {"cp": 2, "recompute": "selective"})


def _pairs(found: torch.Tensor, length: int) -> torch.Tensor:
    """Return which of so many keys are listed, bool [B, S, length]; -1 is none."""
    pairs = torch.zeros(*found.shape[:2], length + 1, dtype=torch.bool)
    return pairs.scatter_(2, found.long() % (length + 1), True)[..., :length]


@contextmanager
def _noted() -> Iterator[list[torch.Tensor]]:
    """Note which keys queries select, bool [B, S, S], of whole sequences, on one rank and on rings."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    from burst_plugin.megatron.sparse.sparse_attention import BurstSparseAttention

    noted: list[torch.Tensor] = []
    name = "fused_qk_topk_naive"  # from 0.17 on
    owner: Any = dsa if hasattr(dsa, name) else dsa.DSAIndexer
    name = name if owner is dsa else "forward_with_scores"
    own, ring = getattr(owner, name), BurstSparseAttention.selected_keys

    def of_one_rank(*args: Any, **kwargs: Any) -> Any:
        scores, found = own(*args, **kwargs)
        noted.append(_pairs(found, scores.shape[2]).tril())
        return scores, found

    def of_ring(core: Any, given: Any, call: Any) -> Any:
        found = ring(core, given, call)
        length = found.shape[1] * call.cp.ranks
        whole = torch.zeros(found.shape[0], length, length, dtype=torch.uint8)
        whole[:, call.cp.positions(length)] = _pairs(found, length).to(torch.uint8)
        dist.all_reduce(whole, group=call.cp.group)
        noted.append(whole.bool())
        return found

    setattr(owner, name, of_one_rank)
    BurstSparseAttention.selected_keys = of_ring
    try:
        yield noted
    finally:
        setattr(owner, name, own)
        BurstSparseAttention.selected_keys = ring


Found = dict[str, tuple[StepResult, list[torch.Tensor], float, list[str]]]


def _steps(rank: int, runs: dict[str, GptRun], step: Any = None) -> Found:
    """Run a step of each; return results, what was selected, the loss that is logged, and keys of a checkpoint."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper as Logging

    found = {}
    for name, run in runs.items():
        model = build(run)
        with _noted() as noted:
            loss = forward_backward(model, run, random_tokens(run), step)
        Logging.reduce_loss_in_tracker()
        logged = float(Logging.tracker["values"].sum()) if "values" in Logging.tracker else 0.0
        Logging.clean_loss_in_tracker()
        keys = sorted(model.module.sharded_state_dict())
        found[name] = StepResult(loss, full_grads(model, run)), noted, logged, keys
        leave()
    return found


@pytest.mark.parametrize("rings", [RINGS, pytest.param(MORE_RINGS, marks=pytest.mark.slow)], ids=["few", "more"])
def test_rings_equal_megatrons_own_on_one_rank(rings: dict[str, tuple[str, dict[str, Any]]]) -> None:
    runs = {f"{of} on one rank": replace(RUN, **REFERENCES[of]) for of, _ in rings.values()}
    runs |= {name: replace(RUN, **changes) for name, (_, changes) in rings.items()}
    for found in run_ranks(_steps, 4, runs):
        for name, (of, changes) in rings.items():
            (result, selections, logged, keys), reference = found[name], found[f"{of} on one rank"]
            expected, whole, as_logged, as_saved = reference
            assert keys == as_saved
            _check(result, expected, trained=of != "not trained")
            assert logged == pytest.approx(as_logged, rel=1e-5), name
            times = 2 if "recompute" in changes else 1
            assert len(selections) == times * len(whole), name
            for one, other in zip(sorted(selections, key=_order), sorted(whole * times, key=_order), strict=True):
                assert torch.equal(one, other), name


def _order(selection: torch.Tensor) -> bytes:
    return selection.numpy().tobytes()


def _check(result: StepResult, expected: StepResult, trained: bool = True) -> None:
    """Compare; an indexer that is not trained has gradients of 0."""
    indexers = [name for name in expected.grads if ".indexer." in name]
    assert len(indexers) == 10
    if not trained:
        assert not any(each.grads[name].any() for each in (result, expected) for name in indexers)
        result, expected = (
            replace(each, grads={name: grad for name, grad in each.grads.items() if name not in indexers})
            for each in (result, expected)
        )
    check_equal([result], expected)


def test_hybrid_models_equal_megatrons_own_on_one_rank() -> None:
    if not sparse_attention.SINCE_0_19:
        pytest.skip("Megatron has no sparse attention in hybrid models until 0.19")
    by_name = replace(RUN, layers=4, pattern="D-D-")
    by_pattern = replace(by_name, config={**RUN.config, "experimental_attention_variant": None})
    for run in (by_name, by_pattern):
        for found in run_ranks(_steps, 2, {"one rank": run, "ring": replace(run, cp=2)}):
            _check(found["ring"][0], found["one rank"][0])


@pytest.mark.slow
def test_expanded_keys_in_another_layout_equal_megatrons_own() -> None:
    run = replace(RUN, strategy=Strategy(latents="expand", layout="striped"))
    runs = {"one rank": run, "ring": replace(run, cp=4)}
    for found in run_ranks(_steps, 4, runs):
        _check(found["ring"][0], found["one rank"][0])


# ----------------------------------------------------------------------------------------------------- refusals


def _refused(rank: int, wrong: dict[str, GptRun]) -> dict[str, str]:
    found = {}
    for name, run in wrong.items():
        with pytest.raises(ValueError, match=r".") as refused:
            _steps(rank, {name: run})
        found[name] = str(refused.value)
        leave()
    return found


def test_what_sparse_attention_does_not_have_is_refused_by_name() -> None:
    cp2 = replace(RUN, cp=2)
    expected = {
        "attention_dropout=0.1 is not supported by sparse attention (dsa): Megatron's own ignores it": {
            "config": {**RUN.config, "attention_dropout": 0.1}
        },
        "softmax_type='off-by-one' is not supported by sparse attention (dsa): use vanilla": {
            "config": {**RUN.config, "softmax_type": "off-by-one"}
        },
        "window_size=(7, 0) is not supported by sparse attention (dsa): leave it out": {
            "config": {**RUN.config, "window_size": (7, 0)}
        },
        "apply_rope_fusion=True is not supported by sparse attention (dsa): switch it off": {
            "config": {**RUN.config, "apply_rope_fusion": True}
        },
    }
    if not sparse_attention.SINCE_0_19:
        expected["recompute_modules has core_attn"] = {"recompute": "selective"}
    wrong = {message: replace(cp2, **changes) for message, changes in expected.items()}
    for found in run_ranks(_refused, 2, wrong):
        for message, text in found.items():
            assert message in text


@pytest.mark.parametrize(
    ("name", "value"),
    [("dsa_indexer_topk_freq", 2), ("dsa_indexer_scoring_relu", False), ("dsa_kernel_backend", "cudnn")],
)
def test_what_newer_releases_have_is_refused_by_name(name: str, value: Any) -> None:
    usual = SimpleNamespace(softmax_type="vanilla")
    assert sparse_attention.problems(usual) == []
    setattr(usual, name, value)
    (problem,) = sparse_attention.problems(usual)
    assert problem.startswith(f"{name}={value!r} is not supported by sparse attention (dsa): use ")


# Documents of 16, 24 and 8 tokens, of which 13, 24 and 3 are real.
STARTS, REAL = (0, 16, 40, 48), (0, 13, 37, 40)
PACKED = replace(RUN, seq_length=48, microbatch_size=1)


def _packed_step(data: Any, model: Any) -> Any:
    """Run a step of packed documents, of which Megatron's own is told what is padding, as the ring knows."""
    from megatron.core import packed_seq_params

    kind = packed_seq_params.PackedSeqParams

    def params(*args: Any) -> Any:
        made = kind(*args)
        at = torch.arange(STARTS[-1])
        made.real_token_mask_q = torch.zeros(1, STARTS[-1], dtype=torch.bool)
        for start, length in zip(STARTS, torch.tensor(REAL).diff().tolist(), strict=False):
            made.real_token_mask_q |= (at >= start) & (at < start + length)
        return made

    with mock.patch.object(packed_seq_params, "PackedSeqParams", params):
        return packed_forward_step(data, model, starts=STARTS, real=REAL)


@pytest.mark.parametrize("by_token", [True, False])
def test_packed_documents_equal_megatrons_own_on_one_rank(by_token: bool) -> None:
    if not sparse_attention.SINCE_0_19:
        pytest.skip("Megatron has no packed sequences here until 0.19")
    run = replace(PACKED, per_token_loss=by_token)
    runs = {"one rank": run, "two": replace(run, cp=2), "four": replace(run, cp=4)}
    for found in run_ranks(_steps, 4, runs, _packed_step):
        expected, _, as_logged, _ = found.pop("one rank")
        for result, _, logged, _ in found.values():
            _check(result, expected)
            assert logged == pytest.approx(as_logged, rel=1e-5)


def test_packed_documents_are_refused_by_releases_without_them() -> None:
    if sparse_attention.SINCE_0_19:
        pytest.skip("Megatron has packed sequences here since 0.19")

    def refused(rank: int) -> str:
        run = replace(PACKED, cp=2)
        model = build(run)
        with pytest.raises(ValueError, match=r".") as found:
            forward_backward(model, run, random_tokens(run), _packed_step)
        return str(found.value)

    for text in run_ranks(refused, 2):
        assert "packed sequences (thd) are not supported by the sparse attention of this release" in text
