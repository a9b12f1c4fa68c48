"""Every field of TransformerConfig is honoured or refused, and what is refused is named with the way out."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.transformer_config import MLATransformerConfig

from burst_plugin import Strategy
from burst_plugin.megatron.flags.config import (
    HONOURED,
    REFUSED,
    is_irrelevant,
    problems,
    spreads_sequences,
    unknown_fields,
)
from burst_plugin.megatron.layers import core_attention
from burst_plugin.megatron.layers.core_attention import BurstCoreAttention
from burst_plugin.megatron.registry import Registry

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize("config", [TransformerConfig, MLATransformerConfig])
def test_every_field_is_classified_once(config: type) -> None:
    names = [field.name for field in dataclasses.fields(config)]
    tables = {name: [name in HONOURED, name in REFUSED, is_irrelevant(name)] for name in names}
    unclassified = [name for name, places in tables.items() if sum(places) != 1]
    assert not unclassified, f"decide what burst attention does with these: {unclassified}"


def test_tables_name_only_fields_that_exist() -> None:
    fields = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    assert set(HONOURED) | set(REFUSED) <= fields


def config(**changes: Any) -> TransformerConfig:
    return TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, attention_dropout=0.0, **changes)


def test_a_usual_config_has_no_problems() -> None:
    assert problems(config(), windowed=False, attention_type="self") == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("experimental_attention_variant", "gdn2"),
        ("attention_backend", AttnBackend.unfused),
        ("attention_backend", AttnBackend.local),
        ("fp8_dot_product_attention", True),
        ("fp8_multi_head_attention", True),
        ("use_kitchen_attention", True),
        ("enable_cuda_graph", True),
        ("external_cuda_graph", True),
        ("cuda_graph_impl", "local"),
        ("batch_invariant_mode", True),
        ("flash_decode", True),
        ("cache_mla_latents", True),
        ("use_inference_optimized_layers", True),
        ("transformer_impl", "inference_optimized"),
        ("overlap_moe_expert_parallel_comm", True),
        ("cpu_offloading", True),
        ("offload_modules", ["core_attn"]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(name: str, value: object) -> None:
    fields = {**dataclasses.asdict(MLATransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1))}
    usual = types.SimpleNamespace(**{**fields, **dataclasses.asdict(config()), "cache_mla_latents": False})
    assert problems(usual, windowed=False, attention_type="self") == []
    setattr(usual, name, value)
    (problem,) = problems(usual, windowed=False, attention_type="self")
    assert problem.startswith(f"{name}={value!r} is not supported: ")
    assert name in REFUSED


def test_every_refused_field_is_tried_above() -> None:
    mark = next(m for m in test_what_cannot_be_honoured_is_refused_by_name.pytestmark if m.name == "parametrize")
    assert {name for name, _ in mark.args[1]} == set(REFUSED)


def test_batches_that_newer_releases_cut_otherwise_are_refused() -> None:
    given = types.SimpleNamespace(**dataclasses.asdict(config()), cp_partition_mode="contiguous")
    (problem,) = problems(given, windowed=False, attention_type="self")
    assert problem.startswith("cp_partition_mode='contiguous' is not supported")
    given.cp_partition_mode = "zigzag"
    assert problems(given, windowed=False, attention_type="self") == []


def test_groups_of_newer_releases_are_refused() -> None:
    given = types.SimpleNamespace(**dataclasses.asdict(config()), dynamic_context_parallel=True)
    (problem,) = problems(given, windowed=False, attention_type="self")
    assert problem.startswith("dynamic_context_parallel=True is not supported: its groups change")
    assert spreads_sequences(given)


def test_a_kernel_that_newer_releases_choose_is_refused() -> None:
    given = types.SimpleNamespace(**dataclasses.asdict(config()), flash_attention_version=3)
    (problem,) = problems(given, windowed=False, attention_type="self")
    assert problem.startswith("flash_attention_version=3 is not supported: leave it out; kernels are chosen by")


def test_windows_are_refused_in_cross_attention() -> None:
    (problem,) = problems(config(window_size=(7, 0)), windowed=True, attention_type="cross")
    assert problem.startswith("window_size=(7, 0) is not supported in cross attention")
    assert problems(config(window_size=(7, 0)), windowed=False, attention_type="cross") == []


@pytest.mark.parametrize(
    "changes",
    [
        {"window_size": (7, 0)},
        {"window_size": (-1, -1)},
        {"softmax_type": "off-by-one"},
        {"softmax_type": "learnable"},
        {"attention_dropout": 0.1},
        {"hybrid_context_parallel": True},
        {"multi_latent_attention": True},
        {"attention_backend": None},
        {"attention_backend": AttnBackend.flash},
        {"attention_backend": AttnBackend.fused},
    ],
    ids=str,
)
def test_what_the_ring_can_do_has_no_problems(changes: dict[str, Any]) -> None:
    assert problems(_changed(changes), windowed="window_size" in changes, attention_type="self") == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"window_size": (4, -2)},
            "window_size=(4, -2) is not valid: use a pair (left, right), each 0 or more, or -1 for no bound",
        ),
        ({"softmax_type": "twisted"}, "softmax_type='twisted' is not valid: use vanilla, off-by-one or learnable"),
        (
            {"hybrid_context_parallel": True, "mtp_num_layers": 1},
            "mtp_num_layers=1 is not supported with hybrid_context_parallel: outside of attention it takes a rank's "
            "tokens for consecutive ones; use context_parallel_size",
        ),
        (
            {"hybrid_context_parallel": True, "is_hybrid_model": True},
            "is_hybrid_model=True is not supported with hybrid_context_parallel: outside of attention it takes a "
            "rank's tokens for consecutive ones; use context_parallel_size",
        ),
        (
            {"hybrid_context_parallel": True, "attention_dropout": 0.1},
            "attention_dropout=0.1 is not supported with hybrid_context_parallel, whose ranks draw different "
            "numbers: set it to 0",
        ),
    ],
    ids=str,
)
def test_values_that_mean_nothing_are_refused(changes: dict[str, Any], problem: str) -> None:
    assert problems(_changed(changes), windowed="window_size" in changes, attention_type="self") == [problem]


def _changed(changes: dict[str, Any]) -> types.SimpleNamespace:
    """A usual config with fields that need not pass Megatron's own checks."""
    return types.SimpleNamespace(**{**dataclasses.asdict(config()), **changes})


def test_a_field_of_a_newer_megatron_is_told_of_if_it_is_set() -> None:
    @dataclasses.dataclass
    class Newer:
        num_layers: int = 1
        attention_twist: float = 0.0
        mtp_num_layers: int = 0
        mtp_twist: float = 0.0  # a name that begins as others which have no bearing on attention
        moe_router_twist: float = 0.0

    assert unknown_fields(Newer()) == []
    assert unknown_fields(Newer(num_layers=3, mtp_num_layers=1)) == []
    for name in ("attention_twist", "mtp_twist", "moe_router_twist"):
        assert unknown_fields(Newer(**{name: 0.5})) == [name]


def test_unknown_options_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_attention, "unknown_fields", lambda config: ["num_layers"])
    with pytest.warns(UserWarning, match="does not know Megatron's option num_layers=2"):
        BurstCoreAttention(config(), 1, AttnMaskType.causal, "self", registry=Registry(None))


@dataclasses.dataclass
class OfAProvider(TransformerConfig):
    """A configuration with options of its own, such as model providers have."""

    window_size: Any = 512
    vocab_size: int = 0


def test_options_of_model_providers_are_not_taken_for_megatrons() -> None:
    provided = OfAProvider(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=128)
    assert unknown_fields(provided) == []
    (problem,) = problems(provided, windowed=True, attention_type="self")
    assert problem.startswith("window_size=512 is not valid: use a pair (left, right)")


def test_deterministic_mode_needs_deterministic_kernels() -> None:
    options = {"config": config(deterministic_mode=True), "layer_number": 1, "attn_mask_type": AttnMaskType.causal}
    with pytest.raises(ValueError, match=r"deterministic_mode=True needs torch\.use_deterministic_algorithms"):
        BurstCoreAttention(**options, attention_type="self", registry=Registry(None))
    BurstCoreAttention(**options, attention_type="self", registry=Registry(Strategy(deterministic=True)))
    torch.use_deterministic_algorithms(True)
    try:
        BurstCoreAttention(**options, attention_type="self", registry=Registry(None))
    finally:
        torch.use_deterministic_algorithms(False)
