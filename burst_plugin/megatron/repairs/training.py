"""Repairs of how Megatron starts and schedules a run; see `faults`."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from burst_plugin.frameworks.wrapping import wrap

# ----------------------------------------------------------------------------------------------- weights at the start


def has_scripts() -> bool:
    """Return whether Megatron's training scripts are there, which megatron-core may lack."""
    return importlib.util.find_spec("megatron.training") is not None


def keep_random_states() -> None:
    """Restore random states after a script has warmed up functions with random tensors of S/CP rows.

    Scripts are looked up when they make groups. They cannot be imported before, since they hold references to some of
    the functions of megatron.core that `install()` replaces.
    """

    def warm_up(original: Any, *args: Any, **kwargs: Any) -> None:
        state = torch.get_rng_state()
        gpu_state = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        original(*args, **kwargs)
        torch.set_rng_state(state)
        if gpu_state is not None:
            torch.cuda.set_rng_state(gpu_state)

    def initialize(original: Any, *args: Any, **kwargs: Any) -> Any:
        scripts = sys.modules.get("megatron.training.initialize")
        if hasattr(scripts, _WARMS_UP):
            wrap(scripts, _WARMS_UP, warm_up)
        return original(*args, **kwargs)

    wrap(parallel_state, "initialize_model_parallel", initialize)


_WARMS_UP = "_warmup_jit_function"


# ----------------------------------------------------------------------------------------------- pipeline parallelism


def send_forward_before_backward() -> None:
    """Exchange activations before gradients, one after the other, between two pipeline stages.

    With two stages the next one is also the previous one, and messages between two ranks are matched by their order.
    Megatron batches them with the gradient sent first, and the activation received first.
    """

    def exchange(
        original: Any,
        stage: P2PCommunicator,
        output_tensor: Tensor | None,
        input_tensor_grad: Tensor | None,
        **options: Any,
    ) -> Any:
        if stage.pp_group.size() > 2 or not stage.config.batch_p2p_comm:
            return original(stage, output_tensor, input_tensor_grad, **options)
        recv_prev, recv_next = options.pop("recv_prev"), options.pop("recv_next")
        activation = stage.send_forward_recv_forward(output_tensor, recv_prev=recv_prev, **options)
        return activation, stage.send_backward_recv_backward(input_tensor_grad, recv_next=recv_next, **options)

    wrap(P2PCommunicator, "send_forward_backward_recv_forward_backward", exchange)
