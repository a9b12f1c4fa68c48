"""Exchange heads inside Ulysses groups of ranks, so that a ring of groups is left: "2D attention".

`ulysses_degree` ranks are a *Ulysses group*: consecutive ones, or as `topology.Groups` says. Before the ring each of
them sends its tokens of some heads to the ranks that work on these heads, and has the tokens of the whole group for
its own share of the heads; afterwards outputs take the way back. Rank j of every group goes around a ring with the
ranks j of the others.

8 tokens over 4 ranks in zigzag, degree 2, heads a b; two rings, of ranks 0 2 (head a) and 1 3 (head b):

                  before          after
    group 0  rank 0   0 7   a b       0 1 6 7   a        rows are sorted by position, and neighbours joined: a group's
             rank 1   1 6   a b       0 1 6 7   b        block in zigzag is what one rank of two would hold, and a
    group 1  rank 2   2 5   a b       2 3 4 5   a        whole group's is the sequence: one ring of one rank
             rank 3   3 4   a b       2 3 4 5   b

What is sent to be read is gather traffic, outputs and gradients on their way back are reduce traffic. Per rank
it is (degree - 1) / degree of q, k, v and out, once, whatever the number of ranks, but not hidden behind work.

Sources: DeepSpeed-Ulysses (arXiv 2309.14509) for the exchange; USP (2405.07719) and LoongTrain's 2D attention
(2406.18485, section 4.2) for ring and exchange together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from burst_plugin.comm.buffers import Buffer, Packing
from burst_plugin.comm.transport import Channel, PeerLostError, Pending, Transport, lost_peer_error
from burst_plugin.ring.request import Inputs, Outputs
from burst_plugin.ring.ulysses_groups import GroupBlock, UlyssesGroup
from burst_plugin.ring.ulysses_pieces import Piece, ToHeads, ToTokens
from burst_plugin.types import Side, Spec

if TYPE_CHECKING:
    from burst_plugin.profiling.recorder import Profile

__all__ = ["HeadExchange"]


@dataclass(frozen=True, eq=False, repr=False)
class HeadExchange:
    """One rank's part in the exchange of its group, in one pass.

    `blocks` says of side "q" and "kv" what the group holds; `label` to which call a message belongs (see
    `executor.RingPass`). The bytes that are to be sent are counted in `expected_bytes`; `packing` says how a message
    is laid out. With more members than key/value heads, as many as `ranks_per_kv_head` work with the same one.
    `rows`, if there are any, are those of `ulysses_groups.member_rows`: then all messages are filled at once.
    """

    ulysses_group: UlyssesGroup
    transport: Transport
    blocks: Mapping[Side, GroupBlock]
    expected_bytes: Counter[Channel]
    packing: Callable[[tuple[Spec, ...]], Packing]
    label: Tensor | None = None
    profile: Profile | None = None
    ranks_per_kv_head: int = 1
    rows: Mapping[Side, Tensor] | None = None
    what: ClassVar[str] = "the exchange of heads"

    def run(
        self, to_heads: bool, tensors: Sequence[Tensor], sides: Sequence[Side]
    ) -> Generator[None, None, list[Tensor]]:
        """Send tensors, each of a side, to the ranks of their heads, or back; all ranks of the group call it.

        To heads: [B, S_local, H, D] becomes [B, S_group, H / degree, D], the group's rows of this rank's share. Back:
        the other way round, and what members have of a head that they share is added up. Yields once, while messages
        are under way, for ranks that take turns.
        """
        pieces = [self._piece(to_heads, x, side) for x, side in zip(tensors, sides, strict=True)]
        yield from self.move(pieces, sides)
        return [piece.result for piece in pieces]

    def move(self, pieces: Sequence[Piece], sides: Sequence[Side]) -> Generator[None, None, None]:
        """Send pieces, each of a side, between the ranks of the group, all in one message to each of the others."""
        log = None if self.profile is None else self.profile.begin_pass("exchange", pieces[0].local.device)
        transport = self.transport if log is None else log.watch(self.transport)
        packings = [
            self.packing(tuple(piece.spec(member) for piece in pieces)) for member in range(self.ulysses_group.degree)
        ]
        try:
            with nullcontext() if log is None else log.timed("move"):
                rows = None if self.rows is None else [self.rows[side] for side in sides]
                if rows is None:
                    leased, under_way = self._begin(transport, pieces, packings)
                else:
                    leased, under_way = self._begin_at_once(transport, pieces, packings[0], rows)
            yield
            while not transport.has_met(under_way):  # rings of other places may take more steps
                yield
            with nullcontext() if log is None else log.timed("move"):
                for pending in under_way:
                    pending.wait()
                if rows is None:
                    self._finish(transport, pieces, packings, leased)
                else:
                    self._finish_at_once(transport, pieces, packings[0], rows, leased[0])
        except PeerLostError as lost:
            rank = self.ulysses_group.peers[self.ulysses_group.place]
            raise lost_peer_error(transport, rank, self.what, lost) from lost

    def to_heads(self, inputs: Inputs) -> Generator[None, None, Inputs]:
        """Return what the ring is given: the group's rows of this rank's share of the heads."""
        group = self.ulysses_group
        tensors = [inputs.q, inputs.k, inputs.v]
        sides: list[Side] = ["q", "kv", "kv"]
        if inputs.bias is not None:
            rows = inputs.bias.transpose(1, 2)  # one that heads share goes to each of them
            tensors.append(rows if rows.shape[2] > 1 else rows.expand(-1, -1, group.degree, -1))
            sides.append("q")
        q, k, v, *bias = yield from self.run(True, tensors, sides)
        sink = None if inputs.sink is None else inputs.sink[group.heads_of(inputs.q.shape[2])]
        return Inputs(q, k, v, sink, bias[0].transpose(1, 2) if bias else None)

    def outputs_to_tokens(self, outs: Outputs, with_lse: bool) -> Generator[None, None, Outputs]:
        """Return what the ring gave, for this rank's rows of all heads; lse if it is asked for."""
        group = self.ulysses_group
        tensors = [outs.out]
        if with_lse and outs.lse is not None:
            tensors.append(outs.lse.transpose(1, 2).unsqueeze(3))
        out, *lse = yield from self.run(False, tensors, ["q"] * len(tensors))
        return Outputs(
            out,
            lse[0].squeeze(3).transpose(1, 2) if lse else None,
            None if outs.max_logits is None else group.spread(outs.max_logits, -torch.inf),  # others' were not seen
        )

    def dout_to_heads(self, dout: Tensor) -> Generator[None, None, Tensor]:
        """Return the gradient of the output, as the ring takes it."""
        (dout,) = yield from self.run(True, [dout], ["q"])
        return dout

    def grads_to_tokens(self, grads: Inputs, shared_bias: bool) -> Generator[None, None, Inputs]:
        """Return the gradients of the inputs of `to_heads`; `shared_bias` says that heads share theirs."""
        group = self.ulysses_group
        dq, dk, dv, dsink, dbias = grads
        tensors = [dq, dk, dv]
        sides: list[Side] = ["q", "kv", "kv"]
        if dbias is not None:
            tensors.append(dbias.transpose(1, 2))
            sides.append("q")
        dq, dk, dv, *rows = yield from self.run(False, tensors, sides)
        dbias = rows[0].transpose(1, 2) if rows else None
        if dbias is not None and shared_bias:
            dbias = dbias.sum(1, keepdim=True)
        return Inputs(dq, dk, dv, None if dsink is None else group.spread(dsink, 0.0), dbias)

    def _piece(self, to_heads: bool, x: Tensor, side: Side) -> Piece:
        block, ranks_per_head = self.blocks[side], self.ranks_per_kv_head if side == "kv" else 1
        different = self.ulysses_group.degree // ranks_per_head
        batch, _, heads, dim = x.shape
        if to_heads:
            return ToHeads(x, x.new_empty((batch, block.length, heads // different, dim)), block, ranks_per_head)
        shape = (batch, block.counts[self.ulysses_group.place], heads * different, dim)
        local = x.new_empty(shape) if ranks_per_head == 1 else x.new_zeros(shape)
        return ToTokens(local, x, block, ranks_per_head)

    def _begin(
        self, transport: Transport, pieces: Sequence[Piece], packings: Sequence[Packing]
    ) -> tuple[list[tuple[Buffer, Buffer]], list[Pending]]:
        """Post what goes to and comes from every other member; what stays with this rank is copied meanwhile.

        `packings` are those of messages with the rows of each member.
        """
        group, device, traffic, whose = (
            self.ulysses_group,
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
        under_way = transport.post(sends, recvs)
        for piece in pieces:
            piece.stay(group.place)
        return leased, under_way

    def _begin_at_once(
        self, transport: Transport, pieces: Sequence[Piece], packing: Packing, rows: Sequence[Tensor]
    ) -> tuple[list[tuple[Buffer, Buffer]], list[Pending]]:
        """Do what `_begin` does in a few launches for each tensor; all messages are in one buffer each way."""
        group, traffic, count = self.ulysses_group, pieces[0].traffic, self.ulysses_group.degree - 1
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
        under_way = transport.post(sends, recvs)
        for piece, here in zip(pieces, rows, strict=True):
            piece.stay_at(here, group.place)
        return [(leaving, arriving)], under_way

    def _finish_at_once(
        self,
        transport: Transport,
        pieces: Sequence[Piece],
        packing: Packing,
        rows: Sequence[Tensor],
        leased: tuple[Buffer, Buffer],
    ) -> None:
        """Do what `_finish` does, of all messages at once."""
        leaving, arrived = leased
        views = arrived.views(packing, self.ulysses_group.degree - 1)
        for piece, messages, here in zip(pieces, views, rows, strict=True):
            piece.arrive_all(messages, here, self.ulysses_group.place)
        transport.pool.release(leaving)
        transport.pool.release(arrived)

    def _finish(
        self,
        transport: Transport,
        pieces: Sequence[Piece],
        packings: Sequence[Packing],
        leased: Sequence[tuple[Buffer, Buffer]],
    ) -> None:
        """Put what arrived where it belongs."""
        for member, (leaving, arrived) in zip(self.ulysses_group.others, leased, strict=True):
            if not arrived.has_label(self.label):
                raise PeerLostError(self.ulysses_group.peers[member], "what it sent belongs to another call")
            packing = packings[pieces[0].whose_rows(member, self.ulysses_group.place)]
            for piece, view in zip(pieces, arrived.views(packing), strict=True):
                piece.arrive(member, view)
            transport.pool.release(leaving)
            transport.pool.release(arrived)
