"""What a visitor runs first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launched import launched

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
_LLAMA = ("transformers.models.llama.modeling_llama",)
_DEEPSPEED = ("deepspeed", *_LLAMA, "transformers.trainer")  # what the examples import


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.parametrize("model", [["--layers", "2"], ["--pattern", "M*-"]], ids=["gpt", "hybrid"])
def test_the_quickstart_trains_compares_and_draws(tmp_path: Path, model: list[str]) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    command = [sys.executable, "examples/quickstart.py", "--device", "cpu", "--out", str(tmp_path)]
    command += ["--steps", "3", "--seq-length", "512", *model, "--hidden", "64", "--backward", "q"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "two_level_ring" in done.stdout
    assert "q (asked for: q)" in done.stdout
    assert done.stdout.count("as the schedule counts") == 2
    assert "began with the same" in done.stdout
    assert (tmp_path / "quickstart.png").stat().st_size > 10_000


def test_quickstart_help_and_bad_options_are_clear() -> None:
    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "examples/quickstart.py", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)

    assert "--seq-length" in ask("--help").stdout
    refused = ask("--seq-length", "4097")
    assert refused.returncode == 2
    assert "--seq-length: got 4097, expected a multiple of 2 x ranks = 8" in refused.stderr
    assert "try 4104" in refused.stderr
    refused = ask("--pattern", "MX")
    assert refused.returncode == 2
    assert "--pattern MX: expected letters M, * and -, of which * at least once; try MM-*M-" in refused.stderr


@pytest.mark.slow
def test_the_plain_pytorch_example_is_exact() -> None:
    done = launched(["examples/plain_pytorch.py"], ranks=4)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("relative errors")]
    assert all(float(error) < 2e-6 for error in line.split(":")[1].split())
    assert "'schedule': 'two_level_ring'" in done.stdout


@pytest.mark.slow
def test_the_example_of_a_cache_says_the_same_on_all_ranks() -> None:
    done = launched(["examples/kv_cache.py"], ranks=4)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("same tokens as one rank: True") == 4


@pytest.mark.huggingface
@pytest.mark.slow
def test_the_example_of_generation_runs_on_the_ring() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    done = launched(["examples/generate.py", "--smoke"], ranks=4, imports=_LLAMA)
    assert done.returncode == 0, done.stderr
    assert "passkeys found in 1024 tokens: " in done.stdout
    sent = [line.split("sent per token ")[1] for line in done.stdout.splitlines() if "sent per token" in line]
    assert len(sent) == 4
    assert len(set(sent)) == 1


@pytest.mark.slow
def test_the_example_of_diffusion_trains_as_one_rank() -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    wan = ("diffusers.models.transformers.transformer_wan",)
    done = launched(["examples/diffusion.py", "--steps", "2"], ranks=4, imports=wan)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()[-3:]
    assert [row.split()[0].strip(",") for row in rows] == ["loss", "first", "weights"]
    assert all(float(row.split()[-1]) < 1e-6 for row in rows), done.stdout


@pytest.mark.huggingface
def test_the_example_of_grpo_has_the_same_losses_folded(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    command = ["examples/grpo.py", "--smoke", "--out", str(tmp_path / "grpo.png")]
    done = launched(command, ranks=2, imports=_LLAMA)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("largest difference of losses")]
    of_losses, of_gradients = (float(word) for word in line.replace(",", "").split() if word[0].isdigit())
    assert of_losses < 1e-6
    assert of_gradients < 1e-5
    assert "tokens of an update: 480 unfolded, " in done.stdout
    assert (tmp_path / "grpo.png").stat().st_size > 10_000


@pytest.mark.huggingface
def test_the_example_of_grpo_misses_matplotlib_before_it_trains(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    script = tmp_path / "without_matplotlib.py"
    lines = ["import runpy, sys", "sys.modules['matplotlib'] = None", "sys.argv = ['grpo.py', '--smoke']"]
    script.write_text(
        "\n".join([*lines, f"runpy.run_path({str(ROOT / 'examples' / 'grpo.py')!r}, run_name='__main__')"])
    )
    done = launched([str(script)], ranks=2, imports=_LLAMA)
    assert done.returncode == 1
    assert "grpo.py draws its picture with matplotlib, which is not installed: pip install matplotlib" in done.stderr
    assert "Traceback" not in done.stderr
    assert "step " not in done.stdout


@pytest.mark.deepspeed
@pytest.mark.slow
def test_the_example_of_alst_trains_as_ours_with_all_that_saves_memory(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    run = ["-m", "burst_plugin.run", "--framework", "deepspeed", "--cpu"]
    small = ["--steps", "3", "--seq-length", "2048", "--vocabulary", "300", "--layers", "2"]
    small += ["--config", "examples/deepspeed/ds_config_long.json"]
    for script in ("train", "alst"):
        out = ["--out", str(tmp_path / f"{script}.json")]
        done = launched([*run, f"examples/deepspeed/{script}.py", *small, *out], ranks=2, imports=_DEEPSPEED)
        assert done.returncode == 0, done.stdout + done.stderr
    files = [str(tmp_path / f"{script}.json") for script in ("train", "alst")]
    command = [sys.executable, "examples/deepspeed/compare.py", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "equal"


@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("script", ["train.py", "trainer.py"])
def test_the_deepspeed_examples_equal_one_rank(tmp_path: Path, script: str) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    small = ["--steps", "2", "--seq-length", "256", "--vocabulary", "300"]
    for ranks, name, off in ((4, "ring", []), (1, "one", ["--off"])):
        run = ["-m", "burst_plugin.run", "--framework", "deepspeed", "--cpu", f"examples/deepspeed/{script}"]
        command = [*run, *small, *off, "--out", str(tmp_path / f"{name}.json")]
        done = launched(command, ranks=ranks, imports=_DEEPSPEED)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count(f"burst_plugin: context_parallel_size={ranks}: topology ") == (not off)
    files = [str(tmp_path / "ring.json"), str(tmp_path / "one.json")]
    compared = subprocess.run(
        [sys.executable, "examples/deepspeed/compare.py", *files],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert compared.returncode == 0, compared.stdout
    assert "equal" in compared.stdout.splitlines()
