"""What a machine has room for, and how a benchmark says that something cannot be done here."""

from __future__ import annotations

from pathlib import Path

import psutil

_USED = 0.9  # of the memory that is available: the rest is left to the system and to other programs


class RefusedError(Exception):
    """What was asked for cannot be done here. The text, for the user, says what to change."""


def available_bytes() -> int:
    """Memory that new processes can have: what the system says, or less if this process's cgroup has a limit."""
    return min([int(psutil.virtual_memory().available), *_cgroup_room_bytes()])


def ranks_that_fit(bytes_per_rank: int, *, room_bytes: int | None = None) -> int:
    """How many ranks of `bytes_per_rank` fit in nine tenths of `room_bytes` (default: of the available memory).

    For ranks that share one GPU, `room_bytes` is what `torch.cuda.mem_get_info` says is free.
    """
    if bytes_per_rank < 1:
        raise ValueError(f"bytes_per_rank is {bytes_per_rank}; expected at least 1")
    room_bytes = available_bytes() if room_bytes is None else room_bytes
    return int(_USED * room_bytes) // bytes_per_rank


def check_ranks(ranks: int, bytes_per_rank: int, change: str, *, room_bytes: int | None = None) -> None:
    """Refuse more ranks than memory allows.

    Args:
        change: which options to change, as in "--ranks or --seq".

    Raises:
        RefusedError: with the number of ranks that fit.
    """
    room_bytes = available_bytes() if room_bytes is None else room_bytes
    fit = ranks_that_fit(bytes_per_rank, room_bytes=room_bytes)
    if ranks > fit:
        raise RefusedError(
            f"{ranks} ranks of about {_gigabytes(bytes_per_rank)} each need {_gigabytes(ranks * bytes_per_rank)}; "
            f"{_gigabytes(room_bytes)} are available, in which at most {fit} fit. Lower {change}."
        )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB"


def _cgroup_room_bytes() -> list[int]:
    """What this process's memory cgroups (version 2) leave, with what caches files; [] if there is no limit."""
    try:
        path = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    root = Path("/sys/fs/cgroup")
    group = root / path.strip("/")
    rooms = []
    for level in (group, *group.parents):
        if level != root and root not in level.parents:
            break
        try:
            most = (level / "memory.max").read_text().strip()
            used = int((level / "memory.current").read_text())
            stat = dict(line.split() for line in (level / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if most != "max":
            rooms.append(max(0, int(most) - used + int(stat.get("inactive_file", 0))))
    return rooms
