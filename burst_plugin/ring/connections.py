"""How ranks meet and part: the nodes they are on, the communicators between them, and what watches these."""

from __future__ import annotations

import logging
import os
import socket
import sys
import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from burst_plugin.comm.buffers import LABEL_BYTES
from burst_plugin.comm.consistency import DISAGREE, ConsistencyCheck
from burst_plugin.comm.failure_watch import Board, FailureWatch
from burst_plugin.comm.process_groups import (
    Communicators,
    barrier,
    end_waiting,
    group_device,
    is_alive,
    launches_batches,
)
from burst_plugin.comm.torch_distributed import DistributedTransport
from burst_plugin.comm.transport import Channel, Message, RingError
from burst_plugin.ring.rank_state import RankState
from burst_plugin.schedule.rings import BY_NODE
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Link, Topology, Traffic, node_id, node_sizes

_LOG = logging.getLogger(__name__)
_NODE = "node: "
_TOLD = 0
_DROPPED: list[int] = []  # process groups of rings that were dropped without a close; then _TOLD


class Connections:
    """A rank's connections to the other ranks of its ring; there are none before the first `connect`.

    Args:
        rank_state: the rank's state, which gets other transports once ranks meet.
        group: the process group of all ranks; None for a single rank.
        levels: process groups that a framework has made for the levels of a topology, to be used where they suit.
        global_ranks: the global rank of each rank of the group.
        consistency: by which ranks compare which ring they connect; None for a single rank.
    """

    def __init__(
        self,
        rank_state: RankState,
        group: dist.ProcessGroup | None,
        levels: Sequence[dist.ProcessGroup],
        global_ranks: Sequence[int],
        consistency: ConsistencyCheck | None,
    ) -> None:
        self.rank_state, self.group = rank_state, group
        self.watch: FailureWatch | None = None
        self._consistency, self.global_ranks = consistency, list(global_ranks)
        self._devices: set[torch.device] = set()  # the group is known to move their tensors
        given = [] if group is None else [group, *levels]
        self.communicators = Communicators(given, self.global_ranks, rank_state.strategy.max_ctas)
        weakref.finalize(self, _note_a_dropped_ring, rank_state, self.communicators).atexit = False
        _warn_of_dropped_rings()

    @property
    def _aborts(self) -> bool:
        """Return whether this rank aborts its communicators once a rank has given up."""
        return self.rank_state.strategy.abort and self.group is not None and launches_batches(self.group)

    def connect(self, by_link: Collection[bool] | None = None) -> None:
        """Create the communicators of the ring that are still missing; collective, and harmless when repeated.

        At the first call ranks meet: they check that all connect this ring, and record where failures are told.

        by_link: which sets of communicators, one for both links (False), one for each link (True); None for the set
            that schedules need where every rank visits every block.
        """
        self.rank_state.check_open()
        if self._consistency is None or self.group is None:
            return
        if not self.rank_state.ring_id:
            self._meet(self._consistency)
        if self.rank_state.route_table.ring_ranks == 1:  # all ranks are one group: none to go around with
            return
        if by_link is None:
            by_link = {self.rank_state.route_table.dense(True).by_link}
        for is_by_link in sorted(by_link):
            if not any(channel.by_link == is_by_link for channel in self.communicators):
                # With NCCL a communicator that leaves a node has few thread blocks for each peer, those inside too.
                peers = self.rank_state.link_peers(is_by_link, apart=launches_batches(self.group))
                self.communicators.connect(peers, is_by_link, self.rank_state.ring_id)
                if launches_batches(self.group):
                    self.meet_neighbours(peers, is_by_link)

    def _meet(self, consistency: ConsistencyCheck) -> None:
        """Give the ring the id that rank 0 draws, a place to record failures, and its transports."""
        said = [text.split() for text in consistency.meet(f"{os.urandom(8).hex()} {socket.gethostname()}")]
        ring_id, hosts = said[0][0], [each[1] for each in said]
        names = [f"global rank {g} on {host}" for g, host in zip(self.global_ranks, hosts, strict=True)]
        shared = dist.distributed_c10d._get_default_store()
        own = shared.clone()  # type: ignore[attr-defined]  # a connection: on a shared one this rank may wait for long
        store = PrefixStore(f"burst_plugin/{ring_id}", own)
        board = Board(
            store, self.rank_state.rank, names, self.rank_state.progress, self.rank_state.strategy.late_after
        )
        consistency.board = board
        state, pools = self.rank_state, self.rank_state.pools  # which a warm-up may have filled
        state.transport = DistributedTransport(self.communicators, self.global_ranks, board)
        if (group := state.group).degree > 1:
            exchange = self.communicators.whole
            if launches_batches(exchange) and group.nodes < state.topology.nodes:
                exchange = self.communicators.of_ranks(group.peers, ring_id)
            channels = {Channel(traffic, link): exchange for traffic in Traffic for link in Link}
            state.ulysses_transport = DistributedTransport(channels, self.global_ranks, board)
        state.transport.pool, state.ulysses_transport.pool = pools
        end = partial(end_waiting, self.rank_state.progress, self.communicators.abort)
        self.watch = FailureWatch(board, end=end if self._aborts else None, fault=self.communicators.fault)
        self.rank_state.ring_id = ring_id  # set last: `connect` takes it for a sign that ranks have met

    def meet_neighbours(self, link_peers: Mapping[Link, tuple[int, ...]], by_link: bool) -> None:
        """Connect to the next and the previous rank on every channel, now that all ranks are known to be there.

        NCCL connects two ranks at their first message, and would wait for ever for one that is lost by then.
        """
        transport = DistributedTransport(self.communicators, self.global_ranks)  # counts for itself
        sent = torch.zeros(LABEL_BYTES, dtype=torch.uint8, device=group_device(self.communicators.whole))
        for traffic in Traffic:
            for link, peers in link_peers.items():
                channel, place = Channel(traffic, link, by_link), peers.index(self.rank_state.rank)
                to = Message(peers[(place + 1) % len(peers)], channel, sent)
                of = Message(peers[place - 1], channel, torch.empty_like(sent))
                sends, recvs = ([m] if self._is_on(link, m.peer) else [] for m in (to, of))
                for pending in transport.post(sends, recvs):
                    pending.wait()

    def _is_on(self, link: Link, peer: int) -> bool:
        """Return whether messages between this rank and another one go over `link`."""
        return peer != self.rank_state.rank and self.rank_state.topology.link(self.rank_state.rank, peer) is link

    def close(self) -> None:
        """Destroy the communicators that this ring made, and free its buffers; collective.

        All ranks wait for each other first, but not while an exception is handled, nor once a rank has given up; with
        NCCL communicators are aborted or left alone then, since destroying them could wait. Raises RuntimeError in
        the middle of a pass.
        """
        some_gave_up = self.rank_state.is_broken or (self.watch is not None and self.watch.some_gave_up())
        self.release()
        if self.group is not None and self.communicators and dist.is_initialized():
            if some_gave_up or sys.exc_info()[0] is not None:
                if launches_batches(self.group):
                    if some_gave_up and self._aborts:
                        self.communicators.abort()
                    return
            elif is_alive(self.group):
                self._wait_for_all(self.group)
        self.communicators.destroy()

    def release(self) -> None:
        """Free this rank's buffers and stop its watch, without the other ranks; the communicators stay."""
        self.rank_state.close()
        if self.watch is not None:
            self.watch.close()

    def _wait_for_all(self, group: dist.ProcessGroup) -> None:
        """Have this rank wait until no rank is in a pass any more. If that fails, the next `close` does not wait.

        With NCCL only the stream waits, behind the rank's passes: that will do, since NCCL finishes what is enqueued
        on a communicator before it destroys it.
        """
        try:
            barrier(group)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            lost = RingError(
                "a rank of the context-parallel group ended, or did not come, before all had closed the ring "
                f"({reason}); it is closed on this rank, and another close() does not wait"
            )
            self.rank_state.give_up(lost)
            raise lost from error
        except BaseException as error:
            self.rank_state.give_up(error)
            raise

    def check_device(self, device: torch.device) -> None:
        """Raise ValueError if the group cannot move tensors of `device`."""
        if self.group is None or device in self._devices:
            return
        here = group_device(self.group)
        if here.type == device.type == "cuda" and here != device:
            raise ValueError(
                f"q, k, v are on {device}, but the current GPU, on which ranks meet, is {here}; call "
                "torch.cuda.set_device before the process groups are made"
            )
        if here.type != device.type:  # gloo says that it moves what GPUs hold, but sends none of it from rank to rank
            raise ValueError(
                f"q, k, v are on {device}, but the context-parallel group moves tensors of {here}; move q, k, v "
                "there, or make the group with a backend for them: NCCL for GPUs, gloo for CPUs"
            )
        self._devices.add(device)


def _note_a_dropped_ring(rank_state: RankState, communicators: Communicators) -> None:
    """Remember that a ring was dropped with its process groups still there, which nothing else destroys."""
    if communicators.created and not rank_state.is_closed and dist.is_initialized():
        _DROPPED.append(len(communicators.created))


def _warn_of_dropped_rings() -> None:
    """Warn once, when another ring is made, of the process groups that dropped rings have left behind."""
    if len(_DROPPED) > 0 and _TOLD not in _DROPPED:
        _LOG.warning(
            "a ContextParallel was dropped without close(), and another one is made: the process groups that it made "
            "(%d), with their threads and connections, stay until the process ends; call close() on all ranks after "
            "the last backward pass",
            sum(_DROPPED),
        )
        _DROPPED.append(_TOLD)


def find_topology(
    strategy: Strategy, rank: int, ranks: int, sizes: list[int] | None, consistency: ConsistencyCheck | None
) -> Topology:
    """Return the nodes that ranks are on: by options, by `sizes` of a hierarchy, or by what ranks tell each other.

    Where the ranks of nodes are not side by side, or nodes have no common size above 1, it is one node of all ranks,
    with a warning; ValueError is raised if a schedule is asked for that goes by nodes.

    Args:
        strategy: has the options `ranks_per_node` and `schedule`.
        rank, ranks: this rank, and the number of all.
        sizes: of the levels of a hierarchy, innermost first; None if there is none.
        consistency: by which ranks tell each other, collectively; None for a single rank.
    """
    per_node = strategy.ranks_per_node
    said_per_node = per_node if isinstance(per_node, int) else None
    if said_per_node is not None or sizes is not None:
        return Topology.from_sizes(ranks, sizes, said_per_node)
    if consistency is None:
        return Topology(1, 1)
    said = consistency.exchange(f"{_NODE}{strategy.schedule} {node_id()}", "looking for nodes")
    if not all(text.startswith(_NODE) for text in said):
        raise ValueError(DISAGREE + "only some ask for nodes to be detected: give all the same ranks_per_node")
    schedules, ids = zip(*(text.removeprefix(_NODE).split(" ", 1) for text in said), strict=True)
    topology = Topology.from_node_ids(ids)
    if topology is None:
        return _without_nodes(rank, ranks, node_sizes(ids), [name for name in schedules if name in BY_NODE])
    if rank == 0 and len(set(ids)) != topology.nodes:
        _LOG.info("nodes of %s ranks count as %s", _listed(node_sizes(ids)), topology)
    return topology


def _without_nodes(rank: int, ranks: int, sizes: Sequence[int], impossible: Sequence[str]) -> Topology:
    """Return the topology of one flat ring over nodes of unequal `sizes`, or interleaved ones; rank 0 warns of it.

    `impossible` are the schedules of any rank that need nodes of one size. Raises ValueError if there are any.
    """
    situation = f"nodes have {_listed(sizes)} ranks" if sizes else "the ranks of a node are not side by side"
    if impossible:
        least = min(sizes, default=0)
        alternative = f"a group with {least} ranks of each node" if least > 1 else "a group that is spread like that"
        raise ValueError(
            f"schedule={impossible[0]!r} needs nodes with equally many ranks of the context-parallel "
            f"group, side by side, and here {situation}: use schedule='auto', which is one flat ring then, "
            f"{alternative}, or say with ranks_per_node how many ranks count as a node"
        )
    if rank == 0:
        warnings.warn(
            f"the {ranks} ranks of the context-parallel group are not spread evenly, in consecutive runs, "
            f"over the nodes ({situation}): using one flat ring; pass ranks_per_node or hierarchy to say otherwise",
            stacklevel=4,
        )
    return Topology(1, ranks)


def _listed(sizes: Sequence[int]) -> str:
    *first, last = map(str, sorted(set(sizes)))
    return f"{', '.join(first)} and {last}" if first else last
