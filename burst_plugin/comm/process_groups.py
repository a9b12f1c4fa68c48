"""The communicators of a ring: process groups, by kind of traffic and link.

There is one for each of (gather | reduce) x (intra | inter) where a schedule uses both links at the same time. Groups
that a framework has made carry gather traffic where they suit; the other groups are made here. With NCCL every group
takes multiprocessors from the attention that hides it, and memory for each peer: so its thread blocks (CTAs) are
limited.

A rank ends even where it would wait for ever, as with NCCL for a message that another rank never sends. An abort of
communicators ends the waiting kernels. But it leaves garbage in the tensors that they were to receive, and whatever
the host has enqueued behind them computes with it. So the thread that trains gets an error first, which is raised
before it runs another line: also where it waits for the GPU, as soon as that wait returns.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed.device_mesh import DeviceMesh

from burst_plugin.checks import as_listed, shown, whole_number
from burst_plugin.comm.call_identity import Progress
from burst_plugin.comm.transport import Channel, RingError
from burst_plugin.topology import Link, Traffic

_CTAS = {Link.INTRA: 32, Link.INTER: 4}  # that NCCL takes for a peer without a limit (paths.cc): between H100s
_CTA_BYTES = 9.4 * 2**20  # LL 0.5, LL128 4.9, simple 4 MiB (p2p.cc)
_FAULTS = {ErrorType.TIMEOUT: "time-out", ErrorType.COMM_ERROR: "lost connection"}


class Communicators(dict[Channel, dist.ProcessGroup]):
    """A dict from channels to the process groups that carry them, filled by `connect`.

    Args:
        given: groups that exist already, the group of all context-parallel ranks first; others are used where they
            suit.
        global_ranks: the global rank of each context-parallel rank.
        max_ctas: a limit on NCCL's thread blocks for each group that is made here; 0 sets no limit.

    `created` lists the groups that were made here.
    """

    def __init__(self, given: Sequence[dist.ProcessGroup], global_ranks: Sequence[int], max_ctas: int = 0) -> None:
        self._given, self._global_ranks, self._max_ctas = given, global_ranks, max_ctas
        self.created: list[dist.ProcessGroup] = []
        self._known: dict[tuple[Traffic, tuple[int, ...]], dist.ProcessGroup] = {}  # by traffic and ranks
        self._attempts = 0
        self._is_aborted = False

    @property
    def whole(self) -> dist.ProcessGroup:
        """Return the group of all context-parallel ranks, which was given."""
        return self._given[0]

    def connect(self, members: Mapping[Link, tuple[int, ...]], by_link: bool, mark: str) -> None:
        """Add a process group for each link and kind of traffic, a given one or one made here; collective.

        Args:
            members: for each link, the context-parallel ranks between which it is used, this one among them.
            by_link: the field of this name of the channels to add.
            mark: text, equal on all ranks, that tells the names of new groups from the names of other rings' groups.
        """
        known = dict(self._known)
        for group in filter(self._serves, self._given):
            there = dist.get_process_group_ranks(group)
            known.setdefault((Traffic.GATHER, tuple(self._global_ranks.index(rank) for rank in there)), group)
        self._attempts += 1  # part of names: an attempt that failed has left some of its groups behind
        ring_group, used = self.whole, {self.whole, *self.values()}
        channels: dict[Channel, dist.ProcessGroup] = {}
        for traffic in Traffic:
            for link in members:
                key = (traffic, members[link])
                if key not in known:
                    global_ranks = [self._global_ranks[rank] for rank in members[link]]
                    name = f"BURST_{traffic.name}_{link.name}_{self._attempts}_{mark}_{global_ranks[0]}"
                    known[key] = new_group_like(ring_group, global_ranks, name, _limit(self._max_ctas, link))
                    self.created.append(known[key])
                elif known[key] not in used:  # a given one, which may be new
                    warm_up(known[key])
                used.add(known[key])
                channels[Channel(traffic, link, by_link)] = known[key]
        self.update(channels)  # all of them or, if one could not be made, none
        self._known = known

    def of_ranks(self, ranks: Sequence[int], mark: str) -> dist.ProcessGroup:
        """Return a process group of these context-parallel ranks for the exchange of heads; collective.

        It is a given group of just these ranks, or one made here, whose name has `mark` in it. Nothing else is at
        work while heads are exchanged, so that its thread blocks are not limited.
        """
        global_ranks = [self._global_ranks[rank] for rank in ranks]
        for group in self._given:
            if dist.get_process_group_ranks(group) == global_ranks:
                warm_up(group)
                return group
        made = new_group_like(self.whole, global_ranks, f"BURST_ULYSSES_{mark}_{global_ranks[0]}")
        self.created.append(made)
        return made

    def _serves(self, group: dist.ProcessGroup) -> bool:
        """Return whether a given group suits gather traffic: with NCCL, if it is like one that is made here.

        Then its stream has high priority. Most have not, and carry a framework's own collectives besides.
        """
        backend = group._get_backend(group_device(group))
        if backend.name() != "nccl":
            return True
        options: Any = backend.options
        return options.is_high_priority_stream and bool(ctas_of(group) or not self._max_ctas)

    def fault(self) -> str:
        """Return the first fault that NCCL's watchdog has found on any group, such as "time-out"; "" for none."""
        return next(filter(None, map(fault_of, (*self._given, *self.created))), "")

    def abort(self) -> None:
        """Abort all groups, also groups that a framework has made, so that waits in them end; not collective."""
        if not self._is_aborted:
            self._is_aborted = True
            abort_groups({*self._given, *self.created})

    def destroy(self) -> None:
        """Forget all channels, and destroy the groups that were made here; collective."""
        self.clear()
        self._known.clear()
        while self.created:
            group = self.created.pop()
            if is_alive(group):
                dist.destroy_process_group(group)


def new_group_like(
    group: dist.ProcessGroup, global_ranks: Sequence[int], name: str, max_ctas: int = 0
) -> dist.ProcessGroup:
    """Return a new communicator over `global_ranks`, with the backend, time-out and options of `group`, warmed up.

    Exactly those ranks call this, in the same order on each, with a `name` that no other group has. With NCCL
    `max_ctas` limits its thread blocks, unless 0, or `group` has a limit of its own.
    """
    device = group_device(group)
    original = group._get_backend(device)
    backend, existing = original.name(), original.options  # for other devices the group may have another backend
    options = None
    if backend == "nccl":  # a copy: torch writes into these options
        # A message and the next kernel wait for the same event: high priority has the message start first.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config, options._timeout = existing.config, existing._timeout  # type: ignore[attr-defined]
        if max_ctas and hasattr(options.config, "max_ctas") and not ctas_of(group):
            # NCCL refuses a maximum below the minimum.
            options.config.max_ctas = max(max_ctas, options.config.min_ctas)
    with created_by_members_alone(name):
        created: dist.ProcessGroup = dist.new_group(
            list(global_ranks),
            timeout=existing._timeout,
            backend=backend,
            pg_options=options,
            use_local_synchronization=True,
            group_desc=name,
        )
    warm_up(created)
    return created


def ctas_of(group: dist.ProcessGroup) -> int:
    """Return the most thread blocks that NCCL takes for `group` at once; 0 if it has no limit, or is not NCCL's."""
    options = getattr(group._get_backend(group_device(group)), "options", None)
    limit: int = getattr(getattr(options, "config", None), "max_ctas", 0)
    return max(0, limit)  # NCCL_CONFIG_UNDEF_INT is negative


def _limit(max_ctas: int, link: Link) -> int:
    return min(max_ctas, _CTAS[link]) if link is Link.INTER else max_ctas


def peer_bytes(max_ctas: int, link: Link) -> float:
    """Return the bytes that NCCL holds for each peer that a communicator receives from, on an H100.

    It has buffers for as many thread blocks as it might take for the largest message, whatever is sent.

    max_ctas: the limit on the communicator's thread blocks; 0 for none.
    link: the link to the peer; between nodes NCCL takes fewer thread blocks.
    """
    return (_limit(max_ctas, link) or _CTAS[link]) * _CTA_BYTES


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the time-out of messages of `group`."""
    timeout: timedelta = group._get_backend(group_device(group)).options._timeout
    return timeout


def fault_of(group: dist.ProcessGroup) -> str:
    """Return the faults that NCCL's watchdog has found on `group`, such as "time-out"; "" without NCCL or faults.

    The watchdog is asked, not the GPU: a query of its events could disturb a CUDA graph that another thread captures.
    """
    if not is_alive(group):
        return ""
    backends: Any = [group._get_backend(device) for device in group._device_types]
    found = {each.get_error() for each in backends if each.name() == "nccl"} - {ErrorType.SUCCESS}
    return ", ".join(_FAULTS.get(each, each.name) for each in found)


def is_alive(group: dist.ProcessGroup) -> bool:
    """Return whether the group has not been destroyed, alone or with all groups."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


def barrier(group: dist.ProcessGroup) -> None:
    """Have all ranks of a group wait for each other: an all-reduce, since `dist.barrier` has to guess a device.

    With gloo the host waits. With NCCL only the current stream does, and the host goes on: synchronize the stream if
    the host has to wait, too.
    """
    dist.all_reduce(torch.zeros(1, device=group_device(group)), group=group)


def warm_up(group: dist.ProcessGroup) -> None:
    """Run a first collective on a process group, which sets up its communicator if it is new; collective.

    A first batch of point-to-point messages in which only some ranks take part is undefined in torch.
    """
    barrier(group)


@contextmanager
def created_by_members_alone(name: str) -> Iterator[None]:
    """Keep two things in torch's `new_group(use_local_synchronization=True)` from needing other ranks.

    It names a group after its ranks and the number of groups that this rank is in, so that ranks in different numbers
    of groups wait for each other under different names until the time-out. And where the world is bound to a device,
    it splits the world's communicator, in which all ranks of the world would have to take part.
    """
    torch_private: Any = dist.distributed_c10d
    world, original = torch_private._get_default_group(), torch_private._process_group_name
    device = world.bound_device_id
    torch_private._process_group_name = lambda ranks, use_hashed_name: name
    try:
        if device is not None:
            world.bound_device_id = None
        yield
    finally:
        torch_private._process_group_name = original
        if device is not None:
            world.bound_device_id = device


def refuse_torchcomms() -> None:
    """Raise ValueError if torch makes process groups by TorchComms, which cannot make them for some ranks alone."""
    is_enabled = getattr(dist.distributed_c10d, "_use_torchcomms_enabled", None)  # since torch 2.12
    if is_enabled is not None and is_enabled():
        raise ValueError(
            "burst attention cannot make its process groups over TorchComms: set TORCH_DISTRIBUTED_USE_TORCHCOMMS=0 "
            "before torch.distributed is initialised, for NCCL or gloo as they are"
        )


def launches_batches(group: dist.ProcessGroup) -> bool:
    """Return whether the backend of `group` launches a batch of point-to-point messages as one, as NCCL does."""
    coalesces: bool = group._get_backend(group_device(group)).supports_coalescing
    return coalesces


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device of tensors that `group` moves: the current GPU for NCCL, also beside gloo, else the CPU.

    Raises ValueError if the group is bound to another GPU than the current one.
    """
    for device in group._device_types:
        if device.type == "cuda" and group._get_backend(device).name() != "gloo":  # which says that it moves both
            here, bound = torch.device("cuda", torch.cuda.current_device()), group.bound_device_id
            if bound is not None and bound.type == "cuda" and bound != here:
                raise ValueError(
                    f"the process group is bound to {bound}, but the current device is {here}; call "
                    f"torch.cuda.set_device({bound.index}) before the ring is made"
                )
            return here
    return torch.device("cpu")


_LOG = logging.getLogger(__name__)


def abort_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Abort process groups, without the other ranks, and return at once.

    Each is aborted in a thread: an abort may wait for its GPU, on which the kernels of another group wait for theirs.
    """
    for group in groups:
        threading.Thread(target=_abort, args=(group,), name="burst_plugin abort", daemon=True).start()


def _abort(group: dist.ProcessGroup) -> None:
    try:
        group.abort()
    except RuntimeError as error:
        _LOG.error("a process group could not be aborted (%s): PyTorch's time-out ends this process", error)


def end_waiting(progress: Progress, abort: Callable[[], None], text: str) -> None:
    """End the waits of this rank, and have its training thread raise RingError before its next line of Python.

    Args:
        progress: names the thread that raises.
        abort: called to end the waits, once the error is set.
        text: the text of the error; "" to raise none.
    """
    if text:
        _raise_in(progress.thread, text)
    abort()


def _raise_in(thread: int, text: str) -> None:
    """Have `thread`, by its identifier, raise RingError before the next line of Python that it runs."""

    class Ended(RingError):  # noqa: N818
        def __init__(self) -> None:  # the interpreter makes the error, from its class alone
            super().__init__(text)

    Ended.__name__ = Ended.__qualname__ = RingError.__name__
    Ended.__module__ = RingError.__module__
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Ended))


def as_group(group: object) -> dist.ProcessGroup | None:
    """Return a process group, or the group of a one-dimensional mesh; None stays None. Raise ValueError otherwise."""
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


def levels_of(
    hierarchy: Sequence[dist.ProcessGroup] | Sequence[int] | None,
) -> list[dist.ProcessGroup | int] | None:
    """Return the option `hierarchy`, groups or their sizes, as a list; None for None. Else raise ValueError."""
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


def place_in(group: dist.ProcessGroup | None) -> tuple[int, list[int]]:
    """Return the number of this rank within `group`, and the global ranks of all of its ranks; (0, [0]) for None.

    Raises ValueError if this process is not in the group.
    """
    if group is None:
        return 0, [0]
    if dist.get_rank(group) < 0:
        raise _outsider(group)
    return dist.get_rank(group), dist.get_process_group_ranks(group)
