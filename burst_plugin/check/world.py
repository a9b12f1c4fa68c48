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

_OTHER_LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # the numbers of their processes
_LATE_S = 30.0  # that a rank may be behind the others, besides the time-out of messages


class LateError(RuntimeError):
    """A rank did not report its result in time."""


class MissedError(RuntimeError):
    """This rank met an error only because another one had ended."""


class Outcome(NamedTuple):
    """The result of some work on one rank, or the error that it met.

    value: what the work returned, None after an error. error: type and message, "" for none.
    was_lost: whether the error is that another rank was lost.
    """

    value: Any
    error: str = ""
    was_lost: bool = False


@dataclass
class World:
    """The ranks that check together, seen from one of them.

    rank, size: its number, and how many ranks there are. device: where its tensors are.
    store: the key-value store through which ranks exchange results. timeout_s: the time limit of a message.
    ranks_per_node: how many ranks count as a node; None to have ranks find out which share a node.
    shares_gpu: whether `device` is another rank's, too.
    measured: what sections have measured, for later sections. hosts: names by rank, once they have been asked for.
    is_late: whether a rank did not come in time, and is not to be waited for again.
    """

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
    hosts: list[str] = field(default_factory=list)

    @property
    def backend(self) -> str:
        """Return the name of the backend of torch.distributed."""
        return str(dist.get_backend())

    def name(self, rank: int) -> str:
        """Return the name of a rank for messages, such as "rank 3"; with its host if ranks are on several.

        Collective at the first call.
        """
        if not self.hosts:
            self.hosts = self.exchange("host names", socket.gethostname())
        return f"rank {rank} on {self.hosts[rank]}" if len(set(self.hosts)) > 1 else f"rank {rank}"

    def ring(self, **options: Any) -> ContextParallel:
        """Return a ring of all ranks, with `options` of `Strategy`; collective."""
        per_node = self.ranks_per_node or "auto"
        strategy = Strategy(**{"ranks_per_node": per_node, **options})
        return ContextParallel(dist.group.WORLD if self.size > 1 else None, strategy=strategy)

    def attempt(self, what: str, work: Callable[[], Any]) -> list[Outcome]:
        """Call `work` on this rank, and return the outcomes of all ranks, in rank order; collective.

        Errors of `work` are in the outcomes. It has to return what JSON can hold. Raises LateError, whose message has
        `what`, if a rank does not report in time.
        """
        try:
            outcome = Outcome(work())
        except Exception as error:  # whatever the backend or a kernel raises
            outcome = Outcome(None, error_text(error), was_lost=isinstance(error, RingError))
        return [Outcome(*fields) for fields in self.exchange(what, outcome)]

    def first_error(self, error: Exception) -> str:
        """Record the error that makes this rank give up, and return the first error that any rank has recorded.

        It is returned as "rank 3: ...".
        """
        this_rank = f"rank {self.rank}: {error_text(error)}"
        try:
            first: bytes = self.store.compare_set("first error", "", this_rank)
        except RuntimeError:  # the store went with the rank that hosted it
            return this_rank
        return first.decode()

    def exchange(self, what: str, value: Any, late_s: float = _LATE_S) -> list[Any]:
        """Return the values of all ranks, in rank order; collective. Raise LateError if a rank does not come in time.

        what: the name of the work that these values result from, for the message of this error.
        value: what JSON can hold. late_s: how many seconds a rank may be behind, besides `timeout_s`.
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
        """Return the bytes of this rank's GPU that are taken outside PyTorch's allocator, as by NCCL; 0 on CPUs."""
        if self.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device)

    def together(self) -> None:
        """Wait until all ranks are here, and their GPUs have finished their work; collective."""
        self.synchronize()
        if self.size > 1 and dist.group.WORLD is not None:
            barrier(dist.group.WORLD)
        self.synchronize()

    def timed(self, work: Callable[[], Any]) -> float:
        """Return how many seconds `work` takes on this rank, begun by all ranks together; collective."""
        self.together()
        start = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start


def launcher_environment() -> tuple[int, int, int] | None:
    """Return (rank, ranks, local rank) as a launcher such as torchrun has set them; None without a launcher.

    Raises ValueError for processes that srun or mpirun has started, which know nothing of each other.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        for name in _OTHER_LAUNCHERS:
            count = os.environ.get(name, "")
            if count.isdecimal() and int(count) > 1:
                raise ValueError(
                    f"{name}={count} processes were started without RANK and WORLD_SIZE, so that each would check "
                    "alone; start one torchrun on each node: srun --ntasks-per-node=1 torchrun --nnodes ... "
                    "--nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m burst_plugin.cli check. "
                    f"To check this machine alone, unset {name}"
                )
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
    """Join the process group of all ranks, yield the `World` of this one, and leave the group at the end; collective.

    Args:
        place: (rank, ranks, local rank) of this process.
        timeout_s: the time limit of a message.
        directory: a folder in which ranks of one machine find each other; None to find them as the launcher says.
        ranks_per_node: how many ranks count as a node; None to have ranks find out.
        is_bound: whether to bind the process group to the rank's GPU (`device_id`), so that NCCL connects at once,
            and torch splits later groups off it.

    A process group that is there already is used, and not left.
    """
    rank, size, local = place
    device = device_of_rank(local)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # TF32, which images of NVIDIA's switch on, would be a fault
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
    torch.set_float32_matmul_precision(precision)
    if not had_group and dist.is_initialized():  # not after an error, when it could wait for ranks that are gone
        dist.destroy_process_group()


def share_gpus(rank: int, ranks: int) -> bool:
    """Return whether ranks have to share GPUs, and if so, set the environment such that NCCL lets them.

    rank, ranks: of this process, and of all processes on this machine. To be called before this process makes a
    group. Without GPUs nothing is shared.
    """
    if not torch.cuda.is_available() or ranks <= torch.cuda.device_count():
        return False
    if torch.cuda.nccl.version() >= (2, 30):  # type: ignore[no-untyped-call]
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    else:  # each is on a host of its own, and talks over sockets
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
        os.environ["NCCL_SOCKET_IFNAME"] = _loopback()
    return True


def device_of_rank(local: int) -> torch.device:
    """Return the device of the rank of this number on its node, and make a GPU the current one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _loopback() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
