"""Kernels of flash-linear-attention, interpreted on CPUs: maps of pieces and gradients in stages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from burst_plugin.recurrent.kernels import fla_delta_rule
from tests.support.launched import ROOT

_VERSION = "0.6.0"


@pytest.fixture(scope="module")
def library() -> Path:
    """Return a folder with the library, apart from the environment, since transformers takes what it finds there."""
    folder = Path(sys.prefix, "share", f"fla-core-{_VERSION}")
    if not (folder / "fla").exists():
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
        subprocess.run([*install, f"fla-core=={_VERSION}"], check=True, timeout=120)
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


def test_stages_are_taken_where_a_function_is_the_librarys() -> None:
    def wrapped() -> None:
        return implementation()

    implementation, other = _rule, int
    values = torch.zeros(1, 4, 2, 8)

    def pair(function: object, decays: int = 3, usable: bool = True) -> object:
        library = mock.Mock(by_head=mock.Mock(rule=_rule))
        with (
            mock.patch.object(fla_delta_rule, "_library", return_value=library),
            mock.patch.object(fla_delta_rule, "_is_usable", return_value=usable),
        ):
            return fla_delta_rule.pair_in_stages(function, values, torch.zeros((1,) * decays))

    assert pair(_rule)
    assert pair(wrapped), "in the closure of a wrapper"
    assert pair(other) is pair(_rule, decays=4) is pair(_rule, usable=False) is None
    assert fla_delta_rule.pair_in_stages(_rule, values, torch.zeros(1, 4, 2)) is None, "on CPUs"


@pytest.mark.parametrize("fault", [0.5, RuntimeError("no such argument")], ids=str)
def test_stages_that_differ_from_the_library_are_not_used(fault: object) -> None:
    fla_delta_rule._are_right.cache_clear()
    wrong = {"side_effect": fault} if isinstance(fault, Exception) else {"return_value": fault}
    with mock.patch.object(fla_delta_rule, "worst_error", **wrong), pytest.warns(UserWarning, match="are not used"):
        assert not fla_delta_rule._are_right(torch.device("cpu"), False)
    fla_delta_rule._are_right.cache_clear()
