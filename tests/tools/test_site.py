"""The documentation site: builds without a warning, and every link on it leads somewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

pytest.importorskip("mkdocs", reason="mkdocs is not installed")
pytest.importorskip("material", reason="mkdocs-material is not installed")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")

from tools.site_docstrings import tidy
from tools.site_hooks import OUTSIDE, REFERENCE, public_names, reference_page

ROOT = Path(__file__).parents[2]


class _Page(HTMLParser):
    """The names that a page has for places on it, its links, and Markdown that is still to be seen in its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: list[str] = []
        self.left_over: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.places.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)

    def handle_endtag(self, tag: str) -> None:
        while tag in self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"pre", "code", "script", "style"} & set(self._open):
            self.left_over += re.findall(r"^(?: *[-*] |\| |:::|```|#+ ).*|.*\]\(.*", data, re.M)


def _pages(site: Path) -> dict[Path, _Page]:
    return {path: _Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}


def _broken(site: Path) -> list[str]:
    """The links among the pages of a site that lead to no file, or to no place on a page."""
    pages, found = _pages(site), []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            file, _, place = unquote(link).partition("#")
            target = (path.parent / file).resolve() if file else path
            target = target / "index.html" if target.is_dir() else target
            there = pages[target].places if target in pages else {place}
            if not target.exists() or (place and place not in there):
                found.append(f"{path.relative_to(site)}: {link}")
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("site").resolve()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(built)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return built


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"^ *- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1], re.M)
    pages = [path.name for path in ROOT.glob("docs/*.md")]
    assert sorted(listed) == sorted([*pages, *OUTSIDE, *map(reference_page, REFERENCE)])


def test_every_link_leads_somewhere(site: Path) -> None:
    assert _broken(site) == []


def test_no_markdown_is_left_over(site: Path) -> None:
    assert {path.parent.name: page.left_over for path, page in _pages(site).items() if page.left_over} == {}


def test_every_public_name_is_documented(site: Path) -> None:
    for package in REFERENCE:
        page = _Page((site / reference_page(package).removesuffix(".md") / "index.html").read_text())
        assert [name for name in public_names(package) if f"{package}.{name}" not in page.places] == []


def test_fields_of_named_tuples_are_shown(site: Path) -> None:
    text = re.sub(r"<[^>]*>", "", (site / "reference" / "kernels" / "index.html").read_text())
    assert "class Lengths(NamedTuple):" in text
    assert "q_ends: Tensor" in text


def test_words_are_found_on_the_pages_that_explain_them(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    words = {"offload": "memory/", "zigzag": "options/", "NCCL": "internals/", "sp_size": "deepspeed/"}
    for word, page in {**words, "VirtualRing": "reference/burst_plugin/"}.items():
        found = [entry for entry in entries if word in f"{entry['title']} {entry['text']}"]
        assert page in [entry["location"].partition("#")[0] for entry in found], word


def test_docstrings_become_markdown() -> None:
    given = "Attend.\n\nspans: positions\n    of tokens.\nleft, right: bounds.\n\nExample:\n    x = 1"
    shown = "Attend.\n\n- `spans`: positions\n    of tokens.\n- `left, right`: bounds.\n\nExample:\n\n    x = 1"
    assert tidy(given) == shown
    for kept in ("Args:\n    x: one.", "Source: a paper."):
        assert tidy(kept) == kept


def test_broken_links_and_markdown_are_found(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index.html").write_text('<h2 id="here">Here</h2><p>text\n- no item</p>')
    links = "".join(
        f'<a href="{link}">x</a>' for link in ("other/#here", "other/#gone", "gone/", "#gone", "https://x")
    )
    (tmp_path / "index.html").write_text(f"{links}<pre>- a line</pre>")
    assert _broken(tmp_path) == [f"index.html: {link}" for link in ("other/#gone", "gone/", "#gone")]
    assert [page.left_over for page in _pages(tmp_path).values() if page.left_over] == [["- no item"]]
