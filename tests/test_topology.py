"""Ranks on nodes: places, links, and topologies made of sizes and of node ids."""

from __future__ import annotations

import pytest

from burst_plugin import Link, Topology
from burst_plugin.topology import Groups, node_sizes


def test_places_and_links() -> None:
    topology = Topology(nodes=2, ranks_per_node=4)
    assert topology.ranks == 8
    assert [topology.node(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [topology.local_rank(rank) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert topology.link(0, 3) is Link.INTRA
    assert topology.link(3, 4) is Link.INTER
    assert topology.node_peers(5) == (4, 5, 6, 7)
    assert topology.counterparts(5) == (1, 5)
    assert topology.rank(node=3, local_rank=-1) == 7


@pytest.mark.parametrize(
    ("groups", "members", "rings", "ring"),
    [
        (Groups(Topology(2, 4), 2), "01 23 45 67", "0246 1357", Topology(2, 2)),
        (Groups(Topology(2, 4), 2, apart=True), "04 15 26 37", "0123 4567", Topology(1, 4)),
        (Groups(Topology(2, 4), 4, apart=True), "0246 1357", "01 23 45 67", Topology(1, 2)),
        (Groups(Topology(4, 2), 2, apart=True), "04 15 26 37", "0123 4567", Topology(2, 2)),
        (Groups(Topology(2, 3), 2, apart=True), "03 14 25", "012 345", Topology(1, 3)),
        (Groups(Topology(1, 4), 4, apart=True), "0123", "0 1 2 3", Topology(1, 1)),
        (Groups(Topology(2, 2), 1, apart=True), "0 1 2 3", "0123", Topology(2, 2)),
    ],
    ids=str,
)
def test_ranks_in_groups_and_in_rings(groups: Groups, members: str, rings: str, ring: Topology) -> None:
    def written(ranges: list[range]) -> str:
        return " ".join("".join(map(str, ranks)) for ranks in ranges)

    assert written([groups.members(group) for group in range(groups.ring_size)]) == members
    assert written([groups.ring(place) for place in range(groups.size)]) == rings
    assert groups.ring_topology == ring
    for rank in range(groups.topology.ranks):
        group, place = groups.of(rank)
        assert groups.members(group)[place] == groups.ring(place)[group] == rank


def test_rings_of_neighbours_that_would_straddle_nodes_are_refused_with_what_can_be_had() -> None:
    with pytest.raises(ValueError, match=r"ulysses_degree=2 does not divide 3x2 .*; use one of \[1, 3, 6\]"):
        _ = Groups(Topology(3, 2), 2, apart=True).ring_topology


@pytest.mark.parametrize(
    ("hierarchy", "expected"),
    [
        ([8], Topology(1, 8)),
        ([1, 8], Topology(1, 8)),
        ([2, 4], Topology(4, 2)),
        ([4, 2], Topology(2, 4)),
        ([2, 2, 2], Topology(4, 2)),
        ([8, 1], Topology(1, 8)),
    ],
)
def test_hierarchy_is_innermost_first(hierarchy: list[int], expected: Topology) -> None:
    assert Topology.from_sizes(8, hierarchy) == expected


@pytest.mark.parametrize(
    ("hierarchy", "ranks_per_node", "message"),
    [
        ([2, 2], None, r"hierarchy=\[2, 2\] multiplies to 4, but .* 8 ranks"),
        ([], None, r"hierarchy=\[\] has no sizes; give them, innermost first, such as \[8\], or None"),
        ([2, -4], None, "multiplies to -8"),
        ([2, 2, 2, 1], None, "4 levels"),
        ([2, 4], 4, "contradicts hierarchy=.2, 4."),
        (None, 3, "ranks_per_node=3 does not divide the 8 ranks"),
        (None, 0, "ranks_per_node=0 does not divide"),
    ],
)
def test_sizes_that_do_not_fit_are_named(
    hierarchy: list[int] | None, ranks_per_node: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Topology.from_sizes(8, hierarchy, ranks_per_node)


def test_matching_ranks_per_node_beside_hierarchy_is_no_contradiction() -> None:
    assert Topology.from_sizes(8, [2, 4], 2) == Topology(4, 2)


def test_nodes_are_found_from_node_ids() -> None:
    assert Topology.from_node_ids(["a", "a", "b", "b"]) == Topology(2, 2)
    assert Topology.from_node_ids(["a"] * 4) == Topology(1, 4)
    assert Topology.from_node_ids(["a", "b", "c"]) == Topology(3, 1)


@pytest.mark.parametrize(
    ("ids", "expected"), [("aaaabb", (3, 2)), ("aabbbbbb", (4, 2)), ("aaabbbbbb", (3, 3)), ("aaaabbbbbbcc", (6, 2))]
)
def test_nodes_of_unlike_size_count_as_several_of_one_size(ids: str, expected: tuple[int, int]) -> None:
    assert Topology.from_node_ids(list(ids)) == Topology(*expected)


@pytest.mark.parametrize("ids", ["aab", "aaabbbbb", "abab", "aabba"], ids=["2+1", "3+5", "interleaved", "split"])
def test_nodes_that_no_size_divides_are_not_a_topology(ids: str) -> None:
    assert Topology.from_node_ids(list(ids)) is None


def test_sizes_of_nodes() -> None:
    assert node_sizes("aaabbbbb") == [3, 5]
    assert node_sizes("aba") == []


def test_empty_topology_is_refused() -> None:
    with pytest.raises(ValueError, match="nodes=0"):
        Topology(0, 4)
