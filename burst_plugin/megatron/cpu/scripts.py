"""What the training scripts of a Megatron-LM checkout need without a GPU, beyond `cpu.enable()`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import NonCallableMock

import typing_extensions

from burst_plugin.frameworks.wrapping import wrap
from burst_plugin.megatron.cpu.absent_triton import triton_or_stand_in

_LOCAL_ATTENTION = "megatron.core.transformer.dot_product_attention"
_HELPERS = "megatron.core.datasets.helpers_cpp"
# Functions that compile or warm up CUDA code, or insist on it, by module; here they do nothing. Not every release has
# all of them.
_UNNEEDED = {
    "megatron.legacy.fused_kernels": "load",
    "megatron.training.initialize": "_warmup_jit_function",
    "megatron.core.inference.communication_utils": "_is_cuda",
}


def prepare_training_scripts(checkout: Path) -> list[str]:
    """Prepare for `pretrain_*.py` of a Megatron-LM checkout, besides `cpu.enable()`; return a line for each change.

    All of megatron comes from the checkout, except the compiled dataset helpers of an installed megatron-core if the
    checkout's are not built. Tested with `pretrain_gpt.py`, and `pretrain_mamba.py` or `pretrain_hybrid.py`, of
    core_v0.16.1, 0.17.1, 0.18.2, 0.19.0 and main of August 2026, which also need six, regex, pydantic and packages of
    tokenizers.

    Args:
        checkout: the directory that holds `pretrain_gpt.py` and `megatron/`.
    """
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    if not hasattr(typing, "override"):  # Megatron-LM from 0.18 on is written for Python 3.12
        vars(typing)["override"] = typing_extensions.override
    unneeded = dict(_UNNEEDED)
    if _borrow_helpers():
        unneeded["megatron.core.datasets.utils"] = "compile_helpers"
    with triton_or_stand_in():
        from burst_plugin.megatron.cpu.local_layers import use_local_layers

        use_local_layers()  # before megatron.training, which imports specs
        present = {module: name for module, name in unneeded.items() if _exists(module)}
        for module, name in present.items():
            vars(importlib.import_module(module))[name] = _nothing
        wrap(importlib.import_module(_LOCAL_ATTENTION).DotProductAttention, "__init__", with_head_dims)
    replace_mocks_by_classes()
    return [
        f"megatron: {', '.join(present.values())} do nothing",
        "megatron: layers of Transformer Engine are Megatron's own, or empty classes; DotProductAttention takes head "
        "dims of latent attention",
    ]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, in place of functions that compile or warm up CUDA code."""


def with_head_dims(
    original: Callable[..., None],
    core: Any,
    *args: Any,
    k_channels: int | None = None,
    v_channels: int | None = None,
    **kwargs: Any,
) -> None:
    """Build Megatron's own core attention for multi-latent attention, too, whose values may have another head dim."""
    original(core, *args, **kwargs)
    if v_channels is not None:
        core.hidden_size_per_partition = v_channels * core.num_attention_heads_per_partition


def replace_mocks_by_classes() -> None:
    """Put an empty class in place of each mock that stands for a class, so that `isinstance` takes it.

    Without Transformer Engine, Megatron has mocks in place of classes that would be derived from that package's.
    """
    classes: dict[int, type] = {}
    for module in [sys.modules[name] for name in sys.modules if name.startswith("megatron.")]:
        for name, value in list(vars(module).items()):
            if isinstance(value, NonCallableMock) and name[0].isupper():
                vars(module)[name] = classes.setdefault(id(value), type(name, (), {}))


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not there
        return False


def _borrow_helpers() -> bool:
    """Use the compiled dataset helpers of an installed megatron-core. Return False if there are none to be found."""
    if _exists(_HELPERS):
        return True
    try:
        files = importlib.metadata.files("megatron-core") or []
    except importlib.metadata.PackageNotFoundError:
        return False
    for file in files:
        if file.name.startswith("helpers_cpp."):
            spec = importlib.util.spec_from_file_location(_HELPERS, str(file.locate()))
            assert spec is not None
            assert spec.loader is not None
            sys.modules[_HELPERS] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[_HELPERS])
            return True
    return False
