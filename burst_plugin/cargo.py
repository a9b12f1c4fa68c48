"""What travels in one pass of a call, for the executor: operands of one side, and its sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from burst_plugin.passes import Pass, Tensors
from burst_plugin.rows import take_rows
from burst_plugin.sums import OwnSums, Place, TileSums
from burst_plugin.transfers import Rows

__all__ = ["CallCargo"]


class CallCargo:
    """See `executor.Cargo`. `passes` are those of the parts of the heads, `own` this rank's sums of side `away`."""

    def __init__(self, passes: Sequence[Pass], away: str, own: OwnSums, ranks: int, device: torch.device) -> None:
        self.device = device
        self._passes, self._away, self._own, self._ranks = passes, away, own, ranks
        self._outgoing: dict[int, Tensors] = {}

    def operands(self, block: int, rows: Rows | None) -> Tensors:
        """See `executor.Cargo`."""
        if block not in self._outgoing:
            self._outgoing[block] = self._pass_of(block).outgoing(self._away)
        whole = self._outgoing[block]
        return whole if rows is None else tuple(take_rows(x, rows) for x in whole)

    def sums(self, block: int, place: Place, filled: bool) -> TileSums:
        """See `executor.Cargo`."""
        return self._pass_of(block).sums(self._away, place, filled)

    def own_sums(self, block: int) -> TileSums:
        """See `executor.Cargo`."""
        return self._own.parts[block // self._ranks]

    def _pass_of(self, block: int) -> Pass:
        return self._passes[block // self._ranks]
