"""GPUs that are not there, of all ranks of this process, whose accesses to memory are checked: see `races`.

    with recorded_gpus() as gpus, gpus.rank(0):
        x = torch.empty(4, device=GPU)                          # on the compute stream of rank 0
        with torch.cuda.stream(torch.cuda.Stream(GPU)):
            x.fill_(1)
        x.add_(1)                                               # raises RaceError: nothing waits for the other stream

Tensors are those of `fake_gpu`. What PyTorch's operators read and write their schemas say; what other kernels do is
said here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from burst_plugin import virtual
from burst_plugin.comm import torch_distributed
from burst_plugin.comm.torch_distributed import DistributedTransport
from burst_plugin.comm.transport import Channel
from burst_plugin.kernels import Case, Grads, How, Queries
from burst_plugin.topology import Link
from tests.support.fake_gpu import Launches, fake_gpu
from tests.support.races import Event, Gpus, Stream

_DEVICE = Tensor.device.__get__  # type: ignore[attr-defined]
_FUSED = {"merge_": 2, "add_": 1, "row_delta": 0, "row_factor": 0}  # how many arguments are written to


class _Kernels(TorchDispatchMode):
    """Launches what PyTorch's operators read and write."""

    def __init__(self, gpus: Gpus) -> None:
        super().__init__()
        self._gpus = gpus

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs, schema = kwargs or {}, _schema(func)
        out = func(*args, **kwargs)
        if schema.is_view:
            return out
        given = dict(zip(schema.names, args, strict=False)) | kwargs
        reads, writes = (_on_gpus([given.get(name) for name in names]) for names in (schema.reads, schema.writes))
        new = _on_gpus(out) if schema.is_new else []
        if schema.is_empty:
            for x in new:
                self._gpus.allocate(x)
        elif reads or writes or new:
            self._gpus.launch(func.overloadpacket.__name__, reads, writes + new)
        return out


class _Schema(NamedTuple):
    """What an operator does with memory: which arguments it reads and writes, and whether what it returns is new."""

    names: list[str]
    reads: list[str]
    writes: list[str]
    is_new: bool
    is_empty: bool
    is_view: bool


@cache
def _schema(func: Any) -> _Schema:
    name, schema = func.overloadpacket.__name__, func._schema
    looks = name.startswith("new_") or name.endswith("_like")  # at shapes alone
    reads = [each.name for each in schema.arguments if each.alias_info is None and not looks]
    writes = [each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    is_new = any(each.alias_info is None for each in schema.returns)
    is_view = func.namespace != "aten" or not (writes or is_new)
    return _Schema([each.name for each in schema.arguments], reads, writes, is_new, "empty" in name, is_view)


class _Copies(TorchFunctionMode):
    """Launches copies, which fake tensors do not show to operators."""

    def __init__(self, gpus: Gpus) -> None:
        super().__init__()
        self._gpus = gpus

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # without the detour by an operator
        if func not in (Tensor.copy_, Tensor.__setitem__):
            return func(*args, **(kwargs or {}))
        target, source = args[0], args[-1] if func is Tensor.__setitem__ else args[1]
        if not isinstance(source, Tensor) or _on_gpus((target, source)):
            self._gpus.launch("copy_", [source] if isinstance(source, Tensor) else [], [target])
        asynchronous = (kwargs or {}).get("non_blocking") and target.device != source.device
        return target if asynchronous else func(*args, **(kwargs or {}))


def _on_gpus(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, FakeTensor) and x.fake_device.type == "cuda"]


class _Op(NamedTuple):
    """In the place of `dist.P2POp`."""

    op: Callable[..., Any]
    tensor: Tensor
    peer: int
    group: Communicator


class _Work(NamedTuple):
    """In the place of `dist.Work`, of a batch."""

    gpus: Gpus
    end: Event

    def wait(self, *_: object) -> None:
        self.gpus.current_stream().wait_event(self.end)


class NcclNetwork:
    """Ranks with the transport of process groups, over what NCCL does to memory, for `VirtualRing(network=...)`.

    A communicator has a stream on each rank. A batch on it waits for the current stream, reads what is sent, writes
    what is received, and the current stream waits for it when it is told to. What the other end has done by then is
    not taken to order anything here.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def transports(self) -> list[DistributedTransport]:
        """Return the transport of every rank."""
        everyone = range(self._ranks)
        return [DistributedTransport(_Communicators(rank), everyone) for rank in everyone]  # type: ignore[arg-type]


class Communicator(Stream):
    """The stream of a rank's communicator; messages of a batch are on `lanes`, which have no order."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.lanes: list[Stream] = []


class _Communicators(dict[Channel, Communicator]):
    """The communicators of a rank, which are those of `process_groups.Communicators`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._named: dict[str, Communicator] = {}

    def __missing__(self, channel: Channel) -> Communicator:
        link = f" over {channel.link.value}" if channel.by_link or channel.link is Link.INTER else ""
        name = f"rank {self._rank}'s NCCL stream of {channel.traffic.value}{link}"
        return self._named.setdefault(name, Communicator(name))


class PlainKernel:
    """An attention kernel that reads its operands and writes its results in one launch, both in the inputs' types."""

    name = "plain"
    features = frozenset({"head dims", "deterministic", "windows"})

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus

    def refuse(self, case: Case) -> str | None:
        """See `Kernel.refuse`."""
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        found = q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(_of_rows(q), dtype=torch.float32)
        self._gpus.launch("attention", [q, k, v], found)
        return found

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        """See `Kernel.backward`."""
        grads = Grads(*(x.new_empty(x.shape) for x in (queries.q, k, v)))
        self._gpus.launch("attention backward", [*queries, k, v], grads[:3])
        return grads


def _of_rows(q: Tensor) -> tuple[int, int, int]:
    return q.shape[0], q.shape[2], q.shape[1]


def _batch(gpus: Gpus, ops: Sequence[_Op]) -> list[_Work]:
    """Do what `dist.batch_isend_irecv` does: all messages at the same time."""
    stream = ops[0].group
    stream.wait_stream(gpus.current_stream())
    for number, each in enumerate(ops):
        if number == len(stream.lanes):
            stream.lanes.append(Stream(stream.name))
        stream.lanes[number].wait_stream(stream)
        with gpus.on(stream.lanes[number]):
            sent, received = ([each.tensor], []) if each.op is dist.isend else ([], [each.tensor])
            gpus.launch("send" if sent else "receive", sent, received)
    for lane in stream.lanes[: len(ops)]:
        stream.wait_stream(lane)
    return [_Work(gpus, stream.record_event())]


def _fused(gpus: Gpus, name: str, written: int) -> Callable[..., Any]:
    """Return a method of `Launches` that launches what its kernel reads and writes."""
    original = getattr(Launches, name)

    def launched(self: Launches, *args: Any) -> Any:
        found = original(self, *args)
        gpus.launch(name, _on_gpus(args), [*args[:written], *_on_gpus(found)])
        return found

    return launched


@contextmanager
def recorded_gpus() -> Iterator[Gpus]:
    """Until the end of the block tensors may be on `GPU`, without autograd; what is done to them is checked."""
    gpus = Gpus()
    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "Stream", gpus.new_stream),
        (torch.cuda, "Event", Event),
        (torch.cuda, "current_stream", gpus.current_stream),
        (torch.cuda, "stream", gpus.on),
        (torch.cuda, "_sleep", gpus.sleep),
        (torch.Tensor, "record_stream", lambda x, stream: gpus.record_stream(x, stream)),
        (dist, "P2POp", _Op),
        (dist, "batch_isend_irecv", partial(_batch, gpus)),
        (torch_distributed, "launches_batches", lambda group: True),
        (torch_distributed, "ctas_of", lambda group: 8),
        (virtual, "forward_program", gpus.follow(virtual.forward_program)),
        (virtual, "backward_program", gpus.follow(virtual.backward_program)),
        *((Launches, name, _fused(gpus, name, written)) for name, written in _FUSED.items()),
    ]
    modes: list[AbstractContextManager[Any]] = [_Kernels(gpus), _Copies(gpus)]
    with ExitStack() as stack:
        stack.enter_context(fake_gpu())
        for where, name, answer in answers:
            stack.enter_context(mock.patch.object(where, name, answer))
        for mode in modes:
            stack.enter_context(mode)
        yield gpus
