"""Stand-ins for attention libraries and PyTorch's CUDA operators: what they document, computed on CPUs in float64.

They insist on what the real ones insist on (dense and aligned rows, whole head dims, the shape of the lse), and take
windows as the real ones do, each in its own way where there are more rows than keys.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from burst_plugin.kernels import library, trial


class Calls(list[dict[str, Any]]):
    """The options of every call, in order."""


class Terms(NamedTuple):
    """Everything between q . k and the softmax."""

    allowed: Tensor  # [Sq, Sk]
    scale: float
    softcap: float = 0.0
    bias: Tensor | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """(out [B, Sq, Hq, Dv], lse [B, Hq, Sq]); rows without a key have out 0 and an infinite lse."""
    scores, _ = _scores(q, k, terms)
    lse = scores.logsumexp(-1)
    p = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(0.0)
    out = p.matmul(_heads(v, q)).transpose(1, 2)
    return out.to(q.dtype).contiguous(), lse.masked_fill(lse == -torch.inf, torch.inf).to(_sum_dtype(q))


def gradients(rows: tuple[Tensor, ...], k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dbias) of rows = (dout, q, out, lse), with the lse as it is given."""
    dout, q, out, lse = rows
    scores, slope = _scores(q, k, terms)
    p = torch.exp(scores - lse.double().unsqueeze(-1))
    dout, out = dout.double().transpose(1, 2), out.double().transpose(1, 2)
    dbias = p * (dout.matmul(_heads(v, q).transpose(-1, -2)) - (dout * out).sum(-1, keepdim=True))
    ds = dbias * slope * terms.scale
    dk = ds.transpose(-1, -2).matmul(q.double().transpose(1, 2))
    dv = p.transpose(-1, -2).matmul(dout)
    dk, dv = (grad.unflatten(1, (k.shape[2], -1)).sum(2) for grad in (dk, dv))
    dq = ds.matmul(_heads(k, q))
    grads = (x.transpose(1, 2).contiguous().to(q.dtype) for x in (dq, dk, dv))
    return *grads, dbias.to(q.dtype)  # type: ignore[return-value]


def _scores(q: Tensor, k: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    scores = q.double().transpose(1, 2).matmul(_heads(k, q).transpose(-1, -2)) * terms.scale
    slope = torch.ones_like(scores)
    if terms.softcap:
        bent = torch.tanh(scores / terms.softcap)
        scores, slope = bent * terms.softcap, 1 - bent.square()
    if terms.bias is not None:
        scores = scores + terms.bias.double()
    return scores.masked_fill(~terms.allowed, -torch.inf), slope


def _heads(x: Tensor, q: Tensor) -> Tensor:
    return x.double().transpose(1, 2).repeat_interleave(q.shape[2] // x.shape[2], dim=1)


def _sum_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _ahead(q: Tensor, k: Tensor, *, bottom_right: bool) -> Tensor:
    """How far key j is ahead of row i, [Sq, Sk]."""
    corner = k.shape[1] - q.shape[1] if bottom_right else 0
    return torch.arange(k.shape[1]) - torch.arange(q.shape[1]).unsqueeze(1) - corner


def window_2(q: Tensor, k: Tensor, left: int, right: int) -> Tensor:
    """flash-attention 2: -1 is no bound, so is anything from the number of keys up; one bound alone makes the other
    as large as the number of keys.
    """
    assert q.shape[-1] <= 192 or q.shape[-1] == 256, "no backward kernel on some GPUs"
    keys, ahead = k.shape[1], _ahead(q, k, bottom_right=True)
    left, right = (-1 if side >= keys else side for side in (left, right))
    if left < 0 and right < 0:
        return torch.ones_like(ahead, dtype=torch.bool)
    left, right = (keys if side < 0 else side for side in (left, right))
    return (ahead >= -left) & (ahead <= right)


def window_3(q: Tensor, k: Tensor, left: int, right: int) -> Tensor:
    """flash-attention 3: -1 is no bound, so is anything that bounds nothing."""
    ahead = _ahead(q, k, bottom_right=True)
    left = k.shape[1] - 1 if left < 0 else left
    right = q.shape[1] - 1 if right < 0 else right
    return (ahead >= -left) & (ahead <= right)


def window_4(q: Tensor, k: Tensor, left: int | None, right: int | None) -> Tensor:
    """flash-attention 4: None is no bound."""
    ahead = _ahead(q, k, bottom_right=True)
    allowed = torch.ones_like(ahead, dtype=torch.bool)
    if left is not None and right is not None and left + right < 0:
        return allowed
    if left is not None:
        allowed &= ahead >= -left
    return allowed if right is None else allowed & (ahead <= right)


def from_top_left(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Causal as cuDNN and the memory-efficient kernel have it."""
    ahead = _ahead(q, k, bottom_right=False)
    return ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)


def demand(q: Tensor, k: Tensor, *others: Tensor, heads_first: bool = False) -> None:
    """What all of them want of their tensors."""
    dtype = q.dtype
    for x in (q, k, *others):
        assert x.dtype == dtype, f"{x.dtype} beside {dtype}"
        assert x.stride(-1) == 1, "the last dim is not dense"
        assert x.shape[-1] * x.element_size() % 16 == 0 or dtype == torch.float64
        starts = (stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1)
        assert not any(n * x.element_size() % 16 for n in (x.storage_offset(), *starts)), "rows are not aligned"
    heads = 1 if heads_first else 2
    assert q.shape[-1] == k.shape[-1]
    assert q.shape[heads] % k.shape[heads] == 0


def demand_flash(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> None:
    """And what flash-attention wants."""
    demand(q, k, v, *others)
    assert q.shape[-1] % 8 == 0
    assert q.shape[-1] == v.shape[-1] or (q.shape[-1], v.shape[-1]) == (192, 128)


def demand_dims_4(q: Tensor, v: Tensor) -> None:
    """What flash-attention 4 has kernels for on Blackwell."""
    dims = (q.shape[-1], v.shape[-1])
    assert max(dims) <= 128 or dims == (192, 128), dims


def demand_lse(lse: Tensor, q: Tensor) -> None:
    """[B, Hq, Sq], contiguous."""
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert lse.is_contiguous()
    assert lse.dtype == _sum_dtype(q)


def sequences(
    q: Tensor, k: Tensor, ends: tuple[Tensor, Tensor], longest: tuple[int, int]
) -> list[tuple[slice, slice]]:
    """The rows of every sequence in q [T, H, D] and in k, and what all of them want of that."""
    slices = []
    for x, end, most in zip((q, k), ends, longest, strict=True):
        assert x.dim() == 3
        assert end.dtype == torch.int32
        assert end.is_contiguous()
        at = end.tolist()
        assert (at[0], at[-1]) == (0, x.shape[0])
        assert max(stop - start for start, stop in pairwise(at)) == most
        slices.append([slice(start, stop) for start, stop in pairwise(at)])
    return list(zip(*slices, strict=True))


class Packed(NamedTuple):
    """Where sequences one after another end in q [T, H, D] and in k, and how long the longest are."""

    ends: tuple[Tensor, Tensor]
    longest: tuple[int, int]


def within(
    window: Callable[..., Tensor], sides: tuple[int | None, int | None], scale: float, softcap: float = 0.0
) -> Callable[[Tensor, Tensor], Terms]:
    """Return what makes the terms of q and k, from one of the ways to take a window."""
    return lambda q, k: Terms(window(q, k, *sides), scale, softcap)


def flash_forward(
    tensors: tuple[Tensor, Tensor, Tensor], terms: Callable[[Tensor, Tensor], Terms], packed: Packed | None = None
) -> tuple[Tensor, Tensor]:
    """Out and lse as of `attend`; of sequences that are packed, out [T, Hq, Dv] and lse [Hq, T]."""
    if packed is None:
        demand_flash(*tensors)
        return attend(*tensors, terms(*tensors[:2]))
    q, k, v = (x.unsqueeze(0) for x in tensors)
    demand_flash(q, k, v)
    found = [attend(q[:, a], k[:, b], v[:, b], terms(q[:, a], k[:, b])) for a, b in sequences(*tensors[:2], *packed)]
    return torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], 1)


def flash_backward(
    rows: tuple[Tensor, ...],
    k: Tensor,
    v: Tensor,
    terms: Callable[[Tensor, Tensor], Terms],
    packed: Packed | None = None,
    written: tuple[Tensor, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of rows = (dout, q, out, lse), also copied into those to be `written`; lse [Hq, T] if packed."""
    if packed is None:
        dout, q, out, lse = rows
        demand_flash(q, k, v, dout, out, *written)
        demand_lse(lse, q)
        dq, dk, dv, _ = gradients(rows, k, v, terms(q, k))
    else:
        each = sequences(rows[1], k, *packed)
        dout, q, out, lse, k, v = (x.unsqueeze(0) for x in (*rows, k, v))
        demand_flash(q, k, v, dout, out, *(x.unsqueeze(0) for x in written))
        assert lse.shape == (1, q.shape[2], q.shape[1])
        assert lse.is_contiguous()
        found = [
            gradients((dout[:, a], q[:, a], out[:, a], lse[:, :, a]), k[:, b], v[:, b], terms(q[:, a], k[:, b]))
            for a, b in each
        ]
        dq, dk, dv = (torch.cat([grads[n][0] for grads in found]) for n in range(3))
    for x, grad in zip(written, (dq, dk, dv), strict=False):
        x.copy_(grad)
    return dq, dk, dv


def _module(patch: pytest.MonkeyPatch, name: str, **contents: object) -> None:
    """A module `name`, and the packages that it is in."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        full = ".".join(parts[:length])
        if full not in sys.modules:
            module = ModuleType(full)
            module.__path__ = []
            patch.setitem(sys.modules, full, module)
    vars(sys.modules[name]).update(contents)
    library.find.cache_clear()


@contextmanager
def flash_attn_2(calls: Calls) -> Iterator[None]:
    """The package flash-attn, with the arguments of 2.7.0 to 2.8.3."""

    def forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        assert (dropout_p, causal, alibi_slopes, return_softmax) == (0.0, False, None, False)
        terms = within(window_2, (window_size_left, window_size_right), softmax_scale, softcap)
        return *flash_forward((q, k, v), terms), q.new_empty(0), torch.empty(2, dtype=torch.int64)

    def backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, causal, alibi_slopes, rng_state) == (0.0, False, None, None)
        calls.append({"deterministic": deterministic})
        terms = within(window_2, (window_size_left, window_size_right), softmax_scale, softcap)
        flash_backward((dout, q, out, softmax_lse), k, v, terms, written=(dq, dk, dv))
        return torch.empty(0)

    def varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    ):  # fmt: skip
        assert (dropout_p, causal, alibi_slopes, return_softmax) == (0.0, False, None, False)
        assert max_seqlen_q > 1, "heads of a group would be taken for its queries"
        packed = Packed((cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
        terms = within(window_2, (window_size_left, window_size_right), softmax_scale, softcap)
        return *flash_forward((q, k, v), terms, packed), q.new_empty(0), torch.empty(2, dtype=torch.int64)

    def varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, causal, alibi_slopes, rng_state) == (0.0, False, None, None)
        calls.append({"deterministic": deterministic})
        packed = Packed((cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
        terms = within(window_2, (window_size_left, window_size_right), softmax_scale, softcap)
        flash_backward((dout, q, out, softmax_lse), k, v, terms, packed, (dq, dk, dv))
        return torch.empty(0)

    with pytest.MonkeyPatch.context() as patch:
        _module(patch, "flash_attn", __version__="2.8.3")
        name = "flash_attn.flash_attn_interface"
        _module(patch, name, _flash_attn_forward=forward, _flash_attn_backward=backward)
        _module(patch, name, _flash_attn_varlen_forward=varlen_forward, _flash_attn_varlen_backward=varlen_backward)
        yield
    library.find.cache_clear()


@contextmanager
def flash_attn_3(calls: Calls, returned: int) -> Iterator[None]:
    """The operators of flash-attention 3; `returned` tensors come back from the backward one: 8 in v2.8, later 5.

    With 8 it refuses a v of another head dim than q and k, as early ones do.
    """
    options = (
        "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
        "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
        "float softcap=0.0"
    )

    # The dispatcher leaves out arguments that have their default value.
    def forward(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
        is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, num_splits=0, sm_margin=0,
    ):  # fmt: skip
        assert not is_causal
        assert num_splits == 1
        if sm_margin:
            calls.append({"sm_margin": sm_margin})
        packed = None
        if cu_seqlens_q is not None:
            packed = Packed((cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
        terms = within(window_3, (window_size_left, window_size_right), softmax_scale, softcap)
        return *flash_forward((q, k, v), terms, packed), q.new_empty(0), q.new_empty(0)

    def backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
        max_seqlen_k=None, softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1,
        softcap=0.0, deterministic=False,
    ):  # fmt: skip
        assert not is_causal
        assert returned == 5 or v.shape[-1] == q.shape[-1], "v must have shape (batch, seqlen, heads, head_size)"
        calls.append({"deterministic": deterministic, "v_dim": v.shape[-1]})
        packed = None
        if cu_seqlens_q is not None:
            packed = Packed((cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
        terms = within(window_3, (window_size_left, window_size_right), softmax_scale, softcap)
        flash_backward((dout, q, out, softmax_lse), k, v, terms, packed, (dq, dk, dv))
        return tuple(q.new_empty(0) for _ in range(returned))

    with pytest.MonkeyPatch.context() as patch, torch.library._scoped_library("flash_attn_3", "FRAGMENT") as ours:
        ours.define(
            f"fwd(Tensor q, Tensor k, Tensor v, {options}, int num_splits=0, int sm_margin=0) "
            "-> (Tensor, Tensor, Tensor, Tensor)"
        )
        grads = ", ".join(f"Tensor({name}!)? {name}=None" for name in ("dq", "dk", "dv"))
        tensors = ", ".join(["Tensor"] * returned)
        ours.define(
            "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
            f"{grads}, {options}, bool deterministic=False) -> ({tensors})"
        )
        ours.impl("fwd", forward, "CPU")
        ours.impl("bwd", backward, "CPU")
        _module(patch, "flash_attn_interface")
        trial.problem_on_device.cache_clear()  # what another release takes says nothing of this one
        yield
    library.find.cache_clear()
    trial.problem_on_device.cache_clear()


@contextmanager
def flash_attn_4(calls: Calls, returned: int, version: str = "4.0.0") -> Iterator[None]:
    """The package flash-attn-4; `returned` tensors come back from the forward function: 2 in betas, later 4."""

    def forward(
        q, k, v, softmax_scale=None, causal=False, softcap=None, window_size_left=None, window_size_right=None,
        return_lse=False,
    ):  # fmt: skip
        assert not causal
        assert return_lse
        demand_dims_4(q, v)
        terms = within(window_4, (window_size_left, window_size_right), softmax_scale, softcap or 0.0)
        return (*flash_forward((q, k, v), terms), None, None)[:returned]

    def backward(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, deterministic=False,
    ):  # fmt: skip
        assert not causal
        calls.append({"deterministic": deterministic})
        assert not any(x.shape[-1] % 32 for x in (q, v)), "dq would be laid out in another way than written"
        demand_dims_4(q, v)
        terms = within(window_4, (window_size_left, window_size_right), softmax_scale, softcap)
        return flash_backward((dout, q, out, lse), k, v, terms)

    installed = metadata.version
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "version", lambda name: version if name == "flash-attn-4" else installed(name))
        _module(patch, "flash_attn.cute.interface", _flash_attn_fwd=forward, _flash_attn_bwd=backward)
        yield
    library.find.cache_clear()


@contextmanager
def torch_flash(calls: Calls) -> Iterator[None]:
    """PyTorch's build of flash-attention 2."""

    def packed_of(q, k, ends, longest):
        if ends[0] is not None:
            return Packed(ends, longest)
        assert (*ends, *longest) == (None, None, q.shape[1], k.shape[1])
        return None

    def windowed(left, right, scale):
        return within(window_2, tuple(-1 if side is None else side for side in (left, right)), scale)

    def forward(
        q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale, window_size_left=None,
        window_size_right=None,
    ):  # fmt: skip
        assert (dropout, causal, debug) == (0.0, False, False)
        packed = packed_of(q, k, (cum_q, cum_k), (max_q, max_k))
        assert packed is None or max_q > 1, "heads of a group would be taken for its queries"
        terms = windowed(window_size_left, window_size_right, scale)
        return *flash_forward((q, k, v), terms, packed), *(torch.empty(0) for _ in range(3))

    def backward(
        dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, state, unused, *, scale,
        window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        assert (dropout, causal, state.dtype, unused.dtype) == (0.0, False, torch.uint64, torch.uint64)
        calls.append({"by": "torch_flash", "deterministic": torch.are_deterministic_algorithms_enabled()})
        packed = packed_of(q, k, (cum_q, cum_k), (max_q, max_k))
        return flash_backward((dout, q, out, lse), k, v, windowed(window_size_left, window_size_right, scale), packed)

    with _operators(_flash_attention_forward=forward, _flash_attention_backward=backward):
        yield


@contextmanager
def torch_cudnn(calls: Calls) -> Iterator[None]:
    """cuDNN's attention through PyTorch, beside flash-attention: heads before rows, and the lse [B, H, Sq, 1]."""

    def forward(q, k, v, bias, wants_lse, dropout=0.0, causal=False, debug=False, *, scale):
        assert (bias, wants_lse, dropout, debug) == (None, True, 0.0, False)
        demand(q, k, v, heads_first=True)
        assert k.shape[2] > 1, "cuDNN has no kernel for one key"
        calls.append({"by": "torch_cudnn", "strides": [x.stride() for x in (q, k, v)]})
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = attend(q, k, v, Terms(from_top_left(q, k, causal), scale))
        rest = (torch.empty(0) for _ in range(3))
        return out.transpose(1, 2), lse.unsqueeze(-1), None, None, q.shape[1], k.shape[1], *rest

    def backward(
        dout, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, causal, *, scale
    ):  # fmt: skip
        assert (bias, cum_q, cum_k, max_q, max_k) == (None, None, None, q.shape[2], k.shape[2])
        assert (dropout, seed.dtype, offset.dtype) == (0.0, torch.int64, torch.int64)
        demand(q, k, v, dout, out, heads_first=True)
        q, k, v, dout, out = (x.transpose(1, 2) for x in (q, k, v, dout, out))
        demand_lse(lse.squeeze(-1), q)
        assert lse.ndim == 4
        assert lse.data_ptr() % 16 == 0
        terms = Terms(from_top_left(q, k, causal), scale)
        return tuple(x.transpose(1, 2) for x in gradients((dout, q, out, lse.squeeze(-1)), k, v, terms)[:3])

    name = "_scaled_dot_product_cudnn_attention"
    with torch_flash(calls), _operators(**{name: forward, f"{name}_backward": backward}):
        yield


@contextmanager
def torch_efficient(calls: Calls) -> Iterator[None]:
    """PyTorch's memory-efficient attention: no grouped heads, lse padded to 32 rows, gaps in the bias' gradient."""

    def in_base_2(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor | None:
        if bias is None:
            return None
        assert bias.shape == (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        assert bias.dtype == q.dtype
        assert bias.stride(-1) == 1
        assert not any(stride % 8 for stride in bias.stride()[:-1])
        return bias.masked_fill((bias.float() * 1.442695).isneginf(), -torch.inf)

    def forward(q, k, v, bias, cu_q, cu_k, max_q, max_k, dropout, mask, wants_lse, *, scale):
        assert (cu_q, cu_k, max_q, max_k, dropout, wants_lse) == (None, None, None, None, 0.0, True)
        demand(q, k, v)
        assert q.shape[2] == k.shape[2] == v.shape[2]
        bias = in_base_2(q, k, bias)
        out, lse = attend(q, k, v, Terms(from_top_left(q, k, {0: False, 1: True}[mask]), scale, bias=bias))
        lse = lse.masked_fill(lse == torch.inf, 0.0)  # of a row that a bias keeps from all keys
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf)
        return out, lse, torch.empty(0), torch.empty(0), q.shape[1], k.shape[1]

    def backward(
        dout, q, k, v, bias, out, cu_q, cu_k, max_q, max_k, lse, dropout, seed, offset, mask, bias_requires_grad, *,
        scale, num_splits_key=None,
    ):  # fmt: skip
        assert (cu_q, cu_k, max_q, max_k, dropout) == (None, None, q.shape[1], k.shape[1], 0.0)
        assert seed.dtype == offset.dtype == torch.int64
        calls.append({"deterministic": num_splits_key == 1})
        demand(q, k, v, dout, out)
        assert q.shape[2] == k.shape[2] == v.shape[2]
        assert out.is_contiguous()
        assert dout.is_contiguous()
        bias = in_base_2(q, k, bias)
        rows = q.shape[1]
        assert lse.shape[2] % 32 == 0
        assert lse.is_contiguous()
        assert bool(torch.isposinf(lse[:, :, rows:]).all())
        terms = Terms(from_top_left(q, k, {0: False, 1: True}[mask]), scale, bias=bias)
        dq, dk, dv, dbias = gradients((dout, q, out, lse[:, :, :rows]), k, v, terms)
        dbias = dbias.masked_fill(~terms.allowed, torch.nan)  # blocks that are skipped are never written
        return dq, dk, dv, dbias if bias_requires_grad else torch.empty(0)

    with _operators(_efficient_attention_forward=forward, _efficient_attention_backward=backward):
        yield


@contextmanager
def _operators(**functions: Callable[..., Any]) -> Iterator[None]:
    """Operators of PyTorch that have no kernel for CPUs, with one."""
    with torch.library._scoped_library("aten", "IMPL") as ours:
        for name, function in functions.items():
            ours.impl(name, function, "CPU")
        yield


# By what a test is called: (the kernel, what puts its stand-in in place).
INSTALL: dict[str, tuple[str, Callable[[Calls], Any]]] = {
    "flash_attn_2": ("flash_attn_2", flash_attn_2),
    "flash_attn_3 v2.8": ("flash_attn_3", lambda calls: flash_attn_3(calls, 8)),
    "flash_attn_3": ("flash_attn_3", lambda calls: flash_attn_3(calls, 5)),
    "flash_attn_4 beta": ("flash_attn_4", lambda calls: flash_attn_4(calls, 2)),
    "flash_attn_4": ("flash_attn_4", lambda calls: flash_attn_4(calls, 4)),
    "torch_flash": ("torch_flash", torch_flash),
    "torch_cudnn": ("torch_cudnn", torch_cudnn),
    "torch_efficient": ("torch_efficient", torch_efficient),
}
