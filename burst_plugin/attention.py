"""Attention over a sequence that is spread over the ranks of a ring: the one loop, and the autograd function.

In every visit one side, queries or keys and values, is at home and the other has travelled. What a pass reads
and sums up on either side is in `burst_plugin.compute.passes`; which side travels is data.

Sources: RingAttention (arXiv 2310.01889) for travelling keys and values; BurstAttention (2403.09347,
algorithm 2) for travelling queries in the backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, TypeVar, overload

import torch
from torch import Tensor

from burst_plugin.activations.recomputation import unseen_by_selective_checkpoints
from burst_plugin.checks import shown
from burst_plugin.comm.call_identity import CallId
from burst_plugin.comm.consistency import prepared_together
from burst_plugin.comm.differences import TensorValues
from burst_plugin.compute.accumulators import OwnSums
from burst_plugin.compute.online_softmax import add_sink, row_factor, sink_grad
from burst_plugin.compute.passes import Part, Tensors, backward_parts, forward_parts
from burst_plugin.compute.tile_attention import bias_grad
from burst_plugin.context import ContextParallel
from burst_plugin.kernels import Queries
from burst_plugin.ring.call import Call, CallKind
from burst_plugin.ring.choices import prepare
from burst_plugin.ring.executor import Visit, lockstep
from burst_plugin.ring.request import Inputs, Outputs, Request
from burst_plugin.scores import Scores
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.masks import Causal, Mask
from burst_plugin.types import OTHER_SIDE, Direction, Side

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing since 3.11

T = TypeVar("T")

__all__ = [
    "attention_of_ranks",
    "backward_program",
    "burst_attention",
    "forward_program",
    "ring_attention",
    "run_pass",
]


def run_pass(
    call: Call, direction: Direction, parts: Sequence[Part], which: CallId
) -> Generator[None, None, dict[str, Tensors]]:
    """One pass of one rank: the sums of both its sides. Yields once per step, for ranks that take turns.

    `parts` are those of the heads, mostly one; `which` call this is, is the same on every rank.
    """
    moving = call.kind.moving_sides[direction]
    own = {side: call.kind.own_sums(direction, parts, side) for side in (OTHER_SIDE[moving], moving)}
    ring = call.ring_pass(direction, parts, own[moving], which)
    for visit in ring.visits():
        if visit is not None:
            with ring.traced(visit):
                _work(call.kind, direction, parts[visit.part], visit, own)
        yield
    yield from ring.final_reduce_hops()
    return {side: sums.finished(call.kind.rounds(direction, side)) for side, sums in own.items()}


def _work(kind: CallKind, direction: Direction, part: Part, visit: Visit, own: Mapping[Side, OwnSums]) -> None:
    """One visit: what its tiles contribute, added to the sums at home and to those that travel."""
    moving = kind.moving_sides[direction]
    home = OTHER_SIDE[moving]
    here = part.operands if visit.is_own else {**part.operands, moving: part.incoming(moving, visit.operands)}
    positions = kind.positions(direction, visit.owner)
    for tile in kind.tiles[direction, visit.owner, visit.is_tail]:
        contributions = part.compute(here["q"], here["kv"], tile, positions)
        if contributions[home]:
            own[home].parts[visit.part].add(tile, home, contributions[home])
        if contributions[moving]:
            visit.sums.add(tile, moving, contributions[moving])
        del contributions  # whose memory the next tile may have


def forward_program(call: Call, which: CallId, inputs: Inputs) -> Generator[None, None, Outputs]:
    """A rank's program around the ring: its outputs, in any type that is as wide as that of q or wider."""
    works = call.tile_works("forward", inputs.bias)
    sums = yield from run_pass(call, "forward", forward_parts(works, *inputs[:3]), which)
    out, lse = sums["q"]
    if inputs.sink is not None:
        out, lse = add_sink(out, lse, inputs.sink)
    largest = [work.max_logits for work in works if work.max_logits is not None]
    return Outputs(out, lse, torch.cat(largest) if largest else None)


def backward_program(
    call: Call, which: CallId, inputs: Inputs, queries: Queries, wants_dbias: bool = True
) -> Generator[None, None, tuple[Tensor | None, ...]]:
    """A rank's program around the ring: the gradients of its inputs, in their order, as wide as these or wider, or
    None.
    """
    works = call.tile_works("backward", inputs.bias, wants_dbias)
    factor = row_factor(queries.out, queries.dout) if call.kind.sends_row_factor else None
    sums = yield from run_pass(call, "backward", backward_parts(works, queries, inputs[1:3], factor), which)
    dsink = None if inputs.sink is None else sink_grad(inputs.sink, queries.out, queries.dout, queries.lse)
    dbias = bias_grad(inputs.bias, works) if inputs.bias is not None and wants_dbias else None
    return (*sums["q"], *sums["kv"], dsink, dbias)


class _Saved(NamedTuple):
    """What a rank's backward pass needs: what the ring was given, and what it gave."""

    given: Inputs
    out: Tensor
    lse: Tensor


def _forward_with_exchange(
    call: Call, which: CallId, inputs: Inputs
) -> Generator[None, None, tuple[Outputs, _Saved]]:
    """A rank's program, heads exchanged before and after the ring: its outputs, and what its backward pass needs."""
    exchange = call.head_exchange("forward", which)
    given = yield from exchange.to_heads(inputs)
    ring_outputs = yield from forward_program(call, which, given)
    ring_outputs = ring_outputs._replace(out=ring_outputs.out.to(given.q.dtype))
    outputs = yield from exchange.outputs_home(ring_outputs, call.kind.lse)
    assert ring_outputs.lse is not None, "a ring always gives it"
    return outputs, _Saved(given, ring_outputs.out, ring_outputs.lse)


def _backward_with_exchange(
    call: Call, which: CallId, dout: Tensor, saved: _Saved, wants_dbias: bool
) -> Generator[None, None, Inputs]:
    """A rank's program, heads exchanged before and after the ring: the gradients of its inputs, in their types."""
    given, out, lse = saved
    wants_dbias = wants_dbias or call.kind.rank_state.ulysses_group.degree > 1  # others of the group may want theirs
    exchange = call.head_exchange("backward", which)
    dout = yield from exchange.dout_to_heads(dout)
    grads = yield from backward_program(call, which, given, Queries(given.q, dout, out, lse), wants_dbias)
    added_up_at_home = ("k", "v") if call.kind.ranks_per_kv_head > 1 else ()
    rounded = _rounded(given, grads, but=added_up_at_home)
    home = yield from exchange.grads_home(rounded, call.kind.extras.shared_bias)
    return _rounded(given, home)


def _rounded(given: Inputs, grads: Sequence[Tensor | None], but: Collection[str] = ()) -> Inputs:
    """Gradients in the types of what they are for; those of `but` as they are."""
    each = zip(Inputs._fields, given, grads, strict=True)
    rounded = (g if x is None or g is None or name in but else g.to(x.dtype) for name, x, g in each)
    return Inputs(*rounded)  # type: ignore[arg-type]


class _Attention(torch.autograd.Function):
    """The ring, and heads exchanged before and after it, for all ranks of this process: five inputs each.

    Saves what the ring was given, its out and lse, nothing else of it; any number of calls may await their backward
    pass.
    """

    @staticmethod
    def forward(ctx: Any, calls: Sequence[Call], which: CallId, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        with _one_pass(calls, "forward", which):
            inputs = [_dense(Inputs(*each)) for each in _by_rank(tensors, len(calls))]  # type: ignore[arg-type]
            results = lockstep(
                [_forward_with_exchange(c, which, each) for c, each in zip(calls, inputs, strict=True)]
            )
            kept = [(*_cut_loose(saved.given), saved.out, saved.lse) for _, saved in results]
        ctx.calls, ctx.which = calls, which
        ctx.save_for_backward(*(x for of_rank in kept for x in of_rank))
        ctx.mark_non_differentiable(*(x for outputs, _ in results for x in outputs[1:] if x is not None))
        return tuple(x for outputs, _ in results for x in outputs)

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: nobody would notice what that graph lacks
            raise RuntimeError("burst attention has no second derivatives; leave out create_graph=True")
        calls, mine = ctx.calls, douts[:: len(Outputs._fields)]
        with _others_hear(calls):  # of hooks that bring them back, which may compute a forward pass again
            tensors = ctx.saved_tensors
        saved = [_Saved(Inputs(*each[:-2]), *each[-2:]) for each in _by_rank(tensors, len(calls))]
        wants_dbias = [Inputs(*each).bias for each in _by_rank(ctx.needs_input_grad[2:], len(calls))]
        each = zip(calls, mine, saved, wants_dbias, strict=True)
        programs = [_backward_with_exchange(call, ctx.which, *of_rank) for call, *of_rank in each]  # type: ignore[arg-type]
        for call in calls:
            call.kind.rank_state.compare_backward(ctx.which)
        with _one_pass(calls, "backward", ctx.which):
            grads = [grad for of_rank in lockstep(programs) for grad in of_rank]
        return None, None, *(x if wants else None for wants, x in zip(ctx.needs_input_grad[2:], grads, strict=True))


def attention_of_ranks(calls: Sequence[Call], which: CallId, inputs: Sequence[Inputs]) -> list[Outputs]:
    """What all ranks of this process get, from local tensors of each; only out has a gradient."""
    tensors = _Attention.apply(calls, which, *(x for each in inputs for x in each))  # type: ignore[no-untyped-call]
    return [Outputs(*each) for each in _by_rank(tensors, len(calls))]


def _dense(inputs: Inputs) -> Inputs:
    """q, k and v as kernels are promised them, and as they arrive from other ranks: the last dim dense."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in inputs[:3])
    return inputs._replace(q=q, k=k, v=v)


def _cut_loose(inputs: Inputs) -> Inputs:
    """q, k and v without the rest of what they are views of, which would be kept until the backward pass.

    So it is with values out of one projection for all three, whose queries and keys rotary embedding replaces.
    """
    storages = [x.untyped_storage() for x in inputs[:3]]
    used_bytes: Counter[int] = Counter()
    for x, storage in zip(inputs[:3], storages, strict=True):
        used_bytes[storage.data_ptr()] += x.nbytes
    whole = (storage.nbytes() <= used_bytes[storage.data_ptr()] for storage in storages)
    each = zip(inputs[:3], whole, strict=True)
    q, k, v = (x if is_whole else x.clone(memory_format=torch.contiguous_format) for x, is_whole in each)
    return inputs._replace(q=q, k=k, v=v)


def _by_rank(flat: Sequence[T], ranks: int) -> list[tuple[T, ...]]:
    """The same number of items for each rank."""
    each = len(flat) // ranks
    return [tuple(flat[each * rank : each * (rank + 1)]) for rank in range(ranks)]


@contextmanager
def _others_hear(calls: Sequence[Call]) -> Iterator[None]:
    """Around what comes before a pass: where it fails on one rank, the others are told why they wait.

    Plain RuntimeErrors are autograd's own, of a graph that is gone through twice say, and the same on all ranks.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not RuntimeError:
            for call in calls:
                call.kind.rank_state.give_up(error)
        raise


@contextmanager
def _one_pass(calls: Sequence[Call], direction: Direction, which: CallId) -> Iterator[None]:
    """Around a pass of all ranks of this process: no other pass meanwhile, and no automatic types."""
    with ExitStack() as stack:
        for call in calls:
            stack.enter_context(call.kind.rank_state.exclusive(call.kind.device))
            call.kind.rank_state.begin_pass(direction, which)
        device = calls[0].kind.device.type
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
        try:
            yield
        finally:
            for call in calls:
                call.kind.rank_state.progress.end_pass(direction)


class _Terms(TypedDict, total=False):
    """The keywords of `burst_attention` that do not decide what it returns."""

    mask: Mask
    softmax_scale: float | None
    scores: Scores
    sink: Tensor | None
    bias: Tensor | None
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
    **terms: Unpack[_Terms],
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
    **terms: Unpack[_Terms],
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
    tokens: Tokens | tuple[Tokens, Tokens] | None = None,
    tag: object = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention of this rank's queries on the keys of all ranks of `cp`; all ranks call it together.

    Args:
        q: [B, S_local, Hq, D], float64, float32, bfloat16 or float16.
        k: [B, S_local, Hkv, D]; Hq must be a multiple of Hkv. Other tokens than those of q make cross attention.
        v: [B, S_local, Hkv, Dv].
        cp: the context-parallel group; its layout says which tokens the rows are (`cp.shard`, `cp.positions`).
        mask: any of `burst_plugin.sequence.masks`, combined with `&`; in positions of the whole sequence.
        softmax_scale: what scores are multiplied by, `D ** -0.5` if None; the same as `scores=Scores(scale=...)`.
        scores: scale, softcap, ALiBi slopes, dropout.
        sink: [Hq], floating point: a logit per head that takes part in every softmax and has no value, as in
            gpt-oss; zeros are "off by one" attention. The same on all ranks. Its gradient is that of this rank's
            queries: sum it over ranks.
        bias: [1 or B, 1 or Hq, S_local, S_global], added to the scores of this rank's queries; the keys are in the
            order of the sequence. Its gradient is complete, but for a bias that ranks share.
        tokens: the sequence that the rows are taken from, if it does not deal out evenly or every document is dealt
            out on its own; for cross attention that of the queries and that of the keys. By default every rank
            holds equally many.
        tag: a name for this call that is the same on every rank: the number of the layer, say, or several such things
            in a tuple. Ranks compare it, and on CPUs messages carry it, so that a rank that skipped a call, or made
            one twice, is found there and then. See also `ContextParallel.step`.
        return_lse: also return lse [B, Hq, S_local], float32 (float64 for float64), natural logarithm, without
            gradient, with the sink.
        return_max_logits: also return, last, the largest score of every query head [Hq] among those that this rank
            worked on, for qk-clip (arXiv 2507.20534): the maximum over ranks is that of the sequence. It takes a
            second multiplication of queries by keys.

    Returns:
        out [B, S_local, Hq, Dv] in the type of q; 0 for queries that attend to nothing. A tuple if more is asked for.

    Raises:
        ValueError: before data moves, for shapes, types or options that do not fit, here or between ranks; says what
            was got, what was expected, and what to change. On every rank, at calls that ranks compare (see
            `Strategy.check`); at others only where something is wrong, and the ring has ended then.
        RingError: a rank was lost; names it and the step at which it was missed. Not with NCCL, whose watchdog ends
            the process instead.
    """
    if not isinstance(cp, ContextParallel):
        raise ValueError(
            f"cp is {shown(cp)}, not a ContextParallel; make one of the process group once, ContextParallel(group), "
            "and pass it here"
        )
    inputs = Inputs(q, k, v, sink, bias)
    request = Request(mask, scores, _both_sides(tokens), return_max_logits, return_lse, softmax_scale)
    if torch.compiler.is_compiling():
        from burst_plugin.ring.compiled import opaque  # which imports the compiler

        outputs = opaque(ring_attention, inputs, request, cp, tag)
    else:
        outputs = ring_attention(inputs, request, cp, tag)
    wanted = (True, return_lse, return_max_logits)
    chosen = tuple(x for x, wants in zip(outputs, wanted, strict=True) if wants)
    return chosen if len(chosen) > 1 else chosen[0]


def ring_attention(inputs: Inputs, request: Request, cp: ContextParallel, tag: object = None) -> Outputs:
    """What this rank gets; see `burst_attention`."""
    if isinstance(inputs.q, Tensor):  # anything else is refused below, on all ranks
        cp.rank_state.check_usable(inputs.q.device)
    with unseen_by_selective_checkpoints():
        call, which = _agreed_call(inputs, request, cp, tag)
        cp.connect(call.kind.by_link)
        return attention_of_ranks([call], which, [inputs])[0]


def _agreed_call(inputs: Inputs, request: Request, cp: ContextParallel, tag: object) -> tuple[Call, CallId]:
    """Return this rank's call, and which one it is: checked here, and compared with those of the other ranks."""

    def prepared() -> tuple[Call, str]:
        call = prepare(cp.rank_state, inputs, request, cp.calls)
        cp.rank_state.note_call(call.kind.choices)
        cp.check_device(inputs.q.device)
        return call, cp.name_of_next_call(tag)

    def agree(mine: tuple[Call, str] | None, problem: str) -> CallId:
        if mine is None:
            return cp.agree_on_attention({}, problem)
        call, name = mine
        gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        sink = {} if inputs.sink is None else {"sink": TensorValues(inputs.sink)}
        return cp.agree_on_attention({"takes part in gradients": gradients, **call.signature, **sink}, problem, name)

    (call, _), which = prepared_together(prepared, agree)
    return call, which


def _both_sides(tokens: Tokens | tuple[Tokens, Tokens] | None) -> tuple[Tokens | None, Tokens | None]:
    return tokens if isinstance(tokens, tuple) else (tokens, tokens)
