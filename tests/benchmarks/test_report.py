"""What is common to the benchmarks: result files, the load of the machine, and the command line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psutil", reason="psutil is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from benchmarks.__main__ import COMMANDS, main
from benchmarks.report import files
from benchmarks.report.files import Load, Recording, Watch

ROOT = Path(__file__).parents[2]
IDLE = Load(before=0.1, after=1.5, others=0.01, stolen=0.0)


# -------------------------------------------------------------------------------------------------------------- load


def watched(
    monkeypatch: pytest.MonkeyPatch, others_s: float = 0.0, own_s: float = 0.0, stolen_s: float = 0.0
) -> Load:
    """The load after 10 s on 2 CPUs in which so much CPU time was used."""
    clocks = iter([(100, 40, 3, 1000), (100 + others_s + own_s, 40 + own_s, 3 + stolen_s, 1020)])
    monkeypatch.setattr(files, "read_clock", lambda: next(clocks))
    with Watch() as watch:
        pass
    return watch.load


def test_other_programs_make_a_machine_busy_and_own_ranks_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    load = partial(watched, monkeypatch)
    assert not load(own_s=20.0).busy
    assert (load(others_s=0.8, own_s=10.0).others, load(others_s=0.8, own_s=10.0).stolen) == (0.04, 0.0)
    assert not load(others_s=0.8).busy
    assert load(others_s=1.2).busy
    assert load(stolen_s=1.2).busy
    assert load(others_s=0.6, stolen_s=0.6).busy
    assert "31% of its CPUs' time" in load(others_s=6.2).in_words()


def test_the_time_of_own_processes_is_own_time() -> None:
    """Of a child that was waited for, of a grandchild, and of one that still runs."""
    spin = "import time\nwhile time.process_time() < 0.3: pass\n"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}])"
    before = files.read_clock()
    subprocess.run([sys.executable, "-c", nested], check=True)
    running = subprocess.Popen([sys.executable, "-c", spin + "print(flush=True); input()"], stdin=-1, stdout=-1)
    with running:
        assert running.stdout is not None
        running.stdout.readline()
        after = files.read_clock()
        running.communicate(b"\n")
    all_s, own_s, _, capacity_s = (y - x for x, y in zip(before, after, strict=True))
    assert own_s >= 0.6
    assert all_s >= 0.5
    assert capacity_s > 0


# ------------------------------------------------------------------------------------------------------------- files


def save(path: Path, name: str = "train", rows: Sequence[dict[str, Any]] = (), load: Load = IDLE) -> Path:
    """A result, as if it had been measured under that load."""
    rows = [{**row, "load": vars(load)} for row in rows]
    Recording(name, {"repeats": 3}, path, rows=rows).save()
    return path


def test_what_is_saved_is_loaded_with_all_that_it_was_measured_under(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "one.json"
    recording = Recording("cluster", {"repeats": 3}, path)
    assert recording.measure(lambda: [{"contender": "burst", "time_s": 0.5}]) == recording.rows
    assert [each.name for each in path.parent.iterdir()] == ["one.json.so-far"]
    recording.save()
    assert list(path.parent.iterdir()) == [path]
    result = files.load(path)
    assert (result.benchmark, result.settings, result.rows) == ("cluster", {"repeats": 3}, recording.rows)
    (row,) = result.rows
    assert (row["contender"], row["time_s"], row["commit"], row["load"]) == ("burst", 0.5, result.commit, result.load)
    assert set(result.load) == {"before", "after", "others", "stolen"}
    assert set(result.machine) == {"cpu", "cores", "memory_bytes", "os", "gpu", "gpu_driver"}
    assert result.machine["cores"] >= 1
    assert re.fullmatch(r"[A-Za-z]+ [0-9.]+", result.machine["os"])
    assert result.machine["memory_bytes"] > 1e8
    assert result.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(files.PACKAGES) < set(result.versions)
    assert re.fullmatch(r"[0-9a-f]{10}(-dirty)?|unknown", result.commit)
    assert str(path.name) in capsys.readouterr().out


def test_a_run_on_a_busy_machine_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for load, busy in ((Load(others=0.2), True), (IDLE, False)):
        path = save(tmp_path / "one.json", rows=[{"time_s": 1.0}], load=load)
        assert files.load(path).busy == busy
        assert ("BUSY MACHINE" in capsys.readouterr().out) == busy


def test_a_result_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    path = save(tmp_path / "one.json")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(path, rows=[{"time_s": 1.0}])
    with pytest.raises(ValueError, match="JSON"):
        save(path, rows=[{"time_s": float("nan")}])
    assert files.load(path).rows == []
    path.write_text('{"rows": []}')
    with pytest.raises(ValueError, match=r"one.json is not a result of a benchmark"):
        files.load(path)


def test_the_results_of_this_repository_are_readable() -> None:
    found = [files.load(path) for path in files.RESULTS.glob("*.json")]
    kinds = {result.benchmark for result in found}
    assert kinds - {"auto"} == {"cluster", "attention", "train", "recurrent", "latents", "groups"}
    assert all(result.rows for result in found)


def test_files_are_named_after_the_machine() -> None:
    cpu = {"gpu": [], "cpu": "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "cores": 2}
    assert files.machine_name(cpu) == "intel-xeon-platinum-8481c-2-cores"
    assert files.machine_name({**cpu, "gpu": ["NVIDIA H200"] * 8}) == "8x-nvidia-h200"


# ------------------------------------------------------------------------------------------------------- command line


def test_help_lists_all_commands_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; from benchmarks.__main__ import main\ntry: main(['--help'])\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert re.findall(r"^    ([a-z]+)", done.stdout, re.MULTILINE) == list(COMMANDS)
    assert not {"torch", "matplotlib", "benchmarks.report.pictures", "benchmarks.train"} & set(done.stdout.split())
    with pytest.raises(SystemExit):
        main(["tabel"])
    assert "invalid choice: 'tabel'" in capsys.readouterr().err


STUCK = """
import signal, sys, time
from pathlib import Path
from benchmarks import __main__ as command
from benchmarks.report.files import Recording
from tests.support.netns import EmulatedCluster
from tests.support.processes import launch

def stuck(rank):
    Path(sys.argv[1], f"rank{rank}").touch()
    time.sleep(60)

class Stuck:
    def add_arguments(parser): pass
    def run(options):
        recording = Recording("stuck", {}, Path(sys.argv[1], "result.json"))
        recording.measure(measure)
        recording.save()

def measure():
    if EmulatedCluster.unavailable() is None:
        with EmulatedCluster(1, 2) as cluster:
            cluster.run(stuck)
    else:
        launch(stuck, 2, (), lambda rank, directory: None, timeout_s=60)
    return []

sys.modules["benchmarks.train"] = Stuck
sys.exit(command.main(["train"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_benchmark_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """No processes, no namespaces (they vanish with those), no files."""
    seen, private = tmp_path / "seen", tmp_path / "private"
    for directory in (seen, private):
        directory.mkdir()
    bench = subprocess.Popen(
        [sys.executable, "-c", STUCK, str(seen)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(private)},
        start_new_session=True,
        # Shells start background jobs with SIGINT ignored, and these tests with them.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with bench:
        deadline = time.monotonic() + 30
        while len(list(seen.iterdir())) < 2 and bench.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        bench.send_signal(number)
        _, said = bench.communicate(timeout=20)
    assert bench.returncode == 130, said
    assert "stopped" in said
    assert sorted(path.name for path in seen.iterdir()) == ["rank0", "rank1"]
    assert list(private.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.killpg(bench.pid, 0)
