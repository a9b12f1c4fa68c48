"""A whole process of a training run on GPUs that are not there: autograd, process groups, DeepSpeed.

    with pretended_gpus(Topology(1, 8)):                       # this is rank 0 of 8
        x = torch.empty(4, device=GPU, requires_grad=True)
        (2 * x).sum().backward()
        with values():                                         # for real tensors in between
            ids = torch.zeros(4)

Tensors are PyTorch's fake ones, which have shapes and types and hold nothing. To Python they are on a GPU, to C++ on
the device "meta": for a GPU's tensors autograd starts a thread that asks the driver for streams. Messages of the
process group arrive at once; other ranks say what this one says; numbers that are read are 1.

DeepSpeed looks at what there is when it is imported, and not again: use this in a process of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from burst_plugin.activations import host_memory, pages
from burst_plugin.comm import process_groups
from burst_plugin.comm.consistency import ConsistencyCheck
from burst_plugin.kernels.protocol import Queries
from burst_plugin.kernels.torch_flash import TorchFlashKernel
from burst_plugin.topology import Topology
from tests.support.fake_gpu import GPU, FakeOperators, fake_driver

_META, _CPU = torch.device("meta"), torch.device("cpu")
_ATEN = torch.ops.aten
_MESSAGES = {torch.ops.c10d.send.default, torch.ops.c10d.recv_.default}  # by the thousand; they make nothing
_IN_PLACE = {_ATEN.add_.Tensor, _ATEN.copy_.default, _ATEN.mul_.Tensor, _ATEN.zero_.default}
_OF_VALUES = (torch.tensor, torch.as_tensor)
_make_subclass, _empty = torch.Tensor._make_subclass, torch.empty
_make_wrapper = torch.Tensor._make_wrapper_subclass
_attention_backward = TorchFlashKernel.run_backward


def values() -> AbstractContextManager[Any]:
    """Return a context in which tensors are real again."""
    return _disable_current_modes()


@contextmanager
def pretended_gpus(topology: Topology) -> Iterator[None]:
    """Make this process rank 0 of all ranks, on its own GPU, until the end of the block."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # which makes the backend known

    _import_what_looks_around()
    with ExitStack() as stack:
        stack.enter_context(_answered(*_of_driver(), *_of_tensors(), *answers_of_other_ranks(topology)))
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=topology.ranks)
        stack.callback(dist.destroy_process_group)
        for mode in (_Operators(allow_non_fake_inputs=True), _Calls()):
            stack.enter_context(mode)
        yield


def import_beforehand(*modules: str) -> None:
    """Import modules that ask the driver when they are imported, in a process that forks those that pretend GPUs."""
    _import_what_looks_around()
    with _answered(*_of_driver()):
        for name in modules:
            importlib.import_module(name)


@contextmanager
def _answered(*answers: tuple[Any, str, Any]) -> Iterator[None]:
    """Answer what is asked of the driver, and these, until the end of the block."""
    with ExitStack() as stack:
        stack.enter_context(fake_driver())
        for where, name, answer in answers:
            stack.enter_context(mock.patch.object(where, name, answer, create=True))
        yield


def _import_what_looks_around() -> None:
    """Import what registers all operators there are, before any is replaced, or wraps how tensors are made."""
    for name in ("torch._dynamo.polyfills.loader", "torch.utils.flop_counter"):
        importlib.import_module(name)


class _Calls(TorchFunctionMode):
    """Says "meta" to C++ where a call says "cuda", and "cpu" where it says "meta"."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kind = _type_of(kwargs.get("device"))
        if kind == "cuda" and func in _OF_VALUES:
            return self._of_values(func, args, kwargs)
        if kind is not None:
            kwargs["device"] = _said(kwargs["device"], kind)
        if func is torch.Tensor.to:
            args = (args[0], *self._where_to(args[1:]))
        return func(*args, **kwargs)

    @staticmethod
    def _of_values(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """Return a tensor on the GPU like that of some values."""
        del kwargs["device"]
        wants_grad = kwargs.pop("requires_grad", False)
        like = func(*args, **kwargs)
        return _empty(like.shape, dtype=like.dtype, device=_META).requires_grad_(wants_grad)

    @staticmethod
    def _where_to(args: Any) -> list[Any]:
        found: list[Any] = []
        for each in args:
            if isinstance(each, Tensor):
                found += [_said(each.device, each.device.type), each.dtype]
            elif isinstance(each, str | torch.device):
                found.append(_said(each, _type_of(each)))
            else:
                found.append(each)
        return found


def _type_of(device: Any) -> str | None:
    """Return the type of a device; a number is a GPU."""
    if device is None or isinstance(device, bool):
        return None
    return "cuda" if isinstance(device, int) else torch.device(device).type


def _said(device: Any, kind: str | None) -> Any:
    return {"cuda": _META, "meta": _CPU}.get(kind or "", device)


class _Operators(FakeOperators):
    """Says "cuda" to fake tensors where C++ says "meta", and reads numbers that are not there."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _type_of(kwargs.get("device")) == "meta":
            kwargs = {**kwargs, "device": GPU}
        if func is _ATEN._local_scalar_dense.default:
            dtype = args[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func in _MESSAGES:
            with in_kernel_invocation_manager(self):
                return func(*args, **kwargs)
        if func in _IN_PLACE and isinstance(args[0], FakeTensor):
            return args[0]
        if func is _ATEN.mm.default or func is _ATEN.mm.dtype:
            a, b, dtype = args if len(args) == 3 else (*args, args[0].dtype)
            with in_kernel_invocation_manager(self):
                return FakeTensor(self, a.new_empty(a.shape[0], b.shape[1], dtype=dtype), a.fake_device)
        return super().dispatch(func, types, args, kwargs)


def _made(cls: Any, data: Tensor, requires_grad: bool = False, **options: Any) -> Any:
    """Do what `Tensor._make_subclass` does, which is told the device that C++ is to see."""
    if _type_of(options.get("device_for_backend_keys")) == "cuda":
        return _make_subclass(cls, data, requires_grad)
    return _make_subclass(cls, data, requires_grad, **options)


def _wrapper(cls: Any, size: Any, *, device: Any, **options: Any) -> Any:
    """Do what `Tensor._make_wrapper_subclass` does, which is told the device that C++ is to see."""
    return _make_wrapper(cls, size, device=_said(device, _type_of(device)), **options)


def _with_workspace(queries: Queries, k: Tensor, *others: Any) -> Any:
    """Do what PyTorch's flash attention does, and allocate what it does inside (flash_attn/flash_api.cpp, mha_bwd).

    The rowsum of out * dout and dq in float32; with grouped heads dk and dv of every query head, which are summed up.
    """
    grads, q = _attention_backward(queries, k, *others), queries.q
    inside = [q.new_empty(q.shape[:3], dtype=torch.float32), q.new_empty(q.shape, dtype=torch.float32)]
    if q.shape[2] != k.shape[2]:
        inside += [k.new_empty((*k.shape[:2], *q.shape[2:])) for _ in range(2)]
    del inside
    return grads


def _of_driver() -> list[tuple[Any, str, Any]]:
    """Return what DeepSpeed and checkpoints ask of the driver, beside what this package does."""
    state = torch.get_rng_state()
    nothing = ("set_device", "synchronize", "set_rng_state", "empty_cache", "reset_peak_memory_stats", "_lazy_init")
    zero = ("current_device", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    return [
        *((torch.cuda, name, lambda *_: None) for name in nothing),
        *((torch.cuda, name, lambda *_: 0) for name in zero),
        *((torch.cuda.nvtx, name, lambda *_: 0) for name in ("range_push", "range_pop")),
        (torch.cuda, "default_stream", lambda *_: torch.cuda.current_stream()),
        (torch.accelerator, "current_stream", lambda *_: torch.cuda.current_stream()),  # by optimizers, since 2.14
        (torch.cuda, "device_count", lambda: 8),
        (torch.cuda, "device", lambda *_: nullcontext()),
        (torch.cuda, "get_rng_state", lambda *_: state),
        (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
        (torch.cuda, "is_initialized", lambda: True),
    ]


def _of_tensors() -> list[tuple[Any, str, Any]]:
    return [
        (torch.Tensor, "_make_subclass", staticmethod(_made)),
        (torch.Tensor, "_make_wrapper_subclass", staticmethod(_wrapper)),
        (torch.Tensor, "is_pinned", lambda x, *_: x.device == _CPU),
        (torch.Tensor, "record_stream", lambda *_: None),
        (FakeTensor, "is_cuda", property(lambda x: x.device.type == "cuda")),
        (FakeTensor, "is_cpu", property(lambda x: x.device.type == "cpu")),
        (FakeTensor, "is_meta", False),
        (FakeTensor, "data_ptr", lambda x: x.untyped_storage()._cdata),
        (torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata),
        (TorchFlashKernel, "run_backward", staticmethod(_with_workspace)),
    ]


def answers_of_other_ranks(topology: Topology) -> list[tuple[Any, str, Any]]:
    """Return how other ranks are asked, and hosts: ranks agree on all but their nodes, and hosts have room."""

    def exchange(_: ConsistencyCheck, text: str, when: str) -> list[str]:
        if not text.startswith("node: "):
            return [text] * topology.ranks
        asked, _ = text.rsplit(" ", 1)  # by whoever looks for nodes, and its own
        return [f"{asked} {rank // topology.ranks_per_node}" for rank in range(topology.ranks)]

    def gathered(said: list[Any], mine: Any, *_: Any, **__: Any) -> None:
        said[:] = [mine] * len(said)

    return [
        (ConsistencyCheck, "exchange", exchange),
        (dist, "all_gather_object", gathered),
        (process_groups, "new_group_like", lambda group, ranks, *_: dist.new_group(ranks, backend="fake")),
        (host_memory, "check_room", lambda *_: None),
        (pages, "check_room", lambda *_: None),
    ]
