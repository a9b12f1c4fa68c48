"""What `burst check` does on GPUs only, at sizes and on worlds that need none."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin.check import run
from burst_plugin.check.findings import FAILED, NOT_SHOWN, OK, SECTIONS, Finding
from burst_plugin.check.kernel_correctness import check_far_offsets, far_errors
from burst_plugin.check.problem import BOUNDS, worst
from burst_plugin.check.processes import RankEnd
from burst_plugin.check.ring_correctness import check_rings, memory_finding
from burst_plugin.check.settings import Settings
from burst_plugin.check.world import World, joined
from burst_plugin.kernels import How
from burst_plugin.kernels.torch_cpu import TorchCpuKernel
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
QUICK = Settings(quick=True)
FAR = 128 * 16 * 128 * 2  # so many elements that a third sequence lies behind them


class Wraps(TorchCpuKernel):
    """Its addresses wrap around: the last sequence is computed from the first one."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        around = [torch.cat([x[:-1], x[:1]]) for x in (q, k, v)]
        return super().forward(*around, how)


def test_what_lies_far_off_is_compared_with_the_definition() -> None:
    name, error = worst(far_errors(TorchCpuKernel(), CPU, torch.float32, FAR))
    assert error < BOUNDS[torch.float32], name
    wrong = far_errors(Wraps(), CPU, torch.float32, FAR)
    assert wrong["out"] > 0.5
    assert wrong["lse"] > 1e-2


def test_far_offsets_need_a_gpu() -> None:
    assert list(check_far_offsets(World(0, 1, CPU, dist.HashStore(), 10.0), QUICK)) == []


def test_the_memory_of_nccl_is_that_of_the_ring_and_rank_with_the_most() -> None:
    world = World(0, 2, CPU, dist.HashStore(), 10.0, hosts=["here", "here"])
    found = memory_finding(world, {"ring 1x2": [2**28, 2**30], "heads exchanged by 2": [2**20, 2**20]})
    assert found.verdict == OK
    assert "up to 1.00 GiB" in found.text
    assert found.text.endswith("ring 1x2, rank 1")
    assert found.figures["bytes"] == {"ring 1x2": 2**30, "heads exchanged by 2": 2**20}


def _with_a_gpu_that_fills_up(rank: int) -> list[Finding]:
    """The rings of groups that are bound to a device, with what a GPU would say of its memory."""
    with joined((rank, 2, rank), 20.0, is_bound=True) as world:
        taken = iter(range(0, 100 << 20, 1 << 20 + rank))
        with mock.patch.object(World, "outside_bytes", side_effect=taken):
            return list(check_rings(world, QUICK, is_bound=True))


def test_groups_that_are_bound_run_some_rings() -> None:
    first, second = run_ranks(_with_a_gpu_that_fills_up, 2)
    assert [each.text for each in first] == [each.text for each in second], "ranks say the same"
    assert [each.what for each in first[:3]] == [
        "ring 1x2, moves q, q, device_id",
        "two rings in turn, device_id",
        "close",
    ]
    assert {each.verdict for each in first[:3]} == {OK}


def test_a_world_is_bound_to_its_gpu_where_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr("burst_plugin.check.world.device_of_rank", lambda local: torch.device("cuda", local))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **options: given.append(options))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", dist.HashStore)
    for is_bound in (False, True):
        with joined((1, 2, 1), 20.0, is_bound=is_bound):
            pass
    assert [each["device_id"] for each in given] == [None, torch.device("cuda", 1)]


@pytest.mark.parametrize(("ranks", "is_bound"), [(2, [False, True]), (1, [False])])
def test_on_gpus_second_processes_have_groups_that_are_bound(
    ranks: int, is_bound: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def in_processes(settings: Settings, ranks: int, is_bound: bool = False) -> list[Finding]:
        asked.append(is_bound)
        return []

    monkeypatch.setattr(run, "in_processes", in_processes)
    monkeypatch.setattr(run, "device_kind", lambda: torch.device("cuda"))
    assert list(run.spawned(Settings(sections=("right",)), ranks)) == []
    assert asked == is_bound


def test_ranks_that_share_a_gpu_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[str, ...], int]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(run, "spawned", lambda settings, ranks: asked.append((settings.sections, ranks)) or [])
    assert list(run.check(Settings(), 2)) == []
    found = list(run.check(Settings(), 4))
    assert [each.section for each in found] == ["fast", "tuned"]
    assert {each.verdict for each in found} == {NOT_SHOWN}
    assert asked == [(SECTIONS, 2), (("right", "safe"), 4)]


def test_what_shared_gpus_cannot_show_is_said() -> None:
    world = World(0, 2, torch.device("cuda", 0), dist.HashStore(), 10.0, shares_gpu=True)
    found = [*check_far_offsets(world, QUICK), memory_finding(world, {"ring 1x2": [2**28, 2**30]})]
    assert [(each.verdict, "share" in each.text) for each in found] == [(NOT_SHOWN, True)] * 2


def test_what_fails_on_bound_groups_is_the_section_right(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = mock.MagicMock()
    ended = {0: RankEnd(None, "no device", 1.0)}
    processes.__enter__.return_value = mock.Mock(messages=lambda enough: [], ended=ended)
    monkeypatch.setattr(run, "RankProcesses", lambda *_, **__: processes)
    found = list(run.in_processes(Settings(sections=("fast", "right")), 1, is_bound=True))
    assert [(each.section, each.verdict) for each in found] == [("right", FAILED)]
