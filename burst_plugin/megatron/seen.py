"""What was read off tensors, remembered: reading a tensor of a GPU stalls the host."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["Seen"]

_T = TypeVar("_T")


class Seen:
    """Answers by tensor, kept while the tensor's memory lives and as long as it is not written to.

    Views of the same memory, such as the detached tensors of recomputation, are the same tensor here.
    """

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()  # by storage

    def get(self, tensor: Tensor, question: Hashable, read: Callable[[], _T]) -> _T:
        """What `read()` said about `tensor` when `question` was first asked."""
        version = None if tensor.is_inference() else tensor._version
        place = (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        answers: dict[Hashable, Any] = self._known.setdefault(tensor.untyped_storage(), {})
        key = (question, place)
        if key not in answers or answers[key][0] != version or version is None:
            answers[key] = (version, read())
        return answers[key][1]  # type: ignore[no-any-return]
