"""Kernels: attention of one query slice on one key slice, behind one small protocol.

A kernel sees tiles only, never a layout, a document or a ring. A new kernel is one file and a line below.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from burst_plugin.kernels.protocol import Case, Kernel, Queries
from burst_plugin.kernels.reference import ReferenceKernel
from burst_plugin.kernels.torch_cpu import TorchCpuKernel

__all__ = ["KERNELS", "Case", "Kernel", "Queries", "choose_kernel"]

KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {kernel.name: kernel for kernel in (TorchCpuKernel(), ReferenceKernel())}  # fastest first
)


def choose_kernel(name: str, case: Case) -> Kernel:
    """The kernel called `name`, or for `"auto"` the first one that can do `case`.

    Raises ValueError if the kernel asked for cannot: with its reason, and the names of those that can.
    """
    refusals = {other: kernel.refuse(case) for other, kernel in KERNELS.items()}
    able = [other for other, refusal in refusals.items() if refusal is None]
    if name == "auto" and able:
        return KERNELS[able[0]]
    if name != "auto" and refusals[name] is None:
        return KERNELS[name]
    reasons = refusals[name] if name != "auto" else "; ".join(f"{k}: {why}" for k, why in refusals.items())
    raise ValueError(f"kernel={name!r} cannot do this attention ({reasons}); these can: {able or 'none'}")
