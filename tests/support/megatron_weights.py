"""Weights of models of transformers, put into Megatron's GPTModel by name, none left out on either side."""

from __future__ import annotations

from typing import Any

import torch

_PLAIN = {
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.o_proj.bias": "self_attention.linear_proj.bias",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "self_attn.sinks": "self_attention.core_attention.softmax_offset",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
    "mlp.down_proj.bias": "mlp.linear_fc2.bias",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.bias",
    "mlp.shared_expert.down_proj.weight": "mlp.shared_experts.linear_fc2.weight",
    "mlp.shared_expert_gate.weight": "mlp.shared_experts.gate_weight",
}


def copy_weights(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Copy every weight of a model of transformers into Megatron's, made for the same config.json.

    Raises AssertionError where one of the models has a weight that the other has not.
    """
    config: Any = source.config
    weights = {name: parameter.detach() for name, parameter in source.named_parameters()}
    found = {"embedding.word_embeddings.weight": weights.pop("model.embed_tokens.weight")}
    found["decoder.final_layernorm.weight"] = weights.pop("model.norm.weight")
    if "lm_head.weight" in weights:
        found["output_layer.weight"] = weights.pop("lm_head.weight")
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): weights.pop(name) for name in list(weights) if name.startswith(prefix)}
        for name, weight in _layer(own, config).items():
            found[f"decoder.layers.{layer}.{name}"] = weight
    assert not weights
    parameters = dict(target.named_parameters())
    assert set(parameters) == set(found)
    with torch.no_grad():
        for name, parameter in parameters.items():
            rows = found[name].shape[0]  # Megatron may pad a vocabulary
            assert parameter.shape[1:] == found[name].shape[1:]
            assert parameter.shape[0] >= rows
            parameter[:rows].copy_(found[name])


def _layer(own: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    found = {_PLAIN[name]: own.pop(name) for name in list(own) if name in _PLAIN}
    for kind in ("weight", "bias"):
        names = [f"self_attn.{letter}_proj.{kind}" for letter in "qkv"]
        if names[0] in own:
            groups = config.num_key_value_heads
            parts = [own.pop(name).unflatten(0, (groups, -1)) for name in names]
            found[f"self_attention.linear_qkv.{kind}"] = torch.cat(parts, 1).flatten(0, 1)
        for here, there in (("mlp", "mlp"), ("mlp.shared_expert", "mlp.shared_experts")):
            names = [f"{here}.{half}_proj.{kind}" for half in ("gate", "up")]
            if names[0] in own:
                found[f"{there}.linear_fc1.{kind}"] = torch.cat([own.pop(name) for name in names])
    for name in [name for name in own if name.startswith("mlp.experts.")]:
        stacked = own.pop(name)
        if config.model_type == "gpt_oss" and "gate_up" in name:  # gates and ups take turns, in the last dimension
            stacked = torch.cat([stacked[..., ::2], stacked[..., 1::2]], -1)
        if config.model_type == "gpt_oss" and stacked.ndim == 3:
            stacked = stacked.transpose(1, 2)
        layer, kind = ("fc1" if "gate_up" in name else "fc2"), ("bias" if name.endswith("bias") else "weight")
        for expert, weight in enumerate(stacked):
            found[f"mlp.experts.local_experts.{expert}.linear_{layer}.{kind}"] = weight
    assert not own
    return found
