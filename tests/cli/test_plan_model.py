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
from tests.support.model_configs import PUBLISHED, VARIANTS, small

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


def test_megatron_gets_the_model_of_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small(VARIANTS["qwen2_with_windows"])))
    folder = tmp_path / "plan"
    out = printed(
        capsys,
        "plan",
        "--model",
        str(tmp_path),
        "--gpus",
        "1",
        "--seq",
        "4096",
        "--emit",
        str(folder),
        "--gpu-gib",
        "80",
    )
    assert re.search(
        r"pretrain_gpt.py \$\(cat .*megatron_flags.txt\) \.\.\. \(Megatron \d+\.\d+\.\d+\)$", out.strip()
    )
    flags = (folder / "megatron_flags.txt").read_text()
    for text in (
        "--rotary-base 1000000",
        "--disable-bias-linear --add-qkv-bias",
        "--norm-epsilon 1e-06",
        "--window-size 8,0 --window-attn-skip-freq ([0]*2+[1]*2)",
    ):
        assert f"{text}\n" in flags


def test_a_model_that_flags_cannot_say_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, message in (
        ("gemma_2", r"gemma2 cannot be written as flags of Megatron .*capped scores \(attn_logit_softcapping=50.0\)"),
        ("olmo_2", r"norms of queries and keys over all heads together \(model_type=olmo2\)"),
        ("deepseek_v3", r"deepseek_v3 cannot be written as flags of Megatron .*since it has experts in some layers"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
        folder = tmp_path / "plan"
        said = refused(capsys, "plan", "--model", str(tmp_path), "--seq", "1m", "--emit", str(folder))
        assert re.search(message, said)
        assert not folder.exists()
        assert "nothing was written" in said


def test_deepspeed_gets_its_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, *NODE, "--seq", "1m", "--framework", "deepspeed", "--fused-norms", "--emit", str(tmp_path))
    config = json.loads((tmp_path / "ds_config.json").read_text())
    arguments = json.loads((tmp_path / "trainer_arguments.json").read_text())
    block = config[BLOCK]
    assert block["context_parallel_size"] == 8
    assert block["memory"] == "off", "all is chosen by the plan"
    for name, value in block.items():
        if name not in ("enabled", "context_parallel_size", "memory") and value is not True:
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
        (("plan", "/nowhere/config.json", "--seq", "1m"), "/nowhere/config.json: no such file; give the path of a"),
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
    said = refused(capsys, "plan", "--nodes", "2", "--seq", "65536")
    assert "the following arguments are required: --ranks-per-node, --heads" in said


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
    assert "there is no --seq-length among the flags" in refused(capsys, *NODE, "--flags", str(tmp_path / "none"))
    (tmp_path / "none").write_text("--seq-length 1048576 --context-parallel-size 3")
    assert "3 x 1 (TP x CP x PP) does not divide 8" in refused(capsys, *NODE, "--flags", str(tmp_path / "none"))
    (tmp_path / "none").write_text("--context-parallel-size")
    assert "--context-parallel-size: expected one argument" in refused(
        capsys, *NODE, "--flags", str(tmp_path / "none")
    )
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
    with pytest.raises(ValueError, match="--burst-preset: invalid choice: 'usb'"):
        setting_of(flags + "--burst-preset usb", 16, 8)


MODEL = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --vocab-size 128256 "
)
RUN = (
    "--seq-length 131072 --tensor-model-parallel-size 2 --context-parallel-size 2 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1 "
)
USUAL = "--bf16 --use-distributed-optimizer --sequence-parallel --cp-comm-type burst "


def test_flags_are_read_as_megatron_reads_them() -> None:
    plain = setting_of(f"{MODEL}{RUN}{USUAL}--burst-loss-chunk 1024 --burst-offload", 8, 8)
    assert (plain.tokens, plain.tensor, plain.context, plain.data) == (131072, 2, 2, 2)
    assert (plain.loss_chunk, plain.offload, plain.micro_batch) == (1024, True, 1)
    assert plain.batch == 2, "without --global-batch-size a micro-batch for each data-parallel rank"
    for same in (
        f"{MODEL}{RUN}{USUAL}--seq-length=131072 --burst-loss-chunk=1024 --burst-offload",
        f"{MODEL}{RUN}{USUAL}--seq-length 1 --burst-loss-chunk 1024 --burst-offload --seq-length \\\n 131072",
        f"torchrun --nproc-per-node 8 -m x -- pretrain_gpt.py {RUN}{USUAL}--burst-loss-chunk 1024 --burst-offload",
        f"{RUN}{USUAL}--burst-loss-chunk 1024 --burst-offload --global-batch-size 2 --new 3 # --burst-mlp-chunk 1",
    ):
        assert setting_of(same, 8, 8) == plain
    assert setting_of(f"{RUN}--micro-batch-size 4", 8, 8).batch == 8
    assert setting_of(f"{RUN}--burst-offload --no-burst-offload", 8, 8).offload is False


# DeepSeek V3's, as Megatron has them.
LATENT_MODEL = (
    "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --vocab-size 129280 "
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    "--v-head-dim 128 --num-experts 256 --moe-layer-freq ([0]*3+[1]*58) --moe-router-topk 8 "
    "--moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 "
).replace("([0]*3+[1]*58)", "'([0]*3+[1]*58)'")
LATENT_RUN = f"{RUN}{USUAL}--cp-comm-type burst "


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (LATENT_MODEL, ""),
        ("", ""),  # which say nothing of the model
        (LATENT_MODEL.replace("--kv-lora-rank 512", "--kv-lora-rank 256"), "--kv-lora-rank 256 (the model has 512)"),
        (LATENT_MODEL.replace("--q-lora-rank 1536", ""), "no --q-lora-rank (the model has 1536)"),
        (LATENT_MODEL.replace("--multi-latent-attention", ""), "no --multi-latent-attention (the model has it)"),
        (
            LATENT_MODEL.replace("[0]*3+[1]*58", "[0]*1+[1]*60"),
            "experts in 60 of 61 layers (the model has them in 58)",
        ),
        (LATENT_MODEL.replace("'([0]*3+[1]*58)'", "0"), "--moe-layer-freq 0 cannot be read; write a number from 1"),
        (LATENT_MODEL.replace("18432", "2048"), "--ffn-hidden-size 2048 (the model has 18432)"),
        (
            f"{LATENT_MODEL}--burst-latents send --burst-ulysses-degree 2",
            "--burst-latents send does not go with --burst-ul",
        ),
    ],
)
def test_flags_of_latent_attention_are_read(
    flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["deepseek_v3"]))
    (tmp_path / "flags").write_text(LATENT_RUN + flags)
    run = ("plan", "--model", str(tmp_path), "--gpus", "8", "--flags", str(tmp_path / "flags"))
    if message:
        assert message in refused(capsys, *run)
    else:
        out = printed(capsys, *run)
        assert "\n  latents sent              with heads exchanged (ulysses_degree = 2) a step takes " in out
        assert "Not priced" not in out


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_plan_says_whether_latents_are_sent(
    framework: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With slow links they are, by default; with fast ones keys and values are, which is an option to be written."""
    config = str(Path(__file__).parents[1] / "planning" / "configs" / "minicpm3_4b.json")
    run = (
        "plan",
        "--model",
        config,
        "--gpus",
        "8",
        "--gpus-per-node",
        "2",
        "--seq",
        "256k",
        "--framework",
        framework,
    )
    for rate, said in (("1", "latents sent"), ("900", "latents = expand")):
        folder = tmp_path / rate
        emit = ("--emit", str(folder)) if framework == "deepspeed" else ()
        out = printed(capsys, *run, "--inter-gb-s", rate, "--intra-gb-s", rate, *emit)
        assert re.search(rf"\n  {said} +with [a-z =()_0-9]+ a step takes [\d.]+ m?s more", out), out
        assert len(re.findall(r"\n  latents ", out)) == 1
        if emit:
            block = json.loads((folder / "ds_config.json").read_text())[BLOCK]
            assert block.get("latents") == (None if said == "latents sent" else "expand")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--seq-length 128k", "--seq-length: got '128k', which Megatron does not read; write 131072"),
        ("--seq-length $SEQ", "give the value, not the variable of a shell"),
        ("--micro-batch-size 0", "--micro-batch-size: got '0', expected a whole number from 1 on"),
        (
            "--global-batch-size 7",
            "--global-batch-size 7 is not a multiple of --micro-batch-size 1 times the 2 data-",
        ),
        ("--micro-batch-size 4 --global-batch-size 4", "use a multiple of 8"),
        ("--seq-length 131073", "--seq-length 131073 is not a multiple of 4, twice --context-parallel-size"),
        ("--hierarchical-context-parallel-sizes 4 4", "is for 16 ranks, not for --context-parallel-size 2"),
        ("--recompute-granularity partial", "--recompute-granularity: invalid choice: 'partial'"),
        (
            "--num-layers 2 --hidden-size 64",
            "--num-layers 2 (the model has 32), --hidden-size 64 (the model has 4096)",
        ),
        (MODEL.replace("--num-query-groups 8", ""), "no --num-query-groups (the model has 8 key/value heads)"),
        (
            "--window-size 4095,0 --window-attn-skip-freq 2",
            "windows of 4096 keys in 16 of 32 layers (the model has none",
        ),
        ("--window-size 4095,0 --window-attn-skip-freq [1]*4+[0]*28", "windows of 4096 keys in 4 of 32 layers"),
        ("--window-size wide", "--window-size wide --window-attn-skip-freq None cannot be read"),
    ],
)
def test_flags_that_cannot_be_priced_are_refused_by_name(
    flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flags").write_text(RUN + USUAL + flags)
    assert message in refused(capsys, *NODE, "--flags", str(tmp_path / "flags"))


def test_what_has_no_price_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "flags"
    path.write_text(f"{MODEL}{RUN}{USUAL}--micro-batch-size 1")
    assert "riced" not in printed(capsys, *NODE, "--flags", str(path))
    path.write_text(f"{RUN}--cp-comm-type burst --bf16 --fp8-format hybrid --burst-schedule direct")
    out = printed(capsys, *NODE, "--flags", str(path)).splitlines()
    assert out[1] == "Not priced: --fp8-format hybrid; --burst-schedule direct."
    assert out[2] == "Priced as if the flags had --use-distributed-optimizer --sequence-parallel, which they lack."


def test_micro_batches_count_in_memory_and_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, said = tmp_path / "flags", {}
    for size in (1, 4):
        path.write_text(f"{MODEL}{RUN}{USUAL}--micro-batch-size {size}")
        out = printed(capsys, *NODE, "--flags", str(path))
        found = re.search(r"(\d+) s per step, .* ([\d.]+) GiB", out.splitlines()[0])
        layers = re.search(r"inputs of layers +([\d.]+) GiB", out)
        assert found is not None
        assert layers is not None
        said[size] = int(found[1]), float(found[2]), float(layers[1])
    assert said[4][0] == pytest.approx(4 * said[1][0], rel=0.05), "a step has four times the sequences"
    assert said[4][1] > said[1][1] + 3 * said[1][2]
    assert said[4][2] == pytest.approx(4 * said[1][2], rel=0.01)


def test_a_model_with_windows_is_said_to_have_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    more = {"vocab_size": 32000, "model_type": "mistral", "intermediate_size": 14336, "sliding_window": 4096}
    (tmp_path / "config.json").write_text(json.dumps(sizes | more))
    (tmp_path / "flags").write_text(f"{RUN}{USUAL}--window-size 4095,0")
    asked = ("plan", "--model", str(tmp_path), "--flags", str(tmp_path / "flags"))
    assert "\nAttention: windows of 4,096 tokens in 32 of 32 layers\n" in printed(capsys, *asked)
    (tmp_path / "flags").write_text(f"{RUN}{USUAL}--num-layers 32")
    assert "no --window-size (the model has 4096 keys in 32)" in refused(capsys, *asked)


def test_small_steps_and_one_gpu_are_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("plan", "--model", "llama3_8b", "--seq", "4k", "--gpus", "1")
    out = printed(capsys, *asked, "--gpu-gib", "200")
    assert re.search(r"1 x 1 GPU of 200 GiB: \d+ ms per step", out)
    assert re.search(r"\nMilliseconds per step\n(.*\n)*  together +\d+\.\d ms\n", out)
    assert " does not fit on 1 GPU: " in refused(capsys, *asked, "--gpu-gib", "20", "--host-gib", "10")


def test_a_search_for_what_fits_says_that_it_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*NODE, "--seq", "1m", "--host-gib", "10"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "burst plan: nothing fits on 8 GPUs; looking for what would, which may take a minute"
    assert said[1].endswith("a host needs 64 GiB of 10; what would fit: hosts of 65 GiB")
    assert len(said) == 2
