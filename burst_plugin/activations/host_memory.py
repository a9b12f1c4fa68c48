"""Activations that wait for the backward pass in host memory: copied there while the next layer computes, and back.

On GPUs copies run on a stream of their own, to pages of pinned memory, and keep at most `MOST_IN_FLIGHT` tensors on
the GPU that nothing else needs. The backward pass needs tensors in reverse: while a layer is at work, the input of
the layer before it is on its way back. On CPUs the same is done with plain copies.

A tensor keeps its pages as long as anything can ask for it: a retained graph fetches it again. All copies of a
device, out and back, run on the same stream. So the pages may go to another tensor at once, while the copy from them
is still to run: the copy to them comes after it.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from burst_plugin.activations.pages import Pages, check_room, copy_from_pages, copy_to_pages, ranks_here, whole_pages
from burst_plugin.activations.snapshot import version_of

MOST_IN_FLIGHT = 2  # tensors that are being copied to the host, and stay on the GPU until then
LEAST_BYTES = 1 << 20  # the smallest tensor that is worth a copy
_MARK = "_burst_plugin_parks_inputs"
_OWNERS: WeakSet[object] = WeakSet()
BY_DEVICE: dict[torch.device, HostMemory] = {}  # where this process parks tensors of each device


class Parked:
    """A tensor that waits in host memory, to be brought back to its device.

    pages: the pages of host memory that hold its bytes. device: where the tensor was, and comes back to.
    like: a tensor without memory that has its shape, strides and type.
    source: the tensor on the device until `let_go`; None afterwards.
    copied: the CUDA event after the copy to the host; None on CPUs.
    returning: the new tensor on the device and the event after the copy to it; None if no copy back has begun.
    was_fetched: whether it has been brought back at least once.
    """

    def __init__(self, source: Tensor, pages: list[Tensor], memory: HostMemory) -> None:
        self.pages, self._memory = pages, memory
        self.returning: tuple[Tensor, Any] | None = None  # a tensor, and an event after the copy to it
        self.like, self.device = torch.empty_like(source, device="meta"), source.device
        self.copied: Any = None  # an event after the copy, on GPUs
        self.was_fetched = False
        self.source: Tensor | None = source
        self._version = source._version
        self._before = memory.latest  # the backward pass needs it next

    def __del__(self) -> None:
        self._memory.take_back(self.pages, self.returning)

    @property
    def before(self) -> Parked | None:
        """Return the last tensor parked before this one that is still needed and not fetched yet, or None."""
        before = None if self._before is None else self._before()
        while before is not None and before.was_fetched:
            before = None if before._before is None else before._before()
        return before

    def let_go(self) -> None:
        """Drop the reference to the tensor on the device. Raise RuntimeError if it was modified during the copy."""
        source, self.source = self.source, None
        if source is not None and source._version != self._version:
            raise RuntimeError(
                "an input of a checkpoint was modified in place while it was copied to the host: let the layer after "
                "it make a new tensor, or use offload=False"
            )


class HostMemory:
    """Parks tensors of one device in host memory, and fetches them back to the device.

    stream: the CUDA stream on which all copies run; None on CPUs. pool: the pages of host memory.
    expected_bytes: the host memory that `expect` has found room for.
    parked_bytes, fetched_bytes: the bytes copied so far, to the host and back.
    latest: a weak reference to the tensor parked last; None at first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream: Any = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = Pages(is_pinned=device.type == "cuda")
        self._leaving: deque[Parked] = deque()
        self._unwanted: list[tuple[Tensor, Any]] = []  # copies back of tensors that nothing asks for any more
        self.expected_bytes = 0.0
        self.latest: ref[Parked] | None = None
        self.parked_bytes = self.fetched_bytes = 0

    def expect(self, nbytes: Iterable[float], times: float, ranks: int) -> None:
        """Raise MemoryError if this host has no room for what its ranks will park in a step.

        nbytes: the bytes of each tensor that one layer of a rank parks.
        times: how many layers' tensors are parked at once.
        ranks: the ranks on this host; if the launcher says that there are more, that number counts.
        """
        needed = times * sum(map(whole_pages, nbytes))
        if needed > max(self.expected_bytes, self.pool.nbytes):
            check_room(needed, self.pool.nbytes, max(ranks, ranks_here()))
            self.expected_bytes = needed

    def park(self, x: Tensor) -> Parked:
        """Start to copy a tensor to the host, and return the `Parked` that `fetch` takes.

        Its memory on the device is free after the copy, once nothing else refers to it. Raises MemoryError if the
        host has no room, and RuntimeError if a tensor was modified in place while it was copied.
        """
        self._end_unwanted()
        while len(self._leaving) >= MOST_IN_FLIGHT:
            self._end_copy(self._leaving.popleft())
        source = _dense(x.detach())
        parked = Parked(source, self.pool.take(x.nbytes), self)
        if self.stream is None:
            copy_to_pages(source, parked.pages)
            parked.let_go()
        else:
            self.stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self.stream):
                copy_to_pages(source, parked.pages)
            parked.copied = self.stream.record_event()
            self._leaving.append(parked)
        self.latest = ref(parked)
        self.parked_bytes += x.nbytes
        return parked

    def fetch(self, parked: Parked) -> Tensor:
        """Return a parked tensor on its device again, and start to copy back the one that was parked before it."""
        self._end_unwanted()
        if parked in self._leaving:
            self._leaving.remove(parked)
            self._end_copy(parked)
        x, done = parked.returning or self._start_back(parked)
        parked.returning, parked.was_fetched = None, True
        before = parked.before
        if self.stream is not None and before is not None and before.returning is None:
            before.returning = self._still_here(before) or self._start_back(before)
        if done is not None:
            torch.cuda.current_stream(self._device).wait_event(done)
        return x

    def _still_here(self, parked: Parked) -> tuple[Tensor, None] | None:
        """Return a tensor that has not left the device yet, in place of a copy beside it; None if it has."""
        source = parked.source
        if source is None or parked not in self._leaving:
            return None
        self._leaving.remove(parked)
        self._end_copy(parked)
        return source, None

    def _start_back(self, parked: Parked) -> tuple[Tensor, Any]:
        x = torch.empty_like(parked.like, device=parked.device)
        self.fetched_bytes += x.nbytes
        if self.stream is None:
            copy_from_pages(x, parked.pages)
            return x, None
        self.stream.wait_stream(torch.cuda.current_stream(self._device))  # which may still use the memory of `x`
        with torch.cuda.stream(self.stream):
            copy_from_pages(x, parked.pages)
        return x, self.stream.record_event()

    def _end_copy(self, parked: Parked) -> None:
        """Let go of a tensor on the device; the current stream may use its memory again after the copy."""
        torch.cuda.current_stream(self._device).wait_event(parked.copied)
        parked.let_go()

    def take_back(self, pages: list[Tensor], returning: tuple[Tensor, Any] | None) -> None:
        """Reuse the pages of a parked tensor that nothing refers to any more, and discard a copy back to the device.

        returning: the tensor on the device and the event after the copy to it; None if no copy back has begun.
        """
        if returning is not None:
            self._unwanted.append(returning)
        self.pool.give_back(pages)

    def _end_unwanted(self) -> None:
        """Let go of tensors on the device that were never fetched, after the copies to them.

        Not when they are given up: that may be in any thread, whose current stream is another one.
        """
        while self._unwanted:
            _, done = self._unwanted.pop()
            if done is not None:
                torch.cuda.current_stream(self._device).wait_event(done)


def _dense(x: Tensor) -> Tensor:
    """Return a tensor without gaps in its memory: itself, in whatever order its dimensions are, or a copy."""
    is_dense = torch.empty_like(x, device="meta").stride() == x.stride()  # only dense tensors keep their strides
    return x if is_dense else torch.empty_like(x).copy_(x)


def offload_while_alive(owner: object) -> None:
    """Have checkpoints of this process park their inputs and kept outputs in host memory as long as `owner` lives.

    There may be several owners, any objects; they are not kept alive.
    """
    _OWNERS.add(owner)


def host_memory(device: torch.device) -> HostMemory | None:
    """Return the `HostMemory` that parks tensors of a device; None if nothing is to be parked.

    That is so outside the life of an owner given to `offload_while_alive`, and in inference mode.
    """
    if not _OWNERS or torch.is_inference_mode_enabled():
        return None
    if device not in BY_DEVICE:
        BY_DEVICE[device] = HostMemory(device)
    return BY_DEVICE[device]


def park_inputs_of(kind: Any) -> None:
    """Replace `kind.apply` by a function that also parks the inputs which this autograd function saves; only once.

    kind: a subclass of `torch.autograd.Function`, such as a reentrant checkpoint's. Inputs under 1 MiB, parameters,
    and tensors that need no gradient are saved as usual; so is everything outside the life of an owner given to
    `offload_while_alive`.
    """
    if not hasattr(kind.apply, _MARK):
        kind.apply = staticmethod(_parking(kind.apply))


def park_inputs_of_frames() -> None:
    """Patch PyTorch's checkpoints that are not reentrant so that they park the inputs which they save; only once.

    Nothing is parked outside the life of an owner given to `offload_while_alive`.
    """
    frame: Any = checkpoint._CheckpointFrame
    if not hasattr(frame, "save_inputs"):  # before torch 2.13
        park_inputs_of(checkpoint._NoopSaveInputs)  # type: ignore[attr-defined]
    elif not hasattr(frame.save_inputs, _MARK):
        frame.save_inputs = _parking(frame.save_inputs)


def _parking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs `original` and parks the arguments that it saves."""

    @functools.wraps(original)
    def parking(*args: Any, **kwargs: Any) -> Any:
        if not _OWNERS:
            return original(*args, **kwargs)
        inputs = [x for x in args if isinstance(x, Tensor)]
        try:
            with saved_tensors_hooks(functools.partial(_packed, inputs), _unpacked):
                return original(*args, **kwargs)
        finally:
            inputs.clear()  # saved tensors refer to their hooks until the backward pass, and hooks to this list

    setattr(parking, _MARK, True)
    return parking


def _packed(inputs: Sequence[Tensor], x: Tensor) -> tuple[Tensor, int] | Parked:
    """Return the saved form of a tensor: its parked copy, or itself and its version if it is small or no activation.

    Autograd gives hooks a copy of its metadata, hence the search for the input with the same data.
    """
    memory = host_memory(x.device)
    if memory is None or x.nbytes < LEAST_BYTES:
        return x, version_of(x)
    for candidate in inputs:
        same = (
            candidate.data_ptr() == x.data_ptr() and candidate.shape == x.shape and candidate.stride() == x.stride()
        )
        if same and candidate.requires_grad and not isinstance(candidate, torch.nn.Parameter):
            return memory.park(candidate)
    return x, version_of(x)


def _unpacked(saved: tuple[Tensor, int] | Parked) -> Tensor:
    """Return a saved tensor. Raise RuntimeError if it was modified, which autograd does not see behind hooks."""
    if isinstance(saved, tuple):
        x, version = saved
        if version_of(x) != version:
            raise RuntimeError(
                f"an input {list(x.shape)} of a checkpoint was modified in place before the backward pass, which "
                "computes the checkpoint again: let what modifies it make a new tensor"
            )
        return x
    memory = BY_DEVICE[saved.device]
    return memory.fetch(saved)
