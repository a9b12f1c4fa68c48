"""What was read off tensors, remembered: reading a tensor of a GPU stalls the host."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["TensorCache"]

_T = TypeVar("_T")


class TensorCache:
    """What was read from tensors, remembered until the memory is freed or written to, or the microbatch ends.

    Views of the same memory, such as the detached tensors of recomputation, are the same tensor here. Torch does not
    notice everything that writes: collectives and NumPy do not count. So an answer ends, too, when the layer that
    asked first asks again: programs that keep one buffer for all microbatches have written the next one into it.
    """

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()  # by storage

    def get(self, tensor: Tensor, question: Hashable, read: Callable[[], _T], layer: int) -> _T:
        """What `read()` said about `tensor` when `question` was first asked; `layer` is who asks now."""
        version = None if tensor.is_inference() else tensor._version
        place = (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        answers: dict[Hashable, Any] = self._known.setdefault(tensor.untyped_storage(), {})
        key = (question, place)
        known = answers.get(key)
        if known is None or version is None or known[0] != version or known[1] == layer:
            answers[key] = (version, layer, read())
        return answers[key][2]  # type: ignore[no-any-return]
