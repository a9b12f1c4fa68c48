"""How far q goes from what a user calls to a kernel."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import burst_plugin
from burst_plugin import Strategy, Topology, VirtualRing
from burst_plugin.kernels.reference import ReferenceKernel
from tests.support.reference import Problem

PACKAGE = str(Path(burst_plugin.__file__).parent)


def frames_at(name: str, run: Any) -> set[int]:
    """Return how many frames of the package are on the stack whenever the kernel's method `name` is entered."""
    code = getattr(ReferenceKernel, name).__code__
    found: set[int] = set()

    def entered(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is code:
            depth, each = 0, frame
            while each is not None:
                depth += each.f_code.co_filename.startswith(PACKAGE)
                each = each.f_back  # type: ignore[assignment]
            found.add(depth)

    sys.setprofile(entered)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("backward", ["q", "kv"])
def test_few_frames_lie_between_a_call_and_a_kernel(backward: str, degree: int) -> None:
    ring = VirtualRing(Topology(2, 2), Strategy(kernel="reference", backward=backward, ulysses_degree=degree))
    q, k, v, dout = Problem.draw(32, (4, 4))[:4]
    q.requires_grad_()
    outputs: list[torch.Tensor] = []
    forward = frames_at("forward", lambda: outputs.append(ring.attention(q, k, v)[0]))
    backward_ = frames_at("backward", lambda: outputs[0].backward(dout))
    assert forward
    assert backward_
    assert max(forward) <= 8
    assert max(backward_) <= 7
