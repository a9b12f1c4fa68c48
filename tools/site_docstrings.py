"""Docstrings as the site shows them: an extension of griffe, which reads them for mkdocstrings."""

from __future__ import annotations

import re
from typing import Any

import griffe

_FIELD = re.compile(r"^(\w+(?:, \w+)*): (?=\S)")


class Tidy(griffe.Extension):
    """Shows examples as code, and the fields that a docstring explains line by line as a list."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Tidy the docstring of a module, a class, a function or an attribute."""
        if obj.docstring:
            obj.docstring.value = tidy(obj.docstring.value)


def tidy(text: str) -> str:
    """Return a docstring, without indentation, with its examples and fields in Markdown."""
    text = text.replace("Example:\n", "Example:\n\n")  # what follows is indented, and so becomes code
    return "\n\n".join(_fields(paragraph) for paragraph in text.rstrip().split("\n\n"))


def _fields(paragraph: str) -> str:
    if not _FIELD.match(paragraph) or paragraph.startswith(("Args:", "Returns:", "Raises:", "Yields:", "Example")):
        return paragraph
    return "\n".join(_FIELD.sub(r"- `\1`: ", line) for line in paragraph.split("\n"))
