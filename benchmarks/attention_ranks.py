"""What a rank of `bench attention` does: time contenders and the kernel on one rank by turns.

In every round each entry runs once, in another order every round, so that whatever the machine does, it does to all
of them. All ranks begin an entry together, and the slowest one's time counts. Before that, trials choose the fastest
of a contender's configurations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.contenders import Case, Contender
from benchmarks.contenders.protocol import Able, best_of
from benchmarks.memory import PeakMemory
from burst_plugin.kernels import KERNELS, How, Kernel, Queries
from burst_plugin.kernels import Case as KernelCase
from burst_plugin.kernels.reference import ReferenceKernel
from burst_plugin.scores import Scores
from burst_plugin.types import CAUSAL, FULL
from tests.support.in_process_ring import InProcessRing

KERNEL, KERNEL_ALONE = "one-rank kernel", "one-rank kernel, alone"
_TRIED_TOKENS = 4096
_NOT_FAR = 1.5  # times the time of the fastest


class Whole(NamedTuple):
    """The whole sequence: q and dout [B, S, Hq, D], k and v [B, S, Hkv, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def draw(cls, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device) -> Whole:
        """Draw normal numbers, the same on every rank; `shape` is (batch, tokens, query heads, key heads, dim)."""
        batch, tokens, q_heads, kv_heads, dim = shape
        source = torch.Generator(device).manual_seed(5)
        sizes = ((batch, tokens, heads, dim) for heads in (q_heads, kv_heads, kv_heads, q_heads))
        return cls(*(torch.randn(s, dtype=dtype, device=device, generator=source) for s in sizes))


class Gradients(NamedTuple):
    """The results of a forward and a backward pass."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class OneRank(NamedTuple):
    """A kernel on the whole sequence: `forward` returns what `backward` needs."""

    name: str
    forward: Callable[[Whole], Any]
    backward: Callable[[Whole, Any], Gradients]


@dataclass
class Times:
    """Seconds of the slowest rank in every round."""

    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    both_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class World:
    """The processes that measure together: the default process group, or this one alone if `size` is 1."""

    device: torch.device
    rank: int = 0
    size: int = 1

    def meet(self) -> None:
        """Wait for all ranks."""
        synchronize(self.device)
        if self.size > 1:
            dist.barrier()
        synchronize(self.device)

    def most(self, number: float) -> float:
        """Return the largest number of all ranks."""
        found = torch.tensor([number], dtype=torch.float64, device=self.device)
        if self.size > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.item()


@dataclass
class Entry:
    """Something to time: `backward` is given what `forward` returns. `ranks` run it (all if None)."""

    name: str
    forward: Callable[[], Any]
    backward: Callable[[Any], Any]
    ranks: Sequence[int] | None = None
    close: Callable[[], None] = lambda: None
    times: Times = field(default_factory=Times)

    def take_turn(self, world: World) -> None:
        """Time both passes; collective."""
        forward_s = both_s = 0.0
        runs = self.ranks is None or world.rank in self.ranks
        world.meet()
        if runs:
            start = time.perf_counter()
            saved = self.forward()
            synchronize(world.device)
            forward_s = time.perf_counter() - start
            self.backward(saved)
            synchronize(world.device)
            both_s = time.perf_counter() - start
        slowest_s = (forward_s, both_s - forward_s, both_s)
        for times, seconds in zip(vars(self.times).values(), slowest_s, strict=True):
            times.append(world.most(seconds))

    @property
    def typical_s(self) -> float:
        return median(self.times.both_s)


class Measured(NamedTuple):
    """What one process found: times are those of the slowest rank, memory is that of this one."""

    kernel: str
    times: dict[str, Times]
    peaks: dict[str, int]
    errors: dict[str, float]


# A contender to be timed: its passes, what gathers their results, and what closes it.
Ready = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any, Any], Gradients], Callable[[], None]]


def measure(world: World, case: Case, able: Able, count: int, virtual: bool = False) -> Measured:
    """Measure the best configuration of every contender in one rank, or all ranks of `virtual` rings; collective."""
    shape = (case.batch, case.ranks * case.seq, case.q_heads, case.kv_heads, case.head_dim)
    whole = Whole.draw(shape, case.dtype, world.device)
    kernel = fastest(whole, case.causal, world.most)
    expected = kernel.backward(whole, kernel.forward(whole))
    # With all ranks at work a core's clock and its share of the memory's bandwidth are the same as in the ring.
    entries = [Entry(KERNEL, partial(kernel.forward, whole), partial(kernel.backward, whole))]
    entries += [replace(entries[0], name=KERNEL_ALONE, ranks=(0,), times=Times())] if world.size > 1 else []
    peaks, errors = {}, {}
    for configurations in able.values():
        tried = []
        for each in configurations:
            with PeakMemory(world.device) as peak:
                forward, backward, gather, close = (_virtual_ready if virtual else _ready)(each, case, whole)
                saved = forward()
                grads = backward(saved)
            peaks[each.name], errors[each.name] = peak.nbytes, largest_error(gather(saved, grads), expected)
            del saved, grads
            tried.append(Entry(each.name, forward, backward, close=close))
        entries.append(best_of(tried, lambda entry: entry.take_turn(world)))
    times = rounds(entries, world, count)
    for entry in entries:
        entry.close()
    return Measured(kernel.name, times, peaks, errors)


def group_rank(rank: int, case: Case, able: Able, count: int) -> Measured:
    """Measure in a rank of the default process group."""
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return measure(World(device, rank, case.ranks), case, able, count)


def rounds(entries: Sequence[Entry], world: World, count: int) -> dict[str, Times]:
    """Time the entries `count` times, after a round that warms up; collective."""
    for number in range(count + 1):
        for entry in Random(number).sample(entries, len(entries)):
            if number < 2:
                entry.times = Times()  # what came before was a trial
            entry.take_turn(world)
    return {entry.name: entry.times for entry in entries}


def largest_error(found: Gradients, expected: Gradients) -> float:
    """Return the largest error of out, dq, dk, dv: the 2-norm of the difference over that of what was expected."""
    errors = [(x.float() - y.float()).norm() / y.float().norm() for x, y in zip(found, expected, strict=True)]
    return float(torch.stack(errors).amax().item())  # unlike Python's `max`, it passes on NaN


def _ready(contender: Contender, case: Case, whole: Whole) -> Ready:
    session = contender.prepare(case, None)
    q, k, v, dout = (session.shard(x) for x in whole)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return (
        lambda: session.attend(*leaves),
        lambda out: torch.autograd.grad(out, leaves, dout),
        lambda out, grads: Gradients(*(session.unshard(x) for x in (out, *grads))),
        session.close,
    )


def _virtual_ready(contender: Contender, case: Case, whole: Whole) -> Ready:
    strategy = contender.strategy  # type: ignore[attr-defined]
    ring = InProcessRing(case.topology, strategy, whole[:3], case.mask)
    douts, dtype = ring.shards(whole.dout), whole.q.dtype

    def backward(done: tuple[list[Tensor], Any]) -> list[Any]:
        return [tuple(x.to(dtype) for x in grads[:3]) for grads in ring.backward(done[1], douts)]

    def gather(done: tuple[list[Tensor], Any], grads: list[Any]) -> Gradients:
        return Gradients(*map(ring.unshard, ([out.to(dtype) for out in done[0]], *zip(*grads, strict=True))))

    return ring.forward, backward, gather, lambda: None


def fastest(whole: Whole, causal: bool, most: Callable[[float], float]) -> OneRank:
    """Return the kernel that is quickest in forward and backward on the first few thousand tokens.

    Candidates are the kernels of the package, called as the package calls them, and `scaled_dot_product_attention`
    with autograd. `most` returns the largest number of all ranks, so that they choose the same. On a GPU so few
    tokens are a matter of launches: there the whole sequence decides between those that are not far behind.
    """
    few, candidates = Whole(*(x[:, :_TRIED_TOKENS].contiguous() for x in whole)), _candidates(whole, causal)
    took_s = {each: most(_duration_s(each, few)) for each in candidates}
    if whole.q.is_cuda and whole.q.shape[1] > _TRIED_TOKENS:
        near = [each for each in candidates if took_s[each] < _NOT_FAR * min(took_s.values())]
        took_s = {each: most(_duration_s(each, whole)) for each in near}
    return min(took_s, key=took_s.__getitem__)


def synchronize(device: torch.device) -> None:
    """Wait for the work of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _duration_s(kernel: OneRank, whole: Whole) -> float:
    entry = Entry(kernel.name, partial(kernel.forward, whole), partial(kernel.backward, whole))
    for _ in range(3):
        entry.take_turn(World(whole.q.device))
    return min(entry.times.both_s)


def _candidates(whole: Whole, causal: bool) -> list[OneRank]:
    q, k = whole.q, whole.k
    case = KernelCase(q.device.type, q.dtype, q.shape[2], k.shape[2], q.shape[3], k.shape[3])
    how = How(CAUSAL if causal else FULL, Scores(scale=q.shape[3] ** -0.5))
    able = [kernel for kernel in KERNELS.values() if kernel.refuse(case) is None]
    return [_of_package(kernel, how) for kernel in able if kernel.name != ReferenceKernel.name] + [_of_torch(causal)]


def _of_package(kernel: Kernel, how: How) -> OneRank:
    def backward(whole: Whole, saved: tuple[Tensor, Tensor]) -> Gradients:
        out, lse = saved
        queries = Queries(whole.q, whole.dout, out.to(whole.q.dtype), lse)
        return Gradients(out, *kernel.backward(queries, whole.k, whole.v, how)[:3])

    return OneRank(kernel.name, lambda whole: kernel.forward(*whole[:3], how), backward)


def _of_torch(causal: bool) -> OneRank:
    def forward(whole: Whole) -> tuple[Tensor, list[Tensor]]:
        leaves = [x.detach().requires_grad_() for x in whole[:3]]
        q, k, v = (x.transpose(1, 2) for x in leaves)
        out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2), leaves

    def backward(whole: Whole, saved: tuple[Tensor, list[Tensor]]) -> Gradients:
        out, leaves = saved
        return Gradients(out.detach(), *torch.autograd.grad(out, leaves, whole.dout))

    return OneRank("scaled_dot_product_attention", forward, backward)
