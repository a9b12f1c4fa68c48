"""Rotary embeddings that depend on the longest position of a batch, on a ring as on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from burst_plugin import ContextParallel
from burst_plugin.batch import shard_batch
from burst_plugin.huggingface import RingCache, prepare
from burst_plugin.huggingface.models import problems
from tests.huggingface.test_families import FAMILIES, check
from tests.support.deepspeed_run import Batch, Run, build, draw, llama
from tests.support.families import shape
from tests.support.ranks import run_ranks
from tests.support.ring_steps import packed

pytestmark = pytest.mark.huggingface

_TRAINED = 24  # positions that the models were trained with
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.2, 1.4, 1.6],
    "long_factor": [1.0, 3.0, 7.0, 20.0],
    "original_max_position_embeddings": _TRAINED,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
MODELS = {
    "longrope": transformers.Phi3Config(
        **shape(), rope_parameters=_LONG, original_max_position_embeddings=_TRAINED, eos_token_id=1, bos_token_id=1
    ),
    "dynamic": llama(rope_parameters=_DYNAMIC, max_position_embeddings=_TRAINED),
}
# HunYuan's, which is called dynamic, but does not depend on the longest position.
FIXED = transformers.HunYuanDenseV1Config(
    **shape(), head_dim=8, rope_parameters={**_DYNAMIC, "alpha": 50.0}, eos_token_id=1, bos_token_id=1
)
FIXED.max_position_embeddings = _TRAINED


def padded(length: int) -> Batch:
    batch = draw(1, rows=2, length=length)[0]
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, :3] = 0
    batch["labels"][0, :4] = -100
    return batch


BATCHES = {
    "long": draw(1, length=32)[0],
    "short": draw(1, length=16)[0],
    "padded": padded(31),
    "packed": packed((13, 1, 18)),
}


def logits_of_phimoe(rank: int, ring: bool) -> torch.Tensor:
    """Logits in evaluation mode (experts are drawn in training), of a text longer than the first shard."""
    scales = {"short_mscale": 1.0, "long_mscale": 1.5, "original_max_position_embeddings": _TRAINED}
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, **scales}
    config = transformers.PhimoeConfig(
        **shape(), num_local_experts=4, rope_parameters=rope, eos_token_id=1, bos_token_id=1
    )
    model = build(Run(model=config), attention="eager").eval()
    ids = BATCHES["long"]["input_ids"]
    with torch.no_grad():
        if not ring:
            return model(input_ids=ids).logits
        cp = ContextParallel(dist.group.WORLD, layout="contiguous")
        local = shard_batch({"input_ids": ids}, cp)
        local.pop("shift_labels", None)
        return cp.unshard(prepare(model)(**local).logits, 1, local["burst"].tokens)


def test_scales_of_phimoe_follow_the_longest_position() -> None:
    expected = logits_of_phimoe(0, False)
    for logits in run_ranks(logits_of_phimoe, 2, True):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", BATCHES)
def test_as_on_one_rank(monkeypatch: pytest.MonkeyPatch, ranks: int, kind: str) -> None:
    """Of 32 tokens, zigzag gives those past the trained length to one rank."""
    for name, config in {**MODELS, "fixed": FIXED}.items():
        monkeypatch.setitem(FAMILIES, name, config)
    check([*MODELS, "fixed"], ranks, BATCHES[kind])
    if ranks == 2:
        check(list(MODELS), ranks, BATCHES[kind], {"keep_attention": "all"})


def _one_after_another(model: Any, lengths: list[int], cp: ContextParallel | None) -> list[torch.Tensor]:
    """Return logits of batches of several lengths, then of texts in generation."""
    found = []
    for length in lengths:
        batch = draw(1, rows=2, length=length)[0]
        del batch["labels"]
        local = batch if cp is None else shard_batch(batch, cp)
        logits = model(**local, use_cache=False).logits.detach()
        found.append(logits if cp is None else local["burst"].unshard(logits))
    cache: Any = transformers.DynamicCache() if cp is None else RingCache(cp)
    ids = draw(1, rows=2, length=_TRAINED + 4)[0]["input_ids"]
    with torch.no_grad():
        for new in (ids[:, : _TRAINED - 2], ids[:, _TRAINED - 2 : -1], ids[:, -1:]):
            found.append(model.eval()(new, past_key_values=cache).logits)
    return found


def _on_ring(rank: int, name: str, lengths: list[int]) -> list[torch.Tensor]:
    model = prepare(build(Run(model=MODELS[name])))
    return _one_after_another(model, lengths, ContextParallel(dist.group.WORLD))


@pytest.mark.parametrize("name", MODELS)
def test_batches_of_several_lengths_and_generation(name: str) -> None:
    """Dynamic scaling keeps that of the longest batch so far, until one fits the trained length again."""
    lengths = [16, 40, 32, 16, 32]
    truth = _one_after_another(build(Run(model=MODELS[name])), lengths, None)
    for found in run_ranks(_on_ring, 2, name, lengths):
        for one, other in zip(found, truth, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


def test_an_embedding_that_takes_no_positions_is_refused() -> None:
    model = build(Run(model=MODELS["longrope"]))
    assert problems(model) == []
    model.model.rotary_emb.rope_type = "other"
    (reason,) = problems(model)
    assert "(longrope) depends on the longest position of each rank" in reason
