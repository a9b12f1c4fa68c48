"""The description of DeepSpeed for the launcher and `burst doctor`. Imports no DeepSpeed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from burst_plugin.deepspeed.config import BLOCK, REFUSED, Block, conflicts, loads, near_misses
from burst_plugin.frameworks.description import Framework
from burst_plugin.strategy import AUTO


def report(path: str | None) -> Iterator[str]:
    """Yield the lines that `burst doctor --deepspeed` prints.

    They say whether DeepSpeed is installed, what the block "burst_attention" of a configuration asks for, and which
    options of DeepSpeed are refused beside it. `path` is the configuration's file; None to leave it out.

    Raises ValueError if the configuration cannot be read, or cannot be honoured.
    """
    installed = importlib.util.find_spec("deepspeed") is not None
    yield "installed" if installed else "not installed; pip install deepspeed"
    if path is not None:
        config = _read(path)
        yield f"{path}: {_asked_for(config)}"
        if BLOCK in config:
            yield (
                "DeepSpeed ignores the block unless the script calls burst_plugin.deepspeed.install(), or is started "
                "by `-m burst_plugin.run`"
            )
    yield f'refused beside an enabled block "{BLOCK}":'
    for name, rule in REFUSED.items():
        yield f"  {name}: {rule.instead}"


def _read(path: str) -> dict[str, Any]:
    try:
        config = loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}; give a file with a DeepSpeed configuration in JSON") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: got {type(config).__name__}, expected a DeepSpeed configuration, {{...}}")
    return config


def _asked_for(config: dict[str, Any]) -> str:
    """Return the options of the block in words. Raise ValueError for options that are not valid, or that clash."""
    block = Block.of(config)
    if block is None:
        similar = [
            f'; it has "{key}": write "{BLOCK}" at the top level if that is what was meant'
            for key in near_misses(config)
        ]
        return f'no block "{BLOCK}", so that burst attention is off{"".join(similar)}'
    if not block.enabled:
        return "burst attention is off: enabled is false"
    size = block.context_parallel_size
    clashes = conflicts(config, config.get("sequence_parallel_size", 1) if size == AUTO else int(size))
    if clashes:
        raise ValueError("; ".join(clashes))
    chosen = {each.name: getattr(block.strategy, each.name) for each in fields(block.strategy)}
    defaults = {each.name: each.default for each in fields(block.strategy)}
    changed = [] if block.loss == AUTO else [f"loss={block.loss!r}"]
    changed += [f"{name}={value!r}" for name, value in chosen.items() if value != defaults[name]]
    return f"burst attention is on, {', '.join([f'context_parallel_size={size}', *changed])}"


FRAMEWORK = Framework(
    name="deepspeed",
    title="DeepSpeed",
    distribution="deepspeed",
    packages=("deepspeed", "transformers", "accelerate", "trl"),
    subject=("FILE", f'a DeepSpeed configuration, to look at its block "{BLOCK}" and what clashes with it'),
    switch=f'the block "{BLOCK}" in the configuration (DeepSpeed)',
    words=("deepspeed",),
    report=report,
    launcher_variables=("CROSS_SIZE", "LOCAL_SIZE"),
    launcher_options=("--local_rank",),
)
