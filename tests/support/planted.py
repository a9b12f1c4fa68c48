"""Kernels with faults that `burst check` has to find, by "module:attribute"."""

from __future__ import annotations

import os
import signal

import torch.distributed as dist
from torch import Tensor

from burst_plugin.kernels import Grads, How, Queries
from burst_plugin.kernels.torch_cpu import TorchCpuKernel


class WrongSign(TorchCpuKernel):
    """dk has the wrong sign."""

    name = "wrong_sign"

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        found = super().backward(queries, k, v, how)
        return found._replace(dk=-found.dk)


class OwnLse(TorchCpuKernel):
    """Gradients are under an lse of the keys that it sees: right alone, wrong in a ring."""

    name = "own_lse"

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        out, lse = self.forward(queries.q, k, v, how)
        return super().backward(queries._replace(out=out.to(queries.q.dtype), lse=lse), k, v, how)


class TrueOut(TorchCpuKernel):
    """Every element of out matters, not only rowsum(out * dout): right alone, wrong where out is made up."""

    name = "true_out"

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        found = super().backward(queries, k, v, how)
        out, _ = self.forward(queries.q, k, v, how)
        return found._replace(dq=found.dq + (queries.out - out).abs().mean())


class NoWindows(TorchCpuKernel):
    """It says that it can do windows, and takes them for causal tiles."""

    name = "no_windows"
    features = TorchCpuKernel.features | {"windows"}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        band = how.band._replace(lower=None) if how.band.lower is not None and how.band.upper == 0 else how.band
        return super().forward(q, k, v, how._replace(band=band))


class Deadly(TorchCpuKernel):
    """It ends the process."""

    name = "deadly"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


class LateOnRankOne(TorchCpuKernel):
    """It raises on rank 1, in the tiles on which it is timed."""

    name = "late_on_rank_one"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        if dist.get_rank() == 1:
            raise RuntimeError("no such instruction")
        return super().forward(q, k, v, how)
