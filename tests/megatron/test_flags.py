"""Flags that burst attention cannot honour stop a run at start-up, by name and with the way out."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import MLATransformerConfig

from burst_plugin import Strategy
from burst_plugin.megatron import framework
from burst_plugin.megatron.flags.arguments import add_arguments, parsed_arguments, parsed_strategy
from burst_plugin.megatron.flags.config import REFUSED, REFUSED_LATER
from burst_plugin.megatron.flags.flag_checks import REFUSED_FLAGS, flag_problems, refuse_flags, warn_of_quantizers
from burst_plugin.megatron.layers.building import choose_core_attention, refuse_whole_sequences
from burst_plugin.megatron.registry import Registry
from burst_plugin.megatron.releases import tree_version
from tests.support.megatron_gpt import GptRun, build, join
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron

USUAL = {"cp_comm_type": ["burst"], "context_parallel_size": 2, "attention_dropout": 0.0, "softmax_type": "vanilla"}


def _parse(**changes: Any) -> None:
    """Leave parsed arguments where Megatron's training scripts leave theirs."""
    parsed = add_arguments(argparse.ArgumentParser()).parse_args([])
    vars(parsed).update({**USUAL, **changes})
    sys.modules["megatron.training.global_vars"] = argparse.Namespace(_GLOBAL_ARGS=parsed)  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def _no_parsed_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", argparse.Namespace())  # type: ignore[arg-type]


def test_without_megatrons_parser_nothing_is_looked_at() -> None:
    assert parsed_arguments() is None
    refuse_flags()
    assert flag_problems() == []


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"burst_backward": "q"},
        {"attention_dropout": 0.1, "softmax_type": "learnable", "multi_latent_attention": True},
        {"cp_comm_type": ["p2p"], "batch_invariant_mode": True},
        {"context_parallel_size": 1, "batch_invariant_mode": True, "burst_backward": "q"},
        {"cp_comm_type": ["p2p", "burst"]},
        {"cp_comm_type": "burst", "burst_layout": "striped"},  # from --yaml-cfg
    ],
    ids=str,
)
def test_what_works_is_not_refused(changes: dict[str, Any]) -> None:
    _parse(**changes)
    before = dict(vars(parsed_arguments()))
    with warnings.catch_warnings(record=True) as said:
        refuse_flags()
    assert len(said) == ("burst" not in (changes.get("cp_comm_type") or USUAL["cp_comm_type"])), "another one runs"
    assert vars(parsed_arguments()) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_mla_latents": True}, "--cache-mla-latents is not supported: it is for inference"),
        (
            {"context_parallel_size": 1, "hybrid_context_parallel": True, "batch_invariant_mode": True},
            "--batch-invariant-mode is not supported",
        ),
        (
            {"cp_comm_type": ["p2p", "burst"], "batch_invariant_mode": True},
            "--batch-invariant-mode is not supported: switch it off",
        ),
        (
            {"cuda_graph_impl": "local"},
            "--cuda-graph-impl local is not supported: use none, which --enable-cuda-graph",
        ),
        (
            {"transformer_impl": "inference_optimized"},
            "--transformer-impl inference_optimized is not supported: use l",
        ),
        ({"cpu_offloading": True}, "--cpu-offloading-num-layers is not supported: switch it off"),
        (
            {"offload_modules": ["mlp", "core_attn"]},
            "--offload-modules mlp core_attn is not supported: take core_att",
        ),
        ({"cp_comm_type": ["brust"]}, "--cp-comm-type brust is not known: write --cp-comm-type burst"),
        ({"cp_comm_type": ["burst", "Burst"]}, "--cp-comm-type Burst is not known: write --cp-comm-type burst"),
        (
            {"hybrid_context_parallel": True, "mtp_num_layers": 1},
            "--mtp-num-layers 1 is not supported with --hybrid-context-parallel: outside of attention it takes",
        ),
        (
            {"cp_comm_type": ["p2p", "burst"], "reset_attention_mask": True},
            "--reset-attention-mask needs --cp-comm-type burst in all layers, got burst p2p",
        ),
        ({"sft": True}, "--sft is not supported: before 0.18 the script does not tell layers where documents begin"),
        (
            {"hybrid_context_parallel": True, "dataloader_inter_document_masking": True},
            "--dataloader-inter-document-masking is not supported with --hybrid-context-parallel: use --context-par",
        ),
        ({"perform_rl_step": True}, "--perform-rl-step is not supported: releases until 0.19 give all ranks whole"),
        (
            {"context_parallel_size": 1, "dynamic_context_parallel": True},
            "--dynamic-context-parallel is not supported: its groups change with every microbatch",
        ),
        ({"fake_process_group": True}, "--fake-process-group is not supported: ranks cannot meet in it"),
        ({"use_legacy_models": True}, "--use-legacy-models is not supported: legacy models have no core attention"),
        (
            {"flash_attention_version": 3},
            "--flash-attention-version 3 is not supported: leave it out; kernels are chosen by --burst",
        ),
        ({"cp_comm_type": ["p2p"], "burst_backward": "q"}, "--burst-backward needs --cp-comm-type burst: add that"),
        (
            {"cp_comm_type": ["p2p", "burst"], "burst_layout": "striped"},
            "--burst-layout striped needs --cp-comm-type burst in all layers, got burst p2p",
        ),
        ({"cp_comm_type": ["p2p"], "burst_ranks_per_node": 2}, "--burst-ranks-per-node needs --cp-comm-type burst"),
        ({"burst_parts": [1, 2, 3]}, "--burst-parts 1 2 3 is not valid; use a positive number, or two: forward and"),
        ({"burst_max_ctas": 6}, "--burst-max-ctas 6 is not valid; use a number of thread blocks, a power of two"),
        ({"burst_loss_chunk": -5}, "--burst-loss-chunk -5 is not valid; use a number of tokens"),
        ({"burst_keep_attention": "half"}, "--burst-keep-attention half is not valid; use 'none', 'all', or a sh"),
        ({"burst_ulysses_degree": 0}, "--burst-ulysses-degree 0 is not valid; use a positive number or 'node'"),
        (
            {"burst_ulysses_degree": 2, "burst_mesh_degree": 2},
            "--burst-ulysses-degree 2 and --burst-mesh-degree 2 cannot be combined",
        ),
        (
            {"burst_preset": "usp", "burst_mesh_degree": 2},
            "--burst-ulysses-degree node (set by --burst-preset usp) and --burst-mesh-degree 2 cannot be combined",
        ),
        ({"context_parallel_size": 1, "burst_loss_chunk": -5}, "--burst-loss-chunk -5 is not valid; use a number of"),
    ],
    ids=str,
)
def test_what_does_not_work_is_refused_by_its_flag(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.core.__version__", "0.17.1")  # the last that packs otherwise
    _parse(**changes)
    with pytest.raises(ValueError, match="burst attention cannot run with these flags:") as caught:
        refuse_flags()
    assert str(caught.value).splitlines()[1].startswith(f"  {message}")


def test_every_refused_flag_is_tried_above() -> None:
    mark = next(m for m in test_what_does_not_work_is_refused_by_its_flag.pytestmark if m.name == "parametrize")
    assert {name for changes, _ in mark.args[1] for name in changes} >= set(REFUSED_FLAGS)


def test_what_to_write_instead_names_no_fields() -> None:
    """Whoever writes flags has never seen the fields of TransformerConfig."""
    fields = {field.name for field in dataclasses.fields(MLATransformerConfig) if "_" in field.name}
    for name, rule in {**REFUSED, **REFUSED_LATER, **REFUSED_FLAGS}.items():
        assert not [field for field in fields if field in rule.instead], (name, rule.instead)


def test_conversations_are_packed_from_0_18_on(monkeypatch: pytest.MonkeyPatch) -> None:
    _parse(sft=True)
    monkeypatch.setattr("megatron.core.__version__", "0.17.1")
    with pytest.raises(ValueError, match="--sft is not supported"):
        refuse_flags()
    assert any("  sft: before 0.18" in line for line in framework.refused_options())
    monkeypatch.setattr("megatron.core.__version__", "0.18.0")
    refuse_flags()
    assert not any("sft" in line for line in framework.refused_options()), "`burst doctor` lists what is refused here"
    _parse(sft=True, hybrid_context_parallel=True)
    with pytest.raises(
        ValueError, match="--sft with --hybrid-context-parallel runs on one ring, which needs --cp-com"
    ):
        refuse_flags()


def test_every_refused_option_is_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "megatron.md").read_text()
    refused = (*REFUSED, *REFUSED_LATER, *REFUSED_FLAGS)
    assert [name for name in refused if name not in page and "--" + name.replace("_", "-") not in page] == []


def test_quantizers_that_are_left_out_are_warned_of() -> None:
    """ModelOpt's, which it adds to Transformer Engine's attention alone."""
    _parse(modelopt_enabled=True)
    with pytest.warns(UserWarning, match="ModelOpt is in use: .* burst attention trains and saves it without"):
        warn_of_quantizers()
    _parse(modelopt_enabled=True, rank=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_quantizers()  # rank 0 has said so


def test_all_flags_are_told_of_at_once() -> None:
    _parse(flash_decode=True, batch_invariant_mode=True, use_legacy_models=True)
    with pytest.raises(ValueError, match="--flash-decode") as caught:
        refuse_flags()
    assert len(str(caught.value).splitlines()) == 4


def test_flags_become_a_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = add_arguments(argparse.ArgumentParser())
    assert "--burst-backward" in parser.format_help()
    assert parsed_strategy() is None
    flags = {"backward": "q", "kernel": "reference", "ranks-per-node": "2", "layout": "striped"}
    parsed = parser.parse_args([word for name, value in flags.items() for word in (f"--burst-{name}", value)])
    parsed.use_legacy_models = False
    module = argparse.Namespace(_GLOBAL_ARGS=parsed)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)  # type: ignore[arg-type]
    assert parsed_strategy() == Strategy(backward="q", kernel="reference", ranks_per_node=2, layout="striped")
    assert Registry(None).layout == "striped"
    assert flag_problems() == []
    parsed.use_legacy_models = True
    assert "--use-legacy-models is not supported" in flag_problems()[0]


@pytest.mark.parametrize("parts", [(2,), (1, 4)])
def test_all_flags_reach_the_strategy(parts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    parser = add_arguments(argparse.ArgumentParser())
    flags = ["--burst-schedule", "flat_ring", "--burst-check", "always", "--burst-parts", *map(str, parts)]
    flags += ["--burst-ulysses-degree", "2"]
    module = argparse.Namespace(_GLOBAL_ARGS=parser.parse_args(flags))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    expected = 2 if len(parts) == 1 else (1, 4)
    assert parsed_strategy() == Strategy(schedule="flat_ring", check="always", parts=expected, ulysses_degree=2)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ({"burst_loss_chunk": 1024}, Strategy(loss_chunk=1024)),
        ({"burst_memory": "off"}, Strategy(memory="off")),
        ({"burst_memory": False}, Strategy(memory="off")),  # what PyYAML makes of off
        ({"burst_preset": "usp"}, Strategy.of(None, preset="usp")),
        ({}, None),
    ],
    ids=str,
)
def test_one_key_of_a_yaml_file_is_enough(
    key: dict[str, Any], expected: Strategy | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's arguments are then those of the file, without defaults."""
    module = argparse.Namespace(_GLOBAL_ARGS=argparse.Namespace(yaml_cfg="run.yaml", **USUAL, **key))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)  # type: ignore[arg-type]
    assert parsed_strategy() == expected


def test_flags_that_a_yaml_file_replaces_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--yaml-cfg", "run.yaml", "--burst-loss-chunk=1024", "--no-burst-offload", "--micro-batch-size", "1"]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *flags])
    _parse(yaml_cfg=None)
    refuse_flags()
    for kinds in (["burst"], None):
        _parse(yaml_cfg="run.yaml", cp_comm_type=kinds, context_parallel_size=2 if kinds else 1)
        with pytest.raises(ValueError, match="burst attention cannot run with these flags") as error:
            refuse_flags()
        of_chunk, of_offload = str(error.value).splitlines()[1:]
        reason = "is lost with --yaml-cfg run.yaml, from which Megatron takes all arguments: write"
        assert of_chunk.strip() == f"--burst-loss-chunk {reason} burst_loss_chunk as a key of that file"
        assert of_offload.strip() == f"--no-burst-offload {reason} burst_offload as a key of that file"


def _start(rank: int) -> tuple[object, str]:
    """Return the exit status of a rank whose flags are refused, and what it has printed."""
    _parse(batch_invariant_mode=True)
    if rank == 0:
        time.sleep(0.5)  # the other rank must not end the run before this one has said why
    with contextlib.redirect_stderr(io.StringIO()) as printed, pytest.raises(SystemExit) as left:
        build(GptRun(layers=2, cp=2, cp_comm_type="burst"))
    return left.value.code, printed.getvalue()


def test_every_rank_stops_before_groups_are_made_and_one_says_why() -> None:
    message = (
        "burst_plugin: burst attention cannot run with these flags:\n"
        "  --batch-invariant-mode is not supported: switch it off\n"
    )
    assert run_ranks(_start, 2) == [(1, message), (1, "")]


def _rings(rank: int, kinds: list[str]) -> int:
    """How many there are right after Megatron has made its groups."""
    from burst_plugin.megatron import install

    _parse(cp_comm_type=kinds)
    join(GptRun(layers=2, cp=2, cp_comm_type="burst"))
    return len(install().contexts())


@pytest.mark.parametrize(("kinds", "rings"), [(["p2p", "burst"], 1), (["p2p"], 0)])
def test_rings_are_made_for_layers_that_are_on_one(kinds: list[str], rings: int) -> None:
    assert run_ranks(_rings, 2, kinds) == [rings] * 2


@pytest.mark.parametrize("flag", ["reset_attention_mask", "dataloader_inter_document_masking"])
def test_documents_are_kept_apart_without_square_masks(flag: str) -> None:
    _parse(**{flag: True, "create_attention_mask_in_dataloader": True})
    name = flag.replace("_", "-")
    with pytest.warns(UserWarning, match=f"--{name}: sequences are cut in zigzag, .*; --burst-layout auto gives"):
        refuse_flags()
    makes_mask = parsed_arguments().create_attention_mask_in_dataloader
    assert makes_mask == (flag == "dataloader_inter_document_masking"), "that loader makes none anyway"
    _parse(**{flag: True, "burst_layout": "auto"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refuse_flags()


def test_a_ring_that_was_not_asked_for_and_masks_of_all_pairs_warn() -> None:
    square = {"create_attention_mask_in_dataloader": True, "seq_length": 131072}
    for changes, message in (
        (
            {"cp_comm_type": ["p2p"]},
            "--context-parallel-size 2 with --cp-comm-type p2p: Megatron's own .* write --cp",
        ),
        (square, "131072 x 131072, 128 GiB .* add --no-create-attention-mask-in-dataloader"),
    ):
        _parse(**changes)
        with pytest.warns(UserWarning, match=message):
            refuse_flags()
    for fine in ({"seq_length": 8192}, {"create_attention_mask_in_dataloader": False}):
        _parse(**{**square, **fine})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            refuse_flags()


@pytest.mark.parametrize(
    "changes",
    [
        {"moe_expert_capacity_factor": 1.0},
        {"moe_router_load_balancing_type": "sinkhorn"},
        {"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]},
    ],
)
def test_experts_that_depend_on_a_ranks_tokens_warn(changes: dict[str, Any]) -> None:
    name = next(iter(changes)).replace("_", "-")
    _parse(num_experts=4, **changes)
    with pytest.warns(
        UserWarning, match=f"^--{name} .*: each .* routes its own tokens .* on --context-parallel-size"
    ):
        refuse_flags()
    others = {"moe_expert_capacity_factor": -1.0, "moe_router_load_balancing_type": ["aux_loss"]}
    for fine in ({"num_experts": 4, **others}, changes, {"num_experts": 4, "context_parallel_size": 1, **changes}):
        _parse(**fine)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            refuse_flags()


def test_turns_that_ranks_weigh_by_their_parts_warn() -> None:
    _parse(use_loss_scaling=True)
    with pytest.warns(UserWarning, match=r"^--use-loss-scaling: each .* so that losses depend on --context-parallel"):
        refuse_flags()
    for fine in ({"use_loss_scaling": False}, {"use_loss_scaling": True, "context_parallel_size": 1}):
        _parse(**fine)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            refuse_flags()


def test_the_version_of_a_tree(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected the root of a Megatron-LM checkout"):
        tree_version(tmp_path)
    info = tmp_path / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text("MAJOR = 0\nMINOR = 19\nPATCH = 1\nPRE_RELEASE = 'rc0'\n")
    assert tree_version(tmp_path) == (0, 19, 1)
    info.write_text("MAJOR = 0\n")
    with pytest.raises(ValueError, match="does not set MAJOR, MINOR and PATCH"):
        tree_version(tmp_path)


REGISTRY = Registry(None)


def test_a_model_that_the_flag_did_not_reach_is_told() -> None:
    """Where a script builds its own TransformerConfig, Megatron's own context parallelism would run unseen."""
    config = argparse.Namespace(context_parallel_size=2, cp_comm_type=None, hybrid_context_parallel=False)
    layer = argparse.Namespace(modules=list)

    def build(cp_comm_type: list[str]) -> list[warnings.WarningMessage]:
        _parse(cp_comm_type=cp_comm_type)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            choose_core_attention(REGISTRY, lambda *args: None, layer, config, None)
        return said

    (said,) = build(["burst"])
    assert "did not reach a model's TransformerConfig" in str(said.message)
    assert build(["p2p"]) == []


@pytest.mark.parametrize("kind", [None, "p2p"])
def test_a_model_that_did_not_ask_is_told_where_no_flags_were_read(kind: str | None) -> None:
    """A ring is made, and said to be, before there is any model."""
    config = argparse.Namespace(context_parallel_size=2, cp_comm_type=kind, hybrid_context_parallel=False)
    layer = argparse.Namespace(modules=list)
    with pytest.warns(UserWarning, match=f"not asked for by a model's TransformerConfig.*cp_comm_type={kind!r}"):
        choose_core_attention(REGISTRY, lambda *args: None, layer, config, None)


def test_a_misspelt_kind_is_refused_when_a_layer_is_built() -> None:
    config = argparse.Namespace(context_parallel_size=2, cp_comm_type="brust", hybrid_context_parallel=False)
    with pytest.raises(ValueError, match="cp_comm_type='brust' is not known: write cp_comm_type='burst'"):
        choose_core_attention(REGISTRY, lambda *args: None, argparse.Namespace(), config, None)


def test_attention_of_megatron_that_has_no_context_parallelism_says_what_to_write() -> None:
    config = argparse.Namespace(context_parallel_size=2, cp_comm_type="p2p")
    message = "context_parallel_size=2 with cp_comm_type='p2p' is not possible .* write cp_comm_type='burst', or"
    with pytest.raises(ValueError, match=message):
        refuse_whole_sequences(lambda *args: None, None, config)
    _parse(cp_comm_type=["p2p"])
    with pytest.raises(ValueError, match=r"--cp-comm-type p2p is not possible .* write --cp-comm-type burst, or"):
        refuse_whole_sequences(lambda *args: None, None, config)
