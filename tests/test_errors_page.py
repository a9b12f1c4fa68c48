"""The page by error message: every message on it is one of the package's."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def _messages(source: str) -> set[str]:
    """Return the texts of a source but docstrings, with `...` for what is filled in."""
    tree, found = ast.parse(source), set()
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [each.value if isinstance(each, ast.Constant) else "..." for each in node.values]
            found.add("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            found.add(node.value)
    return found


def _gone(page: str, messages: set[str]) -> list[str]:
    """Return the messages of a page's headings that are nowhere in `messages`."""
    rows = re.findall(r"^### `(.*?)`$", page, re.M)
    assert len(rows) >= 20
    patterns = [".*".join(map(re.escape, row.split("..."))) for row in rows]
    return [
        row for row, pattern in zip(rows, patterns, strict=True) if not any(map(re.compile(pattern).search, messages))
    ]


def test_every_message_on_the_page_is_one_of_the_package() -> None:
    sources = [path.read_text() for path in ROOT.glob("burst_plugin/**/*.py") if "starters" not in path.parts]
    page, messages = (ROOT / "docs" / "errors.md").read_text(), set().union(*map(_messages, sources))
    assert _gone(page, messages) == []
    assert _gone(page.replace("gave up", "gave in"), messages) == ["rank ... gave in: ..."]
