"""What a profile is made of."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Event"]


class Event(NamedTuple):
    """One thing that a rank did; times are `time.perf_counter()` seconds."""

    kind: str  # "pass"; within it "kernel" and "move", and within that "post" and "wait"
    direction: str  # "forward", "backward", "exchange" of heads, "merge" at inference, or "comparison" of ranks
    step: int
    link: str  # of posts and waits: "intra" or "inter"
    start_s: float
    stop_s: float
    number: int = 0  # of the pass, counted from 0
    batch: int = -1  # of posts and waits: which messages; those posted together are waited for together
    due: int = -1  # of posts: the step at which they are waited for
    traffic: str = ""  # of posts: "gather" or "reduce"
    sent_bytes: int = 0  # of posts
    peers: tuple[int, ...] = ()  # of waits: the ranks waited for; several where a backend waits for these together

    @property
    def duration_s(self) -> float:
        """Return the seconds from start to stop."""
        return self.stop_s - self.start_s
