"""A turn: which new tokens come to a cache, and which of them are this rank's."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from burst_plugin.sequence.turns import held_run

__all__ = ["Turn", "are_few"]


def are_few(tokens: int, ranks: int) -> bool:
    """Return whether new tokens, of the longest row, are so few that by default every rank computes all of them."""
    return tokens <= 2 * ranks


@dataclass(frozen=True, eq=False)
class Turn:
    """New tokens of each batch row, that follow what is cached.

    number: of the turns of this cache so far.
    starts, stops: by row, its length before the turn and after it.
    rank, ranks: this rank and the size of the ring.
    replicated: whether every rank computes all new tokens; if not, position p of a row is computed by rank p % ranks.
        Either way that rank stores its key and value.
    """

    number: int
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    rank: int
    ranks: int
    replicated: bool
    known: dict[Hashable, object] = field(default_factory=dict, repr=False)  # what layers of the turn share

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Return how many new tokens each row has."""
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def compared(self) -> dict[str, object]:
        """Return what has to be the same on every rank, by name."""
        return {"new tokens": self.lengths, "cached tokens": self.starts, "replicated": self.replicated}

    @property
    def is_uniform(self) -> bool:
        """Return whether all rows are equally long, before the turn and after it."""
        return len(set(self.starts)) == len(set(self.stops)) == 1

    @cached_property
    def own(self) -> tuple[slice, ...]:
        """Return which of the new tokens of each row this rank stores, counted from the first new one."""
        return self.own_of(self.rank)

    def own_of(self, rank: int) -> tuple[slice, ...]:
        """Return which of the new tokens of each row `rank` stores."""
        runs = [held_run(rank, self.ranks, *each) for each in zip(self.starts, self.stops, strict=True)]
        each = zip(runs, self.starts, self.lengths, strict=True)
        return tuple(slice(min(run.start - start, length), length, self.ranks) for run, start, length in each)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Return how many tokens of each row this rank computes: rows of its q, k and v that are not padding."""
        return self.lengths if self.replicated else self.counts_of(self.rank)

    def counts_of(self, rank: int) -> tuple[int, ...]:
        """Return how many of the new tokens of each row `rank` stores."""
        return tuple(len(range(own.start, own.stop, own.step)) for own in self.own_of(rank))

    @property
    def size(self) -> int:
        """Return the tokens per row of this rank's tensors: those of the longest row, to which others are padded."""
        return max(self.counts)

    @cached_property
    def index(self) -> Tensor:
        """Return which new token of its row each of this rank's is, [B, size], int64 on the CPU; 0 for padding."""
        found = torch.zeros(len(self.starts), self.size, dtype=torch.int64, device="cpu")
        for row, own in enumerate(self.own):
            steps = range(self.lengths[row]) if self.replicated else range(own.start, own.stop, own.step)
            found[row, : len(steps)] = torch.tensor(steps, dtype=torch.int64, device="cpu")
        return found

    @cached_property
    def valid(self) -> Tensor:
        """Return which of this rank's tokens are no padding, [B, size], bool on the CPU."""
        return torch.arange(self.size, device="cpu") < torch.tensor(self.counts, device="cpu").unsqueeze(1)

    @cached_property
    def positions(self) -> Tensor:
        """Return the positions of this rank's tokens in their rows, for rotary embeddings: [B, size], int64, CPU.

        Those of padding are that of the row's first new token.
        """
        return self.index + torch.tensor(self.starts, device="cpu").unsqueeze(1)

    def take(self, x: Tensor) -> Tensor:
        """Return this rank's tokens, [B, size, ...], of all new ones [B, T, ...], rows padded at their ends."""
        index = self.index.to(x.device).view(*self.index.shape, *[1] * (x.dim() - 2))
        return x.gather(1, index.expand(*self.index.shape, *x.shape[2:]))
