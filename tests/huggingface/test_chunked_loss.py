"""Models of transformers that compute their losses in chunks on a ring: losses and gradients as of whole logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch.nn import functional as F

from burst_plugin import ContextParallel, shard_batch
from burst_plugin.activations.deferred_logits import LazyLogits
from burst_plugin.huggingface import log_likelihood, prepare
from tests.support.deepspeed_run import VOCAB, Batch, Run, build, draw, llama, worst
from tests.support.families import families
from tests.support.largest import LargestLogits
from tests.support.ranks import run_ranks
from tests.support.ring_steps import shifted

pytestmark = pytest.mark.huggingface

BATCH = draw(1, rows=2, length=32)[0]
CHUNK = 5  # of 16 tokens on each of two ranks, in two rows
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
    "pad_token_id": 0,
}


def _configs() -> dict[str, Any]:
    """All families, and those that scale their logits, or have the head's weight in common with their embedding."""
    t = transformers
    return {
        **families(),
        "cohere": t.CohereConfig(**SHAPE, logit_scale=0.25, tie_word_embeddings=True),
        "granite": t.GraniteConfig(**SHAPE, logits_scaling=3.0),
        "tied": llama(tie_word_embeddings=True),
    }


def _lora(model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False, lora_dropout=0.0)
    return peft.get_peft_model(model, config)


def _saved(model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def _model(name: str) -> Any:
    prepared = {"lora": _lora, "modules_to_save": _saved}
    return build(Run(model=deepcopy(_configs().get(name) or llama()), prepare=prepared.get(name)))


def _trained(rank: int, names: list[str]) -> dict[str, tuple[float, dict[str, torch.Tensor], bool]]:
    """The loss and gradients, summed up over the ring, and whether logits wait to be read and the head is back."""
    cp = ContextParallel(dist.group.WORLD, loss_chunk=CHUNK, ranks_per_node=dist.get_world_size())
    found = {}
    for name in names:
        model = prepare(_model(name))
        head = model.get_output_embeddings()
        own = transformers.loss.loss_utils.ForCausalLMLoss if name == "llama" else None
        if own is not None:
            model.loss_function = own
        local = shard_batch(BATCH, cp)
        given = {**local, "labels": local["shift_labels"], "num_items_in_batch": local["burst"].valid_tokens}
        with LargestLogits(VOCAB, 32) as largest:
            output = model(**given, use_cache=False)
            output.loss.backward()
        assert largest.rows == CHUNK or name not in ("llama", "gemma2", "lora"), name  # others have such weights
        loss = output.loss.detach().clone()
        dist.all_reduce(loss)
        grads = {}
        for each, p in model.named_parameters():
            if p.requires_grad:
                grads[each] = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(grads[each])
        is_back = model.get_output_embeddings() is head and "forward" not in head.__dict__
        is_back = is_back and model.__dict__.get("_loss_function") is own
        logits = model.eval()(**given, use_cache=False).logits
        torch.testing.assert_close(output.logits + 0, logits, rtol=1e-5, atol=1e-5)
        found[name] = float(loss), grads, isinstance(output.logits, LazyLogits) and is_back
    return found


def _reference(name: str, batch: Batch = BATCH) -> tuple[float, dict[str, torch.Tensor]]:
    model = _model(name)
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    labels = shifted(batch["labels"])
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    grads = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters() if p.requires_grad
    }
    return float(loss.detach()), grads


def test_every_familys_loss_and_gradients_are_those_of_whole_logits() -> None:
    names = [*_configs(), "lora", "modules_to_save"]
    found = run_ranks(_trained, 2, names, timeout_s=180.0)[0]
    for name in names:
        loss, grads = _reference(name)
        assert found[name][0] == pytest.approx(loss, rel=1e-5), name
        error, parameter = worst(found[name][1], grads)
        assert error <= 1e-5, (name, parameter, error)
        assert found[name][2], name


def test_a_mean_over_the_labels_of_a_shard() -> None:
    """As transformers has it, without num_items_in_batch, where a rank has all labels."""

    def mean(rank: int) -> tuple[float, float]:
        cp = ContextParallel(dist.group.WORLD, loss_chunk=CHUNK, ranks_per_node=1)
        model = prepare(_model("llama"))
        local = shard_batch(BATCH, cp)
        given = {**local, "labels": local["shift_labels"]}
        chunked = model(**given, use_cache=False).loss
        whole = model.eval()(**given, use_cache=False).loss
        return float(chunked.detach()), float(whole.detach())

    for chunked, whole in run_ranks(mean, 1):
        assert chunked == pytest.approx(whole, rel=1e-6)


# Of an answer at the end, whose labels all are rank 0's.
ANSWER = {**BATCH, "labels": BATCH["input_ids"].index_fill(1, torch.arange(26), -100)}


def _own_mean(rank: int) -> tuple[list[str], list[tuple[float, dict[str, torch.Tensor]]]]:
    """What is said of losses without the number of labels; and with it losses, and gradients averaged over ranks."""
    messages, results = [], []
    for chunk in (0, CHUNK):
        cp = ContextParallel(dist.group.WORLD, loss_chunk=chunk, ranks_per_node=2)
        model = prepare(_model("llama"))
        local = shard_batch(ANSWER, cp)
        model(**local, use_cache=False)  # of shift_labels alone models make no loss
        given, labels = {**local, "use_cache": False}, local["shift_labels"]
        for trains in (False, True):
            try:
                model.train(trains)(**given, labels=labels)
                messages.append("nothing was raised")
            except ValueError as error:
                messages.append(str(error))
        with pytest.raises(ValueError, match="a forward got labels with a shard, and no num_items_in_batch"):
            model.forward(**given, labels=labels)  # past the hooks
        with pytest.raises(ValueError, match=r"in torch.bfloat16, which cannot count tokens"):
            model(**given, labels=labels, num_items_in_batch=torch.tensor(257.0, dtype=torch.bfloat16))
        tokens = local["burst"].valid_tokens
        loss = model(**given, labels=labels, num_items_in_batch=tokens / dist.get_world_size()).loss
        loss.backward()
        value, grads = loss.detach().clone(), {name: p.grad for name, p in model.named_parameters()}
        for x in (value, *grads.values()):
            dist.all_reduce(x)
            x /= dist.get_world_size()
        results.append((float(value), grads))
    return messages, results


def test_a_mean_over_the_labels_of_one_rank_is_refused() -> None:
    """Also in evaluation. With the number that the message asks for, gradients are those of whole sequences."""
    loss, grads = _reference("llama", ANSWER)
    for messages, results in run_ranks(_own_mean, 2):
        for message in messages:
            assert message.startswith("LlamaForCausalLM got labels with a shard, and no num_items_in_batch")
            assert "or tokens / dist.get_world_size() if gradients are averaged" in message
        for found, averaged in results:
            assert found == pytest.approx(loss, rel=1e-5)
            assert worst(averaged, grads)[0] <= 1e-5


def test_a_weight_in_bfloat16_gets_its_gradient_as_exactly_as_without_chunks() -> None:
    """In 64 chunks, against float64 of the same hidden states, where zero.Init has replaced `F.linear`."""

    def errors(rank: int) -> tuple[float, float]:
        cp = ContextParallel(dist.group.WORLD, loss_chunk=8, ranks_per_node=1)
        model = prepare(build(Run(model=llama()), dtype=torch.bfloat16))
        hidden: list[torch.Tensor] = []
        model.model.register_forward_hook(lambda _, args, output: hidden.append(output.last_hidden_state.detach()))
        local = shard_batch(draw(1, rows=2, length=256)[0], cp)
        labels = local["shift_labels"]
        with mock.patch.object(torch.nn.functional, "linear", zero3_linear_wrap):
            model(**local, labels=labels, num_items_in_batch=1, use_cache=False).loss.backward()
        found = []
        for dtype in (torch.bfloat16, torch.float64):
            weight = model.lm_head.weight.detach().to(dtype).requires_grad_()
            logits = (hidden[0].to(dtype) @ weight.T).to(torch.promote_types(dtype, torch.float32))
            F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
            found.append(weight.grad.double())
        whole, exact = found
        chunked = model.lm_head.weight.grad.double()
        return tuple(float((each - exact).norm() / exact.norm()) for each in (chunked, whole))

    ((chunked, whole),) = run_ranks(errors, 1)
    assert 1e-4 < chunked <= 1.1 * whole


# --------------------------------------------------------------------------------------------------------- refusals


class _Biased(transformers.LlamaForCausalLM):
    @functools.wraps(transformers.LlamaForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        head = self.lm_head
        with mock.patch.dict(self._modules, {"lm_head": torch.nn.Sequential(head, _Changed(self.change))}):
            return super().forward(*args, **kwargs)


class _Changed(torch.nn.Module):
    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.change = change

    def forward(self, logits: Any) -> Any:
        return self.change(logits)


class _Adding(transformers.LlamaForCausalLM):
    @functools.wraps(transformers.LlamaForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss = output.loss + 0.1
        return output


class _Fused(transformers.LlamaForCausalLM):
    @functools.wraps(transformers.LlamaForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        super().forward(*args, **kwargs)
        return torch.nn.functional.linear(torch.ones(1, 32), self.lm_head.weight)


def _refused(rank: int) -> list[str]:
    cp = ContextParallel(dist.group.WORLD, loss_chunk=CHUNK, ranks_per_node=2)
    local = shard_batch(BATCH, cp)
    given = {**local, "labels": local["shift_labels"], "num_items_in_batch": 8}
    trained = torch.nn.Parameter(torch.tensor(2.0))
    cases: list[tuple[Any, dict[str, Any]]] = [
        (_Biased, {"change": change})
        for change in (lambda z: z[..., 1:], lambda z: z.softmax(-1), torch.relu, lambda z: z * trained)
    ]
    cases += [(_Adding, {}), (_Fused, {}), (transformers.LlamaForCausalLM, {"_loss_function": _another_loss})]
    messages = []
    for kind, attributes in cases:
        model = kind(llama())
        for name, value in attributes.items():
            model.__dict__[name] = value
        model, head = prepare(model.train()), model.lm_head
        try:
            model(**given, use_cache=False)
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
        assert model.lm_head is head, "a forward that failed puts it back"
        assert model.__dict__.get("_loss_function") is attributes.get("_loss_function")
    return messages


@pytest.mark.parametrize("name", ["llama", "tied", "lora", "modules_to_save"])
def test_a_forward_that_ctrl_c_has_interrupted_leaves_a_whole_model(name: str) -> None:
    """Programs save their model then, and may go on with it."""

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    cp = ContextParallel(loss_chunk=8)
    model = prepare(_model(name))
    before, local = model.state_dict(), shard_batch(BATCH, cp)
    arguments = {**local, "labels": local["shift_labels"], "num_items_in_batch": local["burst"].valid_tokens}
    hook = model.get_decoder().norm.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**arguments, use_cache=False)
    hook.remove()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert [each for each, _ in model.named_parameters()] == [each for each, _ in _model(name).named_parameters()]
    with torch.no_grad():
        assert model.eval()(BATCH["input_ids"]).logits.shape == (*BATCH["input_ids"].shape, VOCAB)
    hook = model.train().get_decoder().norm.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**arguments, use_cache=False)
    hook.remove()
    assert log_likelihood(model.eval(), BATCH["input_ids"], cp, context=1).total.shape == (2,)


def _another_loss(logits: Any, labels: Any, vocab_size: int, shift_labels: Any = None, **kwargs: Any) -> Any:
    return logits.sum()


def test_what_a_loss_in_chunks_cannot_do_is_refused() -> None:
    expected = [
        "_Biased: it does more with its logits than scale or cap them before the loss (indexing); leave loss_chunk",
        "before the loss (softmax); leave loss_chunk out",
        "before the loss (relu); leave loss_chunk out",
        "before the loss (mul of []); leave loss_chunk out",
        "not supported with _Adding: it adds to its loss",
        "not supported with _Fused: it reads the weight of its head itself, as the fused losses of Liger and TRL do",
        "its loss has been set to _another_loss; leave one of the two out",
    ]
    for found in run_ranks(_refused, 2):
        for message, part in zip(found, expected, strict=True):
            assert f"loss_chunk={CHUNK}" in message
            assert part in message


def _with_hooks(rank: int, kinds: list[str]) -> dict[str, tuple[str, float]]:
    """Of a model whose head has a hook: its error, or the largest difference of its gradients from whole logits."""
    found = {}
    for kind in kinds:
        results = []
        for chunk in (0, CHUNK):
            cp = ContextParallel(dist.group.WORLD, loss_chunk=chunk, ranks_per_node=1)
            model = prepare(_model("llama"))
            _HOOKS[kind](model.lm_head)
            local = shard_batch(BATCH, cp)
            try:
                model(**local, labels=local["shift_labels"], num_items_in_batch=8, use_cache=False).loss.backward()
            except ValueError as error:
                found[kind] = str(error), 0.0
                break
            whole = (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters())
            results.append(torch.cat([x.flatten() for x in whole]))
        else:
            found[kind] = "", float((results[0] - results[1]).abs().max() / results[0].abs().max())
    return found


def _fully_shard(head: torch.nn.Module) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(head, mesh=init_device_mesh("cpu", (1,)))


def _align_devices(head: torch.nn.Module) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    add_hook_to_module(head, AlignDevicesHook(execution_device="cpu"))


def _under_ddp(rank: int, options: dict[str, bool]) -> tuple[dict[str, torch.Tensor], int, list[str]]:
    """Return gradients, the most rows of logits at once, and errors of what is done with logits beside the loss."""
    cp = ContextParallel(dist.group.WORLD, loss_chunk=CHUNK, ranks_per_node=2)
    model = prepare(_model("llama"))
    ddp = torch.nn.parallel.DistributedDataParallel(model, **options)
    local = shard_batch(BATCH, cp)
    given = {**local, "labels": local["shift_labels"], "use_cache": False}
    given["num_items_in_batch"] = local["burst"].valid_tokens / dist.get_world_size()
    with LargestLogits(VOCAB, 32) as largest:
        ddp(**given).loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    whole = model.eval()(**local, use_cache=False).logits.detach()
    model.train()
    errors = []
    for use in (_of_logits, _of_logits_in_place, _of_clones, _of_late_clones, _of_function):
        try:
            use(ddp(**given).logits, whole)
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))
    return grads, largest.rows, errors


def _of_logits(logits: torch.Tensor, whole: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(logits + 0, whole, rtol=1e-5, atol=1e-5)
    logits.float().square().mean().backward()


def _of_logits_in_place(logits: torch.Tensor, whole: torch.Tensor) -> None:
    with torch.no_grad():
        logits.mul_(2)
        torch.testing.assert_close(logits + 0, 2 * whole, rtol=1e-5, atol=1e-5)
    logits + 0


def _of_clones(logits: torch.Tensor, whole: torch.Tensor) -> None:
    with torch.no_grad():
        clone = logits.clone()
        clone.mul_(2)
    torch.testing.assert_close(clone + 0, 2 * whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close((logits + 0).detach(), whole, rtol=1e-5, atol=1e-5)
    assert not clone.requires_grad


def _of_late_clones(logits: torch.Tensor, whole: torch.Tensor) -> None:
    with torch.no_grad():
        clone = logits.clone()
        logits.mul_(2)
    clone + 0


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


def _of_function(logits: torch.Tensor, whole: torch.Tensor) -> None:
    _Scale.apply(logits).sum().backward()


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_ddp_that_clones_outputs(options: dict[str, bool]) -> None:
    """Its clones are not computed either, and hide no change in place and no gradient that would be lost."""
    _, right = _reference("llama")
    refused, changed = "an autograd function, or a reentrant", "outputs.logits were changed in place"
    for grads, rows, errors in run_ranks(_under_ddp, 2, options):
        error, parameter = worst(grads, right)
        assert error <= 1e-5, parameter
        assert rows == CHUNK
        starts = ["", changed, "", changed, refused]
        assert [found[: len(start) or None] for found, start in zip(errors, starts, strict=True)] == starts


_HOOKS: dict[str, Callable[[Any], Any]] = {
    "forward": lambda head: head.register_forward_hook(lambda _, args, output: 0.5 * output),
    "forward_pre": lambda head: head.register_forward_pre_hook(functools.partial(lambda _, args: None)),
    "backward": lambda head: head.register_full_backward_hook(lambda _, to_inputs, of_outputs: None),
    "fsdp": _fully_shard,
    "accelerate": _align_devices,
}


def test_hooks_on_a_head_are_refused_but_for_those_that_gather_its_weight() -> None:
    (found,) = run_ranks(_with_hooks, 1, [*_HOOKS])
    for kind in ("forward", "forward_pre", "backward"):
        assert f"loss_chunk={CHUNK}" in found[kind][0]
        assert f"its head has hooks, which would get losses in place of logits ({kind} hook tests." in found[kind][0]
    for kind in ("fsdp", "accelerate"):
        message, error = found[kind]
        assert message == ""
        assert error <= 1e-5
