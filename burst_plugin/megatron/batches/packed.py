"""Megatron's packed sequences ("thd"): documents one after another, in zigzag each cut over the ranks on its own.

8 + 4 tokens over 2 ranks, in documents 0 ... 7 and 8 ... 11:

    zigzag     rank 0: 0 1 6 7  8 11        rank 1: 2 3 4 5  9 10
    striped    rank 0: 0 2 4 6  8 10        rank 1: 1 3 5 7  9 11

In zigzag a rank holds two of a document's 2 * ranks chunks, number `rank` and its mirror image, as in Transformer
Engine's `thd_get_partitioned_indices`. Megatron's rotary embedding relies on it. Other layouts cut all documents
together, whatever their lengths.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from burst_plugin.sequence.layout import LAYOUTS, Layout, Tokens, check_cu_seqlens, in_chunks, positions
from burst_plugin.sequence.masks import Documents

Assign = Callable[[tuple[int, ...], int], Tokens]  # (where documents begin, ranks) -> which tokens ranks hold

# Fields of PackedSeqParams: those read here, or with no bearing on attention; and those on how batches are cut.
_KNOWN = frozenset(
    """
    qkv_format cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv
    local_cp_size cp_group total_tokens seq_idx pad_between_seqs tokens_per_sample cp_scatter_cache
    """.split()  # noqa: SIM905
)
_USUAL_CUT = {"cp_partition_mode": (None, "zigzag"), "zigzag_cp_min_chunk_size": (None, 0)}


def check_known(params: Any) -> None:
    """Refuse a `PackedSeqParams` that asks for another cut of batches; warn of unknown fields that are set.

    params: of any release of Megatron. Raises ValueError if a field says that documents are cut otherwise than each
    in 2 * ranks chunks, in zigzag.
    """
    for name, usual in _USUAL_CUT.items():
        value = getattr(params, name, None)
        if value not in usual:
            raise ValueError(
                f"packed_seq_params.{name}={value!r} is not supported: cut batches by burst_plugin.megatron."
                f"packed_indices, and leave it at {usual[-1]!r}"
            )
    for name in sorted(getattr(params, "__dict__", {}).keys() - _KNOWN - _USUAL_CUT.keys()):
        value = getattr(params, name)
        if not name.startswith("_") and value is not getattr(type(params), name, None):
            warnings.warn(
                f"burst_plugin does not know packed_seq_params.{name}, which is set; if it changes attention, burst "
                "attention ignores it",
                stacklevel=2,
            )


def is_packed(params: Any) -> bool:
    """Return whether tensors are packed sequences ("thd"), given their PackedSeqParams or None.

    Raises ValueError for a format that is neither thd nor sbhd (the format of hybrid context parallelism), or for
    fields that say that documents are cut in another way than zigzag.
    """
    if params is None:
        return False
    check_known(params)
    if params.qkv_format not in ("thd", "sbhd"):
        raise ValueError(f"packed_seq_params.qkv_format={params.qkv_format!r} is not supported; use 'thd', or 'sbhd'")
    return bool(params.qkv_format == "thd")


def by_document(offsets: tuple[int, ...], ranks: int) -> Tokens:
    """Return Megatron's own assignment of packed documents to ranks: each document cut by itself, in zigzag.

    Args:
        offsets: where documents begin, 0 first, and the number of tokens last.
        ranks: of the context-parallel group.

    Raises:
        ValueError: a document's length is not a multiple of 2 * ranks.
    """
    for number, (start, stop) in enumerate(pairwise(offsets)):
        if ranks > 1 and (stop - start) % (2 * ranks):
            raise ValueError(
                f"packed document {number} has {stop - start} tokens, expected a multiple of 2 * "
                f"context_parallel_size = {2 * ranks}: pad it, and pass cu_seqlens_padded besides cu_seqlens; or "
                "write --burst-layout striped, which takes documents of any length"
            )
    return Tokens(offsets[-1], offsets)


_assign: Assign = by_document


def assign_by(assign: Assign) -> None:
    """Let `packed_indices` assign tokens to ranks by `assign` from now on.

    assign: returns which tokens ranks hold, given (where documents begin and the number of tokens, number of ranks).
    """
    global _assign
    _assign = assign


def layout_of(tokens: Tokens) -> Layout:
    """Return the layout by which ranks hold `tokens`: made of their `holders`, else their `layout`, else zigzag."""
    return LAYOUTS[tokens.layout or "zigzag"] if tokens.holders is None else in_chunks(tokens.holders, tokens.bounds)


def packed_indices(cu_seqlens: Tensor | Sequence[int], cp_size: int, cp_rank: int) -> Tensor:
    """Return the tokens of a packed sequence that a rank holds: `batch[name].index_select(1, indices)` cuts a batch.

    In zigzag, the default layout of `install()` and `--burst-layout`, each document is cut by itself, as
    `transformer_engine_torch.thd_get_partitioned_indices` does, but on any device. Other layouts cut all documents
    together.

    Args:
        cu_seqlens: where documents begin, 0 first and the number of tokens last. For padded documents give
            `cu_seqlens_padded`.
        cp_size: ranks of the context-parallel group.
        cp_rank: the number of the rank in this group.

    Returns:
        int64 [tokens / cp_size], on the device of `cu_seqlens`.

    Raises:
        ValueError: cu_seqlens decrease; in zigzag the length of a document is not a multiple of 2 * cp_size; in other
            layouts the number of tokens is not a multiple of cp_size.
    """
    device = cu_seqlens.device if isinstance(cu_seqlens, Tensor) else None
    listed = cu_seqlens.flatten().tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    tokens = _assign(check_cu_seqlens(listed), cp_size)
    return positions(layout_of(tokens).runs(cp_rank, cp_size, tokens), device)


def packed_documents(
    params: Any,
    ranks: int,
    lengths: tuple[int, int],
    read: Callable[[Tensor], Sequence[int]],
    assign: Assign = by_document,
) -> tuple[tuple[Tokens, Tokens], Documents]:
    """Return which tokens of q and of k ranks hold, and the mask of documents, by a `PackedSeqParams` of Megatron.

    Args:
        params: its offsets count tokens of the whole sequence: `*_padded` say where documents begin, the others how
            long documents are without padding.
        ranks: of the context-parallel group.
        lengths: tokens of q and of k on this rank.
        read: returns a tensor's values as ints.
        assign: returns which tokens ranks hold, given (where documents begin, number of ranks).

    Raises:
        ValueError: offsets do not fit together, or do not fit `lengths` or `max_seqlen_*`.
    """
    q, q_lengths = _side(params, "q", read)
    kv, kv_lengths = (q, q_lengths) if params.cu_seqlens_kv is None else _side(params, "kv", read)
    _check_longest(params, max(_longest(q, q_lengths), _longest(kv, kv_lengths)), read)
    tokens = assign(q, ranks), assign(kv, ranks)
    for name, offsets, length in (("q", q, lengths[0]), ("kv", kv, lengths[1])):
        if ranks > 1 and offsets[-1] == length:
            raise ValueError(
                f"packed_seq_params end at token {offsets[-1]}, and this rank has all of them: the batch is not cut "
                f"over the {ranks} context-parallel ranks; cut it by burst_plugin.megatron.packed_indices"
            )
        if offsets[-1] != length * ranks:
            raise ValueError(
                f"packed_seq_params end at token {offsets[-1]}, but there are {length * ranks}, {length} on each of "
                f"{ranks} ranks: end cu_seqlens_{name}_padded at the number of tokens, as if what fills up the batch "
                "belonged to its last document"
            )
    documents = (
        Documents(q, q_lengths) if (q, q_lengths) == (kv, kv_lengths) else Documents(q, q_lengths, kv, kv_lengths)
    )
    return tokens, documents


def _side(
    params: Any, side: str, read: Callable[[Tensor], Sequence[int]]
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return where documents begin, and their lengths without padding if they are padded."""
    name = f"cu_seqlens_{side}"
    plain, padded = getattr(params, name), getattr(params, f"{name}_padded")
    if plain is None:
        raise ValueError(f"packed_seq_params.{name} is None; packed sequences need it")
    real = check_cu_seqlens(read(plain))
    offsets = real if padded is None else check_cu_seqlens(read(padded))
    if offsets[-1] < 1:
        raise ValueError(f"packed_seq_params.{name} ends at 0; a packed sequence has 1 token or more")
    if len(offsets) != len(real):
        raise ValueError(
            f"packed_seq_params.{name} has {len(real) - 1} documents and {name}_padded {len(offsets) - 1}; give both "
            "for the same documents"
        )
    lengths = tuple(stop - start for start, stop in pairwise(real))
    room = tuple(stop - start for start, stop in pairwise(offsets))
    return offsets, None if lengths == room else lengths


def _longest(offsets: tuple[int, ...], lengths: tuple[int, ...] | None) -> int:
    """Return the length of the longest document, without padding."""
    return max(lengths or (stop - start for start, stop in pairwise(offsets)))


def _check_longest(params: Any, longest: int, read: Callable[[Tensor], Sequence[int]]) -> None:
    """Raise ValueError for a document with more tokens than Megatron makes a rotary embedding for.

    Those beyond it would all get its last position.
    """
    most: dict[str, int] = {}
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        if (length := getattr(params, name, None)) is not None:
            most[name] = max(read(length)) if isinstance(length, Tensor) else int(length)
    if most and longest > max(most.values()):
        said = ", ".join(f"{name}={value}" for name, value in most.items())
        raise ValueError(
            f"packed_seq_params has {said}, but its longest document has {longest} tokens, for which there would be "
            f"no positions; set max_seqlen_q and max_seqlen_kv to {longest} or more"
        )
