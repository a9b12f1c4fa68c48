"""Models that take images, on rings: losses and gradients are those of one rank without the plugin."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, wraps
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from burst_plugin import ContextParallel
from burst_plugin.batch import shard_batch
from burst_plugin.huggingface import prepare
from burst_plugin.huggingface.media import positions
from tests.support.families import SINCE_5_24
from tests.support.media import FAMILIES, IMAGE, Case, Image, batch, check_step, step_on_ring, tiny_model
from tests.support.ranks import run_ranks
from tests.support.ring_steps import Step

pytestmark = [
    pytest.mark.huggingface,
    SINCE_5_24,
]
# Of unlike sizes, several in a row, one behind the other, across ranks; a row without any.
IMAGES = (Image(0, 3, (4, 4)), Image(0, 8, (2, 4)), Image(0, 20, (4, 8)), Image(1, 28, (8, 4)))
CASES = {
    "images": Case(IMAGES, rows=3),
    "one": Case((Image(0, 25, (8, 4)),)),  # fewer than ranks
    "padded": Case(IMAGES[2:], rows=2, padding=((0, 0), (9, 0))),
    "packed": Case(
        (Image(0, 3, (4, 4)), Image(0, 22, (2, 4)), Image(0, 30, (4, 8)), Image(0, 50, (4, 4))),
        documents=(13, 1, 31, 19),
    ),
    "padded, with positions": Case(IMAGES[2:], rows=2, padding=((0, 0), (9, 0)), has_positions=True),
    "video": Case((Image(0, 4, (4, 4), frames=2), Image(0, 30, (4, 4)), Image(0, 40, (2, 4), frames=3))),
    "video of 64 frames": Case((Image(0, 5, (2, 4), frames=64),), length=200),
    "64 images": Case([Image(0, 5 + 5 * n, (4, 4)) for n in range(64)], length=328),
    # Zigzag on 4 ranks gives tokens 0 to 7, 8 to 15, 16 to 23 to three ranks, 24 to 39 to the last.
    "over three ranks": Case((Image(0, 4, (8, 8)), Image(1, 5, (8, 8))), rows=2),
    "on one rank": Case((Image(0, 24, (4, 4)), Image(0, 30, (4, 4)), Image(0, 36, (2, 4)))),
    "adjacent": Case((Image(0, 6, (4, 8)), Image(0, 14, (2, 4)), Image(0, 16, (4, 4)))),
    "few tokens": Case((Image(0, 1), Image(0, 10)), length=16),  # each over three of 4 ranks
    "adjacent, of one size": Case((Image(0, 6), Image(0, 10), Image(0, 14))),
    "large": Case((Image(0, 4), Image(0, 20), Image(1, 30)), rows=2),
    "longer than trained": Case(IMAGES[:3]),  # with fewer positions than tokens
}
OF = {  # the families of a case; others are of all but the one with large images
    "video": ("qwen2_5_vl", "qwen3_vl"),
    "video of 64 frames": ("qwen3_vl",),
    "64 images": ("gemma3", "mistral3"),
    "over three ranks": ("qwen3_vl", "mistral3"),
    "on one rank": ("qwen3_vl", "gemma3", "mistral3"),
    "adjacent": ("mistral3",),
    "few tokens": ("gemma3", "llava"),
    "adjacent, of one size": ("gemma3", "llava"),
    "large": ("gemma3_large",),
    "longer than trained": ("qwen2_5_vl", "qwen3_vl"),
}
ROPE: dict[str, dict[str, Any]] = {"longer than trained": {"rope_type": "dynamic", "factor": 8.0}}


@cache
def _on_one_rank(family: str, case: str, frozen: bool = False) -> Step:
    return CASES[case].on_one_rank(_model(family, case, frozen), family)


def _model(family: str, case: str, frozen: bool) -> Any:
    model = tiny_model(family, **ROPE.get(case, {}))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and "language_model" not in name and "lm_head" not in name))
    return model


def _on_ring(rank: int, cases: Sequence[tuple[str, str, bool]], options: dict[str, Any]) -> list[Step]:
    cp, found = ContextParallel(dist.group.WORLD, ranks_per_node=2, **options), []
    for family, case, frozen in cases:
        model = _model(family, case, frozen)
        if case == "padded":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        found.append(step_on_ring(model, CASES[case].batch(family), cp))
    return found


@pytest.mark.parametrize(("ranks", "layout"), [(2, "zigzag"), (4, "zigzag"), (4, "auto")])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_equal_themselves_on_one_rank(family: str, ranks: int, layout: str) -> None:
    cases = [(family, case, False) for case in CASES if family in OF.get(case, FAMILIES.keys() - {"gemma3_large"})]
    cases.append((family, cases[0][1], True))
    for found, case in zip(run_ranks(_on_ring, ranks, cases, {"layout": layout})[0], cases, strict=True):
        check_step(found, _on_one_rank(*case), case)


@pytest.mark.parametrize(
    ("case", "family", "ranks"),
    [
        ("over three ranks", "qwen3_vl", {0, 1, 2}),
        ("few tokens", "llava", {0, 1, 2}),
        ("on one rank", "qwen3_vl", {3}),
    ],
)
def test_images_are_on_the_ranks_that_their_cases_say(case: str, family: str, ranks: set[int]) -> None:
    ids = CASES[case].batch(family)["input_ids"][0]
    chunks = torch.nonzero(ids == IMAGE).flatten() * 8 // len(ids)
    first_image = chunks[: FAMILIES[family].tokens(CASES[case].images[0])]
    assert {min(chunk, 7 - chunk) for chunk in first_image.tolist()} == ranks
    assert len(ranks) > 1 or {min(chunk, 7 - chunk) for chunk in chunks.tolist()} == ranks


def _tower_fails(rank: int) -> str:
    """Rank 1 encodes the image of one token alone, which transformers' Mistral 3 cannot."""
    cp, model = ContextParallel(dist.group.WORLD), prepare(tiny_model("mistral3"))
    local = shard_batch(batch("mistral3", (Image(0, 3, (8, 8)), Image(0, 30, (2, 2)))), cp)
    with pytest.raises(ValueError, match="split_sizes") as caught:
        model(**local, use_cache=False)
    return str(caught.value)


def test_failures_of_one_tower_are_errors_on_every_rank() -> None:
    assert all("rank 1" in each for each in run_ranks(_tower_fails, 2))


def test_positions_of_packed_documents_begin_anew() -> None:
    """Rotary embeddings see differences of positions only, but in float32 those of large ones lose their digits."""
    model, whole = prepare(tiny_model("qwen3_vl")), CASES["packed"].batch("qwen3_vl")
    seen: list[torch.Tensor] = []
    model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    model(**shard_batch(whole, ContextParallel()), use_cache=False)
    assert (seen[0][:, 0][:, [0, 13, 14, 45]] == 0).all()
    assert seen[0].max() < max(CASES["packed"].documents)


def test_documents_of_text_are_not_padded_to_those_with_images() -> None:
    """One long document with an image beside many short ones of text."""
    model, lengths = tiny_model("qwen3_vl"), [64, *[4] * 32]
    inner = next(module for module in model.modules() if hasattr(module, positions.METHOD))
    whole = batch("qwen3_vl", (Image(0, 3, (4, 4)),), 1, sum(lengths))
    whole["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    counted = inner.compute_3d_position_ids
    with mock.patch.object(positions, "documents_with_media", lambda types, bounds: list(bounds[:-1])):
        expected = positions.positions_in_axes(counted, whole, whole)
    seen: list[torch.Size] = []

    @wraps(counted)
    def count(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["input_ids"].shape)
        return counted(*args, **kwargs)

    found = positions.positions_in_axes(count, whole, whole)
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)
    assert seen == [(1, 64)]
