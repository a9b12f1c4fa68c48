"""Small promises of the adapter that no other test would miss: each was broken once on purpose."""

from __future__ import annotations

import argparse
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from burst_plugin import Strategy
from burst_plugin.megatron import core_attention, install
from burst_plugin.megatron.arguments import add_arguments, parsed_strategy
from burst_plugin.megatron.choice import ChosenCoreAttention
from burst_plugin.megatron.core_attention import BurstCoreAttention
from burst_plugin.megatron.registry import Registry
from tests.megatron.test_adapter import CP2, CP4, LikeTransformerEngines
from tests.megatron.test_config import config
from tests.megatron.test_parity import _step
from tests.support.megatron_gpt import GptRun, build
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron


def test_each_layer_has_its_own_cp_comm_type() -> None:
    listed = types.SimpleNamespace(context_parallel_size=2, cp_comm_type=["p2p", "burst"])
    options = {"config": listed, "layer_number": 1, "original": LikeTransformerEngines, "registry": None}
    assert type(ChosenCoreAttention(cp_comm_type="p2p", **options)) is LikeTransformerEngines


def test_softmax_scale_is_megatrons() -> None:
    scaled = {"softmax_scale": 0.5}
    (one,) = run_ranks(_step, 1, GptRun(config=scaled))
    for result in run_ranks(_step, 2, GptRun(cp=2, cp_comm_type="burst", config=scaled)):
        assert result.loss == pytest.approx(one.loss, abs=1e-5)


def _no_mask(rank: int) -> list[float]:
    core = build(CP2).module.decoder.layers[0].self_attention.core_attention
    k = torch.zeros(32, 1, 4, 8)
    return core(torch.zeros(32, 1, 8, 8), k, k + rank, None, attn_mask_type=AttnMaskType.no_mask).unique().tolist()


def test_no_mask_is_full_attention() -> None:
    assert run_ranks(_no_mask, 2) == [pytest.approx([0.5])] * 2


def _inference_params(rank: int) -> None:
    layer = build(CP2).module.decoder.layers[0]
    with pytest.raises(ValueError, match="is for training; use context_parallel_size=1"):
        layer(torch.zeros(32, 1, 64), None, inference_params=object())


def test_inference_params_are_refused_too() -> None:
    assert run_ranks(_inference_params, 2) == [None, None]


def _strategy(rank: int) -> str:
    adapter = install(Strategy(schedule="flat_ring"))
    build(CP4)
    return adapter.contexts()[0].describe()["schedule"]


def test_the_installed_strategy_is_used() -> None:
    assert run_ranks(_strategy, 4) == ["flat_ring"] * 4


def _core(**options: Any) -> BurstCoreAttention:
    return BurstCoreAttention(config(), 1, AttnMaskType.causal, "self", registry=Registry(None), **options)


def test_deterministic_mode_needs_deterministic_kernels() -> None:
    options = {"config": config(deterministic_mode=True), "layer_number": 1, "attn_mask_type": AttnMaskType.causal}
    with pytest.raises(ValueError, match=r"deterministic_mode=True needs torch\.use_deterministic_algorithms"):
        BurstCoreAttention(**options, attention_type="self", registry=Registry(None))
    BurstCoreAttention(**options, attention_type="self", registry=Registry(Strategy(deterministic=True)))
    torch.use_deterministic_algorithms(True)
    try:
        BurstCoreAttention(**options, attention_type="self", registry=Registry(None))
    finally:
        torch.use_deterministic_algorithms(False)


def test_unknown_options_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_attention, "unknown_fields", lambda config: ["num_layers"])
    with pytest.warns(UserWarning, match="does not know Megatron's option num_layers=2"):
        _core()


@pytest.mark.parametrize("parts", [(2,), (1, 4)])
def test_all_flags_reach_the_strategy(parts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    parser = add_arguments(argparse.ArgumentParser())
    flags = ["--burst-schedule", "flat_ring", "--burst-check", "always", "--burst-parts", *map(str, parts)]
    flags += ["--burst-ulysses-degree", "2"]
    module = argparse.Namespace(_GLOBAL_ARGS=parser.parse_args(flags))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    expected = 2 if len(parts) == 1 else (1, 4)
    assert parsed_strategy() == Strategy(schedule="flat_ring", check="always", parts=expected, ulysses_degree=2)


def test_a_script_finds_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    (tmp_path / "train.py").write_text("import beside, sys; print(beside.WORD, sys.argv[1:])")
    command = [sys.executable, "-m", "burst_plugin.run", "--framework", "megatron"]
    command += [str(tmp_path / "train.py"), "--x"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.splitlines()[-1] == "found ['--x']", done.stderr


def test_the_launcher_leaves_no_process_behind(tmp_path: Path) -> None:
    """On CPUs it ends at once, without what Python does at exit; Megatron's checkpoints start a manager."""
    script = tmp_path / "train.py"
    script.write_text(
        "import multiprocessing\n"
        "manager = multiprocessing.get_context('spawn').Manager()\n"
        "print('manager', manager._process.pid)"
    )
    command = [sys.executable, "-m", "burst_plugin.run", "--framework", "megatron", "--cpu", str(script)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=60, cwd=root
    )  # ends with the last process
    assert done.returncode == 0
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("manager")]
    assert not Path(f"/proc/{line.split()[1]}").exists()
