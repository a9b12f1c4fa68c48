"""Multi-head latent attention (MLA, arXiv 2405.04434) on a ring that sends latents, not keys and values.

`compute.up_projection` makes keys and values from latents where these arrive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor

from burst_plugin.attention import Terms, ring_attention
from burst_plugin.context import ContextParallel
from burst_plugin.ring.choices import why_expanded
from burst_plugin.ring.request import Inputs, Request
from burst_plugin.scores import Scores
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.masks import Causal, Mask

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing since 3.11


@overload
def latent_attention(
    q: Tensor,
    latents: Tensor,
    shared_keys: Tensor,
    cp: ContextParallel,
    *,
    weight: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    return_max_logits: Literal[False] = ...,
    **terms: Unpack[Terms],
) -> Tensor: ...


@overload
def latent_attention(
    q: Tensor,
    latents: Tensor,
    shared_keys: Tensor,
    cp: ContextParallel,
    *,
    weight: Tensor | None = ...,
    return_lse: bool = ...,
    return_max_logits: bool = ...,
    **terms: Unpack[Terms],
) -> Tensor | tuple[Tensor, ...]: ...


def latent_attention(
    q: Tensor,
    latents: Tensor,
    shared_keys: Tensor,
    cp: ContextParallel,
    *,
    weight: Tensor | None = None,
    mask: Mask = Causal(),
    softmax_scale: float | None = None,
    scores: Scores = Scores(),
    sink: Tensor | None = None,
    bias: Tensor | None = None,
    selection: Tensor | None = None,
    tokens: Tokens | tuple[Tokens, Tokens] | None = None,
    tag: object = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Compute `burst_attention` with keys and values that travel as latents, and are made where they arrive (MLA).

    With DeepSeek V3's 128 heads 576 numbers per token are sent, and kept for the backward pass, in place of 40,960.
    In exchange every rank projects the latents of all ranks, and does so again in the backward pass.

    Args:
        q: [B, S_local, Hq, D].
        latents: [B, S_local, 1, C], normalised, as the up-projection takes them.
        shared_keys: [B, S_local, 1, R], the last R of the D dims of every head's keys, with rotary embedding.
        cp, mask, scores, sink, bias, selection, tokens, tag, return_lse, return_max_logits: as for `burst_attention`.
        weight: of the up-projection, [Hq * (D - R + Dv), C], of each head its keys' D - R rows, then its values' Dv.
            Equal on all ranks. Its gradient comes from this rank's queries: sum it over ranks. None: queries are in
            the space of latents, D = C + R, and so is out, Dv = C.
        softmax_scale: the factor on scores, `D ** -0.5` if None.

    Returns:
        out [B, S_local, Hq, Dv] in the type of q. A tuple if more is asked for.

    Raises:
        ValueError, RingError: as `burst_attention`; also where heads are exchanged, or cut into parts.
    """
    inputs = Inputs(q, latents, shared_keys, sink, bias, selection, weight)
    pair = tokens if isinstance(tokens, tuple) else (tokens, tokens)
    request = Request(mask, scores, pair, return_max_logits, return_lse, softmax_scale, latents=True)
    outputs = ring_attention(inputs, request, cp, tag)
    return outputs.out if not (return_lse or return_max_logits) else outputs.asked_for(request)


def sends_latents(cp: ContextParallel, problem: str = "") -> bool:
    """Return whether the ring of `cp` sends latents in MLA, rather than keys and values made of them.

    With `Strategy.latents` "auto" it does if there are several ranks, heads are neither exchanged nor cut into parts,
    and there is no `problem`; with "send" always; with "expand" never.

    `problem` says what in a layer keeps it from sending latents; "" if nothing does. Raises ValueError if
    latents="send", and the layer or the strategy keeps the ring from it.
    """
    strategy = cp.strategy
    if strategy.latents == "expand":
        return False
    if not problem:
        problem = why_expanded(strategy)
    if problem and strategy.latents == "send":
        raise ValueError(f"latents='send' is not possible: {problem}; use latents='auto'")
    return not problem and (cp.ranks > 1 or strategy.latents == "send")
