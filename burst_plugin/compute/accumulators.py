"""What accumulates on either side of the visits: plain sums (dq; dk and dv) and softmax-weighted ones (out, lse)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from burst_plugin.compute.online_softmax import add_, at_once, merge_
from burst_plugin.compute.rows import rows_of, token_dim
from burst_plugin.sequence.tiles import Tile
from burst_plugin.types import Rows, Side, Spec

__all__ = ["OwnSums", "PlainSums", "Room", "SoftmaxSums", "TileSums", "in_parts"]


class Room(Protocol):
    """A place for sums of `length` token rows, whose tensors are made when they are needed."""

    length: int

    def take(self, kept: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """Tensors to keep sums in from now on, with the values of a contribution `kept` so far if there is one."""
        ...


Place = tuple[Tensor, ...] | Room


class _Contribution(NamedTuple):
    """Tensors that are to be added to these rows of sums."""

    rows: slice
    tensors: Sequence[Tensor]


class TileSums:
    """What accumulates on a side of the visits: tensors [B, S, H, D] or [B, H, S], to which tiles contribute.

    Contributions first wait, just as the kernel returned them: on GPUs several, as many as `softmax` sums up at once;
    elsewhere the first one, if it is to all rows. When another comes, since they might have been all there is, they
    go into `_tensors`, for which there is only `_room` before that. `filled` ones begin in tensors that hold values.
    """

    # What rows that nothing was added to read as, by tensor; a side may have fewer tensors.
    nothing: tuple[float, ...]

    def __init__(self, place: Place, filled: bool = False) -> None:
        self._tensors: tuple[Tensor, ...] | None = place if isinstance(place, tuple) else None
        self._room = None if isinstance(place, tuple) else place
        self._filled = filled
        self._waiting: list[_Contribution] = []

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is summed, all of it."""
        self.settle()
        return self._take(None)

    def add(self, tile: Tile, side: Side, contribution: Sequence[Tensor]) -> None:
        """Add what one tile contributes, which is kept if need be, to its rows of this side."""
        rows, several = tile.rows(side), at_once(contribution[0])
        if tile.batch is not None or (several == 1 and self._filled):
            self._add([rows_of(tensor, rows, tile.batch) for tensor in self.tensors], [contribution], True)
            return
        if 1 < several <= len(self._waiting):
            self._sum_up_waiting()
        may_be_all = self._tensors is None and not self._waiting and self._is_whole(rows)
        self._waiting.append(_Contribution(rows, contribution))
        if several == 1 and not may_be_all:
            self._sum_up_waiting()

    def join(self, other: TileSums, rows: Rows | None) -> None:
        """Add another rank's sums, now, since they are in a message: of these rows, or of all."""
        may_keep = bool(self._waiting)
        if rows is None:
            if other._filled:
                self._waiting.append(_Contribution(slice(0, self._length), other._take(None)))
            self._waiting += other._waiting
        else:
            offset = 0
            for start, stop in rows:
                within = slice(offset, offset + stop - start)
                part = [rows_of(tensor, within) for tensor in other.tensors]
                self._waiting.append(_Contribution(slice(start, stop), part))
                offset += stop - start
        self._sum_up_waiting(may_keep)

    def settle(self) -> None:
        """Have all in `tensors`, and rows that nothing was added to read as nothing, before sums are sent or used."""
        if self._waiting or not self._filled:
            self._sum_up_waiting()

    def rounded(self) -> tuple[Tensor, ...]:
        """All sums at last, in the type of contributions where none of them has to be widened for that."""
        if not self._waiting:
            return self.tensors
        first = self._waiting[0]
        if len(self._waiting) == 1 and not self._filled and self._is_whole(first.rows):
            return tuple(_owned(x, x.shape, x.dtype) for x in first.tensors)
        if at_once(first.tensors[0]) == 1:
            return self.tensors
        result = type(self)(tuple(_of_length(x, self._length) for x in first.tensors))
        result.join(self, None)
        self._waiting, self._tensors = [], None  # nobody adds any more, and the other side may need memory
        return result.tensors

    def _sum_up_waiting(self, may_keep: bool = True) -> None:
        """Have all that waits in tensors; those of the first contribution if it `may_keep` them and it is best."""
        waiting, self._waiting = self._waiting, []
        if may_keep and self._tensors is None and waiting and self._is_whole(waiting[0].rows):
            first = waiting[0].tensors
            if len(waiting) == 1 or at_once(first[0]) == 1:
                self._take(first)
                del waiting[0]
        tensors = self._take(None)
        for rows, parts in _by_rows(waiting, 0 if self._filled else self._length):
            mine = [rows_of(tensor, rows) for tensor in tensors]
            if parts:
                self._add(mine, parts, self._filled)
            else:
                self._clear(mine)
        self._filled = True

    def _take(self, kept: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """The tensors, out of the room if nobody has taken it, which may be those of a contribution."""
        if self._tensors is None:
            assert self._room is not None
            self._tensors, self._filled = self._room.take(kept), kept is not None
        return self._tensors

    @property
    def _length(self) -> int:
        """Token rows; asking for it takes no room."""
        if self._tensors is None:
            assert self._room is not None
            return self._room.length
        return self._tensors[0].size(1) if self._tensors else 0

    def _is_whole(self, rows: slice) -> bool:
        return rows == slice(0, self._length)

    def _clear(self, tensors: Sequence[Tensor]) -> None:
        for tensor, value in zip(tensors, self.nothing, strict=False):
            tensor.fill_(value)

    def _add(self, tensors: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], filled: bool) -> None:
        """Add contributions to these rows of the tensors, which hold nothing yet if not `filled`."""
        raise NotImplementedError


class PlainSums(TileSums):
    """Tensors [B, S, H, D] that contributions are added to."""

    nothing = (0.0, 0.0)

    def _add(self, tensors: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], filled: bool) -> None:
        for tensor, *mine in zip(tensors, *parts, strict=True):
            add_(tensor, mine, filled)


class SoftmaxSums(TileSums):
    """out [B, S, H, Dv] and lse [B, H, S] over the keys seen so far; rows that saw none have out 0, lse -inf."""

    nothing = (0.0, -torch.inf)

    def _add(self, tensors: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], filled: bool) -> None:
        out, lse = tensors
        merge_(out, lse, parts, filled)


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

    def finished(self, rounded: bool) -> tuple[Tensor, ...]:
        """The sums, settled; `rounded` if they may be in the type of contributions."""
        if self._whole is None:
            return self.parts[0].rounded() if rounded else self.parts[0].tensors
        for sums in self.parts:
            sums.settle()
        return self._whole


def in_parts(tensors: Sequence[Tensor], parts: int) -> list[tuple[Tensor, ...]]:
    """Each part's heads of tensors [B, S, H, D] or [B, H, S], as views."""
    if parts == 1:
        return [tuple(tensors)]
    cut = [x.chunk(parts, 2 if x.dim() == 4 else 1) for x in tensors]
    return [tuple(x[part] for x in cut) for part in range(parts)]


def _by_rows(waiting: Sequence[_Contribution], length: int) -> Iterator[tuple[slice, Sequence[Sequence[Tensor]]]]:
    """Runs of rows, with what is contributed to all of the run; none but what there is from row `length` on."""
    if len(waiting) == 1 and not length:
        yield waiting[0].rows, [waiting[0].tensors]
        return
    ends = {0, length}.union(*((each.rows.start, each.rows.stop) for each in waiting))
    for start, stop in pairwise(sorted(ends)):
        parts = [
            [rows_of(x, slice(start - each.rows.start, stop - each.rows.start)) for x in each.tensors]
            for each in waiting
            if each.rows.start <= start and stop <= each.rows.stop
        ]
        if parts or start < length:
            yield slice(start, stop), parts


class _OwnRoom:
    """See `Room`: new tensors."""

    def __init__(self, specs: Sequence[Spec], device: torch.device) -> None:
        self._specs, self._device = specs, device
        self.length = specs[0][0][1] if specs else 0  # a side may have no sums

    def take(self, kept: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """See `Room.take`; a contribution's own tensor where it is as good and holds no more memory."""
        if kept is None:
            return tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._specs)
        return tuple(_owned(part, *spec) for part, spec in zip(kept, self._specs, strict=True))


def _of_length(x: Tensor, length: int) -> Tensor:
    """A new tensor like one [B, S, H, D] or [B, H, S], of that many token rows."""
    shape = list(x.shape)
    shape[token_dim(x)] = length
    return x.new_empty(shape)


def _owned(part: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a kernel returned if it has that shape and type, and no more memory; else a copy of it that has."""
    alike = part.dtype == dtype and part.shape == shape and part.is_contiguous()
    if alike and part.untyped_storage().nbytes() == part.nbytes:
        return part.data  # a kernel's view of its own tensor: as an output it must not count as one
    return torch.empty(shape, dtype=dtype, device=part.device).copy_(part)
