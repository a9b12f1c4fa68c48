"""Drawn conversations: rows that grow, are cut off, forked and share prefixes, in every kind of cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from burst_plugin import Causal, ContextParallel, Scores, SlidingWindow
from burst_plugin.inference import KVCache
from tests.support.ranks import run_ranks
from tests.support.reference import Problem, reference

CASES, RANKS, LAYERS = 8, 4, 2

Row = list[Tensor]  # q, k and v of all its tokens, [S, heads, dim]


class Talk:
    """A conversation, drawn by `seed` in the same way on every rank."""

    def __init__(self, cp: ContextParallel, seed: int) -> None:
        self.draw, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        pick = self.draw.choice
        kv_heads, dim = pick((1, 2)), pick((4, 8))
        heads = kv_heads * pick((1, 3))
        self.shapes = ((heads, dim), (kv_heads, dim), (kv_heads, pick((4, 8))))
        self.windows = [pick((None, 3, 17)) for _ in range(LAYERS)]
        self.scores = Scores(softcap=2.0) if self.draw.random() < 0.2 else Scores()
        self.sink = torch.linspace(-1.0, 1.0, heads).double() if self.draw.random() < 0.3 else None
        options = {"rewind": pick((0, 5)), "reserve": pick((0, 40)), "offload": pick((False, True))}
        self.cache = KVCache(cp, LAYERS, windows=self.windows, forward=pick(("q", "kv", "auto")), **options)
        self.rows = [self._new(0) for _ in range(pick((1, 1, 2, 3)))]

    def _new(self, count: int) -> Row:
        return [torch.randn(count, *each, generator=self.generator, dtype=torch.float64) for each in self.shapes]

    def turn(self) -> float:
        """Change the rows, or not, and add to them. Return the largest error."""
        if self.cache.lengths:
            self._change()
        lengths = [self.draw.choice((0, 1, 1, 2, 5, 11, 30)) for _ in self.rows]
        if self.draw.random() < 0.5 or not any(lengths):
            lengths = [max(1, lengths[0])] * len(lengths)
        starts, new = [len(row[0]) for row in self.rows], [self._new(count) for count in lengths]
        self.rows = [
            [torch.cat(both) for both in zip(*each, strict=True)] for each in zip(self.rows, new, strict=True)
        ]
        turn = self.cache.begin(lengths, replicated=self.draw.choice((None, None, True, False)))
        whole = [_padded(each) for each in zip(*new, strict=True)]
        error = 0.0
        for layer in range(LAYERS):
            q, k, v = (turn.take(x) for x in whole)
            out = self.cache.gather(self.cache.attend(layer, q, k, v, scores=self.scores, sink=self.sink))
            truth = [self._truth(layer, row)[start:] for row, start in zip(self.rows, starts, strict=True)]
            error = max(error, float((out - _padded(truth, 0.0)).abs().max()))
        return error

    def _change(self) -> None:
        kind, count = self.draw.random(), len(self.rows)
        kept = [self.draw.randrange(max(0, n - 6), n + 1) for n in self.cache.lengths]
        chosen = [self.draw.randrange(count) for _ in range(self.draw.choice((1, 2, 3)))]
        with suppress(ValueError):  # a window, or a shared prefix, may not allow it: then nothing changes
            if kind < 0.2:
                self.cache.truncate(kept)
                self.rows = [[x[:n] for x in row] for row, n in zip(self.rows, kept, strict=True)]
            elif kind < 0.5:
                chosen = chosen if kind < 0.35 else chosen[:1] * len(chosen)
                self.cache = self.cache.fork(chosen, shared=kind >= 0.35)
                self.rows = [list(self.rows[row]) for row in chosen]

    def _truth(self, layer: int, row: Row) -> Tensor:
        q, k, v = (x.unsqueeze(0) for x in row)
        left = self.windows[layer]
        problem = Problem(q, k, v, torch.zeros(*q.shape[:3], v.shape[3]), self.sink)
        return reference(problem, Causal() if left is None else SlidingWindow(left), self.scores).out[0]


def _padded(rows: Sequence[Tensor], value: float = torch.nan) -> Tensor:
    most = max(map(len, rows))
    return torch.stack([pad(row, (0, 0, 0, 0, 0, most - len(row)), value=value) for row in rows])


def test_drawn_conversations_are_exact() -> None:
    def on_rank(rank: int) -> list[float]:
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=2)
        errors = []
        for seed in range(CASES):
            talk = Talk(cp, seed)
            errors.append(max(talk.turn() for _ in range(5)))
            talk.cache.finish()
        cp.close()
        return errors

    for errors in run_ranks(on_rank, RANKS, timeout_s=240.0):
        assert max(errors) < 1e-13, f"seed {errors.index(max(errors))}"
