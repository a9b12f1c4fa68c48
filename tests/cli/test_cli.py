"""The command `burst`."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import burst_plugin
from burst_plugin.check.findings import Finding
from burst_plugin.cli import doctor, main

ROOT = Path(__file__).parents[2]


def burst(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "burst_plugin.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert "doctor" in burst("--help").stdout
    for wrong in ([], ["surgeon"]):
        with pytest.raises(SystemExit) as stopped:
            main(wrong)
        assert stopped.value.code == 2
        assert "usage: burst" in capsys.readouterr().err


def test_doctor_says_which_kernels_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: "2.3.2" if package == "mamba-ssm" else "")
    monkeypatch.setitem(sys.modules, "mamba_ssm.ops.triton.ssd_combined", None)  # also if a test has imported one
    _, mamba, _ = doctor._recurrent_kernels()
    assert "mamba-ssm 2.3.2 cannot be imported, ModuleNotFoundError: " in mamba


@pytest.mark.megatron
def test_doctor_says_what_is_there_changed_and_refused() -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    done = burst("doctor")
    section = done.stdout.split("Kernels for layers that carry a state\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in section] == ["flash-linear-attention", "mamba-ssm", "causal-conv1d"]
    for line in section:
        assert re.search(r" \d+\.\d+|not installed: PyTorch's are used", line)
    assert done.returncode == 0, done.stderr
    sections = dict(part.split("\n", 1) for part in done.stdout.split("\n\n")[1:])
    assert f"torch                {torch.__version__}" in sections["Versions"]
    assert "CPU cores" in sections["Devices"]
    assert "torch_cpu" in sections["Kernels, fastest first, for plain attention in bfloat16 with heads of 128"]
    megatron = sections["Megatron"]
    assert re.search(r"Megatron 0\.1\d\.\d: tested", megatron)
    assert "repaired hierarchical_groups: " in megatron
    for name in ("layer_cp_comm_type", "packed_batch", "packed_batch_without_te"):  # in some releases
        assert re.search(rf"(repaired {name}: |repair {name}: not needed )", megatron)
    repairs = re.findall(r"repair(?:ed)? (\w+): ", megatron)
    assert len(repairs) == len(set(repairs)), "each is either done or left out"
    assert 'layers with cp_comm_type="burst"' in megatron
    assert "cuda_graph_impl: use none, " in megatron
    assert "use_legacy_models: legacy models have no core attention" in megatron


@pytest.mark.megatron
def test_doctor_looks_at_a_checkout(tmp_path: Path) -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    refused = burst("doctor", "--megatron", str(tmp_path))
    assert refused.returncode == 1
    assert "expected the root of a Megatron-LM checkout" in refused.stderr
    files = {
        "core/package_info.py": "MAJOR = 0\nMINOR = 99\nPATCH = 3\n",
        "training/__init__.py": "import burst_plugin",
    }
    for name, text in files.items():
        (tmp_path / "megatron" / name).parent.mkdir(parents=True)
        (tmp_path / "megatron" / name).write_text(text)
    (tmp_path / "megatron" / "core" / "__init__.py").write_text("raise ImportError('made for another machine')")
    shown = burst("doctor", "--megatron", str(tmp_path)).stdout
    assert "Megatron 0.99.3: not tested; tested are core_v0.16.1" in shown
    assert f"{tmp_path.resolve()} installs burst_plugin itself" in shown
    assert "cannot be imported here: made for another machine" in shown


@pytest.mark.parametrize(
    ("config", "status", "said"),
    [
        ({"burst_attention": {"context_parallel_size": 4}}, 0, "burst attention is on, context_parallel_size=4"),
        (
            {"burst_attention": {}},
            0,
            "DeepSpeed ignores the block unless the script calls burst_plugin.deepspeed.inst",
        ),
        (
            {"burst_attention": {"backward": "q"}},
            0,
            "burst attention is on, context_parallel_size=auto, backward='q'",
        ),
        ({"burst_attention": {"enabled": False}}, 0, "burst attention is off: enabled is false"),
        (
            {"burst_atention": {}},
            0,
            'no block "burst_attention", so that burst attention is off; it has "burst_atention"',
        ),
        ({"burst_attention": {"forwards": "q"}}, 1, 'unknown key "forwards" (did you mean "forward"?)'),
        (
            {"burst_attention": {}, "hybrid_engine": {"enabled": True}},
            1,
            "it replaces attention layers; switch it off",
        ),
        ({"burst_attention": {"context_parallel_size": 4}, "sequence_parallel_size": 2}, 1, "leave it out"),
        ([], 1, "got list, expected a DeepSpeed configuration"),
        (None, 1, "give a file with a DeepSpeed configuration in JSON"),
    ],
)
def test_doctor_looks_at_a_deepspeed_configuration(
    config: object, status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text("{" if config is None else json.dumps(config))
    assert main(["doctor", "--deepspeed", str(path)]) == status
    out, err = capsys.readouterr()
    assert said in (err if status else out)
    assert out.splitlines()[2] == "DeepSpeed", "what was asked about comes first"


PLAN = ("plan", "--nodes", "2", "--seq", "65536", "--tflops", "500", "--intra-gb-s", "400")


def test_plan_says_what_suits_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--ranks-per-node", "4", "--heads", "32/8", "--inter-gb-s", "45"]) == 0
    idle = capsys.readouterr().out
    assert "2x4 (nodes x ranks per node), 8192 tokens per rank, 32/8 heads of 128, bfloat16, causal" in idle
    assert "Best: Strategy(schedule='two_level_ring', parts=1); computing hides all communication." in idle
    block = 8192 * 8 * 2 * 128 * 2 / 2**30  # 8 heads of keys and values in bfloat16; sums are twice as large
    assert f"buffers take about {(4 + 5 * 2) * block:.2f} GiB" in idle
    assert main([*PLAN, "--ranks-per-node", "4", "--heads", "32/8", "--inter-gb-s", "2"]) == 0
    busy = capsys.readouterr()
    assert "parts=4); ranks wait for the links between nodes, " in busy.out
    assert busy.err == "", "no bar where there is no terminal"


@pytest.mark.parametrize("option", ["--slow-rank=1=0.8", "--node-gb-s=1=3.1"])
def test_plan_has_no_options_for_single_nodes_and_ranks(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*PLAN, "--ranks-per-node", "4", "--heads", "32/8", "--inter-gb-s", "45", option])
    assert f"{option.split('=')[0]} is not an option" in capsys.readouterr().err


ROW = re.compile(r"^(\w+) +(\d+) +(\d+|\(\d, \d\)) +(\w+, \w+) +([\d.]+) +([\d.]+) +([\d.]+)x$", re.MULTILINE)


@pytest.mark.parametrize("inter", ["0.5", "2", "45"])
def test_plan_compares_all_rows_with_one_bound(inter: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--ranks-per-node", "4", "--heads", "32/8", "--inter-gb-s", inter]) == 0
    shown = capsys.readouterr().out
    bound = float(re.findall(r"over ([\d.]+) ms, the same for all rows", shown)[0])
    rows = ROW.findall(shown)
    assert {name for name, *_ in rows} == {"flat_ring", "two_level_ring", "direct", "tasp"}
    for *_, forward, backward, ratio in rows:
        assert (float(forward) + float(backward)) / bound == pytest.approx(float(ratio), rel=2e-3, abs=0.006)
    ratios = [float(row[-1]) for row in rows]
    assert ratios == sorted(ratios)
    assert f"Best: Strategy(schedule='{rows[0][0]}'" in shown
    assert ratios[0] >= 1


def test_plan_has_the_rows_of_a_small_cluster_on_4096_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {}
    for nodes, seq in ("8", "65536"), ("512", "4194304"):
        asked = (*PLAN, "--ranks-per-node", "8", "--heads", "32/8", "--inter-gb-s", "40", "--nodes", nodes)
        assert main([*asked, "--seq", seq]) == 0
        rows[nodes] = {(name, degree) for name, degree, *_ in ROW.findall(capsys.readouterr().out)}
    alone = {(name, "1") for name in ("flat_ring", "two_level_ring", "direct", "tasp")}
    assert alone < rows["512"]
    assert {degree for _, degree in rows["8"]} == {degree for _, degree in rows["512"]}


def test_plan_prices_a_mesh_if_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*PLAN, "--ranks-per-node", "4", "--heads", "32/8", "--inter-gb-s", "2", "--mesh-degree", "4"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert {degree for _, degree, *_ in ROW.findall(out)} == {"1"}, "no heads are exchanged"
    assert re.search(r"Best: Strategy\(.*mesh_degree=4\)", out)
    assert main([*asked[:-1], "3"]) != 0
    assert "no plan for 32 query and 8 key/value heads on 2x4 (nodes x ranks per node) has mesh_degree=3" in (
        capsys.readouterr().err
    )


def test_plan_says_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--ranks-per-node", "80", "--heads", "3/1", "--inter-gb-s", "40"]) == 0
    assert "flat_ring        is not priced without an exchange of heads" in capsys.readouterr().out


def test_plan_draws_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main([*PLAN, "--ranks-per-node", "2", "--heads", "4/1", "--inter-gb-s", "45"]) == 0
    bars = capsys.readouterr().err.split("\r")
    assert re.fullmatch(r"pricing \[#+\.+\] \d+/\d+", bars[1])
    assert len(bars) > 5
    assert not bars[-1]
    assert not bars[-2].strip(), "it is wiped off"
    assert len(bars[-2]) >= max(map(len, bars))


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        *(
            (name, value, expected)
            for name, expected in (
                ("--tflops", "expected TFLOPS, such as 500, 0.001 to 1,000,000"),
                ("--intra-gb-s", "expected GB/s, such as 400, 0.001 to 1,000,000"),
                ("--inter-gb-s", "expected GB/s, such as 40, 0.001 to 1,000,000"),
            )
            for value in ("nan", "inf", "-inf", "1e-300", "1e300", "0", "-1", "fast", "")
        ),
        *(
            (name, value, expected)
            for name, expected in (
                ("--nodes", "expected a whole number of nodes, 1 to 100,000"),
                ("--ranks-per-node", "expected a whole number of ranks, 1 to 1,024"),
                ("--head-dim", "expected a whole number of elements, 1 to 65,536"),
            )
            for value in ("0", "-1", "1.5", "nan", "1" * 22, "٣", "1" * 5000)
        ),
        *(
            ("--seq", value, "such as 131072, 128k (131,072) or 1m (1,048,576), 1 to 1,000,000,000,000")
            for value in ("0", "-1", "1.5", "nan", "1" * 22, "٣", "1" * 5000, "1x", "k", "1.0000001m")
        ),
        *(
            ("--heads", value, "expected query heads / key/value heads, such as 32/8, each 1 to 100,000")
            for value in ("32", "0/1", "8/0", "9999999999999999999999/1", "٣٢/٨", "32/8/2", "a/b", "")
        ),
        ("--heads", "32/5", "5 key/value heads do not divide 32 query heads; write for example 32/8"),
    ],
)
def test_plan_refuses_what_cannot_be(
    option: str, value: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (*PLAN, "--ranks-per-node", "4", "--heads", "32/8", "--inter-gb-s", "45")
    with pytest.raises(SystemExit) as stopped:
        main([*asked, f"{option}={value}"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2
    assert last.startswith(f"burst plan: error: argument {option}: got ")
    assert last.endswith(expected)
    assert len(last) < 200


def test_plan_takes_tokens_with_a_suffix(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (*PLAN, "--ranks-per-node", "2", "--heads", "4/1", "--inter-gb-s", "45")
    for text in ("1m", "1,048,576", "1024K"):
        assert main([*asked, "--seq", text]) == 0
        assert "262144 tokens per rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("--model", "llama3_8b", "--nodes", "2"),
            "--nodes is an option of `burst plan --profile` and `burst plan`, not of `burst plan --model`: give --",
        ),
        (("--seq", "1m", "--gpus", "8"), "name a model, such as llama3_8b, or a config.json: burst plan MODEL --seq"),
        ((), "name a model, such as llama3_8b, or a config.json: burst plan MODEL --seq 1m"),
        (
            ("--nodes", "2", "--gpus", "8"),
            "--gpus is an option of `burst plan --model`, not of `burst plan`: name a model",
        ),
        (
            ("--profile", "x", "--gpus=8"),
            "--gpus is an option of `burst plan --model`, not of `burst plan --profile`",
        ),
        (("--model", "x", "--profile", "y", "--heads", "8/2"), "--heads is an option of `burst plan --profile` and"),
        (("--mode", "llama3_8b"), "--mode is not an option (did you mean --model?)"),
        (("--model", "llama3_8b", "--seq", "1m", "--gpu", "8"), "--gpu is not an option (did you mean --gpus?)"),
        (("--model", "llama3_8b", "--num-layers", "2"), "--num-layers is not an option; see `burst plan --model"),
        (("llama3_8b", "extra", "--seq", "1m"), "unrecognized arguments: extra"),
    ],
)
def test_options_of_another_plan_are_named(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *words])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"burst plan: error: {expected}")


def test_help_of_a_plan_is_that_of_a_model_first(capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in (
        (("--help",), "usage: burst plan MODEL (--seq TOKENS"),
        (("--nodes", "2", "--help"), "usage: burst plan [-h] --nodes N"),
        (("--profile", "x", "--help"), "usage: burst plan [-h] --profile FILE"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["plan", *words])
        assert stopped.value.code == 0
        assert capsys.readouterr().out.startswith(expected)


def test_commands_say_their_version_and_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    for words, status in ((["--version"], 0), (["check", "--quik"], 2)):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == status
    out, err = capsys.readouterr()
    assert out == f"burst_plugin {burst_plugin.__version__}, torch {torch.__version__}\n"
    assert err.endswith("burst check: error: unrecognized arguments: --quik (did you mean --quick?)\n")


def test_plans_and_the_doctor_write_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    assert main(["plan", "llama3_8b", "--seq", "128k", "--gpus", "8", "--json", str(path)]) == 0
    plan = json.loads(path.read_text())
    assert (plan["model"], plan["tokens"], plan["chosen"]["fits"]) == ("llama3_8b", 2**17, True)
    assert plan["chosen"]["options"].keys() >= {"keep_attention"}
    shown = f"{sum(plan['chosen']['gpu_bytes'].values()) / 2**30:.1f} GiB"
    assert shown in capsys.readouterr().out.splitlines()[0]
    asked = (*PLAN, "--ranks-per-node", "4", "--heads", "32/8", "--inter-gb-s", "45")
    assert main([*asked, "--json", str(path)]) == 0
    best = json.loads(path.read_text())["plans"][0]
    assert f"Strategy(schedule='{best['options']['schedule']}'" in capsys.readouterr().out
    assert main(["plan", "llama3_8b", "--seq", "128k", "--json", str(tmp_path)]) == 1
    assert "cannot be written: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--profile"])
def test_check_looks_at_its_files_before_it_measures(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Finding("fast", "passed", "a link", "measured")]
    monkeypatch.setattr("burst_plugin.check.run.spawned", lambda *_: iter(found))
    assert main(["check", option, str(tmp_path)]) == 1
    assert f"burst check: {option} {tmp_path} cannot be written: {tmp_path} is a fol" in capsys.readouterr().err
    assert main(["check", option, str(tmp_path / "there" / "x.json")]) == 1
    out, err = capsys.readouterr()
    assert f"cannot be written: there is no folder {tmp_path}/there; give a file" in err
    assert not out


def test_lines_fit_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    asked = [*PLAN, "--ranks-per-node", "4", "--heads", "32/8", "--inter-gb-s", "45"]
    assert main(asked) == 0
    piped = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert max(map(len, piped.splitlines())) > 100 > max(map(len, shown.splitlines()))
    assert piped.split() == shown.split()


def test_plan_refuses_sequences_shorter_than_the_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--ranks-per-node", "4", "--heads", "32/8", "--inter-gb-s", "45", "--seq", "7"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("burst plan: --seq 7 is fewer tokens than the 8 ranks of --nodes 2 --ranks-per-node 4")
    assert said.count("\n") == 1


@pytest.mark.parametrize("extreme", [("1e6", "0.001", "0.001"), ("0.001", "1e6", "1e6")])
def test_plan_ends_at_its_bounds(extreme: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    tflops, intra, inter = extreme
    rates = ("--tflops", tflops, "--intra-gb-s", intra, "--inter-gb-s", inter)
    sizes = ("--nodes", "100000", "--ranks-per-node", "8", "--seq", str(10**12), "--heads", "100000/1")
    assert main(["plan", *rates, *sizes, "--head-dim", "65536"]) == 0
    assert "nan" not in capsys.readouterr().out
