"""Models as people train them, over 4 ranks as 2 nodes of 2, against one rank: losses and every gradient.

One rank computes attention by Megatron's own code where that can do it, and by a definition in plain torch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.core_attentions import OneRankBurst, WrittenOut
from tests.support.megatron_gpt import (
    GptRun,
    StepResult,
    check_trained,
    cut_batch,
    loss_of,
    one_step,
    packed_forward_step,
    random_tokens,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron

TWO_LAYERS = GptRun(layers=2)
GPT_OSS = replace(TWO_LAYERS, config={"window_size": (9, 0), "window_attn_skip_freq": 2, "softmax_type": "learnable"})
DEEPSEEK = replace(
    TWO_LAYERS,
    cp_comm_type="burst",  # on one rank too, where it means nothing, for the repair of Megatron's experts
    groups=8,
    config={
        "multi_latent_attention": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 32,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    },
)
MTP = replace(TWO_LAYERS, config={"mtp_num_layers": 1}, per_token_loss=True)
# Documents of 16, 24 and 8 tokens, of which 13, 24 and 3 are real.
STARTS, REAL = (0, 16, 40, 48), (0, 13, 37, 40)
LLAMA_PACKED = replace(TWO_LAYERS, seq_length=48, microbatch_size=1, per_token_loss=True)


def over_4(run: GptRun) -> GptRun:
    """The same model on 2 nodes of 2 ranks."""
    return replace(run, cp=4, hierarchical=(2, 2), cp_comm_type="burst", core=None)


def _step(rank: int, run: GptRun, step: Any = None) -> StepResult:
    return one_step(run, random_tokens(run), step)


def check_equal(results: list[StepResult], reference: StepResult, bound: float = 1e-4) -> None:
    """Loss to 1e-5, every parameter's gradient to `bound` relative."""
    for result in results:
        check_trained(result, reference, bound)


# ------------------------------------------------------------------------------------------------ windows and sinks


@functools.cache
def _gpt_oss() -> tuple[StepResult, list[StepResult]]:
    """On one rank, and over 4."""
    return run_ranks(_step, 1, GPT_OSS)[0], run_ranks(_step, 4, over_4(GPT_OSS))


def test_gpt_oss_like_equals_megatron_on_one_rank() -> None:
    reference, results = _gpt_oss()
    assert sum(name.endswith("softmax_offset") for name in reference.grads) == 2
    check_equal(results, reference)


def test_gpt_oss_like_equals_the_definition() -> None:
    check_equal(_gpt_oss()[1], run_ranks(_step, 1, replace(GPT_OSS, core=WrittenOut))[0])


def test_sinks_under_tensor_and_sequence_parallelism() -> None:
    run = replace(GPT_OSS, tp=2, cp=2, cp_comm_type="burst", sequence_parallel=True)
    check_equal(run_ranks(_step, 4, run), _gpt_oss()[0])


def test_off_by_one_softmax_equals_megatron_on_one_rank() -> None:
    run = replace(GPT_OSS, config={"softmax_type": "off-by-one"})
    check_equal(run_ranks(_step, 2, replace(run, cp=2, cp_comm_type="burst")), run_ranks(_step, 1, run)[0])


# ------------------------------------------------------------------------------------------------- MLA, MoE and MTP


@pytest.mark.parametrize("q_lora_rank", [None, 24])
def test_deepseek_like_equals_the_definition(q_lora_rank: int | None) -> None:
    run = replace(DEEPSEEK, config={**DEEPSEEK.config, "q_lora_rank": q_lora_rank})
    check_equal(run_ranks(_step, 4, over_4(run)), run_ranks(_step, 1, replace(run, core=WrittenOut))[0])


def first_token_masked(data: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
    """A microbatch of which every rank has as many tokens to predict as it has tokens after the next to predict.

    From 0.17 Megatron divides the loss of the latter by their number on each rank.
    """
    batch = next(data)
    batch["loss_mask"][:, 0] = 0
    batch = cut_batch(batch)
    mask = batch["loss_mask"]
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=mask)
    return output, partial(loss_of, mask)


def test_multi_token_prediction_equals_megatron_on_one_rank() -> None:
    (reference,) = run_ranks(_step, 1, MTP, first_token_masked)
    check_equal(run_ranks(_step, 4, over_4(MTP), first_token_masked), reference)


# ------------------------------------------------------------------------------------------------- packed documents

packed_step = partial(packed_forward_step, starts=STARTS, real=REAL)


@pytest.mark.parametrize("core", [WrittenOut, OneRankBurst], ids=["definition", "one_rank"])
def test_llama_like_packed_equals_one_rank(core: Any) -> None:
    (reference,) = run_ranks(_step, 1, replace(LLAMA_PACKED, core=core), packed_step)
    check_equal(run_ranks(_step, 4, over_4(LLAMA_PACKED), packed_step), reference)


def test_packed_mla_equals_the_definition() -> None:
    run = replace(DEEPSEEK, seq_length=48, microbatch_size=1, per_token_loss=True)
    (reference,) = run_ranks(_step, 1, replace(run, core=WrittenOut), packed_step)
    check_equal(run_ranks(_step, 4, over_4(run), packed_step), reference)


def test_packed_with_window_sink_and_recomputation_equals_the_definition() -> None:
    run = replace(LLAMA_PACKED, config=GPT_OSS.config)
    (reference,) = run_ranks(_step, 1, replace(run, core=WrittenOut), packed_step)
    check_equal(run_ranks(_step, 4, over_4(replace(run, recompute="full")), packed_step), reference)


# ---------------------------------------------------------------------------------------------------------- dropout

DROPOUT = replace(TWO_LAYERS, seq_length=32, config={"attention_dropout": 0.2})


@functools.cache
def _dropout_on_one_rank() -> StepResult:
    (found,) = run_ranks(_step, 1, replace(DROPOUT, core=OneRankBurst))
    (without,) = run_ranks(_step, 1, replace(DROPOUT, config={}))
    assert abs(found.loss - without.loss) > 1e-3
    return found


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_dropout_is_the_same_over_ranks_and_in_recomputation(recompute: str) -> None:
    check_equal(run_ranks(_step, 4, replace(over_4(DROPOUT), recompute=recompute)), _dropout_on_one_rank())
