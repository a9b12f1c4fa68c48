"""Result files: rows as JSON, with the machine, the versions, the commit and the load that they were measured under.

recording = Recording("cluster", settings, path)
for setting in ...:
    recording.measure(lambda: rows_of(setting))  # in FILE.so-far from now on
recording.save()  # in FILE
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
    """What else ran during a measurement.

    Attributes:
        before, after: load averages of the last minute; `after` contains the benchmark's own ranks.
        others: share of the CPUs' time that other programs used.
        stolen: share that the hypervisor gave to other machines.
    """

    before: float = 0.0
    after: float = 0.0
    others: float = 0.0
    stolen: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether more than `BUSY` of the CPUs' time went elsewhere."""
        return self.others + self.stolen > BUSY

    def in_words(self) -> str:
        """Return what a reader of such figures has to know."""
        return (
            f"measured on a busy machine: {self.others:.0%} of its CPUs' time went to other programs, "
            f"{self.stolen:.0%} to other virtual machines"
        )


class Watch:
    """Measures, as a context manager, what other programs did to the CPUs meanwhile; see `load` afterwards.

    The CPU time of this process and of its children, running or waited for, is subtracted from that of the whole
    machine. Neither includes interrupts, in which the packets of the emulated links are moved. The load average
    would not do as a criterion: it lags by a minute and counts the benchmark's own ranks.
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
    """Return CPU seconds of all processes, of this program, and taken by a hypervisor; wall-clock seconds times CPUs.

    Of the CPUs that this process may use. Its own time includes torchrun's ranks.
    """
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
    """Return the CPU, its usable cores, memory and kernel and, if they are used, the GPUs with their driver.

    Asking torch for GPUs would make a CUDA context, after which no rank can be forked.
    """
    found = None
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
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
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None


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
    """A run of a benchmark. `rows` are those measured so far, each with its `commit` and `load`.

    `out` is the file of the result; None saves nothing. `on_gpu` says whether GPUs compute.
    """

    benchmark: str
    settings: Mapping[str, Any]
    out: Path | None
    on_gpu: bool = False
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
        written = self._write()
        if self.out is not None and written is not None:
            written.replace(self.out)
            print(f"Results: {os.path.relpath(self.out)}")
            if self._load.busy:
                print(f"BUSY MACHINE: {self._load.in_words()}. Run it again when the machine is idle.")

    @property
    def _load(self) -> Load:
        """The heaviest load of any row."""
        loads = [Load(**row["load"]) for row in self.rows if "load" in row]
        return max(loads, key=lambda load: load.others + load.stolen, default=Load())

    def _write(self) -> Path | None:
        """Write FILE.so-far, which appears whole or not at all."""
        if self.out is None:
            return None
        date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        where = (commit(), date, machine(self.on_gpu), versions())
        load, settings = self._load, dict(self.settings)
        result = Result(self.benchmark, *where, asdict(load), load.busy, settings, self.rows)
        text = json.dumps(asdict(result), indent=1, allow_nan=False)
        path = self.out.with_name(f"{self.out.name}.so-far")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            partial.write_text(text + "\n")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        return path


def default_path(name: str, on_gpu: bool = False) -> Path:
    """Return the file in benchmarks/results of a benchmark, or of a variant of one, on this machine or its GPUs."""
    return RESULTS / f"{name}-{machine_name(machine(on_gpu))}.json"


def load(path: Path) -> Result:
    """Read a result; raises ValueError if the file is not one."""
    try:
        return Result(**json.loads(path.read_text()))
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a result of a benchmark: {error}") from None
