"""The bytes of all tensors that are alive at once, real or fake, while operations of PyTorch run.

    with LiveBytes() as live:
        step()
    live.peak                                              # of what was made inside, in bytes

Counts storages, each once however many views there are. What a kernel allocates and frees inside is not seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """`now` and `peak`: bytes that are alive of what operations returned inside of the block.

    counts: whether operations count now; switched off while other ranks of this process are at work.
    shapes: what was alive at the peak, a list of (bytes, shape, type), to look at where a figure is not understood.
    without: methods, as classes and names, whose tensors do not count: those that make memory of a host, say.
    device: the type of device whose tensors count; None for all.
    """

    def __init__(self, *without: tuple[type, str], device: str | None = None) -> None:
        super().__init__()
        self._without, self._patches = without, ExitStack()
        self._device, self._most = device, 0  # what is alive at most: with storages whose end was not noticed yet
        self.counts = True
        self.peak = 0
        self.shapes: list[tuple[int, tuple[int, ...], torch.dtype]] = []
        self._alive: dict[int, tuple[StorageWeakRef, int, tuple[int, ...], torch.dtype]] = {}

    @property
    def now(self) -> int:
        """Bytes that are alive."""
        self._forget_the_dead()
        self._most = sum(nbytes for _, nbytes, *_ in self._alive.values())
        return self._most

    def reset(self) -> None:
        """Begin a new peak, from what is alive."""
        self.peak = self.now

    def __enter__(self) -> LiveBytes:
        for kind, name in self._without:
            self._patches.enter_context(mock.patch.object(kind, name, self._uncounted(getattr(kind, name))))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._patches.close()

    def _uncounted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def uncounted(*args: Any, **kwargs: Any) -> Any:
            before, self.counts = self.counts, False
            try:
                return function(*args, **kwargs)
            finally:
                self.counts = before

        return uncounted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.counts:
            return out
        new = [x for x in _tensors((out,)) if self._is_new(x)]
        if new:
            given = {x.untyped_storage()._cdata for x in _tensors((*args, *(kwargs or {}).values()))}
            for x in new:
                self._note(x, given)
        if self._most > self.peak and self.now > self.peak:
            self.peak = self._most
            self.shapes = sorted((each[1:] for each in self._alive.values()), key=str)
        return out

    def _is_new(self, x: Tensor) -> bool:
        """Return whether a tensor that counts has a storage that was not noted yet."""
        # A meta tensor's storage has a size and no memory, so it counts only where it stands for another's.
        counts = x.device.type == self._device or (self._device is None and x.device.type != "meta")
        return counts and x.untyped_storage()._cdata not in self._alive

    def _note(self, x: Tensor, given: set[int]) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._alive and key not in given:
            self._alive[key] = (StorageWeakRef(storage), storage.nbytes(), tuple(x.shape), x.dtype)
            self._most += storage.nbytes()

    def _forget_the_dead(self) -> None:
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield those that operators take and return: tensors, and lists of them."""
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors(each)
