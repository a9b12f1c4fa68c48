"""What is compared: a case, and contenders that compute its attention, each in its own layout and in its own way."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin import Causal, Documents, Full, Mask, Topology
from burst_plugin.compute.shapes import Shapes
from burst_plugin.sequence.layout import LAYOUTS, Tokens, positions
from tests.support.processes import launch

TRIALS = 7  # turns of each configuration of a contender by which the fastest is chosen, while there are several
_HOPELESS = 1.3  # times the best after any turn, a configuration is not tried again
_IMPORT_S = 120.0
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Able = Mapping[str, Sequence["Contender"]]  # configurations that can do a case, by contender


@dataclass(frozen=True)
class Case:
    """Attention over nodes * ranks_per_node ranks: q [batch, seq, q_heads, head_dim] on each, k and v with kv_heads.

    `seq` is tokens per rank. `documents` are lengths of packed documents, which are causal; `sigma` is how they vary.
    """

    nodes: int
    ranks_per_node: int
    seq: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    causal: bool
    batch: int = 1
    documents: tuple[int, ...] = ()
    sigma: float | None = None

    @property
    def topology(self) -> Topology:
        return Topology(self.nodes, self.ranks_per_node)

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        return (0, *accumulate(self.documents))

    @property
    def mask(self) -> Mask:
        whole = Causal() if self.causal else Full()
        return whole & Documents(self.cu_seqlens) if self.documents else whole

    @property
    def shapes(self) -> Shapes:
        heads, dims = (self.q_heads, self.kv_heads), (self.head_dim, self.head_dim)
        return Shapes(self.batch, self.seq, self.seq, *heads, *dims, self.dtype)


class Slept(NamedTuple):
    """Seconds that one full visit takes where compute is slept: all query heads, seq queries on seq keys, no mask."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Session:
    """A contender in one rank, ready to attend on the rows `rows` [S], int64, of the sequence."""

    rows: Tensor
    call: Attend
    enter: Callable[[], None] = lambda: None  # makes its own what a library keeps per process, before either pass
    close: Callable[[], None] = lambda: None  # collective

    def shard(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of [B, ranks * S, H, D], contiguous."""
        return whole[:, self.rows].contiguous()

    def unshard(self, local: Tensor) -> Tensor:
        """Return the whole sequence, from the rows of all ranks, on every rank; collective, without gradient."""
        local, own, ranks = local.detach().contiguous(), self.rows.to(local.device), dist.get_world_size()
        shards, rows = ([torch.empty_like(x) for _ in range(ranks)] for x in (local, own))
        dist.all_gather(shards, local)
        dist.all_gather(rows, own)
        return torch.cat(shards, 1)[:, torch.cat(rows).argsort()]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of local rows [B, S, H, D] on the whole sequence; both passes are collective."""
        self.enter()
        out = self.call(q, k, v)
        if out.requires_grad:
            out.register_hook(lambda _: self.enter())  # type: ignore[no-untyped-call]
        return out


@dataclass(frozen=True)
class Contender:
    """A way of distributing attention. `absent` and `refuse` are called before there are ranks."""

    name: str

    def absent(self) -> str | None:
        """Return why it is not available on this machine, or None if it is."""
        return None

    def refuse(self, case: Case) -> str | None:
        """Return why it cannot do this case, or None if it can."""
        raise NotImplementedError

    def variants(self, case: Case) -> tuple[Contender, ...]:
        """Return its other configurations."""
        return ()

    def configurations(self, case: Case) -> tuple[Contender, ...]:
        """Return all its configurations that can do `case`, itself first; a benchmark takes the best of them."""
        return tuple(each for each in (self, *self.variants(case)) if each.refuse(case) is None)

    def reason(self, case: Case) -> dict[str, str]:
        """Return why it is not measured, as "absent" or "refused"; empty if it is."""
        absent = self.absent()
        if absent is not None:
            return {"absent": absent}
        if not self.configurations(case):
            return {"refused": self.refuse(case) or "none of its configurations can do this case"}
        return {}

    def prepare(self, case: Case, slept: Slept | None) -> Session:
        """Prepare a session, in every rank of the default process group; collective. Computes unless `slept`."""
        raise NotImplementedError


def best_of(configurations: Sequence[Any], take_turn: Callable[[Any], None]) -> Any:
    """Return the fastest of a contender's configurations by their `typical_s` after some turns; close the others."""
    tried = list(configurations)
    for turn in range(TRIALS):
        for each in tried if turn == 0 or len(tried) > 1 else ():
            take_turn(each)
        best = min(tried, key=lambda each: each.typical_s)
        tried = [each for each in tried if each.typical_s <= _HOPELESS * best.typical_s]
    for each in configurations:
        if each is not best:
            each.close()
    return best


def layout_rows(name: str, case: Case, *, by_document: bool = False) -> Tensor:
    """Return the rows of this rank in one of this project's layouts, which may cut every document on its own."""
    tokens = Tokens(case.ranks * case.seq, case.cu_seqlens if by_document else None)
    return positions(LAYOUTS[name].runs(dist.get_rank(), case.ranks, tokens))


@cache
def import_problem(module: str, load: Callable[[], object]) -> str | None:
    """Return why a package is not installed, or `load` fails in a process of its own; None if it is available."""
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed; the extra `bench` has it"
    threads = torch.get_num_threads()
    try:
        (outcome,) = launch(lambda rank: bool(load()), 1, (), lambda rank, directory: None, timeout_s=_IMPORT_S)
    finally:
        torch.set_num_threads(threads)  # `launch` sets one, for the ranks
    return None if outcome.error is None else f"{module} does not import: {outcome.error.strip().splitlines()[-1]}"
