"""Cached selections on a ring against their definition: rows grow, are cut off and forked, and many scores tie."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from burst_plugin import ContextParallel
from burst_plugin.inference import KVCache
from burst_plugin.sparse import Indexed, keys_of_blocks, select_cached, select_cached_blocks
from tests.support.ranks import run_ranks

COUNT, BLOCK, BLOCKS = 5, 3, 2
LAYERS = 4  # keys and values; keys of an indexer; both for blocks
CUT, FORKED = 3, [1, 0, 1]
# New tokens of each row: many, few, one; unlike rows, some without any.
TURNS = ((11, 11), (1, 1), (14, 3), (2, 0), (1, 1), (3, 3, 20), (1, 1, 1))
SHAPES = ((4, 6), (2, 6), (2, 3), (3, 4), (4,), (3,))  # of a token's q, k, v, and of its queries, key and weights

Row = list[Tensor]  # of all its tokens, in the order of SHAPES


def _new(count: int, dtype: torch.dtype, generator: torch.Generator) -> Row:
    """Draw a row's tokens; numbers of the indexer are small and whole, so that scores are equal and exact."""
    floats = [torch.randn(count, *shape, generator=generator, dtype=dtype) for shape in SHAPES[:3]]
    whole = [torch.randint(-1, 2, (count, *shape), generator=generator).to(dtype) for shape in SHAPES[3:]]
    return floats + whole


def _listed(best: Sequence[int], count: int) -> list[int]:
    return [*best, *[-1] * (count - len(best))]


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one query [heads, dim] to keys and values [keys, heads, dim]."""
    p = (torch.einsum("hd,khd->hk", q, k) * q.shape[1] ** -0.5).softmax(1)
    return torch.einsum("hk,khd->hd", p, v)


def _truth_of_blocks(row: Row) -> tuple[Tensor, Tensor]:
    """Return the starts of the blocks that each token selects [S, 2 * BLOCKS], and its attention [S, heads, dim]."""
    q, k, v, index_q, index_k, _ = (x.double() for x in row)
    scores = torch.einsum("thd,sd->ths", index_q[:, :2], index_k).tolist()
    selected, out = [], []
    for query, by_head in enumerate(scores):
        starts, outs = [], []
        for head, of_keys in enumerate(by_head):
            keys_of = {at: range(at, min(at + BLOCK, query + 1)) for at in range(0, query + 1, BLOCK)}
            best_of = {at: max(of_keys[key] for key in keys) for at, keys in keys_of.items()}
            best_of[query - query % BLOCK] = math.inf
            best = sorted(best_of, key=lambda at, best_of=best_of: (-best_of[at], at))[:BLOCKS]
            starts += _listed(best, BLOCKS)
            keys = [key for at in best for key in keys_of[at]]
            outs.append(_attention(q[query, 2 * head :][:2], *(x[keys, head : head + 1] for x in (k, v))))
        selected.append(torch.tensor(starts))
        out.append(torch.cat(outs))
    return torch.stack(selected), torch.stack(out)


def _truth(row: Row) -> tuple[Tensor, Tensor]:
    """Return what each token of a row selects [S, COUNT], and its attention [S, heads, dim]."""
    q, k, v, index_q, index_k, weights = (x.double() for x in row)
    scores = (torch.einsum("thd,sd->ths", index_q, index_k).relu() * weights.unsqueeze(2)).sum(1) / 2
    selected, out = [], []
    for query, of_keys in enumerate(scores.tolist()):
        best = sorted(range(query + 1), key=lambda key: (-of_keys[key], key))[:COUNT]
        selected.append(torch.tensor(_listed(best, COUNT)))
        out.append(_attention(q[query], *(x[best].repeat_interleave(2, 1) for x in (k, v))))
    return torch.stack(selected), torch.stack(out)


def _talk(cp: ContextParallel, dtype: torch.dtype, offload: bool) -> tuple[int, float]:
    """Return how many lists of keys are wrong, and the largest error of attention."""
    cache, generator = KVCache(cp, LAYERS, offload=offload), torch.Generator().manual_seed(5)
    rows, wrong, error = [_new(0, dtype, generator) for _ in TURNS[0]], 0, 0.0
    for number, lengths in enumerate(TURNS):
        if number == 4:
            kept = [n - CUT for n in cache.lengths]
            cache.truncate(kept)
            rows = [[x[:n] for x in row] for row, n in zip(rows, kept, strict=True)]
        elif number == 5:
            cache, rows = cache.fork(FORKED), [rows[at] for at in FORKED]
        turn = cache.begin(lengths)
        new = [_new(count, dtype, generator) for count in lengths]
        rows = [[torch.cat(both) for both in zip(*each, strict=True)] for each in zip(rows, new, strict=True)]
        q, k, v, *index = (turn.take(pad_sequence(list(x), True)) for x in zip(*new, strict=True))
        keys = select_cached(cache, 1, Indexed(*index), COUNT)
        of_heads = Indexed(index[0][:, :, :2], index[1])
        starts = select_cached_blocks(cache, 3, of_heads, BLOCK, BLOCKS)
        of_blocks = keys_of_blocks(starts, BLOCK, max(cache.lengths))
        starts = pad(starts, (0, BLOCKS - starts.shape[3]), value=-1).transpose(1, 2).flatten(2)
        selected = cache.gather(pad(keys, (0, COUNT - keys.shape[2]), value=-1)), cache.gather(starts)
        outs = [cache.gather(cache.attend(at, q, k, v, selection=x)) for at, x in ((0, keys), (2, of_blocks))]
        for lists, out, of_row in zip(selected, outs, (_truth, _truth_of_blocks), strict=True):
            for row, count in enumerate(lengths):
                if count:
                    expected, truth = (x[-count:] for x in of_row(rows[row]))
                    wrong += int((expected != lists[row, :count]).any(1).sum())
                    error = max(error, float((out[row, :count] - truth).abs().max()))
    cache.finish()
    return wrong, error


def _on_ring(rank: int) -> list[tuple[int, float]]:
    cp = ContextParallel(dist.group.WORLD)
    found = [_talk(cp, torch.float64, False), _talk(cp, torch.float32, True)]
    with torch.autocast("cpu", torch.bfloat16):
        found.append(_talk(cp, torch.float32, False))
    cp.close()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_lists_and_attention_equal_the_definition(ranks: int) -> None:
    for in_float64, in_float32, under_autocast in run_ranks(_on_ring, ranks, timeout_s=120.0):
        assert in_float64[0] == in_float32[0] == under_autocast[0] == 0
        assert in_float64[1] <= 1e-12
        assert in_float32[1] <= 1e-5


def test_what_does_not_fit_is_refused() -> None:
    cache, generator = KVCache(ContextParallel(), 2, windows=[None, 3]), torch.Generator().manual_seed(5)
    cache.begin([4])
    q, k, v, *index = (x.unsqueeze(0) for x in _new(4, torch.float32, generator))
    given = Indexed(*index)
    with pytest.raises(ValueError, match="layer 1 has a window of 3, in which keys cannot be selected"):
        select_cached(cache, 1, given, COUNT)
    with pytest.raises(ValueError, match=r"layer 0 got .*, but holds values \[1, 4, D\] of a turn's tokens"):
        select_cached(cache, 0, Indexed(*(x[:, :3] for x in index)), COUNT)
    with pytest.raises(ValueError, match="top_k=0"):
        select_cached(cache, 0, given, 0)
    selected = select_cached(cache, 0, given, COUNT)
    with pytest.raises(ValueError, match="layer 0 has attended in this turn already"):
        select_cached(cache, 0, given, COUNT)
    with pytest.raises(ValueError, match="layer 1 has a window of 3"):
        cache.attend(1, q, k, v, selection=selected)
