"""`--burst-even-microbatches` in unmodified training scripts: it changes no loss, and says where it cannot work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.megatron_lm import TAGS, checkout, losses, train

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(900)]

EVEN = "--burst-even-microbatches"
EOD = 255  # of NullTokenizer with 255 words


@pytest.fixture(scope="module", params=TAGS)
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout(request.param, tmp_path_factory.mktemp("megatron-lm"))


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags for 16 samples per step, of documents of log-normal lengths that attention keeps apart."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = tmp_path_factory.mktemp("documents") / "documents"
    random = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in np.ceil(random.lognormal(2.5, 1, 1000)).astype(int):
        builder.add_document(np.array([*np.minimum(random.zipf(1.3, length), EOD - 1), EOD]), [length + 1])
    builder.finalize(f"{prefix}.idx")
    data = f"--data-path {prefix} --split 100,0,0 --reset-attention-mask --reset-position-ids"
    return [*data.split(), "--micro-batch-size", "1", "--global-batch-size", "16"]


def _run(tree: Path, ranks: int, *flags: str) -> Any:
    return train(tree / "pretrain_gpt.py", ranks, *flags, without=("--no-create-attention-mask-in-dataloader",))


@pytest.mark.parametrize("stages", [1, 2])
def test_no_loss_changes(tree: Path, flags: list[str], stages: int) -> None:
    """Two data-parallel ranks; of pipelines the first stage knows the tokens, and the last one the labels."""
    flags = [*flags, "--pipeline-model-parallel-size", str(stages)]
    plain, evened = (_run(tree, 2 * stages, *flags, *more) for more in ([], [EVEN]))
    expected = losses(plain)
    assert len(expected) == 5
    assert expected[-1] < expected[0] - 0.2, "the model learns, so that its losses tell one step from another"
    assert losses(evened) == pytest.approx(expected, abs=1e-5)
    (said,) = re.findall(r"ranks has (\S+) times the mean attention, (\S+) times in Megatron's", evened.stdout)
    assert float(said[0]) < 1.02 < 1.1 < float(said[1])
    assert "are evened" not in plain.stdout


def test_a_run_resumes_with_and_without_it_on_any_number_of_ranks(
    tree: Path, flags: list[str], tmp_path: Path
) -> None:
    """The last loss tells of all steps before it. (That of the second step is logged as the mean of two.)"""
    whole = losses(_run(tree, 2, *flags, EVEN))
    saving = ["--save", str(tmp_path), "--save-interval", "2", "--exit-interval", "2"]
    assert losses(_run(tree, 2, *flags, *saving, EVEN)) == pytest.approx(whole[:2], abs=1e-5)
    for ranks, more in ((2, [EVEN]), (4, [EVEN]), (1, [])):
        first, *_, last = losses(_run(tree, ranks, *flags, "--load", str(tmp_path), *more))
        assert (first, last) == pytest.approx((whole[2], whole[4]), abs=1e-5)


def test_what_cannot_work_is_refused_on_every_rank(tree: Path, flags: list[str]) -> None:
    flags = [flag for flag in flags if flag != "--reset-attention-mask"]
    done = _run(tree, 2, *flags, EVEN, "--dataloader-type", "cyclic")
    assert done.returncode != 0
    assert done.stderr.count("cannot run with these flags; change them, or drop it:") >= 2
    for message in ("--dataloader-type cyclic is not supported: ", "it needs --reset-attention-mask or "):
        assert message in done.stderr
