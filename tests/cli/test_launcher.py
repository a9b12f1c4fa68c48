"""Whose adapter the launcher installs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from burst_plugin import run


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that names no framework, under nobody's launcher."""
    monkeypatch.delenv("CROSS_SIZE", raising=False)
    path = tmp_path / "train.py"
    path.write_text("print('training')")
    return path


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let just these frameworks be found."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in names else None)


def test_what_lies_beside_the_script_decides(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "deepspeed")
    (script.parent / "megatron").mkdir()
    assert run._framework(script, ["--deepspeed"]) == "megatron"


def test_deepspeeds_launcher_decides(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "megatron", "deepspeed")
    monkeypatch.setenv("CROSS_SIZE", "1")
    monkeypatch.setenv("LOCAL_SIZE", "2")
    assert run._framework(script, []) == "deepspeed"


@pytest.mark.parametrize("name", ["megatron", "deepspeed"])
def test_the_only_one_installed_is_taken(script: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install(monkeypatch, name)
    assert run._framework(script, []) == name


@pytest.mark.parametrize(
    ("text", "arguments", "name"),
    [
        ("import deepspeed", [], "deepspeed"),
        ("TrainingArguments(deepspeed=path)", [], "deepspeed"),
        ("", ["--deepspeed_config", "ds.json"], "deepspeed"),
        ("from megatron.core import parallel_state", [], "megatron"),
        ("", ["--cp-comm-type", "burst"], "megatron"),
    ],
)
def test_of_two_the_one_that_the_script_or_its_flags_name_is_taken(
    script: Path, monkeypatch: pytest.MonkeyPatch, text: str, arguments: list[str], name: str
) -> None:
    install(monkeypatch, "megatron", "deepspeed")
    script.write_text(text)
    assert run._framework(script, arguments) == name


@pytest.mark.parametrize("text", ["", "import deepspeed, megatron"])
def test_a_script_that_could_be_anybodys_is_refused(script: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    install(monkeypatch, "megatron", "deepspeed")
    script.write_text(text)
    with pytest.raises(SystemExit, match="put --framework megatron or --framework deepspeed before it"):
        run._framework(script, [])


def test_nothing_installed_is_told(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(SystemExit, match="neither megatron-core nor deepspeed is installed"):
        run._framework(script, [])
