"""Masks made of blocks, also of blocks selected at run time; and the blocks that ranks hold.

Sparse attention by blocks: MoBA (arXiv 2502.13189) selects for every block of queries the k blocks of keys whose mean
keys score highest; NSA (2502.11089) lets all heads that share keys and values share the selection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import groupby

import torch
from torch import Tensor

from burst_plugin.checks import SUMMARY, as_listed, as_whole, shown, unreadable, whole_number
from burst_plugin.sequence.layout import Run, Tokens
from burst_plugin.sequence.mask import Mask, Region
from burst_plugin.sequence.masks import Causal, PerHeadGroup, PerRow, check_flags, flag_rows, true_ranges

_FLAGS = "give rows of True and False, one per block of queries, or BlockMask.of(tensor, block)"
_SELECTED = (
    "selected blocks are a bool tensor [query blocks, key blocks], or whole numbers [query blocks, k], those of key "
    "blocks; in front may be [groups of heads], or [batch, groups of heads]"
)
_LISTED = 2048  # blocks, up to which the text of a mask has all of them


@dataclass(frozen=True)
class BlockMask(Mask):
    """Any mask made of square blocks: `allowed[i][j]` says whether block i of queries attends to block j of keys.

    `BlockMask.of(tensor, block)` makes one from a bool tensor [query blocks, key blocks]. The last may be short.
    Rows are kept as bytes, 1 for True: there may be a million blocks, whose hash and text every call asks for.
    """

    block: int
    allowed: tuple[Sequence[bool], ...]
    compares_positions = False

    def __post_init__(self) -> None:
        rows = getattr(self.allowed, "tolist", lambda: self.allowed)()
        allowed = tuple(_flags(row) for row in as_listed("BlockMask(allowed={})", rows, _FLAGS))
        block, lengths = as_whole(self.block), sorted({len(row) for row in allowed})
        if block is None or block < 1 or len(lengths) != 1:
            raise ValueError(
                f"BlockMask needs block >= 1, got {shown(self.block)}, and rows of one length, got {lengths}"
            )
        object.__setattr__(self, "block", block)
        object.__setattr__(self, "allowed", allowed)

    def __repr__(self) -> str:
        """Return a text with all blocks or, of many, their digest."""
        return self._text

    @cached_property
    def _text(self) -> str:
        rows, columns = len(self.allowed), len(self.allowed[0])
        if rows * columns <= _LISTED:
            allowed = str(tuple(tuple(map(bool, row)) for row in self.allowed))
        else:
            digest = blake2b(b"".join(map(bytes, self.allowed)), digest_size=16).hexdigest()
            allowed = f"{rows} x {columns} blocks{SUMMARY}{digest}]"
        return f"BlockMask(block={self.block}, allowed={allowed})"

    @classmethod
    def of(cls, allowed: Tensor, block: int) -> BlockMask:
        """Return the mask of a bool tensor [query blocks, key blocks]. Raise ValueError for another shape or type."""
        check_flags("a block mask is a bool tensor [query blocks, key blocks]", allowed)
        return cls(block, flag_rows(allowed))  # type: ignore[arg-type]

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return one region per range of allowed blocks; equal block rows that follow each other share regions.

        Raises ValueError if the blocks are not as many as `q_len` queries and `kv_len` keys make.
        """
        size = (-(-q_len // self.block), -(-kv_len // self.block))
        if (len(self.allowed), len(self.allowed[0])) != size:
            raise ValueError(
                f"BlockMask of {len(self.allowed)} x {len(self.allowed[0])} blocks of {self.block} does not fit "
                f"{q_len} queries and {kv_len} keys, which are {size[0]} x {size[1]}"
            )
        regions, q_start = [], 0
        for row, same_rows in groupby(self.allowed):
            q_stop = min(q_start + self.block * len(list(same_rows)), q_len)
            for start, stop in true_ranges(bytes(row)):
                regions.append(Region(q_start, q_stop, start * self.block, min(stop * self.block, kv_len)))
            q_start = q_stop
        return tuple(regions)


def selected_blocks(selected: Tensor, block: int, *, causal: bool = True, key_blocks: int | None = None) -> Mask:
    """Return the mask of blocks that were selected at run time, as MoBA and NSA do; their tensor is read once.

    All ranks need the whole selection: see `ContextParallel.blocks`. Every group of heads sends and receives the keys
    that it selected, in a ring pass of its own.

    Args:
        selected: bool [query blocks, key blocks], on any device; or whole numbers [query blocks, k], the numbers of
            selected key blocks, where any below 0 stand for none. With a dim [groups] in front, each group of query
            heads, all of one size, has a selection of its own; with [1 or B, groups], each batch row too.
        block: tokens per block, of queries and of keys; the last may be short.
        causal: whether tokens attend to no later token, neither in later blocks nor in their own.
        key_blocks: how many key blocks there are, where `selected` holds numbers; by default as many as query blocks.

    Raises:
        ValueError: for another shape or type, or the number of a block that does not exist.

    Example:
        mask = selected_blocks(scores.topk(8).indices, block=128)  # scores [groups, query blocks, key blocks]
        out = burst_attention(q, k, v, cp, mask=mask)
    """
    _check_selected(selected)
    flags = selected.detach().cpu()
    if flags.dtype is not torch.bool:
        flags = _as_flags(flags.long(), key_blocks)
    elif key_blocks is not None:
        raise ValueError(f"key_blocks={shown(key_blocks)} goes with numbers of blocks, but selected is bool; drop it")
    if causal:
        flags = flags.tril()
    flags = flags.view(*(1,) * (4 - flags.dim()), *flags.shape)
    by_group = [[BlockMask.of(of_row, block) for of_row in group.unbind()] for group in flags.unbind(1)]
    groups: list[Mask] = [rows[0] if len(rows) == 1 else PerRow(tuple(rows)) for rows in by_group]
    mask = groups[0] if len(groups) == 1 else PerHeadGroup(tuple(groups))
    return mask & Causal() if causal else mask


def block_tokens(shards: Sequence[Sequence[Run]], length: int, block: int) -> Tokens:
    """Return `Tokens` with one token for each block of `block` tokens, held by the rank that holds the block.

    shards: for each rank the runs of tokens that it holds.
    length: the number of tokens.

    Raises ValueError if a block lies on several ranks, or a rank has none.
    """
    block = whole_number("block={}", block, "use the number of tokens in a block, 1 or more", 1)
    held = sorted((run, rank) for rank, runs in enumerate(shards) for run in runs)
    instead = "ranks must hold whole blocks: use smaller blocks, or tokens in fewer and longer chunks"
    for run, rank in held:
        start, stop = run.start, run.last + 1
        if stop - start > run.length or start % block or (stop % block and stop != length):
            apart = "" if stop - start == run.length else f" in steps of {run.stride}"
            raise ValueError(
                f"blocks of {block} tokens lie on several ranks: rank {rank} holds tokens {start} to {stop - 1}"
                f"{apart}; {instead}"
            )
    idle = set(range(len(shards))).difference(rank for _, rank in held)
    if idle:
        raise ValueError(f"rank {min(idle)} holds none of {length} tokens, so no block of them; {instead}")
    bounds = (*(run.start // block for run, _ in held), -(-length // block))
    return Tokens(bounds[-1], holders=tuple(rank for _, rank in held), bounds=bounds)


def _check_selected(selected: object) -> None:
    """Raise ValueError unless it is a tensor that can say which blocks are selected."""
    if not isinstance(selected, Tensor):
        raise ValueError(f"{_SELECTED}; got {shown(selected)}")
    if unreadable(selected):
        raise ValueError(f"{_SELECTED}; got one {unreadable(selected)}")
    if selected.is_floating_point() or selected.is_complex() or not 2 <= selected.dim() <= 4 or not selected.numel():
        raise ValueError(f"{_SELECTED}; got {selected.dtype} {list(selected.shape)}")


def _as_flags(numbers: Tensor, key_blocks: int | None) -> Tensor:
    """Return which key blocks `numbers` [..., query blocks, k] are, bool [..., query blocks, key blocks]."""
    expected = "use the number of blocks of keys, or None for as many as of queries"
    count = numbers.shape[-2] if key_blocks is None else whole_number("key_blocks={}", key_blocks, expected, 1)
    if int(numbers.max()) >= count:
        raise ValueError(
            f"selected has the number {int(numbers.max())}, but blocks of keys have the numbers 0 to {count - 1}; "
            "give key_blocks= if there are more of them than of queries, and numbers below 0 for no block"
        )
    flags = numbers.new_zeros(*numbers.shape[:-1], count + 1, dtype=torch.bool)  # the last stands for none
    return flags.scatter_(-1, numbers.where(numbers >= 0, count), True)[..., :-1]


def _flags(row: object) -> bytes:
    """Return a row of a block mask. Raise ValueError for anything but True and False, or 1 and 0."""
    if not isinstance(row, bytes):
        listed = as_listed("BlockMask(allowed=...) with a row of {}", row, _FLAGS)
        odd = [] if set(map(type, listed)) <= {bool} else [flag for flag in listed if flag not in (0, 1)]
        if odd:
            raise ValueError(f"BlockMask(allowed=...) holds {shown(odd[0])}; {_FLAGS}")
        row = bytes(map(bool, listed))
    if row.translate(None, b"\x00\x01"):
        raise ValueError(f"BlockMask(allowed=...) holds {shown(row)}; {_FLAGS}")
    return row
