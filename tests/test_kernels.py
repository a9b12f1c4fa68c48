"""Each kernel against float64, tile by tile, and that each refuses what it cannot do."""

from __future__ import annotations

import logging

import pytest
import torch

from burst_plugin import Causal, Full, Mask, Scores, SlidingWindow
from burst_plugin.kernels import FEATURES, KERNELS, Case, How, Queries, choose_kernel
from burst_plugin.kernels.dropout import keep
from burst_plugin.tiles import ANTICAUSAL, CAUSAL, FULL, Band
from tests.support.reference import Problem, Result, errors, reference

BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}
CASE = Case("cpu", torch.float32, 4, 2, 8, 8)
BANDS: dict[Band, Mask] = {FULL: Full(), CAUSAL: Causal(), ANTICAUSAL: SlidingWindow(0, None)}
RUNNABLE = [name for name, kernel in KERNELS.items() if kernel.refuse(CASE) is None]
SCALED = Scores(scale=8**-0.5)


def run(name: str, problem: Problem, how: How) -> Result:
    kernel = KERNELS[name]
    out, lse = kernel.forward(*problem[:3], how)
    assert lse.dtype == torch.promote_types(problem.q.dtype, torch.float32)
    grads = kernel.backward(Queries(problem.q, problem.dout, out.to(problem.q.dtype), lse), *problem[1:3], how)
    return Result(out, *grads[:3], None, grads.dbias)


@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("band", BANDS, ids=["full", "causal", "anticausal"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_kernels_are_exact(name: str, dtype: torch.dtype, band: Band, heads: tuple[int, int]) -> None:
    problem = Problem.draw(32, heads, dtype=dtype)
    result = run(name, problem, How(band, SCALED))
    for what, error in errors(result, reference(problem, BANDS[band])).items():
        assert error < BOUNDS[dtype], what


FEATURE_CASES = {
    "windows": (How(Band(-3, 1), SCALED), SlidingWindow(3, 1)),
    "head dims": (How(CAUSAL, SCALED), Causal()),
    "softcap": (How(CAUSAL, Scores(scale=8**-0.5, softcap=1.5)), Causal()),
    "alibi": (How(CAUSAL, Scores(scale=8**-0.5, alibi_slopes=(0.5, 0.25, 0.1, 0.0))), Causal()),
    "bias": (How(CAUSAL, SCALED), Causal()),
    "dropout": (How(CAUSAL, Scores(scale=8**-0.5, dropout=0.3, seed=5)), Causal()),
}


@pytest.mark.parametrize(
    ("name", "feature"),
    [(n, f) for n in RUNNABLE for f in KERNELS[n].features if f in FEATURE_CASES],
)
def test_kernels_can_do_what_they_say(name: str, feature: str) -> None:
    how, mask = FEATURE_CASES[feature]
    problem = Problem.draw(24, (4, 2), (8, 5) if feature == "head dims" else 8, torch.float64)
    if feature == "bias":
        problem = problem.with_bias((1, 4))
        how = how._replace(bias=problem.bias)
    if how.scores.needs_positions:
        how = how._replace(q_positions=torch.arange(24), k_positions=torch.arange(24))
    found = errors(run(name, problem, how), reference(problem, mask, how.scores))
    assert max(found.values()) < 1e-13, found
    assert ("dbias" in found) == (feature == "bias")


def test_every_feature_is_tested() -> None:
    assert {*FEATURE_CASES, "deterministic"} == set(FEATURES)
    assert all(kernel.features <= set(FEATURES) for kernel in KERNELS.values())
    assert KERNELS["reference"].features == set(FEATURES)


@pytest.mark.parametrize("name", [name for name in RUNNABLE if "deterministic" in KERNELS[name].features])
def test_deterministic_kernels_give_the_same_bits(name: str) -> None:
    problem = Problem.draw(200, (4, 2))
    one, other = (run(name, problem, How(CAUSAL, SCALED)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(one[:4], other[:4], strict=True))


@pytest.mark.parametrize("name", RUNNABLE)
def test_kernels_take_slices_and_strides(name: str) -> None:
    """Queries cut out of the middle, heads before rows in memory, and a last dim that is not dense."""
    problem = Problem.draw(24, (4, 2), dtype=torch.float64)
    strided = problem.q.transpose(1, 3).contiguous().transpose(1, 3)
    rows, kernel, how = slice(8, 24), KERNELS[name], How(FULL, Scores(scale=0.3))
    expected = kernel.forward(problem.q[:, rows].contiguous(), *problem[1:3], how)
    for got in (
        kernel.forward(problem.q[:, rows], *problem[1:3], how),
        kernel.forward(strided[:, rows], *problem[1:3], how),
    ):
        torch.testing.assert_close(got[0], expected[0])
        torch.testing.assert_close(got[1], expected[1])


def test_reference_bands_and_rows_without_a_key() -> None:
    q = torch.randn(1, 4, 1, 8, dtype=torch.float64)
    how = How(Band(1, 2), Scores(scale=1.0))
    out, lse = KERNELS["reference"].forward(q, q, q, how)
    assert torch.equal(out[:, 3], torch.zeros(1, 1, 8, dtype=torch.float64))
    assert torch.isneginf(lse[0, 0, 3])
    assert torch.equal(out[:, 2], q[:, 3])  # row 2 sees key 3 alone
    grads = KERNELS["reference"].backward(Queries(q, q, out, lse), q, q, how)
    assert all(bool(grad.isfinite().all()) for grad in grads[:3])
    assert torch.equal(grads[0][:, 3], torch.zeros(1, 1, 8, dtype=torch.float64))


@pytest.mark.parametrize("scores", [SCALED, Scores(scale=8**-0.5, dropout=0.2, alibi_slopes=(0.1, 0.01))], ids=str)
def test_reference_has_the_same_result_in_slices(scores: Scores) -> None:
    problem = Problem.draw(700, (2, 1), dtype=torch.float64)
    how = How(CAUSAL, scores, None, torch.arange(700), torch.arange(700))
    found = errors(run("reference", problem, how), reference(problem, Causal(), scores))
    assert max(found.values()) < 1e-13


def test_dropout_drops_its_share_and_depends_on_places_alone() -> None:
    scores, places = Scores(dropout=0.25, seed=1 << 40), torch.arange(400)
    whole = keep(scores, (0, 2, 3), places, places)
    assert sorted(whole.unique().tolist()) == pytest.approx([0, 1 / 0.75])
    assert abs(float((whole == 0).float().mean()) - 0.25) < 0.002
    part = keep(scores, (1, 1, 3), places[100:200], places[::7])
    assert torch.equal(part[0], whole[1][:, 100:200, ::7])
    dropped = (whole == 0).flatten(0, 1).float() - 0.25
    for other in (1, 2, 3, 5):  # rows, heads, queries and keys are independent of each other
        assert abs(float((dropped[0] * dropped[other]).mean())) < 0.002
    assert abs(float((dropped[:, 1:] * dropped[:, :-1]).mean())) < 0.002
    assert abs(float((dropped[:, :, 1:] * dropped[:, :, :-1]).mean())) < 0.002
    assert not torch.equal(whole, keep(Scores(dropout=0.25, seed=1), (0, 2, 3), places, places))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda"}, "runs on cpu, not on cuda"),
        ({"dtype": torch.float8_e4m3fn}, "not torch.float8_e4m3fn"),
        ({"features": frozenset({"softcap", "bias"})}, "it lacks: bias, softcap"),
    ],
)
def test_a_kernel_that_cannot_says_why_and_which_can(changes: dict[str, object], message: str) -> None:
    case = CASE._replace(**changes)
    with pytest.raises(ValueError, match=rf"kernel='torch_cpu' cannot .*{message}.*these can: \[.*'reference'\]"):
        choose_kernel("torch_cpu", case)


def test_auto_takes_the_fastest_that_can() -> None:
    assert choose_kernel("auto", CASE).name == "torch_cpu"
    assert choose_kernel("reference", CASE).name == "reference"
    assert choose_kernel("auto", CASE._replace(features=frozenset({"head dims"}))).name == "torch_cpu"


def test_a_fallback_to_something_slow_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    case = CASE._replace(features=frozenset({"softcap", "deterministic", "dropout", "bias"}))
    with caplog.at_level(logging.WARNING):
        assert {choose_kernel("auto", case).name for _ in range(3)} == {"reference"}
    assert len(caplog.messages) == 1
    assert "torch_cpu lacks: bias, dropout, softcap" in caplog.messages[0]
    assert "several times as long" in caplog.messages[0]
    caplog.clear()
    choose_kernel("auto", CASE)
    choose_kernel("reference", case)
    assert not caplog.messages, "what was asked for by name needs no telling"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 0.0}, r"softcap=0.0\) is not valid; use a positive number"),
        ({"dropout": 1.0}, r"dropout=1.0\) is not valid"),
        ({"scale": float("nan")}, "use a finite factor"),
    ],
)
def test_scores_that_make_no_sense_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scores(**options)
