"""Attention on packed documents, on one GPU: what a ring's kernels take, by how tokens are assigned to ranks.

    python -m tests.support.packed_on_gpu                          # 8 ranks with 16,384 tokens each; a minute
    python -m tests.support.packed_on_gpu --ranks 64 --seq 4096 --out packed.json
    python -m tests.support.packed_on_gpu --ranks 64 --seq 4096 --documents 4096 --blocks   # needs no GPU

All ranks take turns on the GPU, so that the time of its kernels is what a rank of a balanced ring takes, times their
number. The host, which starts the kernels of all ranks, cannot always keep up: so that time is the profiler's. What
is compared: tokens assigned by their work, as `layout="auto"` does, every document in zigzag, as in Transformer
Engine and Megatron, and the same kernel on one rank that has all. Without a GPU both passes are timed by the clock.

With --blocks nothing is timed: blocks of 128 queries and 128 keys are counted, which kernels compute whole.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.contenders import Case
from benchmarks.contenders.burst import BURST, ZIGZAG_BY_DOCUMENT, Burst
from benchmarks.documents import drawn_documents
from burst_plugin import Strategy
from burst_plugin.kernels import How
from burst_plugin.types import FULL
from tests.support.emulated_gpu import SleepingKernel
from tests.support.in_process_ring import InProcessRing

_NODE = 8
_BLOCK = 128
_ATTENTION = ("flash", "fmha", "attention")  # in names of attention kernels


def kernel_seconds(work: Callable[[], Any], device: torch.device) -> tuple[Any, float, float]:
    """Return what `work` returns, and the seconds of attention kernels and of others; on a CPU all as the former."""
    if device.type == "cpu":
        start = time.perf_counter()
        return work(), time.perf_counter() - start, 0.0
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        found = work()
        torch.cuda.synchronize()
    seconds = {True: 0.0, False: 0.0}
    for event in profiled.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            is_attention = any(name in event.name.lower() for name in _ATTENTION)
            seconds[is_attention] += event.time_range.elapsed_us() / 1e6
    return found, seconds[True], seconds[False]


class _BlockCounter(SleepingKernel):
    """A kernel that computes nothing, and counts the blocks that others would compute."""

    def __init__(self) -> None:
        super().__init__(1, 0.0, 0.0)
        self.blocks = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        lengths = [(q.shape[1], k.shape[1])] if how.lengths is None else zip(*how.lengths[:2], strict=True)
        self.blocks += q.shape[2] * sum(_blocks(rows, keys, how.band != FULL) for rows, keys in lengths)
        return super().forward(q, k, v, how)


def _blocks(rows: int, keys: int, causal: bool) -> int:
    """Count blocks; the last query sees all keys, and if it is causal, each one before it a key less."""
    if not causal:
        return ceil(rows / _BLOCK) * ceil(keys / _BLOCK)
    ends = range(_BLOCK, rows + _BLOCK, _BLOCK)  # of blocks of queries
    return sum(max(0, ceil((keys - rows + min(end, rows)) / _BLOCK)) for end in ends)


def count(case: Case, contender: Burst) -> dict[str, Any]:
    """Return the blocks of all ranks in one head, and those of the rank with the most times the ranks."""
    ring = _ring(case, contender, [torch.zeros(1, case.ranks * case.seq, case.q_heads, case.head_dim)] * 3)
    kernels = [_BlockCounter() for _ in range(case.ranks)]
    ring.use(kernels)
    ring.forward()
    counts = [kernel.blocks for kernel in kernels]
    return {"blocks": sum(counts) // case.q_heads, "most_times_ranks": max(counts) * case.ranks // case.q_heads}


def _ring(case: Case, contender: Burst, qkv: list[Tensor]) -> InProcessRing:
    strategy = contender.strategy.on(case.topology)
    return InProcessRing(case.topology, strategy, qkv, case.mask, partial(contender.tokens, case))


def _drawn(case: Case, device: torch.device) -> list[Tensor]:
    """Draw q, k, v and the gradient of out, of all ranks."""
    source, rows = torch.Generator(device).manual_seed(1), case.ranks * case.seq
    heads = (case.q_heads, case.kv_heads, case.kv_heads, case.q_heads)
    drawn = (torch.randn(1, rows, n, case.head_dim, device=device, generator=source) for n in heads)
    return [x.to(case.dtype) for x in drawn]


def measure(case: Case, contender: Burst, tensors: list[Tensor]) -> dict[str, Any]:
    """Return the seconds of both passes of a ring, and the rates of its attention alone and of all it does."""
    *qkv, dout = tensors
    ring = _ring(case, contender, qkv)
    douts = ring.shards(dout)
    for _ in range(2):  # the first makes what is kept
        saved, forward_s, forward_other_s = kernel_seconds(ring.forward, dout.device)
        _, backward_s, backward_other_s = kernel_seconds(partial(ring.backward, saved[1], douts), dout.device)
    flops = 14.0 * case.q_heads * case.head_dim * sum(n * (n + 1) // 2 for n in case.documents)
    alone_s = forward_s + backward_s
    return {
        "forward_s": forward_s,
        "forward_other_s": forward_other_s,
        "backward_s": backward_s,
        "backward_other_s": backward_other_s,
        "attention_tflops": flops / alone_s / 1e12,
        "all_tflops": flops / (alone_s + forward_other_s + backward_other_s) / 1e12,
    }


def main() -> None:
    """Measure what the command line says; print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="of which 8 are a node")
    parser.add_argument("--seq", type=int, default=16384, help="tokens of a rank")
    parser.add_argument("--documents", type=int, default=8192, help="tokens of a document, on average")
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.5, 1.0, 1.5], help="of their logarithms")
    parser.add_argument("--heads", default="32/8", help="of queries, and of keys and values")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--blocks", action="store_true", help="count them, instead of timing kernels")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    heads, kv_heads = map(int, options.heads.split("/"))
    nodes, width = max(1, options.ranks // _NODE), min(_NODE, options.ranks)
    whole = Case(nodes, width, options.seq, heads, kv_heads, options.head_dim, torch.bfloat16, causal=True)
    if options.blocks:
        whole = Case(nodes, width, options.seq, width, width, 8, torch.float32, causal=True)
    report: dict[str, Any] = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "rows": []}
    measured = count if options.blocks else partial(measure, tensors=_drawn(whole, device))
    for sigma in options.sigmas:
        case = replace(whole, sigma=sigma)
        case = replace(case, documents=drawn_documents(case, options.documents))
        alone = replace(case, nodes=1, ranks_per_node=1, seq=case.ranks * case.seq)
        for name, of, contender in (
            ("burst", case, BURST[0]),
            ("burst, heads exchanged in nodes", case, replace(BURST[0], strategy=Strategy(ulysses_degree=width))),
            ("zigzag by document", case, ZIGZAG_BY_DOCUMENT),
            ("one rank", alone, ZIGZAG_BY_DOCUMENT),
        ):
            row = {"name": name, "sigma": sigma, "documents": len(case.documents), **measured(of, contender)}
            report["rows"].append(row)
            print(json.dumps({key: round(x, 4) if isinstance(x, float) else x for key, x in row.items()}), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
