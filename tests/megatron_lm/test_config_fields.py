"""The options of every release's TransformerConfig: examined one by one, whatever their names begin with."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from burst_plugin.megatron.flags.config import HONOURED, REFUSED, REFUSED_LATER, is_irrelevant
from tests.support.megatron_lm import TAGS, checkout

pytestmark = pytest.mark.megatron

CONFIGS = {
    "megatron/core/model_parallel_config.py": ("ModelParallelConfig",),
    "megatron/core/transformer/transformer_config.py": ("TransformerConfig", "MLATransformerConfig"),
}


def fields_of(tree: Path) -> set[str]:
    """Return the names of all fields, from the text of a checkout, which this Python need not be able to import."""
    names = set()
    for file, classes in CONFIGS.items():
        for node in ast.parse((tree / file).read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name in classes:
                names |= {line.target.id for line in node.body if isinstance(line, ast.AnnAssign)}
    return names


@pytest.mark.parametrize("tag", TAGS)
def test_every_field_has_been_examined(tag: str, tmp_path: Path) -> None:
    names = fields_of(checkout(tag, tmp_path))
    assert len(names) > 200
    examined = {*HONOURED, *REFUSED, *REFUSED_LATER}
    unknown = {name for name in names - examined if not is_irrelevant(name)}
    assert unknown == set(), f"decide what burst attention does with these: {sorted(unknown)}"
