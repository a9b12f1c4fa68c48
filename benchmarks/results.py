"""Results as JSON files, each with the machine, the versions, the commit and the load that it was measured under.

A benchmark measures inside a `Watch` and saves once, at the end; what takes long, on the way too (`campaign`)::

    with Watch() as watch:
        rows = measure(...)
    save("cluster", settings, rows, watch.load)
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BUSY = 0.05  # of the CPUs' time: more than the differences that the benchmarks are to show
PACKAGES = (
    "burst_plugin",
    "torch",
    "megatron-core",
    "deepspeed",
    "transformers",
    "ring-flash-attn",
    "yunchang",
    "flash-attn",
)
_SOURCES = ("burst_plugin", "benchmarks", "examples", ":(exclude)benchmarks/results")


# ------------------------------------------------------------------------------------------------------------- load


@dataclass(frozen=True)
class Clock:
    """Seconds, each since some beginning: of CPU time by everybody, by this program, taken by a hypervisor; of a wall
    clock times the CPUs."""

    everybody_s: float
    own_s: float
    stolen_s: float
    capacity_s: float


@dataclass(frozen=True)
class Load:
    """What else ran while something was measured.

    Attributes:
        before, after: load averages of the last minute; `after` contains the benchmark's own ranks.
        others: share of the CPUs' time that other programs used during the measurement.
        stolen: share that the hypervisor gave to other machines.
    """

    before: float
    after: float
    others: float
    stolen: float

    @property
    def taken(self) -> float:
        """Share of the CPUs' time that went elsewhere."""
        return self.others + self.stolen

    @property
    def busy(self) -> bool:
        """Whether that was enough to spoil times: more than `BUSY`."""
        return self.taken > BUSY

    def warning(self) -> str | None:
        """What to tell the user of a run on a busy machine."""
        if not self.busy:
            return None
        return (
            f"BUSY MACHINE: while this was measured, {self.others:.0%} of the CPUs' time went to other programs and "
            f"{self.stolen:.0%} to other virtual machines (together more than {BUSY:.0%}). "
            "Do not rely on these times: run it again when the machine is idle."
        )


class Watch:
    """Measures, as a context manager, what other programs did to the CPUs meanwhile; `load` has it afterwards.

    The CPU time of this process and of its children, running or waited for, is subtracted from that of the whole
    machine. Neither includes interrupts, in which the packets of the emulated links are moved. The load average
    would not do as a criterion: it lags by a minute and counts the benchmark's own ranks. Times are means over the
    whole run, which is what medians of interleaved repeats suffer from; a short burst spoils only one repeat.
    """

    def __init__(self, read: Callable[[], Clock] | None = None) -> None:
        self._read = read or _read_clock
        self.load: Load

    def __enter__(self) -> Watch:
        self._before = _load_average()
        self._begin = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        end, begin = self._read(), self._begin
        capacity_s = max(end.capacity_s - begin.capacity_s, 1e-9)
        everybody_s, own_s = end.everybody_s - begin.everybody_s, end.own_s - begin.own_s
        self.load = Load(
            before=round(self._before, 2),
            after=round(_load_average(), 2),
            others=round(min(1.0, max(0.0, everybody_s - own_s) / capacity_s), 4),
            stolen=round(min(1.0, (end.stolen_s - begin.stolen_s) / capacity_s), 4),
        )


def _read_clock() -> Clock:
    """The CPUs that this process may use; its own time is all of it, wherever it was spent, torchrun's ranks too."""
    mine = cpus()
    top = psutil.Process().parent() if under_torchrun() else None
    top = top or psutil.Process()
    used = [times for number, times in enumerate(psutil.cpu_times(percpu=True)) if number in mine]
    own_s = 0.0
    for process in (top, *top.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            own_s += sum(process.cpu_times()[:4])  # user, system, and the same of children that were waited for
    return Clock(
        everybody_s=sum(times.user + times.system + getattr(times, "nice", 0.0) for times in used),
        own_s=own_s,
        stolen_s=sum(getattr(times, "steal", 0.0) for times in used),
        capacity_s=time.monotonic() * len(mine),
    )


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def cpus() -> set[int]:
    """The CPUs that this process may run on."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _load_average() -> float:
    return os.getloadavg()[0]


# ------------------------------------------------------------------------------------------ machine, versions, commit


def machine(on_gpu: bool = False) -> dict[str, Any]:
    """CPU, cores that may be used, memory, kernel, and, if they are used, the GPUs with their driver."""
    gpus = _nvidia_smi("name") if on_gpu else []
    return {
        "cpu": _cpu_model(),
        "cores": len(cpus()),
        "memory_bytes": int(psutil.virtual_memory().total),
        "os": f"{platform.system()} {platform.release().partition('-')[0]}",
        "gpu": gpus,
        "gpu_driver": next(iter(_nvidia_smi("driver_version")), None) if gpus else None,
    }


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _nvidia_smi(field: str) -> list[str]:
    """One line per GPU. Asking torch would make a CUDA context, after which no rank can be forked."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in asked.stdout.splitlines() if line.strip()] if asked.returncode == 0 else []


def versions() -> dict[str, str | None]:
    """Of Python and of the packages that results depend on; None for those that are not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def commit() -> str:
    """The commit that is checked out, with "-dirty" if what is measured differs from it; "unknown" outside of git."""

    def git(*arguments: str) -> str | None:
        try:
            asked = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return asked.stdout.strip() if asked.returncode == 0 else None

    head = git("rev-parse", "--short=10", "HEAD")
    if head is None:
        return "unknown"
    return f"{head}-dirty" if git("status", "--porcelain", "--", *_SOURCES) else head


# ------------------------------------------------------------------------------------------------------------ files


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
    rows: list[dict[str, Any]]


def save(
    benchmark: str,
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    load: Load,
    out: Path | None = None,
    *,
    quiet: bool = False,
    on_gpu: bool = False,
) -> Path:
    """Write a result; unless `quiet`, say where, and warn if the machine was busy.

    Args:
        rows: flat, but for a `load` of their own where they were measured at unlike times; no number may be
            infinite or NaN.
        load: of a `Watch` around the measurement.
        out: the file; by default one per benchmark and machine in benchmarks/results, where the newest stands.
        on_gpu: whether GPUs computed, of which the result then tells.

    Returns:
        The path of the file, which appears whole or not at all.
    """
    found = machine(on_gpu)
    result = Result(
        benchmark=benchmark,
        commit=commit(),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        machine=found,
        versions=versions(),
        load=asdict(load),
        busy=load.busy,
        settings=dict(settings),
        rows=[dict(row) for row in rows],
    )
    path = out or default_path(benchmark, on_gpu)
    text = json.dumps(asdict(result), indent=1, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    if not quiet:
        print(f"Results: {os.path.relpath(path)}")
        if load.busy:
            print(load.warning())
    return path


def default_path(name: str, on_gpu: bool = False) -> Path:
    """The file in benchmarks/results of a benchmark, or of a variant of one, on this machine, perhaps on its GPUs."""
    return RESULTS / f"{name}-{_machine_name(machine(on_gpu))}.json"


def load(path: Path) -> Result:
    """Read a result.

    Raises:
        ValueError: if the file is not one.
    """
    try:
        return Result(**json.loads(path.read_text()))
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a result of a benchmark: {error}") from None


def load_all(directory: Path = RESULTS) -> dict[Path, Result]:
    """All results of a directory by path, in the order of their names."""
    return {path: load(path) for path in sorted(directory.glob("*.json"))}


def _machine_name(machine: Mapping[str, Any]) -> str:
    """A file name's worth of a machine: its GPUs, else its CPU."""
    gpus = machine["gpu"]
    words = f"{len(gpus)}x {gpus[0]}" if gpus else f"{machine['cpu']} {machine['cores']} cores"
    words = re.sub(r"\((?:R|TM|C)\)|\bCPU\b|@.*?GHz|\bProcessor\b", " ", words, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
