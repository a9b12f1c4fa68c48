"""The page on masks, kernels and schedules of one's own: its examples run, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "your_own.md").read_text()


def _run(section: str) -> dict[str, Any]:
    """Run the example of a section, and return its names."""
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0], re.S)
    names: dict[str, Any] = {"__name__": "your_own"}
    exec(compile(example, "docs/your_own.md", "exec", dont_inherit=True), names)  # without this file's __future__
    return names


@pytest.mark.parametrize("section", ["A mask of your own", "A kernel of your own"])
def test_the_example_is_exact(section: str) -> None:
    assert _run(section)["error"] < 1e-12


def test_files_and_names_on_the_page_are_there() -> None:
    for path in re.findall(r"`((?:burst_plugin|tests)/[\w/]+\.py)`", PAGE):
        assert (ROOT / path).exists(), path
    named = {"HONOURED": "flags/config", "REFUSED": "flags/config", "Scores(scale=": "layers/core_attention"}
    named = {name: f"megatron/{file}" for name, file in named.items()}
    named |= {
        "EVERY_SCHEDULE": "schedule/rings",
        "MIXERS": "huggingface/recurrent/families",
        "INDEXERS": "huggingface/indexers",
    }
    for name, file in named.items():
        assert name in PAGE
        assert name in (ROOT / "burst_plugin" / f"{file}.py").read_text(), name
