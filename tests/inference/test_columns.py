"""Columns of a turn over four ranks: to storage and back, brought together, and with the tokens before them."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from burst_plugin import ContextParallel
from burst_plugin.inference import KVCache
from burst_plugin.inference.columns import Columns
from tests.support.ranks import run_ranks

CASES, RANKS = 30, 4


def drawn(cp: ContextParallel, seed: int) -> list[str]:
    """What is wrong in a drawn turn; the same draw on every rank."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, width = draw.choice((1, 2, 3)), draw.choice((1, 3, 6))
    cache = KVCache(cp, 0)
    cache.begin([draw.randint(1, 9) for _ in range(rows)])
    lengths = [draw.choice((1, 2, 5, 8, 11, 30)) for _ in range(rows)]
    turn = cache.begin(lengths, replicated=draw.choice((None, True, False)))
    columns = Columns(cp, turn)
    x = torch.randn(rows, max(lengths), 3, generator=generator, dtype=torch.float64)
    y = torch.randn(rows, max(lengths), generator=generator).bfloat16()
    real = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    size = draw.randint(1, max(lengths))
    ends = pad_sequence([row[max(0, n - size) : n] for row, n in zip(x, lengths, strict=True)], batch_first=True)
    at_ends = torch.arange(size) < torch.tensor(lengths).unsqueeze(1)
    mine, valid = columns.take(x), columns.valid
    stored, other = columns.to_storage([mine, columns.take(y)])
    wrong = []
    for name, found, expected, at in (
        ("to storage", stored, turn.take(x), turn.valid),
        ("to storage, of another type", other, turn.take(y), turn.valid),
        ("from storage", columns.from_storage(stored), mine, valid),
        ("padding", columns.from_storage(stored), torch.zeros_like(mine), ~valid),
        ("whole", columns.gather(mine), x, real),
        (f"last {size}", columns.gather(mine, last=size), ends, at_ends),
    ):
        if not torch.equal(found[at], expected[at]):
            wrong.append(f"{seed}: {name}")
    before = torch.randn(rows, width, 3, generator=generator, dtype=torch.float64) if draw.random() < 0.7 else None
    extended, last = columns.with_tokens_before(mine, width, before)
    known = torch.zeros(rows, width, 3, dtype=torch.float64) if before is None else before
    for row, length in enumerate(lengths):
        history = torch.cat([known[row], x[row, :length]])
        if not torch.equal(last[row], history[-width:]):
            wrong.append(f"{seed}: last tokens")
        for column in range(columns.count):
            at = int(columns.index[row, column])
            seen = extended[row, column : column + width + 1]
            if valid[row, column] and not torch.equal(seen, history[at : at + width + 1]):
                wrong.append(f"{seed}: tokens before column {column}")
    return wrong


def on_rank(rank: int) -> list[str]:
    cp = ContextParallel(dist.group.WORLD)
    return [wrong for seed in range(CASES) for wrong in drawn(cp, seed)]


def test_drawn_turns_reach_storage_and_come_back() -> None:
    assert run_ranks(on_rank, RANKS, timeout_s=60.0) == [[]] * RANKS


def test_one_rank_has_all_columns() -> None:
    assert [wrong for seed in range(CASES) for wrong in drawn(ContextParallel(), seed)] == []
