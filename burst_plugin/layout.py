"""Layouts: which tokens of a sequence a rank holds, and in which order.

A layout says so with *runs*, arithmetic progressions of positions. 8 tokens over 2 ranks:

    contiguous   rank 0: 0 1 2 3      rank 1: 4 5 6 7
    striped      rank 0: 0 2 4 6      rank 1: 1 3 5 7
    zigzag       rank 0: 0 1 6 7      rank 1: 2 3 4 5

Under a causal mask contiguous leaves the first ranks idle; striped and zigzag give every rank the same work.

Sources: zigzag is Megatron-core's own (`megatron/core/utils.py`, `get_batch_on_this_cp_rank`): of 2P chunks
rank r holds r and 2P-1-r. Striped: Striped Attention, arXiv 2311.09431.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["LAYOUTS", "Layout", "Run"]


class Run(NamedTuple):
    """`length` tokens at positions `start`, `start + stride`, `start + 2 * stride`, ..."""

    start: int
    length: int
    stride: int = 1


@dataclass(frozen=True)
class Layout:
    """A rule that deals the positions of a sequence out to ranks.

    `multiple(ranks)` is what a sequence length has to divide by; `deal(rank, ranks, seq_len)` gives the runs.
    """

    name: str
    multiple: Callable[[int], int]
    deal: Callable[[int, int, int], tuple[Run, ...]]

    def runs(self, rank: int, ranks: int, seq_len: int) -> tuple[Run, ...]:
        """The positions of `rank`, in local order. Raises ValueError if `seq_len` does not divide."""
        self.check(ranks, seq_len)
        return self.deal(rank, ranks, seq_len)

    def check(self, ranks: int, seq_len: int) -> None:
        """Raise ValueError unless `seq_len` tokens can be dealt out evenly."""
        unit = self.multiple(ranks)
        if seq_len < 1 or seq_len % unit:
            below = seq_len // unit * unit
            raise ValueError(
                f"layout={self.name!r} over {ranks} ranks needs a sequence length that divides by {unit}, got "
                f"{seq_len}: pad or cut the sequence to {below + unit}{f' or {below}' if below else ''} tokens"
            )

    def shard(self, x: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
        """The tokens of `rank` out of the whole sequence `x`, along `dim`; contiguous."""
        runs = self.runs(rank, ranks, x.shape[dim])
        return torch.cat([_take(x, dim, run) for run in runs], dim)

    def unshard(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """The whole sequence out of all ranks' shards, in rank order, along `dim`."""
        ranks, shape = len(shards), list(shards[0].shape)
        shape[dim] = sum(shard.shape[dim] for shard in shards)
        full = shards[0].new_empty(shape)
        for rank, shard in enumerate(shards):
            offset = 0
            for run in self.runs(rank, ranks, shape[dim]):
                _take(full, dim, run).copy_(shard.narrow(dim, offset, run.length))
                offset += run.length
        return full

    def positions(self, rank: int, ranks: int, seq_len: int, device: torch.device | None = None) -> Tensor:
        """Global positions `[S_local]`, int64, of the tokens of `rank`."""
        return torch.cat(
            [
                torch.arange(run.start, run.start + run.length * run.stride, run.stride, device=device)
                for run in self.runs(rank, ranks, seq_len)
            ]
        )


def _take(x: Tensor, dim: int, run: Run) -> Tensor:
    """A view of the positions of `run` along `dim`."""
    index = [slice(None)] * x.dim()
    index[dim] = slice(run.start, run.start + (run.length - 1) * run.stride + 1, run.stride)
    return x[tuple(index)]


def _zigzag(rank: int, ranks: int, seq_len: int) -> tuple[Run, ...]:
    chunk = seq_len // (2 * ranks)
    return (Run(rank * chunk, chunk), Run((2 * ranks - 1 - rank) * chunk, chunk))


def _striped(rank: int, ranks: int, seq_len: int) -> tuple[Run, ...]:
    return (Run(rank, seq_len // ranks, ranks),)


def _contiguous(rank: int, ranks: int, seq_len: int) -> tuple[Run, ...]:
    length = seq_len // ranks
    return (Run(rank * length, length),)


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        layout.name: layout
        for layout in (
            Layout("zigzag", lambda ranks: 2 * ranks, _zigzag),
            Layout("striped", lambda ranks: ranks, _striped),
            Layout("contiguous", lambda ranks: ranks, _contiguous),
        )
    }
)
