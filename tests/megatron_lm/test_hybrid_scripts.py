"""Unmodified scripts that train models of several kinds of layers, such as Nemotron-H: the ring changes no loss.

These want a checkout (see tests/support/megatron_lm.py), which is never committed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from burst_plugin.megatron.releases import tree_version
from tests.megatron_lm.test_scripts import CP2, CP4
from tests.support.megatron_lm import TAGS, checkout, losses, train

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(900)]

# 6 heads of Mamba-2, which 4 context-parallel ranks could not share.
_MAMBA = ["--mamba-state-dim", "8", "--mamba-head-dim", "16", "--mamba-num-groups", "2", "--mamba-num-heads", "6"]
_EXPERTS = ["--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall"]


@pytest.fixture(scope="module", params=TAGS)
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout(request.param, tmp_path_factory.mktemp("megatron-lm"))


def _train(tree: Path, ranks: int, pattern: str, *flags: str) -> list[float]:
    """Losses of a model with layers by `pattern`, of Megatron's own spec; then those of its token prediction."""
    script, kind = "pretrain_hybrid.py", "hybrid"
    if not (tree / script).exists():
        script, kind = "pretrain_mamba.py", "mamba"
    spec = ["--spec", f"megatron.core.models.{kind}.{kind}_layer_specs", f"{kind}_stack_spec"]
    layers = ["--hybrid-layer-pattern", pattern]
    if tree_version(tree) < (0, 17, 0):
        layers = ["--hybrid-override-pattern", pattern, "--num-layers", str(len(pattern))]
    done = train(tree / script, ranks, *spec, *layers, *_MAMBA, *flags)
    predicted = re.findall(r"mtp_1 loss: (\S+)", done.stdout)
    return [*losses(done), *map(float, predicted)]


@pytest.mark.parametrize(
    ("pattern", "flags"),
    [("M*M-", []), ("M-M*ME", _EXPERTS), ("M*-/M*", ["--mtp-num-layers", "1"])],
    ids=["dense", "experts", "token_prediction"],
)
def test_the_launcher_changes_no_loss(tree: Path, pattern: str, flags: list[str]) -> None:
    if "/" in pattern and tree_version(tree) < (0, 17, 0):
        pytest.skip("hybrid models predict one token only until 0.16")
    one_rank = _train(tree, 1, pattern, *flags)
    assert len(one_rank) == (10 if "/" in pattern else 5)
    assert one_rank[4] < one_rank[0] - 0.2, "the model learns, so that its losses tell one step from another"
    for ranks, cp in ((2, CP2), (4, [*CP4, "--burst-layout", "striped", "--burst-loss-chunk", "48"])):
        assert _train(tree, ranks, pattern, *flags, *cp) == pytest.approx(one_rank, abs=1e-5)


def test_pipeline_stages(tree: Path) -> None:
    """Stages draw weights of their own, so the judge is the same pipeline without context parallelism."""
    pattern = "M*M-" if tree_version(tree) < (0, 17, 0) else "M*|M-"
    stages = ["--pipeline-model-parallel-size", "2"]
    whole, cut = (_train(tree, ranks, pattern, *stages, *cp) for ranks, cp in ((2, []), (4, CP2)))
    assert len(whole) == 5
    assert cut == pytest.approx(whole, abs=1e-5)
