"""The ring with what else Megatron trains with: other parallelism, optimizers, checkpoints, half precision."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.test_parity import CP2, CP4, TOKENS, _step
from tests.support.megatron_gpt import (
    GptRun,
    StepResult,
    batches,
    build,
    check_close,
    forward_backward,
    forward_step,
    full_grads,
    join,
    leave,
    one_step,
    random_tokens,
    set_weights,
    transformer_config,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron


# ------------------------------------------------------------------------------------------------------------ experts

EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": "none",
}


@functools.cache
def one_rank_with_experts() -> StepResult:
    return run_ranks(_step, 1, GptRun(layers=2, cp_comm_type="burst", config=EXPERTS))[0]  # for its repairs


@pytest.mark.parametrize(
    ("world_size", "run"),
    [
        (2, replace(CP2, layers=2, ep=2, config=EXPERTS)),
        (4, replace(CP4, layers=2, ep=2, config=EXPERTS)),
    ],
    ids=["cp2_ep2", "cp4_2x2_ep2"],
)
def test_experts(world_size: int, run: GptRun) -> None:
    assert any("experts.3." in name for name in one_rank_with_experts().grads)
    for result in run_ranks(_step, world_size, run):
        check_close(result, one_rank_with_experts())


# ---------------------------------------------------------------------------------------- interleaved pipeline stages


# As Megatron-LM's training scripts have it: messages are under way while the next microbatch is computed.
OVERLAPPED = {
    "virtual_pipeline_model_parallel_size": 2,
    "overlap_p2p_comm": True,
    "batch_p2p_comm": False,
    "deallocate_pipeline_outputs": True,
}
MANY = random_tokens(GptRun(), microbatches=6)  # more than warm the pipeline up


@functools.cache
def one_rank_on_many() -> StepResult:
    return run_ranks(lambda rank: one_step(GptRun(), MANY), 1)[0]


def _interleaved(rank: int, run: GptRun, tokens: torch.Tensor, late_stage: int | None = None) -> StepResult:
    """As `one_step`, with two model chunks per pipeline rank; `late_stage` computes slowly."""
    join(run)
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config, chunks = transformer_config(run), []
    is_late = parallel_state.get_pipeline_model_parallel_rank() == late_stage
    for stage in range(2):
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=run.vocab,
            max_sequence_length=run.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            position_embedding_type="rope",
            vp_stage=stage,
        )
        set_weights(model, run)
        model.model_type = None
        chunks.append(DistributedDataParallel(config, DistributedDataParallelConfig(), model))

    def step(data: Any, model: Any) -> Any:
        if is_late:
            time.sleep(0.02)
        return forward_step(data, model)

    losses = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[batches(tokens), batches(tokens)],
        model=chunks,
        num_microbatches=len(tokens),
        seq_length=run.seq_length,
        micro_batch_size=tokens.shape[1],
        forward_only=False,
    )
    total = sum((part.to(torch.float64) for part in losses), torch.zeros(2, dtype=torch.float64))
    torch.distributed.all_reduce(total)
    grads = {name: grad for chunk in chunks for name, grad in full_grads(chunk, run).items()}
    leave()
    return StepResult(float(total[0] / total[1]), grads)


def test_interleaved_pipeline_stages() -> None:
    (reference,) = run_ranks(_step, 1, GptRun())
    run = replace(CP2, pp=2, config={"virtual_pipeline_model_parallel_size": 2})
    for result in run_ranks(_interleaved, 4, run, TOKENS):
        check_close(result, reference)


@pytest.mark.parametrize("late_stage", [0, 1])
@pytest.mark.parametrize("flush", [False, True], ids=["steady", "always"])
@pytest.mark.parametrize("run", [GptRun(pp=2), replace(CP2, pp=2)], ids=["pp2", "pp2_cp2"])
def test_interleaved_stages_that_do_not_wait_for_messages(run: GptRun, flush: bool, late_stage: int) -> None:
    """What one stage sends is there until the other, which is late, fetches it."""
    run = replace(run, config={**OVERLAPPED, "overlap_p2p_comm_warmup_flush": flush})
    for result in run_ranks(_interleaved, run.pp * run.cp, run, MANY, late_stage):
        check_close(result, one_rank_on_many())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"microbatch_group_size_per_vp_stage": 3},
        {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"},  # which it wants of every model
    ],
    ids=["usual", "groups_of_3", "variable_lengths"],
)
@pytest.mark.parametrize("run", [GptRun(pp=2, cp_comm_type="burst"), replace(CP2, pp=2)], ids=["pp2", "pp2_cp2"])
def test_interleaved_stages_that_send_both_ways_at_once(run: GptRun, options: dict[str, Any]) -> None:
    """As `TransformerConfig` has it unless told otherwise: the next stage is the previous one, too."""
    run = replace(run, config={"virtual_pipeline_model_parallel_size": 2, **options})
    for result in run_ranks(_interleaved, run.pp * run.cp, run, MANY):
        check_close(result, one_rank_on_many())


# ----------------------------------------------------------------------------- the distributed optimizer, checkpoints

TRAINED = replace(CP2, layers=2, distributed_optimizer=True)


def _optimizer(model: Any, run: GptRun, **options: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam", lr=1e-2, weight_decay=0.0, use_distributed_optimizer=run.distributed_optimizer, **options
    )
    return get_megatron_optimizer(config, [model])


def _train(rank: int, run: GptRun, steps: int, load: str = "", save: str = "") -> list[float]:
    """Losses of some steps on one batch, from a checkpoint and to a checkpoint."""
    from megatron.core import dist_checkpointing

    model = build(run)
    optimizer = _optimizer(model, run)

    def sharded(loading: bool) -> dict[str, Any]:
        state = model.module.sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": "dp_reshardable"}  # as Megatron's training scripts have it
        return {
            "model": state,
            "optimizer": optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata),
        }

    if load:
        state = dist_checkpointing.load(sharded(loading=True), load)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    losses = []
    for _ in range(steps):
        losses.append(forward_backward(model, run, random_tokens(run)))
        assert optimizer.step()[0]
        optimizer.zero_grad()
    if save:
        dist_checkpointing.save(sharded(loading=False), save)
    leave()
    return losses


@functools.cache
def trained_on_one_rank() -> list[float]:
    """Five losses of one rank with Megatron's own attention and PyTorch's Adam, undivided."""
    return run_ranks(_train, 1, GptRun(layers=2), 5)[0]


@pytest.mark.parametrize("world_size", [2, 4], ids=["cp2", "cp2_dp2"])
def test_the_distributed_optimizer(world_size: int) -> None:
    for losses in run_ranks(_train, world_size, TRAINED, 5):
        assert losses == pytest.approx(trained_on_one_rank(), abs=1e-5)
    assert trained_on_one_rank()[-1] < trained_on_one_rank()[0] - 0.05


@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (2, 4), (4, 1)])
def test_a_checkpoint_is_continued_at_another_context_parallel_size(tmp_path: Path, saved: int, loaded: int) -> None:
    pytest.importorskip("psutil", reason="Megatron's checkpoints want psutil")
    runs = {
        1: replace(TRAINED, cp=1, cp_comm_type="burst"),
        2: TRAINED,
        4: replace(TRAINED, cp=4, hierarchical=(2, 2)),
    }
    for first in run_ranks(_train, saved, runs[saved], 3, "", str(tmp_path)):
        assert first == pytest.approx(trained_on_one_rank()[:3], abs=1e-5)
    for rest in run_ranks(_train, loaded, runs[loaded], 2, str(tmp_path)):
        assert rest == pytest.approx(trained_on_one_rank()[3:], abs=1e-5)


# ------------------------------------------------------------------------------------------------------- number types


def _in_half(rank: int, run: GptRun, scale: float) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean loss and all gradients, multiplied by `scale`, of a model in bfloat16 or float16."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    core = build(run).module
    config = core.config
    config.grad_scale_func = lambda loss: loss * scale
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), Float16Module(config, core)
    )
    loss = forward_backward(model, run, TOKENS)
    result = loss, full_grads(model, run)
    leave()
    return result


@pytest.mark.parametrize(("name", "scale"), [("bf16", 1.0), ("fp16", 1024.0)])
def test_half_precision_is_as_good_as_on_one_rank(name: str, scale: float) -> None:
    """Against float32: errors of gradients within 1.2 times those of one rank with the same kernel."""
    (exact,) = run_ranks(_step, 1, GptRun(layers=2))
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    options = {name: True, "params_dtype": types[name], "pipeline_dtype": types[name]}

    def errors(run: GptRun) -> tuple[float, dict[str, float]]:
        found = run_ranks(_in_half, run.cp, replace(run, config=options), scale)
        loss, grads = found[0]
        norms = {
            key: float((grad / scale - exact.grads[key]).norm() / exact.grads[key].norm())
            for key, grad in grads.items()
        }
        return abs(loss - exact.loss), norms

    one_loss, one = errors(GptRun(layers=2))
    for run in (replace(CP2, layers=2), replace(CP4, layers=2)):
        loss, many = errors(run)
        assert loss <= 1.2 * one_loss + 1e-3
        mean = sum(many.values()) / sum(one.values())
        assert mean <= 1.2, mean
        assert 0 < max(many.values()) < 0.1


def _overflow(rank: int, run: GptRun) -> list[tuple[bool, float]]:
    """Whether each step was taken, and the loss scale after it, from a scale that is too large for float16."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    core = build(run).module
    model = DistributedDataParallel(core.config, DistributedDataParallelConfig(), Float16Module(core.config, core))
    optimizer = _optimizer(
        model,
        run,
        fp16=True,
        params_dtype=torch.float16,
        initial_loss_scale=2.0**24,
        min_loss_scale=1.0,
        loss_scale_window=1000,
        hysteresis=1,
    )
    core.config.grad_scale_func = optimizer.scale_loss
    steps = []
    for _ in range(24):
        forward_backward(model, run, TOKENS)
        taken, _, _ = optimizer.step()
        optimizer.zero_grad()
        steps.append((bool(taken), float(optimizer.get_loss_scale())))
    leave()
    return steps


def test_all_ranks_skip_the_steps_that_overflow_in_float16() -> None:
    options = {"fp16": True, "params_dtype": torch.float16, "pipeline_dtype": torch.float16}
    found = run_ranks(_overflow, 2, replace(CP2, layers=2, config=options), timeout_s=120)
    assert found[0] == found[1]
    taken = [step for step, _ in found[0]]
    assert taken[0] is False
    assert taken[-1] is True
    assert found[0][0][1] == 2.0**23
