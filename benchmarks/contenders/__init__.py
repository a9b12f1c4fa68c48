"""Ways of distributing attention, side by side: this project's and those of other libraries.

Another library is its package as published on PyPI, in its best configuration. What it needs of GPU packages is a
stand-in, put into `sys.modules` by `prepare`, in a rank's own process only.
"""

from __future__ import annotations

from benchmarks.contenders.burst import BURST
from benchmarks.contenders.protocol import Case, Contender, Session, Slept
from benchmarks.contenders.ring_flash_attn import RingFlashAttn
from benchmarks.contenders.torch_context_parallel import TorchContextParallel
from benchmarks.contenders.ulysses import Ulysses
from benchmarks.contenders.yunchang import USP

__all__ = ["CONTENDERS", "Case", "Contender", "Session", "Slept"]

CONTENDERS: tuple[Contender, ...] = (*BURST, RingFlashAttn(), USP(), Ulysses(), TorchContextParallel())
