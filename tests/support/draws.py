"""Hypothesis strategies for attention calls and their parts; rare corners are weighted."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from hypothesis import strategies as st

from burst_plugin import (
    BidirectionalSpans,
    BlockMask,
    Causal,
    CausalBottomRight,
    Documents,
    Full,
    Keys,
    Mask,
    PerHeadGroup,
    PerRow,
    PrefixLM,
    PrefixTree,
    Scores,
    SlidingWindow,
    Strategy,
    Tokens,
    Topology,
    key_padding,
)
from burst_plugin.kernels import KERNELS, Case
from burst_plugin.schedule.rings import SCHEDULES
from burst_plugin.sequence.layout import LAYOUTS, Layout, in_chunks
from tests.support.drawn import Drawn

FEW_RANKS = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4)]
MANY_RANKS = [(2, 2), (4, 2), (2, 4), (3, 2), (2, 3), (3, 3)]
DTYPES = [torch.float64] * 7 + [torch.float32] * 3 + [torch.bfloat16] * 2 + [torch.float16]
PLAIN = Scores()


def runnable(dtype: torch.dtype, selects: bool = False) -> list[str]:
    """Return the names of the kernels that run on this machine's CPU, or of those that take a selection."""
    case = Case("cpu", dtype, 1, 1, 8, 8, frozenset({"selection"} if selects else ()))
    return [
        name for name, kernel in KERNELS.items() if kernel.refuse(case) is None and case.features <= kernel.features
    ]


def cu_seqlens(length: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw documents: equal and short, or cut anywhere, some of one token and some empty."""
    equal = st.integers(1, 9).map(lambda each: (*range(0, length, each), length))
    sizes = st.lists(st.sampled_from([0, 1, 1, 2, 5, 11]), max_size=8).map(lambda some: tuple(accumulate(some)))
    short = sizes.map(lambda ends: (0, *(end for end in ends if end <= length), length))
    anywhere = st.lists(st.integers(0, length), max_size=4).map(lambda cuts: (0, *sorted(cuts), length))
    return st.one_of(anywhere, equal, short)


@st.composite
def documents(draw: st.DrawFn, q_len: int, kv_len: int) -> Documents:
    """Draw documents with as many keys as queries or with key offsets of their own; some are padded."""
    starts = draw(cu_seqlens(q_len))
    number = len(starts) - 1
    if q_len == kv_len and draw(st.integers(0, 3)):
        kv_starts = None
    else:
        cuts = st.lists(st.integers(0, kv_len), min_size=number - 1, max_size=number - 1)
        kv_starts = (0, *sorted(draw(cuts)), kv_len)

    def lengths(starts: tuple[int, ...]) -> tuple[int, ...] | None:
        if draw(st.integers(0, 3)):
            return None
        missing = draw(st.lists(st.integers(0, 3), min_size=number, max_size=number))
        return tuple(max(0, b - a - less) for a, b, less in zip(starts, starts[1:], missing, strict=False))

    return Documents(starts, lengths(starts), kv_starts, None if kv_starts is None else lengths(kv_starts))


@st.composite
def key_spans(draw: st.DrawFn, kv_len: int) -> Keys:
    """Draw a few spans of keys."""
    edges = sorted(draw(st.lists(st.integers(0, kv_len), min_size=2, max_size=6)))
    return Keys(tuple(zip(edges[::2], edges[1::2], strict=False)))


@st.composite
def bidirectional_spans(draw: st.DrawFn, length: int) -> BidirectionalSpans:
    """Draw a few spans, some empty or side by side, each a group of its own, or all of them one or two groups."""
    if draw(st.booleans()):
        each = draw(st.sampled_from([3, 5, 2]))
        spans = tuple((start, start + each) for start in range(draw(st.integers(0, 3)), length - each + 1, each + 1))
    else:
        edges = sorted(draw(st.lists(st.integers(0, length), min_size=2, max_size=8)))
        spans = tuple(zip(edges[::2], edges[1::2], strict=False))
    groups = draw(st.sampled_from([None, None, 1, 2]))
    left = draw(st.sampled_from([None, None, 0, 4]))
    return BidirectionalSpans(spans, None if groups is None else tuple(n % groups for n in range(len(spans))), left)


@st.composite
def block_masks(draw: st.DrawFn, q_len: int, kv_len: int) -> BlockMask:
    """Draw blocks of any size, down to one token, but at most 12 by 12 of them: masks combine region by region."""
    block = max(draw(st.sampled_from([3, 1, 7, 16])), -(-max(q_len, kv_len) // 12))
    rows, columns = -(-q_len // block), -(-kv_len // block)
    rare, generator = draw(st.sampled_from([0.5, 0.1, 0.9])), torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return BlockMask.of(torch.rand(rows, columns, generator=generator) < rare, block)


@st.composite
def prefix_trees(draw: st.DrawFn, length: int) -> PrefixTree:
    """Draw a forest of up to nine nodes, some of them empty."""
    path: list[int] = []
    parents = []
    for node in range(draw(st.integers(1, 9))):
        depth = draw(st.integers(0, len(path)))
        del path[depth:]
        parents.append(path[-1] if path else -1)
        path.append(node)
    inner = st.lists(st.integers(0, length), min_size=len(parents) - 1, max_size=len(parents) - 1).map(sorted)
    bounds = (0, *draw(inner), length)
    return PrefixTree(tuple(parents), tuple(b - a for a, b in pairwise(bounds)))


def single(q_len: int, kv_len: int) -> st.SearchStrategy[Mask]:
    """Draw one mask for all batch rows."""
    trees = prefix_trees(q_len) if q_len == kv_len else st.just(Causal())
    return st.one_of(
        sparse(q_len, kv_len),
        trees,
        st.sampled_from([Causal(), Full(), CausalBottomRight()]),
        st.builds(SlidingWindow, st.one_of(st.none(), st.integers(0, kv_len)), st.sampled_from([0, 2, None])),
        st.builds(PrefixLM, st.integers(0, kv_len)),
        bidirectional_spans(kv_len),
        block_masks(q_len, kv_len),
        documents(q_len, kv_len),
    )


def sparse(q_len: int, kv_len: int) -> st.SearchStrategy[Mask]:
    """Draw a mask under which few pairs attend, so that blocks travel in pieces."""
    short = st.sampled_from([2, 0, 1, 3, 5])
    each = st.sampled_from([5, 3, 8]).map(lambda size: Documents((*range(0, q_len, size), q_len)))
    return st.one_of(
        each if q_len == kv_len else documents(q_len, kv_len),
        st.builds(SlidingWindow, short, st.sampled_from([0, 1, 2])),
        key_spans(kv_len),
    )


@st.composite
def masks(draw: st.DrawFn, q_len: int, kv_len: int, per_row: bool = True, least: bool = False) -> Mask:
    """Draw up to three masks combined; if `least`, few pairs attend under the first.

    If `per_row`, some have a mask of their own for each of two batch rows.
    """
    found = draw((sparse if least else single)(q_len, kv_len))
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2]))):
        found = combined(found, draw(single(q_len, kv_len)))
    kind = draw(st.sampled_from(["", "", "", "padding", "rows"])) if per_row else ""
    if kind == "padding":
        stops = st.tuples(st.integers(0, kv_len), st.integers(0, kv_len))
        begins, ends = (torch.tensor(draw(stops)).unsqueeze(1) for _ in range(2))
        at = torch.arange(kv_len).expand(2, -1)
        left_out = draw(st.sampled_from([0, 0, 3]))
        return combined(found, key_padding((at >= begins.minimum(ends)) & (at < ends) & ((at + 1) % 4 != left_out)))
    if kind == "rows":
        own = PerRow((draw(single(q_len, kv_len)), draw(single(q_len, kv_len))))
        return draw(st.sampled_from([own, combined(found, own)]))
    return found


def combined(one: Mask, other: Mask) -> Mask:
    """Return both masks combined, or the first where documents with key offsets leave no positions to compare.

    So do two prefix trees.
    """
    if one.trees and other.trees:
        return one
    clash = (one.shifts or other.shifts) and (one.compares_positions or other.compares_positions)
    return one if clash else one & other


def holders(ranks: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw the rank of every chunk: each rank holds one, and some hold more."""
    more = st.lists(st.integers(0, ranks - 1), max_size=2 * ranks)
    return more.flatmap(lambda extra: st.permutations([*range(ranks), *extra])).map(tuple)


def layouts(ranks: int) -> st.SearchStrategy[Layout]:
    """Draw a named layout, or chunks."""
    return st.one_of(st.sampled_from(sorted(LAYOUTS)).map(LAYOUTS.__getitem__), holders(ranks).map(in_chunks))


@st.composite
def sequences(draw: st.DrawFn, length: int, ranks: int) -> Tokens:
    """Draw tokens in the strategy's layout, in another one, by documents, or in chunks."""
    kind = draw(st.sampled_from(["usual", "holders", "bounds", "documents", "layout"]))
    if kind in ("holders", "bounds"):
        chunks = draw(holders(ranks))
        inner = st.lists(st.integers(0, length), min_size=len(chunks) - 1, max_size=len(chunks) - 1).map(sorted)
        return Tokens(length, holders=chunks, bounds=(0, *draw(inner), length) if kind == "bounds" else None)
    layout = draw(st.sampled_from(sorted(LAYOUTS))) if kind == "layout" else None
    return Tokens(length, draw(cu_seqlens(length)) if kind == "documents" else None, layout)


@st.composite
def tokens(draw: st.DrawFn, lengths: tuple[int, int], ranks: int) -> Tokens | tuple[Tokens, Tokens] | None:
    """Draw the tokens of queries and keys; None, the default, in two cases of three."""
    if draw(st.integers(0, 2)):
        return None
    if lengths[0] == lengths[1] and draw(st.integers(0, 3)):
        return draw(sequences(lengths[0], ranks))
    q = draw(sequences(lengths[0], ranks))
    strided = q.holders is None and q.layout in (None, "striped")  # which goes with none of the others
    return q, Tokens(lengths[1], layout=q.layout) if strided else draw(sequences(lengths[1], ranks))


@st.composite
def options(
    draw: st.DrawFn, topology: Topology, heads: tuple[int, int], kernels: list[str], bias: bool, in_pieces: bool
) -> Strategy:
    """Draw a strategy; few are refused."""
    placement = draw(st.sampled_from(["head_first", "head_first", "context_first"]))
    sizes = topology.ulysses_degrees
    if placement == "context_first":
        sizes = [topology.ranks // n for n in sizes]
    fitting = [n for n in sizes if heads[1] % n == 0 or (n % heads[1] == 0 and heads[0] % n == 0)]
    rings_of_groups = [n for n in fitting if 1 < n < topology.ranks]
    gathers = draw(st.sampled_from([False, False, True]))  # blocks, in place of an exchange of heads
    of_any = ["kv", "q", "auto"] if gathers else ["kv", "q", "auto", "both"]
    sides = st.sampled_from([*["kv"] * 20, *["auto"] * 9, "q"] if bias else of_any)
    degree = 1 if gathers else draw(st.sampled_from(rings_of_groups if in_pieces and rings_of_groups else fitting))
    own = max(1, heads[1] // degree)
    parts = st.sampled_from([1, 1, *(n for n in range(1, own + 1) if own % n == 0)])
    return Strategy(
        layout=draw(st.sampled_from(["zigzag", "striped", "contiguous", "striped"])),
        schedule=draw(st.sampled_from(["auto", "direct"] if in_pieces else ["auto", *SCHEDULES])),
        forward=draw(sides),
        backward=draw(sides),
        kernel=draw(st.sampled_from(["auto", *kernels])),
        parts=(draw(parts), draw(parts)),
        ulysses_degree=degree,
        ulysses_placement="head_first" if gathers else placement,
        mesh_degree=draw(st.sampled_from(topology.ulysses_degrees)) if gathers else 1,
    )


@st.composite
def calls(draw: st.DrawFn, selects: bool = False) -> Drawn:
    """Draw a call with any combination of options; if it `selects`, one in float64 whose queries list their keys."""
    # Most have Ulysses groups and a mask under which few pairs attend, so that blocks travel in pieces.
    in_pieces = not selects and draw(st.sampled_from([False, True, True]))
    topology = Topology(*draw(st.sampled_from(MANY_RANKS if in_pieces else [*FEW_RANKS, *MANY_RANKS])))
    length = st.one_of(st.just(64), st.integers(32, 64)) if in_pieces else st.integers(1, 64)
    q_len = draw(length)
    lengths = (q_len, draw(st.one_of(st.just(q_len), st.just(q_len), length)))
    kv_heads = draw(st.sampled_from([4, 8, 2] if in_pieces else [1, 2, 3, 4, 8]))
    heads = (kv_heads * draw(st.sampled_from([1, 1, 2, 4])), kv_heads)
    dtype = torch.float64 if selects else draw(st.sampled_from(DTYPES))
    bias = draw(st.sampled_from([None, None, None, None, (1, 1), (2, heads[0])]))
    selection = None
    if selects or (not in_pieces and not draw(st.integers(0, 3))):
        lists = draw(st.sampled_from([1, 1, kv_heads, max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0)]))
        selection = lists, draw(st.sampled_from([1, 2, 5, lengths[1]]))
    mask = draw(masks(*lengths, least=in_pieces))
    groups = draw(st.sampled_from([1, 1, 1, 1, 2])) if kv_heads % 2 == 0 else 1
    if groups > 1:
        mask = PerHeadGroup((mask, draw(masks(*lengths, least=in_pieces))))
    scores = PLAIN
    if draw(st.booleans()):
        slopes = tuple(0.1 * n for n in range(heads[0]))
        refused = mask.shifts and draw(st.integers(0, 7))
        scores = Scores(
            scale=draw(st.sampled_from([None, 0.7])),
            softcap=draw(st.sampled_from([None, 2.0])),
            alibi_slopes=draw(st.sampled_from([None, None if refused else slopes])),
            dropout=draw(st.sampled_from([0.0, 0.3])) if groups == 1 else 0.0,
            seed=draw(st.sampled_from([0, 5, 1 << 40])),
        )
    kernels = runnable(dtype, selection is not None) if scores == PLAIN and bias is None else []
    has_rows = bias is not None or selection is not None
    strategy = draw(options(topology, (heads[0] // groups, heads[1] // groups), kernels, has_rows, in_pieces))
    if selects:  # which go with no exchange of heads or blocks
        strategy = replace(strategy, ulysses_degree=1, mesh_degree=1)
    return Drawn(
        topology,
        strategy,
        lengths,
        heads,
        draw(st.sampled_from([(4, 4), (8, 8), (6, 3), (3, 5), (1, 1)])),
        dtype,
        mask,
        scores,
        draw(tokens(lengths, topology.ranks)),
        draw(st.sampled_from([False, False, True])),
        bias,
        selection,
        "out" if dtype is torch.float16 else draw(st.sampled_from(["out", "out", "lse", "both"])),
        draw(st.integers(0, 9)),
        draw(st.sampled_from([1, 1, 2, 3, 4])),
        draw(st.sampled_from([0.4, 2.0])),
    )
