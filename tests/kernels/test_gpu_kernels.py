"""Kernels for GPUs where there is none: their arguments against stand-ins, shapes on meta tensors, and who is chosen.

What runs on a GPU is in test_kernels.py.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from burst_plugin import Causal, Documents, Mask, PerRow, Scores, SlidingWindow, Strategy, Topology, VirtualRing
from burst_plugin.kernels import (
    KERNELS,
    Case,
    Grads,
    How,
    Kernel,
    Queries,
    choose_kernel,
    library,
    torch_cudnn,
    torch_efficient,
    warn_once,
)
from burst_plugin.kernels import flash_attn_3 as flash_attn_3_module
from burst_plugin.kernels import flash_attn_4 as flash_attn_4_module
from burst_plugin.kernels.flash import Ask
from burst_plugin.kernels.flash_attn_3 import FlashAttn3Kernel
from burst_plugin.kernels.flash_attn_4 import FlashAttn4Kernel
from burst_plugin.kernels.torch_cpu import TorchCpuKernel
from burst_plugin.kernels.trial import problem_of
from burst_plugin.types import ANTICAUSAL, CAUSAL, FULL, Band
from tests.kernels.test_kernels import BANDS, FEATURE_CASES, run
from tests.support.reference import Problem, errors, reference, relative
from tests.support.stand_ins import INSTALL, Calls, flash_attn_3, flash_attn_4

SCALED = Scores(scale=8**-0.5)
REFERENCE = KERNELS["reference"]
WINDOWED = sorted(n for n, (kernel, _) in INSTALL.items() if "windows" in KERNELS[kernel].features)


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def kernel(request: pytest.FixtureRequest, calls: Calls) -> Iterator[Kernel]:
    name, install = INSTALL[request.param]
    with install(calls):
        yield KERNELS[name]


every_kernel = pytest.mark.parametrize("kernel", INSTALL, indirect=True)
every_windowed = pytest.mark.parametrize("kernel", WINDOWED, indirect=True)


def agree(kernel: Kernel, problem: Problem, how: How) -> None:
    """The same as the reference kernel, forward and backward, up to float64's rounding."""
    out, lse = kernel.forward(*problem[:3], how)
    expected = REFERENCE.forward(*problem[:3], how)
    torch.testing.assert_close((out, lse), expected, rtol=1e-11, atol=1e-11)
    queries = Queries(problem.q, problem.dout, *expected)
    got, wanted = (k.backward(queries, *problem[1:3], how) for k in (kernel, REFERENCE))
    torch.testing.assert_close(got[:3], wanted[:3], rtol=1e-11, atol=1e-11, msg=lambda text: f"{how.band}: {text}")


@every_kernel
@pytest.mark.parametrize("band", BANDS, ids=["full", "causal", "anticausal"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_arguments_mean_what_they_should(kernel: Kernel, band: Band, heads: tuple[int, int]) -> None:
    problem = Problem.draw(19, heads, dtype=torch.float64)
    found = errors(run(kernel.name, problem, How(band, SCALED)), reference(problem, BANDS[band]))
    assert all(error < 1e-13 for error in found.values()), found


@pytest.mark.parametrize(
    ("kernel", "feature"),
    [(n, f) for n, (name, _) in INSTALL.items() for f in sorted(KERNELS[name].features) if f in FEATURE_CASES],
    indirect=["kernel"],
)
def test_features_mean_what_they_should(kernel: Kernel, feature: str) -> None:
    how, mask = FEATURE_CASES[feature]
    largest = kernel.limits.dims or ((512, 512),)
    unlike = [(8, 5), (5, 8), (130, 100), (200, 100), (250, 250)]
    unlike = [(qk, v) for qk, v in unlike if any(qk <= most[0] and v <= most[1] for most in largest)]
    dims = unlike if feature == "head dims" else [(8, 8)]
    for problem in (Problem.draw(24, (4, 2), dim, torch.float64) for dim in dims):
        shapes = [(1, 1), (1, 4), (2, 1), (2, 4)] if feature == "bias" else [None]
        for case in (problem if shape is None else problem.with_bias(shape) for shape in shapes):
            found = errors(run(kernel.name, case, how._replace(bias=case.bias)), reference(case, mask, how.scores))
            assert all(error < 1e-13 for error in found.values()), (case.q.shape, found)
            assert ("dbias" in found) == (feature == "bias")


@pytest.mark.parametrize("kernel", ["torch_efficient"], indirect=True)
def test_a_bias_fits_every_band(kernel: Kernel) -> None:
    problem = Problem.draw(19, (4, 2), dtype=torch.float64).with_bias((1, 4))
    for band, mask in BANDS.items():
        found = errors(run(kernel.name, problem, How(band, SCALED, problem.bias)), reference(problem, mask))
        assert all(error < 1e-13 for error in found.values()), (band, found)


def _windows(q_rows: int, k_rows: int) -> Iterator[Band]:
    """All bands in which every query has a key."""
    for lower, upper in product((None, *range(1 - q_rows, k_rows)), (None, *range(k_rows))):
        first = (0 if lower is None else max(0, lower), k_rows - 1 if upper is None else upper)
        last = 0 if lower is None else q_rows - 1 + lower
        if first[0] <= first[1] and last <= k_rows - 1 and (None in (lower, upper) or lower <= upper):
            yield Band(lower, upper)


@every_windowed
def test_windows_of_all_shapes(kernel: Kernel) -> None:
    """Counted from the other corner, with more rows than keys and the other way round."""
    for q_rows, k_rows in [(1, 1), (1, 4), (4, 1), (3, 3), (2, 5), (5, 2), (4, 5), (9, 3), (7, 4)]:
        problem = Problem.draw((q_rows, k_rows), (2, 1), 8, torch.float64)
        for band in _windows(q_rows, k_rows):
            agree(kernel, problem, How(band, SCALED))


@every_kernel
def test_gradients_follow_the_lse_that_is_given(kernel: Kernel) -> None:
    """Two halves of the keys, each with the lse and the out of all, add up."""
    problem = Problem.draw((16, 24), (4, 2), 8, torch.float64)
    how = How(FULL, SCALED)
    out, lse = REFERENCE.forward(*problem[:3], how)
    queries = Queries(problem.q, problem.dout, out, lse)
    whole = REFERENCE.backward(queries, *problem[1:3], how)
    halves = [kernel.backward(queries, *(x[:, part] for x in problem[1:3]), how) for part in (slice(9), slice(9, 24))]
    torch.testing.assert_close(sum(half.dq for half in halves), whole.dq)
    for name in ("dk", "dv"):
        torch.testing.assert_close(torch.cat([getattr(half, name) for half in halves], 1), getattr(whole, name))


@every_kernel
def test_strided_and_unaligned_tensors(kernel: Kernel) -> None:
    """Rows cut out of the middle, heads first in memory, a last dim that is not dense, and an odd offset."""
    problem = Problem.draw(24, (4, 2), 8, torch.float64)
    how = How(FULL, Scores(scale=0.3))
    q, k, v, dout = problem[:4]
    loose = [x.transpose(1, 3).contiguous().transpose(1, 3)[:, 8:20] for x in (q, k, v, dout)]
    shifted = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)[:, 8:20] for x in (q, k, v, dout)]
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2)[:, 8:20] for x in (q, k, v, dout)]
    for tensors in (loose, shifted, swapped, [x.expand(2, -1, -1, -1) for x in (y[:1, 8:20] for y in problem[:4])]):
        agree(kernel, Problem(*tensors), how)


@every_kernel
def test_16_bit_types_keep_their_lse_in_float32(kernel: Kernel) -> None:
    problem = Problem.draw(16, (4, 2), 64, torch.bfloat16)
    out, lse = kernel.forward(*problem[:3], How(CAUSAL, SCALED))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    grads = kernel.backward(Queries(problem.q, problem.dout, out.float(), lse), *problem[1:3], How(CAUSAL, SCALED))
    assert all(grad.dtype in (torch.bfloat16, torch.float32) for grad in grads[:3])


@pytest.mark.parametrize(
    "kernel", [n for n, (name, _) in INSTALL.items() if "deterministic" in KERNELS[name].features], indirect=True
)
@pytest.mark.parametrize(("strategy", "switch"), [(True, False), (False, True), (False, False)])
def test_the_wish_for_determinism_arrives(
    kernel: Kernel, calls: Calls, strategy: bool, switch: bool, request: pytest.FixtureRequest
) -> None:
    """From the strategy, and from PyTorch's switch for the process, which is as it was afterwards."""
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.use_deterministic_algorithms(switch)
    ring = VirtualRing(Topology(1, 2), Strategy(kernel="reference", deterministic=strategy))
    problem = Problem.draw(16, (2, 2))
    inputs = [x.clone().requires_grad_() for x in problem[:3]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("burst_plugin.ring.choices.choose_kernel", lambda name, case: kernel)
        out, _ = ring.attention(*inputs, mask=Causal())
    out.backward(problem.dout)
    assert {call["deterministic"] for call in calls} == {strategy or switch}
    assert torch.are_deterministic_algorithms_enabled() == switch


def test_the_switch_for_determinism_is_put_back_as_it_was(calls: Calls) -> None:
    problem = Problem.draw(8, (2, 2))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with INSTALL["torch_flash"][1](calls):
            for deterministic in (True, False):
                run("torch_flash", problem, How(FULL, SCALED, deterministic=deterministic))
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kernel", ["torch_cudnn"], indirect=True)
def test_what_cudnn_has_no_kernel_for_is_left_to_flash_attention(
    kernel: Kernel, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single queries and keys; and on Hopper the backward pass of tiles that do not fill its blocks."""
    for rows in ((1, 5), (5, 1), (1, 1)):
        agree(kernel, Problem.draw(rows, (2, 1), 8, torch.float64), How(FULL, SCALED))
    assert {call["by"] for call in calls} == {"torch_flash"}
    for faulty, noted in ((False, ["torch_cudnn"]), (True, ["torch_cudnn", "torch_flash"])):
        monkeypatch.setattr(torch_cudnn, "may_be_nan", lambda rows, keys, device, faulty=faulty: faulty)
        calls.clear()
        agree(kernel, Problem.draw((5, 2), (2, 1), 8, torch.float64), How(FULL, SCALED))
        assert [call["by"] for call in calls] == noted, "of cuDNN forward passes are noted, of flash backward ones"


@pytest.mark.parametrize(
    ("gpu", "cudnn", "shape", "faulty"),
    [
        ("H100", 92000, (128, 64), True),
        ("H100", 92600, (128, 64), False),
        ("H100", 92600, (64, 128), True),
        ("H100", 92000, (256, 128), False),
        ("B200", 92000, (64, 64), False),
    ],
)
def test_which_cudnn_may_give_nan(
    gpu: str,
    cudnn: int,
    shape: tuple[int, int],
    faulty: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pretend(monkeypatch, gpu, cudnn)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: GPU[gpu])
    monkeypatch.setattr(torch_cudnn, "is_hopper", torch_cudnn.is_hopper.__wrapped__)
    torch_cudnn.warn_once.cache_clear()
    caplog.set_level(logging.WARNING)
    assert torch_cudnn.may_be_nan(*shape, torch.device("cuda", 0)) == faulty
    assert torch_cudnn.may_be_nan(*shape, torch.device("cuda", 0)) == faulty
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * faulty, "once"


@pytest.mark.parametrize("kernel", ["torch_flash", "flash_attn_2"], indirect=True)
def test_more_than_can_be_addressed_is_worked_on_in_slices(
    kernel: Kernel, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem.draw(5, (2, 1), 8, torch.float64)  # two batch rows
    for largest, passes in ((2 * 128 * 2 * 64, 1), (2 * 128 * 2 * 64 - 1, 2)):
        monkeypatch.setattr(type(kernel), "largest_dq", largest)
        calls.clear()
        agree(kernel, problem, How(CAUSAL, SCALED))
        assert len(calls) == passes
    problem = Problem.draw(5, (6, 3), 8, torch.float64)
    for heads, passes in ((6, 2), (5, 4), (3, 6), (1, 12)):  # all of a row, two groups of them, one, and each alone
        monkeypatch.setattr(type(kernel), "largest_dq", heads * 128 * 64)
        calls.clear()
        agree(kernel, problem, How(CAUSAL, SCALED))
        assert len(calls) == passes


@every_kernel
def test_a_ring_of_them_is_exact(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles as the ring makes them: windows whole or in pieces, squares reversed."""
    monkeypatch.setattr("burst_plugin.ring.choices.choose_kernel", lambda name, case: kernel)
    problem = Problem.draw(64, (4, 2), 8, torch.float64)
    for mask, backward in product((Causal(), SlidingWindow(7, 3), SlidingWindow(30)), ("q", "kv")):
        ring = VirtualRing(Topology(2, 2), Strategy(backward=backward))
        inputs = [x.clone().requires_grad_() for x in problem[:3]]
        out, _ = ring.attention(*inputs, mask=mask)
        grads = torch.autograd.grad(out, inputs, problem.dout)
        truth = reference(problem, mask)
        for got, expected in zip((out.detach(), *grads), truth[:4], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


every_biased = pytest.mark.parametrize(
    "kernel", [n for n, (name, _) in INSTALL.items() if "bias" in KERNELS[name].features], indirect=True
)


@every_biased
def test_a_query_whose_bias_is_minus_infinity_attends_to_nothing(kernel: Kernel) -> None:
    """Whose lse a library may give as 0; of all keys, or of those that causal leaves."""
    problem = Problem.draw(19, (4, 2), dtype=torch.float64).with_bias((1, 4))
    assert problem.bias is not None
    problem.bias[:, :, 3] = -torch.inf
    problem.bias[:, 1, 5:7, :10] = -torch.inf
    for band in BANDS:
        how = How(band, SCALED, problem.bias)
        agree(kernel, problem, how)
        assert bool(torch.isneginf(kernel.forward(*problem[:3], how)[1][:, :, 3]).all())


@pytest.mark.parametrize("kernel", ["torch_efficient"], indirect=True)
def test_a_bias_of_more_than_can_be_addressed_is_worked_on_in_slices(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shape in ((1, 1), (2, 4)):
        problem = Problem.draw(19, (4, 2), dtype=torch.float64).with_bias(shape)
        for band, mask in BANDS.items():
            how = How(band, SCALED, problem.bias)
            for rows, parts in ((19, 0), (7, 3)):
                monkeypatch.setattr(torch_efficient, "LARGEST_BIAS", 32 * rows)
                assert len(torch_efficient._slices(problem.q, problem.k, how)) == parts
                found = errors(run(kernel.name, problem, how), reference(problem, mask))
                assert all(error < 1e-13 for error in found.values()), (band, found)


@pytest.mark.parametrize("kernel", ["torch_efficient"], indirect=True)
@pytest.mark.parametrize("shape", [None, (1, 1), (2, 4)])
def test_keys_of_more_than_can_be_addressed_are_worked_on_by_heads(
    kernel: Kernel, shape: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem.draw(19, (4, 2), dtype=torch.float64)
    problem = problem if shape is None else problem.with_bias(shape)
    rows, dim = problem.k.shape[1], problem.k.shape[3]
    q, k, v = (torch_efficient._whole(x, 4) for x in problem[:3])
    for largest, parts in ((4 * rows * dim, 1), (4 * rows * dim - 1, 2), (rows * dim, 4), (1, 4)):
        monkeypatch.setattr(torch_efficient, "LARGEST_OFFSET", largest)
        assert len(torch_efficient._addressable(q, k, v, None)) == parts
        for band, mask in BANDS.items():
            found = errors(run(kernel.name, problem, How(band, SCALED, problem.bias)), reference(problem, mask))
            assert all(error < 1e-13 for error in found.values()), (band, found)


@every_biased
@pytest.mark.parametrize("band", BANDS, ids=["full", "causal", "anticausal"])
def test_a_bias_without_a_gradient_gets_none(kernel: Kernel, band: Band) -> None:
    """Which would be as large as all scores."""
    problem = Problem.draw(19, (4, 2), dtype=torch.float64).with_bias((1, 4))
    how = How(band, SCALED, problem.bias)
    out, lse = kernel.forward(*problem[:3], how)
    wanted, without = (
        kernel.backward(Queries(problem.q, problem.dout, out, lse), *problem[1:3], how._replace(bias_has_grad=has))
        for has in (True, False)
    )
    assert wanted.dbias is not None
    assert without.dbias is None
    for one, other in zip(wanted[:3], without[:3], strict=True):
        assert torch.equal(one, other)


@every_biased
@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min])
def test_a_ring_with_a_bias_is_exact(kernel: Kernel, lowest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows in pieces, which cannot share a bias as a batch, and queries that a block has no key for."""
    monkeypatch.setattr("burst_plugin.ring.choices.choose_kernel", lambda name, case: kernel)
    problem = Problem.draw(64, (4, 2), 8, torch.float64).with_bias((1, 4))
    assert problem.bias is not None
    problem.bias[:, :, 40:50, :32] = lowest
    for mask in (Causal(), SlidingWindow(7, 3), SlidingWindow(30)):
        tensors = [*problem[:3], problem.bias]
        inputs = [x.clone().requires_grad_() for x in tensors]
        out, _ = VirtualRing(Topology(2, 2)).attention(*inputs[:3], mask=mask, bias=inputs[3])
        grads = torch.autograd.grad(out, inputs, problem.dout)
        truth = reference(problem, mask)
        for got, expected in zip((out.detach(), *grads), (*truth[:4], truth.dbias), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@every_biased
def test_batch_rows_with_masks_of_their_own_share_a_bias(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient comes from tiles of two rows and from tiles of one, in one type."""
    monkeypatch.setattr("burst_plugin.ring.choices.choose_kernel", lambda name, case: kernel)
    two = Problem.draw(32, (4, 2), 8, torch.bfloat16)
    problem = Problem(*(torch.cat([x, x[:1]]) for x in two[:4])).with_bias((1, 4))
    inputs = [x.clone().requires_grad_() for x in (*problem[:3], problem.bias) if x is not None]
    masks = PerRow((Documents((0, 32)), Documents((0, 32)), Documents((0, 9, 32)))) & Causal()
    out, _ = VirtualRing(Topology(1, 2)).attention(*inputs[:3], mask=masks, bias=inputs[3])
    dbias = torch.autograd.grad(out, inputs, problem.dout)[3]
    truth = reference(problem, masks)
    assert truth.dbias is not None
    assert relative(dbias, truth.dbias) < 2e-2


# Whether the backward operator has a meta implementation that fits its schema: in PyTorch 2.13 one lacks `out`. The
# stand-ins are called through the same schemas.
META = {"torch_cudnn": True, "torch_efficient": False, "torch_flash": True}


@pytest.mark.parametrize("name", META)
@pytest.mark.parametrize("dims", [(64, 64), (20, 12)])
@pytest.mark.parametrize("band", [FULL, CAUSAL, ANTICAUSAL], ids=["full", "causal", "anticausal"])
def test_operators_of_this_pytorch_take_the_arguments(name: str, dims: tuple[int, int], band: Band) -> None:
    """Their meta implementations: schemas, shapes and types of results."""
    q_rows, k_rows = (40, 72) if band == FULL else (40, 40)
    q, dout = (torch.empty(2, q_rows, 4, dim, dtype=torch.bfloat16, device="meta") for dim in dims)
    k, v = (torch.empty(2, k_rows, 2, dim, dtype=torch.bfloat16, device="meta") for dim in dims)
    kernel, how = KERNELS[name], How(band, SCALED)
    out, lse = kernel.forward(q, k, v, how)
    assert (out.shape, out.dtype) == ((2, q_rows, 4, dims[1]), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 4, q_rows), torch.float32)
    if not META[name]:
        return
    grads = kernel.backward(Queries(q, dout, out, lse), k, v, how)
    assert [grad.shape for grad in grads[:3]] == [q.shape, k.shape, v.shape]
    assert all(grad.dtype in (torch.bfloat16, torch.float32) for grad in grads[:3])


@pytest.mark.parametrize(("returned", "refused"), [(8, True), (5, False)])
def test_flash_attention_3_is_asked_for_determinism_only_where_it_has_it(returned: int, refused: bool) -> None:
    kernel = KERNELS["flash_attn_3"]
    with flash_attn_3(Calls(), returned):
        assert isinstance(kernel, FlashAttn3Kernel)
        case = Case("cpu", torch.float32, 2, 1, 64, 64)
        why = kernel.refuse_library(case._replace(features=frozenset({"deterministic"})))
        assert kernel.refuse_library(case) is None
    assert (why is not None and "newer than v2.8.3" in why) == refused


@pytest.mark.parametrize("feature", ["softcap", "windows"])
def test_what_a_build_of_flash_attention_3_lacks_is_refused(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the one in xformers 0.0.34 lacks softcap, seen on an H100; before a message is under way."""
    kernel, asked = KERNELS["flash_attn_3"], Case("cpu", torch.float32, 2, 1, 64, 56)
    plain_forward = FlashAttn3Kernel.call_forward

    def forward(self: FlashAttn3Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ask: Ask) -> Any:
        if ask.softcap if feature == "softcap" else ask.left is not None:
            raise RuntimeError(f"This flash attention build does not support {feature}.")
        return plain_forward(self, q, k, v, ask)

    monkeypatch.setattr(FlashAttn3Kernel, "call_forward", forward)
    with flash_attn_3(Calls(), 5):
        assert kernel.refuse_library(asked) is None
        why = kernel.refuse_library(asked._replace(features=frozenset({feature, "head dims"})))
    assert why == f"tried out, it fails: RuntimeError: This flash attention build does not support {feature}."


@pytest.mark.parametrize(
    ("version", "refused"),
    [
        ("4.0.0b25", True),
        ("4.0.0b26", False),
        ("4.0.0", False),
        ("4.0.0b26.dev3+g940cd96", True),
        ("4.0.0b27.dev1+g940cd96", False),
        ("0.0.0", True),
        ("", True),
    ],
)
def test_betas_of_flash_attention_4_that_compute_wrongly_are_refused(version: str, refused: bool) -> None:
    kernel = KERNELS["flash_attn_4"]
    with flash_attn_4(Calls(), 4, version):
        assert isinstance(kernel, FlashAttn4Kernel)
        why = kernel.refuse_library(Case("cpu", torch.float32, 2, 1, 64, 64))
    assert (why is not None and "4.0.0b26" in why) == refused


@pytest.mark.parametrize(
    ("gpu", "changes", "refused"),
    [
        ("H100", {"qk_dim": 192}, True),
        ("H100", {"qk_dim": 192, "kv_heads": 8}, False),
        ("H100", {"qk_dim": 112, "v_dim": 96}, False),
        ("B200", {"qk_dim": 192}, False),
    ],
)
def test_what_flash_attention_4_has_no_gradients_of_is_refused(
    gpu: str, changes: dict[str, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, gpu)
    with flash_attn_4(Calls(), 4):
        why = KERNELS["flash_attn_4"].refuse(PLAIN._replace(**changes))  # type: ignore[arg-type]
    assert (why is not None and "no gradients of grouped heads" in why) == refused


def test_cudnn_is_not_used_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "H100")
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert "it is switched off; torch.backends.cuda.enable_cudnn_sdp(True)" in str(
            KERNELS["torch_cudnn"].refuse(PLAIN)
        )
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    assert KERNELS["torch_cudnn"].refuse(PLAIN) is None
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    assert "unset it" in str(KERNELS["torch_cudnn"].refuse(PLAIN))


@pytest.mark.parametrize("kernel", ["torch_cudnn"], indirect=True)
def test_cudnn_is_given_the_lse_of_any_rows(kernel: Kernel) -> None:
    """A single head's rows from the third on, in one piece: their address is not one that vectors are loaded from."""
    problem = Problem.draw(16, (1, 1), 8)
    q, k, v, dout = (x[:1] for x in (*problem[:3], problem.dout))
    out, lse = REFERENCE.forward(q, k, v, How(FULL, SCALED))
    rows = Queries(q[:, 3:], dout[:, 3:], out[:, 3:], lse[:, :, 3:])
    assert rows.lse.is_contiguous()
    expected = REFERENCE.backward(rows, k, v, How(FULL, SCALED))
    torch.testing.assert_close(kernel.backward(rows, k, v, How(FULL, SCALED))[:3], expected[:3])


@pytest.mark.parametrize("kernel", ["torch_cudnn"], indirect=True)
@pytest.mark.parametrize("heads", [2, 1])
def test_cudnn_makes_one_plan_for_own_and_received_rows(kernel: Kernel, calls: Calls, heads: int) -> None:
    """A batch of one: as received, turned round from Megatron's [S, B, H, D], and the first rows of a longer one."""
    dense = torch.randn(1, 16, heads, 8, dtype=torch.float64)
    own = dense.transpose(0, 1).contiguous().transpose(0, 1)
    some = torch.cat([dense, dense], 1)[:, :16]
    strides = [x.stride() for x in (dense, own, some)]
    assert len(set(strides)) > 1
    found = [kernel.forward(x, x, x, How(FULL, SCALED)) for x in (dense, own, some)]
    assert len({str(call["strides"]) for call in calls}) == 1
    for out, lse in found:
        torch.testing.assert_close((out, lse), found[0], rtol=0, atol=0)


class _Tried(TorchCpuKernel):
    """What is tried out."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.calls = fault, 0

    def backward(self, queries: Queries, k: torch.Tensor, v: torch.Tensor, how: How) -> Grads:
        self.calls += 1
        if self.fault == "memory":
            raise torch.OutOfMemoryError
        if self.fault == "fails":
            raise RuntimeError("No valid execution plans built")
        grads = super().backward(queries, k, v, how)
        if self.fault == "causal dk" and how.band == CAUSAL:
            return grads._replace(dk=grads.dk * 1.02)
        return grads._replace(dv=grads.dv * torch.nan) if self.fault == "dv" else grads


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("", None),
        ("causal dk", "tried out, dk are not those of reference"),
        ("dv", "tried out, dv are not those of reference"),
        ("fails", "tried out, it fails: RuntimeError: No valid execution plans built"),
    ],
)
def test_a_library_is_tried_out_once(fault: str, problem: str | None) -> None:
    kernel, case = _Tried(fault), Case("cpu", torch.bfloat16, 4, 2, 24, 16)
    found = {
        problem_of(kernel, REFERENCE, each) for each in (case, case._replace(features=frozenset({"bias"})), case)
    }
    assert found == {problem}
    assert kernel.calls == (1 if fault == "fails" else 2), "a causal and a full tile"


def test_a_trial_without_memory_tells_nothing() -> None:
    kernel, case = _Tried("memory"), Case("cpu", torch.bfloat16, 2, 2, 16, 16)
    with pytest.raises(torch.OutOfMemoryError):
        problem_of(kernel, REFERENCE, case)
    kernel.fault = ""
    assert problem_of(kernel, REFERENCE, case) is None


def test_a_kernel_that_is_wrong_here_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, "H100")
    monkeypatch.setattr(torch_cudnn, "problem_of", lambda kernel, trusted, case: f"not like {trusted.name}")
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert choose_kernel("auto", PLAIN).name == "torch_flash"
    assert "torch_cudnn: not like torch_flash" in caplog.text
    with pytest.raises(ValueError, match="not like torch_flash"):
        choose_kernel("torch_cudnn", PLAIN)


def test_the_lse_of_cudnn_has_the_shape_that_this_pytorch_has(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    assert torch_cudnn.statistics_have_a_dim()
    monkeypatch.setattr(torch_cudnn, "statistics_have_a_dim", lambda: False)
    problem = Problem.draw(8, (2, 1))
    with INSTALL["torch_cudnn"][1](calls), pytest.raises(AssertionError):
        run("torch_cudnn", problem, How(FULL, SCALED))


@pytest.mark.parametrize(
    ("release", "dims", "v_dim"),
    [(5, (192, 128), 128), (5, (160, 96), 128), (8, (192, 128), 192), (5, (192, 136), 192)],
)
def test_flash_attention_3_fills_up_v_only_where_it_must(
    release: int, dims: tuple[int, int], v_dim: int, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    """A trial, before anything is sent, finds out what its backward pass takes; and is the only one."""
    flash_attn_3_module.warn_once.cache_clear()
    case = Case("cpu", torch.float32, 2, 1, *dims)
    with flash_attn_3(calls, release), caplog.at_level(logging.WARNING):
        assert KERNELS["flash_attn_3"].refuse_library(case) is None
        calls.clear()
        problem = Problem.draw(8, (2, 1), dims)
        found = errors(run("flash_attn_3", problem, How(CAUSAL, SCALED)), reference(problem, Causal(), SCALED))
        assert max(found.values()) < 1e-5
    assert [call["v_dim"] for call in calls] == [v_dim]
    assert ("v must have shape" in caplog.text) == (release == 8)


GPU = {"V100": (7, 0), "A100": (8, 0), "L40": (8, 9), "H100": (9, 0), "B200": (10, 0), "RTX 5090": (12, 0)}
PLAIN = Case("cuda", torch.bfloat16, 8, 2, 128, 128)


def pretend(monkeypatch: pytest.MonkeyPatch, gpu: str, cudnn: int = 91501) -> None:
    """A PyTorch for CUDA on a machine with this GPU."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: GPU[gpu])
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    for module in (torch_cudnn, flash_attn_3_module, flash_attn_4_module):
        monkeypatch.setattr(module, "problem_of", lambda *_: None)


CHOICES = [
    ("H100", (), {}, "torch_cudnn"),
    ("H100", (), {"new_tiles": True}, "torch_flash"),
    ("H100", ("flash_attn_2",), {"new_tiles": True}, "flash_attn_2"),
    ("H100", ("flash_attn_3",), {}, "flash_attn_3"),
    ("H100", ("flash_attn_2", "flash_attn_4"), {}, "flash_attn_4"),
    ("H100", ("flash_attn_2",), {"features": frozenset({"deterministic"})}, "flash_attn_2"),
    ("H100", (), {"features": frozenset({"deterministic"})}, "torch_flash"),
    ("H100", (), {"qk_dim": 192, "features": frozenset({"head dims"})}, "torch_cudnn"),
    ("H100", ("flash_attn_3",), {"qk_dim": 192, "features": frozenset({"head dims"})}, "flash_attn_3"),
    ("H100", (), {"qk_dim": 256, "v_dim": 256}, "torch_flash"),
    (
        "H100",
        ("flash_attn_3",),
        {"qk_dim": 256, "v_dim": 256, "features": frozenset({"deterministic"})},
        "torch_flash",
    ),
    ("H100", ("flash_attn_3",), {"qk_dim": 512, "v_dim": 512}, "torch_efficient"),
    ("H100", (), {"features": frozenset({"softcap"})}, "reference"),
    ("H100", ("flash_attn_2",), {"features": frozenset({"softcap"})}, "flash_attn_2"),
    ("H100", (), {"features": frozenset({"bias"})}, "torch_efficient"),
    ("H100", ("flash_attn_2",), {"features": frozenset({"alibi"})}, "reference"),
    ("H100", ("flash_attn_3",), {"dtype": torch.float32}, "torch_efficient"),
    ("H100", (), {"dtype": torch.float64}, "reference"),
    ("A100", ("flash_attn_3", "flash_attn_4"), {}, "torch_flash"),
    ("A100", ("flash_attn_2",), {}, "flash_attn_2"),
    ("L40", (), {}, "torch_flash"),
    ("B200", ("flash_attn_3",), {}, "torch_cudnn"),
    ("RTX 5090", ("flash_attn_4",), {}, "torch_flash"),
    ("V100", (), {}, "reference"),
    ("V100", (), {"dtype": torch.float16}, "torch_efficient"),
]


@pytest.mark.parametrize(("gpu", "installed", "changes", "expected"), CHOICES)
def test_auto_takes_the_fastest_of_this_gpu(
    gpu: str,
    installed: tuple[str, ...],
    changes: dict[str, object],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    pretend(monkeypatch, gpu)
    library.find.cache_clear()
    request.addfinalizer(library.find.cache_clear)
    with ExitStack() as stack:
        for name in installed:
            stack.enter_context(INSTALL[name][1](Calls()))
        assert choose_kernel("auto", PLAIN._replace(**changes)).name == expected


@pytest.mark.parametrize(
    ("mask", "new"),
    [
        (Causal(), False),
        (Causal() & SlidingWindow(3), False),
        (Causal() & Documents((0, 3, 8)), True),
        (PerRow((Causal(), Causal())), True),
    ],
)
def test_masks_that_come_with_the_batch_may_bring_new_tiles(
    mask: Mask, new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Case] = []

    def choose(name: str, case: Case) -> Kernel:
        asked.append(case)
        return REFERENCE

    monkeypatch.setattr("burst_plugin.ring.choices.choose_kernel", choose)
    VirtualRing(Topology(1, 2)).attention(*Problem.draw(8, (2, 2))[:3], mask=mask)
    assert {case.new_tiles for case in asked} == {new}


@pytest.mark.parametrize(
    ("name", "gpu", "changes", "message"),
    [
        ("flash_attn_2", "V100", {}, "compute capability 8.0 to 12.1, not 7.0"),
        ("flash_attn_2", "A100", {}, "flash_attn is not installed"),
        ("flash_attn_3", "A100", {}, "compute capability 9.0 to 9.0, not 8.0"),
        ("flash_attn_3", "H100", {}, "flash_attn_interface is not installed"),
        ("flash_attn_4", "B200", {"qk_dim": 256}, "head dims up to 128 with 128 or 192 with 128"),
        ("torch_flash", "H100", {"dtype": torch.float32}, "takes bfloat16, float16, not torch.float32"),
        ("torch_flash", "H100", {"qk_dim": 264}, "up to 256 with 256 .*, not 264 with 128"),
        ("torch_efficient", "V100", {}, "bfloat16 from compute capability 8.0 on"),
        ("torch_cudnn", "A100", {}, "compute capability 9.0 to 10.3, not 8.0"),
    ],
)
def test_gpu_kernels_say_why_not(
    name: str, gpu: str, changes: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, gpu)
    with pytest.raises(ValueError, match=message):
        choose_kernel(name, PLAIN._replace(**changes))


def test_old_libraries_are_refused(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    pretend(monkeypatch, "H100", cudnn=91400)
    assert "needs cuDNN 91501 or newer, not 91400" in str(KERNELS["torch_cudnn"].refuse(PLAIN))
    with INSTALL["flash_attn_2"][1](calls):
        assert KERNELS["flash_attn_2"].refuse(PLAIN) is None
        monkeypatch.setattr(sys.modules["flash_attn"], "__version__", "2.6.3")
        assert "2.7 or newer, not 2.6.3" in str(KERNELS["flash_attn_2"].refuse(PLAIN))
    with INSTALL["flash_attn_4"][1](calls):
        monkeypatch.setattr(sys.modules["flash_attn.cute.interface"], "_flash_attn_bwd", lambda q, k, v, causal: None)
        assert "_flash_attn_bwd does not take softcap" in str(KERNELS["flash_attn_4"].refuse(PLAIN))


@pytest.mark.parametrize(
    ("gpu", "cudnn", "told"), [("H100", 91002, True), ("H100", 92000, False), ("A100", 92000, False)]
)
def test_a_kernel_for_earlier_gpus_says_so_once(
    gpu: str, cudnn: int, told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where PyTorch comes with an older cuDNN, flash-attention 2 would run on Hopper unseen."""
    pretend(monkeypatch, gpu, cudnn)
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):  # libraries that other tests import raise it
        for _ in range(2):
            choose_kernel("auto", PLAIN)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == told
    if told:
        assert said[0].startswith("attention runs on torch_flash, which is slower than kernels made for this GPU (")
        assert "torch_cudnn: it needs cuDNN 91501 or newer, not 91002" in said[0]


def test_flash_attention_is_refused_where_another_is_activated_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "H100", 92000)
    assert KERNELS["torch_flash"].refuse(PLAIN) is None
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4", raising=False)
    for name in ("torch_flash", "torch_cudnn"):
        assert "FA4 is activated in its place" in str(KERNELS[name].refuse(PLAIN))


def test_without_a_gpu_kernels_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert KERNELS["torch_flash"].refuse(PLAIN) == "this PyTorch is not built for CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert KERNELS["torch_flash"].refuse(PLAIN) == "there is no CUDA device"


def test_libraries_are_imported_when_needed_and_once(tmp_path: Path) -> None:
    """They are not where nothing needs them; one that breaks on import is a reason, not an error."""
    broken = tmp_path / "flash_attn"
    broken.mkdir()
    (broken / "__init__.py").write_text("print('imported')\nraise RuntimeError('built for another torch')\n")
    program = (
        "import sys, torch, burst_plugin\n"
        "from burst_plugin.kernels import Case, choose_kernel, library\n"
        "choose_kernel('auto', Case('cpu', torch.float32, 1, 1, 8, 8))\n"
        "assert 'flash_attn' not in sys.modules\n"
        "print(library.find('flash_attn.cute'), library.find('flash_attn.cute'))\n"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": f"{root}:{tmp_path}"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("imported\n") == 1
    assert done.stdout.count("cannot be imported: RuntimeError: built for another torch") == 2
    with pytest.raises(RuntimeError, match="no_such_module is not installed"):
        library.load("no_such_module")


def test_versions_compare_as_numbers() -> None:
    assert library.older("2.6.3.post1", (2, 7))
    assert not library.older("2.10.0", (2, 7))
    assert not library.older("2.7", (2, 7))
    assert library.older("unknown", (2, 7))
