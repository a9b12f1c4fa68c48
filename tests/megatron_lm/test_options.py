"""Options of Megatron that the package and its page name are options of some release, by the text of its files."""

from __future__ import annotations

import re

import pytest

from burst_plugin.megatron.flags.config import HONOURED, REFUSED, REFUSED_LATER
from burst_plugin.megatron.flags.flag_checks import REFUSED_FLAGS
from burst_plugin.megatron.inference.checks import REFUSED_IN_INFERENCE
from tests.support.megatron_lm import ROOT, TAGS, checkout

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

_OF_BRANCH_DEV = {"dynamic_context_parallel", "cp_partition_mode"}
_NOT_MEGATRONS = {
    "--cpu",
    "--emit",
    "--gpus",
    "--help",
    "--megatron",
    "--model",
    "--nnodes",
    "--nproc-per-node",
    "--seq",
}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Flags, fields of configurations, and the flags that are made of these fields, of all releases."""
    found: set[str] = set()
    for tag in TAGS:
        tree = checkout(tag, tmp_path_factory.mktemp("megatron-lm"))
        for file in (tree / "megatron").rglob("*.py"):
            text = file.read_text(errors="replace")
            found.update(re.findall(r"""["'](--[a-z][a-z0-9-]+)["']""", text))
            found.update(re.findall(r"^    ([a-z][a-z0-9_]+) *: ", text, re.MULTILINE))
    return found | {"--" + name.replace("_", "-") for name in found if not name.startswith("--")}


def test_options_of_the_tables_exist(options: set[str]) -> None:
    named = {*HONOURED, *REFUSED, *REFUSED_LATER, *REFUSED_FLAGS, *REFUSED_IN_INFERENCE}
    unknown = {name for name in named if name not in options and "--" + name.replace("_", "-") not in options}
    assert unknown == _OF_BRANCH_DEV, "the page says so of these two"


def test_flags_of_the_page_exist(options: set[str]) -> None:
    page = (ROOT / "docs" / "megatron.md").read_text()
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page)) - _NOT_MEGATRONS
    ours = {flag for flag in flags if flag.startswith("--burst-")}
    negated = {flag for flag in flags if flag.startswith("--no-") and "--" + flag[5:] in options}
    assert not sorted(flags - ours - negated - options)
