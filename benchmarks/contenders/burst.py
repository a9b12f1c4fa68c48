"""This project, by several of its strategies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch.distributed as dist

from benchmarks.contenders.kernels import sleeping
from benchmarks.contenders.protocol import Case, Contender, Session, Slept
from burst_plugin import ContextParallel, Strategy, Tokens, burst_attention
from burst_plugin.assignment.balance import choose_tokens, imbalance
from burst_plugin.ring.choices import choose_moving_side
from burst_plugin.ring.routes import Attending, RouteTable
from burst_plugin.strategy import AUTO, presets


@dataclass(frozen=True)
class Burst(Contender):
    """`burst_attention` by a strategy, whose kernel and ranks per node are those of the case.

    With `several` the rest is open, as to a user of `burst plan`: how many ranks exchange heads or, if none do, what
    moves backward; and on described links parts as the planner says.
    """

    strategy: Strategy = Strategy()  # noqa: RUF009, it is frozen
    several: bool = False
    by_document: bool = False  # zigzag of every document on its own, not what `layout="auto"` makes of all

    def refuse(self, case: Case) -> str | None:
        try:
            degree = self.strategy.on(case.topology).degree
        except ValueError as error:
            return str(error)
        q, kv, parts = case.q_heads, case.kv_heads, self.strategy.parts_of("backward")
        if degree not in case.shapes.ulysses_degrees or case.shapes.of_ulysses_group(degree).kv_heads % parts:
            return f"no groups of {degree} ranks can share {q} query and {kv} key/value heads (parts={parts})"
        if self.by_document and any(length % (2 * case.ranks) for length in case.documents):
            return f"ranks would hold unequal numbers of tokens: documents do not divide by {2 * case.ranks}"
        return None

    def variants(self, case: Case) -> tuple[Contender, ...]:
        if not self.several:
            return ()
        most = case.ranks_per_node if case.documents else case.ranks  # documents are not for exchanges between nodes
        degrees = [n for n in case.topology.ulysses_degrees if 1 < n <= most]
        options = {f"Ulysses of {n}": {"ulysses_degree": n} for n in degrees}
        if choose_moving_side(self.strategy, "backward", case.shapes) == "q":
            options["kv back"] = {"backward": "kv"}
        strategies = {name: replace(self.strategy, **each) for name, each in options.items()}  # type: ignore[arg-type]
        return tuple(replace(self, name=f"{self.name}, {name}", strategy=each) for name, each in strategies.items())

    def configurations(self, case: Case) -> tuple[Contender, ...]:
        able = super().configurations(case)
        return tuple(replace(c, strategy=c.strategy.on(case.topology)) for c in able if isinstance(c, Burst))

    def tokens(self, case: Case, table: RouteTable) -> Tokens:
        """Return which tokens ranks hold."""
        length = case.ranks * case.seq
        if case.documents and self.several:
            return choose_tokens(table, length, case.mask, alike=True)
        return Tokens(length, case.cu_seqlens if self.by_document else None)

    def imbalance(self, case: Case) -> float:
        """Return the most over the mean of the ranks' work."""
        table = RouteTable(case.topology, self.strategy)
        return imbalance(table, Attending(*[self.tokens(case, table)] * 2, case.mask))

    def prepare(self, case: Case, slept: Slept | None) -> Session:
        kernel = AUTO if slept is None else sleeping(case, slept)
        strategy = replace(self.strategy, kernel=kernel, ranks_per_node=case.ranks_per_node)
        cp = ContextParallel(dist.group.WORLD, strategy=strategy)
        cp.rank_state.strategy = replace(strategy, check="sparse")  # as on GPUs, which emulated ranks stand for
        tokens = self.tokens(case, cp.rank_state.route_table)
        attend = partial(burst_attention, cp=cp, mask=case.mask, tokens=tokens)
        return Session(cp.positions(tokens), attend, close=cp.close)


BURST = (
    Burst("burst", several=True),
    Burst("burst flat ring", Strategy(schedule="flat_ring")),
    Burst("burst, q travels", Strategy(forward="kv", backward="q")),
    Burst("burst, kv travels", Strategy(forward="kv", backward="kv")),
)
PRESETS = {name: Burst(f"preset {name}", Strategy.preset(name)) for name in presets.PRESETS}
ZIGZAG_BY_DOCUMENT = Burst("zigzag by document", by_document=True)
