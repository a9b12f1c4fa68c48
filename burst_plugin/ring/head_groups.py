"""Calls whose groups of heads have masks of their own: cut into one call for each, and put together again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from burst_plugin.ring.request import Inputs, Outputs, Request, check_extras, check_kinds, check_tensors
from burst_plugin.sequence.masks import Mask


def by_head_group(inputs: Inputs, request: Request) -> list[tuple[Inputs, Request]]:
    """Return one call, inputs and request, for each group of heads that has a mask of its own.

    The list is empty where heads share the mask, or where the call cannot be cut, which `choices.make_plan` refuses,
    so that all ranks hear of it.
    """
    groups = request.mask.head_groups if isinstance(request.mask, Mask) else None
    if groups is None or why_uncut(inputs, request):
        return []
    if groups == 1:
        return [(inputs, request._replace(mask=request.mask.of_head_group(0)))]
    return [(_inputs_of(inputs, n, groups), _request_of(request, n, inputs.q.shape[2])) for n in range(groups)]


def why_uncut(inputs: Inputs, request: Request) -> str:
    """Return why a call cannot be cut into one call for each of its mask's groups of heads; "" if it can.

    The first reason found is returned, such as tensors of wrong shapes, or heads that the groups do not divide.
    """
    try:
        check_kinds(inputs, request)
        if request.latents:
            return "latents belong to all heads, but the mask has groups of heads; expand keys and values first"
        check_tensors(*inputs[:3])
        check_extras(inputs, inputs.k.shape[1] if inputs.bias is None else inputs.bias.shape[-1])
        request.scores.resolved(1, inputs.q.shape[2])
    except ValueError as error:
        return str(error)
    groups, q_heads, kv_heads = request.mask.head_groups, inputs.q.shape[2], inputs.k.shape[2]
    if groups is None:
        return ""
    if q_heads % groups or (kv_heads % groups and groups % kv_heads):
        return (
            f"the mask is for {groups} groups of heads, into which {q_heads} query heads and {kv_heads} key/value "
            "heads cannot be cut; give one mask for each key/value head, or one for all heads"
        )
    if request.scores.dropout and groups > 1:
        return (
            f"dropout={request.scores.dropout} depends on the number of a head, and the mask's {groups} groups are "
            "calls of their own, each with a head 0; use dropout=0.0, or a mask that all heads share"
        )
    return ""


def joined(outputs: Sequence[Outputs]) -> Outputs:
    """Return the outputs of calls for groups of heads, in their order, as the outputs of one call for all heads."""
    lse = [group.lse for group in outputs if group.lse is not None]
    largest = [group.max_logits for group in outputs if group.max_logits is not None]
    return Outputs(
        torch.cat([group.out for group in outputs], 2),
        torch.cat(lse, 1) if lse else None,
        torch.cat(largest) if largest else None,
    )


def _inputs_of(inputs: Inputs, group: int, groups: int) -> Inputs:
    """Return the heads of one group; several groups may have the same key/value head."""

    def heads_of(count: int) -> slice:
        first = group * count // groups
        return slice(first, max(first + 1, (group + 1) * count // groups))

    q_heads, kv_heads = heads_of(inputs.q.shape[2]), heads_of(inputs.k.shape[2])
    bias = inputs.bias
    return Inputs(
        inputs.q[:, :, q_heads],
        inputs.k[:, :, kv_heads],
        inputs.v[:, :, kv_heads],
        None if inputs.sink is None else inputs.sink[q_heads],
        bias if bias is None or bias.shape[1] == 1 else bias[:, q_heads],
        _selection_of(inputs, kv_heads),
    )


def _selection_of(inputs: Inputs, kv_heads: slice) -> Tensor | None:
    """Return the selected keys of some key/value heads, [B, G, S, n]."""
    selection = inputs.selection
    if selection is None or selection.dim() == 3:
        return selection
    heads_per_list = inputs.k.shape[2] // selection.shape[1]
    heads = range(kv_heads.start, kv_heads.stop)
    lists = sorted({head // heads_per_list for head in heads})
    if len(heads) % len(lists):  # lists for unlike numbers of these heads: one for each
        return selection[:, [head // heads_per_list for head in heads]]
    return selection[:, lists[0] : lists[-1] + 1]


def _request_of(request: Request, group: int, q_heads: int) -> Request:
    """Return the request for one group of heads."""
    groups = request.mask.head_groups
    assert groups is not None, "the mask has groups of heads"
    some = slice(group * q_heads // groups, (group + 1) * q_heads // groups)
    return request._replace(mask=request.mask.of_head_group(group), scores=request.scores.of_heads(some))
