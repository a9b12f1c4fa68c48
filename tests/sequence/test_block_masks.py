"""Masks of selected blocks: what was selected, whichever way it is told; and which blocks ranks hold."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from burst_plugin import (
    BlockMask,
    Causal,
    ContextParallel,
    Full,
    PerHeadGroup,
    PerRow,
    SlidingWindow,
    Strategy,
    Tokens,
    Topology,
    selected_blocks,
)
from burst_plugin.ring.routes import RouteTable
from burst_plugin.sequence.block_masks import block_tokens
from burst_plugin.sequence.layout import LAYOUTS
from tests.support.reference import painted, painted_by_head


def drawn(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.6


def blocks_of(selected: Tensor, block: int, length: int) -> Tensor:
    """The pairs of tokens of selected pairs of blocks, [..., length, length]."""
    pairs = selected.repeat_interleave(block, -1).repeat_interleave(block, -2)
    return pairs[..., :length, :length]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [20, 18])
def test_every_group_of_heads_attends_to_what_it_selected(causal: bool, length: int) -> None:
    selected = drawn(2, 3, 5, 5)
    pairs = blocks_of(selected, 4, length)
    expected = pairs.tril() if causal else pairs
    mask = selected_blocks(selected, 4, causal=causal)
    assert (mask.rows, mask.head_groups) == (2, 3)
    assert torch.equal(painted_by_head(mask, 2, 3, length, length), expected)
    of_groups = [painted(mask.of_head_group(n), 2, length, length) for n in range(3)]
    assert torch.equal(torch.stack(of_groups, 1), expected)


def test_what_is_left_out_in_front_is_shared() -> None:
    selected = drawn(3, 5, 5)
    assert selected_blocks(selected, 4) == selected_blocks(selected.unsqueeze(0), 4)
    assert selected_blocks(selected[0], 4) == selected_blocks(selected[:1], 4)
    assert selected_blocks(selected[0], 4).head_groups is None
    assert selected_blocks(selected[:1].expand(2, -1, -1).unsqueeze(1), 4).rows == 2


def test_numbers_of_blocks_say_the_same_as_flags() -> None:
    """In any order, more than once, with some that stand for none."""
    numbers = torch.tensor([[0, -1, -5], [1, 0, 1], [4, 0, 0], [-1, -1, -1]])
    flags = torch.zeros(4, 5, dtype=torch.bool)
    for row, columns in enumerate([(0,), (0, 1), (0, 4), ()]):
        flags[row, list(columns)] = True
    assert selected_blocks(numbers, 3, causal=False, key_blocks=5) == BlockMask.of(flags, 3)
    assert selected_blocks(numbers.int(), 3, causal=False, key_blocks=5) == BlockMask.of(flags, 3)


def test_a_selection_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs each reading waits for all that is queued."""
    read = []
    cpu = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda x: read.append(x.shape) or cpu(x))
    selected_blocks(drawn(2, 3, 5, 5), 4)
    selected_blocks(torch.zeros(2, 3, 5, 2, dtype=torch.int64), 4)
    assert read == [(2, 3, 5, 5), (2, 3, 5, 2)]


def test_large_masks_are_compared_by_digest() -> None:
    """Every call asks for the text and the hash."""
    flags = drawn(64, 64)
    mask, same = BlockMask.of(flags, 4), BlockMask(4, tuple(map(tuple, flags.tolist())))
    flags[63, 60] ^= True
    other = BlockMask.of(flags, 4)
    assert mask == same
    assert (hash(mask), str(mask)) == (hash(same), str(same))
    assert mask != other
    assert str(mask) != str(other)
    assert re.fullmatch(r"BlockMask\(block=4, allowed=64 x 64 blocks \.\.\. \[\w{32}\]\)", str(mask))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: selected_blocks([[True]], 4), "selected blocks are a bool tensor .*; got [[True]]"),  # type: ignore[arg-type]
        (lambda: selected_blocks(torch.ones(4, 4), 4), "or whole numbers .*; got torch.float32 [4, 4]"),
        (lambda: selected_blocks(drawn(4), 4), "got torch.bool [4]"),
        (lambda: selected_blocks(drawn(1, 1, 1, 4, 4), 4), "got torch.bool [1, 1, 1, 4, 4]"),
        (lambda: selected_blocks(drawn(2, 0, 4), 4), "got torch.bool [2, 0, 4]"),
        (lambda: selected_blocks(drawn(4, 4).to("meta"), 4), "got one on the meta device"),
        (lambda: selected_blocks(drawn(4, 4), 0), "BlockMask needs block >= 1, got 0"),
        (lambda: selected_blocks(drawn(4, 4), 4, key_blocks=4), "key_blocks=4 goes with numbers of blocks"),
        (
            lambda: selected_blocks(torch.tensor([[0], [2]]), 4),
            "has the number 2, but blocks of keys have the",
        ),
        (lambda: selected_blocks(torch.tensor([[0]]), 4, key_blocks=0), "key_blocks=0 is not valid; use the number"),
        (
            lambda: selected_blocks(drawn(4, 4), 4).regions(20, 16),
            "BlockMask of 4 x 4 blocks of 4 does not fit",
        ),
        (lambda: PerHeadGroup(()), "PerHeadGroup(masks=...) holds none; give a list of masks, one for every group"),
        (lambda: PerHeadGroup((Full, Full)), "holds the class Full, which is no mask of one group"),  # type: ignore[arg-type]
        (lambda: PerHeadGroup((PerHeadGroup((Full(),)),)), "which is no mask of one group"),
        (lambda: PerRow((PerHeadGroup((Full(),)),)), "which is no mask of one row"),
        (lambda: PerHeadGroup((PerRow((Full(),)), PerRow((Full(),) * 2))), "unequal numbers of batch rows"),
        (
            lambda: PerHeadGroup((Full(),) * 2) & PerHeadGroup((Full(),) * 3),
            "masks for 2 and 3 groups of heads",
        ),
        (
            lambda: ContextParallel().tokens(8, PerHeadGroup((Full(),) * 2)),
            "let the tokens suit a mask",
        ),
        (
            lambda: ContextParallel().imbalance(PerHeadGroup((Full(),) * 2), 8),
            "let the tokens suit a mask",
        ),
    ],
)
def test_what_selects_no_blocks_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\*", ".*")):
        make()


def test_groups_of_heads_know_what_their_masks_do() -> None:
    groups = PerHeadGroup((Causal(), SlidingWindow(3, 1)))
    assert groups.looks_ahead
    assert not PerHeadGroup((Causal(), SlidingWindow(3))).looks_ahead
    assert groups & Full() == groups & Full()
    assert (Full() & groups).of_head_group(1) == Full() & SlidingWindow(3, 1)
    assert PerHeadGroup((Causal(), PerRow((Full(), Causal())))).rows == 2
    assert PerHeadGroup((PerRow((Full(), Causal())), Causal())).of_row(0) == PerHeadGroup((Full(), Causal()))


def shards(ranks: int, tokens: Tokens, layout: str = "zigzag") -> list[tuple[object, ...]]:
    return RouteTable(Topology(1, ranks), Strategy(layout=layout)).shards(tokens)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("tokens", "layout"),
    [
        (Tokens(64), "zigzag"),
        (Tokens(64), "contiguous"),
        (Tokens(64, holders=(1, 0, 0, 1)), "zigzag"),
        (Tokens(62, holders=(0, 1, 0), bounds=(0, 16, 56, 62)), "zigzag"),
        (Tokens(64, (0, 32, 64)), "zigzag"),
    ],
    ids=str,
)
def test_blocks_are_where_their_tokens_are(tokens: Tokens, layout: str) -> None:
    held = shards(2, tokens, layout)
    blocks = block_tokens(held, tokens.length, 8)  # type: ignore[arg-type]
    assert blocks.length == 8
    for runs, of_blocks in zip(held, shards(2, blocks), strict=True):
        of_tokens = [position // 8 for run in runs for position in range(run.start, run.last + 1)]  # type: ignore[attr-defined]
        expected = list(dict.fromkeys(of_tokens))
        assert [n for run in of_blocks for n in range(run.start, run.last + 1)] == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("tokens", "layout", "block", "message"),
    [
        (Tokens(64), "zigzag", 32, "blocks of 32 tokens lie on several ranks: rank 0 holds tokens 0 to 15;"),
        (Tokens(60), "zigzag", 6, "blocks of 6 tokens lie on several ranks"),
        (Tokens(64), "striped", 8, "rank 0 holds tokens 0 to 62 in steps of 2; ranks must hold whole blocks"),
        (Tokens(1), "contiguous", 8, "rank 0 holds none of 1 tokens, so no block of them"),
        (Tokens(64), "zigzag", 0, "block=0 is not valid; use the number of tokens in a block, 1 or more"),
    ],
)
def test_blocks_on_several_ranks_are_refused(tokens: Tokens, layout: str, block: int, message: str) -> None:
    assert layout in LAYOUTS
    with pytest.raises(ValueError, match=re.escape(message)):
        block_tokens(shards(2, tokens, layout), tokens.length, block)  # type: ignore[arg-type]
