"""Kernels of flash-linear-attention, interpreted on CPUs: maps of pieces and gradients in stages."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from burst_plugin import Strategy, Topology, VirtualRing, recurrent
from burst_plugin.recurrent.kernels import delta_rule, fla_delta_rule
from tests.support.launched import ROOT

_VERSION = "0.6.0"


@pytest.fixture(scope="module")
def library() -> Path:
    """Return a folder with the library, apart from the environment, since transformers takes what it finds there."""
    folder = Path(sys.prefix, "share", f"fla-core-{_VERSION}")
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(dir=folder.parent)
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", made]
        subprocess.run([*install, f"fla-core=={_VERSION}"], check=True, timeout=120)
        with suppress(OSError):  # another worker was faster
            os.rename(made, folder)
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.parametrize("kind", ["by_head", pytest.param("by_channel", marks=pytest.mark.slow)])
def test_layers_in_stages_equal_their_definitions(library: Path, kind: str) -> None:
    paths = os.pathsep.join([str(ROOT), str(library)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.fla_cases", kind],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout.splitlines()[-1])
    assert set(errors) == {"stages", "out", "q", "k", "v", "g", "beta"}
    assert max(errors.values()) < 1e-6, errors


def _rule() -> None:
    """Stand for the library's function."""


def _wrapper(file: str) -> Callable[[], None]:
    """Return a function of a file that calls the library's."""
    found: dict[str, Any] = {}
    source = "def made(implementation):\n    def wrapped():\n        return implementation()\n    return wrapped"
    exec(compile(source, file, "exec"), found)
    wrapped: Callable[[], None] = found["made"](_rule)
    return wrapped


def test_stages_are_taken_where_a_function_is_the_librarys() -> None:
    with mock.patch.object(fla_delta_rule, "rule_of", return_value=_rule):
        assert fla_delta_rule.is_rule(_rule, False)
        assert fla_delta_rule.is_rule(_wrapper("transformers/integrations/hub_kernels.py"), False)
        assert not fla_delta_rule.is_rule(_wrapper("mine.py"), False), "which may change arguments"
        assert not fla_delta_rule.is_rule(int, False)
        assert fla_delta_rule.is_rule(_module(_wrapper("transformers/integrations/hub_kernels.py")), False)
        assert not fla_delta_rule.is_rule(_module(int), False)
    assert not fla_delta_rule.is_usable(torch.device("cpu"))


def _module(function: Callable[..., Any]) -> torch.nn.Module:
    """Return a module that calls a function, as the package `kernels` makes one."""

    class Called(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return function(*args)

    return Called()


_SIZES = fla_delta_rule.RuleSizes(False, 1, 8, 8, torch.float32)


@pytest.mark.parametrize("fault", [0.5, RuntimeError("no such argument")], ids=str)
def test_stages_that_differ_from_the_library_are_not_used(fault: object) -> None:
    wrong = {"side_effect": fault} if isinstance(fault, Exception) else {"return_value": fault}
    with (
        mock.patch.object(fla_delta_rule, "worst_error", **wrong),
        mock.patch.dict(fla_delta_rule.TRIED_OUT, clear=True),
        pytest.warns(UserWarning, match="are not used"),
    ):
        assert not fla_delta_rule.are_right(torch.device("cpu"), _SIZES)


def _tried(*_: object) -> float:
    """Stand for the library's function and the stages: what is saved is read."""
    x = torch.ones(3, requires_grad=True)
    torch.autograd.grad((x * x).exp().sum(), x)
    return 0.0


@pytest.mark.parametrize("where", ["checkpoint", "inference mode"])
def test_stages_are_tried_out_anywhere(where: str) -> None:
    x = torch.ones(3, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        assert fla_delta_rule.are_right(torch.device("cpu"), _SIZES)
        return (x * 2).exp()

    with (
        mock.patch.object(fla_delta_rule, "worst_error", _tried),
        mock.patch.dict(fla_delta_rule.TRIED_OUT, clear=True),
    ):
        if where == "inference mode":
            with torch.inference_mode():
                layer(x)
        else:
            checkpoint(layer, x, use_reentrant=False).sum().backward()
            assert x.grad is not None


@pytest.mark.parametrize("checkpointed", [False, True])
def test_stages_keep_no_tensors_that_autograd_cannot_free(checkpointed: bool) -> None:
    xs = [torch.rand(1, 70, 2, 8, requires_grad=True) for _ in range(3)]
    place = recurrent.Placement(VirtualRing(Topology(1, 3), Strategy(recurrent="state")))
    kept: list[weakref.ref[Tensor]] = []

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        g, beta = -torch.rand(1, 70, 2), torch.rand(1, 70, 2)
        return recurrent.gated_delta_rule(q, k * 1, v, g, beta, place)  # type: ignore[no-any-return]

    def noting(chunks: delta_rule.DeltaChunks) -> Any:
        kept.extend(map(weakref.ref, chunks.tensors))
        return pair(chunks)

    pair = delta_rule.DeltaChunks.pair
    with mock.patch.object(delta_rule.DeltaChunks, "pair", noting):
        out = checkpoint(layer, *xs, use_reentrant=False) if checkpointed else layer(*xs)
        first = len(kept)
        if not checkpointed:
            out.sum().backward()
    gc.collect()
    assert first
    assert not any(each() is not None for each in kept)


def test_stages_are_not_tried_out_in_a_backward_pass() -> None:
    """A thread that waits for another's backward pass in its own would wait for ever on a GPU."""
    x = torch.ones(3, requires_grad=True)
    found = []
    tried = mock.Mock(return_value=0.0)
    with (
        mock.patch.object(fla_delta_rule, "worst_error", tried),
        mock.patch.dict(fla_delta_rule.TRIED_OUT, clear=True),
    ):
        y = x * 2
        y.register_hook(lambda grad: found.append(fla_delta_rule.are_right(torch.device("cpu"), _SIZES)))
        y.sum().backward()
        assert found == [False]
        assert not fla_delta_rule.are_right(torch.device("cpu"), _SIZES), "so that layers go on as they began"
    assert not tried.called
