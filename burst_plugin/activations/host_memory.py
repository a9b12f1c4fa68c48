"""Activations that wait for the backward pass in host memory: copied there behind the next layer, and back in time.

On GPUs copies run on a stream of their own, to pinned memory, and keep at most `_UNDER_WAY` tensors on the GPU that
nothing else needs. The backward pass needs tensors in reverse: while a layer is at work, the one before is on its way
back. On CPUs the same is done with plain copies.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

__all__ = ["HostMemory", "Parked", "host_memory", "offload_while_alive", "park_inputs_of", "park_inputs_of_frames"]

_UNDER_WAY = 2
_LEAST_BYTES = 1 << 20  # of a tensor that is worth a copy
_MARK = "_burst_plugin_parks_inputs"
_OWNERS: WeakSet[object] = WeakSet()
_BY_DEVICE: dict[torch.device, HostMemory] = {}


class Parked:
    """A tensor in host memory; `source` is the one on the device, until it is copied."""

    def __init__(self, source: Tensor, host: Tensor, before: Parked | None) -> None:
        self.host, self.device = host, source.device
        self.copied: Any = None  # an event after the copy, on GPUs
        self.returning: tuple[Tensor, Any] | None = None  # a tensor, and an event after the copy to it
        self.was_fetched = False
        self._source: Tensor | None = source
        self._version = source._version
        self._before = None if before is None else ref(before)  # which the backward pass needs next

    @property
    def before(self) -> Parked | None:
        """The last tensor that was parked before this one and has not been fetched yet, if it is still needed."""
        before = None if self._before is None else self._before()
        while before is not None and before.was_fetched:
            before = None if before._before is None else before._before()
        return before

    def let_go(self) -> None:
        """Forget the source. Raise RuntimeError if it has changed, perhaps while it was copied."""
        source, self._source = self._source, None
        if source is not None and source._version != self._version:
            raise RuntimeError(
                "an input of a checkpoint was modified in place while it was copied to the host: let the layer after "
                "it make a new tensor, or use offload=False"
            )


class HostMemory:
    """Where tensors of one device are parked.

    parked_bytes, fetched_bytes: what has been copied so far, to the host and back.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._leaving: deque[Parked] = deque()
        self._latest: ref[Parked] | None = None
        self.parked_bytes = self.fetched_bytes = 0

    def park(self, x: Tensor) -> Parked:
        """Start to copy a tensor to the host; its memory on the device is free once nothing else refers to it."""
        while len(self._leaving) >= _UNDER_WAY:
            self._end_copy(self._leaving.popleft())
        host = torch.empty_like(x, device="cpu", pin_memory=self._stream is not None)
        parked = Parked(x.detach(), host, None if self._latest is None else self._latest())
        if self._stream is None:
            host.copy_(x.detach())
            parked.let_go()
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                host.copy_(x.detach(), non_blocking=True)
            parked.copied = self._stream.record_event()
            self._leaving.append(parked)
        self._latest = ref(parked)
        self.parked_bytes += x.nbytes
        return parked

    def fetch(self, parked: Parked) -> Tensor:
        """Return a tensor that was parked, on its device, and start to copy back the one before it."""
        if parked in self._leaving:
            self._leaving.remove(parked)
            self._end_copy(parked)
        x, done = parked.returning or self._start_back(parked)
        parked.returning, parked.was_fetched = None, True
        before = parked.before
        if self._stream is not None and before is not None and before.returning is None:
            before.returning = self._start_back(before)
        if done is not None:
            torch.cuda.current_stream(self._device).wait_event(done)
        return x

    def _start_back(self, parked: Parked) -> tuple[Tensor, Any]:
        x = torch.empty_like(parked.host, device=parked.device, pin_memory=False)
        self.fetched_bytes += x.nbytes
        if self._stream is None:
            return x.copy_(parked.host), None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # which may still use the memory of `x`
        with torch.cuda.stream(self._stream):
            x.copy_(parked.host, non_blocking=True)
        return x, self._stream.record_event()

    def _end_copy(self, parked: Parked) -> None:
        """Let go of a tensor on the device, whose memory the current stream may use again after the copy."""
        torch.cuda.current_stream(self._device).wait_event(parked.copied)
        parked.let_go()


def offload_while_alive(owner: object) -> None:
    """Have checkpoints of this process park what they keep, as long as `owner` lives."""
    _OWNERS.add(owner)


def host_memory(device: torch.device) -> HostMemory | None:
    """Return where tensors of a device are parked; None if they are not."""
    if not _OWNERS:
        return None
    if device not in _BY_DEVICE:
        _BY_DEVICE[device] = HostMemory(device)
    return _BY_DEVICE[device]


def park_inputs_of(kind: Any) -> None:
    """Park the inputs that an autograd function saves, such as a checkpoint's; harmless when repeated."""
    if not hasattr(kind.apply, _MARK):
        kind.apply = staticmethod(_parking(kind.apply))


def park_inputs_of_frames() -> None:
    """Park the inputs of PyTorch's checkpoints that are not reentrant; harmless when repeated."""
    frame: Any = checkpoint._CheckpointFrame
    if not hasattr(frame, "save_inputs"):  # before torch 2.13
        park_inputs_of(checkpoint._NoopSaveInputs)  # type: ignore[attr-defined]
    elif not hasattr(frame.save_inputs, _MARK):
        frame.save_inputs = _parking(frame.save_inputs)


def _parking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that parks those of its arguments that `original` saves."""

    @functools.wraps(original)
    def parking(*args: Any, **kwargs: Any) -> Any:
        if not _OWNERS:
            return original(*args, **kwargs)
        inputs = [x for x in args if isinstance(x, Tensor)]
        with saved_tensors_hooks(functools.partial(_packed, inputs), _unpacked):
            return original(*args, **kwargs)

    setattr(parking, _MARK, True)
    return parking


def _packed(inputs: Sequence[Tensor], x: Tensor) -> Tensor | Parked:
    """Return what is saved of a tensor: where it is parked, or itself if it is small or no activation.

    Autograd gives hooks a copy of its metadata, so that the input with the same data is looked for.
    """
    memory = host_memory(x.device)
    if memory is None or x.nbytes < _LEAST_BYTES:
        return x
    for each in inputs:
        same = each.data_ptr() == x.data_ptr() and each.shape == x.shape and each.stride() == x.stride()
        if same and each.requires_grad and not isinstance(each, torch.nn.Parameter):
            return memory.park(each)
    return x


def _unpacked(saved: Tensor | Parked) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    memory = _BY_DEVICE[saved.device]
    return memory.fetch(saved)
