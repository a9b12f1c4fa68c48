"""The loss that trains an indexer: how far its scores are from the attention that queries pay (DeepSeek V3.2).

    target[t, s] = attention of query t to key s, the mean over heads
    index[t, s]  = softmax over s of the indexer's scores I[t, s], see `select_keys`
    loss         = sum over t and s of  target * (log target - log index)

over the keys that a query has selected, or over all keys up to it. The indexer gets gradients, the attention none.

Keys and index keys of the whole sequence are gathered on every rank, index keys in float32 and with gradient. Queries
are worked on a few at a time. Gradients are computed with the loss, since the backward pass only multiplies them by
one number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_plugin.context import ContextParallel
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sparse.selection import Indexed

NUMBERS_AT_ONCE = 2**25  # made for the queries of one slice: 128 MiB of float32
_LEAST = 1e-10  # below it, a share of attention counts as this much in logarithms


class Teacher(NamedTuple):
    """The attention that teaches an indexer which keys matter, by the queries and keys of this rank's tokens.

    q: [B, S_local, H, D].
    k: [B, S_local, Hk, D]; with `weight` [B, S_local, 1, C + R], latents followed by the keys that all heads share.
    scale: the factor on products of queries and keys before softmax.
    weight: [H, D - R, C], makes the first D - R numbers of each head's keys from latents; None if `k` has all
        numbers.
    over_heads: adds up a tensor, in place, over the ranks that have the other heads, as in tensor parallelism; None
        if this rank has all heads.
    """

    q: Tensor
    k: Tensor
    scale: float
    weight: Tensor | None = None
    over_heads: Callable[[Tensor], object] | None = None


def indexer_loss(
    teacher: Teacher,
    indexed: Indexed,
    cp: ContextParallel,
    *,
    scale: float,
    selection: Tensor | None = None,
    tokens: Tokens | None = None,
) -> Tensor:
    """Return the loss of an indexer, the sum over this rank's queries, a scalar in float32 or wider; collective.

    Args:
        teacher: the attention that the indexer learns from; gets no gradient.
        indexed: the indexer's queries, keys and weights; they get the gradients of the sum of all ranks' losses.
        cp: the context-parallel group.
        scale: the factor on products of the indexer's queries and keys, as for `select_keys`.
        selection: the positions of the keys over which to sum, int [B, S_local, n], -1 for none; None for all keys
            that are not later than a query.
        tokens: the sequence that rows are taken from, as for `burst_attention`.

    Raises:
        ValueError: on every rank if any does not hold its part of `tokens`.
    """
    # A checkpoint around the layer would compute all of it again whenever gradients are asked for in here.
    with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
        loss, grads = _with_gradients(teacher, indexed, cp, scale, selection, tokens)
    tensors = (indexed.q, indexed.k, indexed.weights)
    result: Tensor = _WithGradients.apply(loss, *grads, *tensors)  # type: ignore[no-untyped-call]
    return result


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _with_gradients(
    teacher: Teacher,
    indexed: Indexed,
    cp: ContextParallel,
    scale: float,
    selection: Tensor | None,
    tokens: Tokens | None,
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of this rank's queries, and the gradients of the indexer's queries, keys and weights."""
    assert indexed.weights is not None, "an indexer has weights"
    tensors = (indexed.q, indexed.k, indexed.weights)
    with torch.no_grad():
        keys = cp.unshard(teacher.k.detach(), 1, tokens)
    with torch.enable_grad():
        leaf = indexed.k.detach().to(torch.promote_types(indexed.k.dtype, torch.float32)).requires_grad_()
        index_keys = cp.unshard(leaf, 1, tokens, loss="own")
    at = cp.positions(Tokens(keys.shape[1]) if tokens is None else tokens, keys.device)
    total, grads = leaf.new_zeros(()), [torch.zeros_like(x, dtype=leaf.dtype) for x in (*tensors[::2], index_keys)]
    tiles = LossTiles(teacher, indexed, scale, selection, at)
    with torch.autocast(leaf.device.type, enabled=False):
        for row, rows in ((row, rows) for row in range(keys.shape[0]) for rows in tiles.rows(keys.shape[1])):
            total += tiles.add(row, rows, (keys[row], index_keys.detach()[row]), [grad[row] for grad in grads])
    (of_keys,) = torch.autograd.grad(index_keys, leaf, grads[2])
    return total, [grad.to(x.dtype) for grad, x in zip((grads[0], of_keys, grads[1]), tensors, strict=True)]


class LossTiles:
    """Computes the loss of an indexer for some queries of a batch row at a time, with its gradients.

    teacher, indexed, scale, selection: as for `indexer_loss`.
    at: the positions of this rank's tokens, [S_local].
    """

    def __init__(
        self, teacher: Teacher, indexed: Indexed, scale: float, selection: Tensor | None, at: Tensor
    ) -> None:
        assert indexed.weights is not None, "an indexer has weights"
        self._teacher, self._q, self._weights, self._scale = teacher, indexed.q, indexed.weights, scale
        self._selection, self._at = selection, at

    def rows(self, length: int) -> Iterator[slice]:
        """Yield slices of this rank's queries, as many at a time as 128 MiB allow with `length` keys."""
        held, heads, dim = self._q.shape[1:]
        pair_numbers = self._teacher.q.shape[2] + heads
        if self._selection is not None:
            length = self._selection.shape[2]
            pair_numbers += self._teacher.k.shape[2:].numel() + dim
        size = max(1, NUMBERS_AT_ONCE // (length * pair_numbers))
        for start in range(0, held, size):
            yield slice(start, min(held, start + size))

    def add(self, row: int, rows: slice, keys: tuple[Tensor, Tensor], grads: list[Tensor]) -> Tensor:
        """Return the loss of some queries, and add its gradients to `grads`.

        row, rows: the batch row, and its queries.
        keys: of the whole batch row, the teacher's [S, Hk, D], and the indexer's [S, Di].
        grads: of the batch row, for index queries [S_local, H, Di], weights [S_local, H] and index keys [S, Di].
        """
        if self._selection is None:
            listed, allowed = None, torch.arange(len(keys[0]), device=self._at.device) <= self._at[rows].unsqueeze(1)
        else:
            selected = self._selection[row, rows].long()
            listed, allowed = selected.clamp(min=0), selected >= 0
            keys = (keys[0][listed], keys[1][listed])
        counts = allowed.any(1)
        allowed = allowed | ~counts.unsqueeze(1)  # there is no softmax of nothing
        target, dtype = self._target(row, rows, keys[0], allowed), grads[0].dtype
        with torch.enable_grad():
            inputs = [x.detach().to(dtype).requires_grad_() for x in (self._q[row, rows], self._weights[row, rows])]
            q, weights, k = *inputs, keys[1].detach().requires_grad_()
            products = torch.relu(_products(q.unsqueeze(1), k.unsqueeze(-2)).squeeze(1) * self._scale)
            scores = torch.einsum("th,thn->tn", weights, products)
            found = torch.softmax(scores.masked_fill(~allowed, -torch.inf), -1)
            apart = target * (torch.log(target + _LEAST) - torch.log(found + _LEAST))
            loss = (apart.sum(-1) * counts).sum()
            grads[0][rows], grads[1][rows], of_keys = torch.autograd.grad(loss, (q, weights, k))
        if listed is None:
            grads[2].add_(of_keys)
        else:
            grads[2].index_add_(0, listed.flatten(), of_keys.flatten(0, 1))
        return loss.detach()

    @torch.no_grad()
    def _target(self, row: int, rows: slice, keys: Tensor, allowed: Tensor) -> Tensor:
        """Return which share of their attention queries pay to keys, [queries, keys]."""
        q, _, scale, weight, over_heads = self._teacher
        dtype = torch.promote_types(q.dtype, torch.float32)
        queries = q[row, rows].to(dtype)
        if weight is not None:
            own_dim = weight.shape[1]
            absorbed = torch.einsum("thd,hdc->thc", queries[..., :own_dim], weight.to(dtype))
            queries = torch.cat([absorbed, queries[..., own_dim:]], -1)
        grouped = torch.unflatten(queries, 1, (keys.shape[-2], -1))
        scores = _products(grouped, keys.to(dtype)).flatten(1, 2) * scale
        shares = torch.softmax(scores.masked_fill_(~allowed.unsqueeze(1), -torch.inf), -1).sum(1)
        if over_heads is not None:
            over_heads(shares)
        return shares / shares.sum(-1, keepdim=True)


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Return the products of q [T, G, H, D] with k [T, n, G, D], or with one k of all [n, G, D]: [T, G, H, n]."""
    return torch.einsum("tghd,tngd->tghn" if k.dim() == 4 else "tghd,ngd->tghn", q, k)


class _WithGradients(torch.autograd.Function):
    """A loss whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *both: Tensor) -> Tensor:
        ctx.save_for_backward(*both[: len(both) // 2])
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.saved_tensors
        return (None, *(None for _ in found), *(grad.to(x.dtype) * x for x in found))
