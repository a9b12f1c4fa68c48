"""The Triton kernels: right on any device that runs them, and they compile for GPUs that are not there."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from burst_plugin.compute import online_softmax as softmax
from tests.support.fused_cases import check_all

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def _run(code: str, tmp_path: Path, **environment: str) -> str:
    """What a Python of its own prints: triton reads the environment when it is imported."""
    own = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, **own},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@needs_triton
def test_the_kernels_are_right(tmp_path: Path) -> None:
    code = "from tests.support.fused_cases import check_all; print(check_all('cpu'))"
    assert int(_run(code, tmp_path, TRITON_INTERPRET="1")) == 20


@pytest.mark.gpu
@needs_triton
def test_the_kernels_are_right_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert check_all("cuda") == 20
    x = torch.zeros(1, 1, 1, 1, device="cuda")
    assert softmax.fused_kernels(x) is not None


@needs_triton
def test_they_are_tried_out_in_the_types_that_they_meet(tmp_path: Path) -> None:
    """Whatever type a script makes the default one."""
    code = (
        "import torch; from burst_plugin.compute import triton_softmax as fused\n"
        "torch.set_default_dtype(torch.bfloat16); seen = []\n"
        "fused._launch = lambda kernel, size, xs, **_: seen.append([str(x.dtype) for x in xs])\n"
        "fused.try_out(torch.device('cpu')); print(seen[0])"
    )
    found = _run(code, tmp_path, TRITON_INTERPRET="1")
    assert found.strip() == str(["torch.float32"] * 3 + ["torch.bfloat16", "torch.float32"])


_COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from burst_plugin.compute import triton_softmax as fused

class Absent:  # a driver of a GPU that is not there; what is compiled for it is not launched
    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)
    def get_current_device(self):
        return self.capability
    def get_current_stream(self, device):
        return 0

def compiled(kernel, tensors, **constants):
    strides = tuple(tensor.stride() for tensor in tensors)
    found = kernel.warmup(tensors, strides, (4, 64, 128), ROWS=16, WIDTH=128, grid=(1,), **constants).asm
    assert "cubin" in found
    assert any("ld.global.v4" in line for line in found["ptx"].splitlines()), "rows are read 16 bytes at a time"
    assert tensors[0].dtype == torch.float32 or kernel not in (fused._merge, fused._add) or "cvt.rn" in found["ptx"]

absent = Absent()
driver.set_active(absent)
for absent.capability in (80, 90, 100):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out, other, lse = torch.zeros(1, 64, 4, 128), torch.zeros(1, 64, 4, 128, dtype=dtype), torch.zeros(1, 4, 64)
        for parts in (1, fused.FAN_IN):
            for into in (out, other):
                rest = (out, *[other] * parts)
                compiled(fused._merge, (into, lse, *rest, lse[None]), PARTS=1 + parts)
                compiled(fused._add, (into, *rest), PARTS=1 + parts)
        compiled(fused._row_delta, (other, other, lse))
        compiled(fused._row_factor, (other, other, lse))
        print(absent.capability, dtype)
"""


@pytest.mark.slow
@needs_triton
def test_the_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """Not only in the interpreter, which is more patient: for three generations, without any of them."""
    assert len(_run(_COMPILE, tmp_path).splitlines()) == 9


class _OnGpu(torch.Tensor):
    is_cuda = True  # type: ignore[assignment]
    device = torch.device("cuda", 0)  # type: ignore[assignment]


def test_what_cannot_be_fused_is_not(caplog: pytest.LogCaptureFixture) -> None:
    """On CPUs, in float64, without triton or with one that fails; the last two say so once."""
    caplog.set_level(logging.WARNING)  # libraries that other tests import raise it
    plain = torch.zeros(1, 1, 1, 1)
    there: Any = plain.as_subclass(_OnGpu)
    assert softmax.fused_kernels(plain) is None
    assert softmax.fused_kernels(there, there.double().as_subclass(_OnGpu)) is None
    assert softmax.fused_kernels(there, plain) is None
    assert not caplog.records
    for hidden, said in (
        ({"burst_plugin.compute.triton_softmax": None}, "triton_softmax"),
        ({"triton": None}, "triton"),
    ):
        softmax._fused_on.cache_clear()
        caplog.clear()
        sys.modules.pop("burst_plugin.compute.triton_softmax", None)
        with mock.patch.dict(sys.modules, hidden):  # type: ignore[arg-type]
            assert softmax.fused_kernels(there) is softmax.fused_kernels(there) is None
        (record,) = caplog.records
        assert "several kernels instead of one on cuda:0" in record.getMessage()
        assert said in record.getMessage()
    softmax._fused_on.cache_clear()


def test_what_memory_ran_out_for_is_tried_again() -> None:
    there: Any = torch.zeros(1, 1, 1, 1).as_subclass(_OnGpu)
    fused = mock.Mock()
    fused.try_out.side_effect = [torch.OutOfMemoryError(), None]
    softmax._fused_on.cache_clear()
    with mock.patch.dict(sys.modules, {"burst_plugin.compute.triton_softmax": fused}):
        with pytest.raises(torch.OutOfMemoryError):
            softmax.fused_kernels(there)
        assert softmax.fused_kernels(there) is fused
    softmax._fused_on.cache_clear()
