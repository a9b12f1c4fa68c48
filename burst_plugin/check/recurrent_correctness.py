"""Whether layers that carry a state compute on the ranks of the ring what one rank would, gradients included.

Every function of `burst_plugin.recurrent` runs in float64, on packed documents, one of which lies on all ranks: by
states, and by heads where ranks can exchange them. Every rank compares its own part with the results of one rank,
which it computes itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from burst_plugin import recurrent
from burst_plugin.check.findings import CORRECTNESS, FAILED, NOT_SHOWN, OK, Finding
from burst_plugin.check.problem import worst
from burst_plugin.check.ring_correctness import first_error, heads_for
from burst_plugin.check.world import World
from burst_plugin.context import ContextParallel
from burst_plugin.kernels.trial import difference
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.masks import Documents

WHAT = "layers with a state"
_BOUND = 1e-9  # of a relative 2-norm in float64; a state that is lost or mixed up is far more
_TOKENS = 12  # of a rank
_DIM, _SIZE = 8, 4

# How numbers are drawn, by the letter in front of a tensor's name.
_DRAWN: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"-": lambda x: -F.softplus(x), "+": F.softplus, "%": torch.sigmoid}
)


class RecurrentCase(NamedTuple):
    """A recurrent function to check, with the names and sizes of the tensors that it takes.

    tokens: the tensors with a row for each token: by argument, the sizes of one row.
    parameters: the other tensors: by argument, their sizes. In both, a name may begin with "-" or "+" for numbers of
        that sign, or with "%" for numbers from 0 to 1.
    has_heads: whether ranks can exchange its heads in place of states.
    kind: what tells it apart from other cases of the same function, "" for nothing.
    """

    function: Callable[..., Tensor]
    tokens: Mapping[str, tuple[int, ...]]
    parameters: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    has_heads: bool = False
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.function.__name__}{self.kind}"


def _windows(x: Tensor, place: recurrent.Placement) -> Tensor:
    """Add up each token and the two before it."""
    return recurrent.with_tokens_before(lambda x: x + F.pad(x, (0, 0, 2, 0))[:, :-2], x, 2, place)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor, place: recurrent.Placement) -> Tensor:
    return recurrent.causal_convolution(x, weight, bias, place=place, activation="silu")


_windows.__name__, _convolution.__name__ = "with_tokens_before", "causal_convolution"


def recurrent_cases(heads: int) -> list[RecurrentCase]:
    """Return the cases to check: one or more for each function of `burst_plugin.recurrent`.

    heads: how many heads functions with heads get, an even number.
    """
    keys, values = (heads // 2, _DIM), (heads, _SIZE)
    delta = {"q": keys, "k": keys, "v": values, "-g": (heads,), "%beta": (heads,)}
    head_channels, group = (heads, _DIM), (heads // 2, _SIZE)
    lstm = {"q": head_channels, "k": head_channels, "v": values, "igate": (heads,), "fgate": (heads,)}
    channels = {"x": (_DIM,), "+dt": (_DIM,), "B": (_SIZE,), "C": (_SIZE,)}
    return [
        RecurrentCase(_windows, {"x": (_DIM,)}),
        RecurrentCase(_convolution, {"x": (_DIM,)}, {"weight": (_DIM, 4), "bias": (_DIM,)}),
        RecurrentCase(recurrent.gated_delta_rule, delta, has_heads=True),
        RecurrentCase(
            recurrent.gated_delta_rule, {**delta, "-g": head_channels}, has_heads=True, kind=" by channels"
        ),
        RecurrentCase(
            recurrent.state_space,
            {"x": head_channels, "+dt": (heads,), "B": group, "C": group},
            {"-A": (heads,)},
            has_heads=True,
        ),
        RecurrentCase(recurrent.selective_scan, channels, {"-A": (_DIM, _SIZE)}),
        RecurrentCase(
            recurrent.decay_attention,
            {"q": head_channels, "k": head_channels, "v": values},
            {"-log_decay": (heads,)},
            has_heads=True,
        ),
        RecurrentCase(recurrent.affine_scan, {"x": (_DIM,), "-log_decay": (_DIM,)}),
        RecurrentCase(recurrent.rwkv, {"k": (_DIM,), "v": (_DIM,)}, {"-log_decay": (_DIM,), "bonus": (_DIM,)}),
        RecurrentCase(recurrent.mlstm, lstm),
    ]


def check_recurrent(world: World) -> Iterator[Finding]:
    """Yield a finding on whether the functions of `burst_plugin.recurrent` compute as on one rank; collective.

    All ranks of `world` are the ring, with states sent and then with heads exchanged. With one rank nothing is shown.
    """
    if world.size == 1:
        yield Finding(CORRECTNESS, NOT_SHOWN, WHAT, "there is one rank, which sends no states; start 2 or more")
        return
    start = time.perf_counter()
    outcomes = world.attempt(WHAT, lambda: _errors(world))
    seconds = time.perf_counter() - start
    error = first_error(outcomes)
    if error:
        yield Finding(CORRECTNESS, FAILED, WHAT, error, {}, seconds)
        return
    by_rank: list[dict[str, float]] = [outcome.value for outcome in outcomes]
    wrong = [[name for name, x in errors.items() if not x <= _BOUND] for errors in by_rank]
    largest = [worst(errors) for errors in by_rank]
    figures = {"largest_errors": largest}
    if any(wrong):
        rank = max(range(world.size), key=lambda other: len(wrong[other]))  # others have sums with its part
        name, more = wrong[rank][0], len(wrong[rank]) - 1
        text = f"{name} is off by {by_rank[rank][name]:.1e} (bound {_BOUND:.0e}), on {world.name(rank)}"
        text += f"; and {more} results more" if more else ""
        yield Finding(CORRECTNESS, FAILED, WHAT, text, figures, seconds)
        return
    name, most = max(largest, key=lambda each: each[1])
    functions = len({case.function for case in recurrent_cases(2)})
    text = f"{functions} functions as on one rank, by states and by heads; largest error {most:.1e} ({name})"
    yield Finding(CORRECTNESS, OK, WHAT, text, figures, seconds)


def _errors(world: World) -> dict[str, float]:
    """Return the error of every result of this rank, by function and result."""
    all_errors: dict[str, float] = {}
    heads, _ = heads_for(world.size)
    for how in ("state", "heads"):
        cp = world.ring(recurrent=how)
        for case in recurrent_cases(heads):
            if how == "state" or case.has_heads:
                errors = case_errors(case, cp, world.device)
                all_errors |= {f"{name} of {case}, by {how}": error for name, error in errors.items()}
        cp.close()
    return all_errors


def case_errors(case: RecurrentCase, cp: ContextParallel, device: torch.device) -> dict[str, float]:
    """Run the function of a case on the ring `cp`, and on one rank; return the differences by result; collective.

    Returns the relative errors, as 2-norms, of this rank's part of the output, "out", and of gradients, such as "dq";
    gradients of parameters are added up over ranks.
    """
    tokens = Tokens(_TOKENS * cp.ranks)
    mask = Documents((0, 5, tokens.length - 3, tokens.length))
    source = torch.Generator("cpu").manual_seed(7)  # the same on every rank
    inputs = {name: _draw(name, (1, tokens.length, *size), source, device) for name, size in case.tokens.items()}
    parameters = {name: _draw(name, size, source, device) for name, size in case.parameters.items()}
    alone = recurrent.Placement(ContextParallel(hierarchy=[1]), mask, tokens)
    expected = _results(case, inputs, parameters, alone, _ramp)
    here = {name: cp.shard(x, tokens=tokens) for name, x in inputs.items()}
    place = recurrent.Placement(cp, mask, tokens)
    results = _results(case, here, parameters, place, lambda _: cp.shard(_ramp(expected["out"]), tokens=tokens))
    errors = {}
    for name, x in results.items():
        if name.removeprefix("d") in map(_bare, parameters):  # of which each rank has a part
            dist.all_reduce(x)
            errors[name] = difference(x, expected[name])
        else:
            errors[name] = difference(x, cp.shard(expected[name], tokens=tokens))
    return errors


def _bare(name: str) -> str:
    return name.lstrip("-+%")


def _draw(name: str, shape: tuple[int, ...], source: torch.Generator, device: torch.device) -> Tensor:
    x = torch.randn(shape, generator=source, dtype=torch.float64, device="cpu").to(device)
    return _DRAWN[name[0]](x) if name[0] in _DRAWN else x


def _ramp(out: Tensor) -> Tensor:
    """Return a gradient for an output: numbers that all differ."""
    return torch.arange(out.numel(), dtype=out.dtype, device=out.device).view(out.shape).sin()


def _results(
    case: RecurrentCase,
    tokens: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    place: recurrent.Placement,
    dout: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """Return the output and the gradients of all tensors, by name."""
    leaves = {_bare(name): x.detach().clone().requires_grad_() for name, x in (*tokens.items(), *parameters.items())}
    out = case.function(**leaves, place=place)
    grads = torch.autograd.grad(out, tuple(leaves.values()), dout(out))
    return {"out": out.detach(), **{f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}}
