from __future__ import annotations

import pytest
import torch

from burst_plugin.compute.online_softmax import add_, add_sink, merge_, project, row_delta, row_factor, sink_grad


def _attention(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, S, H, D], lse [B, H, S]) of scores [B, H, S, K]; rows of -inf give 0 and -inf."""
    out = torch.einsum("bhsk,bkhd->bshd", scores.softmax(-1).nan_to_num(0.0), values)
    return out, scores.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 1000.0, -1000.0])
def test_merging_parts_gives_the_whole(dtype: torch.dtype, offset: float) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 5, 8, generator=generator, dtype=torch.float64) * 3
    scores[..., 4:] += offset  # far apart: exp of either lse alone overflows or underflows
    values = torch.randn(2, 8, 3, 4, generator=generator, dtype=torch.float64)
    truth, truth_lse = _attention(scores, values)
    out, lse = (x.to(dtype) for x in _attention(scores[..., :1], values[:, :1]))
    others = [_attention(scores[..., keys], values[:, keys]) for keys in (slice(1, 4), slice(4, 8))]
    merge_(out, lse, [(other_out.to(dtype), other_lse.to(dtype)) for other_out, other_lse in others])
    tolerance = 1e-6 if dtype is torch.float32 else 1e-14
    torch.testing.assert_close(out.double(), truth, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), truth_lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_sums_of_parts(count: int, filled: bool) -> None:
    parts = [torch.full((1, 2, 1, 4), 10.0**n, dtype=torch.bfloat16) for n in range(count)]
    total = torch.full((1, 2, 1, 4), 0.5 if filled else torch.nan)
    add_(total, parts, filled)
    assert bool((total == (1.0 if count == 1 else 111.0) + 0.5 * filled).all())


@pytest.mark.parametrize("empty", ["first", "second", "both"])
def test_rows_that_attend_to_nothing_never_become_nan(empty: str) -> None:
    full = torch.ones(1, 2, 1, 4), torch.zeros(1, 1, 2)
    nothing = torch.zeros(1, 2, 1, 4), torch.full((1, 1, 2), -torch.inf)
    out, lse = (x.clone() for x in (full if empty == "second" else nothing))
    merge_(out, lse, [full if empty == "first" else nothing])
    expected = nothing if empty == "both" else full
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 1e3, 1e25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_projection_keeps_delta_and_is_no_longer_than_the_output(dtype: torch.dtype, magnitude: float) -> None:
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(2, 6, 3, 16, generator=generator).to(dtype)
    dout = (torch.randn(2, 6, 3, 16, generator=generator) * magnitude).to(dtype)
    delta = row_delta(out, dout)
    shadow = project(dout, row_factor(out, dout))
    assert shadow.dtype == torch.promote_types(dtype, torch.float32)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    scale = out.double().norm(dim=-1) * dout.double().norm(dim=-1)
    error = (row_delta(shadow.double(), dout.double()) - delta.double()).abs().transpose(1, 2) / scale
    assert float(error.max()) < tolerance
    assert bool((shadow.double().norm(dim=-1) <= out.double().norm(dim=-1) * (1 + tolerance)).all())


def test_projection_on_gradients_too_small_to_divide_by_is_finite() -> None:
    for dtype, tiny in ((torch.float32, 1e-38), (torch.bfloat16, 1e-38), (torch.float64, 1e-307)):
        out, dout = torch.full((1, 1, 1, 4), 1e3, dtype=dtype), torch.full((1, 1, 1, 4), tiny, dtype=dtype)
        factor = row_factor(out, dout)
        assert bool(factor.isfinite().all())
        shadow = project(dout, factor)
        assert bool((shadow.abs() <= out * 1.01).all())
        assert bool((shadow > 0).all())


def test_projection_on_a_zero_gradient_is_zero() -> None:
    dout = torch.zeros(1, 2, 1, 4)
    dout[:, 1] = 1.0
    shadow = project(dout, row_factor(torch.full((1, 2, 1, 4), 0.5), dout))
    assert torch.equal(shadow[:, 0], torch.zeros(1, 1, 4))
    assert torch.equal(shadow[:, 1], torch.full((1, 1, 4), 0.5))


def test_a_sink_of_minus_infinity_is_none() -> None:
    """Not even where a query attends to nothing else."""
    out, lse, sink = torch.randn(1, 2, 1, 4), torch.tensor([[[0.5, -torch.inf]]]), torch.tensor([-torch.inf])
    out[:, 1] = 0.0
    same, both = add_sink(out, lse, sink)
    assert torch.equal(same, out)
    assert torch.equal(both, lse)
    assert torch.equal(sink_grad(sink, out, torch.randn_like(out), both), torch.zeros(1))
