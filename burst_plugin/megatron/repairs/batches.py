"""Repairs of how Megatron cuts batches and rolls labels; `faults.py` says which releases need them."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from megatron.core import parallel_state, utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_token_prediction
from torch import Tensor

from burst_plugin.frameworks.wrapping import bind, wrap
from burst_plugin.megatron.batches.packed import packed_indices

_NOT_BY_TOKEN = frozenset({"attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen"})
_BY_TOKEN = ("tokens", "labels", "loss_mask", "position_ids")


def _take_rows(batch: dict[str, Any], names: Iterable[str], offsets: Tensor, ranks: int, rank: int) -> None:
    """Cut tensors [1, tokens, ...] of a packed batch by rank."""
    rows = packed_indices(offsets, ranks, rank)
    for name in names:
        if batch.get(name) is not None:
            batch[name] = batch[name].index_select(1, rows)


def cut_packed_batches() -> None:
    """Replace Megatron's `get_thd_batch_on_this_cp_rank`, which until 0.17 does not cut packed batches over ranks.

    The data loader gives it offsets [1, documents + 1], and None for padded ones, with which it fails. The
    replacement takes these, and returns the rank's part of the batch and its `PackedSeqParams`.
    """

    def cut(
        batch: dict[str, Any],
        cu_seqlens: Tensor,
        cu_seqlens_padded: Tensor | None,
        max_seqlen: Tensor,
        cp_size: int | None = None,
        cp_rank: int | None = None,
    ) -> tuple[dict[str, Any], PackedSeqParams]:
        lengths = cu_seqlens.flatten()
        offsets = lengths if cu_seqlens_padded is None else cu_seqlens_padded.flatten()
        longest = int(max_seqlen.max())
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=lengths,
            cu_seqlens_kv=lengths,
            cu_seqlens_q_padded=offsets,
            cu_seqlens_kv_padded=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        ranks = parallel_state.get_context_parallel_world_size() if cp_size is None else cp_size
        rank = parallel_state.get_context_parallel_rank() if cp_rank is None else cp_rank
        if ranks > 1:
            _take_rows(batch, batch.keys() - _NOT_BY_TOKEN, offsets, ranks, rank)
        return batch, params

    utils.get_thd_batch_on_this_cp_rank = cut


WANT_TE = ("get_sft_batch_on_this_cp_rank", "_get_batch_on_this_cp_rank_per_document_balancing")


def wants_absent_te() -> bool:
    """Return whether Megatron cuts packed batches by Transformer Engine alone, and that is not installed."""
    return getattr(utils, "tex", None) is None and any(hasattr(utils, name) for name in WANT_TE)


def cut_packed(batch: dict[str, Any], cp_group: Any) -> dict[str, Any]:
    """Cut a batch of packed documents for this rank, as Megatron does from 0.18 on, and return it.

    Args:
        batch: tokens, labels, loss_mask and position_ids [1, tokens], which are replaced by this rank's part;
            cu_seqlens and perhaps cu_seqlens_padded say where documents begin.
        cp_group: the context-parallel group.
    """
    if cp_group.size() > 1:
        padded = batch.get("cu_seqlens_padded")
        offsets = batch["cu_seqlens"] if padded is None else padded
        _take_rows(batch, _BY_TOKEN, offsets, cp_group.size(), cp_group.rank())
    return batch


def cut_without_transformer_engine() -> None:
    """Put `cut_packed` in place of Megatron's functions that cut packed batches by Transformer Engine alone.

    Releases from 0.18 on have such functions.
    """
    for name in WANT_TE:
        if hasattr(utils, name):
            setattr(utils, name, cut_packed)


# In 0.18 and later, `get_batch_on_this_cp_rank` leaves the cutting to these.
CUT_BATCH = (
    "get_pretrain_batch_on_this_cp_rank",
    "_get_batch_on_this_cp_rank_per_sequence_balancing",
    *WANT_TE,
)


def functions_that_cut() -> tuple[str, ...]:
    """Return the names of Megatron's functions that get the whole batch on every rank, and cut it.

    Until 0.17 it is the function that scripts call, later the functions that this function calls.
    """
    return tuple(name for name in CUT_BATCH if hasattr(utils, name)) or ("get_batch_on_this_cp_rank",)


def cut_over_context_parallel_ranks() -> None:
    """Have Megatron's functions that cut batches use its context-parallel group where they are given no group.

    They do so until 0.17, and cut over all ranks of the world from 0.18 on.
    """

    def cut(original: Any, batch: dict[str, Any], cp_group: Any = None, **kwargs: Any) -> dict[str, Any]:
        if cp_group is None:
            cp_group = parallel_state.get_context_parallel_group(check_initialized=False)
        shard: dict[str, Any] = original(batch, cp_group=cp_group, **kwargs)
        return shard

    for name in CUT_BATCH:
        if hasattr(utils, name):
            wrap(utils, name, cut)


def roll_padded_documents() -> None:
    """Have multi-token prediction roll each packed document within its place in the padded sequence.

    It wraps Megatron's `_roll_tensor_packed_seq`, which takes documents to begin where they would without padding.
    """

    def roll(original: Any, *args: Any, **kwargs: Any) -> Any:
        call = bind(original, *args, **kwargs)
        packed = call.arguments["packed_seq_params"]
        if packed.cu_seqlens_q_padded is not None:
            call.arguments["packed_seq_params"] = packed = copy.copy(packed)
            packed.cu_seqlens_q = packed.cu_seqlens_q_padded
        return original(*call.args, **call.kwargs)

    wrap(multi_token_prediction, "_roll_tensor_packed_seq", roll)
