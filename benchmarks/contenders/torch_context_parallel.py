"""PyTorch's own context parallelism: `torch.distributed.tensor.experimental`, by its module interface.

It dispatches on PyTorch's fused attention operators for GPUs. `aten::_scaled_dot_product_flash_attention` has no
implementation for CPUs, so one is registered that calls the kernel of this process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.contenders.kernels import StandIn, install, kernel_for, tile, typed
from benchmarks.contenders.protocol import Case, Contender, Session, Slept, layout_rows
from burst_plugin.kernels import Queries

_SEQ_DIM = 2  # of [B, H, S, D]


@dataclass(frozen=True)
class TorchContextParallel(Contender):
    """Its ring, with the head-tail load balancer where causal, which is zigzag."""

    name: str = "PyTorch context_parallel"
    rotate: str = "allgather"  # keys and values in the forward pass, PyTorch's default; or "alltoall", a ring

    def absent(self) -> str | None:
        try:
            _interface()
        except (ImportError, AttributeError) as error:
            return f"this PyTorch ({torch.__version__}) has another interface: {error}"
        return None

    def refuse(self, case: Case) -> str | None:
        if case.documents:
            return "its ring takes whole sequences; packed documents take flex_attention, trained on GPUs only"
        if case.causal and case.seq % 2:
            return f"its load balancer cuts {case.seq} tokens per rank into halves"
        return None

    def variants(self, case: Case) -> tuple[Contender, ...]:
        return (replace(self, name=f"{self.name}, alltoall", rotate="alltoall"),)

    def prepare(self, case: Case, slept: Slept | None) -> Session:
        style, options, enable, set_rotate_method = _interface()
        stand_in, kernel, layer = _install(), kernel_for(case, slept), _Attention(case.causal)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        style(_SEQ_DIM, style.AttentionType.SDPA)._apply(layer, mesh)
        enable()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return layer(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

        def enter() -> None:
            stand_in.kernel = kernel
            set_rotate_method(self.rotate)
            options.enable_load_balance = case.causal

        return Session(layout_rows("zigzag" if case.causal else "contiguous", case), attend, enter)


class _Attention(torch.nn.Module):
    """Flash attention of distributed tensors [B, H, S, D], by the operator that has a ring."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self._causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, self._causal)[0]


def _interface() -> tuple[Any, ...]:
    from torch.distributed.tensor.experimental import _attention

    names = ("_ContextParallel", "_cp_options", "_enable_context_parallel_dispatcher", "set_rotate_method")
    return attrgetter(*names)(_attention)  # type: ignore[no-any-return]


def _install() -> StandIn:
    """Return the stand-in of this process, also as PyTorch's operator; the registration lives as long as it does."""
    stand_in = install()
    if stand_in.operators is None:
        operators: Any = torch.library.Library("aten", "IMPL", "CPU")  # type: ignore[no-untyped-call]
        operators.impl("_scaled_dot_product_flash_attention", partial(_forward, stand_in))
        operators.impl("_scaled_dot_product_flash_attention_backward", partial(_backward, stand_in))
        stand_in.operators = operators
    return stand_in


def _forward(stand_in: StandIn, *given: Any, scale: float | None = None) -> tuple[object, ...]:
    """Attend; `given` are the operator's q, k, v and, unless left out, dropout and whether it is causal."""
    q, k, v, is_causal = *given[:3], given[4] if len(given) > 4 else False
    how = tile(scale, is_causal, q.shape[3])
    found, lse = stand_in.kernel.forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), how)
    state = torch.zeros((), dtype=torch.int64)  # of the random numbers, of which there are none
    out = typed(stand_in.kernel, found, q.dtype).transpose(1, 2)
    return out, lse, None, None, q.shape[2], k.shape[2], state, state, state


def _backward(stand_in: StandIn, *given: Any, scale: float | None = None) -> tuple[Tensor, ...]:
    """Compute the gradients; `given` are those of the operator, of which sizes and random numbers are not needed."""
    grad_out, q, k, v, out, lse, *_, is_causal, _, _ = given
    how = tile(scale, is_causal, q.shape[3])
    q, grad_out, out, k, v = (x.transpose(1, 2) for x in (q, grad_out, out, k, v))
    grads = stand_in.kernel.backward(Queries(q, grad_out, out, lse), k, v, how)
    return tuple(grad.to(q.dtype).transpose(1, 2) for grad in grads[:3])
