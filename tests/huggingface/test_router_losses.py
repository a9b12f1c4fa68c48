"""Router losses of experts on a ring against those of the whole batch on one rank, without the plugin."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from burst_plugin import ContextParallel
from burst_plugin.batch import IGNORED_LABEL, shard_batch
from burst_plugin.huggingface import prepare, router_losses
from burst_plugin.huggingface.models import problems
from tests.support.deepspeed_run import Batch, Run, build, draw, worst
from tests.support.families import shape
from tests.support.ranks import last_lines, run_ranks
from tests.support.ring_steps import grads_of
from tests.support.wrappers import tiny_wrapper

pytestmark = pytest.mark.huggingface

_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_PLAIN = {"experts_implementation": "eager", "router_aux_loss_coef": 0.5, "output_router_logits": True}
FAMILIES = {
    "mixtral": transformers.MixtralConfig,
    "qwen2_moe": transformers.Qwen2MoeConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "olmoe": transformers.OlmoeConfig,
    "gpt_oss": transformers.GptOssConfig,
    "granitemoe": transformers.GraniteMoeConfig,
    "granitemoeshared": transformers.GraniteMoeSharedConfig,
    "ernie4_5_moe": transformers.Ernie4_5_MoeConfig,
    "flex_olmo": transformers.FlexOlmoConfig,
    "minimax_m2": transformers.MiniMaxM2Config,
    "jetmoe": transformers.JetMoeConfig,  # which does not checkpoint
}


def config(name: str, **changes: Any) -> Any:
    special = {"jetmoe": {"num_key_value_heads": 2, "kv_channels": 8, "aux_loss_coef": 0.5}}.get(name, {})
    return FAMILIES[name](**{**shape(), **_EXPERTS, **_PLAIN, "head_dim": 8, **special, **changes})


def uneven() -> Batch:
    """Return a batch padded on the left, of 31 tokens, with labels near its beginning only: some ranks have none."""
    batch = draw(1, rows=2, length=31)[0]
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, :5] = 0
    batch["labels"][0, :6] = batch["labels"][:, 9:] = IGNORED_LABEL
    return batch


BATCHES = {"plain": draw(1, rows=2, length=32)[0], "uneven": uneven()}


def on_one_rank(name: str, batch: Batch) -> dict[str, torch.Tensor]:
    """Return gradients by parameter, and losses, without the plugin."""
    model = build(Run(model=config(name)), attention="eager").train()
    output = model(**batch, use_cache=False)
    output.loss.backward()
    return {"loss": output.loss.detach(), "aux_loss": output.aux_loss.detach()} | grads_of(model)


def on_ring(rank: int, names: list[str], options: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=dist.get_world_size(), **options)
    found = {}
    for name in names:
        for kind, batch in BATCHES.items():
            model = build(Run(model=config(name), checkpointing=name != "jetmoe"))
            prepare(model, averages_gradients=True)
            local = shard_batch(batch, cp)
            tokens = local["burst"].valid_tokens / cp.ranks
            output = model(**local, labels=local["shift_labels"], num_items_in_batch=tokens, use_cache=False)
            output.loss.backward()
            values = {"loss": output.loss.detach(), "aux_loss": output.aux_loss.detach()} | grads_of(model)
            for each in values.values():
                dist.all_reduce(each)
                each /= cp.ranks
            found[f"{name} {kind}"] = values
    return found


@pytest.mark.parametrize(
    ("ranks", "names", "options"),
    [
        (1, ["mixtral"], {}),
        (2, sorted(FAMILIES), {}),
        (2, ["mixtral"], {"loss_chunk": 8}),
        (4, ["qwen3_moe", "gpt_oss"], {}),
    ],
)
def test_losses_and_gradients_are_those_of_one_rank(ranks: int, names: list[str], options: dict[str, Any]) -> None:
    found = run_ranks(on_ring, ranks, names, options, timeout_s=120.0)[0]
    for name in names:
        for kind, batch in BATCHES.items():
            error, where = worst(found[f"{name} {kind}"], on_one_rank(name, batch))
            assert error < 1e-5, (name, kind, where)


def replaced_after_prepare(rank: int) -> dict[str, torch.Tensor]:
    """Gradients of a model whose file has its own function again, as in a process that has unpickled the model."""
    model = prepare(build(Run(model=config("mixtral"))), averages_gradients=True)
    home = sys.modules[type(model).__module__]
    home.load_balancing_loss_func = inspect.unwrap(home.load_balancing_loss_func)  # type: ignore[attr-defined]
    local = shard_batch(BATCHES["plain"], ContextParallel(dist.group.WORLD))
    tokens = local["burst"].valid_tokens / 2
    model(**local, labels=local["shift_labels"], num_items_in_batch=tokens, use_cache=False).loss.backward()
    found = grads_of(model)
    for each in found.values():
        dist.all_reduce(each)
        each /= 2
    return found


def test_a_function_that_is_put_back_after_prepare_is_replaced_again() -> None:
    truth = {name: x for name, x in on_one_rank("mixtral", BATCHES["plain"]).items() if "loss" not in name}
    error, where = worst(run_ranks(replaced_after_prepare, 2)[0], truth)
    assert error < 1e-5, where


def on_text_alone(rank: int, ring: bool) -> dict[str, torch.Tensor]:
    """Gradients of a model with a vision tower, whose forward is asked for its router's loss, as TRL does."""
    model, batch = tiny_wrapper("qwen3_vl_moe"), dict(BATCHES["uneven"])
    model.config.text_config.router_aux_loss_coef = 0.5
    if ring:
        batch = shard_batch(batch, ContextParallel(dist.group.WORLD))
        batch |= {"labels": batch["shift_labels"], "num_items_in_batch": batch["burst"].valid_tokens / 2}
        prepare(model, averages_gradients=True)
    model(**batch, output_router_logits=True, use_cache=False).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if ring:
        for grad in found.values():
            dist.all_reduce(grad)
            grad /= 2
    return found


def test_of_a_model_that_also_takes_images() -> None:
    error, where = worst(run_ranks(on_text_alone, 2, True)[0], on_text_alone(0, False))
    assert error < 1e-5, where


def test_sums_are_exact_under_autocast() -> None:
    """A product of matrices in bfloat16 would round even the number of tokens."""
    logits = torch.randn(4096, 64)
    real = (torch.rand(1, 4096) < 0.9).float()
    expected = router_losses.router_sums((logits,), 64, 2, real)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(router_losses.router_sums((logits,), 64, 2, real), expected)


@pytest.mark.parametrize("shares", [False, True], ids=["router loss", "shared keys and values"])
def test_reentrant_checkpoints_that_lose_gradients_are_refused(shares: bool) -> None:
    """They lose them in transformers as well, without a ring."""
    model = prepare(build(Run(model=config("mixtral", output_router_logits=not shares))), averages_gradients=True)
    model.config.num_kv_shared_layers = int(shares)
    batch = shard_batch(BATCHES["uneven"], ContextParallel())
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    lost = "keys and values of other layers" if shares else "router logits"
    with pytest.raises(ValueError, match=f"use_reentrant=True, which gives no gradient to {lost}") as refused:
        model(**batch)
    assert "to model.gradient_checkpointing_enable, or to TrainingArguments" in str(refused.value)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model(**batch)


_KEPT = [0, slice(0, None), 2, slice(-1, None), torch.arange(2)]


def _keeping(rank: int) -> list[str]:
    """What is said, if anything, of forwards for the logits of all or some tokens: by name, then by position."""
    model = prepare(build(Run(model=config("mixtral", output_router_logits=False))))
    batch = shard_batch({"input_ids": BATCHES["plain"]["input_ids"]}, ContextParallel(dist.group.WORLD))
    names = list(inspect.signature(model.forward).parameters)
    before = [batch.pop(name, None) for name in names[: names.index("logits_to_keep")]]
    by_name = dict(zip(names, before, strict=False))
    calls: list[Any] = [partial(model, **by_name, **batch, logits_to_keep=kept) for kept in _KEPT]
    texts = []
    for call in [*calls, partial(model, *before, 2, **batch)]:
        try:
            call()
            texts.append("")
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_logits_of_the_last_tokens_of_a_shard_are_refused() -> None:
    for found in run_ranks(_keeping, 2):
        assert found[:2] == ["", ""]
        for text in found[2:]:
            assert "got logits_to_keep with a shard, of which every rank would keep its own" in text
            assert 'out of batch["burst"].unshard(logits)' in text


def test_logits_of_the_last_tokens_are_those_of_the_text_on_a_ring_of_one_rank() -> None:
    model = prepare(build(Run(model=config("mixtral", output_router_logits=False)))).eval()
    batch = shard_batch({"input_ids": BATCHES["plain"]["input_ids"][:, :13]}, ContextParallel())
    expected = model(**batch).logits[:, -2:]
    torch.testing.assert_close(model(**batch, logits_to_keep=2).logits, expected, atol=1e-6, rtol=0)


def unknown_loss(gate_logits: Any, num_experts: int, top_k: int, attention_mask: Any = None) -> torch.Tensor:
    """Stand for the function of another model, of the same name."""
    return torch.stack(gate_logits).square().mean()


def test_what_is_no_load_balancing_loss_of_whole_rings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(Run(model=config("mixtral")))
    assert problems(model) == []
    (reason,) = problems(model, averages_gradients=False)
    assert "say so by burst_plugin.huggingface.prepare(model, averages_gradients=True)" in reason
    monkeypatch.setattr(sys.modules[type(model).__module__], "load_balancing_loss_func", unknown_loss)
    (reason,) = problems(model)
    assert "adds a loss to it that is not the load-balancing loss of Mixtral; leave output_router_logits" in reason


@pytest.mark.parametrize("name", ["Llama4", "Afmoe"])
def test_a_model_that_adds_no_router_loss_is_not_said_to_add_one(name: str) -> None:
    """TRL might make a loss of the router logits that it returns."""
    kind = getattr(transformers, f"{name}ForCausalLM")
    with torch.device("meta"):
        model = kind(kind.config_class(**shape(), output_router_logits=True))
    reasons = [each for each in problems(model) if "output_router_logits" in each]
    assert reasons
    assert all(
        "output_router_logits is set, but its code has no load_balancing_loss_func" in each for each in reasons
    )


def asked_late(rank: int) -> None:
    model = prepare(build(Run(model=config("mixtral", output_router_logits=False))))
    local = shard_batch(BATCHES["plain"], ContextParallel(dist.group.WORLD))
    del local["shift_labels"]
    model(**local)
    model(**local, output_router_logits=True)


def test_a_router_loss_that_is_asked_for_in_a_forward_is_refused_too() -> None:
    for line in last_lines(asked_late, 2):
        assert line.startswith("ValueError: MixtralForCausalLM cannot run on a ring: output_router_logits adds"), line
