"""Other libraries beside the ring, on stand-ins: which are timed, and what is said of the rest."""

from __future__ import annotations

import importlib.machinery
import sys
import time
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from burst_plugin.check import peers
from burst_plugin.check.findings import NOT_SHOWN, OK, Finding
from burst_plugin.check.settings import Settings
from burst_plugin.check.world import joined
from tests.support.ranks import run_ranks

QUICK = Settings(quick=True)
LATE_S = 0.1


def _module(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(attributes)
    return module


def _slow(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, group: Any) -> torch.Tensor:
    assert causal
    assert group.size() == 2
    time.sleep(LATE_S)
    return peers._attend(q, k, v)


def _found(rank: int) -> tuple[list[Finding], list[Finding]]:
    installed = {
        "ring_flash_attn": _module("ring_flash_attn", zigzag_ring_flash_attn_func=_slow),
        "transformer_engine": _module("transformer_engine"),
        "transformer_engine.pytorch": None,
    }
    known = {**peers.PEERS, "Absent": ("no_such_package", peers._pytorch)}
    with (
        joined((rank, 2, rank), 20.0) as world,
        mock.patch.dict(sys.modules, installed),
        mock.patch.object(peers, "PEERS", known),
    ):
        return list(peers.measure_peers(world, QUICK)), list(peers.peers(world, QUICK))


def test_libraries_are_timed_beside_the_ring_and_none_fails_the_check() -> None:
    (first, on_cpus), (second, _) = run_ranks(_found, 2)
    assert [each.text for each in first] == [each.text for each in second], "ranks say the same"
    found = {each.what: each for each in first}
    slow = found["ring-flash-attn"]
    assert slow.verdict == OK, slow.text
    assert slow.figures["peer_s"] >= LATE_S
    assert f"{slow.figures['peer_s'] / slow.figures['ring_s']:.2f} x the ring" in slow.text
    assert found["Transformer Engine"].verdict == NOT_SHOWN
    assert "it does not run here: rank 0: ModuleNotFoundError" in found["Transformer Engine"].text
    assert found["Ulysses"].verdict == OK, found["Ulysses"].text
    assert found["Absent"].text == "no_such_package is not installed"
    assert "it does not run here: rank 0: NotImplementedError: " in found["PyTorch context_parallel"].text, "on CPUs"
    (no_gpus,) = on_cpus
    assert no_gpus.verdict == NOT_SHOWN
