"""The recipe of examples/pretrain_7b: command lines, what they take and, where there is a checkout, smoke mode."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from burst_plugin.cli import main
from burst_plugin.deepspeed.config import Block, conflicts
from burst_plugin.megatron.planning import setting_of
from burst_plugin.training.model_shape import MODELS
from tests.support.megatron_lm import ROOT, checkout

RECIPE = ROOT / "examples" / "pretrain_7b"


def read_flags(path: Path) -> dict[str, list[str]]:
    """Variables of a file of shell assignments, each split into words; $NAME is one that came before."""
    variables: dict[str, list[str]] = {}
    for assignment in shlex.split(path.read_text(), comments=True):
        name, value = assignment.split("=", 1)
        words = [variables[word[1:]] if word.startswith("$") else [word] for word in value.split()]
        variables[name] = [word for some in words for word in some]
    return variables


def pretrain(*arguments: str, timeout_s: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(RECIPE / "pretrain.sh"), *arguments],
        env={**os.environ, "PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.fixture
def shown(tmp_path: Path) -> dict[str, str]:
    """An environment in which `--print` works: a checkout is only looked for."""
    (tmp_path / "pretrain_gpt.py").write_text("")
    return {"MEGATRON": str(tmp_path), "DATA": "/data/text", "TOKENIZER": "--tokenizer-type HuggingFaceTokenizer"}


# ------------------------------------------------------------------------------------------------------ command lines


RUNS = [
    (name, length, nodes) for name in ("llama2_7b", "llama3_8b") for length in ("128k", "1m") for nodes in (1, 4, 8)
]
RUNS += [(name, "4m", 4) for name in ("llama2_7b", "llama3_8b")]


def command(shown: dict[str, str], name: str, length: str, nodes: int) -> str:
    """The command line of a run."""
    where = {"NODES": str(nodes), "NODE_RANK": "0", "MASTER_ADDR": "head"}
    return pretrain("--print", **shown, MODEL=name, TOKENS=length, **where).stdout


@pytest.mark.parametrize(("name", "length", "nodes"), RUNS)
def test_the_command_is_one_that_can_be_run(shown: dict[str, str], name: str, length: str, nodes: int) -> None:
    text = command(shown, name, length, nodes)
    line, run, model = text.split(), setting_of(text, 8 * nodes, 8), MODELS[name]

    def value(flag: str) -> int:
        return int(line[line.index(flag) + 1])

    for flag, size in (
        ("--num-layers", model.layers),
        ("--hidden-size", model.hidden),
        ("--ffn-hidden-size", model.ffn),
        ("--num-attention-heads", model.heads),
        ("--vocab-size", model.vocab),
    ):
        assert value(flag) == size
    assert ("--num-query-groups" in line) == (model.kv_heads != model.heads)
    assert value("--seq-length") == run.tokens == {"128k": 2**17, "1m": 2**20, "4m": 2**22}[length]
    assert value("--nnodes") == nodes
    assert line[line.index("--cp-comm-type") + 1] == "burst"
    # what Megatron and the ring want of a layout
    assert run.batch * run.tokens == 2**22
    assert run.gpus == 8 * nodes
    assert run.batch % run.data == 0
    assert model.kv_heads % run.tensor == 0
    assert run.tokens % (2 * run.context * run.tensor) == 0
    assert run.inner * run.tensor <= 8
    if 1 < run.inner < run.context:
        sizes = line[line.index("--hierarchical-context-parallel-sizes") + 1 :][:2]
        assert int(sizes[0]) * int(sizes[1]) == run.context
    else:  # all in one node, or one in each: ranks find out by themselves
        assert "--hierarchical-context-parallel-sizes" not in line
        assert run.context * run.tensor <= 8 or run.inner == 1


@pytest.mark.parametrize("apex", [False, True])
def test_without_apex_its_kernel_is_not_asked_for(shown: dict[str, str], tmp_path: Path, apex: bool) -> None:
    (tmp_path / "text.idx").write_text("")
    python = tmp_path / "python"
    asked = "import torch, fused_weight_gradient_mlp_cuda"  # which finds libraries of torch only behind torch
    python.write_text(f'#!/bin/sh\n[ "$2" = "{asked}" ] && exit {0 if apex else 1}\necho "$@"\n')
    python.chmod(0o755)
    places = {**shown, "DATA": str(tmp_path / "text"), "OUT": str(tmp_path / "out"), "PYTHON": str(python)}
    assert ("--no-gradient-accumulation-fusion" in pretrain(**places).stdout) == (not apex)


def test_launchers(shown: dict[str, str]) -> None:
    plain = pretrain("--print", "--exit-interval", "7", **shown, NODES="4", NODE_RANK="2", MASTER_ADDR="head").stdout
    launched = "-m burst_plugin.run --framework megatron"
    assert f"--nnodes 4 --node-rank 2 --master-addr head --master-port 29500 {launched} " in plain
    assert plain.endswith("--exit-interval 7\n")
    slurm = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_NNODES": "4", "SLURM_JOB_ID": "77"}
    shown_by_slurm = pretrain("--print", **shown, LAUNCHER="slurm", NODES="4", MASTER_ADDR="n1", **slurm).stdout
    assert f"--nnodes 4 --rdzv-id 77 --rdzv-backend c10d --rdzv-endpoint n1:29500 {launched}" in shown_by_slurm
    deepspeed = pretrain("--print", **shown, LAUNCHER="deepspeed", NODES="8", HOSTFILE="hosts").stdout
    hosts = (
        f"{sys.executable} -m deepspeed.launcher.runner --no_local_rank --num_gpus 8 --hostfile hosts --num_nodes 8 "
    )
    assert deepspeed.startswith(hosts)
    assert "--module burst_plugin.run --framework megatron " in deepspeed


def test_runs_that_differ_have_a_folder_each(shown: dict[str, str], tmp_path: Path) -> None:
    """A checkpoint of another model, length or layout would be loaded otherwise."""
    found = set()
    for change in ({}, {"MODEL": "llama3_8b"}, {"TOKENS": "1m"}, {"OUT": "mine"}, {"OUT": "/mine"}):
        line = shlex.split(pretrain("--print", **shown, **change).stdout)
        folder = line[line.index("--save") + 1]
        assert folder == line[line.index("--load") + 1]
        assert Path(folder).is_absolute()
        found.add(folder)
    assert len(found) == 5


def test_paths_may_have_spaces(shown: dict[str, str], tmp_path: Path) -> None:
    tree = tmp_path / "my tree"
    tree.mkdir()
    (tree / "pretrain_gpt.py").write_text("")
    places = {**shown, "MEGATRON": str(tree), "DATA": "/my data/text", "OUT": "/my out"}
    line = shlex.split(pretrain("--print", **places).stdout)
    assert f"{tree}/pretrain_gpt.py" in line
    assert line[line.index("--data-path") + 1] == "/my data/text"
    assert line[line.index("--save") + 1] == "/my out/checkpoints"


def test_deepspeed_takes_variables_to_other_nodes(shown: dict[str, str], tmp_path: Path) -> None:
    """It passes on PYTHON* and NCCL* alone; Megatron wants CUDA_DEVICE_MAX_CONNECTIONS. As its launcher reads it."""
    (tmp_path / "text.idx").write_text("")
    launcher = tmp_path / "python"
    launcher.write_text('#!/bin/sh\necho "$DS_ENV_FILE"; exec cat "$DS_ENV_FILE"\n')
    launcher.chmod(0o755)
    places = {**shown, "DATA": str(tmp_path / "text"), "OUT": str(tmp_path / "out"), "PYTHON": str(launcher)}
    mine = tmp_path / "mine.env"
    mine.write_text("HF_HOME=/shared\n")
    places["DS_ENV_FILE"] = str(mine)
    done = pretrain(**places, LAUNCHER="deepspeed", HOSTFILE="hosts", NODES="4")
    assert mine.read_text() == "HF_HOME=/shared\n"
    assert done.stdout.splitlines()[1:] == [
        f"{tmp_path}/out/deepspeed.env",
        "HF_HOME=/shared",
        "CUDA_DEVICE_MAX_CONNECTIONS=1",
        "OMP_NUM_THREADS=1",
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
    ]


SRUN = """#!/bin/bash
echo "$@" >>"$LOG"
echo "grace $TORCH_ELASTIC_SHUTDOWN_TIMEOUT master $MASTER_ADDR" >>"$LOG"
trap 'echo killed >>"$LOG"; kill -KILL "$task"; exit 143' TERM  # as srun does
[ -n "$FAILS" ] && exit 3
(
    trap 'sleep 0.3; echo saved >>"$LOG"; exit 0' TERM
    echo started >>"$LOG"
    for _ in $(seq 200); do sleep 0.05; done
) &
task=$!
echo "$task" >"$LOG.task"
wait "$task"
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >>"$LOG"
kill -TERM "$(cat "$LOG.task")"
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """An environment with an `srun` that works until its task is told to stop, and others that take notes."""
    scontrol = '#!/bin/bash\n[ "$1" = show ] && printf "n1\\nn2\\n" || echo "scontrol $*" >>"$LOG"\n'
    for name, script in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", scontrol)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "log").write_text("")
    job = {"SLURM_NNODES": "4", "SLURM_JOB_ID": "77", "SLURM_CPUS_PER_TASK": "64", "SLURM_SUBMIT_DIR": str(RECIPE)}
    job["SLURM_JOB_NODELIST"] = "n[1-4]"
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **job, "PATH": path, "LOG": str(tmp_path / "log"), "FAILS": ""}


def test_a_job_out_of_time_saves_and_is_queued_again(slurm: dict[str, str]) -> None:
    log = Path(slurm["LOG"])
    job = subprocess.Popen(["bash", str(RECIPE / "slurm.sbatch"), "--more"], env=slurm)
    try:
        deadline = time.monotonic() + 30
        while "started" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=30) == 0
    finally:
        job.kill()
        job.wait()
    arguments, grace, *rest = log.read_text().splitlines()
    assert arguments.startswith("--kill-on-bad-exit=1 --cpus-per-task=64 bash ")
    assert arguments.endswith("/pretrain.sh --exit-signal-handler --more")
    assert grace == "grace 1500 master n1"
    assert rest == ["started", "scancel --signal=TERM 77", "saved", "scontrol requeue 77"]


def test_a_job_that_fails_is_not_queued_again(slurm: dict[str, str]) -> None:
    done = subprocess.run(["bash", str(RECIPE / "slurm.sbatch")], env={**slurm, "FAILS": "1"}, timeout=30)
    assert done.returncode == 3
    assert "scontrol" not in Path(slurm["LOG"]).read_text()


def test_a_job_that_is_submitted_from_elsewhere_is_told_so(slurm: dict[str, str], tmp_path: Path) -> None:
    command = ["bash", str(RECIPE / "slurm.sbatch")]
    elsewhere = {**slurm, "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = subprocess.run(command, env=elsewhere, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "has no pretrain.sh; submit from examples/pretrain_7b, or set RECIPE" in done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"MEGATRON": "/nowhere"}, "MEGATRON='/nowhere' is no Megatron-LM checkout"),
        ({"MODEL": "llama"}, "MODEL=llama is not known; use llama2_7b or llama3_8b"),
        ({"TOKENS": "2m"}, "flags.env has no LENGTH_2M; use TOKENS=128k, 1m or 4m"),
        (
            {"NODES": "2"},
            "flags.env has no LAYOUT_LLAMA2_7B_128K_2; use NODES=1, 4 or 8, or add a layout to flags.env, which "
            "burst plan finds:\n    burst plan --model llama2_7b --seq 128k --gpus 16 --batch 32 --emit plan\n",
        ),
        ({"DATA": ""}, "DATA is not set"),
        ({"TOKENIZER": ""}, "TOKENIZER is not set"),
        ({"NODES": "4"}, "NODES=4, but MASTER_ADDR is not set"),
        ({"NODES": "4", "MASTER_ADDR": "head"}, "NODES=4, but NODE_RANK=''; use 0 on the first node"),
        ({"NODES": "4", "MASTER_ADDR": "head", "NODE_RANK": "4"}, "NODE_RANK=4 of NODES=4; use 0 to 3"),
        ({"NODES": "4", "LAUNCHER": "deepspeed"}, "NODES=4, but HOSTFILE is not set"),
        ({"LAUNCHER": "mpirun"}, "LAUNCHER=mpirun is not known; use torchrun, slurm or deepspeed"),
    ],
    ids=str,
)
def test_bad_settings_are_told_of(
    shown: dict[str, str], tmp_path: Path, change: dict[str, str], message: str
) -> None:
    shows = "NODES=4" not in message and "is not set" not in message  # to look at a command, these are not needed
    mode = ("--print",) if shows else ()
    (tmp_path / "text.idx").write_text("")
    done = pretrain(*mode, **{**shown, "DATA": str(tmp_path / "text"), **change})
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "words", ["--smok", "--Smoke", "-smoke", "--pritn", "--prin", "smoke", "--exit-interval 5 --smoke"]
)
def test_a_slip_in_a_mode_starts_no_run(shown: dict[str, str], tmp_path: Path, words: str) -> None:
    (tmp_path / "text.idx").write_text("")
    started = tmp_path / "python"
    started.write_text('#!/bin/sh\necho "$@"\n')
    started.chmod(0o755)
    done = pretrain(*words.split(), **{**shown, "DATA": str(tmp_path / "text"), "PYTHON": str(started)})
    assert done.returncode == 2
    assert done.stdout == ""
    assert words.split()[-1] in done.stderr
    assert "--smoke" in done.stderr


def test_a_command_is_shown_before_there_are_data(shown: dict[str, str]) -> None:
    line = pretrain("--print", MEGATRON=shown["MEGATRON"], DATA="", TOKENIZER="").stdout.split()
    assert line[line.index("--data-path") + 1] == "DATA"
    assert line[line.index("--tokenizer-model") + 1] == "TOKENIZER"


def test_data_that_is_not_there_stops_a_run(shown: dict[str, str]) -> None:
    done = pretrain(**shown)
    assert done.returncode == 2
    assert "there is no /data/text.idx; make it with prepare_data.sh" in done.stderr


def test_the_deepspeed_twin_says_the_same() -> None:
    twin = json.loads((RECIPE / "deepspeed.json").read_text())
    variables = read_flags(RECIPE / "flags.env")
    words = variables["TRAINING"] + variables["LENGTH_128K"]

    def value(flag: str) -> float:
        return float(words[words.index(flag) + 1])

    optimizer, scheduler = twin["optimizer"]["params"], twin["scheduler"]["params"]
    assert optimizer["lr"] == value("--lr")
    assert optimizer["betas"] == [value("--adam-beta1"), value("--adam-beta2")]
    assert optimizer["weight_decay"] == value("--weight-decay")
    assert optimizer["eps"] == value("--adam-eps")
    assert optimizer["lr"] * scheduler["cos_min_ratio"] == pytest.approx(value("--min-lr"))
    assert scheduler["warmup_num_steps"] == value("--lr-warmup-iters")
    assert scheduler["warmup_type"] == "linear", "as Megatron's; DeepSpeed's own is logarithmic"
    assert twin["gradient_clipping"] == value("--clip-grad")
    assert twin["train_micro_batch_size_per_gpu"] == value("--micro-batch-size")
    assert twin["train_batch_size"] == value("--global-batch-size")
    block = {"enabled", "context_parallel_size", "ranks_per_node", "layout", "schedule", "backward", "kernel"}
    assert set(twin["burst_attention"]) == block
    assert twin["burst_attention"]["layout"] == "zigzag"
    burst_block = Block.of(twin)
    assert burst_block is not None
    assert burst_block.context_parallel_size == 8
    assert conflicts(twin, 8) == []


# ----------------------------------------------------------------------------------------------------- what it takes


def planned(text: str, name: str, nodes: int, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> str:
    """What `burst plan` says of a command line."""
    (tmp_path / "flags").write_text(text)
    words = ("plan", "--model", name, "--gpus", str(8 * nodes), "--flags", str(tmp_path / "flags"))
    assert main(words) == 0
    return capsys.readouterr().out


def test_the_page_has_what_burst_plan_says(
    shown: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (RECIPE / "README.md").read_text()
    rows = []
    for name, length, nodes in RUNS:
        text = command(shown, name, length, nodes)
        run, out = setting_of(text, 8 * nodes, 8), planned(text, name, nodes, capsys, tmp_path)
        found = re.search(r": (\d+) s per step, \d+ tokens/s per GPU, ([\d.]+) GiB( \(does not fit\))?\n", out)
        assert found is not None
        assert not found[3], "what the recipe has fits"
        size = f"{float(found[2]):.0f}"
        cut = " × ".join(map(str, (run.tensor, run.context, run.pipeline, run.data)))
        levels = f"{run.context // run.inner} × {run.inner}"
        cells = (name, length, nodes, cut, levels, run.recompute, size, found[1])
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    table = "\n".join(rows)
    assert table in page, table
    details = planned(command(shown, "llama2_7b", "1m", 4), "llama2_7b", 4, capsys, tmp_path)
    assert details in page, details


def test_every_flag_is_explained() -> None:
    page = (RECIPE / "README.md").read_text()
    flags = set(re.findall(r"--[a-z][a-z0-9-]+", (RECIPE / "flags.env").read_text())) - {"--smoke"}
    assert not [flag for flag in sorted(flags) if f"`{flag}" not in page and f" {flag}" not in page]


# ------------------------------------------------------------------------------------------------------------- smoke


def _losses(done: subprocess.CompletedProcess[str]) -> dict[int, float]:
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = re.findall(r"iteration +(\d+)/ +\d+ .*?lm loss: (\S+)", done.stdout)
    return {int(number): float(loss) for number, loss in found}


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("tag", ["core_v0.16.1", "main"])
def test_smoke_and_resume_at_another_context_parallel_size(tmp_path: Path, tag: str) -> None:
    pytest.importorskip("psutil", reason="Megatron's checkpoints want psutil")
    tree = checkout(tag, tmp_path)
    whole = _losses(pretrain("--smoke", MEGATRON=str(tree), OUT=str(tmp_path / "whole"), CP="4", timeout_s=400))
    assert list(whole) == list(range(1, 21))
    assert whole[20] < whole[1] - 1.5
    parts = {"MEGATRON": str(tree), "OUT": str(tmp_path / "parts"), "timeout_s": 400}
    first = _losses(pretrain("--smoke", "--exit-interval", "10", CP="2", **parts))  # type: ignore[arg-type]
    assert list(first) == list(range(1, 11))
    second = _losses(pretrain("--smoke", CP="4", **parts))  # type: ignore[arg-type]
    assert list(second) == list(range(11, 21))
    # After a start Megatron shows, at the second iteration, the mean of the first two.
    assert second.pop(12) == pytest.approx((whole[11] + whole[12]) / 2, abs=1e-5)
    for number, loss in {**first, **second}.items():
        assert loss == pytest.approx(whole[number], abs=1e-5), number
