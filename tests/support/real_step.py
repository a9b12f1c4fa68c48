"""One rank's share of a whole training step, on a real GPU: what it takes of the memory, and how long.

    python -m tests.support.real_step --layers 2                  # Llama 3 8B on 1M tokens, rank 0 of 8; a minute
    python -m tests.support.real_step --layers 32 --out step.json # all of it: three minutes, 66 GiB of host memory

The step is that of `whole_step`, which counts it on a GPU that is not there: DeepSpeed's ZeRO-3 engine, the ring,
checkpoints and the optimizer, with the options of the fastest plan that fits. Here memory and time are those of
PyTorch's allocator and of the GPU. The other ranks are not there: they say what this one says, a message brings what
is sent in its place, and gathered weights are this rank's, so that all sizes are real and no number means anything.
Of attention's tiles every `--every`-th is computed, and timed; all of a million tokens would take minutes. Others are
zeros. Without a GPU the model is a toy's, which shows that this still runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin.activations import host_memory
from burst_plugin.comm import buffers, torch_distributed
from burst_plugin.comm.transport import Message
from burst_plugin.kernels import Case, Grads, How, Kernel, Queries, choose_kernel
from burst_plugin.planning.cluster import Cluster
from burst_plugin.ring import choices
from burst_plugin.topology import Topology
from burst_plugin.training.memory import GIB, memory
from burst_plugin.training.model_shape import MODELS, ModelShape
from burst_plugin.training.setting import Setting
from burst_plugin.training.training_plan import Goal, plans_that_fit
from burst_plugin.types import FULL
from tests.support.pretended_gpu import answers_of_other_ranks
from tests.support.whole_step import engine_of

_STEPS = 3  # the first makes pages on the host, the second finds the optimizer's states made
_TOY = {"hidden": 64, "ffn": 128, "heads": 8, "kv_heads": 4, "head_dim": 8, "vocab": 512}


class SomeTiles:
    """A kernel that computes every `every`-th tile, and returns zeros for the others."""

    name = "some_tiles"

    def __init__(self, kernel: Kernel, every: int) -> None:
        self.features, self._kernel = kernel.features, kernel
        self._turns = {way: itertools.cycle([True, *[False] * (every - 1)]) for way in ("forward", "backward")}
        self._timed: list[tuple[str, float, Any, Any]] = []

    def refuse(self, case: Case) -> str | None:
        """Return what the kernel refuses."""
        return self._kernel.refuse(case)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """Return out and lse of the kernel, or zeros."""
        if next(self._turns["forward"]):
            return self._run("forward", _flops(q, k, how), lambda: self._kernel.forward(q, k, v, how))  # type: ignore[no-any-return]
        out, lse = (*q.shape[:3], v.shape[3]), (q.shape[0], q.shape[2], q.shape[1])
        return q.new_zeros(out), q.new_zeros(lse, dtype=torch.float32)

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        """Return the gradients of the kernel, or zeros."""
        if next(self._turns["backward"]):
            flops = 2.5 * _flops(queries.q, k, how)
            return self._run("backward", flops, lambda: self._kernel.backward(queries, k, v, how))  # type: ignore[no-any-return]
        return Grads(*(torch.zeros_like(x) for x in (queries.q, k, v)))

    def _run(self, way: str, flops: float, work: Callable[[], Any]) -> Any:
        if not torch.cuda.is_available():
            return work()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        found = work()
        end.record()
        self._timed.append((way, flops, start, end))
        return found

    def times(self) -> dict[str, float]:
        """Return seconds in the kernel since the last call, and its rates; the GPU has to be idle."""
        timed, self._timed = self._timed, []
        found = {}
        for way in ("forward", "backward"):
            seconds = sum(start.elapsed_time(end) for each, _, start, end in timed if each == way) / 1e3
            found[f"kernel_{way}_s"] = seconds
            flops = sum(flops for each, flops, *_ in timed if each == way)
            found[f"kernel_{way}_tflops"] = flops / seconds / 1e12 if seconds else 0.0
        return found


def _flops(q: Tensor, k: Tensor, how: How) -> float:
    return 4.0 * q.numel() * k.shape[1] * (1.0 if how.band == FULL else 0.5)


@contextmanager
def one_of(topology: Topology, device: torch.device) -> Iterator[None]:
    """Make this process rank 0 of ranks that are not there, until the end of the block."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # which makes the backend known

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=topology.ranks)
    answers = [*answers_of_other_ranks(topology), (torch_distributed.Communicator, "post", _brings_what_is_sent)]
    answers.append((dist, "reduce_scatter_tensor", _scattered(dist.reduce_scatter_tensor)))
    if device.type == "cpu":  # of which a group that is not gloo's is taken for one of GPUs; labels are other ranks'
        modules = [m for name, m in sys.modules.items() if name.startswith("burst_plugin")]
        answers += [(m, "group_device", lambda *_: device) for m in modules if hasattr(m, "group_device")]
        answers += [(buffers.Buffer, "has_label", lambda *_: True)]
    with ExitStack() as stack:
        for where, name, answer in answers:
            stack.enter_context(mock.patch.object(where, name, answer, create=True))
        yield


def _brings_what_is_sent(_: Any, sends: Sequence[Message], recvs: Sequence[Message]) -> list[dist.Work]:
    for message in recvs:
        sent = next((each.data for each in sends if each.data.shape == message.data.shape), None)
        message.data.zero_() if sent is None else message.data.copy_(sent)
    return []


def _scattered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what fills in gradients that the group leaves as they are: with this rank's own."""

    def reduce_scatter(output: Tensor, whole: Tensor, *args: Any, **options: Any) -> Any:
        output.copy_(whole.reshape(-1)[: output.numel()].view_as(output))
        return function(output, whole, *args, **options)

    return reduce_scatter


def measure(shape: ModelShape, setting: Setting, every: int, device: torch.device) -> Iterator[dict[str, float]]:
    """Make steps; yield of each its seconds and, on a GPU, its bytes in GiB."""
    from burst_plugin.deepspeed import shard_batch

    sizes = (shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim)
    kernel = SomeTiles(choose_kernel("auto", Case(device.type, torch.bfloat16, *sizes)), every)
    with one_of(setting.topology, device), mock.patch.object(choices, "choose_kernel", return_value=kernel):
        engine = engine_of(shape, setting, "auto")
        ids = torch.randint(shape.vocab, (1, setting.tokens))
        batch = shard_batch({"input_ids": ids, "labels": ids})
        batch = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items()}
        for _ in range(_STEPS):
            yield _one_step(engine, batch, device) | kernel.times()


def _one_step(engine: Any, batch: dict[str, Any], device: torch.device) -> dict[str, float]:
    on_gpu, found = device.type == "cuda", {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        if on_gpu:
            torch.cuda.synchronize()
            found[f"{name}_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        found[f"{name}_s"] = time.perf_counter() - start
        return result

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    loss = timed("forward", lambda: engine(**batch, use_cache=False).loss)
    timed("backward", lambda: engine.backward(loss))
    timed("step", engine.step)
    if on_gpu:
        free, total = torch.cuda.mem_get_info()
        found["reserved_peak_gib"] = torch.cuda.max_memory_reserved() / GIB
        stats = torch.cuda.memory_stats()
        found["in_use_peak_gib"] = stats["active_bytes.all.peak"] / GIB  # with what side streams still read
        found["retries"] = stats["num_alloc_retries"]
        found["outside_gib"] = (total - free - torch.cuda.memory_reserved()) / GIB
    found["host_pages_gib"] = sum(each.pool.nbytes for each in host_memory.BY_DEVICE.values()) / GIB
    return found


def main() -> int:
    """Measure what the command line says; print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama3_8b")
    parser.add_argument("--layers", type=int, help="instead of the model's")
    parser.add_argument("--tokens", type=int, default=2**20)
    parser.add_argument("--gpu-gib", type=float, default=80.0, help="that the plan may take")
    parser.add_argument("--most-gib", type=float, help="that PyTorch's allocator may hold; by default all")
    parser.add_argument("--every", type=int, default=16, help="of how many tiles of attention one is computed")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from burst_plugin.deepspeed import cpu
    from burst_plugin.deepspeed.planning import space

    os.environ.setdefault("LOCAL_RANK", "0")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        cpu.enable()  # nothing is compiled
    elif options.most_gib is not None:  # what it holds beyond need it gives back then, which takes retries
        torch.cuda.set_per_process_memory_fraction(options.most_gib * GIB / torch.cuda.mem_get_info()[1])
    cluster, shape = Cluster(gpu_gib=options.gpu_gib), MODELS[options.model]
    goal = Goal(model=shape, tokens=2**20, cluster=cluster, space=space(fused_norms=False))
    setting = replace(plans_that_fit(goal)[0].setting, tokens=options.tokens)
    shape = replace(shape, layers=options.layers or shape.layers, **(_TOY if device.type == "cpu" else {}))
    planned = memory(shape, setting, cluster)
    report: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}, "setting": str(setting)}
    report["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    report["torch"] = torch.__version__
    report["planned_gib"] = {name: each / GIB for name, each in planned.gpu.items()}
    report["steps"] = []
    for step in measure(shape, setting, options.every, device):
        report["steps"].append(step)
        print(json.dumps({name: round(value, 3) for name, value in step.items()}), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
