"""PyTorch's own context parallelism: `torch.distributed.tensor.experimental`, by its module interface.

It dispatches on PyTorch's fused attention operators for GPUs. `aten::_scaled_dot_product_flash_attention` has no
implementation for CPUs, so one is registered that hands over to the kernel of this process. Its interface of old,
`context_parallel(...)`, patches functions for the duration of a step; it runs the same ring.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.contenders import flash_attn_stand_in
from benchmarks.contenders.flash_attn_stand_in import StandIn
from benchmarks.contenders.kernels import kernel_for, tile, typed
from benchmarks.contenders.peer import PeerSession, layout_rows
from benchmarks.contenders.protocol import Case, Contender, Slept
from burst_plugin.kernels import Kernel, Queries

__all__ = ["TorchContextParallel"]

_SEQ_DIM = 2  # of [B, H, S, D]


@dataclass(frozen=True)
class TorchContextParallel:
    """Its ring with the head-tail load balancer where causal, which is zigzag.

    `rotate` is how keys and values move in the forward pass: "allgather", PyTorch's default, or "alltoall", a ring.
    """

    name: str = "PyTorch context_parallel"
    rotate: str = "allgather"

    def absent(self) -> str | None:
        """See `Contender.absent`."""
        try:
            _interface()
        except ImportError as error:
            return f"this PyTorch ({torch.__version__}) has another interface: {error}"
        return None

    def refuse(self, case: Case) -> str | None:
        """See `Contender.refuse`."""
        if case.documents:
            return "its ring takes whole sequences; packed documents take flex_attention, trained on GPUs only"
        if case.causal and case.seq % 2:
            return f"its load balancer cuts {case.seq} tokens per rank into halves"
        return None

    def configurations(self, case: Case) -> tuple[Contender, ...]:
        """See `Contender.configurations`."""
        found = (self, replace(self, name=f"{self.name}, alltoall", rotate="alltoall"))
        return tuple(one for one in found if one.refuse(case) is None)

    def prepare(self, case: Case, slept: Slept | None) -> PeerSession:
        """See `Contender.prepare`."""
        interface, stand_in, kernel = _interface(), _install(), kernel_for(case, slept)
        layer = _Attention(case.causal)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        interface.style(_SEQ_DIM, interface.style.AttentionType.SDPA)._apply(layer, mesh)
        interface.enable()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = layer(*(x.transpose(1, 2) for x in (q, k, v)))
            return out.transpose(1, 2)

        rows = layout_rows("zigzag" if case.causal else "contiguous", case.seq)
        return PeerSession(rows, attend, partial(self._enter, interface, stand_in, kernel, case.causal))

    def _enter(self, interface: _Interface, stand_in: StandIn, kernel: Kernel, causal: bool) -> None:
        stand_in.kernel = kernel
        interface.set_rotate_method(self.rotate)
        interface.options.enable_load_balance = causal


class _Attention(torch.nn.Module):
    """Flash attention of distributed tensors [B, H, S, D], by the operator that has a ring."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self._causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, self._causal)[0]
        return out


class _Interface(NamedTuple):
    """What is used of PyTorch's context parallelism."""

    style: Any
    options: Any
    enable: Any
    set_rotate_method: Any


def _interface() -> _Interface:
    from torch.distributed.tensor.experimental import _attention

    names = ("_ContextParallel", "_cp_options", "_enable_context_parallel_dispatcher", "set_rotate_method")
    missing = [name for name in names if not hasattr(_attention, name)]
    if missing:
        raise ImportError(f"no {', '.join(missing)}")
    return _Interface(*(getattr(_attention, name) for name in names))


def _install() -> StandIn:
    """The stand-in of this process, also as PyTorch's operator; the registration lives as long as it does."""
    stand_in = flash_attn_stand_in.install()
    if stand_in.operators is None:
        operators: Any = torch.library.Library("aten", "IMPL", "CPU")  # type: ignore[no-untyped-call]
        operators.impl("_scaled_dot_product_flash_attention", partial(_forward, stand_in))
        operators.impl("_scaled_dot_product_flash_attention_backward", partial(_backward, stand_in))
        stand_in.operators = operators
    return stand_in


def _forward(
    stand_in: StandIn,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[object, ...]:
    how = tile(scale, is_causal, q.shape[3])
    found, lse = stand_in.kernel.forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), how)
    state = torch.zeros((), dtype=torch.int64)  # of the random numbers, of which there are none
    out = typed(stand_in.kernel, found, q.dtype).transpose(1, 2)
    return out, lse, None, None, q.shape[2], k.shape[2], state, state, state


def _backward(
    stand_in: StandIn,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    how = tile(scale, is_causal, q.shape[3])
    q, grad_out, out, k, v = (x.transpose(1, 2) for x in (q, grad_out, out, k, v))
    grads = stand_in.kernel.backward(Queries(q, grad_out, out, logsumexp), k, v, how)
    return tuple(grad.to(q.dtype).transpose(1, 2) for grad in grads[:3])
