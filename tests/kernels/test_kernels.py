"""Each kernel against float64, tile by tile, and that each refuses what it cannot do."""

from __future__ import annotations

import logging
from itertools import product
from typing import NamedTuple

import pytest
import torch

from burst_plugin import Causal, Documents, Full, Mask, Scores, SlidingWindow, Strategy, Topology, VirtualRing
from burst_plugin.kernels import FEATURES, KERNELS, Case, How, Queries, Selection, choose_kernel, torch_cpu_bf16
from burst_plugin.kernels import reference as reference_kernel
from burst_plugin.kernels.flash import Ask
from burst_plugin.kernels.reference import keep
from burst_plugin.kernels.torch_cpu import TorchCpuKernel
from burst_plugin.kernels.torch_cpu_bf16 import TorchCpuBf16Kernel
from burst_plugin.kernels.torch_flash import TorchFlashKernel
from burst_plugin.kernels.varlen import lengths_of
from burst_plugin.types import ANTICAUSAL, CAUSAL, FULL, Band
from tests.support.reference import Problem, Result, errors, painted, reference, relative

BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}
GPU_BOUNDS = {torch.float64: 1e-14, torch.float32: 5e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
CASE = Case("cpu", torch.float32, 4, 2, 8, 8)
BANDS: dict[Band, Mask] = {FULL: Full(), CAUSAL: Causal(), ANTICAUSAL: SlidingWindow(0, None)}
SCALED = Scores(scale=8**-0.5)
# Around the lengths at which the kernel for CPUs turns to whole vector registers, and to a second block of keys.
NOT_FINITE_SHAPES = [
    *((FULL, 5, keys) for keys in (1, 7, 8, 15, 16, 17, 520)),
    *((CAUSAL, rows, rows) for rows in (1, 7, 9, 15, 17, 33)),
    (ANTICAUSAL, 7, 7),
]
CPU_RUNS = [
    (name, dtype)
    for name, kernel in KERNELS.items()
    if kernel.limits.device == "cpu"
    for dtype in kernel.limits.dtypes
]


class Run(NamedTuple):
    """A kernel on a device."""

    name: str
    device: str

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """What it takes, widest first."""
        return tuple(t for t in BOUNDS if t in (KERNELS[self.name].limits.dtypes or BOUNDS))

    def bound(self, dtype: torch.dtype) -> float:
        """Relative: libraries for GPUs round probabilities, and every part of a sum, to 16 bits before they go on.

        So does one kernel for CPUs.
        """
        return (GPU_BOUNDS if self.device == "cuda" or self.name == TorchCpuBf16Kernel.name else BOUNDS)[dtype]


def runs(*, feature: str = "", dtypes: bool = False) -> list[object]:
    """Every kernel, with `feature`, where it can run here; for CUDA with the mark gpu, and skipped with a reason."""
    found = []
    for name, kernel in KERNELS.items():
        for device in ("cpu", "cuda") if kernel.limits.device is None else (kernel.limits.device,):
            if feature and feature not in kernel.features:
                continue
            where = Run(name, device)
            features = frozenset({feature} if feature else ())
            case = CASE._replace(device=device, dtype=where.dtypes[-1], features=features)
            if device == "cpu" and kernel.refuse(case):  # it is for another feature
                continue
            why = kernel.refuse(case) or (None if torch.cuda.is_available() else "there is no CUDA device")
            gpu = () if device == "cpu" else (pytest.mark.gpu, pytest.mark.skipif(bool(why), reason=f"{name}: {why}"))
            values = [(where, dtype) for dtype in where.dtypes] if dtypes else [(where,)]
            found += [
                pytest.param(*value, marks=gpu, id=" ".join(map(str, (*where, *value[1:])))) for value in values
            ]
    return found


def run(where: Run | str, problem: Problem, how: How) -> Result:
    """Forward and backward on a device; what comes back is on the CPU."""
    name, device = where if isinstance(where, Run) else (where, "cpu")
    kernel = KERNELS[name]
    problem = Problem(*(None if x is None else x.to(device) for x in problem))
    how = how._replace(**{n: x.to(device) for n, x in how._asdict().items() if isinstance(x, torch.Tensor)})
    if how.selection is not None:
        how = how._replace(selection=Selection(*(x.to(device) for x in how.selection)))
    if how.lengths is not None:
        how = how._replace(lengths=lengths_of(*how.lengths[:2], torch.device(device)))
    out, lse = kernel.forward(*problem[:3], how)
    assert lse.dtype == torch.promote_types(problem.q.dtype, torch.float32)
    grads = kernel.backward(Queries(problem.q, problem.dout, out.to(problem.q.dtype), lse), *problem[1:3], how)
    return Result(*(None if x is None else x.cpu() for x in (out, *grads[:3], None, grads.dbias)))


def test_the_reference_works_on_as_few_rows_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, how = Problem.draw(19, (4, 2), dtype=torch.float64), How(CAUSAL, SCALED)
    expected = run("reference", problem, how)
    monkeypatch.setattr(reference_kernel, "MOST_SCORES", 2 * 4 * 19 * 5)
    assert len(list(reference_kernel.row_slices(problem.q, problem.k))) == 4
    for one, other in zip(run("reference", problem, how), expected, strict=True):
        assert one is other is None or (one is not None and torch.allclose(one, other, rtol=1e-12))


@pytest.mark.parametrize(("where", "dtype"), runs(dtypes=True))
@pytest.mark.parametrize("band", BANDS, ids=["full", "causal", "anticausal"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_kernels_are_exact(where: Run, dtype: torch.dtype, band: Band, heads: tuple[int, int]) -> None:
    problem = Problem.draw(32, heads, dtype=dtype)
    result = run(where, problem, How(band, SCALED))
    for what, error in errors(result, reference(problem, BANDS[band])).items():
        assert error < where.bound(dtype), what


@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize(("name", "dtype"), CPU_RUNS, ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (2, 1)], ids=str)
def test_what_is_not_finite_is_kept_and_spreads_no_further(
    where: str, bad: float, name: str, dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    """NaN stays NaN as in the reference kernel; what is not finite spreads no further than in plain attention."""
    for (band, *lengths), place in product(NOT_FINITE_SHAPES, (0.0, 0.5, 1.0)):
        problem, what = Problem.draw((lengths[0], lengths[1]), heads, dtype=dtype), (band, *lengths, place)
        tensor = getattr(problem, where)
        tensor[1, int(place * (tensor.shape[1] - 1)), 0, 3] = bad
        how = How(band, SCALED)
        lse, expected_lse = (KERNELS[each].forward(*problem[:3], how)[1] for each in (name, "reference"))
        assert bool((lse.isnan() | ~expected_lse.isnan()).all()), what
        assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf), what
        results = (run(name, problem, how), run("reference", problem, how), plain(problem, BANDS[band]))
        for found, expected, freely in zip(*(result[:4] for result in results), strict=True):
            finite, expected_finite = found.isfinite(), expected.isfinite()
            assert bool((finite | ~expected_finite | ~freely.isfinite()).all()), what
            assert torch.allclose(found[finite & expected_finite], expected[finite & expected_finite], 0.1, 0.1), what
        row = tensor.isfinite().all(-1).all(-1)[1].logical_not()
        rows = row if where in ("q", "dout") else (painted(BANDS[band], 1, *lengths)[0] & row).any(-1)
        for found, expected in zip(*(result[:2] for result in results[:2]), strict=True):
            assert bool((found.isnan() | ~expected.isnan())[:, rows].all()), what


@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_ring_keeps_nan_in_its_row(dtype: torch.dtype, backward: str) -> None:
    """A window over a long sequence gives a rank tiles of a few keys."""
    problem = Problem.draw(64, (2, 2), dtype=dtype)
    problem.q[1, 20, 0, 3] = torch.nan
    inputs = [x.clone().requires_grad_() for x in problem[:3]]
    out, lse = VirtualRing(Topology(2, 2), Strategy(backward=backward)).attention(*inputs, mask=SlidingWindow(5))
    dq, dk, dv = torch.autograd.grad(out, inputs, problem.dout)
    assert lse.isnan().nonzero().tolist() == [[1, 0, 20]]
    for rows in (out, dq):
        assert rows.isnan().nonzero()[:, :3].unique(dim=0).tolist() == [[1, 20, 0]]
    for keys in (dk, dv):
        touched = keys.isnan().nonzero()[:, :3].unique(dim=0).tolist()
        assert all([1, key, 0] in touched for key in range(15, 21))
        assert all(batch == 1 and head == 0 for batch, _, head in touched)


def plain(problem: Problem, mask: Mask) -> tuple[torch.Tensor, ...]:
    """Out, dq, dk and dv by masked scores and a softmax in float64; nothing that is not finite is taken out."""
    q, k, v = (x.double().requires_grad_() for x in problem[:3])
    keys, values = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) * SCALED.scale
    outside = ~painted(mask, 2, *scores.shape[2:]).unsqueeze(1)
    out = torch.einsum("bhij,bjhd->bihd", scores.masked_fill(outside, -torch.inf).softmax(-1), values)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), problem.dout.double())


@pytest.mark.parametrize("where", runs())
@pytest.mark.parametrize("shape", [(128, 256), (256, 128), (384, 384), (192, 256), (256, 192)])
def test_large_tiles_with_low_scores(where: Run, shape: tuple[int, int]) -> None:
    """Where all scores are below the logarithm of float32's range, cuDNN's faults show (see its kernel)."""
    low = Problem.draw(shape, (8, 2), 64, where.dtypes[0])
    low.q[..., 0], low.k[..., 0] = 16.0, -60.0
    scores = Scores(scale=64**-0.5)
    found, truth = run(where, low, How(FULL, scores)), reference(low, Full(), scores)
    assert float(attention_scores(low, scores).amax()) < -88.7
    assert all(bool(x.isfinite().all()) for x in found[:4])
    bound = where.bound(where.dtypes[0])
    if where.dtypes[0] is torch.float32:  # which rounds scores of 16 * 60 before they are scaled
        bound = max(bound, 8 * 2**-24 * 960 * scores.scale)
    # All queries and all keys are alike in their first dim, where gradients are differences of large numbers.
    for name, got, expected in zip(("out", "dq", "dk", "dv"), found[:4], truth[:4], strict=True):
        assert relative(got[..., 1:], expected[..., 1:]) < bound, name


@pytest.mark.parametrize("band", BANDS, ids=["full", "causal", "anticausal"])
@pytest.mark.parametrize("shape", [(32, 32), (35, 35)], ids=str)
def test_squares_of_a_tile_are_added_up(shape: tuple[int, int], band: Band, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_cpu_bf16, "ROWS", 8)
    problem = Problem.draw(shape, (4, 2), dtype=torch.bfloat16)
    found = errors(run("torch_cpu_bf16", problem, How(band, SCALED)), reference(problem, BANDS[band]))
    assert max(found.values()) < GPU_BOUNDS[torch.bfloat16], found


@pytest.mark.parametrize(("tokens", "heads"), [(8192, (1, 1)), (2048, (8, 1))])
def test_gradients_in_bfloat16_are_as_good_for_long_sequences_and_grouped_heads(
    tokens: int, heads: tuple[int, int]
) -> None:
    """PyTorch's own attention, which adds them up in bfloat16, is off by twice as much."""
    problem, how = Problem.draw(tokens, heads, 16, torch.bfloat16), How(CAUSAL, SCALED)
    truth = run("torch_cpu", Problem(*(None if x is None else x.double() for x in problem)), how)
    found = run("torch_cpu_bf16", problem, how)
    for name, got, expected in zip(("dq", "dk", "dv"), found[1:4], truth[1:4], strict=True):
        assert relative(got, expected) < 5e-3, name


def attention_scores(problem: Problem, scores: Scores) -> torch.Tensor:
    """Of the first head and batch row."""
    found: torch.Tensor = problem.q[0, :, 0].double() @ problem.k[0, :, 0].double().T * scores.scale
    return found


LENGTHS = lengths_of((7, 1, 16) * 2, (7, 1, 16) * 2, torch.device("cpu"))  # of two batch rows
FEATURE_CASES = {
    "windows": (How(Band(-3, 1), SCALED), SlidingWindow(3, 1)),
    "varlen": (How(CAUSAL, SCALED, lengths=LENGTHS), Causal() & Documents((0, 7, 8, 24))),
    "head dims": (How(CAUSAL, SCALED), Causal()),
    "softcap": (How(CAUSAL, Scores(scale=8**-0.5, softcap=1.5)), Causal()),
    "alibi": (How(CAUSAL, Scores(scale=8**-0.5, alibi_slopes=(0.5, 0.25, 0.1, 0.0))), Causal()),
    "bias": (How(CAUSAL, SCALED), Causal()),
    "dropout": (How(CAUSAL, Scores(scale=8**-0.5, dropout=0.3, seed=5)), Causal()),
    "selection": (How(CAUSAL, SCALED), Causal()),
}


@pytest.mark.parametrize(
    ("where", "feature"),
    [pytest.param(*p.values, f, marks=p.marks, id=f"{p.id} {f}") for f in FEATURE_CASES for p in runs(feature=f)],
)
def test_kernels_can_do_what_they_say(where: Run, feature: str) -> None:
    how, mask = FEATURE_CASES[feature]
    dtype = where.dtypes[0]
    problem = Problem.draw(24, (4, 2), (8, 5) if feature == "head dims" else 8, dtype)
    if feature == "bias":
        problem = problem.with_bias((1, 4))
        how = how._replace(bias=problem.bias)
    if feature == "selection":
        problem = problem.with_selection(2, 9)
        how = how._replace(selection=Selection(problem.selection, torch.arange(24)))
    if how.scores.needs_positions:
        how = how._replace(q_positions=torch.arange(24), k_positions=torch.arange(24))
    found = errors(run(where, problem, how), reference(problem, mask, how.scores))
    bound = 1e-13 if dtype == torch.float64 else where.bound(dtype)
    assert all(error < bound for error in found.values()), found
    assert ("dbias" in found) == (feature == "bias")


def test_every_feature_is_tested() -> None:
    assert {*FEATURE_CASES, "deterministic"} == set(FEATURES)
    assert all(kernel.features <= set(FEATURES) for kernel in KERNELS.values())
    assert KERNELS["reference"].features == set(FEATURES)


@pytest.mark.parametrize("where", runs(feature="deterministic"))
def test_deterministic_kernels_give_the_same_bits(where: Run) -> None:
    problem = Problem.draw(200, (4, 2), dtype=where.dtypes[-1])
    one, other = (run(where, problem, How(CAUSAL, SCALED, deterministic=True)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(one[:4], other[:4], strict=True))


@pytest.mark.parametrize("where", runs())
def test_kernels_take_slices_and_strides(where: Run) -> None:
    """Queries cut out of the middle, heads before rows in memory, and a last dim that is not dense."""
    q, k, v = (x.to(where.device) for x in Problem.draw(24, (4, 2), dtype=where.dtypes[0])[:3])
    strided = q.transpose(1, 3).contiguous().transpose(1, 3)
    rows, kernel, how = slice(8, 24), KERNELS[where.name], How(FULL, Scores(scale=0.3))
    expected = kernel.forward(q[:, rows].contiguous(), k, v, how)
    for got in (kernel.forward(q[:, rows], k, v, how), kernel.forward(strided[:, rows], k, v, how)):
        torch.testing.assert_close(got[0], expected[0])
        torch.testing.assert_close(got[1], expected[1])


@pytest.mark.parametrize("where", runs(feature="windows"))
@pytest.mark.parametrize("shape", [(200, 300), (300, 200), (130, 40), (40, 130)])
@pytest.mark.parametrize("seen", [(20, 30), (0, 7), (150, 0)])
def test_windows_of_unlike_sides(where: Run, shape: tuple[int, int], seen: tuple[int, int]) -> None:
    """Counted from the top left corner, where rows and keys are not as many."""
    dtype = where.dtypes[0]
    rows = min(shape[0], shape[1] + seen[0])  # every query has a key
    problem = Problem.draw((rows, shape[1]), (4, 2), 16, dtype)
    found = errors(
        run(where, problem, How(Band(-seen[0], seen[1]), SCALED)), reference(problem, SlidingWindow(*seen), SCALED)
    )
    bound = 1e-13 if dtype == torch.float64 else where.bound(dtype)
    assert all(error < bound for error in found.values()), found


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


@pytest.mark.parametrize(
    "scores", [SCALED, Scores(scale=8**-0.5, dropout=0.2, seed=0, alibi_slopes=(0.1, 0.01))], ids=str
)
@pytest.mark.parametrize("bias", [None, (1, 1), (2, 2)], ids=str)
def test_reference_has_the_same_result_in_slices(scores: Scores, bias: tuple[int, int] | None) -> None:
    problem = Problem.draw(700, (2, 1), dtype=torch.float64)
    problem = problem if bias is None else problem.with_bias(bias)
    how = How(CAUSAL, scores, problem.bias, torch.arange(700), torch.arange(700))
    found = errors(run("reference", problem, how), reference(problem, Causal(), scores))
    assert all(error < 1e-13 for error in found.values())


def test_dropout_drops_its_share_and_depends_on_places_alone() -> None:
    scores, places = Scores(dropout=0.25, seed=1 << 40), torch.arange(400)
    whole = keep(scores, range(2), range(3), places, places)
    assert sorted(whole.unique().tolist()) == pytest.approx([0, 1 / 0.75])
    assert abs(float((whole == 0).float().mean()) - 0.25) < 0.002
    part = keep(scores, range(1, 2), range(3), places[100:200], places[::7])
    assert torch.equal(part[0], whole[1][:, 100:200, ::7])
    dropped = (whole == 0).flatten(0, 1).float() - 0.25
    for other in (1, 2, 3, 5):  # rows, heads, queries and keys are independent of each other
        assert abs(float((dropped[0] * dropped[other]).mean())) < 0.002
    assert abs(float((dropped[:, 1:] * dropped[:, :-1]).mean())) < 0.002
    assert abs(float((dropped[:, :, 1:] * dropped[:, :, :-1]).mean())) < 0.002
    for seed in (0, 1, 1 << 39, 1 + (1 << 40)):
        assert not torch.equal(whole, keep(Scores(dropout=0.25, seed=seed), range(2), range(3), places, places)), seed


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
    for asked_for in ("torch_cpu", TorchCpuKernel()):
        with pytest.raises(ValueError, match=rf"kernel='torch_cpu' cannot .*{message}.*these can: \[.*'reference'\]"):
            choose_kernel(asked_for, case)


def test_a_kernel_of_ones_own_is_taken_as_it_is() -> None:
    own = TorchCpuKernel()
    assert choose_kernel(own, CASE) is own is not choose_kernel("torch_cpu", CASE)


@pytest.mark.parametrize(
    ("processor", "dtype", "name"),
    [
        ({"avx512_bf16": True}, torch.bfloat16, "torch_cpu_bf16"),
        ({"avx512_bf16": True}, torch.float16, "torch_cpu"),
        ({"avx512_bf16": False}, torch.bfloat16, "torch_cpu"),
        ({"architecture": "aarch64"}, torch.bfloat16, "torch_cpu"),
        (None, torch.bfloat16, "torch_cpu"),
    ],
    ids=str,
)
def test_bfloat16_is_multiplied_where_the_processor_does_so_fast(
    processor: dict[str, object] | None, dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)  # as in PyTorch 2.11
    if processor is not None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor, raising=False)
    case = CASE._replace(dtype=dtype)
    assert choose_kernel("auto", case).name == name
    if name == "torch_cpu":
        with pytest.raises(ValueError, match=r"torch_cpu_bf16' cannot .*(no avx512_bf16|not torch.float16)"):
            choose_kernel("torch_cpu_bf16", case)


def test_auto_takes_the_fastest_that_can() -> None:
    assert choose_kernel("auto", CASE).name == "torch_cpu"
    assert choose_kernel("reference", CASE).name == "reference"
    assert choose_kernel("auto", CASE._replace(features=frozenset({"head dims"}))).name == "torch_cpu"


def test_a_fallback_to_something_slow_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    case = CASE._replace(features=frozenset({"softcap", "deterministic", "dropout", "bias"}))
    with caplog.at_level(logging.WARNING):
        assert {choose_kernel("auto", case).name for _ in range(3)} == {"reference"}
    assert len(caplog.messages) == 1
    assert "(torch_cpu: it lacks: bias, dropout, softcap)" in caplog.messages[0]
    assert "5 times as long as torch_cpu, and 10 times for causal masks" in caplog.messages[0]
    caplog.clear()
    choose_kernel("auto", CASE)
    choose_kernel("reference", case)
    assert not caplog.messages, "what was asked for by name needs no telling"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 0.0}, r"softcap=0.0\) is not valid; use a positive number"),
        ({"dropout": 1.0}, r"dropout=1.0\) is not valid"),
        ({"scale": float("nan")}, "use a positive factor"),
        ({"scale": -0.5}, "use a positive factor"),
        ({"scale": 0.0}, "use a positive factor"),
        ({"scale": torch.ones((), requires_grad=True)}, r"scale=...\) gets no gradient; multiply q by it"),
        ({"alibi_slopes": torch.ones(2, requires_grad=True)}, r"alibi_slopes=...\) gets no gradient"),
    ],
)
def test_scores_that_make_no_sense_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scores(**options)


def test_tensors_that_need_no_gradient_are_numbers_among_scores() -> None:
    scale = torch.tensor(0.5)
    scores = Scores(scale=scale, alibi_slopes=torch.tensor([1.0, 2.0]))  # type: ignore[arg-type]
    scale += 1.0  # too late
    assert scores == Scores(scale=0.5, alibi_slopes=(1.0, 2.0))


def test_no_row_is_dropped_out_like_another_one_of_a_neighbouring_seed() -> None:
    positions = torch.arange(64)
    drawn = [keep(Scores(dropout=0.5, seed=seed), range(4), range(2), positions, positions) for seed in range(4, 8)]
    rows = [row for of_seed in drawn for row in of_seed]
    for number, row in enumerate(rows):
        for other in rows[number + 1 :]:
            assert abs(float((row == other).float().mean()) - 0.5) < 0.05


class _CountsHeads(TorchFlashKernel):
    """A flash kernel whose gradients say which heads a call had."""

    largest_dq = 3 * 128 * 64  # of three heads of up to 128 rows

    def __init__(self) -> None:
        self.heads: list[int] = []

    def call_backward(self, queries: Queries, k: torch.Tensor, v: torch.Tensor, ask: Ask) -> tuple[torch.Tensor, ...]:
        self.heads.append(queries.q.shape[2])
        total = queries.q.sum(2, keepdim=True)
        return queries.q, total, -total


@pytest.mark.parametrize(("heads", "calls"), [(3, [3]), (4, [2, 2]), (8, [3, 3, 2])])
def test_slices_of_the_queries_of_one_key_head_are_of_even_sizes(heads: int, calls: list[int]) -> None:
    """What a kernel allocates inside follows the largest."""
    kernel, q = _CountsHeads(), torch.randn(1, 8, heads, 64, dtype=torch.bfloat16)
    k = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)
    queries = Queries(q, q, q, torch.zeros(1, heads, 8))
    dq, dk, dv = kernel.backward(queries, k, k, How(FULL, Scores(scale=1.0)))[:3]
    assert kernel.heads == calls
    assert torch.equal(dq, q)
    if len(calls) > 1:
        assert dk.dtype == dv.dtype == torch.float32
    for grad, sign in ((dk, 1), (dv, -1)):
        assert torch.allclose(grad.float(), sign * q.float().sum(2, keepdim=True), atol=0.2)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("where", "dtype"), runs(feature="selection", dtypes=True))
@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(-3, 1)])
def test_selections_are_exact(where: Run, dtype: torch.dtype, band: Band, heads: tuple[int, int]) -> None:
    q_len, kv_len = 40, 40 if band == CAUSAL else 60
    problem = Problem.draw((q_len, kv_len), heads, (8, 5), dtype)
    mask = {FULL: Full(), CAUSAL: Causal()}.get(band, SlidingWindow(3, 1))
    for lists in {1, heads[1]}:
        problem = problem.with_selection(lists, 30)
        assert problem.selection is not None
        columns = 100 + torch.randperm(kv_len)  # of a tile that lies anywhere in the sequence
        named = torch.cat([columns, torch.tensor([-1])]).int()
        keys = named[problem.selection.long()]
        twice = torch.cat([keys, keys[..., :2], torch.full_like(keys[..., :1], 99)], -1)  # and one of another tile
        how = How(band, Scores(scale=8**-0.5), selection=Selection(twice, columns))
        found = run(where, problem, how)
        truth = reference(problem, mask)
        for name, error in errors(found, truth).items():
            assert error <= where.bound(dtype), (name, error)
