"""What travels in one pass of a call, for the executor: operands of one side, and its sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from burst_plugin.passes import Part, Tensors
from burst_plugin.rows import take_rows
from burst_plugin.sums import OwnSums, Place, TileSums
from burst_plugin.transfers import RankPlan, Rows

__all__ = ["CallCargo"]


class CallCargo:
    """See `executor.Cargo`. `parts` are those of the heads, `own` this rank's sums of the side that travels."""

    def __init__(
        self, parts: Sequence[Part], traveller: str, own: OwnSums, plan: RankPlan, device: torch.device
    ) -> None:
        self.device = device
        self._parts, self._traveller, self._own, self._plan = parts, traveller, own, plan
        self._outgoing: dict[int, Tensors] = {}

    def operands(self, block: int, rows: Rows | None) -> Tensors:
        """See `executor.Cargo`."""
        if block not in self._outgoing:
            self._outgoing[block] = self._part_of(block).outgoing(self._traveller)
        whole = self._outgoing[block]
        return whole if rows is None else tuple(take_rows(x, rows) for x in whole)

    def sums(self, block: int, place: Place, filled: bool) -> TileSums:
        """See `executor.Cargo`."""
        return self._part_of(block).sums(self._traveller, place, filled)

    def own_sums(self, block: int) -> TileSums:
        """See `executor.Cargo`."""
        return self._own.parts[self._plan.part(block)]

    def _part_of(self, block: int) -> Part:
        return self._parts[self._plan.part(block)]
