"""The tables of the docs that follow from the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import tables


def test_the_tables_of_the_docs_are_up_to_date() -> None:
    assert tables.update(check=True) == [], "run `python -m tools.tables`"


def test_a_table_that_is_out_of_date_is_found_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tables.TABLES:
        text = (tables.DOCS / f"{name}.md").read_text()
        (tmp_path / f"{name}.md").write_text(text.replace("torch_cpu", "torch_cpus"))
    monkeypatch.setattr(tables, "DOCS", tmp_path)
    assert tables.update(check=True) == ["kernels.md"]
    assert tables.update() == ["kernels.md"]
    assert tables.update(check=True) == []
