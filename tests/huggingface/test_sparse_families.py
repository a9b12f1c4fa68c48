"""Models of transformers with indexers: a ring against one rank without it, selections first.

Documents of a packed batch are compared with each text alone; and with blocks of keys, which transformers counts from
the first slot of a row, so are rows that are padded. `BURST_SOAK=1 bash tests/run.sh
tests/huggingface/test_sparse_families.py` has all families on four ranks, too.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from burst_plugin import ContextParallel
from burst_plugin.activations import host_memory, pages
from burst_plugin.activations.host_memory import HostMemory
from burst_plugin.batch import IGNORED_LABEL, as_given, shard_batch
from burst_plugin.huggingface import RingCache, prepare
from burst_plugin.huggingface import pool_indexers as pools
from burst_plugin.huggingface.block_indexers import BlockChoice, block_indexers
from burst_plugin.huggingface.indexers import INDEXERS, indexers
from burst_plugin.huggingface.mask_indexers import mask_indexers
from burst_plugin.huggingface.mask_recipes import MaskRecipe
from burst_plugin.huggingface.models import problems
from burst_plugin.huggingface.pool_indexers import PoolChoice, pool_indexers
from burst_plugin.sparse import keys_of_pools
from tests.support.deepspeed_run import Batch, draw, worst
from tests.support.ranks import run_ranks
from tests.support.ring_steps import (
    by_module,
    documents,
    over_ranks,
    over_texts,
    packed,
    shifted,
    step,
    sum_of_losses,
)
from tests.support.sparse_families import build, sparse_families

pytestmark = pytest.mark.huggingface

FAMILIES = sparse_families()
# One of each kind of indexer: of tokens, for several layers, beside windows, of blocks, of pools, of what is seen.
KINDS = ("deepseek_v32", "glm_moe_dsa", "dots3_note_text", "minimax_m3_vl_text", "glm5_next", "qwen4_exp_text")
ON_FOUR = [name for name in FAMILIES if name in KINDS or os.environ.get("BURST_SOAK")]
DOCUMENTS = (13, 1, 5, 21)
PADDING = 6
BY_DEFAULT = (
    "deepseek_v32",
    "axk2",
    "dots3_note",
    "dots3_note_text",
    "glm_moe_dsa",
    "hy_v4",
    "hy_v4_vl",
    "mistral_large4",
    "minimax_m3_vl",
    "minimax_m3_vl_text",
    "glm5_next",
)
HEAD = 10_000  # by so much the selections of an indexer's heads are apart, of which each selects by itself


class Found(NamedTuple):
    """The loss, gradients by parameter, and the selection of each indexer, [B, S, k]."""

    loss: float
    grads: dict[str, Tensor]
    selections: list[Tensor]


def _padded() -> Batch:
    """Rows of a length that does not divide, one of them padded on the left."""
    batch = draw(1, rows=2, length=27, seed=2)[0]
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :PADDING] = 0
    labels = batch["labels"].clone()
    labels[0, : PADDING + 1] = IGNORED_LABEL
    return {"input_ids": batch["input_ids"] * mask, "labels": labels, "attention_mask": mask}


def _whole(model: Any) -> Batch:
    """A padded batch without labels: on the right for blocks of keys.

    On the left, padding takes part in their scores, so that eager and sdpa attention of transformers differ.
    """
    on_right = any(block_indexers(model))
    return {name: x.flip(1) if on_right else x for name, x in _padded().items() if name != "labels"}


BATCHES = {
    "plain": draw(1, rows=2, length=32)[0],
    "packed": packed(DOCUMENTS, seed=1),
    "padded": _padded(),
    "checkpointed": packed(DOCUMENTS, seed=1),
    "kept": packed(DOCUMENTS, seed=1),
}


def _texts(batch: Batch, by_row: bool) -> list[tuple[int, int, Batch]]:
    """What is computed by itself, with row and begin: documents of a packed batch, rows, or the whole batch."""
    if "position_ids" in batch:
        starts = accumulate(DOCUMENTS[:-1], initial=0)
        return [(0, begin, text) for begin, text in zip(starts, documents(batch), strict=True)]
    if not by_row or "attention_mask" not in batch:
        return [(0, 0, batch)]
    found = []
    for row, mask in enumerate(batch["attention_mask"]):
        begin = int(mask.argmax())
        found.append((row, begin, {name: batch[name][row : row + 1, begin:] for name in ("input_ids", "labels")}))
    return found


def _keys(module: Any, output: Any) -> Tensor:
    """What an indexer has selected, [B, S, k]: keys, or where blocks start, `HEAD` more for each further head."""
    if isinstance(output, Tensor) and output.dtype == torch.bool:  # a mask
        return torch.where(output[:, 0], torch.arange(output.shape[-1]), -1)
    if isinstance(output, BlockChoice):
        assert output.starts is not None
        starts = output.starts
    elif isinstance(output, PoolChoice):
        return output.keys()
    elif output.dim() == 3:
        return output
    else:
        starts = torch.where(output < 0, -1, output * module.block_size)
    heads = HEAD * torch.arange(starts.shape[1]).view(-1, 1, 1)
    return torch.where(starts < 0, -1, starts + heads).transpose(1, 2).flatten(2)


def _run(model: Any, inputs: dict[str, Any], labels: Tensor) -> Found:
    """Run a step, and note what indexers select in the forward pass."""
    outputs: list[tuple[Any, Any]] = []
    layers = [*(module for module, _ in indexers(model)), *block_indexers(model), *pool_indexers(model)]
    layers += mask_indexers(model)
    hooks = [
        each.register_forward_hook(lambda module, _, output: outputs.append((module, output))) for each in layers
    ]
    logits = model(**inputs, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    selections = [_keys(*each) for each in outputs]
    return Found(*step(model, sum_of_losses(logits, labels)), selections)


@cache
def _on_one_rank(name: str, kind: str) -> tuple[Found, dict[tuple[int, int], list[Tensor]]]:
    """Sums over all texts of a batch, without the ring; and the selections of each text by its row and begin."""
    model, steps, selections = build(FAMILIES[name]), [], {}
    for row, begin, text in _texts(BATCHES[kind], any(block_indexers(model))):
        found = _run(model, {each: x for each, x in text.items() if each != "labels"}, shifted(text["labels"]))
        steps.append(found[:2])
        selections[row, begin] = found.selections
    return Found(*over_texts(steps), []), selections


def _unlike(ours: list[Tensor], texts: dict[tuple[int, int], list[Tensor]], batch: Batch) -> int:
    """How many queries select other keys than on one rank, where masked keys fill up what is selected."""
    real, wrong = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).tolist(), 0
    for (first, begin), theirs in texts.items():
        for selected, truth in zip(ours, theirs, strict=True):
            for row, query in torch.nonzero(torch.ones(truth.shape[:2])).tolist():
                if real[first + row][begin + query]:
                    keys = {begin + key for key in truth[row, query].tolist() if 0 <= key % HEAD <= query}
                    keys = {key for key in keys if real[first + row][key % HEAD]}
                    wrong += set(selected[first + row, begin + query].tolist()) - {-1} != keys
    return wrong


def _on_ring(rank: int, names: Sequence[str]) -> dict[tuple[str, str], Found]:
    """Losses, gradients (on the first rank alone) and selections of all batches."""
    found = {}
    rings = {keeps: ContextParallel(dist.group.WORLD, keep_attention=keeps) for keeps in ("none", "all")}
    for name in names:
        model = prepare(build(FAMILIES[name]))
        for kind, batch in BATCHES.items():
            model.gradient_checkpointing_disable()
            if kind in ("checkpointed", "kept"):
                model.gradient_checkpointing_enable({"use_reentrant": False})
            local = shard_batch(batch, rings["all" if kind == "kept" else "none"])
            *of_rank, selections = _run(model, local, local.pop("shift_labels"))
            whole = [local["burst"].unshard(each) for each in selections]
            found[name, kind] = Found(*over_ranks(*of_rank), whole)
    return found


@pytest.mark.parametrize(("ranks", "names"), [(2, FAMILIES), (4, ON_FOUR)], ids=["2", "4"])
def test_selections_losses_and_gradients_equal_those_of_one_rank(ranks: int, names: Sequence[str]) -> None:
    failed = []
    for (name, kind), found in run_ranks(_on_ring, ranks, tuple(names), timeout_s=240.0)[0].items():
        truth, texts = _on_one_rank(name, kind)
        unlike = _unlike(found.selections, texts, BATCHES[kind])
        error, parameter = worst(by_module(found.grads), by_module(truth.grads))
        if unlike or abs(found.loss - truth.loss) > 1e-5 * truth.loss or not error <= 1e-5:
            failed.append((name, kind, unlike, found.loss, truth.loss, parameter, error))
    assert not failed, "\n".join(map(str, failed))


def test_no_mask_is_made_of_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: MaskRecipe, *, always: bool) -> None:
        raise AssertionError("a mask of all queries by all keys")

    for name, config in FAMILIES.items():
        model, local = prepare(build(config)), shard_batch(BATCHES["packed"], ContextParallel())
        local.pop("shift_labels")
        with monkeypatch.context() as patch:
            patch.setattr(MaskRecipe, "tensor", refuse)
            assert model(**local, use_cache=False).logits.isfinite().all(), name


@pytest.mark.parametrize("checkpoints", [False, True])
def test_lists_of_keys_are_made_once_where_they_are_kept(monkeypatch: pytest.MonkeyPatch, checkpoints: bool) -> None:
    """Of a layer that selects and one that shares its selection: autograd has one list, checkpoints have none."""
    lists: list[StorageWeakRef] = []

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        keys = keys_of_pools(*args, **kwargs)
        lists.append(StorageWeakRef(keys.untyped_storage()))
        return keys

    monkeypatch.setattr(pools, "keys_of_pools", noted)
    model, local = prepare(build(FAMILIES["glm5_next"])), shard_batch(BATCHES["packed"], ContextParallel())
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    local.pop("shift_labels")
    loss = model(**local, use_cache=False).logits.logsumexp(-1).sum()
    kept = [not each.expired() for each in lists]
    assert kept == ([False, False] if checkpoints else [True])
    loss.backward()
    assert len(lists) == (4 if checkpoints else 1)
    assert all(each.expired() for each in lists)


@pytest.mark.parametrize("name", FAMILIES)
def test_whole_batches_are_computed_and_texts_generated_as_ever(name: str) -> None:
    eager = build(FAMILIES[name]).eval()
    ring, batch = prepare(copy.deepcopy(eager)), _whole(eager)
    with torch.no_grad():
        real = batch["attention_mask"].bool()
        expected, logits = (model(**batch, use_cache=False).logits[real] for model in (eager, ring))
        torch.testing.assert_close(logits, expected, rtol=2e-5, atol=2e-5)
        usual = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        words, written = (model.generate(batch["input_ids"][1:, :16], **usual) for model in (eager, ring))
    assert torch.equal(words, written)


def test_a_ring_of_one_rank_with_the_whole_batch_as_it_was_given() -> None:
    for name, config in FAMILIES.items():
        eager = build(config)
        ring, batch = prepare(copy.deepcopy(eager)), _whole(eager)
        real = batch["attention_mask"].bool()
        found = ring(**as_given(batch, ContextParallel()), use_cache=False).logits
        expected = eager(**batch, use_cache=False).logits
        torch.testing.assert_close(found[real], expected[real], rtol=2e-5, atol=2e-5, msg=name)


def test_blocks_on_a_ring_of_one_rank_are_those_of_each_text_alone() -> None:
    eager = build(FAMILIES["minimax_m3_vl_text"]).eval()
    ring = prepare(copy.deepcopy(eager))
    for kind in ("packed", "padded"):
        batch = {name: x for name, x in BATCHES[kind].items() if name != "labels"}
        found = ring(**as_given(batch, ContextParallel()), use_cache=False).logits
        for row, begin, text in _texts(BATCHES[kind], True):
            expected = eager(text["input_ids"], use_cache=False).logits
            torch.testing.assert_close(
                found[row : row + 1, begin : begin + expected.shape[1]], expected, rtol=2e-5, atol=2e-5
            )
    batch = {name: x for name, x in BATCHES["packed"].items() if name != "labels"}
    with pytest.raises(ValueError, match="takes position_ids for places in the row; give what"):
        ring(**batch, use_cache=False)
    layer = next(block_indexers(ring))
    layer.forward = partial(type(layer).forward.__wrapped__, layer)  # as of a model that has not been prepared
    with pytest.raises(ValueError, match="passes block_indices: call burst_plugin"):
        ring(batch["input_ids"], use_cache=False)


def test_heads_of_an_indexer_that_are_no_groups_are_refused() -> None:
    config = copy.deepcopy(FAMILIES["minimax_m3_vl_text"])
    config.index_n_heads = 4
    assert "index_n_heads=4, which do not divide its num_key_value_heads=2" in "; ".join(problems(build(config)))


@pytest.mark.parametrize("name", [name for name in BY_DEFAULT if name in transformers.CONFIG_MAPPING])
def test_default_configurations_are_accepted(name: str) -> None:
    from tools.families import families

    config = transformers.CONFIG_MAPPING[name]()
    if name.startswith("minimax_m3"):  # which has no sparse layers by default
        text = config.get_text_config()
        text.layer_types = ["full_attention", *["minimax_m3_sparse"] * (text.num_hidden_layers - 1)]
    with torch.device("meta"):
        model = getattr(transformers, families()[name])(config)
    assert problems(model) == []


def test_indexers_of_other_code_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(FAMILIES["deepseek_v32"])
    layer = next(indexers(model))[0]
    with monkeypatch.context() as patch:
        patch.setitem(INDEXERS, "DeepseekV32Indexer", INDEXERS["DeepseekV32Indexer"]._replace(rotary="rotate_all"))
        assert "DeepseekV32Indexer does not use rotate_all, as in the releases" in "; ".join(problems(model))
    with monkeypatch.context() as patch:
        patch.setattr(pools, "_USED", ("wq_b", "get_means"))
        told = "; ".join(problems(build(FAMILIES["glm5_next"])))
        assert "Glm5NextTextIndexer does not use get_means, as in the releases" in told
    layer.__class__ = type("OwnIndexer", (torch.nn.Module,), {"forward": lambda self, *args, **kwargs: args[0]})
    assert "it has layers of type indexed_attention" in "; ".join(problems(model))


def test_pools_without_the_last_one_are_refused() -> None:
    config = copy.deepcopy(FAMILIES["glm5_next"])
    config.text_config.index_kpool_always_select_tail = False
    assert "index_kpool_always_select_tail=False, by which the first tokens" in "; ".join(problems(build(config)))


def test_a_cache_of_a_ring_is_refused_where_pools_are_selected() -> None:
    model = prepare(build(FAMILIES["glm5_next"])).eval()
    with pytest.raises(ValueError, match="selects pools of the keys of all tokens"):
        model.generate(BATCHES["plain"]["input_ids"], past_key_values=RingCache(ContextParallel()), max_new_tokens=2)


@pytest.mark.parametrize("name", [name for name in ("deepseek_v32", "dots3_note_text") if name in FAMILIES])
def test_the_host_is_asked_for_what_each_layer_keeps(name: str) -> None:
    """The dim of values is not the dim of queries, and the layers of Dots 3 have unlike numbers of heads."""
    batch, cpu = draw(1, rows=2, length=16)[0], torch.device("cpu")
    cp = ContextParallel(offload=True, keep_attention="all")
    model = prepare(build(FAMILIES[name]))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with (
        mock.patch.object(host_memory, "LEAST_BYTES", 1),
        mock.patch.object(pages, "PAGE_BYTES", 4),
        mock.patch.dict(host_memory.BY_DEVICE, {cpu: HostMemory(cpu)}),
    ):
        local = shard_batch(batch, cp)
        del local["shift_labels"]
        model(**local, use_cache=False).logits.sum().backward()
        memory = host_memory.BY_DEVICE[cpu]
        assert memory.parked_bytes == memory.fetched_bytes == memory.expected_bytes
