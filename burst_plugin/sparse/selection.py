"""Keys selected by score over the whole sequence, as by the indexer of sparse attention (DeepSeek V3.2).

    selected = sparse.select_keys(index_q, index_k, weights, 2048, cp, mask=Causal())

Keys of the indexer go around the ring, one block per step, or, under a mask that leaves little, their rows to ranks
that need them; a rank holds the block that it scores, and the next one on its way. Scores exist a tile at a time
(`index_scores`), and of each query the best keys so far (`best_keys`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from burst_plugin.activations.kept_attention import next_kept_tensors, unseen_by_selective_checkpoints
from burst_plugin.checks import number, shown, whole_number
from burst_plugin.comm.call_identity import CallId
from burst_plugin.context import ContextParallel
from burst_plugin.recurrent.messages import Messages
from burst_plugin.recurrent.passes import OfOneRank, OfVirtualRing, Passes
from burst_plugin.ring.graph_breaks import between_graphs
from burst_plugin.ring.rank_state import RankState
from burst_plugin.ring.request import as_tokens, check_mask
from burst_plugin.ring.routes import Attending, Pairs
from burst_plugin.sequence.layout import Run, Tokens, cut_runs, positions, token_count
from burst_plugin.sequence.masks import Causal, Mask
from burst_plugin.sequence.required_rows import RequiredRows
from burst_plugin.sequence.tiles import Tile
from burst_plugin.sparse.best_keys import BestKeys, best_keys
from burst_plugin.sparse.index_scores import ScoreTiles
from burst_plugin.sparse.tiled_masks import ChunkMask, by_chunk
from burst_plugin.types import Rows, row_count
from burst_plugin.virtual import VirtualRing

_KNOWN = 8  # sequences and masks of a ring whose blocks are kept


@between_graphs
def select_keys(
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    top_k: int,
    cp: ContextParallel | VirtualRing,
    *,
    mask: Mask = Causal(),
    tokens: Tokens | None = None,
    scale: float | None = None,
    tag: object = None,
) -> Tensor:
    """Return the keys of highest score for each query of this rank, of the keys of all ranks; collective.

    The score of query t on key s is `sum over h of weights[t, h] * relu(scale * index_q[t, h] . index_k[s])`, in
    float32, or in float64 for float64. Of equal scores the key at the lower position comes first. So the result is
    the same, to the bit, on any number of ranks and in any layout.

    Args:
        index_q: [B, S_local, H, D], floating point.
        index_k: [B, S_local, D], of the same tokens and type.
        weights: [B, S_local, H], of any floating point type.
        top_k: how many keys a query selects, 1 or more.
        cp: the context-parallel group; with a `VirtualRing` tensors are whole sequences, the result included.
        mask: which keys a query may select; one for all heads.
        tokens: the sequence that rows are taken from, as for `burst_attention`.
        scale: above 0; `D ** -0.5` if None.
        tag: a name for this call that is the same on every rank.

    Returns:
        Positions in the whole sequence, int32 [B, S_local, min(top_k, S)], the highest score first; -1 in the places
        of a query that may select fewer keys. Without gradient.

    Raises:
        ValueError: on every rank, before data moves, for shapes, types or options that do not fit, here or between
            ranks.
    """
    return selected(
        Indexed(index_q, index_k, weights), SelectionOptions(RankSelection, top_k, mask, tokens, scale), cp, tag
    )


def selected(given: Indexed, asked: SelectionOptions, cp: ContextParallel | VirtualRing, tag: object) -> Tensor:
    """Select keys, blocks or pools for the queries of this process, after ranks have agreed on the call; collective.

    given: the indexer's tensors. asked: the options. cp, tag: as for `select_keys`.

    Returns the positions of selected keys, or the starts of blocks or pools, int32 [*queries, count], -1 for none;
    queries are [B, S_local], or [B, S_local, H] for blocks. Raises ValueError on every rank for what does not fit.
    """
    if not isinstance(cp, ContextParallel | VirtualRing):
        raise ValueError(f"cp={shown(cp)} is not valid; give a ContextParallel, or a VirtualRing")
    passes: Passes = OfOneRank(cp) if isinstance(cp, ContextParallel) else OfVirtualRing(cp)

    def prepare() -> SelectionCall:
        return _prepared(passes, cp.plans, given, asked)

    selection, call = passes.agree(prepare, SelectionCall.signature, tag)
    kept = next_kept_tensors(passes.states[0].strategy, asked.kind.what)
    if kept is not None and kept.found is not None:
        found: Tensor = kept.found
        return found
    with torch.no_grad(), unseen_by_selective_checkpoints():
        result = _run(passes, selection, call, given)
    if kept is not None:
        kept.found = result
    return result


@dataclass(frozen=True, eq=False)
class Indexed:
    """The tensors that an indexer computes from tokens: queries [B, S, H, D], keys [B, S, D], weights [B, S, H].

    Selections by products alone have no weights.
    """

    q: Tensor
    k: Tensor
    weights: Tensor | None = None

    def check(self) -> None:
        """Raise ValueError for tensors that do not fit each other in shape, type or device."""
        for name, x, dims in (("index_q", self.q, 4), ("index_k", self.k, 3), ("weights", self.weights, 3)):
            if x is None and name == "weights":
                continue
            if not isinstance(x, Tensor) or x.dim() != dims or not x.is_floating_point():
                what = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else shown(x)
                raise ValueError(f"{name} is {what}; give a floating point tensor of {dims} dimensions")
        q, k, weights = self.q, self.k, self.q[..., 0] if self.weights is None else self.weights
        if k.shape != (*q.shape[:2], q.shape[3]) or weights.shape != q.shape[:3]:
            raise ValueError(
                f"index_q {list(q.shape)}, index_k {list(k.shape)} and weights {list(weights.shape)} do not fit; "
                "give [B, S, H, D], [B, S, D] and, if any, [B, S, H]"
            )
        if min(q.shape[0], *q.shape[2:]) == 0:
            raise ValueError(f"index_q {list(q.shape)} has a dimension of 0; give 1 or more rows, heads and numbers")
        if q.dtype != k.dtype or len({q.device, k.device, weights.device}) > 1:
            raise ValueError(
                f"index_q is {q.dtype} on {q.device}, index_k {k.dtype} on {k.device}, weights are on "
                f"{weights.device}; give both one type, and all one device"
            )


class SelectionOptions(NamedTuple):
    """The options of a call that selects keys, blocks or pools, as the caller gave them, not checked yet.

    kind: the class that selects: `RankSelection` for keys, or its subclass for blocks or pools.
    top_k, mask, tokens, scale: as for `select_keys`.
    block: how many tokens a unit of selection has: 1 for keys, else the size of a block or pool.
    forced: how many blocks, the query's own and blocks before it, are selected in any case.
    """

    kind: type[RankSelection]
    top_k: object
    mask: object
    tokens: object
    scale: object = None
    block: int = 1
    forced: int = 0


class _Work(NamedTuple):
    """What a rank computes with a block: the tiles of each chunk of its queries, and the positions of the keys."""

    chunks: Mapping[int, Sequence[Tile]]
    places: Tensor


class KeyBlock(NamedTuple):
    """The keys [n, D] that rank `owner` has sent for a batch row.

    places: the positions in the whole sequence of the rows that the owner sends from, int64.
    """

    owner: int
    keys: Tensor
    places: Tensor


@dataclass(frozen=True, eq=False)
class KeyShards:
    """The keys that ranks hold, and what the mask leaves of them.

    shards: by rank the keys that it holds.
    pairs: the tiles of queries of one rank and keys of another.
    required: by rank and owner the rows that are needed, see `Pairs.required`; None where blocks go to all.
    known: results derived from the above, which calls share, so that none waits for a device again.
    """

    shards: Sequence[tuple[Run, ...]]
    pairs: Pairs
    required: RequiredRows | None
    known: dict[tuple[object, ...], Any] = field(default_factory=dict)

    def rows(self, rank: int, owner: int) -> Rows:
        """Return the rows of an owner's block that a rank gets."""
        if self.required is None:
            count = token_count(self.shards[owner])
            return ((0, count),) if count else ()
        return self.required[rank].get(owner, ())

    def runs(self, rank: int, owner: int) -> tuple[Run, ...]:
        """Return the runs of the rows of an owner's block that a rank gets."""
        return cut_runs(self.shards[owner], self.rows(rank, owner))

    def work(self, rank: int, owner: int, size: int, device: torch.device) -> _Work:
        """Return the tiles and positions of the rows that a rank gets of a block, for chunks of `size` queries."""
        key = (_Work, rank, owner, size, device)
        if key not in self.known:
            runs = self.runs(rank, owner)
            tiles = self.pairs.tiles(self.pairs.runs["q"][rank], runs)
            self.known[key] = _Work(by_chunk(tiles, size), positions(runs, device))
        work: _Work = self.known[key]
        return work


@dataclass(frozen=True, eq=False)
class SelectionCall:
    """A call that selects keys, checked on this process, for ranks to agree on.

    blocks: which keys each rank holds and needs.
    tokens, mask: the sequence, and which keys queries may select.
    count: how many keys, blocks or pools each query selects, at most as many as there are.
    scale: the factor on products.
    given, asked: the indexer's tensors, and the options as the caller gave them.
    ahead: for each query of the sequence, how far its position is ahead of its key's, int64; None for none.
    """

    blocks: KeyShards
    tokens: Tokens
    mask: Mask
    count: int
    scale: float
    given: Indexed
    asked: SelectionOptions
    ahead: Tensor | None = None

    def places(self, rank: int, device: torch.device) -> Tensor:
        """Return the positions of a rank's queries among the keys of the whole sequence, int64 [S_local]."""
        found = positions(self.blocks.pairs.runs["q"][rank], device)
        return found if self.ahead is None else found + self.ahead.to(device)[found]

    def signature(self) -> Mapping[str, object]:
        """Return the arguments and options that have to be equal on all ranks, by name."""
        indexed = self.given
        return {
            "call": self.asked.kind.what,
            "batch": indexed.q.shape[0],
            "heads": list(indexed.q.shape[2:]),
            "dtype": [indexed.q.dtype, None if indexed.weights is None else indexed.weights.dtype],
            "top_k": self.count,
            "block": self.asked.block,
            "forced": self.asked.forced,
            "scale": self.scale,
            "tokens": self.tokens,
            "mask": self.mask,
        }


def _prepared(passes: Passes, plans: dict[Any, Any], indexed: Indexed, asked: SelectionOptions) -> SelectionCall:
    """Return the call. Raise ValueError for tensors, options or tokens that do not fit."""
    count, mask, factor = checked_options(indexed, asked)
    states, tokens = passes.states, asked.tokens
    for state in states:
        state.check_usable(indexed.q.device)
    ranks = states[0].topology.ranks
    held = indexed.q.shape[1]
    of_ranks = ranks if len(states) < ranks else 1
    sequence = Tokens(max(1, held * of_ranks)) if tokens is None else as_tokens(tokens)  # type: ignore[arg-type]
    blocks = key_shards(plans, states[0], (sequence, sequence), mask)
    expected_rows = sum(token_count(blocks.shards[state.rank]) for state in states)
    if held != expected_rows:
        raise ValueError(
            f"rank {states[0].rank} holds {expected_rows} of {sequence.length} tokens, but index_q "
            f"{list(indexed.q.shape)} has {held}; pass the tokens= of its shard"
        )
    asked.kind.check(asked, mask)
    return SelectionCall(
        blocks, sequence, mask, min(count, -(-sequence.length // asked.block)), factor, indexed, asked
    )


def checked_options(given: Indexed, asked: SelectionOptions) -> tuple[int, Mask, float]:
    """Return (units per query, mask, factor on products). Raise ValueError for arguments that do not fit."""
    given.check()
    top_k, mask, _, scale = asked[1:5]
    check_mask(mask)
    assert isinstance(mask, Mask), "it is checked"
    count = whole_number("top_k={}", top_k, f"give how many {asked.kind.units} each query selects, 1 or more", 1)
    expected = "give the factor on products, above 0, or None"
    factor = given.q.shape[3] ** -0.5 if scale is None else number("scale={}", scale, expected)
    if factor <= 0:
        raise ValueError(f"scale={shown(scale)} is not valid; {expected}")
    if mask.head_groups is not None:
        raise ValueError(
            "all heads share a selection, but the mask differs between groups of heads; select for each group by "
            "itself"
        )
    batch = given.q.shape[0]
    if mask.rows not in (None, batch):
        raise ValueError(f"the mask has {mask.rows} batch rows, but index_q has {batch}; give a mask for each row")
    return count, mask, factor


def key_shards(
    plans: dict[Any, Any], state: RankState, tokens: tuple[Tokens, Tokens], mask: Mask, alone: bool = False
) -> KeyShards:
    """Return which keys of a sequence each rank holds, and which of them each needs under `mask`.

    It is worked out once for all layers, and kept in `plans`, a dict of the ring.

    tokens: of (queries, keys). alone: whether each rank scores the keys that it holds alone.
    """
    known: dict[Any, KeyShards] = plans.setdefault(KeyShards, {})
    if (tokens, mask) not in known:
        if len(known) >= _KNOWN:
            known.clear()
        queries, keys = map(state.route_table.shards, tokens)
        pairs = Pairs(Attending(*tokens, mask), {"q": queries, "kv": keys})
        required = pairs.required("kv") if len(keys) > 1 and not alone else None
        known[tokens, mask] = KeyShards(keys, pairs, required)
    return known[tokens, mask]


def _run(passes: Passes, selection: SelectionCall, call: CallId, indexed: Indexed) -> Tensor:
    """Return the selected keys of the ranks of this process."""
    tokens, states = selection.tokens, passes.states
    parts = [indexed]
    is_virtual = isinstance(passes, OfVirtualRing)
    layout = states[0].route_table.layout(tokens)
    if is_virtual:
        places = [(rank, len(states)) for rank in range(len(states))]
        tensors = [x for x in (indexed.q, indexed.k, indexed.weights) if x is not None]
        parts = [Indexed(*(layout.shard(x, 1, at, tokens) for x in tensors)) for at in places]
    kind = selection.asked.kind
    programs = [kind(state, selection, part).program(call) for state, part in zip(states, parts, strict=True)]
    keys = passes.run("forward", call, programs, indexed.q.device)
    return layout.unshard(keys, 1, tokens) if is_virtual else keys[0]


class RankSelection:
    """One rank's part of a selection: blocks of keys arrive from all ranks, and its queries select among them.

    state: of the rank. selection: the call. given: the indexer's tensors of this rank's tokens.
    """

    what: ClassVar[str] = "selection of keys"
    units: ClassVar[str] = "keys"

    @staticmethod
    def check(asked: SelectionOptions, mask: Mask) -> None:
        """Raise ValueError for options or a mask that this kind of selection does not support."""

    def __init__(self, state: RankState, selection: SelectionCall, given: Indexed) -> None:
        self._rank, self._state, self.given = state.rank, state, given
        self._blocks, self.count = selection.blocks, selection.count
        dtype = torch.promote_types(given.q.dtype, torch.float32)
        self.tiles = ScoreTiles(given.q.shape[2], dtype, given.q.device)
        self._scale = selection.scale
        self._keys = given.k.detach()

    def program(self, call: CallId) -> Generator[None, None, Tensor]:
        """Run this rank's part; return the positions of the selected keys, int32 [*queries, count], -1 for none.

        A generator, which yields while messages are under way, and returns when keys of all ranks have been scored.
        """
        ranks, device = len(self._blocks.shards), self._keys.device
        messages = Messages(self._state, device, self.what, "forward", call)
        best = self.places()
        block = self.taken(self._rank)  # and what moves on to the next rank, where blocks go to all
        for step in range(ranks):
            in_flight = self._begun(messages, step + 1, block) if step + 1 < ranks else None
            self.score((self._rank - step) % ranks, block, best)
            if in_flight is not None:
                received = (yield from in_flight) or {}
                block = next((x for (x,) in received.values()), self._keys[:, :0])
        return best.positions().view(*self.queries, self.count)

    @property
    def queries(self) -> torch.Size:
        """Return [B, S_local], since each query selects on its own."""
        return self.given.q.shape[:2]

    def places(self, repeats: bool = False) -> BestKeys:
        """Return an empty `BestKeys` for all queries of this rank.

        repeats: whether a key may be offered several times.
        """
        return best_keys(self.queries.numel(), self.count, self.tiles.dtype, self._keys.device, repeats)

    def _begun(self, messages: Messages, step: int, moving: Tensor) -> Generator[None, None, dict[int, list[Tensor]]]:
        """Return the exchange of a step, with messages under way: after it, this rank has the block of `step` ago.

        Blocks that go to all hop from each rank to the next; rows that few need go there from their owner.
        """
        ranks, rank, blocks = len(self._blocks.shards), self._rank, self._blocks
        hops = blocks.required is None
        to, source = (rank + (1 if hops else step)) % ranks, (rank - (1 if hops else step)) % ranks
        if not hops:
            moving = self.taken(to)
        arriving = self.arriving((rank - step) % ranks)
        spec = ((moving.shape[0], arriving, moving.shape[2]), moving.dtype)
        exchange = messages.exchange({to: [moving]} if moving.shape[1] else {}, {source: [spec]} if arriving else {})
        next(exchange, None)  # posts them
        return exchange

    def taken(self, to: int) -> Tensor:
        """Return the keys [B, n, D] of this rank that rank `to` needs, which may be this rank."""
        keys, rows = self._keys, self._blocks.rows(to, self._rank)
        if rows == ((0, keys.shape[1]),):
            return keys
        return torch.cat([keys[:, :0], *(keys[:, start:stop] for start, stop in rows)], 1)

    def arriving(self, owner: int) -> int:
        """Return how many keys this rank receives from rank `owner` for each batch row."""
        return row_count(self._blocks.rows(self._rank, owner))

    def score(self, owner: int, keys: Tensor, best: BestKeys) -> None:
        """Have all queries of this rank select among the keys [B, n, D] that rank `owner` has sent.

        best: where the best keys of all queries are kept.
        """
        blocks, (batch, held) = self._blocks, self.given.q.shape[:2]
        if not keys.shape[1] or not held:
            return
        work = blocks.work(self._rank, owner, self.tiles.queries, keys.device)
        for chunk, parts in work.chunks.items():
            first = chunk * self.tiles.queries
            rows = slice(first, min(held, first + self.tiles.queries))
            for row in range(batch):
                row_parts = [part for part in parts if part.batch is None or part.batch[0] <= row < part.batch[1]]
                if row_parts:
                    block = KeyBlock(owner, keys[row], work.places)
                    self.score_chunk(row, rows, ChunkMask(row_parts, rows.stop - first), block, best)

    def score_chunk(self, row: int, rows: slice, mask: ChunkMask, block: KeyBlock, best: BestKeys) -> None:
        """Have some queries of a batch row select among the keys of a block.

        row, rows: the batch row, and its queries. mask: which of the block's keys they attend to.
        block: the keys of an owner for this batch row. best: where the best keys of all queries are kept.
        """
        scores_of = self.scores_of(row, rows)
        keys, places = mask.packed(block.keys), mask.packed(block.places)
        held, size = self.given.q.shape[1], self.tiles.keys
        window = max(1, -(-self.count // size)) * size  # so many keys are worth a search for the best
        into = slice(row * held + rows.start, row * held + rows.stop)
        for start in range(0, mask.columns, window):
            stop = min(mask.columns, start + window)
            tiles = [scores_of(keys[at : min(stop, at + size)]) for at in range(start, stop, size)]
            scores = tiles[0] if len(tiles) == 1 else torch.cat(tiles, 1)
            best.add(into, scores, places[start:stop], mask.allowed(start, stop, scores.device))

    def scores_of(self, row: int, rows: slice) -> Callable[[Tensor], Tensor]:
        """Return a function that scores keys [n, D] for some queries of a batch row, as [queries, n]."""
        assert self.given.weights is not None, "a selection by the scores of all heads has them"
        weights = self.given.weights[row, rows].detach().to(self.tiles.dtype) * self._scale  # above 0, as relu's is
        return self.tiles.of_queries(self.given.q[row, rows].detach(), weights)
