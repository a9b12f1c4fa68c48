"""One rank gives up; the others, which would wait for its messages with NCCL, abort the ring and raise its reason."""

from __future__ import annotations

import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.utils.checkpoint import checkpoint

from burst_plugin import ContextParallel, RingError, burst_attention
from burst_plugin.comm import failure_watch as watch
from burst_plugin.comm import process_groups
from burst_plugin.comm.call_identity import CallId, Progress
from burst_plugin.comm.failure_watch import FIRST_FAILURE, Board, FailureWatch
from burst_plugin.comm.process_groups import Communicators, end_waiting
from burst_plugin.ring import connections
from tests.support.ranks import run_ranks

REASON = "rank 1 gave up: MemoryError: no room"
X = torch.randn(1, 16, 4, 8, generator=torch.Generator().manual_seed(0))


class Group:
    """A group of NCCL's, one of whose kernels waits for a message that never comes, until it is aborted."""

    def __init__(self) -> None:
        self.kernel = threading.Lock()
        self.kernel.acquire()
        self.aborts = 0

    def abort(self) -> None:
        self.aborts += 1
        self.kernel.release()


def wait_for_aborts() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("burst_plugin"):  # that of the watch, which begins the others, comes first
            thread.join(10.0)
    for thread in threading.enumerate():
        if thread.name == "burst_plugin abort":
            thread.join(10.0)


class Waiting(threading.Thread):
    """A rank that waits for its GPU, or else computes on the host, and what became of it."""

    def __init__(self, group: Group, waits: bool) -> None:
        super().__init__()
        self._group, self._waits = group, waits
        self.error: BaseException | None = None
        self.went_on = False

    def run(self) -> None:
        try:
            while not self._waits:
                time.sleep(0.001)
            self._group.kernel.acquire()  # as in cudaStreamSynchronize, which nothing interrupts
            self.went_on = True
        except BaseException as error:
            self.error = error


@pytest.mark.parametrize("waits", [True, False], ids=["in the stream", "on the host"])
def test_a_rank_raises_before_it_uses_what_did_not_arrive(waits: bool) -> None:
    store, groups = dist.PrefixStore("ring", dist.HashStore()), [Group(), Group()]
    communicators = Communicators(groups, [0, 1])  # type: ignore[arg-type]
    thread = Waiting(groups[1], waits)
    thread.start()
    assert thread.ident is not None
    progress = Progress(thread=thread.ident)
    board = Board(store, 0, ["first", "second"], progress)
    ends = FailureWatch(board, 0.05, partial(end_waiting, progress, communicators.abort))
    store.set(FIRST_FAILURE, REASON)
    thread.join(10.0)
    assert not thread.is_alive()
    assert isinstance(thread.error, RingError)
    assert type(thread.error).__name__ == "RingError"
    assert str(thread.error).startswith(f"{REASON}; rank 0 has aborted the ring")
    assert not thread.went_on
    wait_for_aborts()
    communicators.abort()
    wait_for_aborts()
    assert [group.aborts for group in groups] == [1, 1], "once"
    ends.close()


def test_an_abort_that_waits_for_another_ones_kernels_does_not_hold_that_one_up() -> None:
    first, second, done = Group(), Group(), threading.Event()

    def abort_after_the_second() -> None:
        if second.kernel.acquire(timeout=5.0):
            done.set()

    first.abort = abort_after_the_second  # type: ignore[method-assign]
    process_groups.abort_groups([first, second])  # type: ignore[list-item]
    assert done.wait(10.0)


def _given_up(rank: int, launches: bool, options: dict[str, Any]) -> tuple[str, str, str, set[str]]:
    """Rank 1 gives up between two calls, and lives on, while the other one waits for its GPU.

    Return the errors of that wait, of the next call, and of a comparison of what did not arrive, and the groups that
    were aborted.
    """
    aborted: set[str] = set()
    in_time, patience = threading.Event(), 10.0 if launches and not options else 0.5

    def abort(group: dist.ProcessGroup) -> None:
        aborted.add(group.group_name)
        if len(aborted) == 2:
            in_time.set()

    with (
        mock.patch.object(watch, "PERIOD_S", 0.05),
        mock.patch.object(dist.ProcessGroup, "abort", abort),
        mock.patch.object(connections, "launches_batches", return_value=launches),  # as NCCL does
    ):
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=2, **options)
        burst_attention(X, X, X, cp)
        store = dist.distributed_c10d._get_default_store()
        if rank:
            store.wait(["the other waits"])
            cp.rank_state.give_up(MemoryError("no room"))

        def wait() -> None:
            store.set("the other waits", "")  # the error may be raised from here on
            in_time.wait(patience)

        garbage = mock.patch.object(cp.agreement.consistency, "compare", side_effect=ValueError("ranks differ"))
        said = ["", "", ""]
        for number, step in enumerate((wait, cp.connect, partial(_compare, cp, garbage))):
            try:
                step()
            except (RuntimeError, ValueError) as error:
                said[number] = f"{type(error).__name__}: {error}"
        in_time.wait(patience)  # it raises first, and aborts then
        names = {group.group_name for group in (dist.group.WORLD, *cp.created_groups)}  # type: ignore[union-attr]
        by_then = set(aborted)  # a close would abort, too
        assert by_then in (set(), names)
        cp.close()
    return *said, by_then  # type: ignore[return-value]


def _stopped(rank: int) -> str:
    """Rank 1 stops in a forward pass, and NCCL's watchdog waits in vain on rank 0. Return the error there."""
    in_time = threading.Event()
    found = ErrorType.SUCCESS if rank else ErrorType.TIMEOUT
    nccl = SimpleNamespace(name=lambda: "nccl", get_error=lambda: found)
    with (
        mock.patch.object(watch, "PERIOD_S", 0.05),
        mock.patch.object(dist.ProcessGroup, "abort", side_effect=in_time.set),
        mock.patch.object(connections, "launches_batches", return_value=True),
    ):
        cp = ContextParallel(dist.group.WORLD)
        burst_attention(X, X, X, cp)
        if rank:
            cp.rank_state.progress.begin_pass("forward", CallId(2))
        with mock.patch.object(dist.ProcessGroup, "_get_backend", return_value=nccl):
            try:
                in_time.wait(10.0)
            except RingError as error:
                return str(error)
    return "nothing"


@pytest.mark.alone
def test_a_rank_that_stops_is_named_by_where_it_is() -> None:
    for said in run_ranks(_stopped, 2):
        assert said.startswith("NCCL waits in vain on rank 0 (global rank 0 on")
        assert "(time-out), where ranks have come to: rank 1 (global rank 1 on" in said
        assert "): in the forward pass of call 2; rank 0 (global rank 0 on" in said


def _compare(cp: ContextParallel, garbage: Any) -> None:
    with garbage:
        cp.agreement.compare("there", {})


@pytest.mark.alone
def test_the_others_end_and_name_the_rank_at_fault() -> None:
    first, second = run_ranks(_given_up, 2, True, {})
    for said in first[:3]:
        assert said.startswith(f"RingError: {REASON}; rank 0 has aborted the ring")
    assert second[0] == "", "it has raised its own"
    assert second[1].startswith("RuntimeError: an earlier call on this ring was left half way (MemoryError: no room)")
    assert first[3] == second[3] != set(), "the given group and the one that was made, on both"


@pytest.mark.parametrize(("launches", "options"), [(False, {}), (True, {"abort": False})], ids=["gloo", "opted out"])
def test_nothing_is_aborted(launches: bool, options: dict[str, Any]) -> None:
    first, second = run_ranks(_given_up, 2, launches, options)
    assert first == ("", "", "ValueError: ranks differ", set())
    assert second[3] == set()


def test_torchcomms_is_refused_before_any_group_is_made() -> None:
    for said in run_ranks(_refused, 2):
        assert said.startswith("burst attention cannot make its process groups over TorchComms")
        assert "set TORCH_DISTRIBUTED_USE_TORCHCOMMS=0 before" in said


def _refused(rank: int) -> str:
    with (
        mock.patch.object(dist.distributed_c10d, "_use_torchcomms_enabled", return_value=True),
        mock.patch.object(dist, "new_group", side_effect=AssertionError),
        pytest.raises(ValueError, match="TorchComms") as raised,
    ):
        ContextParallel(dist.group.WORLD)
    return str(raised.value)


def test_the_thread_that_trains_is_the_one_that_raises() -> None:
    """The ring may have been connected in another thread, which has ended."""
    cp, found, x = ContextParallel(), list[int](), torch.zeros(1, 4, 1, 4, requires_grad=True)

    def train() -> None:
        found.append(threading.get_ident())
        burst_attention(x, x, x, cp).sum().backward()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert [cp.rank_state.progress.thread] == found
    assert found[0] != threading.get_ident()


def test_a_forward_pass_that_a_checkpoint_runs_again_is_not_in_the_thread_that_trains() -> None:
    """On GPUs backward passes, and with them recomputation, run in threads of autograd's."""
    cp, x = ContextParallel(), torch.zeros(1, 4, 1, 4, requires_grad=True)
    out = checkpoint(lambda x: burst_attention(x, x, x, cp), x, use_reentrant=False)
    thread = threading.Thread(target=lambda: out.sum().backward())
    thread.start()
    thread.join()
    assert cp.rank_state.progress.thread == threading.get_ident()
