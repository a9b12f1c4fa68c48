"""Core attentions for one rank, to compare the ring with: written out in plain torch, and the ring's own."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule


def OneRankBurst(*args: Any, **kwargs: Any) -> Any:  # noqa: N802
    """Burst attention on a single rank, where Megatron would use its own."""
    from burst_plugin.megatron.layers.core_attention import BurstCoreAttention
    from burst_plugin.megatron.registry import Registry

    return BurstCoreAttention(*args, registry=Registry(None), **kwargs)


def allowed_pairs(queries: int, keys: int, *, causal: bool, window: Any = None, packed: Any = None) -> torch.Tensor:
    """Which query attends to which key, bool [queries, keys], from the definitions.

    `window` is (left, right); `packed` is (where documents begin, their real lengths).
    """
    i, j = torch.arange(queries).view(-1, 1), torch.arange(keys).view(1, -1)
    found = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        found &= j <= i
    if window is not None:
        found &= (i - j <= window[0]) & (j - i <= window[1])
    if packed is not None:
        same = torch.zeros_like(found)
        for start, length in zip(packed[0], packed[1], strict=False):
            same |= (i >= start) & (i < start + length) & (j >= start) & (j < start + length)
        found &= same
    return found


class WrittenOut(MegatronModule):
    """Attention from its definition, in float64: windows, sinks, other head dims of values, packed documents."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **options: Any
    ) -> None:
        super().__init__(config=config)
        self.causal = "causal" in attn_mask_type.name
        self.scale = options.get("softmax_scale")
        freq = config.window_attn_skip_freq
        self.window = config.window_size if config.window_size and (not freq or layer_number % freq) else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // parallel_state.get_tensor_model_parallel_world_size()
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads))
        if config.softmax_type == "off-by-one":
            self.softmax_offset = torch.zeros(config.num_attention_heads)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """As Megatron's."""
        packed = None
        if packed_seq_params is not None:
            starts = packed_seq_params.cu_seqlens_q_padded.tolist()
            packed = starts, packed_seq_params.cu_seqlens_q.diff().tolist()
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        group = query.shape[2] // key.shape[2]
        q, k, v = query.double(), *(x.double().repeat_interleave(group, dim=2) for x in (key, value))
        scores = torch.einsum("ibhd,jbhd->bhij", q, k) * (self.scale or q.shape[-1] ** -0.5)
        pairs = allowed_pairs(len(q), len(k), causal=self.causal, window=self.window, packed=packed)
        scores = scores.masked_fill(~pairs if attention_mask is None else ~pairs | attention_mask, -torch.inf)
        if self.softmax_offset is not None:
            sink = self.softmax_offset.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sink], -1)
        live = pairs.any(-1).view(1, 1, -1, 1)
        p = scores.masked_fill(~live, 0).softmax(-1) * live  # padded queries: 0
        out = torch.einsum("bhij,jbhd->ibhd", p[..., : len(k)], v).to(query.dtype).flatten(2)
        return out.squeeze(1) if packed_seq_params is not None else out
