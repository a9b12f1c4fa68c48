"""Keys and values of one layer on one rank: sequences of unlike lengths, in one allocation each, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

_LEAST_SLACK = 16  # tokens


class RowStore:
    """The keys and values of one layer's tokens on one rank, by batch row, in ascending order of their positions.

    Rows lie one after another in [capacity of all rows, heads, dim]. Where a row has no room left, all rows are
    copied to larger memory, a quarter larger on average than their tokens: so a token is copied a few times, however
    many come.

    Args:
        rows: the batch size.
        reserve: the number of tokens of each row that have room from the start.
    """

    def __init__(self, rows: int, reserve: int = 0) -> None:
        self.lengths = [0] * rows
        self.device = torch.device("cpu")  # of what is appended and read
        self._reserve = reserve
        self._capacities = [0] * rows
        self._k: Tensor | None = None
        self._v: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of the stored keys and values."""
        return sum(self.lengths) * sum(x[0].nbytes for x in self._tensors() if len(x))

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes that are allocated for keys and values, room for more tokens included."""
        return sum(x.nbytes for x in self._tensors())

    @property
    def is_empty(self) -> bool:
        """Return whether no keys and values were ever appended; their type, heads and dims are then open."""
        return self._k is None

    @property
    def state(self) -> Sequence[int] | None:
        """Return the length of each row, to be passed to `undo` later; None if nothing was ever appended."""
        return None if self.is_empty else self.lengths

    def check_like(self, k: Tensor, v: Tensor) -> None:
        """Raise ValueError unless k and v, [B, n, heads, dim], have the stored type, device, heads and head dims.

        Anything fits a store that is empty.
        """
        for name, stored, new in zip("kv", self._tensors(), (k, v), strict=False):
            kinds = [
                (str(x.dtype), str(at), list(x.shape[-2:])) for x, at in ((stored, self.device), (new, new.device))
            ]
            if kinds[0] != kinds[1]:
                raise ValueError(
                    f"{name} has type, device, heads and head dim {kinds[1]}, but the cache has {kinds[0]}"
                )

    def fetch(self) -> None:
        """Do nothing: the stored keys and values are on the device already."""

    def release(self) -> None:
        """Do nothing: there is no copy on the device that could be freed."""

    def append(self, k: Sequence[Tensor], v: Sequence[Tensor]) -> None:
        """Append new tokens to each row: k[i] and v[i], [n, heads, dim], to row i; n may differ between rows."""
        needed = [length + len(new) for length, new in zip(self.lengths, k, strict=True)]
        if self.is_empty or any(n > most for n, most in zip(needed, self._capacities, strict=True)):
            self._lay_out(needed, k[0], v[0])
        assert self._k is not None
        assert self._v is not None
        for stored, new in ((self._k, k), (self._v, v)):
            self._write(stored, new)
        self.lengths = needed

    def keep(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Keep tokens `start:stop` of each row, one pair of `ranges` per row, and forget the others.

        Tokens are numbered as they are stored here. Memory is freed if less than half of it is needed.
        """
        for start, (first, stop), at in zip(self._starts(), ranges, range(len(ranges)), strict=True):
            if first:
                for stored in self._tensors():
                    stored[start : start + stop - first].copy_(stored[start + first : start + stop].clone())
            self.lengths[at] = stop - first
        if self._k is not None and self._v is not None and 2 * sum(self._roomy(self.lengths)) < sum(self._capacities):
            self._lay_out(self.lengths, self._k, self._v)

    def undo(self, lengths: Sequence[int] | None) -> None:
        """Forget the tokens appended since `state` returned `lengths`.

        None for `lengths`, the state of an empty store, also forgets the type, heads and dims of keys and values.
        """
        if lengths is not None:
            self.keep([(0, length) for length in lengths])
            return
        self._k = self._v = None
        self.lengths, self._capacities = [0] * len(self.lengths), [0] * len(self.lengths)

    def row(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of one row, [1, length, heads, dim], as views."""
        start = self._starts()[number]
        k, v = (x[start : start + self.lengths[number]].unsqueeze(0) for x in self._readable())
        return k, v

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values, [B, length, heads, dim] each, of rows that are equally long.

        They are views unless rows have room for different numbers of tokens.
        """
        rows, length = len(self.lengths), self.lengths[0]
        if len(set(self._capacities)) > 1:
            k, v = self.packed()
            return k.view(rows, length, *k.shape[2:]), v.view(rows, length, *v.shape[2:])
        k, v = (x.view(rows, self._capacities[0], *x.shape[1:])[:, :length] for x in self._readable())
        return k, v

    def packed(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values, rows one after another, [1, sum of lengths, heads, dim] each.

        They are a copy if there are several rows, views of a single row.
        """
        if len(self.lengths) == 1:
            return self.row(0)
        rows = [self.row(number) for number in range(len(self.lengths))]
        k, v = (torch.cat(each, 1) for each in zip(*rows, strict=True))
        return k, v

    def selected(self, rows: Sequence[int]) -> RowStore:
        """Return a store with copies of some rows; a row may be listed several times."""
        return self._copied(rows, self._reserve)

    def split(self, row: int, count: int) -> tuple[RowStore, RowStore]:
        """Return two stores: a copy of row number `row` alone, and `count` rows that continue it, without tokens yet.

        The first has no room for more tokens, the rows of the second have room for as many as `row` had left of its
        reserve.
        """
        length = self.lengths[row]
        return self._copied([row], length), self._copied([row] * count, max(0, self._reserve - length), 0)

    def _copied(self, rows: Sequence[int], reserve: int, most: int | None = None) -> RowStore:
        """Return a copy of these rows, or of the first tokens of each, with room for `reserve` tokens of each."""
        new = type(self)(len(rows), reserve)
        if not self.is_empty:
            chosen = [self.row(row) for row in rows]
            new.append([k[0, :most] for k, _ in chosen], [v[0, :most] for _, v in chosen])
            self.release()
        return new

    def _readable(self) -> tuple[Tensor, ...]:
        """Return keys and values where they are read."""
        return self._tensors()

    def _new(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a tensor to store in, without values."""
        self.device = like.device
        return torch.empty(*shape, dtype=like.dtype, device=like.device)

    def _write(self, to: Tensor, new: Sequence[Tensor]) -> None:
        """Write new tokens behind the stored tokens of each row."""
        for start, length, tokens in zip(self._starts(), self.lengths, new, strict=True):
            to[start + length : start + length + len(tokens)].copy_(tokens, non_blocking=to.device != tokens.device)

    def _tensors(self) -> tuple[Tensor, ...]:
        return () if self._k is None or self._v is None else (self._k, self._v)

    def _starts(self) -> list[int]:
        return [0, *accumulate(self._capacities)][:-1]

    def _roomy(self, needed: Sequence[int]) -> list[int]:
        """Return how much room to make for rows of these lengths."""
        slack = max(_LEAST_SLACK, sum(needed) // (4 * len(needed)))
        return [self._reserve if n <= self._reserve else n + slack for n in needed]

    def _lay_out(self, needed: Sequence[int], *like: Tensor) -> None:
        """Copy the stored tokens to new tensors, like the tensors `like`, with room for `needed` tokens and more."""
        capacities = self._roomy(needed)
        starts, grown = [0, *accumulate(capacities)], []
        for old, new in zip(self._tensors() or (None, None), like, strict=True):
            with torch.inference_mode(False):  # tensors made inside could not be written to outside
                tensor = self._new((starts[-1], *new.shape[1:]), new)
            for number, length in enumerate(self.lengths):
                if old is not None and length:
                    at = self._starts()[number]
                    tensor[starts[number] : starts[number] + length].copy_(old[at : at + length])
            grown.append(tensor)
        self._capacities = capacities
        self._k, self._v = grown
