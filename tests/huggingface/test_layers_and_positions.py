"""On a ring against eager attention on one rank: models deepened by copies of layers, and positions of mRoPE."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from burst_plugin import ContextParallel
from burst_plugin.batch import shard_batch
from burst_plugin.huggingface import prepare
from tests.support.deepspeed_run import VOCAB, Batch, Run, build, draw, llama, worst
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.huggingface

LENGTH = 16
IDS = draw(1, rows=2, length=LENGTH)[0]["input_ids"]
WEIGHTS = torch.rand(IDS.shape, generator=torch.Generator().manual_seed(3))
IMAGE = slice(4, 10)


def _with_copies() -> Any:
    """Return a model with a copy of each layer, as depth up-scaling makes one."""
    model = build(Run(model=llama()))
    layers = model.model.layers
    for number, layer in enumerate(copy.deepcopy([*layers]), len(layers)):
        layer.self_attn.layer_idx = number
        layers.append(layer)
    model.config.num_hidden_layers = len(layers)
    return model


def _with_replicated_layers() -> Any:
    """Return a model whose layers PEFT has copied."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=2, layer_replication=[(0, 2), (0, 2)], target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(build(Run(model=llama())), config)


def _text_tower(**rope: Any) -> Any:
    """Return a text model with rotary positions of three kinds: in time, height and width; trained with 8 of each."""
    config = transformers.Qwen3VLTextConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.15,
        max_position_embeddings=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2], **rope},
    )
    torch.manual_seed(0)
    return transformers.Qwen3VLTextModel._from_config(config, attn_implementation="eager").train()


def _mrope() -> torch.Tensor:
    """Return positions [3, B, S] of texts with an image of 2 x 3 patches."""
    positions = torch.arange(LENGTH).repeat(3, 2, 1)
    patches = torch.arange(6)
    for axis, offset in enumerate((torch.zeros_like(patches), patches // 3, patches % 3)):
        positions[axis, :, IMAGE] = 4 + offset
    positions[:, :, IMAGE.stop :] -= 3
    return positions


def _mrope_of_documents() -> torch.Tensor:
    """Return positions [4, B, S] of two documents in each row, those in the text first."""
    return torch.cat([torch.arange(LENGTH // 2).repeat(1, 2, 2), _mrope()])


def _mrope_and_text() -> torch.Tensor:
    """Return positions [4, B, S] with positions in the text first, which are larger than positions in the axes."""
    return torch.cat([torch.arange(LENGTH).repeat(1, 2, 1), _mrope()])


CASES: dict[str, tuple[Callable[[], Any], Batch]] = {
    "copies": (_with_copies, {"input_ids": IDS}),
    "peft": (_with_replicated_layers, {"input_ids": IDS}),
    "mrope": (_text_tower, {"input_ids": IDS, "position_ids": _mrope()}),
    "mrope_of_documents": (_text_tower, {"input_ids": IDS, "position_ids": _mrope_of_documents()}),
    "dynamic": (
        lambda: _text_tower(rope_type="dynamic", factor=8.0),
        {"input_ids": IDS, "position_ids": _mrope_and_text()},
    ),
}


def _grads(model: Any, batch: dict[str, Any], weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return gradients of a weighted sum over tokens of what a model returns."""
    output = model(**batch, use_cache=False)
    values = output.logits if hasattr(output, "logits") else output.last_hidden_state
    (values[..., ::2].square().sum(-1) * weights).sum().backward()  # a norm makes the sum over all of them 1
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _on_ring(rank: int) -> dict[str, dict[str, torch.Tensor]]:
    cp, outcomes = ContextParallel(dist.group.WORLD), {}
    for name, (make, batch) in CASES.items():
        model = prepare(make())
        local = shard_batch({**batch, "weights": WEIGHTS}, cp)
        outcomes[name] = _grads(model, local, local.pop("weights"))
        for grad in outcomes[name].values():
            dist.all_reduce(grad)
    return outcomes


def test_gradients_equal_eager_on_one_rank() -> None:
    [outcomes, _] = run_ranks(_on_ring, 2)
    for name, (make, batch) in CASES.items():
        error, parameter = worst(outcomes[name], _grads(make(), batch, WEIGHTS))
        assert error <= 1e-5, (name, parameter, error)
