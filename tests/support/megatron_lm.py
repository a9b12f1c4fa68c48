"""Checkouts of Megatron-LM to test with, and their training scripts run on CPUs.

BURST_MEGATRON_LM names a checkout of one release, or a Git repository (bare or not) that has the tags of all. Tests
of a release that is not there are skipped, with the reason. If a package that its scripts import is not installed,
they fail before they start one.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from burst_plugin.megatron.releases import RELEASES, tree_version

ROOT = Path(__file__).parents[2]
VARIABLE = "BURST_MEGATRON_LM"
TAGS = [release.tag for release in RELEASES]

# What a release's scripts import and neither PyTorch nor megatron-core installs; `examples/environment.sh test` does.
_IMPORTS = {"core_v0.16.1": ("six",)}

# A small model, and what has to be said on a CPU.
SMALL = """
--distributed-backend gloo --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm
--no-masked-softmax-fusion --no-rope-fusion --num-workers 0 --num-layers 2 --hidden-size 64 --num-attention-heads 8
--group-query-attention --num-query-groups 4 --ffn-hidden-size 96 --swiglu --normalization RMSNorm
--disable-bias-linear --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --seq-length 128
--max-position-embeddings 128 --micro-batch-size 2 --global-batch-size 2 --train-iters 5 --lr 1e-3 --min-lr 1e-4
--lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --log-interval 1 --eval-iters 0
--eval-interval 1000 --no-create-attention-mask-in-dataloader
""".split()  # noqa: SIM905

# Run a script as the launcher with --cpu does, but leave it to its tree to install the plugin.
_WITHOUT_INSTALLING = """
import sys
from pathlib import Path
from burst_plugin import run
from burst_plugin.megatron import cpu
script = Path(sys.argv[1])
sys.argv = sys.argv[1:]
cpu.prepare(script.parent)
run._execute(script, bare_children=True)
run._leave()
"""


def checkout(tag: str, directory: Path) -> Path:
    """Return a checkout of one release, in `directory` if it has to be made.

    Skip the test if there is none; fail it if a package that the release's scripts import is not installed.
    """
    given = os.environ.get(VARIABLE)
    if not given:
        pytest.skip(f"{VARIABLE} names no Megatron-LM checkout")
    tree = _find_or_extract(tag, Path(given), directory)
    missing = [name for name in _IMPORTS.get(tag, ()) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.fail(f"the scripts of {tag} import {', '.join(missing)}: run bash examples/environment.sh test", False)
    return tree


def _find_or_extract(tag: str, given: Path, directory: Path) -> Path:
    """Return `given` if it is a checkout of the release; otherwise extract its tag into `directory`, or skip."""
    (release,) = [release for release in RELEASES if release.tag == tag]
    if (given / "megatron" / "core").is_dir() and tree_version(given) in release.versions:
        return given
    git = ["git", "-C", str(given)]
    revision = tag if tag != "main" else "HEAD"
    if subprocess.run([*git, "rev-parse", "-q", "--verify", revision], capture_output=True).returncode:
        pytest.skip(f"{VARIABLE}={given} has no {tag}")
    target = directory / tag
    target.mkdir()
    archive = subprocess.run(
        [*git, "archive", revision, "--", "megatron", "tools", ":(glob)*.py"], stdout=subprocess.PIPE, check=True
    )
    subprocess.run(["tar", "-x", "-C", target], input=archive.stdout, check=True)
    if tree_version(target) not in release.versions:
        pytest.skip(f"{revision} of {given} is {tree_version(target)}, not {release.versions}")
    return target


def train(
    script: Path,
    ranks: int,
    *flags: str,
    launcher: bool = True,
    timeout_s: float = 300,
    without: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a training script of a checkout on so many ranks: by the launcher, or by its own patched tree.

    On made-up data, unless the flags name some. without: words of `SMALL` to leave out.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    if launcher:
        command += ["-m", "burst_plugin.run", "--cpu"]
    else:
        runner = script.parent / "without_installing.py"
        runner.write_text(_WITHOUT_INSTALLING)
        command.append(str(runner))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [
            *command,
            str(script),
            *(
                word
                for word in SMALL
                if word not in without and (word != "--mock-data" or "--data-path" not in flags)
            ),
            *flags,
        ],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        cwd=ROOT,
    )


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    """Return the loss of every iteration in a log of Megatron-LM's."""
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return [float(text) for text in re.findall(r"lm loss: (\S+)", done.stdout)]
