"""Unmodified training scripts of every release: no loss changes, with the launcher or with a patched tree.

These want a checkout (see tests/support/megatron_lm.py), which is never committed.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from burst_plugin.megatron.releases import tree_version
from tests.support.conversations import write_conversations
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


# Its warm-up, which is left out on CPUs, draws random numbers as on GPUs.
_WARMED_UP = """
import importlib
from megatron.training import initialize
importlib.reload(initialize)
"""
_DRAWN = """
--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --position-embedding-type learned_absolute
--train-iters 1
"""
_INTERLEAVED = """
--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 12
--train-iters 3
"""


def test_weights_start_alike_with_any_context_parallel_size(tree: Path) -> None:
    """Those of routers and learned positions are drawn from the generator that the warm-up draws from."""
    script = tree / "warmed_up.py"
    script.write_text(_WARMED_UP + (tree / "pretrain_gpt.py").read_text())
    runs = [losses(train(script, ranks, *cp, *_DRAWN.split())) for ranks, cp in ((1, []), (2, CP2), (4, CP4))]
    assert len(runs[0]) == 1
    for run in runs[1:]:
        assert run == pytest.approx(runs[0], abs=1e-5)


def test_interleaved_stages(tree: Path) -> None:
    """Stages draw weights of their own, so the judge is the same pipeline without context parallelism, run twice."""
    script = tree / "pretrain_gpt.py"
    runs = [losses(train(script, ranks, *cp, *_INTERLEAVED.split())) for ranks, cp in ((2, []), (2, []), (4, CP2))]
    assert len(runs[0]) == 3
    for run in runs[1:]:
        assert run == pytest.approx(runs[0], abs=1e-5)


_EXPERTS_MTP_MLA = """
--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2
--mtp-num-layers 1 --multi-latent-attention --micro-batch-size 1 --train-iters 3
"""


def test_experts_over_ranks_token_prediction_and_latent_attention(tree: Path) -> None:
    """Without the ring, two ranks have a sample each; latent attention is Megatron's own there."""
    flags, grouped = _EXPERTS_MTP_MLA.split(), ("--group-query-attention", "--num-query-groups", "4")
    runs = [train(tree / "pretrain_gpt.py", 2, *cp, *flags, without=grouped) for cp in ([], CP2)]
    whole, cut = map(losses, runs)
    assert len(whole) == 3
    assert cut == pytest.approx(whole, abs=1e-5)


def test_refused_flags_are_told_once(tree: Path) -> None:
    done = train(tree / "pretrain_gpt.py", 2, *CP2, "--cuda-graph-impl", "local")
    assert done.returncode != 0
    ours = done.stderr.split("torch/distributed/elastic")[0]  # then torchrun says that ranks have failed
    assert ours.count("burst attention cannot run with these flags:") == 1
    assert "\n  --cuda-graph-impl local is not supported: use none, " in ours
    assert "Traceback" not in ours


@pytest.mark.parametrize("per_token", [[], ["--calculate-per-token-loss"]], ids=["mean_of_microbatches", "per_token"])
def test_conversations_are_packed_alike_over_any_ranks(tree: Path, tmp_path: Path, per_token: list[str]) -> None:
    """Megatron's own attention knows no documents on CPUs, so that there is no run on one rank to compare with."""
    script = tree / "pretrain_gpt.py"
    if tree_version(tree) < (0, 18, 0):
        assert "--sft is not supported: before 0.18" in train(script, 2, *CP2, "--sft").stderr
        return
    conversations = write_conversations(tmp_path, lambda source: (24, 16, 40, 32), samples=20)
    flags = [*conversations, "--split", "100,0,0", *per_token]
    two, four = (losses(train(script, ranks, *cp, *flags)) for ranks, cp in ((2, CP2), (4, CP4)))
    assert len(two) == 5
    assert two[-1] < two[0] - 0.1
    assert four == pytest.approx(two, abs=1e-5)


_RECOMPUTED = """
--seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 2 --train-iters 3
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1
"""


def test_what_memory_auto_chooses_changes_no_loss(tree: Path) -> None:
    flags, script = _RECOMPUTED.split(), tree / "pretrain_gpt.py"
    one = losses(train(script, 1, *flags))
    assert len(one) == 3
    chosen, off = (train(script, 2, *CP2, *flags, "--burst-memory", memory) for memory in ("auto", "off"))
    for done in (chosen, off):
        assert losses(done) == pytest.approx(one, abs=1e-5)
    said = 'memory "auto", since layers are computed again: loss in chunks of 512 tokens; attention is not computed'
    assert said in chosen.stdout
    assert 'memory "auto"' not in off.stdout


def test_flags_are_in_the_help_and_refused_by_name(tree: Path) -> None:
    if tree_version(tree)[:2] != (0, 18):  # a help text of that release has a bare percent sign
        shown = train(tree / "pretrain_gpt.py", 1, "--help").stdout
        assert "--burst-backward {auto,q,kv,both}" in shown
    for ranks, flags, message in (
        (2, [*CP2, "--attention-backend", "unfused"], "--attention-backend unfused is not supported"),
        (1, ["--burst-backward", "q"], "--burst-backward needs --cp-comm-type burst"),
    ):
        done = train(tree / "pretrain_gpt.py", ranks, *flags)
        assert done.returncode != 0
        assert message in done.stderr
