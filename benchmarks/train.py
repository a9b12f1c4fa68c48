"""Tokens per second, MFU and peak memory of the training examples, with and without context parallelism.

The same ranks train the same number of tokens in a step three times: each on a sequence of its own, all on one
sequence after the other, and all on a single sequence that is as many times longer as there are ranks. On this one
they also train with all that saves memory in this package, and by DeepSpeed's ALST; with and without offload, which
copies on CPUs as well. Memory is that of a turn that is not timed.

The ranks are processes of this machine, or those that torchrun started, on one node or on several:
`torchrun --nnodes 2 --nproc-per-node 8 ... -m benchmarks train`.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import RefusedError
from benchmarks.report.files import Recording, Row, default_path, load, under_torchrun
from benchmarks.train_ranks import EVERY_EXAMPLE, SAVING_MEMORY, WARM_UP, Example, Job, Trained, prepare, run_rank
from tests.support.processes import LINGER_S, launch
from tests.support.ranks import RankError, run_ranks

_TIMEOUT_S = 1800.0
_SIZES = {  # of an option: on CPUs, on GPUs, and what it is
    "seq": (2048, 16384, "tokens in a sequence without context parallelism"),
    "steps": (2, 10, "optimizer steps that are timed, per repeat"),
    "layers": (4, 16, "layers of the model"),
    "hidden": (256, 2048, "width of the model"),
    "heads": (8, 16, "query heads"),
    "kv_heads": (4, 8, "key/value heads"),
    "vocabulary": (1024, 1024, "tokens of the vocabulary, but of Megatron's"),
}
Train = Callable[[Example, Job], list[Trained]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add, names = parser.add_argument, [example.name.lower() for example in EVERY_EXAMPLE]
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if there are any")
    add("--ranks", type=int, metavar="N", default=0, help="0: one per GPU, 2 on CPUs, or those of torchrun")
    for name, (cpu, cuda, words) in _SIZES.items():
        words += f" (default: {cpu} on CPUs, {cuda} on GPUs)"
        add(f"--{name.replace('_', '-')}", type=int, metavar="N", default=argparse.SUPPRESS, help=words)
    add("--repeats", type=int, metavar="N", default=3, help="how often all is run, by turns")
    add("--examples", nargs="+", choices=names, default=names, help="which examples to run")
    add("--out", type=Path, metavar="FILE", help="of the result (default: in benchmarks/results)")
    add("--add", action="store_true", help="to the rows that the file has")


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    jobs = jobs_of(options)
    first, on_gpu = jobs[0], jobs[0].device == "cuda"
    examples = [example for example in EVERY_EXAMPLE if example.name.lower() in options.examples]
    there = [example for example in examples if example.absent(first) is None]
    prepare(first.device)
    if not on_gpu:  # once, before forking; where there are GPUs, a fork must not find them in use
        for module in (module for example in there for module in example.modules):
            importlib.import_module(module)
    torchrun = Torchrun(f"{', '.join(e.name for e in there)}, {jobs}") if under_torchrun() else None
    train, leads = (_forked, True) if torchrun is None else (torchrun.train, torchrun.rank == 0)
    settings = {"repeats": options.repeats, "steps": first.steps, "device": first.device, **first.shape}
    out = options.out or default_path("train" if first.nodes == 1 else f"train-{first.nodes}-nodes", on_gpu)
    recording = Recording("train", {**settings, "nodes": first.nodes}, out if leads else None, on_gpu)
    show = partial(print, flush=True) if leads else lambda _: None
    if leads and options.add and out.exists():
        recording.rows += load(out).rows
    recording.measure(partial(measure, there, jobs, options.repeats, train, show))
    recording.rows += [{"example": e.name, "absent": e.absent(first)} for e in examples if e not in there]
    if leads:
        print(*map(_line, recording.rows), sep="\n")
    recording.save()
    return 0


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Return what is trained: without and with context parallelism, and with it on longer sequences."""
    nodes, started = 1, 0
    if under_torchrun():
        started, per_node = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = started // per_node
        if nodes * per_node != started:
            raise RefusedError(f"{started} ranks, {per_node} of them on this node: start equally many on every node")
        if options.ranks not in (0, started):
            raise RefusedError(f"--ranks {options.ranks}: torchrun started {started}; leave --ranks out")
    gpus = torch.cuda.device_count() if options.device != "cpu" else 0
    if options.device == "cuda" and gpus == 0:
        raise RefusedError("--device cuda: torch sees no GPU here. Use --device cpu.")
    ranks = started or options.ranks or gpus or 2
    given = {name: getattr(options, name, usual[gpus > 0]) for name, usual in _SIZES.items()}
    for name, value in {**given, "ranks": ranks, "repeats": options.repeats}.items():
        if value < 1:
            raise RefusedError(f"--{name.replace('_', '-')}: got {value}, expected at least 1")
    if gpus and ranks > gpus * nodes:
        raise RefusedError(f"{ranks // nodes} ranks need a GPU each; {gpus} fit. Lower --ranks or take --device cpu.")
    if given["hidden"] % (2 * given["heads"]) or given["heads"] % given["kv_heads"]:
        heads = f"2 x --heads {given['heads']}, and that of --kv-heads {given['kv_heads']}"
        raise RefusedError(f"--hidden {given['hidden']} has to be a multiple of {heads}")
    if given["seq"] % (2 * ranks):
        raise RefusedError(f"--seq: got {given['seq']}, expected a multiple of 2 x ranks = {2 * ranks}, for Megatron")
    sizes = {"ranks": ranks, "nodes": nodes, "device": "cuda" if gpus else "cpu"}
    alone = Job(context_parallel_size=1, sequences=ranks, **sizes, **given)
    shared = replace(alone, context_parallel_size=ranks)
    return [alone, shared, replace(shared, seq=alone.seq * ranks, sequences=1)][: 1 if ranks == 1 else None]


def measure(
    examples: Sequence[Example], jobs: Sequence[Job], repeats: int, train: Train, show: Callable[[str], None]
) -> list[Row]:
    """Return the rows of all trainings, which take turns and each have new processes."""
    keys = [(e, job) for e in examples for job in (jobs[-1:] if e in SAVING_MEMORY else jobs)]
    held = {(e, job): train(e, replace(job, measures_memory=True, steps=1)) for e, job in keys}
    found: dict[tuple[Example, Job], list[list[Trained]]] = {key: [] for key in keys}
    for repeat in range(1, repeats + 1):
        for (example, job), each in found.items():
            each.append(train(example, job))
            show(f"{repeat}/{repeats}: {_line(row(example, job, each[-1:], held[example, job], None))}")
    peaks = [rank.peak_flops_per_s for each in found.values() for ranks in each for rank in ranks]
    peak = max(filter(None, peaks), default=None)  # the most of any rank, so that all figures are shares of the same
    return [row(*key, each, held[key], peak) for key, each in found.items()]


def _forked(example: Example, job: Job) -> list[Trained]:
    """Train on ranks that are forked from here; raises RankError if one fails."""
    if job.device == "cpu":
        return run_ranks(run_rank, job.ranks, example, job, timeout_s=_TIMEOUT_S)

    def on_gpu(rank: int) -> Trained:
        _join(rank, job, dist.FileStore(store, job.ranks))  # type: ignore[attr-defined]
        return run_rank(rank, example, job)

    with TemporaryDirectory() as directory:
        store = f"{directory}/store"
        return run_ranks(on_gpu, job.ranks, init=False, timeout_s=_TIMEOUT_S)


class Torchrun:
    """A process that torchrun started on one of several nodes: it forks a rank of each training and uses no GPU."""

    def __init__(self, plan: str) -> None:
        """Raise RefusedError unless `plan`, what will be trained in which order, is that of the first rank."""
        self._store, self.rank, self._ranks = next(dist.rendezvous("env://"))
        self._store.set_timeout(timedelta(seconds=_TIMEOUT_S))
        self._number = 0
        if self.rank == 0:
            self._store.set("bench train", plan)
        first = self._store.get("bench train").decode()
        if first != plan:
            advice = "have the same packages everywhere, and give all the same options"
            raise RefusedError(f"rank {self.rank} would train {plan}, and rank 0 {first}: {advice}")

    def train(self, example: Example, job: Job) -> list[Trained]:
        """Train; returns what all ranks measured, and raises RankError if this one's fails."""
        self._number += 1

        def train(_: int) -> list[Any]:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])  # a connection of the rank's own
            store = dist.PrefixStore(f"bench train {self._number}", dist.TCPStore(host, port, is_master=False))
            _join(self.rank, job, store)
            every = [None] * job.ranks
            dist.all_gather_object(every, run_rank(self.rank, example, job))
            store.set(f"done {self.rank}", "")
            with suppress(RuntimeError):  # others have died; no peer shall see a reset connection
                store.wait([f"done {rank}" for rank in range(job.ranks)], timedelta(seconds=LINGER_S))
            return every

        (outcome,) = launch(train, 1, (), lambda rank, directory: None, timeout_s=_TIMEOUT_S)
        if outcome.error is not None:
            raise RankError({self.rank: outcome.error}, self._ranks)
        return list(outcome.value)


def _join(rank: int, job: Job, store: dist.Store) -> None:
    """Make the default process group, on a device of this rank's own."""
    if job.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = timedelta(seconds=_TIMEOUT_S / 2)
    backend = "nccl" if job.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=job.ranks, timeout=timeout)


def tokens_per_s(job: Job, ranks: Sequence[Trained]) -> float:
    """Return the rate of all ranks: a step takes as long as its slowest rank, and the median of the steps counts."""
    return job.tokens_per_step / median(max(step) for step in zip(*(rank.steps_s for rank in ranks), strict=True))


def row(
    example: Example, job: Job, repeats: Sequence[Sequence[Trained]], held: Sequence[Trained], peak: float | None
) -> Row:
    """Return the row of one training, from what its ranks saw in each repeat and `held`, and a rank's `peak` FLOP/s.

    MFU counts 6 operations per token and parameter that multiplies, and 12 · layers · width · tokens for the scores
    and their use, of which a causal mask needs half: PaLM (arXiv 2204.02311), appendix B, there without the half.
    """
    rates = [tokens_per_s(job, ranks) for ranks in repeats]
    first, steps = [rank.seen for rank in repeats[0]], len(repeats[0][0].steps_s)
    flops = 6 * first[0].parameters + 6 * job.layers * job.hidden * job.seq
    sizes = ("ranks", "context_parallel_size", "seq", "tokens_per_step", *job.shape, "vocabulary")
    found: Row = {"example": example.name, **{name: getattr(job, name) for name in sizes}}
    found |= {"parameters": first[0].parameters, "kernel": first[0].kernel}
    found |= {"ring_bytes_per_step": sum(seen.ring_bytes for seen in first) // (WARM_UP + steps)}
    found |= {"tokens_per_s": median(rates), "tokens_per_s_min": min(rates), "tokens_per_s_max": max(rates)}
    found |= {"mfu": None if peak is None else median(rates) * flops / (job.ranks * peak), "peak_flops_per_s": peak}
    found |= {"peak_bytes": max(rank.peak_bytes for rank in held), "losses": first[0].losses}
    return found | {"repeats": len(repeats), "steps": steps, "tokens_per_s_by_turn": rates}


def _line(row: Row) -> str:
    if "absent" in row:
        return f"{row['example']} absent: {row['absent']}"
    rates = f"{row['tokens_per_s']:,.0f} tokens/s ({row['tokens_per_s_min']:,.0f} .. {row['tokens_per_s_max']:,.0f})"
    mfu = "" if row["mfu"] is None else f", MFU {row['mfu']:.1%}"
    memory = f", {row['peak_bytes'] / 1e6:,.0f} MB per rank"
    return f"{row['example']:<13} CP {row['context_parallel_size']}, {row['seq']:,} tokens: {rates}{mfu}{memory}"
