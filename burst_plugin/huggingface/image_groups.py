"""Which tokens of a batch attend to each other both ways: the tokens of an image, of all images, or of a prompt.

transformers numbers groups of tokens over a row, so that on a shard their numbers are wrong. A shard has the types of
all tokens of its batch; which of them make groups is known by the kind of model:

    types of tokens          0 0 1 1 1 0 1 1
    each run of type 1       . . a a a . b b      Gemma 3, and Gemma 4 with types 1 and 2
    all of type 1            . . a a a . a a      Molmo 2, and HRM-Text, whose prompt has type 1
    all of type 0            a a . . . a . .      PaliGemma, whose answer has type 1
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_plugin.batch import LayerMask, SequenceShard
from burst_plugin.sequence.batch_masks import TypeRuns
from burst_plugin.sequence.masks import BidirectionalSpans, Causal, Mask, PerRow


class GroupRule(NamedTuple):
    """A rule that says which tokens of a row form groups, within which tokens attend to each other both ways.

    name: the entry of a batch with the tokens' types, such as "token_type_ids".
    types: the types of the tokens that are in groups.
    is_one: whether all these tokens of a row are one group; else every run of consecutive ones is a group of its own.
    """

    name: str
    types: frozenset[int]
    is_one: bool = False


_OF_GEMMA4 = GroupRule("mm_token_type_ids", frozenset({1, 2}))
GROUP_RULES: Mapping[str, GroupRule] = MappingProxyType(
    {
        "gemma3": GroupRule("token_type_ids", frozenset({1})),
        "gemma4": _OF_GEMMA4,
        "gemma4_unified": _OF_GEMMA4,
        "hrm_text": GroupRule("token_type_ids", frozenset({1}), is_one=True),
        "molmo2": GroupRule("mm_token_type_ids", frozenset({1}), is_one=True),
        "paligemma": GroupRule("token_type_ids", frozenset({0}), is_one=True),
    }
)
"""By the `model_type` of a model's configuration."""
MAKES_MASKS = ("paligemma",)
"""Kinds of models that make all masks themselves, causal ones, whatever their language models are configured for."""


class MarkedTurn(NamedTuple):
    """The types of new tokens that come to a cache, in the form that `SequenceShard` has for a batch.

    token_types: by the name of the batch's entry of types, for each row its runs of new tokens of one type, (start,
        stop, type), in positions of the whole row.
    positions: the positions of this rank's new tokens in their rows, [B, n], int64 on the CPU.
    length: the number of tokens of the longest row, new tokens included.
    """

    token_types: Mapping[str, tuple[TypeRuns, ...]]
    positions: Tensor
    length: int


def group_rule(model: torch.nn.Module) -> GroupRule | None:
    """Return the rule that says which tokens a model of transformers groups; None if no rule is known."""
    config: Any = getattr(model, "config", None)
    return GROUP_RULES.get(getattr(config, "model_type", ""))


def layer_mask(model: torch.nn.Module) -> LayerMask | None:
    """Return the function to pass to `shard_batch` as `layer_mask` for a model; None if `layout="auto"` needs none.

    It makes the model's mask from the types of a batch's tokens. `layout="auto"` balances work by this mask in models
    that make all images of a row, or a whole prompt, one group. Single images of a few hundred tokens, each a group
    of its own, make no difference.

        local = shard_batch(batch, cp, layer_mask=layer_mask(model))
    """
    rule = next(filter(None, map(group_rule, model.modules())), None)
    return partial(_mask_of_types, rule) if rule is not None and rule.is_one else None


def _mask_of_types(rule: GroupRule, types: Mapping[str, tuple[TypeRuns, ...]]) -> Mask:
    rows = types.get(rule.name, ())
    return _mask(rows, rule, None) if any(_spans(row, rule) for row in rows) else Causal()


def group_mask(shard: SequenceShard | MarkedTurn, rule: GroupRule, left: int | None = None) -> Mask | None:
    """Return the mask of a whole batch that lets tokens attend to earlier tokens and to their group.

    shard: the batch, or the new tokens of a cache, with the types of all tokens. rule: which types make groups.
    left: how many tokens before it a token attends to besides its group; None is no bound.

    Returns None for a batch without groups. Documents, padding and windows around groups are left to other masks.
    """
    rows = shard.token_types.get(rule.name, ())
    return _mask(rows, rule, left) if any(_spans(row, rule) for row in rows) else None


def groups_agree(shard: SequenceShard | MarkedTurn, rule: GroupRule, blocks: Tensor) -> bool:
    """Return whether a model puts the same tokens of this rank in groups as `rule` does.

    If the rule makes one group of all, the model must have numbered it 0 everywhere.

    blocks: [B, S_local], integers, the group that the model's mask gives each token, -1 for none. The host waits for
        it.
    """
    rows = shard.token_types[rule.name]
    length = shard.length if isinstance(shard, MarkedTurn) else shard.tokens.length
    grouped = torch.full((len(rows), length), 0 in rule.types, dtype=torch.bool, device="cpu")
    for row, runs in zip(grouped, rows, strict=True):
        row[: shard.length] = False
        for start, stop in _spans(runs, rule):
            row[start:stop] = True
    if isinstance(shard, MarkedTurn):
        local = grouped.gather(1, shard.positions)
    else:
        local = shard.cp.shard(grouped, 1, shard.tokens)
    theirs = blocks.cpu()
    numbers = theirs[theirs >= 0]
    return torch.equal(local, theirs >= 0) and not (rule.is_one and bool((numbers != 0).any()))


@lru_cache(maxsize=8)
def _mask(rows: tuple[TypeRuns, ...], rule: GroupRule, left: int | None) -> Mask:
    masks = [_mask_of_row(_spans(row, rule), rule, left) for row in rows]
    return masks[0] if len(set(masks)) == 1 else PerRow(tuple(masks))


def _mask_of_row(spans: tuple[tuple[int, int], ...], rule: GroupRule, left: int | None) -> Mask:
    return BidirectionalSpans(spans, (0,) * len(spans) if rule.is_one else None, left)


@lru_cache(maxsize=64)
def _spans(runs: TypeRuns, rule: GroupRule) -> tuple[tuple[int, int], ...]:
    """Return the spans of tokens in groups; runs of different types that touch are one span."""
    spans: list[tuple[int, int]] = []
    for start, stop, kind in runs:
        if kind not in rule.types:
            continue
        if spans and spans[-1][1] == start:
            spans[-1] = (spans[-1][0], stop)
        else:
            spans.append((start, stop))
    return tuple(spans)
