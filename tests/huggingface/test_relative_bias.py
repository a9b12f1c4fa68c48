"""Inkling and Inkling 2, whose attention has a bias by distance: a ring against one rank without it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from burst_plugin import ContextParallel
from burst_plugin.batch import shard_batch
from burst_plugin.huggingface import RingCache, prepare
from burst_plugin.huggingface.generation import name_of_cache
from burst_plugin.huggingface.mask_recipes import Forward, as_in_forward
from burst_plugin.huggingface.models import problems
from tests.support.deepspeed_run import VOCAB, Batch, draw, worst
from tests.support.inkling import FAMILIES
from tests.support.ranks import run_ranks
from tests.support.ring_steps import (
    Step,
    documents,
    over_ranks,
    over_texts,
    packed,
    padded,
    shifted,
    step,
    sum_of_losses,
)

pytestmark = [
    pytest.mark.huggingface,
    pytest.mark.skipif(not FAMILIES, reason="transformers has no Inkling yet"),
]

DOCUMENTS = (13, 1, 26)


def _build(name: str) -> Any:
    """Return a model in float32 with eager attention, the same on every rank; no parameter is 0 or 1."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(FAMILIES[name]), attn_implementation="eager", dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if any(each in path for each in ("conv", "scale", "query", "proj.weight")):
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.train()


BATCHES = {"plain": draw(1, rows=2, length=40)[0], "packed": packed(DOCUMENTS, seed=1), "padded": padded()}
BATCHES |= {"checkpointed": BATCHES["packed"], "short": draw(1, rows=1, length=5, seed=3)[0]}
for _batch in BATCHES.values():  # the head has no logits of tokens that only pad the vocabulary
    _batch["labels"] = _batch["labels"].clamp(max=VOCAB - 4)


def _on_ring(rank: int, names: Sequence[str], **options: Any) -> dict[tuple[str, str], Step]:
    """Return losses and gradients of all batches; gradients on the first rank alone."""
    cp, found = ContextParallel(dist.group.WORLD, keep_attention="all", **options), {}
    for name in names:
        model = prepare(_build(name))
        for kind, batch in BATCHES.items():
            model.gradient_checkpointing_disable()
            if kind == "checkpointed":
                model.gradient_checkpointing_enable({"use_reentrant": False})
            local = shard_batch(batch, cp)
            labels = local.pop("shift_labels")
            logits = model(**local, use_cache=False).logits
            found[name, kind] = over_ranks(*step(model, sum_of_losses(logits, labels)))
    return found


def _on_one_rank(name: str, batch: Batch) -> Step:
    model, steps = _build(name), []
    for text in documents(batch):
        inputs = {each: x for each, x in text.items() if each != "labels"}
        logits = model(**inputs, use_cache=False).logits
        steps.append(step(model, sum_of_losses(logits, shifted(text["labels"]))))
    return over_texts(steps)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_losses_and_gradients_equal_those_of_one_rank(ranks: int) -> None:
    found = run_ranks(_on_ring, ranks, tuple(FAMILIES), timeout_s=60)[0]
    for (name, kind), (loss, grads) in found.items():
        true_loss, true_grads = _on_one_rank(name, BATCHES[kind])
        assert abs(loss - true_loss) <= 1e-5 * abs(true_loss), (name, kind)
        error, parameter = worst(grads, true_grads)
        assert error <= 2e-5, (name, kind, parameter, error)


def _with_chunks(rank: int) -> dict[str, Step]:
    """Return losses in chunks of tokens, whose head leaves out logits that only pad the vocabulary."""
    cp, found = ContextParallel(dist.group.WORLD, loss_chunk=7, mlp_chunk=0), {}
    for name in FAMILIES:
        model = prepare(_build(name))
        local = shard_batch(BATCHES["plain"], cp)
        count = local["burst"].valid_tokens
        loss = model(**local, labels=local["shift_labels"], num_items_in_batch=count, use_cache=False).loss
        found[name] = over_ranks(*step(model, loss * count))
    return found


def test_losses_in_chunks_equal_those_of_one_rank() -> None:
    for name, (loss, grads) in run_ranks(_with_chunks, 2, timeout_s=60)[0].items():
        true_loss, true_grads = _on_one_rank(name, BATCHES["plain"])
        assert abs(loss - true_loss) <= 1e-5 * abs(true_loss), name
        error, parameter = worst(grads, true_grads)
        assert error <= 2e-5, (name, parameter, error)


@pytest.mark.parametrize("name", FAMILIES)
def test_whole_batches_are_evaluated_as_without_the_ring(name: str) -> None:
    model = _build(name).eval()
    ids = BATCHES["padded"]["input_ids"]
    given = {"input_ids": ids, "attention_mask": BATCHES["padded"]["attention_mask"]}
    with torch.no_grad():
        truth = model(**given).logits
        logits = prepare(model)(**given).logits
    real = given["attention_mask"].bool()
    torch.testing.assert_close(logits[real], truth[real], rtol=1e-4, atol=1e-4)
    asked: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    torch.testing.assert_close(model.generate(ids, **asked), _build(name).eval().generate(ids, **asked))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_not_supported_is_refused(name: str) -> None:
    model = prepare(_build(name))
    cp = ContextParallel(hierarchy=[1])
    local = shard_batch(BATCHES["plain"], cp)
    local.pop("shift_labels")
    model.eval()
    with pytest.raises(ValueError, match="for which a RingCache has no keys yet; generate with a cache of transform"):
        model.generate(BATCHES["plain"]["input_ids"], max_new_tokens=2, **{name_of_cache(): RingCache(cp)})
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match="set attention_dropout to 0 in the model's config"):
        model(**local, use_cache=False)


def test_code_of_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _build("inkling2")
    kind = type(model.model.layers[0].self_attn)
    monkeypatch.setattr(kind, "forward", lambda self, hidden_states, **kwargs: hidden_states)
    assert "its Inkling2SlidingAttention does not use q_proj, k_proj" in "; ".join(problems(model))


def test_a_mask_tensor_is_refused_by_name() -> None:
    model = prepare(_build("inkling"))
    local = shard_batch(BATCHES["packed"], ContextParallel(hierarchy=[1]))
    local.pop("shift_labels")
    layer = model.model.layers[0].self_attn
    inside = Forward(model, local["burst"], None, None)
    message = "InklingAttention got an attention_mask of its own, a Tensor"
    with as_in_forward(inside), pytest.raises(ValueError, match=message):
        layer(torch.zeros(1, sum(DOCUMENTS), 32), torch.ones(1, 1, 40, 40), **local)
