"""`--hybrid-context-parallel` in unmodified `pretrain_gpt.py`: one ring trains as one rank without the plugin."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from burst_plugin.megatron.releases import tree_version
from tests.support.conversations import log_normal_lengths, write_conversations
from tests.support.megatron_lm import TAGS, checkout, losses, train
from tests.support.packed_text import write_packed_text

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(900)]

BURST = ["--cp-comm-type", "burst"]
HYBRID = [*BURST, "--hybrid-context-parallel", "--max-seqlen-per-dp-cp-rank", "64"]
FIXED = [*BURST, "--context-parallel-size", "2", "--burst-layout", "auto"]
AT_2 = ["--ckpt-step", "2"]

# Megatron's own attention knows packed documents with Transformer Engine only. Masks keep them apart on one rank.
_MASKED = """
import torch
from megatron.core.models.gpt import GPTModel
_forward = GPTModel.forward

def _masked(model, input_ids, position_ids, attention_mask, *args, packed_seq_params=None, **kwargs):
    places = torch.arange(input_ids.shape[1])
    numbers = torch.searchsorted(packed_seq_params.cu_seqlens_q.flatten(), places, right=True)
    mask = (numbers[:, None] != numbers) | (places[:, None] < places)
    return _forward(model, input_ids, position_ids, mask[None, None], *args, **kwargs)

GPTModel.forward = _masked
"""


@pytest.fixture(scope="module", params=TAGS)
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout(request.param, tmp_path_factory.mktemp("megatron-lm"))


@pytest.fixture(scope="module")
def given(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags for four steps of four samples, which hold conversations of any length; the last one is cut off."""
    conversations = write_conversations(tmp_path_factory.mktemp("conversations"), log_normal_lengths, samples=24)
    steps = "--split 90,10,0 --global-batch-size 4 --train-iters 4 --eval-iters 1 --eval-interval 2"
    return [*conversations, *steps.split(), "--calculate-per-token-loss", "--ckpt-format", "torch_dist"]


def run(script: Path, ranks: int, *flags: str, without: tuple[str, ...] = ()) -> tuple[list[float], list[float], str]:
    """Return losses, those of evaluation last; norms of the whole gradient; and all that was printed."""
    done = train(script, ranks, *flags, without=without)
    found = losses(done)
    norms = [float(text) for text in re.findall(r"grad norm: (\S+)", done.stdout)]
    evaluated = [float(text) for text in re.findall(r"lm loss value: (\S+)", done.stdout)]
    return [*found, *evaluated], norms, done.stdout


def state(directory: Path) -> dict[str, Any]:
    """Return the weights after the last step, and Adam's means of gradients and of their squares, by name."""
    reader = checkpoint.FileSystemReader(directory / "iter_0000004")
    tensors = {
        name: torch.zeros(meta.size)
        for name, meta in reader.read_metadata().state_dict_metadata.items()
        if isinstance(meta, TensorStorageMetadata) and meta.properties.dtype == torch.float32
    }
    checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def test_the_flag_trains_as_one_rank_and_goes_on_without(tree: Path, given: list[str], tmp_path: Path) -> None:
    script, masked = tree / "pretrain_gpt.py", tree / "masked.py"
    if tree_version(tree) < (0, 18, 0):
        done = train(script, 2, *HYBRID, *given)
        assert "--sft is not supported: before 0.18" in done.stderr
        return
    masked.write_text(_MASKED + script.read_text())
    expected, norms, _ = run(masked, 1, *given, "--save", str(tmp_path / "one"), "--save-interval", "2")
    assert len(norms) == 4
    merges = tree_version(tree) >= (0, 19, 0)  # samples of a microbatch
    one = state(tmp_path / "one")
    assert sum("exp_avg" in name for name in one) > 5
    for ranks, written in ((2, []), (4, ["--context-parallel-size", "2"])):
        saved = tmp_path / f"{ranks}"
        found = run(script, ranks, *HYBRID, *written, *given, "--save", str(saved), "--save-interval", "2")
        assert found[0] == pytest.approx(expected, abs=2e-6)
        assert found[1] == pytest.approx(norms, abs=1e-3)
        taken = (
            f"--context-parallel-size {ranks} --burst-layout auto --micro-batch-size {ranks // 2 if merges else 1}"
        )
        assert found[2].count(f"--hybrid-context-parallel is taken as {taken} --global-batch-size 4") == 1
        ours = state(saved)
        assert ours.keys() == one.keys()
        for name, x in ours.items():
            torch.testing.assert_close(x, one[name], atol=1e-5, rtol=1e-4, msg=name)

    without = [*FIXED, *given, "--load", str(tmp_path / "4"), *AT_2, "--save", str(tmp_path / "without")]
    losses_without, _, _ = run(script, 2, *without, "--exit-interval", "3", "--save-interval", "3")
    assert losses_without[0] == pytest.approx(expected[2], abs=2e-6)
    again, _, _ = run(script, 4, *HYBRID, *given, "--load", str(tmp_path / "without"))
    assert again[0] == pytest.approx(expected[3], abs=2e-6)


def test_documents_of_the_data_files_train_as_on_one_rank(tree: Path, tmp_path: Path) -> None:
    """End-of-document tokens end them, too, so that Megatron's masks keep them apart on one rank."""
    if tree_version(tree) < (0, 19, 0):
        return
    prefix = write_packed_text(tmp_path, 40, eod=254)  # of NullTokenizer with --vocab-size 255
    steps = (
        "--split 90,10,0 --train-iters 3 --eval-iters 1 --eval-interval 2 --micro-batch-size 1 --global-batch-size 8"
    )
    given = ["--data-path", str(prefix), *steps.split(), "--eod-mask-loss", "--calculate-per-token-loss"]
    masks = ["--reset-position-ids", "--reset-attention-mask"]
    packed = ["--dataloader-inter-document-masking", "--context-parallel-size", "2"]
    without = ("--no-create-attention-mask-in-dataloader",)
    expected = run(tree / "pretrain_gpt.py", 1, *given, *masks, without=without)
    found = run(tree / "pretrain_gpt.py", 4, *HYBRID, *given, *packed, without=without)
    assert found[0] == pytest.approx(expected[0], abs=2e-6)
    assert found[1] == pytest.approx(expected[1], abs=1e-3)
    assert "is taken as --context-parallel-size 4 --burst-layout auto --micro-batch-size 2 --global-batch" in found[2]
