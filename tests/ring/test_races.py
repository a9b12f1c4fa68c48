"""No two accesses to the same memory of a GPU are left without an order, in both passes: see `tests.support.races`.

Over the transport of process groups, on what NCCL does to memory, and over copies on streams of the ranks. Faults are
planted in the package's own functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from burst_plugin import Causal, Documents, SlidingWindow, Topology
from burst_plugin.activations import pages
from burst_plugin.activations.host_memory import HostMemory
from burst_plugin.comm import in_process, torch_distributed
from burst_plugin.comm.buffers import Buffer, BufferPool
from burst_plugin.comm.copies import CopyNetwork
from burst_plugin.comm.in_process import Parcel
from burst_plugin.ring.executor import P2POp, RingPass
from burst_plugin.ring.rank_state import RankState
from burst_plugin.schedule.rings import SCHEDULES
from burst_plugin.schedule.steps import Step
from burst_plugin.topology import Traffic
from burst_plugin.types import SIDES
from tests.support.races import RaceError
from tests.support.recorded_layers import SEQ, train

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")

BOTH = NCCL, COPIES = "nccl", "copies"
LATE = "late copies"
DOCUMENTS = Causal() & Documents((0, 100, 104, SEQ))
CASES: list[tuple[str, dict[str, Any]]] = [
    *((network, {"schedule": name, "backward": side}) for network in BOTH for name in SCHEDULES for side in SIDES),
    (LATE, {"topology": Topology(1, 4), "backward": "kv"}),
    (LATE, {"schedule": "two_level_ring", "backward": "q"}),
    *((NCCL, {"parts": 2, "backward": side}) for side in SIDES),
    *((NCCL, {"ulysses_degree": 2, "backward": side}) for side in SIDES),
    *((NCCL, {"mesh_degree": 2, "backward": side}) for side in SIDES),
    *((NCCL, {"keeps": 0.0, "backward": side}) for side in SIDES),
    (NCCL, {"topology": Topology(1, 4), "backward": "q"}),
    (NCCL, {"topology": Topology(1, 4), "backward": "kv", "parts": 2, "ulysses_degree": 2}),
    (NCCL, {"topology": Topology(3, 2), "backward": "q"}),
    (NCCL, {"forward": "q", "backward": "q"}),
    (NCCL, {"topology": Topology(1, 4), "forward": "both", "backward": "both", "layout": "contiguous"}),
    (COPIES, {"forward": "both", "backward": "both", "layout": "contiguous", "schedule": "direct"}),
    (NCCL, {"mask": SlidingWindow(40), "backward": "kv"}),
    (NCCL, {"mask": DOCUMENTS, "schedule": "direct", "backward": "q"}),
    (NCCL, {"keeps": 1.0, "backward": "kv"}),
    (NCCL, {"keeps": 0.5, "backward": "q", "ulysses_degree": 2}),
    (NCCL, {"kernel": "torch_flash", "backward": "q"}),
    (COPIES, {"parts": 2, "backward": "q"}),
    (COPIES, {"ulysses_degree": 2, "backward": "kv"}),
    (COPIES, {"mask": DOCUMENTS, "schedule": "direct", "backward": "kv"}),
    (COPIES, {"keeps": 0.5, "backward": "kv"}),
]


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_BYTES", 1 << 12)  # several of each tensor


def _name(case: object) -> str:
    named = case.items() if isinstance(case, dict) else [(case, "")]
    return " ".join(f"{key} {value}".strip() for key, value in named)


@pytest.mark.parametrize(("network", "case"), CASES, ids=_name)
def test_every_access_is_ordered(network: str, case: dict[str, Any]) -> None:
    """And every message is seen: other streams than those that compute read it once, and write it once."""
    gpus, sent = train(network, **case)
    elsewhere = ("compute stream", "host_memory")
    seen = sum(nbytes for name, nbytes in gpus.accessed_bytes.items() if not any(each in name for each in elsewhere))
    assert seen == 2 * sent > 0
    assert gpus.frees > 0


def test_a_stream_of_another_thread_is_refused() -> None:
    with pytest.raises(RuntimeError, match="run all passes of one context-parallel group on one CUDA stream"):
        train(NCCL, thread=THREAD)


# -------------------------------------------------------------------------------------------------- planted faults


def _nothing(*_: object, **__: object) -> None:
    pass


def _no_wait(patch: pytest.MonkeyPatch) -> None:
    """What was received is read at once."""
    patch.setattr(torch_distributed.DistributedPending, "wait", _nothing)
    patch.setattr(CopyNetwork, "collect", _nothing)


def _operands_released_early(patch: pytest.MonkeyPatch) -> None:
    """A block that arrives gives its buffer back before the visit."""
    arrive, release = RingPass._arrive, BufferPool.release

    def arrived(ring: RingPass, post: P2POp, buffer: Buffer) -> None:
        arrive(ring, post, buffer)
        if post.transfer.traffic is Traffic.GATHER:
            ring.transport.pool.release(buffer)

    def released(pool: BufferPool, buffer: Buffer) -> None:
        if buffer in pool.leased:
            release(pool, buffer)

    patch.setattr(RingPass, "_arrive", arrived)
    patch.setattr(BufferPool, "release", released)


def _results_released_early(patch: pytest.MonkeyPatch) -> None:
    """Partial results that leave give their buffer back when they are posted."""

    def released(ring: RingPass, step: int, buffer: Buffer) -> Buffer:
        ring.transport.pool.release(buffer)
        return buffer

    patch.setattr(RingPass, "_released_at", released)


def _other_stream(patch: pytest.MonkeyPatch) -> None:
    """The thread that runs the backward pass has a stream of its own, and nothing looks at it."""
    patch.setattr(RankState, "_check_stream", _nothing)


def _last_sends_left_alone(patch: pytest.MonkeyPatch) -> None:
    """Once a pass has posted its last messages, only what is received is waited for."""
    move, wait = RingPass.move, in_process.InProcessPending.wait

    def received(pending: in_process.InProcessPending, _: object = None) -> None:
        both = zip(pending.messages, pending.parcels, strict=True)
        pending.network.collect([parcel for message, parcel in both if parcel.target is message.data])

    def moved(ring: RingPass, step: Step) -> None:
        is_last = not any(ring.send_recv.batches[ring.step :])
        patch.setattr(in_process.InProcessPending, "wait", received if is_last else wait)
        move(ring, step)

    patch.setattr(RingPass, "move", moved)


def _no_event(patch: pytest.MonkeyPatch, of: Callable[[Parcel], bool]) -> None:
    """An end of a message is posted without an event on the current stream."""
    posted = CopyNetwork.note_posted

    def forgotten(network: CopyNetwork, parcel: Parcel) -> None:
        posted(network, parcel)
        if of(parcel):
            parcel.events.pop()

    patch.setattr(CopyNetwork, "note_posted", forgotten)


def _no_event_of_sender(patch: pytest.MonkeyPatch) -> None:
    _no_event(patch, lambda parcel: parcel.target is None)


def _no_event_of_receiver(patch: pytest.MonkeyPatch) -> None:
    _no_event(patch, lambda parcel: parcel.source is None)


def _no_event_of_copy(patch: pytest.MonkeyPatch) -> None:
    _no_event(patch, lambda parcel: parcel.is_whole)


def _parked_freed_early(patch: pytest.MonkeyPatch) -> None:
    """A tensor that is parked gives its memory back while it is copied to the host."""
    patch.setattr(HostMemory, "_end_copy", lambda host, parked: parked.let_go())


def _fetched_early(patch: pytest.MonkeyPatch) -> None:
    """A tensor that comes back from the host is read at once."""
    start = HostMemory._start_back
    patch.setattr(HostMemory, "_start_back", lambda host, parked: (start(host, parked)[0], None))


def _copied_at_once(patch: pytest.MonkeyPatch, method: str) -> None:
    """The stream of copies to and from the host does not wait for the one that computes."""
    original = getattr(HostMemory, method)

    def early(host: HostMemory, of: object) -> object:
        with mock.patch.object(host.stream, "wait_stream", _nothing):
            return original(host, of)

    patch.setattr(HostMemory, method, early)


def _parked_at_once(patch: pytest.MonkeyPatch) -> None:
    _copied_at_once(patch, "park")


def _fetched_at_once(patch: pytest.MonkeyPatch) -> None:
    _copied_at_once(patch, "_start_back")


OPTIONS = {"backward": "kv", "topology": Topology(1, 4), "layout": "striped"}
THREAD = "autograd's thread"
DIRECT = {**OPTIONS, "schedule": "direct"}
FAULTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str, dict[str, Any], str]] = [
    (_no_wait, NCCL, OPTIONS, "written by receive .* NCCL stream of gather; they are read by attention"),
    (
        _no_wait,
        NCCL,
        {"ulysses_degree": 2},
        "written by receive .*; they are read by index_put_ at .*/group_exchange",
    ),
    (_no_wait, COPIES, OPTIONS, "written by copy_ .* side stream .*; they are read by attention"),
    (_operands_released_early, NCCL, OPTIONS, "written by receive .*; they are read by send"),
    (
        _operands_released_early,
        NCCL,
        DIRECT,
        "written by receive .* step 1, .*; they are read by attention .* step 1,",
    ),
    (
        _operands_released_early,
        LATE,
        DIRECT,
        "read by attention .* step 1, .*; they are written by .* deliver .* step 1,",
    ),
    (_results_released_early, NCCL, OPTIONS, "written by receive .*; they are read by send .* of reduce"),
    (_results_released_early, COPIES, OPTIONS, "written by copy_ .* deliver .*; they are read by copy_ .* deliver"),
    (_other_stream, NCCL, {"thread": THREAD}, f"written by .* rank 0; they are read by .* rank 0 in {THREAD}"),
    (
        _last_sends_left_alone,
        COPIES,
        OPTIONS,
        "read by copy_ .* call 1, .*; they are written by .* _packed .* call 2,",
    ),
    (_no_event_of_sender, COPIES, OPTIONS, "written by copy_ .* _packed .*; they are read by copy_ .* deliver"),
    (_no_event_of_receiver, COPIES, OPTIONS, "written by what had them before, .*; they are written by .* deliver"),
    (_no_event_of_copy, COPIES, OPTIONS, "written by copy_ .* deliver .*; they are read by attention"),
    (_parked_freed_early, NCCL, {"keeps": 1.0}, "read by .* copy_to_pages .*; they are given back"),
    (_parked_at_once, NCCL, {"keeps": 1.0}, "written by .* rank 0; they are read by .* copy_to_pages"),
    (
        _fetched_at_once,
        NCCL,
        {"keeps": 1.0},
        "written by what had them before, .*; they are written by .* copy_from_pages",
    ),
    (_fetched_early, NCCL, {"keeps": 1.0}, "written by .* copy_from_pages.*; they are read by .* of rank 0,"),
]


@pytest.mark.parametrize(("plant", "network", "options", "found"), FAULTS)
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    network: str,
    options: dict[str, Any],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    with pytest.raises(RaceError, match=found):
        train(network, **options)
