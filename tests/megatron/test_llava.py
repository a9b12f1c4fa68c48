"""LLaVA-like models of Megatron over a ring, against one rank: losses, and gradients of text, tower and projector."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding

from burst_plugin import Strategy
from burst_plugin.frameworks.wrapping import wrap
from burst_plugin.megatron.batches import llava
from burst_plugin.megatron.layers.building import refuse_own_cuts
from burst_plugin.megatron.registry import Registry
from tests.support.core_attentions import OneRankBurst
from tests.support.megatron_gpt import (
    GptRun,
    StepResult,
    cut_batch,
    forward_backward,
    full_grads,
    join,
    leave,
    loss_of,
    random_tokens,
    set_weights,
    transformer_config,
)
from tests.support.megatron_gpt import one_step as one_gpt_step
from tests.support.processes import RankError
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron

IMAGE, SIDE, PATCH = -200, 28, 14  # so that a tile has 4 patches, and with its class token 5 rows
RUN = GptRun(layers=2, seq_length=21, per_token_loss=True)


@dataclass(frozen=True)
class Batch:
    """The images of one microbatch: by row, tiles by position of the image in its text."""

    images: tuple[dict[int, int], ...]

    @property
    def tiles(self) -> list[int]:
        return [row[at] for row in self.images for at in sorted(row)]


# Two images next to each other, one of three tiles, a row without one; of all images on one rank's tokens in zigzag.
BATCHES = (Batch(({3: 1, 4: 1}, {0: 3, 20: 1})), Batch(({}, {9: 1})), Batch(({2: 2, 7: 2, 11: 2}, {})))


def over(ranks: int, **more: Any) -> GptRun:
    return replace(RUN, cp=ranks, cp_comm_type="burst", **more)


def build(run: GptRun, *, frozen: bool = False, longest: int = 64, **options: Any) -> Any:
    """A tiny LLaVA in Megatron's DistributedDataParallel."""
    join(run)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.enums import ModelType

    config = transformer_config(run)
    model = llava_model(run, config, longest=longest, **options)
    model.model_type = ModelType.encoder_or_decoder  # as Megatron's training sets it
    set_weights(model, run)
    model.freeze(False, frozen, False)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def llava_model(
    run: GptRun,
    config: Any,
    *,
    longest: int = 64,
    vision_ranks: int = 1,
    tower: str = "internvit",
    cp_comm_type: str | None = None,
    **options: Any,
) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec

    alone = replace(run, cp=1, cp_comm_type=None, layers=2, heads=4, groups=4, hidden=32, ffn=48)
    vision = transformer_config(alone)
    vision.vision_model_type, vision.context_parallel_size = tower, vision_ranks
    vision.normalization, vision.gated_linear_unit, vision.add_bias_linear = "LayerNorm", False, True
    projection = transformer_config(replace(alone, hidden=run.hidden))
    vision.cp_comm_type = projection.cp_comm_type = cp_comm_type
    layer, text = get_vit_layer_with_local_spec(), get_gpt_layer_local_spec(normalization="RMSNorm")
    mlp = layer.submodules.mlp  # a partial class from 0.18 on
    if run.core is not None:
        text.submodules.self_attention.submodules.core_attention = run.core
    return LLaVAModel(
        language_transformer_config=config,
        language_transformer_layer_spec=text,
        language_vocab_size=run.vocab,
        language_max_sequence_length=longest,
        language_position_embedding_type="rope",
        vision_transformer_config=vision,
        vision_transformer_layer_spec=layer,
        vision_projection_config=projection,
        vision_projection_layer_spec=mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules,
        img_h=SIDE,
        img_w=SIDE,
        patch_dim=PATCH,
        image_token_index=IMAGE,
        **{"drop_vision_class_token": True, **options},
    )


def data(run: GptRun, batches: tuple[Batch, ...], tokens: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Whole microbatches, as the scripts of Megatron's examples give them to a model."""
    generator = torch.Generator().manual_seed(1)
    for rows, batch in zip(tokens.clone(), batches, strict=True):
        for row, images in zip(rows, batch.images, strict=True):
            row[list(images)] = IMAGE
        labels = rows[:, 1:].contiguous()
        yield {
            "images": torch.randn(sum(batch.tiles), 3, SIDE, SIDE, generator=generator),
            "input_ids": rows[:, :-1].contiguous(),
            "position_ids": torch.arange(run.seq_length).expand(len(rows), -1),
            "attention_mask": None,
            "labels": labels,
            "loss_mask": (labels != IMAGE).float(),
            "num_image_tiles": torch.tensor(batch.tiles, dtype=torch.int),
        }


def step(batches: Iterator[dict[str, Any]], model: Any) -> tuple[torch.Tensor, Any]:
    torch.manual_seed(0)  # of which RADIO takes the places of its positions
    output, mask = model(**next(batches))
    return output, partial(loss_of, mask)


def one_step(rank: int, run: GptRun, batches: tuple[Batch, ...] = BATCHES, **options: Any) -> StepResult:
    model = build(run, **options)
    try:
        loss = forward_backward(model, run, random_tokens(run, len(batches)), step, partial(data, run, batches))
        return StepResult(loss, full_grads(model, run))
    finally:
        leave()


@functools.cache
def on_one_rank(longest: int = 64) -> StepResult:
    return run_ranks(partial(one_step, longest=longest), 1, RUN)[0]


def check_equal(results: list[StepResult], reference: StepResult) -> None:
    """Loss and every parameter's gradient to 1e-5."""
    for result in results:
        assert result.loss == pytest.approx(reference.loss, abs=1e-5)
        assert result.grads.keys() == reference.grads.keys()
        for name, grad in result.grads.items():
            size = torch.linalg.vector_norm(reference.grads[name])
            assert torch.linalg.vector_norm(grad - reference.grads[name]) <= 1e-5 * max(size, 1e-3), name
            assert size > 0 or name.startswith("vision_model"), name


@pytest.mark.parametrize("layout", ["zigzag", "auto", "striped", "contiguous"])
def test_two_ranks_equal_one(layout: str) -> None:
    reference = on_one_rank()
    assert {name.split(".")[0] for name in reference.grads} == {"vision_model", "vision_projection", "language_model"}
    check_equal(run_ranks(one_step, 2, over(2, strategy=Strategy(layout=layout))), reference)


@pytest.mark.parametrize("ranks", [4, 8])
def test_more_ranks_than_some_batches_have_tiles(ranks: int) -> None:
    check_equal(run_ranks(one_step, ranks, over(ranks)), on_one_rank())


def test_text_alone_and_a_row_of_images_alone() -> None:
    batches = (Batch(({}, {})), Batch(({0: 4, 1: 1, 2: 1}, {})))
    reference = run_ranks(one_step, 1, RUN, batches)[0]
    check_equal(run_ranks(one_step, 2, over(2), batches), reference)


def test_what_megatron_truncates_is_not_sent() -> None:
    """Rows at the end of a sequence have no token; one of the images has none at all."""
    batches = (Batch(({3: 2, 18: 2, 20: 1}, {0: 1})),)
    (reference,) = run_ranks(partial(one_step, longest=32), 1, RUN, batches)
    check_equal(run_ranks(partial(one_step, longest=32), 2, over(2), batches), reference)


@pytest.mark.parametrize(
    "options",
    [
        {"frozen": True},
        {"drop_vision_class_token": False},
        {"pixel_shuffle": True},
        {"tower": "radio"},
        {"cp_comm_type": "burst"},  # in a copy of the text's, as of pretrain_vlm.py
    ],
    ids=["frozen tower", "class tokens", "pixel shuffle", "places at random", "configuration of text"],
)
def test_other_towers(options: dict[str, Any]) -> None:
    step_of = partial(one_step, **options)
    reference = run_ranks(step_of, 1, RUN)[0]
    of_tower = {name for name, grad in reference.grads.items() if name.startswith("vision_model")}
    if options.get("frozen"):
        assert not of_tower
    check_equal(run_ranks(step_of, 2, over(2)), reference)


def _encoded(rank: int, shares: bool) -> tuple[list[int], StepResult]:
    """How many tiles this rank encodes in each microbatch, and what comes of it."""
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel

    counts, forward = list[int](), CLIPViTModel.forward

    def counting(tower: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        counts.append(len(x))
        return forward(tower, x, *args, **kwargs)

    CLIPViTModel.forward = counting
    can_share = llava.can_share_tiles if shares else lambda *_: False
    with mock.patch.object(llava, "can_share_tiles", can_share):
        return counts, one_step(rank, over(2))


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "all on every rank"])
def test_each_tile_is_encoded_once(shares: bool) -> None:
    """Where ranks cannot share tiles every rank encodes all, and gradients are right as well."""
    found = run_ranks(_encoded, 2, shares)
    counts = [counts for counts, _ in found]
    tiles = [sum(batch.tiles) for batch in BATCHES]
    if shares:
        assert counts == [[3, 1, 3], [3, 1, 3]]  # of the one tile of the second batch, both; one leaves it out
    else:
        assert counts == [tiles, tiles]
    check_equal([result for _, result in found], on_one_rank())


# -------------------------------------------------------------------------------------------------- packed, refused


def packed_step(batches: Iterator[dict[str, Any]], model: Any, ends: tuple[int, ...]) -> tuple[torch.Tensor, Any]:
    """A microbatch of one row with documents, whose offsets count the tokens of images."""
    from megatron.core.packed_seq_params import PackedSeqParams

    batch = next(batches)
    offsets = torch.tensor([0, *ends], dtype=torch.int32)
    longest = int(offsets.diff().max())
    packed = PackedSeqParams("thd", offsets, offsets, offsets, offsets, longest, longest)
    output, mask = model(**batch, packed_seq_params=packed)
    return output, partial(loss_of, mask)


def clamp_offsets() -> None:
    """Have a model clamp the offsets of documents to its sequence, as Megatron does from 0.20 on."""
    from megatron.core.models.multimodal.llava_model import LLaVAModel

    def clamp(original: Any, model: Any, x: torch.Tensor, labels: Any, mask: Any, packed: Any) -> Any:
        offsets = packed.cu_seqlens_q.clamp(max=x.shape[1]).unique_consecutive()
        packed = replace(packed, cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
        return original(model, x, labels, mask, replace(packed, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None))

    wrap(LLaVAModel, "_process_embedding_token_parallel", clamp)


def one_packed_step(rank: int, run: GptRun, ends: tuple[int, ...] = (16, 40), longest: int = 64) -> StepResult:
    batches = (Batch(({3: 1, 7: 2, 10: 2},)),)
    model = build(run, longest=longest)
    if ends[-1] > longest:
        clamp_offsets()
    try:
        tokens = random_tokens(run, 1)
        loss = forward_backward(model, run, tokens, partial(packed_step, ends=ends), partial(data, run, batches))
        return StepResult(loss, full_grads(model, run))
    finally:
        leave()


@pytest.mark.parametrize("layout", ["zigzag", "auto"])
def test_packed_documents(layout: str) -> None:
    """24 tokens of text and 5 tiles of 4 rows, in place of 3 tokens, in documents of 16 and 24; by the definition."""
    run = replace(RUN, seq_length=23, microbatch_size=1, core=OneRankBurst)
    (reference,) = run_ranks(one_packed_step, 1, run)
    ring = replace(run, cp=2, cp_comm_type="burst", core=None, strategy=Strategy(layout=layout))
    check_equal(run_ranks(one_packed_step, 2, ring), reference)


def test_packed_documents_that_megatron_truncates() -> None:
    """The second document of 16 tokens loses half of them, with some of an image's, and the third one all."""
    run = replace(RUN, seq_length=23, microbatch_size=1, core=OneRankBurst)
    (reference,) = run_ranks(partial(one_packed_step, longest=24), 1, run, (16, 24))
    ring = replace(run, cp=2, cp_comm_type="burst", core=None)
    check_equal(run_ranks(partial(one_packed_step, longest=24), 2, ring, (16, 32, 40)), reference)


def _refused(rank: int, change: str) -> str:
    run = over(2)
    if change == "offsets":
        run = replace(run, seq_length=23, microbatch_size=1)
    try:
        if change == "offsets":
            one_packed_step(rank, run, (16, 32))
        elif change == "vision":
            build(run, vision_ranks=2)
        elif change == "mimo":
            from megatron.core.models.mimo.model.base import MimoModel

            join(run)
            spec = SimpleNamespace(params={"config": transformer_config(run)})
            MimoModel(SimpleNamespace(language_model_spec=spec))
        else:
            join(run)
            config = transformer_config(run)
            config.language_model_type = "hf://some/model"
            llava_model(run, config)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("offsets", "packed_seq_params has documents of 32 tokens, but text and images together are [1, 40]"),
        ("vision", "vision_transformer_config.context_parallel_size=2: a tower has whole images"),
        ("mimo", "MimoModel is not supported with cp_comm_type='burst'"),
        ("language", "language_model_type='hf://some/model' is not on the ring"),
    ],
)
def test_what_cannot_run_is_refused_on_every_rank(change: str, message: str) -> None:
    for said in run_ranks(_refused, 2, change):
        assert message in said


# ------------------------------------------------------------------------------------------------------------ mRoPE

MROPE = GptRun(layers=2, positions="mrope", config={"mrope_section": [1, 1, 2]}, per_token_loss=True)


def positions_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Positions [3, B, S] of text, then of an image of 4 x 6 patches, another place in each row, then of text."""
    rows = []
    for row in range(len(batch["tokens"])):
        at, text = 11 + 20 * row, torch.arange(batch["tokens"].shape[1])
        where = torch.stack([torch.zeros(24), torch.arange(24) // 6, torch.arange(24) % 6]).long() + at
        after = text[at + 24 :] - 24 + 6
        rows.append(torch.cat([text[:at].expand(3, -1), where, after.expand(3, -1)], 1))
    return torch.stack(rows, 1)


def mrope_step(data: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(data)
    batch["position_ids"] = positions_of(batch)
    batch = cut_batch(batch)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss_of, batch["loss_mask"])


def cut_mrope_step(data: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
    batch = cut_batch(next(data))
    where = batch["position_ids"].expand(3, -1, -1)
    return model(batch["tokens"], where, None, labels=batch["labels"]), partial(loss_of, batch["loss_mask"])


def _mrope(rank: int, run: GptRun, step: Any = mrope_step) -> StepResult:
    return one_gpt_step(run, random_tokens(run), step)


@pytest.mark.parametrize("layout", ["zigzag", "auto", "striped"])
def test_mrope_equals_one_rank(layout: str) -> None:
    (reference,) = run_ranks(_mrope, 1, MROPE)
    ring = replace(MROPE, cp=2, cp_comm_type="burst", strategy=Strategy(layout=layout))
    check_equal(run_ranks(_mrope, 2, ring), reference)


@pytest.mark.parametrize(
    ("layout", "packed", "is_possible"),
    [
        ("zigzag", False, True),
        ("zigzag", True, True),
        ("auto", False, True),
        ("auto", True, False),
        ("striped", False, False),
    ],
)
def test_models_that_cut_their_embeddings_themselves_need_zigzag(
    layout: str, packed: bool, is_possible: bool
) -> None:
    """Those of Megatron-Bridge, which have a rotary embedding of their own."""

    def preprocess(model: Any, position_ids: torch.Tensor, packed_seq_params: Any = None) -> str:
        return "ran"

    def run(rotary: Any, axes: int) -> str:
        config = SimpleNamespace(context_parallel_size=2, cp_comm_type="burst")
        model = SimpleNamespace(rotary_pos_emb=rotary, config=config)
        where = torch.zeros([3, 2, 8][3 - axes :])
        registry = Registry(Strategy(layout=layout))
        documents = SimpleNamespace(qkv_format="thd") if packed else None
        return str(refuse_own_cuts(registry, preprocess, model, where, documents))

    own = type("OwnRotaryEmbedding", (MultimodalRotaryEmbedding,), {})
    assert run(own.__new__(own), 2) == "ran"
    assert run(MultimodalRotaryEmbedding.__new__(MultimodalRotaryEmbedding), 3) == "ran", "Megatron's follows"
    if is_possible:
        assert run(own.__new__(own), 3) == "ran"
    else:
        with pytest.raises(
            ValueError, match=f"layout='{layout}' is not supported with OwnRotaryEmbedding of positions"
        ):
            run(own.__new__(own), 3)


def _own_rotary_step(data: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
    model.module.rotary_pos_emb.__class__ = type("OwnRotaryEmbedding", (MultimodalRotaryEmbedding,), {})
    return mrope_step(data, model)


def test_a_model_that_cuts_its_embeddings_itself_is_refused_in_its_forward() -> None:
    ring = replace(MROPE, cp=2, cp_comm_type="burst", strategy=Strategy(layout="striped"))
    with pytest.raises(RankError, match="layout='striped' is not supported with OwnRotaryEmbedding of positions"):
        run_ranks(_mrope, 2, ring, _own_rotary_step)


def test_positions_of_mrope_that_were_cut_are_refused() -> None:
    ring = replace(MROPE, cp=2, cp_comm_type="burst")
    with pytest.raises(RankError, match=r"position_ids of mRoPE are \[3, 2, 32\], expected .* \[3, 2, 64\]"):
        run_ranks(_mrope, 2, ring, cut_mrope_step)
