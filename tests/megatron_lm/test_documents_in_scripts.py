"""Unmodified `pretrain_gpt.py` of every release on real text: documents are kept apart with any number of ranks.

Megatron itself keeps them apart on one rank by masks of all pairs, as here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from burst_plugin.megatron.releases import tree_version
from tests.support.megatron_lm import TAGS, checkout, losses, train
from tests.support.packed_text import write_packed_text

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(900)]

CP2 = ["--context-parallel-size", "2", "--cp-comm-type", "burst"]
CP4 = ["--context-parallel-size", "4", "--hierarchical-context-parallel-sizes", "2", "2", "--cp-comm-type", "burst"]
AUTO = ["--burst-layout", "auto"]
RESET = ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"]
PACKED = ["--dataloader-inter-document-masking", "--eod-mask-loss"]
PER_TOKEN = ["--calculate-per-token-loss"]
MLA = """
--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8
--rope-type rope
"""
SHAPES = {
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "experts": (1, "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"),
    "mtp": (1, "--mtp-num-layers 1"),
}


@pytest.fixture(scope="module", params=TAGS)
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout(request.param, tmp_path_factory.mktemp("megatron-lm"))


@pytest.fixture(scope="module")
def text(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags for sequences of 128 tokens that hold some three documents each."""
    eod = 255 if tree_version(tree) < (0, 18, 0) else 254  # of NullTokenizer with --vocab-size 255
    prefix = write_packed_text(tmp_path_factory.mktemp("text"), 40, eod)
    evaluated = ["--split", "90,10,0", "--eval-iters", "1", "--eval-interval", "2"]
    return ["--data-path", str(prefix), "--train-iters", "3", *evaluated]


def run(tree: Path, ranks: int, *flags: str) -> tuple[list[float], list[float]]:
    """Return losses, those of evaluation last, and norms of the whole gradient."""
    without = ["--no-create-attention-mask-in-dataloader"]
    if "--multi-latent-attention" in flags:
        without += ["--group-query-attention", "--num-query-groups", "4"]
    done = train(tree / "pretrain_gpt.py", ranks, *flags, without=tuple(without))
    found = losses(done)
    norms = [float(text) for text in re.findall(r"grad norm: (\S+)", done.stdout)]
    evaluated = [float(text) for text in re.findall(r"lm loss value: (\S+)", done.stdout)]
    assert len(found) == len(norms) == 3
    assert evaluated
    return found + evaluated, norms


def check(found: tuple[list[float], list[float]], expected: tuple[list[float], list[float]]) -> None:
    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    assert found[1] == pytest.approx(expected[1], rel=5e-4), "of three printed decimals"


@pytest.mark.parametrize("per_token", [[], PER_TOKEN], ids=["mean_of_microbatches", "per_token"])
def test_end_of_document_tokens(tree: Path, text: list[str], per_token: list[str]) -> None:
    one = run(tree, 1, *text, *RESET, *per_token)
    apart = run(tree, 1, *text, "--eod-mask-loss", *per_token)
    assert abs(apart[0][0] - one[0][0]) > 1e-4, "documents matter here"
    for ranks, flags in ((2, CP2), (4, [*CP4, *AUTO])):
        check(run(tree, ranks, *flags, *text, *RESET, *per_token), one)


def test_skipped_iterations(tree: Path, text: list[str]) -> None:
    skipping = [*RESET, "--train-iters", "4", "--iterations-to-skip", "2"]
    one = run(tree, 1, *text, *skipping)
    for layout in ([], AUTO):
        check(run(tree, 2, *CP2, *layout, *text, *skipping), one)


@pytest.mark.parametrize("shape", SHAPES)
def test_end_of_document_tokens_in_other_models(tree: Path, text: list[str], shape: str) -> None:
    ranks, flags = SHAPES[shape]
    given = [*text, *RESET, *flags.split()]
    if shape == "mtp" and tree_version(tree) >= (0, 20, 0):  # that Megatron itself makes with Transformer Engine only
        assert "is_inference_column_parallel_linear" in train(tree / "pretrain_gpt.py", 1, *given).stderr
        return
    check(run(tree, 2 * ranks, *CP2, *AUTO, *given), run(tree, ranks, *given))


def test_latent_attention_is_alike_over_any_ranks(tree: Path, text: list[str]) -> None:
    """Without Transformer Engine Megatron has none for one rank, and 0.16 none at all."""
    if tree_version(tree) >= (0, 17, 0):
        given = [*text, *RESET, *MLA.split()]
        check(run(tree, 4, *CP4, *AUTO, *given), run(tree, 2, *CP2, *given))


def test_documents_of_the_data_files(tree: Path, text: list[str]) -> None:
    """They end with end-of-document tokens, so that the masks of these judge them."""
    if tree_version(tree) < (0, 19, 0):
        return
    one = run(tree, 1, *text, *RESET)
    for ranks, flags in ((2, CP2), (4, [*CP4, *AUTO]), (4, [*CP2, *AUTO, "--tensor-model-parallel-size", "2"])):
        if "--tensor-model-parallel-size" in flags:
            one = run(tree, 2, *text, *RESET, "--tensor-model-parallel-size", "2")
        check(run(tree, ranks, *flags, *text, *PACKED), one)


@pytest.mark.parametrize("per_token", [[], PER_TOKEN], ids=["mean_of_microbatches", "per_token"])
def test_experts_are_balanced_in_every_sample(tree: Path, text: list[str], per_token: list[str]) -> None:
    """Samples of a microbatch are packed into one sequence, whose parts ranks hold."""
    if tree_version(tree) < (0, 19, 0):
        return
    given = [*text, *per_token, *SHAPES["experts"][1].split()]
    given += ["--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "10"]
    one = run(tree, 1, *given, *RESET)
    for ranks, flags in ((2, CP2), (4, [*CP4, *AUTO])):
        check(run(tree, ranks, *flags, *given, *PACKED), one)


def test_a_run_of_four_ranks_goes_on_with_two(tree: Path, text: list[str], tmp_path: Path) -> None:
    saved = ["--save", str(tmp_path), "--save-interval", "2", "--ckpt-format", "torch_dist"]
    whole = run(tree, 1, *text, *RESET)
    train(tree / "pretrain_gpt.py", 4, *CP4, *AUTO, *text, *RESET, *saved, "--exit-interval", "2")
    done = train(
        tree / "pretrain_gpt.py", 2, *CP2, *text, *RESET, "--load", str(tmp_path), "--ckpt-format", "torch_dist"
    )
    assert losses(done) == pytest.approx(whole[0][2:3], abs=1e-5)
