"""What a rank holds of a layer, and which tokens are whose."""

from __future__ import annotations

import random

import torch

from burst_plugin.inference.storage import RowStore
from burst_plugin.inference.turn import Turn
from tests.support.turns import held_by_rank


def test_rows_grow_shrink_and_are_copied_like_lists() -> None:
    draw, store = random.Random(3), RowStore(3, reserve=5)
    rows: list[list[float]] = [[], [], []]
    copied = 0
    for step in range(300):
        new = [[draw.random() for _ in range(draw.choice((0, 1, 1, 2, 30 * (step % 50 == 0))))] for _ in rows]
        keys = [torch.tensor(row).view(-1, 1, 1).expand(-1, 2, 3) for row in new]
        before = store.allocated_bytes
        store.append(keys, [k[..., :2] + 1 for k in keys])
        copied += before if store.allocated_bytes != before else 0
        rows = [row + more for row, more in zip(rows, new, strict=True)]
        if step % 40 == 39:
            ranges = [
                (draw.randrange(1 + len(row) // 3), len(row) - draw.randrange(1 + len(row) // 3)) for row in rows
            ]
            store.keep(ranges)
            rows = [row[start:stop] for row, (start, stop) in zip(rows, ranges, strict=True)]
        if step == 200:
            chosen = [2, 0, 2]
            store, rows = store.selected(chosen), [list(rows[row]) for row in chosen]
    assert store.lengths == [len(row) for row in rows]
    assert store.nbytes == sum(store.lengths) * 2 * (3 + 2) * 4
    for number, row in enumerate(rows):
        k, v = store.row(number)
        assert torch.equal(k[0, :, 1, 2], torch.tensor(row))
        assert torch.equal(v[0, :, 1, 1], torch.tensor(row) + 1)
    assert torch.equal(store.packed()[0][0, :, 0, 0], torch.tensor([x for row in rows for x in row]))
    assert store.allocated_bytes < 2 * store.nbytes
    assert copied < 12 * store.nbytes  # a few times, not once per token


def test_rows_that_are_alike_are_a_batch() -> None:
    store, x = RowStore(2), torch.arange(6.0).view(3, 1, 2)
    store.append([x, x], [x, x])
    k, v = store.batch()
    assert torch.equal(k, torch.stack([x, x]))
    assert k.data_ptr() == store.row(0)[0].data_ptr()
    grown = RowStore(2)
    grown.append([x[:1], x.repeat(20, 1, 1)], [x[:1], x.repeat(20, 1, 1)])
    grown.keep([(0, 1), (0, 1)])
    k, v = grown.batch()
    assert torch.equal(v, torch.stack([x[:1], x[:1]]))


def test_tokens_of_a_turn_are_dealt_evenly_and_all_of_them() -> None:
    draw = random.Random(5)
    for _ in range(200):
        ranks, rows = draw.randrange(1, 7), draw.randrange(1, 4)
        starts = tuple(draw.randrange(20) for _ in range(rows))
        stops = tuple(start + draw.randrange(20) for start in starts)
        turns = [Turn(0, starts, stops, rank, ranks, False) for rank in range(ranks)]
        for rank, turn in enumerate(turns):
            ends = held_by_rank(stops, rank, ranks) - held_by_rank(starts, rank, ranks)
            assert sum(turn.counts) == ends
            assert all(position % ranks == rank for position in turn.positions[turn.valid].tolist())
        seen = sorted(position for turn in turns for position in turn.positions[turn.valid].tolist())
        assert seen == sorted(p for start, stop in zip(starts, stops, strict=True) for p in range(start, stop))
