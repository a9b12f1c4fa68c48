"""The inputs of index scores, as Megatron's indexer of sparse attention computes them from a rank's tokens."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.experimental_attention_variant import dsa
from torch import Tensor

from burst_plugin.sparse import Indexed


def index_inputs(indexer: Any, x: Tensor, qr: Tensor, packed_seq_params: Any = None) -> Indexed:
    """Return queries [B, S, H, D], keys [B, S, D] and weights [B, S, H] of a DSAIndexer for a rank's tokens.

    Scores are sums over heads of weights * relu(queries . keys), without another scale.

    Args:
        indexer: Megatron's module.
        x: hidden states [S, B, hidden].
        qr: compressed queries [S, B, rank]. Under sequence parallelism `x` and `qr` are a tensor-parallel rank's part
            of S, and what is returned has all of S.
        packed_seq_params: Megatron's, for packed sequences; else None.
    """
    if hasattr(indexer, "forward_before_topk"):  # from 0.17 on
        q, k, weights = indexer.forward_before_topk(x, qr, packed_seq_params)
    else:
        q, k, weights = _before_selection(indexer, x, qr)
    return Indexed(q.transpose(0, 1), k.transpose(0, 1), weights.transpose(0, 1))


def _before_selection(indexer: Any, x: Tensor, qr: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [S, B, H, D], keys [S, B, D] and weights [S, B, H] of an indexer of 0.16."""
    length = indexer.rotary_pos_emb.get_rotary_seq_len(None, None, x, indexer.config, None)
    embedding = indexer.rotary_pos_emb(length, packed_seq=False)
    angles, mscale = embedding if isinstance(embedding, tuple) else (embedding, 1.0)
    group = indexer.pg_collection.tp
    if indexer.config.sequence_parallel and group.size() > 1:
        x, qr = (gather_from_sequence_parallel_region(tensor, group=group) for tensor in (x, qr))
    q = indexer.linear_wq_b(qr)[0].unflatten(-1, (indexer.index_n_heads, indexer.index_head_dim))
    k = indexer.k_norm(indexer.linear_wk(x)[0]).unsqueeze(2)
    q, k = (dsa.rotate_activation(indexer._apply_rope(tensor, angles, mscale)) for tensor in (q, k))
    weights = indexer.linear_weights_proj(x)[0] * (indexer.index_n_heads**-0.5 * indexer.softmax_scale)
    return q, k.squeeze(2), weights
