"""Replacements for functions that Megatron's mixers call to carry a state or convolve along the sequence.

    MambaMixer     ->  mamba_split_conv1d_scan_combined, or causal_conv1d_fn and mamba_chunk_scan_combined
    GatedDeltaNet  ->  causal_conv1d (causal_conv1d_fn until 0.17), then chunk_gated_delta_rule
        whole sequences:  the function itself
        on the ring:      burst_plugin.recurrent, with the function as its kernel

Each replacement takes the original function and then its arguments. Work on each token by itself, such as gates, that
the original function does is done here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from burst_plugin import recurrent
from burst_plugin.frameworks.wrapping import by_name, wrap
from burst_plugin.megatron.recurrent.calls import MixerCall, call_in_progress
from burst_plugin.recurrent.kernels.convolution import causal_convolution
from burst_plugin.recurrent.kernels.fla_delta_rule import pair_by_library

_Function = Callable[..., Any]
# Arguments that go on from a state, or that say where documents begin, which the call of the mixer does.
_STATES = frozenset(
    """
    initial_state initial_states seq_idx cu_seqlens return_final_states output_final_state return_varlen_states
    """.split()  # noqa: SIM905
)


class ConvolutionOnRing(torch.nn.Conv1d):
    """The `Conv1d` of a gated delta net on a ring, whose class it replaces in a layer that has been built.

    Megatron calls this module until 0.17, where causal-conv1d is not installed.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution of `input` [B, C, S] along S; on a ring with the tokens before this rank's.

        It is on a ring while a mixer's call on it is in progress, and returns [B, C, S] then. Else it returns what
        `Conv1d` does, with padding.
        """
        call = call_in_progress()
        if call is None:
            return super().forward(input)
        return _on_ring(call, super().forward, input.transpose(1, 2), self.kernel_size[0]).transpose(1, 2)


def replace_functions(module: Any, kinds: Mapping[str, _Function]) -> None:
    """Replace functions of a module by wrappers, called as `wrapper(original, ...)` with the function's arguments.

    kinds: wrappers by the name of the function. Names that the module lacks, or has as None, are left out.
    """
    for name, around in kinds.items():
        if getattr(module, name, None) is not None:
            wrap(module, name, around)


def functions_of_mamba(module: Any) -> dict[str, _Function]:
    """Return wrappers that run functions of Mamba-2 on the ring, by the names that the functions have in `module`.

    module: Megatron's module of `MambaMixer`, whose own functions become kernels of the wrappers.
    """
    convolve, scan = getattr(module, "causal_conv1d_fn", None), getattr(module, "mamba_chunk_scan_combined", None)
    fused = partial(_convolve_and_scan, _convolve_by_torch if convolve is None else convolve, scan)
    return {
        "causal_conv1d_fn": _convolve,
        "mamba_chunk_scan_combined": _scan,
        "mamba_split_conv1d_scan_combined": fused,
    }


def _on_ring(call: MixerCall, convolve: Callable[[Tensor], Tensor], x: Tensor, width: int) -> Tensor:
    """Return a convolution of x [B, S, C], given one of [1, C, T] that returns as many tokens or more."""

    def of_piece(x: Tensor) -> Tensor:
        return convolve(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)

    return recurrent.with_tokens_before(of_piece, x, width - 1, call.place("convolution"))


def _given(name: str, original: _Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name. Raise ValueError for states, which ranks carry themselves."""
    arguments = by_name(original, args, kwargs)
    states = [state for state in sorted(_STATES & arguments.keys()) if arguments[state] is not False]
    if states:
        raise ValueError(
            f"{name} got {', '.join(states)} in a layer on the ring, whose ranks carry states themselves; give "
            "documents as packed_seq_params of the layer"
        )
    return arguments


def convolve_by_method(original: _Function, params: Any, input_: Tensor) -> Tensor:
    """Convolve [B, C, S] along S in place of `MambaContextParallel.conv1d`, and return [B, C, S].

    Mixers without causal-conv1d call that method. On the ring the convolution goes on from the tokens before this
    rank's; else the result is that of `original`.

    Args:
        original: the method.
        params: the `MambaContextParallel`, which has the weights.
        input_: [B, C, S].
    """
    call = call_in_progress()
    if call is None:
        return original(params, input_)  # type: ignore[no-any-return]
    width = params.get_conv1d_weight().shape[-1]
    return _on_ring(call, partial(original, params), input_.transpose(1, 2), width).transpose(1, 2)


def _convolve(original: _Function, *args: Any, **kwargs: Any) -> Any:
    """Take the place of causal-conv1d's function, which convolves [B, C, S]."""
    call = call_in_progress()
    if call is None:
        return original(*args, **kwargs)
    arguments = _given("causal_conv1d_fn", original, args, kwargs)
    x = arguments.pop("x")
    return _on_ring(
        call, lambda x: original(x=x, **arguments), x.transpose(1, 2), arguments["weight"].shape[1]
    ).transpose(1, 2)


def _convolve_by_fla(original: _Function, *args: Any, **kwargs: Any) -> Any:
    """Take the place of flash-linear-attention's function, which convolves [B, S, C] and returns a state, too."""
    call = call_in_progress()
    if call is None:
        return original(*args, **kwargs)
    arguments = _given("causal_conv1d", original, args, kwargs)
    x, width = arguments.pop("x"), arguments["weight"].shape[1]

    def of_piece(x: Tensor) -> Tensor:
        out: Tensor = original(x=x, **arguments)[0]
        return out

    return recurrent.with_tokens_before(of_piece, x, width - 1, call.place("convolution")), None


def _convolve_and_scan(convolve: _Function, scan: Any, original: _Function, *args: Any, **kwargs: Any) -> Any:
    """Take the place of mamba-ssm's fused function, [B, S, ...] -> [B, S, H * P], which takes no tokens before.

    convolve, scan: the functions for either part.
    """
    call = call_in_progress()
    if call is None:
        return original(*args, **kwargs)
    inputs = _given("mamba_split_conv1d_scan_combined", original, args, kwargs)
    refused = [name for name in ("rmsnorm_weight", "outproj_weight", "outproj_bias") if name in inputs]
    if refused:
        raise ValueError(
            f"mamba_split_conv1d_scan_combined got {', '.join(refused)}, which Megatron leaves to itself"
        )
    zxbcdt, weight, bias, D = inputs.pop("zxbcdt"), inputs["conv1d_weight"], inputs.get("conv1d_bias"), inputs["D"]
    heads = D.shape[0]
    dim = heads * (inputs["headdim"] if D.dim() == 1 else D.shape[1])
    z, xBC, dt = torch.split(zxbcdt, [dim, weight.shape[0], heads], -1)
    known = {"weight": weight, "bias": bias, "activation": inputs.get("activation", "silu")}
    xBC = _on_ring(call, partial(convolve, **known), xBC, weight.shape[1])
    x, B, C = torch.split(xBC, [dim, *[(weight.shape[0] - dim) // 2] * 2], -1)
    x, z = (torch.unflatten(tensor, -1, (heads, -1)) for tensor in (x, z))
    B, C = (torch.unflatten(tensor, -1, (inputs.get("ngroups", 1), -1)) for tensor in (B, C))
    parts = {"x": x, "dt": dt, "B": B, "C": C, "z": z, "dt_softplus": True}
    return _state_space(call, scan, {**inputs, **parts}).flatten(2)


def _scan(original: _Function, *args: Any, **kwargs: Any) -> Any:
    """Take the place of mamba-ssm's scan, [B, S, H, P]."""
    call = call_in_progress()
    if call is None:
        return original(*args, **kwargs)
    return _state_space(call, original, _given("mamba_chunk_scan_combined", original, args, kwargs))


def _state_space(call: MixerCall, scan: _Function, inputs: Mapping[str, Any]) -> Tensor:
    """Return the outputs [B, S, H, P] of a scan with mamba-ssm's arguments: also steps' bias, skip and gate."""
    x, dt, options = inputs["x"], inputs["dt"], {name: inputs[name] for name in ("state_dtype",) if name in inputs}
    dt = dt.to(torch.promote_types(dt.dtype, torch.float32))
    if "dt_bias" in inputs:
        dt = dt + inputs["dt_bias"].to(dt.dtype)
    if inputs.get("dt_softplus", False):
        dt = F.softplus(dt)
    dt = dt.clamp(*inputs.get("dt_limit", (0.0, None)))

    def kernel(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        known = {"initial_states": state, "return_final_states": True, **options}
        out, last = scan(x, dt, A, B, C, inputs["chunk_size"], **known)
        return out, last

    out: Tensor = recurrent.state_space(
        x, dt, inputs["A"], inputs["B"], inputs["C"], call.place("scan"), kernel=kernel
    )
    kind, D, z = torch.promote_types(out.dtype, torch.float32), inputs.get("D"), inputs.get("z")
    result = out.to(kind)
    if D is not None:
        result = result + (D.unsqueeze(-1) if D.dim() == 1 else D).to(kind) * x.to(kind)
    if z is not None:
        result = result * F.silu(z.to(kind))
    return result.to(out.dtype)


def _delta_rule(original: _Function, *args: Any, **kwargs: Any) -> Any:
    """Take the place of a function that computes a gated delta rule, and returns outputs [B, S, H, V] and a state."""
    call = call_in_progress()
    if call is None:
        return original(*args, **kwargs)
    arguments = _given("gated_delta_rule", original, args, kwargs)
    q, k, v = (arguments.pop(name) for name in [*inspect.signature(original).parameters][:3])
    g, beta = arguments.pop("g"), arguments.pop("beta")
    options = {name: value for name, value in arguments.items() if name not in _STATES}

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, last = original(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, **options)
        return out, last

    pair = None
    if options.keys() <= {"use_qk_l2norm_in_kernel"}:
        pair = partial(pair_by_library, original, kernel, bool(options.get("use_qk_l2norm_in_kernel")))
    place = call.place("delta rule")
    return recurrent.gated_delta_rule(q, k, v, g, beta, place, kernel=kernel, pair=pair), None


def _convolve_by_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Convolve [B, C, S] with weights [C, W], each token with those before it; "silu" may follow."""
    return causal_convolution(x.transpose(1, 2), weight, bias, activation).transpose(1, 2)


FUNCTIONS_OF_DELTA_NET: Mapping[str, _Function] = {
    "causal_conv1d_fn": _convolve,
    "causal_conv1d": _convolve_by_fla,
    "chunk_gated_delta_rule": _delta_rule,
    "torch_chunk_gated_delta_rule": _delta_rule,
}
