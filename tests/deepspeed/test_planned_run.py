"""What `burst plan --framework deepspeed --emit` prints, as a script."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, training_args

import burst_plugin.deepspeed as burst
from burst_plugin.cli.main import main
from tests.support.deepspeed_run import Run, build, draw, llama
from tests.support.ranks import run_ranks
from tests.support.trainer_run import Rows

pytestmark = pytest.mark.huggingface

LENGTH = 64
SHORT = {"max_steps": 1, "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}


def _run(rank: int, lines: str) -> tuple[int, list[float]]:
    """Run the printed lines, then Trainer; return the number of ranks of a ring, and the losses."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    training_args.is_torch_bf16_gpu_available = lambda: True  # which DeepSpeed does not ask on CPUs
    script: dict[str, Any] = {}
    exec(lines, script)
    data = Rows(draw(1, rows=4, length=LENGTH)[0])
    trainer = Trainer(model=build(Run(model=llama())), args=script["arguments"], train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return burst.context().ranks, losses


def test_the_printed_lines_train_on_a_ring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama().save_pretrained(tmp_path)
    plan = ["--gpus", "2", "--gpus-per-node", "2", "--framework", "deepspeed", "--emit", str(tmp_path / "plan")]
    assert main(["plan", "--model", str(tmp_path / "config.json"), "--seq", str(LENGTH), *plan]) == 0
    out = capsys.readouterr().out
    written = tmp_path / "plan" / "trainer_arguments.json"
    written.write_text(json.dumps(json.loads(written.read_text()) | SHORT))
    for ranks, losses in run_ranks(_run, 2, out[out.index("import json") :]):
        assert ranks == 2
        assert losses
        assert torch.tensor(losses).isfinite().all()
