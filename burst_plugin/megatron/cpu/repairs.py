"""Repairs of Megatron that runs on CPUs need, which have no Transformer Engine and train in float32.

They have nothing to do with context parallelism, and are not applied on GPUs.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.moe import moe_utils

from burst_plugin.frameworks.wrapping import wrap
from burst_plugin.megatron.repairs.faults import Repair


def _count_steps_of_pytorchs_adam() -> None:
    """Load the steps of PyTorch's Adam, which counts them per parameter; without Apex and Transformer Engine.

    The state that is loaded has the form of a new optimizer's, which has no step yet. All parameters would then share
    one tensor as their step, which each of them would advance, and which does not hold the number that was saved.
    """

    def state_dict(make: Any, optimizer: Any) -> Any:
        state = optimizer.optimizer.state if optimizer.optimizer is not None else None
        if state is None or state:
            return make(optimizer)
        state["no step yet"] = {"step": torch.tensor(0.0)}
        try:
            return make(optimizer)
        finally:
            state.clear()

    def load_state_dict(load: Any, optimizer: Any, state_dict: Any) -> None:
        (step,) = {float(group["step"]) for group in state_dict["optimizer"]["param_groups"]}
        load(optimizer, state_dict)
        for state in optimizer.optimizer.state.values():
            state["step"] = torch.tensor(step)

    wrap(DistributedOptimizer, "state_dict", state_dict)
    wrap(DistributedOptimizer, "load_state_dict", load_state_dict)


def _load_without_gradients() -> None:
    """Load without autograd: in float32 the optimizer's parameters are views of the model's, which it guards."""
    DistributedOptimizer.load_state_dict = torch.no_grad()(DistributedOptimizer.load_state_dict)


def _route_without_gemm() -> None:
    """Let the router of experts find that Transformer Engine's product is not there, and take PyTorch's."""
    moe_utils.te_general_gemm = None


def _norm_hybrid_models_without_te() -> None:
    """Let models of several kinds of layers have PyTorch's norm at their end."""
    for module in _modules_of_hybrid_models():
        module.TENorm = _torch_norm


def _modules_of_hybrid_models() -> list[Any]:
    """Return the modules, of one release or another, whose stack of layers ends with Transformer Engine's norm."""
    found = []
    for name in _STACKS:
        with contextlib.suppress(ModuleNotFoundError):
            found.append(importlib.import_module(name))
    return [module for module in found if hasattr(module, "TENorm")]


_STACKS = ("megatron.core.ssm.mamba_block", "megatron.core.models.hybrid.hybrid_block")


def _torch_norm(config: Any, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:
    """Return a norm whose gradients Megatron adds up over tensor-parallel ranks in sequence parallelism."""
    kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    norm = kind(hidden_size, eps=eps)
    for parameter in norm.parameters():
        vars(parameter)["sequence_parallel"] = config.sequence_parallel
    return norm


CPU_REPAIRS = (
    Repair(
        name="resume_without_te",
        fault="without Transformer Engine or Apex, the distributed optimizer cannot load, and then miscounts steps",
        fixed_in=None,
        apply=_count_steps_of_pytorchs_adam,
        needed=lambda: not distrib_optimizer.HAVE_APEX_OR_TE,
    ),
    Repair(
        name="resume_in_float32",
        fault="the distributed optimizer cannot load a checkpoint of a model in float32",
        fixed_in=None,
        apply=_load_without_gradients,
    ),
    Repair(
        name="router_without_te",
        fault="without Transformer Engine, the router of experts looks up a function that is not imported",
        fixed_in=(0, 17, 0),
        apply=_route_without_gemm,
        needed=lambda: not hasattr(moe_utils, "te_general_gemm"),
    ),
    Repair(
        name="hybrid_models_without_te",
        fault="Mamba and hybrid models end with a norm of Transformer Engine, whatever their spec says",
        fixed_in=None,
        apply=_norm_hybrid_models_without_te,
        needed=lambda: not distrib_optimizer.HAVE_APEX_OR_TE,
    ),
)
