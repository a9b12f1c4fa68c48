"""Replacements for functions of transformers' modeling files that carry a state or convolve along the sequence.

    mixer -> causal_conv1d_fn, torch_chunk_gated_delta_rule, ...    globals of its file
                whole batch: the function itself
                shard:       burst_plugin.recurrent, with the function as its kernel where that takes a state

transformers has chosen the implementation of such a function before, such as fla's or mamba-ssm's, so that it is the
kernel on GPUs. Other steps of the function, such as a skip connection or a gate, are done here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from burst_plugin import recurrent
from burst_plugin.batch import SequenceShard
from burst_plugin.huggingface.recurrent.forward import (
    entering,
    mask_of_padding,
    placement,
    shard_of,
    states_of_turn,
)
from burst_plugin.recurrent.kernels.fla_delta_rule import pair_by_library
from burst_plugin.recurrent.segments import looking_back

_Original = Callable[..., Any]
_Given = Mapping[str, Any]
_OnShard = Callable[[_Original, SequenceShard, _Given], Any]


def _take_over(names: str, on_shard: _OnShard, original: _Original, /, *args: Any, **kwargs: Any) -> Any:
    """Take the place of a function, whose first arguments have these names."""
    shard = shard_of(kwargs)
    if shard is None:
        return original(*args, **kwargs)
    return on_shard(original, shard, {**dict(zip(names.split(), args, strict=False)), **kwargs})


def _convolve(original: _Original, shard: SequenceShard, arguments: _Given) -> Tensor:
    """Convolve [B, C, S] with the tokens before this rank's runs, which are there already in the turn of a cache."""
    weight: Tensor = arguments["weight"]

    def convolve(x: Tensor) -> Tensor:
        out: Tensor = original(
            x.transpose(1, 2), weight, arguments.get("bias"), activation=arguments.get("activation")
        )
        return out.transpose(1, 2)

    width = weight.shape[-1] - 1
    if states_of_turn() is not None:
        x = arguments["hidden_states"].transpose(1, 2)
        return looking_back(lambda xs: convolve(*xs), [x], width).transpose(1, 2)
    x, place = _without_padding(arguments["hidden_states"], shard), placement(shard, "causal_conv1d_fn")
    result: Tensor = recurrent.with_tokens_before(convolve, x.transpose(1, 2), width, place)
    return result.transpose(1, 2)


def _delta_rule(
    name: str, original: _Original, shard: SequenceShard, arguments: _Given
) -> tuple[Tensor, Tensor | None]:
    """Compute a gated delta rule, [B, S, H, V], and its last state if it is asked for."""
    q, k, v, g, beta = (arguments[entry] for entry in ("query", "key", "value", "g", "beta"))
    initial = entering(name, arguments.get("initial_state"))
    _check_length(q.shape[1], shard, name)
    options = {entry: arguments[entry] for entry in ("chunk_size", "use_qk_l2norm_in_kernel") if entry in arguments}

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, last = original(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, **options)
        return out, last

    heads = v.shape[2] // k.shape[2]
    if heads > 1:  # each query head serves several heads of values, which have states of their own
        q, k = (x.repeat_interleave(heads, 2) for x in (q, k))
    wants_state = bool(arguments.get("output_final_state"))
    place = placement(shard, name, initial)
    pair = partial(pair_by_library, original, kernel, bool(options.get("use_qk_l2norm_in_kernel")))
    result: Any = recurrent.gated_delta_rule(
        q, k, v, g, beta, place, kernel=kernel, pair=pair, return_final_state=wants_state
    )
    return result if wants_state else (result, None)


def _state_space(original: _Original, shard: SequenceShard, arguments: _Given) -> Any:
    """Compute Mamba-2's scan, [B, S, H, P], and its last state if it is asked for."""
    name, x = "mamba2_chunk_scan", arguments["hidden_states"]
    initial = entering(name, arguments.get("initial_states"))
    _check_length(x.shape[1], shard, name)

    def kernel(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        usual = {"chunk_size": arguments["chunk_size"], "return_final_states": True}
        out, last = original(x, dt, A, B, C, initial_states=state, **usual)
        return out, last

    dt = _steps(arguments["dt"], arguments.get("dt_bias"), arguments.get("dt_softplus", False))
    dt = dt.clamp(*arguments.get("dt_limit", (0.0, None)))
    wants_state = bool(arguments.get("return_final_states"))
    A, B, C = (arguments[entry] for entry in ("A", "B", "C"))
    place = placement(shard, name, initial)
    result: Any = recurrent.state_space(x, dt, A, B, C, place, kernel=kernel, return_final_state=wants_state)
    out, last = result if wants_state else (result, None)
    skip = arguments.get("D")
    if skip is not None and skip.dim() == 1:
        skip = skip[:, None]
    out = _finish(out, x, skip, arguments.get("z"))
    return (out, last) if wants_state else out


def _selective_scan(original: _Original, shard: SequenceShard, arguments: _Given) -> Any:
    """Compute Mamba-1's scan, [B, D, S], and its last state if it is asked for."""
    name = "mamba_selective_scan"
    x, dt, B, C = (arguments[entry].transpose(1, 2) for entry in ("hidden_states", "dt", "B", "C"))
    _check_length(x.shape[1], shard, name)
    dt = _steps(dt, arguments.get("delta_bias"), arguments.get("delta_softplus", False))
    wants_state = bool(arguments.get("return_last_state"))
    states = states_of_turn()
    place = placement(shard, name, () if states is None else states.entering_scan())
    result: Any = recurrent.selective_scan(x, dt, arguments["A"], B, C, place, return_final_state=wants_state)
    out, last = result if wants_state else (result, None)
    gate = arguments.get("z")
    out = _finish(out, x, arguments.get("D"), None if gate is None else gate.transpose(1, 2)).transpose(1, 2)
    return (out, last) if wants_state else out


def _rwkv(original: _Original, shard: SequenceShard, arguments: _Given) -> tuple[Tensor, list[Tensor] | None]:
    """Compute RWKV's weighted averages, [B, S, E], and its last state if it is asked for."""
    name, key, states = "rwkv_linear_attention", arguments["key"], states_of_turn()
    _check_length(key.shape[1], shard, name)
    log_decay = -torch.exp(arguments["time_decay"].float())
    wants_state = bool(arguments.get("return_state")) or states is not None
    initial = entering(name, *(arguments.get("state") or ())) if states is None else states.entering_averages()
    place = placement(shard, name, initial)
    result: Any = recurrent.rwkv(
        key, arguments["value"], log_decay, arguments["time_first"], place, return_final_state=wants_state
    )
    out, last = result if wants_state else (result, None)
    if states is not None and last is not None:
        states.keep_averages(last)
        last = None
    return out.to(key.dtype), None if last is None else list(last)


def _nothing(original: _Original, shard: SequenceShard, arguments: _Given) -> None:
    """Return None on a shard: the mixer then calls convolution and scan one by one."""


def _without_padding(hidden_states: Tensor, shard: SequenceShard) -> Tensor:
    """Return the input of a convolution, [B, C, S_local], without the zeros that a cache puts before few tokens."""
    tokens = shard.tokens.length // shard.cp.ranks
    more = hidden_states.shape[-1] - tokens
    if more > 0 and not bool(hidden_states[..., :more].any()):
        hidden_states = hidden_states[..., more:]
    _check_length(hidden_states.shape[-1], shard, "causal_conv1d_fn")
    return hidden_states


def _check_length(tokens: int, shard: SequenceShard, name: str) -> None:
    """Raise ValueError for a call with more tokens than the shard's, as from a cache, or with a part of them."""
    expected = shard.tokens.length // shard.cp.ranks
    if tokens != expected:
        raise ValueError(
            f"{name} got {tokens} tokens of a shard that has {expected}: give whole texts, without a cache of tokens "
            "before them"
        )


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Return the steps of a scan [B, S, ...], in float32 at least: 0 leaves a state as it is."""
    dt = dt.to(torch.promote_types(dt.dtype, torch.float32))
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return torch.nn.functional.softplus(dt) if softplus else dt


def _finish(out: Tensor, x: Tensor, skip: Tensor | None, gate: Tensor | None) -> Tensor:
    """Return the output of a scan with its skip connection and its gate."""
    kind = torch.promote_types(out.dtype, torch.float32)
    result = out if skip is None else out.to(kind) + skip.to(kind) * x.to(kind)
    if gate is not None:
        result = result * torch.nn.functional.silu(gate.to(kind))
    return result.to(out.dtype)


_DELTA = "query key value g beta"
_MAMBA = "hidden_states dt A B C"
FUNCTIONS: dict[str, _Original] = {
    "causal_conv1d_fn": partial(_take_over, "hidden_states weight bias activation", _convolve),
    **{
        name: partial(_take_over, _DELTA, partial(_delta_rule, name))
        for name in ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
    },
    "mamba2_chunk_scan": partial(_take_over, f"{_MAMBA} chunk_size D", _state_space),
    "mamba_selective_scan": partial(_take_over, f"{_MAMBA} D z", _selective_scan),
    "rwkv_linear_attention": partial(_take_over, "time_decay time_first key value state return_state", _rwkv),
    **{name: partial(_take_over, "", _nothing) for name in ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")},
    "create_recurrent_attention_mask": mask_of_padding,
}
"""The replacements of functions, by name; each gets the original function, and then its arguments."""
