"""Every field of TransformerConfig is honoured or refused, and what is refused is named with the way out."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig

from burst_plugin.megatron.config import HONOURED, REFUSED, is_irrelevant, problems, unknown_fields

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize("config", [TransformerConfig, MLATransformerConfig])
def test_every_field_is_classified_once(config: type) -> None:
    names = [field.name for field in dataclasses.fields(config)]
    tables = {name: [name in HONOURED, name in REFUSED, is_irrelevant(name), name == "window_size"] for name in names}
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
        ("attention_dropout", 0.1),
        ("softmax_type", "learnable"),
        ("softmax_type", "off-by-one"),
        ("qk_clip", True),
        ("log_max_attention_logit", True),
        ("multi_latent_attention", True),
        ("experimental_attention_variant", "dsa"),
        ("attention_backend", AttnBackend.flash),
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
        ("hybrid_context_parallel", True),
        ("max_seqlen_per_dp_cp_rank", 4096),
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


def test_windows_and_cross_attention_are_refused_in_the_layers_that_have_them() -> None:
    (problem,) = problems(config(window_size=(7, 0)), windowed=True, attention_type="self")
    assert problem.startswith("window_size=(7, 0) is not supported")
    assert problems(config(window_size=(7, 0)), windowed=False, attention_type="self") == []
    assert "cross attention" in problems(config(), windowed=False, attention_type="cross")[0]


def test_a_field_of_a_newer_megatron_is_told_of_if_it_is_set() -> None:
    @dataclasses.dataclass
    class Newer:
        num_layers: int = 1
        attention_twist: float = 0.0

    assert unknown_fields(Newer()) == []
    assert unknown_fields(Newer(num_layers=3)) == []
    assert unknown_fields(Newer(attention_twist=0.5)) == ["attention_twist"]
