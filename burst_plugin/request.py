"""What is asked for: a rank's tensors, and the options of a call; checked one by one."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from burst_plugin.layout import Tokens
from burst_plugin.mask import Causal, Mask
from burst_plugin.scores import Scores

__all__ = ["Inputs", "Outputs", "Request", "check_extras", "check_tensors"]


class Inputs(NamedTuple):
    """A rank's tensors, see `burst_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None = None
    bias: Tensor | None = None


class Outputs(NamedTuple):
    """out [B, S, Hq, Dv], lse [B, Hq, S] and, if asked for, the largest scores [Hq] of what this rank worked on.

    Where heads are exchanged, lse too is there only if it is asked for.
    """

    out: Tensor
    lse: Tensor | None
    max_logits: Tensor | None = None


class Request(NamedTuple):
    """What is asked for besides tensors, see `burst_attention`. `tokens` are those of the queries and of the keys."""

    mask: Mask = Causal()
    scores: Scores = Scores()
    tokens: tuple[Tokens | None, Tokens | None] = (None, None)
    max_logits: bool = False
    lse: bool = False


def check_extras(inputs: Inputs, kv_length: int) -> None:
    """Raise ValueError unless sink and bias fit; `kv_length` is that of the whole sequence of keys."""
    q, heads = inputs.q, inputs.q.shape[2]
    for name, extra in (("sink", inputs.sink), ("bias", inputs.bias)):
        if extra is None:
            continue
        check_local(name, extra)
        if extra.device != q.device:
            raise ValueError(f"{name} is on {extra.device}, but q, k, v are on {q.device}; move it there")
    if inputs.sink is not None and (inputs.sink.shape != (heads,) or not inputs.sink.is_floating_point()):
        raise ValueError(
            f"sink must be floating point [{heads}], one logit per query head, got {inputs.sink.dtype} "
            f"{list(inputs.sink.shape)}"
        )
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


def check_local(name: str, x: Tensor) -> None:
    """Raise ValueError for a DTensor, whose shape is not that of what a rank holds."""
    if hasattr(x, "to_local"):
        raise ValueError(f"{name} is a {type(x).__name__}; pass {name}.to_local(), what this rank holds")


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless a rank's q, k, v can attend."""
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
            "x.to(...)"
        )
