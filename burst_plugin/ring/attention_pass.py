"""The two passes of attention of one rank: the loop around the ring, and what comes before and after it.

In every visit one side, queries or keys and values, is this rank's own and the other has travelled. What a pass reads
and accumulates on either side is in `compute.passes`; which side moves is data.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.comm.call_identity import CallId
from burst_plugin.compute.accumulators import BlockAccumulators, Tensors
from burst_plugin.compute.online_softmax import add_sink, row_factor, sink_grad
from burst_plugin.compute.passes import Part
from burst_plugin.compute.tile_attention import bias_grad
from burst_plugin.kernels import Queries
from burst_plugin.ring.executor import Visit
from burst_plugin.ring.memo import Memo
from burst_plugin.ring.pass_plan import PassPlan
from burst_plugin.ring.plan import Plan
from burst_plugin.ring.request import BackwardOperands, Inputs, Outputs
from burst_plugin.types import SIDES, Side

__all__ = ["Saved", "backward_program", "forward_program", "run_pass"]


def run_pass(
    plan: Plan, pass_plan: PassPlan, parts: Sequence[Part], which: CallId
) -> Generator[None, None, tuple[Tensors, Tensors]]:
    """Run one pass of one rank, and return the results of its queries, and of its keys and values.

    Yields once per step, for ranks that take turns. `parts` are those of the heads, mostly one; `which` call this is,
    is the same on every rank.
    """
    own = {side: pass_plan.accumulators(side, parts) for side in SIDES}
    rings = plan.ring_passes(pass_plan, parts, own, which)
    for visits in zip_longest(*(ring.steps() for ring in rings)):  # of the ring, or one of each half
        for half, ring, visit in zip(pass_plan.halves, rings, visits, strict=True):
            if visit is not None:
                with ring.traced(visit):
                    _work(half, parts[visit.part], visit, own)
        yield
    q, kv = (own[side].finished(pass_plan.rounded[side]) for side in SIDES)
    return q, kv


def _work(plan: PassPlan, part: Part, visit: Visit, own: Mapping[Side, BlockAccumulators]) -> None:
    """Do the work of one visit: what its tiles contribute is accumulated here, and with the block that travels."""
    q, kv, part.under_way = part.q, part.kv, visit.under_way
    if not visit.is_own:
        arrived = part.incoming(plan.moving, visit.operands)
        q, kv = (arrived, kv) if plan.moving == "q" else (q, arrived)
    positions = plan.positions(visit.owner)
    stays = own["q" if plan.moving == "kv" else "kv"].parts[visit.part]
    for tile in plan.tiles[visit.owner, visit.is_tail]:
        stays.make_room()
        contributions = part.compute(q, kv, tile, positions)
        for side, contribution in zip(SIDES, contributions, strict=True):
            if contribution:
                accumulator = visit.accumulator if side == plan.moving else stays
                accumulator.add(tile, side, contribution)
        del contributions, contribution  # whose memory the next tile may have


class Saved(NamedTuple):
    """What a rank's backward pass needs: what the ring was given, and what it gave."""

    given: Inputs
    out: Tensor
    lse: Tensor


def forward_program(
    plan: Plan, which: CallId, inputs: Inputs, memo: Memo | None = None
) -> Generator[None, None, tuple[Outputs, Saved]]:
    """Run a rank's forward pass, with heads exchanged, or blocks gathered and reduced, before and after the ring.

    What `memo` has of an earlier run is not computed again. Returns the outputs of the rank, and what its backward
    pass needs.
    """
    exchange = plan.head_exchange("forward", which)
    given = yield from exchange.to_heads(inputs)
    memo = memo or Memo(0.0)
    computed, missing = None, memo.missing(plan)
    if missing is not None:
        mesh = missing.mesh_exchange("forward", which)
        parts = missing.forward_parts((yield from mesh.gathered(given)))
        (out, lse), _ = yield from run_pass(missing, missing.forward, parts, which)
        largest = [part.max_logits for part in parts if part.max_logits is not None]
        del parts  # with the group's queries, whose memory the exchange may have
        out, lse = yield from mesh.merged(out, lse)
        if given.sink is not None:
            out, lse = add_sink(out, lse, given.sink)
        computed = Outputs(out.to(given.q.dtype), lse, torch.cat(largest) if largest else None)
    ring_outputs = memo.completed(plan, computed)
    outputs = yield from exchange.outputs_to_tokens(ring_outputs, plan.lse)
    assert ring_outputs.lse is not None, "the ring always gives it"
    return _own_numbers(outputs, plan.lse), Saved(given, ring_outputs.out, ring_outputs.lse)


def _own_numbers(outputs: Outputs, with_lse: bool) -> Outputs:
    """Return outputs whose lse and largest scores the caller may change in place.

    The backward pass and memos have tensors of their own: inside a checkpoint PyTorch would not notice the change.
    """
    lse = outputs.lse.clone() if with_lse and outputs.lse is not None else outputs.lse
    largest = outputs.max_logits
    return Outputs(outputs.out, lse, None if largest is None else largest.clone())


def backward_program(
    plan: Plan, which: CallId, dout: Tensor, saved: Saved, wants_dbias: bool = True
) -> Generator[None, None, Inputs]:
    """Run a rank's backward pass, with heads exchanged, or blocks gathered and reduced, before and after the ring.

    Returns the gradients of its inputs, in their types.
    """
    given, out, lse = saved
    wants_dbias = wants_dbias or plan.rank_state.exchange_group.degree > 1  # others of the group may want theirs
    exchange, mesh = plan.head_exchange("backward", which), plan.mesh_exchange("backward", which)
    dout = yield from exchange.dout_to_heads(dout)
    factor = row_factor(out, dout) if plan.sends_row_factor else None
    own = BackwardOperands(Queries(given.q, dout, out, lse), given, factor)
    operands = yield from mesh.gathered_backward(own)
    parts, bias = plan.backward_parts(*operands, wants_dbias), operands.inputs.bias
    del own, operands
    (dq,), (dk, dv) = yield from run_pass(plan, plan.backward, parts, which)
    dsink = None if given.sink is None else sink_grad(given.sink, out, dout, lse)
    dbias = bias_grad(bias, parts) if bias is not None and wants_dbias else None
    grads = Inputs(dq, dk, dv, dsink, dbias)
    del dout, factor, parts, bias, dq, dk, dv, dbias  # whose memory the exchanges may have
    grads = yield from mesh.summed(grads)
    grads = _rounded(given, grads, but=("k", "v") if plan.ranks_per_kv_head > 1 else ())
    return _rounded(given, (yield from exchange.grads_to_tokens(grads, plan.extras.shared_bias)))


def _rounded(given: Inputs, grads: Inputs, but: Collection[str] = ()) -> Inputs:
    """Return gradients in the types of what they are for; those of `but` as they are."""
    named = zip(Inputs._fields, given, grads, strict=True)
    both = [(name, x, grad) for name, x, grad in named if x is not None and grad is not None and name not in but]
    rounded = {name: grad.to(x.dtype) for name, x, grad in both if grad.dtype != x.dtype}
    return grads._replace(**rounded) if rounded else grads
