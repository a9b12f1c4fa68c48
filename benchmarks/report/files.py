"""Result files: rows as JSON, with the machine, the versions, the commit and the load that they were measured under.

While a benchmark runs, its rows are in FILE.so-far; at the end they are in FILE.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BUSY = 0.05  # of the CPUs' time: more than the differences that the benchmarks are to show
PACKAGES = ("torch", "megatron-core", "deepspeed", "transformers", "ring-flash-attn", "yunchang", "flash-attn")
_SOURCES = ("burst_plugin", "benchmarks", "examples", ":(exclude)benchmarks/results")

Row = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """What else ran during a measurement."""

    before: float = 0.0  # load average of the last minute
    after: float = 0.0  # the same, which contains the benchmark's own ranks
    others: float = 0.0  # share of the CPUs' time that other programs used
    stolen: float = 0.0  # share that the hypervisor gave to other machines

    @property
    def busy(self) -> bool:
        return self.others + self.stolen > BUSY

    def in_words(self) -> str:
        """Return what a reader of such figures has to know."""
        others = f"{self.others:.0%} of its CPUs' time went to other programs"
        return f"measured on a busy machine: {others}, {self.stolen:.0%} to other virtual machines"


class Watch:
    """Measures, as a context manager, what other programs did to the CPUs meanwhile; see `load` afterwards.

    Neither the machine's time nor this program's, which is subtracted, includes interrupts, in which emulated packets
    move. The load average would not do as a criterion: it lags by a minute and counts the benchmark's own ranks.
    """

    load: Load

    def __enter__(self) -> Watch:
        self._before, self._begin = os.getloadavg()[0], read_clock()
        return self

    def __exit__(self, *_: object) -> None:
        all_s, own_s, stolen_s, capacity_s = (y - x for x, y in zip(self._begin, read_clock(), strict=True))
        shares = (seconds / max(capacity_s, 1e-9) for seconds in (max(0.0, all_s - own_s), stolen_s))
        others, stolen = (round(min(1.0, share), 4) for share in shares)
        self.load = Load(round(self._before, 2), round(os.getloadavg()[0], 2), others, stolen)


def read_clock() -> tuple[float, float, float, float]:
    """Return CPU seconds of all processes, of this program and of the hypervisor, and the wall clock times CPUs."""
    mine, top = cpus(), psutil.Process()
    if under_torchrun():
        top = top.parent() or top
    used = [times for number, times in enumerate(psutil.cpu_times(percpu=True)) if number in mine]
    own_s = 0.0
    for process in (top, *top.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            own_s += sum(process.cpu_times()[:4])  # user, system, and the same of children that were waited for
    all_s = sum(times.user + times.system + getattr(times, "nice", 0.0) for times in used)
    return all_s, own_s, sum(getattr(times, "steal", 0.0) for times in used), time.monotonic() * len(mine)


def under_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def cpus() -> set[int]:
    """Return the CPUs that this process may run on."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def machine(on_gpu: bool = False) -> dict[str, Any]:
    """Return the CPU, its usable cores, memory and kernel and, if they are used, the GPUs with their driver."""
    found = None
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    # Asking torch for GPUs would make a CUDA context, after which no rank can be forked.
    smi = _said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") if on_gpu else None
    gpus = [line.rsplit(", ", 1) for line in (smi or "").splitlines()]
    return {
        "cpu": found[1].strip() if found else platform.processor() or platform.machine(),
        "cores": len(cpus()),
        "memory_bytes": int(psutil.virtual_memory().total),
        "os": f"{platform.system()} {platform.release().partition('-')[0]}",
        "gpu": [name for name, _ in gpus],
        "gpu_driver": gpus[0][1] if gpus else None,
    }


def machine_name(machine: Mapping[str, Any]) -> str:
    """Return a name of a machine that fits into a file's: of its GPUs, else of its CPU."""
    gpus = machine["gpu"]
    words = f"{len(gpus)}x {gpus[0]}" if gpus else f"{machine['cpu']} {machine['cores']} cores"
    words = re.sub(r"\((?:R|TM|C)\)|\bCPU\b|@.*?GHz|\bProcessor\b", " ", words, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that results depend on; None where not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), **dict.fromkeys(PACKAGES)}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def commit() -> str:
    """Return the commit that is checked out, with "-dirty" if the sources differ; "unknown" outside of git."""
    git = ("git", "-C", str(ROOT))
    head = _said(*git, "rev-parse", "--short=10", "HEAD")
    if head is None:
        return "unknown"
    return f"{head}-dirty" if _said(*git, "status", "--porcelain", "--", *_SOURCES) else head


def _said(*command: str) -> str | None:
    """Return what a command prints, or None if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


@dataclass(frozen=True)
class Result:
    """One run of one benchmark, as its file has it. Times in `rows` are medians in seconds."""

    benchmark: str
    commit: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, str | None]
    load: dict[str, float]
    busy: bool
    settings: dict[str, Any]
    rows: list[Row]


@dataclass
class Recording:
    """A run of a benchmark. `rows` are those measured so far, each with its `commit` and `load`."""

    benchmark: str
    settings: Mapping[str, Any]
    out: Path | None  # file of the result; None saves nothing
    on_gpu: bool = False  # whether GPUs compute
    rows: list[Row] = field(default_factory=list)

    def measure(self, measure: Callable[[], list[Row]]) -> list[Row]:
        """Measure some rows, keep them in FILE.so-far, and return them."""
        with Watch() as watch:
            measured = measure()
        when = {"commit": commit(), "load": asdict(watch.load)}
        found = [{**row, **when} for row in measured]
        self.rows += found
        self._write()
        return found

    def save(self) -> None:
        """Write FILE, say where it is, and warn if the machine was busy."""
        load = self._write()
        if self.out is not None:
            self._so_far.replace(self.out)
            print(f"Results: {os.path.relpath(self.out)}")
            if load.busy:
                print(f"BUSY MACHINE: {load.in_words()}. Run it again when the machine is idle.")

    @property
    def _so_far(self) -> Path:
        assert self.out is not None
        return self.out.with_name(f"{self.out.name}.so-far")

    def _write(self) -> Load:
        """Write FILE.so-far; returns the heaviest load of any row."""
        loads = [Load(**row["load"]) for row in self.rows if "load" in row]
        load = max(loads, key=lambda load: load.others + load.stolen, default=Load())
        if self.out is None:
            return load
        date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        where = (commit(), date, machine(self.on_gpu), versions())
        settings = {name: value for name, value in self.settings.items() if name != "out"}
        result = Result(self.benchmark, *where, asdict(load), load.busy, settings, self.rows)
        text = json.dumps(asdict(result), indent=1, allow_nan=False)
        self._so_far.parent.mkdir(parents=True, exist_ok=True)
        self._so_far.write_text(text + "\n")
        return load


def default_path(name: str, on_gpu: bool = False) -> Path:
    """Return the file in benchmarks/results of a benchmark, or of a variant of one, on this machine or its GPUs."""
    return RESULTS / f"{name}-{machine_name(machine(on_gpu))}.json"


def load(path: Path) -> Result:
    """Read a result; raises ValueError if the file is not one."""
    try:
        return Result(**json.loads(path.read_text()))
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a result of a benchmark: {error}") from None
