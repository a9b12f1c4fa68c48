"""What sessions of all peers have in common."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin.layout import LAYOUTS, Tokens, positions

__all__ = ["PeerSession", "layout_rows", "not_installed"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class PeerSession:
    """A peer's attention on the rows `rows` [S], int64, of the sequence.

    `enter` makes what the peer keeps per process (its kernel, its switches) that of this session; it is called before
    either pass, since sessions take turns.
    """

    rows: Tensor
    call: Attend
    enter: Callable[[], None]

    def shard(self, whole: Tensor) -> Tensor:
        """See `Session.shard`."""
        return whole[:, self.rows].contiguous()

    def unshard(self, local: Tensor) -> Tensor:
        """See `Session.unshard`."""
        local, ranks = local.detach().contiguous(), dist.get_world_size()
        shards, rows = ([torch.empty_like(x) for _ in range(ranks)] for x in (local, self.rows))
        dist.all_gather(shards, local)
        dist.all_gather(rows, self.rows)
        return torch.cat(shards, 1)[:, torch.cat(rows).argsort()]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Session.attend`."""
        self.enter()
        out = self.call(q, k, v)
        if out.requires_grad:
            out.register_hook(lambda _: self.enter())  # type: ignore[no-untyped-call]
        return out


def layout_rows(name: str, seq: int) -> Tensor:
    """The rows of this rank in one of this project's layouts, of `seq` tokens per rank."""
    ranks = dist.get_world_size()
    return positions(LAYOUTS[name].runs(dist.get_rank(), ranks, Tokens(ranks * seq)))


def not_installed(module: str, requirement: str) -> str | None:
    """Why a package cannot be had: it is not installed. It may still need a stand-in for what it imports."""
    found = importlib.util.find_spec(module) is not None
    return None if found else f"{requirement} is not installed; the extra `bench` has it"
