"""Conversations of Megatron's SFT data (`--sft`), packed without padding where the ring's layout needs none.

Megatron pads each conversation to a multiple of 2 * context_parallel_size, as zigzag needs. What fits into a
sample, and where its last conversation is cut off, would thus depend on the number of ranks.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

from burst_plugin.frameworks.wrapping import wrap
from burst_plugin.megatron.batches.layouts import MEGATRONS_OWN
from burst_plugin.megatron.flags.arguments import burst_is_requested, parsed_arguments

_MARK = "_burst_plugin_packs"  # on the constructor of the data


def hook_conversations(layout: str) -> None:
    """Have Megatron's `SFTDataset` pad no conversations, where the ring's layout needs no padding.

    It wraps the constructor of the dataset. Nothing changes unless Megatron's parsed arguments have `--sft` and burst
    attention.

    layout: the name of the ring's layout; with "zigzag", which needs padding, nothing changes either.
    """
    if layout == MEGATRONS_OWN or not burst_is_requested() or not getattr(parsed_arguments(), "sft", False):
        return
    data = importlib.import_module("megatron.training.datasets.sft_dataset").SFTDataset
    if not hasattr(data.__init__, _MARK):
        setattr(wrap(data, "__init__", _without_padding), _MARK, None)


def _without_padding(original: Callable[..., None], data: Any, *args: Any, **kwargs: Any) -> None:
    """Build Megatron's SFT dataset, with the samples that it has on one context-parallel rank."""
    original(data, *args, **kwargs)
    data.config = copy.copy(data.config)
    data.config.context_parallel_size = 1
