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

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from burst_plugin.ring.request import Inputs, Outputs
from burst_plugin.ring.systems.group_exchange import ExchangedTensor, GroupExchange, ToHeads, ToTokens
from burst_plugin.types import Side


@dataclass(frozen=True, eq=False, repr=False)
class HeadExchange(GroupExchange):
    """One rank's part in the exchange of heads (DeepSpeed-Ulysses) before and after the ring, in one pass."""

    what: ClassVar[str] = "the exchange of heads"

    def inputs(self, inputs: Inputs) -> Generator[None, None, Inputs]:
        """Return the inputs of the ring, from the call's: the group's rows of this rank's share of the heads."""
        group = self.group
        tensors = [inputs.q, inputs.k, inputs.v]
        sides: list[Side] = ["q", "kv", "kv"]
        if inputs.bias is not None:
            rows = inputs.bias.transpose(1, 2)  # a bias that heads share goes to each of them
            tensors.append(rows if rows.shape[2] > 1 else rows.expand(-1, -1, group.degree, -1))
            sides.append("q")
        q, k, v, *bias = yield from self.run(True, tensors, sides)
        sink = None if inputs.sink is None else inputs.sink[group.heads_of(inputs.q.shape[2])]
        return Inputs(q, k, v, sink, bias[0].transpose(1, 2) if bias else None)

    def outputs(self, outputs: Outputs, with_lse: bool) -> Generator[None, None, Outputs]:
        """Return the call's outputs, for this rank's rows of all heads, from the outputs of the ring.

        with_lse: whether lse was asked for; None is returned in its place otherwise. `max_logits` is -inf for heads
            that this rank did not work on.
        """
        group = self.group
        tensors = [outputs.out]
        if with_lse and outputs.lse is not None:
            tensors.append(outputs.lse.transpose(1, 2).unsqueeze(3))
        out, *lse = yield from self.run(False, tensors, ["q"] * len(tensors))
        return Outputs(
            out,
            lse[0].squeeze(3).transpose(1, 2) if lse else None,
            None
            if outputs.max_logits is None
            else group.spread(outputs.max_logits, -torch.inf),  # others' were not seen
        )

    def upstream(
        self, dout: Tensor, dlse: Tensor | None, with_lse: bool
    ) -> Generator[None, None, tuple[Tensor, Tensor | None]]:
        """Return the gradients of the ring's out and lse, from the gradients of this rank's rows of all heads.

        Args:
            dout: [B, S_local, H, D].
            dlse: [B, H, S_local]; None, if nothing on this rank depends on lse, counts as zeros.
            with_lse: whether gradients of lse are exchanged, on all ranks alike. If not, None is returned for lse.

        Returns:
            dout [B, S_group, H / degree, D] and dlse [B, H / degree, S_group], of this rank's share of the heads.
        """
        tensors = [dout]
        if with_lse:
            batch, length, heads, _ = dout.shape
            if dlse is None:
                wide = torch.promote_types(dout.dtype, torch.float32)
                dlse = torch.zeros((batch, heads, length), dtype=wide, device=dout.device)
            tensors.append(dlse.transpose(1, 2).unsqueeze(3))
        dout, *rows = yield from self.run(True, tensors, ["q"] * len(tensors))
        return dout, rows[0].squeeze(3).transpose(1, 2) if rows else None

    def grads(self, grads: Inputs, shared_bias: bool) -> Generator[None, None, Inputs]:
        """Return the gradients of the call's inputs, for this rank's rows of all heads, from the ring's gradients.

        shared_bias: whether all heads share one bias, whose gradient is summed over heads then.
        """
        group = self.group
        dq, dk, dv, dsink, dbias = grads[:5]
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

    def run(
        self, to_heads: bool, tensors: Sequence[Tensor], sides: Sequence[Side]
    ) -> Generator[None, None, list[Tensor]]:
        """Send tensors to the ranks that work on their heads, or back to the ranks of their rows; collective.

        To heads: [B, S_local, H, D] becomes [B, S_group, H / degree, D], the group's rows of this rank's share. Back:
        the other way round, and what members have of a head that they share is added up. Yields while messages are
        under way, for ranks that take turns.

        Args:
            to_heads: True to send to the ranks of the heads, False to send back.
            tensors: what to send.
            sides: "q" or "kv" for each tensor, which says whose rows and heads it has.
        """
        pieces = [self._piece(to_heads, x, side) for x, side in zip(tensors, sides, strict=True)]
        yield from self.move(pieces, sides)
        return [piece.result for piece in pieces]

    def _piece(self, to_heads: bool, x: Tensor, side: Side) -> ExchangedTensor:
        block, ranks_per_head = self.blocks[side], self.ranks_per_kv_head if side == "kv" else 1
        different = self.group.degree // ranks_per_head
        batch, _, heads, dim = x.shape
        if to_heads:
            return ToHeads(x, x.new_empty((batch, block.length, heads // different, dim)), block, ranks_per_head)
        shape = (batch, block.counts[self.group.place], heads * different, dim)
        local = x.new_empty(shape) if ranks_per_head == 1 else x.new_zeros(shape)
        return ToTokens(local, x, block, ranks_per_head)
