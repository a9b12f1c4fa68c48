"""`burst init`: write a small training script that runs, for one framework, to copy lines from into your own.

Each folder of `starters` is one kind: the files to write, and `launch.txt`, the command that starts them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import torch

_RANKS = 2
_LAUNCH = "launch.txt"
_STARTERS = files("burst_plugin.cli") / "starters"
_DESCRIPTION = """\
Write a small training run that works as it is, on two GPUs or on a CPU: the
script, its configuration, and how to launch it. Numbered lines are what a
script of your own needs.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `burst init` to its parser: the kind of script, and the folder to write to."""
    parser.description, parser.formatter_class = _DESCRIPTION, argparse.RawDescriptionHelpFormatter
    kinds = sorted(folder.name for folder in _STARTERS.iterdir() if (folder / _LAUNCH).is_file())
    parser.add_argument("kind", choices=kinds, help="what trains")
    parser.add_argument("folder", type=Path, metavar="DIR", help="where to write; made if it is not there")


def lines(options: argparse.Namespace) -> Iterator[str]:
    """Write the files of a kind of script to a folder, and yield the lines that `burst init` prints: how to start it.

    options: the parsed arguments of `add_arguments`. Raises ValueError for files that are there already, or cannot be
    written.
    """
    starter = _STARTERS / options.kind
    sources = sorted((x for x in starter.iterdir() if x.is_file() and x.name != _LAUNCH), key=lambda x: x.name)
    there = [source.name for source in sources if (options.folder / source.name).exists()]
    if there:
        raise ValueError(f"{options.folder} has {', '.join(there)} already; give another folder")
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        for source in sources:
            (options.folder / source.name).write_text(source.read_text())
    except OSError as error:
        raise ValueError(f"{options.folder} cannot be written to: {error.strerror}; give a folder") from error
    cpu = " --cpu" if torch.cuda.device_count() < _RANKS else ""
    yield f"Written to {options.folder}: {', '.join(source.name for source in sources)}. Start it with"
    yield f"  cd {options.folder} && {(starter / _LAUNCH).read_text().strip().format(cpu=cpu)}"
