"""Transformers of diffusers on a ring: whole inputs in, the whole sample out, and tokens cut in between.

transformer = burst_plugin.integrations.diffusion.prepare(transformer, cp)
sample = transformer(hidden_states, timestep, encoder_hidden_states).sample  # on every rank
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from burst_plugin.checks import shown
from burst_plugin.context import ContextParallel
from burst_plugin.integrations.cut_transformer import CutTransformer
from burst_plugin.integrations.diffusion_families import FAMILIES

Model = TypeVar("Model", bound=torch.nn.Module)

_RING = "burst_ring"


def prepare(model: Model, cp: ContextParallel) -> Model:
    """Put a transformer of diffusers on the ring of `cp`, for training and inference.

    All ranks call the model with equal whole inputs, which they compare, and get the whole sample. The loss has to be
    computed alike on every rank. A rank then has the part of each gradient that its own tokens make: gradients have
    to be summed over the ranks of the ring.

    Args:
        model: a model of diffusers, such as `pipeline.transformer`, without wrappers; DDP and FSDP come after.
        cp: the ranks that hold one sample between them.

    Returns:
        `model`, which is changed in place.

    Raises:
        ValueError: for an architecture that is not known, a configuration that treats some tokens differently, or a
            model that is on a ring already. Calls of the model raise it for inputs that differ between ranks,
            arguments and hooks for whole tokens, more ranks than tokens, and masks other than key padding.
    """
    if not isinstance(cp, ContextParallel):
        raise ValueError(f"cp is {shown(cp)}, not a ContextParallel; make one of the process group once, and pass it")
    name = type(model).__name__
    if name not in FAMILIES:
        raise ValueError(
            f"{name} is not known on a ring: parts of it might see the tokens of one rank only; known are "
            f"{', '.join(FAMILIES)}"
        )
    config: Any = model.config
    for key, value in FAMILIES[name].refused.items():
        if getattr(config, key) == value:
            raise ValueError(f"{name} with {key}={value!r} does not run on a ring: it treats some tokens differently")
    if hasattr(model, _RING):
        raise ValueError(f"this {name} is on a ring already; prepare a model once")
    setattr(model, _RING, CutTransformer(model, FAMILIES[name], cp))
    return model
