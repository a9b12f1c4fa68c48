"""Unmodified training scripts of every release: no loss changes, with the launcher or with a patched tree.

These want a checkout (see tests/support/megatron_lm.py), which is never committed.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.megatron_lm import ROOT, TAGS, checkout, losses, train

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(900)]

CP2 = ["--context-parallel-size", "2", "--cp-comm-type", "burst"]
CP4 = ["--context-parallel-size", "4", "--hierarchical-context-parallel-sizes", "2", "2", "--cp-comm-type", "burst"]


@pytest.fixture(scope="module", params=TAGS)
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout(request.param, tmp_path_factory.mktemp("megatron-lm"))


@pytest.fixture(scope="module")
def one_rank(tree: Path) -> list[float]:
    found = losses(train(tree / "pretrain_gpt.py", 1))
    assert len(found) == 5
    assert found[-1] < found[0] - 0.2, "the model learns, so that its losses tell one step from another"
    return found


def test_the_launcher_changes_no_loss(tree: Path, one_rank: list[float]) -> None:
    for ranks, flags in ((2, CP2), (4, CP4)):
        done = train(tree / "pretrain_gpt.py", ranks, *flags, "--burst-backward", "q")
        assert losses(done) == pytest.approx(one_rank, abs=1e-5)
        assert done.stdout.count("burst_plugin in Megatron-core:") == 1
        assert "not tested" not in done.stdout


def test_a_patched_tree_changes_no_loss(tree: Path, one_rank: list[float], tmp_path: Path) -> None:
    patched = tmp_path / "tree"
    shutil.copytree(tree, patched, ignore=shutil.ignore_patterns(".git", "__pycache__"))
    apply = ["bash", str(ROOT / "patches" / "apply.sh")]
    subprocess.run([*apply, str(patched)], check=True)
    for ranks, flags in ((1, []), (2, CP2), (4, CP4)):
        done = train(patched / "pretrain_gpt.py", ranks, *flags, launcher=False)
        assert losses(done) == pytest.approx(one_rank, abs=1e-5)
    subprocess.run([*apply, "--reverse", str(patched)], check=True)
    name = "megatron/training/__init__.py"
    assert (patched / name).read_bytes() == (tree / name).read_bytes()


def test_flags_are_in_the_help_and_refused_by_name(tree: Path) -> None:
    shown = train(tree / "pretrain_gpt.py", 1, "--help").stdout
    assert "--burst-backward {auto,q,kv}" in shown
    for ranks, flags, message in (
        (2, [*CP2, "--reset-attention-mask"], "--reset-attention-mask is not supported: documents would"),
        (1, ["--burst-backward", "q"], "--burst-backward needs --cp-comm-type burst"),
    ):
        done = train(tree / "pretrain_gpt.py", ranks, *flags)
        assert done.returncode != 0
        assert message in done.stderr
