"""The clock of an emulated accelerator: kernels that take their time, and no processor."""

from __future__ import annotations

import resource
import time

__all__ = ["EmulatedDevice"]

_WHO = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # only Linux counts by thread


class EmulatedDevice:
    """Runs one kernel after the other by sleeping, for a process that may wake up late.

    A GPU ends its kernel in time, however many ranks want a processor then, and has the next one in its queue. So by
    how much a process woke up late is taken off its next kernel; not if it has waited for anything in between, since
    what was waited for, such as a message, would not have come any sooner. (One that came while the process overslept
    was not waited for: by that much at most is a kernel early.)
    """

    def __init__(self) -> None:
        self._start_s = 0.0
        self._late_s = 0.0  # the process, behind the time that it would have on a machine to itself
        self._waits = 0

    def launch(self) -> None:
        """Begin a kernel: now, or when it would have been launched by a process that woke up in time."""
        if _waits() != self._waits:
            self._late_s = 0.0
        self._start_s = time.perf_counter() - self._late_s

    def finish(self, seconds: float) -> None:
        """Wait until the kernel has taken `seconds`."""
        end_s = self._start_s + seconds
        left_s = end_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
            self._late_s = time.perf_counter() - end_s
        else:  # the process is behind its device: as late as before, or by as much as the kernel has ended
            self._late_s = min(self._late_s, -left_s)
        self._waits = _waits()


def _waits() -> int:
    """How often this thread has given its processor away to wait for something."""
    return resource.getrusage(_WHO).ru_nvcsw
