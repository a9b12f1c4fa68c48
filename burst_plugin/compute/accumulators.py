"""Accumulators of what tiles contribute to either side of a visit: sums (dq; dk, dv) and merged means (out, lse)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from burst_plugin.compute.online_softmax import add_, fused_kernels, merge_
from burst_plugin.compute.varlen import rows_of, token_dim
from burst_plugin.sequence.tiles import Tile
from burst_plugin.types import Rows, Side, Spec

Tensors = tuple[Tensor, ...]


class Combine(NamedTuple):
    """A way to combine contributions into one result: `SUM` adds them, `SOFTMAX` merges (out, lse).

    nothing: by tensor, the value of rows to which nothing was added.
    add: called with the result's tensors, contributions of as many tensors each, and `filled`; adds the contributions
        to the tensors in place. If not `filled`, the tensors hold nothing yet.
    """

    nothing: tuple[float, ...]
    add: Callable[[Sequence[Tensor], Sequence[Sequence[Tensor]], bool], None]


class Storage(Protocol):
    """A source of tensors for an `Accumulator` of `length` token rows, which takes them once it needs any."""

    length: int

    def take(self, kept: Sequence[Tensor] | None) -> Tensors:
        """Return tensors to accumulate in, with the values of the contribution `kept`, or undefined ones for None."""
        ...


class MovingHeads(Protocol):
    """The interface of one part of the heads, as a ring needs it: for operands to send, and for results."""

    def outgoing(self, side: Side) -> Tensors:
        """Return this rank's operands of `side`, "q" or "kv", to send; called right before they are sent."""
        ...

    def accumulator(self, side: Side, storage: Storage, tensors: Tensors | None = None) -> Accumulator:
        """Return a new accumulator of results for `side`, "q" or "kv".

        storage: where its tensors come from. tensors: results so far, to add to; None to begin anew.
        """
        ...


class _Contribution(NamedTuple):
    """Tensors that are to be added to these rows."""

    rows: slice
    tensors: Sequence[Tensor]


LARGEST_WAITING = 1 << 29
"""Bytes of a result that may wait for others; to add a larger one at once takes under 1 % of its kernel's time."""


def fan_in(result: Sequence[Tensor]) -> int:
    """Return how many results like this one are worth collecting, to be merged or added up in one pass over memory.

    They are read once, and the sum is read and written once for all of them. 1 means to add up each at once.

    result: the tensors that a kernel returned for one tile, (out, lse), (dq,) or (dk, dv).
    """
    narrow = result[0].element_size() == 2  # others would take as much room as the sum
    if not narrow or sum(x.nbytes for x in result) > LARGEST_WAITING:
        return 1
    fused = fused_kernels(result[0])
    return fused.FAN_IN if fused else 1


class Accumulator:
    """The results of one side so far: tensors, if there are any yet, and contributions that wait to be added.

    Contributions wait, as the kernel returned them: on GPUs several, as many as are added in one pass over memory;
    elsewhere the first one if it covers all rows, since it may be the only one. Tensors are taken from the storage
    when what waits has to be added up.

    Args:
        combine: how contributions are combined, `SUM` or `SOFTMAX`.
        storage: where tensors come from; it has the number of token rows.
        tensors: results so far; None for none.

    waiting: the contributions that wait, oldest first.
    """

    def __init__(self, combine: Combine, storage: Storage, tensors: Tensors | None = None) -> None:
        self.combine, self.storage = combine, storage
        self._length = storage.length  # token rows
        self._tensors = tensors
        self.waiting: list[_Contribution] = []

    @property
    def tensors(self) -> Tensors:
        """Return the sum of all contributions, or their merged attention."""
        self.settle()
        assert self._tensors is not None
        return self._tensors

    def make_room(self) -> None:
        """Add up waiting contributions before a kernel makes another one, unless both can be added up at once."""
        if self.waiting and fan_in(self.waiting[0].tensors) == 1:
            self._add_up()

    def add(self, tile: Tile, side: Side, contribution: Sequence[Tensor]) -> None:
        """Add the results of a tile to its query rows, for side "q", or key rows, for side "kv".

        contribution: the tensors that a kernel returned for the tile: (out, lse), (dq,) or (dk, dv). They may be kept
            without a copy: do not modify them afterwards.
        """
        rows, several = tile.q if side == "q" else tile.k, fan_in(contribution)
        if tile.batch is not None or (several == 1 and self._tensors is not None):
            self.combine.add([rows_of(x, rows, tile.batch) for x in self.tensors], [contribution], True)
            return
        if 1 < several <= len(self.waiting):
            self._add_up()
        may_be_all = self._tensors is None and not self.waiting and rows == slice(0, self._length)
        self.waiting.append(_Contribution(rows, contribution))
        if several == 1 and not may_be_all:
            self._add_up()

    def join(self, other: Accumulator, rows: Rows | None) -> None:
        """Add the results of `other`, which came from another rank, to `rows` of this one, or to all rows if None.

        rows: row ranges of this accumulator; `other` has just these rows, one range after another. Its results are
            added at once, since they lie in a message.
        """
        may_keep = bool(self.waiting)
        if rows is None:
            if other._tensors is not None:
                self.waiting.append(_Contribution(slice(0, self._length), other._tensors))
            self.waiting += other.waiting
        else:
            offset = 0
            for start, stop in rows:
                within = slice(offset, offset + stop - start)
                self.waiting.append(_Contribution(slice(start, stop), [rows_of(x, within) for x in other.tensors]))
                offset += stop - start
        self._add_up(may_keep)

    def settle(self) -> None:
        """Add up all waiting contributions, and fill rows that got none, before the result is sent or read."""
        if self.waiting or self._tensors is None:
            self._add_up()

    def rounded(self) -> Tensors:
        """Return the final result, in the type of the contributions unless adding them up took a wider one.

        Nothing may be added after that.
        """
        if not self.waiting:
            return self.tensors
        first = self.waiting[0]
        if len(self.waiting) == 1 and self._tensors is None and first.rows == slice(0, self._length):
            return tuple(map(_owned, first.tensors))
        if fan_in(first.tensors) == 1:
            return self.tensors
        result = Accumulator(self.combine, Given(tuple(_of_length(x, self._length) for x in first.tensors)))
        result.join(self, None)
        self.waiting, self._tensors = [], None  # nothing is added any more, and the other side may need memory
        return result.tensors

    def _add_up(self, may_keep: bool = True) -> None:
        """Add all that waits to the tensors; the first contribution may become these if `may_keep`."""
        waiting, self.waiting = self.waiting, []
        filled = self._tensors is not None
        if may_keep and not filled and waiting and waiting[0].rows == slice(0, self._length):
            first = waiting[0].tensors
            if len(waiting) == 1 or fan_in(first) == 1:
                self._tensors, filled = self.storage.take(first), True
                del waiting[0]
        tensors = self._tensors = self._tensors if self._tensors is not None else self.storage.take(None)
        for rows, parts in _by_rows(waiting, 0 if filled else self._length):
            totals = [rows_of(tensor, rows) for tensor in tensors]
            if parts:
                self.combine.add(totals, parts, filled)
            else:
                for tensor, value in zip(totals, self.combine.nothing, strict=False):
                    tensor.fill_(value)


def _add_each(tensors: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], filled: bool) -> None:
    for tensor, *mine in zip(tensors, *parts, strict=True):
        add_(tensor, mine, filled)


def _merge(tensors: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], filled: bool) -> None:
    out, lse = tensors
    merge_(out, lse, parts, filled)


SUM = Combine((0.0, 0.0), _add_each)
"""Tensors [B, S, H, D], as many as there are."""
SOFTMAX = Combine((0.0, -torch.inf), _merge)
"""out [B, S, H, Dv] and lse [B, H, S] over the keys so far; rows that attended to none have out 0, lse -inf."""


class BlockAccumulators:
    """The accumulators of one side of a rank's own block: `parts`, one for each part of the heads.

    With several parts they accumulate in views of tensors of all heads.

    Args:
        specs: shape and type of the tensors of all heads.
        device: the device of these tensors.
        heads: the parts of the heads; each makes its accumulator in a storage.
        side: "q" for out and lse, or dq; "kv" for dk and dv.
    """

    def __init__(self, specs: Sequence[Spec], device: torch.device, heads: Sequence[MovingHeads], side: Side):
        self._whole: Tensors | None = None
        new = _New(specs, device)
        if len(heads) == 1:
            self.parts = [heads[0].accumulator(side, new)]
            return
        self._whole = new.take(None)
        views = in_parts(self._whole, len(heads))
        self.parts = [part.accumulator(side, Given(mine)) for part, mine in zip(heads, views, strict=True)]

    def finished(self, rounded: bool) -> Tensors:
        """Return the results of all heads; if `rounded`, they may be in the narrower type of the contributions."""
        if self._whole is None:
            return self.parts[0].rounded() if rounded else self.parts[0].tensors
        for accumulator in self.parts:
            accumulator.settle()
        return self._whole


def in_parts(tensors: Sequence[Tensor], parts: int) -> list[Tensors]:
    """Cut tensors [B, S, H, D] or [B, H, S] into `parts` equal parts of the heads; return the views of each part."""
    if parts == 1:
        return [tuple(tensors)]
    cut = [x.chunk(parts, 2 if x.dim() == 4 else 1) for x in tensors]
    return [tuple(x[part] for x in cut) for part in range(parts)]


def _by_rows(waiting: Sequence[_Contribution], length: int) -> Iterator[tuple[slice, Sequence[Sequence[Tensor]]]]:
    """Yield ranges of rows, with the contributions to each range; ranges up to row `length` may have none."""
    if len(waiting) == 1 and not length:
        yield waiting[0].rows, [waiting[0].tensors]
        return
    ends = {0, length}.union(*((contribution.rows.start, contribution.rows.stop) for contribution in waiting))
    for start, stop in pairwise(sorted(ends)):
        parts = [
            [
                rows_of(x, slice(start - contribution.rows.start, stop - contribution.rows.start))
                for x in contribution.tensors
            ]
            for contribution in waiting
            if contribution.rows.start <= start and stop <= contribution.rows.stop
        ]
        if parts or start < length:
            yield slice(start, stop), parts


class _New:
    """New tensors, or the tensors of the first contribution where they will do; see `Storage`."""

    def __init__(self, specs: Sequence[Spec], device: torch.device) -> None:
        self._specs, self._device = specs, device
        self.length = specs[0][0][1] if specs else 0  # keys and values accumulate nothing in a forward pass

    def take(self, kept: Sequence[Tensor] | None) -> Tensors:
        """Return new tensors, or the tensors of the contribution `kept` where they will do."""
        if kept is None:
            return tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._specs)
        return tuple(_owned(part, *spec) for part, spec in zip(kept, self._specs, strict=True))


class Given:
    """A `Storage` of tensors that exist already, [B, S, H, D] the first."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self.length = tensors[0].size(1) if tensors else 0

    def take(self, kept: Sequence[Tensor] | None) -> Tensors:
        """Return the given tensors, with the values of the contribution `kept` copied into them if there is one."""
        for tensor, part in zip(self._tensors, kept or (), strict=False):
            tensor.copy_(part)
        return self._tensors


def _of_length(x: Tensor, length: int) -> Tensor:
    """Return a new tensor like x, [B, S, H, D] or [B, H, S], with `length` token rows."""
    shape = list(x.shape)
    shape[token_dim(x)] = length
    return x.new_empty(shape)


def _owned(part: Tensor, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return a kernel's result if it has this shape and type, where given, and no spare memory; else a copy."""
    shape, dtype = shape or part.shape, dtype or part.dtype
    fits = part.dtype == dtype and part.shape == shape and part.is_contiguous()
    if fits and part.untyped_storage().nbytes() == part.nbytes:
        return part.data  # a kernel's view of its own tensor: as an output it must not count as one
    return torch.empty(shape, dtype=dtype, device=part.device).copy_(part)
