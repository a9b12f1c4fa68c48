"""Llama 4 on a ring: attention in chunks, and temperatures by places in a row."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from burst_plugin import ContextParallel, Documents, Keys, PerRow
from burst_plugin.batch import shard_batch
from burst_plugin.huggingface import RingCache, prepare
from burst_plugin.huggingface.llama4 import chunk_mask
from burst_plugin.huggingface.models import problems
from burst_plugin.sequence.layout import Tokens
from tests.huggingface.test_families import FAMILIES, _padded, check
from tests.support.deepspeed_run import Run, build, draw
from tests.support.families import shape
from tests.support.ranks import last_lines
from tests.support.ring_steps import packed

pytestmark = pytest.mark.huggingface

LLAMA4 = transformers.Llama4TextConfig(
    **shape(),
    head_dim=8,
    intermediate_size_mlp=48,
    num_local_experts=2,
    interleave_moe_layer_step=2,
    attention_chunk_size=6,
    no_rope_layers=[1, 0],
    layer_types=["chunked_attention", "full_attention"],
    attn_temperature_tuning=True,
    floor_scale=4,
    attn_scale=0.5,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
)
BATCHES = {"plain": draw(1, length=32)[0], "packed": packed((13, 1, 18)), "padded": _padded(length=27)}


@pytest.mark.parametrize("ranks", [2, 4])
def test_as_on_one_rank(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    monkeypatch.setitem(FAMILIES, "llama4", LLAMA4)
    for kind, batch in BATCHES.items():
        tunes = kind != "packed"  # what it is compared with has its documents one by one, and each from place 0 on
        check(
            ["llama4"],
            ranks,
            batch,
            {"keep_attention": "all"} if kind == "padded" else {},
            attn_temperature_tuning=tunes,
        )


def test_chunks_begin_with_documents_and_real_tokens(a_shard: Any) -> None:
    assert chunk_mask(a_shard, 8) == Documents((0, 8, 16, 20))
    packed = replace(a_shard, mask=Documents((0, 9, 20)))
    assert chunk_mask(packed, 8) == Documents((0, 8, 9, 17, 20))
    padded = replace(a_shard, mask=PerRow((Keys(((3, 20),)), Keys(((0, 20),)))))
    assert chunk_mask(padded, 8) == PerRow((Documents((0, 3, 11, 19, 20)), Documents((0, 8, 16, 20))))


@pytest.fixture
def a_shard() -> Any:
    shard = shard_batch({"input_ids": torch.ones(1, 20, dtype=torch.int64)}, ContextParallel(None))["burst"]
    return replace(shard, tokens=Tokens(20))


def _generate(rank: int, chunks: bool) -> None:
    config = copy.deepcopy(LLAMA4)
    if not chunks:
        config.layer_types = ["full_attention"] * 2
    model = prepare(build(Run(model=config))).eval()
    with torch.no_grad():
        model(draw(1)[0]["input_ids"], past_key_values=RingCache(ContextParallel(dist.group.WORLD)))


@pytest.mark.parametrize(
    ("chunks", "reason"), [(True, "its attention in chunks is not supported"), (False, "attn_temperature_tuning")]
)
def test_a_cache_of_a_ring_is_refused_by_name(chunks: bool, reason: str) -> None:
    assert problems(build(Run(model=LLAMA4))) == []
    for line in last_lines(_generate, 2, chunks):
        assert f"ValueError: Llama4ForCausalLM with a RingCache: {reason}" in line
