"""`burst plan --model` on published models with other mixers than attention, and with measured rates."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from burst_plugin.cli import main
from burst_plugin.deepspeed.config import BLOCK, Block
from burst_plugin.profiling.cluster_profile import ClusterProfile
from tests.profiling.test_cluster_profile import PROFILE

CONFIGS = Path(__file__).parents[1] / "planning" / "configs"
QWEN, NEMOTRON = (str(CONFIGS / f"{name}.json") for name in ("qwen3_next_80b_a3b", "nemotron_h_56b"))
MILLION = ("--seq", "1m", "--gpus", "64")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", "--model", *words]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", "--model", *words]) == 1
    return capsys.readouterr().err.splitlines()[-1]


def seconds(out: str, part: str) -> float:
    found = re.search(rf"^  {part} +([\d.]+) s$", out, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize(
    ("config", "says", "layers"),
    [
        (QWEN, r"qwen3_next \(79.67 G parameters\)", "gated delta net in 36, attention in 12 of 48"),
        (NEMOTRON, r"nemotron_h \(56.32 G parameters\)", "Mamba-2 in 54, attention in 10 of 118"),
    ],
)
def test_a_million_tokens(config: str, says: str, layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, config, *MILLION, "--framework", "deepspeed")
    assert re.match(rf"{says} on 1,048,576 tokens, deepspeed, 8 x 8 GPUs of 80 GiB: \d+ s per step", out)
    assert f"\nLayers: {layers}\n" in out
    assert re.search(r"\n  recurrent = state  +(with heads a step takes .* more|64 ranks cannot share)", out)
    assert 0 < seconds(out, "recurrent layers, kernels") < 0.2 * seconds(out, "attention, backward")
    assert seconds(out, "recurrent layers, states or heads sent") < seconds(out, "recurrent layers, kernels")


def test_deepspeed_gets_what_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, NEMOTRON, *MILLION, "--framework", "deepspeed", "--emit", str(tmp_path))
    config = json.loads((tmp_path / "ds_config.json").read_text())
    assert config[BLOCK]["recurrent"] == "state"
    block = Block.of(config)
    assert block is not None
    assert block.strategy.recurrent == "state"


def test_heads_are_exchanged_where_there_are_few_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpus", "64", "--gpus-per-node", "64", "--framework", "deepspeed")
    out = printed(capsys, NEMOTRON, "--seq", "32k", *words)
    assert re.search(r"\n  recurrent = heads  +with states a step takes .* more\n", out)


@pytest.mark.parametrize(("config", "what"), [(QWEN, "gated delta net"), (NEMOTRON, "Mamba-2")])
def test_megatrons_flags_are_refused_by_name(
    config: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "`--emit` cannot write this plan: " in printed(capsys, config, *MILLION)
    said = refused(capsys, config, *MILLION, "--emit", str(tmp_path / "plan"))
    assert re.search(rf"cannot be written as flags of Megatron .* since it has {what}; write the flags", said)
    assert not (tmp_path / "plan").exists()
    flags = tmp_path / "flags.txt"
    flags.write_text("--seq-length 1048576 --context-parallel-size 8")
    said = refused(capsys, config, "--flags", str(flags), "--gpus", "64")
    assert "are not alike, or have other parts than attention" in said


def test_rates_that_were_measured_replace_the_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "profile.json"
    measured = replace(PROFILE, recurrent={"gated delta net": 8e12, "Mamba-2": 160e12})
    measured.save(profile)
    assert ClusterProfile.read(profile) == measured
    words = (*MILLION, "--framework", "deepspeed")
    slow = printed(capsys, QWEN, *words, "--profile", str(profile))
    usual = printed(capsys, QWEN, *words)
    ratio = seconds(slow, "recurrent layers, kernels") / seconds(usual, "recurrent layers, kernels")
    assert ratio == pytest.approx(0.08 * 989 / 8, rel=0.2), "as it is printed, to a tenth of a second"
    given = printed(capsys, QWEN, *words, "--profile", str(profile), "--recurrent-share", "0.08")
    assert seconds(given, "recurrent layers, kernels") == seconds(usual, "recurrent layers, kernels")
    assert seconds(given, "attention, backward") > 1.5 * seconds(usual, "attention, backward")
    profile.write_text(json.dumps({**measured.as_dict(), "recurrent": {"Mamba-2": -1}}))
    assert "recurrent.Mamba-2 is -1, expected a positive number" in refused(
        capsys, QWEN, *words, "--profile", str(profile)
    )
