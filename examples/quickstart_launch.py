"""Starts the ranks of a run as processes, watches them, and ends them whatever happens."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quickstart_settings import Settings

__all__ = ["RunError", "launch"]

_POLL_S = 0.1
_STALL_S = 600
_GRACE_S = 5


class RunError(Exception):
    """A rank failed or none made progress; the text is for the user."""


def launch(settings: Settings, name: str, ranks: int, on_news: Callable[[dict[str, Any]], None]) -> None:
    """Run `quickstart_train.py` as `ranks` processes until all have ended; `on_news` hears of every step.

    Raises RunError after ending the other ranks.
    """
    progress = settings.directory / f"{name}-progress.jsonl"
    port = _free_port()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            processes.append(_start(settings, name, rank, _environment(settings, rank, ranks, port)))
        _watch(settings, name, processes, progress, on_news)
    finally:
        _end(processes)


def _start(settings: Settings, name: str, rank: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("quickstart_train.py")
    with open(log_file(settings, name, rank), "wb") as log:
        return subprocess.Popen(
            [sys.executable, str(script), str(settings.directory / "settings.json"), name],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only the launcher, which then ends the ranks
        )


def log_file(settings: Settings, name: str, rank: int) -> Path:
    return settings.directory / "logs" / f"{name}-rank{rank}.log"


def _environment(settings: Settings, rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun would set, and what makes ranks on one machine quick."""
    environment = dict(
        os.environ,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS=str(max(1, _cores() // ranks)),
        CUDA_DEVICE_MAX_CONNECTIONS="1",  # Megatron wants it
        GLOO_SOCKET_IFNAME=next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo"),
    )
    if settings.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
        # glibc would hand large tensors back to the system each time and clear their pages again: half the run.
        environment.update(MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_=str(2**40))
    return environment


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _watch(
    settings: Settings,
    name: str,
    processes: list[subprocess.Popen[bytes]],
    progress: Path,
    on_news: Callable[[dict[str, Any]], None],
) -> None:
    heard = 0
    last_news = time.monotonic()
    while True:
        codes = [process.poll() for process in processes]
        lines = progress.read_text().splitlines() if progress.exists() else []
        for line in lines[heard:]:
            on_news(json.loads(line))
            last_news = time.monotonic()
        heard = len(lines)
        if any(code not in (None, 0) for code in codes):
            time.sleep(1.0)  # ranks that only lost their peer fail too; whoever failed first is to blame
            raise RunError(_blame(settings, name, processes))
        if all(code == 0 for code in codes):
            return
        if time.monotonic() - last_news > _STALL_S:
            raise RunError(f"The run {name!r} finished no step for {_STALL_S} s. Logs: {settings.directory}/logs")
        time.sleep(_POLL_S)


def _blame(settings: Settings, name: str, processes: list[subprocess.Popen[bytes]]) -> str:
    """Which rank failed first, why, and the end of its log."""
    failures = [json.loads(path.read_text()) for path in settings.directory.glob(f"{name}-failure*.json")]
    killed = [rank for rank, process in enumerate(processes) if (process.poll() or 0) < 0]
    if killed:
        rank = killed[0]
        reason = f"was ended by signal {-processes[rank].returncode} (9: perhaps too little memory)"
    elif failures:
        first = min(failures, key=lambda failure: failure["at"])
        rank, reason = first["rank"], first["error"]
    else:
        rank = next(rank for rank, process in enumerate(processes) if process.poll())
        reason = f"ended with code {processes[rank].returncode}"
    log = log_file(settings, name, rank)
    lines = log.read_text(errors="replace").splitlines()[-12:]
    tail = "".join(f"\n    {line}" for line in lines) if lines else " nothing"
    return f"Rank {rank} of the run {name!r}: {reason}\n\nIts log ends with:{tail}\n\nAll logs: {log.parent}"


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End the processes that still run: politely, then not."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
