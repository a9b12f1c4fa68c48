"""A cache of values read from tensors: reading a tensor of a GPU stalls the host."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["TensorCache"]

_T = TypeVar("_T")


class TensorCache:
    """Values read from tensors, kept until the memory is freed or written to, or the microbatch ends.

    Views of the same memory, such as the detached tensors of recomputation, are the same tensor here. PyTorch's
    version counter misses writes by collectives and NumPy. So a value also expires when a model is called, which
    `moment` tells, or when a layer asks that has asked before: programs with one buffer for all microbatches may then
    have written the next microbatch into it.
    """

    def __init__(self, moment: Callable[[], Hashable] = lambda: None) -> None:
        self._moment = moment
        self._known: Any = WeakIdKeyDictionary()  # by storage

    def get(self, tensor: Tensor, question: Hashable, read: Callable[[], _T], layer: int) -> _T:
        """Return what `read()` returned for `tensor` when `question` was first asked since the value expired.

        layer: the id of the layer that asks now.
        """
        version = None if tensor.is_inference() else (tensor._version, self._moment())
        place = (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        answers: dict[Hashable, Any] = self._known.setdefault(tensor.untyped_storage(), {})
        key = (question, place)
        known = answers.get(key)
        if known is None or version is None or known[0] != version or layer in known[1]:
            answers[key] = (version, set(), read())
        _, layers, value = answers[key]
        layers.add(layer)
        return value  # type: ignore[no-any-return]
