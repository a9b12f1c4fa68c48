"""Mamba-2 and gated delta net on the ring against one rank: losses and all gradients, of hybrid models."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from burst_plugin import Strategy
from tests.support.megatron_gpt import (
    GptRun,
    SequenceParallelNorm,
    StepResult,
    batches,
    forward_backward,
    forward_step,
    join,
    leave,
    loss_of,
    named_parameters,
    packed_forward_step,
    random_tokens,
    transformer_config,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron

# 6 heads, which 4 context-parallel ranks could not share.
MAMBA = {"mamba_state_dim": 8, "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_num_heads": 6}
RUN = GptRun(
    layers=4, hidden=32, heads=4, groups=2, ffn=48, vocab=64, seq_length=64, cp_comm_type="burst", config=MAMBA
)
PATTERN = "M*M-"


# ------------------------------------------------------------------------------------------------------- models


def _mamba_model(run: GptRun, config: Any, pattern: str) -> Any:
    """A `MambaModel` of local layers."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.mamba import MambaModel
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

    mixer = ModuleSpec(
        MambaMixer, submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    )
    mlp = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    mamba = MambaLayerSubmodules(norm=SequenceParallelNorm, mixer=mixer, mamba_bda=get_bias_dropout_add)
    mlps = TransformerLayerSubmodules(pre_mlp_layernorm=SequenceParallelNorm, mlp=mlp, mlp_bda=get_bias_dropout_add)
    stack = MambaStackSubmodules(
        mamba_layer=ModuleSpec(MambaLayer, submodules=mamba),
        attention_layer=_attention_layer(),
        mlp_layer=ModuleSpec(MLPLayer, submodules=mlps),
    )
    return MambaModel(
        config,
        ModuleSpec(MambaStack, submodules=stack),
        run.vocab,
        run.seq_length,
        hybrid_override_pattern=pattern,
        position_embedding_type="rope",
    )


def _attention_layer() -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    inner = SelfAttentionSubmodules(ColumnParallelLinear, DotProductAttention, RowParallelLinear)
    attention = ModuleSpec(SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=inner)
    layer = TransformerLayerSubmodules(
        input_layernorm=SequenceParallelNorm, self_attention=attention, self_attn_bda=get_bias_dropout_add
    )
    return ModuleSpec(TransformerLayer, submodules=layer)


def _sections(name: str, config: Any) -> list[int] | None:
    """The sizes of what a parameter of a mixer has along dim 0, each of which tensor-parallel ranks share."""
    if ".mixer." not in name or "out_proj" in name:
        return None
    inner = config.mamba_num_heads * config.mamba_head_dim
    states = [config.mamba_num_groups * config.mamba_state_dim] * 2
    if "in_proj" in name:
        return [inner, inner, *states, config.mamba_num_heads]
    if "conv1d" in name:
        return [inner, *states]
    return [inner if "norm" in name else config.mamba_num_heads]


def _shape(param: torch.nn.Parameter, name: str, run: GptRun, config: Any) -> tuple[list[int], int | None, list[int]]:
    """The shape of a whole parameter, the dim that is cut if one is, and its sections."""
    shape, sections, dim = list(param.shape), _sections(name, config), None
    if sections is not None:
        dim = 0
    elif getattr(param, "tensor_model_parallel", False):
        dim = param.partition_dim
    if dim is not None:
        shape[dim] *= run.tp
    halves = [shape[0] // 2] * 2 if name.endswith("linear_fc1.weight") else None
    return shape, dim, sections or halves or [shape[dim or 0]]


def _whole(name: str, shape: list[int]) -> torch.Tensor:
    """A parameter, drawn so that states last for some tokens, and that neither gates nor convolutions are mild."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randn(shape, generator=generator)
    last = name.rpartition(".")[2]
    if last == "A_log":
        return drawn - 2
    if last in ("dt_bias", "D"):
        return drawn
    if "conv1d" in name:
        return drawn / 2
    return drawn * 0.2 + (1.0 if len(shape) == 1 else 0.0)


def _set_weights(model: Any, run: GptRun) -> None:
    from megatron.core import parallel_state

    rank, config = parallel_state.get_tensor_model_parallel_rank(), model.config
    with torch.no_grad():
        for name, param in named_parameters(model):
            shape, dim, sections = _shape(param, name, run, config)
            whole = _whole(name, shape)
            if dim is not None:
                whole = torch.cat([part.chunk(run.tp, dim)[rank] for part in whole.split(sections, dim)], dim)
            param.copy_(whole)


def _grads(model: Any, run: GptRun) -> dict[str, torch.Tensor]:
    """Whole gradients on every rank."""
    from megatron.core import parallel_state

    group, found = parallel_state.get_tensor_model_parallel_group(), {}
    for name, param in named_parameters(model):
        grad = param.main_grad.detach().clone()
        _, dim, sections = _shape(param, name, run, param_config(model))
        if dim is not None and run.tp > 1:
            parts = [torch.empty_like(grad) for _ in range(run.tp)]
            dist.all_gather(parts, grad.contiguous(), group=group)
            cut = [part.split([size // run.tp for size in sections], dim) for part in parts]
            grad = torch.cat([torch.cat(same, dim) for same in zip(*cut, strict=True)], dim)
        found[name] = grad
    return found


def param_config(model: Any) -> Any:
    """The configuration of a model in its wrapper."""
    while hasattr(model, "module"):
        model = model.module
    return model.config


def _step(rank: int, run: GptRun, build: Any, tokens: torch.Tensor, step: Any = forward_step) -> StepResult:
    """One forward and backward of a model that `build` builds, on all ranks."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    join(run)
    config = transformer_config(run)
    model = build(run, config)
    _set_weights(model, run)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    try:
        return StepResult(forward_backward(ddp, run, tokens, step), _grads(ddp, run))
    finally:
        leave()


def _check(results: list[StepResult], expected: StepResult) -> None:
    for result in results:
        assert result.loss == pytest.approx(expected.loss, rel=1e-6)
        assert result.grads.keys() == expected.grads.keys()
        for name, grad in result.grads.items():
            error = torch.linalg.vector_norm(grad - expected.grads[name])
            assert error <= 1e-5 * torch.linalg.vector_norm(expected.grads[name]), (name, float(error))


# ------------------------------------------------------------------------------------------------------- Mamba-2

MAMBA_MODEL = partial(_mamba_model, pattern=PATTERN)
TOKENS = random_tokens(RUN)


@pytest.fixture(scope="module")
def one_rank() -> StepResult:
    (result,) = run_ranks(_step, 1, RUN, MAMBA_MODEL, TOKENS)
    return result


@pytest.mark.parametrize(
    ("world", "strategy", "options"),
    [
        (2, Strategy(), {}),
        (2, Strategy(layout="contiguous"), {}),
        (4, Strategy(), {}),
        (4, Strategy(layout="auto"), {}),
        (4, Strategy(layout="striped"), {}),
        (4, Strategy(layout="contiguous", ranks_per_node=2), {"recompute": "full"}),
    ],
)
def test_mamba_equals_one_rank(one_rank: StepResult, world: int, strategy: Strategy, options: dict[str, Any]) -> None:
    run = replace(RUN, cp=world, strategy=strategy, **options)
    _check(run_ranks(_step, world, run, MAMBA_MODEL, TOKENS), one_rank)
