"""What a plan says of towers of images: parameters, FLOPs and kept bytes are those of transformers' models."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from burst_plugin import Topology, VirtualRing
from burst_plugin.planning.cluster import Cluster
from burst_plugin.towers.rows import row_plan
from burst_plugin.towers.sharing import shared_out
from burst_plugin.training.memory import memory
from burst_plugin.training.model_shape import ModelShape, model_shape
from burst_plugin.training.setting import Code, Setting
from burst_plugin.training.step_time import step_seconds
from burst_plugin.training.tower_costs import (
    ENCODING,
    SENDING,
    TOWER,
    at_work,
    busiest_units,
    flops,
    imbalance,
    kept_by_layers,
    kept_bytes,
    sent_rows_bytes,
)
from burst_plugin.training.tower_families import TOWERS, Media, tower_of
from tests.support.live_bytes import LiveBytes

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.huggingface

CONFIGS = Path(__file__).parent / "configs"
# By file: parameters in billions, as the models' pages say.
PUBLISHED = {
    "qwen2_5_vl_7b": 8.29,
    "qwen3_vl_8b": 8.77,
    "qwen3_vl_30b_a3b": 31.1,
    "qwen3_5_35b_a3b": 35.1,
    "gemma_3_4b": 4.30,
    "mistral_small_3_1_24b": 24.0,
    "llava_1_5_7b": 7.06,
    "internvl3_8b": 7.94,
}
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
_TEXT = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4}
_TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
_QWEN = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4}
_QWEN |= {"out_hidden_size": 48}
_SIDES = {"image_size": 32, "patch_size": 4}
# By family, changes to the parts of a configuration that show every branch of what a tower may have.
VARIANTS: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("qwen2_5_vl", {}, {**_QWEN, "window_size": 16, "fullatt_block_indexes": [1]}, {}),
    ("qwen3_vl", {}, {**_QWEN, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}, {}),
    ("qwen3_vl_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, _QWEN, {}),
    ("qwen3_5", {}, {**_QWEN, "num_position_embeddings": 16, "spatial_merge_size": 1}, {}),
    ("qwen3_5_moe", {"num_experts": 4, "moe_intermediate_size": 32, "intermediate_size": None}, _QWEN, {}),
    ("gemma3", {}, {**_VISION, **_SIDES, "vision_use_head": True}, {"mm_tokens_per_image": 16}),
    ("gemma3", {}, {**_VISION, **_SIDES, "vision_use_head": False}, {"tie_word_embeddings": False}),
    ("mistral3", {}, {**_VISION, **_SIDES, "head_dim": 16}, {"multimodal_projector_bias": True}),
    ("mistral3", {}, {**_VISION, **_SIDES, "head_dim": 16}, {"vision_feature_layer": [-1, -2]}),
    ("llava", {}, {**_VISION, **_SIDES, "model_type": "clip_vision_model"}, {"vision_feature_layer": [0, 1]}),
    ("llava", {}, {**_VISION, **_SIDES, "model_type": "siglip_vision_model"}, {"multimodal_projector_bias": False}),
    ("llava", {"tie_word_embeddings": True}, {**_VISION, **_SIDES, "model_type": "pixtral", "head_dim": 16}, {}),
    ("llava_next", {}, {**_VISION, **_SIDES, "model_type": "clip_vision_model"}, {}),
    ("llava_onevision", {}, {**_VISION, **_SIDES, "model_type": "siglip_vision_model"}, {}),
    ("internvl", {}, {**_VISION, "attention_bias": True, "use_qk_norm": True, "norm_type": "rms_norm"}, {}),
    ("internvl", {}, {**_VISION, "use_mask_token": True, "use_mean_pooling": False}, {"tie_word_embeddings": False}),
    ("internvl", {}, {**_VISION, "use_absolute_position_embeddings": False}, {"downsample_ratio": 0.25}),
]


def read(config: Any, directory: Path) -> ModelShape:
    """The sizes that a plan reads from what transformers writes, with one image."""
    (directory / "config.json").write_text(config.to_json_string(use_diff=False))
    return with_images(model_shape(str(directory)))


def with_images(model: ModelShape, units: int = 1, rows: int = 16, **more: Any) -> ModelShape:
    tower = tower_of(model.config, model.hidden)
    return replace(model, media=Media(tower=tower, units=units, rows=tower.tokens or rows, **more))


def empty_model(config: Any) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForImageTextToText.from_config(copy.deepcopy(config))


def check_parameters(model: ModelShape, theirs: Any) -> None:
    language = theirs.model.language_model
    of_text = {id(x) for part in (language, theirs.lm_head) for x in part.parameters()}
    assert model.media is not None
    assert model.media.tower.parameters == sum(x.numel() for x in theirs.parameters() if id(x) not in of_text)
    assert model.parameters == sum(x.numel() for x in theirs.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name: str) -> None:
    model = with_images(model_shape(str(CONFIGS / f"{name}.json")))
    assert model.parameters / 1e9 == pytest.approx(PUBLISHED[name], abs=0.06)
    fields = json.loads((CONFIGS / f"{name}.json").read_text())
    check_parameters(model, empty_model(transformers.AutoConfig.for_model(**fields)))


@pytest.mark.parametrize(("kind", "text", "vision", "more"), VARIANTS)
def test_parameters_of_variants(
    kind: str, text: dict[str, Any], vision: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    config = tiny(kind, text, vision, more)
    check_parameters(read(config, tmp_path), empty_model(config))


@pytest.mark.parametrize("kind", [kind for kind in TOWERS if kind.startswith("qwen")])
def test_layers_are_counted_under_both_names_that_transformers_takes(kind: str) -> None:
    """The default of one, a tower of 27 or 32 layers, does not hide the other."""
    renamed = {"num_hidden_layers" if key == "depth" else key: value for key, value in _QWEN.items()}
    assert transformers.AutoConfig.for_model(kind, vision_config=renamed).vision_config.depth == _QWEN["depth"]
    towers = [tower_of({"model_type": kind, "vision_config": vision}, 48) for vision in (renamed, _QWEN)]
    assert towers[0] == towers[1]


def tiny(kind: str, text: dict[str, Any], vision: dict[str, Any], more: dict[str, Any]) -> Any:
    """A tiny configuration; its language model is of the family's usual kind."""
    usual = transformers.AutoConfig.for_model(kind).text_config.model_type
    sizes = {"model_type": usual, **_TEXT, **text}
    return transformers.AutoConfig.for_model(
        kind, text_config={key: x for key, x in sizes.items() if x is not None}, vision_config=vision, **more
    )


@pytest.mark.parametrize("kind", TOWERS)
def test_parameters_of_default_models(kind: str, tmp_path: Path) -> None:
    """A size that is left out is the one that transformers takes."""
    config = transformers.AutoConfig.for_model(kind)
    complete = read(config, tmp_path)
    check_parameters(complete, empty_model(config))
    fields = config.to_dict()
    vision = {"model_type": fields["vision_config"]["model_type"]}
    kept = {key: fields[key] for key in ("model_type", "tie_word_embeddings")}
    text = {"model_type": fields["text_config"]["model_type"]}
    short = transformers.AutoConfig.for_model(**{"vision_config": dict(vision), "text_config": dict(text), **kept})
    (tmp_path / "config.json").write_text(json.dumps({**kept, "vision_config": vision, "text_config": text}))
    found = with_images(model_shape(str(tmp_path)))
    check_parameters(found, empty_model(short))
    assert found == read(short, tmp_path)


# ------------------------------------------------------------------------------------------------- work and memory

_WIDE = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4}
_WIDE_QWEN = {**_QWEN, "hidden_size": 64, "intermediate_size": 192, "num_heads": 4}
# By family: the changes, and the rows and columns of patches of one image.
ENCODERS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int]]] = {
    "qwen2_5_vl": ({**_WIDE_QWEN, "window_size": 16, "fullatt_block_indexes": [1, 4]}, {}, (16, 8)),
    "qwen3_vl": ({**_WIDE_QWEN, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}, {}, (16, 8)),
    "qwen3_5": (_WIDE_QWEN, {}, (16, 8)),
    "gemma3": ({**_WIDE, **_SIDES, "vision_use_head": False}, {"mm_tokens_per_image": 16}, (8, 8)),
    "mistral3": ({**_WIDE, **_SIDES, "head_dim": 16}, {}, (8, 8)),
    "llava": ({**_WIDE, **_SIDES, "model_type": "clip_vision_model"}, {}, (8, 8)),
    "internvl": ({**_WIDE, "image_size": 32, "patch_size": 4, "attention_bias": True}, {}, (8, 8)),
    "internvl with norms": (
        {**_WIDE, "image_size": 32, "patch_size": 4, "norm_type": "rms_norm", "use_qk_norm": True},
        {},
        (8, 8),
    ),
}


class Encoding:
    """A tiny model of a family in bfloat16 with so many layers of the tower, and one image."""

    def __init__(self, kind: str, layers: int, directory: Path, attention: str = "eager") -> None:
        vision, more, (rows, columns) = ENCODERS[kind]
        kind = kind.split()[0]
        config = tiny(kind, {}, {**vision, "depth" if "depth" in vision else "num_hidden_layers": layers}, more)
        torch.manual_seed(0)
        self.model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).train()
        for module in self.model.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation = attention
        shape = read(config, directory)
        assert shape.media is not None
        tower = shape.media.tower
        self.shape = replace(shape, media=replace(shape.media, rows=rows * columns // tower.merged))
        assert self.shape.media is not None
        self.media: Media = self.shape.media
        if kind.startswith("qwen"):
            self.given = {"pixel_values": torch.randn(rows * columns, tower.pixels, dtype=torch.bfloat16)}
            self.given["image_grid_thw"] = torch.tensor([[1, rows, columns]])
        else:
            self.given = {"pixel_values": torch.randn(1, 3, 4 * rows, 4 * columns, dtype=torch.bfloat16)}
            if kind == "mistral3":
                self.given["image_sizes"] = torch.tensor([[4 * rows, 4 * columns]])

    def rows(self) -> torch.Tensor:
        """The features of the image, those for layers included."""
        out = self.model.model.get_image_features(**self.given)
        parts = out.pooler_output if isinstance(out.pooler_output, list | tuple) else [out.pooler_output]
        deep = getattr(out, "deepstack_features", None) or []
        layers = [torch.cat([*each]) if isinstance(each, list | tuple) else each for each in deep]
        return torch.cat([torch.cat([x.flatten(0, -2) for x in parts]), *layers], -1)


@pytest.mark.parametrize("kind", ENCODERS)
def test_features_and_flops_are_those_of_towers(kind: str, tmp_path: Path) -> None:
    encoding = Encoding(kind, 3, tmp_path)
    media, counter = encoding.media, FlopCounterMode(display=False)
    with counter, torch.no_grad():
        found = encoding.rows()
    assert found.shape == (media.rows, media.tower.width)
    # Angles of rotary positions are a product as well, of next to nothing.
    assert counter.get_total_flops() == pytest.approx(sum(flops(media)), rel=0.005)


class _Saving(torch.autograd.Function):
    """Attention that saves q, k, v, out and lse, as flash attention does."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out.zero_()

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        q, k, v, _, _ = ctx.saved_tensors
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def _saving(module: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    out: Any = _Saving.apply(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))  # type: ignore[no-untyped-call]
    return out, None


CODE = Code(plain_norms=True, mlp_kept=4, logit_bytes=12, sums_weights=True)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", ENCODERS)
def test_kept_bytes_are_those_of_towers(kind: str, recompute: str, tmp_path: Path) -> None:
    """Of some more layers, since what is before and behind them is little in models of full size."""
    transformers.AttentionInterface.register("flash_stand_in", _saving)
    setting, measured, planned = Setting(tokens=256, code=CODE, recompute=recompute), [], []
    for layers in (4, 10):
        encoding = Encoding(kind, layers, tmp_path, "flash_stand_in")
        if recompute == "full":
            encoding.model.gradient_checkpointing_enable({"use_reentrant": False})
        with LiveBytes(device="cpu") as live:
            rows = encoding.rows()
            measured.append(live.now)
        assert rows.requires_grad
        planned.append(kept_bytes(encoding.media, setting))
    assert planned[1] - planned[0] == pytest.approx(measured[1] - measured[0], rel=0.1)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", ENCODERS)
def test_the_peak_of_a_layer_is_that_of_towers(kind: str, recompute: str, tmp_path: Path) -> None:
    """The most that is alive in the backward pass is what layers keep, and the work of one of them."""
    transformers.AttentionInterface.register("flash_stand_in", _saving)
    setting = Setting(tokens=256, code=CODE, recompute=recompute)
    encoding = Encoding(kind, 6, tmp_path, "flash_stand_in")
    if recompute == "full":
        encoding.model.gradient_checkpointing_enable({"use_reentrant": False})
    for parameter in encoding.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveBytes(device="cpu") as live:
        encoding.rows().sum().backward()
    planned = kept_by_layers(encoding.media, setting) + sum(at_work(encoding.media, setting).values())
    planned = max(planned, kept_bytes(encoding.media, setting))
    assert live.peak == pytest.approx(planned, rel=0.1)


# ---------------------------------------------------------------------------------- what a plan makes of them

QWEN = with_images(model_shape(str(CONFIGS / "qwen3_vl_8b.json")), units=12, rows=1024)
CLUSTER = Cluster()


def test_the_busiest_rank_and_the_rows_that_are_sent() -> None:
    media = QWEN.media
    assert media is not None
    setting = Setting(tokens=2**17, code=CODE, context=8, inner=8, zero=3)
    assert busiest_units(media, setting) == max(map(len, shared_out([1.0] * 12, 8))) == 2
    assert imbalance(media, setting) == 2 / 1.5
    # Of tokens that are anywhere, by the plan of messages between virtual ranks.
    generator, rows = torch.Generator().manual_seed(0), media.tokens
    holders = torch.randint(0, 8, (rows,), generator=generator)
    encoders = torch.arange(rows) // (rows // 8)
    encoded, held = ([torch.nonzero(of == rank).flatten() for rank in range(8)] for of in (encoders, holders))
    states = VirtualRing(Topology(1, 8)).rank_states
    plans = [row_plan(state, encoded, held) for state in states]
    sent = sum(len(x) for plan in plans for peer, x in plan.sends.items() if peer != plan.rank_state.rank)
    assert sent_rows_bytes(media, setting) == pytest.approx(2 * 4 * 4096 * sent / 8, rel=0.01)


def test_towers_count_in_memory_and_time() -> None:
    setting = Setting(tokens=2**17, code=CODE, context=8, inner=8, zero=3)
    text, frozen = replace(QWEN, media=None), replace(QWEN, media=replace(QWEN.media, frozen=True))
    of_text, of_all, of_frozen = (memory(model, setting, CLUSTER).gpu for model in (text, QWEN, frozen))
    assert QWEN.media is not None
    parameters = QWEN.media.tower.parameters
    assert of_all["weights"] - of_text["weights"] == pytest.approx(2 * parameters / 8)
    assert of_all["optimizer"] - of_text["optimizer"] == pytest.approx(12 * parameters / 8)
    assert of_all["tower, kept"] > 0
    assert of_all["pixels of all images"] == 4 * 12 * 4096 * 1536
    assert of_frozen["weights"] == of_all["weights"]
    assert (of_frozen["optimizer"], of_frozen["tower, kept"]) == (of_text["optimizer"], 0)
    spent, spent_frozen, spent_text = (step_seconds(model, setting, CLUSTER) for model in (QWEN, frozen, text))
    assert spent[ENCODING] > 3 * spent_frozen[ENCODING] > 0
    assert spent[SENDING] == pytest.approx(2 * spent_frozen[SENDING])
    assert {ENCODING, SENDING}.isdisjoint(spent_text)
    more = replace(QWEN, media=replace(QWEN.media, units=16))  # which all ranks share evenly
    assert step_seconds(more, setting, CLUSTER)[ENCODING] == spent[ENCODING]


def test_the_towers_backward_pass_may_be_the_fullest_moment() -> None:
    """When nothing of the language model waits any more."""
    large = replace(QWEN, media=replace(QWEN.media, units=1, rows=2**17))
    setting = Setting(
        tokens=2**17, code=CODE, context=8, inner=8, zero=3, loss_chunk=1024, mlp_chunk=4096, offload=True
    )
    found = memory(large, setting, CLUSTER)
    assert found.fullest == TOWER
    assert found.gpu["attention, kept"] == 0
    assert found.gpu["at work"] == sum(found.at_work.values())
