"""One rank's place in a ring, and its record of calls.

A `ContextParallel` has one `RankState`; a `VirtualRing` has one for every rank, all in one process.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from burst_plugin.comm.buffers import BufferPool
from burst_plugin.comm.call_identity import CallId, Progress
from burst_plugin.comm.transport import Channel, RingError, Transport
from burst_plugin.compute.passes import RowTable
from burst_plugin.ring.routes import RouteTable
from burst_plugin.ring.systems.rank_groups import RankGroup
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Groups, Link, Topology, Traffic
from burst_plugin.types import Direction

if TYPE_CHECKING:
    from burst_plugin.profiling.recorder import Profile


@dataclass
class Draws:
    """What tells a ring's forwards in training apart, so that each has dropout of its own: equal on all ranks.

    It goes by the step's number, which a resumed run has again, and by no forward in evaluation.

    seed: the seed of rank 0's generator when the ring cut its first batch; None before.
    step: the number of the training step. forwards: how many forwards in training that step has had.
    """

    seed: int | None = None
    step: int = 0
    forwards: int = 0

    def begin(self, step: int) -> None:
        """Note that the forwards from now on belong to training step `step`."""
        if step != self.step:
            self.step, self.forwards = step, 0

    def next_seed(self, batch: int) -> int:
        """Return dropout's seed for the next forward, below 2^63, of the batch with the checksum `batch`."""
        self.forwards += 1
        name = f"{self.seed} {self.step} {self.forwards} {batch}"
        return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(eq=False, repr=False)
class RankState:
    """One rank of the context-parallel group: its place, its transports, its caches and its counts of calls.

    rank, topology: its number, and the nodes of all ranks.
    transport: carries messages around its ring. ulysses_transport: within its `group`.
    route_table: what ranks do in each pass; ranks of one process may share it.
    is_process: whether the other ranks are other processes.
    at_end: called when this rank gives up.
    profile: records passes; None while there is none.
    choices: of the call made last, for people to read.
    calls_made, state_calls: attention calls so far, and calls of layers that carry a state along the sequence, or of
        convolutions.
    training_step: the step that the next calls belong to, if the caller says so. draws: seeds for dropout.
    progress: where this rank is in its program.
    passes_digest: of all passes so far, in their order, which ranks compare.
    expected_bytes: the bytes that schedules have had this rank send, by channel.
    ring_id: tells this ring from others of the same group, once its ranks have met.
    """

    rank: int
    topology: Topology
    strategy: Strategy
    transport: Transport
    ulysses_transport: Transport
    route_table: RouteTable
    is_process: bool = False
    at_end: Callable[[], None] | None = None
    profile: Profile | None = None
    choices: dict[str, str] = field(default_factory=dict)  # of the call made last, for people to read
    calls_made: int = 0
    state_calls: int = 0  # of layers that carry a state along the sequence, or a convolution
    lengths: set[tuple[int, int]] = field(default_factory=set)  # (queries, keys) of sequences, the first few
    training_step: str = ""  # that the next calls belong to, if the caller says so
    draws: Draws = field(default_factory=Draws)
    progress: Progress = field(default_factory=Progress)
    passes_digest: int = 0  # of the passes so far, in their order, which ranks compare
    expected_bytes: Counter[Channel] = field(default_factory=Counter)
    positions: RowTable = field(default_factory=RowTable)
    exchanged_rows: RowTable = field(default_factory=RowTable)
    warmed_up: set[tuple[object, int]] = field(default_factory=set)  # passes, and threads in which they have run
    ring_id: str = ""  # tells this ring from others of the same group, once its ranks have met
    is_closed: bool = False
    _busy: threading.Lock = field(default_factory=threading.Lock)
    _stream: object = None
    _broken: str = ""  # why a pass was left half way, or a call refused by this rank alone

    @cached_property
    def group(self) -> RankGroup:
        """Return the group of ranks, this one included, that exchange heads or blocks; this rank alone if none do."""
        group, place = self.groups.of(self.rank)
        return RankGroup(self.topology, self.groups.members(group), place, self.groups.gathers)

    @cached_property
    def groups(self) -> Groups:
        """Return the division of all ranks into groups, which exchange heads or blocks, and rings."""
        return self.strategy.groups(self.topology)

    @property
    def ring_rank(self) -> int:
        """Return the number of this rank in its ring, which is also the number of its group."""
        return self.groups.of(self.rank)[0]

    @property
    def ring_peers(self) -> range:
        """Return the context-parallel ranks of this rank's ring, in its order."""
        return self.groups.ring(self.groups.of(self.rank)[1])

    @property
    def pools(self) -> tuple[BufferPool, BufferPool]:
        """Return the pools of buffers for messages: (around the ring, within this rank's group)."""
        return self.transport.pool, self.ulysses_transport.pool

    def link_peers(self, by_link: bool, apart: bool = False) -> dict[Link, tuple[int, ...]]:
        """Return, for each link, the context-parallel ranks of the communicator that serves it.

        by_link: whether each link has a communicator of its own: of the ranks of this node, and of this rank's
            counterparts on all nodes. If not, the whole ring serves both.
        apart: without `by_link`, give the link inside the node a communicator of the node's ranks all the same.
        """
        ring, groups = self.ring_peers, self.route_table.ring_topology
        in_node = tuple(ring[place] for place in groups.node_peers(self.ring_rank))
        if by_link:
            return {
                Link.INTRA: in_node,
                Link.INTER: tuple(ring[place] for place in groups.counterparts(self.ring_rank)),
            }
        if not apart or groups.nodes == 1:
            return dict.fromkeys(Link, tuple(ring))
        return {**({Link.INTRA: in_node} if len(in_node) > 1 else {}), Link.INTER: tuple(ring)}

    def note_call(self, choices: dict[str, str]) -> None:
        """Note that an attention call with these `choices`, by name, is about to be made, and count it."""
        self.choices = choices
        self.calls_made += 1

    @property
    def all_calls(self) -> int:
        """Return the number of calls so far that have brought tokens of several ranks together."""
        return self.calls_made + self.state_calls

    def traffic(self) -> dict[str, dict[str, int]]:
        """Return the bytes that this rank has sent: `{"intra": {"gather": n, "reduce": n}, "inter": {...}}`."""
        return _by_name(self.transport.sent_bytes + self.ulysses_transport.sent_bytes)

    def expected_traffic(self) -> dict[str, dict[str, int]]:
        """Return the bytes that this rank should have sent: `{"intra": {"gather": n, "reduce": n}, "inter": {...}}`.

        They are counted from the schedules of its calls.
        """
        return _by_name(self.expected_bytes)

    def reset_traffic(self) -> None:
        """Set the counts of `traffic` and `expected_traffic` to zero."""
        for counter in (self.transport.sent_bytes, self.ulysses_transport.sent_bytes, self.expected_bytes):
            counter.clear()

    @property
    def is_in_pass(self) -> bool:
        """Return whether a pass or a comparison of this ring is running."""
        return self._busy.locked()

    @contextmanager
    def one_pass(self, direction: Direction, call: CallId, device: torch.device) -> Iterator[None]:
        """Return a context that runs a pass of `call`: no other pass meanwhile, no autocast, one CUDA stream for all.

        A pass that raises leaves messages under way that a later one would take for its own, so later ones raise
        RuntimeError. The other ranks are told why when they miss this one. A pass that is refused before it begins,
        on another stream say, leaves the ring as it was.

        Ranks that make passes in different orders may send messages of the same sizes. On CPUs the labels of messages
        show it; on GPUs, where there are none, only the digest of this order does, which ranks compare.
        """
        self.check_usable(device)
        if not self._busy.acquire(blocking=False):
            raise self._entered_twice()
        is_cast = torch.is_autocast_enabled(device.type)
        try:
            if device.type == "cuda":
                self._stream = self._stream or torch.cuda.current_stream(device)
            self.passes_digest = hash((self.passes_digest, call.number, direction == "backward"))
            self.progress.begin_pass(direction, call)
            if direction == "forward" and torch._C._current_graph_task_id() == -1:
                self.progress.thread = threading.get_ident()  # checkpoints run forward passes in autograd's threads
            with torch.autocast(device.type, enabled=False) if is_cast else nullcontext():
                yield
        except BaseException as error:
            self.give_up(error)
            raise
        finally:
            self.progress.end_pass(direction)
            self._busy.release()

    @contextmanager
    def warming_up(self, device: torch.device) -> Iterator[None]:
        """Return a context that runs a pass which sends nothing: if it raises, the ring stays as it was."""
        self.check_usable(device)
        with self.alone():
            if device.type == "cuda":
                self._stream = self._stream or torch.cuda.current_stream(device)
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Return a context that keeps other threads of this process from sending messages of this ring.

        Entering it raises RuntimeError if one does already, which ends the ring: other ranks know nothing of it.
        """
        if not self._busy.acquire(blocking=False):
            raise self._entered_twice()
        try:
            yield
        finally:
            self._busy.release()

    def _entered_twice(self) -> RuntimeError:
        """Return the error of a second thread, which ends the ring: other ranks do not know of it."""
        error = RuntimeError(
            "burst attention was entered, or ranks were to compare a batch, while another of its passes was "
            "running on the same group; run microbatches one after another, cut batches in the thread that "
            "trains, or give each thread a process group and a ContextParallel of its own"
        )
        self.give_up(error)
        return error

    def check_usable(self, device: torch.device) -> None:
        """Raise RuntimeError unless a pass may begin now on `device`.

        It may not if this ring has ended, on another CUDA stream than before, or while a CUDA graph is captured.
        """
        self.check_open()
        if device.type != "cuda":
            return
        if torch.cuda.is_current_stream_capturing():  # nothing may wait in a CUDA graph
            raise RuntimeError("burst attention inside a CUDA graph is not supported; switch CUDA graphs off")
        self._check_stream(device)

    def check_open(self) -> None:
        """Raise RuntimeError if this ring has ended: its other ranks would not take part in anything collective."""
        if self.is_closed:
            raise RuntimeError("this ContextParallel is closed; make a new one, or close it after the last backward")
        if self.transport.board is not None:
            self.check_not_aborted()
        if self._broken:
            raise RuntimeError(
                f"an earlier call on this ring was left half way ({self._broken}), and its messages may still be on "
                "their way; restart the processes, or, on CPUs, make a new process group and a ContextParallel of it"
            )

    def check_not_aborted(self) -> None:
        """Raise RingError if the ring was aborted because another rank has given up."""
        if self.transport.board is not None and self.transport.board.ended:
            raise RingError(self.transport.board.ended)

    def close(self) -> None:
        """Close this ring on this rank, whose later passes raise RuntimeError, and free its buffers.

        Raises RuntimeError in the middle of a pass.
        """
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                "a ContextParallel was closed in the middle of a pass; close it after the backward pass"
            )
        self.is_closed = True
        self.positions, self.exchanged_rows = RowTable(), RowTable()
        self.warmed_up.clear()
        self.transport.close()
        self.ulysses_transport.close()
        self._busy.release()

    @property
    def is_broken(self) -> bool:
        """Return whether this rank has given up: a pass was left half way, or a call refused by this rank alone."""
        return bool(self._broken)

    def give_up(self, error: BaseException) -> None:
        """End this ring because of `error`, while other ranks may be in the middle of a pass, and tell them why.

        A ring of one rank does not end.
        """
        if self.topology.ranks > 1:
            if self.at_end is not None:
                self.at_end()
            why = "something failed while its messages were on their way"  # and nobody waits for them any more
            self._broken = why if isinstance(error, GeneratorExit) else f"{type(error).__name__}: {error}"
            self.transport.report_failure(f"rank {self.rank} gave up: {self._broken}")

    @contextmanager
    def profiled(self, profile: Profile) -> Iterator[Profile]:
        """Return a context that records passes in `profile`. It raises RuntimeError if some are recorded already."""
        if self.profile is not None:
            raise RuntimeError("this ring is being profiled already; leave that `with` block before entering another")
        self.profile = profile
        try:
            yield profile
        finally:
            self.profile = None
            profile.close()

    def _check_stream(self, device: torch.device) -> None:
        stream = torch.cuda.current_stream(device)
        if self._stream not in (None, stream):
            raise RuntimeError(
                f"burst attention ran on {self._stream} before and now on {stream}; run all passes of one "
                "context-parallel group on one CUDA stream"
            )


def _by_name(sent_bytes: Mapping[Channel, int]) -> dict[str, dict[str, int]]:
    """Return bytes by channel as `{"intra": {"gather": n, "reduce": n}, "inter": {...}}`."""
    by_link = {link.value: {traffic.value: 0 for traffic in Traffic} for link in Link}
    for channel, nbytes in sent_bytes.items():
        by_link[channel.link.value][channel.traffic.value] += nbytes
    return by_link
