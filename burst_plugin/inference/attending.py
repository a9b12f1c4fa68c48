"""Calls of `KVCache.attend`: how their arguments are checked, and become a call of the ring or of this rank alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from burst_plugin.attention import ring_attention
from burst_plugin.checks import as_whole, shown
from burst_plugin.comm.call_identity import CallId
from burst_plugin.compute.online_softmax import add_sink
from burst_plugin.compute.passes import OfQueries
from burst_plugin.compute.shapes import Shapes, hop_bytes
from burst_plugin.context import ContextParallel
from burst_plugin.inference.decode import OwnAttention
from burst_plugin.inference.gathering import TreeMerge
from burst_plugin.inference.storage import RowStore
from burst_plugin.inference.turn import Turn
from burst_plugin.inference.turn_rows import TurnRows
from burst_plugin.ring.agreement import error_text, prepared_together
from burst_plugin.ring.attention_pass import dense
from burst_plugin.ring.choices import features_of, is_deterministic, kernel_for
from burst_plugin.ring.plan import Extras
from burst_plugin.ring.request import Inputs, Request, check_extras, check_kinds, check_tensors
from burst_plugin.scores import Scores
from burst_plugin.sequence.masks import Mask
from burst_plugin.strategy import Strategy


class CachedExtras(TypedDict, total=False):
    """The optional tensors of `KVCache.attend`, by name."""

    sink: Tensor | None
    selection: Tensor | None


class Asked(NamedTuple):
    """The arguments of one call of `KVCache.attend`, by their names there."""

    layer: object
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    scores: Scores
    sink: Tensor | None = None
    selection: Tensor | None = None

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
        inputs = Inputs(self.q, self.k, self.v, self.sink, selection=self.selection)
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

    rows: the turn, what this rank stores of the layer, and the mask.
    asked: the arguments of `KVCache.attend`.
    """

    rows: TurnRows
    asked: Asked

    def without_padding(self, out: Tensor) -> Tensor:
        """Return `out` [B, size, Hq, Dv] with padding set to zeros."""
        turn = self.rows.turn
        if len(set(turn.counts)) == 1:
            return out
        return out.where(turn.valid.to(out.device)[:, :, None, None], 0)


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
    return call.rows.by_row(out), _traffic(cp) - before


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

    def agree(own_call: tuple[LayerCall, OwnAttention] | None, problem: str) -> CallId:
        signature = dict if own_call is None else (lambda: own_call[1].signature)
        return cp.agreement.before_forward(signature, problem, cp.agreement.name_of_next_call(tag))

    (call, attention), which = prepared_together(prepared, agree)
    q, sink, layer = call.asked.q, call.asked.sink, call.rows.layer
    out, lse = merge.run(
        lambda: attention.of(q, layer.store, layer.shared_store), which, {"device": q.device, **attention.signature}
    )
    if sink is not None:
        out, _ = add_sink(out, lse, sink)
    return call.without_padding(out.to(q.dtype))


def _traffic(cp: ContextParallel) -> Counter[str]:
    return Counter({link: sum(by_kind.values()) for link, by_kind in cp.traffic().items()})


def ring_call(call: LayerCall, forward: str) -> tuple[Inputs, Request]:
    """Return the ring's inputs and request for a layer's call: new tokens attend to all keys of their rows.

    `forward` is the moving side, "q", "kv" or "auto".
    """
    rows, asked = call
    selection = None if asked.selection is None else rows.selection_of_sequence(asked.selection)
    inputs = Inputs(rows.of_new(asked.q), *rows.stored(), asked.sink, selection=selection)
    return inputs, Request(rows.turn_mask, asked.scores, rows.tokens, forward=forward)


def own_attention(call: LayerCall, strategy: Strategy) -> OwnAttention:
    """Return the `OwnAttention` of a layer's call: how all new tokens attend to the keys that this rank holds.

    Raises ValueError if no kernel can compute it, or the mask hides tokens that rows share.
    """
    ((turn, layer, mask), asked), deterministic = call, is_deterministic(strategy)
    (batch, q_len, q_heads, qk_dim), (kv_heads, v_dim) = asked.q.shape, asked.v.shape[2:]
    shapes = Shapes(batch, q_len, max(layer.store.lengths), q_heads, kv_heads, qk_dim, v_dim, asked.q.dtype)
    features = features_of(shapes, asked.scores, deterministic, Extras(selection=asked.selection is not None))
    kernel = kernel_for(strategy, asked.q.device, shapes, features, new_tiles=True)
    how, selection = (mask, asked.scores, kernel, deterministic), OfQueries.of(None, asked.selection).selection
    attention = OwnAttention(turn, shapes, *how, layer.first_keys, layer.shared, selection)
    if layer.shared:
        attention.check_shared()
    return attention
