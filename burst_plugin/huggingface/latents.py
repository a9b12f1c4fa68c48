"""Multi-head latent attention of transformers on a ring: latents travel, and not the keys and values made of them.

All its families make keys and values of latents in a method `expand_kv`, by a linear layer `kv_b_proj`. On a shard
the method returns empty tensors in their place, and the attention function finds the latents on the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_plugin.activations.replaced_forward import ReplacedForward
from burst_plugin.context import ContextParallel
from burst_plugin.frameworks.wrapping import wrap
from burst_plugin.huggingface.mask_recipes import cache_of_forward, shard_among
from burst_plugin.huggingface.text_only import text_modules
from burst_plugin.latents import latent_attention, sends_latents

_SHARD, _HELD = "_burst_plugin_shard", "_burst_plugin_latents"  # attributes of layers, in the middle of a forward
_LINEAR = (
    torch.nn.Linear,
    *(torch.nn.Identity, torch.nn.Dropout, torch.nn.ModuleDict, torch.nn.ParameterDict),  # as PEFT's LoRA has
)
_WRAPPED = "_burst_plugin_wrapped"


class Latents(NamedTuple):
    """The compressed form of a layer's keys and values in multi-head latent attention.

    c: the compressed latents, [B, 1, S, C].
    shared: the part of the keys that all heads share, with rotary embeddings applied, [B, 1, S, R].
    """

    c: Tensor
    shared: Tensor


def use_latents(model: torch.nn.Module) -> None:
    """Have a model's layers of multi-head latent attention exchange latents, where `Strategy.latents` says so.

    Replaces the `expand_kv` of their classes, and adds hooks to the layers; repeated calls change nothing.
    """
    for layer in text_modules(model):
        kind: Any = type(layer)
        if not hasattr(kind, "expand_kv"):
            continue
        if not hasattr(kind.expand_kv, _WRAPPED):
            setattr(wrap(kind, "expand_kv", _expanded_later), _WRAPPED, True)
        if _note_shard not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_note_shard, with_kwargs=True)
            layer.register_forward_hook(_forget_shard, always_call=True)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _note_shard(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note the shard that a layer is given, also where a checkpoint computes it again."""
    setattr(layer, _SHARD, shard_among(args, kwargs))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forget_shard(layer: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Note the end of a layer, also of one that failed."""
    vars(layer).pop(_SHARD, None)
    vars(layer).pop(_HELD, None)


def _expanded_later(original: Callable[..., Any], layer: Any, c: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
    """Take the place of a layer's `expand_kv`: return empty keys and values on shards, and hold the latents."""
    shard = vars(layer).get(_SHARD)
    if shard is None or cache_of_forward() is not None or not sends_latents(shard.cp, _problem(layer)):
        expanded: tuple[Tensor, Tensor] = original(layer, c, shared)
        return expanded
    batch, _, length, _ = c.shape
    heads = layer.kv_b_proj.out_features // (layer.qk_nope_head_dim + layer.v_head_dim)
    empty = c.new_empty(1)
    key = empty.expand(batch, heads, length, layer.qk_nope_head_dim + shared.shape[-1])
    setattr(layer, _HELD, (key, Latents(c, shared)))
    return key, empty.expand(batch, heads, length, layer.v_head_dim)


def held_latents(layer: torch.nn.Module, key: Tensor) -> Latents | None:
    """Return the latents that a layer holds in place of keys and values, and remove them from it; None for none.

    layer: a layer of attention that has just called `expand_kv`. key: the keys that it passes to attention, which are
        empty if it holds latents.

    Raises ValueError if the layer has replaced the empty keys by others.
    """
    empty, latents = vars(layer).pop(_HELD, (None, None))
    if empty is not None and empty is not key:
        raise ValueError(
            f"{type(layer).__name__} changes keys after it made them from latents and before attention; use "
            "latents='expand'"
        )
    held: Latents | None = latents
    return held


def up_weight(layer: Any, c: Tensor) -> Tensor:
    """Return the weight that makes a layer's keys and values of latents, [heads * (own key dim + value dim), C].

    layer: has `kv_b_proj`. c: latents [..., C]; only their dtype, device and C matter.

    The layer itself computes it from an identity matrix, so that hooks gather parameters, and adapters add their
    weights. These hooks look at whether inputs need gradients.
    """
    identity = torch.eye(c.shape[-1], dtype=c.dtype, device=c.device)
    identity.requires_grad_(
        torch.is_grad_enabled() and any(each.requires_grad for each in layer.kv_b_proj.parameters())
    )
    weight: Tensor = layer.kv_b_proj(identity).t()
    return weight


def attend_to_latents(
    tensors: tuple[Tensor, Tensor, Tensor], weight: Tensor, cp: ContextParallel, terms: Mapping[str, Any]
) -> Tensor:
    """Return attention [B, S, H, Dv] of this rank's queries to the latents of all ranks; collective.

    tensors: queries [B, S, H, D], latents [B, S, 1, C], and the part of keys that all heads share, [B, S, 1, R], with
        rotary embeddings applied.
    weight: as `up_weight` returns it, [H * (D - R + Dv), C].
    terms: keyword arguments of `latent_attention`, `scores` among them.

    Keys that queries selected one by one are not expanded, since many queries select each: queries and outputs are
    projected instead, to the space of latents and back.
    """
    q, c, shared = tensors
    out: Tensor
    if terms.get("selection") is None:
        out = latent_attention(q, c, shared, cp, weight=weight, **terms)
        return out
    dim, by_head = q.shape[-1] - shared.shape[-1], weight.view(q.shape[2], -1, weight.shape[1])
    scores = terms["scores"]
    if scores.scale is None:
        scores = replace(scores, scale=q.shape[-1] ** -0.5)
    absorbed = torch.cat((torch.einsum("bshd,hdc->bshc", q[..., :dim], by_head[:, :dim]), q[..., dim:]), -1)
    out = latent_attention(absorbed, c, shared, cp, **{**terms, "scores": scores})
    projected: Tensor = torch.einsum("bshc,hdc->bshd", out, by_head[:, dim:])
    return projected


def _problem(layer: Any) -> str:
    """Return why a layer cannot send latents; "" if it can."""
    name, projection = type(layer).__name__, layer.kv_b_proj
    if isinstance(vars(layer).get("forward"), ReplacedForward):
        return f"{name} attends to a few heads at a time (head_chunk)"
    parts = [module for module in projection.modules() if not any(module.children())]
    for part in parts:
        drops = isinstance(part, torch.nn.Dropout) and layer.training and part.p > 0
        if drops or type(part) not in _LINEAR:
            return f"kv_b_proj of {name} has a {type(part).__name__}, which need not be linear"
    if any(isinstance(module, torch.nn.Linear) and module.bias is not None for module in parts):
        return f"kv_b_proj of {name} has a bias"
    return ""
