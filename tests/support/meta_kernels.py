"""Shapes of tensors without values, worked out by PyTorch's compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import _meta_registrations as registered
from torch._decomp import global_decomposition_table
from torch._ops import OpOverload

_ATTRIBUTE = "_meta_lib_dont_use_me_use_register_meta"  # of the library of kernels in Python
_Kernels = Mapping[OpOverload, Callable[..., Any]]


@contextmanager
def compiled_meta_kernels() -> Iterator[None]:
    """Let operators on the device "meta" run compiled kernels where there are any, until the end of the block.

    PyTorch prefers those in Python, which also know symbolic shapes. A product takes them 155 us in place of 1, and a
    layer has hundreds. Switching takes 0.06 s.
    """
    in_python = _registered()
    getattr(registered, _ATTRIBUTE)._destroy()
    _register({op: kernel for op, kernel in in_python.items() if not _has_kernel(op)})
    try:
        yield
    finally:
        getattr(registered, _ATTRIBUTE)._destroy()
        _register(in_python)


def _registered() -> _Kernels:
    """Return the kernels in Python."""
    names = {key.split("/")[1] for key in getattr(registered, _ATTRIBUTE)._op_impls}
    found: dict[OpOverload, Callable[..., Any]] = {}
    for kind in ("meta", "post_autograd", "pre_autograd"):  # of several the first counts
        for op, kernel in global_decomposition_table[kind].items():
            if isinstance(op, OpOverload) and op.namespace == "aten" and op.name().removeprefix("aten::") in names:
                found.setdefault(op, kernel)
    return found


def _has_kernel(op: OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "Meta")


def _register(kernels: _Kernels) -> None:
    library = torch.library.Library("aten", "IMPL", "Meta")
    for op, kernel in kernels.items():
        library.impl(op, kernel)
    setattr(registered, _ATTRIBUTE, library)
