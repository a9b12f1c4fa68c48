"""What `burst doctor` prints: versions, devices, kernels, and what every framework reports."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist

import burst_plugin
from burst_plugin.cli.values import write_json
from burst_plugin.frameworks import all_frameworks
from burst_plugin.kernels import KERNELS, Case


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `burst doctor` to its parser: one for every framework, and `--json`."""
    for framework in all_frameworks():
        metavar, text = framework.subject
        parser.add_argument(f"--{framework.name}", metavar=metavar, help=text)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all lines by section as JSON there, too")


def lines(options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines that `burst doctor` prints, section by section; with `--json`, write them to a file as well.

    options: the parsed options of `add_arguments`. Where they name subjects of some frameworks, such as a
    configuration, only these frameworks are reported on.

    Raises:
        ValueError: a subject cannot be read, or asks for something that is refused; a file cannot be written.
    """
    yield f"burst_plugin {burst_plugin.__version__}"
    sections: dict[str, list[str]] = {}
    for title, content in _sections(options):
        yield f"\n{title}"
        sections[title] = []
        for line in content:
            sections[title].append(line)
            yield f"  {line}"
    if options.json is not None:
        write_json(options.json, {"burst_plugin": burst_plugin.__version__, **sections})


def _sections(options: argparse.Namespace) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the titles of sections, with their lines; of frameworks that were asked about, before all others."""
    asked_about = [framework for framework in all_frameworks() if getattr(options, framework.name)]
    for framework in asked_about:
        yield framework.title, framework.report(getattr(options, framework.name))
    yield "Versions", _versions()
    yield "Devices", _devices()
    yield "Kernels, fastest first, for plain attention in bfloat16 with heads of 128", _kernels()
    yield "Kernels for layers that carry a state", _recurrent_kernels()
    for framework in () if asked_about else all_frameworks():
        yield framework.title, framework.report(None)


def _versions() -> Iterator[str]:
    yield f"{'python':20} {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield f"{'torch':20} {torch.__version__}"  # with the build, which the package's metadata may lack
    packages = [name for framework in all_frameworks() for name in framework.packages]
    for name in dict.fromkeys(["triton", *packages, "flash-attn"]):
        yield f"{name:20} {_version(name) or 'not installed'}"


# By the module with the kernels: the packages that have it, of which one is the kernels alone, and what they are for.
_LIBRARIES = MappingProxyType(
    {
        "fla.ops": (("flash-linear-attention", "fla-core"), "gated delta nets, Kimi delta attention"),
        "mamba_ssm.ops.triton.ssd_combined": (("mamba-ssm",), "Mamba-2, Mamba"),
        "causal_conv1d": (("causal-conv1d",), "short convolutions"),
    }
)


def _recurrent_kernels() -> Iterator[str]:
    for module, (packages, layers) in _LIBRARIES.items():
        found = [f"{name} {version}" for name in packages if (version := _version(name))]
        state = _imported(module, found[0]) if found else "not installed: PyTorch's are used"
        yield f"{packages[0]:24} {state} ({layers})"


def _imported(module: str, package: str) -> str:
    """Return a package's name and version, and why its module cannot be imported."""
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a library does when it is imported
        reason = (str(error).splitlines() or [""])[0]
        return f"{package} cannot be imported, {type(error).__name__}: {reason}; PyTorch's are used"
    return package


def _version(package: str) -> str:
    """Return the version of an installed package, "" if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


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
