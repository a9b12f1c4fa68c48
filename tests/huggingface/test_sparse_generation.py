"""Models whose layers select keys one by one, with a `RingCache` against one rank with transformers' own cache.

Of 30 and more tokens each selects 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from burst_plugin import ContextParallel
from burst_plugin.huggingface import RingCache, prepare
from burst_plugin.huggingface.generation import name_of_cache
from tests.support.deepspeed_run import VOCAB
from tests.support.ranks import run_ranks
from tests.support.sparse_families import build, sparse_families

pytestmark = pytest.mark.huggingface

OF_KEYS = ("deepseek_v32", "axk2", "dots3_note_text", "glm_moe_dsa", "hy_v4", "hy_v4_vl", "mistral_large4")
# transformers counts blocks of keys from a row's first slot, padding or not: these rows have none.
OF_BLOCKS = ("minimax_m3_vl_text", "minimax_m3_vl")
FAMILIES = {name: config for name, config in sparse_families().items() if name in OF_KEYS + OF_BLOCKS}
# One of each kind: an indexer in each layer, a selection that layers share, layers with a window beside, and blocks.
KINDS = ("deepseek_v32", "glm_moe_dsa", "dots3_note_text", "minimax_m3_vl_text")
OTHERS = tuple(name for name in FAMILIES if name not in KINDS)
NAME = name_of_cache()
PROMPT = torch.randint(1, VOCAB, (2, 30), generator=torch.Generator().manual_seed(3))
PADDING = torch.tensor([[0] * 11 + [1] * 19, [1] * 30])


def _generated(model: Any, ids: Tensor, mask: Tensor, cache: Any, **options: Any) -> Any:
    usual: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": None}
    usual |= {"suppress_tokens": [0]}  # whose embedding is 0, and so are all scores of indexers: a tie
    usual |= {"return_dict_in_generate": True, "output_logits": True, "attention_mask": mask, NAME: cache}
    return model.generate(ids, **{**usual, **options})


def _logits(model: Any, ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
    """The logits of the last tokens `ids` of rows with this mask."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.no_grad():
        found: Tensor = model(ids, attention_mask=mask, position_ids=positions, **{NAME: cache}).logits
    return found


def _told(name: str, cp: ContextParallel | None) -> dict[str, Tensor]:
    """What a family's model says in turns of many tokens and few, by name, tokens and logits."""
    model = build(FAMILIES[name]).eval()
    if cp is not None:
        prepare(model)
    padding = torch.ones_like(PADDING) if name in OF_BLOCKS else PADDING

    def new_cache() -> Any:
        return DynamicCache(config=model.config) if cp is None else RingCache(cp)

    cache, mask, found = new_cache(), padding, {}
    found["prompt"] = _logits(model, PROMPT, mask, cache)[mask.bool()]
    for more in (1, 13, 3):  # tokens before which the cache has others
        ids = PROMPT[:, :more]
        mask = pad(mask, (0, more), value=1)
        found[f"{more} more"] = _logits(model, ids, mask, cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    mask = pad(mask.flip(0), (0, 2), value=1)
    found["reordered"] = _logits(model, PROMPT[:, 7:9], mask, cache)
    cache = new_cache()
    first = _generated(model, PROMPT * padding, padding, cache)
    ids = torch.cat([first.sequences, PROMPT[:, :12]], 1)
    mask = pad(padding, (0, 17), value=1)
    second = _generated(model, ids, mask, cache)
    beams = _generated(model, PROMPT, torch.ones_like(PROMPT), new_cache(), num_beams=3, num_return_sequences=2)
    drafted = _generated(model, PROMPT[1:], PADDING[1:], new_cache(), prompt_lookup_num_tokens=3)
    for what, told in {"first": first, "second": second, "beams": beams, "drafted": drafted}.items():
        found |= {what: told.sequences, f"logits of {what}": torch.stack(told.logits)}
    return found


def _on_ring(rank: int, names: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    cp = ContextParallel(dist.group.WORLD)
    found = {name: _told(name, cp) for name in names}
    cp.close()
    return found


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, KINDS),
        (4, ("glm_moe_dsa",)),
        pytest.param(2, OTHERS, marks=pytest.mark.slow),
        pytest.param(4, KINDS, marks=pytest.mark.slow),
    ],
    ids=["2", "4", "others", "kinds on 4"],
)
def test_tokens_and_logits_equal_those_of_one_rank(ranks: int, names: Sequence[str]) -> None:
    by_rank = run_ranks(_on_ring, ranks, names, timeout_s=240.0)
    for name in names:
        for what, expected in _told(name, None).items():
            text = f"{name}, {what}"
            for found in by_rank:
                torch.testing.assert_close(found[name][what], expected, rtol=1e-5, atol=1e-5, msg=text)
