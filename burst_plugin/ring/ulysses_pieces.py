"""Tensors on both sides of an exchange of heads (see `ulysses`): how messages are filled, and where they belong.

Member by member, a copy for every run of rows; or, where launching that many takes longer than the copies do, all
members at once: heads by a permutation, rows by an index. For that messages lie one behind the other, in the order of
the members, without this rank itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from burst_plugin.compute.online_softmax import add_
from burst_plugin.ring.ulysses_groups import GroupBlock
from burst_plugin.topology import Traffic
from burst_plugin.types import Spec

__all__ = ["Piece", "ToHeads", "ToTokens"]


@dataclass(frozen=True, eq=False, repr=False)
class Piece(ABC):
    """A tensor on both sides of the exchange: `local` [B, S_local, H, D], `joint` [B, S_group, h, D].

    Each member has h heads: those after the ones of the member before it, or, where a head has several ranks
    (`ranks_per_head`), the same ones. With as many ranks per head as there are members, each has all heads.
    """

    local: Tensor
    joint: Tensor
    block: GroupBlock
    ranks_per_head: int
    traffic: ClassVar[Traffic]

    def local_heads(self, member: int) -> Tensor:
        """Return the heads of another rank of the group, of the local rows."""
        heads = self.joint.shape[2]
        return self.local.narrow(2, member // self.ranks_per_head * heads, heads)

    def spec(self, member: int) -> Spec:
        """Return shape and type of a message with the rows of a member."""
        batch, _, heads, dim = self.joint.shape
        return (batch, self.block.counts[member], heads, dim), self.joint.dtype

    @property
    @abstractmethod
    def result(self) -> Tensor:
        """Return the side that the exchange fills."""

    @abstractmethod
    def whose_rows(self, sender: int, receiver: int) -> int:
        """Return the one of the two that the rows in the message belong to."""

    @abstractmethod
    def leave(self, receiver: int, message: Tensor) -> None:
        """Fill the message to a member."""

    @abstractmethod
    def arrive(self, sender: int, message: Tensor) -> None:
        """Put a member's message where it belongs."""

    @abstractmethod
    def stay(self, place: int) -> None:
        """Put what this rank, the member at `place`, has for itself where it belongs."""

    @abstractmethod
    def leave_all(self, messages: Tensor, rows: Tensor, place: int) -> None:
        """Fill the messages to all other members, [members, B, S, h, D].

        `rows` [members, S] are those of every member among the rows of the group; the last are this rank's own.
        """

    @abstractmethod
    def arrive_all(self, messages: Tensor, rows: Tensor, place: int) -> None:
        """Put the messages of all other members where they belong."""

    @abstractmethod
    def stay_at(self, rows: Tensor, place: int) -> None:
        """Do what `stay` does, in one go."""

    def _heads_of_others(self, place: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield which of the messages there are for consecutive members, and their heads [members, B, S, h, D]."""
        (batch, rows, all_heads, dim), heads = self.local.shape, self.joint.shape[2]
        if self.ranks_per_head > 1:  # then all members have all heads: see `Plan._exchanged_rows`
            yield slice(None), self.local.unsqueeze(0)
            return
        by_member = self.local.view(batch, rows, all_heads // heads, heads, dim).permute(2, 0, 1, 3, 4)
        if place > 0:
            yield slice(0, place), by_member[:place]
        if place < by_member.shape[0] - 1:
            yield slice(place, None), by_member[place + 1 :]


class ToHeads(Piece):
    """A message has the sender's rows of the receiver's heads."""

    traffic = Traffic.GATHER

    @property
    def result(self) -> Tensor:
        """Return the rows of the whole group, of this rank's heads."""
        return self.joint

    def whose_rows(self, sender: int, receiver: int) -> int:
        """Return the sender."""
        return sender

    def leave(self, receiver: int, message: Tensor) -> None:
        """Fill the message with this rank's rows of the receiver's heads."""
        message.copy_(self.local_heads(receiver))

    def arrive(self, sender: int, message: Tensor) -> None:
        """Put the sender's rows among those of the group."""
        for local, joint, length in self.block.spans[sender]:
            self.joint.narrow(1, joint, length).copy_(message.narrow(1, local, length))

    def stay(self, place: int) -> None:
        """Put this rank's own rows among those of the group."""
        self.arrive(place, self.local_heads(place))

    def leave_all(self, messages: Tensor, rows: Tensor, place: int) -> None:
        """Fill every message with this rank's rows of the receiver's heads."""
        for some, heads in self._heads_of_others(place):
            messages[some].copy_(heads)

    def arrive_all(self, messages: Tensor, rows: Tensor, place: int) -> None:
        """Put all senders' rows among those of the group."""
        _put_rows(self.joint, rows[:-1], messages.transpose(0, 1))

    def stay_at(self, rows: Tensor, place: int) -> None:
        """Put this rank's own rows among those of the group."""
        _put_rows(self.joint, rows[-1], self.local_heads(place))


class ToTokens(Piece):
    """A message has the receiver's rows of the sender's heads; what members have of a head they share is added up."""

    traffic = Traffic.REDUCE

    @property
    def result(self) -> Tensor:
        """Return this rank's rows, of all heads."""
        return self.local

    def whose_rows(self, sender: int, receiver: int) -> int:
        """Return the receiver."""
        return receiver

    def leave(self, receiver: int, message: Tensor) -> None:
        """Fill the message with the receiver's rows of this rank's heads."""
        for local, joint, length in self.block.spans[receiver]:
            message.narrow(1, local, length).copy_(self.joint.narrow(1, joint, length))

    def arrive(self, sender: int, message: Tensor) -> None:
        """Put this rank's rows of the sender's heads in place, or add them up where members share a head."""
        mine = self.local_heads(sender)
        if self.ranks_per_head > 1:
            mine.add_(message)
        else:
            mine.copy_(message)

    def stay(self, place: int) -> None:
        """Put this rank's rows of its own heads in place."""
        self.leave(place, self.local_heads(place))

    def leave_all(self, messages: Tensor, rows: Tensor, place: int) -> None:
        """Fill every message with the receiver's rows of this rank's heads."""
        _take_rows(self.joint, rows[:-1], messages.transpose(0, 1))

    def arrive_all(self, messages: Tensor, rows: Tensor, place: int) -> None:
        """Put this rank's rows of all senders' heads in place, or add them up where all members share all heads."""
        for some, heads in self._heads_of_others(place):
            if self.ranks_per_head > 1:
                add_(heads[0], messages[some].unbind())
            else:
                heads.copy_(messages[some])

    def stay_at(self, rows: Tensor, place: int) -> None:
        """Put this rank's rows of its own heads in place."""
        _take_rows(self.joint, rows[-1], self.local_heads(place))


def _put_rows(x: Tensor, rows: Tensor, source: Tensor) -> None:
    """Set the token rows `rows` of x [B, S, h, D]; by the operator, which takes a `source` of any strides."""
    torch.ops.aten.index_put_.default(x, [None, rows], source)


def _take_rows(x: Tensor, rows: Tensor, target: Tensor) -> None:
    """Copy the token rows `rows` of x [B, S, h, D] to `target`, of any strides, without a tensor in between."""
    torch.ops.aten.index.Tensor_out(x, [None, rows], out=target)
