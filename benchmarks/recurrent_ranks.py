"""What every rank of an emulated cluster does with a layer that carries a state: all ways by turns."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cluster_ranks import Entry, defer_transfers, take_turn
from benchmarks.memory import keep_freed_memory
from burst_plugin import ContextParallel, Tokens, recurrent
from burst_plugin.recurrent import heads, layers
from burst_plugin.recurrent.kernels import state_space
from burst_plugin.sequence.layout import positions
from burst_plugin.types import DIRECTIONS
from tests.support.emulated_gpu import EmulatedDevice, zeros

LAYERS = ("delta_rule", "mamba2")
WAYS = ("states", "heads in parts", "heads", "contiguous")
_HEADS = {"delta_rule": (16, 128), "mamba2": (16, 64)}  # heads of a layer, and their width
_HIDDEN = {"delta_rule": 512, "mamba2": 512}  # width of the model, for this share of its heads
_PAIR = 0.74  # of the kernel's time: what pieces of a delta rule do to states, as measured of the kernels here
_ENTERING = 0.38  # of its backward pass: the gradients of entering states, as measured
_STAGES = ((0.36, 0.42), (0.41, 0.37), (0.24, 0.29))
"""Of Mamba-2's kernel forward and backward: what pieces do to states, what needs no other pieces, and outputs from
entering states, as measured of the kernel here."""


@dataclass(frozen=True)
class Sizes:
    """A case: tokens per rank, and seconds of kernels for 8,192 tokens and 8 heads of 128."""

    nodes: int
    ranks_per_node: int
    tokens: int
    layer: str
    forward_s: float
    backward_s: float

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def kernels_s(self) -> dict[str, float]:
        """Return what a layer's kernels take on a rank, by direction."""
        heads, width = _HEADS[self.layer]
        times = (2 if self.layer == "delta_rule" else 1) * self.tokens / 8192 * heads * width / 1024
        return dict(zip(DIRECTIONS, (self.forward_s * times, self.backward_s * times), strict=True))


class _Kernel(NamedTuple):
    """A kernel that takes its time and no processor, in proportion to tokens and heads."""

    device: EmulatedDevice
    sizes: Sizes
    forward: float = 1.0  # times the kernel's time
    backward: float = 1.0

    def sleep(self, direction: str, tokens: int, heads: int) -> None:
        seconds = getattr(self, direction) * getattr(self.sizes, f"{direction}_s")
        self.device.finish(seconds * tokens / 8192 * heads * _HEADS[self.sizes.layer][1] / 1024)

    def delta_rule(self, *tensors: Tensor | None) -> Any:
        _, k, v, *_ = tensors
        return self._run(v.shape, (torch.bfloat16, v.shape), (torch.float32, _state(k, v)), tensors=tensors)

    def pair(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
        pairs = [(torch.float32, _state(k, x)) for x in (k, v)]
        found = self._replace(forward=_PAIR)._run(v.shape, *pairs, tensors=(k, v, g, beta))
        entered, out = self._replace(backward=_ENTERING), (torch.bfloat16, v.shape)
        return *found, lambda entries: entered._run(v.shape, out, tensors=(entries,))

    def mamba2(self, *tensors: Tensor | None) -> Any:
        x, *_, B, _, _ = tensors
        state = torch.float32, (len(x), *x.shape[2:], B.shape[3])
        return self._run(x.shape, (torch.bfloat16, x.shape), state, tensors=tensors)

    def mamba2_chunks(self, *tensors: Tensor) -> Any:
        return _Chunks(self, tensors)

    def _run(self, work: Sequence[int], *outs: Any, tensors: Sequence[Tensor | None]) -> Any:
        """Return zeros of these types and shapes after the time for `work`, [batch, tokens, heads, ...]."""
        return _Slept.apply(self, (work[0] * work[1], work[2]), outs, *tensors)


class _Chunks:
    """Mamba-2's kernel in stages, in place of `DecayChunks`."""

    def __init__(self, kernel: _Kernel, tensors: Sequence[Tensor]) -> None:
        self.tensors = x, *_, B, _ = tensors
        self.stages = [kernel._replace(forward=forward, backward=backward) for forward, backward in _STAGES]
        maps = [(torch.float32, (len(x), x.shape[2], *sizes)) for sizes in ((1, 1), (B.shape[3], x.shape[3]))]
        self.transition, self.bias = self.stages[0]._run(x.shape, *maps, tensors=tensors)

    def inside_then_outputs(self, dtype: torch.dtype, transposed: bool) -> Callable[[Tensor | None], Tensor]:
        x = self.tensors[0]
        inside = self.stages[1]._run(x.shape, (dtype, x.shape), tensors=self.tensors)

        def outputs(entries: Tensor | None) -> Tensor:
            out: Tensor = self.stages[2]._run(x.shape, (dtype, x.shape), tensors=(inside, entries))
            return out

        return outputs


def _state(keys: Tensor, values: Tensor) -> tuple[int, ...]:
    return len(values), values.shape[2], keys.shape[3], values.shape[3]


class _Slept(torch.autograd.Function):
    """Zeros of the right shapes, after a kernel's time."""

    @staticmethod
    def forward(ctx: Any, kernel: _Kernel, work: tuple[int, int], outs: Sequence[Any], *xs: Any) -> Any:
        ctx.kernel, ctx.work = kernel, work
        ctx.shapes = [None if x is None else (tuple(x.shape), x.dtype) for x in xs]
        kernel.device.launch()
        found = [zeros(tuple(shape), dtype, n).detach() for n, (dtype, shape) in enumerate(outs)]
        kernel.sleep("forward", *work)
        return tuple(found) if len(found) > 1 else found[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.kernel.device.launch()
        ctx.kernel.sleep("backward", *ctx.work)
        return None, None, None, *(None if each is None else zeros(*each, 3) for each in ctx.shapes)


class _Projected(torch.autograd.Function):
    """Tensors of the layer from those of the model, and back; their projections are not what is measured."""

    @staticmethod
    def forward(ctx: Any, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], x: Tensor) -> Any:
        ctx.shape, ctx.dtype = tuple(x.shape), x.dtype
        found = [zeros(shape, dtype, 4).detach() for shape, dtype in zip(shapes, dtypes, strict=True)]
        return tuple(found) if len(found) > 1 else found[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, zeros(ctx.shape, ctx.dtype, 5)


class _Moved(torch.autograd.Function):
    """Rows of x [1, S_local, D], which ranks hold as `here` says, where they are to be as `there` says."""

    @staticmethod
    def forward(ctx: Any, here: Sequence[Tensor], there: Sequence[Tensor], x: Tensor) -> Tensor:
        ctx.back = there, here
        rank, whole = dist.get_rank(), torch.zeros(sum(map(len, here)), x.shape[2], dtype=x.dtype)
        ops, taken = [], {}
        for peer in range(len(here)):
            leaving, arriving = (torch.isin(*pair) for pair in ((here[rank], there[peer]), (here[peer], there[rank])))
            rows, places = x[0, leaving], here[peer][arriving]
            if peer == rank:
                whole[places] = rows
                continue
            taken[peer] = places, rows.new_empty(len(places), x.shape[2])
            ops += [dist.P2POp(dist.irecv, taken[peer][1], peer)] if len(places) else []
            ops += [dist.P2POp(dist.isend, rows, peer)] if len(rows) else []
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        for places, rows in taken.values():
            whole[places] = rows
        return whole[there[rank]].unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, _Moved.apply(*ctx.back, grad)


def _layer(sizes: Sizes, place: recurrent.Placement, hidden: Tensor) -> Tensor:
    """Compute the layer on this rank's tokens, hidden [1, S_local, D]; return [1, S_local, D]."""
    count, width = _HEADS[sizes.layer]
    of, half, full = (1, hidden.shape[1], count), torch.bfloat16, torch.float32
    if sizes.layer == "delta_rule":
        shapes = [(*of, width)] * 3 + [of] * 2
        q, k, v, g, beta = _Projected.apply(shapes, [half] * 3 + [full, half], hidden)
        out = recurrent.gated_delta_rule(q, k, v, g, beta, place)
    else:
        groups = (*of[:2], sizes.ranks, 128)
        x, dt, B, C = _Projected.apply([(*of, width), of, groups, groups], [half, full, half, half], hidden)
        out = recurrent.state_space(x, dt, torch.zeros(count), B, C, place)
    done: Tensor = _Projected.apply([tuple(hidden.shape)], [half], out)
    return done


class _Session(NamedTuple):
    attend: Callable[[Tensor], Tensor]


def _sessions(sizes: Sizes) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the ways to compute the layer on a shard in zigzag order, hidden [1, S_local, D]."""
    tokens = Tokens(sizes.ranks * sizes.tokens)
    rings = {
        "states": {"recurrent": "state"},
        "heads in parts": {"recurrent": "heads"},
        "contiguous": {"recurrent": "state", "layout": "contiguous"},
    }
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    rows: dict[str, list[Tensor]] = {}
    for way, options in rings.items():
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=sizes.ranks_per_node, **options)
        rows[way] = [positions(runs) for runs in cp.rank_state.route_table.shards(tokens)]
        found[way] = partial(_layer, sizes, recurrent.Placement(cp, tokens=tokens))
    layer = found["contiguous"]

    def converted(hidden: Tensor) -> Tensor:
        here, there = rows["states"], rows["contiguous"]
        moved: Tensor = _Moved.apply(there, here, layer(_Moved.apply(here, there, hidden)))
        return moved

    in_parts = found["heads in parts"]

    def at_once(hidden: Tensor) -> Tensor:
        with mock.patch.object(heads, "MANY_TOKENS", sizes.tokens + 1):
            return in_parts(hidden)

    return {**found, "heads": at_once, "contiguous": converted}


def measure_in_rank(rank: int, sizes: Sizes, rounds: int) -> dict[str, tuple[dict[str, list[float]], dict[str, int]]]:
    """Measure all ways on one case, by turns: times by direction, and bytes at the busiest NIC."""
    gc.collect()
    gc.freeze()
    keep_freed_memory()
    hidden = torch.zeros(1, sizes.tokens, _HIDDEN[sizes.layer], dtype=torch.bfloat16)
    inputs = hidden.clone().requires_grad_(), hidden
    kernel = _Kernel(EmulatedDevice(), sizes)
    in_place_of = [
        (layers, "delta_rule", kernel.delta_rule),
        (layers, "pair_by_rule", kernel.pair),
        (state_space, "state_space", kernel.mamba2),
        (state_space, "state_space_chunks", kernel.mamba2_chunks),
    ]
    with ExitStack() as stack:
        for module, name, slept in in_place_of:
            stack.enter_context(mock.patch.object(module, name, slept))
        entries = {way: Entry(way, _Session(attend)) for way, attend in _sessions(sizes).items()}
        for entry in entries.values():
            take_turn(entry, inputs)
            entry.times.clear()
        defer_transfers()
        for number in range(rounds):
            for entry in Random(number).sample([*entries.values()], len(entries)):
                take_turn(entry, inputs, count=number == 0)
    return {way: (dict(entry.times), entry.nic_bytes) for way, entry in entries.items()}
