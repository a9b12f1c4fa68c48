"""Layers of Inkling, Inkling 2 and its loops, whose attention has a learned bias by distance that queries mix.

attention                         on the ring, by `burst_plugin.relative_bias.relative_attention`
  module of the bias              returns its profiles by distance, rather than the bias of all tokens to all
Inkling 2's residuals             attention of a token to its own earlier states: written out, no ring
get_relative_distance             the distances of all tokens to all: not made on shards
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burst_plugin.batch import SHARD_KEY, SequenceShard
from burst_plugin.frameworks.wrapping import by_name
from burst_plugin.huggingface.attention import cast, problem_of_call
from burst_plugin.huggingface.known_code import problem_of_code, replace_once
from burst_plugin.huggingface.mask_recipes import cache_of_forward, forward_in_progress, shard_of_forward
from burst_plugin.huggingface.text_only import text_modules
from burst_plugin.relative_bias import relative_attention

_DISTANCES = "get_relative_distance"
_KNOWN = ("hidden_states", "key_hidden_states", "value_hidden_states", "attention_mask", "conv_mask")
_OnShard = Callable[[Any, SequenceShard, Mapping[str, Any]], Any]


def _inkling(module: Any, shard: SequenceShard, arguments: Mapping[str, Any]) -> tuple[Tensor, None]:
    """Compute Inkling's attention on a shard, in place of `forward`; collective. Returns [B, S_local, E], None."""
    hidden: Tensor = arguments["hidden_states"]
    shape = (*hidden.shape[:2], -1, module.head_dim)
    k, v = (
        convolve(project(hidden), cache=None, conv_mask=arguments.get("conv_mask")).view(shape)
        for project, convolve in ((module.k_proj, module.k_sconv), (module.v_proj, module.v_sconv))
    )
    q = module.q_norm(module.q_proj(hidden).view(shape))
    relative = module.r_proj(hidden).view(*hidden.shape[:2], module.num_heads, -1)
    floor = module.config.log_scaling_n_floor
    if not module.is_sliding and floor is not None:
        counts = (_positions(shard, hidden) + 1).float()
        factor = 1.0 + module.config.log_scaling_alpha * torch.log((counts / floor).clamp(min=1.0))[..., None, None]
        q, relative = ((x.float() * factor).to(x.dtype) for x in (q, relative))
    profiles = module.rel_logits_proj(relative, None, None)
    out = _attend(module, shard, arguments, (q, module.k_norm(k), v, relative), profiles)
    return module.o_proj(out.flatten(2)), None


def _inkling2(module: Any, shard: SequenceShard, arguments: Mapping[str, Any]) -> tuple[Tensor, None]:
    """Compute Inkling 2's attention on a shard, in place of its `forward`; collective. Returns [B, S_local, E], None.

    A further logit of each query (its sink) takes part in its softmax.
    """
    hidden: Tensor = arguments["hidden_states"]
    positions = arguments["position_ids"]
    options = {"cache": None, "conv_mask": arguments.get("conv_mask"), "seq_idx": arguments.get("seq_idx")}
    of_keys, of_values = (arguments.get(f"{name}_hidden_states", hidden) for name in ("key", "value"))
    q, k, v = module.q_proj(hidden, positions), module.k_proj(of_keys, **options), module.v_proj(of_values, **options)
    relative, profiles = module.relative_position_bias(hidden, None, positions)
    tensors = (*(x.transpose(1, 2) for x in (q, k, v)), relative)
    out = _attend(module, shard, arguments, tensors, profiles, module.sink_proj(hidden))
    return module.o_proj(out.flatten(2), hidden), None


def _attend(
    module: Any,
    shard: SequenceShard,
    arguments: Mapping[str, Any],
    tensors: tuple[Tensor, ...],
    profiles: Tensor,
    sink: Tensor | None = None,
) -> Tensor:
    """Return attention [B, S_local, H, D] with a bias by distance. Raise ValueError for what it does not support."""
    name, recipe = type(module).__name__, arguments.get("attention_mask")
    problem = problem_of_call(module, recipe, {each: x for each, x in arguments.items() if each not in _KNOWN})
    if problem:
        raise ValueError(problem)
    if module.training and module.attention_dropout:
        raise ValueError(
            f"{name} drops attention probabilities, which a bias by distance does not support; set attention_dropout "
            "to 0 in the model's config"
        )
    if recipe is not None and recipe.mask.looks_ahead:
        raise ValueError(f"{name} attends to later tokens, too; use a causal model")
    shard.cp.rank_state.calls_made += 1
    q, k, v, relative = (cast(x) for x in tensors)
    return relative_attention(
        q,
        k,
        v,
        relative,
        cast(profiles),
        shard.cp,
        mask=shard.mask,
        tokens=shard.tokens,
        scale=module.scaling,
        window=module.sliding_window,
        sink=None if sink is None else cast(sink),
        tag=(f"layer {module.layer_idx}", shard),
    )


def _profiles(module: Any, shard: SequenceShard, arguments: Mapping[str, Any]) -> Tensor:
    """Return the profiles by distance of Inkling's bias, [R, extent], in place of its module's `forward`.

    They are a new tensor: ZeRO-3 takes parameters away where the module's forward ends.
    """
    profiles: Tensor = module.proj.clone()
    return profiles


def _mix_and_profiles(module: Any, shard: SequenceShard, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return, in place of the `forward` of Inkling 2's bias, how queries mix its profiles, and these [R, extent].

    The first is [B, S_local, H, R].
    """
    hidden: Tensor = arguments["hidden_states"]
    mix = module.linear(hidden).view(*hidden.shape[:2], module.num_heads, -1)
    return module.norm(mix, arguments["position_ids"]), module.proj.clone()


def _positions(shard: SequenceShard, hidden: Tensor) -> Tensor:
    """Return the positions of this rank's tokens in their documents, int64 [B or 1, S_local]."""
    forward = forward_in_progress()
    if forward is not None and forward.positions is not None:
        return forward.positions
    return shard.cp.positions(shard.tokens, hidden.device)[None]


def _mixed_blocks(module: Any, shard: SequenceShard, arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Compute Inkling 2's mix of a token's earlier states, in place of its module's `forward`.

    Returns [B, S_local, E] for each query of the module.
    """
    return _mixed(module, module.query, arguments).unbind(-2)


def _messages(module: Any, shard: SequenceShard, arguments: Mapping[str, Any]) -> Tensor:
    """Return the messages of the pass before to a loop's layer, [B, S_local, 4, E], in place of a `forward`."""
    return _mixed(module, module.query[arguments["loop_layer_idx"]], arguments)


def _mixed(module: Any, queries: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """Return the attention of queries, [n, E] or [E], to the earlier states of each token, [B, S_local, n, E]."""
    states = torch.cat([arguments["block_states"], arguments["partial_block_states"].unsqueeze(-2)], -2).float()
    states = module.norm(states)
    queries = queries.float().view(-1, states.shape[-1])
    weights = torch.softmax(torch.einsum("bsne,qe->bsqn", states, queries) * states.shape[-1] ** -0.5, -1)
    return torch.einsum("bsqn,bsne->bsqe", weights, states)


_OF_INKLING_2: dict[str, tuple[tuple[str, ...], _OnShard]] = {
    **dict.fromkeys(
        ("SlidingAttention", "FullAttention"),
        (("q_proj", "k_proj", "v_proj", "relative_position_bias", "sink_proj", "o_proj"), _inkling2),
    ),
    "RelativePositionBias": (("linear", "num_heads", "norm", "proj", "rel_extent"), _mix_and_profiles),
    "BlockAttentionResidual": (("norm", "query"), _mixed_blocks),
    "MessageAttentionResidual": (("norm", "query"), _messages),
}
_LAYERS: dict[str, tuple[tuple[str, ...], _OnShard]] = {  # by class: names that its code uses, and what replaces it
    "InklingAttention": (
        ("q_proj", "k_sconv", "v_sconv", "r_proj", "q_norm", "k_norm", "rel_logits_proj", "log_scaling_n_floor"),
        _inkling,
    ),
    "InklingRelativeLogits": (("proj", "rel_extent"), _profiles),
    **{f"{family}{name}": layer for family in ("Inkling2", "Inkling2Loop") for name, layer in _OF_INKLING_2.items()},
}


def problems_of_relative_bias(pretrained: PreTrainedModel) -> list[str]:
    """Return the reasons why a model's layers with a bias by distance cannot run on a ring; empty if they can."""
    kinds = {type(module) for module in text_modules(pretrained) if type(module).__name__ in _LAYERS}
    problems = [problem_of_code(kind, _LAYERS[kind.__name__][0]) for kind in kinds]
    return [problem for problem in problems if problem]


def use_relative_bias(pretrained: PreTrainedModel) -> None:
    """Have a model's layers with a bias by distance run on the ring in forwards on shards.

    Replaces the `forward` of their classes, and a function of their files; repeated calls change nothing.
    """
    for kind in {type(module) for module in text_modules(pretrained) if type(module).__name__ in _LAYERS}:
        replace_once(kind, "forward", partial(_take_over, _LAYERS[kind.__name__][1]))
        home = sys.modules[kind.__module__]
        if hasattr(home, _DISTANCES):
            replace_once(home, _DISTANCES, _no_distances)


def _take_over(on_shard: _OnShard, original: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Compute a module's `forward` by `on_shard` on a shard, and by itself on a whole batch."""
    shard = kwargs.get(SHARD_KEY) or shard_of_forward()
    if cache_of_forward() is not None:
        raise ValueError(
            f"{type(module).__name__} has a bias by distance, for which a RingCache has no keys yet; generate with a "
            "cache of transformers, on one rank"
        )
    if shard is None:
        return original(module, *args, **kwargs)
    return on_shard(module, shard, by_name(partial(original, module), args, kwargs))


def _no_distances(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return the distances of all tokens to all of a whole batch; None on a shard."""
    return original(*args, **kwargs) if shard_of_forward() is None else None
