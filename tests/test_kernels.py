"""Each kernel against float64, tile by tile, and that each refuses what it cannot do."""

from __future__ import annotations

import pytest
import torch

from burst_plugin import Causal, Full
from burst_plugin.kernels import KERNELS, Case, Queries, choose_kernel
from burst_plugin.mask import CAUSAL, FULL, Band
from tests.support.reference import NAMES, Problem, reference, relative

BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}
CASE = Case("cpu", torch.float32, 4, 2, 8, 8, frozenset({FULL, CAUSAL}))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("band", [FULL, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_kernels_are_exact(name: str, dtype: torch.dtype, band: Band, heads: tuple[int, int]) -> None:
    problem = Problem.draw(32, heads, dtype=dtype)
    truth = reference(problem, Full() if band == FULL else Causal())
    kernel, scale = KERNELS[name], 8**-0.5
    out, lse = kernel.forward(*problem[:3], band, scale)
    assert out.dtype == lse.dtype == torch.promote_types(dtype, torch.float32)
    grads = kernel.backward(Queries(problem.q, problem.dout, out.to(dtype), lse), *problem[1:3], band, scale)
    for what, x, y in zip(NAMES, (out, *grads), truth, strict=True):
        assert relative(x, y) < BOUNDS[dtype], what


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_take_slices_and_strides(name: str) -> None:
    """Queries cut out of the middle, heads before rows in memory, and a last dim that is not dense."""
    problem = Problem.draw(24, (4, 2), dtype=torch.float64)
    strided = problem.q.transpose(1, 3).contiguous().transpose(1, 3)
    rows, kernel = slice(8, 24), KERNELS[name]
    expected = kernel.forward(problem.q[:, rows].contiguous(), *problem[1:3], FULL, 0.3)
    for got in (
        kernel.forward(problem.q[:, rows], *problem[1:3], FULL, 0.3),
        kernel.forward(strided[:, rows], *problem[1:3], FULL, 0.3),
    ):
        torch.testing.assert_close(got[0], expected[0])
        torch.testing.assert_close(got[1], expected[1])


def test_reference_bands_and_rows_without_a_key() -> None:
    q = torch.randn(1, 4, 1, 8, dtype=torch.float64)
    out, lse = KERNELS["reference"].forward(q, q, q, Band(1, 2), 1.0)
    assert torch.equal(out[:, 3], torch.zeros(1, 1, 8, dtype=torch.float64))
    assert torch.isneginf(lse[0, 0, 3])
    assert torch.equal(out[:, 2], q[:, 3])  # row 2 sees key 3 alone
    grads = KERNELS["reference"].backward(Queries(q, q, out, lse), q, q, Band(1, 2), 1.0)
    assert all(bool(grad.isfinite().all()) for grad in grads)
    assert torch.equal(grads[0][:, 3], torch.zeros(1, 1, 8, dtype=torch.float64))


def test_reference_has_the_same_result_in_slices() -> None:
    problem = Problem.draw(700, (2, 1), dtype=torch.float64)
    out, _ = KERNELS["reference"].forward(*problem[:3], CAUSAL, 8**-0.5)
    assert relative(out, reference(problem, Causal()).out) < 1e-14


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda"}, "runs on cpu, not on cuda"),
        ({"dtype": torch.float8_e4m3fn}, "not torch.float8_e4m3fn"),
        ({"v_dim": 4}, "not 8 for q, k and 4 for v"),
        ({"bands": frozenset({Band(-3, 0)})}, "full and causal tiles only"),
    ],
)
def test_a_kernel_that_cannot_says_why_and_which_can(changes: dict[str, object], message: str) -> None:
    case = CASE._replace(**changes)
    with pytest.raises(ValueError, match=rf"kernel='torch_cpu' cannot .*{message}.*these can: \['reference'\]"):
        choose_kernel("torch_cpu", case)
    assert choose_kernel("auto", case).name == "reference"


def test_auto_takes_the_fastest_that_can() -> None:
    assert choose_kernel("auto", CASE).name == "torch_cpu"
    assert choose_kernel("reference", CASE).name == "reference"
