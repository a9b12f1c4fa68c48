"""What `memory="auto"` chooses: chunks by the size of a GPU, kept attention by the room that a step leaves."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pytest
import torch

from burst_plugin.planning.cluster import Cluster
from burst_plugin.strategy import Strategy
from burst_plugin.training.memory import GIB, memory
from burst_plugin.training.memory_choice import NextStep, loss_chunk, mlp_chunk, share_that_fits
from burst_plugin.training.model_shape import MODELS
from burst_plugin.training.setting import Code, Setting

CODE = Code.of_modules(fused_norms=False)


def step(tokens: int, free_gib: float, gpu_gib: float = 80.0) -> NextStep:
    """Llama 3 8B on 8 GPUs, ZeRO-3, with chunks."""
    setting = Setting(
        tokens=tokens, code=CODE, context=8, inner=8, zero=3, recompute="full", loss_chunk=1024, mlp_chunk=4096
    )
    cluster = Cluster(gpu_gib=gpu_gib)
    return NextStep(model=MODELS["llama3_8b"], setting=setting, cluster=cluster, free=free_gib * GIB, states=2 * GIB)


@pytest.mark.parametrize(
    ("vocabulary", "gpu_gib", "rows"),
    [(128_256, 80, 1024), (32_000, 80, 4096), (128_256, 16, 512), (32_000, None, 512)],
)
def test_a_chunk_of_logits_is_a_small_share_of_a_gpu(vocabulary: int, gpu_gib: float | None, rows: int) -> None:
    assert loss_chunk(vocabulary, None if gpu_gib is None else gpu_gib * GIB) == rows


def test_a_chunk_of_an_mlp_is_wide_enough_for_a_product() -> None:
    assert mlp_chunk(4096, 80 * GIB) == mlp_chunk(512, 80 * GIB) == 4096
    assert mlp_chunk(8192, 80 * GIB) == 8192
    assert mlp_chunk(128, None) == 512


def test_attention_is_kept_as_far_as_there_is_room() -> None:
    needs = [step(2**20, 80).needed(share) for share in ("none", 0.5, "all")]
    kept = needs[2] - needs[0]
    assert kept == pytest.approx(32 * 2**17 * 32 * (128 * 2 + 4), rel=0.01), "out and lse of 32 layers"
    chosen = [share_that_fits(step(2**20, need / GIB + 0.1)) for need in needs]
    assert chosen == ["none", 0.5, "all"]


def test_activations_count_in_the_models_type() -> None:
    half, single = step(2**20, 80), replace(step(2**20, 80), item_bytes=4)
    parts = memory(half.model, replace(half.setting, keep=1.0), half.cluster).gpu
    alike = sum(parts[name] for name in ("NCCL's buffers", "left for CUDA, NCCL and the allocator"))
    activations = half.needed("all") - half.states - alike
    assert activations > 10 * GIB
    assert single.needed("all") == pytest.approx(half.states + alike + 2 * activations)


def test_nothing_moves_to_the_host_by_itself() -> None:
    assert share_that_fits(step(2**20, 1)) == "none"


NOTHING_SET = Strategy()
ARGUMENTS: dict[str, Any] = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "kv_channels": 128,
    "padded_vocab_size": 128_256,
    "seq_length": 2**20,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "tensor_model_parallel_size": 4,
    "swiglu": True,
    "context_parallel_size": 16,
    "pipeline_model_parallel_size": 1,
    "world_size": 64,
    "untie_embeddings_and_output_weights": True,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "sequence_parallel": True,
    "use_distributed_optimizer": True,
    "bf16": True,
}


def _set_gpu(monkeypatch: pytest.MonkeyPatch, gib: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gib is not None)
    gpu = argparse.Namespace(total_memory=(gib or 0) * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: gpu)


@pytest.mark.megatron
def test_megatron_knows_all_before_its_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from burst_plugin.megatron.memory.chosen_options import in_words, with_chosen

    def chosen(gpu_gib: float | None, strategy: Strategy = NOTHING_SET, **changes: Any) -> Strategy:
        _set_gpu(monkeypatch, gpu_gib)
        return with_chosen(strategy, argparse.Namespace(**ARGUMENTS | changes))

    roomy = chosen(80)
    assert (roomy.loss_chunk, roomy.keep_attention, roomy.offload) == (4096, "all", False)
    assert "keep_attention='all'" in in_words(Strategy(), roomy, None)
    assert chosen(14).keep_attention == "none", "no GPU is as small"
    assert chosen(80, num_experts=8).keep_attention == "none", "whose memory depends on who has them"
    assert chosen(80, seq_length=4096).loss_chunk == 0, "as many tokens as a chunk has"
    assert chosen(80, tensor_parallel_num_weight_shards=4) == roomy, "as many as tensor-parallel ranks"
    assert chosen(80, tensor_parallel_num_weight_shards=8) == Strategy(), "neither is possible with shards"
    deferred = {"defer_embedding_wgrad_compute": True, "pipeline_model_parallel_size": 2}
    assert chosen(80, **deferred) == Strategy(), "neither where gradients of many logits are kept"
    assert chosen(None).keep_attention == "all", "on CPUs"
    assert chosen(80, multi_latent_attention=True).keep_attention == "none", "which the planner does not know here"
    set_by_hand = Strategy(loss_chunk=99, keep_attention=0.5)
    assert chosen(80, set_by_hand) == set_by_hand
    assert chosen(80, num_layers=None).keep_attention == "none", "before arguments are complete"
    args = argparse.Namespace(**ARGUMENTS)
    assert with_chosen(Strategy(memory="off"), args) == Strategy(memory="off")
    args.recompute_granularity = "selective"
    assert with_chosen(Strategy(), args) == Strategy(), "attention is kept anyway"
    assert in_words(Strategy(), Strategy(), None) == ""


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"sequence_parallel": False}, "--tensor-model-parallel-size 4 without --sequence-parallel"),
        (
            {"recompute_method": "block", "recompute_num_layers": 4},
            "--recompute-method block --recompute-num-layers 4",
        ),
        ({"recompute_num_layers": 2}, "--recompute-method uniform --recompute-num-layers 2"),
        ({"virtual_pipeline_model_parallel_size": 2}, "--num-virtual-stages-per-pipeline-rank 2"),
        ({"num_experts": 8}, "--num-experts 8"),
        ({"variable_seq_lengths": True, "seq_length": 4096}, "variable_seq_lengths=True"),  # as slime has it
        ({"tensor_parallel_num_weight_shards": 8}, "--tensor-parallel-num-weight-shards 8"),
        (
            {"defer_embedding_wgrad_compute": True, "pipeline_model_parallel_size": 2},  # it needs several stages
            "--defer-embedding-wgrad-compute",
        ),
    ],
)
def test_flags_of_megatron_that_are_not_counted_keep_nothing_and_are_named(
    changes: dict[str, Any], flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from burst_plugin.megatron.memory.chosen_options import in_words, with_chosen

    _set_gpu(monkeypatch, 1000)
    args = argparse.Namespace(**ARGUMENTS | changes)
    asked = with_chosen(NOTHING_SET, args)
    assert asked.keep_attention == "none"
    assert in_words(NOTHING_SET, asked, args).count(f"since its memory is not counted with {flags}. To change") == 1


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"cross_entropy_loss_fusion": True}, "--cross-entropy-loss-fusion"),
        ({"config_logger_dir": "logs"}, "--config-logger-dir logs"),
    ],
)
def test_whole_logits_are_counted_where_flags_of_megatron_keep_them(
    changes: dict[str, Any], flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from burst_plugin.megatron.memory.chosen_options import in_words, with_chosen

    _set_gpu(monkeypatch, 80)
    sizes = {"tensor_model_parallel_size": 2, "context_parallel_size": 4, "seq_length": 2**18, "global_batch_size": 8}
    args = argparse.Namespace(**ARGUMENTS | sizes)
    assert with_chosen(NOTHING_SET, args) == Strategy(loss_chunk=2048, keep_attention="all")
    vars(args).update(changes)
    asked = with_chosen(NOTHING_SET, args)
    assert asked == Strategy(), "attention that is kept as well would need 86 GiB"
    assert f"logits stay whole, since the loss is not cut into chunks with {flag}." in in_words(
        NOTHING_SET, asked, args
    )


@pytest.mark.megatron
def test_flags_of_megatron_that_cost_memory_leave_less_for_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from burst_plugin.megatron.memory.chosen_options import in_words, with_chosen

    def least_gib(**changes: Any) -> int:
        """Return the smallest GPU on which all of attention is kept."""
        for gib in range(10, 200):
            _set_gpu(monkeypatch, gib)
            args = argparse.Namespace(**ARGUMENTS | changes)
            asked = with_chosen(NOTHING_SET, args)
            assert "not counted" not in in_words(NOTHING_SET, asked, args)
            if asked.keep_attention == "all":
                return gib
        raise AssertionError("none is large enough")

    usual, of_rank = least_gib(), 8.03e9 / 4 / GIB  # parameters
    assert least_gib(use_distributed_optimizer=False) == pytest.approx(usual + 12 * of_rank * 15 / 16, abs=1.1)
    instances = {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 4}
    assert least_gib(**instances) == pytest.approx(usual + 12 * of_rank * 3 / 16, abs=1.1), "4 ranks have a copy"
    assert least_gib(use_distributed_optimizer=False, num_distributed_optimizer_instances=4) == least_gib(
        use_distributed_optimizer=False
    )
    assert least_gib(fp8="e4m3") == pytest.approx(usual + 2 * of_rank, abs=1.1)
    assert least_gib(bf16=False, fp16=True) == usual
    activations = usual - 4 - (2 + 4 + 12 / 16) * of_rank  # without the margin
    assert least_gib(bf16=False) == pytest.approx(usual + activations + 2 * of_rank, abs=1.5)
    block = {"recompute_method": "block", "recompute_num_layers": 32}
    assert least_gib(**block) == usual, "all layers, each by itself"
