"""Whether kernels compute attention: each alone, on every kind of tile, and with the ring's further demands.

The ring asks for two things that no kernel's own tests cover: gradients of a part of the keys under the lse of all
keys, and gradients for an `out` that is made up from `dout` so that only `rowsum(out * dout)` is true. On GPUs the
kernel also has to reach tensors that lie behind 2**31 elements.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.check.findings import CORRECTNESS, FAILED, NOT_SHOWN, OK, Finding
from burst_plugin.check.problem import BOUNDS, Problem, definition, differences, worst
from burst_plugin.check.settings import Settings, load_kernel
from burst_plugin.check.world import World
from burst_plugin.compute.online_softmax import merge_, project, row_factor
from burst_plugin.kernels import KERNELS, Case, How, Kernel, Queries, choose_kernel
from burst_plugin.kernels.varlen import lengths_of
from burst_plugin.scores import Scores
from burst_plugin.training.memory import GIB
from burst_plugin.types import ANTICAUSAL, CAUSAL, FULL, Band

FAR = "offsets past 2**31 elements"
SHARED = "ranks share GPUs; leave out --ranks"
_FAR_ELEMENTS = 2**31
_FAR_ROWS, _FAR_HEADS, _FAR_DIM = 128, 16, 128
_FAR_TENSORS = 12  # of that size, which a kernel may need for both passes


class TileCase(NamedTuple):
    """A tile to check kernels on.

    name: for messages. rows: (queries, keys).
    band: the diagonals where queries attend to keys, counted in each document if there are several.
    feature: what a kernel has to support for this tile, as in `Kernel.features`; "" for nothing.
    documents: (queries of each document, keys of each document), if the tile has several side by side; else None.
    """

    name: str
    band: Band
    rows: tuple[int, int]
    feature: str = ""
    documents: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def allowed(self, device: torch.device) -> Tensor:
        """Return the tile's mask as a bool tensor [Sq, Sk], True where a query may attend to a key."""
        if self.documents is None:
            return _within(self.band, *self.rows, device)
        allowed = torch.zeros(self.rows, dtype=torch.bool, device=device)
        row = column = 0
        for queries, keys in zip(*self.documents, strict=True):
            allowed[row : row + queries, column : column + keys] = _within(self.band, queries, keys, device)
            row, column = row + queries, column + keys
        return allowed


def _within(band: Band, queries: int, keys: int, device: torch.device) -> Tensor:
    ahead = torch.arange(keys, device=device) - torch.arange(queries, device=device).unsqueeze(1)
    lower = -queries if band.lower is None else band.lower
    upper = keys if band.upper is None else band.upper
    return (ahead >= lower) & (ahead <= upper)


def _tiles(n: int) -> list[TileCase]:
    """Return every kind of tile, of about n queries."""
    several = (n // 8 + 1, n // 2, n // 4)
    others = (n // 2, 1 + n // 8, n // 3)
    return [
        TileCase("full", FULL, (n, 2 * n - n // 3)),
        TileCase("causal", CAUSAL, (n, n)),
        TileCase("anticausal", ANTICAUSAL, (n, n)),
        TileCase("window", Band(-n // 3, 0), (n, n), "windows"),
        TileCase("band", Band(-n // 2, n // 4), (n, n + n // 4), "windows"),
        TileCase("documents, full", FULL, (sum(several), sum(others)), "varlen", (several, others)),
        TileCase("documents, causal", CAUSAL, (sum(several),) * 2, "varlen", (several, several)),
    ]


_RunPasses = Callable[[Kernel, Problem, How], tuple[Tensor, ...]]


def _plain(kernel: Kernel, problem: Problem, how: How) -> tuple[Tensor, ...]:
    """Run both passes as a kernel's own library would."""
    q, k, v, dout = problem
    out, lse = kernel.forward(q, k, v, how)
    return out, lse, *kernel.backward(Queries(q, dout, out.to(q.dtype), lse), k, v, how)[:3]


def _halves(kernel: Kernel, problem: Problem, how: How) -> tuple[Tensor, ...]:
    """Run both passes on two halves of the keys, each with the lse of the whole row in the backward pass."""
    q, k, v, dout = problem
    halves = list(zip(k.chunk(2, 1), v.chunk(2, 1), strict=True))
    first, *others = (kernel.forward(q, *half, how) for half in halves)
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = first[0].to(wide).clone(), first[1].clone()
    merge_(out, lse, [(half_out.to(wide), half_lse) for half_out, half_lse in others])
    queries = Queries(q, dout, out.to(q.dtype), lse)
    grads = [kernel.backward(queries, *half, how) for half in halves]
    dq = grads[0].dq.to(wide) + grads[1].dq.to(wide)
    return out, lse, dq, torch.cat([grad.dk for grad in grads], 1), torch.cat([grad.dv for grad in grads], 1)


def _made_up(kernel: Kernel, problem: Problem, how: How) -> tuple[Tensor, ...]:
    """Run both passes, the backward one with an output that is made up from dout."""
    q, k, v, dout = problem
    out, lse = kernel.forward(q, k, v, how)
    queries = Queries(q, dout, project(dout, row_factor(out.to(q.dtype), dout)), lse)
    return out, lse, *kernel.backward(queries, k, v, how)[:3]


class KernelTrial(NamedTuple):
    """One run of a kernel on a tile, whose results are compared with the definition of attention.

    heads: (query heads, key heads). dims: the sizes of a head of (queries and keys, values).
    run: takes a kernel, a `Problem` and a `How`; returns out, lse, dq, dk and dv. how_run: how it differs from a
    plain forward and backward pass, in words, "" if it does not.
    """

    tile: TileCase
    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: torch.dtype
    run: _RunPasses
    how_run: str = ""

    def __str__(self) -> str:
        (q_heads, kv_heads), (dim, v_dim) = self.heads, self.dims
        size = f"{dim}" if dim == v_dim else f"{dim} and {v_dim}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.tile.name}, heads {q_heads}/{kv_heads} of {size}, {dtype}{self.how_run}"

    def errors(self, kernel: Kernel, device: torch.device) -> dict[str, float]:
        """Run the kernel on random numbers, and return the relative errors of "out", "lse", "dq", "dk" and "dv"."""
        problem = Problem.draw(self.tile.rows, self.heads, self.dims, self.dtype, device)
        lengths = None if self.tile.documents is None else lengths_of(*self.tile.documents, device)
        how = How(self.tile.band, Scores(scale=self.dims[0] ** -0.5), lengths=lengths)
        with torch.no_grad():
            results = self.run(kernel, problem, how)
        return differences(results, definition(problem, self.tile.allowed(device)))


def _trials(device: torch.device, settings: Settings) -> Iterator[KernelTrial]:
    """Yield all trials of a kernel, those for the ring's own demands, on full tiles, first."""
    tiles = _tiles(settings.sizes(device).tile)
    gpu = (torch.bfloat16, torch.float16, torch.float32)
    dtypes = gpu if device.type == "cuda" else (torch.float32, torch.bfloat16)
    heads = ((4, 2),) if settings.quick else ((4, 4), (4, 2), (4, 1))
    dims = ((64, 64),) if settings.quick else ((64, 64), (128, 128), (192, 128))
    for dtype in dtypes:
        yield KernelTrial(tiles[0], heads[0], dims[0], dtype, _halves, ", halves with the whole lse")
        if dtype != torch.float16:
            yield KernelTrial(tiles[0], heads[0], dims[0], dtype, _made_up, ", out made up from dout")
    for tile in tiles:
        for dtype in dtypes if tile is tiles[1] or not settings.quick else dtypes[:1]:
            yield from (KernelTrial(tile, *sizes, dtype, _plain) for sizes in product(heads, dims))


def _refusal(kernel: Kernel, trial: KernelTrial, device: torch.device) -> str | None:
    (q_heads, kv_heads), (dim, v_dim) = trial.heads, trial.dims
    if trial.tile.feature and trial.tile.feature not in kernel.features:
        return f"it lacks {trial.tile.feature}"
    if dim != v_dim and "head dims" not in kernel.features:
        return "it lacks head dims"
    return kernel.refuse(Case(device.type, trial.dtype, q_heads, kv_heads, dim, v_dim))


def _kernels(settings: Settings) -> list[Kernel]:
    own = load_kernel(settings.kernel)
    return [*([] if isinstance(own, str) else [own]), *KERNELS.values()]


def check_kernels(world: World, settings: Settings) -> Iterator[Finding]:
    """Yield a finding for each kernel on whether it computes attention on every kind of tile; collective.

    The kernels are those of this package, and one of your own if the settings name it. Each is tried with many tiles,
    heads and types. Each rank with a GPU of its own makes all trials; other ranks divide them. A kernel that refuses
    all of them is not shown.
    """
    for kernel in _kernels(settings):
        start = time.perf_counter()
        all_trials = list(_trials(world.device, settings))
        trials = [trial for trial in all_trials if _refusal(kernel, trial, world.device) is None]
        if not trials:
            reason = _refusal(kernel, all_trials[0], world.device)
            yield Finding(CORRECTNESS, NOT_SHOWN, f"kernel {kernel.name}", f"refused here: {reason}")
            continue
        has_own_gpu = world.device.type == "cuda" and not world.shares_gpu
        trials_here = trials if has_own_gpu else trials[world.rank :: world.size]
        wrong_by_rank = world.exchange(f"kernel {kernel.name} alone", _wrong(kernel, trials_here, world.device))
        yield _finding(world, kernel, wrong_by_rank, len(trials), time.perf_counter() - start)


def _wrong(kernel: Kernel, trials: list[KernelTrial], device: torch.device) -> dict[str, str]:
    """Return, by trial, the faults that this rank found."""
    wrong = {}
    for trial in trials:
        try:
            errors = trial.errors(kernel, device)
        except Exception as error:  # whatever a library raises
            wrong[str(trial)] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            continue
        bound = BOUNDS[trial.dtype]
        if not worst(errors)[1] <= bound:
            bad = [f"{name} is off by {error:.1e}" for name, error in errors.items() if not error <= bound]
            wrong[str(trial)] = f"{', '.join(bad)} (bound {bound:.0e})"
    return wrong


def _finding(
    world: World, kernel: Kernel, wrong_by_rank: list[dict[str, str]], trials: int, seconds: float
) -> Finding:
    subject = f"kernel {kernel.name}"
    failures = [(rank, trial, text) for rank, wrong in enumerate(wrong_by_rank) for trial, text in wrong.items()]
    figures = {"trials": trials, "wrong": {trial: text for _, trial, text in failures}}
    if not failures:
        text = f"{trials} trials against float64, including gradients of half the keys and for an out that is made up"
        return Finding(CORRECTNESS, OK, subject, text, figures, seconds)
    rank, trial, text = failures[0]
    more = f"; and {len(failures) - 1} trials more" if len(failures) > 1 else ""
    return Finding(CORRECTNESS, FAILED, subject, f"{trial}: {text}, on {world.name(rank)}{more}", figures, seconds)


def check_far_offsets(world: World, settings: Settings) -> Iterator[Finding]:
    """Yield a finding on whether the kernel is right on tensors of over 2**31 elements, none on CPUs; collective."""
    if world.device.type != "cuda":
        return
    if world.shares_gpu:
        yield Finding(CORRECTNESS, NOT_SHOWN, FAR, SHARED)
        return
    dtype, start = torch.bfloat16, time.perf_counter()
    needed, free = _FAR_TENSORS * _FAR_ELEMENTS * dtype.itemsize, torch.cuda.mem_get_info(world.device)[0]
    if min(world.exchange("free memory", free)) < needed:
        yield Finding(CORRECTNESS, NOT_SHOWN, FAR, f"takes {needed / GIB:.0f} GiB of free memory on every GPU")
        return
    case = Case(world.device.type, dtype, _FAR_HEADS, _FAR_HEADS, _FAR_DIM, _FAR_DIM)
    wanted = load_kernel(settings.kernel)
    outcomes = world.attempt(FAR, lambda: far_errors(choose_kernel(wanted, case), world.device, dtype, _FAR_ELEMENTS))
    torch.cuda.empty_cache()
    bound, failures = BOUNDS[dtype], []
    for rank, outcome in enumerate(outcomes):
        name, error = ("", 0.0) if outcome.error else worst(outcome.value)
        if outcome.error or not error <= bound:
            text = outcome.error or f"{name} is off by {error:.1e} (bound {bound:.0e})"
            failures.append(f"{world.name(rank)}: {text}")
    text = "; ".join(failures) or "both ends of a batch, against float64"
    yield Finding(CORRECTNESS, FAILED if failures else OK, FAR, text, {}, time.perf_counter() - start)


def far_errors(kernel: Kernel, device: torch.device, dtype: torch.dtype, elements: int) -> dict[str, float]:
    """Return a kernel's errors of "out", "lse", "dq", "dk", "dv" on the first and last sequence of a large batch.

    elements: how many numbers of a tensor lie before the last sequence, to find offsets that overflow. q and v are
    one tensor, as are k and dout, so that it takes less memory.
    """
    batch = elements // (_FAR_ROWS * _FAR_HEADS * _FAR_DIM) + 1
    generator = torch.Generator(device).manual_seed(7)
    shape = (batch, _FAR_ROWS, _FAR_HEADS, _FAR_DIM)
    x, y = (torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator) for _ in range(2))
    how = How(CAUSAL, Scores(scale=_FAR_DIM**-0.5))
    with torch.no_grad():
        results = _plain(kernel, Problem(x, y, x, y), how)
    allowed = torch.ones(_FAR_ROWS, _FAR_ROWS, dtype=torch.bool, device=device).tril()
    ends = [0, batch - 1]
    expected = definition(Problem(x[ends], y[ends], x[ends], y[ends]), allowed)
    return differences([result[ends] for result in results], expected)
