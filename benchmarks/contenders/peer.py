"""What sessions of all peers have in common."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin.sequence.layout import LAYOUTS, Tokens, positions
from tests.support.processes import launch

__all__ = ["Attend", "PeerSession", "import_problem", "layout_rows"]

_IMPORT_S = 120.0
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


def import_problem(module: str, load: Callable[[], object]) -> str | None:
    """Why a package cannot be had: it is not installed, or `load` fails; None if it can.

    `load` is tried in a process of its own, since it may put stand-ins in place.
    """
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed; the extra `bench` has it"
    threads = torch.get_num_threads()
    try:
        (outcome,) = launch(lambda rank: bool(load()), 1, (), lambda rank, directory: None, timeout_s=_IMPORT_S)
    finally:
        torch.set_num_threads(threads)  # ranks compute on one each, and so does what launches them
    return None if outcome.error is None else f"{module} does not import: {outcome.error.strip().splitlines()[-1]}"
