"""How many buffers schedules need: what docs/internals.md says, and what rings lease."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from burst_plugin import Causal, Full, Mask, Strategy, Topology, VirtualRing, direct, flat_ring, tasp, two_level_ring
from burst_plugin.comm.copies import CopyNetwork
from burst_plugin.planning.buffer_count import CountingPool, Held, as_many_buffers, most_held
from burst_plugin.schedule.rings import SCHEDULES
from tests.support.reference import Problem

TOPOLOGIES = [Topology(n, w) for n, w in ((1, 2), (1, 4), (2, 2), (2, 3), (2, 4), (4, 2), (3, 3), (4, 4), (8, 8))]
LARGER = [topology for topology in TOPOLOGIES if topology.ranks > 2]


@pytest.mark.parametrize("topology", LARGER, ids=str)
def test_a_flat_ring_needs_two_blocks_and_three_sums(topology: Topology) -> None:
    assert most_held(flat_ring(topology, reduces=False)) == Held(2, 0)
    assert most_held(flat_ring(topology)) == Held(2, 3)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_a_two_level_ring_needs_no_more_than_documented(topology: Topology) -> None:
    assert most_held(two_level_ring(topology, reduces=False)).operands <= 4
    held = most_held(two_level_ring(topology))
    assert held.operands <= 5
    assert held.results <= 6


def test_no_more_is_documented_than_is_needed() -> None:
    assert most_held(two_level_ring(Topology(4, 4), reduces=False)) == Held(4, 0)
    assert most_held(two_level_ring(Topology(4, 4))) == Held(5, 6)
    assert most_held(direct(Topology(1, 4))) == Held(3, 3)
    for topology in (Topology(1, 8), Topology(2, 4)):  # 4 parts of 2 and 3 blocks
        assert most_held(tasp(topology, reduces=False).in_parts(4)) == Held(8, 0)
        assert most_held(tasp(topology).in_parts(4)) == Held(8, 12)
    assert most_held(direct(Topology(4, 4), reduces=False)) == Held(5, 0)
    assert most_held(direct(Topology(4, 4))) == Held(5, 6)


def leased_at_once(ring: VirtualRing, mask: Mask) -> Counter[int]:
    """By size, the most buffers that any rank leases at once in a forward and a backward pass."""
    pools = [CountingPool() for _ in ring.rank_states]
    for rank_state, pool in zip(ring.rank_states, pools, strict=True):
        rank_state.transport.pool = pool
    q, k, v = (x.requires_grad_() for x in Problem.draw(96, (4, 4), dtype=torch.bfloat16)[:3])
    ring.attention(q, k, v, mask=mask)[0].sum().backward()
    assert not any(+pool.now for pool in pools)
    most: Counter[int] = Counter()
    for pool in pools:
        most |= pool.most
    return most


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("topology", [Topology(1, 2), Topology(1, 4), Topology(2, 2), Topology(2, 4)], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rings_lease_what_was_counted(schedule: str, topology: Topology, parts: int) -> None:
    """And less where a kernel call covers a block: what it gives waits where it is for the sum that comes."""
    strategy = Strategy(layout="striped", schedule=schedule, backward="kv", parts=parts)
    ring, whole = (
        VirtualRing(topology, strategy, network=CopyNetwork(topology.ranks, torch.device("cpu"))) for _ in range(2)
    )
    most = leased_at_once(ring, Causal())
    assert not leased_at_once(whole, Full()) - most
    counted = [most_held(SCHEDULES[schedule](topology, reduces, None).in_parts(parts)) for reduces in (False, True)]
    operands, sums = sorted(most)  # in bfloat16 and in float32
    assert (most[operands], most[sums]) == (max(held.operands for held in counted), counted[1].results)
    for rank_state in ring.rank_states:
        held = rank_state.transport.pool.allocated_bytes
        assert held <= most[operands] * operands + most[sums] * sums


def test_rows_are_let_go_of_when_they_have_been_worked_on() -> None:
    """What is visited, what comes next, and rows of its own block on their way out."""
    required = [{rank: None, **dict.fromkeys(range(rank), ((0, 1),))} for rank in range(6)]
    assert most_held(direct(Topology(1, 6), reduces=False, required=required)) == Held(3, 0)


def test_what_is_sent_by_rows_is_counted_while_it_is_on_its_way() -> None:
    """Rank 0 packs rows of its block for rank 1 at step 0 and for rank 2 at step 1, when the former have left."""
    required = [{0: None}, {1: None, 0: ((0, 1),)}, {2: None, 0: ((0, 2),)}]
    schedule = direct(Topology(1, 3), required=required)
    assert {t.rows for t in schedule.gather} == {((0, 1),), ((0, 2),)}
    assert most_held(schedule) == Held(1, 1)
    late = replace(
        schedule,
        visits=((0, None, None), (1, None, 0), (2, None, 0)),
        gather=tuple(t._replace(due=2) for t in schedule.gather),
        reduce=tuple(t._replace(issue=t.issue + 1, due=t.due + 1) for t in schedule.reduce),
    )
    assert most_held(late) == Held(2, 1)


@pytest.mark.parametrize("size", [(1, 9), (9, 1), (2, 9), (5, 4), (4, 7), (7, 3)])
def test_a_small_cluster_needs_as_many_buffers(size: tuple[int, int]) -> None:
    topology = Topology(*size)
    small = as_many_buffers(topology)
    assert small.ranks < topology.ranks
    for name, reduces, parts in itertools.product(SCHEDULES, (True, False), (1, 2, 4)):
        whole, part = (most_held(SCHEDULES[name](each, reduces).in_parts(parts)) for each in (topology, small))
        assert whole == part, (name, reduces, parts)
