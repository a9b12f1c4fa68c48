"""The ring over NCCL, in ranks that are spawned: what gloo's tests ask, and what `burst check` does.

    python -m pytest -m nccl

On CPUs one world over gloo shows that the same code would find what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from burst_plugin.check import world
from burst_plugin.check.findings import failed
from burst_plugin.check.run import check
from burst_plugin.check.settings import Settings
from tests.support.exactness import RINGS, Found, found_by_ranks

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of GPUs, which round products of probabilities
STEPS = 20  # what is read too early may be there by chance
SHARED_STEPS = 3  # where ranks take turns on a GPU, and a message takes milliseconds
NCCL = [pytest.mark.nccl, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
MOST = max(8, torch.cuda.device_count())  # which may share one


def wrong(found: Sequence[Sequence[Found]], bounds: dict[torch.dtype, float]) -> list[tuple[int, Found]]:
    """Return ranks and what is wrong there."""
    by_name = {str(dtype): bound for dtype, bound in bounds.items()}
    every = [(rank, each) for rank, of_rank in enumerate(found) for each in of_rank]
    return [(rank, x) for rank, x in every if not x.error < by_name[x.dtype] or not x.is_as_planned]


def test_spawned_ranks_run_the_same_over_gloo() -> None:
    found = found_by_ranks(2, [torch.float32])
    assert len(found) == 2
    assert [len(each) for each in found] == [2 * sum(ranks == 2 for ranks, _ in RINGS)] * 2
    assert wrong(found, {torch.float32: 2e-6}) == []


def test_what_is_wrong_is_found() -> None:
    fine, off, nan, other = (Found("a", "torch.float32", error) for error in (1e-7, 1e-4, float("nan"), 0.0))
    other = Found("a", "torch.float32", 0.0, is_as_planned=False)
    assert wrong([[fine, off], [nan, other]], BOUNDS) == [(0, off), (1, nan), (1, other)]


@pytest.mark.parametrize("is_bound", [False, True], ids=["", "device_id"])
@pytest.mark.parametrize("ranks", sorted({ranks for ranks, _ in RINGS}))
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("over", [pytest.param("nccl", marks=NCCL)])
def test_exact_over_nccl(over: str, dtype: torch.dtype, ranks: int, is_bound: bool) -> None:
    if ranks > MOST:
        pytest.skip(f"there are GPUs for {MOST} ranks")
    steps = STEPS if ranks <= torch.cuda.device_count() else SHARED_STEPS
    assert wrong(found_by_ranks(ranks, [dtype], steps=steps, is_bound=is_bound), BOUNDS) == []


@pytest.mark.parametrize("over", [pytest.param("nccl", marks=NCCL)])
def test_burst_check_finds_nothing_wrong(over: str) -> None:
    """Kernels alone, every way to run a ring on all GPUs, and a rank that raises, is killed or stops."""
    found = list(check(Settings(quick=True, sections=("right", "safe"), profile="")))
    assert not failed(found), "\n".join(str(each) for each in found if each.verdict == "FAILED")


@pytest.mark.parametrize(
    ("gpus", "version", "names"),
    [
        (2, (2, 30, 7), set()),
        (1, (2, 30, 7), {"NCCL_MULTI_RANK_GPU_ENABLE"}),
        (1, (2, 29, 3), {"NCCL_HOSTID", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME"}),
    ],
)
def test_ranks_share_a_gpu_as_nccl_allows_it(
    gpus: int, version: tuple[int, int, int], names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr(world.os, "environ", environment)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    assert world.share_gpus(1, 2) == (gpus == 1)
    assert set(environment) == names
