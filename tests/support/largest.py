"""The largest tensor that any operation returns, of all or of logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Notes in `elements` the size of the largest tensor, of one type if asked for."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype, self.elements = dtype, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor) and self.dtype in (None, x.dtype):
                self.elements = max(self.elements, x.numel())
        return out


class LargestLogits(TorchDispatchMode):
    """Notes in `rows` the most rows of any tensor of `vocabulary` columns, but for weights of `width`."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.vocabulary, self.width, self.rows = vocabulary, width, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if not isinstance(x, Tensor) or not x.is_floating_point():  # bytes of weights are none
                continue
            if self.vocabulary in x.shape and {*x.shape} != {self.vocabulary, self.width}:
                self.rows = max(self.rows, x.numel() // self.vocabulary)
        return out
