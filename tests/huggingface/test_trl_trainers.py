"""TRL's trainers with losses of whole sequences, and Trainer with classifiers: on rings as on one rank without."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import pytest
import torch
import transformers

pytest.importorskip("trl", reason="trl is not installed")
pytest.importorskip("peft", reason="peft is not installed")

import deepspeed
from peft import LoraConfig
from transformers import DataCollatorForTokenClassification

import burst_plugin.deepspeed as burst
from burst_plugin.deepspeed import model_hooks, trl_logits, whole_outputs
from tests.support.deepspeed_run import VOCAB
from tests.support.grpo_run import tokenizer
from tests.support.media import tiny_model
from tests.support.ranks import run_ranks
from tests.support.swift_like import labelled
from tests.support.trl_run import (
    Case,
    Layout,
    Outcome,
    WithImages,
    answered,
    classified,
    compared,
    judged,
    preferences_by_margins,
    read,
    save_models,
    talks,
    train_all,
)

pytestmark = [
    pytest.mark.huggingface,
    pytest.mark.skipif(
        tuple(map(int, version("trl").split(".")[:2])) < (1, 16),
        reason=f"the models of these trainers return log-probabilities since TRL 1.16, this is {version('trl')}",
    ),
]


def lora(directory: str, task: str = "CAUSAL_LM", **options: Any) -> LoraConfig:
    """Adapters that change what the model computes from the start, as a reference without them shows."""
    targets = ["q_proj", "v_proj", "down_proj"]
    return LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type=task, **options)


OTHER = {"ref_model": partial(read, name="other")}
PRECOMPUTED = {"precompute_ref_log_probs": True}
ONE_ROW = {"per_device_eval_batch_size": 1}  # for means over padding, too, which depend on how rows are put together
TALK = """{% for turn in messages %}{% if turn['role'] == 'assistant' %}w2 {% generation %}{{ turn['content'] }} w1\
{% endgeneration %} {% else %}w3 {{ turn['content'] }} {% endif %}{% endfor %}\
{% if add_generation_prompt %}w2 {% endif %}"""


def talking(directory: str) -> Any:
    """A tokenizer with a template of turns, which says what the assistant has said."""
    words = tokenizer()
    words.chat_template = TALK
    return words


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.15}
WORDS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}


def experts(directory: str, seed: int) -> Any:
    """A model whose routers have a loss, which TRL adds."""
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        **WORDS,
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        output_router_logits=True,
        experts_implementation="eager",
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def with_images(family: str) -> Case:
    """A case of a model that takes images, some of whose evaluated rows have one."""

    def model(directory: str, noise: float) -> Any:
        found = tiny_model(family)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in found.parameters():
                parameter += noise * torch.randn_like(parameter)
        return found

    return Case(
        "DPOTrainer",
        {"learning_rate": 0.02},
        keywords={
            "model": partial(model, noise=0.0),
            "ref_model": partial(model, noise=0.05),
            "data_collator": lambda directory: WithImages(family),
        },
    )


def classes_of_gpt2(directory: str) -> Any:
    """A classifier with learned positions."""
    torch.manual_seed(0)
    return transformers.GPT2ForSequenceClassification(
        transformers.GPT2Config(
            **WORDS,
            n_embd=32,
            n_layer=2,
            n_head=4,
            initializer_range=0.15,
            num_labels=3,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def classes_of_gemma3(directory: str) -> Any:
    """A classifier with a window in most layers."""
    torch.manual_seed(0)
    return transformers.AutoModelForSequenceClassification.from_config(
        transformers.Gemma3TextConfig(
            **WORDS, **SIZES, num_key_value_heads=2, head_dim=8, intermediate_size=48, sliding_window=8, num_labels=3
        )
    )


def likely_words(trainer: Any) -> None:
    """Have the most likely words generated, which do not depend on what was drawn before."""
    trainer.generation_config.do_sample = False


def likely_words_or_given(trainer: Any) -> None:
    """Have ranks disagree on when to generate, by Python's random numbers; the first draws as one rank does."""
    likely_words(trainer)
    random.seed(trainer.args.process_index)


def positionally(trainer: Any) -> None:
    """Have the trainer's loss called as a subclass calls it, without names."""
    original = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        return original(model, inputs, return_outputs, num_items_in_batch)

    trainer.compute_loss = compute_loss


DISTILLED: Any = {
    "home": "trl.experimental.gkd",
    "rows": talks,
    "keywords": {"teacher_model": partial(read, name="other"), "processing_class": talking},
}
CASES = {
    "dpo": Case("DPOTrainer"),
    "dpo_other": Case("DPOTrainer", keywords=OTHER),
    "dpo_lora": Case("DPOTrainer", keywords={"peft_config": lora}),
    "dpo_precomputed": Case("DPOTrainer", PRECOMPUTED),
    "dpo_precomputed_other": Case("DPOTrainer", PRECOMPUTED, keywords=OTHER),
    "dpo_precomputed_lora": Case("DPOTrainer", PRECOMPUTED, keywords={"peft_config": lora}),
    "dpo_by_tokens": Case(
        "DPOTrainer",
        {"loss_type": ["ipo", "sigmoid_norm"], "loss_weights": [1.0, 0.5], "use_weighting": True, "ld_alpha": 0.5},
        keywords=OTHER,
    ),
    "dpo_checkpoints": Case("DPOTrainer", {"gradient_checkpointing": True}, keywords=OTHER),
    "kto": Case("KTOTrainer", rows=judged, keywords=OTHER),
    "kto_precomputed": Case("KTOTrainer", PRECOMPUTED, rows=judged, keywords=OTHER),
    "reward": Case("RewardTrainer", model="reward"),
    "reward_lora": Case(
        "RewardTrainer",
        {"center_rewards_coefficient": 0.1},
        rows=preferences_by_margins,
        model="reward",
        keywords={"peft_config": partial(lora, task="SEQ_CLS", modules_to_save=["score"])},
    ),
    "sft": Case("SFTTrainer", rows=answered),
    "sft_every_token": Case(
        "SFTTrainer", {"completion_only_loss": False, "include_num_input_tokens_seen": "all"}, rows=answered
    ),
    "sft_talks": Case(
        "SFTTrainer", {"assistant_only_loss": True}, rows=talks, keywords={"processing_class": talking}
    ),
    "sft_experts": Case(
        "SFTTrainer",
        {"router_aux_loss_coef": 0.5},  # the model and its configuration begin with another
        rows=answered,
        keywords={"model": partial(experts, seed=0)},
    ),
    "swift_experts": Case(
        "Seq2SeqTrainer",
        home="tests.support.swift_like",
        rows=labelled,
        keywords={
            "model": partial(experts, seed=0),
            "data_collator": lambda directory: DataCollatorForTokenClassification(tokenizer()),
        },
    ),
    "orpo": Case("ORPOTrainer", ONE_ROW, home="trl.experimental.orpo"),
    "cpo": Case("CPOTrainer", ONE_ROW, home="trl.experimental.cpo"),
    "simpo": Case("CPOTrainer", {"loss_type": "simpo", "cpo_alpha": 0.5, **ONE_ROW}, home="trl.experimental.cpo"),
    "tpo": Case("TPOTrainer", home="trl.experimental.tpo", rows=compared),
    "gkd": Case("GKDTrainer", {"lmbda": 0.0, "beta": 0.3}, **DISTILLED),
    "gkd_of_student": Case(
        "GKDTrainer",
        {"lmbda": 1.0, "max_new_tokens": 6, "gradient_checkpointing": True},
        **DISTILLED,
        changes=likely_words,
    ),
    "gkd_of_either": Case(
        "GKDTrainer", {"lmbda": 0.8, "max_new_tokens": 6}, **DISTILLED, changes=likely_words_or_given
    ),
    "gkd_of_teacher": Case(
        "GKDTrainer", {"lmbda": 0.0, "seq_kd": True, "max_new_tokens": 6}, **DISTILLED, changes=likely_words
    ),
    "classes": Case("Trainer", home="transformers", model="classes", rows=classified),
    "classes_positionally": Case(
        "Trainer", home="transformers", model="classes", rows=classified, changes=positionally
    ),
    "dpo_patches": with_images("qwen2_5_vl"),
    "dpo_images": with_images("internvl"),
    "dpo_experts": Case(
        "DPOTrainer",
        {"router_aux_loss_coef": 0.5},
        keywords={"model": partial(experts, seed=0), "ref_model": partial(experts, seed=1)},
    ),
    "classes_gpt2": Case("Trainer", home="transformers", rows=classified, keywords={"model": classes_of_gpt2}),
    "classes_gemma3": Case("Trainer", home="transformers", rows=classified, keywords={"model": classes_of_gemma3}),
    "tags": Case(
        "Trainer",
        home="transformers",
        model="tags",
        rows=partial(classified, of_tokens=True),
        keywords={"data_collator": lambda directory: DataCollatorForTokenClassification(tokenizer())},
    ),
}
# Means over batches of a mean over tokens, a minimum or a maximum. With several rings each is that of all their
# batches at once, as TRL has it for several ranks.
_BY_BATCH = ("entropy", "logits/chosen", "logits/rejected", "mean_token_accuracy", "min_reward", "max_reward")
_OF_TIME = ("_runtime", "_per_second", "grad_norm")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def no_whole_logits(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Let ranks, which inherit this, fail where one would hold the logits of whole sequences, as TPOTrainer does."""
    if "tpo" in request.node.name:
        return
    gathered = whole_outputs.gathered

    def narrow(local: torch.Tensor, shard: Any) -> torch.Tensor:
        assert local.shape[-1] < VOCAB, "whole logits"
        return gathered(local, shard)

    for module in (whole_outputs, model_hooks, trl_logits):
        monkeypatch.setattr(module, "gathered", narrow)


@cache
def on_one_rank(names: Sequence[str], directory: str, rings: int) -> list[Outcome]:
    """With as many micro-batches in a step as all rings have."""
    cases = [CASES[name] for name in names]
    return run_ranks(train_all, 1, cases, directory, Layout(ranks=rings), timeout_s=300.0)[0]


def check(found: Outcome, truth: Outcome, layout: Layout) -> None:
    """Everything that is logged, gradients and weights."""
    assert found.sent, "evaluated on the ring"
    assert len(found.logged) == len(truth.logged) == 2 + 2  # those of the whole training, and of the evaluation
    for mine, right in zip(found.logged, truth.logged, strict=True):
        assert mine.keys() - {"grad_norm"} == right.keys() - {"grad_norm"}
        for name, x in right.items():
            if name.endswith(_OF_TIME) or (name == "total_flos" and layout.stage == 3):
                continue
            if layout.ranks > layout.ring and name.removeprefix("eval_").startswith(_BY_BATCH):
                continue
            # Others are made of sums of log-probabilities, of which a last bit in float32 is 4e-6.
            bound = 1e-6 if name.endswith("loss") else 1e-5
            assert mine[name] == pytest.approx(x, abs=bound, rel=bound), name
    for tensors, right in ((found.grads, truth.grads), (found.weights, truth.weights)):
        assert tensors.keys() == right.keys()
        for name, x in right.items():
            assert float((tensors[name] - x).norm()) <= 1e-5 * float(x.norm()) + 1e-8, name


QUICK = ("dpo_other", "kto", "reward_lora", "cpo", "sft_talks", "classes_positionally")
FIRST = (*QUICK, "sft_experts", "swift_experts")
WITHOUT_PEERS = (
    "dpo",
    "dpo_precomputed_other",
    "reward",
    "classes",
    "classes_positionally",
    "tags",
    "simpo",
)  # no loss of a mean over ranks


# Each stage of ZeRO with some cases; with BURST_SOAK, with all of them.
OTHERS: list[tuple[int, tuple[str, ...]]] = [
    (1, ("dpo_lora", "sft_every_token", "gkd")),
    (1, ("dpo_patches", "dpo_images")),
    (2, ("gkd_of_either", "orpo", "tags", "classes_gpt2", "classes_gemma3", "dpo_experts")),
    (3, ("gkd_of_student", "simpo", "kto_precomputed")),
    (3, ("tpo",)),
]
if os.environ.get("BURST_SOAK"):  # what is made from a configuration has other weights with ZeRO 3
    DRAWN = {
        "tpo",
        "dpo_experts",
        "sft_experts",
        "swift_experts",
        "dpo_patches",
        "dpo_images",
        "classes_gpt2",
        "classes_gemma3",
    }
    OTHERS = [(n, tuple(name for name in CASES if name not in (DRAWN if n == 3 else {"tpo"}))) for n in range(4)]
    OTHERS += [(n, ("tpo",)) for n in range(4)]


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        pytest.param(Layout(2, 2, 0), FIRST, id="zero0"),
        pytest.param(Layout(2, 2, 3), ("dpo_precomputed_lora",), id="zero3"),
        *(
            pytest.param(Layout(2, 2, n), names, id=f"zero{n}_{names[0]}", marks=pytest.mark.slow)
            for n, names in OTHERS
        ),
        pytest.param(Layout(4, 4, 3), QUICK, id="four_zero3", marks=pytest.mark.slow),
        pytest.param(Layout(4, 2, 2), WITHOUT_PEERS, id="rings_zero2", marks=pytest.mark.slow),
        pytest.param(Layout(4, 2, 3), WITHOUT_PEERS, id="rings_zero3", marks=pytest.mark.slow),
    ],
)
def test_training_and_evaluation_equal_one_rank(directory: str, layout: Layout, names: Sequence[str]) -> None:
    cases = [CASES[name] for name in names]
    truth = on_one_rank(names, directory, layout.ranks // layout.ring)
    for on_rank in run_ranks(train_all, layout.ranks, cases, directory, layout, timeout_s=600.0):
        for outcome, right in zip(on_rank, truth, strict=True):
            check(outcome, right, layout)


def test_cases_say_something(directory: str) -> None:
    """References differ from policies, and no gradient is zero."""
    for name, outcome in zip(FIRST, on_one_rank(FIRST, directory, 1), strict=True):
        assert all(torch.any(x != 0) for x in outcome.grads.values()), name
        for margin in (entry["rewards/margins"] for entry in outcome.logged if "rewards/margins" in entry):
            assert abs(margin) > 0.01, name


def _classify(rank: int, directory: str) -> tuple[str, list[torch.Size], float, float]:
    """Return the refusal of a batch that was cut, sizes of whole states, and the losses on the ring and without."""
    burst.install()
    model = read(directory, "classes").eval()
    batch = {"input_ids": torch.arange(2, 18).view(2, 8), "labels": torch.tensor([0, 1])}
    with torch.no_grad():
        alone = float(model(**batch).loss)
    engine = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "burst_attention": {"enabled": True},
            "bf16": {"enabled": False},
        },
    )[0]
    with pytest.raises(ValueError, match="in a classifier got a batch that was cut") as refused:
        engine(**burst.shard_batch({"input_ids": batch["input_ids"]}))
    engine.eval()
    states = engine(**batch, output_hidden_states=True, use_cache=False).hidden_states
    return str(refused.value), [each.shape for each in states], float(burst.eval_batch(batch, engine)), alone


def test_classifiers_return_whole_sequences_and_take_no_shards(directory: str) -> None:
    for refusal, sizes, loss, alone in run_ranks(_classify, 2, directory):
        assert "pass whole batches, without shard_batch" in refusal
        assert sizes == [torch.Size([2, 8, 32])] * 3
        assert loss == pytest.approx(alone, abs=1e-6)


@pytest.mark.slow
def test_ranks_distil_from_the_same_drawn_words(directory: str) -> None:
    """Each would draw its own, since its numbers are others."""
    case = Case("GKDTrainer", {"lmbda": 1.0, "max_new_tokens": 6}, **DISTILLED, changes=numbers_of_this_rank)
    (first,), (second,) = run_ranks(train_all, 2, [case], directory, Layout(2, 2, 2), timeout_s=300.0)
    assert [entry["loss"] for entry in first.logged if "loss" in entry][1] > 0.01
    for name, x in first.weights.items():
        assert torch.equal(x, second.weights[name]), name


def numbers_of_this_rank(trainer: Any) -> None:
    """Have random numbers begin at another place on every rank."""
    torch.manual_seed(trainer.args.process_index)


def five_rows(trainer: Any) -> None:
    """Have the second of two rings of two ranks evaluate one row, where it has batches of two."""
    trainer.eval_dataset = trainer.eval_dataset.select(range(5))
    trainer.compute_metrics = lambda found: {"rows": float(len(found.label_ids))}


@pytest.mark.slow
def test_classifiers_on_several_rings_evaluate_each_row_once(directory: str) -> None:
    case = Case("Trainer", home="transformers", model="classes", rows=classified, changes=five_rows)
    (truth,) = run_ranks(train_all, 1, [case], directory, Layout(ranks=2), timeout_s=200.0)[0]
    for (found,) in run_ranks(train_all, 4, [case], directory, Layout(4, 2, 0), timeout_s=200.0):
        for name in ("eval_loss", "eval_rows"):
            assert found.logged[-1][name] == pytest.approx(truth.logged[-1][name], rel=1e-5), name
