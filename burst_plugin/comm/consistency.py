"""How ranks compare their calls before attention data moves, in one exchange of fixed size.

Rings may have process groups of their own, and on different groups ranks never meet. So in the first exchange of a
ring a rank that waits writes into the store of the job which ring it waits on, and reads what others have written:
ranks that are about to begin different rings get an error, instead of waiting.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillWaiting
from functools import cached_property, partial
from hashlib import blake2b
from time import monotonic
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from burst_plugin.checks import SUMMARY
from burst_plugin.comm.call_identity import by_rank
from burst_plugin.comm.differences import differences
from burst_plugin.comm.failure_watch import Board
from burst_plugin.comm.process_groups import group_device, is_alive, launches_batches, timeout_of
from burst_plugin.comm.torch_distributed import DistributedTransport
from burst_plugin.comm.transport import Channel, Message, PeerLostError, Pending, lost_peer_error
from burst_plugin.topology import Link, Traffic

EXCHANGE_BYTES = 2048  # that each rank sends to each other rank
DISAGREE = "the ranks of the context-parallel group disagree; all must pass the same shapes, types and options: "
_DIGEST_BYTES = 16
_CHANNEL = Channel(Traffic.GATHER, Link.INTRA)
_TAG = 20240  # of comparisons, beside messages of passes and of others on the same groups
_SHARED: dict[tuple[int, ...], dist.ProcessGroup] = {}  # by global ranks: the group that their rings compare over
_PROBLEM = "problem: "
_PLACE = "at: "


class Constants(dict[str, object]):
    """A dict of values by name that every comparison of a ring includes, such as its options; not to be changed."""

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """Return each entry as a text "name=value", made once and kept."""
        return tuple(f"{name}={value}" for name, value in self.items())


_NO_CONSTANTS = Constants()


class ConsistencyCheck:
    """A means for the ranks of `group` to compare their next actions; all methods that send are collective.

    rank: this rank's number in the group. global_ranks: the global rank of each rank of the group.
    in_one: whether all ranks compare in one collective call, as on NCCL.

    On gloo all rings of the same ranks compare over the group of the first of them, so that ranks that are about to
    use different rings get an error, instead of waiting for each other on two groups. Threads of a process, which may
    each have a ring, keep to the ring's own group.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, global_ranks: Sequence[int]) -> None:
        self.is_on_cpu = group_device(group).type == "cpu"
        self.board: Board | None = None  # where this rank notes which one it waits for, or misses
        self._group, self._rank, self._ranks = group, rank, len(global_ranks)
        self.in_one = launches_batches(group)
        self._key = tuple(global_ranks)
        self._shared: dist.ProcessGroup | None = None  # that this ring compares over, once its ranks have met
        self._transports: dict[dist.ProcessGroup, DistributedTransport] = {}
        self.watched: Callable[[Pending], Pending] = lambda pending: pending  # for a profile to note waits

    @property
    def group_name(self) -> str:
        """Return the name of the ring's group, which all its ranks share and no other group has.

        It is empty with NCCL, where ranks may have different names for a group that was split off another, but
        compare over that group only.
        """
        return "" if self.in_one else str(self._group.group_name)

    @cached_property
    def device(self) -> torch.device:
        """Return the device whose tensors the group moves, looked up at first use, when each rank has set its GPU."""
        return group_device(self._group)

    def meet(self, text: str) -> list[str]:
        """Exchange one line of `text` with every rank before the ring is connected; return all texts, in rank order.

        Raises ValueError on every rank if any is about to do anything but connect this ring. Collective.
        """
        lines = [f"{_PLACE}the ring is connected", f"ring={self.ring_name()}", text]
        said = self.exchange("\n".join(lines), "connecting")
        raise_if_apart(dict(enumerate(said)), self._ranks)
        _raise_if_problem(said)
        return [each.splitlines()[-1] for each in said]

    def ring_name(self, ring_id: str = "") -> str:
        """Return text that names this ring; no other ring of the same ranks has it.

        ring_id: the id that the ring's ranks drew when they met; "" for a ring that is not connected yet.
        """
        return f"{ring_id or 'new'} on group {self.group_name}"

    def compare(
        self, at: str, compared: Mapping[str, object], problem: str, constants: Constants = _NO_CONSTANTS
    ) -> None:
        """Raise ValueError on every rank if ranks are about to act differently, or if any has a problem; collective.

        Values that are too long for one exchange are compared by a digest; if they differ, further exchanges find
        where.

        Args:
            at: the action that is about to begin, such as "the forward pass of call 13".
            compared: values by name, which must be equal on all ranks.
            problem: why this rank cannot go on; "" if it can.
            constants: further values that must be equal, which do not change from call to call.
        """
        when = f"the comparison before {at}"
        lines = [_PLACE + at, *(f"{name}={value}" for name, value in compared.items()), *constants.lines]
        said = self.exchange(fingerprint(lines, problem), when)
        if len(set(said)) == 1 and not problem:
            return
        raise_if_apart(dict(enumerate(said)), self._ranks)
        compares = all(text.startswith(_PLACE) for text in said)  # ranks with a problem end here
        if compares and len(set(said)) > 1 and any(map(_is_cut, said)):
            found = differences({**compared, **constants}, partial(self.exchange, when=when))
            if found:
                raise ValueError(DISAGREE + found)
        raise_if_unlike(said, DISAGREE)

    def exchange(self, text: str, when: str) -> list[str]:
        """Return the text of every rank, in rank order; collective.

        Texts of about `EXCHANGE_BYTES` or more are cut and end with a digest, so that different texts stay different.

        With gloo texts are exchanged between all pairs, so that a lost rank can be named: raises RingError, whose
        text says `when` it was missed. With NCCL, which cannot tell, and holds megabytes for every pair that is
        connected, they are exchanged in one all-gather.
        """
        own_bytes = torch.frombuffer(bytearray(encode(text)), dtype=torch.uint8)
        if self.in_one:
            received = self._gathered(own_bytes)
        elif self._shared is not None or not _in_main_thread():
            received = self._between_pairs(self._usable(self._shared), own_bytes, when)
        else:
            received = self._first_between_pairs(own_bytes, text, when)
        if all(message is own_bytes or torch.equal(message, own_bytes) for message in received):  # mostly
            return [text] * self._ranks
        return [decode(bytes(message.tolist())) for message in received]

    def forget_shared_group(self) -> None:
        """Have the next ring of these ranks compare over its own group, as the shared one may have messages left."""
        _SHARED.pop(self._key, None)

    def _gathered(self, own_bytes: Tensor) -> Sequence[Tensor]:
        received = torch.empty(self._ranks * own_bytes.numel(), dtype=own_bytes.dtype, device=self.device)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        gather(received, own_bytes.to(self.device), group=self._group)
        return received.cpu().view(self._ranks, -1).unbind()

    def _first_between_pairs(self, own_bytes: Tensor, text: str, when: str) -> Sequence[Tensor]:
        """Exchange over the group of earlier rings, if any. Raise ValueError if ranks begin different rings."""
        shared = self._usable(_SHARED.get(self._key))
        ring = f"ring={self.ring_name()}, compared over group {shared.group_name}"
        where = text.splitlines()[0] if text.startswith(_PLACE) else f"{_PLACE}{when}"
        apart = partial(raise_if_apart, ranks=self._ranks)
        swap = partial(self._between_pairs, shared, own_bytes, when)
        received = first_exchange(swap, self._key, self._rank, f"{where}\n{ring}", apart)
        self._shared = _SHARED[self._key] = shared
        return received

    def _between_pairs(self, group: dist.ProcessGroup, own_bytes: Tensor, when: str) -> Sequence[Tensor]:
        own_bytes = own_bytes.to(self.device)
        received = [own_bytes if rank == self._rank else torch.empty_like(own_bytes) for rank in range(self._ranks)]
        peers = [rank for rank in range(self._ranks) if rank != self._rank]
        sends = [Message(rank, _CHANNEL, own_bytes) for rank in peers]
        recvs = [Message(rank, _CHANNEL, received[rank]) for rank in peers]
        transport = self._transport(group)
        try:
            for pending in transport.post(sends, recvs):
                self.watched(pending).wait()
        except BaseException as error:
            self.forget_shared_group()  # with messages that are left on it
            if isinstance(error, PeerLostError):
                raise lost_peer_error(transport, self._rank, when, error) from error
            raise
        return [message.cpu() for message in received]

    def _usable(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        """Return the group that rings share, if it still exists and this is the main thread; else the ring's own."""
        return group if group is not None and _in_main_thread() and is_alive(group) else self._group

    def _transport(self, group: dist.ProcessGroup) -> DistributedTransport:
        if group not in self._transports:
            self._transports[group] = DistributedTransport(
                {_CHANNEL: group}, self._key, tag=_TAG, timeout=timeout_of(self._group)
            )
        self._transports[group].board = self.board
        return self._transports[group]


def fingerprint(ours: Sequence[str], problem: str) -> str:
    """Return the text that a rank sends for comparison: its `problem` if it has one, else the lines `ours`."""
    return _PROBLEM + problem if problem else "\n".join(ours)


def raise_if_unlike(said: Sequence[str], disagree: str) -> None:
    """Raise ValueError if a rank has reported a problem, or if the texts of ranks differ.

    said: the text of each rank, as `fingerprint` makes it, in rank order.
    disagree: the beginning of the message if texts differ.
    """
    _raise_if_problem(said)
    if len(set(said)) > 1:
        same = set.intersection(*(set(text.splitlines()) for text in said))
        unlike = [", ".join(line for line in text.splitlines() if line not in same) for text in said]
        raise ValueError(disagree + by_rank(dict(enumerate(unlike)), len(said)))


def _raise_if_problem(said: Sequence[str]) -> None:
    problems = {rank: text.removeprefix(_PROBLEM) for rank, text in enumerate(said) if text.startswith(_PROBLEM)}
    if problems:
        raise ValueError(by_rank(problems, len(said)))


def raise_if_apart(said: Mapping[int, str], ranks: int) -> None:
    """Raise ValueError if ranks compare at different places of the program, or on different rings.

    said: by rank, the lines that it sends for comparison, beginning with its place. If one of them reports a problem
        instead, nothing is raised here.
    ranks: the number of all ranks, also of those that have said nothing yet.
    """
    places = {}
    for rank, text in said.items():
        lines = text.splitlines()
        if not lines or not lines[0].startswith(_PLACE):
            return  # a problem, which is raised as such
        places[rank] = lines[0].removeprefix(_PLACE), next((x for x in lines if x.startswith("ring=")), "")
    if len(set(places.values())) > 1:
        rings = {ring for _, ring in places.values()}
        texts = {
            rank: f"before {at}" + (f" of the ring {ring.removeprefix('ring=')}" if len(rings) > 1 else "")
            for rank, (at, ring) in places.items()
        }
        raise ValueError(
            f"ranks are at different places: {by_rank(texts, ranks)}; some rank skipped a call, a backward pass "
            "or a whole step, or made one twice, or it uses its rings in another order"
        )


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def encode(text: str) -> bytes:
    """Return the `EXCHANGE_BYTES` that are sent for a text: its beginning, and a digest of all of it."""
    data = text.encode()
    room = EXCHANGE_BYTES - _DIGEST_BYTES
    return data[:room].ljust(room, b"\0") + blake2b(data, digest_size=_DIGEST_BYTES).digest()


def decode(data: bytes) -> str:
    """Return the text, followed by its digest if it was cut, so that texts which differ behind the cut still do."""
    text, digest = data[:-_DIGEST_BYTES].rstrip(b"\0"), data[-_DIGEST_BYTES:]
    whole = blake2b(text, digest_size=_DIGEST_BYTES).digest() == digest
    return text.decode(errors="replace") + ("" if whole else f"{SUMMARY}{digest.hex()}]")


def _is_cut(text: str) -> bool:
    """Return whether a text from `decode` was too long, or has a value whose text was."""
    return SUMMARY in text


T = TypeVar("T")

_BEGUN: Counter[tuple[int, ...]] = Counter()  # first exchanges of this process, by the global ranks that take part
_PERIOD_S = 0.2
_FOR_ALL_S = 2.0  # to wait for the places of all ranks, so that the error names each


def first_exchange(
    exchange: Callable[[], T],
    global_ranks: Sequence[int],
    rank: int,
    place: str,
    raise_if_apart: Callable[[Mapping[int, str]], None],
) -> T:
    """Return the result of the collective `exchange`, which runs in a thread, while waiting ranks say where they are.

    A rank that has waited for 0.2 s writes its `place` into the store of the job. When all ranks have, or after 2 s,
    `raise_if_apart` is called with the places that are known by then, so that ranks which wait for each other in
    different exchanges get an error. Ranks number their first exchanges, and compare places under one number only;
    where their histories differ, they wait for the time-out of `exchange`.

    Args:
        exchange: the collective to run; an error that it raises is raised here.
        global_ranks: the global ranks that take part.
        rank: this rank's number among them.
        place: text that says where this rank is in its program.
        raise_if_apart: called with the places by rank; raises if they do not fit together.
    """
    key = tuple(global_ranks)
    _BEGUN[key] += 1
    name = f"burst_plugin/first_exchange/{hash(key):x}/{_BEGUN[key]}"
    result = _in_a_thread(exchange)
    store, since = None, monotonic()
    while True:
        try:
            return result.result(timeout=_PERIOD_S)
        except StillWaiting:
            if result.done():  # with an error of this kind
                raise
        if store is None:
            store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            store.set(f"{name}/{rank}", place)
        places = _places(store, name, len(key))
        if len(places) == len(key) or monotonic() - since > _FOR_ALL_S:
            raise_if_apart(places)


def _places(store: Store, name: str, ranks: int) -> dict[int, str]:
    """Return the places of the ranks that wait, by rank."""
    waiting = [rank for rank in range(ranks) if store.check([f"{name}/{rank}"])]
    return {rank: store.get(f"{name}/{rank}").decode() for rank in waiting}


def _in_a_thread(fn: Callable[[], T]) -> Future[T]:
    """Run `fn` in a daemon thread, which the end of the process does not wait for. Return its future."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(fn())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="burst_plugin first exchange", daemon=True).start()
    return future
