"""Images in a forward with a `RingCache`: features of this rank's tokens, and groups of tokens in whole rows.

`generate` encodes all images on every rank before the first forward; each rank keeps the rows of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burst_plugin.huggingface.image_groups import MarkedTurn, group_mask, group_rule
from burst_plugin.huggingface.media.families import modalities_of, token_of
from burst_plugin.huggingface.media.features import OutputRows
from burst_plugin.inference import Turn
from burst_plugin.inference.columns import Columns
from burst_plugin.sequence.batch_masks import type_runs

FEATURES = "mm_encoder_outputs"  # the argument of a forward


def features_of_rank(model: PreTrainedModel, given: Mapping[str, Any], take: Callable[[Tensor], Tensor]) -> Any:
    """Return the features of images and videos that a forward got, cut to the rows of this rank's tokens.

    given: the arguments of the forward by name, for all new tokens; its `mm_encoder_outputs` are the features, by
        modality.
    take: takes a tensor [B, n, ...] of all new tokens, and returns the part of this rank's tokens.

    Returns features in the form of `mm_encoder_outputs`. Raises ValueError if there are not as many features as
    placeholder tokens, or `input_ids` are missing.
    """
    features, ids, local_features = given[FEATURES], given.get("input_ids"), {}
    for modality, out in features.items():
        module = next((each for each in model.modules() if modality in modalities_of(each)), None)
        if out is None or module is None:
            continue
        if ids is None:
            raise ValueError("a RingCache finds the places of images by input_ids; give these, not inputs_embeds")
        placeholders = ids == token_of(module, modality)
        rows = OutputRows.of(out)
        x = torch.cat(rows.tensors, 1)
        if len(x) != int(placeholders.sum()):
            raise ValueError(
                f"the prompt has {int(placeholders.sum())} tokens of {modality}s, but {type(module).__name__} makes "
                f"{len(x)} features of the {modality}s; give what its processor returns for this prompt"
            )
        numbers = (placeholders.flatten().cumsum(0) - 1).view(ids.shape)
        local_features[modality] = rows.put(x[take(numbers)[take(placeholders)].to(x.device)])
    return {**features, **local_features}


def marked_turn(
    model: PreTrainedModel, types: Tensor | None, real: Tensor, turn: Turn | Columns
) -> MarkedTurn | None:
    """Return the types of a turn's new tokens, to make masks of groups of tokens, such as an image's.

    types: [B, n], the type of every new token; None if the batch has none.
    real: [B, n], bool, which of the tokens are no padding.
    turn: which of the tokens this rank computes.

    Returns None if none of the tokens is in a group.
    """
    rule = group_rule(model)
    if rule is None or types is None:
        return None
    inner = turn.turn if isinstance(turn, Columns) else turn
    rows = []
    for row, kept, start in zip(types.cpu(), real, inner.starts, strict=True):
        (runs,) = type_runs(row[kept].unsqueeze(0))
        rows.append(tuple((first + start, stop + start, kind) for first, stop, kind in runs))
    marked = MarkedTurn({rule.name: tuple(rows)}, turn.positions, max(inner.stops))
    return None if group_mask(marked, rule) is None else marked
