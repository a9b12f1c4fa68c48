"""`ContextParallel`: what it is made of, which nodes it finds, and what it refuses."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from burst_plugin import Causal, ContextParallel, Strategy, Topology, VirtualRing, burst_attention
from burst_plugin.comm.call_identity import CallId
from burst_plugin.comm.torch_distributed import DistributedTransport
from burst_plugin.ring import connections
from tests.support.exactness import train_step
from tests.support.ranks import run_ranks
from tests.support.reference import Problem, Result, errors, reference, relative


@pytest.fixture
def cp() -> ContextParallel:
    return ContextParallel()


def test_one_rank_needs_no_group(cp: ContextParallel) -> None:
    problem = Problem.draw(16, (4, 2))
    x = torch.arange(16).view(1, 16)
    assert torch.equal(cp.unshard(cp.shard(x)), x)
    assert cp.positions(16).tolist() == list(range(16))
    out, lse = burst_attention(*problem[:3], cp, return_lse=True)
    assert relative(out, reference(problem, Causal()).out) < 1e-6
    assert lse.shape == (2, 4, 16)
    assert lse.dtype == torch.float32
    assert cp.traffic() == cp.expected_traffic() == {k: {"gather": 0, "reduce": 0} for k in ("intra", "inter")}
    assert cp.describe()["topology"].startswith("1x1")
    assert "nccl_buffers" not in cp.describe()
    with mock.patch.object(DistributedTransport, "backend_bytes", 3 * 2**20):
        assert cp.describe()["nccl_buffers"] == "6 MiB", "of the ring, and of the exchange of heads"


def test_options_are_checked_at_once() -> None:
    with pytest.raises(ValueError, match="use one of: zigzag, striped, contiguous"):
        ContextParallel(layout="spiral")
    with pytest.raises(ValueError, match="got strategy= and also backward"):
        ContextParallel(strategy=Strategy(), backward="q")
    with pytest.raises(ValueError, match="multiplies to 4"):
        ContextParallel(hierarchy=[2, 2])


def test_a_model_with_a_ring_can_be_copied_but_not_saved_whole(cp: ContextParallel) -> None:
    """Copied for a moving average of its weights, or as the reference of a preference loss."""
    model = torch.nn.Linear(2, 2)
    model.cp = cp  # type: ignore[assignment]
    assert copy.deepcopy(model).cp is cp
    assert copy.copy(cp) is cp
    with pytest.raises(TypeError, match=r"a ContextParallel cannot be saved .*state_dict\(\)"):
        pickle.dumps(model)


def test_a_virtual_ring_is_one_ring_in_every_copy_too() -> None:
    ring = VirtualRing(Topology(1, 2))
    assert copy.copy(ring) is copy.deepcopy([ring])[0] is ring
    with pytest.raises(TypeError, match=r"a VirtualRing cannot be saved .*state_dict\(\)"):
        pickle.dumps(ring)


def test_unshard_refuses_to_lose_a_gradient(cp: ContextParallel) -> None:
    x = torch.zeros(1, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"pass loss='same' if .*x\.detach\(\)"):
        cp.unshard(x)
    with torch.no_grad():
        cp.unshard(x)


def test_entering_twice_at_once_is_refused(cp: ContextParallel) -> None:
    with (
        cp.rank_state.one_pass("forward", CallId(1), torch.device("cpu")),
        pytest.raises(RuntimeError, match="while another of its passes"),
    ):
        burst_attention(*Problem.draw(8, (2, 2))[:3], cp)


def _hierarchy(rank: int) -> Topology:
    return ContextParallel(dist.group.WORLD, hierarchy=[3, 2]).topology


def test_the_first_size_of_a_hierarchy_is_that_of_a_node() -> None:
    assert run_ranks(_hierarchy, 6) == [Topology(2, 3)] * 6


def _detected(rank: int, nodes: str) -> tuple[Topology, list[str]]:
    connections.node_id = lambda: nodes[rank]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cp = ContextParallel(dist.group.WORLD)
    return cp.topology, [str(w.message) for w in told if "not spread evenly" in str(w.message)]


def test_nodes_are_detected_and_uneven_ones_told_of() -> None:
    assert run_ranks(_detected, 4, "aabb") == [(Topology(2, 2), [])] * 4
    outcomes = run_ranks(_detected, 4, "abab")
    assert [topology for topology, _ in outcomes] == [Topology(1, 4)] * 4
    assert [len(told) for _, told in outcomes] == [1, 0, 0, 0]


def _on_unlike_nodes(rank: int, nodes: str, problem: Problem, truth: Result) -> tuple[Any, ...]:
    """The topology of a ring on such nodes; that of two levels, or why there is none, asked for by all and by one.

    And warnings, and the largest error.
    """
    connections.node_id = lambda: nodes[rank]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cp = ContextParallel(dist.group.WORLD)
    warned, levels = len([w for w in told if "not spread evenly" in str(w.message)]), []
    for asks in (True, rank == 2):
        try:
            two = ContextParallel(dist.group.WORLD, schedule="two_level_ring" if asks else "auto")
            levels.append(two.describe()["topology"])
        except ValueError as error:
            levels.append(str(error))
    return cp.topology, levels, warned, max(errors(train_step(cp, problem), truth).values())


def test_nodes_of_unlike_size_are_run_and_two_levels_of_them_refused_on_every_rank() -> None:
    problem = Problem.draw(48, (4, 2))
    truth = reference(problem, Causal())
    found = run_ranks(_on_unlike_nodes, 8, "aaabbbbb", problem, truth)
    for topology, levels, _, wrong in found:
        assert topology == Topology(1, 8)
        for refused in levels:
            assert "schedule='two_level_ring' needs nodes with equally many ranks" in refused
            assert "here nodes have 3 and 5 ranks: use schedule='auto', which is one flat ring then, " in refused
            assert "a group with 3 ranks of each node, or say with ranks_per_node" in refused
        assert wrong < 2e-6
    assert [warned for _, _, warned, _ in found] == [1] + [0] * 7
    for topology, levels, warned, wrong in run_ranks(_on_unlike_nodes, 6, "aaaabb", problem, truth):
        assert (topology, levels, warned) == (Topology(3, 2), [str(Topology(3, 2))] * 2, 0)
        assert wrong < 2e-6


def _reset(rank: int) -> tuple[Any, Any]:
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=2)
    x = torch.zeros(1, 16, 4, 8)
    burst_attention(x, x, x, cp)
    assert cp.traffic()["intra"]["gather"] > 0
    cp.reset_traffic()
    return cp.traffic(), cp.expected_traffic()


def test_reset_traffic_resets_both_counts() -> None:
    nothing = {link: {"gather": 0, "reduce": 0} for link in ("intra", "inter")}
    assert run_ranks(_reset, 2) == [(nothing, nothing)] * 2
