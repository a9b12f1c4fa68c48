"""`patches/apply.sh`: picks by version, takes back what it did, and leaves alone what it does not know.

Works on trees and patches that are made here: real patches only fit real files, as the tests of real checkouts show.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from burst_plugin.megatron.releases import RELEASES
from tests.support.megatron_lm import ROOT

PATCHES = ROOT / "patches"
TARGET = "megatron/training/__init__.py"
FILES = {
    "megatron/core/package_info.py": "MAJOR = 9\nMINOR = 8\nPATCH = 7\nPRE_RELEASE = ''\n",
    TARGET: "first = 1\nsecond = 2\nthird = 3\n",
    "megatron/training/arguments.py": "def add_megatron_arguments(parser): return parser\n",
    "pretrain_gpt.py": "from megatron.training import arguments\n",
}
Apply = Callable[..., "subprocess.CompletedProcess[str]"]


def git(tree: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    done = subprocess.run(["git", *identity, *arguments], cwd=tree, capture_output=True, text=True, check=True)
    return done.stdout


def contents(tree: Path) -> dict[str, bytes]:
    files = (path for path in tree.rglob("*") if path.is_file() and ".git" not in path.parts)
    return {str(path.relative_to(tree)): path.read_bytes() for path in files}


def added_lines(patch: Path) -> list[str]:
    return [line[1:] for line in patch.read_text().splitlines() if line.startswith("+") and line[:3] != "+++"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A stand-in for a checkout: a Git repository of its own."""
    root = tmp_path / "Megatron LM"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "base")
    return root


@pytest.fixture
def apply(tree: Path, tmp_path: Path) -> Apply:
    """`apply.sh` with the real patches, and one that fits the stand-in and adds what the newest real one adds."""
    patches = tmp_path / "patches"
    shutil.copytree(PATCHES, patches)
    newest = patches / "megatron-lm" / RELEASES[-1].tag / "install.patch"
    before = (tree / TARGET).read_text()
    (tree / TARGET).write_text(before + "\n".join(added_lines(newest)) + "\n")
    diff = git(tree, "diff", "--full-index", "-U2")
    (tree / TARGET).write_text(before)
    made = patches / "megatron-lm" / "stand-in" / "install.patch"
    made.parent.mkdir()
    made.write_text(f"A stand-in.\n\nBase: 1234\nVersions: 9.8.6 9.8.7\n\n{diff}")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(patches / "apply.sh"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    return run


def test_every_release_has_a_patch_that_only_adds_a_hook() -> None:
    found = {path.parent.name: path for path in (PATCHES / "megatron-lm").glob("*/*.patch")}
    assert found.keys() == {release.tag for release in RELEASES}
    for release in RELEASES:
        head, diff = found[release.tag].read_text().split("diff --git ", 1)
        fields = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
        versions = [".".join(map(str, version)) for version in release.versions]
        assert fields["Versions"].split() == versions
        assert len(fields["Base"].split()[0]) == 40
        assert release.tag in fields["Base"]
        assert fields["Why"]
        assert fields["Until"]
        changed = [line for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
        assert changed == ["+", "+import burst_plugin.megatron", "+", "+burst_plugin.megatron.install()"]
        assert sum(line.startswith(" ") for line in diff.splitlines()) <= 3, "context lines are upstream's"


def test_a_patch_is_applied_once_and_taken_back(tree: Path, apply: Apply) -> None:
    before = contents(tree)
    checked = apply("--check", str(tree))
    assert "megatron-lm/stand-in/install.patch fits" in checked.stdout
    assert contents(tree) == before
    done = apply(str(tree))
    assert done.returncode == 0, done.stderr
    assert "applied megatron-lm/stand-in/install.patch" in done.stdout
    patched = contents(tree)
    assert {name for name in before if before[name] != patched[name]} == {TARGET}
    assert (
        patched[TARGET]
        .decode()
        .endswith("third = 3\n\nimport burst_plugin.megatron\n\nburst_plugin.megatron.install()\n")
    )
    again = apply(str(tree))
    assert again.returncode == 0
    assert "already; nothing to do" in again.stdout
    assert contents(tree) == patched
    back = apply("--reverse", str(tree))
    assert back.returncode == 0, back.stderr
    assert contents(tree) == before
    assert git(tree, "status", "--porcelain") == ""


def test_a_tree_without_git_or_inside_another_repository(tree: Path, apply: Apply) -> None:
    before = contents(tree)
    shutil.rmtree(tree / ".git")
    for _ in range(2):
        assert "applied" in apply(str(tree)).stdout
        assert "took" in apply("--reverse", str(tree)).stdout
        assert contents(tree) == before
        git(tree.parent, "init", "-q")  # a repository around the tree must not hide its files


def _dirty(tree: Path) -> None:
    (tree / "pretrain_gpt.py").write_text("changed = True\n")


def _dirty_target(tree: Path) -> None:
    (tree / TARGET).write_text("first = 1\nsecond = 20\nthird = 3\n")


def _other_target(tree: Path) -> None:
    _dirty_target(tree)
    git(tree, "commit", "-qam", "our own")


def _unknown_version(tree: Path) -> None:
    (tree / "megatron/core/package_info.py").write_text("MAJOR = 0\nMINOR = 12\nPATCH = 3\n")
    git(tree, "commit", "-qam", "older")


def _no_version(tree: Path) -> None:
    (tree / "megatron/core/package_info.py").write_text("VERSION = 'unknown'\n")


def _no_checkout(tree: Path) -> None:
    (tree / "megatron/core/package_info.py").unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_dirty, "changes that are not committed. Commit or stash them first:\napply.sh:  M pretrain_gpt.py"),
        (_dirty_target, f"apply.sh:  M {TARGET}"),
        (_other_target, f"but its {TARGET} is not the one of 1234"),
        (_unknown_version, "is megatron.core 0.12.3, for which there is no patch. There is for:"),
        (_no_version, "is megatron.core without a version"),
        (_no_checkout, "is not a Megatron-LM checkout"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_other_trees_are_left_as_they_are(
    tree: Path, apply: Apply, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(tree)
    before = contents(tree)
    for options in ([], ["--check"], ["--reverse"]):
        done = apply(*options, str(tree))
        assert done.returncode == 1, done.stdout
        assert done.stderr.endswith("The tree was left as it is.\n")
        assert contents(tree) == before
    assert message in apply(str(tree)).stderr


def test_the_refusal_lists_all_known_versions(tree: Path, apply: Apply) -> None:
    _unknown_version(tree)
    told = apply(str(tree)).stderr
    for release in RELEASES:
        for version in release.versions:
            assert ".".join(map(str, version)) in told
    assert "core_v0.17.1" in told
    assert "python -m burst_plugin.run" in told


def test_wrong_calls_show_how(tree: Path, apply: Apply) -> None:
    for arguments in ([], ["--what", str(tree)], [str(tree), str(tree)]):
        done = apply(*arguments)
        assert done.returncode == 2
        assert "bash patches/apply.sh --reverse TREE" in done.stderr
    assert "is not a directory" in apply(str(tree / "nowhere")).stderr


@pytest.mark.megatron
def test_a_patched_tree_installs_the_plugin(tree: Path, apply: Apply) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    apply(str(tree))
    code = "import argparse\nfrom megatron.training import arguments\n"
    code += "print(arguments.add_megatron_arguments(argparse.ArgumentParser()).format_help())"
    (tree / "pretrain_gpt.py").write_text(code)
    (tree / "megatron/core/package_info.py").unlink()  # else the stand-in's megatron.core hides the installed one
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "pretrain_gpt.py"]
    shown = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=120)
    assert "--burst-backward {auto,q,kv,both}" in shown.stdout, shown.stderr
