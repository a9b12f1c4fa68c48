"""What every rank of `bench train` does: the training step of an example, on made-up tokens, timed."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.flops import cpu_peak_flops_per_s, gpu_peak_flops_per_s
from benchmarks.peak_memory import PeakMemory
from benchmarks.results import ROOT

EXAMPLES = ROOT / "examples"
VOCABULARY = 1024
WARM_UP = 1  # steps that are not timed; the clock starts when they end


@dataclass(frozen=True)
class Model:
    """A GPT's shape, the same in every example."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int


@dataclass(frozen=True)
class Job:
    """One training: `ranks` ranks, of which `context_parallel_size` share a sequence of `seq` tokens.

    sequences: of a step, on all ranks; steps: those that are timed; device: "cpu" or "cuda".
    """

    ranks: int
    context_parallel_size: int
    seq: int
    sequences: int
    steps: int
    device: str
    model: Model

    @property
    def microbatches(self) -> int:
        """Sequences that a rank works on, or takes part in, one after the other, in a step."""
        return self.sequences * self.context_parallel_size // self.ranks

    @property
    def tokens_per_step(self) -> int:
        return self.seq * self.sequences


@dataclass(frozen=True)
class Trained:
    """What one rank saw.

    steps_s: by step; peak_bytes: beyond what it held before the model was built; parameters: without the table of
    input embeddings; peak_flops_per_s: of its device, measured on CPUs. None is what is not known.
    """

    steps_s: list[float]
    peak_bytes: int | None
    parameters: int
    peak_flops_per_s: float | None


@dataclass(frozen=True)
class Example:
    """A training example: the packages that it needs, the modules that take time to import, and its rank's work.

    `train(job, step_ended)` trains WARM_UP + job.steps steps, calls `step_ended` after each, and returns the number
    of parameters.
    """

    name: str
    packages: tuple[str, ...]
    modules: tuple[str, ...]
    train: Callable[[Job, Callable[[], None]], int]

    def absent(self) -> str | None:
        """Why it cannot run here."""
        missing = [name for name in self.packages if importlib.util.find_spec(name.split(".")[0]) is None]
        return f"not installed: {', '.join(missing)}" if missing else None


def run_rank(rank: int, example: Example, job: Job) -> Trained:
    """Train, in a process that has joined its group, and measure."""
    torch.set_num_threads(max(1, _cores() // job.ranks))
    for module in example.modules:
        importlib.import_module(module)
    ends = []

    def step_ended() -> None:
        if job.device == "cuda":
            torch.cuda.synchronize()
        ends.append(time.perf_counter())

    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), PeakMemory(_device(job)) as peak:
        parameters = example.train(job, step_ended)
    steps_s = [stop - start for start, stop in pairwise(ends)]
    dist.barrier()  # all multiply at once, as they trained
    gpu = torch.cuda.get_device_name() if job.device == "cuda" else None
    peak_flops_per_s = cpu_peak_flops_per_s() if gpu is None else gpu_peak_flops_per_s(gpu)
    return Trained(steps_s, peak.nbytes, parameters, peak_flops_per_s)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _device(job: Job) -> torch.device:
    return torch.device(job.device, torch.cuda.current_device()) if job.device == "cuda" else torch.device("cpu")


def prepare(device: str) -> None:
    """Before the ranks are forked, or in each of them: quiet libraries, where the examples are, memory kept."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ.update(DS_LOG_LEVEL="error", CUDA_DEVICE_MAX_CONNECTIONS="1")
    for folder in (EXAMPLES, EXAMPLES / "deepspeed"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    if device == "cpu":
        os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
        _keep_memory()


# ----------------------------------------------------------------------------------------------------------- Megatron


def train_megatron(job: Job, step_ended: Callable[[], None]) -> int:
    """The quickstart's model and step. Without context parallelism attention is the same kernel on one rank:
    Megatron's own writes out every score, which would not compare."""
    if job.device == "cpu":
        from burst_plugin.megatron import cpu

        cpu.enable(force=True)
    import quickstart_train as example
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settings, name = _quickstart_settings(job), "burst" if job.context_parallel_size > 1 else "reference"
    if name == "burst":
        example.use_burst(settings)
    model = example.build_model(settings, name)
    if name == "reference":
        for layer in model.modules():
            if hasattr(layer, "core_attention"):
                layer.core_attention = _OneRank()
    bf16 = job.device == "cuda"
    options = OptimizerConfig(
        optimizer="adam", lr=1e-4, clip_grad=1.0, bf16=bf16, params_dtype=torch.bfloat16 if bf16 else torch.float32
    )
    optimizer = get_megatron_optimizer(options, [model])
    batches = _batches(job.seq)
    for _ in range(WARM_UP + job.steps):
        example.train_step(settings, model, optimizer, batches, job.microbatches)
        step_ended()
    return _multiplying(model)


def _quickstart_settings(job: Job) -> Any:
    from quickstart_settings import Settings

    return Settings(
        steps=job.steps,
        seq_length=job.seq,
        ranks=job.ranks,
        nodes=1,
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

        self._alone = ContextParallel(None)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """q [S, B, H, D], k and v alike -> [S, B, H · D], causal."""
        from burst_plugin import burst_attention

        out = burst_attention(*(x.transpose(0, 1) for x in (query, key, value)), self._alone)
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


def train_deepspeed(job: Job, step_ended: Callable[[], None]) -> int:
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
    parameters = _multiplying(model)
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=_samples(job, (WARM_UP + job.steps) * job.sequences),
        config=config,
    )
    example.train(engine, _noted(loader, job.microbatches, step_ended))
    return parameters


def _samples(job: Job, count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCABULARY, (count, job.seq), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def _noted(loader: Iterable[Any], microbatches: int, step_ended: Callable[[], None]) -> Iterator[Any]:
    """The batches of a loader; when all of a step have been worked on, `step_ended` is called."""
    for number, batch in enumerate(loader, 1):
        yield batch
        if number % microbatches == 0:
            step_ended()


# ------------------------------------------------------------------------------------------------------------- memory


def _multiplying(model: nn.Module) -> int:
    """The number of parameters, without the table of input embeddings, which is only looked up in."""
    return sum(parameter.numel() for name, parameter in model.named_parameters() if "embed" not in name)


def _keep_memory() -> None:
    """Have glibc keep what is freed, as the quickstart has. It would hand large tensors back to the system each time
    and clear their pages again, which costs longer sequences, with larger tensors, more."""
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_max, 0)


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
