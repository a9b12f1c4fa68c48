"""Layers that carry a state on one GPU, all ranks in this process: PyTorch's kernels, and a library's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from burst_plugin import Strategy, Topology, VirtualRing, recurrent
from burst_plugin.recurrent import heads
from tests.support.recurrences import DEFINITIONS, draw

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
TOKENS, SIZES = 512, {"groups": 4, "heads": 8, "keys": 64, "values": 64}


def _worst(layer: Any, kind: str, device: str = "cuda", **options: Any) -> float:
    """The largest error of out and gradients, relative to the definition in float64."""
    drawn = draw(kind, torch.Generator().manual_seed(0), 1, TOKENS, **SIZES)
    xs = {name: x.float().to(device).requires_grad_() for name, x in drawn.items()}
    truths = {name: x.detach().double().requires_grad_() for name, x in xs.items()}
    ring = VirtualRing(Topology(2, 4), Strategy(layout="zigzag", recurrent="state"))
    out = layer(**xs, place=recurrent.Placement(ring), **options)
    expected, _ = DEFINITIONS[kind](**truths)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device)
    found = torch.autograd.grad(out, list(xs.values()), dout)
    true = torch.autograd.grad(expected, list(truths.values()), dout.double())
    pairs = [(out, expected), *zip(found, true, strict=True)]
    return max(float(((x.double() - y).norm() / y.norm()).detach()) for x, y in pairs)


@pytest.fixture(autouse=True)
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of some heads travel while others are computed."""
    monkeypatch.setattr(heads, "MANY_TOKENS", 0)
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("kind", "layer", "device"),
    [
        pytest.param("delta_rule", recurrent.gated_delta_rule, "cpu", id="toy"),
        pytest.param("delta_rule", recurrent.gated_delta_rule, "cuda", marks=GPU, id="delta_rule"),
        pytest.param(
            "delta_rule_by_channel", recurrent.gated_delta_rule, "cuda", marks=GPU, id="delta_rule_by_channel"
        ),
        pytest.param("state_space", recurrent.state_space, "cuda", marks=GPU, id="state_space"),
        pytest.param("selective_scan", recurrent.selective_scan, "cuda", marks=GPU, id="selective_scan"),
        pytest.param("decay_attention", recurrent.decay_attention, "cuda", marks=GPU, id="decay_attention"),
    ],
)
def test_layers_equal_their_definitions(kind: str, layer: Any, device: str) -> None:
    assert _worst(layer, kind, device) < 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_kernel_of_flash_linear_attention_equals_the_definition() -> None:
    rules = pytest.importorskip("fla.ops.gated_delta_rule")

    def kernel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None) -> Any:
        shared = v.shape[2] // k.shape[2]
        q, k = (x.repeat_interleave(shared, 2).contiguous() for x in (q, k))
        options = {"scale": 1.0, "initial_state": state, "output_final_state": True}
        return rules.chunk_gated_delta_rule(q, k, v.contiguous(), g, beta, **options)

    assert _worst(recurrent.gated_delta_rule, "delta_rule", kernel=kernel) < 2e-2
