"""A turn over a cache: its new tokens, the rank that holds each token, and the mask of the turn.

Position p of every sequence is held by rank p % ranks: round robin, whichever turn a token came in. So ranks stay
even within one token per sequence, however sequences grow and wherever they are cut off, and so do the last tokens,
which windows keep. No list of holders is needed. Causal work is even as well, as in Striped Attention (arXiv
2311.09431). Sequences of a batch lie one after another; nothing is padded:

    keys        a a a a a b b b       5 and 3 of them, of which the last 2 and 1 are new
    queries           a a     b
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from burst_plugin.sequence.layout import Layout, Run, Tokens
from burst_plugin.sequence.mask import Mask, Region


def are_few(tokens: int, ranks: int) -> bool:
    """Return whether new tokens, of the longest row, are so few that by default every rank computes all of them."""
    return tokens <= 2 * ranks


@dataclass(frozen=True, eq=False)
class Turn:
    """New tokens of each batch row, which follow the cached tokens.

    number: how many turns this cache had before.
    starts, stops: the length of each row before the turn and after it.
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
        """Return the number of new tokens of each row."""
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def compared(self) -> dict[str, object]:
        """Return the values that must be equal on every rank, by name."""
        return {"new tokens": self.lengths, "cached tokens": self.starts, "replicated": self.replicated}

    @property
    def is_uniform(self) -> bool:
        """Return whether all rows are equally long, before the turn and after it."""
        return len(set(self.starts)) == len(set(self.stops)) == 1

    @cached_property
    def own(self) -> tuple[slice, ...]:
        """Return which of each row's new tokens this rank stores, as slices counted from the first new token."""
        return self.own_of(self.rank)

    def own_of(self, rank: int) -> tuple[slice, ...]:
        """Return which of each row's new tokens `rank` stores, as slices counted from the first new token."""
        firsts = (held_run(rank, self.ranks, *bounds).start for bounds in zip(self.starts, self.stops, strict=True))
        rows = zip(firsts, self.starts, self.lengths, strict=True)
        return tuple(slice(min(first - start, length), length, self.ranks) for first, start, length in rows)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Return how many tokens of each row this rank computes: rows of its q, k and v that are not padding."""
        return self.lengths if self.replicated else self.counts_of(self.rank)

    def counts_of(self, rank: int) -> tuple[int, ...]:
        """Return how many of the new tokens of each row `rank` stores."""
        return tuple(len(range(own.start, own.stop, own.step)) for own in self.own_of(rank))

    @property
    def size(self) -> int:
        """Return the padded length of rows in this rank's tensors: its number of tokens of the longest row."""
        return max(self.counts)

    @cached_property
    def index(self) -> Tensor:
        """Return which of its row's new tokens each token of this rank is, [B, size], int64; 0 for padding."""
        index = torch.zeros(len(self.starts), self.size, dtype=torch.int64, device="cpu")
        for row, own in enumerate(self.own):
            steps = range(self.lengths[row]) if self.replicated else range(own.start, own.stop, own.step)
            index[row, : len(steps)] = torch.tensor(steps, dtype=torch.int64, device="cpu")
        return index

    @cached_property
    def valid(self) -> Tensor:
        """Return which of this rank's tokens are no padding, [B, size], bool on the CPU."""
        return torch.arange(self.size, device="cpu") < torch.tensor(self.counts, device="cpu").unsqueeze(1)

    @cached_property
    def positions(self) -> Tensor:
        """Return the positions of this rank's tokens in their rows, for rotary embeddings: [B, size], int64, CPU.

        Padding has the position of the row's first new token.
        """
        return self.index + torch.tensor(self.starts, device="cpu").unsqueeze(1)

    def take(self, x: Tensor) -> Tensor:
        """Select this rank's tokens, [B, size, ...], from all new tokens [B, T, ...], padded at their ends."""
        index = self.index.to(x.device).view(*self.index.shape, *[1] * (x.dim() - 2))
        return x.gather(1, index.expand(*self.index.shape, *x.shape[2:]))


def held_run(rank: int, ranks: int, start: int, stop: int) -> Run:
    """Return the run of positions among `start:stop` of a sequence that `rank` holds; it may be empty."""
    first = start + (rank - start) % ranks
    return Run(first, max(0, -(-(stop - first) // ranks)), ranks)


@dataclass(frozen=True, repr=False)
class RoundRobin(Tokens):
    """Sequences one after another, bounded by `cu_seqlens`, that ranks hold round robin.

    starts: the position, in its whole sequence, of the first token of each that is here.
    """

    starts: tuple[int, ...] = ()

    @property
    def own_layout(self) -> Layout:
        """Return the layout by which ranks hold these tokens, round robin, whatever the options say."""
        return ROUND_ROBIN

    @classmethod
    def of(cls, starts: tuple[int, ...], stops: tuple[int, ...]) -> RoundRobin:
        """Return sequences of the tokens at positions `start:stop` of each whole sequence, held round robin."""
        bounds = [0]
        for start, stop in zip(starts, stops, strict=True):
            bounds.append(bounds[-1] + stop - start)
        return cls(bounds[-1], tuple(bounds), starts=starts)


class _RoundRobinLayout(Layout):
    def runs(self, rank: int, ranks: int, tokens: Tokens) -> tuple[Run, ...]:
        """Return the runs of `rank`, one for each sequence that it holds tokens of."""
        assert isinstance(tokens, RoundRobin)
        assert tokens.cu_seqlens is not None
        runs = []
        for (bound, end), start in zip(pairwise(tokens.cu_seqlens), tokens.starts, strict=True):
            run = held_run(rank, ranks, start, start + end - bound)
            if run.length:
                runs.append(run._replace(start=run.start - start + bound))
        return tuple(runs)


ROUND_ROBIN = _RoundRobinLayout("round robin", lambda rank, ranks, length: (held_run(rank, ranks, 0, length),))


@dataclass(frozen=True)
class TurnMask(Mask):
    """`mask`, as the last tokens of each sequence see it, on the keys of the sequence that are still there.

    mask: the mask in positions of a whole sequence; one for every sequence if it is `PerRow`.
    first_keys: the position of the first key that is still there, of each sequence.
    first_queries: the position of the first query of each sequence.
    stops: the length of each sequence.
    shared: how many first tokens all sequences share; their keys come first, once for all sequences.
    """

    mask: Mask
    first_keys: tuple[int, ...]
    first_queries: tuple[int, ...]
    stops: tuple[int, ...]
    shared: int = 0
    shifts = True

    @property
    def looks_ahead(self) -> bool:
        """Return whether `mask` lets a query attend to a later key."""
        return self.mask.looks_ahead

    @property
    def compares_positions(self) -> bool:
        """Return whether the distance of query and key matters in `mask`."""
        return self.mask.compares_positions

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return the regions of all sequences, moved to their places. Raise ValueError for other lengths."""
        regions: list[Region] = []
        q_at, k_at = 0, self.shared
        for row, (key, query, stop) in enumerate(zip(self.first_keys, self.first_queries, self.stops, strict=True)):
            if self.shared:
                regions += _moved(seen(self.mask, row, (query, stop), (0, self.shared)), q_at - query, 0)
            regions += _moved(seen(self.mask, row, (query, stop), (key, stop)), q_at - query, k_at - key)
            q_at, k_at = q_at + stop - query, k_at + stop - key
        if (q_at, k_at) != (q_len, kv_len):
            raise ValueError(f"the turn has {q_at} queries and {k_at} keys, not {q_len} and {kv_len}")
        return tuple(regions)


def seen(mask: Mask, row: int, queries: tuple[int, int], keys: tuple[int, int]) -> tuple[Region, ...]:
    """Return the regions of `mask` for the last queries `start:stop` of sequence `row`, and some of its keys."""
    here, length = Region(*queries, *keys), queries[1]
    if here.is_empty:
        return ()
    regions = (
        part.intersect(here) for region in mask.of_row(row).regions(length, length) for part in region.rectangles()
    )
    return tuple(region for region in regions if not region.is_empty)


def _moved(regions: tuple[Region, ...], q_shift: int, k_shift: int) -> Iterator[Region]:
    """Yield the regions with their queries and keys at other positions."""
    for q_start, q_stop, k_start, k_stop, lower, upper, _ in regions:
        lower, upper = (None if edge is None else edge + k_shift - q_shift for edge in (lower, upper))
        yield Region(q_start + q_shift, q_stop + q_shift, k_start + k_shift, k_stop + k_shift, lower, upper)
