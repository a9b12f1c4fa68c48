"""MLPs in chunks of tokens in Megatron's layers, against whole ones on one rank by Megatron itself."""

from __future__ import annotations

import argparse
import functools
import sys
import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from burst_plugin import Strategy
from burst_plugin.megatron.flags.arguments import add_arguments
from burst_plugin.megatron.registry import Registry
from tests.support.megatron_gpt import (
    GptRun,
    StepResult,
    build,
    check_trained,
    forward_backward,
    leave,
    one_step,
    random_tokens,
)
from tests.support.ranks import last_lines, run_ranks

pytestmark = pytest.mark.megatron

CHUNK = 10  # of the 2 * 64 tokens of a microbatch: the last chunk is shorter
ONE = GptRun(layers=2)
CHUNKED = replace(ONE, cp_comm_type="burst", strategy=Strategy(mlp_chunk=CHUNK))


def _several(rank: int, runs: Sequence[GptRun]) -> list[StepResult]:
    return [one_step(run, random_tokens(run)) for run in runs]


@functools.cache
def _of_one_rank() -> StepResult:
    return run_ranks(_several, 1, [ONE])[0][0]


BIASED = {
    "add_bias_linear": True,
    "gated_linear_unit": False,
    "activation_func": torch.nn.functional.gelu,
    "bias_activation_fusion": False,
}


def check(ranks: int, runs: Sequence[GptRun], truth: StepResult) -> None:
    for results in run_ranks(_several, ranks, runs, timeout_s=120.0):
        for run, result in zip(runs, results, strict=True):
            check_trained(result, truth, 1e-5, run)


def test_tensor_and_context_parallel_ranks_equal_one_rank() -> None:
    """With and without sequence parallelism, with the distributed optimizer, and with all kinds of recomputation."""
    run = replace(CHUNKED, tp=2, cp=2)
    mlp = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    runs = [
        replace(run, sequence_parallel=True),
        replace(run, recompute="full"),
        replace(run, recompute="full", sequence_parallel=True),
        replace(run, config=mlp),
        replace(run, distributed_optimizer=True),
    ]
    check(4, [run, *runs], _of_one_rank())


def test_biases_and_one_rank_without_a_ring() -> None:
    """The bias of the second linear layer, which is added later on, has its gradient too."""
    check(1, [replace(CHUNKED, config=BIASED)], run_ranks(_several, 1, [replace(ONE, config=BIASED)])[0][0])
    cut = replace(CHUNKED, tp=2, cp=2, sequence_parallel=True, config=BIASED)
    check(4, [cut], run_ranks(_several, 4, [replace(cut, strategy=None)])[0][0])


# ------------------------------------------------------------------------------------------------- what is made of it


class _Rows(TorchDispatchMode):
    """Notes the rows of every tensor as wide as the intermediate of an MLP, or half of what the first layer gives."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self._widths, self.most = widths, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else [out]:
            if isinstance(each, Tensor) and each.dim() == 3 and each.shape[-1] in self._widths:
                self.most = max(self.most, each.shape[:-1].numel())
        return out


def _most_rows(rank: int, run: GptRun) -> int:
    ffn = run.ffn // run.tp
    model = build(run)
    with _Rows([ffn, 2 * ffn]) as noted:
        forward_backward(model, run, random_tokens(run))
    leave()
    return noted.most


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, CHUNK),
        ({"sequence_parallel": True}, CHUNK),  # 5 of each rank
        ({"recompute": "full"}, CHUNK),
        ({"strategy": None}, 128),
    ],
)
def test_no_intermediate_has_more_tokens_than_a_chunk(changes: dict[str, Any], most: int) -> None:
    """Of any rank; where tokens are gathered from tensor-parallel ranks, too. Widths are of nothing else."""
    run = replace(CHUNKED, tp=2, ffn=176, **changes)
    assert run_ranks(_most_rows, 2, run) == [most] * 2


def _fused(rank: int, run: GptRun, reduces_in_fp32: bool) -> StepResult | str:
    """One step with a kernel that adds gradients of weights to main_grad, as Apex' does, here in plain PyTorch."""
    from megatron.core.tensor_parallel import layers

    def add(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        main_grad.add_(grad_output.t().matmul(total_input).to(main_grad.dtype))

    kernels = types.SimpleNamespace(wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add)
    with (
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", kernels, create=True),
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
    ):
        if reduces_in_fp32:
            return one_step(run, random_tokens(run))
        model = build(run)
        for name, param in model.named_parameters():
            if "mlp" in name:
                param.main_grad = param.main_grad.bfloat16()
        try:
            forward_backward(model, run, random_tokens(run))
        except ValueError as error:
            return str(error)
        finally:
            leave()
    return "not refused"


FUSED = {"gradient_accumulation_fusion": True}


def test_gradients_that_kernels_add_up_themselves() -> None:
    truth = _of_one_rank()
    run = replace(CHUNKED, tp=2, cp=2, sequence_parallel=True, config=FUSED)
    for result in run_ranks(_fused, 4, run, True):
        for name, grad in result.grads.items():
            error = torch.linalg.vector_norm(grad - truth.grads[name])
            assert error <= 1e-5 * torch.linalg.vector_norm(truth.grads[name]), name


def test_kernels_that_would_add_up_in_low_precision_are_refused() -> None:
    (said,) = run_ranks(_fused, 1, replace(CHUNKED, config=FUSED), False)
    assert "gradient_accumulation_fusion would sum chunks in torch.bfloat16" in said


# ----------------------------------------------------------------------------------------------------------- refusals


def _build(rank: int, run: GptRun) -> None:
    build(run)


EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
}


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (
            replace(CHUNKED, config=EXPERTS),
            "mlp_chunk=10 (--burst-mlp-chunk) is not possible here: num_moe_experts=4: experts are not cut",
        ),
        (
            replace(CHUNKED, tp=2, sequence_parallel=True, strategy=Strategy(mlp_chunk=1)),
            "sequence_parallel gathers a token of each of 2 ranks at least: use 2 or more",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(run: GptRun, expected: str) -> None:
    for line in last_lines(_build, run.tp, run):
        assert expected in line


def _layer(mlp: Any = None, **config: Any) -> Any:
    given = {"sequence_parallel": False, "tensor_model_parallel_size": 1, **config}
    return types.SimpleNamespace(mlp=mlp, config=types.SimpleNamespace(**given))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp8", True),
        ("fp4", True),
        ("delay_wgrad_compute", True),
        ("tp_comm_overlap", True),
        ("gtp_weight_remat_size", 2),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_name(name: str, value: Any) -> None:
    from burst_plugin.megatron.memory.chunked_mlp import chunk_mlp

    with pytest.raises(ValueError, match=rf"{name}={value}: .*a layer has NoneType as its MLP"):
        chunk_mlp(_layer(**{name: value}), Strategy(mlp_chunk=4))
    chunk_mlp(_layer(**{name: value}), Strategy())


def test_the_flag_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Megatron's parser ran, and `install()` was given no strategy."""
    from megatron.core.transformer.identity_op import IdentityOp

    from burst_plugin.megatron.memory.chunked_mlp import chunk_mlp

    flags = add_arguments(argparse.ArgumentParser()).parse_args(["--burst-mlp-chunk", "7"])
    module: Any = argparse.Namespace(_GLOBAL_ARGS=flags)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    with pytest.raises(ValueError, match=r"mlp_chunk=7 \(--burst-mlp-chunk\) is not possible here: a layer has"):
        chunk_mlp(_layer(), Registry(None).asked())
    chunk_mlp(_layer(IdentityOp()), Strategy(mlp_chunk=4))  # a layer without an MLP
    chunk_mlp(_layer(), Strategy())
