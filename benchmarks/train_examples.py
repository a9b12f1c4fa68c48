"""The training examples of this repository, trained on made-up tokens."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.train_ranks import EXAMPLES, WARM_UP, Example, Job, Seen, multiplying, ring_bytes

__all__ = ["EVERY_EXAMPLE", "VOCABULARY", "noted"]

VOCABULARY = 1024  # of the DeepSpeed example

# ----------------------------------------------------------------------------------------------------------- Megatron


def train_megatron(job: Job, step_ended: Callable[[], None]) -> Seen:
    """The quickstart's model and step. Without context parallelism attention is the same kernel on one rank:
    Megatron's own writes out every score, which would not compare."""
    if job.device == "cpu":
        from burst_plugin.megatron import cpu

        cpu.enable(force=True)
    import quickstart_train as example
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settings, name = _quickstart_settings(job), "burst" if job.context_parallel_size > 1 else "reference"
    ring = example.use_burst(settings) if name == "burst" else None
    model = example.build_model(settings, name)
    alone = _OneRank()
    if ring is None:
        for layer in model.modules():
            if hasattr(layer, "core_attention"):
                layer.core_attention = alone
    bf16 = job.device == "cuda"
    options = OptimizerConfig(
        optimizer="adam", lr=1e-4, clip_grad=1.0, bf16=bf16, params_dtype=torch.bfloat16 if bf16 else torch.float32
    )
    optimizer = get_megatron_optimizer(options, [model])
    batches = _batches(job.seq)
    for _ in range(WARM_UP + job.steps):
        example.train_step(settings, model, optimizer, batches, job.microbatches)
        step_ended()
    context = alone.context if ring is None else ring.contexts()[0]
    return Seen(multiplying(model), context.describe()["kernel"], ring_bytes(context))


def _quickstart_settings(job: Job) -> Any:
    from quickstart_settings import Settings

    return Settings(
        steps=job.steps,
        seq_length=job.seq,
        ranks=job.ranks,
        nodes=job.nodes,
        layers=job.model.layers,
        hidden=job.model.hidden,
        heads=job.model.heads,
        kv_heads=job.model.kv_heads,
        learning_rate=1e-4,
        seed=1,
        backward="auto",
        data="",
        out="",
        reference=False,
        device=job.device,
    )


class _OneRank(nn.Module):
    """Megatron's core attention by burst attention's kernel, without a ring."""

    def __init__(self) -> None:
        super().__init__()
        from burst_plugin import ContextParallel

        self.context = ContextParallel(hierarchy=[1])

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """q [S, B, H, D], k and v alike -> [S, B, H · D], causal."""
        from burst_plugin import burst_attention

        out = burst_attention(*(x.transpose(0, 1) for x in (query, key, value)), self.context)
        return out.transpose(0, 1).flatten(2)


def _batches(seq: int) -> Iterator[dict[str, Tensor]]:
    """Batches of one sequence as Megatron's GPT dataset gives them, of tokens drawn at random."""
    generator = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(256, (1, seq + 1), generator=generator)
        places = torch.arange(seq).unsqueeze(0)
        yield {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "loss_mask": torch.ones(1, seq),
            "position_ids": places,
        }


# ---------------------------------------------------------------------------------------------------------- DeepSpeed


def train_deepspeed(job: Job, step_ended: Callable[[], None]) -> Seen:
    """The DeepSpeed example's Llama, configuration (ZeRO-3) and loop; without context parallelism as with `--off`."""
    import deepspeed

    import burst_plugin.deepspeed
    from burst_plugin.deepspeed import cpu

    if job.device == "cpu":
        cpu.enable()
    example = importlib.import_module("train")
    burst_plugin.deepspeed.install()
    config = json.loads((EXAMPLES / "deepspeed" / "ds_config.json").read_text())
    config["burst_attention"]["enabled"] = job.context_parallel_size > 1
    config["gradient_accumulation_steps"] = job.microbatches
    if job.device == "cuda":
        config["bf16"] = {"enabled": True}
    shape = vars(job.model)
    model = example.build_model(argparse.Namespace(vocabulary=VOCABULARY, seq_length=job.seq, **shape))
    parameters = multiplying(model)
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=_samples(job, (WARM_UP + job.steps) * job.sequences),
        config=config,
    )
    example.train(engine, noted(loader, job.microbatches, step_ended))
    if job.context_parallel_size == 1:
        return Seen(parameters, model.config._attn_implementation, 0)
    context = burst_plugin.deepspeed.context(engine)
    return Seen(parameters, context.describe()["kernel"], ring_bytes(context))


def _samples(job: Job, count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCABULARY, (count, job.seq), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def noted(loader: Iterable[Any], microbatches: int, step_ended: Callable[[], None]) -> Iterator[Any]:
    """The batches of a loader; when all of a step have been worked on, `step_ended` is called."""
    for number, batch in enumerate(loader, 1):
        yield batch
        if number % microbatches == 0:
            step_ended()


MEGATRON = Example(
    "Megatron",
    ("megatron.core",),
    ("megatron.core.models.gpt", "megatron.core.optimizer", "burst_plugin.megatron"),
    train_megatron,
)
DEEPSPEED = Example(
    "DeepSpeed",
    ("deepspeed", "transformers", "tokenizers"),
    ("deepspeed", "transformers.models.llama", "burst_plugin.deepspeed"),
    train_deepspeed,
)
EVERY_EXAMPLE = (MEGATRON, DEEPSPEED)
