"""What a rank of `bench attention` does: contenders over a process group, or a virtual ring in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.attention_rounds import Entry, Group, OneProcess, Times, World, kernel_entries, rounds
from benchmarks.contenders import Case, Contender
from benchmarks.contenders.burst import Burst
from benchmarks.memory import PeakMemory
from benchmarks.one_rank import Gradients, Whole, fastest
from benchmarks.silent import SilentTransport, silenced
from burst_plugin import Causal, ContextParallel, Full, Topology, VirtualRing
from burst_plugin.comm.call_identity import CallId
from burst_plugin.comm.copies import CopyNetwork
from burst_plugin.ring.attention_pass import Saved, backward_program, forward_program
from burst_plugin.ring.choices import make_plan
from burst_plugin.ring.executor import lockstep
from burst_plugin.ring.rank_state import RankState
from burst_plugin.ring.request import Inputs, Request
from burst_plugin.sequence.layout import Tokens

__all__ = ["SILENT", "Measured", "Ready", "group_rank", "virtual_rank"]

SILENT = ", no transfers"  # at the end of an entry's name


@dataclass(frozen=True)
class Measured:
    """What one process found: peers' times are those of the slowest rank, memory that of this one."""

    kernel: str
    times: dict[str, Times]
    peaks: dict[str, int | None]
    errors: dict[str, float]


def group_rank(rank: int, case: Case, able: Mapping[str, Sequence[Contender]], count: int) -> Measured:
    """One rank of the default process group, with the configurations of every contender; collective."""
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    makers = {name: [partial(_contender_ready, c, case) for c in each] for name, each in able.items()}
    return _measured(Group(rank, case.ranks, device), device, case, makers, count)


def virtual_rank(case: Case, able: Mapping[str, Sequence[Burst]], count: int) -> Measured:
    """All ranks in this process, which is `case.ranks` times as much work."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    makers = {name: [partial(_virtual_ready, c, case) for c in each] for name, each in able.items()}
    return _measured(OneProcess(), device, case, makers, count)


def _measured(
    world: World,
    device: torch.device,
    case: Case,
    makers: Mapping[str, Sequence[Callable[[Whole], Ready]]],
    count: int,
) -> Measured:
    shape = (case.batch, case.ranks * case.seq, case.q_heads, case.kv_heads, case.head_dim)
    whole = Whole.draw(shape, case.dtype, device)
    kernel = fastest(whole, case.causal, world.most)
    expected = kernel.backward(whole, kernel.forward(whole))
    entries, peaks, errors = kernel_entries(kernel, whole, world.size), {}, {}
    for contender, make in ((name, make) for name, each in makers.items() for make in each):
        with PeakMemory(device) as peak:
            ready = make(whole)
            saved = ready.forward()
            grads = ready.backward(saved)
        peaks[ready.name], errors[ready.name] = peak.nbytes, _largest_error(ready.whole(saved, grads), expected)
        entries += ready.entries(contender)
        del saved, grads
    del expected
    return Measured(kernel.name, rounds(entries, world, device, count), peaks, errors)


def _largest_error(found: Gradients, expected: Gradients) -> float:
    """The largest of out, dq, dk, dv, each as the 2-norm of its difference over that of what was expected.

    NaN if any of them has one. In float32, which is exact enough to tell errors of any type that is measured.
    """
    pairs = zip(found, expected, strict=True)
    errors = [(x.float() - y.float()).norm() / y.float().norm() for x, y in pairs]
    return float(torch.stack(errors).amax().item())  # unlike Python's `max`, it passes on NaN


@dataclass(frozen=True)
class Ready:
    """A contender to be timed; `whole` puts its results together (collective), `rank_states` are those of a ring."""

    name: str
    forward: Callable[[], Any]
    backward: Callable[[Any], Any]
    whole: Callable[[Any, Any], Gradients]
    rank_states: tuple[RankState, ...] = ()

    def entries(self, contender: str) -> list[Entry]:
        """To time as a configuration of a contender; a ring of this project also without transfers."""
        entry = Entry(self.name, self.forward, self.backward, contender=contender, configuration=self.name)
        if not self.rank_states:
            return [entry]
        transports = [SilentTransport() for _ in self.rank_states]
        within: Callable[[], AbstractContextManager[Any]] = partial(silenced, self.rank_states, transports)
        return [entry, replace(entry, name=self.silent_name, within=within)]

    @property
    def silent_name(self) -> str:
        """The name of the entry without transfers."""
        return self.name + SILENT


def _contender_ready(contender: Contender, case: Case, whole: Whole) -> Ready:
    """A contender in one rank of the default process group; collective."""
    session = contender.prepare(case, None)
    q, k, v, dout = (session.shard(x) for x in whole)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def gather(out: Tensor, grads: tuple[Tensor, ...]) -> Gradients:
        return Gradients(*(session.unshard(x.detach()) for x in (out, *grads)))

    cp = getattr(session, "cp", None)
    return Ready(
        contender.name,
        lambda: session.attend(*leaves),
        lambda out: torch.autograd.grad(out, leaves, dout),
        gather,
        (cp.rank_state,) if isinstance(cp, ContextParallel) else (),
    )


def _virtual_ready(contender: Burst, case: Case, whole: Whole) -> Ready:
    """All ranks of a ring in this process, taking turns, with a copy in memory for every message.

    Runs what `burst_attention` runs on every rank; autograd and the consistency between ranks are left out.
    """
    topology, device = Topology(case.nodes, case.ranks_per_node), whole.q.device
    ring = VirtualRing(topology, contender.strategy, network=CopyNetwork(topology.ranks, device))
    layout = ring.rank_states[0].route_table.layout
    request = Request(Causal() if case.causal else Full())
    tokens = Tokens(whole.q.shape[1])
    shards = [[layout(tokens).shard(x, 1, (m.rank, case.ranks), tokens) for x in whole] for m in ring.rank_states]
    inputs = [Inputs(q, k, v) for q, k, v, _ in shards]
    plans = [make_plan(state, mine, request, {}) for state, mine in zip(ring.rank_states, inputs, strict=True)]
    number = 0

    def forward() -> tuple[CallId, list[Saved]]:
        nonlocal number
        number += 1
        which = CallId(number)
        done = lockstep([forward_program(plan, which, x) for plan, x in zip(plans, inputs, strict=True)])
        return which, [saved for _, saved in done]

    def backward(saved: tuple[CallId, list[Saved]]) -> list[tuple[Tensor, ...]]:
        mine, kept = saved
        each = zip(plans, shards, kept, strict=True)
        done = lockstep([backward_program(plan, mine, shard[3], one) for plan, shard, one in each])
        return [tuple(grads[:3]) for grads in done]

    def gather(saved: tuple[CallId, list[Saved]], grads: list[tuple[Tensor, ...]]) -> Gradients:
        columns = ([rows.out for rows in saved[1]], *zip(*grads, strict=True))
        return Gradients(*(layout(tokens).unshard(list(column), 1, tokens) for column in columns))

    return Ready(contender.name, forward, backward, gather, tuple(ring.rank_states))
