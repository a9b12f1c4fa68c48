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

from burst_plugin.cli import main

ROOT = Path(__file__).parents[1]


def burst(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "burst_plugin.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_help_names_the_commands() -> None:
    assert "doctor" in burst("--help").stdout
    assert burst().returncode == 2
    assert burst("surgeon").returncode == 2


@pytest.mark.megatron
def test_doctor_says_what_is_there_changed_and_refused() -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    done = burst("doctor")
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
    assert "cuda_graph_impl: use cuda_graph_impl='none'" in megatron
    assert "reset_attention_mask: documents would attend to each other" in megatron


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


PLAN = ("plan", "--nodes", "2", "--seq", "65536", "--tflops", "500", "--intra-gb-s", "400")


def test_plan_says_what_suits_a_cluster() -> None:
    idle = burst(*PLAN, "--ranks-per-node", "4", "--heads", "32/8", "--inter-gb-s", "45").stdout
    assert "2x4 (nodes x ranks per node), 8192 tokens per rank, 32/8 heads of 128, bfloat16, causal" in idle
    assert "Best: Strategy(schedule='two_level_ring', parts=1); all communication is hidden behind work." in idle
    block = 8192 * 8 * 2 * 128 * 2 / 2**30  # 8 heads of keys and values in bfloat16; sums are twice as large
    assert f"buffers take about {(4 + 5 * 2) * block:.2f} GiB" in idle
    busy = burst(*PLAN, "--ranks-per-node", "4", "--heads", "32/8", "--inter-gb-s", "2").stdout
    assert "parts=(4, 2)); inter-node links are what ranks wait for." in busy


@pytest.mark.parametrize(
    ("heads", "ranks", "message"),
    [("32", "4", "--heads 32 is not valid; write"), ("32/8", "0", "at least 1 node and 1 rank per node")],
)
def test_plan_refuses_what_cannot_be(heads: str, ranks: str, message: str) -> None:
    done = burst(*PLAN, "--ranks-per-node", ranks, "--heads", heads, "--inter-gb-s", "45")
    assert done.returncode == 1
    assert message in done.stderr
