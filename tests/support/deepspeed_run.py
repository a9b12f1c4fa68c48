"""A tiny transformers model trained by DeepSpeed on several ranks, and the same by plain PyTorch on one, for parity.

Every rank of an initialised gloo process group calls `train(run, batches)`; `reference(run, batches)` needs no group.
Both give the mean loss of every step and every parameter's gradient, and its change by SGD steps.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from transformers import AutoModelForCausalLM, PretrainedConfig

import burst_plugin.deepspeed as burst

Batch = dict[str, torch.Tensor]

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled at first use; gloo does without
VOCAB = 96
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def quiet_ranks() -> Iterator[None]:
    """Ranks that a test forks keep their warnings, which are many, to themselves; other tests' are as usual."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    yield
    logging.disable(before)


def llama(**changes: Any) -> PretrainedConfig:
    """A Llama of two layers, with weights large enough that a wrong token order is plain to see."""
    return transformers.LlamaConfig(**{**SHAPE, **changes})


@dataclass(frozen=True)
class Run:
    """What is trained, and how DeepSpeed is told to.

    steps: optimizer steps, each on `accumulation` batches; config: more of DeepSpeed's configuration.
    """

    model: PretrainedConfig = field(default_factory=llama)
    stage: int = 0
    cp: int = 2
    steps: int = 1
    accumulation: int = 1
    lr: float = 1.0
    checkpointing: bool = False
    block: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], Any] | None = None
    """Changes the model, such as freezing parameters or adding LoRA, on every rank in the same way."""


@dataclass(frozen=True)
class Result:
    """Losses by step; gradients of the first step, and the change of every parameter, in float32 on the CPU."""

    losses: list[float]
    grads: dict[str, torch.Tensor]
    changes: dict[str, torch.Tensor]


def build(run: Run, *, attention: str = "eager", dtype: torch.dtype = torch.float32) -> Any:
    """The model, the same on every rank."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(run.model), attn_implementation=attention, dtype=dtype)
    if run.prepare is not None:
        torch.manual_seed(1)
        model = run.prepare(model) or model
    if run.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": run.stage == 3})
    return model.train()


def draw(count: int, *, rows: int = 2, length: int = 32, seed: int = 0) -> list[Batch]:
    """Batches with uneven labels: -100 at random, and at both ends, which zigzag gives to rank 0."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        ids = torch.randint(1, VOCAB, (rows, length), generator=generator)
        hidden = torch.rand(ids.shape, generator=generator) < torch.linspace(0.1, 0.7, length)
        hidden[:, : length // 8 + 1] = hidden[:, -length // 8 - 1 :] = True
        batches.append({"input_ids": ids, "labels": ids.masked_fill(hidden, -100)})
    return batches


def configuration(run: Run, micro_batch_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration of a run."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": run.accumulation,
        "zero_optimization": {"stage": run.stage, **run.config.get("zero_optimization", {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "burst_attention": {"enabled": True, "context_parallel_size": run.cp, **run.block},
        **{name: value for name, value in run.config.items() if name != "zero_optimization"},
    }


def start(run: Run, micro_batch_size: int, *, plain: bool = False) -> Any:
    """The engine of a run; its model has been given `attn_implementation="burst"` by the plugin, unless `plain`."""
    burst.install()
    model = build(run)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = configuration(run, micro_batch_size)
    if plain:
        del config["burst_attention"]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(trained, lr=run.lr), model_parameters=trained, config=config
    )
    return engine


def stop(engine: Any) -> None:
    """Take the engine down, so that the same processes can start another."""
    engine.destroy()


def train(run: Run, batches: Sequence[Batch]) -> Result:
    """`run.steps` steps on `batches`, whose rows are split over data-parallel ranks; the model computes the loss.

    The loss is one mean over all tokens of a step: `valid_tokens` of all its micro-batches.
    """
    data_parallel = dist.get_world_size() // run.cp
    rows = len(batches[0]["input_ids"]) // data_parallel
    engine = start(run, rows)
    strategy = burst.context().strategy
    assert all(getattr(strategy, name, value) == value for name, value in run.block.items()), "the block is obeyed"
    before = _parameters(engine)
    losses, grads = [], {}
    mine = [_rows(batch, dist.get_rank() // run.cp, rows) for batch in batches]
    for step in range(run.steps):
        shards = [burst.shard_batch(mine[step * run.accumulation + i]) for i in range(run.accumulation)]
        count = burst.valid_tokens(*(shard["burst"] for shard in shards))
        losses.append(0.0)
        for local in shards:
            output = engine(**{name: x for name, x in local.items() if name != "labels"}, use_cache=False)
            loss = burst.token_mean_loss(output.logits, local["shift_labels"], valid_tokens=count)
            engine.backward(loss, scale_wrt_gas=False)
            losses[-1] += float(loss.detach())
            if step == 0 and engine.is_gradient_accumulation_boundary():
                grads = gradients(engine)
            engine.step()
    after = _parameters(engine)
    stop(engine)
    return Result(losses, grads, {name: after[name] - before[name] for name in after})


def train_unmodified(run: Run, batches: Sequence[Batch], *, plain: bool = False) -> Result:
    """A step on whole batches by a script that knows of no ring; with `plain` there is none, nor the block.

    Losses are those that this rank saw, one for each micro-batch.
    """
    ring = 1 if plain else run.cp
    rows = len(batches[0]["input_ids"]) * ring // dist.get_world_size()
    engine = start(run, rows, plain=plain)
    losses, grads = [], {}
    for batch in batches[: run.accumulation]:
        loss = engine(**_rows(batch, dist.get_rank() // ring, rows), use_cache=False).loss
        engine.backward(loss)
        losses.append(float(loss.detach()))
        if engine.is_gradient_accumulation_boundary():
            grads = gradients(engine)
        engine.step()
    stop(engine)
    return Result(losses, grads, {})


def reference(run: Run, batches: Sequence[Batch], *, attention: str = "eager") -> Result:
    """The same on one rank in plain PyTorch."""
    model = build(run, attention=attention)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    losses, grads = [], {}
    for step in range(run.steps):
        micro = batches[step * run.accumulation : (step + 1) * run.accumulation]
        count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro)
        losses.append(0.0)
        for batch in micro:
            loss = model(**batch, num_items_in_batch=count, use_cache=False).loss
            loss.backward()
            losses[-1] += float(loss.detach())
        if step == 0:
            grads = {name: parameter.grad.clone() for name, parameter in trained.items()}
        clipping = run.config.get("gradient_clipping")
        if clipping:
            torch.nn.utils.clip_grad_norm_(list(trained.values()), clipping)
        with torch.no_grad():
            for parameter in trained.values():
                parameter -= run.lr * parameter.grad
                parameter.grad = None
    return Result(losses, grads, {name: trained[name].detach() - before[name] for name in trained})


def worst(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error of any tensor, and its name."""
    assert found.keys() == truth.keys()
    errors = {name: _relative(found[name].float(), truth[name].float()) for name in truth}
    name = max(errors, key=lambda each: errors[each])
    return errors[name], name


def _relative(x: torch.Tensor, truth: torch.Tensor) -> float:
    scale = float(truth.norm())
    return float((x - truth).norm()) / scale if scale else float(x.norm())


def _rows(batch: Batch, index: int, rows: int) -> Batch:
    return {name: x[index * rows : (index + 1) * rows] for name, x in batch.items()}


def _named(engine: Any) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in engine.module.named_parameters() if parameter.requires_grad}


def _parameters(engine: Any) -> dict[str, torch.Tensor]:
    """The weights that the optimizer works on, in float32 also where the model's are not."""
    found = {}
    for name, parameter in _named(engine).items():
        master = safe_get_full_fp32_param(parameter)
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = (parameter if master is None else master).detach().float().cpu().clone()
    return found


def gradients(engine: Any) -> dict[str, torch.Tensor]:
    """The gradients of all parameters that are trained, whole, in float32 on the CPU."""
    return {name: _grad(parameter) for name, parameter in _named(engine).items()}


def _grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    found = safe_get_full_grad(parameter)
    return (parameter.grad if found is None else found).detach().float().cpu().clone()
