"""Which of transformers' models can run on a ring: all whose tokens meet in attention only, as far as it is known."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from transformers import PreTrainedModel

from burst_plugin.huggingface.attention import NAME, register_attention

__all__ = ["problems", "use_burst"]

_LAYER_TYPES = ("full_attention", "sliding_attention")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_LOSS = "ForCausalLM"


def use_burst(model: torch.nn.Module) -> None:
    """Switch a model, perhaps wrapped, to `attn_implementation="burst"`."""
    register_attention()
    pretrained = _pretrained(model)
    if pretrained.config._attn_implementation != NAME:
        pretrained.set_attn_implementation(NAME)


def problems(model: torch.nn.Module) -> list[str]:
    """What in a model cannot be computed on shards of its sequences, each with a reason."""
    pretrained = _pretrained(model)
    found = [*_problems_of_config(pretrained.config), *_problems_of_code(pretrained)]
    if any(getattr(peft, "is_prompt_learning", False) for peft in _peft_configs(model)):
        found.append("PEFT prompt learning puts tokens before each rank's shard; use LoRA")
    return [f"{type(pretrained).__name__} cannot run on a ring: {reason}" for reason in found]


def _problems_of_code(pretrained: PreTrainedModel) -> list[str]:
    """What a model computes otherwise than on whole sequences."""
    name, found = type(pretrained).__name__, []
    head = re.search(r"For[A-Z]\w*$", name)  # as transformers finds losses; without one: a body, or an LMHead
    if head and head[0] != _LOSS:
        found.append(
            f"its loss is that of {head[0]}, but labels are shifted by one token as {_LOSS} has them; train a causal "
            "language model, or its body without a head on a loss of your own"
        )
    if not pretrained._can_set_attn_implementation():
        found.append(
            "its attention does not go through transformers' AttentionInterface; call burst_plugin.burst_attention "
            "there"
        )
    if getattr(pretrained, "_is_stateful", False):
        found.append("it carries a state along the sequence; use a model of attention layers only")
    parameters = inspect.signature(type(pretrained).forward).parameters
    if "position_ids" not in parameters or any(map(_counts_positions, pretrained.modules())):
        found.append(
            "it counts positions by itself, on every shard from the start or by padding; use a model that takes "
            "position_ids as they are"
        )
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        found.append("its forward takes no further keyword arguments; add **kwargs and hand them to its layers")
    return found


def _problems_of_config(config: Any) -> list[str]:
    """What a model is configured for."""
    text, found = config.get_text_config(), []
    if config.is_encoder_decoder:
        found.append("it is an encoder-decoder; use a decoder alone")
    others = [key for key in config.sub_configs if getattr(config, key, None) not in (None, text)]
    if others:
        found.append(f"it has parts besides the language model: {', '.join(others)}; train that by itself")
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - set(_LAYER_TYPES))
    if kinds:
        found.append(f"it has layers of type {', '.join(kinds)}; known are {', '.join(_LAYER_TYPES)}")
    if getattr(text, "use_bidirectional_attention", None):
        found.append("use_bidirectional_attention is set; leave it out")
    if getattr(text, "output_router_logits", False):
        found.append(
            "output_router_logits adds a loss that is not a sum over tokens; set it to False, in TRL by "
            "router_aux_loss_coef=0.0"
        )
    rope = _rope_types(text) & set(_LENGTH_DEPENDENT_ROPE)
    if rope:
        kinds_of_rope = ", ".join(sorted(rope))
        found.append(
            f"its rotary embedding ({kinds_of_rope}) depends on the longest position of each rank; use another "
            "rope_type, such as linear, yarn or llama3"
        )
    return found


def _counts_positions(module: torch.nn.Module) -> bool:
    """From the padding index on, as RoBERTa's embeddings; or where padding ends, as OPT's."""
    if hasattr(module, "create_position_ids_from_input_ids"):
        return True
    by_mask = "attention_mask" in inspect.signature(type(module).forward).parameters
    return by_mask and type(module).__name__.endswith("PositionalEmbedding")


def _pretrained(model: torch.nn.Module) -> Any:
    """The outermost of transformers' models in a model."""
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def _rope_types(config: Any) -> set[str]:
    """The kinds of rotary embedding in a configuration, of all its layer types."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return {str(each.get("rope_type", each.get("type", "default"))) for each in nested}


def _peft_configs(model: torch.nn.Module) -> list[Any]:
    configs = getattr(model, "peft_config", None)
    return list(configs.values()) if isinstance(configs, dict) else []
