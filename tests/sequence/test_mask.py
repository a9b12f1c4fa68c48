"""Masks as regions: what their definitions say, pair by pair; and what cannot be a mask is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from burst_plugin import (
    BidirectionalSpans,
    BlockMask,
    Causal,
    CausalBottomRight,
    Documents,
    Full,
    Keys,
    Mask,
    PerRow,
    PrefixLM,
    SlidingWindow,
    Tokens,
    Topology,
    VirtualRing,
    key_padding,
)
from burst_plugin.sequence.mask import Region, allowed, regions_of, work_by_token
from tests.support.reference import painted

Q_LEN, KV_LEN = 11, 13
BLOCKS = BlockMask.of(torch.rand(4, 5, generator=torch.Generator().manual_seed(0)) > 0.4, 3)
DOCUMENTS = Documents((0, 4, 4, 11), (3, 0, 7), (0, 2, 5, 13), (2, 3, 6))
SINGLE = [
    Full(),
    Causal(),
    CausalBottomRight(),
    SlidingWindow(3),
    SlidingWindow(0),
    SlidingWindow(2, 3),
    SlidingWindow(None, 1),
    SlidingWindow(1, None),
    PrefixLM(0),
    PrefixLM(5),
    PrefixLM(11),
    BidirectionalSpans(((0, 2), (3, 3), (4, 8))),
    BidirectionalSpans(((1, 3), (3, 4), (6, 9), (10, 13)), (0, 1, 0, 0)),
    BidirectionalSpans(((0, 4), (5, 6), (7, 13)), (0, 1, 0), left=2),
    Keys(((0, 3), (5, 5), (7, 12))),
    Keys(()),
    BLOCKS,
    DOCUMENTS,
    Documents((0, 4, 4, 11), (3, 0, 7), (0, 2, 5, 13)),
    Documents((0, 4, 4, 11), None, (0, 2, 5, 13), (2, 3, 6)),
]
COMBINED = [
    Causal() & BLOCKS,
    SlidingWindow(4) & Keys(((2, 9),)) & BLOCKS,
    DOCUMENTS & Keys(((1, 12),)),
    Documents((0, 4, 11), (3, 6), (0, 5, 13)) & Full(),
    Full() & Documents((0, 4, 11), None, (0, 5, 13), (2, 8)),
    PrefixLM(3) & SlidingWindow(5, None),
    BidirectionalSpans(((1, 4), (6, 12))) & SlidingWindow(2, None) & BLOCKS,
    PerRow((BidirectionalSpans(((0, 9),)), BidirectionalSpans(((2, 5), (7, 8)), (4, 4)))) & Keys(((0, 8),)),
    PerRow((Causal(), SlidingWindow(2))) & BLOCKS,
    key_padding(torch.rand(2, KV_LEN, generator=torch.Generator().manual_seed(1)) > 0.5) & CausalBottomRight(),
]


class Diagonal(Mask):
    """A mask of a user's, who says nothing of positions."""

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        return (Region(0, q_len, 0, kv_len, 0, 0),)


@pytest.mark.parametrize("mask", [*SINGLE, *COMBINED], ids=str)
def test_regions_are_the_definition(mask: Mask) -> None:
    expected = painted(mask, 2, Q_LEN, KV_LEN)
    found = allowed(mask, (Q_LEN, KV_LEN), torch.arange(Q_LEN), torch.arange(KV_LEN))
    assert torch.equal(found.expand_as(expected), expected)
    work = expected.sum(-1) if mask.rows is None else expected.sum(-1).sum(0, keepdim=True)
    assert torch.equal(work_by_token(mask, (Q_LEN, KV_LEN)), work[0])
    assert torch.equal(work_by_token(mask, (Q_LEN, KV_LEN), "kv"), expected[: mask.rows or 1].sum((0, 1)))


@pytest.mark.parametrize("mask", [mask for mask in (*SINGLE, *COMBINED) if mask.rows is None], ids=str)
def test_regions_are_disjoint(mask: Mask) -> None:
    """What two regions held would be attended to twice."""
    one_by_one = sum(int(region_pairs) for region_pairs in _pairs_by_region(mask))
    assert one_by_one == int(painted(mask, 1, Q_LEN, KV_LEN).sum())


def _pairs_by_region(mask: Mask) -> list[int]:
    found = []
    for r in (part for region in mask.regions(Q_LEN, KV_LEN) for part in region.rectangles()):
        pairs = torch.arange(r.k_start, r.k_stop) - torch.arange(r.q_start, r.q_stop).unsqueeze(1)
        low = -99 if r.lower is None else r.lower
        high = 99 if r.upper is None else r.upper
        found.append(int(((pairs >= low) & (pairs <= high)).sum()))
    return found


def test_keys_are_padded_like_queries_unless_they_have_documents_of_their_own() -> None:
    like_queries, own = Documents((0, 4, 11), (3, 5)), Documents((0, 4, 11), (3, 5), (0, 4, 11))
    assert [region.k_stop for region in like_queries.regions(11, 11)] == [3, 9]
    assert [region.k_stop for region in own.regions(11, 11)] == [4, 11]


def test_masks_are_compared_by_value_and_read_well() -> None:
    assert Causal() & Keys(((0, 4),)) == Causal() & Keys(((0, 4),))
    assert hash(Documents((0, 4, 8))) == hash(Documents([0, 4, 8]))  # type: ignore[arg-type]
    assert repr(SlidingWindow(3)) == "SlidingWindow(left=3, right=0)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlidingWindow(-1), r"SlidingWindow\(left=-1\) is not valid.* or None for no bound"),
        (lambda: SlidingWindow(4, -2), r"SlidingWindow\(right=-2\) is not valid"),
        (lambda: PrefixLM(-1), "number of tokens in the prefix"),
        (lambda: PrefixLM(99).regions(16, 16), r"PrefixLM\(prefix=99\) goes beyond the 16 keys .* or Full\(\)"),
        (lambda: Documents((0, 8, 4)), "must not decrease, but document 1 runs from 8 to 4"),
        (lambda: Documents((0, 8, 12)).regions(16, 16), "ends at 12, but the sequence has 16 tokens"),
        (lambda: Documents((0, 4, 8), None, (0, 2, 8)) & Diagonal(), "no common positions"),
        (lambda: Documents((0, 8), (9,)), "do not fit into documents of"),
        (lambda: Documents((0, 8), None, (0, 4, 8)), "1 documents of queries and 2 of keys"),
        (lambda: Documents((0, 4, 8), None, (0, 2, 8)) & Causal(), "have no common positions"),
        (lambda: Documents((0, 8), None, (0, 9)) & PerRow((Full(), Causal())), "have no common positions"),
        (lambda: Causal() & PerRow((Full(), Documents((0, 8), None, (0, 9)))), "have no common positions"),
        (lambda: Full() & Documents((0, 8), None, (0, 9)) & Causal(), "have no common positions"),
        (lambda: Documents((0, 8), None, (0, 9)) & (Full() & Causal()), "have no common positions"),
        (lambda: Keys(((4, 2),)), "in ascending order"),
        (lambda: Keys(((-1, 2),)), "from 0 on"),
        (lambda: Keys(((0, 9),)).regions(8, 8), "beyond the 8 keys"),
        (lambda: BidirectionalSpans(((0, 5), (4, 6))), r"BidirectionalSpans\(\(\(0, 5\), .* in ascending order"),
        (lambda: BidirectionalSpans((), left=-1), "how many tokens before it a token attends to"),
        (lambda: BidirectionalSpans(((0, 9),)).regions(8, 8), "up to 9 go beyond the 8 keys"),
        (lambda: BidirectionalSpans(((0, 2), (4, 6)), (1,)), "2 spans and 1 numbers of groups; give the number of a"),
        (lambda: BlockMask.of(torch.ones(2, 2), 4), "bool tensor .*, got torch.float32"),
        (lambda: BlockMask.of(torch.ones(2, dtype=torch.bool), 4), r"got torch.bool \[2\]"),
        (lambda: BlockMask.of(torch.ones(2, 2, dtype=torch.bool), 4).regions(16, 8), "does not fit 16 queries"),
        (lambda: BlockMask(0, ((True,),)), "needs block >= 1, got 0"),
        (lambda: key_padding(torch.ones(2, 8)), r"bool tensor \[batch, keys\], got torch.float32"),
        (lambda: key_padding(torch.ones(8, dtype=torch.bool)), r"got torch.bool \[8\]"),
        (
            lambda: key_padding(torch.ones(2, 8, dtype=torch.bool)).of_row(0).regions(16, 16),
            "says which of 8 keys are real, but there are 16, those of all ranks: give it for the whole",
        ),
        (lambda: PerRow((Full(),) * 2) & PerRow((Full(),) * 3), "masks for 2 and 3 batch rows do not combine"),
        (lambda: Causal() & "causal", "only masks combine with &"),  # type: ignore[operator]
    ],
)
def test_what_is_no_mask_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


AHEAD = [
    *SINGLE[:11],
    Keys(((3, 7),)),
    Causal() & Keys(((3, 7),)),
    SlidingWindow(2, 3) & SlidingWindow(4),
    SlidingWindow(2, 3) & PrefixLM(5),
    BidirectionalSpans(()),
    BidirectionalSpans(((2, 4),)),
    BidirectionalSpans(((2, 3), (5, 6)), (1, 1)),
]


@pytest.mark.parametrize("mask", AHEAD, ids=str)
def test_a_mask_says_whether_a_query_sees_what_comes_after_it(mask: Mask) -> None:
    """Else padding behind a sequence would be attended to. (An empty prefix may say that it does.)"""
    everyone = torch.arange(12)
    ahead = bool(allowed(mask, (12, 12), everyone, everyone).triu(1).any())
    assert mask.looks_ahead == (ahead or mask == PrefixLM(0))
    assert PerRow((Causal(), mask)).looks_ahead == mask.looks_ahead


def test_documents_are_known_wherever_they_stand() -> None:
    documents = Documents((0, 4, 8))
    for mask in (documents, documents & Causal(), Causal() & documents, Full() & (Causal() & documents)):
        assert mask.documents == (0, 4, 8)
    assert Causal().documents is None
    assert Documents((0, 4, 8), None, (0, 2, 8)).documents is None, "keys have other documents"
    assert not Documents((0, 4, 8), None, (0, 4, 8)).shifts
    assert (Documents((0, 4, 8), None, (0, 4, 8)) & Causal()).documents == (0, 4, 8)


def test_a_number_given_as_a_tensor_is_the_number_that_it_was() -> None:
    """Masks are keys of what is kept of a call; a tensor would be one by identity, whatever is written into it."""
    left, prefix, block, length = (torch.tensor(n) for n in (3, 5, 2, 8))
    made = SlidingWindow(left), PrefixLM(prefix), BlockMask(block, ((True,),)), Tokens(length)
    for number in (left, prefix, block, length):
        number.fill_(1)
    assert made == (SlidingWindow(3), PrefixLM(5), BlockMask(2, ((True,),)), Tokens(8))
    assert all(type(number) is int for number in (made[0].left, made[1].prefix, made[2].block, made[3].length))


def test_masks_have_no_truth_value() -> None:
    """`and` of two masks would be the second one."""
    for mask in (Causal(), Causal() & Full()):
        with pytest.raises(TypeError, match="masks combine with &"):
            bool(mask)


@dataclass(frozen=True)
class Streaming(Mask):
    """A user's mask: the first two tokens, and a window that begins at key `start`."""

    start: int

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        seen = Region(0, q_len, 0, 2, upper=0)
        return seen, Region(0, q_len, self.start, kv_len, lower=-3, upper=0)


@pytest.mark.parametrize("combined", [False, True])
def test_regions_of_a_users_mask_may_not_overlap(combined: bool) -> None:
    right, wrong = (Streaming(start) & Keys(((0, 9),)) if combined else Streaming(start) for start in (2, 0))
    assert regions_of(right, 12, 12) == right.regions(12, 12)
    with pytest.raises(ValueError, match=r"regions of the mask .*Streaming\(start=0\).* overlap, so that keys"):
        regions_of(wrong, 12, 12)
    ring, x = VirtualRing(Topology(1, 2)), torch.zeros(1, 12, 1, 4)
    with pytest.raises(ValueError, match="return disjoint regions"):
        ring.attention(x, x, x, mask=wrong)


@pytest.mark.parametrize("lower", [-5, -4])
def test_bands_that_pass_each_other_do_not_overlap(lower: int) -> None:
    """Two bands in one rectangle, side by side or with a common diagonal."""

    @dataclass(frozen=True)
    class Bands(Mask):
        def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
            near, far = Region(0, q_len, 0, kv_len, lower, 0), Region(0, q_len, 0, kv_len, -9, -5)
            return near, far

    if lower == -4:
        assert len(regions_of(Bands(), 12, 12)) == 2
    else:
        with pytest.raises(ValueError, match="overlap"):
            regions_of(Bands(), 12, 12)
