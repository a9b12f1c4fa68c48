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
    """Return whether a turn has so few new tokens that by default every rank computes all of them.

    `tokens` is the number of new tokens of the longest row; up to twice the number of `ranks` are few.
    """
    return tokens <= 2 * ranks


@dataclass(frozen=True, eq=False)
class Turn:
    """The new tokens of each batch row in one turn, which follow the row's cached tokens.

    number: how many turns this cache had before.
    starts, stops: the length of each row before the turn and after it.
    rank, ranks: this rank and the size of the ring.
    replicated: whether every rank computes all new tokens; if not, position p of a row is computed by rank p % ranks.
        Either way that rank stores its key and value.
    known: tiles that one layer has found and other layers of the turn use.
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
        """Return the values by name that ranks compare when a turn begins, since they must be equal on every rank."""
        return {"new tokens": self.lengths, "cached tokens": self.starts, "replicated": self.replicated}

    @property
    def is_uniform(self) -> bool:
        """Return whether all batch rows are equally long, before the turn and after it."""
        return len(set(self.starts)) == len(set(self.stops)) == 1

    @cached_property
    def own(self) -> tuple[slice, ...]:
        """Return a slice for each row, which selects the tokens that this rank stores among the row's new tokens."""
        return self.own_of(self.rank)

    def own_of(self, rank: int) -> tuple[slice, ...]:
        """Return a slice for each row, which selects the tokens that `rank` stores among the row's new tokens."""
        firsts = (held_run(rank, self.ranks, *bounds).start for bounds in zip(self.starts, self.stops, strict=True))
        rows = zip(firsts, self.starts, self.lengths, strict=True)
        return tuple(slice(min(first - start, length), length, self.ranks) for first, start, length in rows)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Return how many new tokens of each row this rank computes, as its q, k and v have them without padding."""
        return self.lengths if self.replicated else self.counts_of(self.rank)

    def counts_of(self, rank: int) -> tuple[int, ...]:
        """Return the number of new tokens of each row that `rank` stores."""
        return tuple(len(range(own.start, own.stop, own.step)) for own in self.own_of(rank))

    @property
    def size(self) -> int:
        """Return the length of rows in this rank's q, k and v with padding: the largest of `counts`."""
        return max(self.counts)

    @cached_property
    def index(self) -> Tensor:
        """Return the number of each token that this rank computes, [B, size], int64 on the CPU; 0 for padding.

        A row's first new token is number 0.
        """
        index = torch.zeros(len(self.starts), self.size, dtype=torch.int64, device="cpu")
        for row, own in enumerate(self.own):
            steps = range(self.lengths[row]) if self.replicated else range(own.start, own.stop, own.step)
            index[row, : len(steps)] = torch.tensor(steps, dtype=torch.int64, device="cpu")
        return index

    @cached_property
    def valid(self) -> Tensor:
        """Return whether each entry of this rank's rows is a token and no padding, [B, size], bool on the CPU."""
        return torch.arange(self.size, device="cpu") < torch.tensor(self.counts, device="cpu").unsqueeze(1)

    @cached_property
    def positions(self) -> Tensor:
        """Return the position in its row of each token that this rank computes, [B, size], int64 on the CPU.

        Positions count cached tokens, too, as rotary embeddings need. Padding has the position of the row's first new
        token.
        """
        return self.index + torch.tensor(self.starts, device="cpu").unsqueeze(1)

    def take(self, x: Tensor) -> Tensor:
        """Return this rank's tokens, [B, size, ...], of all new tokens `x` [B, T, ...], rows padded at their ends.

        T is the number of new tokens of the longest row.
        """
        index = self.index.to(x.device).view(*self.index.shape, *[1] * (x.dim() - 2))
        return x.gather(1, index.expand(*self.index.shape, *x.shape[2:]))


def held_run(rank: int, ranks: int, start: int, stop: int) -> Run:
    """Return the positions among `start:stop` of a sequence that `rank` holds, every `ranks`-th, as a `Run`.

    The run has length 0 if there is none.
    """
    first = start + (rank - start) % ranks
    return Run(first, max(0, -(-(stop - first) // ranks)), ranks)


@dataclass(frozen=True, repr=False)
class RoundRobin(Tokens):
    """Several sequences one after another, bounded by `cu_seqlens`, each held by the ranks of a ring round robin.

    starts: for each sequence the position that its first token here has in the whole sequence. The rank of a token is
        its position in the whole sequence modulo the number of ranks.
    """

    starts: tuple[int, ...] = ()

    @property
    def own_layout(self) -> Layout:
        """Return the round-robin layout: ranks hold these tokens by it, whatever layout the options ask for."""
        return ROUND_ROBIN

    @classmethod
    def of(cls, starts: tuple[int, ...], stops: tuple[int, ...]) -> RoundRobin:
        """Return the parts `start:stop` of whole sequences, one after another, as tokens that are held round robin.

        `starts` and `stops` have a position in its whole sequence for each part.
        """
        bounds = [0]
        for start, stop in zip(starts, stops, strict=True):
            bounds.append(bounds[-1] + stop - start)
        return cls(bounds[-1], tuple(bounds), starts=starts)


@dataclass(frozen=True, repr=False)
class Everywhere(Tokens):
    """Several sequences one after another, bounded by `cu_seqlens`, that every rank has all tokens of.

    Its runs have the stride of `RoundRobin` sequences, so that both make tiles.
    """

    @property
    def own_layout(self) -> Layout:
        """Return the layout that gives every rank all tokens, every n-th one after another, n being the ranks."""
        return EVERYWHERE


class _EverywhereLayout(Layout):
    def runs(self, rank: int, ranks: int, tokens: Tokens) -> tuple[Run, ...]:
        """Return the runs of any rank, up to `ranks` of them for each sequence."""
        assert tokens.cu_seqlens is not None
        return tuple(
            Run(first, len(range(first, end, ranks)), ranks)
            for bound, end in pairwise(tokens.cu_seqlens)
            for first in range(bound, min(bound + ranks, end))
        )


EVERYWHERE = _EverywhereLayout("everywhere", lambda rank, ranks, length: (Run(0, length, 1),))


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
    """The mask of a turn: which of the remaining keys of its sequence each new token attends to.

    Queries of all sequences lie one after another, and so do keys. The queries of a sequence are its last tokens.

    mask: the mask in positions of a whole sequence; one for every sequence if it is `PerRow`.
    first_keys: by sequence, the position of the first key that the cache still has.
    first_queries: by sequence, the position of the first query.
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
        """Return whether `mask` depends on the distance of query and key."""
        return self.mask.compares_positions

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return the regions of query and key rows that attend, of all sequences as they lie one after another.

        Raises ValueError unless `q_len` and `kv_len` are the numbers of queries and keys of all sequences.
        """
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
    """Return the regions where queries `start:stop` of batch row `row` attend to keys `start:stop` under `mask`.

    `queries` and `keys` are pairs (start, stop) of positions in the whole sequence, whose last tokens are the
    queries.
    """
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
