"""The request for attention: a rank's tensors and the options of a call, each checked by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from burst_plugin.checks import as_whole, shown, unreadable
from burst_plugin.compute.shapes import Shapes
from burst_plugin.kernels import Queries
from burst_plugin.scores import Scores
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.masks import Causal, Mask

_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Inputs(NamedTuple):
    """The tensors of one rank in an attention call: q, k, v and optional ones; see `burst_attention`.

    q: [B, S_local, Hq, D]. k, v: [B, S_local, Hkv, D or Dv]; for `latent_attention`, latents [B, S_local, 1, C] and
        the part of keys that heads share [B, S_local, 1, R], which travel.
    sink: [Hq], a logit per head.
    bias: [1 or B, 1 or Hq, S_local, S_global].
    selection: [B, S_local, n] or [B, G, S_local, n], positions of keys.
    weight: of `latent_attention`, by which keys and values are made from latents.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None = None
    bias: Tensor | None = None
    selection: Tensor | None = None
    weight: Tensor | None = None


class Wanted(NamedTuple):
    """Which optional gradients a backward pass computes: of bias and weight, each by a computation of its own.

    from_lse: whether any rank may have a gradient of lse, which ranks that exchange heads then send each other.
    """

    bias: bool = True
    weight: bool = True
    from_lse: bool = True

    @classmethod
    def of(cls, needed: Sequence[bool]) -> Wanted:
        """Return the wanted gradients, from whether each field of `Inputs`, in order, needs a gradient."""
        by_name = dict(zip(Inputs._fields, needed, strict=True))
        return cls(by_name["bias"], by_name["weight"])


ALL_WANTED = Wanted()


class ExtraTensors(TypedDict, total=False):
    """A dict of the optional inputs of attention, by name, which few calls have."""

    sink: Tensor | None
    bias: Tensor | None
    selection: Tensor | None


class Outputs(NamedTuple):
    """The outputs of attention on one rank: out [B, S, Hq, Dv], lse [B, Hq, S], and the largest scores.

    lse: always there on the ring; where heads are exchanged, afterwards only if it is asked for.
    max_logits: [Hq], the largest scores of each head that this rank worked on; None unless asked for.
    """

    out: Tensor
    lse: Tensor | None
    max_logits: Tensor | None = None

    def asked_for(self, request: Request) -> tuple[Tensor, ...]:
        """Return (out,), followed by lse and by max_logits if `request` asks for them."""
        wanted = (True, request.lse, request.max_logits)
        return tuple(x for x, wants in zip(self, wanted, strict=True) if wants and x is not None)


class BackwardOperands(NamedTuple):
    """The operands of a backward pass on the ring: the tensors of queries, and all inputs of the forward pass.

    factor: [B, H, S], what queries that travel send in place of out; None if they send out, or do not travel.
    """

    queries: Queries
    inputs: Inputs
    factor: Tensor | None


class Request(NamedTuple):
    """The arguments of an attention call besides tensors, see `burst_attention`.

    tokens: of (queries, keys): the sequence that the rows are taken from; None if it is cut evenly.
    max_logits, lse: whether the largest scores, and lse, are to be returned.
    scale: the factor on scores if it is given beside `scores`, until `scaled` moves it there.
    forward: the side that moves in the forward pass, in place of the strategy's option; None for the option.
    latents: whether keys and values are made from latents where these arrive.
    """

    mask: Mask = Causal()
    scores: Scores = Scores()
    tokens: tuple[Tokens | None, Tokens | None] = (None, None)
    max_logits: bool = False
    lse: bool = False
    scale: float | None = None
    forward: str | None = None
    latents: bool = False


def both_sides(tokens: Tokens | tuple[Tokens, Tokens] | None) -> tuple[Tokens | None, Tokens | None]:
    """Return the tokens of (queries, keys); one `Tokens`, or None, stands for both sides."""
    return tokens if isinstance(tokens, tuple) else (tokens, tokens)


def has_gradients(inputs: Inputs) -> bool:
    """Return whether autograd records a call with these tensors: in grad mode, if any of them requires a gradient."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def check_kinds(inputs: Inputs, request: Request) -> None:
    """Raise ValueError for an argument of a wrong type, before other checks read it."""
    for name, x in zip(Inputs._fields, inputs, strict=True):
        if x is None and name in Inputs._field_defaults:
            continue
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} is {shown(x)}, not a tensor; pass what this rank holds as a torch.Tensor")
        elsewhere = x.is_meta and name in Inputs._field_defaults  # than q, k, v: `check_extras` says so
        if unreadable(x) and not elsewhere:
            raise ValueError(f"{name} is a tensor {unreadable(x)}")
    check_mask(request.mask)
    if not isinstance(request.scores, Scores):
        raise ValueError(f"scores={shown(request.scores)} is not a Scores; write Scores(scale=..., softcap=...)")
    tokens = request.tokens
    if len(tokens) != 2 or not all(isinstance(x, Tokens | None) for x in tokens):
        got = tokens[0] if len(tokens) == 2 and tokens[0] is tokens[1] else tokens
        raise ValueError(
            f"tokens={shown(got)} is not valid; use Tokens(length), or, for cross attention, a pair of them as a "
            "tuple: those of the queries, and those of the keys"
        )
    for name, flag in (("return_lse", request.lse), ("return_max_logits", request.max_logits)):
        if not isinstance(flag, bool):
            raise ValueError(f"{name}={shown(flag)} is not valid; use True or False")


def check_mask(mask: object) -> None:
    """Raise ValueError if `mask` is not a `Mask`; the message names the mask to use in place of a common mistake."""
    if isinstance(mask, Mask):
        kind = type(mask)
        if kind.__hash__ is None or kind.__repr__ is object.__repr__:
            raise ValueError(
                f"mask is a {kind.__name__}, which cannot be compared between ranks: write @dataclass(frozen=True) "
                "above its class"
            )
        return
    if isinstance(mask, type) and issubclass(mask, Mask):
        raise ValueError(f"mask is the class {mask.__name__}; pass an object of it, {mask.__name__}(...)")
    if isinstance(mask, Tensor):
        raise ValueError(
            f"mask is {shown(mask)}, not a mask; key_padding(valid) makes one of a bool tensor [batch, all keys], "
            "BlockMask.of(allowed, block) of one [query blocks, key blocks]; Causal(), SlidingWindow(left) and "
            "Documents(cu_seqlens) need none"
        )
    raise ValueError(f"mask={shown(mask)} is not a mask; use one of the masks of burst_plugin, such as Causal()")


def as_tokens(tokens: Tokens | int, or_length: bool = False) -> Tokens:
    """Return `tokens` as a `Tokens`; with `or_length` it may be the sequence's length. Else raise ValueError."""
    if isinstance(tokens, Tokens):
        return tokens
    if or_length:
        return Tokens(tokens)
    raise ValueError(
        f"tokens={shown(tokens)} is not valid; use Tokens(length), with the length of the whole sequence"
    )


def token_dim(name: str, x: object, dim: object) -> int:
    """Return the number of the dimension `dim` of `x`, from 0. Raise ValueError if `x` lacks it or is no tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is {shown(x)}, not a tensor; pass a torch.Tensor")
    if unreadable(x) and not x.is_meta:
        raise ValueError(f"{name} is a tensor {unreadable(x)}")
    index = as_whole(dim)
    if index is None or not -x.ndim <= index < x.ndim:
        raise ValueError(
            f"dim={shown(dim)} is not a dimension of {name} {list(x.shape)}; use that of tokens, such as dim=1"
        )
    return index % x.ndim


def scaled(request: Request) -> Request:
    """Return `request` with its `scale` moved into its scores. Raise ValueError if these have one of their own."""
    if request.scale is None:
        return request
    if request.scores.scale is not None:
        raise ValueError(
            f"got softmax_scale={shown(request.scale)} and scores with scale={request.scores.scale}, which mean the "
            "same; give one"
        )
    return request._replace(scores=replace(request.scores, scale=request.scale), scale=None)


def check_extras(inputs: Inputs, kv_length: int) -> None:
    """Raise ValueError unless sink, bias, selection and weight fit; `kv_length` counts the whole sequence of keys."""
    q, heads = inputs.q, inputs.q.shape[2]
    for name, extra in (
        ("sink", inputs.sink),
        ("bias", inputs.bias),
        ("selection", inputs.selection),
        ("weight", inputs.weight),
    ):
        if extra is None:
            continue
        check_local(name, extra)
        check_type(name, extra.dtype)
        if extra.device != q.device:
            raise ValueError(f"{name} is on {extra.device}, but q, k, v are on {q.device}; move it there")
    if inputs.sink is not None and (inputs.sink.shape != (heads,) or not inputs.sink.is_floating_point()):
        raise ValueError(
            f"sink must be floating point [{heads}], one logit per query head, got {inputs.sink.dtype} "
            f"{list(inputs.sink.shape)}"
        )
    if inputs.selection is not None:
        _check_selection(inputs.selection, inputs)
    bias = inputs.bias
    if bias is None:
        return
    expected = (q.shape[0], heads, q.shape[1], kv_length)
    shape = tuple(bias.shape)
    shared = tuple(1 if n == 1 else m for n, m in zip(shape[:2], expected, strict=False)) + expected[2:]
    if shape != shared or not bias.is_floating_point():
        raise ValueError(
            f"bias must be floating point [1 or batch, 1 or query heads, local queries, all keys], here "
            f"{list(expected)}, got {bias.dtype} {list(bias.shape)}"
        )


def _check_selection(selection: Tensor, inputs: Inputs) -> None:
    """Raise ValueError unless there are positions of keys for every query."""
    (batch, length), kv_heads = inputs.q.shape[:2], inputs.k.shape[2] if inputs.weight is None else 1
    by_group = selection if selection.dim() == 4 else selection.unsqueeze(1)
    fits = selection.dim() in (3, 4) and by_group.shape[0] == batch and by_group.shape[2] == length
    if (
        selection.dtype not in (torch.int32, torch.int64)
        or not fits
        or not by_group.shape[3]
        or not by_group.shape[1]
        or kv_heads % by_group.shape[1]
    ):
        raise ValueError(
            "selection must be int32 or int64 [batch, local queries, keys per query], positions in the whole "
            f"sequence and -1 for none, here [{batch}, {length}, keys per query], or one list for each group of "
            f"the {kv_heads} key/value heads, [{batch}, groups, {length}, keys per query]; got {selection.dtype} "
            f"{list(selection.shape)}"
        )


def check_local(name: str, x: Tensor) -> None:
    """Raise ValueError if `x`, called `name`, is a DTensor, whose shape is not the shape of this rank's tensor."""
    if hasattr(x, "to_local"):
        raise ValueError(f"{name} is a {type(x).__name__}; pass {name}.to_local(), what this rank holds")


def check_type(name: str, dtype: torch.dtype) -> None:
    """Raise ValueError if tensor `name` has a floating-point type that attention does not support, such as 8 bits."""
    if dtype.is_floating_point and dtype not in _TYPES:
        raise ValueError(
            f"{name} has type {dtype}, but attention is computed in float64, float32, bfloat16 or float16; cast it "
            "with x.to(torch.bfloat16), and multiply by the scale that it was quantized with"
        )


def shapes_of(inputs: Inputs, latents: bool) -> Shapes:
    """Return the local shapes of a call, read from its tensors; raise ValueError if these do not fit together.

    latents: whether `inputs.k` and `inputs.v` are latents and the part of keys that heads share.
    """
    if latents:
        return _latent_shapes(inputs)
    q, k, v = inputs[:3]
    check_tensors(q, k, v)
    return Shapes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.dtype)


def _latent_shapes(inputs: Inputs) -> Shapes:
    """Return the shapes of a call whose keys and values are made of latents."""
    (q, c, shared), weight = inputs[:3], inputs.weight
    for name, x in (("q", q), ("latents", c), ("shared_keys", shared)):
        check_local(name, x)
    shapes = f"q {list(q.shape)}, latents {list(c.shape)}, shared_keys {list(shared.shape)}"
    if weight is not None:
        shapes += f", weight {list(weight.shape)}"
    if not q.dim() == c.dim() == shared.dim() == 4 or c.shape[:3] != shared.shape[:3] or c.shape[2] != 1:
        raise ValueError(
            "expected q [batch, local tokens, heads, head dim], latents and shared_keys [batch, local tokens, 1, "
            f"width], got {shapes}"
        )
    own_dim, heads, width = q.shape[3] - shared.shape[3], q.shape[2], c.shape[3]
    if weight is None:
        fits, v_dim = own_dim == width, width
        expected = f"queries of {width} + {shared.shape[3]} numbers, since there is no weight"
    else:
        fits = weight.dim() == 2 and weight.shape[1] == width and own_dim > 0 and weight.shape[0] % heads == 0
        v_dim = weight.shape[0] // heads - own_dim if fits else 0
        fits = fits and v_dim > 0
        expected = f"a weight [{heads} heads * ({own_dim} + value dim), {width}]"
    if not fits or q.shape[0] != c.shape[0] or 0 in (q.shape[0], heads, width):
        raise ValueError(f"q, latents, shared_keys and weight do not fit together: {shapes}; expected {expected}")
    kinds = {(str(x.dtype), str(x.device)) for x in (q, c, shared, weight) if x is not None}
    if len(kinds) > 1 or not q.is_floating_point():
        raise ValueError(
            f"q, latents, shared_keys and weight must share one floating-point type and one device, got "
            f"{sorted(kinds)}; cast or move them with x.to(...)"
        )
    check_type("q", q.dtype)
    kv_heads = 1 if weight is None else heads
    latent = (width, shared.shape[3])
    return Shapes(q.shape[0], q.shape[1], c.shape[1], heads, kv_heads, q.shape[3], v_dim, q.dtype, latent)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless a rank's q, k and v fit together.

    q has to be [batch, local queries, heads, head dim], k and v [batch, local keys, key/value heads, .], with heads a
    multiple of key/value heads, of one floating-point type that attention supports, on one device.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_local(name, x)
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"expected q, k, v of shape [batch, local tokens, heads, head dim], got {shapes}")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q, k, v do not fit together: {shapes}; batches must be equal, k and v must have the same tokens and "
            "heads, q and k the same head dim"
        )
    if 0 in (q.shape[0], *q.shape[2:], *k.shape[2:], *v.shape[2:]):
        raise ValueError(f"tensors without batch, heads or head dim cannot attend: {shapes}; leave such a call out")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} key/value heads; repeat key/value heads or "
            "change the number of query heads"
        )
    kinds = {(str(x.dtype), str(x.device)) for x in (q, k, v)}
    if len(kinds) > 1 or not q.is_floating_point():
        raise ValueError(
            f"q, k, v must share one floating-point type and one device, got {sorted(kinds)}; cast or move them with "
            "x.to(...), such as q.to(v.dtype), also under autocast, which does not cast them"
        )
    check_type("q", q.dtype)
