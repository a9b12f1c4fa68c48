"""Who starts the ranks of `bench train`. Every training has new processes, to which the one before leaves nothing."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from benchmarks.limits import RefusedError
from benchmarks.train_ranks import Example, Job, Trained, run_rank
from tests.support.processes import LINGER_S, launch, values
from tests.support.ranks import RankError, launcher_environment, run_ranks

__all__ = ["OfThisMachine", "OfTorchrun", "Starter"]

_TIMEOUT_S = 1800.0
_PLAN = "bench train"


class Starter(Protocol):
    """Starts trainings."""

    leads: bool  # whether this process is the one that prints and saves

    def train(self, example: Example, job: Job) -> list[Trained]:
        """What every rank of one training measured; nothing in a process that does not lead.

        Raises:
            RankError: if one of those that this process started failed.
        """
        ...


class OfThisMachine:
    """All ranks are forked from here."""

    leads = True

    def train(self, example: Example, job: Job) -> list[Trained]:
        """See `Starter.train`."""
        if job.device == "cpu":
            return run_ranks(run_rank, job.ranks, example, job, timeout_s=_TIMEOUT_S)

        def enter(rank: int, directory: Path) -> None:
            os.environ.update(launcher_environment(rank, job.ranks, job.ranks))
            store = dist.FileStore(str(directory / "store"), job.ranks)  # type: ignore[attr-defined]
            _join(rank, job, store)

        return values(launch(run_rank, job.ranks, (example, job), enter, timeout_s=_TIMEOUT_S))


class OfTorchrun:
    """Of the processes that torchrun started, perhaps on several nodes, each forks one rank of each training.

    They themselves stay out of it: neither a process group nor a GPU is theirs. What ranks measured comes together in
    torchrun's store.
    """

    def __init__(self, plan: str) -> None:
        """`plan` says what will be trained, in which order. RefusedError if that is another one on the first rank."""
        self._store, self._rank, self._ranks = next(dist.rendezvous("env://"))
        self._store.set_timeout(timedelta(seconds=_TIMEOUT_S))
        self._number = 0
        self.leads = self._rank == 0
        if self.leads:
            self._store.set(_PLAN, plan)
        first = self._store.get(_PLAN).decode()
        if first != plan:
            raise RefusedError(
                f"rank {self._rank} would train {plan}, and rank 0 {first}: have the same packages everywhere, and "
                "give all the same options"
            )

    def train(self, example: Example, job: Job) -> list[Trained]:
        """See `Starter.train`."""
        self._number += 1
        name = f"bench train {self._number}"

        def train(_: int) -> Trained:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])  # a connection of the rank's own
            store = dist.PrefixStore(name, dist.TCPStore(host, port, is_master=False))
            _join(self._rank, job, store)
            trained = run_rank(self._rank, example, job)
            store.set(f"done {self._rank}", "")
            with suppress(RuntimeError):  # they have died
                store.wait([f"done {rank}" for rank in range(self._ranks)], timedelta(seconds=LINGER_S))
            return trained

        (outcome,) = launch(train, 1, (), lambda rank, directory: None, timeout_s=_TIMEOUT_S)
        if outcome.error is not None:
            raise RankError({self._rank: outcome.error}, self._ranks)
        self._store.set(f"{name}, rank {self._rank}", pickle.dumps(outcome.value))
        if not self.leads:  # which may have the store, and end first
            return []
        every = (self._store.get(f"{name}, rank {rank}") for rank in range(self._ranks))
        return [pickle.loads(found) for found in every]


def _join(rank: int, job: Job, store: dist.Store) -> None:
    """Make the default process group, on a device of this rank's own."""
    if job.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = timedelta(seconds=_TIMEOUT_S / 2)
    backend = "nccl" if job.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=job.ranks, timeout=timeout)
