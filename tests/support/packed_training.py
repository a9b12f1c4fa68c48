"""Megatron's GPT on packed documents, on an emulated cluster: layouts of the ring, and data parallelism alone.

All have the same tokens in memory: a sequence over all ranks, or a part of it on each rank, for which documents that
reach beyond it are cut. Attention sleeps for the pairs that it computes; all else, and what is sent, is real.

    python -m tests.support.packed_training --rounds 5
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from random import Random
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders.kernels import SleepingKernel
from burst_plugin import Strategy
from burst_plugin.megatron import install, packed_indices
from tests.support.megatron_gpt import GptRun, build, forward_backward, loss_of, random_tokens
from tests.support.netns import EmulatedCluster
from tests.support.ranks import as_on_gpus

ALONE = "data parallel"


@dataclass(frozen=True)
class Measured:
    """tokens_per_s: of all ranks. cut_s: what the host takes to choose a microbatch's tokens, and to cut it."""

    tokens_per_s: float
    cut_s: float


@dataclass(frozen=True)
class PackedTraining:
    """A step of training: 2 nodes of 4 ranks, of which each has a NIC; microbatches have documents of their own."""

    rate_mbit: float = 100
    seq: int = 2048  # tokens per rank
    mean_length: int = 1024  # of documents, log-normal with sigma 1
    microbatches: int = 4
    visit_s: tuple[float, float] = (0.030, 0.075)  # that all pairs of two blocks of `seq` take

    def by_turns(self, ways: tuple[str, ...], rounds: int = 1) -> dict[str, Measured]:
        """Return the medians of all ways: layouts, or `ALONE`."""
        found: dict[str, list[Measured]] = {way: [] for way in ways}
        with EmulatedCluster(2, 4, self.rate_mbit) as cluster:
            for _ in range(rounds):
                for way in ways:
                    found[way].append(cluster.run(self._train, way, timeout_s=300)[0])
        return {
            way: Measured(median(m.tokens_per_s for m in each), median(m.cut_s for m in each))
            for way, each in found.items()
        }

    def _train(self, rank: int, way: str) -> Measured:
        spread, kernel = way != ALONE, SleepingKernel(self.seq**2 * 16, *self.visit_s, None)
        strategy = Strategy(kernel=kernel, layout=way if spread else "zigzag", parts=4 if spread else 1)
        ranks, sizes = (
            (8, {"cp": 8, "hierarchical": (4, 2)}) if spread else (1, {"core": partial(_core_alone, strategy)})
        )
        shape: dict[str, Any] = {"layers": 2, "heads": 16, "groups": 4, "config": {"kv_channels": 64}, **sizes}
        run = GptRun(**shape, microbatch_size=1, seq_length=ranks * self.seq, cp_comm_type="burst", strategy=strategy)
        model, cuts = build(run), list[float]()
        for cp in install(strategy).contexts():
            as_on_gpus(cp)
        for number in range(2):  # the first to warm up
            cuts.clear()
            documents = [self._documents(self.microbatches * number + each) for each in range(self.microbatches)]
            if not spread:
                first, last = rank * self.seq, (rank + 1) * self.seq
                documents = [sorted({min(max(x, first), last) - first for x in each}) for each in documents]
            tokens = random_tokens(run, self.microbatches)
            dist.barrier()
            start = time.perf_counter()
            forward_backward(model, run, tokens, partial(_step, documents=iter(documents), cuts=cuts))
            dist.barrier()
            elapsed = time.perf_counter() - start
        return Measured(self.microbatches * 8 * self.seq / elapsed, mean(cuts))

    def _documents(self, number: int) -> list[int]:
        """Draw where documents begin, in multiples of 16, as zigzag takes them on 8 ranks."""
        random, starts = Random(number), [0]
        while starts[-1] < 8 * self.seq:
            length = 16 * max(1, round(self.mean_length / 16 * random.lognormvariate(-0.5, 1)))
            starts.append(min(starts[-1] + length, 8 * self.seq))
        return starts


def _core_alone(strategy: Strategy, *args: Any, **kwargs: Any) -> Any:
    """Return a core attention of one rank that takes packed documents without Transformer Engine."""
    from burst_plugin.megatron.layers.core_attention import BurstCoreAttention
    from burst_plugin.megatron.registry import Registry

    return BurstCoreAttention(*args, registry=Registry(strategy), **kwargs)


def _step(data: Iterator[dict[str, Tensor]], model: Any, documents: Iterator[list[int]], cuts: list[float]) -> Any:
    """Do a forward step on the next documents, and note how long cutting takes."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    batch, group, starts = next(data), parallel_state.get_context_parallel_group(), next(documents)
    begin = time.perf_counter()
    rows = packed_indices(starts, group.size(), group.rank())
    batch = {name: x.index_select(1, rows) for name, x in batch.items()}
    cuts.append(time.perf_counter() - begin)
    offsets, longest = torch.tensor(starts, dtype=torch.int32), max(b - a for a, b in pairwise(starts))
    params = PackedSeqParams("thd", *[offsets] * 4, longest, longest)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=params)
    return output, partial(loss_of, batch["loss_mask"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Training on packed documents, on an emulated cluster.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=100, help="of a NIC, in Mbit/s")
    options = parser.parse_args()
    measured = PackedTraining(options.rate).by_turns(("auto", "zigzag", ALONE), options.rounds)
    for name, each in measured.items():
        print(f"{name:<14} {each.tokens_per_s:8,.0f} tokens/s, {1e3 * each.cut_s:5.1f} ms to cut a microbatch")
