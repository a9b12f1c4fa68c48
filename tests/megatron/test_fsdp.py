"""Megatron-core's two kinds of FSDP over data- and context-parallel ranks, with the ring, against one rank."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import DeviceMesh

from tests.support.megatron_gpt import (
    GptRun,
    build,
    forward_backward,
    leave,
    named_parameters,
    one_step,
    random_tokens,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron

ONE_RANK = GptRun(layers=2, config={"transformer_impl": "local"})
TOKENS = random_tokens(ONE_RANK)


def with_torch_fsdp(config: Any, model: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel
    from megatron.core.distributed import torch_fully_sharded_data_parallel as module

    of_cpus = SimpleNamespace(from_group=lambda group, kind: DeviceMesh.from_group(group, "cpu"))
    module.DeviceMesh = of_cpus  # in place of one of GPUs
    wrapped = TorchFullyShardedDataParallel(config, DistributedDataParallelConfig(), model)
    wrapped.zero_grad_buffer = lambda: None
    wrapped.finish_grad_sync = lambda **options: None  # that of 0.16.1 does not take what it is given
    return wrapped


def with_megatron_fsdp(config: Any, model: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    options = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        gradient_reduce_div_fusion=False,  # an operation of NCCL
    )
    return FullyShardedDataParallel(config, options, model, device=torch.device("cpu"))


WRAPPERS = {"torch": with_torch_fsdp, "megatron": with_megatron_fsdp}


def sharded_step(rank: int, kind: str, run: GptRun) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss, and this rank's part of all gradients, flat."""
    from megatron.core import parallel_state

    wrapped = build(run, WRAPPERS[kind])
    rows = TOKENS.chunk(torch.distributed.get_world_size() // run.cp, 1)[parallel_state.get_data_parallel_rank()]
    loss = forward_backward(wrapped, run, rows)
    grads = {name: p.grad for name, p in named_parameters(wrapped)}
    leave()
    return loss, {name: torch.empty(0) if x is None else x.to_local().flatten() for name, x in grads.items()}


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize(("ranks", "cp", "recompute"), [(2, 2, "none"), (4, 4, "full"), (4, 2, "selective")])
def test_as_on_one_rank(kind: str, ranks: int, cp: int, recompute: str) -> None:
    [truth] = run_ranks(lambda rank: one_step(ONE_RANK, TOKENS), 1)
    run = replace(ONE_RANK, cp=cp, cp_comm_type="burst", recompute=recompute)
    losses, parts = zip(*run_ranks(sharded_step, ranks, kind, run, timeout_s=60.0), strict=True)
    assert losses == pytest.approx([truth.loss] * ranks, rel=1e-6)
    for name, grad in truth.grads.items():
        found = torch.cat([part[name] for part in parts])
        assert float((found - grad.flatten()).norm()) <= 1e-5 * float(grad.norm()), name
