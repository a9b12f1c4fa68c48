"""Messages between any two ranks of a group, round by round, for passes other than ring attention, such as scans.

In a round, a rank sends another rank all its tensors in one message.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from burst_plugin.comm.buffers import Buffer, Packing
from burst_plugin.comm.call_identity import CallId
from burst_plugin.comm.torch_distributed import DistributedTransport
from burst_plugin.comm.transport import Channel, Message, PeerLostError, Transport, lost_peer_error
from burst_plugin.ring.rank_state import RankState
from burst_plugin.topology import Link, Traffic
from burst_plugin.types import Direction, Spec

if TYPE_CHECKING:
    from burst_plugin.context import ContextParallel

TRANSPORTS: WeakKeyDictionary[RankState, Transport] = WeakKeyDictionary()


def connect(cp: ContextParallel) -> None:
    """Connect this rank with all ranks of its context-parallel group, for `Messages`; collective.

    Transports of ring attention connect a rank with its ring and its Ulysses group only; these messages go through
    the process group. Does nothing if that has been done, or if there is no process group.
    """
    state = cp.rank_state
    if cp.group is None or state in TRANSPORTS:
        return
    cp.connections.connect(())
    group, ring = cp.connections.communicators.whole, state.transport
    channels = {Channel(traffic, link): group for traffic in Traffic for link in Link}
    transport = DistributedTransport(channels, cp.connections.global_ranks, ring.board)
    transport.pool, transport.sent_bytes = ring.pool, ring.sent_bytes
    TRANSPORTS[state] = transport


class Messages:
    """The messages that one rank sends and receives in one pass.

    On CPUs each carries a label of the pass, so that a message of another pass is noticed.

    Args:
        state: of the rank.
        device: of all tensors that are sent and received.
        what: a description of the pass for labels and errors, equal on all ranks.
        direction, call: which pass of which call it is.
    """

    def __init__(self, state: RankState, device: torch.device, what: str, direction: Direction, call: CallId) -> None:
        self.state, self.device = state, device
        self.transport = TRANSPORTS.get(state, state.transport)
        self.log = None if state.profile is None else state.profile.begin_pass("exchange", device)
        if self.log is not None:
            self.transport = self.log.watch(self.transport)
        self.label: Tensor | None = None
        if device.type == "cpu":
            kind = blake2b(repr((state.ring_id, what)).encode(), digest_size=8).digest()
            self.label = torch.frombuffer(bytearray(call.label(direction, kind)), dtype=torch.uint8)
        self.traffic = Traffic.GATHER if direction == "forward" else Traffic.REDUCE
        self.what = what

    def exchange(
        self, sends: Mapping[int, Sequence[Tensor]], recvs: Mapping[int, Sequence[Spec]]
    ) -> Generator[None, None, dict[int, list[Tensor]]]:
        """Exchange one round of messages; return the tensors that came from each rank.

        What this rank sends itself is returned as it is.

        A generator, which yields while messages are under way, and returns when all have come.

        Args:
            sends: for each rank that is sent something, the tensors.
            recvs: for each rank that sends something to this one, the shapes and types of the tensors.

        Raises:
            RingError: if another rank is lost, or is in another call.
        """
        own = self.state.rank
        received = {own: list(sends[own])} if own in sends else dict[int, list[Tensor]]()
        leaving = [(rank, self._packed(tensors)) for rank, tensors in sorted(sends.items()) if rank != own]
        packings = {
            rank: _packing(tuple(specs), self.label is not None)
            for rank, specs in sorted(recvs.items())
            if rank != own
        }
        if not leaving and not packings:
            return received
        pool = self.transport.pool
        arriving = [(rank, pool.lease(packing.nbytes, self.device)) for rank, packing in packings.items()]
        outgoing = [self._message(rank, buffer) for rank, buffer in leaving]
        for message in outgoing:
            self.state.expected_bytes[message.channel] += message.data.numel()
        try:
            with nullcontext() if self.log is None else self.log.timed("move"):
                in_flight = self.transport.post(outgoing, [self._message(rank, buffer) for rank, buffer in arriving])
            yield
            while not self.transport.has_met(in_flight):
                yield
            with nullcontext() if self.log is None else self.log.timed("move"):
                for pending in in_flight:
                    pending.wait()
            for rank, buffer in arriving:
                if not buffer.has_label(self.label):
                    raise PeerLostError(rank, "what it sent belongs to another call")
                received[rank] = [view.clone() for view in buffer.views(packings[rank])]
        except PeerLostError as lost:
            raise lost_peer_error(self.transport, self.state.rank, self.what, lost) from lost
        for _, buffer in (*leaving, *arriving):
            pool.release(buffer)
        return received

    def _packed(self, tensors: Sequence[Tensor]) -> Buffer:
        """Return a buffer with these tensors, and the label."""
        packing = _packing(tuple((tuple(x.shape), x.dtype) for x in tensors), self.label is not None)
        buffer = self.transport.pool.lease(packing.nbytes, self.device)
        for view, x in zip(buffer.views(packing), tensors, strict=True):
            view.copy_(x)
        buffer.put_label(self.label)
        return buffer

    def _message(self, rank: int, buffer: Buffer) -> Message:
        link = self.state.topology.link(self.state.rank, rank)
        return Message(rank, Channel(self.traffic, link), buffer.data)


@lru_cache(maxsize=256)
def _packing(specs: tuple[Spec, ...], labelled: bool) -> Packing:
    return Packing(specs, labelled)
