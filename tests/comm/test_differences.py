"""Where ranks differ in values that are too long to be told whole: found by all ranks alike, and named."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from burst_plugin import (
    BidirectionalSpans,
    BlockMask,
    Causal,
    ContextParallel,
    Documents,
    Keys,
    Mask,
    PerRow,
    Scores,
    SlidingWindow,
    burst_attention,
)
from burst_plugin.comm import differences as differences_module
from burst_plugin.comm.consistency import EXCHANGE_BYTES, ConsistencyCheck, Constants, decode, encode
from burst_plugin.comm.differences import TensorValues, differences
from burst_plugin.sequence.mask import Region
from tests.support.ranks import as_on_gpus, run_ranks

STARTS = tuple(range(0, 40 * 1001, 40))


def starts_with(entry: int, value: int) -> tuple[int, ...]:
    """`STARTS` with another number at one entry."""
    return (*STARTS[:entry], value, *STARTS[entry + 1 :])


def found_by(said: Sequence[Mapping[str, object]]) -> tuple[list[str], int]:
    """What each rank finds, and in how many exchanges, each with what the ring's can hold."""
    board, raised = [""] * len(said), list[BaseException]()
    barrier, found, exchanges = threading.Barrier(len(said), timeout=20.0), [""] * len(said), Counter[int]()

    def run(rank: int) -> None:
        def tell(text: str) -> list[str]:
            exchanges[rank] += 1
            board[rank] = decode(encode(text))
            barrier.wait()
            told = [*board]
            barrier.wait()
            return told

        try:
            found[rank] = differences(said[rank], tell)
        except BaseException as error:
            barrier.abort()
            raised.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(said))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not raised, raised
    assert len(set(exchanges.values())) == 1, "every rank comes to every exchange"
    return found, exchanges[0]


@dataclass(frozen=True)
class Written(Mask):
    """A mask whose only field is written at length."""

    text: str

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        return ()


ALLOWED = tuple(tuple((row + column) % 3 > 0 for column in range(120)) for row in range(120))
ODD_ROW = (*ALLOWED[7][:90], not ALLOWED[7][90], *ALLOWED[7][91:])
SPANS = tuple((8 * n, 8 * n + 5) for n in range(300))


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        (
            [Documents(STARTS), Documents(starts_with(812, 32470))],
            "mask: Documents.cu_seqlens differs at entry 812: rank 0: 32480; rank 1: 32470",
        ),
        (
            [Documents(STARTS), Documents(STARTS), Documents(STARTS), Documents(starts_with(1000, 40030))],
            "mask: Documents.cu_seqlens differs at entry 1000: rank 3: 40030; rank 0, 1, 2: 40000",
        ),
        (
            [Documents(STARTS), Documents(STARTS[:900])],
            "mask: Documents.cu_seqlens differs at entry 900: rank 0: 36000; rank 1: nothing, there are 900",
        ),
        (
            [Documents(STARTS, (40,) * 1000), Documents(STARTS)],
            "mask: Documents.lengths differs: rank 0: (40, 40, .*; rank 1: None",
        ),
        (
            [Causal() & Documents(STARTS), Causal() & Documents(starts_with(1, 39))],
            "mask: Both.other: Documents.cu_seqlens differs at entry 1: rank 0: 40; rank 1: 39",
        ),
        (
            [PerRow((Keys(()), Keys(SPANS))), PerRow((Keys(()), Keys((*SPANS[:250], (2000, 2004), *SPANS[251:]))))],
            "mask: PerRow.masks at entry 1: Keys.spans differs at entry 250: rank 0: (2000, 2005); rank 1: (2000, 20",
        ),
        (
            [BidirectionalSpans(SPANS), BidirectionalSpans((*SPANS[:250], (2000, 2004), *SPANS[251:]))],
            "mask: BidirectionalSpans.spans differs at entry 250: rank 0: (2000, 2005); rank 1: (2000, 2004)",
        ),
        (
            [BlockMask(8, ALLOWED), BlockMask(8, (*ALLOWED[:7], ODD_ROW, *ALLOWED[8:]))],
            "mask: BlockMask.allowed at entry 7 differs at entry 90: rank 0: 1; rank 1: 0",
        ),
        (
            [Documents(STARTS), SlidingWindow(3)],
            "mask differs: rank 0: Documents(.* ...; rank 1: SlidingWindow(left=3",
        ),
        (
            [Written("x" * 9000 + "y"), Written("x" * 9000 + "z")],
            "mask: Written.text differs at character 8960: rank 0: x.*xy; rank 1: x.*xz",
        ),
    ],
    ids=lambda x: x.partition(":")[0] if isinstance(x, str) else "",
)
def test_the_first_place_where_masks_differ_is_named_on_every_rank(masks: list[Mask], message: str) -> None:
    found, exchanges = found_by([{"batch": 1, "mask": mask, "scores": Scores()} for mask in masks])
    assert len(set(found)) == 1
    pattern = re.escape(message).replace(re.escape(".*"), ".*")
    assert re.match(pattern, found[0]), found[0]
    assert exchanges < 12


def test_a_million_entries_take_a_few_exchanges() -> None:
    many = tuple(range(1_000_001))
    other = (*many[:765_432], many[765_433], *many[765_433:])
    found, exchanges = found_by([{"mask": Documents(many)}, {"mask": Documents(other)}])
    assert found == ["mask: Documents.cu_seqlens differs at entry 765432: rank 0: 765432; rank 1: 765433"] * 2
    assert exchanges <= 9


def test_everything_that_differs_is_named_and_ranks_that_do_something_else_are_not_asked_further() -> None:
    one = {"batch": 1, "mask": Documents(STARTS), "scores": Scores()}
    other = {"batch": 2, "mask": Documents(starts_with(5, 201)), "scores": Scores()}
    found, _ = found_by([one, other])
    where = "mask: Documents.cu_seqlens differs at entry 5: rank 0: 200; rank 1: 201"
    assert found == [f"batch differs: rank 0: 1; rank 1: 2; {where}"] * 2
    assert found_by([one, {"unshard": 1}, one]) == ([""] * 3, 1)


def test_what_is_written_otherwise_in_equal_parts_is_shown() -> None:
    values = [TensorValues(torch.arange(64, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    found, _ = found_by([{"sink": each} for each in values])
    assert found[0].startswith("sink differs: rank 0: torch.float32 (0.0, 1.0, 2.0,")
    assert "rank 1: torch.float64 (0.0, " in found[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_checksum_is_the_weighted_sum_however_it_is_added_up(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 50, generator=torch.Generator().manual_seed(1)) * 9).to(dtype).t()
    numbers = x.float().contiguous().view(torch.int32) if x.is_floating_point() else x
    weights = torch.arange(1, 151) % 65521 + 1
    expected = int((numbers.flatten().long() * weights).sum() % differences_module.CHECKSUMS)
    for at_once in (7, 150, 1000):
        with mock.patch.object(differences_module, "VALUES_AT_ONCE", at_once):
            assert differences_module.checksum_of([x]) == expected
            assert differences_module.checksum_of([x, x]) == 32 * expected % differences_module.CHECKSUMS


# ------------------------------------------------------------------------------------------------------ real ranks


def _compares(rank: int, masks: dict[int, Mask], in_one: bool) -> tuple[str, int, set[int]]:
    """The error of one call, how many exchanges it took, and the sizes of all messages."""
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=2)
    assert cp.agreement.consistency is not None
    cp.agreement.consistency.in_one = in_one  # as with NCCL
    x, message = torch.zeros(1, 1000, 1, 1), ""
    with mock.patch.object(
        ConsistencyCheck, "exchange", autospec=True, side_effect=ConsistencyCheck.exchange
    ) as exchange:
        try:
            burst_attention(x, x, x, cp, mask=masks.get(rank, Causal()))
        except ValueError as error:
            message = str(error)
    return message, exchange.call_count, {len(encode(call.args[1])) for call in exchange.mock_calls}


@pytest.mark.parametrize("in_one", [False, True])
def test_ranks_whose_long_masks_differ_are_told_where(in_one: bool) -> None:
    masks = {rank: Documents((*range(0, 2000, 2), 2000, 4000)) for rank in range(4)}
    masks[3] = Documents((*range(0, 1624, 2), 1625, *range(1626, 2000, 2), 2000, 4000))
    outcomes = run_ranks(_compares, 4, masks, in_one)
    assert len(set(map(str, outcomes))) == 1
    message, exchanges, sizes = outcomes[0]
    where = "mask: Documents.cu_seqlens differs at entry 812: rank 3: 1625; rank 0, 1, 2: 1624"
    assert message.endswith(f"all must pass the same shapes, types and options: {where}")
    assert exchanges == 8
    assert sizes == {EXCHANGE_BYTES}


def test_long_masks_that_are_the_same_take_one_exchange_as_short_ones() -> None:
    same = {rank: Documents((*range(0, 2000, 2), 2000, 2000)) for rank in range(2)}
    long, short = run_ranks(_compares, 2, same, False), run_ranks(_compares, 2, {}, False)
    assert [outcome[:2] for outcome in long] == [outcome[:2] for outcome in short] == [("", 2)] * 2, "one to connect"


def _of_other_parts(rank: int) -> str:
    consistency = ConsistencyCheck(dist.group.WORLD, rank, [0, 1])
    mask = Documents((*range(0, 2000, 2), 2000))
    with pytest.raises(ValueError, match="disagree") as found:
        consistency.compare("a test", {"mask": mask}, "", Constants({"layout": "zigzag", "parts": 1 + rank}))
    return str(found.value)


def test_options_that_differ_behind_a_long_mask_are_named() -> None:
    told = run_ranks(_of_other_parts, 2, timeout_s=20.0)
    assert told[0] == told[1]
    assert told[0].endswith("options: parts differs: rank 0: 1; rank 1: 2")


def _compares_with_another_that_does_not(rank: int) -> str:
    consistency = ConsistencyCheck(dist.group.WORLD, rank, [0, 1, 2])
    if rank == 2:
        return str(len(consistency.exchange("node: a", "a test")))
    with pytest.raises(ValueError, match="disagree") as found:
        consistency.compare("a test", {"passes": 0, "mask": Documents(starts_with(5, 200 + rank))}, "")
    return str(found.value)


def test_a_rank_that_does_not_compare_is_not_waited_for() -> None:
    told = run_ranks(_compares_with_another_that_does_not, 3, timeout_s=20.0)
    assert told[0] == told[1]
    assert "rank 2: node: a" in told[0]


def _sinks(
    rank: int, heads: int, odd: float, options: dict[str, Any], sparse: bool = False
) -> tuple[list[str], list[int]]:
    """The errors of three calls, in whose last rank 1 has another sink, and how often each read it."""
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=2, **options)
    cp = as_on_gpus(cp) if sparse else cp
    x, errors, reads = torch.zeros(1, 4, heads, 2), [], []
    for call in (1, 2, 3):
        sink = torch.arange(heads).float().requires_grad_()
        if rank == 1 and call == 3:
            sink.data[heads - 2] = odd
        with mock.patch.object(TensorValues, "__repr__", autospec=True, side_effect=TensorValues.__repr__) as read:
            try:
                burst_attention(x, x, x, cp, sink=sink)
                errors.append("")
            except ValueError as error:
                errors.append(str(error))
        reads.append(int(read.called))
    return errors, reads


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("options", [{}, {"ulysses_degree": 2}], ids=str)
def test_ranks_whose_sinks_have_other_values_are_told(options: dict[str, Any], ranks: int) -> None:
    others = ", ".join(map(str, [0, *range(2, ranks)]))
    for errors, _ in run_ranks(_sinks, ranks, 4, 0.5, options):
        assert errors[:2] == [""] * 2
        assert f"rank {others}: sink=torch.float32 (0.0, 1.0, 2.0, 3.0)" in errors[2]
        assert "rank 1: sink=torch.float32 (0.0, 1.0, 0.5, 3.0)" in errors[2]
    for errors, _ in run_ranks(_sinks, ranks, 256, 0.5, options):
        _, _, differs = errors[2].partition("sink differs at entry 254: ")
        assert sorted(differs.split("; ")) == [f"rank {others}: 254.0", "rank 1: 0.5"]


def test_sinks_are_read_only_where_ranks_compare_calls() -> None:
    """On GPUs to read one is to wait for all that is queued there."""
    for errors, reads in run_ranks(_sinks, 2, 4, 0.5, {}, True):
        assert errors == [""] * 3, "the third call is not compared"
        assert reads == [1, 1, 0]
    x = torch.zeros(1, 4, 2, 2)
    with mock.patch.object(TensorValues, "__repr__") as read:
        burst_attention(x, x, x, ContextParallel(), sink=torch.zeros(2))
    assert not read.called, "a rank alone has none to compare with"
