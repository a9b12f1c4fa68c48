"""The definition of a selection of keys by scores, in float64; and calls drawn at random to compare with it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from burst_plugin import (
    Causal,
    ContextParallel,
    Documents,
    Full,
    Mask,
    PerRow,
    PrefixTree,
    SlidingWindow,
    Strategy,
    Tokens,
    Topology,
    VirtualRing,
    key_padding,
)
from burst_plugin.sequence.mask import allowed
from burst_plugin.sequence.masks import document_starts
from burst_plugin.sparse import keys_of_pools, pool, select_blocks, select_keys, select_pools

MANY = [(1, 1), (1, 2), (1, 3), (2, 2), (1, 5), (2, 3), (1, 7), (2, 4)]


def scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, scale: float | None) -> torch.Tensor:
    """All scores [B, S, S], in float64."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    products = torch.einsum("bthd,bsd->bths", q.double(), k.double()) * factor
    return torch.einsum("bths,bth->bts", products.relu(), weights.double())


def selection(found: torch.Tensor, mask: Mask, top_k: int) -> torch.Tensor:
    """The definition: of scores [B, S, S] the best of each query, int32 [B, S, min(top_k, S)], -1 where none is."""
    batch, length, _ = found.shape
    at = torch.arange(length)
    may = allowed(mask, (length, length), at, at).expand(batch, -1, -1)
    result = torch.full((batch, length, min(top_k, length)), -1, dtype=torch.int32)
    for row in range(batch):
        for query in range(length):
            keys = torch.nonzero(may[row, query]).flatten().tolist()
            keys.sort(key=lambda key: (-float(found[row, query, key]), key))
            best = keys[:top_k]
            result[row, query, : len(best)] = torch.tensor(best, dtype=torch.int32)
    return result


@dataclass
class DrawnSelection:
    """A call on all ranks of a virtual ring."""

    ring: VirtualRing
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    mask: Mask
    tokens: Tokens | None
    top_k: int
    scale: float | None

    def expected(self) -> torch.Tensor:
        return selection(scores(*self.tensors, self.scale), self.mask, self.top_k)

    def found(self) -> torch.Tensor:
        return select_keys(*self.tensors, self.top_k, self.ring, mask=self.mask, tokens=self.tokens, scale=self.scale)


def drawn_selection(number: int) -> DrawnSelection:
    """Draw a call; in two of three all scores are small whole numbers, so that most of them are ties."""
    draws, generator = random.Random(number), torch.Generator().manual_seed(number)
    topology = Topology(*draws.choice(MANY))
    length, batch = draws.choice([1, 7, 16, 33, 48, 70]), draws.choice([1, 1, 2])
    heads, size = draws.choice([1, 2, 3, 4]), draws.choice([1, 4, 8])
    shapes = (batch, length, heads, size), (batch, length, size), (batch, length, heads)
    scale: float | None = None
    if draws.random() < 0.67:
        most, scale = draws.choice([1, 2, 3]), draws.choice([1.0, 0.5, 2.0])
        dtype = draws.choice([torch.float32, torch.float64, torch.bfloat16])
        tensors = [torch.randint(-most, most + 1, each, generator=generator).to(dtype) for each in shapes]
    else:
        tensors = [torch.randn(each, generator=generator, dtype=torch.float64) for each in shapes]
    mask = _mask(draws, length, batch)
    ring, tokens = _ring(draws, topology, length, mask, number)
    top_k = draws.choice([1, 2, 5, length, length + 3, draws.randrange(1, length + 1)])
    return DrawnSelection(ring, (tensors[0], tensors[1], tensors[2]), mask, tokens, top_k, scale)


def calls_on_ranks(drawn: Callable[[int], Any], numbers: range) -> Iterator[tuple[int, Any, ContextParallel, Tokens]]:
    """Draw calls for real ranks, each with its number, its ring and its tokens; those in chunks of more are left out.

    After each of them the ring's bytes have to be those that were expected.
    """
    cps: dict[str, ContextParallel] = {}
    for number in numbers:
        call = drawn(number)
        if call.tokens is not None and call.tokens.holders and len(set(call.tokens.holders)) != dist.get_world_size():
            continue
        layout = call.ring.rank_states[0].strategy.layout
        if layout not in cps:
            cps[layout] = ContextParallel(dist.group.WORLD, layout=layout)
        cp = cps[layout]
        yield number, call, cp, call.tokens or Tokens(call.tensors[0].shape[1])
        assert cp.traffic() == cp.expected_traffic()


def _ring(
    draws: random.Random, topology: Topology, length: int, mask: Mask, number: int
) -> tuple[VirtualRing, Tokens | None]:
    layout = draws.choice(["zigzag", "contiguous", "striped", "auto"])
    ring, tokens = VirtualRing(topology, Strategy(layout=layout), seed=number), None
    if layout == "auto":
        ranks = topology.ranks
        chunks = [*range(ranks), *(draws.randrange(ranks) for _ in range(draws.randrange(ranks + 1)))]
        draws.shuffle(chunks)
        cuts = sorted(draws.randrange(length + 1) for _ in chunks[1:])
        tokens = Tokens(length, holders=tuple(chunks), bounds=draws.choice([None, (0, *cuts, length)]))
    elif draws.random() < 0.2 and mask.documents is not None:
        tokens = Tokens(length, cu_seqlens=mask.documents)
    return ring, tokens


@dataclass
class DrawnBlocks:
    """A selection of blocks on all ranks of a virtual ring."""

    ring: VirtualRing
    tensors: tuple[torch.Tensor, torch.Tensor]
    mask: Mask
    tokens: Tokens | None
    numbers: tuple[int, int, int]  # keys of a block, blocks to select, and forced

    def expected(self) -> torch.Tensor:
        """The definition, in float64: the starts of the best blocks of each query and head, int32 [B, H, S, n]."""
        (q, k), (block, top_k, forced) = self.tensors, self.numbers
        scores = torch.einsum("bthd,bsd->bhts", q.double(), k.double())
        batch, heads, length, _ = scores.shape
        at = torch.arange(length)
        may = allowed(self.mask, (length, length), at, at).expand(batch, -1, -1)
        result = torch.full((batch, heads, length, min(top_k, -(-length // block))), -1, dtype=torch.int32)
        for row in range(batch):
            documents = sorted({0} | document_starts(self.mask.of_row(row)))
            starts = [a for a, b in pairwise([*documents, length]) for a in range(a, b, block)]
            blocks = list(pairwise([*starts, length]))
            for query in range(length):
                document = max(start for start in documents if start <= query)
                first = max(document, query - (query - document) % block - (forced - 1) * block)
                for head in range(heads):
                    found = []
                    for start, stop in blocks:
                        keys = [key for key in range(start, stop) if may[row, query, key]]
                        if keys:
                            best = max(float(scores[row, head, query, key]) for key in keys)
                            found.append((-math.inf if forced and first <= start <= query else -best, start))
                    best_blocks = [start for _, start in sorted(found)][:top_k]
                    result[row, head, query, : len(best_blocks)] = torch.tensor(best_blocks, dtype=torch.int32)
        return result

    def found(self) -> torch.Tensor:
        block, top_k, forced = self.numbers
        options = {"forced": forced, "mask": self.mask, "tokens": self.tokens}
        return select_blocks(*self.tensors, block, top_k, self.ring, **options)  # type: ignore[arg-type]


def drawn_blocks(number: int) -> DrawnBlocks:
    """Draw a selection of blocks; in two of three all scores are small whole numbers, so that most are ties."""
    draws, generator = random.Random(number), torch.Generator().manual_seed(number)
    topology = Topology(*draws.choice(MANY))
    length, batch = draws.choice([1, 7, 17, 33, 48, 50]), draws.choice([1, 1, 2])
    heads, size = draws.choice([1, 2]), draws.choice([1, 4, 8])
    shapes = (batch, length, heads, size), (batch, length, size)
    if draws.random() < 0.67:
        most, dtype = draws.choice([1, 2, 3]), draws.choice([torch.float32, torch.float64, torch.bfloat16])
        q, k = (torch.randint(-most, most + 1, each, generator=generator).to(dtype) for each in shapes)
    else:
        q, k = (torch.randn(each, generator=generator, dtype=torch.float64) for each in shapes)
    mask = _mask(draws, length, batch, of_blocks=True)
    ring, tokens = _ring(draws, topology, length, mask, number)
    numbers = draws.choice([1, 3, 4, 5, 8, 11]), draws.choice([1, 2, 3, 4, length]), draws.choice([0, 1, 1, 1, 2])
    return DrawnBlocks(ring, (q, k), mask, tokens, numbers)


@dataclass
class DrawnPools:
    """A selection of pools on all ranks of a virtual ring."""

    ring: VirtualRing
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # queries, keys, gates, weights
    mask: Mask
    tokens: Tokens | None
    numbers: tuple[int, int]  # tokens of a pool, and pools to select
    pooled: Callable[[list[torch.Tensor]], torch.Tensor]

    def pools(self, row: int) -> list[int]:
        """The definition: where the whole pools of a row start."""
        length, size = self.tensors[0].shape[1], self.numbers[0]
        documents = sorted({0, length} | document_starts(self.mask.of_row(row)))
        return [start for a, b in pairwise(documents) for start in range(a, b - size + 1, size)]

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The definition, in float64: the starts of the best pools of each query, int32 [B, S, n]; listed keys."""
        (q, k, gate, weights), (size, top_k) = self.tensors, self.numbers
        batch, length, at = len(q), q.shape[1], torch.arange(q.shape[1])
        may = allowed(self.mask, (length, length), at, at).expand(batch, -1, -1)
        result = torch.full((batch, length, min(top_k, -(-length // size))), -1, dtype=torch.int32)
        listed = torch.zeros(batch, length, length, dtype=torch.bool)
        for row in range(batch):
            starts = self.pools(row)
            keys = [self.pooled([x[row : row + 1, a : a + size].double() for x in (k, gate)])[0] for a in starts]
            found = scores(q[[row]], torch.stack(keys)[None], weights[[row]], None)[0] if keys else None
            documents = sorted({0} | document_starts(self.mask.of_row(row)))
            for query in range(length):
                seen = [n for n, a in enumerate(starts) if may[row, query, a + size - 1]]
                seen.sort(key=lambda n: (-float(found[query, n]), n))  # type: ignore[index]
                for place, n in enumerate(seen[:top_k]):
                    result[row, query, place] = starts[n]
                    listed[row, query, starts[n] : starts[n] + size] = True
                document = max(start for start in documents if start <= query)
                listed[row, query, query + 1 - (query + 1 - document) % size : query + 1] = True
        return result, listed

    def options(self) -> dict[str, Any]:
        return {"mask": self.mask, "tokens": self.tokens}

    def found(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the plugin selects; and which keys it lists, bool [B, S, S]."""
        (q, k, gate, weights), (size, top_k) = self.tensors, self.numbers
        keys = pool(self.pooled, [k, gate], size, self.ring, **self.options())
        starts = select_pools(q, keys, weights, size, top_k, self.ring, **self.options())
        return starts, listed_keys(keys_of_pools(starts, size, self.ring, **self.options()), q.shape[1])


def listed_keys(positions: torch.Tensor, length: int) -> torch.Tensor:
    """Positions of keys [B, S, n], -1 for none, as bool [B, S, length]."""
    places = torch.where(positions < 0, length, positions.long())
    return torch.zeros(*positions.shape[:2], length + 1, dtype=torch.bool).scatter_(2, places, True)[..., :length]


def gated_mean(both: list[torch.Tensor]) -> torch.Tensor:
    """The mean of keys [pools, size, D] by the softmax of gates, each number by itself."""
    keys, gates = both
    return (keys * gates.softmax(1)).sum(1)


def drawn_pools(number: int) -> DrawnPools:
    """Draw a selection of pools; in two of three all scores are small whole numbers, so that most are ties."""
    draws, generator = random.Random(number), torch.Generator().manual_seed(number)
    topology = Topology(*draws.choice(MANY))
    length, batch = draws.choice([1, 7, 17, 33, 48, 50]), draws.choice([1, 1, 2])
    heads, size = draws.choice([1, 2, 3]), draws.choice([1, 4, 16])
    shapes = (batch, length, heads, size), *[(batch, length, size)] * 2, (batch, length, heads)
    pooled: Any = gated_mean
    if draws.random() < 0.67:
        most, dtype = draws.choice([1, 2]), draws.choice([torch.float32, torch.float64, torch.bfloat16])
        tensors = [torch.randint(-most, most + 1, each, generator=generator).to(dtype) for each in shapes]
        pooled = _whole_sum
    else:
        tensors = [torch.randn(each, generator=generator, dtype=torch.float64) for each in shapes]
    mask = _mask(draws, length, batch, of_blocks=True)
    ring, tokens = _ring(draws, topology, length, mask, number)
    numbers = draws.choice([1, 2, 3, 4, 5, 8, 11]), draws.choice([1, 2, 3, length])
    q, k, gate, weights = tensors
    return DrawnPools(ring, (q, k, gate, weights), mask, tokens, numbers, pooled)


def _whole_sum(both: list[torch.Tensor]) -> torch.Tensor:
    """Sums of whole numbers, in which the place of a token counts; exact in every type."""
    keys, gates = both
    count = keys.shape[1]
    return (keys * (1 + torch.arange(count, dtype=keys.dtype) % 2).unsqueeze(1) + gates).sum(1)


def _mask(draws: random.Random, length: int, batch: int, of_blocks: bool = False) -> Mask:
    kinds = ["causal", "causal", "documents", "documents", "window", "full", "tree", "tokens"]

    def one() -> Mask:
        kind = draws.choice(kinds[:5] if of_blocks else kinds)
        if kind == "documents":
            cuts = sorted(draws.randrange(length + 1) for _ in range(draws.randrange(6)))
            return Causal() & Documents((0, *cuts, length))
        if kind == "tokens":
            return Causal() & Documents(tuple(range(length + 1)))
        if kind == "window":
            return SlidingWindow(draws.randrange(length), 0 if of_blocks else draws.choice([0, 0, 2]))
        if kind == "tree" and length >= 7:
            cuts = sorted(draws.randrange(length + 1) for _ in range(3))
            sizes = [b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)]
            return PrefixTree((-1, 0, 1, 0), tuple(sizes))
        return Full() if kind == "full" else Causal()

    kind = draws.choice(["one", "one", "rows", "padded"])
    if kind == "rows":
        return PerRow(tuple(one() for _ in range(batch)))
    if kind == "padded":  # on the left, perhaps all of a row
        starts = torch.tensor([draws.randrange(length + 1) for _ in range(batch)])
        return Causal() & key_padding(torch.arange(length) >= starts[:, None])
    return one()
