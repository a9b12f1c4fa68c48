"""What every rank of `bench train` does: train an example, and measure time and memory."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.flops import cpu_peak_flops_per_s, gpu_peak_flops_per_s
from benchmarks.memory import PeakMemory, keep_freed_memory
from benchmarks.results import ROOT, cpus

EXAMPLES = ROOT / "examples"
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

    sequences: of a step, on all ranks; steps: those that are timed; device: "cpu" or "cuda"; nodes: machines.
    """

    ranks: int
    context_parallel_size: int
    seq: int
    sequences: int
    steps: int
    device: str
    model: Model
    nodes: int = 1

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes

    @property
    def microbatches(self) -> int:
        """Sequences that a rank works on, or takes part in, one after the other, in a step."""
        return self.sequences * self.context_parallel_size // self.ranks

    @property
    def tokens_per_step(self) -> int:
        return self.seq * self.sequences


@dataclass(frozen=True)
class Seen:
    """What a rank knows of its training: parameters, without the table of input embeddings, and of attention the
    kernel and how many bytes its ring has sent."""

    parameters: int
    kernel: str
    ring_bytes: int


@dataclass(frozen=True)
class Trained:
    """What one rank measured.

    steps_s: by step; peak_bytes: beyond what it held before the model was built; peak_flops_per_s: of its device,
    measured on CPUs. None is what is not known.
    """

    steps_s: list[float]
    peak_bytes: int | None
    peak_flops_per_s: float | None
    seen: Seen


@dataclass(frozen=True)
class Example:
    """A training example: the packages that it needs, the modules that take time to import, and its rank's work.

    `train(job, step_ended)` trains WARM_UP + job.steps steps and calls `step_ended` after each.
    """

    name: str
    packages: tuple[str, ...]
    modules: tuple[str, ...]
    train: Callable[[Job, Callable[[], None]], Seen]

    def absent(self) -> str | None:
        """Why it cannot run here."""
        missing = [name for name in self.packages if not _is_installed(name)]
        return f"not installed: {', '.join(missing)}" if missing else None


def _is_installed(name: str) -> bool:
    """Not just a folder of that name, such as that of an example."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # of what it is a part of
        return False
    return found is not None and found.origin is not None


def run_rank(rank: int, example: Example, job: Job) -> Trained:
    """Train, in a process that has joined its group, and measure."""
    torch.set_num_threads(max(1, len(cpus()) // job.ranks_per_node))
    for module in example.modules:
        importlib.import_module(module)
    ends = []

    def step_ended() -> None:
        if job.device == "cuda":
            torch.cuda.synchronize()
        ends.append(time.perf_counter())

    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), PeakMemory(_device(job)) as peak:
        seen = example.train(job, step_ended)
    steps_s = [stop - start for start, stop in pairwise(ends)]
    dist.barrier()  # all multiply at once, as they trained
    gpu = torch.cuda.get_device_name() if job.device == "cuda" else None
    peak_flops_per_s = cpu_peak_flops_per_s() if gpu is None else gpu_peak_flops_per_s(gpu)
    return Trained(steps_s, peak.nbytes, peak_flops_per_s, seen)


def _device(job: Job) -> torch.device:
    return torch.device(job.device, torch.cuda.current_device()) if job.device == "cuda" else torch.device("cpu")


def prepare(device: str) -> None:
    """Before the ranks are forked: quiet libraries, where the examples are, memory kept."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ.update(DS_LOG_LEVEL="error", CUDA_DEVICE_MAX_CONNECTIONS="1")
    for folder in (EXAMPLES, EXAMPLES / "deepspeed"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    if device == "cpu":
        os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
        keep_freed_memory()


def ring_bytes(context: Any) -> int:
    """What this rank has sent around the ring."""
    return sum(sum(kinds.values()) for kinds in context.traffic().values())


def multiplying(model: nn.Module) -> int:
    """The number of parameters, without the table of input embeddings, which is only looked up in."""
    return sum(parameter.numel() for name, parameter in model.named_parameters() if "embed" not in name)
