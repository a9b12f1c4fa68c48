"""Make the plan of an attention call from a rank's tensors and options: check them, and make every choice."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import cache, partial

import torch

from burst_plugin.comm.buffers import Packing
from burst_plugin.compute.shapes import Shapes, hop_bytes
from burst_plugin.compute.varlen import SpanTable
from burst_plugin.kernels import Case, Kernel, choose_kernel
from burst_plugin.ring.head_groups import why_uncut
from burst_plugin.ring.plan import Extras, KernelTiles, PassPlan, Plan
from burst_plugin.ring.rank_state import RankState
from burst_plugin.ring.request import Inputs, Request, check_extras, check_kinds, scaled, shapes_of
from burst_plugin.ring.routes import Attending
from burst_plugin.ring.systems.group_exchange import GroupExchange
from burst_plugin.ring.systems.rank_groups import RankGroup
from burst_plugin.ring.systems.ulysses import HeadExchange
from burst_plugin.scores import Scores
from burst_plugin.sequence.layout import Tokens, token_count
from burst_plugin.strategy import AUTO, Strategy
from burst_plugin.strategy.presets import presets_with
from burst_plugin.types import BOTH, DIRECTIONS, OTHER_SIDE, SIDES, Direction, Side

_KNOWN_CALLS = 64  # kinds of calls to remember; lengths may vary without end
_MANY_HEADS = 256  # keys have as many heads in no model
_FEW_LENGTHS = 8  # of sequences; with more of them the next may be new as well


def make_plan(rank_state: RankState, inputs: Inputs, request: Request, known: dict[Hashable, Plan]) -> Plan:
    """Return the plan of one rank's call, from its local tensors; made once for each kind of call.

    known: the plans made so far, by kind of call; a new plan is added.

    Raises ValueError, before any communication, if tensors and options do not fit.
    """
    try:
        key = _kind_of_call(rank_state.strategy, inputs, request)
        plan = known.get(key)
    except (AttributeError, RuntimeError, TypeError):  # arguments of other types, which have no shape or no hash
        plan = None
    if plan is None:
        check_kinds(inputs, request)
        if request.mask.head_groups is not None:  # others were cut before: see `by_head_group`
            raise ValueError(why_uncut(inputs, request))
        key = _kind_of_call(rank_state.strategy, inputs, request)
        plan = _new_plan(rank_state, inputs, _seedless(scaled(request)))
        if len(known) >= _KNOWN_CALLS:
            known.clear()
        known[key] = plan
    seed = request.scores.seed or 0
    if plan.scores.seed != seed:
        plan = known[key] = plan.with_seed(seed)
    return plan


def _kind_of_call(strategy: Strategy, inputs: Inputs, request: Request) -> Hashable:
    """Return a key for calls that may share a plan: it has all but the values of tensors, and dropout's seed."""
    kinds: list[object] = []
    for x in inputs:
        kinds.append(None if x is None else (type(x), x.shape, x.dtype, x.device, x.layout))
    seedless = _seedless(request) if request.scores.seed else request
    flags = type(request.lse), type(request.max_logits)  # 1 is not True, though equal
    return seedless, flags, is_deterministic(strategy), switches(), *kinds


def switches() -> tuple[object, ...]:
    """Return PyTorch's process-wide switches that the choice of a kernel depends on, except determinism.

    They are the name of its library for flash attention, if one is set, and whether it may use cuDNN's attention.
    """
    library = getattr(torch.nn.attention, "current_flash_attention_impl", None)  # not in all releases
    return library and library(), torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]


def _seedless(request: Request) -> Request:
    return request._replace(scores=replace(request.scores, seed=0))


def _new_plan(rank_state: RankState, inputs: Inputs, request: Request) -> Plan:
    deterministic = is_deterministic(rank_state.strategy)
    strategy, device = _strategy_of(request, rank_state.strategy), inputs.q.device
    shapes, attending, ranks_per_kv_head = _shapes(rank_state, inputs, request)
    extras = _extras(inputs, strategy.group_size)
    scores = request.scores.resolved(shapes.qk_dim, inputs.q.shape[2])
    features = features_of(shapes, scores, deterministic, extras)
    kernel = kernel_for(strategy, device, shapes, features, new_tiles=_new_tiles(rank_state, attending))
    needs_positions = bool(extras.of_queries) or scores.needs_positions
    kernel_tiles = KernelTiles(kernel.features, shapes, needs_positions, request.max_logits)
    packing = cache(partial(Packing, labelled=device.type == "cpu"))
    moving = moving_sides(strategy, shapes, rank_state.route_table.ring_ranks, of_queries=extras.of_queries)
    rounded = _rounded_sides(extras, ranks_per_kv_head)
    if rank_state.group.gathers:  # where its blocks are added up
        for direction in DIRECTIONS:
            rounded[direction][OTHER_SIDE[moving[direction][0]]] = False
    same = partial(
        PassPlan,
        rank_state=rank_state,
        attending=attending,
        kernel_tiles=kernel_tiles,
        device=device,
        packing=packing,
    )
    passes = _passes(same, moving, rounded)
    return Plan(
        rank_state=rank_state,
        shapes=shapes,
        attending=attending,
        scores=scores,
        kernel=kernel,
        device=device,
        extras=extras,
        deterministic=deterministic,
        max_logits=request.max_logits,
        lse=request.lse,
        ranks_per_kv_head=ranks_per_kv_head,
        forward=passes["forward"],
        backward=passes["backward"],
        spans=SpanTable(shapes.batch, device),
        packing=packing,
        exchange_kind=_exchange_kind(rank_state.group),
    )


def _strategy_of(request: Request, strategy: Strategy) -> Strategy:
    """Return the strategy of a call: under a prefix tree keys move, unless queries are asked to.

    Otherwise ranks that hold a prompt would have the work of all its answers.
    """
    if request.forward is not None:
        strategy = replace(strategy, forward=request.forward)
    if request.mask.trees:
        forward, backward = ("kv" if each == AUTO else each for each in (strategy.forward, strategy.backward))
        strategy = replace(strategy, forward=forward, backward=backward)
    return strategy


def _rounded_sides(extras: Extras, ranks_per_kv_head: int) -> dict[Direction, dict[Side, bool]]:
    """Return which results are rounded at once; those to which something is added first stay in float32 or wider."""
    return {
        "forward": {"q": not extras.sink, "kv": True},
        "backward": {"q": True, "kv": ranks_per_kv_head == 1},
    }


def _passes(
    make: Callable[..., PassPlan],
    moving: Mapping[Direction, tuple[Side, ...]],
    rounded: Mapping[Direction, Mapping[Side, bool]],
) -> dict[Direction, PassPlan]:
    """Return the plans of the passes; `moving` has one side or both for each direction."""
    passes: dict[Direction, PassPlan] = {}
    for direction, sides in moving.items():
        same = partial(make, direction=direction, rounded=rounded[direction])
        if len(sides) == 1:
            passes[direction] = same(moving=sides[0])
        else:
            from burst_plugin.ring.systems.both_sides import half_of_visits  # rarely needed

            queries = same(moving="q", visits=half_of_visits)
            passes[direction] = replace(queries, moving="kv", other=queries)
    return passes


def _exchange_kind(group: RankGroup) -> type[GroupExchange] | None:
    """Return the kind of exchange that a group has before and after the ring; None for a group of one rank."""
    if group.degree == 1:
        return None
    if group.gathers:
        from burst_plugin.ring.systems.mesh import MeshExchange  # rarely needed

        return MeshExchange
    return HeadExchange


def _shapes(rank_state: RankState, inputs: Inputs, request: Request) -> tuple[Shapes, Attending, int]:
    """Return shapes in the ring, which tokens attend to which, and how many ranks share a key/value head.

    Raises ValueError for tensors and options that do not fit together.
    """
    strategy, local = rank_state.strategy, shapes_of(inputs, request.latents)
    tokens, longest = _tokens(rank_state, local, request)
    if request.latents:
        _check_latents(strategy)
    _check_heads(strategy, local)
    _check_mask(request, local.batch)
    degree = strategy.degree
    shapes = local.of_ulysses_group(degree)._replace(q_len=longest["q"], kv_len=longest["kv"])
    _check_parts(strategy, shapes)
    _warn_of_heads_first(rank_state, inputs)
    attending = Attending(tokens["q"], tokens["kv"], request.mask)
    rank_state.route_table.pairs(attending)  # raises ValueError if the mask does not fit the lengths
    check_extras(inputs, attending.kv.length)
    return shapes, attending, max(1, degree // local.kv_heads)


def _warn_of_heads_first(rank_state: RankState, inputs: Inputs) -> None:
    """Warn on rank 0 if tensors seem to be [B, H, S_local, D]: more heads than models have, and fewer tokens."""
    tokens, heads = inputs.q.shape[1:3]
    if heads >= _MANY_HEADS and heads > tokens and inputs.k.shape[2] == heads and not rank_state.rank:
        warnings.warn(
            f"q has {heads} heads of {tokens} tokens, expected [B, S_local, H, D]: if heads come first, as for "
            "scaled_dot_product_attention, pass q.transpose(1, 2), and k and v likewise",
            stacklevel=2,
        )


def _tokens(rank_state: RankState, local: Shapes, request: Request) -> tuple[dict[str, Tokens], dict[str, int]]:
    """Return by side the whole sequence, and the most tokens of it that a rank of the ring holds."""
    ranks, rank, table = rank_state.topology.ranks, rank_state.rank, rank_state.route_table
    lengths = {"q": local.q_len, "kv": local.kv_len}
    given = dict(zip(lengths, request.tokens, strict=True))
    tokens = {side: given[side] or Tokens(max(1, n * ranks)) for side, n in lengths.items()}
    longest = {}
    for side, sequence in tokens.items():
        held = [token_count(runs) for runs in table.shards(sequence)]
        longest[side] = max(block.length for block in table.group_blocks(sequence))
        if lengths[side] != held[rank]:
            raise ValueError(
                f"rank {rank} of {ranks} holds {held[rank]} of {sequence} in layout {table.layout(sequence).name!r}, "
                f"but its {'queries have' if side == 'q' else 'keys have'} {lengths[side]}; cut tensors with "
                "ContextParallel.shard, and pass the same tokens= to it and here"
            )
    return tokens, longest


def _check_latents(strategy: Strategy) -> None:
    """Raise ValueError where heads are exchanged, or cut into parts."""
    if problem := why_expanded(strategy):
        raise ValueError(
            f"{problem}; expand keys and values first, or use a preset without these: "
            f"{presets_with(ulysses_degree=1, mesh_degree=1, parts=1)}"
        )


def why_expanded(strategy: Strategy) -> str:
    """Return why a strategy needs latents expanded to keys and values before the ring; "" if they can travel.

    Latents belong to all heads: they cannot be cut into parts, nor shared or gathered by a group of ranks.
    """
    if strategy.group_size == 1 and all(strategy.parts_of(direction) == 1 for direction in DIRECTIONS):
        return ""
    return (
        f"latents belong to all heads, but here ulysses_degree={strategy.ulysses_degree}, "
        f"mesh_degree={strategy.mesh_degree}, parts={strategy.parts}"
    )


def _check_heads(strategy: Strategy, local: Shapes) -> None:
    """Raise ValueError unless a Ulysses group can share the heads between its ranks."""
    if strategy.degree not in local.ulysses_degrees:
        raise ValueError(
            f"ulysses_degree={strategy.degree} ranks cannot share the {local.q_heads} query heads and "
            f"{local.kv_heads} key/value heads of this rank; use one of {local.ulysses_degrees}, or a preset for "
            f"any number of heads: {presets_with(ulysses_degree=1, parts=1)}"
        )


def _check_parts(strategy: Strategy, shapes: Shapes) -> None:
    """Raise ValueError unless the heads can be cut into parts."""
    if any(shapes.kv_heads % strategy.parts_of(direction) for direction in DIRECTIONS):
        valid = [n for n in range(1, shapes.kv_heads + 1) if shapes.kv_heads % n == 0]
        raise ValueError(
            f"parts={strategy.parts} does not divide the {shapes.kv_heads} key/value heads of this rank; use one "
            f"of {valid}, or a preset without parts: {presets_with(parts=1)}"
        )


def _check_mask(request: Request, batch: int) -> None:
    """Raise ValueError unless the mask fits the batch and the scores."""
    rows = request.mask.rows
    if rows not in (None, batch):
        raise ValueError(
            f"the mask is for {rows} batch rows, but q, k, v have {batch}; make it of all rows of this batch, or of "
            "none, for a mask that they share"
        )
    if request.mask.shifts and request.scores.alibi_slopes is not None:
        raise ValueError(
            "alibi_slopes need positions that count alike for queries and keys, but the mask's documents have keys "
            "that begin elsewhere; add the slopes as a bias"
        )
    by_row = {request.mask.of_row(row).trees for row in range(rows or 1)} if request.scores.needs_positions else ()
    if len(by_row) > 1:
        raise ValueError(
            "alibi_slopes and dropout go by the positions of tokens, which batch rows with different prefix trees do "
            "not share; give all rows one tree, or make a call for each row"
        )


def _extras(inputs: Inputs, degree: int) -> Extras:
    bias, selected = inputs.bias, inputs.selection is not None
    if selected and degree > 1:
        raise ValueError(
            "a selection has rows for the queries of one rank, but here a group of ranks shares heads or queries; "
            f"use a preset without such groups: {presets_with(ulysses_degree=1, mesh_degree=1)}"
        )
    if bias is None:
        return Extras(sink=inputs.sink is not None, selection=selected)
    exchanged = f"bias of {bias.shape[0]} batch rows in {bias.dtype}" if degree > 1 else ""
    return Extras(inputs.sink is not None, True, bias.shape[1] == 1, exchanged, selected)


def _new_tiles(rank_state: RankState, attending: Attending) -> bool:
    """Return whether batches may bring tiles of new shapes: by their masks, or by lengths, if many were different."""
    if len(rank_state.lengths) <= _FEW_LENGTHS:
        rank_state.lengths.add((attending.q.length, attending.kv.length))
    return not attending.mask.is_fixed or len(rank_state.lengths) > _FEW_LENGTHS


def kernel_for(
    strategy: Strategy, device: torch.device, shapes: Shapes, features: frozenset[str], *, new_tiles: bool
) -> Kernel:
    """Return the kernel that the strategy names or, for "auto", the fastest that can do the call.

    Args:
        strategy: has the option `kernel`.
        device: the device of q, k and v.
        shapes: the shapes on the ring.
        features: what the call needs of its kernel, from `features_of`.
        new_tiles: whether batches may bring tiles of new shapes; "auto" then prefers kernels that need no plan for
            each shape.

    Raises ValueError if the named kernel, or every kernel, cannot do the call.
    """
    heads, dims = (shapes.q_heads, shapes.kv_heads), (shapes.qk_dim, shapes.v_dim)
    return choose_kernel(strategy.kernel, Case(device.type, shapes.dtype, *heads, *dims, features, new_tiles))


def features_of(shapes: Shapes, scores: Scores, deterministic: bool, extras: Extras) -> frozenset[str]:
    """Return the features that a call needs of its kernel, by their names in `kernels.FEATURES`."""
    wanted = {
        "head dims": shapes.qk_dim != shapes.v_dim,
        "softcap": scores.softcap is not None,
        "alibi": scores.alibi_slopes is not None,
        "bias": extras.bias,
        "selection": extras.selection,
        "dropout": scores.dropout > 0,
        "deterministic": deterministic,
    }
    return frozenset(name for name, needed in wanted.items() if needed)


def is_deterministic(strategy: Strategy) -> bool:
    """Return whether the strategy, or PyTorch's switch for the process, asks for deterministic gradients."""
    switch = (
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    return strategy.deterministic or switch


def moving_sides(
    strategy: Strategy, shapes: Shapes, ring_ranks: int, *, of_queries: str = ""
) -> Mapping[Direction, tuple[Side, ...]]:
    """Return the side that moves, or both sides, by direction of the pass.

    Args:
        strategy: has the options `forward` and `backward`.
        shapes: the shapes on the ring.
        ring_ranks: the number of ranks of the ring; with one or two "both" is the same as "kv".
        of_queries: "bias" or "selection" if the call has one, else "". Its rows belong to queries, so keys move.

    Raises ValueError if queries are asked to move in spite of `of_queries`.
    """
    moving: dict[Direction, tuple[Side, ...]] = {}
    for direction in DIRECTIONS:
        asked = getattr(strategy, direction)
        if of_queries and asked in ("q", BOTH):
            raise ValueError(
                f"{direction}={asked!r} cannot be combined with a {of_queries}: its rows belong to the queries, "
                f"which would have to take all of them along; use {direction}='kv' or 'auto', or a preset in which "
                f"keys and values move: {presets_with(forward='kv', backward='kv')}"
            )
        if of_queries or (asked == BOTH and ring_ranks <= 2):  # half way round is all of the way
            moving[direction] = ("kv",)
        elif asked == BOTH:
            moving[direction] = ("kv", "q")
        else:
            moving[direction] = (choose_moving_side(strategy, direction, shapes, ring_ranks),)
    return moving


def choose_moving_side(strategy: Strategy, direction: Direction, shapes: Shapes, ring_ranks: int = 1) -> Side:
    """Return the side that moves in a pass: the one asked for, else the one with fewer bytes per hop (kv if equal).

    With a `mesh_degree` blocks of the other side are gathered, and count as well, beside all `ring_ranks - 1` hops:
    see `mesh`. Raises ValueError for "both", of which there is no price.
    """
    asked = strategy.forward if direction == "forward" else strategy.backward
    if asked == BOTH:
        raise ValueError(
            f"{direction}='both' cannot be planned: it has no price. Use 'q', 'kv' or 'auto'; or run it without a "
            "plan, as Strategy(schedule=..., parts=..., ...)"
        )
    if asked != AUTO:
        return "q" if asked == "q" else "kv"
    gathered = strategy.mesh_degree - 1
    hops = ring_ranks - 1 if gathered else 1

    def sent_bytes(moving: Side) -> int:
        stays = OTHER_SIDE[moving]
        return hops * hop_bytes(shapes, direction, moving) + gathered * hop_bytes(shapes, direction, stays)

    return min(reversed(SIDES), key=sent_bytes)
