"""The stages of flash-linear-attention's gated delta rule, with one decay per head, on NVIDIA's GPUs from Ampere on.

The library has functions for them that its own context parallelism uses, but no public ones. So they are tried out
against its public function before the first use, and pieces are computed by that function where they differ.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from burst_plugin.recurrent.staged import Pair, Stages, pair_by_stages

_CHUNK = 64
_WORST = 0.02  # relative error of stages in half precision

Stage = Callable[..., Any]


@lru_cache(maxsize=1)
def _library() -> Any:
    """Return the library's functions by name, or None if they are not as they are in its version 0.6."""
    try:
        from fla.modules.l2norm import l2norm
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu, chunk_gated_delta_rule_fwd_h
        from fla.ops.common.chunk_o import chunk_bwd_dv_local, chunk_fwd_o
        from fla.ops.cp.chunk_fwd import chunk_cp_fwd_h
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd
        from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
        from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd
        from fla.ops.utils import chunk_local_cumsum
        from fla.ops.utils.constant import RCP_LN2
    except ImportError:
        return None
    if "multi_seqs" not in inspect.signature(chunk_cp_fwd_h).parameters:
        return None
    return SimpleNamespace(
        rule=chunk_gated_delta_rule,
        normalise=l2norm,
        add_up=lambda g: chunk_local_cumsum(g, chunk_size=_CHUNK, scale=RCP_LN2),
        prepare=chunk_gated_delta_rule_fwd_intra,
        prepare_again=recompute_w_u_fwd,
        maps=chunk_cp_fwd_h,
        states=chunk_gated_delta_rule_fwd_h,
        outputs=chunk_fwd_o,
        local_gradients=chunk_bwd_dv_local,
        state_gradients=chunk_gated_delta_rule_bwd_dhu,
        gradients=chunk_gated_delta_rule_bwd,
    )


class FlaStages(Stages):
    """The stages of the library's gated delta rule; tensors are q, k, v, g, beta of pieces, see `gated_delta_rule`.

    scale: of q.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float) -> None:
        super().__init__([x.contiguous() for x in (q, k, v, g.float(), beta)])
        self._scale, self._fla = scale, _library()

    def pair(self, *xs: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """See `Stages.pair`."""
        _, k, v, g, beta = xs
        count, length, heads, width = v.shape
        decays = self._fla.add_up(g)
        w, u, A = self._fla.prepare(k=k, v=v, g=decays, beta=beta)
        maps = torch.zeros(count, heads, k.shape[3], width + k.shape[3], device=v.device)
        rows = {name: x.flatten(0, 1).unsqueeze(0) for name, x in {"k": k, "w": w, "u": u, "g": decays}.items()}
        bounds = torch.arange(count + 1, dtype=torch.int64, device=v.device) * length
        self._fla.maps(**rows, hm=maps, cu_seqlens=bounds, multi_seqs=True)
        return maps[..., width:].contiguous(), maps[..., :width].contiguous(), (decays, A)

    def outputs(self, entries: Tensor, *xs: Tensor) -> Tensor:
        """See `Stages.outputs`."""
        q, k, v, _, beta, decays, A = xs
        w, u = self._fla.prepare_again(k=k, v=v, beta=beta, A=A, g=decays)
        states, deltas, _ = self._fla.states(
            k=k, w=w, u=u, g=decays, initial_state=entries.contiguous(), output_final_state=False
        )
        out: Tensor = self._fla.outputs(q=q, k=k, v=deltas, h=states, g=decays, scale=self._scale)
        return out.to(v.dtype)

    def entry_gradients(self, grad: Tensor, *xs: Tensor) -> Tensor:
        """See `Stages.entry_gradients`."""
        q, k, v, _, beta, decays, A = xs
        grad = grad.contiguous()
        w, _ = self._fla.prepare_again(k=k, v=v, beta=beta, A=A, g=decays)
        of_values = self._fla.local_gradients(q=q, k=k, g=decays, do=grad, scale=self._scale)
        nothing = torch.zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], device=v.device)
        parts = {"h0": nothing, "dht": None, "do": grad, "dv": of_values, "scale": self._scale}
        _, found, _ = self._fla.state_gradients(q=q, k=k, w=w, g=decays, **parts)
        entering: Tensor = found
        return entering

    def gradients(self, entries: Tensor, grad: Tensor, leaving: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        """See `Stages.gradients`."""
        *inputs, decays, A = xs
        q, k, v, _, beta = inputs
        states = {"initial_state": entries.contiguous(), "do": grad.contiguous(), "dht": leaving.contiguous()}
        parts = {"q": q, "k": k, "v": v, "g": decays, "beta": beta, "A": A, "scale": self._scale}
        dq, dk, dv, dbeta, dg, *_ = self._fla.gradients(**parts, **states)
        return tuple(dx.to(x.dtype) for dx, x in zip((dq, dk, dv, dg, dbeta), inputs, strict=True))


def pair_in_stages(
    function: Stage, v: Tensor, g: Tensor, *, normalises: bool = False, scale: float | None = None
) -> Callable[..., Pair] | None:
    """Return the function that computes A and B of pieces in stages of the library, see `TwoPasses.pair`.

    None if `function` is not the library's gated delta rule, as such or in a wrapper; if decays `g` are not one
    per head; or on devices where the stages do not work.

    v, g: values and decays, of which type and device count.
    normalises: whether q and k are to be divided by their norms.
    scale: of q; None for one over the root of its size.
    """
    if g.dim() != 3 or not _is_usable(v.device) or not _calls(function, _library().rule):
        return None
    return partial(_pair, normalises, scale)


def _pair(normalises: bool, scale: float | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    if normalises:
        q, k = (_library().normalise(x) for x in (q, k))
    return pair_by_stages(FlaStages(q, k, v, g, beta, scale=q.shape[3] ** -0.5 if scale is None else scale))


def _calls(function: Any, wanted: Stage) -> bool:
    """Return whether a function is another one, or a wrapper that holds it: transformers' has it in its closure."""
    while function is not None:
        held = (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
        if function is wanted or any(each is wanted for each in held):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _is_usable(device: torch.device) -> bool:
    """Return whether the stages work on a device, and have been tried out there."""
    if device.type != "cuda" or torch.version.hip or _library() is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and _are_right(device)


@lru_cache(maxsize=8)
def _are_right(device: torch.device) -> bool:
    """Return whether the stages do what the library's public function does, on drawn tensors; else warn."""
    try:
        worst = worst_error(device)
    except Exception as error:
        worst, why = float("inf"), f"{type(error).__name__}: {error}"
    else:
        why = f"relative errors of up to {worst:.2g}"
    if not worst < _WORST:
        warnings.warn(
            f"flash-linear-attention's stages of the gated delta rule are not used, since they differ from its "
            f"function here ({why}); layers take longer so. They are made for fla-core 0.6",
            stacklevel=2,
        )
    return worst < _WORST


def worst_error(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return the largest relative error of outputs and gradients of the stages, beside the library's function."""
    draw = torch.Generator("cpu").manual_seed(0)

    def drawn(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=draw, device="cpu").to(device, of)

    count, length, heads, dim, width = 2, 150, 1, 32, 16
    q, k, v = drawn(count, length, heads, dim), drawn(count, length, heads, dim), drawn(count, length, heads, width)
    g, beta = -0.02 * drawn(count, length, heads, of=torch.float32).abs(), drawn(count, length, heads).sigmoid()
    state = drawn(count, heads, dim, width, of=torch.float32)
    dout, leaving = drawn(count, length, heads, width), drawn(count, heads, dim, width, of=torch.float32)
    results = []
    for in_stages in (False, True):
        xs = [x.detach().requires_grad_() for x in (q, k, v, g, beta, state)]
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            if in_stages:
                transition, bias, goes_on = _pair(True, None, *xs[:5])
                out, last = goes_on(xs[5]), transition @ state + bias
                grads = torch.autograd.grad([out, bias], xs, [dout, leaving])
                grads = (*grads[:5], grads[5] + transition.mT @ leaving)
            else:
                both = {"initial_state": xs[5], "output_final_state": True, "use_qk_l2norm_in_kernel": True}
                out, last = _library().rule(*xs[:5], **both)
                grads = torch.autograd.grad([out, last], xs, [dout, leaving])
        results.append([out, last, *grads])
    return max(_error(found.float(), true.float()) for true, found in zip(*results, strict=True))


def _error(found: Tensor, true: Tensor) -> float:
    error = float(((found - true).norm() / true.norm()).detach())
    return error if error == error else float("inf")
