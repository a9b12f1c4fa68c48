"""Repairs that Megatron needs only on CPUs, where it runs without Transformer Engine and trains in float32.

They have nothing to do with context parallelism, and are not applied on GPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.moe import moe_utils

from burst_plugin.frameworks.wrapping import wrap
from burst_plugin.megatron.cpu.local_layers import use_local_layers
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


def _rotate_in_float32() -> None:
    """Let the indexer of sparse attention rotate any type, as its kernel does."""

    def rotate(original: Any, x: torch.Tensor) -> torch.Tensor:
        assert dsa.hadamard_transform is not None, "it is stood in for"
        rotated: torch.Tensor = dsa.hadamard_transform(x, scale=x.shape[-1] ** -0.5)
        return rotated

    wrap(dsa, "rotate_activation", rotate)


def _route_without_gemm() -> None:
    """Let the router of experts find that Transformer Engine's product is not there, and take PyTorch's."""
    moe_utils.te_general_gemm = None


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
        name="indexer_in_float32",
        fault="the indexer of sparse attention rotates bfloat16 only",
        fixed_in=None,
        apply=_rotate_in_float32,
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
        fault="Megatron's specs of hybrid models, and the norm at their end, name layers of Transformer Engine only",
        fixed_in=None,
        apply=use_local_layers,
        needed=lambda: not distrib_optimizer.HAVE_APEX_OR_TE,
    ),
)
