"""The definition of attention to tokens and to entries made of windows, in float64; and calls drawn at random."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from burst_plugin import Causal, Documents, Keys, Mask, PerRow, SlidingWindow, Tokens
from burst_plugin.sequence.layout import LAYOUTS, Run, in_chunks
from burst_plugin.sequence.mask import allowed
from burst_plugin.sequence.masks import document_starts


@dataclass
class DrawnEntries:
    """A batch of documents and padding, cut to ranks, and the windows that are asked for."""

    tokens: Tokens
    ranks: int
    batch: int
    mask: Mask | None
    rate: int
    overlaps: bool
    window: int

    @property
    def shards(self) -> list[tuple[Run, ...]]:
        tokens = self.tokens
        layout = in_chunks(tokens.holders, tokens.bounds) if tokens.holders else LAYOUTS[tokens.layout or "zigzag"]
        return [layout.runs(rank, self.ranks, tokens) for rank in range(self.ranks)]

    def documents(self, row: int) -> list[int]:
        """The bounds of the documents of a row."""
        starts = set() if self.mask is None else document_starts(self.mask.of_row(row))
        return sorted({0, self.tokens.length} | starts)

    def windows(self, row: int) -> list[tuple[int, int]]:
        """The windows of a row, in order: their first tokens, and the begins of their documents."""
        bounds = pairwise(self.documents(row))
        return [(at, a) for a, b in bounds for at in range(a, b - self.rate + 1, self.rate)]

    @property
    def of_tokens(self) -> Mask:
        own = SlidingWindow(self.window - 1)
        return own if self.mask is None else own & self.mask

    def seen(self, row: int) -> Tensor:
        """Which entries the queries of a row attend to, bool [S, windows]."""
        at = torch.arange(self.tokens.length)
        begin_of = torch.tensor(self.documents(row))
        begins = begin_of[torch.searchsorted(begin_of, at, right=True) - 1]
        columns = [(at >= start + self.rate - 1) & (begins == begin) for start, begin in self.windows(row)]
        return torch.stack(columns, 1) if columns else torch.zeros(len(at), 0, dtype=torch.bool)

    def expected(
        self, q: Tensor, kv: Tensor, x: Tensor, gate: Tensor, bias: Tensor, sink: Tensor, starts: Tensor | None
    ) -> Tensor:
        """The definition, [B, S, H, D]; one softmax over tokens, entries and the sink."""
        outs, length, dim = [], self.tokens.length, q.shape[3]
        at = torch.arange(length)
        for row in range(self.batch):
            may = torch.cat([allowed(self.of_tokens.of_row(row), (length, length), at, at), self.seen(row)], 1)
            made = [self._entry(x[row], gate[row], bias, dim, *window) for window in self.windows(row)]
            if starts is not None:
                chosen = [(starts[row] == start).any(-1) for start, _ in self.windows(row)]
                may[:, length:] &= torch.stack(chosen, 1) if chosen else may[:, length:]
            keys = torch.cat([kv[row, :, 0], *(each[None] for each in made)])
            scores = torch.einsum("qhd,kd->hqk", q[row], keys) * dim**-0.5
            scores = scores.masked_fill(~may, -torch.inf)
            scores = torch.cat([scores, sink[:, None, None].expand(-1, length, 1)], -1)
            outs.append(torch.einsum("hqk,kd->qhd", scores.softmax(-1)[..., :-1], keys))
        return torch.stack(outs)

    def _entry(self, x: Tensor, gate: Tensor, bias: Tensor, dim: int, start: int, begin: int) -> Tensor:
        """The entry of the window at `start`, of a document that begins at `begin`."""
        inside, later = slice(start, start + self.rate), slice(dim, None) if self.overlaps else slice(None)
        numbers, gates = x[inside, later], gate[inside, later] + bias[:, later]
        if self.overlaps and start > begin:
            before = slice(start - self.rate, start)
            numbers = torch.cat([x[before, :dim], numbers])
            gates = torch.cat([gate[before, :dim] + bias[:, :dim], gates])
        return (numbers * gates.softmax(0)).sum(0)

    def drawn_starts(self, generator: torch.Generator) -> Tensor:
        """Windows that queries select among those that they see, int32 [B, S, 3], -1 for none."""
        found = torch.full((self.batch, self.tokens.length, 3), -1, dtype=torch.int32)
        for row in range(self.batch):
            windows, seen = self.windows(row), self.seen(row)
            for query in range(self.tokens.length):
                numbers = torch.nonzero(seen[query]).flatten()
                for place, number in enumerate(
                    numbers[torch.randperm(len(numbers), generator=generator)[:3]].tolist()
                ):
                    found[row, query, place] = windows[number][0]
        return found


def drawn_entries(number: int, ranks: int) -> DrawnEntries:
    """Draw a batch; documents may be shorter than a window, and a window on as many ranks as it has tokens."""
    draws = random.Random(number)
    length, batch = draws.choice([7, 24, 33, 48, 70]), draws.choice([1, 1, 2, 3])
    kind = draws.choice(["none", "causal", "documents", "padded", "rows", "padded documents"])
    mask: Mask | None = None
    if kind == "causal":
        mask = Causal()
    elif kind == "documents":
        mask = _documents(draws, length)
    elif kind == "padded":
        mask = PerRow(tuple(Keys(((draws.randrange(length), length),)) for _ in range(batch)))
    elif kind == "rows":
        mask = PerRow(tuple(draws.choice([Causal(), _documents(draws, length)]) for _ in range(batch)))
    elif kind == "padded documents":
        documents = _documents(draws, length)
        spans = [(a, draws.randrange(a + 1, b + 1)) for a, b in pairwise(documents.cu_seqlens)]
        mask = documents & Keys(tuple(spans))
    tokens = Tokens(length, layout=draws.choice(["zigzag", "contiguous"]))
    if draws.random() < 0.4:
        holders = [*range(ranks), *(draws.randrange(ranks) for _ in range(draws.randrange(ranks + 3)))]
        draws.shuffle(holders)
        cuts = sorted(draws.randrange(length + 1) for _ in holders[1:])
        tokens = Tokens(length, holders=tuple(holders), bounds=draws.choice([None, (0, *cuts, length)]))
    return DrawnEntries(
        tokens, ranks, batch, mask, draws.choice([1, 2, 3, 4, 8]), draws.random() < 0.5, draws.choice([1, 3, 6])
    )


def _documents(draws: random.Random, length: int) -> Documents:
    cuts = {draws.randrange(1, length) for _ in range(draws.randrange(1, 5))}
    return Documents((0, *sorted(cuts), length))
