"""Models with sliding windows: which layers have one, and what a plan says of their attention."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from burst_plugin.compute.shapes import hop_bytes_by_traffic
from burst_plugin.planning.buffer_count import most_bytes
from burst_plugin.planning.cluster import Cluster, Links
from burst_plugin.planning.price import pairs_in_window, pass_price
from burst_plugin.ring.choices import choose_moving_side
from burst_plugin.ring.routes import Attending, PassKey, RouteTable
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.masks import SlidingWindow
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Link, Topology
from burst_plugin.training.layer_memory import ring_shapes
from burst_plugin.training.memory import memory
from burst_plugin.training.model_shape import MODELS, ModelShape, model_shape
from burst_plugin.training.setting import Code, Setting
from burst_plugin.training.step_time import step_seconds
from burst_plugin.training.windows import layer_windows
from burst_plugin.types import DIRECTIONS

CODE = Code(plain_norms=False, mlp_kept=3, logit_bytes=10, sums_weights=False)
LLAMA = MODELS["llama3_8b"]
ALL_WINDOWED = replace(LLAMA, window=4096, windowed=32)
SIZES: dict[str, Any] = {
    "num_hidden_layers": 34,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
}
# A config.json, and which of its layers, counted from 0, have the window.
PATTERNS: dict[str, tuple[dict[str, Any], Callable[[int], bool]]] = {
    "mistral": ({"sliding_window": 4096}, lambda layer: True),
    "gemma2": ({"sliding_window": 4096}, lambda layer: layer % 2 == 0),
    "gpt_oss": ({"sliding_window": 4096}, lambda layer: layer % 2 == 0),
    "gemma3_text": ({"sliding_window": 4096}, lambda layer: layer % 6 != 5),
    "qwen2": (
        {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 10},
        lambda layer: layer >= 10,
    ),
    "qwen3": ({"sliding_window": 4096, "use_sliding_window": False}, lambda layer: False),
    "llama": ({"layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 31, "sliding_window": 4096},
              lambda layer: layer < 3),
}  # fmt: skip


def shape_of(name: str, tmp_path: Path) -> ModelShape:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": name} | PATTERNS[name][0]))
    return model_shape(str(tmp_path))


@pytest.mark.parametrize(("context", "inner", "ulysses"), [(1, 1, 1), (8, 8, 1), (8, 8, 4), (32, 8, 1)])
@pytest.mark.parametrize("name", PATTERNS)
def test_attention_takes_the_time_of_the_pairs_that_its_masks_leave(
    name: str, context: int, inner: int, ulysses: int, tmp_path: Path
) -> None:
    """At 512K tokens: 4 operations per pair, head and element of a head, 2.5 times as many backward."""
    tokens, cluster = 2**19, Cluster()
    setting = Setting(tokens=tokens, code=CODE, context=context, inner=inner, ulysses=ulysses)
    spent = step_seconds(shape_of(name, tmp_path), setting, cluster)
    within, all_before = (int(torch.arange(1, tokens + 1).clamp(max=reach).sum()) for reach in (4096, tokens))
    has_window = PATTERNS[name][1]
    pairs = sum(within if has_window(layer) else all_before for layer in range(SIZES["num_hidden_layers"]))
    expected = 4 * pairs * 32 * 128 / context / (cluster.peak_flops * cluster.attention_share)
    assert spent["attention, forward"] == pytest.approx(expected, rel=0.01)
    assert spent["attention, forward again"] == pytest.approx(expected, rel=0.01)
    assert spent["attention, backward"] == pytest.approx(2.5 * expected, rel=0.01)


def test_pairs_of_a_window_are_those_of_its_mask() -> None:
    for tokens, window in ((1, 1), (7, 3), (7, 7), (7, 9), (64, 17)):
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        assert pairs_in_window(tokens, window) == int(((distance >= 0) & (distance < window)).sum())


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    setting = Setting(tokens=4096, code=CODE, context=8, inner=8)
    assert step_seconds(ALL_WINDOWED, setting, Cluster()) == step_seconds(LLAMA, setting, Cluster())


# ----------------------------------------------------------------------------------------------------------- the ring


def test_the_ring_sends_the_rows_within_the_window() -> None:
    """In zigzag the next chunk's rank needs the last 4,095 keys of each of a rank's two chunks."""
    setting = Setting(tokens=2**19, code=CODE, context=8, inner=8)
    shapes, links = ring_shapes(LLAMA, setting), Links(1e9, 1e9)
    found = pass_price(Strategy(), "forward", Topology(1, 8), shapes, 1.0, links, window=4096)
    assert found.link_s[Link.INTRA] == pytest.approx(2 * 4095 * 2 * 8 * 128 * 2 / 1e9)
    causal = pass_price(Strategy(), "forward", Topology(1, 8), shapes, 1.0, links)
    assert causal.link_s[Link.INTRA] == pytest.approx(7 * 2**16 * 2 * 8 * 128 * 2 / 1e9)


@pytest.mark.parametrize("window", [1000, 9000])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_part_of_a_large_cluster_stands_for_all_of_it(direction: Any, window: int) -> None:
    topology = Topology(20, 4)
    setting = Setting(tokens=80 * 2**11, code=CODE, context=80, inner=4)
    shapes, links = ring_shapes(LLAMA, setting), Links(1e10, 1e9)
    part = pass_price(Strategy(), direction, topology, shapes, 0.02, links, window=window)
    with mock.patch("burst_plugin.planning.price.FEW_RANKS", topology.ranks):
        of_all = pass_price(Strategy(), direction, topology, shapes, 0.02, links, window=window)
    assert part.time_s == pytest.approx(of_all.time_s, rel=1e-6)
    assert part.compute_s == pytest.approx(of_all.compute_s, rel=1e-6)
    assert part.link_s == pytest.approx(of_all.link_s, rel=1e-6)


def test_a_window_over_very_many_ranks_has_a_price() -> None:
    setting = Setting(tokens=2**19, code=CODE, context=512, inner=8)
    shapes = ring_shapes(LLAMA, setting)
    found = pass_price(Strategy(), "forward", Topology(64, 8), shapes, 1.0, Links(1e12, 1e12), window=2**18)
    assert found.compute_s == pytest.approx(512 * pairs_in_window(2**19, 2**18) / 2**38, rel=1e-3)


def test_buffers_are_those_of_the_rows_that_are_sent() -> None:
    setting = Setting(tokens=2**19, code=CODE, context=8, inner=8)
    shapes, tokens = ring_shapes(LLAMA, setting), Tokens(2**19)
    table, needed = RouteTable(Topology(1, 8), Strategy()), []
    for direction in DIRECTIONS:
        moving = choose_moving_side(Strategy(), direction, shapes)
        operands, results = hop_bytes_by_traffic(shapes, direction, moving)
        schedule = table.schedule(PassKey(Attending(tokens, tokens, SlidingWindow(4095, 0)), moving, results > 0))
        needed.append(most_bytes(schedule, operands, results))
    found = memory(ALL_WINDOWED, setting, Cluster()).gpu
    assert found["ring buffers"] == pytest.approx(max(needed), rel=0.1)
    assert "ring buffers, half blocks sent on" not in found
    some = memory(replace(ALL_WINDOWED, windowed=31), setting, Cluster()).gpu
    assert some == memory(LLAMA, setting, Cluster()).gpu, "the layer without a window needs as much as all"


@pytest.mark.parametrize(
    ("tokens", "window", "ranks"), [(4096, 1, 1), (4096, 300, 4), (4096, 2000, 4), (4096, 5000, 2)]
)
def test_what_is_kept_of_a_window_is_not_computed_again(tokens: int, window: int, ranks: int) -> None:
    """Pairs counted query by query, of the first queries, on the rank of a zigzag layout that has most of them."""
    setting = Setting(tokens=tokens, code=CODE, context=ranks, inner=ranks, keep=0.4)
    pairs = torch.arange(1, tokens + 1).clamp(max=window).double()
    again = pairs * (torch.arange(tokens) < 0.6 * tokens)
    most = [
        max(float(chunks[rank].sum() + chunks[-1 - rank].sum()) for rank in range(ranks))
        for chunks in (again.chunk(2 * ranks), pairs.chunk(2 * ranks))
    ]
    assert setting.again_share(window) == pytest.approx(most[0] / most[1], rel=0.01)


# ---------------------------------------------------------------------------------------------------------- the model


@pytest.mark.huggingface
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"sliding_window": 77},
        {"sliding_window": 77, "use_sliding_window": True},
        {"sliding_window": 77, "use_sliding_window": True, "max_window_layers": 3},
        {"sliding_window": 77, "sliding_window_pattern": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "family",
    [
        *("mistral", "ministral", "mixtral", "phi3", "phimoe", "starcoder2", "gemma2", "gemma3_text", "gpt_oss"),
        *(
            "cohere2",
            "olmo3",
            "exaone4",
            "qwen2",
            "qwen2_moe",
            "qwen2_vl_text",
            "qwen2_5_vl_text",
            "qwen3",
            "qwen3_moe",
        ),
    ],
)
def test_the_layers_with_a_window_are_those_of_transformers(family: str, more: dict[str, Any]) -> None:
    from transformers import AutoConfig

    config = {"num_hidden_layers": 13, **more}
    theirs = AutoConfig.for_model(family, **config)
    window, types = getattr(theirs, "sliding_window", None), getattr(theirs, "layer_types", None)
    count = (13 if window else 0) if types is None else types.count("sliding_attention")
    windows = layer_windows(config | {"model_type": family}, 13, "config.json")
    found = max(windows), sum(map(bool, windows))
    assert found == ((window, count) if count else (0, 0))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "new", "sliding_window": 8}, "model_type 'new' is not known; add \"layer_types\" to it"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window=-1, expected a positive whole number"),
        ({"model_type": "mistral", "sliding_window": "4k"}, "sliding_window='4k', expected a positive whole number"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window=None, expected a positive whole number"),
        ({"model_type": "cohere2", "sliding_window_pattern": [1]}, "write whole numbers for sliding_window_pattern"),
        ({"attention_chunk_size": 8192}, "describes a model with attention in chunks"),
    ],
)
def test_a_window_that_is_not_understood_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | config))
    with pytest.raises(ValueError, match=message):
        model_shape(str(tmp_path))
