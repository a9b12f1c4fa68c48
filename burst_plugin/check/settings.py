"""What `burst check` looks at: sections, sizes, the kernel, and the model that a strategy is wanted for."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass

import torch

from burst_plugin.check.findings import SECTIONS
from burst_plugin.kernels import KERNELS, Kernel
from burst_plugin.profiling.cluster_profile import Model
from burst_plugin.strategy.validation import check_kernel


@dataclass(frozen=True)
class Sizes:
    """The sizes of the checks. On GPUs all of them take minutes, with `quick` under one.

    tile: queries of the tiles on which kernels are compared with the definition. rows: lengths of the tiles on which
    a kernel is timed.
    tokens: tokens of a rank in the timed ring. steps: forward and backward passes of each ring that is compared.
    rounds: measurements of each time; the best or the median of them counts.
    transfer_s, most_bytes: how long a transfer that is timed should take, and its largest message.
    timeout_s: the time limit of a message. dead_s: the time limit for all ranks to end once one rank has ended.
    """

    tile: int
    rows: tuple[int, ...]
    tokens: int
    steps: int
    rounds: int
    transfer_s: float
    most_bytes: int
    timeout_s: float
    dead_s: float = 30.0


_QUICK_CPU = Sizes(96, (64, 128, 256), 128, 2, 3, 0.15, 8 << 20, 30.0)
_CPU = Sizes(256, (128, 256, 512, 1024), 512, 20, 5, 0.6, 32 << 20, 60.0)
_QUICK_GPU = Sizes(512, (1024, 2048, 4096), 2048, 20, 5, 0.02, 64 << 20, 30.0)
_GPU = Sizes(2048, (1024, 2048, 4096, 8192, 16384), 16384, 20, 10, 0.05, 512 << 20, 120.0)
_MODEL = Model(32, 8, 128, 131072, "causal")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of a check.

    sections: the sections to run, of `SECTIONS`. quick: whether to take smaller sizes and fewer steps.
    kernel: a name, "auto", or "module:attribute" of a kernel of one's own, which is then checked as well.
    ranks_per_node: how many ranks count as a node; None to have ranks find out which share a node.
    model: the attention that a strategy is wanted for. Kernels are timed with its heads, on CPUs with fewer.
    profile: the path of the profile to write; "" for none.
    """

    sections: tuple[str, ...] = SECTIONS
    quick: bool = False
    kernel: str = "auto"
    ranks_per_node: int | None = None
    model: Model = _MODEL
    profile: str = "burst-profile.json"

    def sizes(self, device: torch.device) -> Sizes:
        """Return the sizes of the checks for ranks on this type of device."""
        if device.type == "cuda":
            return _QUICK_GPU if self.quick else _GPU
        return _QUICK_CPU if self.quick else _CPU


def load_kernel(text: str) -> str | Kernel:
    """Return the kernel at "module:attribute", which is an object, or a class to call without arguments.

    "auto" and the names of kernels are returned as they are. Modules in the working directory are found, too, as by
    `python -m`; the command `burst` would not look there. Raises ValueError for a name that is not known, for a
    module or an attribute that is not there, and for an attribute that is no kernel.
    """
    if text == "auto" or text in KERNELS:
        return text
    module, colon, attribute = text.partition(":")
    if not colon:
        raise ValueError(
            f"kernel={text!r} is not valid; use auto, one of {', '.join(KERNELS)}, or module:attribute of your own"
        )
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        value = getattr(importlib.import_module(module), attribute)
        kernel = value() if isinstance(value, type) else value
    except (ImportError, AttributeError, TypeError) as error:  # the last one of a class that wants arguments
        raise ValueError(f"kernel={text!r} cannot be loaded ({error}); use module:attribute of your kernel") from None
    check_kernel(kernel)
    if not isinstance(kernel, Kernel):
        raise ValueError(f"kernel={text!r} is not a kernel; see burst_plugin.kernels.Kernel for what one has")
    return kernel
