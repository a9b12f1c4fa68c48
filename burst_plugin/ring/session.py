"""One rank's session on a ring: how ranks meet, compare what they are about to do, and end it.

A `ContextParallel` is a session, and what users ask of it.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from burst_plugin.comm.abort import end_waiting
from burst_plugin.comm.buffers import LABEL_BYTES
from burst_plugin.comm.call_identity import CallId, call_name
from burst_plugin.comm.consistency import ConsistencyCheck, prepared_together
from burst_plugin.comm.failure_watch import Board, FailureWatch
from burst_plugin.comm.process_groups import (
    Communicators,
    barrier,
    group_device,
    is_alive,
    launches_batches,
    refuse_torchcomms,
)
from burst_plugin.comm.torch_distributed import DistributedTransport
from burst_plugin.comm.transport import Channel, Message, RingError
from burst_plugin.ring.choices import make_plan
from burst_plugin.ring.dropped_rings import note_a_dropped_ring, warn_of_dropped_rings
from burst_plugin.ring.plan import Plan
from burst_plugin.ring.rank_state import RankState
from burst_plugin.ring.request import Inputs, Request
from burst_plugin.ring.routes import RouteTable
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Link, Topology, Traffic

__all__ = ["Session"]


class Session:
    """A rank of a ring, and its connections to the others.

    Args:
        group: that of all ranks; None for a single rank.
        levels: groups that a framework has made for the levels of a topology.
        rank, global_ranks: this rank within the group, and the global rank of each rank of the group.
        strategy: the options of the run.
    """

    rank_state: RankState

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        levels: Sequence[dist.ProcessGroup],
        rank: int,
        global_ranks: Sequence[int],
        strategy: Strategy,
    ) -> None:
        self.strategy, self.rank, self._global_ranks = strategy, rank, list(global_ranks)
        self.group = group if self.ranks > 1 else None  # one rank has no others to talk to
        if self.group is not None:
            refuse_torchcomms()
        self._consistency = (
            None if self.group is None else ConsistencyCheck(self.group, self.rank, self._global_ranks)
        )
        if self._consistency is not None and self._consistency.is_on_cpu and self.strategy.check == "sparse":
            raise ValueError(
                "check='sparse' is for GPUs: gloo, which moves what CPUs hold, ends a process that gets more bytes "
                "than it expects, so that ranks compare every call there; use check='auto'"
            )
        self.plans: dict[Hashable, Plan] = {}  # of the kinds of attention calls made before: see `choices.make_plan`
        self._comparison_count = self._attention_count = self._meetings = 0
        self._process = os.getpid()
        self._watch: FailureWatch | None = None
        self._devices: set[torch.device] = set()  # the group is known to move their tensors
        given = [] if self.group is None else [self.group, *levels]
        self._communicators = Communicators(given, self._global_ranks, self.strategy.max_ctas)

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self._global_ranks)

    @property
    def _aborts(self) -> bool:
        """Return whether this rank aborts its communicators once a rank has given up."""
        return self.strategy.abort and self.group is not None and launches_batches(self.group)

    @property
    def created_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Return the process groups that this ring has made so far, with the time-out that the given one had then."""
        return tuple(self._communicators.created)

    def _begin(self, topology: Topology) -> None:
        """Take a place in the ring, now that its topology is known."""
        ring, ulysses = (DistributedTransport({}, self._global_ranks) for _ in range(2))  # `_meet` replaces them
        table = RouteTable(topology, self.strategy)
        self.rank_state = RankState(self.rank, topology, self.strategy, ring, ulysses, table, self._consistency)
        weakref.finalize(self, note_a_dropped_ring, self.rank_state, self._communicators).atexit = False
        warn_of_dropped_rings()

    # ------------------------------------------------------------------------------------------- meeting and parting

    def connect(self, by_link: Collection[bool] | None = None) -> None:
        """Create the communicators that are still missing; collective, and harmless when repeated.

        `by_link`: which sets of them, one for both links (False), one for each (True); by default that of calls
        with a mask that leaves most of the work.
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
        for each in sorted(by_link):
            if not any(channel.by_link == each for channel in self._communicators):
                # With NCCL a communicator that leaves a node has few thread blocks for each peer, those inside too.
                peers = self.rank_state.link_peers(each, apart=launches_batches(self.group))
                self._communicators.connect(peers, each, self.rank_state.ring_id)
                if launches_batches(self.group):
                    self._meet_neighbours(peers, each)

    def _warm_up(self, inputs: Inputs, request: Request) -> None:
        """Make all that such calls need, and run both passes without their messages; collective."""
        from burst_plugin.ring.rehearsal import rehearse

        def prepared() -> Plan:
            plan = make_plan(self.rank_state, inputs, request, self.plans)
            self.check_device(plan.device)
            rehearse(plan, inputs)
            return plan

        def agree(plan: Plan | None, problem: str) -> None:
            at = f"comparison {self._next_comparison()}, of a warm-up"
            self.rank_state.compare(at, {} if plan is None else plan.signature, problem)

        plan, _ = prepared_together(prepared, agree)
        self.connect(plan.by_link)

    def _meet(self, consistency: ConsistencyCheck) -> None:
        """Give the ring the id that rank 0 draws, a place to record failures, and its transports."""
        said = [text.split() for text in consistency.meet(f"{os.urandom(8).hex()} {socket.gethostname()}")]
        ring_id, hosts = said[0][0], [each[1] for each in said]
        names = [f"global rank {g} on {host}" for g, host in zip(self._global_ranks, hosts, strict=True)]
        shared = dist.distributed_c10d._get_default_store()
        own = shared.clone()  # type: ignore[attr-defined]  # a connection: on a shared one this rank may wait for long
        store = PrefixStore(f"burst_plugin/{ring_id}", own)
        board = Board(store, self.rank, names, self.rank_state.progress, self.strategy.late_after)
        consistency.board = board
        state, pools = self.rank_state, self.rank_state.pools  # which a warm-up may have filled
        state.transport = DistributedTransport(self._communicators, self._global_ranks, board)
        if (group := state.group).degree > 1:
            exchange = self._communicators.whole
            if launches_batches(exchange) and group.nodes < state.topology.nodes:
                exchange = self._communicators.of_ranks(group.peers, ring_id)
            channels = {Channel(traffic, link): exchange for traffic in Traffic for link in Link}
            state.ulysses_transport = DistributedTransport(channels, self._global_ranks, board)
        state.transport.pool, state.ulysses_transport.pool = pools
        end = partial(end_waiting, threading.get_ident(), self._communicators.abort)
        self._watch = FailureWatch(board, end=end if self._aborts else None, fault=self._communicators.fault)
        self.rank_state.ring_id = ring_id  # set last: `connect` takes it for a sign that ranks have met

    def _meet_neighbours(self, link_peers: Mapping[Link, tuple[int, ...]], by_link: bool) -> None:
        """Connect to the next and the previous rank on every channel, now that all ranks are known to be there.

        NCCL connects two ranks at their first message, and would wait for ever for one that is lost by then.
        """
        transport = DistributedTransport(self._communicators, self._global_ranks)  # counts for itself
        sent = torch.zeros(LABEL_BYTES, dtype=torch.uint8, device=group_device(self._communicators.whole))
        for traffic in Traffic:
            for link, peers in link_peers.items():
                channel, place = Channel(traffic, link, by_link), peers.index(self.rank)
                to = Message(peers[(place + 1) % len(peers)], channel, sent)
                of = Message(peers[place - 1], channel, torch.empty_like(sent))
                sends, recvs = ([m] if self._is_on(link, m.peer) else [] for m in (to, of))
                for pending in transport.post(sends, recvs):
                    pending.wait()

    def _is_on(self, link: Link, peer: int) -> bool:
        """Return whether messages between this rank and another one go over `link`."""
        return peer != self.rank and self.rank_state.topology.link(self.rank, peer) is link

    def close(self) -> None:
        """Destroy the communicators that this ring made, and let go of its buffers; all ranks call it together.

        For programs that make one ring after another. Attention, and backward passes of earlier calls, raise
        RuntimeError from then on. The groups that it was given stay; where `torch.distributed` has ended already,
        nothing is left to destroy. All ranks wait for each other first, but not while an exception is handled, as in
        `finally`, nor once a rank has given up; with NCCL communicators are aborted or left alone then, since
        destroying them could wait. Raises RuntimeError in the middle of a pass.
        """
        some_gave_up = self.rank_state.is_broken or (self._watch is not None and self._watch.some_gave_up())
        self.release()
        if self.group is not None and self._communicators and dist.is_initialized():
            if some_gave_up or sys.exc_info()[0] is not None:
                if launches_batches(self.group):
                    if some_gave_up and self._aborts:
                        self._communicators.abort()
                    return
            elif is_alive(self.group):
                self._wait_for_all(self.group)
        self._communicators.destroy()

    def release(self) -> None:
        """Let go of this rank's buffers, without the other ranks: `close`, but the communicators stay."""
        self.rank_state.close()
        self.plans.clear()
        if self._watch is not None:
            self._watch.close()

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

    # ---------------------------------------------------------------------------------------------------- comparing

    def agree(self, signature: Mapping[str, object], problem: str = "", of: str = "a batch") -> int:
        """Compare what all ranks are about to do, and return how many agreements there have been; collective.

        Raises ValueError on every rank if any has a `problem`, or if they differ in `signature`, what has to be equal
        by name, or in their options.
        """
        number = self._next_comparison()
        self.rank_state.compare(f"comparison {number}, of {of}", signature, problem)
        return number

    def meet(self, at: str) -> None:
        """Check that all ranks are `at` the same place, as often as calls are compared; collective.

        For places after which a rank that left something out would wait elsewhere, for ranks that wait here.
        """
        self._meetings += 1
        consistency = self._consistency
        if consistency is not None and self.strategy.check_is_due(self._meetings, consistency.is_on_cpu):
            self.rank_state.check_open()
            self.rank_state.compare(at, {})

    def name_of_next_call(self, tag: object) -> str:
        """Return the name of the next attention call; a tag, maybe on a GPU, is read only where ranks compare it."""
        consistency = self._consistency
        reads = consistency is not None and (
            consistency.is_on_cpu or self.strategy.check_is_due(self._attention_count + 1, consistency.is_on_cpu)
        )
        step = self.rank_state.training_step
        return step if tag is None or not reads else call_name(step, tag)

    def agree_on_attention(
        self, signature: Callable[[], Mapping[str, object]], problem: str = "", name: str = ""
    ) -> CallId:
        """Compare as `agree` does, before an attention call that `Strategy.check` has ranks compare.

        `signature` returns what has to be equal, by name; it is called where ranks compare. At other calls only this
        rank knows of its problem, and the other ranks may be sending already: so the ring ends. `name` is the one of
        `name_of_next_call`.
        """
        self._attention_count += 1
        consistency = self._consistency
        due = consistency is None or self.strategy.check_is_due(self._attention_count, consistency.is_on_cpu)
        call = CallId(self._next_comparison(), name, due)
        if due:
            if problem or consistency is not None:
                self.rank_state.compare(f"the forward pass of {call}", signature(), problem)
            return call
        if problem:
            ended = "; ranks did not compare this call, so that the ring has ended (see Strategy.check)"
            refusal = ValueError(problem + ended)
            self.rank_state.give_up(refusal)
            raise refusal
        return call

    def _next_comparison(self) -> int:
        self.rank_state.check_open()
        if self.group is not None and os.getpid() != self._process:
            raise RuntimeError(
                "this ContextParallel belongs to the process that made it, and a data loader's worker is another: "
                "cut batches in the training loop, with shard_batch or burst_plugin.deepspeed.sharded_loader"
            )
        self._comparison_count += 1
        return self._comparison_count

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
