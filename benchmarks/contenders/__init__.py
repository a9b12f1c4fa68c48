"""Ways of distributing attention: this project's, and other libraries' packages as published on PyPI."""

from __future__ import annotations

from benchmarks.contenders.burst import BURST
from benchmarks.contenders.protocol import Case, Contender, Session, Slept
from benchmarks.contenders.ring_flash_attn import RingFlashAttn
from benchmarks.contenders.torch_context_parallel import TorchContextParallel
from benchmarks.contenders.ulysses import Ulysses
from benchmarks.contenders.yunchang import USP

__all__ = ["CONTENDERS", "Case", "Contender", "Session", "Slept"]

CONTENDERS: tuple[Contender, ...] = (*BURST, RingFlashAttn(), USP(), Ulysses(), TorchContextParallel())
