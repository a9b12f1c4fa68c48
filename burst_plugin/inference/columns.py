"""New tokens of a turn as columns, so that each rank computes consecutive tokens.

Layers that carry a state along the sequence need consecutive tokens, but keys and values lie round robin. Three rows
of 7, 6 and 3 new tokens after 4 cached ones, on two ranks, `.` being padding:

    computed by    rank 0    rank 1        stored by    rank 0    rank 1
                   . 0 1 2   3 4 5 6                    0 2 4 6   1 3 5
                   . . 0 1   2 3 4 5                    0 2 4     1 3 5
                   . . . .   . 0 1 2                    0 2       1

So a layer of attention exchanges queries, keys, values and outputs, and other layers do nothing at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin.context import ContextParallel
from burst_plugin.inference.gathering import of_ranks
from burst_plugin.inference.turn import Turn
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.masks import Documents, Mask, PerRow

_FEWEST = 2  # columns of a rank: layers take one token with a state for a step of decoding


class _Route(NamedTuple):
    """This rank's part of the exchange of tokens between the ranks that compute them and the ranks that store them.

    computed, stored: where its tokens are among [B * columns] and [B * size], in the order of the other rank.
    to_store, to_compute: how many tokens go to each rank, and come from it.
    """

    computed: Tensor
    stored: Tensor
    to_store: list[int]
    to_compute: list[int]


@dataclass(frozen=True, eq=False)
class Columns:
    """The new tokens of a turn as a table with a line per batch row, whose columns ranks compute in equal shares.

    Each row of the batch ends in the last column, after its padding, and each rank computes consecutive columns.

    cp: the context-parallel group.
    turn: the turn, which says on which rank the keys and values of a token are stored.
    """

    cp: ContextParallel
    turn: Turn

    @classmethod
    def of_one_rank(cls, turn: Turn) -> Columns:
        """Return columns that this rank computes all by itself, for a turn of layers without attention."""
        return cls(ContextParallel(hierarchy=[1]), replace(turn, rank=0, ranks=1, replicated=True, known={}))

    @cached_property
    def count(self) -> int:
        """Return the number of columns that each rank computes, two or more."""
        return max(_FEWEST, -(-max(self.turn.lengths) // self.turn.ranks))

    @property
    def total(self) -> int:
        """Return the number of columns that all ranks compute together."""
        return self.count * self.turn.ranks

    @cached_property
    def padding(self) -> Tensor:
        """Return the number of columns of padding at the beginning of each row, [B, 1], int64 on the CPU."""
        return self.total - torch.tensor(self.turn.lengths, device="cpu").unsqueeze(1)

    @cached_property
    def mask(self) -> Mask | None:
        """Return the mask over all columns that keeps padding apart from its row's tokens; None without padding."""
        bounds = [(0, pad, self.total) if pad else (0, self.total) for pad in self.padding.flatten().tolist()]
        if len(set(bounds)) == 1:
            return Documents(bounds[0]) if len(bounds[0]) == 3 else None
        return PerRow(tuple(map(Documents, bounds)))

    @property
    def tokens(self) -> Tokens:
        """Return the `total` columns as a sequence of one chunk of consecutive positions for each rank."""
        return Tokens(self.total, holders=tuple(range(self.turn.ranks)))

    @cached_property
    def _numbers(self) -> Tensor:
        """Return which new token of its row each of this rank's columns is, [B, columns]; below 0 for padding."""
        first = self.turn.rank * self.count
        return torch.arange(first, first + self.count, device="cpu") - self.padding

    @cached_property
    def valid(self) -> Tensor:
        """Return whether each of this rank's columns is a token and no padding, [B, columns], bool on the CPU."""
        return self._numbers >= 0

    @cached_property
    def index(self) -> Tensor:
        """Return the number of the new token in each of this rank's columns, [B, columns], int64 on the CPU.

        A row's first new token is number 0; padding has 0, too.
        """
        return self._numbers.clamp(min=0)

    @cached_property
    def positions(self) -> Tensor:
        """Return the position in its row of the token in each of this rank's columns, [B, columns], int64 on the CPU.

        Positions count cached tokens, too, as rotary embeddings need; padding has the position of the first new
        token.
        """
        return self.index + torch.tensor(self.turn.starts, device="cpu").unsqueeze(1)

    def take(self, x: Tensor) -> Tensor:
        """Return this rank's columns, [B, columns, ...], of all new tokens `x` [B, T, ...], padded at their ends.

        T is the number of new tokens of the longest row.
        """
        return _taken(x, self.index)

    # ------------------------------------------------------------------------------------------- between the ranks

    @cached_property
    def _route(self) -> _Route:
        turn, count, own_rank = self.turn, self.count, self.turn.rank
        computed, stored, sources, targets = [], [], [], []
        for row, (start, length) in enumerate(zip(turn.starts, turn.lengths, strict=True)):
            token = torch.arange(length, device="cpu")
            column = token + self.total - length
            storing = (start + token) % turn.ranks
            first = (storing - start) % turn.ranks  # the first new token of the rank that stores this one
            sources.append(column // count)
            targets.append(storing)
            computed.append(row * count + column % count)
            stored.append(row * turn.size + (token - first) // turn.ranks)
        source, target, column, slot = map(torch.cat, (sources, targets, computed, stored))
        leaves, comes = source == own_rank, target == own_rank
        to_store, to_compute = (
            torch.bincount(peers, minlength=turn.ranks).tolist() for peers in (target[leaves], source[comes])
        )
        by_target, by_source = target[leaves].argsort(stable=True), source[comes].argsort(stable=True)
        return _Route(column[leaves][by_target], slot[comes][by_source], to_store, to_compute)

    def to_storage(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Move this rank's columns of each of `xs` to the ranks that store their tokens; collective.

        Args:
            xs: tensors [B, columns, ...].

        Returns:
            For each of `xs` the tokens that this rank stores, [B, size, ...], 0 for padding; all new tokens, [B, T,
            ...], if the turn is `replicated`. They are what `KVCache.attend` takes.
        """
        if self.turn.replicated:
            return [self.gather(x) for x in xs]
        route = self._route
        return self._exchanged(xs, route.computed, route.to_store, route.stored, route.to_compute, self.turn.size)

    def from_storage(self, x: Tensor) -> Tensor:
        """Move values of tokens from the ranks that store them to the ranks that compute their columns; collective.

        Takes [B, size, ...], this rank's tokens of the turn, and returns [B, columns, ...], 0 for padding.
        """
        if self.turn.replicated:
            valid = self.valid.to(x.device).view(*self.valid.shape, *(1,) * (x.dim() - 2))
            return self.take(x).where(valid, 0)
        route = self._route
        return self._exchanged([x], route.stored, route.to_compute, route.computed, route.to_store, self.count)[0]

    def _exchanged(
        self,
        xs: Sequence[Tensor],
        leaving: Tensor,
        to_ranks: list[int],
        arriving: Tensor,
        from_ranks: list[int],
        size: int,
    ) -> list[Tensor]:
        """Return tensors [B, size, ...] with the received tokens at the places `arriving`, else 0; collective."""
        self._compare("an exchange of columns", xs)
        device, rows = xs[0].device, len(self.turn.starts)
        sent = torch.cat([_as_bytes(x.flatten(0, 1)[leaving.to(device)]) for x in xs], 1)
        received = torch.empty((sum(from_ranks), sent.shape[1]), dtype=torch.uint8, device=device)
        dist.all_to_all_single(received, sent, from_ranks, to_ranks, group=self.cp.group)
        results, at = [], 0
        for x in xs:
            width = x.shape[2:].numel() * x.element_size()
            part = received[:, at : at + width].clone(memory_format=torch.contiguous_format).view(x.dtype)
            places = torch.zeros((rows * size, *x.shape[2:]), dtype=x.dtype, device=device)
            places[arriving.to(device)] = part.view(len(part), *x.shape[2:])
            results.append(places.view(rows, size, *x.shape[2:]))
            at += width
        return results

    def gather(self, x: Tensor, *, last: int | None = None) -> Tensor:
        """Return new tokens [B, n, ...] on every rank, from each rank's columns; collective.

        x: [B, columns, ...].
        last: how many last new tokens of each row to return, n, at most that of the longest row; None for all.

        Shorter rows are padded at their ends with anything. Results are equal to the bit on every rank.
        """
        size = max(self.turn.lengths) if last is None else last
        self._compare(f"the last {size} tokens of columns", (x,))
        ends = x[:, -size:]
        table = ends if self.cp.ranks == 1 else torch.cat(of_ranks(self.cp, ends), 1)
        first = table.shape[1] - torch.tensor(self.turn.lengths, device="cpu").clamp(max=size).unsqueeze(1)
        return _taken(table, (first + torch.arange(size, device="cpu")).clamp(max=table.shape[1] - 1))

    def with_tokens_before(self, x: Tensor, width: int, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return this rank's columns after the `width` tokens before them, and rows' last `width` tokens; collective.

        Causal convolutions need the tokens before a column, which another rank may compute, or an earlier turn has
        computed.

        Args:
            x: [B, columns, ...], this rank's columns.
            width: the number of tokens to put in front, 1 or more.
            before: the last tokens of each row before this turn, [B, width, ...]; None for zeros.

        Returns:
            The columns with tokens in front, [B, width + columns, ...], and the last tokens of rows, [B, width, ...],
            which are equal on every rank and the next turn's `before`. A row's first new token follows its tokens in
            `before`; values further in front mean nothing.
        """
        self._compare(f"{width} tokens before columns", (x,))
        if before is None:
            before = torch.zeros((len(x), width, *x.shape[2:]), dtype=x.dtype, device=x.device)
        before = before.to(x.dtype)
        filled = self._filled(before, self._numbers).where(~_wide(self.valid, x), x)
        start = self._filled(before, torch.arange(-width, 0, device="cpu") - self.padding)
        ends = [filled[:, -width:]] if self.cp.ranks == 1 else of_ranks(self.cp, filled[:, -width:])
        rank = self.turn.rank
        halo, last = (torch.cat([start, *some], 1)[:, -width:] for some in (ends[:rank], ends))
        return torch.cat([halo, filled], 1), last

    def _filled(self, before: Tensor, numbers: Tensor) -> Tensor:
        """Return the tokens of `before` at `numbers` [B, n], of which -1 is the last; any token if out of range."""
        width = before.shape[1]
        return _taken(before, (numbers + width).clamp(0, width - 1))

    def _compare(self, of: str, xs: Sequence[Tensor]) -> None:
        """Have ranks agree on the sizes that they exchange; a rank that failed before makes all of them fail."""
        self.cp.agree({"sizes": [list(x.shape[2:]) for x in xs], "dtype": [x.dtype for x in xs]}, of=of)


def _as_bytes(x: Tensor) -> Tensor:
    """Return the numbers of tokens [T, ...] as bytes, [T, n]."""
    return x.reshape(len(x), x.shape[1:].numel()).contiguous().view(torch.uint8)


def _wide(of_tokens: Tensor, x: Tensor) -> Tensor:
    """Return [B, n] with as many dims as x, on its device."""
    return of_tokens.to(x.device).view(*of_tokens.shape, *(1,) * (x.dim() - 2))


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """Return the tokens `index` [B, n] of the rows of x [B, T, ...]."""
    return x.gather(1, _wide(index, x).expand(*index.shape, *x.shape[2:]))
