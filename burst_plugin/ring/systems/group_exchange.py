"""Exchanges within a group of ranks before and after a pass: of heads (`ulysses`), or of blocks (`mesh`).

A `GroupExchange` surrounds the ring. At each of its places a kind of exchange may send something; where it does not,
the tensors go on as they are:

    forward     inputs -> (kept for the backward pass) -> gathered -> the ring -> merged -> outputs
    backward    upstream -> gathered_backward -> the ring -> summed -> grads

Tensors are on both sides of an exchange as *pieces*, which say how messages are filled, and where they belong: member
by member, a copy for every run of rows; or, where launching that many takes longer than the copies do, all members at
once: heads by a permutation, rows by an index. For that messages lie one behind the other, in the order of the
members, without this rank itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from burst_plugin.comm.buffers import Buffer, Packing
from burst_plugin.comm.transport import Channel, PeerLostError, Pending, Transport, lost_peer_error
from burst_plugin.compute.online_softmax import add_
from burst_plugin.ring.request import BackwardOperands, Inputs, Outputs
from burst_plugin.ring.systems.rank_groups import GroupBlock, RankGroup
from burst_plugin.topology import Traffic
from burst_plugin.types import Side, Spec

if TYPE_CHECKING:
    from burst_plugin.profiling.recorder import Profile


@dataclass(frozen=True, eq=False, repr=False)
class GroupExchange:
    """The base of exchanges within a group of ranks: one rank's part, in one pass of one call.

    Its methods return generators, which yield while messages are under way, for ranks that take turns. Here they send
    nothing and return their tensors as they are; a subclass replaces some.

    Args:
        group: this rank's group.
        transport: carries its messages.
        blocks: by side, the tokens that the group holds, and each member's rows among them.
        expected_bytes: counts, by channel, the bytes that are to be sent.
        packing: returns the layout of a message from the shapes and types of its tensors.
        moving: the side that goes around the ring in this pass.
        label: [LABEL_BYTES], uint8, says which call a message belongs to, on CPUs; None for none.
        profile: records the exchange; None if there is none.
        ranks_per_kv_head: how many members share a key/value head; above 1 with more members than such heads.
        rows: by side, from `rank_groups.member_rows`: then all messages are filled at once. None: one by one.
    """

    group: RankGroup
    transport: Transport
    blocks: Mapping[Side, GroupBlock]
    expected_bytes: Counter[Channel]
    packing: Callable[[tuple[Spec, ...]], Packing]
    moving: Side = "kv"
    label: Tensor | None = None
    profile: Profile | None = None
    ranks_per_kv_head: int = 1
    rows: Mapping[Side, Tensor] | None = None
    what: ClassVar[str] = "the exchange of a group"

    # ---------------------------------------------------------------------------------------------- forward, in order

    def inputs(self, inputs: Inputs) -> Generator[None, None, Inputs]:
        """Exchange the inputs of a call before the forward pass; return the inputs that the backward pass keeps.

        Here they are the inputs as they are; where ranks exchange heads, the group's rows of this rank's heads.
        """
        yield from ()
        return inputs

    def gathered(self, inputs: Inputs) -> Generator[None, None, Inputs]:
        """Return the inputs that the ring reads in the forward pass, from the inputs that `inputs` returned.

        Here they are the inputs as they are; where ranks gather blocks, the side that stays has the whole group's
        rows.
        """
        yield from ()
        return inputs

    def merged(self, out: Tensor, lse: Tensor) -> Generator[None, None, tuple[Tensor, Tensor]]:
        """Return out [B, S, H, D] and lse [B, H, S] over the keys of all ranks, from the ring's outputs."""
        yield from ()
        return out, lse

    def outputs(self, outputs: Outputs, with_lse: bool) -> Generator[None, None, Outputs]:
        """Return the outputs of the call, for this rank's rows of all heads, from the outputs of `merged`.

        Here they are returned as they are. with_lse: whether lse is asked for; if not, it may be left out.
        """
        yield from ()
        return outputs

    # --------------------------------------------------------------------------------------------- backward, in order

    def upstream(
        self, dout: Tensor, dlse: Tensor | None, with_lse: bool
    ) -> Generator[None, None, tuple[Tensor, Tensor | None]]:
        """Return the gradients that the ring needs of out and lse, from the gradients of the call's out and lse.

        Here they are returned as they are; where ranks exchange heads, for the group's rows of this rank's heads.

        dlse: None if nothing on this rank depends on lse. with_lse: whether gradients of lse are exchanged, on all
            ranks.
        """
        yield from ()
        return dout, dlse

    def gathered_backward(self, own: BackwardOperands) -> Generator[None, None, BackwardOperands]:
        """Return the operands that the ring reads in the backward pass, from this rank's `own`.

        Here they are `own` as it is; where ranks gather blocks, the side that stays has the whole group's rows.
        """
        yield from ()
        return own

    def summed(self, grads: Inputs) -> Generator[None, None, Inputs]:
        """Return the gradients of the inputs that the backward pass kept, from the gradients that the ring computed.

        Here these are returned as they are; where ranks gather blocks, members' gradients of each block are added up.
        """
        yield from ()
        return grads

    def grads(self, grads: Inputs, shared_bias: bool) -> Generator[None, None, Inputs]:
        """Return the gradients of the call's inputs, from the gradients of the inputs that the backward pass kept.

        Here these are returned as they are; where ranks exchange heads, for this rank's rows of all heads.
        `shared_bias` says that all heads share one bias.
        """
        yield from ()
        return grads

    # ------------------------------------------------------------------------------------------------------- messages

    def move(self, pieces: Sequence[ExchangedTensor], sides: Sequence[Side]) -> Generator[None, None, None]:
        """Exchange tensors within the group, in one message to each other member; collective in the group.

        pieces: the tensors, on both sides of the exchange; their `result` is complete at the end.
        sides: "q" or "kv" for each tensor, which says whose rows it has.

        Yields while messages are under way. Raises RingError if a member is lost.
        """
        log = None if self.profile is None else self.profile.begin_pass("exchange", pieces[0].local.device)
        transport = self.transport if log is None else log.watch(self.transport)
        packings = [
            self.packing(tuple(piece.spec(member) for piece in pieces)) for member in range(self.group.degree)
        ]
        try:
            with nullcontext() if log is None else log.timed("move"):
                rows = None if self.rows is None else [self.rows[side] for side in sides]
                if rows is None:
                    leased, in_flight = self._begin(transport, pieces, packings)
                else:
                    leased, in_flight = self.begin_at_once(transport, pieces, packings[0], rows)
            yield
            while not transport.has_met(in_flight):  # rings of other places may take more steps
                yield
            with nullcontext() if log is None else log.timed("move"):
                for pending in in_flight:
                    pending.wait()
                if rows is None:
                    self._finish(transport, pieces, packings, leased)
                else:
                    self.finish_at_once(transport, pieces, packings[0], rows, leased[0])
        except PeerLostError as lost:
            rank = self.group.peers[self.group.place]
            raise lost_peer_error(transport, rank, self.what, lost) from lost

    def _begin(
        self, transport: Transport, pieces: Sequence[ExchangedTensor], packings: Sequence[Packing]
    ) -> tuple[list[tuple[Buffer, Buffer]], list[Pending]]:
        """Post the messages to and from every other member; rows that stay with this rank are copied meanwhile.

        `packings` has the packing of a message with the rows of each member.
        """
        group, device, traffic, whose = (
            self.group,
            pieces[0].local.device,
            pieces[0].traffic,
            pieces[0].whose_rows,
        )
        sends, recvs = [], []
        leased: list[tuple[Buffer, Buffer]] = []
        for member in group.others:
            out, back = packings[whose(group.place, member)], packings[whose(member, group.place)]
            leaving, arriving = transport.pool.lease(out.nbytes, device), transport.pool.lease(back.nbytes, device)
            leased.append((leaving, arriving))
            for piece, view in zip(pieces, leaving.views(out), strict=True):
                piece.leave(member, view)
            leaving.put_label(self.label)
            sends.append(group.message(traffic, member, leaving.data))
            recvs.append(group.message(traffic, member, arriving.data))
            self.expected_bytes[sends[-1].channel] += out.nbytes
        in_flight = transport.post(sends, recvs)
        for piece in pieces:
            piece.stay(group.place)
        return leased, in_flight

    def begin_at_once(
        self, transport: Transport, pieces: Sequence[ExchangedTensor], packing: Packing, rows: Sequence[Tensor]
    ) -> tuple[list[tuple[Buffer, Buffer]], list[Pending]]:
        """Pack and send all messages in a few launches for each tensor, in one buffer each way."""
        group, traffic, count = self.group, pieces[0].traffic, self.group.degree - 1
        device = pieces[0].local.device
        leaving, arriving = (transport.pool.lease(count * packing.nbytes, device) for _ in range(2))
        for piece, messages, here in zip(pieces, leaving.views(packing, count), rows, strict=True):
            piece.leave_all(messages, here, group.place)
        sends, recvs = (
            [group.message(traffic, member, data) for member, data in zip(group.others, all_data, strict=True)]
            for all_data in (leaving.data.chunk(count), arriving.data.chunk(count))
        )
        for message in sends:
            self.expected_bytes[message.channel] += packing.nbytes
        in_flight = transport.post(sends, recvs)
        for piece, here in zip(pieces, rows, strict=True):
            piece.stay_at(here, group.place)
        return [(leaving, arriving)], in_flight

    def finish_at_once(
        self,
        transport: Transport,
        pieces: Sequence[ExchangedTensor],
        packing: Packing,
        rows: Sequence[Tensor],
        leased: tuple[Buffer, Buffer],
    ) -> None:
        """Unpack all messages at once, and give their buffers back."""
        leaving, arrived = leased
        views = arrived.views(packing, self.group.degree - 1)
        for piece, messages, here in zip(pieces, views, rows, strict=True):
            piece.arrive_all(messages, here, self.group.place)
        transport.pool.release(leaving)
        transport.pool.release(arrived)

    def _finish(
        self,
        transport: Transport,
        pieces: Sequence[ExchangedTensor],
        packings: Sequence[Packing],
        leased: Sequence[tuple[Buffer, Buffer]],
    ) -> None:
        """Put the received rows where they belong, and give the buffers back."""
        for member, (leaving, arrived) in zip(self.group.others, leased, strict=True):
            if not arrived.has_label(self.label):
                raise PeerLostError(self.group.peers[member], "what it sent belongs to another call")
            packing = packings[pieces[0].whose_rows(member, self.group.place)]
            for piece, view in zip(pieces, arrived.views(packing), strict=True):
                piece.arrive(member, view)
            transport.pool.release(leaving)
            transport.pool.release(arrived)


@dataclass(frozen=True, eq=False, repr=False)
class ExchangedTensor(ABC):
    """A tensor on both sides of an exchange: this rank's rows of all heads, and the group's rows of its heads.

    local: [B, S_local, H, D]. joint: [B, S_group, h, D]. One of them is sent from, the other is the `result`.
    block: the tokens of the group, and where each member's rows are among them.
    ranks_per_head: how many members have the same heads. Each member has h heads: the ones after the member before it
        or, where a head has several ranks, the same ones. With as many ranks per head as there are members, each has
        all heads.
    traffic: the kind of traffic, for the channel of messages.
    """

    local: Tensor
    joint: Tensor
    block: GroupBlock
    ranks_per_head: int
    traffic: ClassVar[Traffic]

    def local_heads(self, member: int) -> Tensor:
        """Return a view of `local` with the heads of `member`: this rank's rows of them."""
        heads = self.joint.shape[2]
        return self.local.narrow(2, member // self.ranks_per_head * heads, heads)

    def spec(self, member: int) -> Spec:
        """Return the shape and the type of a message with the rows of `member`: [B, its rows, h, D]."""
        batch, _, heads, dim = self.joint.shape
        return (batch, self.block.counts[member], heads, dim), self.joint.dtype

    @property
    @abstractmethod
    def result(self) -> Tensor:
        """Return the tensor that the exchange fills: `joint` or `local`."""

    @abstractmethod
    def whose_rows(self, sender: int, receiver: int) -> int:
        """Return whose rows the message from `sender` to `receiver` holds: the number of one of these two members."""

    @abstractmethod
    def leave(self, receiver: int, message: Tensor) -> None:
        """Fill `message` [B, rows, h, D], which is sent to member `receiver`."""

    @abstractmethod
    def arrive(self, sender: int, message: Tensor) -> None:
        """Put the received `message` [B, rows, h, D] of member `sender` into the result."""

    @abstractmethod
    def stay(self, place: int) -> None:
        """Copy into the result the rows that this rank, the member at `place`, has for itself."""

    @abstractmethod
    def leave_all(self, messages: Tensor, rows: Tensor, place: int) -> None:
        """Fill the messages to all other members, [others, B, S, h, D], at once.

        rows: [members, S], the places of every member's rows among the group's; the last are this rank's own.
        place: this rank's place in the group.
        """

    @abstractmethod
    def arrive_all(self, messages: Tensor, rows: Tensor, place: int) -> None:
        """Put the received messages of all other members, [others, B, S, h, D], into the result, at once.

        `rows` [members, S] are the places of every member's rows among the group's; the last are this rank's own.
        """

    @abstractmethod
    def stay_at(self, rows: Tensor, place: int) -> None:
        """Copy into the result the rows that this rank, the member at `place`, has for itself, by an index.

        `rows` [members, S] are the places of every member's rows among the group's; the last are this rank's own.
        """

    def _heads_of_others(self, place: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of the messages, for consecutive members, and these members' heads [members, B, S, h, D]."""
        (batch, rows, all_heads, dim), heads = self.local.shape, self.joint.shape[2]
        if self.ranks_per_head > 1:  # then all members have all heads: see `Plan._exchanged_rows`
            yield slice(None), self.local.unsqueeze(0)
            return
        by_member = self.local.view(batch, rows, all_heads // heads, heads, dim).permute(2, 0, 1, 3, 4)
        if place > 0:
            yield slice(0, place), by_member[:place]
        if place < by_member.shape[0] - 1:
            yield slice(place, None), by_member[place + 1 :]


class ToHeads(ExchangedTensor):
    """The exchange of a tensor before the ring: each message holds the sender's rows of the receiver's heads."""

    traffic = Traffic.GATHER

    @property
    def result(self) -> Tensor:
        """Return `joint`, the whole group's rows of this rank's heads."""
        return self.joint

    def whose_rows(self, sender: int, receiver: int) -> int:
        """Return `sender`: the message from it to `receiver` holds the sender's rows."""
        return sender

    def leave(self, receiver: int, message: Tensor) -> None:
        """Fill `message`, to member `receiver`, with this rank's rows of that member's heads."""
        message.copy_(self.local_heads(receiver))

    def arrive(self, sender: int, message: Tensor) -> None:
        """Copy the rows in `message`, from member `sender`, to their places among the group's rows in `joint`."""
        for local, joint, length in self.block.spans[sender]:
            self.joint.narrow(1, joint, length).copy_(message.narrow(1, local, length))

    def stay(self, place: int) -> None:
        """Copy this rank's own rows of its heads, as the member at `place`, to their places in `joint`."""
        self.arrive(place, self.local_heads(place))

    def leave_all(self, messages: Tensor, rows: Tensor, place: int) -> None:
        """Fill the messages to all others, [others, B, S, h, D], with this rank's rows of each receiver's heads.

        `place` is this rank's place in the group.
        """
        for some, heads in self._heads_of_others(place):
            messages[some].copy_(heads)

    def arrive_all(self, messages: Tensor, rows: Tensor, place: int) -> None:
        """Copy the rows in all received messages, [others, B, S, h, D], to their places in `joint`.

        `rows` [members, S] has the places of each sender's rows among the group's, and last of this rank's own.
        """
        _put_rows(self.joint, rows[:-1], messages.transpose(0, 1))

    def stay_at(self, rows: Tensor, place: int) -> None:
        """Copy this rank's own rows of its heads to their places in `joint`, the last of `rows` [members, S]."""
        _put_rows(self.joint, rows[-1], self.local_heads(place))


class ToTokens(ExchangedTensor):
    """The exchange of a tensor after the ring: each message holds the receiver's rows of the sender's heads.

    Results of a head that several members share are added up.
    """

    traffic = Traffic.REDUCE

    @property
    def result(self) -> Tensor:
        """Return `local`, this rank's rows of all heads."""
        return self.local

    def whose_rows(self, sender: int, receiver: int) -> int:
        """Return `receiver`: the message from `sender` to it holds the receiver's rows."""
        return receiver

    def leave(self, receiver: int, message: Tensor) -> None:
        """Fill `message`, to member `receiver`, with that member's rows of this rank's heads."""
        for local, joint, length in self.block.spans[receiver]:
            message.narrow(1, local, length).copy_(self.joint.narrow(1, joint, length))

    def arrive(self, sender: int, message: Tensor) -> None:
        """Copy `message`, this rank's rows of member `sender`'s heads, into `local`; add it if they share a head."""
        own_rows = self.local_heads(sender)
        if self.ranks_per_head > 1:
            own_rows.add_(message)
        else:
            own_rows.copy_(message)

    def stay(self, place: int) -> None:
        """Copy this rank's rows of its own heads, as the member at `place`, into `local`."""
        self.leave(place, self.local_heads(place))

    def leave_all(self, messages: Tensor, rows: Tensor, place: int) -> None:
        """Fill the messages to all others, [others, B, S, h, D], with each receiver's rows of this rank's heads.

        `rows` [members, S] has the places of each receiver's rows among the group's, and last of this rank's own.
        """
        _take_rows(self.joint, rows[:-1], messages.transpose(0, 1))

    def arrive_all(self, messages: Tensor, rows: Tensor, place: int) -> None:
        """Copy all received messages, [others, B, S, h, D], into `local`.

        They are added up where all members share all heads. Each has this rank's rows of the sender's heads; `place`
        is this rank's place in the group.
        """
        for some, heads in self._heads_of_others(place):
            if self.ranks_per_head > 1:
                add_(heads[0], messages[some].unbind())
            else:
                heads.copy_(messages[some])

    def stay_at(self, rows: Tensor, place: int) -> None:
        """Copy this rank's rows of its own heads into `local`, as the member at `place`.

        The last of `rows` [members, S] are the places of its rows among the group's.
        """
        _take_rows(self.joint, rows[-1], self.local_heads(place))


def _put_rows(x: Tensor, rows: Tensor, source: Tensor) -> None:
    """Set the token rows `rows` of x [B, S, h, D]; by the operator, which takes a `source` of any strides."""
    torch.ops.aten.index_put_.default(x, [None, rows], source)


def _take_rows(x: Tensor, rows: Tensor, target: Tensor) -> None:
    """Copy the token rows `rows` of x [B, S, h, D] to `target`, of any strides, without a tensor in between."""
    torch.ops.aten.index.Tensor_out(x, [None, rows], out=target)
