"""Distributed attention, forward and backward: time, rate, share of the kernel's rate, memory.

It runs (`--on`) in `processes` of this machine over gloo, in those of `torchrun`, one per GPU where there are any
(`torchrun --nproc-per-node 8 -m benchmarks attention ...`), or as a `virtual` ring: all ranks in turn in this
process, on its GPU if it has one, with a copy in memory for every message.

`kernel_share` is the time of the one-rank kernel on the whole sequence, by as many copies at once as there are ranks,
divided by their number, over the time of the ring; in a virtual ring nothing is divided. Times are medians of the
slowest rank over rounds taken by turns.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from functools import partial
from math import comb, isnan
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks import RefusedError
from benchmarks.attention_ranks import KERNEL, KERNEL_ALONE, Measured, World, group_rank, measure
from benchmarks.contenders import CONTENDERS, Case, Contender
from benchmarks.contenders.burst import Burst
from benchmarks.report.files import Recording, Row, default_path, under_torchrun
from burst_plugin.sequence.layout import even_length
from tests.support.ranks import run_ranks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OURS = "burst"
OVER_KERNEL = 1.05  # times what the kernel takes on one rank, divided by the ranks
CHANCE = 0.05  # a claim fails by what is less likely by chance
WRONG = 0.05  # relative error, from which on no rounding explains it: bfloat16 gives up to 0.02
_TIMEOUT_S = 3600.0  # of one case, all rounds
_PROCESS_BYTES = 400 * 10**6  # of a rank that has computed nothing yet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add, names = parser.add_argument, [contender.name for contender in CONTENDERS]
    add("--seq", type=int, nargs="+", default=[8192], help="tokens of the whole sequence")
    add("--heads", type=int, default=8, help="query heads")
    add("--kv-heads", type=int, help="key and value heads; as many as query heads if not given")
    add("--head-dim", type=int, default=64)
    add("--dtype", nargs="+", choices=DTYPES, default=["float32"], metavar="TYPE")
    add("--mask", choices=("causal", "full"), default="causal")
    add("--on", choices=("processes", "torchrun", "virtual"), help="where the ranks are")
    add("--ranks", type=int, default=2, help="ranks; under torchrun as many as it started")
    add("--ranks-per-node", type=int, help="by default all, under torchrun those that it started on a node")
    add("--contenders", nargs="+", choices=[*names, "all"], default=[OURS], metavar="NAME")
    add("--rounds", type=int, default=5, help="measurements of each, by turns")
    add("--out", type=Path, metavar="FILE", help="of the result (default: in benchmarks/results)")
    parser.set_defaults(on="torchrun" if under_torchrun() else "processes")


def run(options: argparse.Namespace) -> int:
    """Measure, print and save; returns 1 if anything was computed wrong."""
    if options.on == "torchrun" and "WORLD_SIZE" not in os.environ:
        raise RefusedError("--on torchrun: there are no ranks; start it with torchrun -m benchmarks attention ...")
    cases = _cases(options)
    chosen = [c for c in CONTENDERS if c.name in options.contenders or "all" in options.contenders]
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # messages start before the kernels that hide them
    on_gpu, leads = options.on != "processes" and torch.cuda.is_available(), True
    if options.on == "torchrun" and on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    for case in () if on_gpu else cases:  # each process has the whole sequence, for the one-rank kernel
        whole_bytes = 40 * case.ranks * case.seq * case.head_dim * (case.q_heads + case.kv_heads)
        processes = {"virtual": 1, "torchrun": case.ranks_per_node, "processes": case.ranks}[options.on]
        fit = int(0.9 * psutil.virtual_memory().available) // (_PROCESS_BYTES + whole_bytes)
        if processes > fit:
            raise RefusedError(f"{processes} processes do not fit into memory, at most {fit} do; lower --seq")
    if options.on == "torchrun":
        dist.init_process_group("nccl" if on_gpu else "gloo")
        leads = dist.get_rank() == 0
    name = "attention" if options.on == "processes" else f"attention-{options.on}"
    out = (options.out or default_path(name, on_gpu)) if leads else None
    recording = Recording("attention", vars(options), out, on_gpu)
    for case in cases:
        rows = recording.measure(partial(_measure, case, chosen, options))
        if leads:
            print(*map(_line, rows), sep="\n", flush=True)
    if leads:
        print(*verdicts(recording.rows), sep="\n")
    recording.save()
    return int(any(row.get("wrong", False) for row in recording.rows))


def _cases(options: argparse.Namespace) -> list[Case]:
    if min(options.ranks, options.rounds, options.heads, options.head_dim, *options.seq) < 1:
        raise RefusedError("--ranks, --rounds, --heads, --head-dim and --seq have to be 1 or more")
    ranks = int(os.environ["WORLD_SIZE"]) if options.on == "torchrun" else options.ranks
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if options.on == "torchrun" else ranks
    per_node, kv_heads = options.ranks_per_node or local, options.kv_heads or options.heads
    if per_node < 1 or ranks % per_node:
        raise RefusedError(f"--ranks-per-node {per_node} does not divide {ranks} ranks")
    if options.heads % kv_heads:
        raise RefusedError(f"--heads {options.heads} is not a multiple of --kv-heads {kv_heads}")
    for seq in options.seq:
        if even_length(seq, ranks) != seq:
            raise RefusedError(f"--seq {seq} does not divide over {ranks} ranks; use {even_length(seq, ranks)}")
    sizes, causal = (options.heads, kv_heads, options.head_dim), options.mask == "causal"
    tokens = [(DTYPES[dtype], seq // ranks) for dtype in options.dtype for seq in options.seq]
    return [Case(ranks // per_node, per_node, seq, *sizes, dtype, causal) for dtype, seq in tokens]


def _measure(case: Case, chosen: Sequence[Contender], options: argparse.Namespace) -> list[Row]:
    """Return the rows of one case: of a contender its best configuration, or why it has none."""
    reasons = {c.name: _reason(c, case, options.on) for c in chosen}
    able = {c.name: c.configurations(case) for c in chosen if not reasons[c.name]}
    every: list[Any]
    if options.on == "virtual":  # the ring alone: nothing is exchanged inside nodes
        able = {name: found[:1] for name, found in able.items()}
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.set_num_threads(1)
        every = [measure(World(device), case, able, options.rounds, virtual=True)]
    elif options.on == "torchrun":
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, group_rank(dist.get_rank(), case, able, options.rounds))
    else:
        every = run_ranks(group_rank, case.ranks, case, able, options.rounds, timeout_s=_TIMEOUT_S)
    row = partial(row_of, case, every, options.on == "virtual")
    return [row(c.name, [each.name for each in able.get(c.name, ())]) | reasons[c.name] for c in chosen]


def _reason(contender: Contender, case: Case, on: str) -> dict[str, str]:
    """Return why a contender is not measured; empty if it is."""
    if on == "virtual" and not isinstance(contender, Burst):
        return {"refused": "a virtual ring is one of this project's"}
    if on == "torchrun" and torch.cuda.is_available() and not isinstance(contender, Burst):
        return {"refused": "other libraries run on CPUs here, on stand-ins for the GPU packages that they need"}
    return contender.reason(case)  # which tries imports in forked processes: not where a GPU is in use


def attention_flops(case: Case) -> float:
    """Count the operations of a forward pass as flash-attention does (arXiv 2307.08691, 4.1), but pairs exactly."""
    tokens = case.ranks * case.seq
    pairs = tokens * (tokens + 1) // 2 if case.causal else tokens * tokens
    return 4.0 * case.batch * case.q_heads * case.head_dim * pairs


def row_of(case: Case, each: Sequence[Measured], virtual: bool, contender: str, configurations: Sequence[str]) -> Row:
    """Return the row of a contender's best configuration, as all processes measured it; only the case if none."""
    row = {n: getattr(case, n) for n in ("ranks", "ranks_per_node", "q_heads", "kv_heads", "head_dim", "causal")}
    row |= {"seq": case.ranks * case.seq, "dtype": str(case.dtype).removeprefix("torch."), "contender": contender}
    if not configurations:
        return row
    times = each[0].times
    best = next(name for name in configurations if name in times)  # the others were slower
    error = max((measured.errors[best] for measured in each), key=lambda x: (isnan(x), x))  # NaN is the worst
    if not error <= WRONG:
        return row | {"refused": f"what it computed is wrong: relative error {error:.1e}", "wrong": True}
    mine, kernel = times[best], times[KERNEL]
    parts = 1 if virtual else case.ranks
    row |= _spread("forward_s", mine.forward_s) | _spread("backward_s", mine.backward_s)
    row |= _spread("both_s", mine.both_s) | {"virtual": virtual, "rounds": len(mine.both_s), "rounds_s": mine.both_s}
    row |= {"kernel": each[0].kernel, "kernel_s": median(kernel.both_s)}
    row |= {"kernel_alone_s": median(times.get(KERNEL_ALONE, kernel).both_s)}
    row |= _spread("kernel_share", [k / parts / m for k, m in zip(kernel.both_s, mine.both_s, strict=True)])
    row["flops_per_s"] = 3.5 * attention_flops(case) / row["both_s"]  # two matrix products, and five
    row["peak_bytes"] = max(measured.peaks[best] for measured in each)
    return row | {"error": error, "configuration": best}


def _spread(name: str, numbers: Sequence[float]) -> dict[str, float]:
    return {name: median(numbers), f"{name}_min": min(numbers), f"{name}_max": max(numbers)}


def _line(row: Row) -> str:
    what = f"{row['seq']:>7} tokens {row['dtype']:<8} {row['ranks']} ranks  {row['contender']:<20}"
    if "both_s" not in row:
        return f"{what} {'absent' if 'absent' in row else 'refused'}: {row.get('absent') or row['refused']}"
    return (
        f"{what} {row['both_s'] * 1e3:8.1f} ms ({row['forward_s'] * 1e3:.1f} + {row['backward_s'] * 1e3:.1f}), "
        f"{row['flops_per_s'] / 1e9:.0f} GFLOP/s, {row['kernel_share']:.3f} of {row['kernel']} "
        f"({row['kernel_share_min']:.3f} .. {row['kernel_share_max']:.3f}), "
        f"{row['peak_bytes'] / 1e6:.0f} MB, error {row['error']:.1e}"
    )


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the claims by case, near the kernel and behind no other library, each with its figures.

    All call the same kernel, so that rounds differ by more than contenders do: which is faster is told by a sign
    test, the probability that burst is slower in so many rounds or more if every round tosses a coin.
    """
    timed = [row for row in rows if "rounds_s" in row]
    for ours in (row for row in timed if row["contender"] == OURS):
        over, divided = 1 / ours["kernel_share"], "" if ours["virtual"] else " / ranks"
        verdict = "ok  " if over <= OVER_KERNEL else "FAIL"
        yield f"{verdict} time / (one rank's kernel{divided}) = {over:.3f}, {_where(ours)}"
        for other in timed:
            if _where(other) != _where(ours) or other["contender"].startswith(OURS):
                continue
            pairs = list(zip(ours["rounds_s"], other["rounds_s"], strict=True))
            ratio, behind = median(theirs / own for own, theirs in pairs), sum(theirs < own for own, theirs in pairs)
            by_chance = sum(comb(len(pairs), k) for k in range(behind, len(pairs) + 1)) / 2 ** len(pairs)
            verdict = "FAIL" if ratio < 1 and by_chance <= CHANCE else "ok  "
            rounds = f"burst behind in {behind} of {len(pairs)} rounds (by chance: {by_chance:.0%})"
            yield f"{verdict} {other['contender']} / burst = {ratio:.3f}, {rounds}, {_where(ours)}"


def _where(row: Row) -> str:
    mask, heads = "causal" if row["causal"] else "full", f"heads {row['q_heads']}/{row['kv_heads']}"
    return f"{row['ranks']} ranks, {row['seq']} tokens, {row['dtype']}, {mask}, {heads}"
