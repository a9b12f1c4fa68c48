"""Mamba-2 and gated delta net on the ring against one rank: losses and all gradients, of hybrid models."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from burst_plugin import Strategy
from tests.megatron.test_documents import ENDS, documents, parse, with_documents
from tests.megatron.test_documents import step as step_of_documents
from tests.support.megatron_gpt import (
    GptRun,
    StepResult,
    batches,
    check_grads,
    forward_backward,
    forward_step,
    full_grads,
    join,
    leave,
    loss_of,
    packed_forward_step,
    random_tokens,
    set_weights,
    transformer_config,
)
from tests.support.megatron_hybrid import delta_model, hybrid_model, stack_spec
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron

# 6 heads, which 4 context-parallel ranks could not share.
MAMBA = {"mamba_state_dim": 8, "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_num_heads": 6}
RUN = GptRun(
    layers=4,
    hidden=32,
    heads=4,
    groups=2,
    ffn=48,
    vocab=64,
    seq_length=64,
    cp_comm_type="burst",
    config=MAMBA,
    pattern="M*M-",
)


# ------------------------------------------------------------------------------------------------------- models


def _step(
    rank: int, run: GptRun, build: Any, tokens: torch.Tensor, step: Any = forward_step, data: Any = batches
) -> StepResult:
    """One forward and backward of a model that `build` builds, on all ranks."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    join(run)
    config = transformer_config(run)
    model = build(run, config)
    set_weights(model, run)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    try:
        return StepResult(forward_backward(ddp, run, tokens, step, data), full_grads(ddp, run))
    finally:
        leave()


def _check(results: list[StepResult], expected: StepResult) -> None:
    for result in results:
        assert result.loss == pytest.approx(expected.loss, rel=1e-6)
        check_grads(result.grads, expected.grads, 1e-5)


# ------------------------------------------------------------------------------------------------------- Mamba-2

TOKENS = random_tokens(RUN)


@pytest.fixture(scope="module")
def one_rank() -> StepResult:
    (result,) = run_ranks(_step, 1, RUN, hybrid_model, TOKENS)
    return result


@pytest.mark.parametrize(
    ("world", "strategy", "options"),
    [
        (2, Strategy(recurrent="heads"), {}),
        (2, Strategy(layout="contiguous", recurrent="state"), {}),
        (4, Strategy(), {}),
        (2, Strategy(recurrent="state"), {"config": {**MAMBA, "use_mamba_mem_eff_path": False}}),
        (4, Strategy(layout="auto"), {}),
        (4, Strategy(layout="striped"), {}),
        (4, Strategy(layout="contiguous", ranks_per_node=2), {"recompute": "full"}),
    ],
)
def test_mamba_equals_one_rank(one_rank: StepResult, world: int, strategy: Strategy, options: dict[str, Any]) -> None:
    run = replace(RUN, cp=world, strategy=strategy, **options)
    _check(run_ranks(_step, world, run, hybrid_model, TOKENS), one_rank)


def test_mamba_equals_one_rank_with_tensor_parallelism(one_rank: StepResult) -> None:
    run = replace(RUN, tp=2, cp=2, sequence_parallel=True, strategy=Strategy(layout="contiguous", recurrent="state"))
    _check(run_ranks(_step, 4, run, hybrid_model, TOKENS), one_rank)


# The first document fits into no rank; the second is shorter than a convolution; the last is padded.
STARTS, REAL = (0, 24, 26, 40, 64), (0, 24, 26, 40, 61)


def _alone(data: Any, model: Any, *, starts: tuple[int, ...], real: tuple[int, ...]) -> tuple[torch.Tensor, Any]:
    """A forward step on one rank of each document by itself; the last token of each has no part in the loss."""
    batch, losses, masks = next(data), [], []
    for number, start in enumerate(starts[:-1]):
        stop = start + real[number + 1] - real[number]
        tokens, labels, ids = (batch[name][:, start:stop] for name in ("tokens", "labels", "position_ids"))
        losses.append(model(tokens, ids, None, labels=labels))
        masks.append(torch.ones_like(losses[-1]))
        masks[-1][:, -1] = 0
    return torch.cat(losses, 1), partial(loss_of, torch.cat(masks, 1))


@pytest.mark.parametrize(
    ("world", "layout", "starts", "real"),
    [
        (2, "zigzag", (0, 24, 32, 48, 64), (0, 22, 29, 45, 60)),
        (4, "striped", STARTS, REAL),
        (4, "contiguous", STARTS, REAL),
        (4, "auto", STARTS, REAL),
    ],
)
def test_packed_documents_equal_each_alone(
    world: int, layout: str, starts: tuple[int, ...], real: tuple[int, ...]
) -> None:
    """Megatron itself needs packages of CUDA to keep documents of Mamba-2 apart."""
    one, tokens = replace(RUN, microbatch_size=1), random_tokens(replace(RUN, microbatch_size=1))
    (expected,) = run_ranks(_step, 1, one, hybrid_model, tokens, partial(_alone, starts=starts, real=real))
    tp = 2 if layout == "contiguous" else 1
    run = replace(one, cp=world // tp, tp=tp, sequence_parallel=tp > 1)
    run = replace(run, strategy=Strategy(layout=layout, recurrent="state"))
    step = partial(_packed, starts=starts, real=real)
    _check(run_ranks(_step, world, run, hybrid_model, tokens, step), expected)


def _packed(data: Any, model: Any, *, starts: tuple[int, ...], real: tuple[int, ...]) -> tuple[torch.Tensor, Any]:
    """A forward step of packed documents."""
    return packed_forward_step(data, _WithoutLossMask(model), starts=starts, real=real)


class _WithoutLossMask:
    """A model called without a loss mask, which a `MambaModel` does not take until 0.17."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *args: Any, loss_mask: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)


def _with_documents(rank: int, run: GptRun, build: Any, tokens: torch.Tensor) -> StepResult:
    """A step with `--reset-attention-mask`."""
    parse(context_parallel_size=run.cp)
    make = partial(with_documents, masks=False, reset=False)

    def step(data: Any, model: Any) -> Any:
        return step_of_documents(data, _WithoutLossMask(model), read=None)

    return _step(rank, run, build, tokens, step, make)


def _documents_alone(data: Any, model: Any, *, ends: Any) -> tuple[torch.Tensor, Any]:
    """The same on one rank with each document of each row by itself."""
    batch, losses = next(data), []
    batch.pop("burst_documents")
    for row, of_row in enumerate(next(ends)):
        starts = [0, *(end + 1 for end in of_row if end < RUN.seq_length - 1), RUN.seq_length]
        for start, stop in itertools.pairwise(starts):
            tokens, labels, ids = (
                batch[name][row : row + 1, start:stop] for name in ("tokens", "labels", "position_ids")
            )
            losses.append(model(tokens, ids, None, labels=labels).flatten())
    output = torch.cat(losses).view(batch["tokens"].shape)
    return output, partial(loss_of, batch["loss_mask"])


@pytest.mark.parametrize(("world", "layout"), [(2, "zigzag"), (4, "contiguous"), (4, "auto")])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_documents_of_reset_attention_mask_equal_each_alone(world: int, layout: str, recompute: str) -> None:
    tokens = documents(RUN)
    one = partial(_documents_alone, ends=iter(ENDS))
    data = partial(with_documents, masks=False, reset=False)
    (expected,) = run_ranks(_step, 1, RUN, hybrid_model, tokens, one, data)
    run = replace(RUN, cp=world, strategy=Strategy(layout=layout, recurrent="state"), recompute=recompute)
    _check(run_ranks(_with_documents, world, run, hybrid_model, tokens), expected)


# ----------------------------------------------------------------------------------------------- gated delta net

DELTA = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
DELTA_RUN = replace(RUN, layers=2, config=DELTA, pattern="")


@pytest.fixture(scope="module")
def delta_on_one_rank() -> StepResult:
    (result,) = run_ranks(_step, 1, DELTA_RUN, delta_model, TOKENS)
    return result


@pytest.mark.parametrize(
    ("world", "strategy", "options"),
    [
        (2, Strategy(recurrent="state"), {}),
        (2, Strategy(layout="contiguous", recurrent="heads"), {}),
        (4, Strategy(), {"config": {**DELTA, "deterministic_mode": True}, "strategy": Strategy(deterministic=True)}),
        (4, Strategy(layout="contiguous"), {"recompute": "full"}),
        (4, Strategy(layout="auto", ranks_per_node=2), {}),
        (2, Strategy(layout="contiguous"), {"tp": 2, "sequence_parallel": True}),
    ],
)
def test_gated_delta_net_equals_one_rank(
    delta_on_one_rank: StepResult, world: int, strategy: Strategy, options: dict[str, Any]
) -> None:
    from megatron.core.ssm import gated_delta_net

    if "config" in options and not hasattr(gated_delta_net, "causal_conv1d_fn"):
        pytest.skip("deterministic delta nets are refused from 0.18 on")
    run = replace(DELTA_RUN, **{"cp": world, "strategy": strategy, **options})
    _check(run_ranks(_step, run.tp * world, run, delta_model, TOKENS), delta_on_one_rank)


def test_packed_documents_of_gated_delta_net_equal_each_alone() -> None:
    one, tokens = replace(DELTA_RUN, microbatch_size=1), random_tokens(replace(DELTA_RUN, microbatch_size=1))
    (expected,) = run_ranks(_step, 1, one, delta_model, tokens, partial(_alone, starts=STARTS, real=REAL))
    run = replace(one, cp=4, strategy=Strategy(layout="auto"))
    step = partial(packed_forward_step, starts=STARTS, real=REAL)
    _check(run_ranks(_step, 4, run, delta_model, tokens, step), expected)


def test_hybrid_models_with_both_kinds_equal_one_rank() -> None:
    if not hasattr(stack_spec().submodules, "gdn_layer"):
        pytest.skip("hybrid models have no gated delta net until 0.17")
    heads = {name: value for name, value in DELTA.items() if name.startswith("linear_") and "freq" not in name}
    run = replace(RUN, config={**MAMBA, **heads}, pattern="MG*-")
    (expected,) = run_ranks(_step, 1, run, hybrid_model, TOKENS)
    cut = replace(run, cp=4, strategy=Strategy(layout="contiguous"))
    _check(run_ranks(_step, 4, cut, hybrid_model, TOKENS), expected)


# ----------------------------------------------------------------------------------------------------- refusals


def _refused(rank: int) -> list[str]:
    from megatron.core.inference.contexts import StaticInferenceContext

    found = []
    for run, build in ((RUN, hybrid_model), (DELTA_RUN, delta_model)):
        run = replace(run, cp=2)
        join(run)
        config = transformer_config(run)
        model = build(run, config)
        layer = model.decoder.layers[0]
        mixer = layer.mixer if hasattr(layer, "mixer") else layer.self_attention
        given = {"attention_mask": None} if mixer is getattr(layer, "self_attention", None) else {}
        x = torch.zeros(8, 1, run.hidden, device="cpu")
        with pytest.raises(ValueError, match="inference") as inference:
            mixer(x, inference_context=StaticInferenceContext(1, 16), **given)
        with pytest.raises(ValueError, match="fp8") as fp8:
            build(run, replace_field(config, "fp8_dot_product_attention", True))
        found += [str(inference.value), str(fp8.value)]
        leave()
    return found


def replace_field(config: Any, name: str, value: Any) -> Any:
    """A copy of a configuration with another value, unchecked."""
    config = copy.copy(config)
    setattr(config, name, value)
    return config


def test_what_mixers_cannot_honour_is_refused_by_name() -> None:
    for found in run_ranks(_refused, 2):
        for kind, (inference, fp8) in zip(("MambaMixer", "GatedDeltaNet"), (found[:2], found[2:]), strict=True):
            assert f"is not for {kind} layers; use context_parallel_size=1" in inference
            assert f"{kind} of layer 1 cannot run on the ring" in fp8
            assert "fp8_dot_product_attention" in fp8
