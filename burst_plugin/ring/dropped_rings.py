"""A warning about rings that were dropped without `close()`: nothing else destroys their process groups."""

from __future__ import annotations

import logging

import torch.distributed as dist

from burst_plugin.comm.process_groups import Communicators
from burst_plugin.ring.rank_state import RankState

__all__ = ["note_a_dropped_ring", "warn_of_dropped_rings"]

_LOG = logging.getLogger(__name__)
_TOLD = 0
_DROPPED: list[int] = []  # process groups of rings that were dropped without a close; then _TOLD


def note_a_dropped_ring(rank_state: RankState, communicators: Communicators) -> None:
    """Remember that a ring was dropped with its process groups still there, which nothing else destroys."""
    if communicators.created and not rank_state.is_closed and dist.is_initialized():
        _DROPPED.append(len(communicators.created))


def warn_of_dropped_rings() -> None:
    """Say once, where another ring is made, what those before it have left behind."""
    if len(_DROPPED) > 0 and _TOLD not in _DROPPED:
        _LOG.warning(
            "a ContextParallel was dropped without close(), and another one is made: the process groups that it made "
            "(%d), with their threads and connections, stay until the process ends; call close() on all ranks after "
            "the last backward pass",
            sum(_DROPPED),
        )
        _DROPPED.append(_TOLD)
