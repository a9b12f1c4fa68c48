"""Flags that `burst plan --emit` writes, in Megatron-LM's own parser and model builder: the model of transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from burst_plugin.megatron.releases import tree_version
from tests.support.megatron_lm import ROOT, TAGS, checkout
from tests.support.model_flags import BEFORE_0_19, LACKS

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("tag", TAGS)
def test_logits_are_those_of_transformers(tag: str, tmp_path: Path) -> None:
    tree = checkout(tag, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.flags_in_scripts", str(tree), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    version = tree_version(tree)
    refused = {*LACKS, *(BEFORE_0_19 if version < (0, 19, 0) else ())}
    assert {name for name, outcome in outcomes.items() if isinstance(outcome, str)} == refused
    built = {name: outcome for name, outcome in outcomes.items() if name not in refused}
    assert len(built) >= 18
    assert {name: gap for name, (gap, _) in built.items() if not gap < 1e-4} == {}
    assert {name: fields for name, (_, fields) in built.items() if fields} == {}, "tests read these flags otherwise"
