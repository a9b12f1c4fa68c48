"""DeepSeek V4 of transformers: a ring against one rank without it, every text by itself.

transformers counts windows from the first slot of a row, so that documents and what is padded on the left are
compared with each text alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from burst_plugin import ContextParallel
from burst_plugin.batch import IGNORED_LABEL, as_given, shard_batch
from burst_plugin.huggingface import RingCache, prepare
from burst_plugin.huggingface import compressors as room
from burst_plugin.huggingface.models import problems
from tests.support.deepspeed_run import Batch, draw, worst
from tests.support.ranks import run_ranks
from tests.support.ring_steps import Step, by_module, over_ranks, over_texts, shifted, step, sum_of_losses

if not hasattr(transformers, "DeepseekV4Config"):
    pytest.skip("this release of transformers has no DeepSeek V4", allow_module_level=True)

from tests.support.compressed_family import build  # which needs the family

pytestmark = pytest.mark.huggingface

DOCUMENTS = (13, 3, 1, 23)  # some shorter than a window, none a whole number of them
SHORT = (3, 2, 3)  # without an entry of any layer
PADDING = 6


def _packed(lengths: tuple[int, ...]) -> Batch:
    batch = draw(1, rows=1, length=sum(lengths), seed=1)[0]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = batch["input_ids"].masked_fill(positions == 0, IGNORED_LABEL)
    return {"input_ids": batch["input_ids"], "position_ids": positions, "labels": labels}


def _padded(on_left: bool) -> Batch:
    """Rows of a length that does not divide, one of them padded."""
    ids = draw(1, rows=2, length=27, seed=2)[0]["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :PADDING] = 0
    mask = mask if on_left else mask.flip(1)
    labels = ids.masked_fill(mask == 0, IGNORED_LABEL)
    labels[0, : PADDING + 1 if on_left else 0] = IGNORED_LABEL
    return {"input_ids": ids * mask, "labels": labels, "attention_mask": mask}


BATCHES = {
    "plain": draw(1, rows=2, length=32)[0],
    "packed": _packed(DOCUMENTS),
    "short": _packed(SHORT),
    "left": _padded(on_left=True),
    "right": _padded(on_left=False),
    "checkpointed": _packed(DOCUMENTS),
    "kept": _packed(DOCUMENTS),
}


def _texts(batch: Batch) -> Iterator[tuple[slice, slice]]:
    """Where the texts of a batch are: rows, tokens."""
    rows, length = batch["input_ids"].shape
    starts = [0, length]
    if "position_ids" in batch:
        starts = [*torch.nonzero(batch["position_ids"][0] == 0).flatten().tolist(), length]
    for row in range(rows):
        real = batch["attention_mask"][row].nonzero() if "attention_mask" in batch else torch.tensor([0, length - 1])
        for start, stop in pairwise(starts):
            yield slice(row, row + 1), slice(max(start, int(real.min())), min(stop, int(real.max()) + 1))


def _step(model: Any, inputs: dict[str, Any], labels: Tensor) -> Step:
    return step(model, sum_of_losses(model(**inputs, use_cache=False).logits.double(), labels))


@cache
def _on_one_rank(kind: str) -> Step:
    """Sums over all texts of a batch, without the ring."""
    model, batch = build().double(), BATCHES[kind]
    ids, labels = batch["input_ids"], batch["labels"]
    return over_texts(_step(model, {"input_ids": ids[text]}, shifted(labels[text])) for text in _texts(batch))


def _on_ring(rank: int, kinds: dict[str, tuple[str, ...]]) -> dict[tuple[str, str], Step]:
    """Losses and, on the first rank alone, gradients of batches, by layouts."""
    model, found = prepare(build().double()), {}
    for layout, names in kinds.items():
        for kind in names:
            batch = BATCHES[kind]
            cp = _ring(layout, "all" if kind == "kept" else "none")
            model.gradient_checkpointing_disable()
            if kind in ("checkpointed", "kept"):
                model.gradient_checkpointing_enable({"use_reentrant": False})
            local = shard_batch(batch, cp)
            found[layout, kind] = over_ranks(*_step(model, local, local.pop("shift_labels")))
    return found


@cache
def _ring(layout: str, keeps: str) -> ContextParallel:
    return ContextParallel(dist.group.WORLD, layout=layout, keep_attention=keeps)


FEW = {"zigzag": ("plain", "short", "left", "kept"), "contiguous": ("right",), "auto": ("checkpointed",)}
ALL = dict.fromkeys(FEW, tuple(BATCHES))
MORE = {layout: tuple(kind for kind in BATCHES if kind not in few) for layout, few in FEW.items()}


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [
        (2, FEW),
        (4, FEW),
        *(pytest.param(n, kinds, marks=pytest.mark.slow) for n, kinds in ((2, MORE), (3, ALL), (4, MORE))),
    ],
)
def test_losses_and_gradients_equal_those_of_each_text_on_one_rank(
    ranks: int, kinds: dict[str, tuple[str, ...]]
) -> None:
    failed = []
    for (layout, kind), (loss, grads) in run_ranks(_on_ring, ranks, kinds, timeout_s=240.0)[0].items():
        truth, expected = _on_one_rank(kind)
        error, parameter = worst(by_module(grads), by_module(expected))
        if abs(loss - truth) > 1e-5 * truth or not error <= 1e-5:
            failed.append((layout, kind, loss, truth, parameter, error))
    assert not failed, "\n".join(map(str, failed))


def test_every_compressor_has_gradients() -> None:
    _, grads = _on_one_rank("packed")
    of_compressors = {name: grad for name, grad in grads.items() if ".compressor." in name}
    assert {name for name, grad in of_compressors.items() if not grad.any()} == {
        name for name in of_compressors if ".indexer." in name
    }


def _logits(model: Any, batch: Batch) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(**{name: x for name, x in batch.items() if name != "labels"}, use_cache=False).logits
    return logits


def test_whole_batches_are_computed_and_texts_generated_as_ever() -> None:
    eager = build().eval()
    ring = prepare(copy.deepcopy(eager))
    for kind in ("plain", "right"):
        torch.testing.assert_close(_logits(ring, BATCHES[kind]), _logits(eager, BATCHES[kind]), rtol=2e-5, atol=2e-5)
    usual = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    words, written = (model.generate(BATCHES["plain"]["input_ids"][:, :17], **usual) for model in (eager, ring))
    assert torch.equal(words, written)
    with pytest.raises(ValueError, match=r"makes entries across documents; give what burst_plugin.shard_batch"):
        _logits(ring, BATCHES["packed"])


def test_a_ring_of_one_rank_has_the_entries_of_each_text_alone() -> None:
    eager = build().eval()
    ring = prepare(copy.deepcopy(eager))
    for kind in ("packed", "left", "right"):
        batch = BATCHES[kind]
        found = _logits(ring, as_given({name: x for name, x in batch.items() if name != "labels"}, ContextParallel()))
        for rows, tokens in _texts(batch):
            expected = _logits(eager, {"input_ids": batch["input_ids"][rows, tokens]})
            torch.testing.assert_close(found[rows, tokens], expected, rtol=2e-5, atol=2e-5)


def test_hooks_of_compressors_and_indexers_run_on_shards() -> None:
    model, ran = prepare(build()), list[str]()
    parts = [part for each in room.compressors(model) for part in (each, getattr(each, "indexer", None)) if part]
    for part in parts:
        part.register_forward_pre_hook(lambda module, _: ran.append(type(module).__name__))
    _logits(model, {**shard_batch(BATCHES["plain"], ContextParallel()), "shift_labels": None})
    assert ran == ["DeepseekV4CSACompressor", "DeepseekV4Indexer", "DeepseekV4HCACompressor"]


def test_default_configurations_are_accepted() -> None:
    with torch.device("meta"):
        model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config())
    assert problems(model) == []


def test_compressors_of_other_code_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    with monkeypatch.context() as patch:
        patch.setattr(room, "_USED_BY_INDEXER", ("wq_b",))
        assert "its DeepseekV4Indexer does not use wq_b, as in the releases" in "; ".join(problems(model))
    layer = next(room.compressors(model))
    layer.__class__ = type("OwnCompressor", (torch.nn.Module,), {"forward": lambda self, *args: args[0]})
    assert "it has layers of type compressed_sparse_attention" in "; ".join(problems(model))


def test_a_compressor_that_is_not_replaced_is_an_error() -> None:
    model = prepare(build())
    kind = type(next(room.compressors(model)))
    local = shard_batch(BATCHES["plain"], ContextParallel())
    for each in room.compressors(model):
        each.forward = kind.forward.__wrapped__.__get__(each)  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError, match="has made entries of this rank's tokens alone: something has replaced its forward"
    ):
        model(**{name: x for name, x in local.items() if name != "shift_labels"}, use_cache=False)


def test_a_cache_of_a_ring_is_refused() -> None:
    model = prepare(build()).eval()
    with pytest.raises(ValueError, match="which a RingCache does not hold; generate with a cache of transformers"):
        model.generate(BATCHES["plain"]["input_ids"], past_key_values=RingCache(ContextParallel()), max_new_tokens=2)
