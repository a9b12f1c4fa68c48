"""What stands in for GPU packages under the contenders, and what sleeps instead of computing."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks.contenders import Case, Slept, kernels
from benchmarks.contenders.kernels import StandIn, kernel_for, sleeping, tile
from benchmarks.contenders.protocol import import_problem
from benchmarks.contenders.ring_flash_attn import RingFlashAttn
from benchmarks.contenders.torch_context_parallel import _backward, _forward
from benchmarks.contenders.yunchang import USP
from burst_plugin import Causal, CausalBottomRight, Full, Mask, Scores
from burst_plugin.kernels import Queries
from burst_plugin.types import ANTICAUSAL, FULL
from tests.support import emulated_gpu
from tests.support.emulated_gpu import EmulatedDevice
from tests.support.reference import Problem, Result, errors, painted, reference, relative

CASE = Case(1, 2, 64, 4, 2, 8, torch.bfloat16, causal=False, batch=2)
SLEPT = Slept(forward_s=0.16, backward_s=0.32)
SCALE = 0.9  # far from 8 ** -0.5


class Found(NamedTuple):
    """What a library gets."""

    result: Result
    lse: Tensor


def _stand_in() -> StandIn:
    module = StandIn()
    module.kernel = kernel_for(CASE, None)
    return module


def _by_blocks(problem: Problem, scale: float, causal: bool) -> Found:
    """As rings call flash-attn."""
    module, (q, k, v, dout) = _stand_in(), problem[:4]
    out, lse, _, _ = module._flash_attn_forward(q, k, v, 0.0, scale, causal, -1, -1, 0.0, None, False)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    module._flash_attn_backward(dout, q, k, v, out, lse, *grads, 0.0, scale, causal, -1, -1, 0.0, None, False, None)
    return Found(Result(out, *grads), lse)


def _whole(problem: Problem, scale: float, causal: bool) -> Found:
    """As Ulysses calls flash-attn."""
    q, k, v = (x.clone().requires_grad_() for x in problem[:3])
    out = _stand_in().flash_attn_func(q, k, v, softmax_scale=scale, causal=causal)
    out.backward(problem.dout)
    return Found(Result(out.detach(), *(x.grad for x in (q, k, v))), _by_blocks(problem, scale, causal).lse)


def _operators(problem: Problem, scale: float, causal: bool) -> Found:
    """As PyTorch calls its own."""
    q, k, v, dout = (x.transpose(1, 2) for x in problem[:4])
    out, lse, *rest = _forward(_stand_in(), q, k, v, 0.0, causal, scale=scale)
    seeds = rest[4:6]
    grads = _backward(_stand_in(), dout, q, k, v, out, lse, *rest[:4], 0.0, causal, *seeds, scale=scale)
    return Found(Result(*(x.transpose(1, 2) for x in (out, *grads))), lse)


def _lse(problem: Problem, mask: Mask, scale: float) -> Tensor:
    """In float64, from the definition."""
    q, k = problem.q.double(), problem.k.double().repeat_interleave(problem.q.shape[2] // problem.k.shape[2], dim=2)
    scores = scale * torch.einsum("bihd,bjhd->bhij", q, k)
    allowed = painted(mask, q.shape[0], q.shape[1], k.shape[1]).unsqueeze(1)
    return scores.masked_fill(~allowed, -torch.inf).logsumexp(-1)


@pytest.mark.parametrize("call", [_by_blocks, _whole, _operators])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3)])
def test_a_stand_in_is_attention(
    call: object, causal: bool, heads: tuple[int, int], dtype: torch.dtype, bound: float
) -> None:
    problem = Problem.draw(24, heads, dtype=dtype)
    mask = Causal() if causal else Full()
    result, lse = call(problem, SCALE, causal)  # type: ignore[operator]
    found = errors(result, reference(problem, mask, Scores(scale=SCALE)))
    assert all(error < bound for error in found.values()), found
    assert relative(lse, _lse(problem, mask, SCALE)) < bound


@pytest.mark.parametrize("shape", [(24, 24), (10, 24)])
def test_sequences_of_varying_lengths_are_causal_from_their_ends(shape: tuple[int, int]) -> None:
    """Both functions: as rings call them, and with gradients; two sequences, with keys before the first query."""
    problem, module = Problem.draw(shape, (4, 2)), _stand_in()
    ends = [torch.tensor([0, length, 2 * length], dtype=torch.int32) for length in shape]
    q, k, v, dout = (x.flatten(0, 1).requires_grad_() for x in problem[:4])
    out = module.flash_attn_varlen_func(q, k, v, *ends, *shape, causal=True)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    with torch.no_grad():
        again, lse, *_ = module._flash_attn_varlen_forward(q, k, v, *ends, *shape, 0.0, 8**-0.5, True)
        buffers = [torch.empty_like(x) for x in (q, k, v)]
        module._flash_attn_varlen_backward(dout, q, k, v, again, lse, *buffers, *ends, *shape, 0.0, 8**-0.5, True)
    expected = reference(problem, CausalBottomRight())
    for found in ((out, *grads), (again, *buffers)):
        whole = Result(*(x.detach().unflatten(0, (2, -1)) for x in found))
        assert all(error < 1e-6 for error in errors(whole, expected).values())


@pytest.mark.parametrize("option", [{"dropout_p": 0.1}, {"window_size": (8, 0)}, {"softcap": 30.0}])
def test_what_a_stand_in_lacks_is_refused(option: dict[str, object]) -> None:
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(NotImplementedError, match="no dropout, windows, softcap or alibi"):
        _stand_in().flash_attn_func(q, q, q, **option)
    ends = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="no dropout, windows, softcap or alibi"):
        _stand_in().flash_attn_varlen_func(q[0], q[0], q[0], ends, ends, 4, 4, **option)


def test_asking_for_contenders_puts_no_stand_in_in_place() -> None:
    code = (
        "import os, sys\n"
        "before = dict(os.environ)\n"
        "from benchmarks.contenders import CONTENDERS\n"
        "[contender.absent() for contender in CONTENDERS]\n"
        "print({'flash_attn', 'ring_flash_attn', 'yunchang'} & set(sys.modules), os.environ == before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "set() True\n"


@pytest.mark.parametrize("name", ["ring_flash_attn", "yunchang"])
def test_a_peer_that_cannot_be_had_says_why(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contender = {"ring_flash_attn": RingFlashAttn(), "yunchang": USP()}[name]
    (tmp_path / f"{name}.py").write_text("raise RuntimeError('no luck')\n")
    monkeypatch.syspath_prepend(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    import_problem.cache_clear()
    try:
        assert contender.absent() == f"{name} does not import: RuntimeError: no luck"
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    import_problem.cache_clear()
    assert contender.absent() == f"{name} is not installed; the extra `bench` has it"
    import_problem.cache_clear()


def _slept_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is slept from now on, by a clock of its own."""
    clock = _Clock()
    monkeypatch.setattr(emulated_gpu, "time", clock)
    return clock.slept_s


class _Clock:
    """Stands in for the module `time`: it goes on while somebody sleeps, and for `late_s` more."""

    late_s = 0.0

    def __init__(self) -> None:
        self.now_s = 7.0
        self.slept_s: list[float] = []

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds + self.late_s


@pytest.mark.parametrize(
    ("q_len", "k_len", "band", "share"),
    [
        (64, 64, FULL, 1.0),
        (64, 64, tile(None, True, 8).band, 0.5),
        (64, 64, ANTICAUSAL, 0.5),
        (32, 64, FULL, 0.5),
        (32, 16, FULL, 0.125),
        (32, 64, tile(None, True, 8).band, 0.375),
        (64, 32, tile(None, True, 8).band, 0.125),
    ],
)
def test_a_slept_call_takes_its_share_of_a_full_visit(
    q_len: int, k_len: int, band: object, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, slept_s = sleeping(CASE, SLEPT), _slept_s(monkeypatch)
    how = tile(None, False, 8)._replace(band=band)
    q, k = torch.ones(2, q_len, 4, 8), torch.ones(2, k_len, 2, 8)
    out, lse = kernel.forward(q, k, k, how)
    grads = kernel.backward(Queries(q, out, out, lse), k, k, how)
    assert slept_s == pytest.approx([0.16 * share, 0.32 * share])
    assert (out.shape, lse.shape) == (q.shape, (2, 4, q_len))
    assert [x.shape for x in grads[:3]] == [q.shape, k.shape, k.shape]


@pytest.mark.parametrize(("causal", "share"), [(False, 8 * 8 + 8 * 56), (True, 8 * 8 / 2 + 8 * 52)])
def test_a_slept_call_of_several_sequences_takes_their_shares(
    causal: bool, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 queries on 8 keys, and the last 8 queries of 56: of 2 * 64 * 64 pairs, all in one call."""
    kernel, slept_s = sleeping(CASE, SLEPT), _slept_s(monkeypatch)
    q_ends, k_ends = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 8, 16], [0, 8, 64]))
    how = tile(None, causal, 8, (q_ends, k_ends))
    q, k = torch.ones(1, 16, 4, 8), torch.ones(1, 64, 2, 8)
    out, lse = kernels.forward(kernel, q, k, k, how)
    kernels.backward(kernel, Queries(q, out, out, lse), k, k, how)
    assert slept_s == pytest.approx([0.16 * share / 8192, 0.32 * share / 8192])


@pytest.mark.parametrize("waits", [False, True])
def test_a_late_wake_up_is_taken_off_the_next_kernel_unless_there_was_waiting(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four kernels of 30 ms that end 1 ms late, 2 ms of work before each: on a device of one's own 4 * 32 ms."""
    clock, device, waited = _Clock(), EmulatedDevice(), iter(range(100))
    clock.late_s = 0.001
    monkeypatch.setattr(emulated_gpu, "time", clock)
    monkeypatch.setattr(emulated_gpu, "_waits", lambda: next(waited) if waits else 0)
    start_s = clock.now_s
    for _ in range(4):
        clock.now_s += 0.002
        device.launch()
        device.finish(0.03)
    late_s = 0.004 if waits else 0.001
    assert clock.now_s - start_s == pytest.approx(4 * 0.032 + late_s)


def test_a_process_that_is_behind_its_device_is_not_ahead_of_it_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Late by 5 ms once; then short kernels that have ended when they are asked for: 5 ms are made up, no more."""
    clock, device = _Clock(), EmulatedDevice()
    monkeypatch.setattr(emulated_gpu, "time", clock)
    monkeypatch.setattr(emulated_gpu, "_waits", lambda: 0)
    clock.late_s = 0.005
    start_s = clock.now_s
    device.launch()
    device.finish(0.03)
    clock.late_s = 0.0
    for _ in range(3):
        device.launch()
        clock.now_s += 0.004  # to launch it takes longer than the kernel
        device.finish(0.001)
    device.launch()
    device.finish(0.03)
    assert clock.now_s - start_s == pytest.approx(0.03 + 3 * 0.004 + 0.03)


def test_waits_are_those_of_this_thread() -> None:
    before = emulated_gpu._waits()
    assert emulated_gpu._waits() == before
    time.sleep(0.001)
    assert emulated_gpu._waits() > before


def test_a_sleeping_kernel_gives_what_the_kernel_in_its_place_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32, as the kernel for CPUs; but peers get their gradients as flash_attn writes them."""
    _slept_s(monkeypatch)
    q, k = (torch.ones(2, 64, heads, 8, dtype=torch.bfloat16) for heads in (4, 2))
    how = tile(None, False, 8)
    for kernel, grads_in in ((sleeping(CASE, SLEPT), torch.float32), (kernel_for(CASE, SLEPT), torch.bfloat16)):
        out, lse = kernel.forward(q, k, k, how)
        assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
        grads = kernel.backward(Queries(q, q, q, lse), k, k, how)[:3]
        assert {grad.dtype for grad in grads} == {grads_in}
        assert not any(bool(x.any()) for x in (out, lse, *grads))
        lse += 1
        assert not bool(kernel.forward(q, k, k, how)[1].any()), "a ring sums up in it"
