"""Plans of models with multi-head latent attention: parameters of transformers' models, memory and time of a step.

Memory is held to steps and rings that hold no values; time to formulas, and to the products that a ring computes.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from burst_plugin import ContextParallel, Strategy, Topology, VirtualRing, sparse
from burst_plugin.compute.shapes import hop_bytes
from burst_plugin.huggingface.chunked_modules import chunk_modules
from burst_plugin.planning.cluster import Cluster
from burst_plugin.strategy import AUTO
from burst_plugin.training.latent_families import LATENT_FAMILIES, LatentSizes
from burst_plugin.training.layer_memory import moments, ring_shapes, saved_by_layer
from burst_plugin.training.memory import memory
from burst_plugin.training.model_shape import ModelShape, model_shape, shape_of
from burst_plugin.training.setting import Code, Setting, latents_sent, strategy_options
from burst_plugin.training.step_time import step_seconds
from burst_plugin.training.training_plan import Goal, Space, plans_that_fit, settings
from tests.support.live_bytes import LiveBytes
from tests.support.measured_step import activation_bytes, measured_code
from tests.support.ring_memory import backward_bytes

transformers = pytest.importorskip("transformers")
families = pytest.importorskip("tests.support.families")

pytestmark = pytest.mark.huggingface

CONFIGS = Path(__file__).parent / "configs"
# Billions of parameters, of which none predict further tokens, and how many layers have no experts.
PUBLISHED = {
    "deepseek_v2": (235.7, 1),
    "deepseek_v2_lite": (15.7, 1),
    "deepseek_v3": (671.0, 3),
    "kimi_k2": (1026.4, 1),
    "glm_4_7_flash": (29.9, 1),
    "minicpm3_4b": (4.07, 62),
    "youtu_llm_2b": (1.96, 32),
}
BIASES = {"attention_bias": True, "mlp_bias": True}
CODE = Code(plain_norms=False, mlp_kept=3, logit_bytes=10, sums_weights=False, workspace=0)
WAITS = ("inputs of layers", "attention, kept", "at work")


def counted(config: Any) -> int:
    """The parameters of transformers' own model."""
    with torch.device("meta"):
        if config.model_type == "mistral4":
            model = transformers.models.mistral4.Mistral4ForCausalLM(config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return sum(parameter.numel() for parameter in model.parameters())


def read(config: Any, directory: Path, **options: Any) -> ModelShape:
    """The sizes that a plan reads from what transformers writes."""
    (directory / "config.json").write_text(config.to_json_string(**options))
    return model_shape(str(directory))


def published(name: str) -> ModelShape:
    return model_shape(str(CONFIGS / f"{name}.json"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_published_models(name: str) -> None:
    shape = published(name)
    fields = json.loads((CONFIGS / f"{name}.json").read_text())
    assert shape.parameters == counted(transformers.AutoConfig.for_model(**fields))
    billions, without_experts = PUBLISHED[name]
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    assert sum(kind.layers for kind in shape.by_kind if not kind.experts) == without_experts


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}, BIASES], ids=["tiny", "whole queries", "biases"])
@pytest.mark.parametrize("kind", sorted(set(families.mla_families()) & set(LATENT_FAMILIES)))
def test_parameters_are_those_of_tiny_models(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    tiny = families.mla_families()[kind]
    if kind == "axk1" and "q_lora_rank" in changes:  # which it always has
        changes = {"q_lora_rank": 24}
    config = type(tiny)(**{**tiny.to_dict(), **changes})
    assert read(config, tmp_path, use_diff=False).parameters == counted(config)


@pytest.mark.parametrize("whole", [True, False], ids=["all keys", "keys that are not at their defaults"])
@pytest.mark.parametrize("kind", LATENT_FAMILIES)
def test_parameters_are_those_of_default_models(kind: str, whole: bool, tmp_path: Path) -> None:
    """A key that is left out means what transformers takes it for."""
    more = {"num_experts_per_tok": 6} if kind == "deepseek_v2" else {}  # which has no default
    config = transformers.AutoConfig.for_model(kind, **more)
    shape = read(config, tmp_path, use_diff=False)
    assert shape.parameters == counted(config)
    sizes = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", *more)
    if not whole:
        left_out = json.loads((tmp_path / "config.json").read_text())
        text = json.dumps({key: left_out[key] for key in (*sizes, "vocab_size")})
        (tmp_path / "config.json").write_text(text)
        assert model_shape(str(tmp_path)) == shape


def test_layers_with_experts_may_be_listed(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("glm4_moe_lite", num_hidden_layers=3)
    config.mlp_layer_types = ["sparse", "dense", "sparse"]
    assert read(config, tmp_path).parameters == counted(config)
    config.mlp_layer_types = ["sparse", "dense"]
    with pytest.raises(ValueError, match='expected a list with "dense" or "sparse" for each of 3 layers'):
        read(config, tmp_path)


KIMI: dict[str, Any] = {"model_type": "kimi_linear", "num_hidden_layers": 8, "hidden_size": 256, "vocab_size": 128}
KIMI |= {"intermediate_size": 512, "num_attention_heads": 4, "num_experts": 16, "moe_intermediate_size": 64}
KIMI |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
SECTION = {
    "full_attn_layers": [4, 8],
    "kda_layers": [1, 2, 3, 5, 6, 7],
    "head_dim": 32,
    "num_heads": 4,
    "short_conv_kernel_size": 4,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"linear_attn_config": {}},
        {"linear_attn_config": {"full_attn_layers": [4], "head_dim": 32}},
        {"linear_attn_config": {"kda_layers": 4}},
        {"linear_attn_config": {**SECTION, "full_attn_layers": 4}, "layer_types": ["full_attention"] * 8},
        {"layers_block_type": ["full_attention"] * 8},
        {"layer_types": ["mamba", "attention"] * 4},
        {"mlp_layer_types": ["dense", "sparse"] * 4, "first_k_dense_replace": None},
        {"first_k_dense_replace": 9},
        {"num_shared_experts": 0, "shared_expert_intermediate_size": 32},
        {"n_routed_experts": 4},
        {"moe_layer_freq": 2},
        {"moe_layer_freq": "2", "mlp_only_layers": [5], "decoder_sparse_step": 2},
        {"moe_layer_freq": [0], "moe_layer_interval": 2, "moe_layer_start_index": 3, "moe_layer_end_index": 5},
    ],
    ids=str,
)
def test_a_file_of_kimi_linear_means_what_transformers_takes_it_for(changes: dict[str, Any]) -> None:
    """Which ignores what other families say, one list of layers alone, and lists beside `layer_types`."""
    config = {**KIMI, "linear_attn_config": SECTION, **changes}
    theirs = transformers.KimiLinearConfig.from_dict(copy.deepcopy(config))
    assert shape_of(config, "config.json").parameters == counted(theirs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_attn_config": "x"}, ": linear_attn_config is 'x', expected an object with num_heads and head_dim"),
        (
            {"linear_attn_config": None},
            ": linear_attn_config is None, expected an object with num_heads and head_dim",
        ),
        ({"head_dim": "128"}, " has linear_attn_config.head_dim='128', expected a positive whole number"),
        ({"head_dim": None}, " has linear_attn_config.head_dim=None, expected a positive whole number"),
        ({"num_heads": -1}, " has linear_attn_config.num_heads=-1, expected a positive whole number"),
        ({"num_heads": 16.0}, " has linear_attn_config.num_heads=16.0, expected a positive whole number"),
        (
            {"short_conv_kernel_size": 0},
            " has linear_attn_config.short_conv_kernel_size=0, expected a positive whole number",
        ),
        ({"full_attn_layers": 4}, ": linear_attn_config.full_attn_layers is 4, expected a list of layers"),
        ({"kda_layers": None}, ": linear_attn_config.kda_layers is None, expected a list of layers"),
        ({"full_attn_layers": [4, 9]}, ": linear_attn_config.full_attn_layers has 9, expected layers from 1 to 8"),
        ({"full_attn_layers": ["4"]}, ": linear_attn_config.full_attn_layers has '4', expected layers from 1 to 8"),
        (
            {"full_attn_layers": [1, 4, 8]},
            ": linear_attn_config.kda_layers has 1, as full_attn_layers has; keep it in one of them",
        ),
        (
            {"full_attn_layers": [8]},
            ": linear_attn_config has layer 4 of 8 in neither list; add it to full_attn_layers or kda_layers",
        ),
        (
            {"layer_types": ["kda"] * 8},
            ": layers of the type kda are not known; write full_attention or linear_attention in layer_types",
        ),
        ({"layer_types": []}, ": layer_types is [], expected a list with the kind of each of 8 layers"),
        ({"num_experts": None}, " has num_experts=None, expected a positive whole number"),
        ({"n_shared_experts": None}, " has n_shared_experts=None, expected a whole number, 0 or more"),
        ({"num_experts_per_token": "8"}, " has num_experts_per_token='8', expected a positive whole number"),
        ({"moe_intermediate_size": None}, " has moe_intermediate_size=None, expected a positive whole number"),
        ({"first_k_dense_replace": None}, " has first_k_dense_replace=None, expected a whole number, 0 or more"),
        ({"v_head_dim": None}, " has v_head_dim=None, expected a positive whole number"),
    ],
)
def test_what_is_odd_in_a_file_of_kimi_linear_is_named(changes: dict[str, Any], message: str) -> None:
    section = SECTION | {key: value for key, value in changes.items() if key in SECTION}
    others = {key: value for key, value in changes.items() if key not in SECTION}
    with pytest.raises(ValueError, match=f"^config.json{re.escape(message)}$"):
        shape_of({**KIMI, "linear_attn_config": section, **others}, "config.json")


@pytest.mark.parametrize("kind", sorted(set(families.mla_families()) & set(LATENT_FAMILIES)))
def test_parts_run_in_chunks_where_a_run_takes_that(kind: str, tmp_path: Path) -> None:
    config = families.mla_families()[kind]
    shape, taken = read(config, tmp_path), []
    for part, option in (("mlp", "mlp_chunk"), ("heads", "head_chunk")):
        try:
            chunk_modules(transformers.AutoModelForCausalLM.from_config(config), Strategy(**{option: 2}))
        except ValueError:
            continue
        taken.append(part)
    assert [part for part in shape.in_chunks if part != "mlp" or not shape.has_experts] == taken


# -------------------------------------------------------------------------------------------------------- the memory

_STEP = {
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize("plain_norms", [True, False])
@pytest.mark.parametrize("recompute", ["full", "none"])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("youtu", {}),
        ("youtu", {"intermediate_size": 64}),
        ("youtu", {"intermediate_size": 64, "q_lora_rank": None}),
        ("youtu", {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 32, "v_head_dim": 32}),
        ("minicpm3", {"intermediate_size": 64, "num_attention_heads": 16}),
    ],
)
def test_a_step_takes_what_the_plan_says(
    kind: str, changes: dict[str, Any], recompute: str, plain_norms: bool, tmp_path: Path
) -> None:
    """On one rank, where keys and values of all heads are made of latents before attention."""
    fields = {**_STEP, **changes}
    fields["num_key_value_heads"] = fields["num_attention_heads"]
    config = transformers.AutoConfig.for_model(kind, **fields)
    shape = read(config, tmp_path, use_diff=False)
    code = replace(measured_code(), plain_norms=plain_norms)
    setting = Setting(tokens=4096, code=code, recompute=recompute)
    found = memory(shape, setting, Cluster())
    expected, measured = (
        sum(found.gpu[name] for name in WAITS),
        activation_bytes(shape, setting, config=config).peak,
    )
    print(f"{kind} {changes} {recompute} plain {plain_norms}: {expected / measured:.4f} {found.fullest}")
    assert expected == pytest.approx(measured, rel=0.01 if recompute == "full" else 0.07)


def sized(heads: int, latent: LatentSizes, **changes: Any) -> ModelShape:
    return ModelShape(
        name="tiny",
        layers=8,
        hidden=512,
        ffn=1536,
        heads=heads,
        kv_heads=heads,
        head_dim=latent.qk_dim,
        vocab=256,
        latent=latent,
        **changes,
    )


@pytest.mark.parametrize(
    ("heads", "tokens", "ranks", "rank", "own", "shared"),
    [
        (16, 1024, 2, 256, 64, 32),
        (16, 1024, 4, 256, 64, 32),
        (16, 1024, 8, 256, 64, 32),
        (4, 4096, 4, 512, 64, 64),
        (16, 4096, 8, 128, 64, 64),
        (32, 2048, 3, 128, 64, 64),
    ],
)
def test_a_rank_of_a_ring_holds_what_the_plan_says(
    heads: int, tokens: int, ranks: int, rank: int, own: int, shared: int
) -> None:
    """In a backward pass in which latents travel. Values have the dim of keys, so that kernels pad nothing."""
    latent = LatentSizes(q_rank=0, rank=rank, own_dim=own, shared_dim=shared, value_dim=own + shared)
    shape = sized(heads, latent)
    setting = Setting(tokens=tokens * ranks, context=ranks, inner=ranks, code=CODE)
    measured = backward_bytes(Topology(1, ranks), ring_shapes(shape, setting)).peak
    given = ("normalized input", "gradient past the MLP", "gradient of out", "cos and sin of positions", "q")
    given += ("latents, and before their norms",)
    attention = moments(shape, setting)["attention, backward"]
    mine = sum(nbytes for name, nbytes in attention.items() if name not in given)
    mine += memory(shape, setting, Cluster()).gpu["ring buffers"]
    print(f"{heads} heads, {tokens} tokens, {ranks} ranks, latents of {rank}: {mine / measured:.4f}")
    assert mine == pytest.approx(measured, rel=0.12)


def test_layers_keep_latents_in_place_of_keys_and_values() -> None:
    """DeepSeek V3: 128 heads of 192 and 128 numbers, or 512 + 64 of all heads."""
    shape, tokens = published("deepseek_v3").by_kind[1], 4096
    setting = Setting(tokens=8 * tokens, context=8, inner=8, recompute="none", code=CODE)
    sent = saved_by_layer(shape, setting, whole_mlp=False)
    expanded = saved_by_layer(shape, replace(setting, latents="expand"), whole_mlp=False)
    assert sum(expanded.values()) - sum(sent.values()) == 2 * tokens * 128 * (192 + 128)
    assert sent["out and lse"] == tokens * 128 * (2 * 128 + 4)
    assert sent["q"] == tokens * 128 * 192 * 2
    # before and after norms of latents of queries, keys and values; shared keys before and after their rotation
    assert sent["latents, and before their norms"] == tokens * 2 * (2 * (1536 + 512) + 2 * 64)


# ---------------------------------------------------------------------------------------------------------- the time


class _Products(TorchDispatchMode):
    """Counts the operations of products of two matrices of which one has `rank` rows or columns."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank, self.flops = rank, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            (rows, inner), columns = args[0].shape, args[1].shape[1]
            if self._rank in (rows, inner, columns):
                self.flops += 2 * rows * inner * columns
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_ring_computes_the_products_that_the_plan_counts(ranks: int) -> None:
    """Forward an expansion for every step of the ring, and backward one, and two products of gradients."""
    latent = LatentSizes(q_rank=0, rank=24, own_dim=8, shared_dim=4, value_dim=6)
    shape, tokens = sized(2, latent), 32 * ranks
    cluster = Cluster(peak_flops=1e9, matmul_share=1.0, attention_share=1.0)
    setting = Setting(tokens=tokens, context=ranks, inner=ranks, recompute="none", code=CODE)
    spent = step_seconds(shape, setting, cluster)["attention, keys and values made of latents on every rank"]

    def drawn(heads: int, dim: int) -> Tensor:
        return torch.randn(1, tokens, heads, dim, requires_grad=True)

    ring, q = VirtualRing(Topology(1, ranks), Strategy(schedule="flat_ring")), drawn(2, 12)
    weight = torch.randn(2 * (8 + 6), 24, requires_grad=True)
    with _Products(24) as products:
        out, _ = ring.latent_attention(q, drawn(1, 24), drawn(1, 4), weight=weight)
        out.sum().backward()
    print(f"{ranks} ranks: {products.flops / ranks} operations, planned {spent * 1e9 / shape.layers}")
    assert spent * 1e9 / shape.layers == pytest.approx(products.flops / ranks, rel=0.02)


def test_time_follows_the_formulas() -> None:
    """Links are so slow that the ring takes what its bytes take; the work is worked out by hand."""
    latent = LatentSizes(q_rank=16, rank=32, own_dim=8, shared_dim=8, value_dim=4)
    shape = sized(8, latent)
    cluster = Cluster(
        peak_flops=1e12, matmul_share=1.0, attention_share=0.5, intra_bytes_per_s=1e6, inter_bytes_per_s=1e6
    )
    sends = Setting(tokens=4096, context=4, inner=4, recompute="none", code=CODE)
    for setting, per_token in ((sends, (32 + 8) * 2), (replace(sends, latents="expand"), 8 * (16 + 4) * 2)):
        spent = step_seconds(shape, setting, cluster)
        assert hop_bytes(ring_shapes(shape, setting), "forward", "kv") == 1024 * per_token
        pairs = 4096**2 / 2 / 4 * 8
        assert spent["attention, forward"] == pytest.approx(8 * 2 * pairs * (16 + 4) / 0.5e12)
        assert spent["attention, backward"] == pytest.approx(8 * 2 * pairs * (3 * 16 + 2 * 4) / 0.5e12)
        is_sent = setting is sends
        up = 32 * 8 * (8 + 4)
        weights = 512 * (16 + 32 + 8) + 16 * 8 * 16 + 8 * 4 * 512 + (0 if is_sent else up)
        assert spent["linear layers"] == pytest.approx(8 * 3 * 2 * 1024 * (weights + 3 * 512 * 1536) / 1e12)
        made = spent.get("attention, keys and values made of latents on every rank", 0.0)
        assert made == pytest.approx(8 * 2 * 4096 * up * (1 + 1 + 2 * 13 / 16) / 1e12 if is_sent else 0.0)
        forward = 3 * hop_bytes(ring_shapes(shape, setting), "forward", "kv") / 1e6
        backward = 3 * min(hop_bytes(ring_shapes(shape, setting), "backward", side) for side in ("q", "kv")) / 1e6
        waited = spent["ring and exchange of heads, not hidden"]
        assert forward + 0.8 * backward < waited / 8 < 1.2 * (forward + 4 / 3 * backward)


# -------------------------------------------------------------------------------------------------------- the choice

SHARDED = Space(code=CODE, zeros=(3,), tensor=False, pipeline=False, recompute=("full",), divides=False)


def test_latents_are_sent_where_links_are_slow_and_not_where_they_are_fast() -> None:
    model, chosen = published("deepseek_v2_lite"), {}
    for rate in (1e9, 1e12):
        cluster = Cluster(nodes=8, gpus_per_node=2, inter_bytes_per_s=rate, intra_bytes_per_s=rate)
        best = plans_that_fit(Goal(model=model, tokens=2**19, cluster=cluster, space=SHARDED))[0].setting
        chosen[rate] = latents_sent(model, best) is not None
        ways = [replace(best, ulysses=1, parts=1, latents=way) for way in (AUTO, "expand")]
        both = [sum(step_seconds(model, way, cluster).values()) for way in ways]
        assert (both[0] < both[1]) == chosen[rate]
    assert chosen == {1e9: True, 1e12: False}


def test_both_ways_are_tried_and_parts_of_heads_say_that_keys_and_values_are_sent() -> None:
    goal = Goal(model=published("minicpm3_4b"), tokens=2**16, cluster=Cluster(gpus_per_node=4), space=SHARDED)
    tried = {(each.context, each.ulysses, each.parts, each.latents) for each in settings(goal)}
    assert {latents for context, ulysses, parts, latents in tried if (context, ulysses, parts) == (4, 1, 1)} == {
        AUTO,
        "expand",
    }
    assert {latents for _, ulysses, parts, latents in tried if (ulysses, parts > 1) == (1, True)} == {"expand"}
    assert {latents for context, ulysses, _, latents in tried if context == 1 or ulysses > 1} == {AUTO}


def test_options_say_what_is_not_usual() -> None:
    model = published("minicpm3_4b")
    usual = Setting(tokens=2**16, context=4, inner=4, code=CODE)
    assert strategy_options(model, usual) == {}
    assert strategy_options(model, replace(usual, latents="expand")) == {"latents": "expand"}
    assert latents_sent(model, usual) == model.latent
    for changes in ({"ulysses": 2}, {"parts": 4}, {"head_chunks": 2}, {"context": 1}, {"latents": "expand"}):
        assert latents_sent(model, replace(usual, **changes)) is None  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ selected keys


def indexed(tokens: int = 2**18) -> tuple[ModelShape, Setting]:
    """DeepSeek V3.2, and 8 ranks that train it."""
    config = transformers.AutoConfig.for_model("deepseek_v32").to_dict()
    return shape_of(config, "deepseek_v32"), Setting(tokens=tokens, context=8, inner=8, code=CODE)


def test_attention_takes_the_pairs_that_are_selected_and_an_indexer_scores_all() -> None:
    """Links are fast, so that attention takes what its operations take."""
    shape, setting = indexed()
    cluster = Cluster(peak_flops=1e15, attention_share=0.5, intra_bytes_per_s=1e15)
    spent = step_seconds(shape, setting, cluster)
    pairs, selected = setting.tokens**2 / 2, setting.tokens * 2048
    rate = 8 * 0.5e15
    assert spent["attention, forward"] == pytest.approx(61 * 2 * selected * 128 * (192 + 128) / rate, rel=0.02)
    assert spent["attention, scores of indexers"] == pytest.approx(61 * 2 * 2 * pairs * 64 * 128 / rate, rel=0.01)
    dense = step_seconds(shape_of({**shape.config, "model_type": "deepseek_v3"}, "v3"), setting, cluster)
    assert dense["attention, forward"] == pytest.approx(spent["attention, forward"] * pairs / selected, rel=0.02)


def test_layers_that_take_keys_of_others_have_no_indexer() -> None:
    config = transformers.AutoConfig.for_model("glm_moe_dsa")
    config.indexer_types = ["full", "shared", "shared"] * 26
    shape = shape_of(config.to_dict(), "glm_moe_dsa")
    assert shape.parameters == counted(config)
    full, cluster = indexed()[1], Cluster()
    every = shape_of({**config.to_dict(), "indexer_types": ["full"] * 78}, "glm_moe_dsa")
    both = [step_seconds(each, full, cluster)["attention, scores of indexers"] for each in (shape, every)]
    assert both[1] == pytest.approx(3 * both[0])


@pytest.mark.parametrize(
    "fields",
    [
        {"index_topk_freq": 4},
        {"index_topk_freq": 3, "index_skip_topk_offset": 5},
        {"index_topk_freq": 0},
        {"index_topk_pattern": "FSSF" * 2, "index_topk_freq": 2},
        {"index_topk_pattern": ["full", "shared"] * 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["glm_moe_dsa", "deepseek_v32"])
def test_layers_with_an_indexer_are_those_of_transformers(kind: str, fields: dict[str, Any]) -> None:
    """Which reads these keys of GLM-5 alone; that all layers have one is the default."""
    sizes = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    config = {"model_type": kind, "vocab_size": 128, **sizes, **fields}
    assert shape_of(config, kind).parameters == counted(transformers.AutoConfig.for_model(**config))


@pytest.mark.parametrize(
    ("key", "kinds"), [("indexer_types", 4), ("index_topk_pattern", "FS"), ("indexer_types", ["full", "half"])]
)
def test_kinds_of_indexers_that_do_not_fit_are_refused(key: str, kinds: Any) -> None:
    config = transformers.AutoConfig.for_model("glm_moe_dsa", num_hidden_layers=2).to_dict()
    expected = f'{key} is {kinds!r}, expected a list with "full" or "shared" for 3 layers'
    with pytest.raises(ValueError, match=re.escape(expected)):
        shape_of({**config, "num_hidden_layers": 3, "mlp_layer_types": None, "indexer_types": None, key: kinds}, "x")


def test_a_plan_counts_lists_of_keys_and_leaves_heads_where_they_are() -> None:
    shape, setting = indexed()
    kind = shape.by_kind[-1]
    lists = 4 * 2048 * setting.local_tokens
    assert saved_by_layer(kind, setting, whole_mlp=False)["selected keys"] == lists
    assert moments(shape, setting)["indexer, forward"]["best keys"] == 3 * lists
    short = replace(setting, tokens=4096)
    assert saved_by_layer(kind, replace(short, tokens=1024), whole_mlp=False)["selected keys"] == 4 * 1024 * 128
    goal = Goal(model=shape, tokens=2**18, cluster=Cluster(nodes=64, gpu_gib=140), space=SHARDED)
    assert {each.ulysses for each in settings(goal)} == {1}


def test_choosing_keys_takes_what_the_plan_says() -> None:
    """In 8-byte numbers the best keys so far, and the list that is made of them; chunks take up to 100 MB more."""
    q, k, weights = torch.randn(1, 8192, 2, 16), torch.randn(1, 8192, 16), torch.randn(1, 8192, 2)
    with LiveBytes() as live:
        sparse.select_keys(q, k, weights, 2048, ContextParallel(None))
    assert 0 < live.peak - 3 * 4 * 2048 * 8192 < 1.1e8
