"""How fast ranks compute layers that carry a state: by kernels of libraries, or in PyTorch where there are none."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from burst_plugin.check.findings import OK, PERFORMANCE, Finding
from burst_plugin.check.settings import Settings
from burst_plugin.check.world import World
from burst_plugin.recurrent.kernels.delta_rule import delta_rule
from burst_plugin.recurrent.kernels.state_space import state_space
from burst_plugin.training import mixers
from burst_plugin.training.recurrent_time import BACKWARD

_PYTORCH = "PyTorch"


class RecurrentRate(NamedTuple):
    """The measured speed of a kernel for layers of one kind that carry a state, on the slowest rank.

    kind: the layers, such as "Mamba-2". library: whose kernel it is, or "PyTorch" for this package's own.
    flops_per_s: the operations of both passes, over the time of both.
    """

    kind: str
    library: str
    forward_tokens_per_s: float
    backward_tokens_per_s: float
    flops_per_s: float


class _TimedMixer(NamedTuple):
    """A mixer with the tensors of its kernel, made for some tokens, and the kernel."""

    mixer: mixers.TokenMixer
    library: str
    tensors: Sequence[Tensor]
    kernel: Callable[..., Tensor]


def recurrent_rates_of(world: World, settings: Settings) -> list[RecurrentRate]:
    """Return the speed of kernels for gated delta nets and Mamba-2, measured once for each `world`; collective.

    It is measured on as many tokens as a rank has in the timed ring.
    """
    if "recurrent rates" not in world.measured:
        sizes = settings.sizes(world.device)
        timed = [_delta_rule(sizes.tokens, world.device), _state_space(sizes.tokens, world.device)]
        world.measured["recurrent rates"] = [_rate(world, each, sizes.tokens, sizes.rounds) for each in timed]
    rates: list[RecurrentRate] = world.measured["recurrent rates"]
    return rates


def recurrent_finding(world: World, settings: Settings) -> Finding:
    """Return a finding with the speed of kernels for gated delta nets and Mamba-2, by pass; collective."""
    start = time.perf_counter()
    rates = recurrent_rates_of(world, settings)
    shown = ", ".join(
        f"{rate.kind} {rate.forward_tokens_per_s:.3g}/{rate.backward_tokens_per_s:.3g} ({rate.library})"
        for rate in rates
    )
    figures = {rate.kind: rate._asdict() for rate in rates}
    text = f"tokens/s forward/backward: {shown}"
    return Finding(PERFORMANCE, OK, "kernels of layers with a state", text, figures, time.perf_counter() - start)


def _rate(world: World, timed: _TimedMixer, tokens: int, rounds: int) -> RecurrentRate:
    xs = [x.requires_grad_() for x in timed.tensors]
    best = [float("inf")] * 2
    for number in range(rounds + 1):
        world.together()
        start = time.perf_counter()
        out = timed.kernel(*xs)
        world.synchronize()
        middle = time.perf_counter()
        torch.autograd.grad(out, xs, torch.ones_like(out))
        world.synchronize()
        if number:  # the first warms up
            best = [min(best[0], middle - start), min(best[1], time.perf_counter() - middle)]
    by_rank = world.exchange(f"{timed.mixer.kind} timed", best)
    forward_s, backward_s = map(max, zip(*by_rank, strict=True))
    operations = timed.mixer.flops * (1 + BACKWARD) * tokens
    return RecurrentRate(
        timed.mixer.kind,
        timed.library,
        tokens / forward_s,
        tokens / backward_s,
        operations / (forward_s + backward_s),
    )


def _draw(shape: Sequence[int], device: torch.device) -> Tensor:
    source = torch.Generator("cpu").manual_seed(7)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.randn(1, *shape, generator=source, device="cpu").to(device, dtype)


def library_function(module: str, name: str, device: torch.device) -> Any:
    """Return a function of a library of kernels for GPUs; None without a GPU, or where it cannot be imported."""
    if device.type != "cuda":
        return None
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, RuntimeError, OSError):  # RuntimeError, OSError: built for another PyTorch
        return None


def _delta_rule(tokens: int, device: torch.device) -> _TimedMixer:
    keys, values = ((16, 128), (32, 128)) if device.type == "cuda" else ((2, 64), (4, 64))
    q, k = (F.normalize(_draw((tokens, *keys), device), dim=-1) for _ in range(2))
    v, gates = _draw((tokens, *values), device), _draw((tokens, values[0]), device)
    inputs = _leaves((q, k, v, F.logsigmoid(gates.float()), gates.sigmoid()))
    mixer = mixers.delta_rule(hidden=1, keys=keys, values=values, width=1)
    library = library_function("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", device)
    if library is None:
        return _TimedMixer(mixer, _PYTORCH, inputs, lambda *xs: delta_rule(*xs)[0])
    return _TimedMixer(
        mixer,
        "flash-linear-attention",
        inputs,
        lambda q, k, v, g, beta: library(q, k, v, g=g, beta=beta, scale=1.0)[0],
    )


def _state_space(tokens: int, device: torch.device) -> _TimedMixer:
    heads, dim, groups, size = (128, 64, 8, 128) if device.type == "cuda" else (8, 32, 2, 32)
    x, dt = _draw((tokens, heads, dim), device), F.softplus(_draw((tokens, heads), device))
    B, C = (_draw((tokens, groups, size), device) for _ in range(2))
    A = -torch.ones(heads, device=device)
    mixer = mixers.state_space(hidden=1, heads=heads, head_dim=dim, groups=groups, size=size, width=1)
    library = library_function("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", device)
    inputs = _leaves((x, dt, A, B, C))
    if library is None:
        return _TimedMixer(mixer, _PYTORCH, inputs, lambda *xs: state_space(*xs)[0])
    return _TimedMixer(mixer, "mamba-ssm", inputs, lambda *xs: library(*xs, chunk_size=256))


def _leaves(xs: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach() for x in xs]
