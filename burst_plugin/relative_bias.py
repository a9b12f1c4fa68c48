"""Attention with a learned bias for each distance back from a query to a key, up to some extent, over a ring.

    score(i, j) = scale * q_i . k_j + relative_i . profiles[:, i - j]     without the bias from `extent` tokens on

    near   keys fewer than `extent` tokens back: ranks fetch the tokens before their pieces once, and each computes a
           band of scores beside the diagonal by itself
    far    all other keys, on the ring, under a mask that leaves out the near ones
    both are joined by their lse

So nothing is as large as the sequence squared. The band is computed in float32 (float64 for float64), in chunks of
queries, again in the backward pass. Bias of this form: Inkling's `InklingRelativeLogits`; with a fixed `relative` it
is T5's and Shaw et al.'s (arXiv 1803.02155).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from burst_plugin.activations.recomputed_chunks import wide_dtype
from burst_plugin.attention import burst_attention
from burst_plugin.context import ContextParallel
from burst_plugin.recurrent.held_pieces import Group
from burst_plugin.recurrent.pieces import START, Pieces
from burst_plugin.recurrent.placement import Call, Placement
from burst_plugin.ring.graph_breaks import between_graphs
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.mask import Mask, Region
from burst_plugin.sequence.masks import Causal, SlidingWindow, check_padding

QUERIES_AT_ONCE = 256  # of a chunk of a band
BYTES_AT_ONCE = 2**27  # of the scores of a chunk, about


@dataclass(frozen=True)
class FurtherBack(Mask):
    """Every token attends to the tokens that are at least `distance` before it."""

    distance: int
    looks_ahead = False
    is_fixed = True

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return one region: all queries and keys, below a diagonal."""
        return (Region(0, q_len, 0, kv_len, None, -self.distance),)


class _Band(NamedTuple):
    """The scores beside the diagonal: how many keys each query sees, itself included, and the factor on q . k."""

    reach: int
    scale: float


@between_graphs
def relative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    relative: Tensor,
    profiles: Tensor,
    cp: ContextParallel,
    *,
    mask: Mask | None = None,
    tokens: Tokens | None = None,
    scale: float | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
    tag: object = None,
) -> Tensor:
    """Compute causal attention with a learned bias by distance, which depends on the query; collective.

    Args:
        q: [B, S_local, H, D], float64, float32 or bfloat16; float16 only without keys beyond `extent`.
        k: [B, S_local, Hkv, D]; H must be a multiple of Hkv.
        v: [B, S_local, Hkv, Dv].
        relative: [B, S_local, H, R], by which each query mixes the profiles.
        profiles: [R, extent]; column d is for keys d tokens back. Equal on all ranks; its gradient comes from this
            rank's queries: sum it over ranks.
        cp: the ring, in any layout but "striped".
        mask: documents and padding, in positions of the whole sequence; None if each batch row is one document.
        tokens: the sequence that rows are taken from, as for `burst_attention`.
        scale: the factor on q . k, `D ** -0.5` if None.
        window: how many keys a query sees, itself included; None for all before it.
        sink: [B, S_local, H], a logit of each query that takes part in its softmax and has no value; None for none.
        tag: a name for this call, equal on every rank.

    Returns:
        [B, S_local, H, Dv] in the type of q.

    Raises:
        ValueError: on every rank, if shapes or options do not fit on any of them; for a prefix tree, padding inside a
            document, or the layout "striped".
        RingError: as `burst_attention`.
    """
    place = Placement(cp, mask=mask, tokens=tokens, tag=tag)
    tensors = {"q": q, "k": k, "v": v, "relative": relative, **({} if sink is None else {"sink": sink})}

    def check() -> Mapping[str, object]:
        _check(tensors, profiles, place, window)
        shapes = {name: list(x.shape[2:]) for name, x in tensors.items()}
        return {**shapes, "profiles": list(profiles.shape), "dtype": q.dtype, "window": window, "scale": scale}

    call = place.call("relative_attention", tensors, check, [profiles])
    extent, length = profiles.shape[1], call.held.tokens.length
    band = _Band(extent if window is None else min(extent, window), q.shape[3] ** -0.5 if scale is None else scale)
    out, lse = _near(call, (q, k, v, relative), profiles, band)
    if extent < length and (window is None or extent < window):
        seen: Mask = Causal() if window is None else SlidingWindow(window - 1)
        further = seen & FurtherBack(extent)
        out, lse = _joined(
            (out, lse),
            burst_attention(
                q,
                k,
                v,
                cp,
                mask=further if mask is None else further & mask,
                softmax_scale=band.scale,
                tokens=tokens,
                tag=tag,
                return_lse=True,
            ),
        )
    if sink is not None:
        out = out * torch.sigmoid(lse - sink.to(lse.dtype)).unsqueeze(3)
    return out.to(q.dtype)


def _check(tensors: Mapping[str, Tensor], profiles: Tensor, place: Placement, window: int | None) -> None:
    """Raise ValueError for tensors that do not fit each other, and for sequences whose tokens have no distances."""
    q, k, v, relative = (tensors[name] for name in ("q", "k", "v", "relative"))
    if any(tensors[name].dim() != 4 for name in ("q", "k", "v", "relative")) or profiles.dim() != 2:
        shapes = {name: list(x.shape) for name, x in tensors.items()}
        raise ValueError(f"{shapes}, profiles {list(profiles.shape)}: give [B, S, heads, ...] and [R, extent]")
    heads, wanted = q.shape[2], {"k": k.shape[2:] == (v.shape[2], q.shape[3])}
    wanted |= {"relative": relative.shape[2:] == (heads, profiles.shape[0]), "heads": heads % k.shape[2] == 0}
    if "sink" in tensors:
        wanted["sink"] = tensors["sink"].shape[2:] == (heads,)
    wrong = [name for name, fits in wanted.items() if not fits]
    if wrong:
        raise ValueError(
            f"{wrong[0]} does not fit: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}, relative "
            f"{list(relative.shape)}, profiles {list(profiles.shape)}; see relative_attention for the shapes"
        )
    if window is not None and window < 1:
        raise ValueError(f"window={window} is not valid: a query sees at least itself; give 1 or more, or None")
    if place.mask is not None and place.mask.trees:
        raise ValueError(
            "relative_attention has no distances in a prefix tree; give every path a row of its own, or leave the "
            "tree out"
        )
    if place.mask is not None:
        check_padding(place.mask, "relative_attention")
    states = place.passes.states
    shards = states[0].route_table.shards(place.held(q).tokens)
    if any(run.stride > 1 and run.length > 1 for held in shards for run in held):
        raise ValueError(
            "layout='striped' scatters neighbouring tokens over all ranks, and relative_attention would fetch all "
            "tokens before each of them; use layout='zigzag'"
        )


def _joined(near: tuple[Tensor, Tensor], far: Any) -> tuple[Tensor, Tensor]:
    """Return out and lse of all keys, from those of near keys, and of far ones as the ring returns them."""
    (out, lse), (out_far, lse_far) = near, far
    lse_far = lse_far.transpose(1, 2)
    both = torch.logaddexp(lse, lse_far)
    weights = (torch.exp(x - both).unsqueeze(3) for x in (lse, lse_far))
    near_part, far_part = (x * weight for x, weight in zip((out, out_far.to(out.dtype)), weights, strict=True))
    return near_part + far_part, both


def _near(call: Call, tensors: tuple[Tensor, ...], profiles: Tensor, band: _Band) -> tuple[Tensor, Tensor]:
    """Return out [B, S_local, H, Dv] and lse [B, S_local, H] over the keys of a band beside the diagonal."""
    held, width = call.held, band.reach - 1
    q, k, v, relative = map(held.flat, tensors)
    halos = call.halos([k, v], width)
    groups, outs = [], []
    for group, before in _groups(call, width, q.device):
        keys, values = (group.take(x) for x in (k, v))
        if before is not None:
            keys, values = (
                torch.cat([group.of_pieces(halo), x], 1) for halo, x in zip(halos, (keys, values), strict=True)
            )
        groups.append(group)
        outs.append(_BandFunction.apply(band, before, group.take(q), keys, values, group.take(relative), profiles))  # type: ignore[no-untyped-call]
    if groups:
        out, lse = (held.joined(groups, each) for each in zip(*outs, strict=True))
    else:
        out, lse = (
            q.new_zeros(shape, dtype=wide_dtype(q.dtype)) for shape in ((0, q.shape[1], v.shape[2]), (0, q.shape[1]))
        )
    # Also where all pieces begin documents, or there are none, so that all ranks have the same backward passes.
    out = call.tied(out, *halos, *(() if groups else call.tensors))
    return held.unflat(out), held.unflat(lse)


def _groups(call: Call, width: int, device: torch.device) -> Iterator[tuple[Group, Tensor | None]]:
    """Yield the pieces of this process in groups, and how many keys are before each piece, int64 [pieces].

    None for pieces that begin documents, which have none.
    """
    held = call.held
    enters = [width > 0 and held.pieces.every[number].before != START for number in held.numbers]
    for goes_on in (False, True):
        numbers = [n for n, each in enumerate(enters) if each is goes_on]
        for group in held.groups(numbers, device):
            counts = [_tokens_before(held.pieces, held.numbers[n], width) for n in group.pieces]
            yield group, torch.tensor(counts, device=device) if goes_on else None


def _tokens_before(pieces: Pieces, number: int, most: int) -> int:
    """Return how many tokens of its document come before a piece, `most` at most."""
    count, before = 0, pieces.every[number].before
    while before != START and count < most:
        count, before = count + pieces.every[before].length, pieces.every[before].before
    return min(count, most)


class _BandFunction(torch.autograd.Function):
    """The autograd function of a band's attention, which computes scores again in its backward pass.

    Arguments of `apply`: band; before: how many of the keys in front are of each piece's document, None without keys
    in front; q [N, L, H, D]; k, v [N, W + L, Hkv, ...], with the W tokens before each piece in front; relative
    [N, L, H, R]; profiles [R, extent]. Returns out [N, L, H, Dv] and lse [N, L, H], float32 at least.
    """

    @staticmethod
    def forward(ctx: Any, band: _Band, before: Tensor | None, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Compute out and lse, a chunk of queries at a time."""
        q, _, v = tensors[:3]
        out = q.new_empty((*q.shape[:3], v.shape[3]), dtype=wide_dtype(q.dtype))
        lse = q.new_empty(q.shape[:3], dtype=wide_dtype(q.dtype))
        with torch.autocast(q.device.type, enabled=False):
            for chunk in _chunks(band.reach, tensors):
                out[chunk.queries], lse[chunk.queries] = _attend(band, before, chunk, chunk.of(tensors))
        ctx.band, ctx.has_before = band, before is not None
        ctx.save_for_backward(*([] if before is None else [before]), *tensors)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the tensors, a chunk of queries at a time."""
        saved = ctx.saved_tensors
        before, tensors = (saved[0], saved[1:]) if ctx.has_before else (None, saved)
        grads = [torch.zeros_like(x, dtype=wide_dtype(x.dtype)) for x in tensors]
        with torch.autocast(dout.device.type, enabled=False), torch.enable_grad():
            for chunk in _chunks(ctx.band.reach, tensors):
                parts = [x.detach().requires_grad_() for x in chunk.of(tensors)]
                results = _attend(ctx.band, before, chunk, parts)
                upstream = (dout[chunk.queries], dlse[chunk.queries])
                for grad, part in zip(chunk.of(grads), torch.autograd.grad(results, parts, upstream), strict=True):
                    grad += part
        return None, None, *(grad.to(x.dtype) for grad, x in zip(grads, tensors, strict=True))


class _BandChunk(NamedTuple):
    """Some queries of some pieces, and the keys of their bands.

    queries, keys: slices of pieces and of tokens.
    ahead: how many of these keys are before the first query.
    own: which of these keys is the first token of the piece; below 0 if it comes before them.
    """

    queries: tuple[slice, slice]
    keys: tuple[slice, slice]
    ahead: int
    own: int

    def of(self, tensors: Any) -> list[Tensor]:
        """Return the parts of q, k, v, relative and profiles that the chunk works on."""
        q, k, v, relative, profiles = tensors
        return [q[self.queries], k[self.keys], v[self.keys], relative[self.queries], profiles]


def _chunks(reach: int, tensors: tuple[Tensor, ...]) -> Iterator[_BandChunk]:
    """Yield chunks that together have all queries once."""
    q, k = tensors[:2]
    count, length, heads = q.shape[:3]
    in_front = k.shape[1] - length
    tokens = min(length, QUERIES_AT_ONCE)
    pieces = max(
        1, BYTES_AT_ONCE // (heads * tokens * min(k.shape[1], tokens + reach) * wide_dtype(q.dtype).itemsize)
    )
    for first in range(0, count, pieces):
        rows = slice(first, min(first + pieces, count))
        for start in range(0, length, tokens):
            stop = min(start + tokens, length)
            since = max(0, in_front + start - reach + 1)
            queries, keys = (rows, slice(start, stop)), (rows, slice(since, in_front + stop))
            yield _BandChunk(queries, keys, in_front + start - since, in_front - since)


def _attend(
    band: _Band, before: Tensor | None, chunk: _BandChunk, tensors: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return out [N, L, H, Dv] and lse [N, L, H] of a chunk's queries on the keys of their bands.

    before: how many keys in front of each piece are of its document; None without keys in front. tensors: the parts
        of q, k, v, relative and profiles that the chunk works on.
    """
    q, k, v, relative, profiles = (x.to(wide_dtype(tensors[0].dtype)) for x in tensors)
    (count, queries, heads), (keys, kv_heads) = q.shape[:3], k.shape[1:3]
    by_group = q.view(count, queries, kv_heads, heads // kv_heads, -1)
    scores = torch.einsum("nagrd,nbgd->ngrab", by_group, k).reshape(count, heads, queries, keys) * band.scale
    places = torch.arange(keys, device=q.device)
    distance = torch.arange(queries, device=q.device).unsqueeze(1) + chunk.ahead - places
    biases = (relative @ profiles).transpose(1, 2)
    at = distance.clamp(0, profiles.shape[1] - 1).expand(count, heads, -1, -1)
    unseen = (distance < 0) | (distance >= band.reach)
    if before is not None:
        unseen = unseen | (places < chunk.own - before[chunk.keys[0]].view(-1, 1, 1, 1))
    scores = (scores + biases.gather(3, at)).masked_fill(unseen, -torch.inf)
    lse = torch.logsumexp(scores, 3)
    weights = torch.exp(scores - lse.unsqueeze(3)).view(count, kv_heads, heads // kv_heads, queries, keys)
    out = torch.einsum("ngrab,nbgd->nagrd", weights, v).reshape(count, queries, heads, -1)
    return out, lse.transpose(1, 2)
