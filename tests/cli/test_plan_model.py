"""`burst plan --model`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from burst_plugin.cli import main
from burst_plugin.deepspeed.config import BLOCK, Block, conflicts
from burst_plugin.frameworks import FRAMEWORKS
from burst_plugin.megatron.planning import setting_of

NODE = ("plan", "--model", "llama3_8b", "--gpus", "8", "--gpu-gib", "80")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        status = main(arguments)
    except SystemExit as error:  # by the parser
        status = int(error.code or 0)
    assert status
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.splitlines()[-1]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_parts_add_up(framework: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, *NODE, "--seq", "1m", "--framework", framework)
    first = out.splitlines()[0]
    assert first.startswith(f"llama3_8b (8.03 G parameters) on 1,048,576 tokens, {framework}, 1 x 8 GPUs of 80 GiB: ")
    said = re.search(r"(\d+) s per step, (\d+) tokens/s per GPU, ([\d.]+) GiB$", first)
    assert said is not None
    for title, total in (("GiB per GPU", said[3]), ("Seconds per step", said[1])):
        section = out.split(f"{title}\n")[1].split("  together")[0]
        parts = [float(value) for value in re.findall(r"([\d.]+) (?:GiB|s)$", section, re.MULTILINE)]
        assert sum(parts) == pytest.approx(float(total), abs=0.8)
    assert float(said[2]) == pytest.approx(2**20 / 8 / float(said[1]), rel=0.01)
    assert "\n  bound by attention, " in out
    assert "\nRunner-up: TP " in out
    assert re.search(r"\n  loss_chunk = 1024 +without it a GPU needs [\d.]+ GiB\n", out)


def test_the_longest_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, *NODE, "--max-tokens", "--framework", "deepspeed")
    most = re.match(r"The longest sequence that fits, to 65,536: ([\d,]+) tokens", out)
    assert most is not None
    assert f" on {most[1]} tokens, deepspeed" in out
    assert "does not fit" in refused(
        capsys, *NODE, "--framework", "deepspeed", "--seq", str(int(most[1].replace(",", "")) + 2**16)
    )


def test_norms_in_one_kernel_fit_more_unless_others_run_in_chunks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Chunks of tokens are not for models with experts, of which this one has two that are half of the other's MLP.

    Its heads share one key head, so that they do not come in chunks either, whatever the norms.
    """
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 1}
    experts = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 7168}
    more = {"vocab_size": 128256, "model_type": "qwen3_moe", "intermediate_size": 14336}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(sizes | experts | more))

    def longest(model: str, *words: str) -> int:
        out = printed(capsys, "plan", "--model", model, *NODE[3:], "--max-tokens", "--framework", "deepspeed", *words)
        return int(re.findall(r"65,536: ([\d,]+)", out)[0].replace(",", ""))

    assert longest("llama3_8b", "--fused-norms") == longest("llama3_8b")
    assert longest(str(config), "--fused-norms") > 1.15 * longest(str(config))


def test_megatron_gets_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, *NODE, "--seq", "1m", "--framework", "megatron", "--emit", str(tmp_path / "plan"))
    words = (tmp_path / "plan" / "megatron_flags.txt").read_text().split()
    assert (
        f"Written to {tmp_path / 'plan'}: megatron_flags.txt. python -m burst_plugin.run --framework megatron" in out
    )

    def value(flag: str) -> int:
        return int(words[words.index(flag) + 1])

    assert value("--seq-length") == 2**20
    assert (value("--num-layers"), value("--hidden-size"), value("--num-query-groups")) == (32, 4096, 8)
    tensor = value("--tensor-model-parallel-size") if "--tensor-model-parallel-size" in words else 1
    assert value("--context-parallel-size") * tensor == 8
    assert f"TP {tensor} x CP {8 // tensor} x" in out
    assert words[words.index("--cp-comm-type") + 1] == "burst"
    assert words[words.index("--burst-loss-chunk") + 1] == "1024"
    assert ("--burst-keep-attention" in words) == ("keep_attention = " in out)
    assert ("--optimizer-cpu-offload" in words) == ("optimizer on the host" in out.split("Runner-up")[0])


def test_deepspeed_gets_its_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, *NODE, "--seq", "1m", "--framework", "deepspeed", "--fused-norms", "--emit", str(tmp_path))
    config = json.loads((tmp_path / "ds_config.json").read_text())
    arguments = json.loads((tmp_path / "trainer_arguments.json").read_text())
    block = config[BLOCK]
    assert block["context_parallel_size"] == 8
    for name, value in block.items():
        if name not in ("enabled", "context_parallel_size") and value is not True:
            assert f"\n  {name} = {value} " in out
    parsed = Block.of(config)
    assert parsed is not None
    assert parsed.strategy.loss_chunk == 1024
    assert conflicts(config, 8) == []
    assert config["zero_optimization"]["stage"] == 3
    assert arguments["gradient_checkpointing"] is True
    assert arguments["liger_kernel_config"]["rms_norm"] is True
    assert sum(arguments["liger_kernel_config"].values()) == 1
    assert arguments["liger_kernel_config"]["fused_linear_cross_entropy"] is False, "Liger's default is true"


def test_what_is_wrong_is_said_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    sized = ("plan", "--model", "llama3_8b", "--seq", "1m")
    for arguments, message in (
        (("plan", "--model", "llama3-8b", "--seq", "1m"), "model 'llama3-8b' is not known (did you mean llama3_8b?)"),
        (
            ("plan", "--model", "llama3_8b", "--seq", "1x"),
            "argument --seq: got '1x', expected a number of tokens such",
        ),
        (("plan", "--model", "llama3_8b"), "one of the arguments --seq --max-tokens --flags is required"),
        ((*sized, "--gpus", "12"), "--gpus 12 is not a number of whole nodes of --gpus-per-node 8; use a multiple"),
        ((*sized, "--gpu-gib", "no"), "argument --gpu-gib: got 'no', expected a positive number"),
        ((*sized, "--emit", str(tmp_path / "file" / "x")), "cannot be written to: "),
        (
            ("plan", "--model", "llama3_8b", "--seq", "1000001"),
            "1,000,001 tokens cannot be cut over 8 GPUs; use a mu",
        ),
    ):
        assert message in refused(capsys, *arguments)
    message = refused(capsys, *NODE, "--seq", "16m")
    assert re.search(
        r"llama3_8b on 16,777,216 tokens does not fit on 8 GPUs: with the nearest plan a GPU needs [\d.]+ GiB of 80 "
        r"and a host needs \d+ GiB of 2048; what would fit: GPUs of [\d.]+ GiB and hosts of \d+ GiB, or sequences of "
        r"[\d,]+ tokens, or \d+ GPUs$",
        message,
    )


def test_the_command_without_a_model_is_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the following arguments are required: --nodes" in refused(capsys, "plan", "--seq", "65536")


def test_a_command_line_is_priced_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was written for a plan is read again as the same plan."""
    out = printed(capsys, *NODE, "--seq", "1m", "--emit", str(tmp_path))
    flags = str(tmp_path / "megatron_flags.txt")
    again = printed(capsys, *NODE, "--flags", flags)
    assert again.splitlines()[0] == out.splitlines()[0]
    assert out.split("GiB per GPU\n")[1].split("\n\n")[0] in again
    assert out.split("Chosen, ")[1].split("\n")[1] in again
    assert "Runner-up" not in again
    assert " (does not fit)\n" in printed(capsys, *NODE[:-1], "20", "--flags", flags)
    (tmp_path / "none").write_text("--context-parallel-size 3")
    assert "3 x 1 (TP x CP x PP) does not divide 8" in refused(capsys, *NODE, "--flags", str(tmp_path / "none"))
    (tmp_path / "none").write_text("--context-parallel-size 4")
    assert "there is no --seq-length among them" in refused(capsys, *NODE, "--flags", str(tmp_path / "none"))
    (tmp_path / "none").write_text("--context-parallel-size")
    assert "--context-parallel-size has no value" in refused(capsys, *NODE, "--flags", str(tmp_path / "none"))
    assert "cannot be read; use --seq" in refused(capsys, *NODE, "--framework", "deepspeed", "--flags", flags)


def test_flags_may_name_a_preset() -> None:
    flags = "--seq-length 65536 --context-parallel-size 16 "
    for words, degree in (
        ("--burst-preset usp", 8),
        ("--burst-preset usp --burst-ulysses-degree 2", 2),
        ("--burst-ulysses-degree all", 16),
        ("--burst-preset ring", 1),
        ("", 1),
    ):
        assert setting_of(flags + words, 16, 8).ulysses == degree
    with pytest.raises(ValueError, match="preset='usb' is not valid"):
        setting_of(flags + "--burst-preset usb", 16, 8)
