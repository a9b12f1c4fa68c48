"""What accumulates on either side of the visits: plain sums (dq; dk and dv) and softmax-weighted ones (out, lse)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from burst_plugin.packing import Spec
from burst_plugin.rows import rows_of
from burst_plugin.sides import Side
from burst_plugin.softmax import merge_
from burst_plugin.tiles import Tile
from burst_plugin.transfers import Rows

__all__ = ["OwnSums", "PlainSums", "Room", "SoftmaxSums", "TileSums", "in_parts"]


class Room(Protocol):
    """A place for sums of `length` token rows, whose tensors are made when they are needed."""

    length: int

    def take(self, kept: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """Tensors to keep sums in from now on, with the values of a contribution `kept` so far if there is one."""
        ...


Place = tuple[Tensor, ...] | Room


class TileSums:
    """What accumulates on a side of the visits: tensors [B, S, H, D] or [B, H, S], to which tiles contribute.

    Their states, in this order: empty, in `_tensors` that hold nothing yet or with only `_room` for them; `_kept`:
    one contribution to all rows, just as the kernel returned it, while there is only room; in `_tensors`, into which
    the first contribution is copied and others are added. `filled` ones begin in tensors that hold values.
    """

    # What rows that nothing was added to read as, by tensor; a side may have fewer tensors.
    nothing: tuple[float, ...]

    def __init__(self, place: Place, filled: bool = False) -> None:
        self._tensors: tuple[Tensor, ...] | None = place if isinstance(place, tuple) else None
        self._room = None if isinstance(place, tuple) else place
        self._kept: Sequence[Tensor] | None = None
        self._filled = filled

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is summed; read it after `settle`. Takes the room if nobody has."""
        if self._tensors is None:
            assert self._room is not None
            self._tensors, self._kept = self._room.take(self._kept), None
        return self._tensors

    def add(self, tile: Tile, side: Side, contribution: Sequence[Tensor]) -> None:
        """Add what one tile contributes, which is kept if need be, to its rows of this side."""
        rows = tile.rows(side)
        waits = not self._filled and self._tensors is None and tile.batch is None
        if waits and rows == slice(0, self._length):
            self._kept, self._filled = contribution, True
            return
        self._add(rows, tile.batch, contribution)

    def join(self, other: TileSums, rows: Rows | None) -> None:
        """Add another rank's sums: of these rows, or of all."""
        if rows is None:
            self._add(slice(0, self._length), None, other._kept or other.tensors)
            return
        offset = 0
        for start, stop in rows:
            within = slice(offset, offset + stop - start)
            self._add(slice(start, stop), None, [rows_of(tensor, within) for tensor in other.tensors])
            offset += stop - start

    def settle(self) -> None:
        """Have all in `tensors`, and rows that nothing was added to read as nothing, before sums are sent or used."""
        tensors = self.tensors
        if not self._filled:
            self._clear(tensors)
            self._filled = True

    def _add(self, rows: slice, batch: tuple[int, int] | None, contribution: Sequence[Tensor]) -> None:
        if not self._filled and batch is None:
            self._begin(rows, contribution)
            return
        self.settle()
        self._accumulate([rows_of(tensor, rows, batch) for tensor in self.tensors], contribution)

    def _begin(self, rows: slice, contribution: Sequence[Tensor]) -> None:
        """The first contribution, to all batch rows."""
        self._filled = True
        for rest in (slice(0, rows.start), slice(rows.stop, self._length)):
            if rest.start < rest.stop:
                self._clear([rows_of(tensor, rest) for tensor in self.tensors])
        for tensor, part in zip(self.tensors, contribution, strict=True):
            rows_of(tensor, rows).copy_(part)

    @property
    def _length(self) -> int:
        """Token rows; asking for it takes no room."""
        if self._tensors is None:
            assert self._room is not None
            return self._room.length
        return self._tensors[0].size(1)

    def _clear(self, tensors: Sequence[Tensor]) -> None:
        for tensor, value in zip(tensors, self.nothing, strict=False):
            tensor.fill_(value)

    def _accumulate(self, tensors: Sequence[Tensor], contribution: Sequence[Tensor]) -> None:
        """Add to these rows of the tensors."""
        raise NotImplementedError


class PlainSums(TileSums):
    """Tensors [B, S, H, D] that contributions are added to."""

    nothing = (0.0, 0.0)

    def _accumulate(self, tensors: Sequence[Tensor], contribution: Sequence[Tensor]) -> None:
        for tensor, part in zip(tensors, contribution, strict=True):
            tensor.add_(part)


class SoftmaxSums(TileSums):
    """out [B, S, H, Dv] and lse [B, H, S] over the keys seen so far; rows that saw none have out 0, lse -inf."""

    nothing = (0.0, -torch.inf)

    def _accumulate(self, tensors: Sequence[Tensor], contribution: Sequence[Tensor]) -> None:
        merge_(*tensors, *contribution)


class OwnSums:
    """The sums of a rank's own block: `tensors` whole, and `parts`, sums of their own, one per part of the heads.

    `specs` are those of the whole; `make` makes sums, of a part whose number it is given, in tensors or in room for
    them.
    """

    def __init__(
        self, specs: Sequence[Spec], device: torch.device, parts: int, make: Callable[[int, Place], TileSums]
    ) -> None:
        self._whole: tuple[Tensor, ...] | None = None
        room = _OwnRoom(specs, device)
        if parts == 1:
            self.parts = [make(0, room)]
            return
        self._whole = room.take(None)
        self.parts = [make(part, views) for part, views in enumerate(in_parts(self._whole, parts))]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The sums, once settled."""
        return self.parts[0].tensors if self._whole is None else self._whole

    def settle(self) -> None:
        """See `TileSums.settle`."""
        for sums in self.parts:
            sums.settle()


def in_parts(tensors: Sequence[Tensor], parts: int) -> list[tuple[Tensor, ...]]:
    """Each part's heads of tensors [B, S, H, D] or [B, H, S], as views."""
    if parts == 1:
        return [tuple(tensors)]
    cut = [x.chunk(parts, 2 if x.dim() == 4 else 1) for x in tensors]
    return [tuple(x[part] for x in cut) for part in range(parts)]


class _OwnRoom:
    """See `Room`: new tensors."""

    def __init__(self, specs: Sequence[Spec], device: torch.device) -> None:
        self._specs, self._device = specs, device
        self.length = specs[0][0][1] if specs else 0  # a side may have no sums

    def take(self, kept: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """See `Room.take`; a contribution's own tensor where it is as good and holds no more memory."""
        if kept is None:
            return tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._specs)
        return tuple(self._taken(part, *spec) for part, spec in zip(kept, self._specs, strict=True))

    def _taken(self, part: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        alike = part.dtype == dtype and part.shape == shape and part.is_contiguous()
        if alike and part.untyped_storage().nbytes() == part.nbytes:
            return part.data  # a kernel's view of its own tensor: as an output it must not count as one
        return torch.empty(shape, dtype=dtype, device=self._device).copy_(part)
