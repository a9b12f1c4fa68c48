"""Why ranks wait: a thread that reads what the first rank to give up has left in the store."""

from __future__ import annotations

import logging
import threading

from torch._C._distributed_c10d import Store

__all__ = ["FIRST_FAILURE", "FailureWatch"]

FIRST_FAILURE = "first_failure"  # the key in a ring's store
_PERIOD_S = 10.0

_LOG = logging.getLogger(__name__)


class FailureWatch:
    """Logs, within seconds, that another rank has given up, and why; until it is closed or collected.

    Ranks wait for messages that do not come until PyTorch's time-out, ten minutes or more; gloo's only until the
    process of the other rank ends, which may live on. What NCCL says then names neither the rank nor its reason.
    Ending the processes is left to the time-out and the launcher.
    """

    def __init__(self, store: Store, rank: int, period_s: float | None = None) -> None:
        self._closed, self._seen = threading.Event(), threading.Event()
        arguments = (store, f"rank {rank} ", period_s or _PERIOD_S, self._closed, self._seen)
        threading.Thread(target=_watch, args=arguments, name="burst_plugin watch", daemon=True).start()

    def some_gave_up(self) -> bool:
        """Whether a rank is known to have given up; asks nobody."""
        return self._seen.is_set()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def __del__(self) -> None:
        self.close()


def _watch(store: Store, own: str, period_s: float, closed: threading.Event, seen: threading.Event) -> None:
    while not closed.wait(period_s):
        try:
            if not store.check([FIRST_FAILURE]):
                continue
            text = store.get(FIRST_FAILURE).decode()
            seen.set()
        except RuntimeError:  # the store went with the rank that hosted it
            return
        if not text.startswith(own):
            _LOG.error("%sof a ring waits for nothing, until PyTorch's time-out ends it: %s", own, text)
        return
