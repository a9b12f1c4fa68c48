"""Kernels: attention of one query slice on one key slice, behind one small protocol.

A kernel sees tiles only, never a layout, a document or a ring. A new kernel is one file and a line below.

Ideas that are not kernels yet:

- FlexAttention has softcap, ALiBi and more on GPUs, and it returns the lse. Its backward pass takes the lse that its
  own forward pass saved, never a given one (`torch.nn.attention.flex_attention`; the operator below it takes one,
  with traced graphs and in base 2, and is private), so a ring cannot use it as it is. What would work: run the
  forward pass again, and give `w * dout` as the gradient of its out and `w * (rowsum(dout * its out) - delta)` as
  that of its lse, `w = exp(its lse - lse)`, at the price of one more forward pass per tile.
- ALiBi in flash-attention 2 takes distances from the rows of a tile, which are those of the sequence on the diagonal
  only, and leaves a term per row out of the lse where causal.
- Dropout in all libraries draws by the order of work, not by positions: it would differ with the number of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from burst_plugin.kernels.flash_attn_2 import FlashAttn2Kernel
from burst_plugin.kernels.flash_attn_3 import FlashAttn3Kernel
from burst_plugin.kernels.flash_attn_4 import FlashAttn4Kernel
from burst_plugin.kernels.limits import LimitedKernel
from burst_plugin.kernels.protocol import FEATURES, Case, Grads, How, Kernel, Lengths, Queries, Selection
from burst_plugin.kernels.reference import ReferenceKernel, largest_scores
from burst_plugin.kernels.torch_cpu import TorchCpuKernel
from burst_plugin.kernels.torch_cpu_bf16 import TorchCpuBf16Kernel
from burst_plugin.kernels.torch_cudnn import TorchCudnnKernel
from burst_plugin.kernels.torch_efficient import TorchEfficientKernel
from burst_plugin.kernels.torch_flash import TorchFlashKernel
from burst_plugin.kernels.torch_gather import TorchGatherKernel

__all__ = [
    "FEATURES",
    "KERNELS",
    "Case",
    "Grads",
    "How",
    "Kernel",
    "Lengths",
    "Queries",
    "Selection",
    "choose_kernel",
    "largest_scores",
]

KERNELS: Mapping[str, LimitedKernel] = MappingProxyType(
    {
        kernel.name: kernel
        for kernel in (  # fastest first
            FlashAttn3Kernel(),
            FlashAttn4Kernel(),
            TorchCudnnKernel(),
            FlashAttn2Kernel(),
            TorchFlashKernel(),
            TorchEfficientKernel(),
            TorchGatherKernel(),
            TorchCpuBf16Kernel(),
            TorchCpuKernel(),
            ReferenceKernel(),
        )
    }
)
_LOG = logging.getLogger(__name__)


def choose_kernel(wanted: str | Kernel, case: Case) -> Kernel:
    """Return the kernel that computes `case`: the one called `wanted`, `wanted` itself, or with "auto" the fastest.

    Where every batch may bring tiles of new shapes, "auto" prefers a kernel that does not keep a plan for each shape.
    Where it cannot take a faster kernel of this device because of a feature, a warning says so once, with the cost.

    Raises ValueError if the wanted kernel, or with "auto" every kernel, cannot compute it, with reasons and, for a
    wanted kernel, the names of kernels that can.
    """
    if wanted == "auto":
        return _fastest(case)
    kernel = KERNELS[wanted] if isinstance(wanted, str) else wanted
    refusal = _refusal(kernel, case)
    if refusal is None:
        return kernel
    known: dict[str, Kernel] = {**KERNELS, kernel.name: kernel}
    able = [name for name, other in known.items() if _refusal(other, case) is None]
    raise ValueError(f"kernel={kernel.name!r} cannot do this attention ({refusal}); these can: {able or 'none'}")


def _fastest(case: Case) -> Kernel:
    """Return the first kernel for `case`, if possible without a plan per new shape. Raise ValueError if none can."""
    refusals = {name: _refusal(kernel, case) for name, kernel in KERNELS.items()}
    able = [KERNELS[name] for name, refusal in refusals.items() if refusal is None]
    if not able:
        reasons = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items())
        raise ValueError(f"kernel='auto': no kernel can do this attention ({reasons})")
    lasting = [kernel for kernel in able if not (case.new_tiles and kernel.limits.keeps_plans)]
    chosen = (lasting or able)[0]
    _warn_of_fallback(chosen.name, case)
    return chosen


def _refusal(kernel: Kernel, case: Case) -> str | None:
    """Return why a kernel cannot do `case`, features included; None if it can."""
    missing = sorted(case.features - kernel.features)
    return kernel.refuse(case) or (f"it lacks: {', '.join(missing)}" if missing else None)


def _warn_of_fallback(chosen: str, case: Case) -> None:
    """Warn if a kernel was chosen that is slower than the one for plain attention on this device."""
    plain = case._replace(features=case.features & {"selection"}, new_tiles=False)
    usual = next(name for name, kernel in KERNELS.items() if _refusal(kernel, plain) is None)
    if usual == chosen:
        _warn_of_earlier_gpus(KERNELS[usual], plain)
        return
    why = _refusal(KERNELS[usual], case) or "it would keep a plan for every new shape of a tile; ask for it by name"
    text = f"attention runs on {chosen}, which is slower than {usual} ({usual}: {why})"
    if chosen == ReferenceKernel.name:
        text += (
            ". It multiplies whole score matrices, some query rows at a time: on a CPU it takes 5 times as long as "
            "torch_cpu, and 10 times for causal masks (forward and backward, 2048 tokens, 8 heads of 64, float32). "
            "Leave out what you can spare: Megatron's --attention-dropout is 0.1 unless it is set"
        )
    warn_once(text)


def _warn_of_earlier_gpus(kernel: LimitedKernel, plain: Case) -> None:
    """Warn if a kernel for earlier GPUs runs because all kernels that were made for this one are refused."""
    made_for = {name: each.limits.capability[0] for name, each in KERNELS.items() if each.limits.capability}
    newer = [
        f"{name}: {KERNELS[name].refuse(plain)}"
        for name, first in made_for.items()
        if first > made_for.get(kernel.name, first) and KERNELS[name].limits.refuse(plain) is None
    ]
    if newer:
        warn_once(
            f"attention runs on {kernel.name}, which is slower than kernels made for this GPU ({'; '.join(newer)})"
        )


@cache
def warn_once(text: str) -> None:
    """Log a warning about the choice of a kernel, each text once in a process."""
    _LOG.warning(text)
