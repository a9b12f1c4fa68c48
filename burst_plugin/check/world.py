"""The ranks that check together: how they join, how they exchange results, and when a rank is late.

Results go through the store of the process group, not through its messages: where messages are broken, the store
still says which rank did not come.
"""

from __future__ import annotations

import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from burst_plugin.check.processes import error_text
from burst_plugin.comm.process_groups import barrier
from burst_plugin.comm.transport import RingError
from burst_plugin.context import ContextParallel
from burst_plugin.strategy import Strategy

_LATE_S = 30.0  # that a rank may be behind the others, besides the time-out of messages


class LateError(RuntimeError):
    """A rank did not report its result in time."""


class MissedError(RuntimeError):
    """This rank met an error only because another one had ended."""


class Outcome(NamedTuple):
    """What one rank found, or the error that it met; `was_lost` if another rank was at fault."""

    value: Any
    error: str = ""
    was_lost: bool = False


@dataclass
class World:
    """What one rank knows of all `size` ranks of a check; with `ranks_per_node` None ranks find their nodes."""

    rank: int
    size: int
    device: torch.device
    store: Store
    timeout_s: float
    ranks_per_node: int | None = None
    shares_gpu: bool = False  # whether `device` is another rank's too
    _meetings: int = 0
    measured: dict[str, Any] = field(default_factory=dict)  # what sections hand on to later ones
    is_late: bool = False  # whether a rank did not come, and is not to be waited for again
    _hosts: list[str] = field(default_factory=list)

    @property
    def backend(self) -> str:
        """Return the name of the backend of torch.distributed."""
        return str(dist.get_backend())

    def name(self, rank: int) -> str:
        """Return the number of a rank, with its host where there are several; collective when first called."""
        if not self._hosts:
            self._hosts = self.exchange("host names", socket.gethostname())
        return f"rank {rank} on {self._hosts[rank]}" if len(set(self._hosts)) > 1 else f"rank {rank}"

    def ring(self, **options: Any) -> ContextParallel:
        """Return a ring of all ranks; collective."""
        per_node = self.ranks_per_node or "auto"
        strategy = Strategy(**{"ranks_per_node": per_node, **options})
        return ContextParallel(dist.group.WORLD if self.size > 1 else None, strategy=strategy)

    def attempt(self, what: str, work: Callable[[], Any]) -> list[Outcome]:
        """Do `work` on this rank; return what came of it on every rank, in rank order; collective.

        Values have to be such as JSON holds. Raises LateError, with `what`, if a rank did not come.
        """
        try:
            outcome = Outcome(work())
        except Exception as error:  # whatever the backend or a kernel raises
            outcome = Outcome(None, error_text(error), was_lost=isinstance(error, RingError))
        return [Outcome(*fields) for fields in self.exchange(what, outcome)]

    def first_error(self, error: Exception) -> str:
        """Record the error that makes this rank give up. Return the number and error of the first rank that did."""
        this_rank = f"rank {self.rank}: {error_text(error)}"
        try:
            first: bytes = self.store.compare_set("first error", "", this_rank)
        except RuntimeError:  # the store went with the rank that hosted it
            return this_rank
        return first.decode()

    def exchange(self, what: str, value: Any, late_s: float = _LATE_S) -> list[Any]:
        """Return every rank's value, in rank order; collective. Raises LateError if a rank did not come.

        late_s: how long a rank may be behind, besides the time-out of messages.
        """
        self._meetings += 1
        self.store.set(f"{self._meetings}/{self.rank}", json.dumps(value))
        limit = timedelta(seconds=self.timeout_s + late_s)
        values = []
        for rank in range(self.size):
            key = f"{self._meetings}/{rank}"
            try:
                self.store.wait([key], limit)
            except RuntimeError as error:
                raise LateError(f"rank {rank} did not finish in time: {what}") from error
            values.append(json.loads(self.store.get(key)))
        return values

    def synchronize(self) -> None:
        """Wait for the work of this rank's GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def outside_bytes(self) -> int:
        """Return the bytes of the GPU that are taken outside of PyTorch's allocator, as by NCCL; 0 on CPUs."""
        if self.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device)

    def together(self) -> None:
        """Wait for all ranks, and for their GPUs."""
        self.synchronize()
        if self.size > 1 and dist.group.WORLD is not None:
            barrier(dist.group.WORLD)
        self.synchronize()

    def timed(self, work: Callable[[], Any]) -> float:
        """Return the seconds that `work` takes on this rank, once all ranks have started together; collective."""
        self.together()
        start = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start


def launcher_environment() -> tuple[int, int, int] | None:
    """Return (rank, ranks, local rank) as a launcher such as torchrun says, or None where there is no launcher."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank = int(os.environ["RANK"])
    return rank, int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", rank))


@contextmanager
def joined(
    place: tuple[int, int, int],
    timeout_s: float,
    directory: Path | None = None,
    ranks_per_node: int | None = None,
    *,
    is_bound: bool = False,
) -> Iterator[World]:
    """Join the ranks as `place`, (rank, ranks, local rank), and leave them at the end; collective.

    directory: where ranks of one machine find each other; None for the launcher's own way. A process group that is
    there already is used, and stays. is_bound: whether the process group is bound to the rank's GPU (`device_id`), so
    that NCCL connects at once, and torch splits later groups off it.
    """
    rank, size, local = place
    device = _device(local)
    shares_gpu = directory is not None and share_gpus(rank, size)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // max(1, size)) if device.type == "cpu" else 1)
    # Autograd's thread makes its CUDA context with its first product of matrices, and PyTorch warns of that.
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
    had_group, timeout = dist.is_initialized(), timedelta(seconds=timeout_s)
    if not had_group:
        store = None
        if directory is not None:
            store = dist.FileStore(str(directory / "store"), size)  # type: ignore[attr-defined]
            if device.type == "cpu":
                os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
        backend = "nccl" if device.type == "cuda" else "gloo"
        bound = device if is_bound and device.type == "cuda" else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=bound)
    shared = dist.distributed_c10d._get_default_store()
    yield World(rank, size, device, PrefixStore("burst check", shared), timeout_s, ranks_per_node, shares_gpu)
    if not had_group and dist.is_initialized():  # not after an error, when it could wait for ranks that are gone
        dist.destroy_process_group()


def share_gpus(rank: int, ranks: int) -> bool:
    """Return whether there are GPUs, and fewer than ranks. Then let NCCL take several ranks for one: it refuses them.

    ranks: all of this machine. Before any group of this process is made.
    """
    if not torch.cuda.is_available() or ranks <= torch.cuda.device_count():
        return False
    if torch.cuda.nccl.version() >= (2, 30):  # type: ignore[no-untyped-call]
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    else:  # each is on a host of its own, and talks over sockets
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
        os.environ["NCCL_SOCKET_IFNAME"] = _loopback()
    return True


def _device(local: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _loopback() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
