"""What packed documents take on a GPU is measured by code that runs on CPUs, too."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support import packed_on_gpu


def test_every_assignment_of_tokens_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "packed.json"
    small = "--ranks 4 --seq 32 --documents 32 --sigmas 0.5 1 --heads 4/2 --head-dim 8"
    monkeypatch.setattr(sys, "argv", ["packed_on_gpu", *small.split(), "--out", str(out)])
    packed_on_gpu.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == ["burst", "zigzag by document", "one rank"] * 2
    assert all(row["forward_s"] > 0 and row["attention_tflops"] > 0 for row in rows)
    assert len({row["documents"] for row in rows if row["sigma"] == 1}) == 1
