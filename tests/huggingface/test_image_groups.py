"""Tokens of images that attend to each other both ways, in language models on a ring, against one rank without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from burst_plugin import BidirectionalSpans, Causal, ContextParallel, PerRow, SlidingWindow, shard_batch
from burst_plugin.batch import IGNORED_LABEL
from burst_plugin.huggingface import layer_mask, prepare
from burst_plugin.huggingface.image_groups import GROUP_RULES, GroupRule, group_mask
from burst_plugin.huggingface.mask_recipes import MaskRecipe
from burst_plugin.sequence.batch_masks import type_runs
from tests.support.deepspeed_run import Batch, draw
from tests.support.families import SINCE_5_24
from tests.support.ranks import run_ranks
from tests.support.wrapper_runs import check_on_ring
from tests.support.wrappers import tiny_wrapper

pytestmark = [
    pytest.mark.huggingface,
    SINCE_5_24,
]

LENGTH = 33  # not a multiple of the ranks, so that padding is added
# Images with one token between them, longer than a window, at either end of a row, and one of two types.
TYPES = torch.tensor(
    [
        [0] * 3 + [1] * 7 + [0] + [1] * 12 + [0] * 4 + [1] * 6,
        [1] * 7 + [0] * 4 + [1] * 4 + [2] * 5 + [0] + [1] + [0] * 11,
    ]
)
PROMPT = (torch.arange(LENGTH) >= torch.tensor([[21], [14]])).long()  # 0 in the prompt, 1 in the answer
DOCUMENTS = (14, 1, 18)
FAMILIES = {
    "gemma3": "token_type_ids",
    "gemma4 with images": "mm_token_type_ids",
    "gemma4_unified with images": "mm_token_type_ids",
    "hrm_text": "token_type_ids",
    "molmo2": "mm_token_type_ids",
    "paligemma": "token_type_ids",
    "paligemma2": "token_type_ids",
}


def _types(family: str, rows: int = 2) -> Batch:
    types = PROMPT if family.startswith("paligemma") else 1 - PROMPT if family == "hrm_text" else TYPES
    types = types.where(types < 2, 1) if "gemma4" not in family else types  # others have one kind alone
    return {FAMILIES[family]: types[:rows]}


def _plain(family: str) -> Batch:
    return {**draw(1, rows=2, length=LENGTH)[0], **_types(family)}


def _packed(family: str) -> Batch:
    """Documents in one row, of which the first ends with an image, and the last begins with one."""
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    batch = draw(1, rows=1, length=LENGTH, seed=1)[0]
    batch = {**batch, "labels": batch["labels"].masked_fill(positions == 0, IGNORED_LABEL)}
    return {**batch, "position_ids": positions, **_types(family, 1)}


def _padded(family: str) -> Batch:
    batch = draw(1, rows=2, length=LENGTH, seed=2)[0]
    real = torch.arange(LENGTH) >= torch.tensor([[2], [9]])
    first = torch.arange(LENGTH) == torch.tensor([[2], [9]])
    labels = batch["labels"].masked_fill(first | ~real, IGNORED_LABEL)
    return {**batch, "attention_mask": real.long(), "labels": labels, **_types(family)}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_losses_and_gradients_equal_eager_on_one_rank(ranks: int) -> None:
    check_on_ring({family: _plain(family) for family in FAMILIES}, ranks)


def test_documents_stay_apart_also_between_images() -> None:
    check_on_ring({family: _packed(family) for family in FAMILIES}, 2, DOCUMENTS)


def test_padding_is_not_attended_to() -> None:
    check_on_ring({family: _padded(family) for family in FAMILIES}, 2, has_checkpoints=True)


def test_striped_tokens_and_embeddings() -> None:
    batch = _plain("gemma3")
    embeddings = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(0))
    del batch["input_ids"]
    check_on_ring({"gemma3": {**batch, "inputs_embeds": embeddings}}, 2, layout="striped")


# ------------------------------------------------------------------------------------------------------- the masks


RUNS = GroupRule("token_type_ids", frozenset({1, 2}))
ONE = GroupRule("token_type_ids", frozenset({1}), is_one=True)


def _shard(types: torch.Tensor) -> Any:
    ids = torch.ones(types.shape, dtype=torch.int64)
    return shard_batch({"input_ids": ids, "token_type_ids": types}, ContextParallel())["burst"]


def test_runs_are_read_row_by_row() -> None:
    types = torch.tensor([[0, 0, 1, 2, 0], [3, 3, 3, 3, 3]])
    assert type_runs(types) == (((0, 2, 0), (2, 3, 1), (3, 4, 2), (4, 5, 0)), ((0, 5, 3),))


def test_groups_are_runs_or_one_for_a_row() -> None:
    shard = _shard(torch.tensor([[0, 1, 2, 0, 1, 0], [1, 1, 0, 0, 0, 1]]))
    runs = PerRow((BidirectionalSpans(((1, 3), (4, 5))), BidirectionalSpans(((0, 2), (5, 6)))))
    assert group_mask(shard, RUNS) == runs
    ones = (BidirectionalSpans(((1, 2), (4, 5)), (0, 0), 3), BidirectionalSpans(((0, 2), (5, 6)), (0, 0), 3))
    assert group_mask(shard, ONE, 3) == PerRow(ones)
    assert group_mask(_shard(torch.tensor([[0, 1, 1], [0, 1, 1]])), RUNS) == BidirectionalSpans(((1, 3),))
    assert group_mask(_shard(torch.zeros(2, 4, dtype=torch.int64)), RUNS) is None


def _recipe(mask_function: Any, types: torch.Tensor, rule: GroupRule | None, **asked: Any) -> MaskRecipe:
    shape = {"batch_size": len(types), "q_length": types.shape[1], "kv_length": types.shape[1]}
    return MaskRecipe(shard=_shard(types), rule=rule, mask_function=mask_function, **shape, **asked)


def test_a_window_is_around_groups_or_beside_them() -> None:
    from transformers import masking_utils as rules

    types = torch.tensor([[0, 1, 1, 0, 1, 1, 1]])
    blocks = rules.blockwise_overlay(torch.tensor([[-1, 0, 0, -1, 1, 1, 1]]))
    window, causal = rules.sliding_window_overlay(4), rules.causal_mask_function
    spans = ((1, 3), (4, 7))
    around = _recipe(rules.and_masks(rules.or_masks(causal, blocks), window), types, RUNS)
    assert around.mask == BidirectionalSpans(spans) & SlidingWindow(3, None)
    beside = _recipe(rules.or_masks(rules.and_masks(window, causal), blocks), types, RUNS, local_size=4)
    assert beside.mask == BidirectionalSpans(spans, None, 3)
    alone = _recipe(rules.or_masks(causal, blocks), types, RUNS)
    assert alone.mask == BidirectionalSpans(spans)
    assert not around.unknown + beside.unknown + alone.unknown


def test_a_rank_without_images_has_the_mask_of_the_others() -> None:
    from transformers import masking_utils as rules

    nothing = rules.blockwise_overlay(torch.full((1, 4), -1))
    recipe = _recipe(rules.or_masks(rules.causal_mask_function, nothing), torch.zeros(1, 4).long(), RUNS)
    assert recipe.mask == Causal()
    assert recipe.unknown == []


@pytest.mark.parametrize("types", [[0, 0, 0, 0], [0, 0, 1, 1]], ids=str)
def test_a_rank_without_images_refuses_groups_that_are_not_known_as_the_others_do(types: list[int]) -> None:
    from transformers import masking_utils as rules

    nothing = rules.blockwise_overlay(torch.full((1, 4), -1))
    recipe = _recipe(rules.or_masks(rules.causal_mask_function, nothing), torch.tensor([types]), None)
    assert ("blockwise_overlay.<locals>.inner_mask" in recipe.unknown) == any(types)


@pytest.mark.parametrize(
    ("groups", "rule"),
    [([0, 0, -1, 1], None), ([0, 0, 0, 1], RUNS), ([-1, -1, -1, -1], RUNS), ([0, 0, -1, 1], ONE)],
    ids=["not known", "another token", "fewer tokens", "another number"],
)
def test_groups_that_are_not_those_of_the_model_are_refused(groups: list[int], rule: GroupRule | None) -> None:
    from transformers import masking_utils as rules

    blocks = rules.blockwise_overlay(torch.tensor([groups]))
    recipe = _recipe(rules.or_masks(rules.causal_mask_function, blocks), torch.tensor([[1, 1, 0, 1]]), rule)
    assert "blockwise_overlay.<locals>.inner_mask" in recipe.unknown


def test_a_model_without_such_groups_refuses_marks_of_images() -> None:
    model = prepare(tiny_wrapper("gemma3"))
    ids = draw(1, rows=1, length=8)[0]["input_ids"]
    local = shard_batch({"input_ids": ids, "mm_token_type_ids": torch.ones_like(ids)}, ContextParallel())
    with pytest.raises(ValueError, match="got mm_token_type_ids that mark tokens of an image"):
        model(**local)
    assert set(GROUP_RULES) == {family.split(" ")[0] for family in FAMILIES} - {"paligemma2"}


def _imbalance(rank: int, family: str) -> list[float]:
    """Of the work of a model's layers: as causal layers are balanced, and as this model's."""
    cp, model = ContextParallel(dist.group.WORLD, layout="auto"), prepare(tiny_wrapper(family))
    ids = torch.ones(1, 4096, dtype=torch.int64)
    types = (torch.arange(4096)[None] < 2048).long()  # images first, or a prompt
    rule = GROUP_RULES[family]
    batch = {"input_ids": ids, rule.name: types if 1 in rule.types else 1 - types}
    found = []
    for mask in (None, layer_mask(model)):
        shard = shard_batch(batch, cp, layer_mask=mask)["burst"]
        found.append(cp.imbalance(group_mask(shard, rule), shard.tokens))
    return found


@pytest.mark.parametrize("family", ["molmo2", "paligemma"])
def test_layouts_balance_groups_of_many_tokens(family: str) -> None:
    causal, groups = run_ranks(_imbalance, 4, family)[0]
    assert groups < 1.05 < 1.14 < causal


def test_groups_of_single_images_are_balanced_as_causal_layers() -> None:
    assert layer_mask(tiny_wrapper("gemma3")) is None
