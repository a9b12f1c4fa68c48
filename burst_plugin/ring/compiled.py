"""Attention inside `torch.compile`: one opaque step between two graphs.

The compiler may neither look into the ring, whose order of messages all ranks share, nor take its options for
constants (`torch.compiler.assume_constant_result` forgets the fields of dataclasses made in compiled code, seen in
torch 2.13). So every attention is one graph break, with what comes before and after it compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


@torch.compiler.disable(reason="burst attention communicates around a ring")  # type: ignore[untyped-decorator,no-untyped-call]
def opaque(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` and return its result, as one step between two graphs of `torch.compile`, not traced."""
    return function(*args, **kwargs)
