"""Heads exchanged inside teams of ranks, so that a ring of teams is left: Ulysses and ring, "2D attention".

`ulysses_degree` consecutive ranks are a *team*. Before the ring each of them gives its tokens of some heads to those
who work on these heads, and has the tokens of the whole team for its own share of the heads; afterwards outputs take
the way back. Rank j of every team goes around a ring with the ranks j of the others.

8 tokens over 4 ranks in zigzag, degree 2, heads a b; two rings, of ranks 0 2 (head a) and 1 3 (head b):

                 before           after
    team 0  rank 0   0 7   a b        0 1 6 7   a        rows are sorted by position, and neighbours joined: a team's
            rank 1   1 6   a b        0 1 6 7   b        block in zigzag is what one rank of two would hold, and a
    team 1  rank 2   2 5   a b        2 3 4 5   a        whole group's is the sequence: one ring of one rank
            rank 3   3 4   a b        2 3 4 5   b

What goes to where it is read is gather traffic, outputs and gradients on their way home are reduce traffic. Per rank
it is (degree - 1) / degree of q, k, v and out, once, whatever the number of ranks, but not hidden behind work.

Sources: DeepSpeed-Ulysses (arXiv 2309.14509) for the exchange; USP (2405.07719) and LoongTrain's 2D attention
(2406.18485, section 4.2) for ring and exchange together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.executor import ring_error
from burst_plugin.layout import Run
from burst_plugin.packing import Buffer, Packing, Spec
from burst_plugin.profile import Profile
from burst_plugin.request import Inputs, Outputs
from burst_plugin.topology import Topology, Traffic
from burst_plugin.transport import Channel, Message, PeerLostError, Pending, Transport

__all__ = ["HeadExchange", "Joined", "Team", "joined"]


class Span(NamedTuple):
    """`length` rows: from `local` on in the rank's own order, from `joint` on in the team's."""

    local: int
    joint: int
    length: int


class Joined(NamedTuple):
    """What a team holds: its runs, and where each member's rows are among them."""

    runs: tuple[Run, ...]
    spans: tuple[tuple[Span, ...], ...]
    counts: tuple[int, ...]  # of rows that every member brings

    @property
    def length(self) -> int:
        """Rows of the whole team."""
        return sum(run.length for run in self.runs)


def joined(held: Sequence[tuple[Run, ...]]) -> Joined:
    """The rows of all members, by position; a team of one keeps its order."""
    pieces = []
    for member, runs in enumerate(held):
        starts = accumulate((run.length for run in runs), initial=0)
        pieces += [(run, member, start) for run, start in zip(runs, starts, strict=False)]
    if len(held) > 1:
        pieces.sort()
    found: list[Run] = []
    spans: list[list[Span]] = [[] for _ in held]
    at = 0
    for run, member, start in pieces:
        spans[member].append(Span(start, at, run.length))
        at += run.length
        last = found[-1] if found and len(held) > 1 else None
        if last is not None and last.stride == run.stride and last.start + last.length * last.stride == run.start:
            found[-1] = last._replace(length=last.length + run.length)
        else:
            found.append(run)
    counts = tuple(sum(span.length for span in each) for each in spans)
    return Joined(tuple(found), tuple(map(tuple, spans)), counts)


@dataclass(frozen=True)
class Team:
    """A rank's team: its members are the CP ranks `peers`, of which this rank is number `place`."""

    topology: Topology
    peers: Sequence[int]
    place: int

    @property
    def degree(self) -> int:
        """How many ranks, and shares of the heads."""
        return len(self.peers)

    @property
    def others(self) -> list[int]:
        """The members besides this rank."""
        return [member for member in range(self.degree) if member != self.place]

    def share(self, heads: int) -> slice:
        """This rank's, of so many heads."""
        return slice(self.place * heads // self.degree, (self.place + 1) * heads // self.degree)

    def spread(self, mine: Tensor, others: float) -> Tensor:
        """[H] of all heads from [H / degree] of this rank's share."""
        found = mine.new_full((len(mine) * self.degree,), others)
        found[self.share(len(found))] = mine
        return found

    @cached_property
    def _channels(self) -> dict[Traffic, list[Channel]]:
        """To every member."""
        links = [self.topology.link(self.peers[self.place], peer) for peer in self.peers]
        return {traffic: [Channel(traffic, link) for link in links] for traffic in Traffic}

    def message(self, traffic: Traffic, member: int, data: Tensor) -> Message:
        """To or from a member."""
        return Message(self.peers[member], self._channels[traffic][member], data)


class _Piece(NamedTuple):
    """A tensor on both sides of the exchange: `local` [B, S_local, H, D], `joint` [B, S_team, h, D].

    Each member has h heads, the next ones after those of the member before, or after `sharing` members the same ones.
    """

    local: Tensor
    joint: Tensor
    rows: Joined
    sharing: int

    def share(self, member: int) -> Tensor:
        """The heads of a member, of the local rows."""
        heads = self.joint.shape[2]
        return self.local.narrow(2, member // self.sharing * heads, heads)

    def spec(self, count: int) -> Spec:
        """Of so many rows of one share of the heads."""
        batch, _, heads, dim = self.joint.shape
        return (batch, count, heads, dim), self.joint.dtype

    def to_joint(self, member: int, part: Tensor) -> None:
        """Put a member's rows of this rank's heads, `part`, among the team's."""
        for local, joint, length in self.rows.spans[member]:
            self.joint.narrow(1, joint, length).copy_(part.narrow(1, local, length))

    def from_joint(self, member: int, part: Tensor) -> None:
        """The other way round."""
        for local, joint, length in self.rows.spans[member]:
            part.narrow(1, local, length).copy_(self.joint.narrow(1, joint, length))


@dataclass(frozen=True)
class HeadExchange:
    """One rank's part in the exchange of its team, in one pass.

    `joined` says of side "q" and "kv" what the team holds; `label` to which call a message belongs (`executor.Ring`).
    The bytes that are to be sent are counted in `expected_bytes`; `packing` says how a message is laid out. With more
    members than key/value heads, as many as `sharing` work with the same one.
    """

    team: Team
    transport: Transport
    joined: Mapping[str, Joined]
    expected_bytes: Counter[Channel]
    packing: Callable[[tuple[Spec, ...]], Packing]
    label: Tensor | None = None
    profile: Profile | None = None
    sharing: int = 1

    def run(
        self, to_heads: bool, tensors: Sequence[Tensor], sides: Sequence[str]
    ) -> Generator[None, None, list[Tensor]]:
        """Tensors, each of a side, on their way to the ranks of their heads, or back; all of the team together.

        To heads: [B, S_local, H, D] becomes [B, S_team, H / degree, D], the team's rows of this rank's share. Back:
        the other way round, and what members have of a head that they share is added up. Yields once, while messages
        are under way, for ranks that take turns.
        """
        log = None if self.profile is None else self.profile.begin_pass("exchange", tensors[0].device)
        transport = self.transport if log is None else log.watch(self.transport)
        pieces = [self._piece(to_heads, x, side) for x, side in zip(tensors, sides, strict=True)]
        try:
            with nullcontext() if log is None else log.timed("move"):
                under_way = self._begin(transport, to_heads, pieces)
            yield
            with nullcontext() if log is None else log.timed("move"):
                self._finish(transport, to_heads, pieces, under_way)
        except PeerLostError as lost:
            raise ring_error(transport, self.team.peers[self.team.place], "the exchange of heads", lost) from lost
        return [piece.joint if to_heads else piece.local for piece in pieces]

    def to_heads(self, inputs: Inputs) -> Generator[None, None, Inputs]:
        """What the ring is given: the team's rows of this rank's share of the heads."""
        team = self.team
        if team.degree == 1:
            return inputs
        tensors, sides = [inputs.q, inputs.k, inputs.v], ["q", "kv", "kv"]
        if inputs.bias is not None:
            rows = inputs.bias.transpose(1, 2)  # one that heads share goes to each of them
            tensors.append(rows if rows.shape[2] > 1 else rows.expand(-1, -1, team.degree, -1))
            sides.append("q")
        q, k, v, *bias = yield from self.run(True, tensors, sides)
        sink = None if inputs.sink is None else inputs.sink[team.share(inputs.q.shape[2])]
        return Inputs(q, k, v, sink, bias[0].transpose(1, 2) if bias else None)

    def outputs_home(self, found: Outputs, with_lse: bool) -> Generator[None, None, Outputs]:
        """What the ring gave, for this rank's rows of all heads; lse if it is asked for."""
        team = self.team
        if team.degree == 1:
            return found
        tensors = [found.out]
        if with_lse and found.lse is not None:
            tensors.append(found.lse.transpose(1, 2).unsqueeze(3))
        out, *lse = yield from self.run(False, tensors, ["q"] * len(tensors))
        return Outputs(
            out,
            lse[0].squeeze(3).transpose(1, 2) if lse else None,
            None if found.max_logits is None else team.spread(found.max_logits, -torch.inf),  # others' were not seen
        )

    def dout_to_heads(self, dout: Tensor) -> Generator[None, None, Tensor]:
        """The gradient of the output, as the ring wants it."""
        if self.team.degree == 1:
            return dout.contiguous()
        (dout,) = yield from self.run(True, [dout], ["q"])
        return dout

    def grads_home(self, grads: Inputs, shared_bias: bool) -> Generator[None, None, Inputs]:
        """The gradients of `to_heads`' inputs; `shared_bias` says that heads share theirs."""
        team = self.team
        if team.degree == 1:
            return grads
        dq, dk, dv, dsink, dbias = grads
        tensors, sides = [dq, dk, dv], ["q", "kv", "kv"]
        if dbias is not None:
            tensors.append(dbias.transpose(1, 2))
            sides.append("q")
        dq, dk, dv, *rows = yield from self.run(False, tensors, sides)
        dbias = rows[0].transpose(1, 2) if rows else None
        if dbias is not None and shared_bias:
            dbias = dbias.sum(1, keepdim=True)
        return Inputs(dq, dk, dv, None if dsink is None else team.spread(dsink, 0.0), dbias)

    def _piece(self, to_heads: bool, x: Tensor, side: str) -> _Piece:
        rows, sharing = self.joined[side], self.sharing if side == "kv" else 1
        different = self.team.degree // sharing
        batch, _, heads, dim = x.shape
        if to_heads:
            return _Piece(x, x.new_empty((batch, rows.length, heads // different, dim)), rows, sharing)
        shape = (batch, rows.counts[self.team.place], heads * different, dim)
        return _Piece(x.new_empty(shape) if sharing == 1 else x.new_zeros(shape), x, rows, sharing)

    def _begin(self, transport: Transport, to_heads: bool, pieces: Sequence[_Piece]) -> _UnderWay:
        """Post what goes to and comes from every other member; what stays with this rank goes over meanwhile."""
        team, device = self.team, pieces[0].local.device
        traffic = Traffic.GATHER if to_heads else Traffic.REDUCE
        sends, recvs = [], []
        leased: list[tuple[Buffer, Buffer]] = []
        rows_of = self._packings_by_member(pieces)
        for member in team.others:
            out, back = rows_of[team.place], rows_of[member]
            if not to_heads:
                out, back = back, out
            leaving, arriving = transport.pool.lease(out.nbytes, device), transport.pool.lease(back.nbytes, device)
            leased.append((leaving, arriving))
            for piece, view in zip(pieces, leaving.views(out), strict=True):
                if to_heads:
                    view.copy_(piece.share(member))
                else:
                    piece.from_joint(member, view)
            leaving.mark(self.label)
            sends.append(team.message(traffic, member, leaving.data))
            recvs.append(team.message(traffic, member, arriving.data))
            self.expected_bytes[sends[-1].channel] += out.nbytes
        under_way = _UnderWay(leased, rows_of, transport.post(sends, recvs))
        for piece in pieces:
            (piece.to_joint if to_heads else piece.from_joint)(team.place, piece.share(team.place))
        return under_way

    def _finish(self, transport: Transport, to_heads: bool, pieces: Sequence[_Piece], under_way: _UnderWay) -> None:
        """Wait, and put what arrived in its place."""
        for pending in under_way.pending:
            pending.wait()
        for member, (leaving, arrived) in zip(self.team.others, under_way.leased, strict=True):
            if not arrived.bears(self.label):
                raise PeerLostError(self.team.peers[member], "what it sent belongs to another call")
            packing = under_way.packings[member if to_heads else self.team.place]
            for piece, view in zip(pieces, arrived.views(packing), strict=True):
                if to_heads:
                    piece.to_joint(member, view)
                elif piece.sharing > 1:
                    piece.share(member).add_(view)
                else:
                    piece.share(member).copy_(view)
            transport.pool.release(leaving)
            transport.pool.release(arrived)

    def _packings_by_member(self, pieces: Sequence[_Piece]) -> list[Packing]:
        """How every member's rows of one share of the heads travel; members mostly bring alike numbers of rows."""
        found: dict[tuple[int, ...], Packing] = {}
        every = [*zip(*(piece.rows.counts for piece in pieces), strict=True)]
        for counts in dict.fromkeys(every):
            specs = tuple(piece.spec(count) for piece, count in zip(pieces, counts, strict=True))
            found[counts] = self.packing(specs)
        return [found[counts] for counts in every]


class _UnderWay(NamedTuple):
    leased: list[tuple[Buffer, Buffer]]  # to and from every other member
    packings: list[Packing]  # of every member's rows
    pending: list[Pending]
