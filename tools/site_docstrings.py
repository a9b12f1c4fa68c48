"""Docstrings as the site shows them: an extension of griffe, which reads them for mkdocstrings."""

from __future__ import annotations

import re
from typing import Any

import griffe

_FIELD = re.compile(r"^([a-z_]\w*(?:, \w+)*): (?=\S)")


class Tidy(griffe.Extension):
    """Shows examples as code, the fields that a docstring explains as a list, and all fields of a NamedTuple."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Tidy the docstring of a module, a class, a function or an attribute."""
        if obj.docstring:
            obj.docstring.value = tidy(obj.docstring.value) + fields(obj)


def tidy(text: str) -> str:
    """Return a docstring, without indentation, with its examples and fields in Markdown."""
    text = text.replace("Example:\n", "Example:\n\n")  # what follows is indented, and so becomes code
    return "\n\n".join(_fields(paragraph) for paragraph in text.rstrip().split("\n\n"))


def _fields(paragraph: str) -> str:
    if not _FIELD.match(paragraph):
        return paragraph
    return "\n".join(_FIELD.sub(r"- `\1`: ", line) for line in paragraph.split("\n"))


def fields(obj: griffe.Object) -> str:
    """Return the fields of a NamedTuple as code, with types and defaults; nothing of any other object."""
    if not isinstance(obj, griffe.Class) or "NamedTuple" not in map(str, obj.bases):
        return ""
    lines = [
        f"    {name}: {each.annotation}" + (f" = {each.value}" if each.value is not None else "")
        for name, each in obj.attributes.items()
        if "property" not in each.labels
    ]
    return "\n".join(["", "", "```python", f"class {obj.name}(NamedTuple):", *lines, "```"])
