"""What `burst doctor` prints: versions, devices, kernels, and what becomes of each framework."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

import burst_plugin
from burst_plugin.frameworks import FRAMEWORKS, adapter_module
from burst_plugin.kernels import KERNELS, Case

__all__ = ["framework_report", "report"]

_PACKAGES = (
    "triton",
    "megatron-core",
    "transformer-engine",
    "flash-attn",
    "deepspeed",
    "transformers",
    "accelerate",
    "trl",
)


def report(given: Mapping[str, str | None]) -> Iterator[str]:
    """Lines of plain text, section by section.

    Args:
        given: by framework: a Megatron-LM checkout to look at, a DeepSpeed configuration. Where there is any, only
            these frameworks are reported on.

    Raises:
        ValueError: such a thing cannot be read, or asks for what is refused.
    """
    yield f"burst_plugin {burst_plugin.__version__}"
    yield from _section("Versions", _versions())
    yield from _section("Devices", _devices())
    yield from _section("Kernels, fastest first, for plain attention in bfloat16 with heads of 128", _kernels())
    for name in [name for name in FRAMEWORKS if given.get(name)] or FRAMEWORKS:
        framework = framework_report(name)
        yield from _section(framework.TITLE, framework.lines(given.get(name)))


def framework_report(name: str) -> Any:
    """The module `report` of a framework's adapter, with TITLE, METAVAR, HELP and `lines(given)`."""
    return adapter_module(name, "report")


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    yield f"\n{title}"
    yield from (f"  {line}" for line in lines)


def _versions() -> Iterator[str]:
    yield f"{'python':20} {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield f"{'torch':20} {torch.__version__}"  # with what it is built for, which its package does not always say
    for name in _PACKAGES:
        try:
            yield f"{name:20} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{name:20} not installed"


def _devices() -> Iterator[str]:
    yield f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} CPU cores"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        device = torch.cuda.get_device_properties(index)
        yield f"cuda:{index} {device.name}, {device.total_memory / 2**30:.0f} GiB, sm_{device.major}{device.minor}"
    if not count:
        yield f"no GPU (torch is built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPUs'})"
    backends = {"nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available}
    usable = [name for name, available in backends.items() if dist.is_available() and available()]
    yield f"torch.distributed: {', '.join(usable) or 'not available'}"


def _kernels() -> Iterator[str]:
    case = Case("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16, 8, 8, 128, 128)
    for name, kernel in KERNELS.items():
        yield f"{name:20} {kernel.refuse(case) or 'can'}"
