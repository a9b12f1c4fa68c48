"""What `burst doctor` prints: versions, devices, kernels, and what becomes of Megatron."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import burst_plugin
from burst_plugin.kernels import KERNELS, Case
from burst_plugin.megatron.releases import about, tree_version

__all__ = ["report"]

_PACKAGES = (
    "torch",
    "triton",
    "megatron-core",
    "transformer-engine",
    "flash-attn",
    "deepspeed",
    "transformers",
    "accelerate",
    "trl",
)


def report(tree: str | None = None) -> Iterator[str]:
    """Lines of plain text, section by section.

    Args:
        tree: a Megatron-LM checkout to look at; None for an installed megatron-core.

    Raises:
        ValueError: `tree` is not a checkout.
    """
    yield f"burst_plugin {burst_plugin.__version__}"
    yield from _section("Versions", _versions())
    yield from _section("Devices", _devices())
    yield from _section("Kernels, fastest first, for plain attention in bfloat16 with heads of 128", _kernels())
    yield from _section("Megatron", _megatron(tree))


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    yield f"\n{title}"
    yield from (f"  {line}" for line in lines)


def _versions() -> Iterator[str]:
    yield f"{'python':20} {platform.python_version()} on {platform.system()} {platform.machine()}"
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
    found = [name for name, available in backends.items() if dist.is_available() and available()]
    yield f"torch.distributed: {', '.join(found) or 'not available'}"


def _kernels() -> Iterator[str]:
    case = Case("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16, 8, 8, 128, 128)
    for name, kernel in KERNELS.items():
        yield f"{name:20} {kernel.refuse(case) or 'can'}"


def _megatron(tree: str | None) -> Iterator[str]:
    if tree is not None:
        root = Path(tree).resolve()
        yield about(tree_version(root))
        hooked = "burst_plugin" in (root / "megatron" / "training" / "__init__.py").read_text()
        yield f"{root} {'installs' if hooked else 'does not install'} burst_plugin itself (see patches/)"
        sys.path.insert(0, str(root))
    try:
        if importlib.util.find_spec("megatron.core") is None:
            raise ModuleNotFoundError("no megatron.core; install megatron-core, or give --megatron TREE")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron warns of what else is not installed
            lines = _what_install_does()
    except ImportError as error:
        yield f"cannot be imported here: {error}"
        return
    yield from lines
    yield "refused with --cp-comm-type burst and --context-parallel-size above 1:"
    yield from _refused()


def _what_install_does() -> list[str]:
    from megatron.core import __file__ as core

    from burst_plugin.megatron import install

    return [f"megatron.core in {Path(core).parent}", *install().report, *_repairs_left_out()]


def _repairs_left_out() -> Iterator[str]:
    from megatron.core import __version__

    from burst_plugin.megatron.releases import parse_version
    from burst_plugin.megatron.repairs import REPAIRS

    for repair in REPAIRS:
        status = repair.status(parse_version(__version__))
        if status != "applied":
            yield f"repair {repair.name}: {status}"


def _refused() -> Iterator[str]:
    from burst_plugin.megatron.arguments import REFUSED_FLAGS
    from burst_plugin.megatron.config import REFUSED

    for name, rule in {**REFUSED, **REFUSED_FLAGS}.items():
        yield f"  {name}: {rule.instead}"
