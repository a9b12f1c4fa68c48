"""`--hybrid-context-parallel` of Megatron's scripts becomes one ring, before Megatron looks at its flags."""

from __future__ import annotations

import argparse
import sys
import types
from typing import Any

import pytest
from megatron.core import utils

from burst_plugin.megatron.batches.conversations import hook_conversations
from burst_plugin.megatron.flags.arguments import add_arguments, parsed_layout
from burst_plugin.megatron.flags.one_ring import hook_validation, take_as_one_ring

pytestmark = pytest.mark.megatron

WRITTEN = {
    "hybrid_context_parallel": True,
    "sft": True,
    "cp_comm_type": ["burst"],
    "calculate_per_token_loss": True,
    "world_size": 8,
    "rank": 0,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 2,
    "micro_batch_size": 1,
    "global_batch_size": 12,
    "seq_length": 2048,
    "max_seqlen_per_dp_cp_rank": 1024,
}


def _parsed(*flags: str, **changes: Any) -> argparse.Namespace:
    args = add_arguments(argparse.ArgumentParser()).parse_args(flags)
    vars(args).update({**WRITTEN, **changes})
    return args


@pytest.fixture(autouse=True)
def _merging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the samples of a microbatch be merged, as from 0.19 on."""
    monkeypatch.setattr(utils, "flatten_batch_for_packed_sequences", lambda batch: batch, raising=False)


@pytest.mark.parametrize(
    ("changes", "samples"),
    [
        ({}, 4),  # 8 ranks of 1024 tokens
        ({"global_batch_size": 6}, 3),
        ({"max_seqlen_per_dp_cp_rank": 200, "micro_batch_size": 2}, 1),
        ({"max_seqlen_per_dp_cp_rank": None, "micro_batch_size": 2}, 2),
        ({"rampup_batch_size": ["2", "2", "100"]}, 1),
        ({"iterations_to_skip": [5]}, 1),  # Megatron reads them in microbatches of one row
        ({"iterations_to_skip": []}, 4),
        ({"result_rejected_tracker_filename": "rejected", "micro_batch_size": 2}, 2),
        ({"world_size": 16, "tensor_parallel_num_weight_shards": 2}, 3),  # 12 samples in two copies
        ({"world_size": 16, "tensor_model_parallel_size": 2}, 1),  # buffers of evaluation have the size for training
        ({"world_size": 16, "tensor_model_parallel_size": 2, "micro_batch_size": 2, "global_batch_size": 8}, 2),
        ({"step_batch_size_schedule": "0:2 100:4", "global_batch_size": None}, 1),
        ({"global_batch_size": None, "micro_batch_size": 3}, 4),  # four data-parallel ranks had 3 each
        ({"sft": False, "dataloader_inter_document_masking": True}, 4),
    ],
    ids=str,
)
def test_a_step_has_the_same_samples(changes: dict[str, Any], samples: int) -> None:
    args = _parsed(**changes)
    said = take_as_one_ring(args)
    assert (args.context_parallel_size, args.hybrid_context_parallel, args.micro_batch_size) == (8, False, samples)
    assert args.burst_layout == "auto"
    if "step_batch_size_schedule" not in changes:
        assert args.global_batch_size == (changes.get("global_batch_size") or 12)
    assert said is not None
    assert f"is taken as --context-parallel-size 8 --burst-layout auto --micro-batch-size {samples}" in said
    assert ("--sft" in said) == args.sft


@pytest.mark.parametrize(
    "changes",
    [
        {"hybrid_context_parallel": False},
        {"sft": False},
        {"cp_comm_type": None},
        {"cp_comm_type": ["p2p"]},
        {"cp_comm_type": ["burst", "p2p"]},
        {"calculate_per_token_loss": False},
        {"pipeline_model_parallel_size": 2},
        {"world_size": 17, "tensor_model_parallel_size": 2},
        {"context_parallel_size": 3},
        {"seq_length": 2040},
        {"seq_length": None},
        {"world_size": 1, "context_parallel_size": 1},
        {"tensor_parallel_num_weight_shards": 16, "context_parallel_size": 1},
    ],
    ids=str,
)
def test_other_runs_are_left_alone(changes: dict[str, Any]) -> None:
    args = _parsed(**changes)
    before = dict(vars(args))
    assert take_as_one_ring(args) is None
    assert vars(args) == before


def test_what_the_user_wrote_stays() -> None:
    for layout in ("zigzag", "striped"):
        args = _parsed("--burst-layout", layout)
        take_as_one_ring(args)
        assert args.burst_layout == layout
    args = _parsed(eval_micro_batch_size=None)
    take_as_one_ring(args)
    assert args.eval_micro_batch_size == 1, "any number of samples to evaluate can be cut into it"


def test_microbatches_stay_single_samples_until_0_18(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(utils, "flatten_batch_for_packed_sequences")
    for changes in ({}, {"micro_batch_size": 2}, {"micro_batch_size": 2, "eval_micro_batch_size": 2}):
        args = _parsed(**{"eval_micro_batch_size": None, **changes})
        said = take_as_one_ring(args)
        assert (args.micro_batch_size, args.eval_micro_batch_size) == (1, 1), "Megatron would stack unequal offsets"
        assert "--eval-micro-batch-size 1:" in (said or "")
    args = _parsed()
    take_as_one_ring(args)
    assert not hasattr(args, "eval_micro_batch_size"), "0.17 has none"


def test_evaluation_has_as_many_samples_as_groups_gave_it() -> None:
    schedule = {"step_batch_size_schedule": "0:8 100:16", "global_batch_size": None, "micro_batch_size": 2}
    for written, samples in ((None, 8), (4, 4)):  # 4 data-parallel ranks had 2 each
        args = _parsed(**schedule, eval_global_batch_size=written, eval_micro_batch_size=None)
        said = take_as_one_ring(args)
        assert (args.eval_global_batch_size, args.eval_micro_batch_size, args.micro_batch_size) == (samples, 2, 2)
        assert ("--eval-global-batch-size 8" in (said or "")) == (written is None)
    args = _parsed(eval_global_batch_size=None)
    take_as_one_ring(args)
    assert args.eval_global_batch_size is None, "Megatron takes the global batch size"


def test_levels_of_the_old_size_are_left_out() -> None:
    args = _parsed(hierarchical_context_parallel_sizes=[2, 1])
    said = take_as_one_ring(args)
    assert args.hierarchical_context_parallel_sizes is None
    assert "--hierarchical-context-parallel-sizes 2 1 is left out" in (said or "")
    args = _parsed(hierarchical_context_parallel_sizes=[4, 2], context_parallel_size=8)
    said = take_as_one_ring(args)
    assert args.hierarchical_context_parallel_sizes == [4, 2]
    assert "left out" not in (said or "left out")


@pytest.mark.parametrize(
    ("written", "strategy", "changes", "even", "unpadded"),
    [
        (None, None, {}, True, True),
        (None, None, {"sft": False, "dataloader_inter_document_masking": True}, True, False),
        ("zigzag", None, {}, False, False),
        ("striped", None, {}, False, True),
        (None, "zigzag", {}, False, False),
        (None, "striped", {}, False, True),
        ("zigzag", "auto", {}, True, True),
    ],
)
def test_the_line_says_what_runs(
    written: str | None, strategy: str | None, changes: dict[str, Any], even: bool, unpadded: bool
) -> None:
    args = _parsed(*(("--burst-layout", written) if written else ()), **changes)
    before = args.burst_layout
    said = take_as_one_ring(args, strategy) or ""
    assert ("even work" in said, "Conversations are not padded" in said) == (even, unpadded)
    assert ("--burst-layout" in said) == (strategy is None), "flags do not change the strategy of install()"
    if strategy is not None:
        assert args.burst_layout == before


def test_it_is_taken_before_megatron_looks(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []
    module = types.ModuleType("arguments")
    vars(module)["validate_args"] = lambda args, defaults: seen.append(args.context_parallel_size) or args
    hook_validation(module)
    for rank in (0, 1):
        args = _parsed(rank=rank)
        assert module.validate_args(args, {}) is args
    assert seen == [8, 8]
    assert capsys.readouterr().out.count("burst_plugin: --hybrid-context-parallel is taken as") == 1, "rank 0 says it"


def test_conversations_are_not_padded_where_any_length_can_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    class SFTDataset:
        def __init__(self, config: Any) -> None:
            self.config = config

    name = "megatron.training.datasets.sft_dataset"
    module = types.ModuleType(name)
    vars(module)["SFTDataset"] = SFTDataset
    monkeypatch.setitem(sys.modules, name, module)
    config = types.SimpleNamespace(context_parallel_size=8)
    for changes, paddedto in (
        ({"burst_layout": "zigzag"}, 8),
        ({"burst_layout": "auto", "sft": False}, 8),
        ({"burst_layout": "auto", "cp_comm_type": ["p2p"]}, 8),
        ({"burst_layout": "auto"}, 1),
        ({"burst_layout": "auto"}, 1),
    ):
        parsed = _parsed(**changes)
        monkeypatch.setitem(
            sys.modules,
            "megatron.training.global_vars",
            argparse.Namespace(_GLOBAL_ARGS=parsed),  # type: ignore[arg-type]
        )
        hook_conversations(parsed_layout())
        assert SFTDataset(config).config.context_parallel_size == paddedto
    assert config.context_parallel_size == 8, "others read it, too"
