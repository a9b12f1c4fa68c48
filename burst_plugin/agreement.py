"""How ranks compare their calls before attention data moves, in one exchange of fixed size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from hashlib import blake2b
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from burst_plugin.communicators import group_device, launches_batches
from burst_plugin.differences import by_rank, differences
from burst_plugin.distributed_transport import DistributedTransport
from burst_plugin.topology import Link, Traffic
from burst_plugin.transport import Channel, Message, PeerLostError, lost_peer_error

__all__ = [
    "DISAGREE",
    "EXCHANGE_BYTES",
    "Agreement",
    "error_text",
    "prepared_together",
    "raise_if_unlike",
    "statement",
]

T = TypeVar("T")
Agreed = TypeVar("Agreed")

EXCHANGE_BYTES = 2048  # what each rank tells each other rank
DISAGREE = "the ranks of the context-parallel group disagree; all must pass the same shapes, types and options: "
_DIGEST_BYTES = 16
_CHANNEL = Channel(Traffic.GATHER, Link.INTRA)
_PROBLEM = "problem: "


class Agreement:
    """The ranks of `group` in conversation; every method is collective.

    `record_failures_in` says where the first rank to miss another notes it.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, global_ranks: Sequence[int]) -> None:
        self.is_on_cpu = group_device(group).type == "cpu"
        self._group, self._rank, self._ranks = group, rank, len(global_ranks)
        self._in_one = launches_batches(group)
        self._transport = DistributedTransport({_CHANNEL: group}, global_ranks)

    @cached_property
    def device(self) -> torch.device:
        """Whose tensors the group moves; looked up when ranks first meet, by when each has set its GPU."""
        return group_device(self._group)

    def compare(self, compared: Mapping[str, object], problem: str, when: str) -> None:
        """Raise ValueError on every rank if any has a `problem`, or if they differ in `compared`, values by name.

        Only where they differ behind what one exchange can hold are there more, which find the place.
        """
        said = self.exchange(statement([f"{name}={value}" for name, value in compared.items()], problem), when)
        if len(set(said)) > 1 and any(map(_is_cut, said)):
            first = f"{next(iter(compared))}="
            if all(text.startswith(first) for text in said):  # others do not compare, and would not come again
                found = differences(compared, partial(self.exchange, when=when))
                if found:
                    raise ValueError(DISAGREE + found)
        raise_if_unlike(said, DISAGREE)

    def exchange(self, text: str, when: str) -> list[str]:
        """What every rank says, in rank order; a long text is cut, but no two different ones come out equal.

        Between all pairs, so that the rank that is lost can be named: RingError. With NCCL, which cannot tell, and
        holds megabytes for every pair that is connected, in one all-gather.
        """
        encoded = _encode(text)
        mine = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        everyone = self._gathered(mine) if self._in_one else self._between_pairs(mine, when)
        ours = _decode(encoded)  # what most say, if not all
        return [ours if torch.equal(each, mine) else _decode(bytes(each.tolist())) for each in everyone]

    def _gathered(self, mine: Tensor) -> Sequence[Tensor]:
        everyone = torch.empty(self._ranks * mine.numel(), dtype=mine.dtype, device=self.device)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        gather(everyone, mine.to(self.device), group=self._group)
        return everyone.cpu().view(self._ranks, -1).unbind()

    def _between_pairs(self, mine: Tensor, when: str) -> Sequence[Tensor]:
        mine = mine.to(self.device)
        everyone = [mine if rank == self._rank else torch.empty_like(mine) for rank in range(self._ranks)]
        peers = [rank for rank in range(self._ranks) if rank != self._rank]
        sends = [Message(rank, _CHANNEL, mine) for rank in peers]
        recvs = [Message(rank, _CHANNEL, everyone[rank]) for rank in peers]
        try:
            for pending in self._transport.post(sends, recvs):
                pending.wait()
        except PeerLostError as lost:
            raise lost_peer_error(self._transport, self._rank, when, lost) from lost
        return [each.cpu() for each in everyone]

    def record_failures_in(self, store: Store) -> None:
        """From now on the first rank to miss another says so in `store`."""
        self._transport.store = store


def prepared_together(prepare: Callable[[], T], agree: Callable[[T | None, str], Agreed]) -> tuple[T, Agreed]:
    """What this rank prepares, once all ranks have, and what they agreed on.

    Args:
        prepare: of this rank alone; may raise.
        agree: collective, with what was prepared, or None and the problem with it; raises ValueError on every rank if
            any has one.

    Raises:
        ValueError: that of `agree`; on a rank with a problem its cause is the error that `prepare` raised.
    """
    prepared, problem, cause = None, "", None
    try:
        prepared = prepare()
    except Exception as error:  # whatever it is, the other ranks have to hear of it
        problem, cause = error_text(error), error
    try:
        agreed = agree(prepared, problem)
    except ValueError as error:
        raise error from cause or error.__cause__
    assert prepared is not None, "agree raises if any rank has a problem"
    return prepared, agreed


def error_text(error: BaseException) -> str:
    """An error as other ranks are told of it."""
    return str(error) if isinstance(error, ValueError) and str(error) else repr(error)


def statement(ours: Sequence[str], problem: str) -> str:
    """What a rank says: its `problem`, or else what has to be the same on all, line by line."""
    return _PROBLEM + problem if problem else "\n".join(ours)


def raise_if_unlike(said: Sequence[str], disagree: str) -> None:
    """Raise ValueError if the statement of any rank is a problem, or, beginning with `disagree`, if they differ."""
    problems = {rank: text.removeprefix(_PROBLEM) for rank, text in enumerate(said) if text.startswith(_PROBLEM)}
    if problems:
        raise ValueError(by_rank(problems, len(said)))
    if len(set(said)) > 1:
        same = set.intersection(*(set(text.splitlines()) for text in said))
        unlike = [", ".join(line for line in text.splitlines() if line not in same) for text in said]
        raise ValueError(disagree + by_rank(dict(enumerate(unlike)), len(said)))


def _encode(text: str) -> bytes:
    data = text.encode()
    room = EXCHANGE_BYTES - _DIGEST_BYTES
    return data[:room].ljust(room, b"\0") + blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _decode(data: bytes) -> str:
    """The text; followed by its digest if it was cut, so that texts that differ behind the cut still do."""
    text, digest = data[:-_DIGEST_BYTES].rstrip(b"\0"), data[-_DIGEST_BYTES:]
    whole = blake2b(text, digest_size=_DIGEST_BYTES).digest() == digest
    return text.decode(errors="replace") + ("" if whole else f" ... [{digest.hex()}]")


def _is_cut(text: str) -> bool:
    """Whether `_decode` gave a text that was too long."""
    return len(text.encode()) > EXCHANGE_BYTES - _DIGEST_BYTES
