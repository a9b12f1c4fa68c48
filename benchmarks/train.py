"""Tokens per second, MFU and peak memory of the training examples, with and without context parallelism.

The same ranks train the same number of tokens in a step three times: each on a sequence of its own, all on one
sequence after the other, and all on a single sequence that is as many times longer as there are ranks.

The ranks are processes of this machine, or those that torchrun started, on one node or on several:
`torchrun --nnodes 2 --nproc-per-node 8 ... -m benchmarks train`.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.flops import train_flops_per_token
from benchmarks.limits import RefusedError, check_ranks
from benchmarks.results import Watch, default_path, save, under_torchrun
from benchmarks.train_examples import EVERY_EXAMPLE, VOCABULARY
from benchmarks.train_processes import OfThisMachine, OfTorchrun, Starter
from benchmarks.train_ranks import WARM_UP, Example, Job, Model, Trained, prepare

_LIBRARIES_BYTES = 5e8
_DEFAULTS = {
    "cpu": {"seq": 2048, "steps": 2, "layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4},
    "cuda": {"seq": 16384, "steps": 10, "layers": 16, "hidden": 2048, "heads": 16, "kv_heads": 8},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def count(name: str, words: str) -> None:
        cpu, cuda = (_DEFAULTS[device][name.replace("-", "_")] for device in ("cpu", "cuda"))
        words += f" (default: {cpu} on CPUs, {cuda} on GPUs)"
        parser.add_argument(f"--{name}", type=int, metavar="N", default=argparse.SUPPRESS, help=words)

    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if there are any"
    )
    ranks_help = "processes; 0: one per GPU, or 2 on CPUs; under torchrun those that it started"
    parser.add_argument("--ranks", type=int, metavar="N", default=0, help=ranks_help)
    count("seq", "tokens in a sequence without context parallelism")
    count("steps", "optimizer steps that are timed, per repeat")
    count("layers", "layers of the model")
    count("hidden", "width of the model")
    count("heads", "query heads")
    count("kv-heads", "key/value heads")
    parser.add_argument("--repeats", type=int, metavar="N", default=3, help="how often all is run, in turns")
    names = [example.name.lower() for example in EVERY_EXAMPLE]
    parser.add_argument("--examples", nargs="+", choices=names, default=names, help="which examples to run")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results there")


def run(options: argparse.Namespace) -> int:
    """Measure, print a table, save."""
    jobs = jobs_of(options)
    examples = [example for example in EVERY_EXAMPLE if example.name.lower() in options.examples]
    there = [example for example in examples if example.absent() is None]
    _check_memory(jobs)
    prepare(jobs[0].device)
    if jobs[0].device == "cpu":  # once, before forking; where there are GPUs, a fork must not find them in use
        for module in (module for example in there for module in example.modules):
            importlib.import_module(module)
    plan = f"{', '.join(example.name for example in there)}, {jobs}"
    starter = OfTorchrun(plan) if under_torchrun() else OfThisMachine()
    with Watch() as watch:
        measured = measure(there, jobs, options.repeats, starter)
    if not starter.leads:
        return 0
    peak = peak_flops_per_s(rank for repeats in measured.values() for ranks in repeats for rank in ranks)
    rows = [row(example, job, repeats, peak) for (example, job), repeats in measured.items()]
    rows += [{"example": example.name, "absent": example.absent()} for example in examples if example not in there]
    _print(rows)
    settings = {"repeats": options.repeats, "steps": jobs[0].steps, "device": jobs[0].device, **vars(jobs[0].model)}
    on_gpu, nodes = jobs[0].device == "cuda", jobs[0].nodes
    out = options.out or default_path("train" if nodes == 1 else f"train-{nodes}-nodes", on_gpu)
    save("train", {**settings, "nodes": nodes}, rows, watch.load, out, on_gpu=on_gpu)
    return 0


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """What is trained: without and with context parallelism, and with it on longer sequences.

    Raises:
        RefusedError: for sizes that do not go together, or more ranks on a machine than GPUs.
    """
    nodes, started = _torchrun_sizes() if under_torchrun() else (1, 0)
    if started and options.ranks not in (0, started):
        raise RefusedError(f"--ranks {options.ranks}: torchrun started {started}; leave --ranks out")
    gpus = torch.cuda.device_count() if options.device != "cpu" else 0
    if options.device == "cuda" and gpus == 0:
        raise RefusedError("--device cuda: torch sees no GPU here. Take --device cpu.")
    device = "cuda" if gpus > 0 else "cpu"
    ranks = started or options.ranks or (gpus if device == "cuda" else 2)
    given = {name: getattr(options, name, usual) for name, usual in _DEFAULTS[device].items()}
    for name, value in {**given, "ranks": ranks, "repeats": options.repeats}.items():
        if value < 1:
            raise RefusedError(f"--{name.replace('_', '-')}: got {value}, expected at least 1")
    if device == "cuda" and ranks > gpus * nodes:
        raise RefusedError(
            f"{ranks // nodes} ranks need a GPU each; {gpus} fit. Lower --ranks, or take --device cpu."
        )
    model = Model(**{name: given[name] for name in ("layers", "hidden", "heads", "kv_heads")})
    if model.hidden % (2 * model.heads) or model.heads % model.kv_heads:
        raise RefusedError(
            f"--hidden {model.hidden} has to be a multiple of 2 x --heads {model.heads}, and that of --kv-heads "
            f"{model.kv_heads}"
        )
    seq = given["seq"]
    if seq % (2 * ranks):
        raise RefusedError(f"--seq: got {seq}, expected a multiple of 2 x ranks = {2 * ranks}, for Megatron")
    alone = Job(ranks, 1, seq, ranks, given["steps"], device, model, nodes)
    if ranks == 1:
        return [alone]
    return [
        alone,
        replace(alone, context_parallel_size=ranks),
        replace(alone, context_parallel_size=ranks, seq=seq * ranks, sequences=1),
    ]


def rank_bytes(job: Job) -> int:
    """About what a rank needs: float32 weights, gradients and Adam's moments, activations, logits, libraries."""
    model = job.model
    parameters = 12 * model.layers * model.hidden**2 + 2 * VOCABULARY * model.hidden
    tokens, element_bytes = job.seq // job.context_parallel_size, 2 if job.device == "cuda" else 4
    activations = tokens * element_bytes * (20 * model.layers * model.hidden + 4 * VOCABULARY)
    return int(20 * parameters + activations + _LIBRARIES_BYTES)


def _check_memory(jobs: Sequence[Job]) -> None:
    if jobs[0].device == "cpu":
        check_ranks(jobs[0].ranks_per_node, max(map(rank_bytes, jobs)), "--ranks, --seq, --hidden or --layers")


def _torchrun_sizes() -> tuple[int, int]:
    """Nodes and ranks that torchrun started."""
    ranks, per_node = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if ranks % per_node:
        raise RefusedError(f"{ranks} ranks, {per_node} of them on this node: start equally many on every node")
    return ranks // per_node, ranks


def measure(
    examples: Sequence[Example], jobs: Sequence[Job], repeats: int, starter: Starter
) -> dict[tuple[Example, Job], list[Any]]:
    """What the ranks of each training saw, by repeat; all of them in turns, so that a slow minute hits all alike."""
    found: dict[tuple[Example, Job], list[Any]] = {(example, job): [] for example in examples for job in jobs}
    for repeat in range(1, repeats + 1):
        for (example, job), ranks in found.items():
            ranks.append(starter.train(example, job))
            if starter.leads:
                print(
                    f"{example.name}, CP {job.context_parallel_size}, {job.sequences} x {job.seq} tokens: "
                    f"{tokens_per_s(job, ranks[-1]):,.0f} tokens/s ({repeat}/{repeats})",
                    flush=True,
                )
    return found


# ------------------------------------------------------------------------------------------------------------ figures


def tokens_per_s(job: Job, ranks: Sequence[Trained]) -> float:
    """Of all ranks: a step takes as long as its slowest rank, and the middle one of the steps counts."""
    return job.tokens_per_step / median(max(step) for step in zip(*(rank.steps_s for rank in ranks), strict=True))


def peak_flops_per_s(ranks: Iterable[Trained]) -> float | None:
    """Of one rank: the most that any has seen, so that all figures are shares of the same; None if not known."""
    return max((rank.peak_flops_per_s for rank in ranks if rank.peak_flops_per_s is not None), default=None)


def row(example: Example, job: Job, repeats: Sequence[Sequence[Trained]], peak: float | None) -> dict[str, Any]:
    """The row of one training, from what its ranks saw in each repeat and the `peak` FLOP/s of a rank."""
    rates = [tokens_per_s(job, ranks) for ranks in repeats]
    first = [rank.seen for rank in repeats[0]]
    steps = WARM_UP + len(repeats[0][0].steps_s)
    flops = train_flops_per_token(
        parameters=first[0].parameters, layers=job.model.layers, width=job.model.hidden, seq=job.seq
    )
    return {
        "example": example.name,
        "ranks": job.ranks,
        "context_parallel_size": job.context_parallel_size,
        "seq": job.seq,
        "tokens_per_step": job.tokens_per_step,
        "parameters": first[0].parameters,
        "kernel": first[0].kernel,
        "ring_bytes_per_step": sum(seen.ring_bytes for seen in first) // steps,
        "tokens_per_s": median(rates),
        "tokens_per_s_min": min(rates),
        "tokens_per_s_max": max(rates),
        "mfu": None if peak is None else median(rates) * flops / (job.ranks * peak),
        "peak_flops_per_s": peak,
        "peak_bytes": _peak_bytes(repeats),
        "repeats": len(repeats),
        "steps": len(repeats[0][0].steps_s),
    }


def _peak_bytes(repeats: Sequence[Sequence[Trained]]) -> int | None:
    """The most of any rank, in the middle one of the repeats."""
    every = [[rank.peak_bytes for rank in ranks if rank.peak_bytes is not None] for ranks in repeats]
    return int(median(map(max, every))) if all(every) else None


def _print(rows: Sequence[dict[str, Any]]) -> None:
    columns = ("example", "CP", "tokens in a sequence", "tokens/s", "lowest", "highest", "MFU", "memory of a rank")
    table = Table(*columns, title="Training", title_justify="left")
    for row in rows:
        if "absent" in row:
            table.add_row(row["example"], "absent: " + row["absent"])
            continue
        rates = (f"{row[key]:,.0f}" for key in ("tokens_per_s", "tokens_per_s_min", "tokens_per_s_max"))
        mfu = "not known" if row["mfu"] is None else f"{row['mfu']:.1%}"
        sizes = (str(row["context_parallel_size"]), f"{row['seq']:,}")
        memory = "not known" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.0f} MB"
        table.add_row(row["example"], *sizes, *rates, mfu, memory)
    Console().print(table)
