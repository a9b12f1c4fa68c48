"""Models that also take images, audio or video, on batches of text, against eager attention on one rank.

`BURST_SOAK=1 bash tests/run.sh tests/huggingface/test_text_only.py` has all families on four ranks, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from burst_plugin import ContextParallel
from burst_plugin.batch import IGNORED_LABEL, shard_batch
from burst_plugin.huggingface import prepare
from burst_plugin.huggingface.media.families import MODALITIES
from burst_plugin.huggingface.models import problems
from burst_plugin.huggingface.text_only import text_modules, text_part, towers
from tests.support.deepspeed_run import Batch, draw, llama, worst
from tests.support.families import SINCE_5_24
from tests.support.ranks import run_ranks
from tests.support.ring_steps import packed, shifted, sum_of_losses
from tests.support.wrapper_runs import check_on_ring
from tests.support.wrappers import WRAPPERS, class_name, tiny_wrapper

pytestmark = [
    pytest.mark.huggingface,
    SINCE_5_24,
]

_KINDS_OF_TOKENS = {  # given by processors: 0 for text
    "gemma3": "token_type_ids",
    **dict.fromkeys(("gemma4", "gemma4_unified", "glm4v", "molmo2", "qwen2_5_vl", "qwen3_vl"), "mm_token_type_ids"),
}
DOCUMENTS = (13, 1, 18)


def _plain() -> Batch:
    return draw(1, rows=2, length=32)[0]


def _padded() -> Batch:
    batch = draw(1, rows=2, length=27, seed=2)[0]
    real = torch.arange(27) >= torch.tensor([[9], [2]])
    first = torch.arange(27) == torch.tensor([[9], [2]])
    return {
        **batch,
        "attention_mask": real.long(),
        "labels": batch["labels"].masked_fill(first | ~real, IGNORED_LABEL),
    }


BATCHES = {"plain": _plain, "packed": partial(packed, DOCUMENTS, seed=1), "padded": _padded}


def _given(family: str, kind: str) -> Batch:
    batch, config = BATCHES[kind](), tiny_wrapper(family).config
    names = [f"{modality}_token_{what}" for modality in MODALITIES for what in ("id", "index")]
    of_media = torch.tensor([token for name in names if (token := getattr(config, name, None)) is not None])
    batch["input_ids"] = batch["input_ids"].masked_fill(torch.isin(batch["input_ids"], of_media), 2)
    if family in _KINDS_OF_TOKENS:
        batch[_KINDS_OF_TOKENS[family]] = torch.zeros_like(batch["input_ids"])
    return batch


# On four ranks one family of each kind: of states, of selections, of positions, of windows and masks, of layers that
# look at images, of experts, of latents, of sound.
KINDS = (
    *("lfm3_vl", "nemotron_h_omni", "qwen3_5", "qwen4_exp", "minimax_m3_vl", "qwen2_5_vl", "qwen3_vl", "hunyuan_vl"),
    *("cohere_compass", "gemma3", "gemma4", "molmo2", "paligemma", "mllama", "qwen3_vl_moe", "kimi_k25", "aria"),
    *("qwen3_omni_moe_thinker", "voxtral", "llava", "deepseek_vl_hybrid", "step3p7"),
)
ON_FOUR = [family for family in WRAPPERS if family in KINDS or os.environ.get("BURST_SOAK")]


@pytest.mark.parametrize(
    ("ranks", "kind", "families"),
    [(4, "plain", ON_FOUR), (2, "packed", WRAPPERS), (2, "padded", WRAPPERS)],
    ids=["4-plain", "2-packed", "2-padded"],
)
def test_losses_and_gradients_equal_eager_on_one_rank(ranks: int, kind: str, families: Sequence[str]) -> None:
    documents = DOCUMENTS if kind == "packed" else ()
    check_on_ring({family: _given(family, kind) for family in families}, ranks, documents, kind == "padded")


def test_what_runs_in_chunks_is_the_language_model() -> None:
    batches = {family: _given(family, "padded") for family in ("qwen2_5_vl", "gemma3", "llava")}
    options = {"mlp_chunk": 5, "loss_chunk": 7, "head_chunk": 2, "keep_attention": 0.5}
    check_on_ring(batches, 2, has_checkpoints=True, **options)


def test_towers_are_left_as_they_are() -> None:
    model = prepare(tiny_wrapper("qwen3_vl"))
    assert towers(model) == [model.model.visual]
    assert model.model.visual.config._attn_implementation == "eager"
    assert model.model.language_model.config._attn_implementation == "burst"
    parts = set(text_modules(model))
    assert model.model.language_model.layers[0] in parts
    assert model.model.visual.blocks[0] not in parts


def test_attention_beside_that_of_the_language_model_is_examined() -> None:
    """GOT-OCR2 has none, though its file has attention of a tower that is not transformers' own."""
    model = tiny_wrapper("got_ocr2")
    assert not type(model)._can_set_attn_implementation()
    assert problems(model) == []
    model.model.fusion = torch.nn.MultiheadAttention(32, 4)
    assert "its attention does not go through transformers' AttentionInterface" in problems(model)[0]


def test_a_whole_batch_with_an_image_is_evaluated_as_without_the_ring() -> None:
    model = tiny_wrapper("llava").eval()
    pixels = torch.rand(1, 3, 336, 336, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[5, *[model.config.image_token_id] * 576, 7, 8]])
    model.get_input_embeddings().weight.data = torch.randn(model.config.image_token_id + 1, 32)
    with torch.no_grad():
        truth = model(input_ids=ids, pixel_values=pixels).logits
        logits = prepare(model)(input_ids=ids, pixel_values=pixels).logits
    torch.testing.assert_close(logits, truth, rtol=1e-4, atol=1e-4)


IMAGES = {
    "pixel_values": torch.zeros(3, 3, 8, 8),
    "image_grid_thw": torch.ones(1, 3),
    "input_features": [torch.zeros(80, 10)],
    "mm_encoder_outputs": {"image": (torch.zeros(1, 4, 32),)},
}


def _cut_with_an_image(rank: int) -> list[str]:
    cp, told = ContextParallel(dist.group.WORLD), []
    for name, value in IMAGES.items():
        try:
            shard_batch({**_plain(), **({name: value} if rank else {})}, cp)
        except ValueError as error:
            told.append(str(error))
    return told


def test_an_image_on_one_rank_is_refused_by_all() -> None:
    for told in run_ranks(_cut_with_an_image, 2):
        assert len(told) == len(IMAGES)
        for name, message in zip(IMAGES, told, strict=True):
            differs = "all ranks of a context-parallel group take the same batch"
            refused = f"{name}, tensors in a tuple, cannot be cut along the sequence; take {name} out of the batch"
            assert (refused if name == "mm_encoder_outputs" else differs) in message
            assert "\n" not in message


@pytest.mark.parametrize("name", [*IMAGES, "image_sizes"])
def test_an_image_beside_a_shard_is_refused_by_name(name: str) -> None:
    model = prepare(tiny_wrapper("mistral3"))
    local = shard_batch(_plain(), ContextParallel())
    given = {name: IMAGES.get(name, torch.tensor([8, 8]))}
    message = (
        rf"Mistral3ForConditionalGeneration got {name} with a batch that was cut without it: give shard_batch all "
        rf"that a processor returns, or leave {name} out"
    )
    with pytest.raises(ValueError, match=message):
        model(**local, **given)
    if name == "pixel_values":
        with pytest.raises(ValueError, match=message):
            model(local.pop("input_ids"), given["pixel_values"], **local)


class _Scattering(transformers.LlamaForCausalLM):
    """Puts features of images in places of tokens in its own forward, and has no configuration of its text alone."""

    def forward(
        self, input_ids: torch.Tensor, pixel_values: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any
    ) -> Any:
        embeds = self.get_input_embeddings()(input_ids)
        is_image = (input_ids == IMAGE)[..., None].expand_as(embeds)
        embeds = embeds.masked_scatter(is_image, pixel_values)
        return super().forward(inputs_embeds=embeds, position_ids=position_ids, **kwargs)


def _scattering() -> Any:
    return _Scattering(llama())


def _higgs() -> Any:
    special = {"audio_token_id": IMAGE, "audio_bos_token_id": 6, "audio_delay_token_id": 7}
    config = transformers.HiggsAudioV2Config(
        **llama().to_dict() | special | {"head_dim": 8, "num_codebooks": 2, "codebook_size": 8}
    )
    return transformers.HiggsAudioV2ForConditionalGeneration(config)


IMAGE = 60


@pytest.mark.parametrize(
    ("make", "media"),
    [
        (_scattering, {"pixel_values": torch.zeros(12, 32)}),
        (_higgs, {"audio_input_ids": torch.zeros(2, 6, 2, dtype=torch.int64)}),
    ],
)
def test_an_image_in_a_model_without_a_configuration_of_its_text_is_refused(
    make: Callable[[], Any], media: dict[str, torch.Tensor]
) -> None:
    model = prepare(make())
    assert text_part(model.config) is None
    ids = _plain()["input_ids"]
    ids[:, 4:7] = ids[:, 20:23] = IMAGE
    local = shard_batch({"input_ids": ids, **media}, ContextParallel())
    with pytest.raises(
        ValueError, match=rf"{type(model).__name__} got images, video or audio in a batch that is cut"
    ):
        model(**local)


def _marked(rank: int) -> str:
    model, ids = prepare(tiny_wrapper("qwen3_vl")), _plain()["input_ids"]
    marks = torch.zeros_like(ids)
    marks[:, :2] = 1  # which zigzag gives to rank 0 alone
    local = shard_batch({"input_ids": ids, "mm_token_type_ids": marks}, ContextParallel(dist.group.WORLD))
    try:
        model(**local)
    except ValueError as error:
        return str(error)
    return ""


def test_tokens_of_an_image_without_it_are_refused_on_every_rank() -> None:
    """Positions depend on the image, and one rank alone has its tokens."""
    for told in run_ranks(_marked, 2):
        assert told.startswith(
            "Qwen3VLForConditionalGeneration got mm_token_type_ids that mark tokens of an image in a batch"
        )


def test_a_tower_that_runs_on_a_shard_is_refused() -> None:
    model = prepare(tiny_wrapper("llava"))
    local = shard_batch(_plain(), ContextParallel())
    tower = model.model.vision_tower
    hook = model.model.language_model.register_forward_pre_hook(lambda *args: tower(torch.zeros(1, 3, 336, 336)))
    with pytest.raises(ValueError, match="CLIPVisionModel ran on a batch of text that was cut"):
        model(**local)
    hook.remove()
    model(**local)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("voxtral_realtime", "it adds features of audio to every token"),
        ("blt", "it has parts besides the language model: patcher_config"),
        ("gemma4_unified_assistant", "it is a draft of another model"),
        ("nemo_speechlm", "it carries a state along the sequence (in Nemotron3_5TranscribeForConditionalGeneration)"),
    ],
)
def test_families_whose_text_needs_more_are_refused(family: str, reason: str) -> None:
    config = transformers.CONFIG_MAPPING[family]()
    with torch.device("meta"):
        model = getattr(transformers, class_name(family))(config)
    assert any(reason in each for each in problems(model)), problems(model)


OWN_LOSSES = ["qwen2_audio", "granite_speech", "granite_speech_plus"]


def _of_logits(rank: int) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for family in OWN_LOSSES:
        model = prepare(tiny_wrapper(family).train())
        local = shard_batch(_plain(), ContextParallel(dist.group.WORLD))
        labels = local.pop("shift_labels")
        with pytest.raises(ValueError, match=r"computes the loss of labels in its own way; leave them out"):
            model(**local, labels=labels, shift_labels=labels, num_items_in_batch=8)
        found[family] = _own_grads(model, model(**local).logits, labels)
        for grad in found[family].values():
            dist.all_reduce(grad)
    return found


def _own_grads(model: Any, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    sum_of_losses(logits, labels).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_models_with_a_loss_in_their_own_way_train_on_one_of_their_logits() -> None:
    found = run_ranks(_of_logits, 2)[0]
    for family in OWN_LOSSES:
        batch = _plain()
        labels = shifted(batch.pop("labels"))
        model = tiny_wrapper(family).train()
        error, name = worst(found[family], _own_grads(model, model(**batch).logits, labels))
        assert error <= 1e-5, (family, name)
