"""`ContextParallel`: a process group as a ring, with its topology, layout, schedule and communicators."""

from __future__ import annotations

import logging
import os
import socket
import sys
import warnings
import weakref
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from secrets import token_hex
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh

from burst_plugin.checks import as_listed, shown, whole_number
from burst_plugin.comm.buffers import LABEL_BYTES
from burst_plugin.comm.call_identity import CallId, by_rank, call_name
from burst_plugin.comm.consistency import DISAGREE, Agreement, prepared_together
from burst_plugin.comm.failure_watch import Board, FailureWatch
from burst_plugin.comm.process_groups import Communicators, barrier, group_device, is_alive, launches_batches
from burst_plugin.comm.torch_distributed import DistributedTransport
from burst_plugin.comm.transport import Channel, Message, RingError
from burst_plugin.profiling.recorder import Profile
from burst_plugin.ring.load_balance import choose_tokens, imbalance
from burst_plugin.ring.rank_state import Member
from burst_plugin.ring.request import as_tokens, check_mask, token_dim
from burst_plugin.ring.routes import Attending, RouteTable
from burst_plugin.sequence.layout import Tokens, positions, token_count
from burst_plugin.sequence.masks import Mask
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Link, Topology, Traffic, node_id

__all__ = ["ContextParallel"]

_NODE = "node: "
_LOG = logging.getLogger(__name__)
_TOLD = 0
_DROPPED: list[int] = []  # process groups of rings that were dropped without a close; then _TOLD


class ContextParallel:
    """A context-parallel group: the ranks that hold one sequence between them.

    Make one per group and share it between layers. Creating it is collective when `ranks_per_node` is "auto"
    and no hierarchy is given (ranks then ask each other for their node); so is the first attention call, which
    creates the communicators that `group` and `hierarchy` do not supply already.

    Args:
        group: the whole context-parallel ProcessGroup, or a DeviceMesh of one dimension; None for a single rank,
            which among several has to be said by `hierarchy=[1]`.
        hierarchy: Megatron's hierarchical groups or their sizes, innermost first; fixes the ranks per node.
        strategy: all options at once.
        options: those of `Strategy`, by name, in place of one: `ContextParallel(group, layout="striped")`.

    Raises:
        ValueError: an option that is not valid, sizes that do not multiply to the group's, or a group that
            this rank is not in; no group, where there are several ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        hierarchy: Sequence[dist.ProcessGroup] | Sequence[int] | None = None,
        strategy: Strategy | None = None,
        **options: Any,
    ) -> None:
        self.strategy = Strategy.of(strategy, **options)
        group = _as_group(group)
        levels = _levels(hierarchy)
        if group is None and hierarchy is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"there are {dist.get_world_size()} ranks, and no group says which of them hold a sequence together: "
                "pass their process group, torch.distributed.group.WORLD for all, hierarchy=[1] for this rank alone"
            )
        self.rank, self._global_ranks = _place(group)
        self.group = group if self.ranks > 1 else None  # one rank has nobody to talk to
        self._agreement = None if self.group is None else Agreement(self.group, self.rank, self._global_ranks)
        if self._agreement is not None and self._agreement.is_on_cpu and self.strategy.check == "sparse":
            raise ValueError(
                "check='sparse' is for GPUs: gloo, which moves what CPUs hold, ends a process that gets more bytes "
                "than it expects, so that ranks compare every call there; use check='auto'"
            )
        sizes = None if levels is None else [x if isinstance(x, int) else x.size() for x in levels]
        groups = [level for level in levels or () if not isinstance(level, int)]
        self.calls: dict[Hashable, Any] = {}  # kinds of attention calls made before: see `choices.prepare`
        self._agreement_count = self._attention_count = self._meetings = 0
        self._process = os.getpid()
        self._watch: FailureWatch | None = None
        self._devices: set[torch.device] = set()  # whose tensors the group is known to move
        self._communicators = Communicators([] if self.group is None else [self.group, *groups], self._global_ranks)
        topology = self._find_topology(sizes)
        table = RouteTable(topology, self.strategy)
        ring, team = (DistributedTransport({}, self._global_ranks) for _ in range(2))  # `_meet` replaces them
        self.member = Member(self.rank, topology, self.strategy, ring, team, table, self._agreement)
        weakref.finalize(self, _note_a_dropped_ring, self.member, self._communicators).atexit = False
        _tell_of_dropped_rings()

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """Itself: a copy of a model, for a moving average or as a reference, goes around the same ring."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a ContextParallel cannot be saved or sent to another process, since its process groups cannot: save a "
            "model's state_dict(), and make a ContextParallel where it is loaded"
        )

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self._global_ranks)

    @property
    def created_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups that this ring has made so far, with the time-out that the given one had then."""
        return tuple(self._communicators.created)

    @property
    def topology(self) -> Topology:
        """Nodes and ranks per node."""
        return self.member.topology

    def shard(self, x: Tensor, dim: int = 1, tokens: Tokens | None = None) -> Tensor:
        """This rank's tokens out of the whole sequence `x`, along `dim`.

        Where the length does not divide by the number of ranks, they hold unequal numbers: pass
        `tokens=Tokens(length)` to `burst_attention` and `unshard` then. ValueError if `tokens` has another length.
        """
        dim = token_dim("x", x, dim)
        tokens = Tokens(x.shape[dim]) if tokens is None else as_tokens(tokens)
        return self.member.route_table.layout(tokens).shard(x, dim, (self.rank, self.ranks), tokens)

    def unshard(self, local: Tensor, dim: int = 1, tokens: Tokens | None = None) -> Tensor:
        """The whole sequence from all ranks' `local`, along `dim`, on every rank; collective.

        For looking at results: raises RuntimeError where gradients would be lost. ValueError on every rank if any
        does not hold its part of `tokens`, or if they differ in what they pass.
        """
        if getattr(local, "requires_grad", False) and torch.is_grad_enabled():
            raise RuntimeError(
                "unshard has no gradient; call it on x.detach() or under torch.no_grad(), and compute losses on "
                "the shard"
            )

        def agree(held: tuple[int, Tokens, list[int]] | None, problem: str) -> int:
            if held is None:
                return self.agree({}, problem)
            others = [*local.shape[: held[0]], *local.shape[held[0] + 1 :]]
            return self.agree({"unshard": held[1], "dim": held[0], "other sizes": others, "dtype": local.dtype})

        (dim, tokens, lengths), _ = prepared_together(partial(self._held, local, dim, tokens), agree)
        layout, held = self.member.route_table.layout(tokens), lengths[self.rank]
        if self.group is None:
            return layout.unshard([local], dim, tokens)
        padded = local.contiguous()
        if held < max(lengths):
            padded = local.new_zeros((*local.shape[:dim], max(lengths), *local.shape[dim + 1 :]))
            padded.narrow(dim, 0, held).copy_(local)
        shards = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(shards, padded, group=self.group)
        whole = [shard.narrow(dim, 0, length) for shard, length in zip(shards, lengths, strict=True)]
        return layout.unshard(whole, dim, tokens)

    def _held(self, local: Tensor, dim: int, tokens: Tokens | None) -> tuple[int, Tokens, list[int]]:
        """The dimension and the sequence that `local` is cut along, and how many tokens each rank holds of it.

        ValueError if this rank holds another number.
        """
        dim = token_dim("local", local, dim)
        # A rank without any token has to say so, too.
        tokens = Tokens(max(1, local.shape[dim] * self.ranks)) if tokens is None else as_tokens(tokens)
        lengths = [token_count(runs) for runs in self.member.route_table.shards(tokens)]
        if local.shape[dim] != lengths[self.rank]:
            raise ValueError(
                f"rank {self.rank} holds {lengths[self.rank]} of {tokens.length} tokens, but local "
                f"{list(local.shape)} has {local.shape[dim]} along dim {dim}; pass the tokens= of its shard"
            )
        return dim, tokens, lengths

    def positions(self, tokens: Tokens | int, device: torch.device | None = None) -> Tensor:
        """Global positions [S_local], int64, of this rank's tokens in a sequence, given whole or by its length."""
        tokens = as_tokens(tokens, or_length=True)
        return positions(self.member.route_table.shards(tokens)[self.rank], device)

    def tokens(self, length: int, mask: Mask, *, alike: bool = False) -> Tokens:
        """A sequence of `length` tokens, dealt out as suits `mask`: what is done first, computing and sending.

        It is for `tokens=` of all else. With `alike` ranks hold equally many, as lengths of `even_length` allow.
        """
        check_mask(mask)
        return choose_tokens(self.member.route_table, length, mask, alike)

    def imbalance(self, mask: Mask, tokens: Tokens | int) -> float:
        """Most over mean of the ranks' attention work; 1 is even."""
        check_mask(mask)
        tokens = as_tokens(tokens, or_length=True)
        return imbalance(self.member.route_table, Attending(tokens, tokens, mask))

    def step(self, number: int, microbatch: int | None = None) -> None:
        """Say that the calls from now on belong to training step `number`, and to this microbatch of it.

        Ranks compare it before every pass that they compare, and messages carry it on CPUs, so that a rank that
        skipped a step is found at its next call, before anything is computed of it. Adapters of frameworks call this
        themselves. Not collective.
        """
        self.member.training_step = f"step {number}" + ("" if microbatch is None else f", microbatch {microbatch}")

    def traffic(self) -> dict[str, dict[str, int]]:
        """Bytes that this rank has sent: `{"intra": {"gather": n, "reduce": n}, "inter": {...}}`.

        Attention data only: not the `agreement.EXCHANGE_BYTES` per peer by which ranks agree before a call.
        """
        return self.member.traffic()

    def expected_traffic(self) -> dict[str, dict[str, int]]:
        """The same, as the schedule counts it for the calls made."""
        return self.member.expected_traffic()

    def reset_traffic(self) -> None:
        """Start counting from zero."""
        self.member.reset_traffic()

    def allocated_bytes(self) -> int:
        """Bytes of all communication buffers; does not grow once every kind of call has been made twice."""
        return self.member.transport.pool.allocated_bytes + self.member.team_transport.pool.allocated_bytes

    def describe(self) -> dict[str, str]:
        """What runs: topology, schedule, layout and, after the first call, kernel and travellers."""
        degree = self.strategy.ulysses_degree
        return {
            "topology": str(self.topology),
            **({"ulysses_degree": str(degree)} if degree > 1 else {}),
            "schedule": self.member.route_table.schedule_name,
            "layout": self.strategy.layout,
            **self.member.choices,
        }

    def profile(self) -> AbstractContextManager[Profile]:
        """Note what this rank computes, sends and waits for until the end of the `with` block; see `Profile`."""
        return self.member.profiled(Profile(self.rank, self.topology, self.group))

    def connect(self, by_link: Collection[bool] | None = None) -> None:
        """Create the communicators that are still missing; collective, and harmless when repeated.

        `by_link`: which sets of them, one for both links (False), one for each (True); by default that of calls whose
        mask leaves most of the work.
        """
        self.member.check_open()
        if self._agreement is None or self.group is None:
            return
        if not self.member.ring_id:
            self._meet(self._agreement, self.group)
        if self.member.route_table.ring_ranks == 1:  # heads are exchanged by all ranks: nobody to go around with
            return
        if by_link is None:
            by_link = {self.member.route_table.dense(True).by_link}
        for each in sorted(by_link):
            if Channel(Traffic.GATHER, Link.INTRA, each) not in self._communicators:
                self._communicators.connect(self.member.link_peers(each), each, self.member.ring_id)
                if launches_batches(self.group):
                    self._meet_neighbours(each)

    def _meet(self, agreement: Agreement, group: dist.ProcessGroup) -> None:
        """Give the ring the id that rank 0 draws, a place to record failures, and its transports."""
        mine = f"{token_hex(8)} {socket.gethostname()} {agreement.wire} {agreement.group_name}"
        said = [text.split() for text in agreement.exchange(mine, "connecting")]
        if len({tuple(each[3:]) for each in said}) > 1:
            places = {rank: f"before the ring of group {each[-1]} is connected" for rank, each in enumerate(said)}
            raise ValueError(f"ranks are at different places: {by_rank(places, self.ranks)}")
        ring_id, hosts = said[0][0], [each[1] for each in said]
        names = [f"global rank {g} on {host}" for g, host in zip(self._global_ranks, hosts, strict=True)]
        shared = dist.distributed_c10d._get_default_store()
        own = shared.clone()  # type: ignore[attr-defined]  # a connection: on that of others one may wait for long
        store = PrefixStore(f"burst_plugin/{ring_id}", own)
        board = Board(store, self.rank, names, self.member.progress, self.strategy.late_after)
        agreement.share([each[2] for each in said], board)
        self.member.transport = DistributedTransport(self._communicators, self._global_ranks, board)
        if self.strategy.ulysses_degree > 1:
            channels = {Channel(traffic, link): group for traffic in Traffic for link in Link}
            self.member.team_transport = DistributedTransport(channels, self._global_ranks, board)
        self._watch = FailureWatch(board)
        self.member.ring_id = ring_id  # the last, as `connect` takes it for a sign that ranks have met

    def _meet_neighbours(self, by_link: bool) -> None:
        """Connect to the next and the previous rank on every channel, now that all ranks are known to be there.

        NCCL connects two ranks at their first message, and would wait for one that is lost by then for ever.
        """
        transport = DistributedTransport(self._communicators, self._global_ranks)  # counts for itself
        sent = torch.zeros(LABEL_BYTES, dtype=torch.uint8, device=group_device(self._communicators.whole))
        for traffic in Traffic:
            for link, peers in self.member.link_peers(by_link).items():
                if len(peers) > 1:
                    channel, place = Channel(traffic, link, by_link), peers.index(self.rank)
                    to = Message(peers[(place + 1) % len(peers)], channel, sent)
                    of = Message(peers[place - 1], channel, torch.empty_like(sent))
                    for pending in transport.post([to], [of]):
                        pending.wait()

    def close(self) -> None:
        """Destroy the communicators that this ring made, and let go of its buffers; all ranks call it together.

        For programs that make one ring after another. Attention, and backward passes of earlier calls, raise
        RuntimeError from then on. The groups that it was given stay; where `torch.distributed` has ended already,
        nothing is left to destroy. All ranks wait for each other first, but not while an exception is handled, as in
        `finally`, nor once a rank has given up; with NCCL communicators are left alone then, since destroying them
        could wait. RuntimeError in the middle of a pass.
        """
        some_gave_up = self.member.is_broken or (self._watch is not None and self._watch.some_gave_up())
        self.release()
        if self.group is not None and self._communicators and dist.is_initialized():
            if some_gave_up or sys.exc_info()[0] is not None:
                if launches_batches(self.group):
                    return
            elif is_alive(self.group):
                self._wait_for_all(self.group)
        self._communicators.destroy()

    def release(self) -> None:
        """Let go of this rank's buffers, without the other ranks: `close`, but the communicators stay."""
        self.member.close()
        self.calls.clear()
        if self._watch is not None:
            self._watch.close()

    def _wait_for_all(self, group: dist.ProcessGroup) -> None:
        """Until no rank is in a pass any more. If that fails, the next `close` waits for nobody."""
        try:
            barrier(group)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            lost = RingError(
                "a rank of the context-parallel group ended, or did not come, before all had closed the ring "
                f"({reason}); it is closed on this rank, and another close() waits for nobody"
            )
            self.member.give_up(lost)
            raise lost from error
        except BaseException as error:
            self.member.give_up(error)
            raise

    def agree(self, signature: Mapping[str, object], problem: str = "") -> int:
        """Compare what all ranks are about to do, and return how many agreements there have been; collective.

        Raises ValueError on every rank if any has a `problem`, or if they differ in `signature`, what has to be equal
        by name, or in their options.
        """
        number = self._next_agreement()
        self.member.compare(f"comparison {number}, of a batch", signature, problem)
        return number

    def meet(self, at: str) -> None:
        """Compare with the other ranks that all are `at` the same place, as often as calls are compared; collective.

        For places after which a rank that left something out would wait elsewhere, for ranks that wait here.
        """
        self._meetings += 1
        agreement = self._agreement
        if agreement is not None and self.strategy.check_is_due(self._meetings, agreement.is_on_cpu):
            self.member.check_open()
            self.member.compare(at, {})

    def name_of_next_call(self, tag: object) -> str:
        """Return the name of the next attention call; a tag, which may lie on a GPU, is read only where ranks do."""
        agreement = self._agreement
        reads = agreement is not None and (
            agreement.is_on_cpu or self.strategy.check_is_due(self._attention_count + 1, agreement.is_on_cpu)
        )
        return call_name(self.member.training_step, tag if reads else None)

    def agree_on_attention(self, signature: Mapping[str, object], problem: str = "", name: str = "") -> CallId:
        """`agree` before an attention call, if it is one of those that `Strategy.check` has ranks compare.

        At others only this rank knows of its problem, and the other ranks may be sending already: so the ring ends.
        `name` is that of `name_of_next_call`.
        """
        self._attention_count += 1
        agreement = self._agreement
        due = agreement is None or self.strategy.check_is_due(self._attention_count, agreement.is_on_cpu)
        call = CallId(self._next_agreement(), name, due)
        if due:
            self.member.compare(f"the forward pass of {call}", signature, problem)
            return call
        if problem:
            ended = "; ranks did not compare this call, so that the ring has ended (see Strategy.check)"
            refusal = ValueError(problem + ended)
            self.member.give_up(refusal)
            raise refusal
        return call

    def _next_agreement(self) -> int:
        self.member.check_open()
        if self.group is not None and os.getpid() != self._process:
            raise RuntimeError(
                "this ContextParallel belongs to the process that made it, and a data loader's worker is another: "
                "cut batches in the training loop, with shard_batch or burst_plugin.deepspeed.sharded_loader"
            )
        self._agreement_count += 1
        return self._agreement_count

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

    def _find_topology(self, sizes: list[int] | None) -> Topology:
        per_node = self.strategy.ranks_per_node
        if isinstance(per_node, int) or sizes is not None:
            return Topology.from_sizes(self.ranks, sizes, per_node if isinstance(per_node, int) else None)
        if self._agreement is None:
            return Topology(1, 1)
        said = self._agreement.exchange(_NODE + node_id(), "looking for nodes")
        if not all(text.startswith(_NODE) for text in said):
            raise ValueError(DISAGREE + "only some ask for nodes to be detected: give all the same ranks_per_node")
        topology = Topology.from_node_ids(said)
        if topology is None:
            if self.rank == 0:
                warnings.warn(
                    f"the {self.ranks} ranks of the context-parallel group are not spread evenly, in consecutive "
                    "runs, over the nodes: using one flat ring; pass ranks_per_node or hierarchy to say otherwise",
                    stacklevel=3,
                )
            return Topology(1, self.ranks)
        return topology


def _as_group(group: object) -> dist.ProcessGroup | None:
    """The group of a mesh's only dimension, or a group itself. ValueError for a mesh of more, or anything else."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"got a mesh of {group.ndim} dimensions, {group.mesh_dim_names}; pass the one of the "
                'context-parallel ranks, such as mesh["cp"]'
            )
        return group.get_group()
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:  # new_group's, where a rank is left out
        raise _outsider(group)
    raise ValueError(
        f"group is {shown(group)}, not a process group; pass the context-parallel ProcessGroup, such as "
        'torch.distributed.group.WORLD, or a DeviceMesh of one dimension, mesh["cp"]'
    )


def _outsider(group: object) -> ValueError:
    here = f" (global rank {dist.get_rank()})" if dist.is_initialized() else ""
    return ValueError(
        f"this process{here} is not in the group it was given ({group}); pass the context-parallel group that this "
        "rank belongs to"
    )


def _levels(
    hierarchy: Sequence[dist.ProcessGroup] | Sequence[int] | None,
) -> list[dist.ProcessGroup | int] | None:
    """Hierarchical groups or their sizes, one by one. ValueError for anything else."""
    if hierarchy is None:
        return None
    expected = "give a list of sizes or of process groups, innermost first, such as [8, 2]"
    levels: list[dist.ProcessGroup | int] = []
    for level in as_listed("hierarchy={}", hierarchy, expected):
        if isinstance(level, dist.ProcessGroup):
            levels.append(level)
        else:
            levels.append(whole_number("hierarchy=[...] with a level of {}", level, expected, None))
    return levels


def _place(group: dist.ProcessGroup | None) -> tuple[int, list[int]]:
    """This rank within the group, and the global ranks of its members."""
    if group is None:
        return 0, [0]
    if dist.get_rank(group) < 0:
        raise _outsider(group)
    return dist.get_rank(group), dist.get_process_group_ranks(group)


def _note_a_dropped_ring(member: Member, communicators: Communicators) -> None:
    """Remember that a ring was dropped with its process groups still there, which nothing else destroys."""
    if communicators.created and not member.is_closed and dist.is_initialized():
        _DROPPED.append(len(communicators.created))


def _tell_of_dropped_rings() -> None:
    """Say once, where another ring is made, what those before it have left behind."""
    if len(_DROPPED) > 0 and _TOLD not in _DROPPED:
        _LOG.warning(
            "a ContextParallel was dropped without close(), and another one is made: the process groups that it made "
            "(%d), with their threads and connections, stay until the process ends; call close() on all ranks after "
            "the last backward pass",
            sum(_DROPPED),
        )
        _DROPPED.append(_TOLD)
