"""What a ring has to compute, whatever the backend: the cases of gloo's tests, which are NCCL's too.

On CPUs tests fork their ranks and call `ring_errors` and `masked_errors` there. CUDA does not survive a fork: for
NCCL `found_by_ranks` spawns them, over gloo where there are no GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from burst_plugin import (
    BidirectionalSpans,
    Causal,
    ContextParallel,
    Documents,
    Full,
    Mask,
    SlidingWindow,
    Strategy,
    Tokens,
    burst_attention,
    key_padding,
)
from burst_plugin.check.processes import RankProcesses
from burst_plugin.check.world import joined
from tests.support.reference import Problem, Result, errors, reference

LENGTH = 61
DOCUMENTS = (0, 7, 8, 40, 61)
_PADDED = torch.arange(LENGTH).expand(2, LENGTH) >= torch.tensor([[0], [9]])
_HEADS = (4, 2)
_TIMEOUT_S = 60.0
_LIMIT_S = 240.0

RINGS: Sequence[tuple[int, dict[str, Any]]] = (
    (2, {"ranks_per_node": 2}),
    (2, {"ranks_per_node": 1, "layout": "striped"}),
    (2, {"schedule": "tasp", "parts": 2}),
    (4, {"ranks_per_node": 2}),
    (4, {"ranks_per_node": 2, "schedule": "flat_ring", "layout": "contiguous"}),
    (4, {"ranks_per_node": 1}),
    (4, {}),
    (4, {"ranks_per_node": 4, "schedule": "tasp", "parts": 2}),
    (8, {"ranks_per_node": 4}),
    (8, {"ranks_per_node": 4, "schedule": "tasp", "parts": 2, "layout": "striped"}),
    (8, {"ranks_per_node": 2, "layout": "striped"}),
    (8, {"ranks_per_node": 4, "forward": "both", "schedule": "direct", "layout": "contiguous"}),
)
"""Ranks, and options of `Strategy`."""

MASKS: Sequence[tuple[Mask, Tokens | None, str]] = (
    (Causal(), Tokens(LENGTH), "two_level_ring"),
    (SlidingWindow(5), Tokens(LENGTH, layout="contiguous"), "direct"),
    (SlidingWindow(3, 2), Tokens(LENGTH), "direct"),
    (Causal() & Documents(DOCUMENTS), Tokens(LENGTH, DOCUMENTS), "two_level_ring"),
    (Causal() & Documents(DOCUMENTS), Tokens(LENGTH, layout="striped"), "two_level_ring"),
    (Full() & key_padding(_PADDED), Tokens(LENGTH), "two_level_ring"),
    (SlidingWindow(9), None, "direct"),
    (BidirectionalSpans(((3, 17), (20, 29), (29, 35), (50, 61))), Tokens(LENGTH), "two_level_ring"),
    (BidirectionalSpans(((3, 17), (20, 29), (50, 61)), (1, 2, 1)) & SlidingWindow(4, None), None, "direct"),
    (Causal() & Documents((0, 30, 61)), Tokens(LENGTH, holders=(2, 3, 1, 0, 0, 1)), "direct"),
)
"""Masks, tokens, None for `layout="auto"`, and the schedule that runs; on 2x2 ranks."""


def train_step(cp: ContextParallel, problem: Problem) -> Result:
    """Return the whole out, dq, dk, dv, put together from all ranks."""
    q, k, v = (cp.shard(x).requires_grad_() for x in problem[:3])
    out = burst_attention(q, k, v, cp)
    grads = torch.autograd.grad(out, (q, k, v), cp.shard(problem.dout))
    return Result(*(cp.unshard(x) for x in (out.detach(), *grads)))


def ring_errors(strategy: Strategy, problem: Problem, truth: Result, steps: int = 2) -> dict[str, float]:
    """Return the errors of the last of some steps, the second of which has buffers that were used before."""
    cp = ContextParallel(dist.group.WORLD, strategy=strategy)
    for _ in range(steps):
        found = train_step(cp, problem)
    assert cp.traffic() == cp.expected_traffic()
    cp.close()
    return errors(_on_cpu(found), truth)


def masked_errors(
    strategy: Strategy, mask: Mask, tokens: Tokens | None, problem: Problem, truth: Result, steps: int = 2
) -> tuple[dict[str, float], bool, str]:
    """Return the errors of the last step, whether bytes were as counted, and the schedule; with a sink."""
    cp = ContextParallel(dist.group.WORLD, strategy=strategy)
    tokens = tokens or cp.tokens(LENGTH, mask)
    assert problem.sink is not None
    for _ in range(steps):
        inputs = [*(cp.shard(x, tokens=tokens) for x in problem[:3]), problem.sink.clone()]
        q, k, v, sink = (x.requires_grad_() for x in inputs)
        out = burst_attention(q, k, v, cp, mask=mask, sink=sink, tokens=tokens)
        grads = torch.autograd.grad(out, (q, k, v, sink), cp.shard(problem.dout, tokens=tokens))
    dist.all_reduce(grads[3])
    whole = (cp.unshard(x.detach(), tokens=tokens) for x in (out, *grads[:3]))
    found = errors(_on_cpu(Result(*whole, grads[3])), truth)
    is_counted, schedule = cp.traffic() == cp.expected_traffic(), cp.describe()["schedule"]
    cp.close()
    return found, is_counted, schedule


def _on_cpu(result: Result) -> Result:
    return Result(*(None if x is None else x.cpu() for x in result))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Found:
    """The worst error of a case on one rank; `is_as_planned`: its bytes and its schedule."""

    case: str
    dtype: str
    error: float
    is_as_planned: bool = True


def found_by_ranks(
    ranks: int, dtypes: Sequence[torch.dtype], *, steps: int = 2, is_bound: bool = False
) -> list[list[Found]]:
    """Run all cases for so many ranks in processes that are spawned, on GPUs if there are any.

    is_bound: whether the world's group is bound to the rank's GPU. Raises AssertionError with the errors of ranks.
    """
    with RankProcesses(ranks, _rank, tuple(dtypes), steps, is_bound, limit_s=_LIMIT_S) as processes:
        for _ in processes.messages(lambda: any(end.error for end in processes.ended.values())):
            pass
        wrong = {rank: end.error for rank, end in processes.ended.items() if end.error}
        assert not wrong, wrong
        assert len(processes.ended) == ranks, "some ranks are late"
        return [[Found(**each) for each in processes.ended[rank].value] for rank in range(ranks)]


def _rank(
    rank: int,
    ranks: int,
    directory: Path,
    say: Callable[[Any], None],
    dtypes: Sequence[torch.dtype],
    steps: int,
    is_bound: bool,
) -> list[dict[str, Any]]:
    with joined((rank, ranks, rank), _TIMEOUT_S, directory, is_bound=is_bound) as world:
        found = [each for dtype in dtypes for each in _cases(ranks, dtype, world.device, steps)]
        world.exchange("the end", None)
    return [asdict(each) for each in found]


def _cases(ranks: int, dtype: torch.dtype, device: torch.device, steps: int) -> Iterator[Found]:
    for of_ranks, options in RINGS:
        if of_ranks == ranks:
            drawn = Problem.draw(2 * ranks * 3, _HEADS, dtype=dtype)
            truth, problem = reference(drawn, Causal()), _on(device, drawn)
            for side in ("q", "kv"):
                worst = max(ring_errors(Strategy(backward=side, **options), problem, truth, steps).values())
                yield Found(f"{options}, backward {side}", str(dtype), worst)
    for mask, tokens, schedule in MASKS if ranks == 4 else ():
        drawn = Problem.draw(LENGTH, _HEADS, dtype=dtype).with_sink()
        strategy = Strategy(ranks_per_node=2, layout="auto" if tokens is None else "zigzag")
        problem, truth = _on(device, drawn), reference(drawn, mask)
        by_name, is_counted, ran = masked_errors(strategy, mask, tokens, problem, truth, steps)
        yield Found(f"{mask}, {tokens}", str(dtype), max(by_name.values()), is_counted and ran == schedule)


def _on(device: torch.device, problem: Problem) -> Problem:
    return Problem(*(None if x is None else x.to(device) for x in problem))  # type: ignore[arg-type]
