"""The section "peers": what other libraries take for the same attention, where they are installed.

Each is called as its own documentation says, with as many tokens of a causal sequence on each rank as the ring has,
and timed interleaved with the ring. What a library refuses or raises is said, and fails nothing here. It is the last
section: with NCCL a library that raises on one rank alone keeps the others waiting until the time-out ends them.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from burst_plugin.attention import burst_attention
from burst_plugin.check.findings import NOT_SHOWN, OK, Finding, shown_time
from burst_plugin.check.problem import Problem
from burst_plugin.check.rates import timed_heads
from burst_plugin.check.right_ring import first_error
from burst_plugin.check.settings import Settings, load_kernel
from burst_plugin.check.world import World

__all__ = ["PEERS", "measure_peers", "peers"]

Step = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
Peer = Callable[[World, tuple[int, int], int], Step]


def peers(world: World, settings: Settings) -> Iterator[Finding]:
    """Yield what each library takes beside the ring; collective."""
    if world.size == 1:
        yield Finding("peers", NOT_SHOWN, "other libraries", "there is one rank, which has no ring; start 2 or more")
    elif world.device.type != "cuda":
        yield Finding("peers", NOT_SHOWN, "other libraries", "they want GPUs; benchmarks/ has stand-ins")
    elif settings.quick:
        yield Finding("peers", NOT_SHOWN, "other libraries", "leave out --quick")
    else:
        yield from measure_peers(world, settings)


def measure_peers(world: World, settings: Settings) -> Iterator[Finding]:
    """Yield a finding for each library, and for Ulysses as this package runs it; collective."""
    sizes, device = settings.sizes(world.device), world.device
    heads, dim = timed_heads(settings, device), settings.model.head_dim
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    local = Problem.draw((sizes.tokens, sizes.tokens), heads, (dim, dim), dtype, device)
    q, k, v = (x.requires_grad_() for x in local[:3])
    kernel = load_kernel(settings.kernel)
    rings = [world.ring(kernel=kernel, ulysses_degree=degree) for degree in (1, world.size)]
    ours, ulysses = (_with_gradients(partial(burst_attention, cp=cp)) for cp in rings)
    for name, (module, made) in {**PEERS, "Ulysses": ("torch", lambda *_: ulysses)}.items():
        start = time.perf_counter()
        if not _is_installed(module):
            yield Finding("peers", NOT_SHOWN, name, f"{module} is not installed")
            continue

        def both(made: Peer = made) -> list[list[float]]:
            step = made(world, heads, dim)
            for each in (ours, step, ours, step):  # warm up
                each(q, k, v, local.dout)
            by_turns = [partial(each, q, k, v, local.dout) for each in (ours, step)]
            return [[world.timed(work) for work in by_turns] for _ in range(sizes.rounds)]

        yield _finding(name, world.attempt(name, both), time.perf_counter() - start)
    for cp in rings:
        cp.close()


def _finding(name: str, found: list[Any], seconds: float) -> Finding:
    error = first_error(found)
    if error:
        return Finding("peers", NOT_SHOWN, name, f"it does not run here: {error}", {}, seconds)
    turns = zip(*(each.value for each in found), strict=True)
    ring_s, peer_s = (median(x) for x in zip(*(map(max, zip(*turn, strict=True)) for turn in turns), strict=True))
    text = f"both passes {shown_time(peer_s)}, the ring {shown_time(ring_s)}: {peer_s / ring_s:.2f} x the ring"
    return Finding("peers", OK, name, text, {"peer_s": peer_s, "ring_s": ring_s}, seconds)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _pytorch(world: World, heads: tuple[int, int], dim: int) -> Step:
    """Return PyTorch's `context_parallel`, which rings in place of `scaled_dot_product_attention`."""
    context_parallel = importlib.import_module("torch.distributed.tensor.experimental").context_parallel
    mesh = init_device_mesh(world.device.type, (world.size,))

    def step(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Any:
        whole = torch.zeros(world.size * q.shape[1], device=q.device)  # of which it takes the length, and cuts it
        with context_parallel(mesh, buffers=[whole], buffer_seq_dims=[0]):
            return torch.autograd.grad(_attend(q, k, v), (q, k, v), dout)

    return step


def _ring_flash_attn(world: World, heads: tuple[int, int], dim: int) -> Step:
    """Return its ring in zigzag, for causal attention."""
    attend = importlib.import_module("ring_flash_attn").zigzag_ring_flash_attn_func
    return _with_gradients(lambda q, k, v: attend(q, k, v, causal=True, group=dist.group.WORLD))


def _transformer_engine(world: World, heads: tuple[int, int], dim: int) -> Step:
    """Return Transformer Engine's ring of point-to-point messages."""
    layer = importlib.import_module("transformer_engine.pytorch").DotProductAttention(
        heads[0],
        dim,
        num_gqa_groups=heads[1],
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type="causal",
    )
    layer.set_context_parallel_group(dist.group.WORLD, list(range(world.size)), torch.cuda.Stream(), "p2p")  # type: ignore[no-untyped-call]
    return _with_gradients(lambda q, k, v: layer(q, k, v).unflatten(-1, (heads[0], dim)))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention, [B, S, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    is_grouped = q.shape[1] != k.shape[1]
    out: Tensor = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
    return out.transpose(1, 2)


def _with_gradients(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Step:
    return lambda q, k, v, dout: torch.autograd.grad(attend(q, k, v), (q, k, v), dout)


PEERS: Mapping[str, tuple[str, Peer]] = MappingProxyType(
    {
        "Transformer Engine": ("transformer_engine", _transformer_engine),
        "ring-flash-attn": ("ring_flash_attn", _ring_flash_attn),
        "PyTorch context_parallel": ("torch", _pytorch),
    }
)
