"""The limits of kernels: one description, used to refuse cases and to make the table of kernels."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from burst_plugin.kernels.protocol import Case, Kernel

HALVES = (torch.bfloat16, torch.float16)


class Limits(NamedTuple):
    """The limits of a kernel: device, types, head dims and library; an empty or absent one stands for any.

    device: "cuda" or "cpu".
    dtypes: the types of q, k and v.
    dims: the largest (dim of q and k, dim of v); a case has to fit into one of these pairs.
    capability: the first and the last CUDA compute capability, (major, minor) each.
    library: the library that has to be installed, in the words of docs/kernels.md.
    keeps_plans: whether the kernel prepares something for every shape of a tile, and never frees it.
    """

    device: str | None = None
    dtypes: tuple[torch.dtype, ...] = ()
    dims: tuple[tuple[int, int], ...] = ()
    capability: tuple[tuple[int, int], tuple[int, int]] | None = None
    library: str = ""
    keeps_plans: bool = False

    def refuse(self, case: Case) -> str | None:
        """Return why `case` is outside these limits; None if it is inside. The library is not looked at."""
        if self.device is not None and case.device != self.device:
            return f"it runs on {self.device}, not on {case.device}"
        if self.dtypes and case.dtype not in self.dtypes:
            return f"it takes {', '.join(str(t).removeprefix('torch.') for t in self.dtypes)}, not {case.dtype}"
        if self.dims and not any(case.qk_dim <= qk and case.v_dim <= v for qk, v in self.dims):
            largest = " or ".join(f"{qk} with {v}" for qk, v in self.dims)
            return f"it takes head dims up to {largest} (of q and k, and of v), not {case.qk_dim} with {case.v_dim}"
        return None if self.capability is None else self._refuse_gpu(self.capability)

    @staticmethod
    def _refuse_gpu(capability: tuple[tuple[int, int], tuple[int, int]]) -> str | None:
        if torch.version.cuda is None:
            return "this PyTorch is not built for CUDA"
        if not torch.cuda.is_available():
            return "there is no CUDA device"
        first, last = capability
        actual = torch.cuda.get_device_capability()
        if first <= actual <= last:
            return None
        lowest, highest, got = (f"{major}.{minor}" for major, minor in (first, last, actual))
        return f"it needs a GPU of compute capability {lowest} to {highest}, not {got}"


class LimitedKernel(Kernel, Protocol):
    """The interface of this package's kernels, which have `limits`; a user's kernel need not have any."""

    limits: Limits
