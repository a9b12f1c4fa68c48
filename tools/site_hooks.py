"""What the documentation site adds to the pages of docs/, which are written for a code host: hooks of MkDocs.

    python -m mkdocs build --strict        # or: serve

README and other pages outside docs/ become pages of the site, and so does a reference of the public names, made from
their docstrings. Links among pages lead to the site's pages; a link to any other file of the repository becomes the
file's path, as the site has no such file.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = {  # page of the site: its source in the repository
    "index.md": "README.md",
    "pretrain_7b.md": "examples/pretrain_7b/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
}
REFERENCE = (  # packages whose names users import
    "burst_plugin",
    "burst_plugin.kernels",
    "burst_plugin.activations",
    "burst_plugin.trajectories",
    "burst_plugin.inference",
    "burst_plugin.recurrent",
    "burst_plugin.sparse",
    "burst_plugin.huggingface",
    "burst_plugin.deepspeed",
    "burst_plugin.megatron",
)
FOUND_LAST = ("changes.md", "families.md", "peers.md", "performance.md", "testing.md")  # long, and about every word
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_ITEM = re.compile(r"( *)(?:[-*]|\d+\.) ")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for package in REFERENCE:
        files.append(File.generated(config, reference_page(package), content=_reference(package)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return the page with links as the site needs them, and with lists as Python-Markdown reads them."""
    name = page.file.src_uri
    later = name in FOUND_LAST or name.startswith("reference/")
    page.meta["search"] = {"boost": 0.5 if later else 1}
    source = OUTSIDE.get(name, f"docs/{name}")
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.M | re.S)  # every other one is a block of code
    return "".join(part if number % 2 else _lists(_links(part, name, source)) for number, part in enumerate(parts))


def reference_page(package: str) -> str:
    """Return the page of the site that documents the public names of a package."""
    return f"reference/{package.removeprefix('burst_plugin.')}.md"


def public_names(package: str) -> list[str]:
    """Return the public names of a package: its `__all__`, else what it imports `as` itself, else what it defines."""
    path = ROOT.joinpath(*package.split("."))
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    imported = [each for node in tree.body if isinstance(node, ast.ImportFrom) for each in node.names]
    defined = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    again = [each.name for each in imported if each.asname == each.name]
    return again or [name for name in defined if not name.startswith("_")]


def _reference(package: str) -> str:
    entries = "\n\n".join(f"::: {package}.{name}" for name in public_names(package))
    about = f"::: {package}\n    options: {{members: false, show_root_heading: false, show_root_toc_entry: false}}"
    return f"# {package}\n\n{about}\n\n{entries}\n"


def _links(text: str, page: str, source: str) -> str:
    """Return text in which links lead to pages of the site, or are the paths of files that the site has not."""
    pages = {path: name for name, path in OUTSIDE.items()}

    def link(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        there = pages.get(file, file.removeprefix("docs/") if file.startswith("docs/") else "")
        if not there:
            return label if file in label else f"{label} (`{file}`)"
        if label in (target, path):
            label = (ROOT / file).read_text().partition("\n")[0].lstrip("# ")
        there = posixpath.relpath(there, posixpath.dirname(page) or ".")
        return f"{mark}[{label}]({there}{'#' * bool(anchor)}{anchor})"

    return _LINK.sub(link, text)


def _lists(text: str) -> str:
    """Return text with an empty line before lists, and with four columns of indentation for each level, not two."""
    lines = [""]
    inside = False
    for line in text.split("\n"):
        item = _ITEM.match(line)
        if item and not inside and lines[-1]:
            lines.append("")
        inside = bool(item) or (inside and not line[:1].strip())
        lines.append(f"{item[1]}{line}" if item else line)
    return "\n".join(lines[1:])
