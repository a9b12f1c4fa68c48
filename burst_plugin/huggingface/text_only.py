"""Models that also take images, audio or video, on text alone: modules off the path of text stay as they are.

Model  ->  projector, towers: of images, audio, video; never run on a shard, so neither examined nor switched
       ->  language model: examined, and on the ring
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burst_plugin.batch import MEDIA, SHARD_KEY
from burst_plugin.frameworks.wrapping import by_name
from burst_plugin.huggingface.image_groups import group_rule
from burst_plugin.huggingface.mask_recipes import shard_of_forward
from burst_plugin.huggingface.media.features import takes_media
from burst_plugin.huggingface.walks import modules_in, names_and_modules, once

# Tensors, caches and lists that a batch of text may have; of `token_type_ids` masks are made, which are examined.
_OF_TEXT = frozenset(
    {
        SHARD_KEY,
        "input_ids",
        "inputs_embeds",
        "labels",
        "shift_labels",
        "position_ids",
        "attention_mask",
        "token_type_ids",
        "mm_token_type_ids",
        "cache",
        "past_key_values",
        "cache_position",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "seq_idx",
        "logits_to_keep",
        "num_items_in_batch",
    }
)


def other_parts(config: Any) -> list[str]:
    """Return the names of inner configurations of models beside the language model, such as "vision_config"."""
    text = config.get_text_config()
    return [name for name in config.sub_configs if _is_part(getattr(config, name, None), text)]


def text_part(config: Any) -> str | None:
    """Return the name of the inner configuration of a language model, such as "text_config", beside other parts.

    Returns None for an encoder-decoder, for a model without other parts, and for a language model without a
    configuration of its own: it cannot be told from the other parts, so that text may pass through them.
    """
    text = config.get_text_config()
    if config.is_encoder_decoder or not other_parts(config):
        return None
    return next((name for name in config.sub_configs if getattr(config, name, None) is text), None)


def _is_part(config: Any, text: Any) -> bool:
    """Return whether an inner configuration describes a model beside `text`, rather than options of layers."""
    if config is None or config is text:
        return False
    return bool(config.model_type or config.sub_configs or hasattr(config, "num_hidden_layers"))


@once
def towers(model: torch.nn.Module) -> list[PreTrainedModel]:
    """Return the models inside `model` that text does not pass through, such as a vision tower.

    These are all inner models of transformers but the language model and the models inside it.
    """
    inner_models: dict[int, PreTrainedModel] = {}
    for around in modules_in(model):
        if isinstance(around, PreTrainedModel) and text_part(around.config):
            ours = (around.config, around.config.get_text_config())
            inner = [module for module in modules_in(around) if isinstance(module, PreTrainedModel)]
            of_text = {id(part) for module in inner if module.config is ours[1] for part in modules_in(module)}
            others = [module for module in inner if not any(module.config is config for config in ours)]
            inner_models |= {id(module): module for module in others if of_text and id(module) not in of_text}
    return list(inner_models.values())


@once
def named_text_modules(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return the names and modules of a model that text may pass through: all but its towers and their modules."""
    left_out = {id(part) for tower in towers(model) for part in modules_in(tower)}
    return [(name, module) for name, module in names_and_modules(model).items() if id(module) not in left_out]


def text_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules of a model that text may pass through: all but its towers and their modules."""
    for _, module in named_text_modules(model):
        yield module


def leaves_attention_to_parts(model: PreTrainedModel) -> bool:
    """Return whether a model has parts beside its language model, and attention in its inner models only."""
    inner = [module for module in modules_in(model) if isinstance(module, PreTrainedModel) and module is not model]
    theirs = {id(part) for module in inner for part in modules_in(module)}
    own_modules = [module for module in modules_in(model) if id(module) not in theirs]
    return text_part(model.config) is not None and not any(
        "Attention" in type(module).__name__ for module in own_modules
    )


def watch_towers(model: PreTrainedModel) -> None:
    """Add hooks to a model's towers, such as of images, which raise ValueError if a tower runs on a shard.

    Towers that ranks share run outside of the forward on the shard, and are not refused. Repeated calls change
    nothing.
    """
    for tower in towers(model):
        if _refuse_tower not in tower._forward_pre_hooks.values():
            tower.register_forward_pre_hook(_refuse_tower)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_tower(tower: torch.nn.Module, args: tuple[Any, ...]) -> None:
    """Raise ValueError for a part besides the language model that runs on a shard, which nobody has examined."""
    shard = shard_of_forward()
    if shard is not None and not shard.as_given:
        raise ValueError(
            f"{type(tower).__name__} ran on a batch of text that was cut, and whether it can run on a ring has not "
            "been examined; train the language model by itself"
        )


def check_media(model: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError if a shard has images, video or audio that ranks cannot share, or entries that were not cut.

    Entries that were not cut, and marks of images, are looked for only in models with a configuration of their
    language model. args, kwargs: the arguments of the forward on the shard, which is `kwargs["burst"]`.
    """
    shard, name = kwargs[SHARD_KEY], type(model).__name__
    if shard.has_media and not takes_media(model):
        raise ValueError(
            f"{name} got images, video or audio in a batch that is cut, and makes features of them in a way that "
            "ranks cannot share yet; train on text alone, or leave images out of shard_batch if your own code places "
            "their features"
        )
    if not text_part(model.config):
        return
    rule = group_rule(model)
    marks = [entry for entry, rows in shard.token_types.items() if any(kind for row in rows for _, _, kind in row)]
    unknown = [entry for entry in marks if rule is None or entry != rule.name]
    if unknown and not shard.has_media:
        raise ValueError(
            f"{name} got {', '.join(unknown)} that mark tokens of an image in a batch that is cut, without the "
            "image; leave them out, or give zeros for text"
        )
    for entry, value in by_name(model.forward, args, kwargs).items():
        is_known = entry in _OF_TEXT or (shard.has_media and entry.startswith(MEDIA))
        if not is_known and isinstance(value, Tensor | list | tuple | Mapping):
            raise ValueError(
                f"{name} got {entry} with a batch that was cut without it: give shard_batch all that a processor "
                f"returns, or leave {entry} out"
            )
