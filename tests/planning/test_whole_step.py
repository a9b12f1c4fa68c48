"""A plan against whole training steps at their real size, on GPUs that are not there: see `support.whole_step`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace

import pytest

from burst_plugin.planning.cluster import Cluster
from burst_plugin.training.memory import GIB, memory
from burst_plugin.training.model_shape import MODELS
from burst_plugin.training.setting import Setting
from burst_plugin.training.training_plan import Goal, plans_that_fit
from tests.support.whole_step import whole_step

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]
MARGIN, NCCL = "left for CUDA, NCCL and the allocator", "NCCL's buffers"


@dataclass(frozen=True)
class Case:
    """A million tokens on nodes of 8 GPUs, of which a plan may take `gpu_gib`; `layers` instead of all, if given."""

    model: str
    nodes: int
    gpu_gib: float
    layers: int = 0


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("llama3_8b", 1, 36.0, layers=2), marks=pytest.mark.slow),  # which takes heads in chunks
        pytest.param(Case("llama3_8b", 1, 56.0, layers=8), marks=pytest.mark.slow),
        pytest.param(Case("qwen3_14b", 4, 54.0), marks=pytest.mark.slow),
        pytest.param(Case("llama3_8b", 4, 76.0), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_step_on_a_million_tokens_takes_what_the_plan_says(case: Case) -> None:
    from burst_plugin.deepspeed.planning import space

    cluster, shape = Cluster(nodes=case.nodes, gpu_gib=case.gpu_gib), MODELS[case.model]
    goal = Goal(model=shape, tokens=2**20, cluster=cluster, space=space(fused_norms=False))
    setting = plans_that_fit(goal)[0].setting
    if case.layers:
        shape = replace(shape, layers=case.layers)
    planned, found = memory(shape, setting, cluster), whole_step(shape, setting)
    expected = planned.gpu_bytes - planned.gpu[MARGIN] - planned.gpu[NCCL]  # neither of which is tensors
    print(f"{case}: {expected / GIB:.2f} GiB by the plan, {found.peak / GIB:.2f} found, {planned.fullest}")
    assert found.peak + planned.gpu[MARGIN] + planned.gpu[NCCL] <= case.gpu_gib * GIB
    assert expected == pytest.approx(found.peak, rel=0.1)
    on_host = planned.host.get("inputs of layers", 0.0) + planned.host.get("attention, kept", 0.0)
    assert found.host_pages == on_host / cluster.gpus_per_node


@pytest.mark.slow
@pytest.mark.parametrize(("chunks", "ulysses", "keep"), [(8, 1, 0.0), (4, 8, 1.0), (2, 4, 0.5)])
def test_heads_in_chunks_take_what_the_plan_says(chunks: int, ulysses: int, keep: float) -> None:
    from burst_plugin.deepspeed.planning import space

    # A vocabulary and chunks with which head and MLP take fewer operations, and no more memory than attention.
    shape, cluster = replace(MODELS["llama3_8b"], layers=2, vocab=16384), Cluster()
    setting = Setting(
        tokens=2**21,
        code=space(fused_norms=False).code,
        context=8,
        inner=8,
        zero=3,
        keep=keep,
        loss_chunk=8192,
        mlp_chunk=8192,
        head_chunks=chunks,
        ulysses=ulysses,
        offload=True,
        offload_optimizer=True,
    )
    planned, found = memory(shape, setting, cluster), whole_step(shape, setting)
    expected = planned.gpu_bytes - planned.gpu[MARGIN] - planned.gpu[NCCL]  # neither of which is tensors
    print(f"{chunks} {ulysses} {keep}: {expected / GIB:.2f} GiB by the plan, {found.peak / GIB:.2f} found")
    assert expected == pytest.approx(found.peak, rel=0.1)
    on_host = planned.host["inputs of layers"] + planned.host.get("attention, kept", 0.0)
    assert found.host_pages == on_host / cluster.gpus_per_node
