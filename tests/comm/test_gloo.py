"""Real processes and gloo: exactness, bytes on the wire, the order of posts and waits, and what goes wrong."""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

import burst_plugin
from burst_plugin import (
    Causal,
    ContextParallel,
    Documents,
    Full,
    Link,
    Scores,
    Strategy,
    Topology,
    burst_attention,
    shard_batch,
    two_level_ring,
)
from burst_plugin.comm.consistency import EXCHANGE_BYTES, ConsistencyCheck
from burst_plugin.comm.process_groups import warm_up
from burst_plugin.kernels.torch_cpu import TorchCpuKernel
from burst_plugin.profiling.summary import Event
from burst_plugin.ring import connections
from burst_plugin.ring.plan import Plan
from burst_plugin.schedule.rings import SCHEDULES
from burst_plugin.sequence.layout import Tokens
from tests.support.exactness import RINGS, ring_errors, train_step
from tests.support.ranks import as_on_gpus, last_lines, run_ranks, run_ranks_outcomes
from tests.support.reference import Problem, Result, errors, reference

# ------------------------------------------------------------------------------------------------- exactness


def _exactness_of_both(rank: int, options: dict[str, Any], problem: Problem, truth: Result) -> list[dict[str, float]]:
    """Return the errors where queries move in the backward pass, and where keys and values do."""
    return [ring_errors(Strategy(backward=side, **options), problem, truth) for side in ("q", "kv")]


@pytest.mark.parametrize(("ranks", "options"), RINGS, ids=str)
def test_exact_over_gloo(ranks: int, options: dict[str, Any]) -> None:
    problem = Problem.draw(2 * ranks * 3, (4, 2))
    for found in run_ranks(_exactness_of_both, ranks, options, problem, reference(problem, Causal())):
        assert all(max(each.values()) < 2e-6 for each in found), found


def _own_kernel(rank: int, problem: Problem, truth: Result) -> dict[str, float]:
    apart = [TorchCpuKernel() for _ in range(1 + 9 * rank)]  # so that the same object lies elsewhere on every rank
    return ring_errors(Strategy(ranks_per_node=2, kernel=apart[-1]), problem, truth)


def test_a_kernel_of_ones_own_is_the_same_one_on_all_ranks() -> None:
    problem = Problem.draw(24, (4, 2))
    for found in run_ranks(_own_kernel, 2, problem, reference(problem, Causal())):
        assert max(found.values()) < 2e-6, found


def _unlike_groups(rank: int, problem: Problem, truth: Result) -> list[dict[str, float]]:
    backends = [None, "cpu:gloo", "gloo"]
    groups = [dist.new_group([0, 1], backend=backend) for backend in backends]
    return [errors(train_step(ContextParallel(group, ranks_per_node=2), problem), truth) for group in groups]


def test_a_group_may_name_its_backend_by_device() -> None:
    problem = Problem.draw(24, (4, 2))
    for found in run_ranks(_unlike_groups, 2, problem, reference(problem, Causal())):
        assert all(max(each.values()) < 2e-6 for each in found), found


def _several_groups(rank: int, problem: Problem, truth: Result) -> tuple[dict[str, float], int, bool]:
    """Two groups of two among four ranks, used in turn with one of all four that has hierarchical groups."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    levels = [pairs[rank // 2], [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]]
    before = len(dist.distributed_c10d._world.pg_map)
    pair = ContextParallel(pairs[rank // 2], ranks_per_node=2)
    everyone = ContextParallel(dist.group.WORLD, hierarchy=levels)
    assert everyone.topology == burst_plugin.Topology(2, 2)
    worst: dict[str, float] = {}
    with mock.patch("burst_plugin.comm.process_groups.warm_up", side_effect=warm_up) as warmed:
        for cp in (pair, everyone, pair, everyone):
            for name, error in errors(train_step(cp, problem), truth).items():
                worst[name] = max(error, worst.get(name, 0.0))
    made = len(dist.distributed_c10d._world.pg_map) - before
    return worst, made, [call.args[0] for call in warmed.call_args_list if call.args[0] in levels] == levels


def test_groups_beside_each_other_and_reuse_of_the_frameworks_own() -> None:
    problem = Problem.draw(32, (4, 2))
    for worst, made, warmed in run_ranks(_several_groups, 4, problem, reference(problem, Causal())):
        assert max(worst.values()) < 2e-6
        assert warmed, "the framework may not have used its groups yet"
        assert made == 3, "one reduce group for the pair, two for the whole; gather groups are the framework's"


def _one_ring_after_another(
    rank: int, problem: Problem, truth: Result
) -> tuple[float, list[int], list[int], str, str]:
    """How far off three rings are, groups and open files when each has been closed, and what a closed one says."""
    worst, groups, files = 0.0, [], []
    for _ in range(3):
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=2, ulysses_degree=2)
        worst = max(worst, *errors(train_step(cp, problem), truth).values())
        q, k, v = (cp.shard(x).requires_grad_() for x in problem[:3])
        out = burst_attention(q, k, v, cp)
        assert cp.allocated_bytes() > 0
        cp.close()
        cp.close()
        assert cp.allocated_bytes() == 0
        groups.append(len(dist.distributed_c10d._world.pg_map))
        dist.barrier()
        gc.collect()  # what an earlier ring consists of refers to each other
        files.append(len(os.listdir("/proc/self/fd")))
    said = []
    for late in (lambda: burst_attention(q, k, v, cp), lambda: out.sum().backward()):  # type: ignore[union-attr]
        try:
            late()
        except RuntimeError as error:
            said.append(str(error))
    return worst, groups, files, *said  # type: ignore[return-value]


def test_closed_rings_leave_nothing_behind_and_say_that_they_are_closed() -> None:
    problem = Problem.draw(32, (4, 2))
    for worst, groups, files, *said in run_ranks(_one_ring_after_another, 4, problem, reference(problem, Causal())):
        assert worst < 2e-6
        assert groups == [1] * 3, "only the world is left"
        assert files[1:] == files[:-1], "and no connections"
        assert [text.split(";")[0] for text in said] == ["this ContextParallel is closed"] * 2


_meet_neighbours = connections.Connections.meet_neighbours


def _as_with_nccl(rank: int, problem: Problem, truth: Result, options: dict[str, int]) -> tuple[float, bool]:
    """What a ring does besides where the backend launches batches of messages as one."""
    meet = mock.patch.object(connections.Connections, "meet_neighbours", autospec=True, side_effect=_meet_neighbours)
    with mock.patch.object(connections, "launches_batches", return_value=True), meet as met:
        cp = ContextParallel(dist.group.WORLD, **options)
        worst = max(errors(train_step(cp, problem), truth).values())
    assert met.call_count == len(cp.created_groups and {channel.by_link for channel in cp.connections.communicators})
    assert cp.traffic() == cp.expected_traffic()
    groups = [*cp.connections.communicators.items(), *cp.rank_state.ulysses_transport._groups.items()]  # type: ignore[attr-defined]
    for channel, group in groups:
        if channel.link is Link.INTRA:
            assert len({cp.topology.node(peer) for peer in dist.get_process_group_ranks(group)}) == 1
    there = any(thread.name == "burst_plugin watch" for thread in threading.enumerate())
    cp.close()
    return worst, there


@pytest.mark.parametrize(
    "options",
    [
        {"ranks_per_node": 2},
        {"ranks_per_node": 4},
        {"ulysses_degree": 2},
        {"ranks_per_node": 2, "ulysses_degree": 2},
        {"ranks_per_node": 2, "mesh_degree": 2},
        {"ranks_per_node": 2, "schedule": "flat_ring"},
    ],
    ids=str,
)
def test_ranks_connect_while_all_are_there_and_watch_for_one_that_gives_up(options: dict[str, int]) -> None:
    problem = Problem.draw(32, (4, 2))
    for worst, there in run_ranks(_as_with_nccl, 4, problem, reference(problem, Causal()), options):
        assert worst < 2e-6
        assert there


def _closed_in_finally(rank: int) -> str:
    """Rank 1 fails between two calls, and closes its ring on the way out, as a `with` block would."""
    cp = ContextParallel(dist.group.WORLD)
    x = torch.randn(1, 16, 4, 8)
    burst_attention(x, x, x, cp)
    try:
        if rank == 1:
            raise KeyError("of rank 1's own")
        burst_attention(x, x, x, cp)
    finally:
        if rank == 1:
            with mock.patch.object(connections, "barrier", side_effect=AssertionError("the other does not come")):
                cp.close()
    return "done"


def test_closing_a_ring_while_an_exception_is_handled_waits_for_nobody() -> None:
    outcomes = run_ranks_outcomes(_closed_in_finally, 2, timeout_s=30.0)
    assert "KeyError: " in outcomes[1].error
    assert "AssertionError" not in outcomes[1].error
    assert "RingError: rank 1" in outcomes[0].error


def _broken_and_on(rank: int) -> list[str]:
    """Rank 1 runs out of memory in a pass, passes over the batch, and goes on to the next."""
    cp = ContextParallel(dist.group.WORLD)
    x, said = torch.randn(1, 16, 4, 8), []
    burst_attention(x, x, x, cp)
    with mock.patch.object(TorchCpuKernel, "forward", side_effect=MemoryError("no room")) if rank else nullcontext():
        for step in (lambda: burst_attention(x, x, x, cp), lambda: cp.agree({})):
            try:
                step()
            except (MemoryError, RuntimeError) as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.alone
def test_a_broken_ring_does_not_come_to_the_next_comparison() -> None:
    """Where the others wait for its part of the pass, on GPUs without a word."""
    first, second = run_ranks(_broken_and_on, 2, timeout_s=30.0)
    assert second[0] == "MemoryError: no room"
    assert second[1].startswith("RuntimeError: an earlier call on this ring was left half way (MemoryError")
    assert first[0].startswith("RingError: rank 1 gave up: MemoryError: no room")


def _cut_by_a_worker(rank: int) -> str:
    cp = ContextParallel(dist.group.WORLD)
    batches = DataLoader([torch.arange(16)] * 2, num_workers=1, collate_fn=lambda rows: _cut(rows, cp), timeout=20)
    try:
        next(iter(batches))
    except RuntimeError as error:
        return str(error)
    return "done"


def _cut(rows: list[Tensor], cp: ContextParallel) -> Tensor:
    found: Tensor = shard_batch({"input_ids": torch.stack(rows)}, cp)["input_ids"]
    return found


def test_a_data_loaders_worker_is_told_where_batches_are_cut() -> None:
    for said in run_ranks(_cut_by_a_worker, 2, timeout_s=50.0):
        assert "cut batches in the training loop" in said


# ------------------------------------------------------------------------------------------- bytes on the wire


def _sent_bytes(rank: int, strategy: Strategy, heads: tuple[int, int]) -> tuple[int, dict[str, dict[str, int]], str]:
    """What process groups were given to send in one training step, consistency apart."""
    sent = Counter[str]()
    original = dist.ProcessGroup.send

    def count(group: dist.ProcessGroup, tensors: list[Tensor], *to: int) -> dist.Work:
        sent["bytes"] += sum(tensor.nbytes for tensor in tensors)
        return original(group, tensors, *to)

    dist.ProcessGroup.send = count  # type: ignore[method-assign, assignment]
    cp = ContextParallel(dist.group.WORLD, strategy=strategy)
    problem = Problem.draw(64, heads, dim=16)
    train_step(cp, problem)
    consistency = (
        7 * (cp.ranks - 1) * EXCHANGE_BYTES
    )  # to connect, before both passes, and to look at out, dq, dk, dv
    return sent["bytes"] - consistency, cp.traffic(), cp.describe()["backward"]


@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("schedule", ["flat_ring", "two_level_ring", "tasp"])
def test_bytes_on_the_wire_are_those_of_the_schedule(schedule: str, backward: str) -> None:
    ranks, per_node = 4, 2
    parts = 2 if schedule == "tasp" else 1
    strategy = Strategy(schedule=schedule, backward=backward, ranks_per_node=per_node, parts=parts)
    outcomes = run_ranks(_sent_bytes, ranks, strategy, (4, 2))
    rows, q, kv, lse = 2 * (64 // ranks), 4 * 16 * 4, 2 * 16 * 4, 4 * 4  # per row of a block, bytes of float32
    q, kv, lse = q // parts, kv // parts, lse // parts
    label = 16
    forward_hop = label + rows * 2 * kv
    backward_hop = {
        "kv": (label + rows * 2 * kv, label + rows * 2 * kv),
        "q": (label + rows * (2 * q + 2 * lse), label + rows * q),
    }[backward]
    for rank, (sent, traffic, _) in enumerate(outcomes):
        plan = SCHEDULES[schedule](Topology(2, per_node), True, None).in_parts(parts).hops(rank)
        expected = {
            link.value: {
                "gather": plan[link][burst_plugin.Traffic.GATHER] * (forward_hop + backward_hop[0]),
                "reduce": plan[link][burst_plugin.Traffic.REDUCE] * backward_hop[1],
            }
            for link in burst_plugin.Link
        }
        assert traffic == expected
        assert sent == sum(sum(kinds.values()) for kinds in expected.values())


@pytest.mark.parametrize(("heads", "expected"), [((32, 32), "q"), ((32, 8), "kv")])
def test_the_chosen_traveller_is_the_one_with_fewer_bytes(heads: tuple[int, int], expected: str) -> None:
    sent = {}
    for backward in ("auto", "q", "kv"):
        outcomes = run_ranks(_sent_bytes, 2, Strategy(backward=backward), heads)
        sent[backward] = outcomes[0][0]
        if backward == "auto":
            assert {chosen for _, _, chosen in outcomes} == {expected}
    assert sent["auto"] == min(sent["q"], sent["kv"]) < max(sent["q"], sent["kv"])


# ------------------------------------------------------------------------------------------------------ overlap


def _events(rank: int, nodes: int) -> list[Event]:
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=dist.get_world_size() // nodes)
    problem = Problem.draw(64, (4, 2))
    train_step(cp, problem)
    with cp.profile() as profile:
        train_step(cp, problem)
    assert cp.rank_state.profile is None
    return profile.events


def test_posts_come_before_the_kernel_that_hides_them_and_waits_after_it() -> None:
    """Of every rank's events: what step t+1 needs is posted before the kernel of step t and waited for after it;
    what crosses between nodes has the kernels of a whole inner ring (backward, at first, of half of one) between.
    """
    schedules = {"forward": two_level_ring(Topology(2, 2), False), "backward": two_level_ring(Topology(2, 2), True)}
    for rank, events in enumerate(run_ranks(_events, 4, 2)):
        for direction, schedule in schedules.items():
            mine = [event for event in events if event.direction == direction and event.kind != "move"]
            assert [e.start_s for e in mine] == sorted(e.start_s for e in mine)
            order = [(e.kind, e.step, e.link) for e in mine]
            steps, visits = schedule.of_rank(rank).steps, len(schedule.visits[rank])
            posts = [("post", s, t.link.value) for s, step in enumerate(steps) for t in step.issue]
            waits = [("wait", s, t.link.value) for s, step in enumerate(steps) for t in step.due]
            assert set(order) == {*posts, *waits, *(("kernel", s, "") for s in range(visits))}
            due = {(e.step, e.traffic, e.link, e.due) for e in mine if e.kind == "post"}
            assert due == {
                (s, t.traffic.value, t.link.value, t.due) for s, step in enumerate(steps) for t in step.issue
            }
            for step in steps:
                for t in step.issue:
                    hidden_behind = [s for s in range(t.issue, t.due) if s < visits]
                    post, wait = (
                        order.index((kind, s, t.link.value)) for kind, s in (("post", t.issue), ("wait", t.due))
                    )
                    for kernel in (order.index(("kernel", s, "")) for s in hidden_behind):
                        assert post < kernel < wait
    crossing = [t for t in schedules["forward"].gather if t.link is Link.INTER]
    assert {(t.issue, t.due) for t in crossing} == {(0, 2)}, "the whole inner ring"


# ------------------------------------------------------------------------------------------------ what goes wrong


def _attend_with(rank: int, changes: dict[int, dict[str, Any]]) -> None:
    """One rank's call differs from the others'."""
    options = {"tokens": 16, "heads": 4, "dtype": torch.float32, "scale": None, "ranks_per_node": 2, "kernel": "auto"}
    options |= {"mask": Causal(), "forward": "kv", **changes.get(rank, {})}
    strategy = Strategy(**{name: options[name] for name in ("ranks_per_node", "kernel", "forward")})
    cp = ContextParallel(dist.group.WORLD, strategy=strategy)
    moved = Counter[int]()

    def counted(original: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
        def count(group: dist.ProcessGroup, tensors: list[Tensor], *peer_and_tag: int) -> dist.Work:
            moved.update(tensor.nbytes for tensor in tensors)
            return original(group, tensors, *peer_and_tag)

        return count

    for name in ("send", "recv"):
        setattr(dist.ProcessGroup, name, counted(getattr(dist.ProcessGroup, name)))
    x = torch.zeros(1, options["tokens"], options["heads"], 8, dtype=options["dtype"])
    try:
        burst_attention(x, x, x, cp, mask=options["mask"], scores=Scores(scale=options["scale"]))
    finally:
        assert set(moved) <= {EXCHANGE_BYTES}, "attention data moved before the error"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({2: {"tokens": 32}}, "rank 0, 1, 3: query tokens=Tokens(length=64)"),
        ({1: {"heads": 2}}, "rank 1: q_heads=2, kv_heads=2"),
        ({3: {"dtype": torch.bfloat16}}, "rank 3: dtype=torch.bfloat16"),
        ({0: {"scale": 0.5}}, "rank 0: scores=Scores(scale=0.5"),
        ({1: {"mask": Full()}}, "rank 1: mask=Full(); rank 0, 2, 3: mask=Causal()"),
        ({0: {"ranks_per_node": 4}}, "rank 0: topology=1x4"),
        ({0: {"kernel": "reference"}}, "rank 0: kernel in use=reference, kernel=reference"),
        ({1: {"forward": "both"}}, "rank 1: forward moving=kv and q"),
        ({0: {"ranks_per_node": "auto"}, 2: {"ranks_per_node": "auto"}}, "only some ask for nodes to be detected"),
        ({2: {"tokens": 15}}, "rank 2: query tokens=Tokens(length=60)"),
    ],
    ids=str,
)
def test_disagreement_is_one_clear_error_on_every_rank(changes: dict[int, dict[str, Any]], message: str) -> None:
    lines = last_lines(_attend_with, 4, changes)
    if "only some" in message:  # those that did not ask see it when they first compare calls
        assert all("ranks of the context-parallel group disagree" in line for line in lines)
        assert any(message in line for line in lines)
        return
    for line in lines:
        assert message in line


def _wrong_group(rank: int, kind: str) -> None:
    group = dist.new_group([0])
    if kind == "outsider":
        ContextParallel(group if rank else dist.group.WORLD, ranks_per_node=1)
    else:
        ContextParallel(dist.group.WORLD, hierarchy=[2, 2])


def test_a_group_this_rank_is_not_in_is_refused() -> None:
    assert "is not in the group it was given" in last_lines(_wrong_group, 2, "outsider")[1]


def test_sizes_whose_product_is_not_the_groups_are_refused_on_every_rank() -> None:
    for line in last_lines(_wrong_group, 2, "sizes"):
        assert "hierarchy=[2, 2] multiplies to 4, but the context-parallel group has 2 ranks" in line


def _die(rank: int, when: str) -> None:
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=2)
    x = torch.randn(1, 64, 4, 8, requires_grad=True)
    for _ in range(3 if when == "in a pass" else 1):
        out = burst_attention(x, x, x, as_on_gpus(cp) if when == "in a pass" else cp)
    if when in ("in a pass", "backward") and rank == 2:
        os._exit(9)
    out.sum().backward()
    if when == "between calls" and rank == 2:
        time.sleep(0.5)  # a socket that closes with bytes unread takes back what it sent last
        os._exit(9)
    burst_attention(x, x, x, cp)


@pytest.mark.parametrize(
    ("when", "where"),
    [
        ("in a pass", " of call 3 by rank"),
        ("backward", "before the backward pass of call 1"),
        ("between calls", "before the forward pass of call 2"),
    ],
)
def test_a_dead_rank_is_named_with_the_step_where_it_was_missed(when: str, where: str) -> None:
    lines = last_lines(_die, 4, when, timeout_s=30.0)
    assert "exit code 9" in lines[2]
    for line in (lines[0], lines[1], lines[3]):
        assert "RingError: rank 2 of the context-parallel group (global rank 2 on " in line
        assert where in line


# -------------------------------------------------------------------------------------------------- steady state


def _allocations(rank: int) -> list[int]:
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=2)
    seen = []
    for _ in range(4):
        for _ in range(3):  # layers
            train_step(cp, Problem.draw(64, (4, 2)))
        seen.append(cp.allocated_bytes())
    return seen


def test_buffers_are_used_again() -> None:
    for seen in run_ranks(_allocations, 4):
        assert len(set(seen)) == 1, seen
        assert seen[0] > 0


def _differ_later(rank: int, check: str) -> None:
    """Call 3 differs on rank 2, by as many bytes as the others'."""
    cp = ContextParallel(dist.group.WORLD, strategy=Strategy(ranks_per_node=2))
    cp = as_on_gpus(cp) if check == "sparse" else cp
    for call in (1, 2, 3):
        x = torch.ones(1, 16, 4, 8)
        if (call, rank) == (3, 2):
            x = torch.ones(1, 32, 4, 8, dtype=torch.bfloat16)
        burst_attention(x, x, x, cp)


def test_a_rank_that_differs_later_is_one_clear_error_on_every_rank() -> None:
    for line in last_lines(_differ_later, 4, "auto", timeout_s=30.0):
        assert "ValueError: the ranks of the context-parallel group disagree" in line
        assert "rank 2: dtype=torch.bfloat16, query tokens=Tokens(length=128)" in line


def _other_order(rank: int) -> None:
    """Two calls of the same kind, whose backward passes rank 2 runs the other way round."""
    _backward_passes_swapped(as_on_gpus(ContextParallel(dist.group.WORLD, ranks_per_node=2)), rank)


def _backward_passes_swapped(cp: ContextParallel, rank: int) -> None:
    """Those of calls 5 and 6, which ranks of GPUs do not compare."""
    x = torch.ones(1, 16, 4, 8, requires_grad=True)
    outs = [burst_attention(x, x, x, cp) for _ in range(6)][4:]
    for out in reversed(outs) if rank == 2 else outs:
        out.sum().backward()


@pytest.mark.parametrize("what", [(_differ_later, "sparse"), (_other_order,)], ids=["other type", "other order"])
def test_between_comparisons_the_label_of_a_message_tells(what: tuple[Any, ...]) -> None:
    """gloo would take its bytes for numbers of another type, or of another layer, silently."""
    fn, *arguments = what
    lines = last_lines(fn, 4, *arguments, timeout_s=30.0)
    assert all("RingError" in line for line in lines)
    assert all("belongs to another call, or to one with other shapes, types or options" in line for line in lines)


def _other_order_without_labels(rank: int) -> None:
    """As on GPUs, where messages have none: the next call has to notice."""
    with mock.patch.object(Plan, "label", return_value=None):
        cp = as_on_gpus(ContextParallel(dist.group.WORLD, ranks_per_node=2))
        _backward_passes_swapped(cp, rank)
        x = torch.ones(1, 16, 4, 8)
        for _ in range(2):  # 7 and 8
            burst_attention(x, x, x, cp)


def test_without_labels_the_next_comparison_tells_of_another_order_of_passes() -> None:
    for line in last_lines(_other_order_without_labels, 4, timeout_s=30.0):
        assert "ValueError: the ranks of the context-parallel group disagree" in line
        assert "order of passes so far=" in line


def _gradients_on_some(rank: int) -> None:
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=2)
    x = torch.ones(1, 16, 4, 8, requires_grad=rank == 0)
    burst_attention(x, x, x, cp)


def test_ranks_that_differ_in_whether_there_will_be_a_backward_pass_are_told() -> None:
    for line in last_lines(_gradients_on_some, 4, timeout_s=30.0):
        assert "rank 0: takes part in gradients=True; rank 1, 2, 3: takes part in gradients=False" in line


def _fault_of_its_own(rank: int) -> str:
    """A work that fails as torch tells of a GPU's fault: of this rank, not of its peer."""
    work = mock.Mock()
    work.wait.side_effect = torch.AcceleratorError("CUDA error: device-side assert triggered")
    with mock.patch.multiple(dist.ProcessGroup, send=mock.Mock(return_value=work), recv=mock.Mock(return_value=work)):
        x = torch.randn(1, 16, 4, 8)
        try:
            burst_attention(x, x, x, ContextParallel(dist.group.WORLD))
        except RuntimeError as error:
            return type(error).__name__
    return "nothing"


def test_a_fault_of_a_ranks_own_gpu_is_not_blamed_on_a_peer() -> None:
    assert run_ranks(_fault_of_its_own, 2, timeout_s=20.0) == ["AcceleratorError"] * 2


def _unlike_numbers_of_groups(rank: int) -> bool:
    dist.new_group([0, 1])  # ranks 2 and 3 are in one group less
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=2)
    x = torch.randn(1, 16, 4, 8)
    burst_attention(x, x, x, cp)
    again = ContextParallel(dist.group.WORLD, ranks_per_node=2)
    burst_attention(x, x, x, again)
    return True


def test_ranks_may_be_in_unlike_numbers_of_groups() -> None:
    assert all(run_ranks(_unlike_numbers_of_groups, 4, timeout_s=20.0))


def _group_of_one(rank: int) -> int:
    groups = [dist.new_group([r]) for r in range(2)]
    before = len(dist.distributed_c10d._world.pg_map)
    cp = ContextParallel(groups[rank])
    x = torch.randn(1, 16, 4, 8)
    with mock.patch.object(dist.ProcessGroup, "send", side_effect=AssertionError("one rank has nobody to talk to")):
        burst_attention(x, x, x, cp)
        assert torch.equal(cp.unshard(x), x)
    return len(dist.distributed_c10d._world.pg_map) - before


def test_a_group_of_one_rank_does_not_communicate() -> None:
    assert run_ranks(_group_of_one, 2) == [0, 0]


def _wrong_device(rank: int) -> None:
    if rank == 1:
        connections.group_device = lambda group: torch.device("cuda")  # as if the group were NCCL's
    x = torch.empty(1, 16, 4, 8)
    burst_attention(x, x, x, ContextParallel(dist.group.WORLD, ranks_per_node=2))


def test_tensors_on_a_device_that_the_group_does_not_move_are_refused_on_every_rank() -> None:
    for line in last_lines(_wrong_device, 2):
        assert "ValueError: rank 1: q, k, v are on cpu, but the context-parallel group moves tensors of cuda" in line


def _unshard_unlike(rank: int, tokens: Tokens | None) -> None:
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=2)
    cp.unshard(torch.zeros(1, 4 - rank, 2), tokens=tokens)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (None, "rank 0: unshard=Tokens(length=8)"),
        (Tokens(8), "ValueError: rank 1: rank 1 holds 4 of 8 tokens, but local [1, 3, 2] has 3 along dim 1"),
    ],
)
def test_unlike_shards_are_refused_on_every_rank(tokens: Tokens | None, message: str) -> None:
    for line in last_lines(_unshard_unlike, 2, tokens):
        assert message in line


def _shard_without_tokens(rank: int) -> None:
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=2, layout="contiguous")
    cp.unshard(torch.zeros(1, 1 if rank < 2 else 0, 2))


def test_a_rank_that_has_none_of_the_rows_says_so_to_all() -> None:
    for line in last_lines(_shard_without_tokens, 4):
        assert "rank 3 holds 1 of 1 tokens, but local [1, 0, 2] has 0 along dim 1" in line


def _no_group(rank: int) -> int:
    with pytest.raises(
        ValueError, match=r"there are 2 ranks, and no group says .* hierarchy=\[1\] for this rank alone"
    ):
        ContextParallel()
    return ContextParallel(hierarchy=[1]).ranks


def test_among_several_ranks_a_group_is_asked_for() -> None:
    assert run_ranks(_no_group, 2) == [1, 1]


def _long_lists(rank: int, differ: bool, in_one: bool) -> str:
    consistency = ConsistencyCheck(dist.group.WORLD, rank, [0, 1])
    consistency.in_one = in_one  # as with NCCL
    compared = {"length": "x" * 5000, "rank": rank if differ else 0}
    try:
        consistency.compare("a test", compared, "")
    except ValueError as error:
        return str(error)
    return "they agree"


@pytest.mark.parametrize("in_one", [False, True])
@pytest.mark.parametrize("differ", [False, True])
def test_what_differs_beyond_the_size_of_an_exchange_still_differs(differ: bool, in_one: bool) -> None:
    for answer in run_ranks(_long_lists, 2, differ, in_one):
        assert ("disagree" in answer) == differ


# ---------------------------------------------------------------------------- what others do around an attention call


def _selective_checkpoints(rank: int) -> list[float]:
    """Return the relative errors of two layers' gradients, recomputed but for the kernel, `mm`, or both."""
    kernel, mm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, torch.ops.aten.mm.default
    cp = ContextParallel(dist.group.WORLD)
    torch.manual_seed(3)
    weights = [torch.randn(32, 32) / 6 for _ in range(2)]
    grads = []
    for kept in ([], [kernel], [mm], [kernel, mm]):
        x = cp.shard(torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(4))).requires_grad_()

        def layer(x: Tensor, weight: Tensor) -> Tensor:
            heads = (x @ weight).view(1, -1, 4, 8)
            kv = heads[:, :, :2].contiguous()  # grouped: forward and backward lease buffers of like sizes
            return x + burst_attention(heads, kv, kv, cp).reshape(x.shape)

        h = x
        for weight in weights:
            if kept:
                context = functools.partial(create_selective_checkpoint_contexts, kept)
                h = checkpoint(layer, h, weight, use_reentrant=False, context_fn=context)
            else:
                h = layer(h, weight)
        h.square().sum().backward()
        assert x.grad is not None
        grads.append(x.grad)
    return [float((grad - grads[0]).norm() / grads[0].norm()) for grad in grads[1:]]


@pytest.mark.parametrize("ranks", [2, 4])
def test_selective_checkpoints_recompute_attention_as_a_whole(ranks: int) -> None:
    """A policy that keeps what a kernel returned would keep what the ring sums up into afterwards."""
    assert run_ranks(_selective_checkpoints, ranks) == [[0.0] * 3] * ranks


def _refused_here_alone(rank: int) -> list[str]:
    """Call 3 is not compared; rank 1's does not fit, which its loop passes over."""
    cp = as_on_gpus(ContextParallel(dist.group.WORLD))
    said = []
    for number in range(1, 5):
        x = torch.randn(1, 16, 4, 8)
        mask = Documents((0, 30)) if (rank, number) == (1, 3) else Causal()
        try:
            burst_attention(x, x, x, cp, mask=mask)
        except (ValueError, RuntimeError) as error:
            said.append(f"{number}: {type(error).__name__}: {error}")
    return said


@pytest.mark.alone
def test_a_call_that_one_rank_alone_refuses_ends_its_ring() -> None:
    """Else its next call would meet the others' last one, and mix two batches."""
    first, second = run_ranks(_refused_here_alone, 2, timeout_s=30.0)
    assert "ValueError: " in second[0]
    assert second[0].startswith("3: ")
    assert second[1].startswith("4: RuntimeError: an earlier call on this ring was left half way (ValueError")
    assert [line.split(": ")[1] for line in first] == ["RingError", "RuntimeError"], first
    assert "rank 1 gave up: ValueError" in first[0]


def _rings_swapped(rank: int) -> str:
    rings = [ContextParallel(dist.group.WORLD) for _ in range(2)]
    x = torch.randn(1, 16, 4, 8)
    for cp in rings:
        burst_attention(x, x, x, cp)
    try:
        burst_attention(x, x, x, rings[rank])
    except ValueError as error:
        return str(error)
    return "they agree"


def test_two_rings_of_one_group_are_told_apart() -> None:
    for said in run_ranks(_rings_swapped, 2):
        assert "ranks are at different places: rank 0: before the forward pass of call 2 of the ring " in said


def _checks_of_attention(rank: int) -> list[bool]:
    """Whether rank 1's other mask is heard of, with as many comparisons of batches as calls of attention before."""
    cp = as_on_gpus(ContextParallel(dist.group.WORLD))
    x, heard = torch.randn(1, 16, 4, 8), []
    for number in range(1, 9):
        due = number in (4, 8)
        try:
            burst_attention(x, x, x, cp, scores=Scores(scale=1.0 + (rank if due else 0)))
        except ValueError:
            heard.append(due)
        cp.agree({"batch": "alike"})
    return heard


def test_comparing_batches_does_not_keep_attention_from_being_compared() -> None:
    assert run_ranks(_checks_of_attention, 2) == [[True, True]] * 2


def _mesh(rank: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp = ContextParallel(mesh["cp"])
    with pytest.raises(ValueError, match=r'mesh of 2 dimensions, .*; pass the one .* such as mesh\["cp"\]'):
        ContextParallel(mesh)
    return [cp.ranks, dist.get_process_group_ranks(cp.group)]


def test_a_mesh_of_one_dimension_is_a_group() -> None:
    assert run_ranks(_mesh, 4) == [[2, [0, 1]]] * 2 + [[2, [2, 3]]] * 2
