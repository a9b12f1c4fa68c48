"""Conversations: whole sequences that come to a cache turn by turn, judged by one process in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from burst_plugin import ContextParallel, Mask, PerRow, Strategy, Topology, VirtualRing
from burst_plugin.comm.call_identity import CallId
from burst_plugin.comm.in_process import HostileNetwork
from burst_plugin.inference import KVCache, Turn
from burst_plugin.inference.attending import Asked, LayerCall, own_attention, ring_call
from burst_plugin.inference.layer import LayerCache
from burst_plugin.inference.tree import merge_in_tree
from burst_plugin.inference.turn_rows import TurnRows
from burst_plugin.ring.choices import make_plan
from burst_plugin.ring.executor import lockstep
from burst_plugin.scores import Scores
from burst_plugin.sequence.masks import Causal
from burst_plugin.virtual import VirtualRingAttention, by_rank
from tests.support.reference import Problem, reference


class Told(NamedTuple):
    """What a rank saw: the largest error, the last turn's out, bytes held, bytes sent in each turn."""

    error: float
    out: Tensor
    held: int
    sent: list[dict[str, int]]


class Conversation(NamedTuple):
    """Rows of unlike lengths: `turns` are the numbers of new tokens by row; q, k and v hold the longest."""

    turns: Sequence[Sequence[int]]
    problem: Problem
    mask: Mask
    scores: Scores
    truth: Tensor

    @classmethod
    def draw(
        cls,
        turns: Sequence[Sequence[int]],
        heads: tuple[int, int] = (4, 2),
        dims: tuple[int, int] = (8, 8),
        dtype: torch.dtype = torch.float64,
        mask: Mask = Causal(),
        scores: Scores = Scores(),
        sink: bool = False,
        same: int = 0,
    ) -> Conversation:
        """Draw a conversation of as many rows as turns have numbers, and compute what it gives in float64.

        So many of their first tokens are the `same` in all rows.
        """
        rows, length = len(turns[0]), max(map(sum, zip(*turns, strict=True)))
        generator = torch.Generator().manual_seed(len(turns) + length)
        shapes = [(heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]), (heads[0], dims[1])]
        problem = Problem(*(torch.randn(rows, length, *each, generator=generator).to(dtype) for each in shapes))
        problem = problem.with_sink() if sink else problem
        for x in problem[:3]:
            x[:, :same] = x[:1, :same].clone()
        per_row = [
            reference(_of_row(problem, row), mask.of_row(row) if isinstance(mask, PerRow) else mask, scores).out
            for row in range(rows)
        ]
        return cls(turns, problem, mask, scores, torch.cat(per_row))

    def of_rows(self, count: int, turns: Sequence[Sequence[int]]) -> Conversation:
        """Return some of the turns, of the first rows."""
        problem = Problem(*(x[:count] for x in self.problem[:4]), self.problem.sink)
        return self._replace(turns=[turn[:count] for turn in turns], problem=problem, truth=self.truth[:count])

    def of_turn(self, x: Tensor, starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Return the new tokens of `x` [B, S, ...] in a turn, rows padded at their ends with NaN."""
        most = max(lengths)
        rows = [row[at : at + n] for row, at, n in zip(x, starts, lengths, strict=True)]
        return torch.stack([pad(row, (0, 0, 0, 0, 0, most - len(row)), value=torch.nan) for row in rows])

    def asked(self, turn: Turn) -> Asked:
        """Return what a rank asks for in a turn."""
        q, k, v = (turn.take(self.of_turn(x, turn.starts, turn.lengths)) for x in self.problem[:3])
        return Asked(0, q, k, v, self.mask, self.scores, self.problem.sink)

    def error(self, whole: Tensor, starts: Sequence[int], lengths: Sequence[int]) -> float:
        """Return the largest error of a turn's out [B, T, Hq, Dv] of all ranks."""
        return float((whole.double() - self.of_turn(self.truth, starts, lengths).nan_to_num(0.0)).abs().max())

    def tell(self, cp: ContextParallel, cache: KVCache, layers: int = 1) -> Told:
        """Tell it to a cache, on every rank, and look at the outputs of all ranks."""
        error, sent, whole = 0.0, [], torch.empty(0)
        for lengths in self.turns:
            before = cache.bytes_sent
            turn = cache.begin(lengths)
            for layer in range(layers):
                whole = cache.gather(cache.attend(**self.asked(turn)._replace(layer=layer)._asdict()))
                error = max(error, self.error(whole, turn.starts, lengths))
            sent.append({link: n - before[link] for link, n in cache.bytes_sent.items()})
        cache.finish()
        return Told(error, whole, cache.bytes, sent)


class RanksInOne:
    """The caches of all ranks in this process, one layer each, over a hostile network."""

    def __init__(self, topology: Topology, strategy: Strategy | None = None, forward: str = "auto") -> None:
        self.ring, self.forward = VirtualRing(topology, strategy), forward
        self.transports = HostileNetwork(topology.ranks).transports()
        self._number = 0
        self.last_turn_bytes = 0  # that all ranks have sent on the ring

    def tell(self, conversation: Conversation, replicated: bool | None = None, left: int | None = None) -> float:
        """Tell it, with turns that all ranks compute where they are short, or always, or never. Return the error."""
        rows, states = len(conversation.turns[0]), self.ring.rank_states
        layers = [LayerCache.empty((rank, len(states)), rows, left, 0, 0) for rank in range(len(states))]
        stops, error = (0,) * rows, 0.0
        for lengths in conversation.turns:
            starts, stops = stops, tuple(at + n for at, n in zip(stops, lengths, strict=True))
            all_compute = max(lengths) <= 2 * len(states) if replicated is None else replicated
            turns = [Turn(0, starts, stops, rank, len(states), all_compute) for rank in range(len(states))]
            calls = []
            for turn, layer in zip(turns, layers, strict=True):
                asked = conversation.asked(turn).checked(turn, layer.store)
                calls.append(LayerCall(TurnRows(turn, layer, layer.masked(asked.mask)), asked))
                calls[-1].rows.append(asked.k, asked.v)
            found = self._in_tree(conversation, calls) if all_compute else self._on_ring(conversation, calls)
            error = max(error, found)
            for layer in layers:
                layer.trim(conversation.mask, turns[0])
        return error

    def _in_tree(self, conversation: Conversation, calls: Sequence[LayerCall]) -> float:
        """Return the error of the merged results, which are the same to the bit on all ranks."""
        programs = [
            merge_in_tree(
                self.transports[rank],
                self.ring.rank_states[0].topology,
                rank,
                own_attention(call, Strategy()).of(call.asked.q, *call.rows.layer.stores),
            )
            for rank, call in enumerate(calls)
        ]
        merged = lockstep(programs)
        for each in merged:
            assert torch.equal(each.out, merged[0].out)
            assert torch.equal(each.lse, merged[0].lse)
        turn = calls[0].rows.turn
        return conversation.error(calls[0].without_padding(merged[0].out), turn.starts, turn.lengths)

    def _on_ring(self, conversation: Conversation, calls: Sequence[LayerCall]) -> float:
        self._number += 1
        before = self._sent()
        asked = [ring_call(call, self.forward) for call in calls]
        plans = [make_plan(state, *each, {}) for state, each in zip(self.ring.rank_states, asked, strict=True)]
        flat = [x for inputs, _ in asked for x in inputs]
        outs = [
            each[0] for each in by_rank(VirtualRingAttention.apply(plans, CallId(self._number), *flat), len(plans))
        ]
        self.last_turn_bytes = self._sent() - before
        error = 0.0
        for call, out in zip(calls, outs, strict=True):
            turn = call.rows.turn
            truth = turn.take(conversation.of_turn(conversation.truth, turn.starts, turn.lengths))
            wrong = (call.rows.by_row(out).double() - truth)[turn.valid]
            error = max(error, float(wrong.abs().max()) if len(wrong) else 0.0)
        return error

    def _sent(self) -> int:
        by_link = [kinds for rank in range(len(self.ring.rank_states)) for kinds in self.ring.traffic(rank).values()]
        return sum(sum(kinds.values()) for kinds in by_link)


def _of_row(problem: Problem, row: int) -> Problem:
    tensors = (x[row : row + 1] for x in problem[:4])
    return Problem(*tensors, problem.sink)


def held_by_rank(lengths: Sequence[int], rank: int, ranks: int) -> int:
    """Return how many tokens of these rows a rank holds."""
    return sum(len(range(rank, length, ranks)) for length in lengths)
