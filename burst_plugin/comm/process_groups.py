"""The communicators of a ring: process groups, by what they carry over which link.

There is one for each of (gather | reduce) x (intra | inter) where a schedule uses both links at the same time. Groups
of frameworks are used for gather traffic; the others are made here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from burst_plugin.comm.abort import abort_groups
from burst_plugin.comm.transport import Channel
from burst_plugin.topology import Link, Traffic

__all__ = [
    "Communicators",
    "barrier",
    "group_device",
    "is_alive",
    "launches_batches",
    "new_group_like",
    "refuse_torchcomms",
    "timeout_of",
    "warm_up",
]


class Communicators(dict[Channel, dist.ProcessGroup]):
    """The process group of every channel that is connected; `created` are those that were made here."""

    def __init__(self, given: Sequence[dist.ProcessGroup], global_ranks: Sequence[int]) -> None:
        self._given, self._global_ranks = given, global_ranks
        self.created: list[dist.ProcessGroup] = []
        self._attempts = 0
        self._is_aborted = False

    @property
    def whole(self) -> dist.ProcessGroup:
        """Group of all ranks."""
        return self._given[0]

    def connect(self, members: Mapping[Link, tuple[int, ...]], by_link: bool, mark: str) -> None:
        """Add the channels of either link, between these ranks of the group; collective.

        `mark`, the same on all ranks, makes the names of new groups differ from those of other rings.
        """
        known: dict[tuple[Traffic, tuple[int, ...]], dist.ProcessGroup] = {}
        for group in self._given:
            there = dist.get_process_group_ranks(group)
            known.setdefault((Traffic.GATHER, tuple(self._global_ranks.index(rank) for rank in there)), group)
        self._attempts += 1  # part of names: an attempt that failed has left some of its groups behind
        whole, used = self.whole, {self.whole, *self.values()}
        channels: dict[Channel, dist.ProcessGroup] = {}
        for traffic in Traffic:
            for link in Link:
                key = (traffic, members[link])
                if key not in known:
                    global_ranks = [self._global_ranks[rank] for rank in members[link]]
                    name = f"BURST_{traffic.name}_{link.name}_{self._attempts}_{mark}_{global_ranks[0]}"
                    known[key] = new_group_like(whole, global_ranks, name)
                    self.created.append(known[key])
                elif known[key] not in used:  # a given one, which may be new
                    warm_up(known[key])
                used.add(known[key])
                channels[Channel(traffic, link, by_link)] = known[key]
        self.update(channels)  # all of them or, if one could not be made, none

    def abort(self) -> None:
        """Abort all groups, also those that were given, so that what waits in them ends; not collective."""
        if not self._is_aborted:
            self._is_aborted = True
            abort_groups({*self._given, *self.created})

    def destroy(self) -> None:
        """Forget all channels, and destroy the groups that were made here; collective."""
        self.clear()
        while self.created:
            group = self.created.pop()
            if is_alive(group):
                dist.destroy_process_group(group)


def new_group_like(group: dist.ProcessGroup, global_ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    """Return a new communicator over `global_ranks`, with the backend, time-out and options of `group`, warmed up.

    Exactly those ranks call this, in the same order on each, with a `name` that no other group has.
    """
    device = group_device(group)
    original = group._get_backend(device)
    backend, existing = original.name(), original.options  # for other devices the group may have another backend
    options = None
    if backend == "nccl":  # a copy: torch writes into what it is given
        # A message and the next kernel wait for the same event: high priority has the message start first.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config, options._timeout = existing.config, existing._timeout  # type: ignore[attr-defined]
    with _created_by_members_alone(name):
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


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the time-out of messages of `group`."""
    timeout: timedelta = group._get_backend(group_device(group)).options._timeout
    return timeout


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
    """Set up a communicator that may be new; all of its ranks call this together.

    A first batch of point-to-point messages in which only some ranks take part is undefined in torch.
    """
    barrier(group)


@contextmanager
def _created_by_members_alone(name: str) -> Iterator[None]:
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
    """Return whether the backend launches a batch of messages as one, as NCCL does."""
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
