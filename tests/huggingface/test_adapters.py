"""Adapters of PEFT on a ring, with each option that saves memory, against eager attention on one rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from burst_plugin import ContextParallel
from burst_plugin.batch import shard_batch
from burst_plugin.huggingface import prepare
from tests.support.deepspeed_run import Run, build, draw, llama, worst
from tests.support.ranks import run_ranks

peft = pytest.importorskip("peft", reason="peft is not installed")

pytestmark = pytest.mark.huggingface

BATCH = draw(1, rows=2, length=32)[0]
_ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
KINDS: dict[str, Callable[[], Any]] = {
    "dora": lambda: peft.LoraConfig(r=2, target_modules=_ALL, use_dora=True, init_lora_weights=False),
    "ia3": lambda: peft.IA3Config(
        target_modules=["q_proj", "k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "replicated dora": lambda: peft.LoraConfig(
        r=2, target_modules=["q_proj"], use_dora=True, init_lora_weights=False, layer_replication=[(0, 2), (0, 2)]
    ),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"keep_attention": "all"},
    {"keep_attention": 0.5, "offload": True},
    {"mlp_chunk": 5},
    {"loss_chunk": 8},
    {"head_chunk": 2},
    {"head_chunk": 2, "mlp_chunk": 5, "loss_chunk": 8, "keep_attention": "all", "offload": True},
]


def adapted(kind: str, *, checkpoints: bool = False) -> Any:
    """Return a model whose adapters are far from doing nothing, and whose weights they alone train."""
    base = build(Run(model=llama(attention_bias=True), checkpointing=checkpoints))
    torch.manual_seed(1)
    model = peft.get_peft_model(base, KINDS[kind]()).train()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "ia3" in name or "magnitude" in name:
                x.mul_(1 + 0.3 * torch.rand_like(x))
    if checkpoints:
        model.enable_input_require_grads()
    return model


def grads(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def on_ring(rank: int, kind: str) -> list[dict[str, torch.Tensor]]:
    found = []
    for options in OPTIONS:
        cp = ContextParallel(dist.group.WORLD, **options)
        model = prepare(adapted(kind, checkpoints="keep_attention" in options))
        local = shard_batch(BATCH, cp)
        tokens = local["burst"].valid_tokens
        cached = {} if "head_chunk" in options else {"use_cache": False}  # the model's default, an empty cache
        model(**local, labels=local["shift_labels"], num_items_in_batch=tokens, **cached).loss.backward()
        found.append(grads(model))
        for grad in found[-1].values():
            dist.all_reduce(grad)
        cp.close()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_eager_on_one_rank(kind: str) -> None:
    model = adapted(kind)
    model(**BATCH, use_cache=False).loss.backward()
    truth = grads(model)
    assert len(truth) > 4
    assert all(x.any() for x in truth.values())
    for options, found in zip(OPTIONS, run_ranks(on_ring, 2, kind, timeout_s=120.0)[0], strict=True):
        error, name = worst(found, truth)
        assert error <= 1e-5, (options, name, error)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "alora": (lambda: peft.LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[5]), "PEFT's aLoRA looks"),
    "lily": (lambda: peft.LilyConfig(target_modules=["q_proj"]), "PEFT's Lily weighs"),
    "loha": (lambda: peft.LoHaConfig(target_modules=["q_proj"], module_dropout=0.1), "PEFT's module_dropout=0.1 of"),
    "lokr": (lambda: peft.LoKrConfig(target_modules=["q_proj"], rank_dropout=0.2), "PEFT's rank_dropout=0.2 of LoKr"),
    "oft": (
        lambda: peft.OFTConfig(target_modules=["q_proj"], module_dropout=0.1),
        "PEFT's module_dropout=0.1 of OFT",
    ),
    "boft": (lambda: peft.BOFTConfig(target_modules=["q_proj"], boft_dropout=0.1), "PEFT's boft_dropout=0.1 of"),
}


PLACES: dict[str, Callable[[Any], Any]] = {
    "model": lambda model: model,
    "body": lambda model: model.model,
    "layers": lambda model: model.model.layers,
    "layer": lambda model: model.model.layers[1],
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", REFUSED)
def test_adapters_added_after_prepare_are_examined_too(kind: str, place: str) -> None:
    make, message = REFUSED[kind]
    model, local = prepare(build(Run())), shard_batch(BATCH, ContextParallel())
    del local["shift_labels"]
    model(**local, use_cache=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parts of a model that have no configuration
        peft.get_peft_model(PLACES[place](model), make())
    for _ in range(2):
        with pytest.raises(ValueError, match=f"LlamaForCausalLM has adapters .* ring: {message}"):
            model(**local, use_cache=False)


@pytest.mark.parametrize("kind", ["AdaLoRA", "LLaMA-Adapter"])
def test_adapters_that_go_past_the_model_are_examined_in_its_body(kind: str) -> None:
    """They call the forward of the model that was prepared, without its hooks."""
    ada = {
        "r": 2,
        "target_r": 1,
        "init_r": 2,
        "total_step": 10,
        "tinit": 1,
        "tfinal": 1,
        "target_modules": ["q_proj"],
    }
    config = (
        peft.AdaLoraConfig(task_type="CAUSAL_LM", **ada)
        if kind == "AdaLoRA"
        else peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=2, adapter_layers=1)
    )
    model = peft.get_peft_model(prepare(build(Run(model=llama()))), config)
    with pytest.raises(ValueError, match=f"adapters that cannot run on a ring: PEFT's {kind} calls the model's forw"):
        model(**shard_batch(BATCH, ContextParallel()))
