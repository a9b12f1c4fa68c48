"""A GPU that is not there: tensors that say they are on it, have shapes and types, and hold nothing.

PyTorch's fake tensors refuse operators whose operands are on unlike devices, and its operators for GPUs know what
they return. What asks the driver is answered here; what PyTorch's own bindings would ask it for, before they come to
a fake tensor, is worked out in `_Bindings`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.overrides import TorchFunctionMode

from burst_plugin.compute import accumulators
from burst_plugin.compute import online_softmax as softmax

GPU = torch.device("cuda", 0)
CUDNN = 92000
_ATEN = torch.ops.aten
_OF_ONE = {  # of which most calls are, and which need not be looked up with all that fake tensors remember
    *(_ATEN.slice.Tensor, _ATEN.alias.default, _ATEN.detach.default, _ATEN.view.default, _ATEN.transpose.int),
    *(_ATEN.t.default, _ATEN.unsqueeze.default, _ATEN._unsafe_view.default, _ATEN.select.int, _ATEN.view.dtype),
    *(_ATEN.as_strided.default, _ATEN.new_empty.default, _ATEN.empty_like.default, _ATEN.clone.default),
    _ATEN.expand.default,
}


class Launches:
    """In the place of `compute.triton_softmax`: checks what kernels would be given, and counts parts of sums."""

    FAN_IN = 4

    def __init__(self) -> None:
        self.merges: list[int] = []
        self.additions: list[int] = []

    def merge_(self, out: Tensor, lse: Tensor, parts: Sequence[Sequence[Tensor]], filled: bool) -> None:
        self.merges.append(len(parts) + filled)
        assert lse.shape == (out.shape[0], out.shape[2], out.shape[1])
        for other_out, other_lse in parts:
            assert (other_out.device, other_lse.device) == (out.device, lse.device) == (GPU, GPU)
            assert (other_out.shape, other_lse.shape) == (out.shape, lse.shape)
            assert other_lse.dtype == lse.dtype == torch.float32

    def add_(self, total: Tensor, parts: Sequence[Tensor], filled: bool) -> None:
        self.additions.append(len(parts) + filled)
        assert all((part.device, part.shape) == (total.device, total.shape) for part in parts)

    def row_delta(self, out: Tensor, dout: Tensor) -> Tensor:
        assert (out.device, out.shape) == (dout.device, dout.shape)
        return out.new_empty(out.shape[0], out.shape[2], out.shape[1], dtype=torch.float32)

    row_factor = row_delta


class _Event:
    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, *_: object) -> None:
        pass

    wait = synchronize = record

    def query(self) -> bool:
        return True


class _Stream:
    """The only one: whatever is asked for is equal to it."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record_event(self) -> _Event:
        return _Event()

    def wait_event(self, event: _Event) -> None:
        assert isinstance(event, _Event)

    def wait_stream(self, stream: _Stream) -> None:
        assert isinstance(stream, _Stream)

    def synchronize(self) -> None:
        pass

    def is_capturing(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = object.__hash__


class FakeOperators(FakeTensorMode):
    """PyTorch's fake tensors, with a short way for operators on one tensor: kernel tests take 21 s instead of 36."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_ONE and isinstance(args[0], FakeTensor) and "device" not in kwargs:
            with in_kernel_invocation_manager(self):
                return FakeTensor(self, func(*args, **kwargs), args[0].fake_device)
        return super().dispatch(func, types, args, kwargs)


class _Bindings(TorchFunctionMode):
    """What PyTorch's bindings do themselves, in operators that fake tensors know."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            return _item(*args)
        if func is torch.Tensor.__setitem__:
            return _copy(_item(*args[:2]), args[2])
        if func is torch.Tensor.copy_:
            return _copy(*args[:2])
        if func is torch.Tensor.contiguous:
            (x,) = args
            return x if x.is_contiguous() else torch.ops.aten.clone(x, memory_format=torch.contiguous_format)
        return func(*args, **(kwargs or {}))


def _item(x: Tensor, index: Any) -> Tensor:
    """x[index] of numbers, slices, tensors, None and Ellipsis."""
    each = list(index) if isinstance(index, tuple) else [index]
    if any(entry is Ellipsis for entry in each):
        at = next(number for number, entry in enumerate(each) if entry is Ellipsis)
        named = sum(entry is not None for entry in each) - 1
        each[at : at + 1] = [slice(None)] * (x.dim() - named)
    dim = 0
    for entry in each:
        if isinstance(entry, int):
            x = torch.ops.aten.select.int(x, dim, entry)
            continue
        if entry is None:
            x = x.unsqueeze(dim)
        elif isinstance(entry, Tensor):
            x = x.index_select(dim, entry)
        else:
            assert isinstance(entry, slice), entry
            x = torch.ops.aten.slice.Tensor(x, dim, entry.start, entry.stop, entry.step or 1)
        dim += 1
    return x


def _copy(x: Tensor, other: Any) -> Tensor:
    """A copy between devices would be one of the host's memory, for which GPUs wait: none is expected."""
    if isinstance(other, Tensor):
        assert other.device == x.device, f"copied from {other.device} to {x.device}"
        assert torch.broadcast_shapes(x.shape, other.shape) == x.shape
    return x


def _efficient_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any, **_: Any) -> tuple[Any, ...]:
    """PyTorch's own answer for fake tensors has other arguments than its operator."""
    bias, wants_dbias = others[0], others[-1]
    assert {x.device for x in (dout, q, k, v, *others) if isinstance(x, Tensor)} == {GPU}
    return (*(torch.empty_like(x) for x in (q, k, v)), torch.empty_like(bias) if wants_dbias else None)


@contextmanager
def fake_driver() -> Iterator[Launches]:
    """Answer what is asked of the driver and of kernels' libraries, until the end of the block."""
    launches, stream = Launches(), _Stream()

    def fused(*xs: Tensor) -> Launches | None:
        return launches if all(map(_suits_fused, xs)) else None

    answers: list[tuple[Any, str, Any]] = [
        (torch.version, "cuda", "13.0"),
        (torch.backends.cudnn, "version", lambda: CUDNN),
        (torch.backends.cuda, "is_flash_attention_available", lambda: True),
        (torch.cuda, "is_available", lambda: True),
        (fake_tensor, "init_gpu_context", lambda _: None),  # which a PyTorch for CUDA would do
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Event),
        (torch.cuda, "current_stream", lambda *_: stream),
        (torch.cuda, "stream", lambda _: nullcontext()),
        (torch.cuda.nvtx, "range", lambda _: nullcontext()),
        (torch.Tensor, "pin_memory", lambda x, *_: x),
        *((module, "fused_kernels", fused) for module in (softmax, accumulators)),
    ]
    with ExitStack() as stack:
        for where, name, answer in answers:
            stack.enter_context(mock.patch.object(where, name, answer))
        stack.enter_context(mock.patch("burst_plugin.kernels.flash.is_right", return_value=True))
        stack.enter_context(mock.patch("burst_plugin.kernels.torch_cudnn.problem_of", return_value=None))
        yield launches


def _suits_fused(x: Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype != torch.float64


@contextmanager
def fake_gpu() -> Iterator[Launches]:
    """Until the end of the block tensors may be on `GPU`; without autograd, whose threads want a driver."""
    with ExitStack() as stack:
        launches = stack.enter_context(fake_driver())
        stack.enter_context(mock.patch.object(torch.ops.aten, "_efficient_attention_backward", _efficient_backward))
        stack.enter_context(torch.no_grad())
        stack.enter_context(FakeOperators())
        stack.enter_context(_Bindings())
        yield launches
