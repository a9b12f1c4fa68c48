"""The page for those who come from another system: its example runs, and what it names there and here exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

import burst_plugin
from burst_plugin.deepspeed.config import BLOCK
from burst_plugin.strategy import Strategy
from tests.support.ranks import run_ranks

PAGE = (Path(__file__).parents[1] / "docs" / "coming_from.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
THERE = {  # the packages that have the names of a section's left column
    "ALST, DeepSpeed's Ulysses": "deepspeed",
    "ring-flash-attn": "ring_flash_attn",
    "USP (yunchang)": "yunchang",
}


def _example(rank: int, whole: list[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """The whole output of the page's example, and whether a rank holds the chunks that the page says."""
    (example,) = re.findall(r"```python\n(.*?)```", SECTIONS["ring-flash-attn"], re.S)
    names: dict[str, Any] = dict(zip("qkv", whole, strict=True)) | {"group": dist.group.WORLD}
    exec(example, names)
    chunks = whole[0].chunk(2 * dist.get_world_size(), dim=1)
    as_there = torch.cat([chunks[rank], chunks[2 * dist.get_world_size() - 1 - rank]], dim=1)
    return names["cp"].unshard(names["out"]), torch.equal(names["local_q"], as_there)


def test_the_example_is_exact_and_cuts_as_ring_flash_attn() -> None:
    whole = [torch.randn(1, 32, 2, 8, dtype=torch.float64) for _ in range(3)]
    truth = scaled_dot_product_attention(*(x.transpose(1, 2) for x in whole), is_causal=True).transpose(1, 2)
    for out, as_there in run_ranks(_example, 2, whole):
        assert as_there
        assert (out - truth).abs().max() < 1e-12


@pytest.mark.parametrize("section", THERE)
def test_the_other_system_has_what_the_page_names(section: str) -> None:
    spec = importlib.util.find_spec(THERE[section])
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{THERE[section]} is not installed")
    left = " ".join(re.findall(r"^\| (.*?) \|", SECTIONS[section], re.M))
    names = set(
        re.findall(r"\b(?:[A-Z]\w+SP\w+|Tiled\w+|LongContext\w+|[a-z]\w*_flash\w+|set_seq\w+|register_\w+)", left)
    )
    names |= set(
        re.findall(r"\b(?:heads_k_stride|cu_seqlens|max_seqlen|return_attn_probs|EXTRACT_\w+|sequence_par\w+)", left)
    )
    assert len(names) >= 3
    root = Path(spec.submodule_search_locations[0])
    folder = root / "runtime" if section.startswith("ALST") else root
    source = "".join(path.read_text() for path in folder.rglob("*.py"))
    assert [name for name in names if name not in source] == []


def test_this_package_has_what_the_page_names() -> None:
    for preset in re.findall(r'preset[ =]"?(\w+)', PAGE):
        Strategy.preset(preset)
    for name in re.findall(r"\b(?:Full|SlidingWindow|Causal|Documents|Tokens|Scores|ContextParallel)\b", PAGE):
        assert hasattr(burst_plugin, name)
    options = {f"--burst-{name.replace('_', '-')}" for name in Strategy.__dataclass_fields__} | {"--burst-preset"}
    assert set(re.findall(r"--burst-[a-z-]+", PAGE)) <= options
    fields = re.findall(r'`"(\w+)": (?:\d+|true)`', PAGE)
    assert f'"{BLOCK}": {{"enabled": true' in PAGE
    assert set(fields) - {"sequence_parallel_size"} <= set(Strategy.__dataclass_fields__)
