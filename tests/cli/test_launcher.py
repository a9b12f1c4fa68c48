"""Which adapter the launcher installs."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from burst_plugin import frameworks, run
from burst_plugin.cli import main
from burst_plugin.frameworks.description import Framework


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that names no framework, started by no framework's launcher."""
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
    assert run.framework_of(script, ["--deepspeed"]) == "megatron"


def test_deepspeeds_launcher_decides(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "megatron", "deepspeed")
    monkeypatch.setenv("CROSS_SIZE", "1")
    monkeypatch.setenv("LOCAL_SIZE", "2")
    assert run.framework_of(script, []) == "deepspeed"


@pytest.mark.parametrize("name", ["megatron", "deepspeed"])
def test_the_only_one_installed_is_taken(script: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install(monkeypatch, name)
    assert run.framework_of(script, []) == name


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
def test_of_two_the_one_named_by_the_script_or_its_flags_is_taken(
    script: Path, monkeypatch: pytest.MonkeyPatch, text: str, arguments: list[str], name: str
) -> None:
    install(monkeypatch, "megatron", "deepspeed")
    script.write_text(text)
    assert run.framework_of(script, arguments) == name


@pytest.mark.parametrize("text", ["", "import deepspeed, megatron"])
def test_a_script_that_could_use_either_is_refused(script: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    install(monkeypatch, "megatron", "deepspeed")
    script.write_text(text)
    with pytest.raises(SystemExit, match="put --framework megatron or --framework deepspeed before it"):
        run.framework_of(script, [])


def test_nothing_installed_is_told(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(SystemExit, match="neither megatron-core nor deepspeed is installed"):
        run.framework_of(script, [])


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more framework, known by its name in the registry and by what its package says."""

    def report(subject: str | None) -> Iterator[str]:
        yield f"looked at {subject}"

    described = Framework(
        name="other",
        title="The Other",
        distribution="other-core",
        packages=("other-core",),
        subject=("PLACE", "where to look"),
        switch="--other",
        words=("import other",),
        report=report,
        launcher_options=("--other-rank",),
    )
    for name, module in {
        "other": SimpleNamespace(install=lambda: "the other is installed"),
        "other.framework": SimpleNamespace(FRAMEWORK=described),
        "other.cpu": SimpleNamespace(prepare=lambda directory: print(f"prepared for {directory.name}")),
    }.items():
        monkeypatch.setitem(sys.modules, f"burst_plugin.{name}", module)  # type: ignore[arg-type]
    monkeypatch.setattr(frameworks, "FRAMEWORKS", (*frameworks.FRAMEWORKS, "other"))


@pytest.mark.usefixtures("other")
def test_a_framework_is_registered_by_its_name_only(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--other", "here"]) == 0
    shown = capsys.readouterr().out
    assert "\n  other-core           not installed\n" in shown
    assert shown.startswith("burst_plugin 0.1.0\n\nThe Other\n  looked at here\n\nVersions\n"), "before all else"
    assert "DeepSpeed" not in shown, "others were not asked about"
    install(monkeypatch, "deepspeed", "other")
    script.write_text("import sys\nprint(sys.argv[1:])  # import other")
    assert run.framework_of(script, []) == "other"
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # which the script takes the place of
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(sys, "argv", ["run"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    run.main(["--cpu", "--other-rank=3", str(script), "--steps", "2"])
    shown = capsys.readouterr().out
    assert shown == f"prepared for {script.parent.name}\nthe other is installed\n['--other-rank=3', '--steps', '2']\n"
    assert left == [0]
    with pytest.raises(SystemExit):
        run.main(["--help"])
    assert "The Other" in capsys.readouterr().out
