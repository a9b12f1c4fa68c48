"""The keys of highest score of each query so far, in a total order: by score, the higher first, then by position.

No two keys are equal in that order, so that the same keys are found in whatever order they come in, and on any number
of ranks; `torch.topk` alone takes any of equal scores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

_NO_KEY = torch.iinfo(torch.int64).min
_LAST = 2**31 - 1  # the largest position
_CHUNK = 1 << 22  # numbers that are sorted at once


class BestKeys(ABC):
    """The `count` best keys so far of each of several queries: of highest score, and of equal scores the earlier."""

    @abstractmethod
    def add(self, rows: slice, scores: Tensor, positions: Tensor, allowed: Tensor | None) -> None:
        """Offer keys to some queries.

        rows: which queries. scores: of the keys for them, [rows, keys]. positions: of the keys, int64 [keys].
        allowed: which queries may take which keys, bool [rows, keys]; None if all may.
        """

    @abstractmethod
    def positions(self) -> Tensor:
        """Return the positions of each query's best keys, highest score first, int32 [rows, count], -1 for none."""

    @property
    @abstractmethod
    def kept(self) -> tuple[Tensor, ...]:
        """Return the tensors [rows, count] in which the best keys are kept, for `merge` on other ranks."""

    @abstractmethod
    def merge(self, *kept: Sequence[Tensor]) -> None:
        """Keep the best keys of all ranks in place of the keys that are kept here.

        kept: for each tensor of `kept` the tensors of all ranks, which share keys only where `repeats` allows it.
        """


def best_keys(rows: int, count: int, dtype: torch.dtype, device: torch.device, repeats: bool = False) -> BestKeys:
    """Return an empty `BestKeys` that keeps the `count` best keys of each of `rows` queries.

    dtype: of scores, float32 or float64.
    repeats: whether a position may come in several calls of `add`, once in each; then the highest of its scores is
        its score.
    """
    kind = BestOfFloat64 if dtype == torch.float64 else BestOfFloat32
    return kind(rows, count, device, repeats)


class BestOfFloat32(BestKeys):
    """The `BestKeys` of float32 scores, which keeps each key as one int64 that sorts as the key does.

    The upper half is made of the bits of the score, the lower half of the distance of the position from the last one.
    """

    def __init__(self, rows: int, count: int, device: torch.device, repeats: bool) -> None:
        self._repeats = repeats
        self._best = torch.full((rows, count), _NO_KEY, dtype=torch.int64, device=device)

    def add(self, rows: slice, scores: Tensor, positions: Tensor, allowed: Tensor | None) -> None:
        """Offer keys to some queries: float32 scores [rows, keys], positions int64 [keys]; see `BestKeys.add`."""
        bits = scores.view(torch.int32)
        ordered = torch.where(bits < 0, bits ^ _LAST, bits).to(torch.int64)  # as integers, as scores compare
        candidates = ordered.mul_(2**32).add_(_LAST - positions)
        if allowed is not None:
            candidates.masked_fill_(~allowed, _NO_KEY)
        self._add(rows, candidates)

    def _add(self, rows: slice, candidates: Tensor) -> None:
        """Offer keys [rows, keys] to some queries, in the form in which they are kept."""
        best = self._best[rows]
        both = torch.cat([best, candidates], 1)
        if self._repeats:
            both = self._without_repeats(both)
        best.copy_(both.topk(best.shape[1], sorted=False).values)

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """Return the tensor [rows, count] in which the best keys are kept, int64."""
        return (self._best,)

    def merge(self, *kept: Sequence[Tensor]) -> None:
        """Keep the best keys of all ranks; see `BestKeys.merge`."""
        self._best = torch.full_like(self._best, _NO_KEY)
        for best in kept[0]:
            self._add(slice(None), best)

    @staticmethod
    def _without_repeats(both: Tensor) -> Tensor:
        """Return the highest entries [rows, keys], each position once; a position is in `both` at most twice."""
        highest = both.sort(1, descending=True).values
        positions, places = (highest & _LAST).sort(dim=1, stable=True)
        highest = highest.gather(1, places)
        highest[:, 1:].masked_fill_(positions[:, 1:] == positions[:, :-1], _NO_KEY)
        return highest

    def positions(self) -> Tensor:
        """Return the positions of each query's best keys, highest score first, int32 [rows, count], -1 for none."""
        result = torch.empty(self._best.shape, dtype=torch.int32, device=self._best.device)
        chunk_size = max(1, _CHUNK // max(1, self._best.shape[1]))
        for start in range(0, len(self._best), chunk_size):
            ordered = self._best[start : start + chunk_size].sort(descending=True).values
            result[start : start + chunk_size].copy_((_LAST - (ordered & _LAST)).masked_fill_(ordered == _NO_KEY, -1))
        return result


class BestOfFloat64(BestKeys):
    """The `BestKeys` of float64 scores, which keeps each key as a score and a position, sorted by both."""

    def __init__(self, rows: int, count: int, device: torch.device, repeats: bool) -> None:
        self._repeats = repeats
        self._scores = torch.full((rows, count), -torch.inf, dtype=torch.float64, device=device)
        self._positions = torch.full((rows, count), _LAST, dtype=torch.int64, device=device)

    def add(self, rows: slice, scores: Tensor, positions: Tensor, allowed: Tensor | None) -> None:
        """Offer keys to some queries: float64 scores [rows, keys], positions int64 [keys]; see `BestKeys.add`."""
        positions = positions.expand_as(scores)
        if allowed is not None:
            scores, positions = scores.masked_fill(~allowed, -torch.inf), positions.masked_fill(~allowed, _LAST)
        self._add(rows, scores, positions)

    def _add(self, rows: slice, scores: Tensor, positions: Tensor) -> None:
        """Offer keys to some queries: scores and positions [rows, keys]."""
        both = torch.cat([self._scores[rows], scores], 1), torch.cat([self._positions[rows], positions], 1)
        scores, positions = in_order(*both)
        if self._repeats:
            positions, places = positions.sort(dim=1, stable=True)
            scores, again = scores.gather(1, places), positions.diff(dim=1) == 0
            scores[:, 1:].masked_fill_(again, -torch.inf)
            positions[:, 1:].masked_fill_(again, _LAST)
            scores, positions = in_order(scores, positions)
        count = self._scores.shape[1]
        self._scores[rows], self._positions[rows] = scores[:, :count], positions[:, :count]

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """Return the scores and positions [rows, count] of the best keys, float64 and int64."""
        return self._scores, self._positions

    def merge(self, *kept: Sequence[Tensor]) -> None:
        """Keep the best keys of all ranks; see `BestKeys.merge`."""
        self._scores = torch.full_like(self._scores, -torch.inf)
        self._positions = torch.full_like(self._positions, _LAST)
        for scores, positions in zip(*kept, strict=True):
            self._add(slice(None), scores, positions)

    def positions(self) -> Tensor:
        """Return the positions of each query's best keys, highest score first, int32 [rows, count], -1 for none."""
        _, positions = in_order(self._scores, self._positions)
        return positions.masked_fill(positions == _LAST, -1).to(torch.int32)


def in_order(scores: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Sort each query's keys by score, highest first, and keys of equal scores by position.

    scores, positions: [rows, keys]. Returns both in that order.
    """
    positions, places = positions.sort(1)
    scores, places = scores.gather(1, places).sort(stable=True, dim=1, descending=True)
    return scores, positions.gather(1, places)
