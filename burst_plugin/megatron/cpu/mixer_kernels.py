"""Definitions in PyTorch of functions that Megatron imports from packages for GPUs.

Mamba-2 and gated delta net layers call functions of mamba-ssm and flash-linear-attention, and are built only where
these can be imported. The indexer of sparse attention calls a function of fast-hadamard-transform.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def stand_in_for_packages() -> str:
    """Put modules with functions in PyTorch in place of mamba_ssm, fla and fast_hadamard_transform, installed or not.

    Only Megatron's code finds functions in them. Returns a line of text on the replacement.
    """
    for path, names in _MODULES.items():
        for end in [place for place, letter in enumerate(path) if letter == "."] + [len(path)]:
            name = path[:end]
            if not isinstance(sys.modules.get(name), _PackageOfFunctions):
                sys.modules[name] = _PackageOfFunctions(name)
                outer, _, last = name.rpartition(".")
                if outer:
                    setattr(sys.modules[outer], last, sys.modules[name])
        vars(sys.modules[path])["functions"] = names
    return f"functions of {' and '.join(_PACKAGES)} are definitions in PyTorch"


class _PackageOfFunctions(ModuleType):
    """A module that stands in for a package's, and has only the modules that are put there.

    Megatron alone finds functions in it: other libraries would call them otherwise than Megatron does.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.__path__: list[str] = []
        self.functions: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Return a function to Megatron's code. Raise AttributeError for others, and other names."""
        functions = self.__dict__.get("functions", {})
        if name in functions and sys._getframe(1).f_globals.get("__name__", "").startswith(_CALLERS):
            return functions[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class _GatedNorm(torch.nn.Module):
    """The RMSNorm of Mamba-2, by groups of channels, before or after which a gate applies."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        **at: Any,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size or hidden_size, norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, **at))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return the norm of x, and of its gate z."""
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        if z is not None and not self.norm_before_gate:
            values = values * F.silu(z.to(values.dtype))
        grouped = torch.unflatten(values, -1, (-1, self.group_size))
        grouped = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
        values = grouped.flatten(-2) * self.weight.to(values.dtype)
        if z is not None and self.norm_before_gate:
            values = values * F.silu(z.to(values.dtype))
        return values.to(x.dtype)


def _scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    **options: Any,
) -> Any:
    """Compute Mamba-2's scan of x [B, S, H, P], and its last state if `return_final_states`."""
    from burst_plugin.recurrent.kernels.state_space import state_space

    _refuse(options, "D", "z", "dt_bias", "dt_softplus", "dt_limit", "initial_states", "return_final_states")
    steps = dt.to(torch.promote_types(dt.dtype, torch.float32))
    if options.get("dt_bias") is not None:
        steps = steps + options["dt_bias"]
    steps = F.softplus(steps) if options.get("dt_softplus") else steps
    steps = steps.clamp(*options.get("dt_limit", (0.0, None)))
    out, last = state_space(x, steps, A, B, C, options.get("initial_states"), chunk_size=chunk_size)
    D, z = options.get("D"), options.get("z")
    if D is not None:
        out = out + (D.unsqueeze(-1) if D.dim() == 1 else D) * x
    out = (out if z is None else out * F.silu(z)).to(x.dtype)
    return (out, last) if options.get("return_final_states") else out


def _convolve_and_scan(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    **options: Any,
) -> Tensor:
    """Compute Mamba-2's steps between its projections, without a norm: [B, S, ...] -> [B, S, H * P]."""
    _refuse(options, "chunk_size", "activation", "headdim", "ngroups", "norm_before_gate", "dt_limit")
    heads = len(D)
    dim = heads * options["headdim"] if D.dim() == 1 else D.numel()
    z, xBC, dt = torch.split(zxbcdt, [dim, len(conv1d_weight), heads], -1)
    xBC, _ = _convolve(xBC, conv1d_weight, conv1d_bias, options.get("activation"))
    sizes = [dim, *[(len(conv1d_weight) - dim) // 2] * 2]
    x, B, C = torch.split(xBC, sizes, -1)
    B, C = (torch.unflatten(each, -1, (options.get("ngroups", 1), -1)) for each in (B, C))
    x, z = (torch.unflatten(each, -1, (heads, -1)) for each in (x, z))
    limits, size = options.get("dt_limit", (0.0, None)), options["chunk_size"]
    out = _scan(x, dt, A, B, C, size, D=D, z=z, dt_bias=dt_bias, dt_softplus=True, dt_limit=limits)
    return out.flatten(2)  # type: ignore[no-any-return]


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **options: Any
) -> tuple[Tensor, None]:
    """Convolve [B, S, C] with weights [C, W], each token with those before it."""
    from burst_plugin.recurrent.kernels.convolution import causal_convolution

    _refuse(options)
    return causal_convolution(x, weight, bias, activation), None


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute a gated delta rule of q and k [B, S, Hk, K] and v [B, S, H, V], and its last state if asked for it."""
    from burst_plugin.recurrent.kernels.delta_rule import delta_rule

    _refuse(options, "initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
    if options.get("use_qk_l2norm_in_kernel"):
        q, k = _l2norm(q), _l2norm(k)
    q = q * (k.shape[-1] ** -0.5 if scale is None else scale)
    out, last = delta_rule(q, k, v, g, beta, options.get("initial_state"))
    return out, last if options.get("output_final_state") else None


def _l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return x over its length along the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def hadamard_transform(x: Tensor, scale: float = 1.0) -> Tensor:
    """Return the Walsh-Hadamard transform of the last dimension of x, a power of two, times `scale`."""
    size = x.shape[-1]
    if size & (size - 1):
        raise NotImplementedError(f"a Hadamard transform of {size} numbers is not supported without a GPU")
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    for half in (1 << step for step in range(size.bit_length() - 1)):
        pairs = torch.unflatten(values, -1, (-1, 2, half))
        first, second = pairs.unbind(-2)
        values = torch.stack([first + second, first - second], -2).flatten(-3)
    return (values * scale).to(x.dtype)


def _refuse(options: dict[str, Any], *known: str) -> None:
    """Raise NotImplementedError for options that are set and not known here."""
    for name, value in options.items():
        if name not in known and value is not None and value is not False:
            raise NotImplementedError(f"{name} is not supported without a GPU")


_MODULES: dict[str, dict[str, Any]] = {
    "mamba_ssm": {"__version__": "2.0.0"},
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": _GatedNorm},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": _scan,
        "mamba_split_conv1d_scan_combined": _convolve_and_scan,
    },
    "fla.modules.l2norm": {"l2norm": _l2norm},
    "fla.modules.convolution": {"causal_conv1d": _convolve},
    "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": _delta_rule},
    "fast_hadamard_transform": {"hadamard_transform": hadamard_transform},
}

_PACKAGES = ("mamba_ssm", "fla", "fast_hadamard_transform")
_CALLERS = ("megatron.", "tests.")
