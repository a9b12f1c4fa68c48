"""First sentences of public docstrings: each stands without its neighbours, and names what it is about."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "burst_plugin"
MOST = 40  # in the whole package
PATTERNS = {
    "those of what": r"\bthose (of|that|in|with|which|for)\b|\bthat of\b|\bthose\b[.,;:]",
    "of which": r"\b(of|in|with|by|for|to|from|on) which\b",
    "what it": r"\bwhat (it|they|he|is|has|was|were|are)\b",
    "Do what": r"^(Do|Return|Yield|Say|Compute|Give|Make|Take|Run) (what|that|those|it|them|the same)\b",
    "the same": r"\bthe same\b(?=[.,;:)]| (as|for|of|in|on|by|with|whatever|wherever|way)\b|$)",
}


def first_sentence(docstring: str) -> str:
    """Return the first sentence of a docstring."""
    return re.split(r"(?<=[.!?])\s", " ".join(docstring.split("\n\n")[0].split()))[0]


def vague(sentence: str) -> list[str]:
    """Return the names of the patterns that a sentence has."""
    return [name for name, pattern in PATTERNS.items() if re.search(pattern, sentence)]


def _public(tree: ast.AST, path: str) -> Iterator[tuple[str, str]]:
    """Yield where each public docstring is, and the docstring."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if node.name.startswith("_"):
            continue
        docstring = ast.get_docstring(node)
        if docstring:
            yield f"{path}:{node.lineno}", docstring
        if isinstance(node, ast.ClassDef):
            yield from _public(node, path)


def violations() -> Iterator[str]:
    """Yield every first sentence of the package that has a pattern."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        name = str(path.relative_to(PACKAGE.parent))
        docstring = ast.get_docstring(tree)
        for place, text in [*([(f"{name}:1", docstring)] if docstring else []), *_public(tree, name)]:
            sentence = first_sentence(text)
            if found := vague(sentence):
                yield f"{place}: {', '.join(found)}: {sentence}"


def test_first_sentences_name_what_they_are_about() -> None:
    found = list(violations())
    assert len(found) <= MOST, "\n".join(found)


def test_vague_sentences_are_found() -> None:
    assert vague("Return those of either mask.") == ["those of what", "Do what"]
    assert vague("Do the same, in one go.") == ["Do what", "the same"]
    assert vague("Yield the blocks of keys that a rank holds, in the order of the sequence.") == []
    assert first_sentence("Return a mask.\nIt is causal.\n\nMore.") == "Return a mask."


if __name__ == "__main__":
    print("\n".join(violations()))
