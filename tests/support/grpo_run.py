"""TRL's GRPOTrainer and RLOOTrainer on a tiny model, configured as in TRL's own tests, with or without folding."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

import burst_plugin.deepspeed
from burst_plugin import ContextParallel
from burst_plugin.huggingface import fold_rollouts
from tests.support.deepspeed_run import VOCAB

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # about rollout_func

GENERATIONS, PROMPTS = 4, 2  # of a step
WORDS = [f"w{number}" for number in range(VOCAB)]

QWEN2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


@dataclass
class Outcome:
    """What Trainer logged of every step, gradients of the first one, the weights, and a loss on other prompts."""

    losses: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    eval_loss: float = 0.0


def save_model(directory: Path, kind: type[PreTrainedConfig] = transformers.Qwen2Config, **fields: Any) -> str:
    """Write a tiny model down, a Qwen2, as TRL's tests have one, or one of another kind, and return where."""
    torch.manual_seed(0)
    config = kind(
        **QWEN2,
        **fields,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return that of texts w5 w2 w7 ..."""
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")


def prompts(seed: int) -> Dataset:
    """Prompts of unlike lengths, so that some are padded."""
    draw = torch.Generator().manual_seed(seed)
    lengths = [11, 5, 17, 8, 3, 14]
    ids = [torch.randint(2, VOCAB, (length,), generator=draw).tolist() for length in lengths]
    return Dataset.from_dict({"prompt": [" ".join(WORDS[each] for each in row) for row in ids]})


def drawn_completions(texts: list[str], trainer: Any) -> dict[str, Any]:
    """Stand in for generation: completions by prompt, by their number among its completions, and by the step."""
    prompt_ids = [trainer.processing_class(text)["input_ids"] for text in texts]
    return {"prompt_ids": prompt_ids, "completion_ids": _drawn(prompt_ids, trainer), "logprobs": None}


def _drawn(prompt_ids: list[list[int]], trainer: Any) -> list[list[int]]:
    completion_ids = []
    for number, ids in enumerate(prompt_ids, trainer.accelerator.process_index * len(prompt_ids)):
        draw = torch.Generator().manual_seed(sum(ids) * 100 + number % GENERATIONS * 10 + trainer.state.global_step)
        length = int(torch.randint(1, 9, (1,), generator=draw))
        completion_ids.append(torch.randint(1, VOCAB, (length,), generator=draw).tolist())
    return completion_ids


class DrawsCompletions(RLOOTrainer):
    """RLOOTrainer with such completions, since it takes no function for them."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], *others: Any) -> list[list[int]]:
        return _drawn(prompt_ids, self)


def share_of_even_words(completion_ids: list[list[int]], **others: Any) -> list[float]:
    """Return a reward that can be checked."""
    return [sum(each % 2 == 0 for each in ids) / len(ids) for ids in completion_ids]


class NotesGradients(TrainerCallback):
    """Keeps the gradients of the first step."""

    def __init__(self, grads: dict[str, torch.Tensor]) -> None:
        self.grads = grads

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        if not self.grads:
            self.grads |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def make_trainer(
    directory: str, ranks: int, *, generates: bool = False, leaves_one_out: bool = False, **options: Any
) -> GRPOTrainer | RLOOTrainer:
    """Return a trainer, RLOOTrainer if it `leaves_one_out`; each of `ranks` has its part of a step's completions."""
    rows = GENERATIONS * PROMPTS // ranks
    settings: dict[str, Any] = {
        "output_dir": f"{directory}/run",
        "learning_rate": 0.05,
        "optim": "sgd",  # without clipping, so that a wrong scale of gradients shows
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": rows,
        "num_generations": GENERATIONS,
        "max_completion_length": 8,
        "max_steps": 3,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": "deepspeed" not in options,
        "bf16": False,
        "dataloader_num_workers": 0,
    }
    given = {
        "model": directory,
        "reward_funcs": share_of_even_words,
        "train_dataset": prompts(0),
        "eval_dataset": prompts(1),
        "processing_class": tokenizer(),
    }
    if leaves_one_out:
        return DrawsCompletions(args=RLOOConfig(**{**settings, **options}), **given)
    rollouts = None if generates else drawn_completions
    return GRPOTrainer(args=GRPOConfig(**{**settings, **options}), **given, rollout_func=rollouts)


def train(directory: str, ranks: int, cp: ContextParallel | None, **options: Any) -> Outcome:
    """Train and evaluate, with rollouts folded over `cp` if there is one."""
    found = Outcome()
    if "deepspeed" in options:
        burst_plugin.deepspeed.install()  # for DeepSpeed without a GPU
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    with redirect_stdout(io.StringIO()):  # which has a line for every step
        trainer = make_trainer(directory, ranks, **options)
        if cp is not None:
            assert fold_rollouts(trainer, cp) is trainer
        trainer.add_callback(NotesGradients(found.grads))
        trainer.train()
        found.eval_loss = trainer.evaluate()["eval_loss"]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    found.losses, found.entropies = ([entry[name] for entry in logged] for name in ("loss", "entropy"))
    for name, x in trainer.accelerator.unwrap_model(trainer.model).named_parameters():
        with deepspeed.zero.GatheredParameters([x], enabled=hasattr(x, "ds_id")):
            found.weights[name] = x.detach().clone()
    return found
