"""Attention modules of transformers that compute scores by themselves, rather than by its attention interface.

Their `forward` takes another way once they are given a `MaskRecipe`: the steps before and after the scores are done
here, and the scores are computed as `attn_implementation="burst"` computes them for other models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from burst_plugin.frameworks.wrapping import by_name, wrap
from burst_plugin.huggingface import attention
from burst_plugin.huggingface.mask_recipes import MaskRecipe, cache_of_forward

_MARK = "_burst_plugin_wrapped"
_Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys and values, [B, heads, S, D]


class _Family(NamedTuple):
    """The steps of one kind of modules besides scores. All functions get the module, and its arguments by name.

    project: returns queries, keys and values.
    terms: returns the options of the attention function.
    finish: returns the module's outputs from the outputs of all heads, [B, S, H].
    mask: for ALiBi, turns the mask of a whole batch, True for keys that are seen, into the form of the module.
    """

    project: Callable[[Any, Mapping[str, Any]], _Heads]
    terms: Callable[[Any], dict[str, Any]]
    finish: Callable[[Any, Tensor, Mapping[str, Any]], Any]
    mask: Callable[[Tensor, torch.dtype], Tensor] | None = None


def old_attention(pretrained: PreTrainedModel) -> list[type[torch.nn.Module]]:
    """Return the classes of a model's attention modules that bypass transformers' interface and can be adapted."""
    kinds = {type(module) for module in pretrained.modules()}
    return [kind for kind in kinds if _family(kind) is not None and not _rounds_alibi(pretrained)]


def problems_of_old_attention(pretrained: PreTrainedModel) -> list[str]:
    """Return the reasons why a model's attention modules that bypass transformers' interface cannot run on a ring.

    Empty if the model has none, or all can be adapted.
    """
    if _rounds_alibi(pretrained):
        return [
            "its ALiBi is rounded to bfloat16 in a way that depends on where a token is in the batch, which a ring "
            "does not repeat; use a Falcon with rotary embeddings (alibi=False)"
        ]
    if pretrained._can_set_attn_implementation() or old_attention(pretrained):
        return []
    told = (
        "its attention does not go through transformers' AttentionInterface; call burst_plugin.burst_attention there"
    )
    return [told]


def _rounds_alibi(pretrained: PreTrainedModel) -> bool:
    return pretrained.config.model_type == "falcon" and bool(pretrained.config.alibi)


def adapt(pretrained: PreTrainedModel) -> bool:
    """Have attention modules that bypass transformers' interface run on the ring; return whether a model has any.

    Replaces the `forward` of their classes, once.
    """
    kinds = old_attention(pretrained)
    for kind in kinds:
        if not hasattr(kind.forward, _MARK):
            family = _family(kind)
            assert family is not None
            setattr(wrap(kind, "forward", partial(_attend, family)), _MARK, True)
    return bool(kinds)


def _family(kind: type) -> _Family | None:
    return next((_FAMILIES[each.__name__] for each in kind.__mro__ if each.__name__ in _FAMILIES), None)


def _attend(family: _Family, original: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Take the place of a module's `forward`."""
    arguments = by_name(partial(original, module), args, kwargs)
    recipe = arguments.get("attention_mask")
    if not isinstance(recipe, MaskRecipe):
        return original(module, *args, **kwargs)
    is_whole = recipe.shard is None and cache_of_forward() is None
    if is_whole and family.mask is not None:
        attention.check_not_training(module)
        mask = recipe.tensor(always=True)
        assert mask is not None
        return original(
            module, **{**arguments, "attention_mask": family.mask(mask, arguments["hidden_states"].dtype)}
        )
    q, k, v = family.project(module, arguments)
    cache = next((x for x in arguments.values() if isinstance(x, Cache)), None)
    if cache is not None:
        k, v = cache.update(k, v, module.layer_idx if hasattr(module, "layer_idx") else module.layer_id)
    if is_whole:  # PyTorch's attention takes as many heads of keys as of queries
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if getattr(module, "attention_type", None) == "local":
        recipe = recipe.within(module.config.window_size)
    terms = {**family.terms(module), "output_attentions": arguments.get("output_attentions")}
    terms["sliding_window"] = recipe.window
    if not module.training:
        terms["dropout"] = 0.0
    out, _ = attention.forward(module, q, k, v, recipe, **terms)
    return family.finish(module, out.flatten(2), arguments)


def _heads(x: Tensor, heads: int) -> Tensor:
    """Return [B, heads, S, D] of [B, S, heads * D]."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def _interleaved(x: Tensor, groups: int, heads: int) -> _Heads:
    """Return the heads of a projection that has `groups` times `heads` query heads, then a key and a value."""
    x = x.reshape(*x.shape[:2], groups, heads + 2, -1)
    return x[..., :-2, :].flatten(2, 3).transpose(1, 2), x[..., -2, :].transpose(1, 2), x[..., -1, :].transpose(1, 2)


def _rotated(x: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """Return queries or keys with a rotary embedding on as many dims as the angles have."""
    cos, sin = (angle.unsqueeze(1) for angle in arguments["position_embeddings"])
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    left, right = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-right, left), -1) * sin, rest), -1)


def _slopes(heads: int) -> tuple[float, ...]:
    """Return the slopes of ALiBi (arXiv 2108.12409): the even ones of a power of two, then the others."""
    power = 2 ** math.ceil(math.log2(heads))
    every = [2.0 ** (-8 * head / power) for head in range(1, power + 1)]
    return tuple(every if power == heads else (every[1::2] + every[::2])[:heads])


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask as numbers that are added to scores: 0 where it is True, else the lowest of the type."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


# --------------------------------------------------------------------------------------------------- one by one


def _falcon(module: Any, arguments: Mapping[str, Any]) -> _Heads:
    fused = module.query_key_value(arguments["hidden_states"])
    q, k, v = _interleaved(fused, module.num_kv_heads, module.num_heads // module.num_kv_heads)
    return _rotated(q, arguments), _rotated(k, arguments), v


def _bloom(module: Any, arguments: Mapping[str, Any]) -> _Heads:
    return _interleaved(module.query_key_value(arguments["hidden_states"]), module.num_heads, 1)


def _bloom_output(module: Any, out: Tensor, arguments: Mapping[str, Any]) -> Any:
    is_sliced = module.slow_but_exact and module.pretraining_tp > 1  # then transformers leaves the bias out
    out = torch.nn.functional.linear(out, module.dense.weight) if is_sliced else module.dense(out)
    dropped = torch.nn.functional.dropout(out, module.hidden_dropout, module.training)
    return arguments["residual"] + dropped, None


def _mpt(module: Any, arguments: Mapping[str, Any]) -> _Heads:
    fused = module.Wqkv(arguments["hidden_states"])
    if module.clip_qkv:
        fused = fused.clamp(-module.clip_qkv, module.clip_qkv)
    q, k, v = (_heads(x, module.n_heads) for x in fused.chunk(3, -1))
    return q, k, v


def _neox_japanese(module: Any, arguments: Mapping[str, Any]) -> _Heads:
    q, k, v = _interleaved(module.query_key_value(arguments["hidden_states"]), module.num_attention_heads, 1)
    return _rotated(q, arguments), _rotated(k, arguments), v


def _separate(module: Any, arguments: Mapping[str, Any]) -> _Heads:
    if "key_value_states" in arguments:
        raise ValueError(f"{type(module).__name__} attends to an encoder, whose masks a shard does not have")
    x = arguments["hidden_states"]
    q, k, v = (_heads(project(x), module.num_heads) for project in (module.q_proj, module.k_proj, module.v_proj))
    return q, k, v


_FAMILIES = {
    "FalconAttention": _Family(
        project=_falcon,
        terms=lambda module: {"scaling": module.inv_norm_factor},  # without dropout
        finish=lambda module, out, arguments: (module.dense(out), None),
    ),
    "BloomAttention": _Family(
        project=_bloom,
        terms=lambda module: {
            "scaling": module.inv_norm_factor,
            "dropout": module.attention_dropout.p,
            "alibi_slopes": _slopes(module.num_heads),
        },
        finish=_bloom_output,
        mask=_added,
    ),
    "MptAttention": _Family(
        project=_mpt,
        terms=lambda module: {
            "scaling": module.softmax_scale,
            "dropout": module.attn_dropout_p,
            "alibi_slopes": _slopes(module.n_heads),
        },
        finish=lambda module, out, arguments: (module.out_proj(out), None),
        mask=lambda mask, dtype: ~mask,
    ),
    "GPTNeoSelfAttention": _Family(
        project=_separate,
        terms=lambda module: {"scaling": 1.0, "dropout": module.attn_dropout.p},
        finish=lambda module, out, arguments: (module.resid_dropout(module.out_proj(out)), None),
    ),
    "XGLMAttention": _Family(
        project=_separate,
        terms=lambda module: {"scaling": module.scaling, "dropout": module.dropout},
        finish=lambda module, out, arguments: (module.out_proj(out), None),
    ),
    "GPTNeoXJapaneseAttention": _Family(
        project=_neox_japanese,
        terms=lambda module: {"scaling": 1 / module.norm_factor, "dropout": module.attention_dropout.p},
        finish=lambda module, out, arguments: (module.dense(out), None, module.dense_bias),
    ),
}
