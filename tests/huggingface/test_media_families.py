"""Families that take images, video and audio, on rings: losses and gradients are those of one rank.

`BURST_SOAK=1 bash tests/run.sh tests/huggingface/test_media_families.py` has all of them on four ranks, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from burst_plugin import ContextParallel
from burst_plugin.batch import IGNORED_LABEL, shard_batch
from burst_plugin.huggingface import prepare
from burst_plugin.huggingface.media.families import EXAMINED, why_not
from burst_plugin.huggingface.media.units import units_of
from tests.support.families import SINCE_5_24
from tests.support.media import check_step, step_on_ring
from tests.support.media_families import FIRST_OF_MEDIA, joined_batch, media_batch, tiny_media_model
from tests.support.ranks import run_ranks
from tests.support.ring_steps import Step, step

pytestmark = [
    pytest.mark.huggingface,
    SINCE_5_24,
]
ALL = [(family, modality) for family, modalities in EXAMINED.items() for modality in modalities]
SHARED = 4  # how many of them share one start of the ranks
# One of each way to give images, to count their tokens, and to place them.
SOME = [
    ("gemma4", "image"),  # whose tokens attend to each other, in some layers
    ("idefics3", "image"),  # rows of images, filled up
    ("llava_next", "image"),  # tiles of images of unlike sizes
    ("minicpmv4_7", "image"),  # patches in a strip, whose sizes make positions
    ("granite_docling", "image"),  # features for several layers, which carry no state; tiles by row
    ("deepseek_vl_hybrid", "image"),  # two resolutions
    ("lfm2_vl", "image"),  # padded patches
    ("qwen3_5", "video"),  # gated delta nets
    ("glm4v", "video"),  # in places of image tokens
    ("video_llava", "video"),
    ("audioflamingo3", "audio"),  # as many features as masks leave
    ("qwen2_5_omni_thinker", "audio"),  # whose lengths make positions
    ("molmo2", "image"),  # several crops each, which tokens pool
    ("molmo2", "video"),
    ("qwen2_5_omni_thinker", "image+audio"),
    ("qwen3_omni_moe_thinker", "image+video+audio"),
]


def _on_one_rank(family: str, modality: str) -> Step:
    model = tiny_media_model(family)
    whole = joined_batch(model, modality.split("+"))
    count = int((whole["labels"][:, 1:] != IGNORED_LABEL).sum())
    return step(model, model(**whole, num_items_in_batch=count, use_cache=False).loss)


def _on_ring(rank: int, cases: Sequence[tuple[str, str]], options: Mapping[str, str]) -> list[Step]:
    cp, found = ContextParallel(dist.group.WORLD, ranks_per_node=2, **options), []
    for family, modality in cases:
        model = tiny_media_model(family)
        found.append(step_on_ring(model, joined_batch(model, modality.split("+")), cp))
    return found


def _check(ranks: int, cases: Sequence[tuple[str, str]], **options: str) -> None:
    by_rank = run_ranks(_on_ring, ranks, cases, options, timeout_s=240.0)
    for found, case in zip(by_rank[0], cases, strict=True):
        check_step(found, _on_one_rank(*case), case)


def test_each_way_to_give_images_equals_one_rank() -> None:
    _check(4, SOME)


def test_several_ways_at_once_equal_one_rank() -> None:
    _check(2, [(family, modality) for family, modality in SOME if "+" in modality])


def test_layouts_that_balance_groups_of_images_equal_one_rank() -> None:
    _check(4, [("molmo2", "image"), ("molmo2", "video"), ("paligemma", "image")], layout="auto")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4] if os.environ.get("BURST_SOAK") else [2])
@pytest.mark.parametrize(
    "cases", [ALL[n : n + SHARED] for n in range(0, len(ALL), SHARED)], ids=lambda cases: cases[0][0]
)
def test_all_examined_families_equal_one_rank(cases: Sequence[tuple[str, str]], ranks: int) -> None:
    _check(ranks, cases)


def _refused(rank: int, family: str, joined: bool, message: str) -> str:
    cp, model = ContextParallel(dist.group.WORLD), tiny_media_model(family)
    whole = media_batch(model, "audio")
    if joined:  # the tokens of two clips follow each other
        row = whole["input_ids"][0]
        row.copy_(torch.cat([row[row < FIRST_OF_MEDIA], row[row >= FIRST_OF_MEDIA].sort().values]))
    local = shard_batch(whole, cp)
    prepare(model)
    with pytest.raises(ValueError, match=message) as caught:
        model(**local, use_cache=False)
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "joined", "message"),
    [
        ("fun_asr_nano", False, "its adaptor has attention of its own that transformers cannot set"),
        ("audioflamingo3", True, "put a token of text between two of them"),
    ],
)
def test_what_ranks_cannot_share_is_refused_on_every_rank(family: str, joined: bool, message: str) -> None:
    assert len(set(run_ranks(_refused, 2, family, joined, message))) == 1


def test_crops_that_do_not_fit_are_refused() -> None:
    given = media_batch(tiny_media_model("molmo2"))
    names = ("pixel_values", "image_token_pooling", "image_grids")
    pixels, pooling, grids = (given[name] for name in names)
    for misfit, message in (
        ((pixels[:-1], pooling, grids), "patches of 8 crops of 16, but pixel_values has 7 crops"),
        ((pixels, pooling, grids[:2]), "image_grids says that there are 18 tokens, but image_token_pooling has 28"),
    ):
        with pytest.raises(ValueError, match=message):
            units_of(names[0], dict(zip(names, misfit, strict=True)), by_frame=False)


def test_texts_with_one_image_beside_others_with_several_are_refused() -> None:
    given = {"pixel_values": torch.zeros(3, 2, 3, 4, 4), "image_sizes": torch.ones(3, 2)}
    for numbers in ([1, 1, 1], [3]):
        units_of("pixel_values", {**given, "batch_num_images": torch.tensor(numbers)}, by_frame=False)
    with pytest.raises(
        ValueError, match="has texts with one image, which is cut into tiles, beside texts with several"
    ):
        units_of("pixel_values", {**given, "batch_num_images": torch.tensor([2, 1])}, by_frame=False)


def test_families_that_nobody_examined_and_batch_norms_are_refused() -> None:
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(4))
    module.config = SimpleNamespace(model_type="unheard_of")  # type: ignore[assignment]
    assert "how ranks could share images has not been examined" in why_not(module, "image")
    module.config.model_type = "llava"
    assert "BatchNorm" in why_not(module, "image")
    assert not why_not(module.eval(), "image")
    assert "how ranks could share audio has not been examined" in why_not(module, "audio")
