"""Where a rank is in its training: which call of attention, which pass, which rank it waits for.

Ranks compare it before a pass, on CPUs messages carry it, and ranks that wait publish it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from threading import get_ident
from time import monotonic
from typing import NamedTuple, Protocol

from burst_plugin.types import Direction


class CallId(NamedTuple):
    """The identity of one call of attention.

    number: the running number of this rank's comparisons and calls, from 1 on; equal on every rank that is in step.
    name: the caller's name for the call, such as "step 7, layer 3".
    is_compared: whether ranks compare this call, and therefore its backward pass.
    """

    number: int
    name: str = ""
    is_compared: bool = False

    def __str__(self) -> str:
        return f"call {self.number} ({self.name})" if self.name else f"call {self.number}"

    def label(self, direction: Direction, kind: bytes) -> bytes:
        """Return 16 bytes to end the messages of one pass of this call, which tell them from other messages.

        kind: the digest of the kind of call, see `Plan.digest`.
        """
        which = 2 * self.number + (direction == "backward")
        named = blake2b(self.name.encode(), key=kind, digest_size=8).digest()
        return named + which.to_bytes(8, "little")


def call_name(step: str, tag: object) -> str:
    """Return the name of a call, such as "step 7, layer 3", from the training step and the caller's `tag`.

    step: text that names the training step; left out if empty.
    tag: any object; the items of a tuple are listed one by one. None is left out.
    """
    items = tag if isinstance(tag, tuple) else (tag,)
    return ", ".join(text for text in (step, *(str(item) for item in items if item is not None)) if text)


class _KnowsItsStep(Protocol):
    @property
    def step(self) -> int: ...


@dataclass
class Progress:
    """A record of where a rank is in its program; the training thread writes it, the watching thread reads it.

    where: the action and its call, or words, such as ("in the forward pass of", call 13).
    call: the call whose pass is running, if any.
    ring_pass: the running `RingPass`, if any, which knows the step that it is at.
    waiting: the rank that this one waits for, and since when by `time.monotonic`; None while it does not wait.
    thread: the identifier of the thread that trains: it runs forward passes outside of backward passes.
    """

    where: tuple[object, ...] = ("before the first call",)
    call: CallId | None = None
    ring_pass: _KnowsItsStep | None = None
    waiting: tuple[int, float] | None = None
    thread: int = field(default_factory=get_ident)

    def begin_pass(self, direction: Direction, call: CallId) -> None:
        """Note that this rank enters the forward or backward pass of `call`."""
        self.call, self.where = call, ("in the", direction, "pass of", call)

    def end_pass(self, direction: Direction) -> None:
        """Note that this rank has left the pass that it was in."""
        self.where, self.call, self.ring_pass = ("after the", direction, "pass of", self.call), None, None

    def wait_for(self, peer: int) -> None:
        """Note that this rank begins to wait for a message to or from `peer`."""
        self.waiting = (peer, monotonic())

    def __str__(self) -> str:
        ring_pass, where = self.ring_pass, " ".join(map(str, self.where))  # the other thread may take the pass away
        return where if ring_pass is None else f"{where}, ring step {ring_pass.step}"


def by_rank(texts: Mapping[int, str], count: int, name_of: Callable[[int], str] = lambda rank: "") -> str:
    """Return a summary of the texts of ranks, such as "rank 0, 2: x; rank 1: y", the rarest text first.

    If all `count` ranks say one text, it is returned alone.

    Args:
        texts: the text of each rank, by its number; some ranks may be missing.
        count: the number of all ranks.
        name_of: returns a suffix for the number of a rank that is alone with its text, such as its host.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_of.setdefault(text, []).append(rank)
    if len(ranks_of) == 1 and len(texts) == count:
        return next(iter(ranks_of))
    named = sorted(ranks_of.items(), key=lambda item: len(item[1]))
    return "; ".join(
        f"rank {', '.join(map(str, ranks))}{name_of(ranks[0]) if len(ranks) == 1 else ''}: {text}"
        for text, ranks in named
    )
