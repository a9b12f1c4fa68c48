"""Packed documents in one kernel call: tiles put together, rows taken and put back, and what libraries are asked."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from burst_plugin import (
    BidirectionalSpans,
    Causal,
    ContextParallel,
    Documents,
    Full,
    Mask,
    PerRow,
    SlidingWindow,
    Strategy,
    Tokens,
    Topology,
    VirtualRing,
    burst_attention,
)
from burst_plugin.compute.shapes import Shapes
from burst_plugin.compute.varlen import SpanTable
from burst_plugin.kernels import KERNELS, How, Kernel, Queries
from burst_plugin.kernels import flash as flash_module
from burst_plugin.kernels.protocol import Grads
from burst_plugin.kernels.varlen import backward_looped, forward_looped, lengths_of
from burst_plugin.ring.plan import KernelTiles
from burst_plugin.scores import Scores
from burst_plugin.sequence.layout import LAYOUTS, Run
from burst_plugin.sequence.tiles import Regions, Tile, batched, tiles_of
from burst_plugin.types import ANTICAUSAL, CAUSAL, FULL, Band
from tests.support.reference import Problem, Result, errors, reference
from tests.support.stand_ins import INSTALL, Calls

RAGGED = sorted(n for n, (kernel, _) in INSTALL.items() if "varlen" in KERNELS[kernel].features)
CPU = torch.device("cpu")
STARTS = (0, 24, 40, 64, 72, 128)
SPANS = BidirectionalSpans(((2, 10), (12, 20), (24, 33), (40, 56), (60, 66), (66, 72), (90, 128)))


def documents(mask: Mask) -> Mask:
    return mask & Documents(STARTS)


# ------------------------------------------------------------------------------------------------------------ tiles


def pairs(tiles: list[Tile]) -> list[tuple[int, int, int, int, Band, tuple[int, int] | None]]:
    """All of what tiles stand for, alone."""
    parts = [(part, tile) for tile in tiles for part in (tile.subtiles or (tile[:4],))]
    return sorted(((*part, tile.band, tile.batch) for part, tile in parts), key=str)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cu_seqlens", [None, STARTS], ids=["as a whole", "by document"])
@pytest.mark.parametrize("mask", [Causal(), Full(), SlidingWindow(9, 0), SPANS], ids=str)
def test_nothing_is_lost_or_added(layout: str, cu_seqlens: tuple[int, ...] | None, mask: Mask) -> None:
    regions = Regions(documents(mask).regions(128, 128))
    runs = [LAYOUTS[layout].runs(rank, 4, Tokens(128, cu_seqlens)) for rank in range(4)]
    for queries in runs:
        for keys in runs:
            alone = tiles_of(regions, queries, keys)
            found = list(batched(alone, 1000))
            assert pairs(found) == pairs(list(alone))
            for tile in found:
                assert not tile.subtiles or tile.band in (FULL, CAUSAL, ANTICAUSAL)
                assert all(
                    a[1] <= b[0] and a[3] <= b[2] for a, b in zip(tile.subtiles, tile.subtiles[1:], strict=False)
                )
                assert not tile.subtiles or (tile.q, tile.k) == (
                    slice(tile.subtiles[0][0], tile.subtiles[-1][1]),
                    slice(tile.subtiles[0][2], tile.subtiles[-1][3]),
                )


def test_documents_that_are_spread_over_all_ranks_are_one_tile_per_visit() -> None:
    """As Megatron has them: the drawing in `tile_splitting`."""
    starts = tuple(range(0, 65, 8))
    regions = Regions((Causal() & Documents(starts)).regions(64, 64))
    runs = [LAYOUTS["zigzag"].runs(rank, 2, Tokens(64, starts)) for rank in range(2)]
    own, later, earlier = (list(batched(tiles_of(regions, runs[q], runs[k]), 8)) for q, k in ((0, 0), (1, 0), (0, 1)))
    assert own == [Tile(0, 32, 0, 32, CAUSAL, subtiles=tuple((n, n + 4, n, n + 4) for n in range(0, 32, 4)))]
    assert later == [Tile(0, 32, 0, 30, FULL, subtiles=tuple((n, n + 4, n, n + 2) for n in range(0, 32, 4)))]
    assert earlier == [Tile(2, 32, 0, 32, FULL, subtiles=tuple((n + 2, n + 4, n, n + 4) for n in range(0, 32, 4)))]


@pytest.mark.parametrize(
    "alone",
    [
        [Tile(0, 4, 0, 4, CAUSAL), Tile(4, 8, 4, 8, CAUSAL)],
        [Tile(0, 4, 0, 4), Tile(100, 104, 4, 8), Tile(200, 204, 8, 12)],
        [Tile(0, 4, 0, 4), Tile(4, 8, 100, 104), Tile(8, 12, 200, 204)],
        [Tile(n, n + 2049, n, n + 2049, CAUSAL) for n in range(0, 9000, 2049)],
        [Tile(0, 4, 0, 4), Tile(0, 4, 4, 8), Tile(4, 8, 0, 4), Tile(4, 8, 4, 8)],
        [Tile(n, n + 4, n, n + 4, Band(-2, 0)) for n in range(0, 40, 4)],
        [Tile(n, n + 4, n, n + 4, CAUSAL, pieces=2) for n in range(0, 40, 4)],
        [Tile(n, n + 4, n, n + 4, CAUSAL, batch=(n, n + 4)) for n in range(0, 40, 4)],
        [Tile(n, n + 4, n, n + 4, taken=(((n, n + 1), (n + 2, n + 4)), ((n, n + 4),))) for n in range(0, 40, 4)],
    ],
    ids=["two", "far apart", "keys far apart", "long", "the same rows", "windows", "pieces", "batch rows", "taken"],
)
def test_what_is_not_worth_it_or_does_not_go_together_stays_alone(alone: list[Tile]) -> None:
    assert sorted(batched(alone, 1000), key=lambda tile: tile[:4]) == sorted(alone, key=lambda tile: tile[:4])


def test_one_outlier_does_not_keep_the_others_apart() -> None:
    near = [Tile(n, n + 4, n, n + 4) for n in range(0, 40, 4)]
    far = Tile(1000, 1004, 40, 44)
    assert list(batched([*near, far], 1000)) == [Tile(0, 40, 0, 40, subtiles=tuple(t[:4] for t in near)), far]


def test_no_more_go_together_than_there_is_room_for() -> None:
    tiles = [Tile(n, n + 4, n, n + 4, CAUSAL) for n in range(0, 40, 4)]
    assert [len(tile.subtiles) for tile in batched(tiles, 4)] == [4, 4, 0, 0]
    assert list(batched(tiles, 2)) == tiles


@pytest.mark.parametrize(
    ("batch", "heads", "dim", "most"), [(1, 32, 128, 256), (2, 32, 128, 128), (1, 64, 256, 64), (256, 1, 1, 255)]
)
def test_room_is_half_a_gib_of_rows_filled_up(batch: int, heads: int, dim: int, most: int) -> None:
    shapes = Shapes(batch, 8, 8, heads, heads, dim, dim, torch.bfloat16)
    assert KernelTiles(frozenset(), shapes, uses_positions=False, max_logits=False).most_spans == most


def test_rows_are_counted_from_the_first_one() -> None:
    tile = Tile(10, 30, 5, 14, FULL, batch=(1, 3), subtiles=((10, 14, 5, 8), (20, 22, 8, 10), (22, 30, 10, 14)))
    rows = SpanTable(5, CPU).rows_of(tile)
    assert rows.q is not None
    assert rows.q.tolist() == [0, 1, 2, 3, *range(10, 20)]
    assert rows.k is None, "all of them: no copy"
    assert rows.lengths[:2] == ((4, 2, 8) * 2, (3, 2, 4) * 2)
    assert rows.lengths.q_ends.tolist() == [0, 4, 6, 14, 18, 20, 28]
    assert rows.lengths.k_ends.dtype == torch.int32


# ---------------------------------------------------------------------------------------------------------- kernels


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def kernel(request: pytest.FixtureRequest, calls: Calls) -> Iterator[Kernel]:
    name, install = INSTALL[request.param]
    flash_module.is_right.cache_clear()
    with install(calls):
        yield KERNELS[name]
    flash_module.is_right.cache_clear()


every_varlen = pytest.mark.parametrize("kernel", RAGGED, indirect=True)


def drawn(q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], batch: int, dims: tuple[int, int]) -> Problem:
    generator = torch.Generator().manual_seed(3)
    sizes = ((sum(q_lengths), 4, dims[0]), (sum(k_lengths), 2, dims[0]), (sum(k_lengths), 2, dims[1]))
    shapes = [*sizes, (sum(q_lengths), 4, dims[1])]
    return Problem(*(torch.randn(batch, *shape, generator=generator, dtype=torch.float64) for shape in shapes))


def agree(kernel: Kernel, problem: Problem, how: How) -> None:
    """With the reference kernel, a call per sequence."""
    reference_kernel = KERNELS["reference"]
    expected = forward_looped(reference_kernel, *problem[:3], how)
    torch.testing.assert_close(kernel.forward(*problem[:3], how), expected, rtol=1e-11, atol=1e-11)
    queries = Queries(problem.q, problem.dout, *expected)
    wanted = backward_looped(reference_kernel, queries, *problem[1:3], how)
    torch.testing.assert_close(kernel.backward(queries, *problem[1:3], how)[:3], wanted[:3], rtol=1e-11, atol=1e-11)


@every_varlen
@pytest.mark.parametrize("band", [FULL, CAUSAL, ANTICAUSAL], ids=["full", "causal", "anticausal"])
@pytest.mark.parametrize("dims", [(8, 8), (12, 8), (8, 20)], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_several_sequences_are_one_call(
    kernel: Kernel, calls: Calls, band: Band, dims: tuple[int, int], batch: int
) -> None:
    q_lengths, k_lengths = (5, 1, 9), (2, 11, 4) if band == FULL else (5, 1, 9)
    problem = drawn(q_lengths, k_lengths, batch, dims)
    how = How(band, Scores(scale=0.3), lengths=lengths_of(q_lengths * batch, k_lengths * batch, CPU))
    agree(kernel, problem, how)  # and the library is tried out
    calls.clear()
    agree(kernel, problem, how)
    assert len(calls) == 1
    assert not calls[0]["deterministic"]
    agree(kernel, problem, how._replace(deterministic=True))
    assert calls[1]["deterministic"]


@every_varlen
def test_one_query_each_and_what_cannot_be_addressed_go_alone(
    kernel: Kernel, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    singles = drawn((1, 1, 1), (4, 2, 3), 1, (8, 8))
    agree(kernel, singles, How(FULL, Scores(scale=0.3), lengths=lengths_of((1, 1, 1), (4, 2, 3), CPU)))
    assert len(calls) == 3
    problem = drawn((4, 2, 3), (4, 2, 3), 1, (8, 8))
    how = How(CAUSAL, Scores(scale=0.3), lengths=lengths_of((4, 2, 3), (4, 2, 3), CPU))
    agree(kernel, problem, how)  # the library is tried out
    largest = (9 + 3 * 128) * 4 * 64
    for limit, passes in ((largest, 1), (largest - 1, 3)):
        monkeypatch.setattr(type(kernel), "largest_dq", limit)
        calls.clear()
        agree(kernel, problem, how)
        assert len(calls) == passes


@every_varlen
@pytest.mark.parametrize("fault", ["wrong dk", "raises", "wrong lse"])
def test_a_library_that_is_wrong_there_is_found_out(
    kernel: Kernel, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward, backward = type(kernel).call_forward_varlen, type(kernel).call_backward_varlen  # type: ignore[attr-defined]

    def wrong_forward(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
        if fault == "raises":
            raise RuntimeError("no such kernel")
        out, lse = forward(*args)
        return out, lse.roll(1, 1) if fault == "wrong lse" else lse

    def wrong_backward(*args: object) -> Grads:
        dq, dk, dv = backward(*args)
        return dq, dk.roll(1, 0) if fault == "wrong dk" else dk, dv  # type: ignore[return-value]

    monkeypatch.setattr(type(kernel), "call_forward_varlen", wrong_forward)
    monkeypatch.setattr(type(kernel), "call_backward_varlen", wrong_backward)
    problem = drawn((5, 2, 9), (5, 2, 9), 2, (8, 8))
    how = How(CAUSAL, Scores(scale=0.3), lengths=lengths_of((5, 2, 9) * 2, (5, 2, 9) * 2, CPU))
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        agree(kernel, problem, how)
    said = [record.message for record in caplog.records]
    assert len(said) == 1, "once"
    assert {"wrong dk": "(dk differ", "raises": "no such kernel", "wrong lse": "(lse differ"}[fault] in said[0]


# ------------------------------------------------------------------------------------------------------------- rings


class Counted:
    """A kernel, and how often it was called."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.name, self.features, self.refuse = kernel.name, kernel.features, kernel.refuse
        self.forwards = self.backwards = 0

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.forwards += 1
        return self._kernel.forward(q, k, v, how)

    def backward(self, queries: Queries, k: torch.Tensor, v: torch.Tensor, how: How) -> Grads:
        self.backwards += 1
        return self._kernel.backward(queries, k, v, how)


def ring_errors(kernel: Kernel, mask: Mask, tokens: Tokens, strategy: Strategy) -> dict[str, float]:
    problem = Problem.draw(tokens.length, (4, 2), 8, torch.float64)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("burst_plugin.ring.choices.choose_kernel", lambda name, case: kernel)
        inputs = [x.clone().requires_grad_() for x in problem[:3]]
        out, _ = VirtualRing(Topology(2, 2), strategy).attention(*inputs, mask=mask, tokens=tokens)
        grads = torch.autograd.grad(out, inputs, problem.dout)
    return errors(Result(out.detach(), *grads), reference(problem, mask))


@pytest.mark.parametrize("name", ["reference", *RAGGED])
@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("cu_seqlens", [None, STARTS], ids=["as a whole", "by document"])
@pytest.mark.parametrize(
    "mask",
    [
        documents(Causal()),
        documents(Full()),
        documents(SlidingWindow(9, 0)),
        Causal() & Documents(STARTS, (20, 16, 24, 3, 50)),
        PerRow((Causal() & Documents((0, 8, 16, 24, 32, 40, 128)), Causal())),
        documents(SPANS & SlidingWindow(9, None)),
        PerRow((SPANS, BidirectionalSpans(SPANS.spans, (0, 1, 0, 1, 0, 0, 1)))),
    ],
    ids=["causal", "full", "window", "padded", "by batch row", "spans", "spans by batch row"],
)
def test_a_ring_is_exact(name: str, backward: str, cu_seqlens: tuple[int, ...] | None, mask: Mask) -> None:
    strategy = Strategy(backward=backward)
    with ExitStack() as stack:
        if name in INSTALL:
            chosen, install = INSTALL[name]
            flash_module.is_right.cache_clear()
            stack.callback(flash_module.is_right.cache_clear)
            stack.enter_context(install(Calls()))
            name = chosen
        found = ring_errors(KERNELS[name], mask, Tokens(128, cu_seqlens), strategy)
    assert max(found.values()) < 1e-12, found


def test_a_visit_of_many_documents_is_one_call() -> None:
    """Each spread over all ranks, as in Megatron: 16 visits, of which the 4 of a rank's own block have a tail."""
    starts = tuple(range(0, 129, 16))
    counted = Counted(KERNELS["reference"])
    found = ring_errors(counted, Causal() & Documents(starts), Tokens(128, starts), Strategy())
    assert max(found.values()) < 1e-12, found
    assert counted.forwards <= 24
    assert counted.backwards <= 24


def test_spans_that_look_ahead_are_one_call_more() -> None:
    """16 images of 8 tokens on one rank: one causal call, and one for what is later of all images."""
    spans = BidirectionalSpans(tuple((start, start + 8) for start in range(4, 256, 16)))
    work = tiles_of(Regions(spans.regions(256, 256)), (Run(0, 256),), (Run(0, 256),))
    causal, ahead = batched(work, 1000)
    assert causal == Tile(0, 256, 0, 256, CAUSAL)
    assert (ahead.band, len(ahead.subtiles)) == (ANTICAUSAL, 16)
    assert ahead.subtiles[0] == (4, 11, 5, 12)


def test_largest_scores_are_found_in_every_document() -> None:
    """Tile by tile: a call for several gives no scores."""
    problem, starts = Problem.draw(40, (4, 2)), (0, 8, 16, 24, 32, 40)
    cp = ContextParallel(strategy=Strategy(kernel="reference"))
    q, k, v = problem[:3]
    _, found = burst_attention(q, k, v, cp, mask=Documents(starts), return_max_logits=True)
    scores = torch.einsum("bihd,bjhd->hbij", q, k.repeat_interleave(2, 2)) * 8**-0.5
    inside = torch.block_diag(*[torch.ones(8, 8)] * 5).bool()
    torch.testing.assert_close(found, scores.masked_fill(~inside, -torch.inf).amax((1, 2, 3)))
