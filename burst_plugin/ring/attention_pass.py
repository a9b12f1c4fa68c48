"""The two passes of attention of one rank: the loop around the ring, and what comes before and after it.

In every visit one side, queries or keys and values, is this rank's own and the other has travelled. What a pass reads
and accumulates on either side is in `compute.passes`; which side moves is data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.comm.call_identity import CallId
from burst_plugin.compute.accumulators import BlockAccumulators, Tensors
from burst_plugin.compute.online_softmax import add_sink, row_factor, sink_grad, with_lse_grad
from burst_plugin.compute.passes import NO_POSITIONS, Part, bias_grad
from burst_plugin.kernels import Queries
from burst_plugin.ring.executor import RingPass, Visit
from burst_plugin.ring.kept_outputs import KeptOutputs
from burst_plugin.ring.plan import PassPlan, Plan
from burst_plugin.ring.request import ALL_WANTED, BackwardOperands, Inputs, Outputs, Wanted
from burst_plugin.types import OTHER_SIDE, SIDES, Side


def run_pass(
    plan: Plan, pass_plan: PassPlan, parts: Sequence[Part], call: CallId
) -> Generator[None, None, tuple[Tensors, Tensors]]:
    """Run one pass of one rank around the ring; return the results of its queries, and of its keys and values.

    These are (out, lse) and () in a forward pass, (dq,) and (dk, dv) in a backward pass. Yields once per step, for
    ranks that take turns.

    Args:
        plan: the plan of the call.
        pass_plan: its plan for this pass, `plan.forward` or `plan.backward`.
        parts: the parts of the heads, mostly one.
        call: the identity of the call, equal on every rank.
    """
    accumulators, profile = pass_plan.accumulators(parts), plan.rank_state.profile
    log = None if profile is None else profile.begin_pass(pass_plan.direction, plan.device)
    # Mostly one.
    rings = [*map(partial(plan.ring_pass, parts=parts, own=accumulators, call=call, log=log), pass_plan.rings)]
    for visits in zip_longest(*map(RingPass.steps, rings)):
        for of_ring, ring, visit in zip(pass_plan.rings, rings, visits, strict=True):
            if visit is not None:
                with ring.traced(visit):
                    work(of_ring, parts[visit.part], visit, accumulators)
        yield
    kv = accumulators["kv"].finished(pass_plan.rounded["kv"]) if "kv" in accumulators else ()
    return accumulators["q"].finished(pass_plan.rounded["q"]), kv


def work(plan: PassPlan, part: Part, visit: Visit, own: Mapping[Side, BlockAccumulators]) -> None:
    """Compute one visit's tiles; add their results to the accumulators of this rank and of the visiting block.

    part: the part of the heads that the visit is for. own: the accumulators of this rank's own block, by side.
    """
    q, kv = part.q, part.kv
    if not visit.is_own:
        arrived = part.incoming(plan.moving, visit.operands)
        q, kv = (arrived, kv) if plan.moving == "q" else (q, arrived)
    positions = plan.positions(visit.owner) if plan.kernel_tiles.uses_positions else NO_POSITIONS
    stays = own[OTHER_SIDE[plan.moving]].parts[visit.part] if OTHER_SIDE[plan.moving] in own else None
    for tile in plan.tiles[visit.owner, visit.is_tail]:
        if stays is not None:
            stays.make_room()
        contributions = part.compute(q, kv, tile, positions)
        for side, contribution in zip(SIDES, contributions, strict=True):
            if contribution:
                accumulator = visit.accumulator if side == plan.moving or stays is None else stays
                accumulator.add(tile, side, contribution)
        del contributions, contribution  # whose memory the next tile may have


class Saved(NamedTuple):
    """The tensors that a rank's backward pass needs: the inputs `given` to the ring, and the ring's out and lse."""

    given: Inputs
    out: Tensor
    lse: Tensor


def forward_program(
    plan: Plan, call: CallId, inputs: Inputs, kept: KeptOutputs | None = None
) -> Generator[None, None, tuple[Outputs, Saved]]:
    """Run a rank's forward pass: around the ring, between the exchanges of its group if there are any.

    Yields once per step, for ranks that take turns. Returns the outputs of the rank, and what its backward pass
    needs.

    kept: outputs of an earlier run of the call in a checkpoint, which are not computed again, or a place to keep
        them.
    """
    exchange = None if plan.exchange_kind is None else plan.exchange("forward", call)
    ring_inputs = inputs if exchange is None else (yield from exchange.inputs(inputs))
    if kept is None:
        on_ring = yield from _around_the_ring(plan, call, ring_inputs)
    else:
        missing = kept.missing(plan)
        computed = None if missing is None else (yield from _around_the_ring(missing, call, ring_inputs))
        on_ring = kept.completed(plan, computed)
    assert on_ring.lse is not None, "the ring always gives it"
    outputs = on_ring if exchange is None else (yield from exchange.outputs(on_ring, plan.lse))
    if plan.lse or plan.max_logits:
        outputs = _own_numbers(outputs, plan.lse)
    return outputs, Saved(ring_inputs, on_ring.out, on_ring.lse)


def _around_the_ring(plan: Plan, call: CallId, inputs: Inputs) -> Generator[None, None, Outputs]:
    """Return out and lse of the queries that this rank has on the ring, over the keys of all ranks."""
    exchange = None if plan.exchange_kind is None else plan.exchange("forward", call)
    parts = plan.forward_parts(inputs if exchange is None else (yield from exchange.gathered(inputs)))
    (out, lse), _ = yield from run_pass(plan, plan.forward, parts, call)
    largest = torch.cat([part.max_logits for part in parts]) if plan.max_logits else None  # type: ignore[misc]
    del parts  # with the group's queries, whose memory the exchange may have
    if exchange is not None:
        out, lse = yield from exchange.merged(out, lse)
    if inputs.sink is not None:
        out, lse = add_sink(out, lse, inputs.sink)
    return Outputs(out.to(inputs.q.dtype), lse, largest)


def dense(inputs: Inputs) -> Inputs:
    """Return inputs whose q, k and v have stride 1 in the last dim, as kernels expect."""
    q, k, v = inputs[:3]
    if q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return inputs
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return inputs._replace(q=q, k=k, v=v)


def cut_loose(inputs: Inputs) -> Inputs:
    """Return inputs whose q, k and v are not views of larger tensors, which the backward pass would keep alive.

    Values are such views where one projection makes all three and rotary embedding replaces queries and keys.
    """
    used_bytes: Counter[int] = Counter()
    for x in inputs[:3]:
        used_bytes[x.untyped_storage().data_ptr()] += x.nbytes
    separate = {}
    for name, x in zip(Inputs._fields, inputs[:3], strict=False):
        storage = x.untyped_storage()
        if storage.nbytes() > used_bytes[storage.data_ptr()]:
            separate[name] = x.clone(memory_format=torch.contiguous_format)
    return inputs._replace(**separate) if separate else inputs


def _own_numbers(outputs: Outputs, with_lse: bool) -> Outputs:
    """Return outputs whose lse and largest scores the caller may change in place.

    The backward pass and kept outputs have tensors of their own: inside a checkpoint PyTorch would not notice.
    """
    lse = outputs.lse.clone() if with_lse and outputs.lse is not None else outputs.lse
    largest = outputs.max_logits
    return Outputs(outputs.out, lse, None if largest is None else largest.clone())


def backward_program(
    plan: Plan,
    call: CallId,
    upstream: tuple[Tensor, Tensor | None],
    saved: Saved,
    wanted: Wanted = ALL_WANTED,
) -> Generator[None, None, Inputs]:
    """Run a rank's backward pass: around the ring, between the exchanges of its group if there are any.

    Yields once per step, for ranks that take turns. Returns the gradients of the rank's inputs, in their types.

    Args:
        plan: the plan of the call.
        call: the identity of the call, equal on every rank.
        upstream: the gradients of out and of lse; None for lse if nothing depends on it.
        saved: what the forward pass returned for this pass.
        wanted: which gradients to compute besides q, k, v and sink.
    """
    ring_inputs, out, lse = saved
    exchange = None if plan.exchange_kind is None else plan.exchange("backward", call)
    if exchange is not None:
        wanted = wanted._replace(bias=True)  # others of the group may want theirs
    dout, dlse = upstream
    check_lse_grad(ring_inputs.q.dtype, dlse)
    if exchange is not None:
        with_lse = plan.lse and wanted.from_lse and ring_inputs.q.dtype is not torch.float16
        dout, dlse = yield from exchange.upstream(dout, dlse, with_lse)
    dout = dout.contiguous()
    if dlse is not None:
        out, dout = with_lse_grad(out, dout, lse, dlse)
    factor = row_factor(out, dout) if plan.sends_row_factor else None
    operands = BackwardOperands(Queries(ring_inputs.q, dout, out, lse), ring_inputs, factor)
    if exchange is not None:
        operands = yield from exchange.gathered_backward(operands)
    parts, bias = plan.backward_parts(*operands, wanted), operands.inputs.bias
    del operands
    (dq,), (dk, dv) = yield from run_pass(plan, plan.backward, parts, call)
    dsink = None if ring_inputs.sink is None else sink_grad(ring_inputs.sink, out, dout, lse)
    dbias = bias_grad(bias, parts) if bias is not None and wanted.bias else None
    grads = Inputs(dq, dk, dv, dsink, dbias, weight=getattr(parts[0], "dweight", None))
    del dout, dlse, factor, parts, bias, dq, dk, dv, dbias  # whose memory the exchanges may have
    if exchange is not None:
        grads = yield from exchange.summed(grads)
    grads = _rounded(ring_inputs, grads, but=("k", "v") if plan.ranks_per_kv_head > 1 else ())
    if exchange is not None:
        grads = _rounded(ring_inputs, (yield from exchange.grads(grads, plan.extras.shared_bias)))
    return grads


def check_lse_grad(dtype: torch.dtype, dlse: Tensor | None) -> None:
    """Raise ValueError if lse has a gradient, `dlse`, in a call of type float16, whose range is too small for it."""
    if dlse is not None and dtype is torch.float16:
        raise ValueError(
            "lse has no gradient in float16, whose largest number is too small for it; compute attention in bfloat16 "
            "or float32, or call lse.detach()"
        )


def _rounded(inputs: Inputs, grads: Inputs, but: Collection[str] = ()) -> Inputs:
    """Return gradients in the types of the inputs; the gradients named in `but` as they are."""
    rounded = {}
    for name, x, grad in zip(Inputs._fields, inputs, grads, strict=True):
        if x is not None and grad is not None and name not in but and grad.dtype != x.dtype:
            rounded[name] = grad.to(x.dtype)
    return grads._replace(**rounded) if rounded else grads
