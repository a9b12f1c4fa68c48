"""Exact attention over a sequence that is spread over the ranks of a ring: what users call.

    burst_attention           checks and plans the call          ring/choices.py, ring/plan.py
      RingAttention           autograd, for torch                ring/autograd.py
        forward_program       heads exchanged, the ring          ring/attention_pass.py
          run_pass            the loop: one visit per step
            work              the tiles of a visit, to a kernel

Sources: RingAttention (arXiv 2310.01889) for travelling keys and values; BurstAttention (2403.09347,
algorithm 2) for travelling queries in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, TypedDict, overload

import torch
from torch import Tensor

from burst_plugin.activations.kept_attention import next_kept_outputs, unseen_by_selective_checkpoints
from burst_plugin.checks import shown
from burst_plugin.comm.call_identity import CallId
from burst_plugin.comm.differences import TensorValues
from burst_plugin.context import ContextParallel
from burst_plugin.ring.agreement import prepared_together
from burst_plugin.ring.autograd import RingAttention
from burst_plugin.ring.choices import make_plan
from burst_plugin.ring.head_groups import by_head_group, joined
from burst_plugin.ring.kept_outputs import KeptOutputs
from burst_plugin.ring.plan import Plan
from burst_plugin.ring.request import Inputs, Outputs, Request, has_gradients
from burst_plugin.scores import Scores
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.masks import Causal, Mask, QueriesBefore

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing since 3.11


class Terms(TypedDict, total=False):
    """The keyword arguments of `burst_attention` except `return_lse` and `return_max_logits`, for `**terms`.

    These two decide how many tensors are returned, so that overloads spell them out.
    """

    mask: Mask
    softmax_scale: float | None
    scores: Scores
    sink: Tensor | None
    bias: Tensor | None
    selection: Tensor | None
    tokens: Tokens | tuple[Tokens, Tokens] | None
    tag: object


@overload
def burst_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: ContextParallel,
    *,
    return_lse: Literal[False] = ...,
    return_max_logits: Literal[False] = ...,
    **terms: Unpack[Terms],
) -> Tensor: ...


@overload
def burst_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: ContextParallel,
    *,
    return_lse: bool = ...,
    return_max_logits: bool = ...,
    **terms: Unpack[Terms],
) -> Tensor | tuple[Tensor, ...]: ...


def burst_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: ContextParallel,
    *,
    mask: Mask = Causal(),
    softmax_scale: float | None = None,
    scores: Scores = Scores(),
    sink: Tensor | None = None,
    bias: Tensor | None = None,
    selection: Tensor | None = None,
    tokens: Tokens | tuple[Tokens, Tokens] | None = None,
    tag: object = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Compute exact attention of this rank's queries on the keys of all ranks of `cp`; all ranks call it together.

    Args:
        q: [B, S_local, Hq, D], float64, float32, bfloat16 or float16.
        k: [B, S_local, Hkv, D]; Hq must be a multiple of Hkv. Keys of another sequence make cross attention.
        v: [B, S_local, Hkv, Dv].
        cp: the context-parallel group; its layout says which tokens the rows are (`cp.shard`, `cp.positions`).
        mask: any of `burst_plugin.sequence.masks`, combined with `&`; in positions of the whole sequence.
        softmax_scale: the factor on scores, `D ** -0.5` if None; short for `scores=Scores(scale=...)`.
        scores: scale, softcap, ALiBi slopes, dropout.
        sink: [Hq], floating point: a logit per head that takes part in every softmax and has no value, as in
            gpt-oss; zeros are "off by one" attention. Equal on all ranks. Its gradient comes from this rank's
            queries: sum it over ranks.
        bias: [1 or B, 1 or Hq, S_local, S_global], added to the scores of this rank's queries; the keys are in the
            order of the sequence. Its gradient is complete for these queries; sum gradients of what all ranks'
            biases are made of, such as a table, over ranks.
        selection: int32 or int64 [B, S_local, n], the keys that each of this rank's queries attends to, or, for G
            groups of key/value heads, [B, G, S_local, n]: positions in the whole sequence, in any order, twice counts
            once; -1 for none. Keys that the mask leaves out stay left out. Keys and values move. See
            `burst_plugin.sparse` for selections by score.
        tokens: the whole sequence, where it is not cut evenly, or every document is cut on its own; for cross
            attention a pair, the sequences of the queries and of the keys. None: every rank holds equally many
            tokens.
        tag: a name for this call, equal on every rank: the number of the layer, say, or several such things
            in a tuple. Ranks compare it, and on CPUs messages carry it, so that a rank that skipped a call, or made
            one twice, is found there and then. See also `ContextParallel.step`.
        return_lse: also return lse [B, Hq, S_local], float32 (float64 for float64), natural logarithm, with
            the sink; differentiable, except with float16 inputs.
        return_max_logits: also return, last, the largest score of every query head [Hq] on this rank,
            for qk-clip (arXiv 2507.20534): its maximum over ranks is the largest score of the sequence. It takes a
            second multiplication of queries by keys.

    Returns:
        out [B, S_local, Hq, Dv] in the type of q; 0 for queries that attend to nothing. If more is asked for, a tuple
        of out, lse if asked for, and the largest scores if asked for.

    Raises:
        ValueError: before data moves, for shapes, types or options that do not fit, here or between ranks; says what
            was got, what was expected, and what to change. At calls that ranks compare (see `Strategy.check`) every
            rank raises it; at other calls only a rank where something is wrong, which ends the ring.
        RingError: a rank was lost; names it, and the step at which it was missed or why it gave up. With NCCL it may
            interrupt any later code of this rank (see `Strategy.abort`), and says how far each rank has come if none
            gave up.
    """
    inputs = Inputs(q, k, v, sink, bias, selection)
    pair = tokens if isinstance(tokens, tuple) else (tokens, tokens)
    request = Request(mask, scores, pair, return_max_logits, return_lse, softmax_scale)
    outputs = ring_attention(inputs, request, cp, tag)
    return outputs.out if not (return_lse or return_max_logits) else outputs.asked_for(request)


def ring_attention(inputs: Inputs, request: Request, cp: ContextParallel, tag: object = None) -> Outputs:
    """Return this rank's outputs of one attention call on the ring of `cp`, also in compiled code; collective.

    `burst_attention` and `latent_attention` call it. With a mask that differs between groups of heads it makes one
    call of the ring for each group, and joins the outputs.

    Args:
        inputs: this rank's tensors; with `request.latents` k and v are latents and the keys that heads share.
        request: the mask, the options of scores, the tokens of both sides, and which outputs are wanted.
        cp: the context-parallel group.
        tag: a name for the call, which ranks compare; None for none.

    Raises:
        ValueError, RingError: as `burst_attention`.
    """
    if not isinstance(cp, ContextParallel):
        raise ValueError(
            f"cp is {shown(cp)}, not a ContextParallel; make one of the process group once, ContextParallel(group), "
            "and pass it here"
        )
    if torch.compiler.is_compiling():
        from burst_plugin.ring.compiled import opaque  # which imports the compiler

        outputs: Outputs = opaque(ring_attention, inputs, request, cp, tag)
        return outputs
    is_whole = not isinstance(request.mask, Mask) or request.mask.head_groups is None
    calls = [] if is_whole else by_head_group(inputs, request)
    if not calls:
        return _first_of([(inputs, request)], cp, tag)
    first = [_first_of(calls, cp, tag)]  # checks all of them
    return joined(first + [_first_of([call], cp, tag) for call in calls[1:]])


def _first_of(calls: Sequence[tuple[Inputs, Request]], cp: ContextParallel, tag: object) -> Outputs:
    """Return the outputs of the first of `calls`; raise ValueError if this rank cannot make the others, too."""
    inputs, state = calls[0][0], cp.rank_state
    if isinstance(inputs.q, Tensor):  # anything else is refused below, on all ranks
        state.check_usable(inputs.q.device)
    with unseen_by_selective_checkpoints():
        kept = next_kept_outputs(cp.strategy, inputs)
        prepare = partial(_prepared, calls, cp, tag, kept)
        (plan, _), call = prepared_together(prepare, partial(_agreed, cp, inputs, kept))
        if cp.group is not None:
            cp.connections.connect(
                plan.by_link if kept is None or kept.rest is None else plan.by_link | kept.rest.by_link
            )
        return Outputs(*RingAttention.apply(plan, call, cp.agreement, kept, *inputs))  # type: ignore[no-untyped-call]


def _prepared(
    calls: Sequence[tuple[Inputs, Request]], cp: ContextParallel, tag: object, kept: KeptOutputs | None
) -> tuple[Plan, str]:
    """Return this rank's plan of the first of `calls`, and the call's name. Raise ValueError for a wrong one."""
    inputs, request = calls[0]
    plan = make_plan(cp.rank_state, inputs, request, cp.plans)
    for call in calls[1:]:
        make_plan(cp.rank_state, *call, cp.plans)
    if kept is not None and kept.is_filled:
        kept.check(plan)
        kept.rest = _plan_of_rest(kept.first_kept(plan), inputs, request, cp)
    cp.rank_state.note_call(plan.choices)
    if cp.group is not None:
        cp.connections.check_device(plan.device)
    if plan.device.type == "cuda" and plan.warms_up:
        from burst_plugin.ring.warm_up import warm_up_forward

        warm_up_forward(plan, inputs)
    return plan, cp.agreement.name_of_next_call(tag)


def _agreed(
    cp: ContextParallel,
    inputs: Inputs,
    kept: KeptOutputs | None,
    prepared: tuple[Plan, str] | None,
    problem: str,
) -> CallId:
    """Compare what this rank has prepared with the other ranks, and return which call it is; collective."""
    if prepared is None:
        return cp.agreement.before_forward(dict, problem)
    plan, name = prepared

    def compared() -> dict[str, object]:
        from_checkpoint = {} if kept is None else {"kept by a checkpoint": kept.is_filled}
        sink = {} if inputs.sink is None else {"sink": TensorValues(inputs.sink)}
        return {"takes part in gradients": has_gradients(inputs), **from_checkpoint, **plan.signature, **sink}

    return cp.agreement.before_forward(compared, problem, name)


def _plan_of_rest(first_kept: int, inputs: Inputs, request: Request, cp: ContextParallel) -> Plan | None:
    """Return the plan of a call without the queries from `first_kept` on; None if there are none before it."""
    if not first_kept:
        return None
    before = request._replace(mask=request.mask & QueriesBefore(first_kept))
    return make_plan(cp.rank_state, inputs, before, cp.plans)
