"""What only GPUs show: tensors of more than 2**31 elements, and what NCCL takes of the memory.

Groups that are bound to a device have ranks of their own: see `run.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import torch

from burst_plugin.check.findings import FAILED, NOT_SHOWN, OK, Finding
from burst_plugin.check.problem import BOUNDS, Problem, definition, differences, worst
from burst_plugin.check.settings import Settings, load_kernel
from burst_plugin.check.world import World
from burst_plugin.kernels import Case, How, Kernel, Queries, choose_kernel
from burst_plugin.planning.memory import GIB
from burst_plugin.scores import Scores
from burst_plugin.types import CAUSAL

__all__ = ["BOUND", "ONLY_GPUS", "check_far_offsets", "far_errors", "memory_finding"]

_FAR, _MEMORY, BOUND = "offsets past 2**31 elements", "memory of NCCL", "groups bound to a device"
ONLY_GPUS = (_FAR, _MEMORY, BOUND)
"""What is listed as not shown where there are none."""

_SHARED = "ranks share GPUs; leave out --ranks"
_ELEMENTS = 2**31
_ROWS, _HEADS, _DIM = 128, 16, 128
_TENSORS = 12  # of that size, which a kernel may need for both passes


def far_errors(kernel: Kernel, device: torch.device, dtype: torch.dtype, elements: int) -> dict[str, float]:
    """Return the errors of a batch whose last sequence lies behind `elements` elements; of the first one, too.

    q and v are one tensor, as are k and dout, so that it takes less memory.
    """
    batch = elements // (_ROWS * _HEADS * _DIM) + 1
    generator = torch.Generator(device).manual_seed(7)
    shape = (batch, _ROWS, _HEADS, _DIM)
    x, y = (torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator) for _ in range(2))
    how = How(CAUSAL, Scores(scale=_DIM**-0.5))
    with torch.no_grad():
        out, lse = kernel.forward(x, y, x, how)
        found = out, lse, *kernel.backward(Queries(x, y, out.to(dtype), lse), y, x, how)[:3]
    allowed = torch.ones(_ROWS, _ROWS, dtype=torch.bool, device=device).tril()
    ends = [0, batch - 1]
    expected = definition(Problem(x[ends], y[ends], x[ends], y[ends]), allowed)
    return differences([each[ends] for each in found], expected)


def check_far_offsets(world: World, settings: Settings) -> Iterator[Finding]:
    """Yield whether the kernel finds what lies behind 2**31 elements; collective. Nothing without a GPU."""
    if world.device.type != "cuda":
        return
    if world.shares_gpu:
        yield Finding("right", NOT_SHOWN, _FAR, _SHARED)
        return
    dtype, start = torch.bfloat16, time.perf_counter()
    needed, free = _TENSORS * _ELEMENTS * dtype.itemsize, torch.cuda.mem_get_info(world.device)[0]
    if min(world.exchange("free memory", free)) < needed:
        yield Finding("right", NOT_SHOWN, _FAR, f"takes {needed / GIB:.0f} GiB of free memory on every GPU")
        return
    case = Case(world.device.type, dtype, _HEADS, _HEADS, _DIM, _DIM)
    wanted = load_kernel(settings.kernel)
    found = world.attempt(_FAR, lambda: far_errors(choose_kernel(wanted, case), world.device, dtype, _ELEMENTS))
    torch.cuda.empty_cache()
    bound, bad = BOUNDS[dtype], []
    for rank, each in enumerate(found):
        name, error = ("", 0.0) if each.error else worst(each.value)
        if each.error or not error <= bound:
            bad.append(f"{world.name(rank)}: {each.error or f'{name} is off by {error:.1e} (bound {bound:.0e})'}")
    text = "; ".join(bad) or "both ends of a batch, against float64"
    yield Finding("right", FAILED if bad else OK, _FAR, text, {}, time.perf_counter() - start)


def memory_finding(world: World, outside: Mapping[str, list[int]]) -> Finding:
    """Return what was taken of GPUs outside of PyTorch's allocator while a ring was open, by ring and rank."""
    if world.shares_gpu:
        return Finding("right", NOT_SHOWN, _MEMORY, _SHARED)
    largest = max(outside, key=lambda name: max(outside[name]))
    most = max(outside[largest])
    rank = outside[largest].index(most)
    text = f"up to {most / GIB:.2f} GiB besides tensors, with what CUDA takes: {largest}, {world.name(rank)}"
    return Finding("right", OK, _MEMORY, text, {"bytes": {name: max(each) for name, each in outside.items()}})
