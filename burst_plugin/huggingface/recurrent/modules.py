"""Modules of transformers that compute a state in their own code, and their replacements on shards.

Replacements repeat the module's computation before and after the state; whole batches go to the original.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from burst_plugin import recurrent
from burst_plugin.batch import SequenceShard
from burst_plugin.frameworks.wrapping import by_name
from burst_plugin.huggingface.recurrent.forward import entering, placement, shard_of, states_of_turn

if TYPE_CHECKING:
    from burst_plugin.huggingface.recurrent.states import LayerStates

_OnShard = Callable[[Any, SequenceShard, Mapping[str, Any]], Any]


def take_over(on_shard: _OnShard, original: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Compute a call of a module's method: by `on_shard` on a shard, by the method itself on a whole batch.

    Bound to `on_shard`, this function replaces the method of the class. Returns the result of either.

    on_shard: takes the module, the shard, and the arguments of the call by name.
    original: the method that was replaced, called with `module` and the arguments.
    """
    shard = shard_of(kwargs)
    if shard is None:
        return original(module, *args, **kwargs)
    return on_shard(module, shard, by_name(partial(original, module), args, kwargs))


def lightning_attention(module: Any, shard: SequenceShard, given: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Compute MiniMax's linear attention with a fixed decay on a shard, in place of its `forward`; collective.

    given: the arguments of the module's `forward` by name. Returns outputs [B, S_local, E], and with a cache the last
        state, else None.
    """
    hidden: Tensor = given["hidden_states"]
    mask, cache = given.get("attention_mask"), given.get("cache", given.get("past_key_values"))
    projected = module.act_fn(module.qkv_proj(hidden))
    if mask is not None:
        projected = projected * mask[..., None].to(projected.dtype)
    q, k, v = _by_head(projected, module.num_attention_heads).chunk(3, dim=-1)
    scan = partial(recurrent.decay_attention, q, k, v, -module.slope_rate.flatten().float())
    before = None if cache is None else cache.get_linear_cache(module.layer_idx)
    place, last = placement(shard, "lightning_attention", entering(type(module).__name__, before)), None
    if cache is None:
        out = scan(place)
    else:
        out, last = scan(place, return_final_state=True)
        cache.set_linear_cache(module.layer_idx, last.to(hidden.dtype))  # in which the next token is computed
    out = module.norm(out.to(hidden.dtype).flatten(2))
    return module.out_proj(torch.sigmoid(module.output_gate(hidden)) * out), last


def recurrent_block(module: Any, shard: SequenceShard, given: Mapping[str, Any]) -> tuple[Tensor, None]:
    """Compute RecurrentGemma's block on a shard, in place of its `forward`; collective.

    It has a convolution, then a unit with a state (RG-LRU), beside a gate.

    given: the arguments of the module's `forward` by name. Returns outputs [B, S_local, E], and None.
    """
    hidden: Tensor = given["input_states"]
    gate = module.act_fn(module.linear_y(hidden))

    def convolve(x: Tensor) -> Tensor:
        out: Tensor = module.conv_1d(x.transpose(1, 2))[..., : x.shape[1]]
        return out.transpose(1, 2)

    width, states = module.conv1d_width - 1, states_of_turn()
    if states is None:
        place = placement(shard, "conv_1d")
        x = recurrent.with_tokens_before(convolve, module.linear_x(hidden), width, place)
        module.conv1d_state = module.rg_lru.recurrent_states = None
    else:
        before = None if module.conv1d_state is None else module.conv1d_state.transpose(1, 2)
        x, last = states.with_tokens_before(module.linear_x(hidden), width, before)
        x, module.conv1d_state = convolve(x)[:, width:], last.transpose(1, 2)
    out = module.rg_lru(x, given["position_ids"])
    return module.linear_out(out * gate), None


def recurrent_unit(module: Any, shard: SequenceShard, given: Mapping[str, Any]) -> Tensor:
    """Compute RecurrentGemma's RG-LRU on a shard, in place of its `forward`; its state is 0 before every document.

    given: the arguments of the module's `forward` by name. Returns outputs [B, S_local, E]. Collective.
    """
    x: Tensor = given["activations"]
    in_turn = states_of_turn() is not None
    before = [] if not in_turn or module.recurrent_states is None else [module.recurrent_states]
    place = placement(shard, "rg_lru", before)
    starts = (given["position_ids"] == 0 if in_turn else place.starts(x)).unsqueeze(-1)
    by_head = _by_head(x, module.num_attention_heads)
    gates = [
        torch.sigmoid(torch.einsum("bshi,hij->bshj", by_head, weight) + bias).flatten(2)
        for weight, bias in (
            (module.input_gate_weight, module.input_gate_bias),
            (module.recurrent_gate_weight, module.recurrent_gate_bias),
        )
    ]
    log_decay = -8.0 * gates[1] * torch.nn.functional.softplus(module.recurrent_param)
    # transformers bounds the slope of this root at 1000, which matters for decays of almost 1 alone.
    rest = 1 - torch.exp(2 * log_decay)
    scale = torch.where(starts, torch.ones_like(rest), _bounded_root(rest))
    scaled = x * gates[0] * scale.to(x.dtype)
    log_decay = log_decay.float().masked_fill(starts, float("-inf"))
    result: Any = recurrent.affine_scan(scaled.float(), log_decay, place, return_final_state=in_turn)
    out: Tensor
    out, module.recurrent_states = result if in_turn else (result, module.recurrent_states)
    return out.to(x.dtype)


class _BoundedRoot(torch.autograd.Function):
    """A square root whose slope is at most 1000."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the root."""
        root = x.sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return the gradient with the slope, 1 / (2 root), as it is bounded."""
        (root,) = ctx.saved_tensors
        slope: Tensor = 1 / (2 * root).clamp(min=1e-3)
        return grads[0] * slope


def _bounded_root(x: Tensor) -> Tensor:
    root: Tensor = _BoundedRoot.apply(x)  # type: ignore[no-untyped-call]
    return root


def mlstm(module: Any, shard: SequenceShard, given: Mapping[str, Any]) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    """Compute xLSTM's cell with a matrix memory on a shard, in place of its `forward`; collective.

    given: the arguments of the module's `forward` by name. Returns outputs [B, H, S_local, V] and, if `given` has
        initial states, the last states (memory, normalizer, maximum), else None.
    """
    initial, in_turn = entering(type(module).__name__, *(given.get(f"{c}_initial") for c in "cnm")), False
    if initial:
        *parts, most = initial
        initial, in_turn = [*parts, most.squeeze(-1)], True
    names = ("query", "key", "value", "igate", "fgate")
    q, k, v, igate, fgate = (given[name].transpose(1, 2) for name in names)
    place = placement(shard, "mlstm", initial)
    result: Any = recurrent.mlstm(q, k, v, igate, fgate, place, return_final_state=in_turn)
    out, last = result if in_turn else (result, None)
    if last is not None:
        last = (*last[:2], last[2].unsqueeze(-1))
    return out.transpose(1, 2).to(given["query"].dtype), last


def compressed_projection(
    module: Any, shard: SequenceShard, given: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the projections of Zaya's compressed convolutional attention on a shard; collective.

    It replaces the module's `forward`, and returns queries [B, S_local, heads, D], keys and values [B, S_local, KV
    heads, D]. Convolutions mix earlier tokens into queries and keys, and a part of each value is made of the token
    before. Earlier tokens may be on other ranks.

    given: the arguments of the module's `forward` by name.
    """
    hidden: Tensor = given["hidden_states"]
    mask = given.get("conv_mask")
    if mask is not None:
        hidden = hidden * mask[..., None].to(hidden.dtype)
    heads, groups, size = module.num_attention_heads, module.num_key_value_heads, module.head_dim
    q, k = module.q_proj(hidden), module.k_proj(hidden)
    by_group = q.reshape(*q.shape[:-1], groups, heads // groups, size)
    both = (by_group + _by_head(k, groups)[..., None, :]) / 2
    width = module.conv_kernel_size

    def look_back(x: tuple[Tensor, ...]) -> Tensor:
        qk, states = x
        padded = torch.nn.functional.pad(qk.transpose(1, 2), (width, 0))
        mixed = module.conv_qk_grouped(module.conv_qk_depthwise(padded)).transpose(1, 2)
        return torch.cat([mixed, module.v_proj_delayed(torch.nn.functional.pad(states, (0, 0, 1, -1)))], -1)

    states = states_of_turn()
    if states is None:
        place = placement(shard, "compressed_projection")
        outputs = recurrent.with_tokens_before(look_back, (torch.cat([q, k], -1), hidden), max(width, 1), place)
    else:
        outputs = _with_cached(module, states, torch.cat([q, k], -1), hidden)
    mixed_q, mixed_k, delayed = outputs.tensor_split([heads * size, (heads + groups) * size], -1)
    query = _by_head(mixed_q, heads) + both.flatten(2, 3)
    key = _by_head(mixed_k, groups) + both.mean(3)
    value = torch.cat([module.v_proj_current(hidden), delayed], -1)
    return query, key, _by_head(value, groups)


def _with_cached(module: Any, states: LayerStates, qk: Tensor, hidden: Tensor) -> Tensor:
    """Return Zaya's convolved queries and keys, and delayed values, which also depend on tokens before a turn."""
    width, layer = module.conv_kernel_size, states.layers[module.layer_idx]
    padded = states.with_conv_state(qk.transpose(1, 2), module.layer_idx, 0, width)
    mixed = module.conv_qk_grouped(module.conv_qk_depthwise(padded)).transpose(1, 2)
    delayed = module.v_proj_delayed(hidden)
    if layer.is_recurrent_states_initialized[0]:
        before = layer.recurrent_states[0].unsqueeze(1)
    else:  # the value of a token of zeros
        before = module.v_proj_delayed(hidden.new_zeros(len(hidden), 1, hidden.shape[2]))
    delayed, last = states.with_tokens_before(delayed, 1, before)
    layer.update_recurrent_state(last[:, 0], state_idx=0)
    return torch.cat([mixed, delayed[:, :-1]], -1)


def ngram_embedding(module: Any, shard: SequenceShard, given: Mapping[str, Any]) -> Tensor:
    """Compute Qwen4's embeddings of n-grams on a shard, [B, S_local, E], in place of its `forward`; collective.

    given: the arguments of the module's `forward` by name. A document's first tokens follow end-of-text tokens, as in
        a row of its own.
    """
    own_forward, end = partial(inspect.unwrap(type(module).forward), module), module.eos_token_id
    place = placement(shard, "ngram_embedding")

    def embed(ids: Tensor) -> Tensor:
        embeddings: Tensor = own_forward(ids + end, None)  # where ids are 0, before a document, these are ends
        return embeddings

    return recurrent.with_tokens_before(embed, given["input_ids"].long() - end, module.context_len, place)


def dilated_convolution(module: Any, shard: SequenceShard, given: Mapping[str, Any]) -> Tensor:
    """Compute the convolution of Qwen4's layers of n-grams on a shard, [B, S_local, C]; collective.

    It replaces the module's method `_short_conv`, whose arguments by name are `given`. Zeros come before a document.
    """
    own_convolution = partial(inspect.unwrap(type(module)._short_conv), module)
    place = placement(shard, "dilated_convolution")
    width: int = module.short_conv_state_len
    return recurrent.with_tokens_before(lambda x: own_convolution(x, None), given["hidden_states"], width, place)


def dynamic_convolution(module: Any, shard: SequenceShard, given: Mapping[str, Any]) -> Tensor:
    """Compute Inkling 2's convolution with weights of each token on a shard, [B, S_local, C]; collective.

    It replaces the module's `forward`, whose arguments by name are `given`. Zeros come before a document.
    """
    hidden: Tensor = given["hidden_states"]
    mask, taps = given.get("conv_mask"), module.conv_kernel_size
    states = hidden.float()
    visible = states if mask is None else states * mask[..., None]

    def convolve(xs: list[Tensor]) -> Tensor:
        x, of_tokens = xs
        windows = torch.nn.functional.pad(x, (0, 0, taps - 1, 0)).unfold(1, taps, 1).flip(-1)
        weights: Tensor = module.static_weight.float().t().view(module.num_heads, -1, taps)
        weights = weights + of_tokens.view(*x.shape[:2], module.num_heads, 1, taps)
        return (windows.reshape(*x.shape[:2], module.num_heads, -1, taps) * weights).sum(-1).flatten(2)

    place = placement(shard, "dynamic_convolution")
    of_tokens = module.weight_proj(given["dynamic_input"]).float()
    out = recurrent.with_tokens_before(convolve, (visible, of_tokens), taps - 1, place)
    mixed: Tensor = (out + states) / math.sqrt(2 * taps + 1)
    return mixed.to(hidden.dtype)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Return [B, S, heads, D] of [B, S, heads * D]."""
    return x.reshape(*x.shape[:-1], heads, -1)


class TimeShift(torch.nn.ZeroPad2d):
    """A replacement of RWKV's `time_shift`, which shifts [B, S, E] by one token; it has no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """Return for each token of x [B, S, E] the one before it in its document, zeros for a document's first.

        Collective on shards. In a turn of a cache, a row's first new token follows its last cached token.
        """
        shard, states = shard_of({}), states_of_turn()
        if states is not None:
            return states.shifted(x)
        if shard is None:
            return super().forward(x)
        return recurrent.with_tokens_before(super().forward, x, 1, placement(shard, "time_shift"))
