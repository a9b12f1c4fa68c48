"""Entries made of windows of tokens, against their definition: which there are, what sees them, attention to them.

`BURST_SOAK=3000 bash tests/run.sh tests/sparse` draws so many batches.
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin import Causal, ContextParallel, Keys, Mask, PerHeadGroup, PrefixTree, Tokens
from burst_plugin.sequence.layout import LAYOUTS, in_chunks, positions
from burst_plugin.sequence.mask import allowed
from burst_plugin.sparse import Entries, entry_masks
from burst_plugin.sparse.entry_masks import EntryMask, Stairs
from burst_plugin.sparse.windows import Windows
from tests.support.entries import DrawnEntries, drawn_entries
from tests.support.ranks import run_ranks

SOAK = int(os.environ.get("BURST_SOAK", "0")) or 60
RANKS = (1, 2, 3, 4, 7)


def _made(call: DrawnEntries, windows: Windows) -> list[dict[int, list[int]]]:
    """By row what ranks make: the tokens of each entry, those that exist, by slot."""
    found: list[dict[int, list[int]]] = [{} for _ in range(call.batch)]
    sequence = windows.tokens_and_entries
    assert sequence.holders is not None
    for rank, held in enumerate(call.shards):
        own = positions(held)
        places = positions(in_chunks(sequence.holders, sequence.bounds).runs(rank, call.ranks, sequence))
        assert torch.equal(places[: len(own)], own)
        sources = windows.sources(rank, call.batch, len(own))
        rows = torch.cat([own] * call.batch + windows.foreign(rank, call.batch))
        for row in range(call.batch):
            for number, slot in enumerate((places[len(own) :] - call.tokens.length).tolist()):
                if sources.last[row, number] >= 0:
                    tokens = rows[sources.rows[row, number][sources.exist[row, number]]].tolist()
                    assert tokens[-1] == own[sources.last[row, number]]
                    found[row][slot] = tokens
    return found


def _wrong_windows(call: DrawnEntries) -> bool:
    """Whether ranks make other entries than the definition has, or queries see others."""
    windows, length = (
        Windows(call.shards, call.tokens.length, call.mask, call.rate, call.overlaps),
        call.tokens.length,
    )
    made, queries, slots = _made(call, windows), torch.arange(length), torch.arange(length, length + windows.slots)
    lengths = length, length + windows.slots
    for row in range(call.batch):
        slots_of_row = sorted(made[row])
        expected = []
        for start, begin in call.windows(row):
            first = max(begin, start - call.rate) if call.overlaps else start
            expected.append(list(range(first, start + call.rate)))
        if [made[row][slot] for slot in slots_of_row] != expected:
            return True
        by_end = windows.slots_by_end()[row % len(windows.rows)]
        if [int(by_end[tokens[-1]]) for tokens in expected] != slots_of_row:
            return True
        seen = torch.zeros(length, windows.slots, dtype=torch.bool)
        seen[:, slots_of_row] = call.seen(row)
        exact, coarse = (
            allowed(windows.mask_with(call.of_tokens, exact=each).of_row(row), lengths, queries, slots)
            for each in (True, False)
        )
        if not torch.equal(exact, seen) or bool((seen & ~coarse).any()):
            return True
    return False


def test_ranks_make_the_entries_of_the_definition_and_queries_see_theirs() -> None:
    calls = {(number, ranks): drawn_entries(number, ranks) for number in range(SOAK) for ranks in RANKS}
    assert [which for which, call in calls.items() if _wrong_windows(call)] == []


def test_few_rectangles_stand_for_many_windows() -> None:
    stairs = (Stairs(3, 0, 5000, 20_005),)
    with mock.patch.object(entry_masks, "LEAF", 1):
        every = EntryMask(4, stairs).regions(20_005, 5000)
    exact, coarse = (EntryMask(4, stairs, each).regions(20_005, 5000) for each in (True, False))
    assert (len(every), len(exact), len(coarse)) == (10_000, 6024, 16)
    pairs = [sum((r.q_stop - r.q_start) * (r.k_stop - r.k_start) for r in each) for each in (every, exact, coarse)]
    assert pairs[0] == pairs[1] < pairs[2] < 1.2 * pairs[1]


def _tensors(call: DrawnEntries, generator: torch.Generator) -> list[Tensor]:
    """q, kv, x and gates of all tokens, bias, and sink."""
    batch, length, heads, dim = call.batch, call.tokens.length, 2, 4
    width = 2 * dim if call.overlaps else dim
    shapes = [(batch, length, heads, dim), (batch, length, 1, dim), *[(batch, length, width)] * 2]
    shapes += [(call.rate, width), (heads,)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _errors(cp: ContextParallel, number: int) -> list[float]:
    """How far a drawn call's output and gradients are from the definition."""
    call, generator = drawn_entries(number, cp.ranks), torch.Generator().manual_seed(number)
    whole, tokens = _tensors(call, generator), call.tokens
    starts = call.drawn_starts(generator) if number % 2 else None
    factor = torch.randn(whole[0].shape, generator=generator, dtype=torch.float64)
    local = [cp.shard(x, 1, tokens).detach().requires_grad_() for x in whole[:4]]
    shared = [x.clone().requires_grad_() for x in whole[4:]]
    entries = Entries.known(cp, call.rate, call.overlaps, mask=call.mask, tokens=tokens, batch=call.batch)
    made = entries.pooled(*local[2:], shared[0], tag=number)
    chosen = None if starts is None else cp.shard(starts, 1, tokens)
    both = torch.cat([local[1], made.unsqueeze(2)], 1)
    options: dict[str, Any] = {"starts": chosen, "window": call.window, "sink": shared[1], "tag": number}
    out = entries.attend(local[0], both, call.of_tokens, **options)
    (out * cp.shard(factor, 1, tokens)).sum().backward()
    for x in shared:
        x.grad = torch.zeros_like(x) if x.grad is None else x.grad
        dist.all_reduce(x.grad)
    truth = [x.clone().requires_grad_() for x in whole]
    expected = call.expected(*truth, starts)
    (expected * factor).sum().backward()
    found = [cp.unshard(each, 1, tokens) for each in (out.detach(), *(x.grad for x in local))]
    found += [x.grad for x in shared]
    aims = [expected.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in truth)]
    return [float((a - b).abs().max()) for a, b in zip(found, aims, strict=True)]


def _on_ranks(rank: int, numbers: range) -> list[tuple[int, list[float]]]:
    """The drawn calls whose results are wrong; chunks that leave out a rank are left out."""
    cp = ContextParallel(dist.group.WORLD)
    errors = [(number, _errors(cp, number)) for number in numbers]
    assert cp.traffic() == cp.expected_traffic()
    return [(number, found) for number, found in errors if not max(found) <= 1e-12]


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_to_tokens_and_entries_is_that_of_the_definition(ranks: int) -> None:
    assert run_ranks(_on_ranks, ranks, range(20)) == [[]] * ranks


@pytest.mark.parametrize(
    ("mask", "layout", "expected"),
    [
        (PrefixTree((-1, 0, 0), (8, 8, 8)), "zigzag", "not supported with a prefix tree"),
        (PerHeadGroup((Causal(), Causal())), "zigzag", "a mask for each group of heads; leave it out"),
        (
            Keys(((0, 4), (6, 24))),
            "zigzag",
            "padding ends at token 6 of batch row 0, in the middle of a document, and would be in its windows",
        ),
        (
            Causal() & Keys(((0, 4), (6, 24))),
            "zigzag",
            "padding ends at token 6 of batch row 0, in the middle of a document, and would be in its windows",
        ),
        (None, "striped", "layout='striped' scatters windows"),
    ],
)
def test_windows_that_are_not_known_are_refused(mask: Mask | None, layout: str, expected: str) -> None:
    shards = [LAYOUTS[layout].runs(rank, 2, Tokens(24)) for rank in range(2)]
    with pytest.raises(ValueError, match=expected):
        Windows(shards, 24, mask, 4, overlaps=False)
