"""`generate` with images and a `RingCache`, against the same on one rank with transformers' own cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from burst_plugin import ContextParallel
from burst_plugin.huggingface import RingCache, prepare
from burst_plugin.huggingface.generation import name_of_cache
from tests.support.families import SINCE_5_24
from tests.support.media import Image, batch, tiny_model
from tests.support.media_families import media_batch, tiny_media_model
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.huggingface,
    SINCE_5_24,
]
# In two rows, of unlike sizes, several in a row, one behind the other.
IMAGES = (Image(0, 3, (4, 4)), Image(0, 8, (2, 4)), Image(0, 20, (4, 8)), Image(1, 28, (8, 4)))
PADDING = 5  # tokens, of the second row
TALKS = ("qwen3_vl", "llava")
DRAWN = ("qwen3_5", "gemma4")  # with their batches, of one row


def _model(family: str) -> Any:
    model = tiny_media_model(family) if family in DRAWN else tiny_model(family)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():  # by which features would be zeros
            torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def _prompt(family: str, model: Any) -> dict[str, Any]:
    if family in DRAWN:
        drawn = media_batch(model)
        return {name: x for name, x in drawn.items() if name != "labels"}
    drawn = batch(family, IMAGES, rows=2)
    real = torch.ones_like(drawn["input_ids"])
    real[1, :PADDING] = 0
    prompt = {name: x for name, x in drawn.items() if name != "labels"}
    return {**prompt, "input_ids": drawn["input_ids"] * real, "attention_mask": real}


def _generated(family: str, cp: ContextParallel | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and logits of an answer, and of another one after a question on it."""
    model = _model(family)
    prompt = _prompt(family, model)
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "use_cache": True}
    options |= {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 6}
    if cp is not None or family in TALKS:
        options[name_of_cache()] = transformers.DynamicCache() if cp is None else RingCache(cp)
    model = model if cp is None else prepare(model)
    found = [model.generate(**prompt, **options)]
    if family in TALKS:  # a question on the images, which the cache has
        ids = torch.cat([found[0].sequences, torch.tensor([[5, 6, 7], [8, 9, 10]])], 1)
        real = torch.nn.functional.pad(prompt["attention_mask"], (0, ids.shape[1] - 64), value=1)
        found.append(model.generate(input_ids=ids, attention_mask=real, **options))
    return found[-1].sequences, torch.cat([x for each in found for x in each.logits])


def _on_ring(rank: int, families: tuple[str, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    cp = ContextParallel(dist.group.WORLD)
    return [_generated(family, cp) for family in families]


@pytest.mark.parametrize("ranks", [2, 4])
def test_greedy_tokens_and_logits_equal_those_of_one_rank(ranks: int) -> None:
    families = ("qwen3_vl", "llava", "gemma3", "mistral3", *DRAWN)
    truths = [_generated(family, None) for family in families]
    for each in run_ranks(_on_ring, ranks, families, timeout_s=60.0):
        for family, (tokens, logits), truth in zip(families, each, truths, strict=True):
            assert torch.equal(tokens, truth[0]), family
            torch.testing.assert_close(logits, truth[1], rtol=2e-5, atol=2e-5, msg=family)


def _refusals(rank: int) -> list[str]:
    """What is raised, in this order: for pixels in a forward, images in two turns, and other images on each rank."""
    cp, found = ContextParallel(dist.group.WORLD), []

    def refused(call: Any) -> None:
        with pytest.raises(ValueError, match=r"image|pixel_values") as raised, torch.no_grad():
            call()
        found.append(str(raised.value))

    model, options = prepare(_model("llava")), {"max_new_tokens": 2, "do_sample": False}
    prompt = _prompt("llava", model)
    refused(lambda: model(**prompt, **{name_of_cache(): RingCache(cp)}))
    other = {**prompt, "pixel_values": prompt["pixel_values"] + rank}
    refused(lambda: model.generate(**other, **options, **{name_of_cache(): RingCache(cp)}))
    few = {**prompt, "pixel_values": prompt["pixel_values"][:3]}
    refused(lambda: model.generate(**few, **options, **{name_of_cache(): RingCache(cp)}))
    gemma = prepare(_model("gemma3"))
    cut = _prompt("gemma3", gemma)
    refused(lambda: gemma.generate(**cut, **options, prefill_chunk_size=22, **{name_of_cache(): RingCache(cp)}))
    return found


def test_what_cannot_be_had_is_refused_on_every_rank() -> None:
    expected = (
        "got pixel_values, but each rank computes a part of the tokens only: give images to generate",
        "pixel_values",
        "the prompt has 16 tokens of images, but LlavaModel makes 12 features of the images",
        "tokens of an image, which attend to each other both ways, came in two turns: give all tokens",
    )
    for found in run_ranks(_refusals, 2):
        for message, part in zip(found, expected, strict=True):
            assert part in message
