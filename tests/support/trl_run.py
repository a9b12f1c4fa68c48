"""TRL's trainers on tiny models and made-up preferences: on one rank without DeepSpeed, and on rings."""

from __future__ import annotations

import importlib
import io
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import deepspeed
import torch
import torch.distributed as dist
import transformers
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset, disable_progress_bars, load_from_disk
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import burst_plugin.deepspeed as burst
from burst_plugin.deepspeed.adapter import installed
from tests.support import media
from tests.support.deepspeed_run import VOCAB, gradients
from tests.support.grpo_run import QWEN2, WORDS, NotesGradients, tokenizer
from tests.support.trainer_run import sent_bytes

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
disable_progress_bars()
transformers.utils.logging.disable_progress_bar()
_ACCUMULATION = 2  # micro-batches of each rank in a step
_ROWS = 2  # of a micro-batch
_ANSWERS = ("chosen_ids", "rejected_ids")
_MODELS: dict[str, tuple[Any, int]] = {
    "policy": (AutoModelForCausalLM, 2),
    "other": (AutoModelForCausalLM, 2),
    "reward": (AutoModelForSequenceClassification, 1),
    "classes": (AutoModelForSequenceClassification, 3),
    "tags": (AutoModelForTokenClassification, 3),
}


@dataclass(frozen=True)
class Case:
    """What is trained.

    trainer, home: the name of a trainer, and the module that has it.
    model: the name of one that `save_models` writes down.
    options: of the trainer's configuration; keywords: of the trainer itself, as functions of the model's directory.
    changes: is called with the trainer before it trains.
    """

    trainer: str
    options: dict[str, Any] = field(default_factory=dict)
    home: str = "trl"
    rows: Callable[[int], Dataset] | None = None
    keywords: dict[str, Callable[[str], Any]] = field(default_factory=dict)
    model: str = "policy"
    changes: Callable[[Any], None] | None = None


@dataclass(frozen=True)
class Layout:
    """How many ranks, how many in a ring, and which ZeRO stage; 0 in a ring: without DeepSpeed."""

    ranks: int = 1
    ring: int = 0
    stage: int = 0


@dataclass
class Outcome:
    """What Trainer logged, of steps and of the evaluation; gradients of the first step; the weights at the end."""

    logged: list[dict[str, float]] = field(default_factory=list)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    sent: int = 0


def save_models(directory: Path) -> str:
    """Write tiny models of each kind down, and return where."""
    for number, (name, (kind, labels)) in enumerate(_MODELS.items()):
        torch.manual_seed(number)
        config = transformers.Qwen2Config(
            **QWEN2,
            tie_word_embeddings=False,
            num_labels=labels,
            classifier_dropout=0.0,
        )
        kind.from_config(config).save_pretrained(directory / name)
    return str(directory)


def compared(seed: int) -> Dataset:
    """Preferences with a third answer to compare with."""
    return preferences(seed).add_column("reference", preferences(seed + 7)["chosen"])


def preferences_by_margins(seed: int) -> Dataset:
    """Preferences, and by how much each chosen answer is to be better."""
    rows = preferences(seed)
    return rows.add_column("margin", [0.25 * (number % 5) for number in range(len(rows))])


class WithImages:
    """A collator of preferences that puts an image before some of the prompts, of a model that `media` makes."""

    def __init__(self, family: str) -> None:
        self._of_patches = family.startswith("qwen")

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Return a batch of all chosen answers, then all rejected ones."""
        texts, is_answer, pixels = [], [], []
        for prompt, answer in ((row["prompt_ids"], row[name]) for name in _ANSWERS for row in examples):
            seed = sum(prompt)
            has_image = seed // 2 % 2  # of the rows to evaluate the last one, but not the first, which fills up
            before = [media.IMAGE] * 4 * has_image + prompt
            texts.append(torch.tensor(before + answer))
            is_answer.append(torch.tensor([0] * len(before) + [1] * len(answer)))
            if has_image:
                shape = (16, 96) if self._of_patches else (1, 3, 16, 16)
                pixels.append(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
        ids = pad_sequence(texts, batch_first=True)
        found = {
            "input_ids": ids,
            "attention_mask": (ids != 0).long(),
            "completion_mask": pad_sequence(is_answer, batch_first=True),
        }
        if self._of_patches:
            found["mm_token_type_ids"] = (ids == media.IMAGE).int()
        if pixels:
            found["pixel_values"] = torch.cat(pixels)
        if pixels and self._of_patches:
            found["image_grid_thw"] = torch.tensor([[1, 4, 4]] * len(pixels))
        return found


def answered(seed: int) -> Dataset:
    """Prompts with one answer each."""
    return preferences(seed).rename_column("chosen", "completion").remove_columns("rejected")


def talks(seed: int) -> Dataset:
    """Two questions and two answers in a row."""
    rows = []
    for one, other in zip(preferences(seed), preferences(seed + 5), strict=True):
        said = [(row["prompt"], row["chosen"].strip()) for row in (one, other)]
        turns = [text for pair in said for text in zip(("user", "assistant"), pair, strict=True)]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    return Dataset.from_list(rows)


def read(directory: str, name: str) -> Any:
    """Return one of the models that `save_models` has written down."""
    return _MODELS[name][0].from_pretrained(Path(directory, name), dtype=torch.float32)


def preferences(seed: int) -> Dataset:
    """Prompts with a chosen and a rejected answer, all of unlike lengths, so that most are padded."""
    draw = torch.Generator().manual_seed(seed)

    def words(low: int, high: int) -> str:
        count = int(torch.randint(low, high, (), generator=draw))
        return " ".join(WORDS[each] for each in torch.randint(2, VOCAB, (count,), generator=draw))

    rows = [{"prompt": words(3, 16), "chosen": " " + words(2, 14), "rejected": " " + words(2, 14)} for _ in range(16)]
    return Dataset.from_list(rows)


def judged(seed: int) -> Dataset:
    """Prompts with one answer each, of which the first of every two is a good one."""
    pairs = preferences(seed)
    names = [("chosen", True), ("rejected", False)]
    return Dataset.from_list(
        [{"prompt": row["prompt"], "completion": row[name], "label": good} for row in pairs for name, good in names]
    )


def classified(seed: int, of_tokens: bool = False) -> Dataset:
    """Texts of unlike lengths with a class of each, or of each of their tokens."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(16):
        length = int(torch.randint(5, 30, (), generator=draw))
        ids = torch.randint(2, VOCAB, (length,), generator=draw)
        labels = torch.randint(0, 3, (length,), generator=draw).tolist()
        rows.append({"input_ids": ids.tolist(), "labels": labels if of_tokens else labels[0]})
    return Dataset.from_list(rows)


def make_trainer(case: Case, directory: str, layout: Layout, output: str) -> Any:
    """Return the trainer of a case.

    It trains to the end of its samples, where the ranks of a ring begin anew with 3 of them to fill up their last
    batches, and evaluates 5. With several rings, whose last batches would be others than those of one rank, it
    evaluates 8, and has samples for all places, as has KTOTrainer, which pairs samples in advance.
    """
    rings = max(1, layout.ranks // max(1, layout.ring))
    repeated = 0 if case.trainer == "KTOTrainer" or rings > 1 else 3
    trained = 2 * _ROWS * _ACCUMULATION * rings - repeated
    numbers = [*range(trained), *([] if layout.ring else range(repeated))]
    home = importlib.import_module(case.home)
    settings: dict[str, Any] = {
        "output_dir": output,
        "learning_rate": 0.05,
        "optim": "sgd",  # without clipping, so that a wrong scale of gradients shows
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": _ROWS,
        "per_device_eval_batch_size": _ROWS,
        "gradient_accumulation_steps": _ACCUMULATION * rings,
        "max_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": not layout.ring,
        "bf16": False,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",
        "include_num_input_tokens_seen": "non_padding",
    }
    if layout.ring:
        settings |= _on_rings(layout)
    rows = case.rows or preferences
    if case.trainer == "Trainer":
        config, max_length = home.TrainingArguments, {}
    else:
        config, max_length = getattr(home, case.trainer.replace("Trainer", "Config")), {"max_length": 64}
    given = {name: make(directory) for name, make in case.keywords.items()}
    return getattr(home, case.trainer)(
        args=config(**{**settings, **max_length, **case.options}),
        train_dataset=_on_disk(rows(0).select(numbers), f"{output}/train"),
        eval_dataset=_on_disk(rows(1).select(range(8 if rings > 1 else 5)), f"{output}/eval"),
        **{
            "model": None if "model" in given else read(directory, case.model),
            "processing_class": tokenizer(),
            **given,
        },
    )


def _on_disk(rows: Dataset, path: str) -> Dataset:
    """Return rows that all ranks read from one place, beside which TRL keeps what it has computed for them."""
    if dist.get_rank() == 0:
        rows.save_to_disk(path)
    dist.barrier()
    return load_from_disk(path)


def _on_rings(layout: Layout) -> dict[str, Any]:
    """Settings of DeepSpeed and Accelerate."""
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {
        "gradient_accumulation_steps": _ACCUMULATION,
        "deepspeed": {
            **dict.fromkeys(batch, "auto"),
            "zero_optimization": {"stage": layout.stage, "stage3_param_persistence_threshold": 0},
            "zero_force_ds_cpu_optimizer": False,
            "burst_attention": {"enabled": True},
        },
        "parallelism_config": ParallelismConfig(
            sp_size=layout.ring, sp_backend="deepspeed", dp_shard_size=layout.ranks // layout.ring
        ),
    }


def train(case: Case, directory: str, layout: Layout) -> Outcome:
    """Train and evaluate."""
    found = Outcome()
    if layout.ring:
        burst.install()  # for DeepSpeed without a GPU
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    output = [f"{directory}/{uuid4()}"]  # of this run alone, so that nothing is taken from another
    dist.broadcast_object_list(output)
    with redirect_stdout(io.StringIO()), _noting_gradients(found.grads):  # the former has a line for every step
        trainer = make_trainer(case, directory, layout, output[0])
        if not layout.ring:
            trainer.add_callback(NotesGradients(found.grads))
        if case.changes is not None:
            case.changes(trainer)
        trainer.train()
        before = sent_bytes()
        trainer.evaluate()
        found.sent = sent_bytes() - before
    found.logged = trainer.state.log_history
    for name, x in trainer.accelerator.unwrap_model(trainer.model).named_parameters():
        with deepspeed.zero.GatheredParameters([x], enabled=hasattr(x, "ds_id")):
            found.weights[name] = x.detach().clone()
    if layout.ring:
        for engine in list(installed().sessions):  # type: ignore[union-attr]
            engine.destroy()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return found


def train_all(rank: int, cases: Sequence[Case], directory: str, layout: Layout) -> list[Outcome]:
    """Train one case after the other in the same processes, and check every loss on the way."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the model returns a loss without logits")
        return [train(case, directory, layout) for case in cases]


@contextmanager
def _noting_gradients(grads: dict[str, torch.Tensor]) -> Iterator[None]:
    """Keep the gradients of the first step of an engine in `grads`."""
    step = deepspeed.DeepSpeedEngine.step

    def noting(engine: Any, *args: Any, **kwargs: Any) -> Any:
        if not grads and engine.is_gradient_accumulation_boundary():
            grads.update(gradients(engine))
        return step(engine, *args, **kwargs)

    deepspeed.DeepSpeedEngine.step = noting
    try:
        yield
    finally:
        deepspeed.DeepSpeedEngine.step = step
