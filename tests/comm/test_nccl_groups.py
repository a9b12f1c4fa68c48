"""Which communicators a ring makes with NCCL, and with which options; none of them moves anything."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from burst_plugin.comm.process_groups import Communicators, ctas_of, new_group_like
from burst_plugin.topology import Link
from tests.support.nccl_groups import Config, NcclGroup, Options, nccl


@pytest.mark.parametrize(
    ("config", "max_ctas", "found"),
    [
        (Config(), 8, 8),
        (Config(), 0, 0),
        (Config(max_ctas=16), 8, 16),  # which the framework was told
        (Config(min_ctas=12), 8, 12),
        (SimpleNamespace(), 8, 0),  # of a PyTorch that cannot be told
    ],
    ids=str,
)
def test_ctas_are_limited_where_nothing_else_limits_them(config: Config, max_ctas: int, found: int) -> None:
    group = NcclGroup(range(8), Options(config=config))
    before = vars(config).copy()
    with nccl():
        made = new_group_like(group, range(4), "ours", max_ctas)  # type: ignore[arg-type]
        assert ctas_of(made) == found
    assert vars(config) == before, "those of the given group stay"


@pytest.mark.parametrize(("max_ctas", "found"), [(8, {8, 4}), (2, {2}), (0, {0})])
def test_between_nodes_ctas_are_as_few_as_nccl_takes(max_ctas: int, found: set[int]) -> None:
    with nccl() as made:
        groups = Communicators([NcclGroup(range(8))], range(8), max_ctas)  # type: ignore[list-item]
        groups.connect({Link.INTRA: (0, 1, 2, 3), Link.INTER: (0, 4)}, True, "mark")
        assert {ctas_of(group) for group in made} == found  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("priority", "limit", "max_ctas", "serves"),
    [(False, 8, 8, False), (True, 8, 8, True), (True, -1, 8, False), (True, -1, 0, True), (False, -1, 0, False)],
)
def test_gather_traffic_has_a_stream_of_high_priority(
    priority: bool, limit: int, max_ctas: int, serves: bool
) -> None:
    given = NcclGroup(range(4), Options(priority, Config(max_ctas=limit)))
    with nccl() as made:
        groups = Communicators([given], range(4), max_ctas)  # type: ignore[list-item]
        groups.connect(dict.fromkeys(Link, (0, 1, 2, 3)), False, "mark")
        assert [group.name.split("_")[1] for group in made] == ["REDUCE"] if serves else ["GATHER", "REDUCE"]
        assert all(group.options.is_high_priority_stream for group in made)
    assert len(set(groups.values())) == 2
    assert (given in groups.values()) == serves
