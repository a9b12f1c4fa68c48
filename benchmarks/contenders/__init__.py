"""Ways of distributing attention: this project's, and other libraries' packages as published on PyPI."""

from __future__ import annotations

from benchmarks.contenders import ring_flash_attn
from benchmarks.contenders.burst import BURST, ZIGZAG_BY_DOCUMENT
from benchmarks.contenders.protocol import Case, Contender, Session, Slept
from benchmarks.contenders.ring_flash_attn import RingFlashAttn
from benchmarks.contenders.torch_context_parallel import TorchContextParallel
from benchmarks.contenders.ulysses import Ulysses
from benchmarks.contenders.yunchang import USP

__all__ = ["CONTENDERS", "PACKED", "Case", "Contender", "Session", "Slept"]

_OTHERS: tuple[Contender, ...] = (USP(), Ulysses(), TorchContextParallel())
CONTENDERS: tuple[Contender, ...] = (*BURST, RingFlashAttn(), *_OTHERS)
PACKED: tuple[Contender, ...] = (BURST[0], ZIGZAG_BY_DOCUMENT, *ring_flash_attn.PACKED, *_OTHERS)  # for documents
