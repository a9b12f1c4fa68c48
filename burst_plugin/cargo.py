"""What travels in one pass of a call, for the executor: operands of one side, and its sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from burst_plugin.passes import Pass, Tensors
from burst_plugin.rows import take_rows
from burst_plugin.sums import OwnSums, Place, TileSums
from burst_plugin.transfers import Rows

if TYPE_CHECKING:
    from burst_plugin.call import Call

__all__ = ["CallCargo"]


class CallCargo:
    """See `executor.Cargo`. `works` are the passes over the parts of the heads, `own` this rank's sums."""

    def __init__(self, call: Call, works: Sequence[Pass], away: str, own: OwnSums) -> None:
        self._call, self._works, self._away, self._own = call, works, away, own
        self._outgoing: dict[int, Tensors] = {}
        self._ranks, self._direction = call.member.routes.ranks, works[0].direction

    @property
    def device(self) -> torch.device:
        """Where tensors are."""
        return self._call.device

    def operands(self, block: int, rows: Rows | None) -> Tensors:
        """See `executor.Cargo`."""
        if block not in self._outgoing:
            self._outgoing[block] = self._work(block).outgoing(self._away)
        whole = self._outgoing[block]
        return whole if rows is None else tuple(take_rows(x, rows) for x in whole)

    def sums(self, block: int, place: Place, filled: bool) -> TileSums:
        """See `executor.Cargo`."""
        return self._work(block).sums(self._away, place, filled)

    def own_sums(self, block: int) -> TileSums:
        """See `executor.Cargo`."""
        return self._own.parts[block // self._ranks]

    def _work(self, block: int) -> Pass:
        return self._works[block // self._ranks]
