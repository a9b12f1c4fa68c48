"""Calls of `KVCache.attend`: how their arguments are checked, and become a call of the ring or of this rank alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.attention import ring_attention
from burst_plugin.checks import as_whole, shown
from burst_plugin.comm.call_identity import CallId
from burst_plugin.compute.online_softmax import add_sink
from burst_plugin.compute.shapes import Shapes, hop_bytes
from burst_plugin.context import ContextParallel
from burst_plugin.inference.decode import OwnAttention
from burst_plugin.inference.gathering import TreeMerge
from burst_plugin.inference.layer import LayerCache
from burst_plugin.inference.storage import RowStore
from burst_plugin.inference.turn import RoundRobin, Turn, TurnMask
from burst_plugin.ring.agreement import error_text, prepared_together
from burst_plugin.ring.attention_pass import dense
from burst_plugin.ring.choices import features_of, is_deterministic, kernel_for
from burst_plugin.ring.plan import Extras
from burst_plugin.ring.request import Inputs, Request, check_extras, check_kinds, check_tensors
from burst_plugin.scores import Scores
from burst_plugin.sequence.masks import Mask
from burst_plugin.strategy import Strategy


class Asked(NamedTuple):
    """The arguments of one call of `KVCache.attend`, by their names there."""

    layer: object
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    scores: Scores
    sink: Tensor | None

    def without_gradient(self) -> Asked:
        """Return the arguments unchanged. Raise RuntimeError if autograd would expect a gradient."""
        tensors = (self.q, self.k, self.v, self.sink)
        if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors):
            raise RuntimeError(
                "KVCache.attend has no gradient; call it under torch.no_grad(), and train with burst_attention"
            )
        return self

    def checked(self, turn: Turn, store: RowStore) -> Asked:
        """Return the arguments with the default scale filled in and with dense tensors, checked for this turn.

        Raises ValueError for tensors that do not fit the turn's tokens or the type, heads and dims in `store`, and
        for masks and scores that a cache does not take.
        """
        inputs = Inputs(self.q, self.k, self.v, self.sink)
        check_kinds(inputs, Request(self.mask, self.scores))
        check_tensors(self.q, self.k, self.v)
        check_extras(inputs, 0)
        batch, size = len(turn.starts), turn.size
        if self.q.shape[:2] != (batch, size) or self.k.shape[1] != size:
            raise ValueError(
                f"rank {turn.rank} has {size} new tokens in each of {batch} rows in this turn, padding included, but "
                f"got q {list(self.q.shape)}, k {list(self.k.shape)}; take its tokens with Turn.take"
            )
        if self.mask.rows not in (None, batch):
            raise ValueError(
                f"the mask has {self.mask.rows} batch rows, but the cache has {batch}; give a mask for each row"
            )
        if self.mask.head_groups is not None:
            raise ValueError(
                f"the mask is for {self.mask.head_groups} groups of heads, but a KVCache has one mask for all heads "
                "of a layer; give a mask that all heads share, or make a cache with a layer for each group"
            )
        if self.scores.needs_positions:
            raise ValueError(f"a KVCache has no alibi_slopes and no dropout, got {self.scores}; leave these out")
        store.check_like(self.k, self.v)
        q, k, v = dense(inputs)[:3]
        return self._replace(q=q, k=k, v=v, scores=self.scores.resolved(q.shape[3], q.shape[2]))


def check_layer(layer: object, layers: int, attended: frozenset[int]) -> int:
    """Return the number of a layer as an int, checked for one turn.

    Args:
        layer: the number to check.
        layers: the number of layers of the cache.
        attended: the layers that have attended in this turn.

    Raises ValueError for a number that is not one of the cache's, or is among `attended`.
    """
    number = as_whole(layer)
    if number is None or not 0 <= number < layers:
        raise ValueError(f"layer={shown(layer)} is not one of the cache's {layers} layers; count them from 0")
    if number in attended:
        raise ValueError(f"layer {number} has attended in this turn already; begin the next one with KVCache.begin")
    return number


class LayerCall(NamedTuple):
    """One layer's attention in one turn.

    turn: the turn, with its new tokens and their positions.
    layer: this rank's keys and values of the layer.
    asked: the arguments of `KVCache.attend`.
    """

    turn: Turn
    layer: LayerCache
    asked: Asked

    @property
    def is_uniform(self) -> bool:
        """Return whether batch rows have equal lengths and one mask, and share no tokens.

        The ring takes such rows as a batch, others one after another in one sequence.
        """
        layer, mask = self.layer, self.asked.mask
        return self.turn.is_uniform and mask.rows is None and len(set(layer.first_keys)) == 1 and not layer.shared

    def append(self) -> None:
        """Append the new keys and values that this rank stores to its layer's store."""
        turn = self.turn
        own = turn.own if turn.replicated else [slice(count) for count in turn.counts]
        k, v = ([row[:n][mine] for row, n, mine in zip(x, turn.counts, own, strict=True)] for x in self.asked[2:4])
        self.layer.store.append(k, v)

    def unpacked(self, out: Tensor) -> Tensor:
        """Return `out`, as the ring returned it, as [B, size, Hq, Dv], rows padded with zeros.

        The ring returns that shape if the call `is_uniform`, otherwise rows one after another, [1, sum of counts, Hq,
        Dv].
        """
        if self.is_uniform:
            return out
        counts = self.turn.counts
        found = out.new_zeros(len(counts), self.turn.size, *out.shape[2:])
        for row, stop, count in zip(found, accumulate(counts), counts, strict=True):
            row[:count] = out[0, stop - count : stop]
        return found

    def without_padding(self, out: Tensor) -> Tensor:
        """Return `out` [B, size, Hq, Dv] with padding set to zeros."""
        if len(set(self.turn.counts)) == 1:
            return out
        return out.where(self.turn.valid.to(out.device)[:, :, None, None], 0)


def pass_q_share(q_heads: int, kv_heads: int, qk_dim: int, v_dim: int, dtype: torch.dtype) -> float:
    """Return the share of new tokens in all tokens of a turn below which pass-Q sends fewer bytes than pass-KV.

    A query takes along `Hq·(qk_dim·e + 4·(v_dim + 1))` bytes, itself and its partial result in float32, and a key
    `Hkv·(qk_dim + v_dim)·e`; the share is their quotient, e being the bytes of a number.

    Source: the heuristic of arXiv 2411.01783, in which it is 2·Hkv / Hq, partial results being left out.
    """
    one = Shapes(1, 1, 1, q_heads, kv_heads, qk_dim, v_dim, dtype)
    return hop_bytes(one, "forward", "kv") / hop_bytes(one, "forward", "q")


def attend_on_ring(
    cp: ContextParallel, appended: Callable[[], LayerCall], tag: tuple[str, ...], forward: str
) -> tuple[Tensor, Counter[str]]:
    """Attend where every rank has new tokens of its own; return out, and the bytes that this rank sent; collective.

    Args:
        cp: the ring.
        appended: returns the layer's call, with its new tokens in the cache, or raises; other ranks learn of the
            error.
        tag: texts that name the call in errors, such as ("turn 0", "layer 3").
        forward: the moving side, "q", "kv" or "auto".

    Returns:
        out [B, size, Hq, Dv], 0 for padding, and the bytes under "intra" and "inter".
    """
    try:
        call = appended()
    except Exception as error:  # of any kind: the other ranks must know of it
        try:
            cp.agreement.before_forward(dict, error_text(error), cp.agreement.name_of_next_call(tag))
        except ValueError as told:
            raise told from error
        raise
    inputs, request = ring_call(call, forward)
    before = _traffic(cp)
    out = ring_attention(inputs, request, cp, tag).out
    return call.unpacked(out), _traffic(cp) - before


def attend_in_tree(
    cp: ContextParallel, appended: Callable[[], LayerCall], tag: tuple[str, ...], merge: TreeMerge
) -> Tensor:
    """Attend where every rank has all new tokens: each rank to its own keys, then results are merged; collective.

    Args:
        cp: the ring.
        appended: returns the layer's call, with its new tokens in the cache, or raises; other ranks learn of the
            error.
        tag: texts that name the call in errors, such as ("turn 0", "layer 3").
        merge: merges the results of all ranks.

    Returns:
        out [B, size, Hq, Dv] in the type of q, equal on every rank; 0 for padding.
    """

    def prepared() -> tuple[LayerCall, OwnAttention]:
        call = appended()
        cp.connections.check_device(call.asked.q.device)
        return call, own_attention(call, cp.strategy)

    def agree(mine: tuple[LayerCall, OwnAttention] | None, problem: str) -> CallId:
        signature = dict if mine is None else (lambda: mine[1].signature)
        return cp.agreement.before_forward(signature, problem, cp.agreement.name_of_next_call(tag))

    (call, own), which = prepared_together(prepared, agree)
    q, sink = call.asked.q, call.asked.sink
    out, lse = merge.run(
        lambda: own.of(q, call.layer.store, call.layer.shared_store), which, {"device": q.device, **own.signature}
    )
    if sink is not None:
        out, _ = add_sink(out, lse, sink)
    return call.without_padding(out.to(q.dtype))


def _traffic(cp: ContextParallel) -> Counter[str]:
    return Counter({link: sum(by_kind.values()) for link, by_kind in cp.traffic().items()})


def ring_call(call: LayerCall, forward: str) -> tuple[Inputs, Request]:
    """Return the ring's inputs and request for a layer's call: new tokens attend to all keys of their rows.

    If the call `is_uniform`, its rows are the batch; otherwise they lie one after another in one sequence, so that
    nothing is padded. `forward` is the moving side, "q", "kv" or "auto".
    """
    turn, layer, asked = call
    bounds = layer.first_keys, turn.starts, turn.stops
    if call.is_uniform:
        first_keys, starts, stops = (each[:1] for each in bounds)
        q, (k, v) = asked.q, layer.store.batch()
    else:
        first_keys, starts, stops = bounds
        q, (k, v) = _packed(asked.q, turn.counts), layer.store.packed()
    mask = TurnMask(asked.mask, first_keys, starts, stops, layer.shared)
    if layer.shared_store is not None:
        k, v = (torch.cat(both, 1) for both in zip(layer.shared_store.row(0), (k, v), strict=True))
        first_keys, stops = (0, *first_keys), (layer.shared, *stops)
    tokens = RoundRobin.of(starts, turn.stops[: len(starts)]), RoundRobin.of(first_keys, stops)
    return Inputs(q, k, v, asked.sink), Request(mask, asked.scores, tokens, forward=forward)


def own_attention(call: LayerCall, strategy: Strategy) -> OwnAttention:
    """Return the `OwnAttention` of a layer's call: how all new tokens attend to the keys that this rank holds.

    Raises ValueError if no kernel can compute it, or the mask hides tokens that rows share.
    """
    (turn, layer, asked), deterministic = call, is_deterministic(strategy)
    (batch, q_len, q_heads, qk_dim), (kv_heads, v_dim) = asked.q.shape, asked.v.shape[2:]
    shapes = Shapes(batch, q_len, max(layer.store.lengths), q_heads, kv_heads, qk_dim, v_dim, asked.q.dtype)
    features = features_of(shapes, asked.scores, deterministic, Extras())
    kernel = kernel_for(strategy, asked.q.device, shapes, features, new_tiles=True)
    how = (asked.mask, asked.scores, kernel, deterministic)
    own = OwnAttention(turn, shapes, *how, layer.first_keys, layer.shared)
    if layer.shared:
        own.check_shared()
    return own


def _packed(x: Tensor, counts: Sequence[int]) -> Tensor:
    """Return rows [B, n, ...] one after another without padding, [1, sum of counts, ...]."""
    return torch.cat([row[:count] for row, count in zip(x, counts, strict=True)]).unsqueeze(0)
