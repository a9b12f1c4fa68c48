"""Layers of Megatron's and norms of PyTorch's in place of Transformer Engine's, where that is not installed.

Megatron's own specs of hybrid models (`mamba_stack_spec`, `hybrid_stack_spec`) name Transformer Engine's layers only.
Parameters have Transformer Engine's names, so that checkpoints fit a machine that has it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from megatron.core.extensions import transformer_engine, transformer_engine_spec_provider
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.nn import functional as F

_SPECS = (".hybrid_layer_specs", ".mamba_layer_specs")


def use_local_layers() -> None:
    """Replace Transformer Engine's layers by Megatron's and PyTorch's own, in modules and specs of Megatron.

    Specs that name Transformer Engine's layers, also existing ones of hybrid models, can then be built where it is
    not installed. A second call changes nothing.
    """
    provider = transformer_engine_spec_provider.TESpecProvider
    if provider.grouped_mlp_modules is _experts_one_by_one:
        return
    provider.grouped_mlp_modules = _experts_one_by_one
    loaded = {name: module for name, module in sys.modules.items() if name.startswith("megatron.")}
    for name, layer in _LAYERS.items():
        absent = getattr(transformer_engine, name)
        for module in loaded.values():
            if vars(module).get(name) is absent:
                vars(module)[name] = layer
    for module in [module for name, module in loaded.items() if name.endswith(_SPECS)]:
        before = {name: value for name, value in vars(module).items() if isinstance(value, ModuleSpec)}
        importlib.reload(module)
        for name, spec in before.items():
            vars(spec).update(vars(getattr(module, name)))


def _experts_one_by_one(provider: Any, moe_use_grouped_gemm: bool, *args: Any, **kwargs: Any) -> Any:
    """Return the module that computes experts one after another; grouped products need packages for GPUs."""
    return LocalSpecProvider().grouped_mlp_modules(False, *args, **kwargs)


class _Norm:
    """Built as PyTorch's norm; its gradients are added up over tensor-parallel ranks in sequence parallelism."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> Any:
        """Return the norm that the configuration names."""
        _refuse_centered(config)
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            vars(parameter)["sequence_parallel"] = config.sequence_parallel
        return norm


class _NormAndLinear(ColumnParallelLinear):
    """A linear layer that norms its input first."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        _refuse_centered(config)
        at = {"dtype": config.params_dtype, "device": self.weight.device}
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, **at))
        vars(self.layer_norm_weight)["sequence_parallel"] = config.sequence_parallel
        self.layer_norm_bias = None
        if config.normalization != "RMSNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(input_size, **at))
            vars(self.layer_norm_bias)["sequence_parallel"] = config.sequence_parallel

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of `ColumnParallelLinear` for the normed `input_` [S, B, H]."""
        weight, bias, eps = self.layer_norm_weight, self.layer_norm_bias, self.config.layernorm_epsilon
        if self.config.normalization == "RMSNorm":
            normed = F.rms_norm(input_, weight.shape, weight, eps)
        else:
            normed = F.layer_norm(input_, weight.shape, weight, bias, eps)
        return super().forward(normed, *args, **kwargs)


class _WholeLinear(torch.nn.Module):
    """A linear layer that all tensor-parallel ranks have whole, each for its own tokens in sequence parallelism."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, init_method: Any, **options: Any) -> None:
        super().__init__()
        if options.get("bias") or options.get("parallel_mode") != "duplicated":
            raise ValueError("TELinear is not supported on CPUs but without bias, with parallel_mode='duplicated'")
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel
        if config.perform_initialization:
            init_method(self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the product of x with the weight, and no bias."""
        return F.linear(x, self.weight), None


def _refuse_centered(config: Any) -> None:
    """Raise ValueError for weights of norms that are counted from 1, which PyTorch's norms do not know."""
    if config.layernorm_zero_centered_gamma:
        raise ValueError("layernorm_zero_centered_gamma=True is not supported on CPUs: drop --apply-layernorm-1p")


_LAYERS: dict[str, Any] = {
    "TENorm": _Norm,
    "TELinear": _WholeLinear,
    "TEColumnParallelLinear": ColumnParallelLinear,
    "TERowParallelLinear": RowParallelLinear,
    "TELayerNormColumnParallelLinear": _NormAndLinear,
    "TEDotProductAttention": DotProductAttention,
}
