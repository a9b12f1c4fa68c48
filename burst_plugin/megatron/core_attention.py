"""Megatron's core attention, computed by the ring."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from burst_plugin.attention import burst_attention
from burst_plugin.mask import Causal, Full, Mask
from burst_plugin.megatron.arguments import flag_problems
from burst_plugin.megatron.config import problems, unknown_fields
from burst_plugin.megatron.registry import Registry
from burst_plugin.scores import Scores

__all__ = ["BurstCoreAttention", "ChosenCoreAttention"]

_MASKS: dict[str, Mask] = {"causal": Causal(), "no_mask": Full()}


class ChosenCoreAttention:
    """Built in place of a layer's core attention: the ring where `cp_comm_type` is "burst", else the original.

    Multi-latent attention builds its core attention twice, first without a `cp_comm_type`; that one is never used.
    """

    def __new__(cls, *args: Any, original: Any, registry: Registry, **kwargs: Any) -> Any:
        """The core attention of one layer."""
        config = kwargs["config"]
        kind = kwargs.get("cp_comm_type")
        if kind is None:
            listed = config.cp_comm_type
            kind = "burst" if isinstance(listed, list) and "burst" in listed else listed
        if config.context_parallel_size > 1 and kind == "burst":
            return BurstCoreAttention(*args, registry=registry, **kwargs)
        return build_module(original, *args, **kwargs)


class BurstCoreAttention(MegatronModule):
    """Attention over the context-parallel group, in the place of Megatron's DotProductAttention.

    Holds no groups, unless it was given others than Megatron's global ones: these are looked up when it runs. Raises
    ValueError naming each field of the configuration that cannot be honoured, and what to write instead.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *,
        registry: Registry,
        pg_collection: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self._registry = registry
        given = getattr(pg_collection, "cp", None)
        usual = parallel_state.get_context_parallel_group(check_initialized=False)
        self._pg_collection = pg_collection if given is not usual else None
        self._scores = Scores(scale=options.get("softmax_scale"))
        self._check(config, attention_type, options.get("attention_dropout"))

    def _check(self, config: Any, attention_type: str, dropout: float | None) -> None:
        skip = getattr(config, "window_attn_skip_freq", None)
        windowed = is_layer_window_attention(config.window_size, skip, self.layer_number)
        found = problems(config, windowed, attention_type) + flag_problems()
        if dropout:
            found.append(f"attention_dropout={dropout} is not supported: set it to 0")
        if found:
            raise ValueError(f"burst attention cannot run layer {self.layer_number}: " + "; ".join(found))
        for name in unknown_fields(config):
            warnings.warn(
                f"burst_plugin does not know Megatron's option {name}={getattr(config, name)!r}; if it changes "
                "attention, burst attention ignores it",
                stacklevel=2,
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **options: Any,
    ) -> Tensor:
        """q [S/CP, B, H/TP, D], k and v [S/CP, B, groups/TP, D] -> [S/CP, B, H/TP * D], in the type of q.

        Raises ValueError for masks, biases and packed sequences, naming what was got.
        """
        mask_type = (attn_mask_type or self.attn_mask_type).name
        if mask_type not in _MASKS:
            raise ValueError(f"attn_mask_type={mask_type} is not supported; burst attention has: {', '.join(_MASKS)}")
        if attention_bias is not None:
            raise ValueError("attention_bias is not supported; use rotary or no position embeddings")
        if packed_seq_params is not None:
            raise ValueError("packed sequences (packed_seq_params) are not supported; train on unpacked ones")
        cp = self._registry.context(self.config, self._pg_collection)
        mask = _MASKS[mask_type]
        if attention_mask is not None:
            self._registry.check_mask(cp, attention_mask, mask)
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        out = burst_attention(q, k, v, cp, mask=mask, scores=self._scores)
        assert isinstance(out, torch.Tensor)
        return out.transpose(0, 1).flatten(2)
