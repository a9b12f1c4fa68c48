"""`compute.triton_softmax` held against `compute.online_softmax` in float64, on any device.

In a process with TRITON_INTERPRET=1 they run on CPUs: `python -m tests.support.fused_cases`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.compute import online_softmax as softmax

_SHAPES = ((2, 67, 3, 24), (1, 1, 1, 1), (1, 40, 2, 128), (2, 9, 2, 192), (1, 2, 1, 4000))
_FAN_IN = 4
_TAKEN = (
    (True, 1),
    (False, 2),
    (True, _FAN_IN),
    (False, _FAN_IN + 1),
    (False, _FAN_IN + 2),
)  # whether the sum is filled, how many parts
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Case(NamedTuple):
    """Tensors in some strides; `surroundings` are the storages that out and lse are cut out of."""

    name: str
    out: Tensor
    lse: Tensor
    other_out: Tensor
    other_lse: Tensor
    surroundings: tuple[Tensor, Tensor]


def _dense(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone()
    return x, x


def _rows_of_more(x: Tensor) -> tuple[Tensor, Tensor]:
    """Some tokens of a longer tensor."""
    dim = 1 if x.dim() == 4 else 2
    longer = torch.cat([torch.full_like(x, 7.0), x, torch.full_like(x, 7.0)], dim)
    return longer.narrow(dim, x.shape[dim], x.shape[dim]), longer


def _heads_first(x: Tensor) -> tuple[Tensor, Tensor]:
    """[B, S, H, D] laid out as [B, H, S, D], and [B, H, S] as [B, S, H]."""
    storage = x.transpose(1, 2).contiguous()
    return storage.transpose(1, 2), storage


def _every_other(x: Tensor) -> tuple[Tensor, Tensor]:
    storage = torch.stack([x, torch.full_like(x, 7.0)], -1).flatten(-2)
    return storage[..., ::2], storage


_STRIDES: tuple[Callable[[Tensor], tuple[Tensor, Tensor]], ...] = (_rows_of_more, _dense, _heads_first, _every_other)
_PAIRS = tuple(zip(_STRIDES, (*_STRIDES[1:], _STRIDES[0]), strict=True))
_OF_TYPE = {torch.float32: _PAIRS, torch.bfloat16: _PAIRS[::2], torch.float16: _PAIRS[1::2]}


def _cases(device: str) -> Iterator[_Case]:
    generator = torch.Generator().manual_seed(0)
    for shape in _SHAPES:
        for dtype in _TYPES:
            for ours, theirs in _OF_TYPE[dtype] if shape == _SHAPES[0] else _PAIRS[:1]:
                batch, length, heads, _ = shape
                out, other = (torch.randn(shape, generator=generator) for _ in range(2))
                lse, other_lse = (torch.randn(batch, heads, length, generator=generator) * 20 for _ in range(2))
                for x, rows, logs in ((out, slice(0, 3), lse), (other, slice(2, 5), other_lse)):
                    if length > 5:  # of both, row 2 attends to nothing
                        x[:, rows], logs[:, :, rows] = 0.0, -torch.inf
                if length > 9:
                    lse[:, :, 6:8] += 1e4
                    lse[:, :, 8] = torch.finfo(torch.float32).min
                tensors = (out.to(device), lse.to(device), other.to(device, dtype), other_lse.to(device))
                (out, around), (lse, around_lse) = (ours(x) for x in tensors[:2])
                (other, _), (other_lse, _) = (theirs(x) for x in tensors[2:])
                name = f"{shape}, {dtype}, {ours.__name__}, {theirs.__name__}"
                yield _Case(name, out, lse, other, other_lse, (around, around_lse))


def check_all(device: str) -> int:
    """Return how many cases there are; raise AssertionError for the first that is wrong."""
    count = 0
    for case in _cases(device):
        for check in (_check_merges, _check_additions, _check_rounding, _check_delta_and_factor):
            try:
                check(case)
            except AssertionError as error:
                raise AssertionError(f"{check.__name__}: {case.name}: {error}") from error
        count += 1
    return count


def _check_merges(case: _Case) -> None:
    """Of one part, of several, and of more than go at once; into what holds values, and into what holds none."""
    from burst_plugin.compute import triton_softmax as fused

    assert fused.FAN_IN == _FAN_IN
    held = case.out.clone(), case.lse.clone()
    others = [case[3:5], *((case.other_out.roll(n, 1), case.other_lse.roll(n, 2)) for n in range(1, _FAN_IN + 2))]
    kept = [x.clone() for part in others for x in part]
    for filled, count in _TAKEN:
        truth, truth_lse = (x.double() for x in held)
        softmax.merge_(truth, truth_lse, [(out.double(), lse.double()) for out, lse in others[:count]], filled)
        for x, value in zip(case[1:3], held, strict=True):
            x.copy_(value) if filled else x.fill_(torch.nan)
        before = [x.clone() for x in case.surroundings]
        fused.merge_(case.out, case.lse, others[:count], filled)
        torch.testing.assert_close(case.lse.double(), truth_lse, rtol=2e-7, atol=1e-6)
        torch.testing.assert_close(case.out.double(), truth, rtol=4e-6, atol=4e-6)  # the weight's: 1 ulp of 20 in lse
        _check_surroundings(case, before)
    assert all(torch.equal(x, y) for x, y in zip((x for part in others for x in part), kept, strict=True))
    for x, value in zip(case[1:3], held, strict=True):
        x.copy_(value)


def _check_additions(case: _Case) -> None:
    """As of merges."""
    from burst_plugin.compute import triton_softmax as fused

    held, before = case.out.clone(), [x.clone() for x in case.surroundings]
    others = [case.other_out.roll(n, 1) if n else case.other_out for n in range(_FAN_IN + 2)]
    for filled, count in _TAKEN:
        truth = sum((x.double() for x in others[:count]), held.double() if filled else 0.0)
        case.out.copy_(held) if filled else case.out.fill_(torch.nan)
        fused.add_(case.out, others[:count], filled)
        torch.testing.assert_close(case.out.double(), truth, rtol=1e-6, atol=1e-6)
        _check_surroundings(case, before)
    case.out.copy_(held)


def _check_rounding(case: _Case) -> None:
    """Of a sum and what still waits for it, into tensors of the type of what waits."""
    from burst_plugin.compute import triton_softmax as fused

    for count in (1, 2, _FAN_IN):
        parts = [case[1:3]] + [case[3:5]] * count
        truth, truth_lse = (x.double() for x in case[1:3])
        softmax.merge_(truth, truth_lse, [(out.double(), lse.double()) for out, lse in parts[1:]])
        out, lse = (torch.full_like(x, torch.nan) for x in case[3:5])
        fused.merge_(out, lse, parts, False)
        torch.testing.assert_close(out, truth.to(out.dtype), rtol=2 * torch.finfo(out.dtype).eps, atol=4e-6)
        torch.testing.assert_close(lse.double(), truth_lse, rtol=2e-7, atol=1e-6)
        fused.add_(out, [out for out, _ in parts], False)
        total = case.out.double() + count * case.other_out.double()
        torch.testing.assert_close(out, total.to(out.dtype), rtol=2 * torch.finfo(out.dtype).eps, atol=4e-6)


def _check_surroundings(case: _Case, before: Sequence[Tensor]) -> None:
    """What lies between the rows of out and lse is as it was."""
    for whole, part, was in zip(case.surroundings, case[1:3], before, strict=True):
        found = part.clone()
        part.zero_()
        outside = whole != 0
        assert torch.equal(whole[outside], was[outside]), "what lies between the rows was written to"
        part.copy_(found)


def _check_delta_and_factor(case: _Case) -> None:
    from burst_plugin.compute import triton_softmax as fused

    dout = case.other_out
    for magnitude in (1.0, 1e-30) if dout.is_contiguous() and dout.dtype != torch.float16 else (1.0,):
        scaled = dout if magnitude == 1.0 else dout * magnitude
        truth = softmax.row_delta(case.out.double(), scaled.double())
        found = fused.row_delta(case.out, scaled)
        size = case.out.double().norm() * scaled.double().norm()
        assert float((found.double() - truth).norm()) <= 1e-6 * float(size)
        factor, wanted = fused.row_factor(case.out, scaled), softmax.row_factor(case.out.double(), scaled.double())
        assert float((factor.double() - wanted).norm()) <= 2e-6 * float(wanted.norm())
        assert bool((factor.transpose(1, 2)[(scaled == 0).all(-1)] == 0).all())
    spoilt = case.out.clone()
    spoilt[0, 0, 0, 0] = torch.nan
    assert fused.row_factor(spoilt, dout).isnan().nonzero().tolist() == [[0, 0, 0]]


if __name__ == "__main__":
    print(check_all("cpu"), "cases")
