"""The transport of a process group: torch.distributed, over NCCL, gloo, or whatever backend the groups have.

All messages of a post on one communicator go out in one batch, receives before sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from burst_plugin.comm.call_identity import Progress
from burst_plugin.comm.failure_watch import Board
from burst_plugin.comm.process_groups import ctas_of, launches_batches, peer_bytes
from burst_plugin.comm.transport import Channel, Message, PeerLostError, Pending, Transport, Waited
from burst_plugin.topology import Link


class DistributedPending:
    """Messages, held on to, since gloo reads and writes them until waited for; `timeout` instead of the group's."""

    def __init__(
        self, messages: Sequence[Message], works: list[dist.Work], progress: Progress, timeout: timedelta | None
    ) -> None:
        self.messages, self.works, self.progress, self.timeout = messages, works, progress, timeout

    def wait(self, waited: Waited | None = None) -> None:
        """Wait for all messages; raise PeerLostError if one does not arrive. `waited` gets them as they are done."""
        try:
            self._wait(waited)
        finally:
            self.progress.waiting = None
        self.messages, self.works = (), []  # they refer to buffers and connections

    def _wait(self, waited: Waited | None) -> None:
        is_work_per_message = len(self.works) == len(self.messages)
        for number, work in enumerate(self.works):
            messages = self.messages[number : number + 1] if is_work_per_message else self.messages
            self.progress.wait_for(messages[0].peer)
            try:
                work.wait() if self.timeout is None else work.wait(self.timeout)
            except torch.AcceleratorError:  # a fault of this rank's own GPU, noticed here
                raise
            except RuntimeError as error:
                raise PeerLostError(messages[0].peer, reason_of(error)) from error
            if waited is not None:
                waited(messages)


class Communicator:
    """A process group that a ring posts to.

    Backends that launch a batch as one get it by `batch_isend_irecv`. With other backends it would post one message
    after the other, with a dozen checks each; so the functions that it calls in the end are called here.
    """

    def __init__(self, group: dist.ProcessGroup, global_ranks: Sequence[int], tag: int) -> None:
        self._group, self._global_ranks, self._tag = group, global_ranks, tag
        self._launches_batches = launches_batches(group)
        self.ctas = ctas_of(group)
        self.senders: set[int] = set()  # peers that batches have come from
        self._group_ranks: dict[int, int] = {}  # of peers met so far

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[dist.Work]:
        """Post messages, receives before sends. Return handles to wait for. Raise PeerLostError if a peer is gone."""
        works: list[dist.Work] = []
        try:
            if self._launches_batches:
                self.senders.update(m.peer for m in recvs)
                both = (*((dist.irecv, m) for m in recvs), *((dist.isend, m) for m in sends))
                ops = [dist.P2POp(op, m.data, self._global_ranks[m.peer], self._group) for op, m in both]
                return dist.batch_isend_irecv(ops)
            for m in recvs:
                works.append(self._group.recv([m.data], self._rank_of(m.peer), self._tag))
            for m in sends:
                works.append(self._group.send([m.data], self._rank_of(m.peer), self._tag))
        except torch.AcceleratorError:  # a fault of this rank's own GPU
            raise
        except RuntimeError as error:
            failed = [*recvs, *sends][len(works)]  # of a batch the first, as any may have failed
            raise PeerLostError(failed.peer, reason_of(error)) from error
        return works

    def _rank_of(self, peer: int) -> int:
        rank = self._group_ranks.get(peer)
        if rank is None:
            rank = self._group_ranks[peer] = dist.get_group_rank(self._group, self._global_ranks[peer])
        return rank


class DistributedTransport(Transport):
    """A transport that sends by torch.distributed, over process groups.

    Args:
        communicators: the process group of every channel.
        global_ranks: `global_ranks[r]` is the global rank of rank r of the context-parallel group.
        board: where this rank notes which one it waits for, and why it gives up; None for nowhere.
        tag: a number that separates these messages from other ones on the same groups.
        timeout: the time-out of messages, instead of the groups' own.
    """

    def __init__(
        self,
        communicators: Mapping[Channel, dist.ProcessGroup],
        global_ranks: Sequence[int],
        board: Board | None = None,
        *,
        tag: int = 0,
        timeout: timedelta | None = None,
    ) -> None:
        super().__init__(board=board)
        self._tag, self._timeout = tag, timeout
        self._progress = Progress()  # until there is a board
        self._groups = communicators
        self._global_ranks = global_ranks
        self._communicators: dict[dist.ProcessGroup, Communicator] = {}
        self._by_channel: dict[Channel, Communicator] = {}

    def start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[Pending]:
        """Start these messages, in one batch per communicator, receives before sends.

        Communicators follow one order on all ranks, whatever each of them sends and receives: NCCL connects two ranks
        at their first message, and holds up the host until both are there.
        """
        batches: dict[Communicator, tuple[list[Message], list[Message]]] = {}
        for number, posted in enumerate((recvs, sends)):
            for message in posted:
                communicator = self._by_channel.get(message.channel) or self._communicator(message.channel)
                batch = batches.get(communicator)
                if batch is None:
                    batch = batches[communicator] = ([], [])
                batch[number].append(message)
        pending: list[Pending] = []
        in_order = batches.items() if len(batches) == 1 else sorted(batches.items(), key=_first_channel)
        for communicator, (to_receive, to_send) in in_order:
            works = communicator.post(to_send, to_receive)
            pending.append(DistributedPending(to_receive + to_send, works, self.progress, self._timeout))
        return pending

    @property
    def backend_bytes(self) -> float:
        """Return roughly the bytes that NCCL holds for the peers that messages have come from; 0 without NCCL."""
        leaving = {communicator for channel, communicator in self._by_channel.items() if channel.link is Link.INTER}
        return sum(
            len(communicator.senders)
            * peer_bytes(communicator.ctas, Link.INTER if communicator in leaving else Link.INTRA)
            for communicator in self._communicators.values()
        )

    @property
    def progress(self) -> Progress:
        """Return the record of where this rank is in its program, with the peers that it waits for."""
        return self._progress if self.board is None else self.board.progress

    def _communicator(self, channel: Channel) -> Communicator:
        """Return the communicator of a channel, which several channels may share."""
        group = self._groups[channel]
        if group not in self._communicators:
            self._communicators[group] = Communicator(group, self._global_ranks, self._tag)
        self._by_channel[channel] = self._communicators[group]
        return self._by_channel[channel]

    def close(self) -> None:
        """Release buffers and communicators; no messages may be under way."""
        super().close()
        self._communicators.clear()
        self._by_channel.clear()


def _first_channel(batch: tuple[Communicator, tuple[list[Message], list[Message]]]) -> Channel:
    """Return the first channel of a communicator's batch; no two communicators of a ring share one."""
    return min(message.channel for messages in batch[1] for message in messages)


def reason_of(error: RuntimeError) -> str:
    """Return the sentence of a backend's error that says what happened, without source file and advice."""
    sentence = str(error).splitlines()[0].split("] ", 1)[-1]
    return sentence.split(". This is typically", 1)[0]
