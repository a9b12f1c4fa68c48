"""Planted faults in kernels and in one rank of a ring: the section "right" fails, and names them."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from burst_plugin.check import ring_correctness
from burst_plugin.check.findings import FAILED, NOT_SHOWN, OK, Finding
from burst_plugin.check.kernel_correctness import check_kernels
from burst_plugin.check.ring_correctness import check_rings
from burst_plugin.check.settings import Settings, load_kernel
from burst_plugin.check.world import World, joined
from burst_plugin.cli import main
from burst_plugin.comm import torch_distributed
from burst_plugin.kernels.torch_cpu import TorchCpuKernel
from tests.support.ranks import run_ranks

PLANTED = "tests.support.planted"
QUICK = Settings(quick=True)


def alone() -> World:
    """The world of one rank, without a process group."""
    return World(0, 1, torch.device("cpu"), dist.HashStore(), 10.0)


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("WrongSign", "causal, heads 4/2 of 64, float32: dk is off by 2.0e+00 (bound 1e-05)"),
        ("OwnLse", "halves with the whole lse: dq is off by"),
        ("TrueOut", "out made up from dout: dq is off by"),
        ("NoWindows", "window, heads 4/2 of 64, float32: out is off by"),
    ],
)
def test_a_wrong_kernel_is_named_with_the_tile_and_the_result(kernel: str, said: str) -> None:
    settings = replace(QUICK, kernel=f"{PLANTED}:{kernel}")
    first, *others = check_kernels(alone(), settings)
    assert first.what == f"kernel {load_kernel(settings.kernel).name}"  # type: ignore[union-attr]
    assert first.verdict == FAILED
    wrong = [f"{trial}: {text}" for trial, text in first.figures["wrong"].items()]
    assert any(said in text for text in wrong), wrong
    assert first.text.startswith(wrong[0])
    assert {each.verdict for each in others} <= {OK, NOT_SHOWN}
    assert by_name(others)["kernel torch_cpu"].verdict == OK
    assert "not on cpu" in by_name(others)["kernel torch_flash"].text


def test_one_rank_has_no_ring() -> None:
    (finding,) = check_rings(alone(), QUICK)
    assert finding.verdict == NOT_SHOWN
    assert "there is one rank" in finding.text


def _rings(rank: int, fault: Any) -> list[Finding]:
    """The first rings of two ranks, the second of which has a fault."""
    with joined((rank, 2, rank), 20.0) as world, fault() if rank else nullcontext():
        return list(islice(check_rings(world, QUICK), 2))


def _sign() -> Any:
    right = TorchCpuKernel.backward

    def wrong(self: TorchCpuKernel, *arguments: Any) -> Any:
        found = right(self, *arguments)
        return found._replace(dv=-found.dv)

    return mock.patch.object(TorchCpuKernel, "backward", wrong)


def _raises() -> Any:
    return mock.patch.object(TorchCpuKernel, "backward", side_effect=MemoryError("no room"))


def test_a_ring_names_the_rank_whose_results_are_wrong() -> None:
    first, second = run_ranks(_rings, 2, _sign)
    assert first == second or [x.text for x in first] == [x.text for x in second], "ranks say the same"
    wrong = by_name(first)["ring 1x2, moves q, kv"]
    assert wrong.verdict == FAILED
    assert "dv off by up to" in wrong.text
    assert "kernel torch_cpu" in wrong.text


def _in_first_step() -> Any:
    """Only the first of the two steps of a ring is wrong."""
    right, calls = ring_correctness._step, []

    def wrong(*arguments: Any) -> Any:
        calls.append(arguments)
        out, *others = right(*arguments)
        return out * 1.5 if len(calls) % 2 else out, *others

    return mock.patch.object(ring_correctness, "_step", wrong)


def test_every_step_of_a_ring_is_compared() -> None:
    first, _ = run_ranks(_rings, 2, _in_first_step)
    assert [each.verdict for each in first] == [FAILED, FAILED]
    assert "out off by up to 5.0e-01 (bound 1e-05), on rank 1" in first[0].text
    assert "first in step 1 of 2" in first[0].text


@pytest.mark.alone
def test_a_ring_names_the_rank_that_raises_and_ends_the_section() -> None:
    first, _ = run_ranks(_rings, 2, _raises, timeout_s=10.0)
    assert [each.verdict for each in first] == [FAILED, NOT_SHOWN]
    assert first[0].text == "rank 1: MemoryError: no room"


def _without_a_wait(rank: int) -> list[Finding]:
    """The first rings of two ranks: the first sends late, and the second goes on without waiting for it."""
    post, wait, forgotten = torch_distributed.Communicator.post, torch_distributed.DistributedPending.wait, []

    def late(*arguments: Any) -> Any:
        time.sleep(0.02)
        return post(*arguments)

    def not_yet(self: Any, waited: Any = None) -> None:
        if self.messages[0].data.nbytes < 4096:  # of a comparison
            wait(self, waited)
            return
        for work in forgotten:  # before its buffer is used again
            work.wait()
        messages, forgotten[:], self.works = self.messages, self.works, []
        wait(self, waited)
        if waited is not None:
            waited(messages)

    fault: tuple[str, Any] = ("DistributedPending.wait", not_yet) if rank else ("Communicator.post", late)
    with joined((rank, 2, rank), 6.0) as world, mock.patch(f"{torch_distributed.__name__}.{fault[0]}", fault[1]):
        return list(islice(check_rings(world, QUICK), 2))


@pytest.mark.slow
@pytest.mark.alone
def test_a_missing_wait_is_found_and_the_rank_named() -> None:
    first, _ = run_ranks(_without_a_wait, 2, timeout_s=10.0)
    assert first[0].verdict == FAILED
    assert "by rank 1" in first[0].text, first[0].text
    assert "what it sent belongs to another call" in first[0].text, "as the label of an old message says"


def _other_bytes() -> Any:
    return mock.patch("burst_plugin.context.ContextParallel.traffic", return_value={"intra": {"gather": 1}})


def test_other_bytes_than_the_schedule_counts_are_found() -> None:
    first, _ = run_ranks(_rings, 2, _other_bytes)
    assert "rank 1 sent other bytes than the schedule counts: {'intra': {'gather': 1}}" in first[0].text


def test_a_kernel_that_ends_its_process_is_an_end_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quick", "--sections", "right", "--ranks", "1", "--kernel", f"{PLANTED}:Deadly"]
    assert main(["check", *words]) == 1
    assert "rank 0: killed by SIGKILL" in capsys.readouterr().out


def test_the_command_finds_a_kernel_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "of_my_own.py").write_text(
        "from burst_plugin.kernels.torch_cpu import TorchCpuKernel\nclass Mine(TorchCpuKernel):\n    name = 'mine'\n"
    )
    script = Path(sys.executable).with_name("burst")
    if not script.exists():
        pytest.skip("the package is not installed in this environment")
    words = ["check", "--quick", "--sections", "right", "--ranks", "1", "--kernel", "of_my_own:Mine"]
    done = subprocess.run([script, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kernel mine" in done.stdout


def test_the_rank_that_raises_is_the_only_culprit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quick", "--sections", "fast", "--ranks", "2", "--kernel", f"{PLANTED}:LateOnRankOne"]
    assert main(["check", *words]) == 1
    out = capsys.readouterr().out
    assert out.count("culprit: ") == 1
    assert "culprit: rank 1: RuntimeError: no such instruction" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kernel", "flash_attn_5"], "kernel='flash_attn_5' is not valid; use auto, one of flash_attn_3"),
        (["--kernel", "burst_plugin:nothing"], "cannot be loaded (module 'burst_plugin' has no attribute 'nothing')"),
        (["--kernel", "burst_plugin:Topology"], "cannot be loaded (Topology.__init__() missing 2 required"),
        (["--kernel", "burst_plugin:Causal"], "kernel='burst_plugin:Causal' is not a kernel"),
        (["--ranks", "4", "--ranks-per-node", "3"], "ranks_per_node=3 does not divide the 4 ranks"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *words]) == 1
    out, err = capsys.readouterr()
    assert said in err
    assert out == ""
