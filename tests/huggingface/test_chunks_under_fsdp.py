"""Options that save memory, under PyTorch's FSDP: every weight is trained, or the step is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from burst_plugin import ContextParallel, shard_batch
from burst_plugin.activations import host_memory, pages
from burst_plugin.activations.deferred_logits import LazyLogits
from burst_plugin.activations.host_memory import HostMemory
from burst_plugin.huggingface import prepare
from tests.support.deepspeed_run import Run, build, draw, reference, worst
from tests.support.ranks import run_ranks
from tests.support.ring_steps import sum_of_losses

pytestmark = pytest.mark.huggingface

BATCH = draw(1)[0]
CHUNKS = ({"mlp_chunk": 5}, {"head_chunk": 2})


def _fsdp1(model: Any, use_orig_params: bool) -> Any:
    policy = ModuleWrapPolicy({LlamaDecoderLayer})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=use_orig_params
    )


def _step(model: Any, cp: ContextParallel, optimizer: torch.optim.Optimizer) -> None:
    local = shard_batch(BATCH, cp)
    labels, tokens = local.pop("shift_labels"), local["burst"].valid_tokens
    logits = model(**local, use_cache=False).logits
    loss = sum_of_losses(logits, labels)
    (loss / tokens * dist.get_world_size()).backward()
    optimizer.step()
    optimizer.zero_grad()


def _evaluate(model: Any, cp: ContextParallel) -> None:
    local = shard_batch(BATCH, cp)
    del local["shift_labels"]
    with torch.no_grad():
        model(**local, use_cache=False)


def _changes(rank: int, kind: str, checkpointing: bool, block: dict[str, int]) -> dict[str, Tensor]:
    """The change of every parameter by two steps, with an evaluation before each."""
    model = prepare(build(Run()))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    cp = ContextParallel(dist.group.WORLD, **block)
    if kind == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp1":
        wrapped = _fsdp1(model, use_orig_params=True)
    else:
        for each in (*model.model.layers, model):
            fully_shard(each)
        wrapped = model
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(2):
        _evaluate(wrapped, cp)
        _step(wrapped, cp, optimizer)
    if kind == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(wrapped):
            after = {name: each.detach().clone() for name, each in model.named_parameters()}
        after = {name.replace("_fsdp_wrapped_module.", ""): each for name, each in after.items()}
    else:
        after = {name: getattr(each, "full_tensor", each.clone)().detach() for name, each in model.named_parameters()}
    return {name: after[name] - start for name, start in before.items()}


def _cases(rank: int) -> dict[str, float]:
    """The largest error of a parameter's change, by case."""
    truth, found = _changes(rank, "ddp", False, {}), {}
    for kind, checkpointing in (("fsdp1", False), ("fsdp2", False), ("fsdp2", True)):
        for block in CHUNKS:
            actual = _changes(rank, kind, checkpointing, block)
            found[f"{kind} {checkpointing} {block}"] = worst(actual, truth)[0]
    return found


def test_parameters_change_as_without_chunks() -> None:
    for found in run_ranks(_cases, 2, timeout_s=120.0):
        assert {case: error for case, error in found.items() if not error <= 1e-5} == {}
        assert len(found) == 6


def _flat(rank: int) -> list[str]:
    """What is raised where weights are views of a flat parameter, which modules do not list as theirs."""
    found = []
    for block in CHUNKS:
        model, cp = prepare(build(Run())), ContextParallel(dist.group.WORLD, **block)
        _evaluate(model, cp)  # before it is wrapped: MLPs are not found later
        wrapped = _fsdp1(model, use_orig_params=False)
        with pytest.raises(ValueError, match="would get no gradient") as raised:
            _step(wrapped, cp, torch.optim.SGD(wrapped.parameters(), lr=0.1))
        found.append(str(raised.value))
    return found


def test_flat_parameters_are_refused() -> None:
    for of_tokens, of_heads in run_ranks(_flat, 2, timeout_s=120.0):
        assert "an MLP in chunks uses a trained tensor" in of_tokens
        assert "attention on a few heads at a time uses a trained tensor" in of_heads
        for message in (of_tokens, of_heads):
            assert "under FSDP, wrap with use_orig_params=True, or use fully_shard" in message


def _with_drawn_norms(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)


SAVING = Run(checkpointing=True, prepare=_with_drawn_norms)
EVERY: dict[str, Any] = {"loss_chunk": 7, "mlp_chunk": 5, "head_chunk": 2, "keep_attention": "all", "offload": True}
OPTIONS = ({}, *({name: value} for name, value in EVERY.items()), {"keep_attention": 0.5}, EVERY, EVERY)


@dataclass(frozen=True)
class Saved:
    """One step: the loss on this rank, the worst error of a gradient, and what tells that options were obeyed."""

    loss: float
    error: float
    is_lazy: bool
    sent_bytes: int
    parked_bytes: int


def _own_loss(options: dict[str, Any], groups: list[str], truth: dict[str, Tensor]) -> Saved:
    """Let a model compute its loss under `fully_shard`, with the modules in `groups` in groups of their own."""
    model = prepare(build(SAVING))
    for each in (*model.model.layers, *(model.get_submodule(name) for name in groups), model):
        fully_shard(each)
    cp = ContextParallel(dist.group.WORLD, **options, memory="off")
    local = shard_batch(BATCH, cp)
    count = local["burst"].valid_tokens / dist.get_world_size()  # gradients are averaged over ranks
    host = HostMemory(torch.device("cpu"))
    with mock.patch.dict(host_memory.BY_DEVICE, {torch.device("cpu"): host}):
        output = model(**local, labels=local["shift_labels"], num_items_in_batch=count, use_cache=False)
        output.loss.backward()
    grads = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    sent = sum(sum(kinds.values()) for kinds in cp.traffic().values())
    error = worst(grads, truth)[0]
    return Saved(float(output.loss.detach()), error, isinstance(output.logits, LazyLogits), sent, host.parked_bytes)


def _saving(rank: int, truth: dict[str, Tensor]) -> list[Saved]:
    """The last case has the embedding and the head in groups of their own; else these are in the root's."""
    groups = [[]] * (len(OPTIONS) - 1) + [["model.embed_tokens", "lm_head"]]
    return [_own_loss(options, each, truth) for options, each in zip(OPTIONS, groups, strict=True)]


def test_every_option_that_saves_memory_trains_as_one_rank_does() -> None:
    truth = reference(SAVING, [BATCH])
    with mock.patch.object(host_memory, "LEAST_BYTES", 1), mock.patch.object(pages, "PAGE_BYTES", 64):
        ranks = run_ranks(_saving, 2, truth.grads, timeout_s=120.0)
    for cases in ranks:
        for options, case in zip(OPTIONS, cases, strict=True):
            assert case.error <= 1e-5, options
            assert case.is_lazy == ("loss_chunk" in options), options
            assert (case.parked_bytes > 0) == ("offload" in options), options
            assert (case.sent_bytes < cases[0].sent_bytes) == ("keep_attention" in options), options
    for cases in zip(*ranks, strict=True):
        assert sum(case.loss for case in cases) / 2 == pytest.approx(truth.losses[0], rel=1e-5)
