"""Models of transformers on a ring against eager attention on one rank: logits, and every parameter's gradient."""

from __future__ import annotations

import logging
import pickle
import re
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.big_modeling import _attach_context_parallel_hooks
from torch.utils.checkpoint import checkpoint
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)

from burst_plugin import Causal, ContextParallel, Documents, SlidingWindow, Strategy, Tokens, key_padding
from burst_plugin.batch import IGNORED_LABEL, SequenceShard, shard_batch
from burst_plugin.huggingface import prepare, register
from burst_plugin.huggingface.attention import EXAMINED, _seed, forward
from burst_plugin.huggingface.chunked_modules import chunk_modules
from burst_plugin.huggingface.mask_recipes import MaskRecipe, shard_of_forward
from burst_plugin.huggingface.models import problems, use_burst
from tests.support.deepspeed_run import VOCAB, Batch, Run, build, draw, llama, worst
from tests.support.families import NEWER, families, hybrids, shape
from tests.support.ranks import run_ranks
from tests.support.ring_steps import grads_of, masked, packed, padding, shifted, sum_of_losses

pytestmark = pytest.mark.huggingface

FAMILIES = families()
BATCH = draw(1, rows=2, length=32)[0]


@dataclass(frozen=True)
class Result:
    """Whole logits [B, S, V] where labels are, zero elsewhere; gradients of the sum of losses; bytes sent."""

    logits: torch.Tensor
    grads: dict[str, torch.Tensor]
    sent: int = 0


def _on_ring(
    rank: int, names: list[str], batch: Batch, options: dict[str, Any], changes: dict[str, Any]
) -> dict[str, Result]:
    register()
    cp = ContextParallel(dist.group.WORLD, **options, ranks_per_node=dist.get_world_size())
    found = {}
    for name in names:
        checkpointing = "keep_attention" in options
        model = prepare(build(Run(model=_config(name, changes), checkpointing=checkpointing)))
        local = shard_batch(batch, cp)
        labels = local.pop("shift_labels")
        cp.reset_traffic()
        cached = {} if "head_chunk" in options else {"use_cache": False}  # the model's default, an empty cache
        logits = model(**local, **cached).logits
        sum_of_losses(logits, labels).backward()
        grads = grads_of(model)
        for grad in grads.values():
            dist.all_reduce(grad)
        sent = sum(n for link in cp.traffic().values() for n in link.values())
        found[name] = Result(local["burst"].unshard(logits.detach()), grads, sent)
    return found


def _on_one_rank(name: str, batch: Batch, changes: dict[str, Any]) -> Result:
    model = build(Run(model=_config(name, changes)), attention="eager")
    logits = _logits(model, batch)
    sum_of_losses(logits, shifted(batch["labels"])).backward()
    return Result(logits.detach(), grads_of(model))


def _logits(model: Any, batch: Batch) -> torch.Tensor:
    """Of all rows; of packed ones document by document, since not every model of transformers keeps those apart."""
    if "position_ids" not in batch:
        inputs = {each: x for each, x in batch.items() if each != "labels"}
        return model(**inputs, use_cache=False).logits
    rows = []
    for ids, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        parts = [model(input_ids=ids[None, a:b], use_cache=False).logits for a, b in pairwise(starts)]
        rows.append(torch.cat(parts, 1))
    return torch.cat(rows)


def _config(name: str, changes: dict[str, Any]) -> Any:
    config = FAMILIES[name]
    for field, value in changes.items():
        setattr(config, field, value)
    return config


def check(
    names: list[str], ranks: int, batch: Batch, options: dict[str, Any] | None = None, **changes: Any
) -> dict[str, int]:
    """Compare models on a ring with those on one rank, but for the logits of padding; `options` are the ring's.

    Return the bytes that a rank sends, by model.
    """
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    truths = {name: _on_one_rank(name, batch, changes) for name in names}
    found = run_ranks(_on_ring, ranks, names, batch, options or {}, changes, timeout_s=120.0)[0]
    for name, truth in truths.items():
        torch.testing.assert_close(found[name].logits[real], truth.logits[real], rtol=2e-5, atol=2e-5, msg=name)
        error, parameter = worst(found[name].grads, truth.grads)
        assert error <= 1e-5, (name, parameter, error)
    return {name: found[name].sent for name in names}


@pytest.mark.parametrize("ranks", [2, 4])
def test_logits_and_gradients_equal_eager_on_one_rank(ranks: int) -> None:
    check(list(FAMILIES), ranks, BATCH)


def test_attention_that_checkpoints_keep() -> None:
    whole, half = (check(list(FAMILIES), 2, BATCH, {"keep_attention": share}) for share in ("all", 0.5))
    assert all(whole[name] < half[name] for name in FAMILIES), "of what is not kept, blocks are sent again"


NOT_BY_HEADS = {
    "phi3": "Phi3Attention has no q_proj",
    "deepseek_v3": "DeepseekV3Attention has no q_proj",
    "dbrx": "DbrxAttention has no q_proj",
    "stablelm": "StableLmAttention has a q_layernorm, which may need all heads at once",
}


@pytest.mark.slow
def test_heads_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in FAMILIES if name not in NOT_BY_HEADS]
    check(names, 2, BATCH, {"head_chunk": 2})
    check(names, 4, BATCH, {"head_chunk": 2, "keep_attention": 0.5})
    check(names, 2, packed((13, 1, 18)), {"head_chunk": 2, "keep_attention": "none", "ulysses_degree": 2})
    if NEWER:
        for name, config in hybrids().items():
            monkeypatch.setitem(FAMILIES, name, config)
        check(list(hybrids()), 2, BATCH, {"head_chunk": 2, "keep_attention": "all"})


@pytest.mark.skipif(not NEWER, reason="other releases have other configurations")
def test_heads_in_chunks_of_layers_that_leave_keys_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4's last layer of each kind does, whether or not there is one that takes them."""
    kinds = ["sliding_attention", "full_attention"] * 2
    config = transformers.Gemma4TextConfig(
        **{**shape(), "num_hidden_layers": 4},
        head_dim=8,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
        sliding_window=9,
        layer_types=kinds,
        per_layer_config={},
    )
    monkeypatch.setitem(FAMILIES, "gemma4_text", config)
    check(["gemma4_text"], 2, BATCH, {"head_chunk": 2, "keep_attention": "all"})


def _dropping(rank: int) -> str:
    register()
    cp = ContextParallel(dist.group.WORLD, head_chunk=2)
    model = prepare(transformers.AutoModelForCausalLM.from_config(llama(attention_dropout=0.1))).train()
    local = shard_batch(BATCH, cp)
    local.pop("shift_labels")
    try:
        model(**local, use_cache=True)  # an empty cache does no harm
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_dropout_of_probabilities_is_refused_with_heads_in_chunks() -> None:
    for message in run_ranks(_dropping, 2):
        assert message.startswith("LlamaAttention drops attention probabilities, which head_chunk=2 would repeat")


def test_models_whose_heads_do_not_come_in_chunks_are_refused_by_name() -> None:
    for name, reason in NOT_BY_HEADS.items():
        with pytest.raises(ValueError, match=rf"head_chunk=2 is not possible here: {reason}.*; use head_chunk=0"):
            chunk_modules(build(Run(model=FAMILIES[name])), Strategy(head_chunk=2))
    with pytest.raises(ValueError, match=r"has 4 query heads, 2 for each key head: use one of \[2, 4\]"):
        chunk_modules(build(Run(model=FAMILIES["llama"])), Strategy(head_chunk=3))


def test_other_adapters_are_named_with_heads_in_chunks() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(build(Run(model=FAMILIES["llama"])), peft.LoHaConfig(target_modules=["q_proj"]))
    message = "has a q_proj that is neither an nn.Linear nor one with LoRA, DoRA or IA3, but a peft.tuners.loha.layer"
    with pytest.raises(ValueError, match=message):
        chunk_modules(model, Strategy(head_chunk=2))


def test_in_other_layouts_and_lengths_that_do_not_divide() -> None:
    batch = draw(1, rows=1, length=29)[0]
    check(["llama", "gemma2", "gpt_oss", "deepseek_v3"], 4, batch, {"layout": "contiguous"})
    check(["mistral", "gemma3"], 2, batch, {"layout": "striped"})


@pytest.mark.skipif(not NEWER, reason="layer types have other names before 5.24")
def test_hybrid_families_run_where_all_their_layers_attend(monkeypatch: pytest.MonkeyPatch) -> None:
    found = hybrids()
    for name, config in found.items():
        monkeypatch.setitem(FAMILIES, name, config)
    check(list(found), 2, BATCH)
    check(list(found), 2, packed((13, 1, 18)))
    check(list(found), 2, _padded(length=27))


# ------------------------------------------------------------------------------- layers that hand on the mask alone


def _two_batches(rank: int, name: str, batches: list[Batch], reentrant: bool) -> dict[str, torch.Tensor]:
    """Gradients of two batches whose layers are recomputed after both have gone forward, as pipelines do."""
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=dist.get_world_size())
    model = prepare(build(Run(model=FAMILIES[name])))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    losses = []
    for batch in batches:
        local = shard_batch(batch, cp)
        labels = local.pop("shift_labels")
        logits = model(**local, use_cache=False).logits
        losses.append(sum_of_losses(logits, labels))
    with torch.no_grad():  # and a whole one between
        model.eval()(BATCH["input_ids"])
        model.train()
    for loss in losses:
        loss.backward()
    grads = {each: p.grad for each, p in model.named_parameters()}
    for grad in grads.values():
        dist.all_reduce(grad)
    return grads


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["nemotron", "stablelm"])
def test_a_mask_carries_its_own_batch_into_recomputation(name: str, reentrant: bool) -> None:
    """Two batches of one shape, of which one is packed: with the other's shard only gradients would be wrong."""
    batches = [packed((13, 1, 18)), draw(1, rows=1, length=32, seed=3)[0]]
    parts = [_on_one_rank(name, batch, {}).grads for batch in batches]
    truth = {each: parts[0][each] + parts[1][each] for each in parts[0]}
    for grads in run_ranks(_two_batches, 2, name, batches, reentrant):
        assert worst(grads, truth)[0] <= 1e-5


def test_a_forward_that_fails_leaves_no_shard_behind() -> None:
    """A mask that is made outside of any forward would find it."""
    model = prepare(build(Run(model=FAMILIES["nemotron"])))
    local = shard_batch(BATCH, ContextParallel())
    hook = model.model.norm.register_forward_hook(_fail)
    with pytest.raises(RuntimeError, match="planted"):
        model(**local, use_cache=False)
    hook.remove()
    assert shard_of_forward() is None
    model.eval()(BATCH["input_ids"])


def test_a_forward_that_ctrl_c_has_interrupted_leaves_no_shard_for_the_next_one() -> None:
    """A whole batch would get the padding of the shard, and one of another length would be refused."""
    model = prepare(build(Run(model=FAMILIES["nemotron"])))
    mask = torch.ones_like(BATCH["input_ids"]).index_fill_(1, torch.arange(9), 0)
    local = shard_batch({**BATCH, "attention_mask": mask}, ContextParallel())
    hook = model.model.norm.register_forward_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**local, use_cache=False)
    hook.remove()
    eager = build(Run(model=FAMILIES["nemotron"])).eval()
    with torch.no_grad():
        for ids in (BATCH["input_ids"], BATCH["input_ids"][:, :7]):
            torch.testing.assert_close(model.eval()(ids).logits, eager(ids).logits, rtol=1e-4, atol=1e-4)
    assert shard_of_forward() is None


def test_a_forward_that_is_refused_before_it_begins_leaves_the_one_around_it_alone() -> None:
    """After-hooks of torch run then, too; and a model that is not a part of the one around it has its own batch."""
    outer, inner = (prepare(build(Run(model=FAMILIES["nemotron"]))) for _ in range(2))
    local, found = shard_batch(BATCH, ContextParallel()), []

    def within(*args: Any) -> None:
        with pytest.raises(ValueError, match="without its entry"):
            inner(input_ids=_marked(local["input_ids"]))
        found.append(shard_of_forward())
        hook = inner.model.norm.register_forward_hook(lambda *args: found.append(shard_of_forward()))
        with torch.no_grad():
            inner.eval()(BATCH["input_ids"])
        hook.remove()

    outer.model.norm.register_forward_hook(within)
    outer(**local, use_cache=False)
    assert [None if shard is None else shard.name for shard in found] == [local["burst"].name, None]


def _marked(ids: torch.Tensor) -> torch.Tensor:
    """Ids that were cut, as `shard_batch` marks them on several ranks."""
    ids = ids.clone()
    ids._burst_plugin_shard = True  # type: ignore[attr-defined]
    return ids


def _interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def _fail(*args: Any) -> None:
    raise RuntimeError("planted")


class _DropsAll(torch.nn.Module):
    """A layer that hands neither keyword arguments nor the mask to its attention."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any, position_embeddings: Any, **kwargs: Any
    ) -> Any:
        """See `LlamaDecoderLayer`."""
        return self.layer(hidden_states, position_embeddings=position_embeddings)


def test_an_encoder_with_windows_both_ways_equals_eager() -> None:
    """Its layers pass a window that counts the token itself, its masks one that does not."""
    register()
    config = transformers.ModernBertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        local_attention=8,
        global_attn_every_n_layers=2,
        pad_token_id=0,
        cls_token_id=1,
        sep_token_id=2,
        initializer_range=0.15,
    )
    eager, ring = (
        transformers.ModernBertModel._from_config(deepcopy(config), attn_implementation=kind)
        for kind in ("eager", "burst")
    )
    ring.load_state_dict(eager.state_dict())
    prepare(ring)
    local = shard_batch({"input_ids": BATCH["input_ids"]}, ContextParallel())
    found = ring(**local).last_hidden_state
    truth = eager(input_ids=BATCH["input_ids"]).last_hidden_state
    torch.testing.assert_close(local["burst"].unshard(found.detach()), truth, rtol=2e-5, atol=2e-5)


# ------------------------------------------------------------------------------------------- padding and packing

MASKED = ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"]


def _padded(*, length: int = 32) -> Batch:
    """One row padded on the left, one on the right, one not at all."""
    batch = draw(1, rows=3, length=length)[0]
    return masked(batch, padding(batch["input_ids"]))


@pytest.mark.parametrize("length", [32, 27])
def test_padding_masks_are_honoured(length: int) -> None:
    check(MASKED, 4, _padded(length=length))


@pytest.mark.parametrize("rows", [[(13, 1, 18)], [(13, 1, 18), (30, 2)], [(9, 20), (29,)]], ids=str)
def test_packed_samples_do_not_attend_to_each_other(rows: list[tuple[int, ...]]) -> None:
    check(MASKED, 4, packed(*rows))


def test_a_layout_may_be_chosen_for_every_batch() -> None:
    check(MASKED, 4, packed((3, 1, 28), (30, 2)), {"layout": "auto"})
    check(["llama", "gpt_oss"], 4, _padded(length=27), {"layout": "auto"})


def _dealt(rank: int, batch: dict[str, Any], layout: str) -> tuple[float, int, list[str]]:
    """How uneven the work on the shards of a batch is, how many tokens a rank has, and what is logged for two."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.disable(logging.NOTSET)  # ranks are quiet otherwise
    logging.getLogger("burst_plugin").addHandler(handler)
    cp = ContextParallel(dist.group.WORLD, layout=layout)
    shards = [shard_batch(batch, cp) for _ in range(2)]
    shard = shards[0]["burst"]
    assert torch.equal(shard.unshard(shards[0]["input_ids"]), batch["input_ids"])
    return cp.imbalance(Causal() & shard.mask, shard.tokens), shards[0]["input_ids"].shape[1], said


def test_packed_batches_are_dealt_out_evenly_or_it_is_said_that_they_are_not() -> None:
    batch = packed((16384, 640, 992, 224, 6080, 256))
    for uneven, rows, said in run_ranks(_dealt, 4, batch, "auto"):
        assert uneven <= 1.05
        assert rows == 24576 // 4
        assert said == []
    first, *others = run_ranks(_dealt, 4, batch, "zigzag")
    (text,) = first[2]
    assert f"one rank {first[0]:.1f} times" in text
    assert 'layout="auto"' in text
    assert first[0] > 1.3
    assert all(said == [] for *_, said in others)


def _told(rank: int, batches: list[Batch], layout: str) -> list[str]:
    """What is logged of models on two shards each."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.disable(logging.NOTSET)  # ranks are quiet otherwise
    logging.getLogger("burst_plugin.huggingface").addHandler(handler)
    cp = ContextParallel(dist.group.WORLD, layout=layout)
    for name in ("llama", "gpt_oss", "gpt_oss"):
        model = prepare(build(Run(model=FAMILIES[name])))
        for batch in batches:
            model(**{k: x for k, x in shard_batch(batch, cp).items() if k != "shift_labels"}, use_cache=False)
    return said


def test_models_whose_documents_meet_in_eager_attention_are_named_once() -> None:
    """Not for batches without documents, nor those that hand positions to their mask."""
    batch = packed((13, 1, 18), (30, 2))
    plain = {"input_ids": BATCH["input_ids"]}
    first, second = run_ranks(_told, 2, [plain, batch, batch], "zigzag")
    assert second == []
    (text,) = first
    assert "GptOssForCausalLM passes no position_ids to its mask" in text
    assert run_ranks(_told, 2, [plain], "zigzag") == [[], []]
    late = packed((29, 3))  # of which the first rank has no bound, and the first half of a sequence
    assert run_ranks(_told, 2, [late], "contiguous") == [[], []]


def test_eager_attention_does_let_documents_meet() -> None:
    """Else what is said of it would be wrong."""
    batch = packed((13, 1, 18))
    for name, meet in (("llama", False), ("gpt_oss", True)):
        model = build(Run(model=FAMILIES[name]))
        inputs = {each: batch[each] for each in ("input_ids", "position_ids")}
        error = (model(**inputs, use_cache=False).logits - _logits(model, batch)).detach().abs().max()
        assert (float(error) > 0.1) == meet, name


def test_packed_samples_with_padding() -> None:
    """Padding at both ends, whose positions say nothing, as tokenizers that pad make them."""
    batch = packed((13, 1, 18))
    mask = torch.ones(1, 44, dtype=torch.long)
    mask[0, :5] = mask[0, 37:] = 0
    wide = {name: torch.nn.functional.pad(x, (5, 7), value=1) for name, x in batch.items()}
    wide["labels"] = wide["labels"].masked_fill(mask == 0, IGNORED_LABEL)
    for name in MASKED:
        (found,) = run_ranks(_on_ring, 4, [name], {**wide, "attention_mask": mask}, {}, {})[:1]
        truth = _on_one_rank(name, batch, {})
        torch.testing.assert_close(found[name].logits[:, 5:37], truth.logits, rtol=2e-5, atol=2e-5)


def _shard_only(rank: int, batch: dict[str, Any]) -> Any:
    return shard_batch(batch, ContextParallel(dist.group.WORLD))["burst"].mask


def test_padding_inside_a_document_does_not_end_it() -> None:
    """Whether positions count it, or do not, as tokenizers' do."""
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1]])
    for positions in (torch.arange(8)[None], (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)):
        batch = {"input_ids": torch.ones_like(mask), "attention_mask": mask, "position_ids": positions}
        assert shard_batch(batch, ContextParallel())["burst"].mask == key_padding(mask.bool())


def test_bounds_of_documents_may_come_as_cu_seq_lens() -> None:
    batch = packed((13, 1, 18))
    bounds = torch.tensor([0, 13, 14, 32], dtype=torch.int32)
    flat = {**batch, "position_ids": torch.arange(32)[None], "cu_seq_lens_q": bounds, "max_length_q": 18}
    assert run_ranks(_shard_only, 2, flat) == run_ranks(_shard_only, 2, batch) == [Documents((0, 13, 14, 32))] * 2


# ---------------------------------------------------------------------------------------- whole sequences, one rank


def _whole(name: str, batch: Batch, attention: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Evaluation, and generation from a left-padded prompt."""
    register()
    model = build(Run(model=FAMILIES[name]), attention=attention).eval()
    prompt = {"input_ids": batch["input_ids"][:, :16], "attention_mask": torch.ones(2, 16, dtype=torch.long)}
    prompt["attention_mask"][0, :5] = 0
    inputs = {each: x for each, x in batch.items() if each != "labels"}
    with torch.no_grad():
        written = model.generate(**prompt, max_new_tokens=6, do_sample=False, eos_token_id=None)
        return model(**inputs).logits, written


@pytest.mark.parametrize("name", FAMILIES)
def test_whole_sequences_in_evaluation_and_generation(name: str) -> None:
    for batch in (BATCH, packed((13, 1, 18), (30, 2))):
        logits, written = _whole(name, batch, "burst")
        expected, words = _whole(name, batch, "eager")
        torch.testing.assert_close(logits, expected, rtol=2e-5, atol=2e-5)
        assert torch.equal(written, words)


# -------------------------------------------------------------------------------------------------------- dropout


def _dropped(rank: int, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Logits twice with one sharded batch, once with another one of the same; and gradients under recomputation."""
    register()
    cp = ContextParallel(dist.group.WORLD, layout="contiguous")
    config = families()["llama"]
    config.attention_dropout = 0.5
    model = prepare(build(Run(model=config, checkpointing=rank >= 0)))
    local = shard_batch(batch, cp)
    first = model(**local, use_cache=False)
    assert not torch.equal(first.logits, model(**local, use_cache=False).logits), "two forwards"
    assert not torch.equal(first.logits, model(**shard_batch(batch, cp), use_cache=False).logits), "two batches"
    first.logits.square().sum().backward()
    grads = {each: p.grad for each, p in model.named_parameters()}
    for grad in grads.values():
        dist.all_reduce(grad)
    return local["burst"].unshard(first.logits.detach()), local["burst"].seed, grads


def test_dropout_is_the_same_on_any_number_of_ranks_and_under_recomputation() -> None:
    truth, seed, grads = run_ranks(_dropped, 1, BATCH)[0]
    for found, other, others in run_ranks(_dropped, 4, BATCH):
        assert other == seed
        torch.testing.assert_close(found, truth, rtol=2e-5, atol=2e-5)
        assert worst(others, grads)[0] <= 1e-5


def _drawn_twice(rank: int, kind: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Logits of two forwards with one sharded batch, and gradients of both together, under a kind of checkpoint."""
    cp = ContextParallel(dist.group.WORLD, layout="contiguous")
    model = prepare(build(Run(model=llama(attention_dropout=0.5))))
    if kind in ("reentrant", "not reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
    local = shard_batch(BATCH, cp)
    local.pop("shift_labels")
    with torch.no_grad():
        model.eval()(**local)  # has no dropout, and does not count
    model.train()
    copied = kind == "copied"  # in every forward, as FSDP does
    given = [{**local, "burst": replace(local["burst"])} if copied else local for _ in range(2)]
    first, second = (model(**each, use_cache=False).logits for each in given)
    if kind == "one by one":
        first.square().sum().backward()
        (2 * second.square().sum()).backward()
    else:
        (first.square().sum() + 2 * second.square().sum()).backward()
    grads = {each: p.grad for each, p in model.named_parameters()}
    for grad in grads.values():
        dist.all_reduce(grad)
    return [local["burst"].unshard(x.detach()) for x in (first, second)], grads


def test_every_forward_with_one_batch_has_dropout_of_its_own_and_its_recomputation_the_same() -> None:
    """As consistency losses need it (R-Drop, SimCSE)."""
    logits, grads = run_ranks(_drawn_twice, 1, "plain")[0]
    assert float((logits[0] - logits[1]).norm() / logits[0].norm()) > 0.1
    for kind in ("plain", "copied", "one by one", "reentrant", "not reentrant"):
        found, others = run_ranks(_drawn_twice, 2, kind)[0]
        torch.testing.assert_close(found, logits, rtol=2e-5, atol=2e-5)
        assert worst(others, grads)[0] <= 1e-5, kind


def _by_step(rank: int, seed: int, first: int, evaluates: bool) -> list[torch.Tensor]:
    """Logits of two micro-batches of each of the steps `first` to 2, all of one batch."""
    model = prepare(build(Run(model=llama(attention_dropout=0.5))))
    torch.manual_seed(seed + rank)
    cp, logits = ContextParallel(dist.group.WORLD), []
    with torch.no_grad():
        for step in range(first, 3):
            cp.step(step)
            for _ in range(2):
                local = shard_batch(BATCH, cp)
                logits.append(local["burst"].unshard(model(**local, use_cache=False).logits))
            if evaluates:
                model.eval()(**shard_batch(BATCH, cp), use_cache=False)
                model.train()
    return logits


def test_dropout_goes_by_the_seed_of_rank_0_and_by_the_step() -> None:
    """A resumed run draws what an uninterrupted one would, and evaluation draws nothing."""
    plain, *others = run_ranks(_by_step, 2, 1, 0, False)[0]
    for other in (*others, *run_ranks(_by_step, 2, 2, 0, False)[0]):
        assert float((other - plain).norm() / plain.norm()) > 0.1
    for first, evaluates in ((0, True), (1, False)):
        logits = run_ranks(_by_step, 2, 1, first, evaluates)[0]
        torch.testing.assert_close(logits, [plain, *others][2 * first :], rtol=0, atol=0)


def _whole_model(rank: int, use_reentrant: bool) -> tuple[float, str]:
    """The difference of gradients under a checkpoint around a model, and what is said of two of one batch."""
    cp = ContextParallel(dist.group.WORLD)
    grads = []
    for recomputes in (False, True):
        model = prepare(build(Run(model=llama(attention_dropout=0.5))))
        local = shard_batch(BATCH, cp)
        cp.rank_state.draws.forwards = 0  # the same seed for both
        local.pop("shift_labels")
        hidden = model.get_input_embeddings()(local.pop("input_ids")).detach().requires_grad_()

        def run(hidden: torch.Tensor, model: Any = model, local: Batch = local) -> torch.Tensor:
            return model(**local, inputs_embeds=hidden, use_cache=False).logits

        def logits(run: Any = run, hidden: torch.Tensor = hidden, recomputes: bool = recomputes) -> torch.Tensor:
            return checkpoint(run, hidden, use_reentrant=use_reentrant) if recomputes else run(hidden)

        logits().square().sum().backward()
        grads.append({each: p.grad.clone() for each, p in model.named_parameters() if p.grad is not None})
    twice = logits()
    try:
        twice.sum().backward()
    except ValueError as error:
        return worst(grads[1], grads[0])[0], str(error)
    return worst(grads[1], grads[0])[0], "nothing was raised"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_around_a_whole_model_draws_again_what_its_only_forward_drew(use_reentrant: bool) -> None:
    for error, message in run_ranks(_whole_model, 2, use_reentrant):
        assert error <= 1e-6
        assert "checkpoint around the whole model, and its shard was used in several forwards" in message


# ----------------------------------------------------------------------------------------------------- refused


CHUNKED = chunked_causal_mask_function(4, torch.zeros(1))
REMAPS = hasattr(masking_utils, "remap_positions_for_packed_sequence")
CHAINS = packed_sequence_mask_function(torch.zeros(1, 8))  # by ids of a model's own, which a ring is not told
PARTIAL = and_masks(causal_mask_function, partial(causal_mask_function))
WINDOWS = and_masks(*map(sliding_window_causal_mask_function, (4, 3)))  # two, without a size beside them
BLOCKS = or_masks(causal_mask_function, blockwise_overlay(torch.zeros(1)))


class _Layer(torch.nn.Module):
    is_causal = True


setattr(_Layer, EXAMINED, True)


def test_a_model_that_nobody_has_examined_is_refused() -> None:
    """In a loop of one's own; else layers that scan a shard, or count its positions, would go unnoticed."""
    register()
    local = shard_batch({"input_ids": BATCH["input_ids"]}, ContextParallel())
    model = build(Run(model=FAMILIES["llama"]), attention="burst")
    with pytest.raises(ValueError, match=r"LlamaAttention got a sharded batch, .*huggingface\.prepare\(model\)"):
        model(**local)
    prepare(model)(**local)
    other = build(Run(model=FAMILIES["llama"]))
    other.config.layer_types = ["full_attention", "a_new_kind"]
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot run on a ring: it has layers of type a_new_kind"):
        prepare(other)
    with pytest.raises(ValueError, match=r"Linear has no model of transformers; call burst_plugin.burst_attention"):
        prepare(torch.nn.Linear(2, 2))


def test_tokens_that_an_adapter_adds_to_a_shard_are_refused() -> None:
    """Prompt tuning that comes after `prepare`, which would have refused it."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = prepare(build(Run(model=FAMILIES["llama"])))
    tuned = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    local = shard_batch({"input_ids": BATCH["input_ids"]}, ContextParallel())
    with pytest.raises(ValueError, match="PEFT prompt learning puts tokens before each rank's shard"):
        prepare(tuned)
    with pytest.raises(ValueError, match=r"LlamaAttention got 34 tokens, but a rank's share of the batch is 32"):
        tuned(**local, use_cache=False)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_second_model_that_was_not_prepared_takes_no_shards(attention: str) -> None:
    """A teacher, say: its logits would have the right shape, and be those of a shard that attends to itself alone."""
    prepare(build(Run(model=FAMILIES["llama"])))
    teacher = build(Run(model=FAMILIES["llama"]), attention=attention).eval()
    local = shard_batch(BATCH, ContextParallel())
    with torch.no_grad(), pytest.raises(ValueError, match=r"computes without the ring, .*prepare\(model\) first"):
        teacher(**local)
    with torch.no_grad():
        teacher(input_ids=BATCH["input_ids"])  # whole


def test_a_loss_that_does_not_shift_is_refused() -> None:
    """Labels are shifted already, so that it would train every token on the one after the next."""
    for change in ({"loss_type": "ForMaskedLM"}, {"loss_function": torch.nn.functional.cross_entropy}):
        model = build(Run(model=FAMILIES["llama"]))
        for name, value in change.items():
            setattr(model, name, value)
        with pytest.raises(ValueError, match=r"its loss has been set to .*labels are shifted already by one"):
            prepare(model)
    model = build(Run(model=FAMILIES["llama"]))
    model.loss_function = lambda logits, labels, vocab_size, shift_labels=None, **kwargs: (
        logits.sum()
    )  # in chunks, say
    prepare(model)


def test_padding_needs_no_positions_of_its_own() -> None:
    """A table of learned positions may end with the sequence."""
    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4, n_positions=27)
    model = prepare(transformers.GPT2LMHeadModel(config))
    ring = [shard_batch({"input_ids": BATCH["input_ids"][:, :27]}, cp) for cp in [ContextParallel()]]
    assert int(ring[0]["position_ids"].max()) == 26
    model(**ring[0])


@pytest.mark.parametrize("training", [False, True])
def test_a_model_whose_layers_hand_nothing_on_is_told(training: bool) -> None:
    """Its attention never hears of the ring, and in evaluation would attend to the shard alone."""
    model = build(Run(model=llama(num_hidden_layers=1)))
    model.model.layers[0] = _DropsAll(model.model.layers[0])
    prepare(model).train(training)
    local = shard_batch({"input_ids": BATCH["input_ids"]}, ContextParallel())
    told = "LlamaAttention does not know the shard" if training else "its layers pass on to attention neither"
    with torch.set_grad_enabled(training), pytest.raises(ValueError, match=told):
        model(**local, use_cache=False)


def test_a_mask_of_the_values_of_all_keys_is_refused() -> None:
    """Doge's, of which a rank would know its own keys' alone; on a ring of one rank, too."""
    config = transformers.DogeConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    model = transformers.DogeForCausalLM(config)
    with pytest.raises(ValueError, match=r"DogeForCausalLM cannot run on a ring: its attention makes a mask of the"):
        prepare(model)
    (reason,) = problems(model, is_whole=True, is_own_mean=True)
    assert "prepare_dynamic_mask" in reason


def test_a_model_that_takes_its_mask_for_a_tensor_is_told() -> None:
    recipe = MaskRecipe(mask_function=causal_mask_function, batch_size=2, q_length=3, kv_length=4)
    with pytest.raises(AttributeError, match="a model reads dtype of its attention mask, as if that were a tensor"):
        recipe.dtype  # noqa: B018
    assert recipe.shape == (2, 1, 3, 4), "by which transformers makes a mask of a mask"


def test_options_of_layers_are_no_parts_of_a_model() -> None:
    """MPT has a configuration of its attention."""
    config = transformers.MptConfig(d_model=32, n_heads=4, n_layers=1, max_seq_len=64, vocab_size=VOCAB)
    assert problems(transformers.MptForCausalLM(config)) == []


def test_a_model_on_the_ring_can_be_copied_and_pickled() -> None:
    model = prepare(build(Run(model=FAMILIES["llama"]))).eval()
    local = shard_batch({"input_ids": BATCH["input_ids"]}, ContextParallel())
    with torch.no_grad():
        expected = model(**local, use_cache=False).logits
        for other in (deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(**local, use_cache=False).logits, expected)


def test_adapters_that_take_means_over_tokens_and_decoders_of_encoders_are_refused() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    for kind, message in ((SimpleNamespace(value="LILY"), "PEFT's Lily"), (None, "PEFT's VeLoRA")):
        config = peft.LoraConfig(r=2, target_modules=["q_proj"])
        model = peft.get_peft_model(build(Run(model=FAMILIES["llama"])), config)
        if kind is None:
            config.velora_config = SimpleNamespace(init_type="batch_average")
        else:
            config.peft_type = kind
        with pytest.raises(ValueError, match=message):
            prepare(model)
    around = (
        peft.AdaLoraConfig(total_step=10, target_modules=["q_proj"]),
        peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1),
    )
    for config, name in zip(around, ("AdaLoRA", "LLaMA-Adapter"), strict=True):
        model = peft.get_peft_model(build(Run(model=FAMILIES["llama"])), config)
        with pytest.raises(ValueError, match=f"PEFT's {name} calls the model's forward past the hooks"):
            prepare(model)
    decoder = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        is_decoder=True, add_cross_attention=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="attends to an encoder"):
        prepare(transformers.BertLMHeadModel(decoder))


def test_layers_without_a_number_drop_other_probabilities() -> None:
    """DistilBERT's attention does not know which layer it is in."""
    config = transformers.DistilBertConfig(vocab_size=VOCAB, dim=16, hidden_dim=16, n_layers=2, n_heads=2)
    model = transformers.DistilBertModel(config)
    use_burst(model)
    shard = shard_batch({"input_ids": BATCH["input_ids"]}, ContextParallel())["burst"]
    assert len({_seed(shard, layer.attention) for layer in model.transformer.layer}) == 2


@pytest.mark.parametrize("positions", [[0, 1, 2, 3, 3, 3, 4, 5], [0, 1, 2, 3, 2, 3, 4, 5]])
def test_positions_that_are_shared_are_no_documents_where_there_is_a_padding_mask(positions: list[int]) -> None:
    """transformers takes any break for a document only if it is given no attention_mask."""
    batch = {"input_ids": torch.ones(1, 8, dtype=torch.int64), "position_ids": torch.tensor([positions])}
    assert shard_batch(batch, ContextParallel())["burst"].mask is not None
    batch["attention_mask"] = torch.ones(1, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"position_ids go from 3 to \d at token 4: whether that begins a document"):
        shard_batch(batch, ContextParallel())
    for clear in ([0, 1, 2, 3, 0, 1, 2, 3], [2, 3, 4, 5, 2, 3, 4, 5]):
        batch["position_ids"] = torch.tensor([clear])
        assert shard_batch(batch, ContextParallel())["burst"].mask == Documents((0, 4, 8))


def test_part_of_a_mask_is_a_tensor_and_all_of_it_a_recipe() -> None:
    recipe = MaskRecipe(
        mask_function=causal_mask_function, batch_size=1, q_length=4, kv_length=4, q_offset=0, kv_offset=0
    )
    assert recipe[:, :, slice(0, None), :] is recipe
    assert torch.equal(recipe[:, :, -1:, :], torch.ones(1, 1, 1, 4, dtype=torch.bool))


def test_rules_are_known_by_what_they_do_whatever_they_are_called() -> None:
    """In Python 3.10 the compiler makes them again without the name of the function that made them."""
    rule = sliding_window_causal_mask_function(4)
    for part in (rule, rule.__closure__[0].cell_contents[0]):
        part.__qualname__ = part.__name__
    recipe = MaskRecipe(mask_function=rule, local_size=4)
    assert recipe.unknown == []
    assert recipe.mask == SlidingWindow(3, 0)


def test_labels_of_a_shard_are_called_shifted() -> None:
    """A loss that shifts `labels` itself would shift them twice."""
    local = shard_batch(BATCH, ContextParallel())
    assert "labels" not in local
    assert torch.equal(local["shift_labels"][:, :-1], BATCH["labels"][:, 1:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_bias": torch.zeros(1)}, "_Layer passes position_bias, which attn_implementation"),
        ({"output_attentions": True}, "output_attentions=True is not supported"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, "got an attention_mask of its own, a Tensor"),
        ({"attention_mask": MaskRecipe(mask_function=CHUNKED)}, "chunked_overlay.<locals>.inner_mask"),
        pytest.param(
            {"attention_mask": MaskRecipe(mask_function=CHAINS)},
            "packed_sequence_mask_function.<locals>.inner_mask",
            marks=pytest.mark.skipif(not REMAPS, reason="before 5.23 it looks like the one of packed documents"),
        ),
        ({"attention_mask": MaskRecipe(mask_function=PARTIAL)}, "know: partial"),
        ({"attention_mask": MaskRecipe(mask_function=BLOCKS)}, "blockwise_overlay.<locals>.inner_mask, or_masks"),
        ({"attention_mask": MaskRecipe(mask_function=WINDOWS)}, "sliding_window_overlay.<locals>.inner_mask"),
        ({"indices": torch.zeros(1)}, "selection must be int32 or int64 [batch, local queries, keys per query]"),
        (
            {"attention_mask": MaskRecipe(mask_function=causal_mask_function), "sliding_window": 3},
            "_Layer passes sliding_window=3, but the window of its mask is None",
        ),
    ],
)
def test_what_a_layer_asks_for_is_honoured_or_refused(options: dict[str, Any], message: str) -> None:
    x = torch.zeros(1, 2, 4, 8)
    shard = SequenceShard(ContextParallel(), 4, Tokens(4))
    with pytest.raises(ValueError, match=re.escape(message)):
        forward(_Layer(), x, x, x, **{"attention_mask": None, "burst": shard, **options})


def test_layers_whose_masks_accelerate_takes_away_are_refused() -> None:
    model = transformers.EuroBertModel(transformers.EuroBertConfig(**shape()))
    _attach_context_parallel_hooks(prepare(model))
    with pytest.raises(ValueError, match="EuroBertAttention has lost its mask to Accelerate's own"):
        model(**shard_batch({"input_ids": BATCH["input_ids"]}, ContextParallel()))


def test_training_on_whole_sequences_is_refused() -> None:
    x = torch.zeros(1, 2, 4, 8)
    with pytest.raises(
        ValueError, match=r"_Layer got a batch that is not sharded: pass what burst_plugin.shard_batch"
    ):
        forward(_Layer(), x, x, x, None)
