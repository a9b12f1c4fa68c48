"""Rates of layers with a state: positive, the same on every rank, and of libraries where there are some."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin.check import recurrent_rates
from burst_plugin.check.findings import OK
from burst_plugin.check.recurrent_rates import recurrent_finding, recurrent_rates_of
from burst_plugin.check.settings import Settings
from burst_plugin.check.world import World, joined
from burst_plugin.recurrent.kernels.delta_rule import delta_rule
from burst_plugin.recurrent.kernels.state_space import state_space
from tests.support.ranks import run_ranks

QUICK = Settings(quick=True)


def alone() -> World:
    return World(0, 1, torch.device("cpu"), dist.HashStore(), 10.0)


def _rates(rank: int) -> list[Any]:
    with joined((rank, 2, rank), 20.0) as world:
        return recurrent_rates_of(world, QUICK)


def test_rates_are_those_of_the_slowest_rank() -> None:
    one, other = run_ranks(_rates, 2)
    assert one == other
    assert [rate.kind for rate in one] == ["gated delta net", "Mamba-2"]
    assert all(min(rate.forward_tokens_per_s, rate.backward_tokens_per_s, rate.flops_per_s) > 0 for rate in one)


def test_libraries_are_called_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names and the order of their arguments."""
    called = []

    def chunk_gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, scale: float
    ) -> tuple[Tensor, None]:
        called.append(scale)
        return delta_rule(q, k, v, g, beta)[0], None

    def mamba_chunk_scan_combined(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int) -> Tensor:
        called.append(chunk_size)
        return state_space(x, dt, A, B, C)[0]

    found = {each.__name__: each for each in (chunk_gated_delta_rule, mamba_chunk_scan_combined)}
    monkeypatch.setattr(recurrent_rates, "library_function", lambda module, name, device: found[name])
    finding = recurrent_finding(alone(), QUICK)
    assert finding.verdict == OK
    assert "(flash-linear-attention)" in finding.text
    assert "(mamba-ssm)" in finding.text
    assert set(called) == {1.0, 256}
