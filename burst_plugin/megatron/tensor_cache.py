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
    version counter misses writes by collectives and NumPy. So a value also expires when the layer that asked first
    asks again: programs with one buffer for all microbatches have then written the next microbatch into it.
    """

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()  # by storage

    def get(self, tensor: Tensor, question: Hashable, read: Callable[[], _T], layer: int) -> _T:
        """Return what `read()` returned for `tensor` when `question` was first asked.

        layer: the id of the layer that asks now.
        """
        version = None if tensor.is_inference() else tensor._version
        place = (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        answers: dict[Hashable, Any] = self._known.setdefault(tensor.untyped_storage(), {})
        key = (question, place)
        known = answers.get(key)
        if known is None or version is None or known[0] != version or known[1] == layer:
            answers[key] = (version, layer, read())
        return answers[key][2]  # type: ignore[no-any-return]
