"""Gather blocks inside groups of ranks, so that both sides move: tiles of a by b blocks, "Mesh-Attention".

`mesh_degree` consecutive ranks, a, are a group. Before a pass every rank gets from each other rank of its group the
block of the side that stays, and goes around a ring with the ranks at its own place in the other groups, b = P / a of
them; so it works on the a blocks of its group and the b blocks of its ring, its own block among both. Afterwards
the partial results of the group's blocks go to the ranks that own these, which merge or add them up in float32.

6 ranks, mesh_degree 2, keys move; which rank works on which pair of blocks, two rings, of ranks 0 2 4 and 1 3 5:

                       keys of rank     0  1  2  3  4  5
    group 0   queries of rank 0         0  1  0  1  0  1       rank 0 gets the queries of rank 1, and all keys
                              1         0  1  0  1  0  1       of its ring: a tile of 2 x 3 blocks
    group 1                   2         2  3  2  3  2  3
                              3         2  3  2  3  2  3
    group 2                   4         4  5  4  5  4  5
                              5         4  5  4  5  4  5

With S and M the bytes of one block of the side that stays and of the one that moves, operands as they are read and
partial results (`compute.shapes`), a rank sends in a pass

    (a - 1) * S + (b - 1) * M

and with a = b = sqrt(P) as few as 2 (sqrt(P) - 1) blocks, where a ring sends P - 1. Messages of the ring hide
behind work, messages of groups do not. With a = 1 there is the ring alone; with a = P nothing moves around, and if
queries are the side that would, all keys are gathered.

Source: Mesh-Attention (arXiv 2512.20968): a tile of a x b blocks for every GPU, of which its own queries and keys are
one. There queries are gathered, and partial outputs are sent back; here the side that is gathered is free, as is the
side that moves. In blocks of one tensor, q, k, v and out of one size and type, lse and other
numbers per row left aside, its tile has 2 (a - 1) + 2 (b - 1) to send forward, q and out, k and v, and
3 (a - 1) + 4 (b - 1) backward, q, dout and dq, and k, v, dk and dv.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from burst_plugin.compute.online_softmax import merge_, project
from burst_plugin.kernels import Queries
from burst_plugin.ring.request import BackwardOperands, Inputs
from burst_plugin.ring.systems.group_exchange import ExchangedTensor, GroupExchange, ToHeads, ToTokens
from burst_plugin.ring.systems.rank_groups import GroupBlock
from burst_plugin.types import OTHER_SIDE, Side


@dataclass(frozen=True, eq=False, repr=False)
class MeshExchange(GroupExchange):
    """One rank's part in gathering blocks within its group before the ring, and reducing results after it.

    The blocks are of the side that stays: queries, or keys and values.
    """

    what: ClassVar[str] = "the exchange of blocks"

    @property
    def stays(self) -> Side:
        """Return the side that does not go around the ring, whose blocks the group gathers."""
        return OTHER_SIDE[self.moving]

    def gathered(self, inputs: Inputs) -> Generator[None, None, Inputs]:
        """Return the inputs of the ring's forward pass: of the side that stays, all rows of the group."""
        if self.stays == "kv":
            k, v = yield from self._gather([inputs.k, inputs.v])
            return inputs._replace(k=k, v=v)
        q, *bias = yield from self._gather([inputs.q, *_token_rows(inputs.bias)])
        return inputs._replace(q=q, bias=bias[0].transpose(1, 2) if bias else None)

    def gathered_backward(self, own: BackwardOperands) -> Generator[None, None, BackwardOperands]:
        """Return the operands of the ring's backward pass: of the side that stays, all rows of the group.

        own: this rank's operands. Queries that are gathered send a factor per row in place of out, if `own` has one.
        """
        if self.stays == "kv":
            return own._replace(inputs=(yield from self.gathered(own.inputs)))
        (q, dout, out, lse), factor, bias = own.queries, own.factor, own.inputs.bias
        sent = [q, dout, out if factor is None else _as_heads(factor), _as_heads(lse), *_token_rows(bias)]
        q, dout, for_delta, lse, *rows = yield from self._gather(sent)
        out = for_delta if factor is None else project(dout, _as_rows(for_delta))
        inputs = own.inputs._replace(q=q, bias=rows[0].transpose(1, 2) if rows else None)
        return BackwardOperands(Queries(q, dout, out, _as_rows(lse)), inputs, None)

    def merged(self, out: Tensor, lse: Tensor) -> Generator[None, None, tuple[Tensor, Tensor]]:
        """Return out [B, S, H, D] and lse [B, H, S] of this rank's queries over the keys of all ranks.

        out, lse: the results of the ring; if queries stay, of all rows of the group over the keys of one ring only.
        """
        if self.stays == "kv":
            return out, lse
        (batch, _, heads, dim), block, members = out.shape, self._block, self.group.degree
        own = (batch, block.counts[self.group.place])
        lses = ToTokens(lse.new_empty(*own, members * heads, 1), _as_heads(lse), block, 1)
        merged = out.new_empty(*own, heads, dim), lse.new_empty(batch, heads, own[1])
        outs = _Merged(merged[0], out, block, members, lses, merged[1])
        yield from self.move([lses, outs], ["q", "q"])
        return merged

    def summed(self, grads: Inputs) -> Generator[None, None, Inputs]:
        """Return the gradients of this rank's inputs, from the gradients that the ring computed.

        Gradients of the side that stays come from the ring with all rows of the group, and each row is summed over
        members.
        """
        if self.stays == "kv":
            dk, dv = yield from self._reduce([grads.k, grads.v])
            return grads._replace(k=dk, v=dv)
        dbias = None if grads.bias is None else grads.bias.to(grads.q.dtype)  # narrow where a rank had no work
        dq, *rows = yield from self._reduce([grads.q, *_token_rows(dbias)])
        return grads._replace(q=dq, bias=rows[0].transpose(1, 2) if rows else None)

    def _gather(self, tensors: Sequence[Tensor]) -> Generator[None, None, list[Tensor]]:
        """Return the rows of the whole group, [B, S_group, H, D], of tensors [B, S_local, H, D]."""
        pieces: list[ExchangedTensor] = []
        for x in tensors:
            joint = x.new_empty(x.shape[0], self._block.length, *x.shape[2:])
            pieces.append(ToHeads(x, joint, self._block, self.group.degree))
        yield from self.move(pieces, [self.stays] * len(pieces))
        return [piece.result for piece in pieces]

    def _reduce(self, tensors: Sequence[Tensor]) -> Generator[None, None, list[Tensor]]:
        """Return this rank's rows of tensors with the rows of the whole group, all members' added up."""
        pieces: list[ExchangedTensor] = []
        for x in tensors:
            local = x.new_zeros(x.shape[0], self._block.counts[self.group.place], *x.shape[2:])
            pieces.append(ToTokens(local, x, self._block, self.group.degree))
        yield from self.move(pieces, [self.stays] * len(pieces))
        return [piece.result for piece in pieces]

    @property
    def _block(self) -> GroupBlock:
        return self.blocks[self.stays]


@dataclass(frozen=True, eq=False, repr=False)
class _Merged(ToTokens):
    """Partial outputs of this rank's rows over the keys of each member, merged as they come; and lse [B, H, S].

    `of_members` is the piece with the lse of every member side by side, which is before this one in messages.
    """

    of_members: ExchangedTensor
    lse: Tensor

    def arrive(self, sender: int, message: Tensor) -> None:
        """Merge a member's partial outputs."""
        merge_(self.local, self.lse, [(message, self._lse_of(sender))])

    def arrive_all(self, messages: Tensor, rows: Tensor, place: int) -> None:
        """Merge all other members' partial outputs."""
        others = [member for member in range(self.ranks_per_head) if member != place]
        merge_(self.local, self.lse, [(x, self._lse_of(n)) for x, n in zip(messages.unbind(), others, strict=True)])

    def stay(self, place: int) -> None:
        """Begin with this rank's own partial outputs."""
        super().stay(place)
        self.lse.copy_(self._lse_of(place))

    def stay_at(self, rows: Tensor, place: int) -> None:
        """Put this rank's own partial outputs into the tensors of all places, in one go."""
        super().stay_at(rows, place)
        self.lse.copy_(self._lse_of(place))

    def _lse_of(self, member: int) -> Tensor:
        return _as_rows(self.of_members.local_heads(member))


def _as_heads(x: Tensor) -> Tensor:
    """Return numbers per row [B, H, S] as [B, S, H, 1]."""
    return x.transpose(1, 2).unsqueeze(3)


def _as_rows(x: Tensor) -> Tensor:
    """Return [B, S, H, 1] as [B, H, S]."""
    return x.squeeze(3).transpose(1, 2).contiguous()


def _token_rows(bias: Tensor | None) -> list[Tensor]:
    """Return a bias [B, H, S, K], if there is one, as [B, S, H, K]."""
    return [] if bias is None else [bias.transpose(1, 2)]
