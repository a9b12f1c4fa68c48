"""Models of transformers that count positions or compute scores by themselves: a ring against eager attention."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
import transformers

from burst_plugin import ContextParallel
from burst_plugin.batch import as_given, shard_batch
from burst_plugin.huggingface import RingCache, prepare
from burst_plugin.huggingface.models import problems
from burst_plugin.trajectories import fold
from tests.support.deepspeed_run import VOCAB, Batch, Run, build, draw, worst
from tests.support.families import counting, old_attention
from tests.support.ranks import last_lines, run_ranks
from tests.support.ring_steps import documents, packed, padded, shifted, step, sum_of_losses

pytestmark = pytest.mark.huggingface

FAMILIES = counting() | old_attention()
FEW = ("opt", "biogpt", "roberta", "xmod", "bart", "pegasus", "whisper", *old_attention())
BY_IDS = [name for name in FAMILIES if "roberta" in name or name in ("xmod", "camembert", "data2vec-text")]
Found = tuple[torch.Tensor, dict[str, torch.Tensor]]


def _plain() -> Batch:
    """With a token in the text that has the id of padding."""
    batch = draw(1, rows=2, length=32)[0]
    batch["input_ids"][0, 5] = 0
    return batch


BATCHES = {"plain": _plain(), "packed": packed((13, 1, 18), seed=1), "padded": padded(), "checkpointed": _plain()}


def _of_family(name: str, batch: Batch) -> Batch:
    if name in BY_IDS and "position_ids" in batch:  # the first token is at position 1, after that of padding
        return {**batch, "position_ids": batch["position_ids"] + 1}
    return batch


def _on_ring(rank: int, names: Sequence[str]) -> dict[tuple[str, str], Found]:
    cps = {"kept": ContextParallel(dist.group.WORLD, keep_attention="all"), "": ContextParallel(dist.group.WORLD)}
    found = {}
    for name in names:
        model = prepare(build(Run(model=FAMILIES[name])))
        for kind, batch in BATCHES.items():
            cp = cps["kept" if kind == "checkpointed" else ""]
            if kind == "checkpointed" and model.supports_gradient_checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            local = shard_batch(_of_family(name, batch), cp)
            labels = local.pop("shift_labels")
            logits = model(**local, use_cache=False).logits
            _, grads = step(model, sum_of_losses(logits, labels))
            for grad in grads.values():
                dist.all_reduce(grad)
            found[name, kind] = local["burst"].unshard(logits.detach()), grads
    return found


def _on_one_rank(name: str, batch: Batch) -> Found:
    model = build(Run(model=FAMILIES[name]))
    texts = [{each: x for each, x in text.items() if each != "labels"} for text in documents(batch)]
    logits = torch.cat([model(**text, use_cache=False).logits for text in texts], 1)
    return logits.detach(), step(model, sum_of_losses(logits, shifted(batch["labels"])))[1]


def _with_key_biases(grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Biases of keys together with weights: their own gradient is 0, but for rounding."""
    merged = {}
    for name, grad in grads.items():
        bias = grads.get(name.replace("weight", "bias")) if name.endswith((".k_proj.weight", ".key.weight")) else None
        merged[name] = grad if bias is None else torch.cat([grad.flatten(), bias])
    return {name: grad for name, grad in merged.items() if not name.endswith((".k_proj.bias", ".key.bias"))}


@pytest.fixture(scope="module")
def truths() -> dict[tuple[str, str], Found]:
    return {(name, kind): _on_one_rank(name, batch) for name in FAMILIES for kind, batch in BATCHES.items()}


@pytest.mark.parametrize(("ranks", "names"), [(2, tuple(FAMILIES)), (4, FEW)], ids=["2", "4"])
def test_logits_and_gradients_equal_eager_on_one_rank(
    ranks: int, names: Sequence[str], truths: dict[tuple[str, str], Found]
) -> None:
    by_rank = run_ranks(_on_ring, ranks, names, timeout_s=240.0)
    for (name, kind), (found, others) in by_rank[0].items():
        logits, grads = truths[name, kind]
        real = BATCHES[kind].get("attention_mask", torch.ones(found.shape[:2])).bool()
        torch.testing.assert_close(found[real], logits[real], rtol=2e-5, atol=2e-5, msg=f"{name}, {kind}")
        error, parameter = worst(_with_key_biases(others), _with_key_biases(grads))
        assert error <= 1e-5, (name, kind, parameter, error)


def test_whole_batches_in_evaluation_and_generation_are_as_ever() -> None:
    for name, config in FAMILIES.items():
        eager = build(Run(model=config)).eval()
        ring = prepare(copy.deepcopy(eager))
        batch = {each: x for each, x in padded().items() if each != "labels"}
        prompt = {each: x[:1, :16] for each, x in batch.items()}
        with torch.no_grad():
            real = batch["attention_mask"].bool()
            expected, logits = (model(**batch).logits[real] for model in (eager, ring))
            torch.testing.assert_close(logits, expected, rtol=2e-5, atol=2e-5, msg=name)
            words, written = (
                model.generate(**prompt, max_new_tokens=4, do_sample=False, eos_token_id=None)
                for model in (eager, ring)
            )
            assert torch.equal(written, words), name


def test_a_ring_of_one_rank_with_the_whole_batch_as_it_was_given() -> None:
    for name, config in FAMILIES.items():
        eager = build(Run(model=config))
        ring = prepare(copy.deepcopy(eager))
        batch = {each: x for each, x in padded().items() if each != "labels"}
        found = ring(**as_given(batch, ContextParallel()), use_cache=False).logits
        real = batch["attention_mask"].bool()
        expected = eager(**batch, use_cache=False).logits
        torch.testing.assert_close(found[real], expected[real], rtol=2e-5, atol=2e-5, msg=name)


def test_embeddings_in_place_of_ids_have_no_padding() -> None:
    eager = build(Run(model=FAMILIES["roberta"]))
    ring = prepare(copy.deepcopy(eager))
    embedded = eager.get_input_embeddings()(_plain()["input_ids"]).detach()
    expected = eager(inputs_embeds=embedded, use_cache=False).logits
    for cut in (shard_batch, as_given):
        found = ring(**cut({"inputs_embeds": embedded}, ContextParallel()), use_cache=False).logits
        torch.testing.assert_close(found[:, :16], expected[:, :16], rtol=2e-5, atol=2e-5)


def test_training_on_whole_batches_is_refused() -> None:
    for name in old_attention():
        with pytest.raises(ValueError, match=r"Attention got a batch that is not sharded: pass what"):
            prepare(build(Run(model=FAMILIES[name])))(_plain()["input_ids"])


# ------------------------------------------------------------------------------------------------------ refused


def _torn(rank: int) -> None:
    batch = _plain()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, 9] = 0
    model = prepare(build(Run(model=FAMILIES["bloom"])))
    model(**shard_batch(batch, ContextParallel(dist.group.WORLD)), use_cache=False)


def test_padding_between_tokens_that_alibi_does_not_count_is_refused_on_every_rank() -> None:
    for line in last_lines(_torn, 2):
        assert "the ALiBi of BloomForCausalLM does not count: pad rows on the left or on the right" in line


def _folded(rank: int) -> None:
    folded = fold([[7, 7, 3, 4], [7, 7, 5, 5]])
    model = prepare(build(Run(model=FAMILIES["roberta"])))
    batch = {"input_ids": folded.ids, "position_ids": folded.position_ids, "tree": folded.tree}
    model(**shard_batch(batch, ContextParallel(dist.group.WORLD)), use_cache=False)


def test_trees_whose_positions_begin_at_zero_are_refused_for_models_that_count_from_padding_on() -> None:
    for line in last_lines(_folded, 2):
        assert (
            "RobertaForCausalLM counts positions by ids that are no padding, but positions of a tree count from 0"
            in line
        )


def test_caches_hold_what_attends_by_positions_from_zero_on_and_others_are_refused() -> None:
    ids, usual = (
        _plain()["input_ids"],
        {"max_new_tokens": 3, "do_sample": False, "use_cache": True, "eos_token_id": None},
    )
    refused = dict.fromkeys(counting().keys() - {"biogpt"}, "it counts positions by itself")
    refused |= dict.fromkeys(("bloom", "bloom_exact", "mpt"), "its ALiBi") | {
        "opt": "computed logits without its layers"
    }
    for name in FAMILIES:
        model = prepare(build(Run(model=FAMILIES[name]))).eval()
        cache = {"past_key_values": RingCache(ContextParallel())}
        if name in refused:
            with pytest.raises(ValueError, match=refused[name]):
                model.generate(ids, **usual, **cache)
        else:
            assert torch.equal(model.generate(ids, **usual), model.generate(ids, **usual, **cache)), name


def test_what_a_ring_would_compute_otherwise_is_refused_by_name() -> None:
    shape = {"vocab_size": VOCAB, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    falcon = transformers.FalconForCausalLM(transformers.FalconConfig(**shape, alibi=True))
    assert "its ALiBi is rounded to bfloat16" in "; ".join(problems(falcon))
    rembert = transformers.RemBertForCausalLM(transformers.RemBertConfig(**shape, is_decoder=True))
    assert "does not go through transformers' AttentionInterface" in "; ".join(problems(rembert))
    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=8, n_layer=1, n_head=2)
    reasons = problems(transformers.GPT2DoubleHeadsModel(config))
    assert "its second head reads one token of each text" in "; ".join(reasons)


@pytest.mark.parametrize("name", ["CLIPText", "SiglipText", "MetaClip2Text"])
def test_a_body_that_pools_one_token_in_its_own_forward_is_refused(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        projection_dim=8, eos_token_id=2,
    )  # fmt: skip
    model = getattr(transformers, f"{name}Model")(config)
    assert "its forward returns one token of each rank's shard as pooler_output" in "; ".join(problems(model))


def test_bodies_without_their_pooler_are_taken() -> None:
    """Their forward could return a pooler_output, but there is none."""
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    assert problems(transformers.BertModel(config, add_pooling_layer=False)) == []


def test_positions_that_are_overwritten_are_refused() -> None:
    """A depth decoder takes position_ids, and counts from 0 on nevertheless."""
    config = transformers.CsmDepthDecoderConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, backbone_hidden_size=8, num_codebooks=4,
    )  # fmt: skip
    for kind in (transformers.CsmDepthDecoderModel, transformers.CsmDepthDecoderForCausalLM):
        assert "it counts positions by itself, on every shard from the start" in "; ".join(problems(kind(config)))


@pytest.mark.parametrize("name", ["bart", "marian", "pegasus", "whisper"])
def test_states_of_an_encoder_with_a_shard_are_refused(name: str) -> None:
    """Its decoder would mask them as if they were its own tokens."""
    model = prepare(build(Run(model=FAMILIES[name])))
    local = shard_batch({"input_ids": _plain()["input_ids"]}, ContextParallel())
    states = torch.zeros(2, 24, 32)
    entry = "encoder_outputs" if name == "whisper" else "encoder_hidden_states"
    message = rf"{type(model).__name__} got {entry} with a shard: it attends to an encoder"
    with pytest.raises(ValueError, match=message):
        model(**local, **{entry: states})
    with pytest.raises(ValueError, match=message):
        model(local.pop("input_ids"), None, states, **local)


@pytest.mark.parametrize("name", ["xglm", "gpt_neo", "gpt_neox_japanese"])
def test_whole_batches_in_evaluation_drop_nothing(name: str) -> None:
    config = copy.deepcopy(FAMILIES[name])
    config.attention_dropout = 0.5
    model = build(Run(model=config)).eval()
    ids = draw(1)[0]["input_ids"]
    with torch.no_grad():
        truth = model(ids, use_cache=False).logits
        torch.testing.assert_close(prepare(model)(ids, use_cache=False).logits, truth, rtol=2e-5, atol=2e-5)
