"""Drawn conversations that branch: windows beside prefix trees, turn by turn, judged by `burst_attention`."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin import ContextParallel, Mask, PerRow, PrefixTree, SlidingWindow, burst_attention
from burst_plugin.inference import KVCache
from tests.inference.test_drawn_turns import _padded
from tests.support.ranks import run_ranks

TURNS, CASES, TURNS_OVER_GLOO = 10, 50, 4
HEADS, DIM = 2, 4

Row = list[Tensor]  # q, k and v of all its tokens, [S, heads, dim]


class Branching:
    """Rows of which each grows as a prefix tree, drawn by `seed` in the same way on every rank."""

    def __init__(self, cp: ContextParallel, alone: ContextParallel, seed: int) -> None:
        self.draw, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        pick = self.draw.choice
        self.alone, self.windows, self.rewind = alone, [pick((0, 3, 17)), pick((None, 8))], pick((0, 7))
        options = {"rewind": self.rewind, "offload": pick((False, True)), "forward": pick(("q", "kv", "auto"))}
        self.cache = KVCache(cp, len(self.windows), windows=self.windows, **options)
        rows = 1 if self.draw.random() < 0.4 else pick((2, 3))
        self.rows = [self._new(0) for _ in range(rows)]
        self.nodes: list[list[tuple[int, int]]] = [[] for _ in range(rows)]  # by row: (parent, tokens)

    def _new(self, count: int) -> Row:
        return [torch.randn(count, HEADS, DIM, generator=self.generator, dtype=torch.float64) for _ in range(3)]

    def turn(self) -> float:
        """Cut rows off or copy them, or not, and let their trees grow. Return the largest error."""
        if self.cache.lengths:
            self._change()
        lengths = [self.draw.choice((0, 1, 1, 2, 5, 11, 40)) for _ in self.rows]
        lengths = lengths if any(lengths) else [1] * len(lengths)
        starts, new = [len(row[0]) for row in self.rows], [self._new(count) for count in lengths]
        self.rows = [
            [torch.cat(x) for x in zip(row, more, strict=True)] for row, more in zip(self.rows, new, strict=True)
        ]
        self.nodes = [self._grown(nodes, count) for nodes, count in zip(self.nodes, lengths, strict=True)]
        trees = [
            PrefixTree(*map(tuple, zip(*nodes, strict=True))) if nodes else SlidingWindow(3) for nodes in self.nodes
        ]
        turn = self.cache.begin(lengths, replicated=self.draw.choice((None, True, False)))
        mask = trees[0] if len(trees) == 1 else PerRow(tuple(trees))
        error = 0.0
        for layer, left in enumerate(self.windows):
            q, k, v = (turn.take(_padded(x)) for x in zip(*new, strict=True))
            out = self.cache.gather(self.cache.attend(layer, q, k, v, mask=mask))
            truth = [
                self._truth(row, tree if left is None else tree & SlidingWindow(left))[start:]
                for row, tree, start in zip(self.rows, trees, starts, strict=True)
            ]
            error = max(error, float((out - _padded(truth, 0.0)).abs().max()))
        return error

    def _grown(self, nodes: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
        """Return the nodes with so many tokens more: some in the last node, the others in up to three new ones."""
        nodes, left = list(nodes), count
        if nodes and self.draw.random() < 0.4:
            more = self.draw.randrange(left + 1)
            nodes[-1], left = (nodes[-1][0], nodes[-1][1] + more), left - more
        while left:
            path, at = [-1], len(nodes) - 1
            while at >= 0:
                path.append(at)
                at = nodes[at][0]
            more = min(left, self.draw.choice((1, 3, 20, 40)))
            nodes.append((self.draw.choice(path), more))
            left -= more
        return nodes

    def _change(self) -> None:
        kind, count = self.draw.random(), len(self.rows)
        if kind < 0.3 and self.rewind:
            kept = [self.draw.randrange(max(0, n - self.rewind), n + 1) for n in self.cache.lengths]
            shortest = [max(bounds) for bounds in zip(*(each.shortest for each in self.cache._layers), strict=True)]
            if any(n < least for n, least in zip(kept, shortest, strict=True)):
                return  # cut off before, and grown by less since
            self.cache.truncate(kept)
            self.rows = [[x[:n] for x in row] for row, n in zip(self.rows, kept, strict=True)]
            self.nodes = [_cut(nodes, n) for nodes, n in zip(self.nodes, kept, strict=True)]
        elif kind > 0.8:
            chosen = [self.draw.randrange(count) for _ in range(self.draw.choice((1, 2, 3)))]
            self.cache = self.cache.fork(chosen)
            self.rows, self.nodes = ([list(rows[row]) for row in chosen] for rows in (self.rows, self.nodes))

    def _truth(self, row: Row, mask: Mask) -> Tensor:
        q, k, v = (x.unsqueeze(0) for x in row)
        return burst_attention(q, k, v, self.alone, mask=mask)[0] if q.shape[1] else q[0]


def _cut(nodes: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """Return the nodes of the first `length` tokens."""
    kept = []
    for parent, count in nodes:
        if length <= 0:
            break
        kept.append((parent, min(count, length)))
        length -= count
    return kept


def test_500_drawn_turns_of_windows_and_trees_are_exact() -> None:
    alone = ContextParallel()
    for seed in range(CASES):
        talk = Branching(alone, alone, seed)
        error = max(talk.turn() for _ in range(TURNS))
        assert error < 1e-13, f"seed {seed}"


def test_drawn_turns_of_windows_and_trees_are_exact_on_four_ranks() -> None:
    def on_rank(rank: int) -> list[float]:
        cp, alone = ContextParallel(dist.group.WORLD, ranks_per_node=2), ContextParallel(hierarchy=[1])
        errors = []
        for seed in range(4):
            talk = Branching(cp, alone, seed)
            errors.append(max(talk.turn() for _ in range(TURNS_OVER_GLOO)))
            talk.cache.finish()
        cp.close()
        return errors

    for errors in run_ranks(on_rank, 4, timeout_s=120.0):
        assert max(errors) < 1e-13, f"seed {errors.index(max(errors))}"


def _told(cache: KVCache, *turns: tuple[int, Mask]) -> None:
    for count, mask in turns:
        x = torch.ones(1, cache.begin([count]).size, HEADS, DIM)
        cache.attend(0, x, x, x, mask=mask)


def test_a_tree_that_reaches_what_a_window_has_dropped_is_refused() -> None:
    """A turn without the tree, or one that continues a node in its middle, comes too late for some tokens."""
    for first in (SlidingWindow(8), PrefixTree((-1,), (60,))):
        cache = KVCache(ContextParallel(), 1, windows=[8])
        _told(cache, (60, first))
        held = cache.bytes
        with pytest.raises(ValueError, match=r"in row 0 new tokens attend to token 12 or later .* before token 52"):
            _told(cache, (5, PrefixTree((-1, 0, 0), (20, 40, 5))))
        assert cache.bytes == held
        x = torch.ones(1, 5, HEADS, DIM)
        cache.attend(0, x, x, x, mask=PrefixTree((-1, 0), (60, 5)))
    cache = KVCache(ContextParallel(), 1, windows=[8], rewind=40)
    _told(cache, (60, PrefixTree((-1,), (60,))), (5, PrefixTree((-1, 0, 0), (20, 40, 5))))


def test_windows_beside_a_tree_drop_what_no_branch_can_need() -> None:
    cache = KVCache(ContextParallel(), 1, windows=[8])
    token = HEADS * DIM * 2 * 4
    _told(cache, (1000, PrefixTree((-1,), (1000,))))
    assert cache.bytes <= (8 + 16) * token
    _told(cache, (500, PrefixTree((-1, 0), (1000, 500))))
    assert 508 <= cache.bytes / token <= 508 + 16  # the end of the prompt, which another branch may continue
    _told(cache, (500, PrefixTree((-1, 0, -1), (1000, 500, 500))))
    assert cache.bytes <= (8 + 16) * token  # a text of its own; nothing continues the one before


def test_a_row_is_not_cut_below_what_a_window_beside_a_tree_kept() -> None:
    cache = KVCache(ContextParallel(), 1, windows=[8], rewind=4)
    _told(cache, (40, PrefixTree((-1,), (40,))), (60, PrefixTree((-1, 0), (40, 60))))
    _told(cache, (60, PrefixTree((-1, -1), (100, 60))))
    with pytest.raises(ValueError, match="row 0 cannot be cut to 155 tokens: layer 0 has a window of 8"):
        cache.truncate([155])
    cache.truncate([156])
