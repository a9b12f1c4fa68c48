"""Drawn attention calls, with all options at once: each is plain data, checks itself, and is written as Python."""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from burst_plugin import (
    BidirectionalSpans,
    BlockMask,
    Causal,
    CausalBottomRight,
    Documents,
    Full,
    Keys,
    Mask,
    PerHeadGroup,
    PerRow,
    PrefixLM,
    PrefixTree,
    Scores,
    SlidingWindow,
    Strategy,
    Tokens,
    Topology,
    VirtualRing,
)
from burst_plugin.compute import accumulators as sums
from burst_plugin.sequence import required_rows
from burst_plugin.sequence.mask import Both
from tests.support.reference import NAMES, Problem, Result, reference, reference_lse

__all__ = [
    "BidirectionalSpans",
    "BlockMask",
    "Causal",
    "CausalBottomRight",
    "Documents",
    "Drawn",
    "Full",
    "Keys",
    "PerHeadGroup",
    "PerRow",
    "PrefixLM",
    "PrefixTree",
    "Scores",
    "SlidingWindow",
    "Strategy",
    "Tokens",
    "Topology",
    "torch",
    "written",
]

CAUSAL, PLAIN = Causal(), Scores()
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1.5e-3}
REFUSALS = (  # what may be refused, of what is drawn
    r"runs with different strides do not make tiles",
    r"(forward|backward)='q' cannot be combined with a (bias|selection)",
    r"a selection has rows for the queries of one rank",
    r"alibi_slopes need positions that count alike",
    r"alibi_slopes and dropout go by the positions of tokens, which batch rows",
    r"parts=.* does not divide the \d+ key/value heads",
    r"ulysses_degree=\d+ ranks cannot share",
)


@dataclass(frozen=True)
class Drawn:
    """One call of attention by all ranks of a ring in one process.

    `lengths`, `heads` and `dims` are those of (queries, keys), (queries, keys) and (keys, values); the batch is 2.
    `bias` is its shape, (1 or 2, 1 or query heads); `selection` are groups of heads, and keys per query; `upstream`
    says what the loss depends on, "out", "lse" or "both". `seed` is that of tensors and of the network. `at_once`
    results wait for each other, as on GPUs; blocks of which a rank needs more than `most_rows` go to all ranks.
    """

    topology: Topology
    strategy: Strategy
    lengths: tuple[int, int]
    heads: tuple[int, int]
    dims: tuple[int, int] = (4, 4)
    dtype: torch.dtype = torch.float64
    mask: Mask = CAUSAL
    scores: Scores = PLAIN
    tokens: Tokens | tuple[Tokens, Tokens] | None = None
    has_sink: bool = False
    bias: tuple[int, int] | None = None
    selection: tuple[int, int] | None = None
    upstream: str = "out"
    seed: int = 0
    at_once: int = 1
    most_rows: float = required_rows.MOST_ROWS

    def __repr__(self) -> str:
        """As Python, without what is as usual."""
        return written(self)

    @property
    def line(self) -> str:
        """One line of shell that checks this case again."""
        return f'python -c "from tests.support.drawn import *; {self!r}.check()"'

    @property
    def problem(self) -> Problem:
        """The tensors."""
        problem = Problem.draw(self.lengths, self.heads, self.dims, self.dtype, self.seed)
        problem = problem.with_sink() if self.has_sink else problem
        problem = problem if self.bias is None else problem.with_bias(self.bias)
        problem = problem if self.selection is None else problem.with_selection(*self.selection)
        return problem if self.upstream == "out" else problem.with_dlse()

    def check(self) -> str:
        """Compare with float64 on one process; return why the call is refused, or nothing.

        Raises AssertionError for what differs, for bytes that the schedule does not count, and for a call that is
        refused after bytes were sent, or for a reason that is none of those that may be.
        """
        ring, problem = VirtualRing(self.topology, self.strategy, seed=self.seed), self.problem
        inputs = [x if x is None else x.clone().requires_grad_() for x in (*problem[:3], *problem[4:6])]
        try:
            result, lse = self._attend(ring, inputs)
        except ValueError as error:
            refusal = str(error)
            sent = sum(sum(link.values()) for rank in self._ranks for link in ring.traffic(rank).values())
            if sent or not any(re.match(reason, refusal) for reason in REFUSALS):
                raise
            return refusal
        truth = reference(problem, self.mask, self.scores, self.upstream != "lse")
        for name in NAMES:
            self._compare(name, getattr(result, name), getattr(truth, name))
        self._compare_lse(lse, reference_lse(problem, self.mask, self.scores))
        for rank in self._ranks:
            assert ring.traffic(rank) == ring.expected_traffic(rank), f"bytes of rank {rank}"
        return ""

    @property
    def _ranks(self) -> range:
        return range(self.topology.ranks)

    def _attend(self, ring: VirtualRing, inputs: list[Tensor | None]) -> tuple[Result, Tensor]:
        """What the ring gives."""
        q, k, v, sink, bias = inputs
        assert q is not None
        assert k is not None
        assert v is not None
        options: dict[str, Any] = {"mask": self.mask, "scores": self.scores, "tokens": self.tokens}
        problem = self.problem
        options["selection"] = problem.selection
        with (
            mock.patch.object(sums, "fan_in", return_value=self.at_once),
            mock.patch.object(required_rows, "MOST_ROWS", self.most_rows),
        ):
            out, lse = ring.attention(q, k, v, sink=sink, bias=bias, **options)
            pairs = [(out, problem.dout)] if self.upstream != "lse" else []
            pairs += [] if problem.dlse is None else [(lse, problem.dlse)]
            outputs, upstream = zip(*pairs, strict=True)
            grads = iter(torch.autograd.grad(outputs, [x for x in inputs if x is not None], upstream))
        return Result(out.detach(), *(None if x is None else next(grads) for x in inputs)), lse.detach()

    @cached_property
    def _alone(self) -> Result:
        """What one rank gives, with the same kernel."""
        alone = replace(self, topology=Topology(1, 1), strategy=Strategy(kernel=self.strategy.kernel), tokens=None)
        inputs = [x if x is None else x.clone().requires_grad_() for x in (*self.problem[:3], *self.problem[4:6])]
        return alone._attend(VirtualRing(alone.topology, alone.strategy), inputs)[0]

    def _compare(self, name: str, found: Tensor | None, truth: Tensor | None) -> None:
        """Raise AssertionError unless one is the other.

        Few keys make dq and dk small differences of numbers of size 1, a single one exactly 0: these numbers' size
        is then what errors are relative to; in 16 bits, for the gradient of a bias that heads or batch rows share,
        that of their sum. Where many of them add up to next to nothing, the error may be twice that of one rank,
        within reason.
        """
        if found is None or truth is None:
            assert found is truth is None, name
            return
        assert found.shape == truth.shape, name
        assert bool(found.isfinite().all()), name
        error, size = float((found.double() - truth).norm()), float(truth.norm())
        numbers = truth.numel()
        if name == "dbias" and self.dtype.itemsize == 2:  # each of what adds up to it is rounded
            numbers = self.problem.q.shape[0] * self.heads[0] * truth.shape[2] * truth.shape[3]
        bound = BOUNDS[self.dtype] * max(size, 0.5 * numbers**0.5)
        if error > bound and name != "lse":
            bound = min(2 * float((getattr(self._alone, name).double() - truth).norm()), 10 * bound)
        assert error <= bound, f"{name}: error {error:.3g} of {size:.3g}, bound {bound:.3g}"

    def _compare_lse(self, found: Tensor, truth: Tensor) -> None:
        nothing = truth == -torch.inf
        assert torch.equal(found == -torch.inf, nothing), "lse is -inf where nothing is attended to"
        self._compare("lse", found.masked_fill(nothing, 0.0), truth.masked_fill(nothing, 0.0))


def written(x: Any) -> str:
    """As Python: dataclasses without fields that are as usual, masks combined with `&`."""
    if isinstance(x, Both):
        other = written(x.other)
        return f"{written(x.one)} & {f'({other})' if isinstance(x.other, Both) else other}"
    if isinstance(x, tuple):
        return f"({', '.join(map(written, x))}{',' if len(x) == 1 else ''})"
    if not is_dataclass(x):
        return repr(x)
    values = ((field, getattr(x, field.name)) for field in fields(x))
    given = (f"{field.name}={written(value)}" for field, value in values if _is_unusual(value, field.default))
    return f"{type(x).__name__}({', '.join(given)})"


def _is_unusual(value: Any, default: Any) -> bool:
    return default is MISSING or type(value) is not type(default) or value != default
