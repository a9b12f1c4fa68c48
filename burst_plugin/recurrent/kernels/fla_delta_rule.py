"""The stages of flash-linear-attention's gated delta rule and Kimi delta attention, on NVIDIA's GPUs from Ampere on.

The library has functions for them that its own context parallelism uses, but no public ones. So they are tried out
against its public function before the first use, and pieces are computed by that function where they differ.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_plugin.recurrent.delta_pairs import pair_by_kernel
from burst_plugin.recurrent.segments import countable_tokens
from burst_plugin.recurrent.staged import Pair, Stages, pair_by_stages
from burst_plugin.recurrent.ways import Kernel

_CHUNK = 64
_WORST = 0.02  # relative error of stages in half precision
_TOKENS = 80  # of pieces that are tried out, more than a chunk
TRIED_OUT: dict[tuple[torch.device, Any], bool] = {}

Stage = Callable[..., Any]


@lru_cache(maxsize=1)
def _library() -> Any:
    """Return the library's functions by name, or None if they are not as in its version 0.6."""
    try:
        from fla.modules.l2norm import l2norm
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu, chunk_gated_delta_rule_fwd_h
        from fla.ops.common.chunk_o import chunk_bwd_dv_local, chunk_fwd_o
        from fla.ops.cp.chunk_fwd import chunk_cp_fwd_h
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd
        from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
        from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd
        from fla.ops.gla.chunk import chunk_gla_fwd_o_gk
        from fla.ops.kda import chunk_kda
        from fla.ops.kda.chunk_bwd import chunk_kda_bwd, chunk_kda_bwd_dAv
        from fla.ops.kda.chunk_intra import chunk_kda_fwd_intra
        from fla.ops.kda.wy_fast import recompute_w_u_fwd as recompute_kda
        from fla.ops.utils import chunk_local_cumsum
        from fla.ops.utils.constant import RCP_LN2
    except Exception:  # as transformers does, which then computes without the library
        return None
    if "multi_seqs" not in inspect.signature(chunk_cp_fwd_h).parameters:
        return None
    return SimpleNamespace(
        normalise=l2norm,
        add_up=lambda g: chunk_local_cumsum(g, chunk_size=_CHUNK, scale=RCP_LN2),
        maps=chunk_cp_fwd_h,
        states=chunk_gated_delta_rule_fwd_h,
        state_gradients=chunk_gated_delta_rule_bwd_dhu,
        by_head=SimpleNamespace(
            rule=chunk_gated_delta_rule,
            prepare=chunk_gated_delta_rule_fwd_intra,
            prepare_again=recompute_w_u_fwd,
            outputs=chunk_fwd_o,
            local_gradients=chunk_bwd_dv_local,
            gradients=chunk_gated_delta_rule_bwd,
        ),
        by_channel=SimpleNamespace(
            rule=chunk_kda,
            prepare=chunk_kda_fwd_intra,
            prepare_again=recompute_kda,
            outputs=chunk_gla_fwd_o_gk,
            local_gradients=chunk_kda_bwd_dAv,
            gradients=chunk_kda_bwd,
        ),
    )


class FlaStages(Stages):
    """The stages of the library's gated delta rule; tensors are q, k, v, g (float32), beta of pieces, contiguous.

    scale: of q.
    """

    def __init__(self, scale: float) -> None:
        self._scale, self._fla = scale, _library()

    def _maps(self, k: Tensor, w: Tensor, u: Tensor, **decays: Tensor) -> tuple[Tensor, Tensor]:
        """Return A and B of pieces, given what chunks read, w, and write, u, [N, L, H, ...].

        The library's kernel counts elements of a sequence in 32 bits. So longer pieces are several sequences.
        """
        (count, length, heads, width), dim = u.shape, k.shape[3]
        named = {"k": k, "w": w, "u": u, **decays}
        rows = {name: x.flatten(0, 1).unsqueeze(0) for name, x in named.items()}
        most = countable_tokens(max(x.shape[2:].numel() for x in named.values()))
        steps = torch.arange(0, length, most, dtype=torch.int64, device=u.device)
        starts = torch.arange(count, dtype=torch.int64, device=u.device).unsqueeze(1) * length + steps
        bounds = torch.nn.functional.pad(starts.flatten(), (0, 1), value=count * length)
        maps = torch.zeros((*starts.shape, heads, dim, width + dim), dtype=torch.float32, device=u.device)
        self._fla.maps(**rows, hm=maps.flatten(0, 1), cu_seqlens=bounds, multi_seqs=True)
        joined, *later = maps.unbind(1)
        for late in later:
            joined = late[..., width:] @ joined
            joined[..., :width] += late[..., :width]
        return joined[..., width:].contiguous(), joined[..., :width].contiguous()

    def _states(self, entries: Tensor, **parts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states that enter chunks, and what chunks write."""
        states, deltas, _ = self._fla.states(**parts, initial_state=entries.contiguous(), output_final_state=False)
        return states, deltas

    def _of_entries(self, k: Tensor, v: Tensor, **parts: Tensor) -> Tensor:
        """Return the gradients of entering states, from the gradients of outputs and of what chunks write."""
        nothing = torch.zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32, device=v.device)
        _, found, _ = self._fla.state_gradients(k=k, **parts, h0=nothing, dht=None, scale=self._scale)
        entering: Tensor = found
        return entering

    def pair(self, *xs: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return the maps of states of pieces, and tensors for the other stages."""
        _, k, v, g, beta = xs
        decays = self._fla.add_up(g)
        w, u, within = self._fla.by_head.prepare(k=k, v=v, g=decays, beta=beta)
        return *self._maps(k, w, u, g=decays), (decays, within)

    def outputs(self, entries: Tensor, *xs: Tensor) -> Tensor:
        """Return the outputs of pieces, given the states that enter them."""
        q, k, v, _, beta, decays, within = xs
        w, u = self._fla.by_head.prepare_again(k=k, v=v, beta=beta, A=within, g=decays)
        states, deltas = self._states(entries, k=k, w=w, u=u, g=decays)
        out: Tensor = self._fla.by_head.outputs(q=q, k=k, v=deltas, h=states, g=decays, scale=self._scale)
        return out.to(v.dtype)

    def entry_gradients(self, grad: Tensor, *xs: Tensor) -> Tensor:
        """Return the gradients of the states that enter pieces, from the outputs alone."""
        q, k, v, _, beta, decays, within = xs
        grad = grad.contiguous()
        w, _ = self._fla.by_head.prepare_again(k=k, v=v, beta=beta, A=within, g=decays)
        written = self._fla.by_head.local_gradients(q=q, k=k, g=decays, do=grad, scale=self._scale)
        return self._of_entries(k, v, q=q, w=w, g=decays, do=grad, dv=written)

    def gradients(self, entries: Tensor, grad: Tensor, leaving: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the tensors that `pair` took."""
        *inputs, decays, within = xs
        q, k, v, _, beta = inputs
        states = {"initial_state": entries.contiguous(), "do": grad.contiguous(), "dht": leaving.contiguous()}
        parts = {"q": q, "k": k, "v": v, "g": decays, "beta": beta, "A": within, "scale": self._scale}
        dq, dk, dv, dbeta, dg, *_ = self._fla.by_head.gradients(**parts, **states)
        return tuple(dx.to(x.dtype) for dx, x in zip((dq, dk, dv, dg, dbeta), inputs, strict=True))


class FlaKimiStages(FlaStages):
    """The stages of the library's Kimi delta attention, with a decay per channel."""

    def pair(self, *xs: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return the maps of states of pieces, and tensors for the other stages."""
        q, k, v, g, beta = xs
        decays = self._fla.add_up(g)
        parts = {"q": q, "k": k, "v": v, "gk": decays, "beta": beta, "scale": self._scale}
        w, u, _, keys, weights, within = self._fla.by_channel.prepare(**parts)
        return *self._maps(keys, w, u, gk=decays), (decays, weights, within)

    def outputs(self, entries: Tensor, *xs: Tensor) -> Tensor:
        """Return the outputs of pieces, given the states that enter them."""
        q, k, v, _, beta, decays, weights, within = xs
        w, u, _, keys = self._fla.by_channel.prepare_again(k=k, v=v, beta=beta, A=within, gk=decays)
        states, deltas = self._states(entries, k=keys, w=w, u=u, gk=decays)
        out: Tensor = self._fla.by_channel.outputs(q=q, v=deltas, g=decays, A=weights, h=states, scale=self._scale)
        return out.to(v.dtype)

    def entry_gradients(self, grad: Tensor, *xs: Tensor) -> Tensor:
        """Return the gradients of the states that enter pieces, from the outputs alone."""
        q, k, v, _, beta, decays, weights, within = xs
        grad = grad.contiguous()
        w, _, queries, keys = self._fla.by_channel.prepare_again(q=q, k=k, v=v, beta=beta, A=within, gk=decays)
        _, written = self._fla.by_channel.local_gradients(q=q, k=k, v=v, do=grad, A=weights, scale=self._scale)
        return self._of_entries(keys, v, q=queries, w=w, gk=decays, do=grad, dv=written)

    def gradients(self, entries: Tensor, grad: Tensor, leaving: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the tensors that `pair` took."""
        *inputs, decays, weights, within = xs
        q, k, v, _, beta = inputs
        states = {"initial_state": entries.contiguous(), "do": grad.contiguous(), "dht": leaving.contiguous()}
        parts = {"q": q, "k": k, "v": v, "g": decays, "beta": beta, "Aqk": weights, "Akk": within}
        dq, dk, dv, dbeta, dg, *_ = self._fla.by_channel.gradients(**parts, scale=self._scale, **states)
        return tuple(dx.to(x.dtype) for dx, x in zip((dq, dk, dv, dg, dbeta), inputs, strict=True))


def pair_by_library(function: Stage, kernel: Kernel, normalises: bool, *tensors: Tensor) -> Any:
    """Return A and B of pieces, in stages of the library where `function` is the library's, see `TwoPasses.pair`.

    Elsewhere `kernel` computes them, see `pair_by_kernel`.

    function: what `kernel` calls: the library's gated delta rule (Kimi delta attention for decays per channel), as
        such or in transformers' wrapper, which scales q by one over the root of its size; or any other.
    normalises: whether `function` divides q and k by their norms.
    tensors: q, k, v, g, beta of pieces.
    """
    _, k, v, g, _ = tensors
    shared = v.shape[2] // k.shape[2]
    sizes = RuleSizes(g.dim() == 4, shared, k.shape[3], v.shape[3], v.dtype)
    if is_usable(v.device) and is_rule(function, sizes.by_channel) and are_right(v.device, sizes):
        return _pair(normalises, *tensors)
    return pair_by_kernel(kernel, *tensors)


def _pair(normalises: bool, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Pair:
    if normalises:
        q, k = (_library().normalise(x) for x in (q, k))
    kind = FlaKimiStages if g.dim() == 4 else FlaStages
    return pair_by_stages(kind(q.shape[3] ** -0.5), [x.contiguous() for x in (q, k, v, g.float(), beta)])


class RuleSizes(NamedTuple):
    """The sizes and types that the code of the library's kernels depends on.

    shared: the heads of values for each key head.
    """

    by_channel: bool
    shared: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype


def rule_of(by_channel: bool) -> Stage:
    """Return the library's public function for decays per channel, or per head."""
    library = _library()
    rule: Stage = (library.by_channel if by_channel else library.by_head).rule
    return rule


def is_rule(function: Any, by_channel: bool) -> bool:
    """Return whether a function is the library's public one, or transformers' wrapper of it.

    Another wrapper might change arguments, which stages would not see.
    """
    if isinstance(function, torch.nn.Module) and "forward" not in vars(function):  # as the package `kernels` wraps it
        cells: Any = getattr(type(function).forward, "__closure__", None) or ()
        function = cells[0].cell_contents if len(cells) == 1 else function
    rule, code = rule_of(by_channel), getattr(function, "__code__", None)
    if function is rule or code is None or not code.co_filename.endswith("hub_kernels.py"):
        return function is rule
    with suppress(ValueError):  # a cell that is empty
        return any(cell.cell_contents is rule for cell in function.__closure__ or ())
    return False


def is_usable(device: torch.device) -> bool:
    """Return whether the library is there, and its stages can run on the device."""
    if device.type != "cuda" or torch.version.hip or _library() is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def are_right(device: torch.device, sizes: RuleSizes) -> bool:
    """Return whether the stages do what the library's public function does, on drawn tensors; else warn once.

    Never tried out in a backward pass, whose thread another thread's backward pass would wait for.
    """
    if (device, sizes) in TRIED_OUT or torch._C._current_graph_task_id() != -1:
        return TRIED_OUT.setdefault((device, sizes), False)
    try:
        # Hooks of checkpoints, modes, autocast and inference mode belong to a thread: this one has none.
        with ThreadPoolExecutor(1) as alone:
            worst = alone.submit(worst_error, device, sizes).result()
    except Exception as error:
        worst, why = float("inf"), f"{type(error).__name__}: {error}"
    else:
        why = f"relative errors of up to {worst:.2g}"
    if not worst < _WORST:
        warnings.warn(
            f"flash-linear-attention's stages of a delta rule are not used, since they differ from its function "
            f"here ({why}); layers take longer so. They are made for fla-core 0.6",
            stacklevel=2,
        )
    TRIED_OUT[device, sizes] = worst < _WORST
    return worst < _WORST


def worst_error(device: torch.device, sizes: RuleSizes) -> float:
    """Return the largest relative error of outputs and gradients of the stages, beside the library's function."""
    draw = torch.Generator("cpu").manual_seed(0)
    by_channel, shared, dim, width, dtype = sizes
    key_heads, heads = 1, shared  # fewer than layers have: kernels are tuned by numbers of heads, not of tokens

    def drawn(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(2, *shape, generator=draw, device="cpu").to(device, of)

    q, k, v = drawn(_TOKENS, key_heads, dim), drawn(_TOKENS, key_heads, dim), drawn(_TOKENS, heads, width)
    g = -0.02 * drawn(_TOKENS, heads, *(dim,) * by_channel, of=torch.float32).abs()
    beta, state = drawn(_TOKENS, heads).sigmoid(), drawn(heads, dim, width, of=torch.float32)
    dout, leaving = drawn(_TOKENS, heads, width), drawn(heads, dim, width, of=torch.float32)
    results = []
    with torch.cuda.device_of(v):  # type: ignore[no-untyped-call]
        for in_stages in (False, True):
            xs = [x.detach().requires_grad_() for x in (q, k, v, g, beta, state)]
            if in_stages:
                transition, bias, goes_on = _pair(True, *xs[:5])
                out, last = goes_on(xs[5]), transition @ state + bias
                grads = torch.autograd.grad([out, bias], xs, [dout, leaving])
                grads = (*grads[:5], grads[5] + transition.mT @ leaving)
            else:
                both = {"initial_state": xs[5], "output_final_state": True, "use_qk_l2norm_in_kernel": True}
                out, last = rule_of(by_channel)(*xs[:5], **both)
                grads = torch.autograd.grad([out, last], xs, [dout, leaving])
            results.append([out, last, *grads])
    return max(_error(found.float(), true.float()) for true, found in zip(*results, strict=True))


def _error(result: Tensor, true: Tensor) -> float:
    error = float(((result - true).norm() / true.norm()).detach())
    return error if error == error else float("inf")
