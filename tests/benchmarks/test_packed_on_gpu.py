"""What packed documents take on a GPU is measured by code that runs on CPUs, too."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import packed_on_gpu


def rows_of(command: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["packed_on_gpu", *command.split(), "--out", str(out)])
    packed_on_gpu.main()
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


def test_every_assignment_of_tokens_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = "--ranks 4 --seq 32 --documents 32 --sigmas 0.5 1 --heads 4/2 --head-dim 8"
    rows = rows_of(small, tmp_path / "packed.json", monkeypatch)
    names = ["burst", "burst, heads exchanged in nodes", "zigzag by document", "one rank"]
    assert [row["name"] for row in rows] == names * 2
    assert all(row["forward_s"] > 0 and row["attention_tflops"] > 0 for row in rows)
    assert len({row["documents"] for row in rows if row["sigma"] == 1}) == 1


def test_hardly_more_blocks_are_computed_than_on_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of documents that are cut into 2 * ranks pieces far more are."""
    command = "--ranks 16 --seq 4096 --documents 4096 --sigmas 1 --blocks"
    burst, exchanged, by_document, alone = rows_of(command, tmp_path / "blocks.json", monkeypatch)
    assert alone["blocks"] < burst["blocks"] < 1.15 * alone["blocks"]
    assert burst["most_times_ranks"] < 1.2 * alone["blocks"]
    assert exchanged["most_times_ranks"] < 1.05 * alone["blocks"]
    assert by_document["blocks"] > 1.5 * alone["blocks"]


def test_blocks_are_counted_right() -> None:
    """As by looking at every pair; the last query sees all keys."""
    block = packed_on_gpu._BLOCK
    for rows, keys in ((1, 1), (128, 128), (129, 129), (300, 700), (700, 300), (256, 1000), (127, 128)):
        q, k = torch.arange(rows)[:, None], torch.arange(keys)
        for causal in (True, False):
            seen = (k - keys <= q - rows) | (not causal)
            of_blocks = torch.zeros(-(-rows // block), -(-keys // block), dtype=torch.bool)
            where = seen.nonzero() // block
            of_blocks[where[:, 0], where[:, 1]] = True
            assert packed_on_gpu._blocks(rows, keys, causal) == of_blocks.sum()
