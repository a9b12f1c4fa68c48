"""What a profile makes of open options: planned for a model's shapes, around what is set, the same on all ranks."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from burst_plugin import ContextParallel, Strategy, Topology, VirtualRing, burst_attention
from burst_plugin.planning.measured import choose, planned
from burst_plugin.profiling.cluster_profile import ClusterProfile, KernelRate, LinkRate, Model, device_name
from tests.support.ranks import run_ranks

PROFILE = ClusterProfile(
    nodes=2,
    ranks_per_node=4,
    device=device_name(),
    backend="gloo",
    intra=LinkRate(400e9, 1e-5),
    inter=LinkRate(20e9, 2e-5),
    nic="rank",
    kernel="torch_cpu",
    dtype="bfloat16",
    rates=(KernelRate(1024, 400e12, 300e12),),
    model=Model(32, 32, 128, 524288, "causal"),
    strategy={"schedule": "flat_ring"},
    why="",
    runner_up="",
)
CLUSTER = Topology(2, 4)


def chosen(profile: ClusterProfile, topology: Topology = CLUSTER, **options: Any) -> Strategy:
    return planned(Strategy.from_profile(profile.as_dict(), **options), topology)[0]


def test_a_run_is_planned_for_its_own_shapes() -> None:
    assert chosen(PROFILE) == Strategy(schedule="two_level_ring"), "computing hides all; not what the file says"
    short = chosen(PROFILE, model={"seq": 8192})
    assert short.ulysses_degree == 8, "links are what ranks wait for"
    grouped = chosen(PROFILE, model={"seq": 8192, "kv_heads": 8})
    assert (grouped.schedule, grouped.ulysses_degree) == ("two_level_ring", 1), "a quarter of the keys and values"
    assert grouped.parts != 1
    assert chosen(PROFILE, model={"seq": 8192, "kv_heads": 1}).parts == 1, "of one head there are no parts"


def test_the_choice_changes_with_the_links() -> None:
    slow = replace(PROFILE, inter=LinkRate(0.2e9, 2e-5))
    assert chosen(PROFILE).ulysses_degree == 1
    assert chosen(slow).ulysses_degree == 8, "an exchange of 32 heads sends the fewest bytes between nodes"
    even, uneven = (replace(PROFILE, intra=LinkRate(20e9, 1e-5), inter=LinkRate(each, 2e-5)) for each in (20e9, 2e9))
    sizes = {"seq": 8192, "kv_heads": 1}
    assert chosen(even, model=sizes).schedule == "direct"
    assert chosen(uneven, model=sizes).schedule == "two_level_ring"


def test_latency_decides_where_messages_are_short() -> None:
    """A ring of 4 nodes waits for 3 messages, one after the other, an exchange for one there and one back."""
    near, far = (replace(PROFILE, inter=LinkRate(20e9, each)) for each in (1e-9, 5e-3))
    sizes = {"seq": 8192, "kv_heads": 1}
    assert chosen(near, Topology(4, 2), model=sizes).ulysses_degree == 1
    assert chosen(far, Topology(4, 2), model=sizes).ulysses_degree == 8


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "flat_ring"},
        {"ulysses_degree": 2},
        {"parts": 8},
        {"parts": (1, 8)},
        {"forward": "kv", "backward": "kv"},
        {"forward": "q"},
        {"backward": "q", "parts": 2, "schedule": "direct"},
        {"check": "always", "mlp_chunk": 512, "kernel": "reference"},
    ],
)
def test_options_that_are_set_stay(options: dict[str, Any]) -> None:
    slow = replace(PROFILE, inter=LinkRate(0.2e9, 2e-5))
    found = chosen(slow, model={"kv_heads": 8}, **options)
    assert {name: getattr(found, name) for name in options} == options
    assert type(found) is Strategy
    assert found.schedule != "auto"


def test_what_is_set_is_planned_around() -> None:
    """In one part heads are exchanged, or not, by what one part costs."""
    model, slow = Model(32, 8, 128, 8192, "causal"), replace(PROFILE, inter=LinkRate(0.2e9, 2e-5))
    assert choose(slow, model, CLUSTER).strategy.ulysses_degree == 1, "of four parts"
    best = choose(slow, model, CLUSTER, {"schedule": "flat_ring", "parts": 1}).strategy
    assert (best.schedule, best.parts, best.ulysses_degree) == ("flat_ring", 1, 4), "which sends less than 8 blocks"


@pytest.mark.parametrize("options", [{"ulysses_degree": 3}, {"parts": 5}, {"parts": 16, "ulysses_degree": 4}])
def test_what_no_plan_can_have_is_refused(options: dict[str, Any]) -> None:
    asked = ", ".join(f"{name}={value}" for name, value in options.items())
    with pytest.raises(ValueError, match="no plan for 32 query and 32 key/value heads on 2x4") as refused:
        chosen(PROFILE, **options)
    assert all(f"{name}={value}" in str(refused.value) for name, value in options.items()), asked


def test_a_smaller_ring_is_planned_by_its_own_links() -> None:
    slow = replace(PROFILE, inter=LinkRate(0.2e9, 2e-5))
    assert chosen(slow, Topology(1, 4)).ulysses_degree == 1
    assert chosen(slow, Topology(1, 1)) == Strategy()
    with pytest.raises(ValueError, match=r"it was measured on 2x4 .*, and this is 1x8"):
        chosen(slow, Topology(1, 8))
    with pytest.raises(ValueError, match="3 is fewer tokens than the 8 ranks"):
        chosen(slow, model={"seq": 3})


def test_heads_in_chunks_are_planned_as_they_are_attended_to() -> None:
    """Of 4 of 32 heads there are no 8 shares of key/value heads, nor 4 parts of shares of two."""
    slow = replace(PROFILE, inter=LinkRate(0.2e9, 2e-5))
    assert chosen(slow, head_chunk=4) == replace(chosen(slow, model={"q_heads": 4, "kv_heads": 4}), head_chunk=4)


def test_the_choice_is_logged_with_the_runner_up_and_reasons(caplog: pytest.LogCaptureFixture) -> None:
    strategy = Strategy.from_profile(replace(PROFILE, inter=LinkRate(0.2e9, 2e-5)).as_dict(), model={"kv_heads": 8})
    with caplog.at_level(logging.INFO):
        found, said = planned(strategy, CLUSTER, logs=True)
        assert planned(strategy, CLUSTER) == (found, said)
    (line,) = (each.getMessage() for each in caplog.records)
    assert line == f"burst attention is {said}"
    best, _, runner_up = said.partition("; runner-up: ")
    assert best.startswith(
        "planned for 32/8 heads of 128 and 524288 tokens on 2x4 (nodes x ranks per node): Strategy("
    )
    for half in (best, runner_up):
        assert "ms for both passes of a layer, ranks wait for the links between nodes" in half
    assert "as fast, and less simple" in runner_up or "slower" in runner_up


def test_a_virtual_ring_is_planned_too() -> None:
    ring = VirtualRing(CLUSTER, Strategy.from_profile(PROFILE.as_dict()))
    assert ring.rank_states[0].strategy == chosen(PROFILE)


def _attend(rank: int, profile: dict[str, Any], other: dict[str, Any] | None) -> tuple[Strategy, str]:
    """Make a ring by a profile, of which rank 1 may have another, and attend on it."""
    mine = other if rank == 1 and other is not None else profile
    sizes = {"q_heads": 4, "kv_heads": 4, "head_dim": 16, "seq": 32}
    cp = ContextParallel(dist.group.WORLD, strategy=Strategy.from_profile(mine, model=sizes, ranks_per_node=1))
    x = torch.ones(1, 16, 4, 16)
    burst_attention(x, x, x, cp)
    return cp.strategy, cp.describe()["plan"]


def test_ranks_choose_the_same_or_are_told() -> None:
    apart = replace(PROFILE, ranks_per_node=1, intra=None, inter=LinkRate(1e6, 1e-3), dtype="float32")
    found = run_ranks(_attend, 2, apart.as_dict(), None)
    assert found[0] == found[1]
    assert found[0][0].ulysses_degree == 2
    fast = replace(apart, inter=LinkRate(1e15, 1e-15), rates=(KernelRate(1, 1e6, 1e6),))
    with pytest.raises(Exception, match="ulysses_degree=1"):
        run_ranks(_attend, 2, apart.as_dict(), fast.as_dict())
