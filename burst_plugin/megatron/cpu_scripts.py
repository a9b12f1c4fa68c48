"""What the training scripts of a Megatron-LM checkout need without a GPU, beyond `burst_plugin.megatron.cpu`."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

from burst_plugin.megatron import cpu

__all__ = ["enable_training_scripts", "is_checkout"]


def is_checkout(directory: Path) -> bool:
    """Whether a directory is the root of a Megatron-LM checkout."""
    return (directory / "megatron" / "training").is_dir()


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In place of what compiles or warms up CUDA code."""


def enable_training_scripts(checkout: Path) -> list[str]:
    """`cpu.enable()`, and what `pretrain_*.py` of a Megatron-LM checkout need besides.

    megatron.core is the installed one, if one is installed; the rest is the checkout's. Tried with
    `pretrain_gpt.py` of core_v0.16.1, which also wants six, regex, pydantic and packages of tokenizers.

    Args:
        checkout: the directory that holds `pretrain_gpt.py` and `megatron/`.

    Returns:
        As `cpu.enable()`.
    """
    lines = cpu.enable()
    if str(checkout) not in sys.path:
        sys.path.append(str(checkout))
    if importlib.util.find_spec("triton") is None:
        kernels = types.ModuleType("megatron.core.transformer.custom_layers.batch_invariant_kernels")
        vars(kernels)["enable_batch_invariant_mode"] = _nothing
        sys.modules.setdefault(kernels.__name__, kernels)
    unneeded = {"megatron.legacy.fused_kernels": "load", "megatron.training.initialize": "_warmup_jit_function"}
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        unneeded["megatron.core.datasets.utils"] = "compile_helpers"
    for module, name in unneeded.items():
        vars(importlib.import_module(module))[name] = _nothing
    return [*lines, f"megatron: {', '.join(unneeded.values())} do nothing"]
