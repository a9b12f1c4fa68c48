"""How much of the package one call goes through, from what a user calls to a kernel and back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import burst_plugin
from burst_plugin import ContextParallel, burst_attention

PACKAGE = str(Path(burst_plugin.__file__).parent)
FORWARD, BACKWARD = (60, 15), (50, 12)  # functions, and the files that they are in


def _entered(run: Callable[[], Any]) -> tuple[set[tuple[str, str]], set[str]]:
    """Return the functions of the package that are entered while `run` runs, and their files."""
    functions: set[tuple[str, str]] = set()

    def noted(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            functions.add((code.co_filename.removeprefix(PACKAGE), f"{code.co_name}, line {code.co_firstlineno}"))

    sys.setprofile(noted)
    try:
        run()
    finally:
        sys.setprofile(None)
    return functions, {path for path, _ in functions}


@pytest.fixture(scope="module")
def entered() -> dict[str, tuple[set[tuple[str, str]], set[str]]]:
    """Return what a steady call on one rank enters, by direction: a tile, no message, and a kernel of every CPU."""
    cp, outs = ContextParallel(kernel="torch_cpu"), []
    for _ in range(3):
        q, k, v = (torch.randn(1, 64, 4, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        forward = _entered(lambda q=q, k=k, v=v: outs.append(burst_attention(q, k, v, cp)))  # type: ignore[misc]
        loss = outs.pop().sum()
        backward = _entered(loss.backward)
    return {"forward": forward, "backward": backward}


@pytest.mark.parametrize(("direction", "most"), [("forward", FORWARD), ("backward", BACKWARD)])
def test_a_call_enters_few_functions_in_few_files(direction: str, most: tuple[int, int], entered: Any) -> None:
    functions, files = entered[direction]
    assert functions, "backward passes of CPUs run in the thread that asks for them"
    assert (len(functions) <= most[0], len(files) <= most[1]) == (True, True), sorted(functions)
