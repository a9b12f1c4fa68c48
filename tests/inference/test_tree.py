"""The tree: what each rank has after every round, and the bytes."""

from __future__ import annotations

import pytest
import torch

from burst_plugin import Topology
from burst_plugin.comm.in_process import HostileNetwork
from burst_plugin.comm.transport import RingError
from burst_plugin.inference import decode_bytes
from burst_plugin.inference.tree import Partial, Round, merge_in_tree, merge_rounds
from burst_plugin.ring.executor import lockstep
from burst_plugin.topology import Link

TOPOLOGIES = [Topology(n, w) for n in (1, 2, 3, 4, 5) for w in (1, 2, 3, 6, 7, 8)]


def merged(topology: Topology) -> list[str]:
    """What every rank has in the end, as a text that shows in which order it was merged."""
    waiting: dict[tuple[int, int], list[str]] = {}
    has = [str(rank) for rank in range(topology.ranks)]
    left = [list(merge_rounds(topology, rank)) for rank in range(topology.ranks)]
    posted = [False] * topology.ranks
    while any(left):
        moved = False
        for rank, rounds in enumerate(left):
            if not rounds:
                continue
            each = rounds[0]
            if each.sends and not posted[rank]:
                waiting.setdefault((rank, each.peer), []).append(has[rank])
                posted[rank] = moved = True
            arrived = waiting.get((each.peer, rank))
            if each.receives and not arrived:
                continue
            if each.receives and arrived:
                got = arrived.pop(0)
                pair = (has[rank], got) if rank < each.peer else (got, has[rank])
                has[rank] = got if each.is_final else f"({pair[0]} {pair[1]})"
            rounds.pop(0)
            posted[rank], moved = False, True
        assert moved, "every rank waits"
    assert not any(waiting.values())
    return has


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_all_ranks_have_the_same_in_the_same_order(topology: Topology) -> None:
    has = merged(topology)
    assert len(set(has)) == 1
    assert sorted(map(int, has[0].replace("(", "").replace(")", "").split())) == list(range(topology.ranks))


def test_the_rounds_of_two_nodes_of_three() -> None:
    assert merge_rounds(Topology(2, 3), 0) == (
        Round(2, Link.INTRA, sends=False),
        Round(1, Link.INTRA),
        Round(2, Link.INTRA, receives=False),
        Round(3, Link.INTER),
    )
    assert merged(Topology(2, 3))[0] == "(((0 2) 1) ((3 5) 4))"


def test_bytes_are_those_of_one_message_per_level() -> None:
    """One token of 32 heads of 128: 16 KiB of out, 128 bytes of lse, and a label."""
    message = 4 * 32 * 128 + 4 * 32 + 16
    assert decode_bytes(Topology(4, 8), 5, (1, 1, 32, 128), torch.bfloat16) == {
        "intra": 3 * message,
        "inter": 2 * message,
    }
    assert decode_bytes(Topology(1, 3), 2, (1, 1, 32, 128)) == {"intra": message, "inter": 0}


def test_a_rank_at_another_call_is_found() -> None:
    transports = HostileNetwork(2).transports()
    partial = Partial(torch.ones(1, 1, 2, 4), torch.zeros(1, 2, 1))
    programs = [
        merge_in_tree(each, Topology(1, 2), rank, partial, torch.full((16,), rank, dtype=torch.uint8))
        for rank, each in enumerate(transports)
    ]
    with pytest.raises(RingError, match="what it sent belongs to another call"):
        lockstep(programs)
