"""`memory="auto"`: nothing but memory changes, and logits are there for whoever reads them."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from copy import deepcopy
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from burst_plugin import ContextParallel, shard_batch
from burst_plugin.activations.deferred_logits import LazyLogits
from burst_plugin.huggingface import auto_memory, prepare
from burst_plugin.training import memory_choice
from burst_plugin.training.memory_choice import NextStep
from tests.support.deepspeed_run import VOCAB, Run, build, draw, llama, worst
from tests.support.families import families
from tests.support.largest import LargestLogits
from tests.support.ranks import run_ranks
from tests.support.ring_steps import grads_of, shifted

pytestmark = pytest.mark.huggingface

BATCH = draw(1, rows=2, length=32)[0]
ROWS = 8  # of a chunk, of 32 tokens on each of two ranks
OPTIONS = ("loss_chunk", "mlp_chunk", "keep_attention")
NAMES = ("llama", "gemma2", "mixtral")


def _model(name: str, **changes: Any) -> Any:
    if name == "mixtral":  # with experts, which do not come in chunks
        shape = llama(**changes).to_diff_dict()
        config = transformers.MixtralConfig(**{**shape, "num_local_experts": 4, "num_experts_per_tok": 2})
        return build(Run(model=config))
    return build(Run(model=deepcopy(llama(**changes) if name == "llama" else families()[name])))


@contextmanager
def _small_chunks() -> Iterator[None]:
    with mock.patch.object(memory_choice, "LEAST_ROWS", ROWS), mock.patch.object(auto_memory, "mlp_chunk") as chunk:
        chunk.return_value = ROWS
        yield


@contextmanager
def _steps_counted(seen_as: Callable[[NextStep], NextStep] = lambda step: step) -> Iterator[list[NextStep]]:
    """Note the steps that are counted, each as `seen_as` returns it to the choice."""
    real, steps = auto_memory.next_step, list[NextStep]()

    def next_step(*args: Any) -> NextStep:
        step = real(*args)
        assert step is not None
        steps.append(step)
        return seen_as(step)

    with mock.patch.object(auto_memory, "next_step", next_step):
        yield steps


def _given(cp: ContextParallel) -> dict[str, Any]:
    local = shard_batch(BATCH, cp)
    return {**local, "labels": local["shift_labels"], "num_items_in_batch": local["burst"].valid_tokens}


def _summed_grads(model: Any) -> dict[str, torch.Tensor]:
    grads = grads_of(model)
    for grad in grads.values():
        dist.all_reduce(grad)
    model.zero_grad()
    return grads


def _trained(rank: int, name: str, checkpoints: bool) -> dict[str, Any]:
    """Train a step with what is chosen, then one whose loss is made of the logits, and one after that."""
    with _small_chunks():
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=dist.get_world_size())
        model = prepare(_model(name))
        if checkpoints:
            model.gradient_checkpointing_enable()
        given, found = _given(cp), {}
        for step in ("own loss", "read", "after"):
            with LargestLogits(model.config.vocab_size, model.config.hidden_size) as largest:
                output = model(**given, use_cache=False)
                loss = output.loss
                if step != "own loss":
                    logits, labels = output.logits.float().flatten(0, 1), given["labels"].flatten()
                    loss = F.cross_entropy(logits, labels, reduction="sum") / given["num_items_in_batch"]
                loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            found[step] = float(total), _summed_grads(model), largest.rows, type(output.logits)
        found["options"] = {
            each: getattr(cp.strategy, each) for each in ("loss_chunk", "mlp_chunk", "keep_attention")
        }
    return found


def _reference(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    model = _model(name)
    logits = model(input_ids=BATCH["input_ids"], use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), shifted(BATCH["labels"]).flatten())
    loss.backward()
    return float(loss.detach()), grads_of(model)


@pytest.mark.parametrize("checkpoints", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_steps_equal_one_rank_whatever_reads_logits(name: str, checkpoints: bool) -> None:
    loss, grads = _reference(name)
    found = run_ranks(_trained, 2, name, checkpoints, timeout_s=120.0)[0]
    for step in ("own loss", "read", "after"):
        assert found[step][0] == pytest.approx(loss, rel=1e-5), step
        error, parameter = worst(found[step][1], grads)
        assert error <= 1e-5, (step, parameter, error)
    kinds = [found[step][3] for step in ("own loss", "read", "after")]
    assert kinds == [LazyLogits, LazyLogits, torch.Tensor], "a loss of logits is not made in chunks twice"
    expected: dict[str, Any] = {"loss_chunk": ROWS, "mlp_chunk": 0, "keep_attention": "none"}
    if checkpoints:
        expected |= {"mlp_chunk": 0 if name == "mixtral" else ROWS, "keep_attention": "all"}
    assert found["options"] == expected


def _on_rings(rank: int) -> list[list[Any]]:
    """What is chosen for a model on one ring, and then on another."""
    model, chosen = prepare(_model("llama")), []
    model.gradient_checkpointing_enable()
    for _ in range(2):
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=2)
        with _small_chunks():
            model(**_given(cp), use_cache=False).loss.backward()
        chosen.append([getattr(cp.strategy, name) for name in OPTIONS])
        cp.close()
    return chosen


def test_each_ring_of_a_model_has_a_choice_of_its_own() -> None:
    for chosen in run_ranks(_on_rings, 2):
        assert chosen == [[ROWS, ROWS, "all"]] * 2


def _choice_that_opens(rank: int) -> list[str]:
    """What is kept of batches before and after checkpoints are switched on, where one rank read logits before."""
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=2)
    model, kept = prepare(_model("llama")), []
    for length in (100, 50, 80, 80):
        if length == 80:
            model.gradient_checkpointing_enable()
        local = shard_batch(draw(1, rows=2, length=length)[0], cp)
        given = {**local, "labels": local["shift_labels"], "num_items_in_batch": local["burst"].valid_tokens}
        with _small_chunks():
            output = model(**given, use_cache=False)
        if length == 100 and rank == 0:
            output.logits.sum()
        output.loss.backward()
        kept.append(str(cp.strategy.keep_attention))
    return kept


def test_news_of_one_rank_leave_ranks_in_step() -> None:
    first, second = run_ranks(_choice_that_opens, 2)
    assert first == second


def _off(rank: int) -> tuple[bool, dict[str, Any]]:
    with _small_chunks():
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=2, memory="off")
        model = prepare(_model("llama"))
        model.gradient_checkpointing_enable()
        is_lazy = isinstance(model(**_given(cp), use_cache=False).logits, LazyLogits)
    return is_lazy, {name: getattr(cp.strategy, name) for name in OPTIONS}


def test_off_leaves_all_options_as_they_were() -> None:
    nothing = {"loss_chunk": 0, "mlp_chunk": 0, "keep_attention": "none"}
    assert run_ranks(_off, 2) == [(False, nothing)] * 2


def _read_late(rank: int) -> str:
    with _small_chunks():
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=2)
        model = prepare(_model("llama"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        output = model(**_given(cp), use_cache=False)
        output.loss.backward()
        again = model(**_given(cp), use_cache=False)
        with torch.no_grad():
            before = output.logits[0, 0, 0]
        optimizer.step()
        assert torch.equal(before, output.logits[0, 0, 0]), "they were computed"
        with pytest.raises(RuntimeError) as raised:
            again.logits.sum()
    return str(raised.value)


def test_logits_are_not_computed_with_weights_of_another_step() -> None:
    for said in run_ranks(_read_late, 2):
        assert said.startswith("logits are read after an optimizer's step")


class _Masked(transformers.LlamaForCausalLM):
    """Changes its logits in place before the loss, as Chameleon does."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        others = {name: x for name, x in kwargs.items() if name not in ("num_items_in_batch", "shift_labels")}
        hidden = self.model(input_ids, position_ids=position_ids, **others)
        logits = self.lm_head(hidden.last_hidden_state)
        logits[:, :, :5] = torch.finfo(logits.dtype).min
        logits = logits.float()
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, VOCAB, **kwargs)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


class _Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach().square().sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.expand(2, 16, VOCAB)


def _odd(rank: int) -> dict[str, Any]:
    """Logits that are changed in place, or go to an autograd function; lengths that differ; reads on one rank."""
    found: dict[str, Any] = {}
    with _small_chunks():
        for memory in ("off", "auto"):
            cp = ContextParallel(dist.group.WORLD, ranks_per_node=2, memory=memory)
            torch.manual_seed(0)
            model = prepare(_Masked(llama()))
            given = _given(cp)
            given["shift_labels"] = given["shift_labels"].masked_fill(given["shift_labels"] < 5, -100)
            loss = model(**given, use_cache=False).loss
            loss.backward()
            found[memory] = float(loss.detach()), _summed_grads(model)
        model = prepare(_model("llama"))
        output = model(**_given(cp), use_cache=False)
        with pytest.raises(RuntimeError, match="its gradient would be lost"):
            (output.loss + _Squares.apply(output.logits)).backward()
        model = prepare(_model("llama"))
        model.gradient_checkpointing_enable()
        short = draw(1, rows=1, length=8)[0]
        losses = []
        for batch in (BATCH, short):
            local = shard_batch(batch, cp)
            given = {**local, "labels": local["shift_labels"], "num_items_in_batch": local["burst"].valid_tokens}
            losses.append(model(**given, use_cache=False).loss)
        sum(losses).backward()
        found["lengths"] = all(p.grad is not None for p in model.parameters())
    return found


def test_logits_that_are_changed_in_place_and_other_odd_uses() -> None:
    for found in run_ranks(_odd, 2, timeout_s=120.0):
        assert found["auto"][0] == pytest.approx(found["off"][0], rel=1e-6)
        assert worst(found["auto"][1], found["off"][1])[0] <= 1e-6
        assert found["lengths"], "checkpoints of one forward are not computed as another one"


def test_short_batches_are_computed_at_once() -> None:
    def few(rank: int) -> bool:
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=2)
        model = prepare(_model("llama"))
        return isinstance(model(**_given(cp), use_cache=False).logits, LazyLogits)

    assert run_ranks(few, 2) == [False] * 2


KINDS = ("labels", "read on rank 1", "no labels", "head of no unit", "experts", "no head", "whole inside")


def _with_room_for_chunks(step: NextStep) -> NextStep:
    in_chunks = replace(step, setting=replace(step.setting, loss_chunk=ROWS))
    return replace(step, free=in_chunks.needed("all"))


def _counted(rank: int) -> dict[str, Any]:
    """Return, by kind of model and batch, the chunks that are counted, and what is kept at each of three forwards.

    A GPU has room for a step whose loss comes in chunks, and not for whole logits.
    """
    found = {}
    for kind in KINDS:
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=2)
        model = _model("mixtral" if kind == "experts" else "llama", vocab_size=4096)
        if kind == "no head":
            model = model.model
        elif kind == "whole inside":
            model = _Masked(llama())
        model = prepare(model)
        model.gradient_checkpointing_enable()
        if kind == "head of no unit":
            for unit in (*model.model.layers, model):
                fully_shard(unit)
        given, kept, said = _given(cp), [], io.StringIO()
        if kind in ("no labels", "no head"):
            given = {name: x for name, x in given.items() if "label" not in name}
        with _small_chunks(), _steps_counted(_with_room_for_chunks) as steps, redirect_stdout(said):
            for _ in range(3):
                output = model(**given, use_cache=False)
                if kind == "read on rank 1" and rank == 1:
                    output.logits.sum()
                kept.append(cp.strategy.keep_attention)
        counted = [(step.setting.loss_chunk, step.setting.mlp_chunk) for step in steps]
        found[kind] = counted, kept, [each in said.getvalue() for each in ("loss in chunks", "MLPs in chunks")]
    return found


def test_only_chunks_that_are_used_count() -> None:
    found = run_ranks(_counted, 2, timeout_s=120.0)
    chunked, whole, all_kept = (ROWS, ROWS), (0, ROWS), ["all"] * 3
    for rank, of_rank in enumerate(found):
        says = rank == 0
        assert of_rank["labels"] == ([chunked], all_kept, [says, says])
        assert of_rank["no labels"] == ([whole], ["none"] * 3, [False, says])
        assert of_rank["head of no unit"] == ([whole], ["none"] * 3, [False, says])
        assert of_rank["experts"] == ([(ROWS, 0)], all_kept, [says, False])
        assert of_rank["no head"] == ([chunked], all_kept, [False, says])
        assert of_rank["whole inside"][0] == [chunked, whole]
    kept = ["all", "none", "none"]
    assert found[0]["read on rank 1"][:2] == ([chunked] * 2, kept)
    assert found[1]["read on rank 1"][:2] == ([chunked, whole], kept), "chosen anew by all ranks together"


def _reasons(rank: int) -> list[str]:
    """Return the line on why attention is computed again, by cause."""
    found = []
    for cause in ("offload", "release", "room", "unknown model"):
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=1, offload=cause == "offload")
        model, said = prepare(_model("llama")), io.StringIO()
        model.gradient_checkpointing_enable()
        with ExitStack() as changes:
            changes.enter_context(redirect_stdout(said))
            if cause == "release":
                changes.enter_context(mock.patch.object(auto_memory, "attention_can_be_kept", return_value=False))
            if cause in ("room", "unknown model"):
                changes.enter_context(mock.patch.object(auto_memory, "_free_bytes", return_value=1))
            if cause == "unknown model":
                changes.enter_context(mock.patch.object(auto_memory, "shape_of", side_effect=KeyError))
            model(**_given(cp), use_cache=False)
        found += [line.strip() for line in said.getvalue().splitlines() if "attention is computed again" in line]
    return found


def test_the_reason_why_attention_is_computed_again_is_the_true_one() -> None:
    reasons = [
        "with offload=True, keep_attention is yours to set",
        "checkpoints of this release of PyTorch cannot keep it",
        "there is no room to keep it on the fullest rank",
        "it would take more than a tenth of the free memory, and no plan is made for this model",
    ]
    assert run_ranks(_reasons, 1) == [[f"attention is computed again: {each}" for each in reasons]]


def _recomputed(rank: int) -> list[str]:
    """Return what a plan computes again: without checkpoints, in every layer, and in every second one."""
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=1)
    shard = shard_batch(BATCH, cp)["burst"]
    model = _model("llama")
    found = [auto_memory.next_step(model, shard, 64, 8)]
    for every in (1, 2):
        model._activation_checkpointing_enable(every_n_layers=every)
        found.append(auto_memory.next_step(model, shard, 64, 8))
    return [step.setting.recompute for step in found if step is not None]


def _types(rank: int) -> list[tuple[int, bool]]:
    """Return how many bytes a number in activations counts for models of two types, and whether the type is said."""
    found = []
    for dtype in ("float32", "bfloat16"):
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=1)
        model, said = prepare(_model("llama").to(getattr(torch, dtype))), io.StringIO()
        given = _given(cp)
        with redirect_stdout(said), torch.autocast("cpu", dtype=torch.bfloat16):
            model(**given, use_cache=False)
        step = auto_memory.next_step(model, given["burst"], 64, 8)
        assert step is not None
        found.append((step.item_bytes, f"counted in {dtype}\n" in said.getvalue()))
    return found


def test_activations_of_float32_models_count_in_float32_also_under_autocast() -> None:
    assert run_ranks(_types, 1) == [[(4, True), (2, True)]]


def test_activations_count_in_the_type_to_which_fsdp_casts_weights() -> None:
    def item_bytes(rank: int) -> int:
        cp, model = ContextParallel(dist.group.WORLD, ranks_per_node=1), prepare(_model("llama"))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for unit in (model.model.embed_tokens, *model.model.layers, model):
            fully_shard(unit, mp_policy=policy)
        step = auto_memory.next_step(model, _given(cp)["burst"], 64, 8)
        assert step is not None
        return step.item_bytes

    assert run_ranks(item_bytes, 1) == [2]


def test_moments_count_until_an_optimizer_holds_them() -> None:
    """Gradients of micro-batches come before them, and are gone after `zero_grad`."""
    torch.manual_seed(0)
    model = _model("llama")
    count = sum(each.numel() for each in model.parameters())
    optimizer, ids = torch.optim.AdamW(model.parameters()), torch.randint(0, 8, (1, 8))

    def missing() -> float:
        return auto_memory.missing_states(model, auto_memory.HeldStates()) / count

    found = [missing()]
    model(input_ids=ids, labels=ids).loss.backward()
    found.append(missing())
    optimizer.step()
    found.append(missing())
    optimizer.zero_grad()
    found.append(missing())
    assert found == [12, 8, 0, 4]
    other = _model("llama").bfloat16()
    assert auto_memory.missing_states(other, auto_memory.HeldStates()) / count == 6
    of_engine = auto_memory.HeldStates(2, are_there=True, are_wide=True)
    assert auto_memory.missing_states(other, of_engine) / count == 4


def _states_under_fsdp(rank: int) -> list[tuple[float, float, int]]:
    """Return the bytes of states that are counted, the bytes there will be, and the plan's stage of ZeRO."""
    found: list[tuple[float, float, int]] = []
    for shape in ((4,), (2, 2)):
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=4)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = prepare(_model("llama"))
        for unit in (*model.model.layers, model):
            fully_shard(unit, mesh=mesh)
        local = sum(each.to_local().numel() for each in model.parameters())
        with _steps_counted() as steps:
            model(**_given(cp), use_cache=False)
        found.append((steps[0].states, 12 * local, steps[0].setting.zero))
    return found


def test_a_rank_counts_the_states_of_what_fsdp_leaves_it() -> None:
    for found in run_ranks(_states_under_fsdp, 4, timeout_s=120.0):
        for counted, local, zero in found:
            assert counted == pytest.approx(local)
            assert zero == 3, "layers are gathered one by one"
        assert found[1][1] == 2 * found[0][1]


def test_layers_without_checkpoints_count_in_the_plan() -> None:
    assert run_ranks(_recomputed, 1) == [["none", "full", "none"]]


def _told_of_checkpoints(rank: int) -> list[bool]:
    """Whether this rank is told that options act on checkpoints alone, without them and with them."""
    told = []
    for has_checkpoints in (False, True):
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=1, offload=True, keep_attention="all")
        model = prepare(transformers.LlamaForCausalLM._from_config(llama(), attn_implementation="eager").train())
        if has_checkpoints:
            model.gradient_checkpointing_enable()
        local = shard_batch({"input_ids": torch.arange(32).view(2, 16)}, cp)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(**local, use_cache=False)
        told.append(any("act on activation checkpoints" in str(each.message) for each in caught))
        cp.close()
    return told


def test_options_of_checkpoints_say_that_there_are_none() -> None:
    assert run_ranks(_told_of_checkpoints, 2) == [[True, False], [False, False]]
