"""What Megatron's inference on a ring cannot honour: refused by name, before ranks send anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.utils import get_model_config

from burst_plugin.frameworks.options import Rule, off, one_of
from burst_plugin.frameworks.wrapping import bind
from burst_plugin.megatron.flags.arguments import option_of, unsupported
from burst_plugin.megatron.flags.config import asks_for_burst, is_hybrid
from burst_plugin.megatron.layers.core_attention import BurstCoreAttention
from burst_plugin.megatron.recurrent.mixers import is_on_ring

_STATIC = "use StaticInferenceContext, which StaticInferenceEngine(legacy=True) takes"
# Arguments of GPTModel.forward that inference needs; any other one has to be None.
_ARGUMENTS = frozenset(
    "self input_ids position_ids attention_mask inference_context inference_params runtime_gather_output".split()  # noqa: SIM905
)

# Fields of TransformerConfig that training may have, and inference may not.
REFUSED_IN_INFERENCE: Mapping[str, Rule] = MappingProxyType(
    {
        "sequence_parallel": Rule(off, "Megatron's static inference has it in experts only; switch it off"),
        "expert_model_parallel_size": Rule(
            lambda size: size in (None, 1), "ranks have unequal numbers of a prompt's tokens; use 1"
        ),
        "moe_expert_capacity_factor": Rule(off, "it drops tokens by how many a rank has; use None"),
        "mtp_num_layers": Rule(off, "tokens are predicted one by one; leave these layers out"),
        "fp8": Rule(off, "its layers want numbers of tokens that divide; use bf16"),
        "fp4": Rule(off, "its layers want numbers of tokens that divide; use bf16"),
        "virtual_pipeline_model_parallel_size": Rule(one_of(None), "Megatron's inference has none; use None"),
    }
)


def refuse_in_layer(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ValueError if a layer on the ring is called with an inference context: a forward pre-hook.

    Such a layer would keep keys and values itself, and see the tokens of one rank only. `args` and `kwargs` are the
    arguments of the layer's forward.
    """
    if kwargs.get("inference_context") is not None or kwargs.get("inference_params") is not None:
        raise ValueError(
            f"inference with context_parallel_size={layer.config.context_parallel_size} and cp_comm_type='burst' is "
            "for GPTModel, which gives its layers no inference_context; use context_parallel_size=1 for other models"
        )


def core_attentions(model: Any) -> list[BurstCoreAttention]:
    """Return the core attention of each layer of a model that has attention, in the order of `model.decoder.layers`.

    Raises ValueError for a layer that is not on the ring or carries a state, and for a model without any attention.
    """
    cores = []
    for layer in model.decoder.layers:
        core = getattr(layer.self_attention, "core_attention", None)
        if isinstance(core, BurstCoreAttention):
            cores.append(core)
        elif is_on_ring(layer.self_attention):
            raise ValueError(
                f"{type(layer.self_attention).__name__} of layer {layer.layer_number} carries a state, which "
                f"inference with context_parallel_size={model.config.context_parallel_size} does not keep: use 1"
            )
        elif not isinstance(layer.self_attention, IdentityOp):
            raise ValueError(
                f"layer {layer.layer_number} is not on the ring, as inference with context_parallel_size="
                f"{model.config.context_parallel_size} needs it: use cp_comm_type='burst' in all layers"
            )
    if not cores:
        raise ValueError("a pipeline stage without attention has nothing to keep on a ring: give it a layer")
    return cores


def refuse_dynamic(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a `DynamicInferenceContext`, or raise ValueError for a model on the ring; a wrapper of `original`.

    Megatron's engines catch the error, and go on with a static context. original: the constructor, until 0.17
    `from_config`, which is called with the other arguments, and whose result is returned.
    """
    arguments = bind(original, *args, **kwargs).arguments
    config, model = arguments.get("model_config"), arguments.get("model")
    config = get_model_config(model) if config is None and model is not None else config
    if config is not None and asks_for_burst(config):
        raise ValueError(
            f"DynamicInferenceContext with context_parallel_size={config.context_parallel_size} and "
            f"cp_comm_type='burst' is not supported: {_STATIC}"
        )
    return original(*args, **kwargs)


def refuse_hybrid(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a hybrid model, or raise ValueError if it has an inference context on a ring; a wrapper of `original`.

    The ring keeps no states of mixers for inference. original: the model's forward, whose result is returned.
    """
    arguments = bind(original, model, *args, **kwargs).arguments
    contexts = [arguments.get("inference_context"), arguments.get("inference_params")]
    if contexts != [None, None] and asks_for_burst(model.config):
        raise ValueError(
            f"inference with context_parallel_size={model.config.context_parallel_size} and cp_comm_type='burst' is "
            f"for GPTModel: layers of {type(model).__name__} carry states, which it does not keep; use "
            "context_parallel_size=1"
        )
    return original(model, *args, **kwargs)


def check_inference(model: Any, context: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError naming everything that inference on a ring cannot honour, each with what to write instead.

    Args:
        model: the `GPTModel`, which must be in evaluation mode.
        context: its inference context, which must be a `StaticInferenceContext` with room for the new tokens.
        arguments: the arguments of its forward by name; `attention_mask` must be None or causal.
    """
    config = model.config
    reasons = []
    if not isinstance(context, StaticInferenceContext):
        reasons.append(f"{type(context).__name__} is not supported: {_STATIC}")
    if model.training:
        reasons.append("the model is in training mode: call model.eval()")
    reasons += unsupported(REFUSED_IN_INFERENCE, config)
    if is_hybrid(config):
        hybrid, size = option_of("hybrid_context_parallel"), option_of("context_parallel_size")
        reasons.append(f"{hybrid} is not supported: use {size}")
    if config.multi_latent_attention and config.apply_rope_fusion:
        reasons.append("apply_rope_fusion with multi-latent attention is not supported: use --no-rope-fusion")
    if model.position_embedding_type == "mrope":
        kind = option_of("position_embedding_type", "mrope")
        reasons.append(f"{kind} is not supported: use {option_of('context_parallel_size', 1)}")
    reasons += [
        f"{name} is not supported: leave it out"
        for name, value in arguments.items()
        if name not in _ARGUMENTS and value is not None
    ]
    if not reasons:
        reasons = _tokens_that_do_not_fit(context, arguments)
    if reasons:
        raise ValueError(
            f"inference with context_parallel_size={config.context_parallel_size} and cp_comm_type='burst' cannot go "
            "on: " + "; ".join(reasons)
        )


def _tokens_that_do_not_fit(context: Any, arguments: Mapping[str, Any]) -> list[str]:
    """Return why new tokens do not fit: the context has no room for them, or their mask is not causal."""
    rows, length = arguments["input_ids"].shape
    start, reasons = context.sequence_len_offset, []
    if start + length > context.max_sequence_length:
        reasons.append(
            f"{start} tokens and {length} new ones are more than max_sequence_length={context.max_sequence_length} "
            "of the inference context: make it larger"
        )
    if rows > context.max_batch_size:
        reasons.append(
            f"{rows} batch rows are more than max_batch_size={context.max_batch_size} of the inference context: make "
            "it larger"
        )
    if context.batch_size_offset:
        reasons.append(
            f"batch_size_offset={context.batch_size_offset} is not supported: give the model all rows at once"
        )
    mask = arguments.get("attention_mask")
    if mask is not None:
        keys = torch.arange(mask.shape[-1], device=mask.device)
        causal = keys > torch.arange(start, start + mask.shape[-2], device=mask.device).unsqueeze(1)
        if not bool((mask.bool() == causal).all()):
            reasons.append(f"attention_mask {list(mask.shape)} is not causal: leave it out; pad rows at their ends")
    return reasons
