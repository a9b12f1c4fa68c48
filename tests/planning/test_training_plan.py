"""The search for a training plan: all settings that fit, priced; against formulas worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from burst_plugin.planning.cluster import Cluster
from burst_plugin.training.memory import GIB, memory, surely_too_large
from burst_plugin.training.model_shape import MODELS, ModelShape, model_shape
from burst_plugin.training.setting import RECOMPUTE, Code, Setting, layout_in_words, strategy_options
from burst_plugin.training.step_time import bound_by, step_seconds, tokens_per_second
from burst_plugin.training.training_plan import Goal, Space, fits, longest, nearest, plans_that_fit, reasons, settings

M = 2**20
LLAMA = MODELS["llama3_8b"]
FUSED = Code(plain_norms=False, mlp_kept=3, logit_bytes=10, sums_weights=False)
PLAIN = Code(plain_norms=True, mlp_kept=4, logit_bytes=12, sums_weights=True)
CUT = Space(code=FUSED, zeros=(1,), tensor=True, pipeline=True, recompute=RECOMPUTE, divides=True)
SHARDED = Space(
    code=PLAIN,
    zeros=(1, 3),
    tensor=False,
    pipeline=False,
    recompute=("none", "full"),
    divides=False,
    head_chunks=True,
)


def goal(space: Space = SHARDED, tokens: int = M, **cluster: Any) -> Goal:
    return Goal(model=LLAMA, tokens=tokens, cluster=Cluster(**cluster), space=space)


# ---------------------------------------------------------------------------------------------------------- the time


def test_time_follows_the_formulas() -> None:
    """One small run, worked out by hand; links are so fast that nothing is to be seen of the ring."""
    model = ModelShape(name="s", layers=4, hidden=64, ffn=128, heads=8, kv_heads=8, head_dim=8, vocab=1000)
    cluster = Cluster(
        peak_flops=1e9, matmul_share=1.0, attention_share=0.5, intra_bytes_per_s=1e12, inter_bytes_per_s=1e12
    )
    setting = Setting(tokens=4096, code=FUSED, tensor=2, context=4, inner=4, batch=2)
    spent = step_seconds(model, setting, cluster)
    mlp, projections = 2 * 4096 * 3 * 64 * 128, 2 * 4096 * 4 * 64 * 64
    assert spent["linear layers"] == pytest.approx(2 * 4 * 4 * (mlp + projections) / 8 / 1e9)
    assert spent["head and loss"] == pytest.approx(2 * 3 * 2 * 4096 * 64 * 1000 / 8 / 1e9)
    attention = 2 * 2 * 4096**2 * 64 / 2 / 8 / 0.5e9  # two products, half of the pairs
    assert spent["attention, forward"] == pytest.approx(2 * 4 * attention)
    assert spent["attention, forward again"] == pytest.approx(2 * 4 * attention)
    assert spent["attention, backward"] == pytest.approx(2 * 4 * 2.5 * attention)
    assert spent["ring and exchange of heads, not hidden"] == pytest.approx(0, abs=1e-4)
    assert spent["tensor parallelism"] == pytest.approx(2 * 4 * 14 * 1024 * 64 * 2 * 0.5 / 1e12)
    kept = step_seconds(model, replace(setting, keep=1.0), cluster)
    assert kept["attention, forward again"] == 0
    assert sum(spent.values()) - sum(kept.values()) == pytest.approx(2 * 4 * attention, rel=1e-3)
    chunked = step_seconds(model, replace(setting, mlp_chunk=512, loss_chunk=512), cluster)
    assert chunked["linear layers"] == pytest.approx(2 * 4 * 4 * (mlp + projections) / 8 / 1e9)
    assert chunked["head and loss"] == pytest.approx(spent["head and loss"])
    mlp_again = step_seconds(model, replace(setting, recompute="mlp"), cluster)
    assert mlp_again["tensor parallelism"] == pytest.approx(spent["tensor parallelism"] * 12 / 14)
    assert bound_by(spent).startswith("attention, ")
    assert tokens_per_second(setting, 2.0) == 2 * 4096 / 2.0 / 8


def test_a_micro_batch_of_several_sequences_computes_as_much_in_fewer_turns() -> None:
    setting, cluster = Setting(tokens=2**16, code=FUSED, context=4, inner=4, pipeline=2, batch=8), Cluster()
    one, four = (step_seconds(LLAMA, replace(setting, micro_batch=n), cluster) for n in (1, 4))
    assert (setting.microbatches, replace(setting, micro_batch=4).microbatches) == (8, 2)
    for name in ("linear layers", "head and loss", "attention, forward", "attention, backward"):
        assert four[name] == pytest.approx(one[name])
    assert four["pipeline bubble"] == pytest.approx(4 * one["pipeline bubble"], rel=0.01)
    sharded = replace(setting, pipeline=1, zero=3)
    slow = Cluster(intra_bytes_per_s=1e7)
    gathered = [step_seconds(LLAMA, replace(sharded, micro_batch=n), slow) for n in (1, 4)]
    weights = [each["weights gathered, not hidden"] for each in gathered]
    assert weights[1] < weights[0] / 3, "weights are gathered once for a micro-batch"


def test_heads_in_chunks_are_projected_once_more_and_attended_to_as_often() -> None:
    setting, cluster = Setting(tokens=M, code=PLAIN, context=8, inner=8, zero=3), Cluster()
    whole, chunked = (step_seconds(LLAMA, replace(setting, head_chunks=n), cluster) for n in (1, 4))
    to_heads = 2 * M * 4096 * 128 * (32 + 2 * 8)
    more = 32 * to_heads / 8 / (cluster.peak_flops * cluster.matmul_share)
    assert chunked["linear layers"] == pytest.approx(whole["linear layers"] + more)
    for name in ("attention, forward", "attention, forward again", "attention, backward"):
        assert chunked[name] == pytest.approx(whole[name])


def test_what_nothing_hides_costs_time() -> None:
    setting = Setting(tokens=M, code=FUSED, context=8, inner=8, zero=3, offload=True)
    fast, slow = Cluster(), Cluster(pcie_bytes_per_s=1e7, intra_bytes_per_s=1e8)
    assert step_seconds(LLAMA, setting, fast)["offload, not hidden"] == 0
    spent = step_seconds(LLAMA, setting, slow)
    assert spent["ring and exchange of heads, not hidden"] > 10
    layers_s = sum(spent[name] for name in spent if name.startswith(("linear", "attention", "ring")))
    assert spent["offload, not hidden"] == pytest.approx(32 * 2 * GIB / 1e7 - layers_s)
    assert spent["weights gathered, not hidden"] == pytest.approx(
        max(0.0, 3 * 2 * LLAMA.parameters * 7 / 8 / 1e8 - layers_s), rel=1e-6
    )


# --------------------------------------------------------------------------------------------------------- the search


@pytest.mark.parametrize("space", [CUT, SHARDED])
def test_settings_are_such_as_can_run(space: Space) -> None:
    some = goal(space, nodes=2)
    found = list(settings(some))
    assert len(found) == len(set(found)) > 100
    for each in found:
        assert each.gpus == 16
        assert each.batch % each.data == 0
        assert LLAMA.layers % each.pipeline == 0
        assert each.context % each.inner == 0
        assert each.inner * each.tensor <= 8
        assert LLAMA.kv_heads % each.tensor == 0
        assert each.context % each.ulysses == 0
        assert each.recompute == "full" or not (each.keep or each.offload)
        assert not space.divides or some.tokens % (2 * each.context * each.tensor) == 0
    assert {each.tensor for each in found} == ({1, 2, 4, 8} if space.tensor else {1})
    assert {each.head_chunks for each in found} == ({1, 2, 4, 8} if space.head_chunks else {1})
    for each in found:
        kv_heads = LLAMA.kv_heads // each.head_chunks
        assert kv_heads % each.ulysses == 0 or each.ulysses % kv_heads == 0 or each.tensor > 1
        assert LLAMA.heads // each.head_chunks % each.ulysses == 0


@pytest.mark.parametrize("space", [CUT, SHARDED])
def test_the_plan_is_the_fastest_that_fits(space: Space) -> None:
    some = goal(space, gpu_gib=60.0)
    best_first = plans_that_fit(some)
    for each in best_first:
        assert each.memory.gpu_bytes <= 60 * GIB
        assert each.memory.host_bytes <= 2048 * GIB
    fit = [
        sum(step_seconds(LLAMA, each, some.cluster).values())
        for each in settings(some)
        if memory(LLAMA, each, some.cluster).gpu_bytes <= 60 * GIB
    ]
    assert best_first[0].step_s <= 1.01 * min(fit)
    assert len(best_first) == len(fit)


def test_a_million_tokens_fit_on_a_node() -> None:
    """What is wanted: at most 56 GiB, and more than 345 tokens/s per GPU."""
    for space in (CUT, SHARDED):
        best = plans_that_fit(goal(space, gpu_gib=56.0))[0]
        assert best.memory.gpu_bytes <= 56 * GIB
        assert best.tokens_per_s > 345


def test_the_longest_sequence_is_the_longest() -> None:
    some = goal(gpu_gib=76.0)
    most = longest(some)
    assert plans_that_fit(replace(some, tokens=most))
    assert not plans_that_fit(replace(some, tokens=most + 2**16))
    assert longest(replace(some, cluster=replace(some.cluster, nodes=4))) > 3 * most
    assert longest(replace(some, cluster=replace(some.cluster, gpu_gib=5.0))) == 0
    assert longest(replace(some, cluster=replace(some.cluster, host_gib=200.0))) < most


def test_reasons_are_true() -> None:
    some = goal(gpu_gib=60.0)
    best = plans_that_fit(some)[0]
    why = reasons(some, best)
    assert {"keep", "loss_chunk", "offload"} <= set(why)
    without = memory(LLAMA, replace(best.setting, loss_chunk=0), some.cluster)
    assert why["loss_chunk"] == f"without it a GPU needs {without.gpu_bytes / GIB:.1f} GiB"
    slower = sum(step_seconds(LLAMA, replace(best.setting, keep=0.0), some.cluster).values()) - best.step_s
    assert why["keep"] == f"without it a step takes {slower:.1f} s more"


def test_the_nearest_lacks_least() -> None:
    some = goal(tokens=16 * M)
    assert plans_that_fit(some) == []
    (found,) = nearest(some)
    for each in settings(some):
        needed = memory(LLAMA, each, some.cluster)
        lacks = max(needed.gpu_bytes / 80, needed.host_bytes / 2048)
        assert lacks >= max(found.gpu_bytes / 80, found.host_bytes / 2048)
    assert nearest(goal(CUT, tokens=M + 1)) == [], "an odd number of tokens cannot be cut"


def test_where_larger_hosts_suffice_no_larger_gpus_are_wanted() -> None:
    (found,) = nearest(goal(host_gib=10.0))
    assert found.gpu_bytes <= 80 * GIB
    assert found.host_bytes == 64 * GIB, "of 8 processes, with nothing on the host besides"
    on_hosts, on_gpus = nearest(goal(host_gib=70.0, gpu_gib=60.0))
    assert on_hosts.gpu_bytes <= 60 * GIB
    assert on_gpus.host_bytes <= 70 * GIB
    assert on_gpus.gpu_bytes > 60 * GIB


@pytest.mark.parametrize("space", [CUT, SHARDED])
def test_what_is_surely_too_large_does_not_fit(space: Space) -> None:
    some = goal(space, tokens=4 * M)
    too_large = [each for each in settings(some) if surely_too_large(LLAMA, each, some.cluster)]
    assert len(too_large) > 100
    assert not any(fits(memory(LLAMA, each, some.cluster), some.cluster) for each in too_large)


def test_what_a_plan_says_to_a_run() -> None:
    setting = Setting(tokens=M, code=FUSED, context=16, inner=8)
    assert strategy_options(LLAMA, setting) == {}
    assert layout_in_words(setting) == "TP 1 x CP 16 x PP 1 x DP 1, CP over 2 nodes of 8"
    full = replace(setting, ulysses=8, parts=2, keep=1.0, loss_chunk=1024, mlp_chunk=4096, offload=True)
    assert strategy_options(LLAMA, full) == {
        "ulysses_degree": 8,
        "parts": 2,
        "keep_attention": "all",
        "loss_chunk": 1024,
        "mlp_chunk": 4096,
        "offload": True,
    }
    assert strategy_options(LLAMA, replace(setting, head_chunks=4)) == {"head_chunk": 8}
    assert strategy_options(LLAMA, replace(setting, keep=0.5)) == {"keep_attention": 0.5}


# ---------------------------------------------------------------------------------------------------------- the model

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def _file(path: Path, config: object) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def test_a_model_is_read_from_its_config(tmp_path: Path) -> None:
    assert model_shape(_file(tmp_path, CONFIG)) == replace(LLAMA, name="llama")
    assert model_shape(str(tmp_path / "config.json")) == replace(LLAMA, name="llama")
    inside = {"model_type": "vlm", "text_config": CONFIG | {"tie_word_embeddings": True}}
    assert model_shape(_file(tmp_path, inside)).tied
    qwen = CONFIG | {"model_type": "qwen3", "num_hidden_layers": 36, "intermediate_size": 12288, "head_dim": 128}
    assert model_shape(_file(tmp_path, qwen | {"vocab_size": 151936})) == replace(MODELS["qwen3_8b"], name="qwen3")


def test_experts_count_whole_in_memory_and_by_use_in_time(tmp_path: Path) -> None:
    """Qwen3-30B-A3B: 128 experts 768 wide, of which 8 see a token: 30.5 G parameters, 3.3 G of them at work."""
    config = CONFIG | {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "vocab_size": 151936,
        "mlp_only_layers": [],
    }
    model = model_shape(_file(tmp_path, config))
    assert model.parameters == 30_532_122_624
    idle = 48 * (model.mlp_parameters - model.active_mlp_parameters)
    assert (model.parameters - idle) / 1e9 == pytest.approx(3.35, abs=0.01)
    assert model.mlp_width == 8 * 768


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            CONFIG | {"kv_lora_rank": 512, "model_type": "longcat_flash"},
            r"a model with latent attention \(kv_lora_rank=512\), whose memory is not known",
        ),
        (CONFIG | {"layer_types": ["linear_attention", "full_attention"]}, "layers of the type linear_attention"),
        (CONFIG | {"lru_width": 64}, r"layers with linear recurrent units \(lru_width=64\)"),
        (CONFIG | {"mamba_d_state": 64, "model_type": "zamba2"}, r"state-space layers \(mamba_d_state=64\)"),
        (CONFIG | {"vocab_size": None}, "has no vocab_size; expected the config.json of a decoder"),
        (CONFIG | {"hidden_size": "wide"}, "has hidden_size='wide', expected a positive whole number"),
        ([1, 2], "expected an object; give the config.json of a model"),
    ],
)
def test_a_model_that_cannot_be_planned_is_refused(config: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        model_shape(_file(tmp_path, config))


def test_chunks_are_computed_once_under_checkpoints_that_end_early() -> None:
    """Checkpoints of PyTorch stop in front of an MLP in chunks; Megatron's compute it, and the chunks do so again."""
    model, cluster = MODELS["llama3_8b"], Cluster(peak_flops=1e12, matmul_share=1.0)
    whole = Setting(tokens=2**15, code=Code.of_modules(fused_norms=False))
    chunks = replace(whole, mlp_chunk=4096, loss_chunk=1024)
    mlp = 2 * 2**15 * 32 * 3 * 4096 * 14336 / 1e12
    head = 2 * 2**15 * 4096 * 128256 / 1e12
    for again in (False, True):
        plain, cut = (
            step_seconds(model, replace(each, code=replace(each.code, chunks_again=again)), cluster)
            for each in (whole, chunks)
        )
        assert cut["linear layers"] - plain["linear layers"] == pytest.approx(again * mlp)
        assert cut["head and loss"] - plain["head and loss"] == pytest.approx(again * head)
