"""`bench train`: what is trained, by whom, and what is made of it."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytest.importorskip("psutil", reason="psutil is not installed")

from benchmarks import RefusedError, train, train_ranks
from benchmarks.__main__ import main
from benchmarks.report.files import load
from benchmarks.train_ranks import ALST, BURST, DEEPSPEED, MEGATRON, Example, Job, Seen, Trained, noted
from tests.support.launched import free_port, launched
from tests.support.ranks import RankError, run_ranks

ROOT = Path(__file__).parents[2]


def asked(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return parser.parse_args(["--device", "cpu", *words])


def modules(*examples: Example) -> list[str]:
    """Return what examples import, without their own scripts."""
    return [name for example in examples for name in example.modules if "." in name]


def test_trainings_compare_the_same_tokens_per_step_on_the_same_ranks() -> None:
    jobs = train.jobs_of(asked("--ranks", "4", "--seq", "512"))
    shapes = [(job.context_parallel_size, job.seq, job.sequences, job.microbatches) for job in jobs]
    assert shapes == [(1, 512, 4, 1), (4, 512, 4, 4), (4, 2048, 1, 1)]
    assert {job.ranks for job in jobs} == {4}
    assert {job.tokens_per_step for job in jobs} == {2048}
    assert len(train.jobs_of(asked("--ranks", "1"))) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seq", "2050"], "--seq: got 2050, expected a multiple of 2 x ranks = 4"),
        (["--kv-heads", "3"], "--hidden 256 has to be .* --kv-heads 3"),
        (["--steps", "0"], "--steps: got 0, expected at least 1"),
    ],
)
def test_trainings_that_cannot_be_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--device", "cpu", *words]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_trainings_on_gpus_have_one_for_each_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train.torch.cuda, "device_count", lambda: 0)
    assert main(["train", "--device", "cuda"]) == 2
    assert "--device cuda: torch sees no GPU here" in capsys.readouterr().err
    monkeypatch.setattr(train.torch.cuda, "device_count", lambda: 4)
    assert main(["train", "--ranks", "8"]) == 2
    assert "8 ranks need a GPU each; 4 fit" in capsys.readouterr().err
    jobs = train.jobs_of(argparse.Namespace(**{**vars(asked()), "device": "auto"}))
    assert [(job.device, job.ranks, job.seq) for job in jobs] == [("cuda", 4, 16384)] * 2 + [("cuda", 4, 65536)]
    assert [job.device for job in train.jobs_of(asked())] == ["cpu"] * 3


def test_rates_and_mfu_from_made_up_ranks() -> None:
    shape = {"layers": 3, "hidden": 8, "heads": 2, "kv_heads": 1, "vocabulary": 9}
    job = Job(ranks=2, context_parallel_size=2, seq=100, sequences=4, steps=3, device="cpu", nodes=1, **shape)
    seen = Seen(parameters=1000, kernel="abacus", ring_bytes=32)
    slow, fast = Trained([2.0, 9.0, 1.0], 0, 5e5, seen), Trained([4.0, 1.0, 1.0], 0, 4e5, seen)
    assert train.tokens_per_s(job, [slow, fast]) == 100  # 400 tokens, steps of 4, 9, 1 s
    faster = Trained([1.0, 2.0, 2.0], 0, 3e5, seen)
    held = [slow._replace(peak_bytes=nbytes) for nbytes in (50, 70)]
    row = train.row(MEGATRON, job, [[slow, fast], [faster, faster], [fast, fast]], held, 5e5)
    assert [row[f"tokens_per_s{end}"] for end in ("", "_min", "_max")] == [200, 100, 400]
    # 6 x 1000 for the parameters, 12 x 3 layers x 8 wide x 100 tokens / 2 for causal attention
    assert row["mfu"] == pytest.approx(200 * (6000 + 14400) / (2 * 5e5))
    assert (row["peak_bytes"], row["tokens_per_step"], row["repeats"], row["steps"]) == (70, 400, 3, 3)
    assert (row["kernel"], row["ring_bytes_per_step"]) == ("abacus", 16)  # 2 x 32 bytes in 4 steps
    assert train.row(MEGATRON, job, [[slow, fast]], held, None)["mfu"] is None
    assert row["tokens_per_s_by_turn"] == [100, 200, 400]
    assert (row["heads"], row["kv_heads"], row["vocabulary"]) == (2, 1, 9)


def test_peaks_of_devices() -> None:
    assert train_ranks.gpu_peak_flops_per_s("NVIDIA H200") == 989e12
    assert train_ranks.gpu_peak_flops_per_s("NVIDIA H20") == 148e12
    assert train_ranks.gpu_peak_flops_per_s("NVIDIA H100 PCIe") == 756e12
    assert train_ranks.gpu_peak_flops_per_s("NVIDIA A100-SXM4-80GB") == 312e12
    assert train_ranks.gpu_peak_flops_per_s("NVIDIA L40S") == 362e12
    assert train_ranks.gpu_peak_flops_per_s("NVIDIA L40") == 181e12
    assert train_ranks.gpu_peak_flops_per_s("NVIDIA H200 NVL") == 835e12
    assert train_ranks.gpu_peak_flops_per_s("NVIDIA A10G") == 70e12
    assert train_ranks.gpu_peak_flops_per_s("NVIDIA A1000") is None
    assert train_ranks.gpu_peak_flops_per_s("Abacus") is None
    assert train_ranks.cpu_peak_flops_per_s(128, 0.01) > 1e8


def test_a_folder_of_that_name_is_no_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples put their own folder first, in which there is one called deepspeed."""
    (tmp_path / "knitwear").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    missing = replace(DEEPSPEED, packages=("pytest", "knitwear", "no_such.part"))
    assert missing.absent(train.jobs_of(asked())[0]) == "not installed: knitwear, no_such.part"


@pytest.mark.megatron
@pytest.mark.deepspeed
@pytest.mark.slow
def test_examples_are_trained_in_every_way(tmp_path: Path) -> None:
    absent = [reason for example in (MEGATRON, DEEPSPEED) if (reason := example.absent(train.jobs_of(asked())[0]))]
    if absent:
        pytest.skip(absent[0])
    out = tmp_path / "train.json"
    small = ["--seq", "64", "--layers", "1", "--hidden", "32", "--heads", "2", "--kv-heads", "1", "--repeats", "1"]
    small += ["--examples", "megatron", "deepspeed"]
    command = ["-m", "benchmarks", "train", "--device", "cpu", "--ranks", "2", *small, "--out", str(out)]
    done = launched(command, imports=modules(MEGATRON, DEEPSPEED))
    assert done.returncode == 0, done.stderr
    rows = load(out).rows
    assert [(row["example"], row["context_parallel_size"], row["seq"]) for row in rows] == [
        (example, *shape) for example in ("Megatron", "DeepSpeed") for shape in ((1, 64), (2, 64), (2, 128))
    ]
    # of one layer: 32 x 64 qkv, 32 x 32, 32 x 192, 96 x 32, norms 2 x 32; behind it a norm of 32 and 32 x 264
    assert {row["parameters"] for row in rows if row["example"] == "Megatron"} == {20_832}
    for row in rows:
        assert row["steps"] == 2
        assert (row["ring_bytes_per_step"] > 0) == (row["context_parallel_size"] == 2)
        hugging_face = row["example"] == "DeepSpeed" and row["context_parallel_size"] == 1
        assert row["kernel"] == ("sdpa" if hugging_face else "torch_cpu")
        assert row["tokens_per_s"] > 10
        assert 0 < row["mfu"] < 1
        assert 1e5 < row["peak_bytes"] < 1e8


def refused_by_deepspeed(rank: int, cases: list[tuple[int, int]]) -> list[bool]:
    from burst_plugin.deepspeed import cpu

    cpu.enable()
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    sizes = {"batch_size": 1, "attn_head_size": 8, "num_hidden_layers": 1, "process_group": dist.group.WORLD}
    found = []
    for heads, kv_heads in cases:
        try:
            UlyssesSPAttentionHF(
                None, attn_head_count=heads, kv_head_count=kv_heads, seq_length_is_variable=True, **sizes
            )
            found.append(False)
        except ValueError:
            found.append(True)
    return found


@pytest.mark.deepspeed
def test_alst_refuses_heads_that_do_not_divide() -> None:
    """What is said without asking DeepSpeed is what it raises."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    cases = {(8, 4): False, (8, 8): False, (8, 2): False, (6, 2): True, (6, 6): True, (12, 3): True}
    assert run_ranks(refused_by_deepspeed, 4, [*cases])[0] == [*cases.values()]
    (job, *_) = train.jobs_of(asked("--ranks", "4", "--seq", "64"))
    for (heads, kv_heads), refused in cases.items():
        reason = ALST.refuse(replace(job, heads=heads, kv_heads=kv_heads))
        assert (reason is not None) == refused, (heads, kv_heads)
    assert BURST.refuse(replace(job, heads=6)) is None


@pytest.mark.deepspeed
@pytest.mark.slow
def test_all_that_saves_memory_is_measured_beside_others(tmp_path: Path) -> None:
    """Both compute the same losses, the second of a step that depends on gradients."""
    (job, *_) = train.jobs_of(asked())
    if reason := ALST.absent(job):
        pytest.skip(reason)
    out = tmp_path / "train.json"
    small = ["--ranks", "2", "--hidden", "64", "--vocabulary", "99", "--repeats", "1", "--steps", "1", "--add"]
    command = ["-m", "benchmarks", "train", "--device", "cpu", *small, "--out", str(out)]
    long = ["--seq", "1024", "--layers", "3", "--heads", "4", "--kv-heads", "2"]
    replicated = ["--seq", "128", "--layers", "1", "--heads", "4", "--kv-heads", "1"]
    names = [example.name for example in train_ranks.SAVING_MEMORY]
    for shape, chosen in ((long, names), (replicated, names[:3])):
        options = [*shape, "--examples", *(name.lower() for name in chosen)]
        done = launched([*command, *options], imports=modules(ALST))
        assert done.returncode == 0, done.stderr
    rows = load(out).rows
    assert [(row["example"], row["seq"]) for row in rows] == [
        *((name, 2048) for name in names),
        *((name, 256) for name in names[:3]),
    ]
    for of_one in (rows[:5], rows[5:7], rows[7:]):
        for row in of_one:
            assert row["losses"] == pytest.approx(of_one[0]["losses"], rel=1e-5)
    default, burst, alst, burst_offload, alst_offload = (row["peak_bytes"] for row in rows[:5])
    assert default <= 1.01 * burst, "what is chosen saves as much as what was set"
    assert rows[5]["ring_bytes_per_step"] < rows[6]["ring_bytes_per_step"], "attention is not computed again"
    assert burst - burst_offload >= 1024 * 64 * 4, "a layer's input"
    weight = 64 * 192 * 4  # ZeRO-3 holds one more in some runs, by when its transfers end
    assert alst_offload <= alst + weight, (
        "DeepSpeed keeps what has come back until the step ends, so it may save nothing"
    )


@pytest.mark.megatron
@pytest.mark.slow
def test_ranks_on_nodes_of_torchrun_train_together(tmp_path: Path) -> None:
    if reason := MEGATRON.absent(train.jobs_of(asked())[0]):
        pytest.skip(reason)
    small = ["--seq", "64", "--layers", "1", "--hidden", "32", "--heads", "2", "--kv-heads", "1", "--repeats", "1"]
    bench = ["-m", "benchmarks", "train", "--device", "cpu", "--examples", "megatron", *small]
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
    ]
    out = tmp_path / "train.json"
    nodes = [
        subprocess.Popen(
            [sys.executable, *launcher, "--node-rank", str(number), *bench, "--out", str(out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for number in range(2)
    ]
    try:
        printed = [node.communicate(timeout=120) for node in nodes]
    finally:
        for node in nodes:
            node.terminate()  # whereupon it ends its ranks
            node.wait(30)
    assert [node.returncode for node in nodes] == [0, 0], printed
    assert printed[0][0].count("1/1: Megatron") == 3
    assert printed[1][0] == ""  # one process prints and saves
    result = load(out)
    assert result.settings["nodes"] == 2
    shapes = [(row["ranks"], row["context_parallel_size"], row["seq"]) for row in result.rows]
    assert shapes == [(2, 1, 64), (2, 2, 64), (2, 2, 128)]
    assert [row["ring_bytes_per_step"] > 0 for row in result.rows] == [False, True, True]


def test_a_rank_of_torchrun_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(store, 5, 8)]))
    monkeypatch.setattr(train, "_join", lambda *_: None)
    store.set("bench train", "one thing")
    with pytest.raises(RefusedError, match="rank 5 would train another, and rank 0 one thing"):
        train.Torchrun("another")
    torchrun = train.Torchrun("one thing")
    (job, *_) = train.jobs_of(asked("--ranks", "2", "--seq", "64"))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    broken = replace(MEGATRON, modules=("no_such_module",))
    with pytest.raises(RankError, match=r"1 of 8 ranks failed: \[5\]") as failed:
        torchrun.train(broken, job)
    assert "no_such_module" in failed.value.errors[5]
    assert torchrun.rank == 5


def test_under_torchrun_ranks_are_those_that_it_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert [(job.nodes, job.ranks) for job in train.jobs_of(asked())] == [(2, 8)] * 3
    assert main(["train", "--device", "cpu", "--ranks", "2"]) == 2
    assert "--ranks 2: torchrun started 8; leave --ranks out" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert main(["train", "--device", "cpu"]) == 2
    assert "start equally many on every node" in capsys.readouterr().err


def test_a_step_ends_when_all_its_batches_have_been_worked_on() -> None:
    seen: list[Any] = []
    for batch in noted("abcd", 2, lambda: seen.append("end")):
        seen.append(batch)
    assert seen == ["a", "b", "end", "c", "d", "end"]


def test_an_example_whose_packages_are_missing_is_absent() -> None:
    example = replace(MEGATRON, packages=("no_such_package.core", "psutil"))
    assert example.absent(train.jobs_of(asked())[0]) == "not installed: no_such_package.core"
