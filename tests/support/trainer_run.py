"""A tiny model trained by Hugging Face Trainer over DeepSpeed on several ranks, and on one rank without it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed as deepspeed_lib
import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

import burst_plugin.deepspeed as burst
from burst_plugin.deepspeed.adapter import installed
from tests.support.deepspeed_run import VOCAB, Batch, Run, build, draw


@dataclass(frozen=True)
class Setup:
    """What Trainer is given; `run` says which model, ZeRO stage and ring."""

    run: Run
    directory: str
    rows: int = 8
    held_out: int = 5  # rows to evaluate, which ranks do not share evenly
    length: int = 32
    max_steps: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    counts_rings: bool = True  # and tells Accelerate
    trainer: Callable[..., Any] | None = None
    """Makes the trainer of model, arguments and data; Trainer itself if None."""
    has_logits: bool = True  # else its loss is computed without them


class Rows(Dataset[dict[str, torch.Tensor]]):
    """One sample per row of a batch."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch["input_ids"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= len(self):
            raise IndexError(index)
        return {name: x[index] for name, x in self.batch.items()}


def arguments(setup: Setup, *, deepspeed: bool) -> TrainingArguments:
    """TrainingArguments of a run: SGD, so that a wrong scale of gradients shows."""
    more: dict[str, Any] = {}
    if deepspeed:
        more["deepspeed"] = {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": setup.run.stage},
            "zero_force_ds_cpu_optimizer": False,
            "burst_attention": {
                "enabled": True,
                "context_parallel_size": "auto",
                "backward": "auto",
                **setup.run.block,
            },
            **setup.run.config,
        }
        if dist.get_world_size() > 1:
            rings = dist.get_world_size() // setup.run.cp if setup.counts_rings else None
            more["parallelism_config"] = ParallelismConfig(
                sp_size=setup.run.cp, sp_backend="deepspeed", dp_shard_size=rings
            )
    return TrainingArguments(
        **{
            "output_dir": setup.directory,
            "max_steps": setup.max_steps,
            "per_device_train_batch_size": 1,
            "per_device_eval_batch_size": 2,
            "gradient_accumulation_steps": setup.run.accumulation,
            "learning_rate": setup.run.lr,
            "lr_scheduler_type": "constant",
            "optim": "sgd",
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": not deepspeed,
            "train_sampling_strategy": "sequential",
            "gradient_checkpointing": setup.run.checkpointing,
            **more,
            **setup.options,
        }
    )


def load(setup: Setup) -> Any:
    """The model from where `save_model` put it; with ZeRO 3 its parameters are cut up while they are read."""
    return AutoModelForCausalLM.from_pretrained(Path(setup.directory, "start"), attn_implementation="eager")


def save_model(setup: Setup) -> Setup:
    """Write the model of a run down, for every rank to read."""
    build(setup.run).save_pretrained(Path(setup.directory, "start"))
    return setup


@dataclass(frozen=True)
class Outcome:
    """Losses that Trainer logged, the loss and the logits of its evaluation, and what it did to the weights."""

    losses: list[float]
    eval_loss: float
    logits: torch.Tensor
    changes: dict[str, torch.Tensor]
    generated: torch.Tensor
    evaluated_on_ring: bool


def train(setup: Setup, *, deepspeed: bool, resume: bool = False) -> Outcome:
    """Train, evaluate, generate."""
    if deepspeed:
        burst.install()
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    data = Rows(draw(1, rows=setup.rows, length=setup.length)[0])
    held_out = Rows(draw(1, rows=setup.held_out, length=setup.length, seed=7)[0])
    args = arguments(setup, deepspeed=deepspeed)
    model = load(setup)
    before = weights(model)
    trainer = (setup.trainer or Trainer)(model=model, args=args, train_dataset=data, eval_dataset=held_out)
    trainer.train(resume_from_checkpoint=resume or None)
    sent = sent_bytes()
    prediction = trainer.predict(held_out)
    evaluated_on_ring = sent_bytes() > sent
    if evaluated_on_ring and not setup.has_logits:
        assert prediction.predictions is None
        trainer.compute_metrics = lambda prediction: {}
        with pytest.raises(ValueError, match="compute_metrics is not supported with a loss"):
            trainer.predict(held_out)
        trainer.compute_metrics = None
    of_losses_only = trainer.evaluate()["eval_loss"]
    assert of_losses_only == pytest.approx(prediction.metrics["test_loss"], rel=1e-6), "without logits the same"
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trainer.model.eval()
    with torch.no_grad():
        generated = trainer.model.generate(
            data.batch["input_ids"][:1, :8], max_new_tokens=8, do_sample=False, pad_token_id=0
        )
    after = weights(trainer.model)
    changes = {name: after[name] - before[name] for name in after}
    return Outcome(
        losses,
        prediction.metrics["test_loss"],
        torch.as_tensor(prediction.predictions) if setup.has_logits else torch.empty(0),
        changes,
        generated,
        evaluated_on_ring,
    )


def sent_bytes() -> int:
    """Bytes that have left this rank on the ring made last."""
    adapter = installed()
    if adapter is None or adapter.latest is None:
        return 0
    return sum(sum(kinds.values()) for kinds in adapter.latest.cp.traffic().values())


def weights(model: Any) -> dict[str, torch.Tensor]:
    """Whole ones in float32, also where ZeRO 3 has cut them up."""
    found = {}
    for name, x in model.named_parameters():
        with deepspeed_lib.zero.GatheredParameters([x], enabled=hasattr(x, "ds_id")):
            found[name] = x.detach().float().clone()
    return found


class Supervised:
    """TRL's SFTTrainer on the same samples, already tokenized."""

    loss_type = "nll"

    def __new__(cls, model: Any, args: TrainingArguments, train_dataset: Rows, eval_dataset: Rows) -> Any:
        from datasets import Dataset as Table
        from trl import SFTConfig, SFTTrainer

        def table(rows: Rows) -> Any:
            return Table.from_list([{name: x.tolist() for name, x in row.items()} for row in rows])

        fields = {
            **args.to_dict(),
            "loss_type": cls.loss_type,
            "max_length": None,
            "dataset_kwargs": {"skip_prepare_dataset": True},
        }
        fields |= {"deepspeed": args.deepspeed, "parallelism_config": args.parallelism_config}
        known = {field.name for field in dataclasses.fields(SFTConfig) if field.init}
        config = SFTConfig(**{name: value for name, value in fields.items() if name in known})
        words = {"<pad>": 0, **{f"w{number}": number for number in range(1, VOCAB)}}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="w1"
        )
        return SFTTrainer(
            model=model,
            args=config,
            train_dataset=table(train_dataset),
            eval_dataset=table(eval_dataset),
            processing_class=tokenizer,
        )


class SupervisedInChunks(Supervised):
    """With the loss that TRL had by default before 1.15, part by part from hidden states."""

    loss_type = "chunked_nll"
