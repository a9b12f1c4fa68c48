"""Models with images and adapters, checkpoints, chunks, DDP and FSDP: losses and gradients are those of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from burst_plugin import ContextParallel, shard_batch
from burst_plugin.huggingface import prepare
from tests.support.deepspeed_run import worst
from tests.support.families import SINCE_5_24
from tests.support.media import Image, batch, tiny_model
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.huggingface,
    SINCE_5_24,
]
IMAGES = (Image(0, 3, (4, 4)), Image(0, 20, (4, 8)), Image(1, 28, (8, 4)))


class Case(NamedTuple):
    """One way to train.

    lora: where adapters are, "text", "tower" or both; images: of each ring's batch; wrap: puts a model under DDP or
    FSDP; options: of the strategy.
    """

    family: str
    lora: tuple[str, ...] = ()
    images: tuple[tuple[Image, ...], ...] = (IMAGES,)
    wrap: str = ""
    checkpoints: bool = False
    options: Mapping[str, Any] = MappingProxyType({})


def _model(case: Case) -> Any:
    model = tiny_model(case.family)
    if case.lora:
        peft = pytest.importorskip("peft")
        ends = {"text": ("q_proj", "down_proj"), "tower": ("qkv", "linear_fc1")}
        inside = {"text": ".*language_model", "tower": ".*visual"}
        targets = "|".join(f"{inside[part]}.*({'|'.join(ends[part])})" for part in case.lora)
        torch.manual_seed(1)
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        ).train()
    if case.checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _batch(case: Case, ring: int) -> dict[str, Tensor]:
    """The batch of a ring, with as many labels as others have."""
    images = case.images[ring % len(case.images)]
    found = batch(case.family, images, rows=2)
    if not images:
        found = {name: found[name] for name in ("input_ids", "labels")}
    return {**found, "labels": found["labels"].masked_fill(batch(case.family, IMAGES, rows=2)["labels"] < 0, -100)}


def _wrapped(case: Case, model: Any, rings: int) -> Any:
    if not case.wrap:
        return model
    if case.wrap == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    blocks = [*model.model.language_model.layers, *model.model.visual.blocks]
    mesh = init_device_mesh("cpu", (rings, dist.get_world_size() // rings), mesh_dim_names=("replicate", "shard"))
    if case.wrap == "fsdp2":
        for each in (*blocks, model):
            fully_shard(each, mesh=mesh if rings > 1 else mesh["shard"])
        return model
    if case.wrap == "fsdp2 of all":
        for each in (*blocks, model):
            fully_shard(each)
        return model
    kind = ShardingStrategy.HYBRID_SHARD if rings > 1 else ShardingStrategy.FULL_SHARD
    return FullyShardedDataParallel(
        model,
        process_group=None if rings > 1 else dist.group.WORLD,
        device_mesh=mesh if rings > 1 else None,
        sharding_strategy=kind,
        auto_wrap_policy=ModuleWrapPolicy({type(each) for each in blocks}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def _grads(case: Case, wrapped: Any, model: Any) -> dict[str, Tensor]:
    """Gradients, whole, in which all ranks have taken part."""
    if case.wrap == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
            found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return {name.replace("_fsdp_wrapped_module.", ""): grad for name, grad in found.items()}
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if case.wrap.startswith("fsdp2"):
        return {name: grad.full_tensor() for name, grad in found.items()}
    for name, p in model.named_parameters() if not case.wrap else ():
        if p.requires_grad:
            found.setdefault(name, torch.zeros_like(p))
            dist.all_reduce(found[name])
    return found


def _on_ring(rank: int, cases: list[Case]) -> list[tuple[float, dict[str, Tensor], int]]:
    """The loss and gradients of each case, and how often this rank's tower ran."""
    found = []
    for case in cases:
        rings, world = len(case.images), dist.get_world_size()
        groups = [dist.new_group([*range(at, at + world // rings)]) for at in range(0, world, world // rings)]
        ring = rank // (world // rings)
        cp = ContextParallel(groups[ring], **case.options)
        model = prepare(_model(case))
        calls: list[int] = []
        visual = next(module for name, module in model.named_modules() if name.endswith(("visual", "vision_tower")))
        visual.register_forward_pre_hook(lambda *args, calls=calls: calls.append(1))
        wrapped = _wrapped(case, model, rings)
        local = shard_batch(_batch(case, ring), cp)
        count = local["burst"].valid_tokens
        loss = wrapped(**local, labels=local["shift_labels"], num_items_in_batch=count, use_cache=False).loss
        (loss * (world // rings if case.wrap else 1)).backward()  # DDP and FSDP take means over ranks
        total = loss.detach() / rings
        dist.all_reduce(total)
        found.append((float(total), _grads(case, wrapped, model), len(calls)))
    return found


def _on_one_rank(case: Case) -> tuple[float, dict[str, Tensor]]:
    model, losses = _model(case._replace(checkpoints=False)), []
    for ring in range(len(case.images)):
        loss = model(**_batch(case, ring), use_cache=False).loss / len(case.images)
        loss.backward()
        losses.append(float(loss.detach()))
    return sum(losses), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _check(ranks: int, cases: dict[str, Case]) -> None:
    by_rank = run_ranks(_on_ring, ranks, list(cases.values()), timeout_s=60.0)
    for number, (name, case) in enumerate(cases.items()):
        expected, truths = _on_one_rank(case)
        least = 1e-5 * max(float(x.norm()) for x in truths.values())  # less is rounding, as of biases of keys
        truths = {each: x for each, x in truths.items() if float(x.norm()) > least}
        for loss, grads, calls in (found[number] for found in by_rank):
            assert loss == pytest.approx(expected, rel=1e-5), name
            error, of = worst({each: grads[each] for each in truths}, truths)
            assert error < 1e-5, (name, of)
            assert calls == 1 or (case.wrap == "ddp" and () in case.images), name


def test_adapters_train_as_on_one_rank() -> None:
    """Of the text model, of its tower, and of both; towers without one keep no graph."""
    parts: dict[str, tuple[str, ...]] = {"text": ("text",), "tower": ("tower",), "both": ("text", "tower")}
    cases = {f"LoRA {name}": Case("qwen3_vl", lora) for name, lora in parts.items()}
    _check(2, {**cases, "LoRA under DDP": Case("qwen3_vl", ("text", "tower"), wrap="ddp")})


def test_towers_run_once_where_layers_are_computed_again() -> None:
    chunks = {"loss_chunk": 8, "mlp_chunk": 5}
    _check(
        2,
        {
            "checkpoints": Case("qwen3_vl", checkpoints=True),
            "chunks": Case("qwen3_vl", options=chunks),
            "both": Case("llava", checkpoints=True, options=chunks),
        },
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_parameters_train_as_on_one_rank(ranks: int) -> None:
    """One image for two ranks; on four, a ring without images beside another one, and parameters with replicas."""
    images = (IMAGES[:1],) if ranks == 2 else (IMAGES, ())
    kinds = ("ddp", "fsdp1", "fsdp2", "fsdp2 of all")
    _check(ranks, {kind: Case("qwen3_vl", images=images, wrap=kind) for kind in kinds})
