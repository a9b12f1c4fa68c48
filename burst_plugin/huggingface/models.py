"""Find out whether a model of transformers can run on a ring, and switch it: its tokens may meet in known ways only.

A forward on a shard that would need more host memory than there is, for what its checkpoints offload, is refused.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from burst_plugin.batch import SHARD_KEY, SequenceShard, check_shard
from burst_plugin.frameworks.wrapping import by_name
from burst_plugin.huggingface.adapters import check_adapters, is_peft, problems_of_peft
from burst_plugin.huggingface.attention import ATTN_IMPLEMENTATION, EXAMINED, register_attention
from burst_plugin.huggingface.auto_memory import choose_kept
from burst_plugin.huggingface.cached_forward import watch_turns
from burst_plugin.huggingface.chunked_loss import begin_chunked_loss, end_chunked_loss, restore_head
from burst_plugin.huggingface.chunked_modules import chunk_modules
from burst_plugin.huggingface.compressors import layer_types_of_compressors, problems_of_compressors, use_compressors
from burst_plugin.huggingface.forward_checks import check_forward, warn_without_checkpoints
from burst_plugin.huggingface.generation import watch_generate
from burst_plugin.huggingface.image_groups import MAKES_MASKS
from burst_plugin.huggingface.indexers import layer_types_of_indexers, problems_of_indexers, use_indexers
from burst_plugin.huggingface.latents import use_latents
from burst_plugin.huggingface.mask_recipes import enter_forward, forward_in_progress, leave_forward
from burst_plugin.huggingface.media.absent import with_absent_media
from burst_plugin.huggingface.media.entries import check_entries
from burst_plugin.huggingface.media.features import use_media
from burst_plugin.huggingface.media.positions import with_media_positions
from burst_plugin.huggingface.offloaded_bytes import expect_on_host
from burst_plugin.huggingface.old_attention import adapt, old_attention, problems_of_old_attention
from burst_plugin.huggingface.own_losses import refuse_own_means, watch_own_loss
from burst_plugin.huggingface.positions import counts_unknown, watch_positions, with_positions
from burst_plugin.huggingface.recurrent import (
    LAYER_TYPES,
    begin,
    is_recurrent_alone,
    mixers,
    problems_of_mixers,
    use_recurrent,
    warn_of_mixing_around,
)
from burst_plugin.huggingface.relative_bias import problems_of_relative_bias, use_relative_bias
from burst_plugin.huggingface.ring_cache import ring_cache_of
from burst_plugin.huggingface.rotary import problem_of_rotary, use_longest_positions
from burst_plugin.huggingface.router_losses import (
    asks_for_router_loss,
    check_router_loss,
    problem_of_router_loss,
    use_router_losses,
)
from burst_plugin.huggingface.text_only import (
    check_media,
    leaves_attention_to_parts,
    other_parts,
    text_modules,
    text_part,
    watch_towers,
)
from burst_plugin.huggingface.walks import walking_once

_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
_LOSS = "ForCausalLM"
_LOSSES = (_LOSS, "ForConditionalGeneration")  # transformers has the same function for them
_OWN_LOSS = "its forward computes the loss of labels in its own way; leave them out, and compute one from its logits"
# Of a model in the middle of a forward: the calls before it, of attention and others, and whether it makes others.
_CALLS = "_burst_plugin_calls"
_ALONE = "_burst_plugin_alone"  # of a body: whether it was called outside of a model's forward last
_MIXING = {  # options with which ranks compute something other than one rank would
    "trigram_input": "joins neighbouring tokens, which another rank may have",
    "token_dropout": "scales embeddings by the masked share of each rank's shard",
    "layerdrop": "leaves out whole layers at random, and on every rank others",
    "decoder_layerdrop": "leaves out whole layers at random, and on every rank others",
}


def prepare_model(model: torch.nn.Module, averages_gradients: bool = False) -> None:
    """Put a model on the ring, so that it trains on sharded batches.

    Raises ValueError, before anything is changed, with all reasons why it cannot run there.

    averages_gradients: whether the training loop averages gradients over the ranks of the ring, rather than adding
        them.
    """
    reasons = problems(model, averages_gradients=averages_gradients)
    if reasons:
        raise ValueError("; ".join(reasons))
    warn_of_mixing_around(model)
    use_burst(model, averages_gradients)


def use_burst(model: torch.nn.Module, averages_gradients: bool = True) -> None:
    """Switch a model, perhaps wrapped, to `attn_implementation="burst"`, after `problems` has found none in it.

    Replaces functions of its classes and adds hooks to its modules. averages_gradients: whether the training loop
    averages gradients over the ranks of the ring, as DeepSpeed does, rather than adding them.
    """
    register_attention()
    refuse_own_means()
    for pretrained in _outermost(module_taking_batches(model), _is_pretrained):
        if adapt(pretrained) or is_recurrent_alone(pretrained):  # transformers would leave them as they are
            pretrained.config._attn_implementation = ATTN_IMPLEMENTATION
        if pretrained.config._attn_implementation != ATTN_IMPLEMENTATION:
            pretrained.set_attn_implementation(_implementations(pretrained.config))
        watch_generate(type(pretrained))
        _switch_copied_layers(pretrained)
        use_router_losses(pretrained, averages_gradients)
        use_longest_positions(pretrained)
        watch_positions(pretrained)
        use_recurrent(pretrained)
        use_latents(pretrained)
        use_indexers(pretrained)
        use_compressors(pretrained)
        use_relative_bias(pretrained)
        use_media(pretrained)
        _watch(pretrained)
        for number, module in enumerate(text_modules(pretrained)):
            setattr(module, EXAMINED, number)


def _implementations(config: Any) -> str | dict[str, str]:
    """Return the attention of a model: the ring, except for parts beside its language model, which keep their own."""
    text = text_part(config)
    return {"": ATTN_IMPLEMENTATION, text: ATTN_IMPLEMENTATION} if text else ATTN_IMPLEMENTATION


def _switch_copied_layers(pretrained: PreTrainedModel) -> None:
    """Switch layers with a configuration of their own, as copies of layers have, which transformers does not switch.

    PEFT's `layer_replication` and other ways to deepen a model copy a layer together with its configuration.
    """
    models = [module for module in pretrained.modules() if _is_pretrained(module)]
    fixed = [each for each in models if not (each._can_set_attn_implementation() or old_attention(each))]
    left_alone = {id(part) for model in fixed for part in model.modules()}
    for module in text_modules(pretrained):
        config = getattr(module, "config", None)
        if not isinstance(config, PreTrainedConfig) or id(module) in left_alone:
            continue
        if config._attn_implementation != ATTN_IMPLEMENTATION:
            config._attn_implementation = ATTN_IMPLEMENTATION


def _watch(pretrained: PreTrainedModel) -> None:
    """Add hooks that tell a model's masks its shard, and that refuse a forward with a shard but without the ring.

    The hook before a forward runs after the hooks that cut batches, however often a model gets another engine.
    """
    if _note_shard not in pretrained._forward_pre_hooks.values():
        watch_turns(pretrained)
        watch_towers(pretrained)
        pretrained.register_forward_pre_hook(_note_shard, with_kwargs=True)
        pretrained.register_forward_hook(_without_logits, prepend=True)  # before those that read what is returned
        pretrained.register_forward_hook(_check_calls, with_kwargs=True)
        watch_own_loss(pretrained)
        pretrained.register_forward_hook(_forget_shard, always_call=True)
        for body in text_modules(pretrained):
            if isinstance(body, PreTrainedModel) and body is not pretrained:
                _watch_body(pretrained, body)
    for key in [key for key, hook in pretrained._forward_pre_hooks.items() if hook is _note_shard]:
        pretrained._forward_pre_hooks.move_to_end(key)


def _watch_body(model: PreTrainedModel, body: PreTrainedModel) -> None:
    """Add hooks to a model inside of another one, which do what the other's do where it is not called itself."""
    watch_positions(body)
    body.register_forward_pre_hook(partial(_note_shard_of_body, model), with_kwargs=True)
    body.register_forward_hook(_check_calls, with_kwargs=True)
    body.register_forward_hook(_forget_shard, always_call=True)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _note_shard_of_body(model: Any, body: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Prepare a body's forward on a shard where it is called for a loss of one's own, or by `model.forward`."""
    shard, forward = kwargs.get(SHARD_KEY), forward_in_progress()
    if torch._C._current_graph_task_id() == -1:
        setattr(body, _ALONE, forward is None)
        if forward is None:
            check_shard(by_name(body.forward, args, kwargs))
    elif not getattr(body, _ALONE, False):  # computed again, with the arguments that the model gave it
        return None
    if shard is None or shard.as_given or (forward is not None and forward.shard is not None):
        return None
    check_adapters(model)
    if kwargs.get("output_router_logits"):
        raise ValueError(
            f"{type(model).__name__} was not called itself, but its forward or its {type(body).__name__}, for router "
            "logits of each rank's tokens; call the model itself, or leave output_router_logits out"
        )
    return _note_shard(body, args, kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
@walking_once()
def _note_shard(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Note the shard of a forward, and the number of attention calls before it; prepare for its strategy."""
    check_shard(kwargs)
    check_router_loss(model, kwargs)
    given_shard = shard = kwargs.get(SHARD_KEY)
    given_kwargs = kwargs
    if shard is not None:
        if not shard.as_given:
            check_forward(model, args, kwargs)
            check_adapters(model)
            check_media(model, args, kwargs)
            _check_labels(model, kwargs)
            check_entries(model, shard, kwargs)
            kwargs = with_media_positions(model, shard, begin(model, shard, kwargs))
            shard = kwargs[SHARD_KEY]
            kwargs = with_absent_media(model, shard, kwargs)
        shard = shard.of_forward() if model.training else shard
        choose_kept(model, shard, kwargs)
        chunk_modules(model, shard.cp.strategy, is_chosen="mlp_chunk" in shard.cp.chosen)
        warn_without_checkpoints(model, shard)
        expect_on_host(model, shard, kwargs)
    kwargs = with_positions(model, shard, args, kwargs)
    enter_forward(model, shard, kwargs.get("position_ids"), ring_cache_of(kwargs.values()))
    setattr(model, _CALLS, None if shard is None else (*_calls(shard), bool(mixers(model))))
    begin_chunked_loss(model, kwargs)
    return None if shard is given_shard and kwargs is given_kwargs else (args, {**kwargs, SHARD_KEY: shard})


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _without_logits(model: PreTrainedModel, args: tuple[Any, ...], output: Any) -> Any:
    """Return the output of a forward, without logits if its loss was computed in chunks."""
    return end_chunked_loss(model, output)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forget_shard(model: PreTrainedModel, args: tuple[Any, ...], output: Any) -> None:
    """Note the end of a forward, also of one that failed, even before it began."""
    restore_head(model)
    leave_forward(model)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _check_calls(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Raise ValueError after a forward on a shard without calls on the ring, of each kind that the model makes."""
    shard, forward = kwargs.get(SHARD_KEY), forward_in_progress()
    if shard is None or shard.as_given or forward is None or forward.model is not model:  # a body in its model
        return
    (attended, carried), (attended_before, carried_before, has_states) = _calls(shard), getattr(model, _CALLS)
    if attended == attended_before and not is_recurrent_alone(model):
        raise ValueError(
            f"{type(model).__name__} got a sharded batch and has computed a forward without the ring, so that ranks "
            "attended to their own tokens only: its layers pass on to attention neither their keyword arguments nor "
            "the mask (which is enough unless torch.compile is used); have them pass on the keyword arguments"
        )
    if carried == carried_before and has_states:
        raise ValueError(
            f"{type(model).__name__} got a sharded batch and has carried no state from rank to rank: something has "
            "replaced the functions that its layers call; call burst_plugin.huggingface.prepare after that"
        )


def _calls(shard: SequenceShard) -> tuple[int, int]:
    """Return how many calls of attention, and of layers that carry a state, there have been on a shard's ring."""
    return shard.cp.rank_state.calls_made, shard.cp.rank_state.state_calls


def module_taking_batches(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that takes a sharded batch: the model of transformers or PEFT inside a user's module.

    That is `model` itself, also compiled, unless it is a user's module. If the user's module computes with whole
    labels itself, shapes do not match and it fails, rather than computing a wrong loss.
    """
    original = getattr(model, "_orig_mod", model)  # torch.compile's
    if _is_pretrained(original) or is_peft(original):
        return model
    outermost: torch.nn.Module = _outermost(model, lambda module: _is_pretrained(module) or is_peft(module))[0]
    return outermost


@walking_once()
def problems(
    model: torch.nn.Module,
    *,
    is_whole: bool = False,
    is_own_mean: bool = False,
    averages_gradients: bool = True,
    apart: torch.nn.Module | None = None,
) -> list[str]:
    """Return the reasons why a model cannot be computed on shards of its sequences; empty if it can.

    Args:
        model: a model of transformers, perhaps wrapped.
        is_whole: whether the ring has one rank, so that batches stay whole. Then only masks and the loss of labels
            are examined.
        is_own_mean: whether the loss is each rank's own mean over labels, as the model has it. With `is_whole`, any
            loss will do then.
        averages_gradients: whether gradients are averaged over ranks, as DeepSpeed does, rather than added.
        apart: a model inside `model` that is not examined, since its head gets whole sequences, and only its body
            gets shards; None for none.
    """
    outermost = _outermost(model, _is_pretrained)
    if not outermost:
        return [f"{type(model).__name__} has no model of transformers; call burst_plugin.burst_attention in it"]
    if len(outermost) > 1 and not is_whole:
        names = ", ".join(type(module).__name__ for module in outermost)
        return [
            f"{type(model).__name__} has {len(outermost)} models of transformers, {names}, but only one can "
            "run on a ring; pass that one"
        ]
    makes_masks = any(module.config.model_type in MAKES_MASKS for module in outermost)
    by_reason: dict[str, str] = {}  # by reason, since a model and its body have most in common
    for pretrained in text_modules(module_taking_batches(model) if is_whole else model):
        if isinstance(pretrained, PreTrainedModel) and pretrained is not apart:
            reasons = [*_problems_of_labels(pretrained, is_whole, is_own_mean), *_problems_of_masks(pretrained)]
            if not is_whole:
                reasons = [
                    *_problems_of_config(pretrained.config, makes_masks, _known_kinds(pretrained)),
                    *reasons,
                    *_problems_of_code(pretrained),
                ]
                reasons.append(problem_of_rotary(pretrained))
                if asks_for_router_loss(pretrained, {}):
                    reasons.append(problem_of_router_loss(pretrained, averages_gradients))
            for reason in filter(None, reasons):
                by_reason.setdefault(reason, f"{type(pretrained).__name__} cannot run on a ring: {reason}")
    return [*by_reason.values(), *([] if is_whole else problems_of_peft(model))]


def _problems_of_labels(pretrained: PreTrainedModel, is_whole: bool, is_own_mean: bool) -> list[str]:
    """Return why a model cannot take labels that are shifted already, or counted as if to be shifted."""
    name, reasons = type(pretrained).__name__, []
    if pretrained.config.is_encoder_decoder:
        reasons.append("it is an encoder-decoder; use a decoder alone")
    if is_whole and is_own_mean:
        return reasons
    head = re.search(r"For[A-Z]\w*$", name)  # as transformers finds losses; without one: a body, or an LMHead
    if head and head[0] not in _LOSSES:
        reasons.append(
            f"its loss is that of {head[0]}, but labels are {'counted' if is_whole else 'shifted by one token'} as "
            f"{_LOSS} has them; train a causal language model, or its body without a head on a loss of your own"
        )
    elif head and is_whole and has_own_loss(pretrained):
        reasons.append(_OWN_LOSS)
    elif not is_whole and not _takes_shifted_labels(pretrained):
        asked = getattr(pretrained, "_loss_function", None) or pretrained.loss_type
        reasons.append(
            f"its loss has been set to {asked!r}, which takes no shift_labels, but labels are shifted already by "
            f"one token; set one that takes shift_labels, as the loss of {_LOSS} does"
        )
    return reasons


def _problems_of_masks(pretrained: PreTrainedModel) -> list[str]:
    """Return the reasons why a model's own masks cannot run on a ring, not even on a ring of one rank."""
    if not any(hasattr(module, "prepare_dynamic_mask") for module in text_modules(pretrained)):
        return []
    return [
        "its attention makes a mask of the values of all keys (prepare_dynamic_mask), of which a ring's rank has its "
        f'own alone, and attn_implementation="{ATTN_IMPLEMENTATION}" takes none; use another model'
    ]


def _problems_of_code(pretrained: PreTrainedModel) -> list[str]:
    """Return the reasons why a model's code would compute differently on shards than on whole sequences."""
    needs_no_attention = is_recurrent_alone(pretrained)
    is_left = needs_no_attention or leaves_attention_to_parts(pretrained)
    reasons = [] if is_left else problems_of_old_attention(pretrained)
    signature = inspect.signature(type(pretrained).forward)
    if getattr(pretrained, "pooler", None) is not None:
        reasons.append("its pooler takes the first token of each rank's shard; make it with add_pooling_layer=False")
    elif not hasattr(pretrained, "pooler") and "Pooling" in str(signature.return_annotation):
        reasons.append("its forward returns one token of each rank's shard as pooler_output; use a model without one")
    kinds = _kinds_of_layers(pretrained.config) - set(layer_types_of_compressors(pretrained))
    reasons += problems_of_mixers(pretrained, kinds)
    reasons += problems_of_indexers(pretrained)
    reasons += problems_of_compressors(pretrained)
    reasons += problems_of_relative_bias(pretrained)
    parameters = signature.parameters
    if not needs_no_attention and counts_unknown(pretrained):
        reasons.append(
            "it counts positions by itself, on every shard from the start or by padding; use a model that takes "
            "position_ids as they are"
        )
    if "shared_kv_states" in parameters and re.search(r"For[A-Z]\w*$", type(pretrained).__name__):
        reasons.append("it is a draft of another model, whose keys and values it attends to; train that model")
    if "mc_token_ids" in parameters:
        reasons.append("its second head reads one token of each text, which another rank may have; use one LMHead")
    if "encoder_inputs_embeds" in parameters and not pretrained.config.is_encoder_decoder:
        reasons.append("it adds features of audio to every token, and a shard has none; train its language model")
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        reasons.append("its forward takes no further keyword arguments; add **kwargs and hand them to its layers")
    return reasons


def _check_labels(pretrained: PreTrainedModel, kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for labels of a shard if the model computes their loss, or a part of it, in its own way."""
    if kwargs.get("labels") is not None and getattr(pretrained, "z_loss_coefficient", False):
        raise ValueError(
            f"{type(pretrained).__name__} got labels with a shard, to whose loss it adds a mean over each rank's "
            f"logits (z_loss_coefficient={pretrained.z_loss_coefficient}); set z_loss_coefficient to 0"
        )
    if kwargs.get("labels") is not None and has_own_loss(pretrained):
        raise ValueError(
            f"{type(pretrained).__name__} got labels with a shard: {_OWN_LOSS}; with DeepSpeed by "
            "burst_plugin.deepspeed.token_mean_loss(logits, shift_labels), with shift_labels out of the batch"
        )


def has_own_loss(pretrained: PreTrainedModel) -> bool:
    """Return whether a model computes the loss of labels in code of its own, not by transformers' `loss_function`.

    Such code does not take the `shift_labels` of a shard. For classes outside of transformers the answer is False:
    they are given `shift_labels`, too.
    """
    forward: Any = inspect.unwrap(type(pretrained).forward)
    if not inspect.isfunction(forward) or not forward.__module__.startswith("transformers."):
        return False
    return "labels" in inspect.signature(forward).parameters and "loss_function" not in forward.__code__.co_names


def _takes_shifted_labels(pretrained: PreTrainedModel) -> bool:
    """Return whether a model has the loss of causal language models, or one that takes labels shifted already."""
    if getattr(pretrained, "loss_type", None) in (None, _LOSS) and not hasattr(pretrained, "_loss_function"):
        return True
    loss: Any = pretrained.loss_function
    return "shift_labels" in inspect.signature(loss.forward if isinstance(loss, torch.nn.Module) else loss).parameters


def _problems_of_config(config: Any, makes_masks: bool, known_kinds: tuple[str, ...]) -> list[str]:
    """Return the reasons why a ring cannot compute a model with this configuration; see `MAKES_MASKS`.

    known_kinds: the known kinds of layers, besides kinds of attention.
    """
    text, reasons = config.get_text_config(), []
    if getattr(config, "add_cross_attention", False):
        reasons.append(
            "it attends to an encoder (add_cross_attention), whose masks a shard does not have; leave it out"
        )
    others = other_parts(config)
    if others and not text_part(config):
        reasons.append(f"it has parts besides the language model: {', '.join(others)}; train that by itself")
    kinds = sorted(_kinds_of_layers(config) - set(known_kinds))
    if kinds:
        known = ", ".join((*_LAYER_TYPES, *known_kinds))
        reasons.append(f"it has layers of type {', '.join(kinds)}; known are {known}")
    for option, what in _MIXING.items():
        if getattr(text, option, None):
            reasons.append(f"{option} {what}; switch it off, or use another model")
    both_ways = getattr(text, "use_bidirectional_attention", None)
    if both_ways not in (None, False, "vision") and not makes_masks:
        reasons.append("use_bidirectional_attention is set; leave it out")
    return reasons


def _known_kinds(pretrained: PreTrainedModel) -> tuple[str, ...]:
    """Return the kinds of layers besides attention of all or some keys that can run on a ring in a model."""
    return (*LAYER_TYPES, *layer_types_of_indexers(pretrained), *layer_types_of_compressors(pretrained))


def _kinds_of_layers(config: Any) -> set[str]:
    """Return the kinds of layers that a configuration names, besides kinds of attention."""
    return set(getattr(config.get_text_config(), "layer_types", None) or ()) - set(_LAYER_TYPES)


def _outermost(model: torch.nn.Module, is_kind: Callable[[Any], bool]) -> list[Any]:
    """Return the modules of a kind, perhaps `model` itself, that are in no other module of the kind; each once."""
    modules = [module for module in model.modules() if is_kind(module)]
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in inner]


def _is_pretrained(module: Any) -> bool:
    return isinstance(module, PreTrainedModel)
