"""The first exchange of a ring: ranks that are about to begin different rings get an error, instead of waiting.

Rings may have process groups of their own, and on different groups ranks never meet. So a rank that waits writes into
the store of the job which ring it waits on, and reads what others have written.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillWaiting
from time import monotonic
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

T = TypeVar("T")

_BEGUN: Counter[tuple[int, ...]] = Counter()  # first exchanges of this process, by the global ranks that take part
_PERIOD_S = 0.2
_FOR_ALL_S = 2.0  # to wait for the places of all ranks, so that the error names each


def first_exchange(
    exchange: Callable[[], T],
    global_ranks: Sequence[int],
    rank: int,
    place: str,
    raise_if_apart: Callable[[Mapping[int, str]], None],
) -> T:
    """Return what `exchange` returns, or raise what `raise_if_apart` does with the places of ranks that wait.

    Ranks count the first exchanges among `global_ranks`, and look only at those of the same number; where their
    histories differ, they wait for the time-out of `exchange`.
    """
    key = tuple(global_ranks)
    _BEGUN[key] += 1
    name = f"burst_plugin/first_exchange/{hash(key):x}/{_BEGUN[key]}"
    result = _in_a_thread(exchange)
    store, since = None, monotonic()
    while True:
        try:
            return result.result(timeout=_PERIOD_S)
        except StillWaiting:
            if result.done():  # with an error of this kind
                raise
        if store is None:
            store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            store.set(f"{name}/{rank}", place)
        places = _places(store, name, len(key))
        if len(places) == len(key) or monotonic() - since > _FOR_ALL_S:
            raise_if_apart(places)


def _places(store: Store, name: str, ranks: int) -> dict[int, str]:
    """Return by rank where those that wait are."""
    waiting = [rank for rank in range(ranks) if store.check([f"{name}/{rank}"])]
    return {rank: store.get(f"{name}/{rank}").decode() for rank in waiting}


def _in_a_thread(fn: Callable[[], T]) -> Future[T]:
    """Run `fn` in a daemon thread, which the end of the process does not wait for. Return its future."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(fn())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="burst_plugin first exchange", daemon=True).start()
    return future
