"""Batches with images drawn at random, on rings drawn at random: losses and gradients are those of one rank.

`BURST_SOAK=1000 bash tests/run.sh tests/huggingface/test_drawn_media.py` draws that many of each family. The number
of a case, which an error tells, draws the same case again.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from burst_plugin import ContextParallel
from burst_plugin.huggingface import models
from burst_plugin.huggingface.media import features
from burst_plugin.towers import rows
from tests.support.families import SINCE_5_24
from tests.support.media import FAMILIES, Case, Image, check_step, step_on_ring, tiny_model
from tests.support.ranks import run_ranks
from tests.support.ring_steps import Step

SOAK = int(os.environ.get("BURST_SOAK", "0"))
pytestmark = [
    pytest.mark.huggingface,
    SINCE_5_24,
    pytest.mark.timeout(120 + 2 * SOAK),
]
PATTERNS = (
    "qwen3_vl",  # positions in three axes, features for several layers
    "gemma3",  # groups of tokens that attend to each other, and windows
    "gemma3_large",  # groups longer than windows
    "mistral3",  # rows of features alone
)
AT_ONCE = 25  # cases of one start of ranks


class OnRing(NamedTuple):
    """A case on a ring. options: of its `ContextParallel`; is_frozen: whether towers are."""

    case: Case
    options: dict[str, Any]
    is_frozen: bool


def _sides(draws: random.Random, length: int) -> tuple[int, int]:
    most = draws.randrange(1, length // 3)
    return draws.choice([(0, 0), (most, 0), (0, most), (most // 2, most // 2)])


def _documents(draws: random.Random, length: int) -> tuple[int, ...]:
    cuts = sorted(draws.sample(range(1, length), draws.randrange(1, 5)))
    return tuple(b - a for a, b in pairwise([0, *cuts, length]))


def _images(draws: random.Random, family: str, row: int, begin: int, end: int) -> list[Image]:
    """Up to five images of unlike sizes between two tokens of a row, some right behind others."""
    found: list[Image] = []
    of, has_video = FAMILIES[family], family == "qwen3_vl" and draws.random() < 0.5
    least = int(has_video or family == "qwen3_vl")  # its images and frames have a token between them
    # transformers fails on an image of Mistral 3 whose only token is that of the whole batch.
    sizes = [(2, 4), (4, 4), (4, 8), (8, 8), *([(2, 2)] if family == "qwen3_vl" else [])]
    at = begin + draws.choice([0, 1, draws.randrange(8)])
    for _ in range(draws.randrange(6)):
        frames = draws.choice([1, 1, 2, 4]) if has_video else 1
        image = Image(row, at, draws.choice(sizes), frames)
        at += of.tokens(image) + (frames - 1) * of.frames_apart
        if at > end:
            break
        found.append(image)
        at += draws.choice([least, 1, draws.randrange(1, 8)])
    return found


def _drawn(family: str, number: int, ranks: int) -> OnRing:
    draws = random.Random(f"{family} {number}")
    while True:
        length, rows, documents, padding = draws.randrange(16, 97), draws.randrange(1, 4), (), []
        kind = draws.choice(["plain", "padded", "padded, with positions", "packed"])
        if kind == "packed":
            rows, documents = 1, _documents(draws, length)
        elif kind != "plain":
            padding = [_sides(draws, length) for _ in range(rows)]
        bounds = [0, *accumulate(documents)] if documents else [0, length]
        images = []
        for row in range(rows):
            before, after = padding[row] if padding else (0, 0)
            for begin, end in pairwise(bounds):
                images += _images(draws, family, row, begin + before, end - after)
        case = Case(images, rows, length, padding, documents, "positions" in kind)
        if (case.batch(family)["labels"][:, 1:] >= 0).any():
            layout, per_node = draws.choice(["zigzag", "contiguous", "striped", "auto"]), draws.choice([1, ranks])
            options = {"layout": layout, "backward": draws.choice(["q", "kv"]), "ranks_per_node": per_node}
            return OnRing(case, options, draws.random() < 0.2)


def _freeze(model: Any, is_frozen: bool) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen or "language_model" in name or "lm_head" in name)


def _on_ring(rank: int, family: str, drawn: Sequence[OnRing], plant: Callable[[], None] | None) -> list[Step]:
    model, found = tiny_model(family), []
    if plant is not None:
        plant()
    for case, options, is_frozen in drawn:
        _freeze(model, is_frozen)
        found.append(step_on_ring(model, case.batch(family), ContextParallel(dist.group.WORLD, **options)))
    return found


def _check(family: str, numbers: Sequence[int], ranks: int, plant: Callable[[], None] | None = None) -> None:
    drawn, model = [_drawn(family, number, ranks) for number in numbers], tiny_model(family)
    steps = run_ranks(_on_ring, ranks, family, drawn, plant)[0]
    for number, each, found in zip(numbers, drawn, steps, strict=True):
        _freeze(model, each.is_frozen)
        check_step(found, each.case.on_one_rank(model, family), (family, number, ranks, each))


@pytest.mark.parametrize("family", PATTERNS)
def test_drawn_batches_equal_one_rank(family: str) -> None:
    for ranks in (2, 3, 4):
        numbers = range(ranks - 2, SOAK or 24, 3)
        for first in range(0, len(numbers), AT_ONCE):
            _check(family, numbers[first : first + AT_ONCE], ranks)


def _to_wrong_rows() -> None:
    """Two tokens of a rank get each other's features."""
    original = features.numbers_of_rows

    def numbers(*args: Any) -> Any:
        encoded, held = original(*args)
        return encoded, [each.flip(0) for each in held]

    features.numbers_of_rows = numbers


def _without_gradients_of_others() -> None:
    """A tower gets the gradients of those features alone that stay on the rank that encoded them."""
    original = rows.move_rows

    def moved(state: Any, call: Any, direction: str, *args: Any) -> Any:
        found = yield from original(state, call, direction, *args)
        if direction == "backward":
            came_from_others = [places for peer, places in args[2].items() if peer != state.rank]
            found[torch.cat([*came_from_others, torch.empty(0, dtype=torch.int64)])] = 0
        return found

    rows.move_rows = moved


def _positions_on_shards() -> None:
    """A rank counts the positions of its own tokens, as if they were a whole batch."""
    original = models.with_media_positions

    def with_positions(model: Any, shard: Any, kwargs: Any) -> Any:
        found = original(model, shard, kwargs)["position_ids"]
        return {**kwargs, "position_ids": torch.arange(found.shape[-1]).expand(found.shape)}

    models.with_media_positions = with_positions


@pytest.mark.parametrize("plant", [_to_wrong_rows, _without_gradients_of_others, _positions_on_shards])
def test_planted_faults_are_found(plant: Callable[[], None]) -> None:
    with pytest.raises(AssertionError):
        _check("qwen3_vl", range(6), 2, plant)
