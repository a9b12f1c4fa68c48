"""What accumulates on a side of the visits, on its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from burst_plugin.compute.accumulators import SOFTMAX, SUM, Accumulator, BlockAccumulators, Storage, Tensors
from burst_plugin.compute.online_softmax import add_
from burst_plugin.sequence.tiles import Tile
from burst_plugin.types import Side

ROWS = 8


def blank(*shape: int) -> Tensor:
    """As torch.empty may be."""
    return torch.full(shape, torch.nan)


class Blanks:
    """Storage of blank tensors, by default one, which counts how often it is asked for them."""

    length = ROWS

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        self.shapes = shapes or ((2, ROWS, 3, 4),)
        self.asked = 0

    def take(self, kept: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        self.asked += 1
        tensors = tuple(blank(*shape) for shape in self.shapes)
        for tensor, part in zip(tensors, kept or (), strict=False):
            tensor.copy_(part)
        return tensors


def plain() -> Accumulator:
    return Accumulator(SUM, Blanks((2, ROWS, 3, 4), (2, ROWS, 3, 4)))


def softmax() -> Accumulator:
    return Accumulator(SOFTMAX, Blanks((2, ROWS, 3, 4), (2, 3, ROWS)))


def arrived_with(value: float) -> Accumulator:
    """An accumulator that holds something already."""
    return Accumulator(SUM, Blanks(), (torch.full((2, ROWS, 3, 4), value),))


class Sums:
    """A part of the heads whose contributions are added up, on either side."""

    def accumulator(self, side: Side, storage: Storage, tensors: Tensors | None = None) -> Accumulator:
        return Accumulator(SUM, storage, tensors)


def own_accumulators(tensors: int, parts: int = 1) -> BlockAccumulators:
    shapes = [((2, ROWS, 3, 4), torch.float32)] * tensors
    return BlockAccumulators(shapes, torch.device("cpu"), [Sums()] * parts, "q")


def contribution_to(accumulator: Accumulator, rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    assert isinstance(accumulator.storage, Blanks)
    shapes = [(2, rows, 3, 4) if len(shape) == 4 else (2, 3, rows) for shape in accumulator.storage.shapes]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def flat(groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [x for group in groups for x in group]


@pytest.mark.parametrize("rows", [(0, 3), (2, 5), (5, 8), (0, 8)], ids=str)
@pytest.mark.parametrize("batch", [None, (0, 1), (0, 2)], ids=str)
@pytest.mark.parametrize("make", [plain, softmax])
def test_what_nothing_was_added_to_reads_as_nothing(
    make: Callable[[], Accumulator], batch: tuple[int, int] | None, rows: tuple[int, int]
) -> None:
    sums = make()
    parts = [part[slice(*batch) if batch else slice(None)] for part in contribution_to(sums, rows[1] - rows[0])]
    sums.add(Tile(*rows, 0, 1, batch=batch), "q", parts)
    sums.settle()
    for tensor, part, nothing in zip(sums.tensors, parts, sums.combine.nothing, strict=True):
        expected = torch.full_like(tensor, nothing)
        of_batch = expected[slice(*batch) if batch else slice(None)]
        of_batch.narrow(1 if tensor.dim() == 4 else 2, rows[0], rows[1] - rows[0]).copy_(part)
        torch.testing.assert_close(tensor, expected)


def test_own_sums_take_the_first_contribution_as_it_is() -> None:
    own = own_accumulators(2)
    given = [torch.ones(2, ROWS, 3, 4), torch.ones(2, 3, ROWS, 4).transpose(1, 2)]
    own.parts[0].add(Tile(0, ROWS, 0, 1), "q", given)
    own.parts[0].add(Tile(0, 2, 0, 1), "q", [torch.ones(2, 2, 3, 4)] * 2)
    first, second = own.finished(False)
    assert first.data_ptr() == given[0].data_ptr()
    assert second.data_ptr() != given[1].data_ptr(), "strided: nobody else has to be ready for that"
    for tensor in (first, second):
        assert bool((tensor[:, :2] == 2).all())
        assert bool((tensor[:, 2:] == 1).all())
        assert tensor._base is None


@pytest.mark.parametrize(
    "part",
    [torch.ones(2, ROWS, 3, 4).double(), torch.ones(2, ROWS, 3, 8)[..., :4], torch.ones(3, ROWS, 3, 4)[:2]],
    ids=["wider", "strided", "of more memory"],
)
def test_own_sums_keep_their_tensors_where_the_contribution_is_not_as_good(part: Tensor) -> None:
    own = own_accumulators(1)
    own.parts[0].add(Tile(0, ROWS, 0, 1), "q", [part])
    (tensor,) = own.finished(False)
    assert (tensor.dtype, tensor.untyped_storage().nbytes()) == (torch.float32, tensor.nbytes)
    assert bool((tensor == 1).all())


def test_narrow_contributions_are_not_widened_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, bool]] = []

    def recorded(total: Tensor, parts: Sequence[Tensor], filled: bool) -> None:
        taken.append((len(parts), filled))
        add_(total, parts, filled)

    monkeypatch.setattr("burst_plugin.compute.accumulators.fan_in", lambda part: 4)
    monkeypatch.setattr("burst_plugin.compute.accumulators.add_", recorded)
    own = own_accumulators(1)
    for _ in range(8):
        own.parts[0].add(Tile(0, ROWS, 0, 1), "q", [torch.ones(2, ROWS, 3, 4, dtype=torch.bfloat16)])
    (found,) = own.finished(True)
    assert taken == [(4, False), (5, False)], "the last four and the sum so far, into a tensor of their type"
    assert bool((found == 8).all())


@pytest.mark.parametrize("others", [0, 2, 3, 4, 6])
@pytest.mark.parametrize("at_once", [1, 4])
def test_sums_of_narrow_contributions_may_stay_narrow(
    others: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where none has to be widened for that: a single one, and those that are rounded as they are summed up."""
    monkeypatch.setattr("burst_plugin.compute.accumulators.fan_in", lambda part: at_once)
    for rounded in (False, True):
        own = own_accumulators(1)
        for _ in range(others):
            own.parts[0].add(Tile(4, ROWS, 0, 1), "q", [torch.ones(2, ROWS - 4, 3, 4, dtype=torch.bfloat16)])
        own.parts[0].add(Tile(0, ROWS, 0, 1), "q", [torch.ones(2, 3, ROWS, 4, dtype=torch.bfloat16).transpose(1, 2)])
        (found,) = own.finished(rounded)
        narrow = rounded and (others == 0 or at_once == 4)
        assert found.dtype == (torch.bfloat16 if narrow else torch.float32)
        assert found.is_contiguous()
        assert found.shape == (2, ROWS, 3, 4)
        assert found[1, :, 2, 3].tolist() == [1.0] * 4 + [others + 1.0] * 4


def test_a_single_contribution_needs_no_room_until_it_is_sent() -> None:
    room, given = Blanks(), torch.ones(2, ROWS, 3, 4)
    sums = Accumulator(SUM, room)
    sums.add(Tile(0, ROWS, 0, 1), "q", [given])
    arrived = arrived_with(2.0)
    arrived.join(sums, None)
    assert room.asked == 0
    assert bool((arrived.tensors[0] == 3).all())
    sums.add(Tile(2, 4, 0, 1), "q", [torch.ones(2, 2, 3, 4)])
    assert room.asked == 1
    assert bool((given == 1).all()), "it belongs to the kernel"
    assert sums.tensors[0][0, :, 0, 0].tolist() == [1, 1, 2, 2, 1, 1, 1, 1]


@pytest.mark.parametrize("make", [plain, softmax])
def test_several_contributions_are_summed_up_together(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that saves memory traffic; those to one batch row, and what other ranks sent, wait for nobody."""
    monkeypatch.setattr("burst_plugin.compute.accumulators.fan_in", lambda part: 3)
    found, expected = make(), make()
    runs = [(0, ROWS), (4, ROWS), (0, 4), (2, 6), (0, ROWS), (0, 4)]
    given = [contribution_to(expected, stop - start) for start, stop in runs]
    copies = [[x.clone() for x in parts] for parts in given]
    for number, (run, parts) in enumerate(zip(runs, given, strict=True)):
        found.add(Tile(*run, 0, 1), "q", parts)
        assert len(found.waiting) == number % 3 + 1
        monkeypatch.setattr("burst_plugin.compute.accumulators.fan_in", lambda part: 1)
        expected.add(Tile(*run, 0, 1), "q", parts)
        monkeypatch.setattr("burst_plugin.compute.accumulators.fan_in", lambda part: 3)
    assert all(torch.equal(x, y) for x, y in zip(flat(given), flat(copies), strict=True)), "they are the kernel's"
    for got, wanted in zip(found.tensors, expected.tensors, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("make", [plain, softmax])
def test_who_waits_goes_in_before_what_cannot_wait(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burst_plugin.compute.accumulators.fan_in", lambda part: 3)
    sums, arrived = make(), make()
    whole, of_batch, sent = (contribution_to(sums, ROWS) for _ in range(3))
    arrived.join(make(), None)
    for tensor, part in zip(arrived.tensors, sent, strict=True):
        tensor.copy_(part)
    sums.add(Tile(0, ROWS, 0, 1), "q", whole)
    sums.add(Tile(0, ROWS, 0, 1, batch=(0, 1)), "q", [x[:1] for x in of_batch])
    assert not sums.waiting
    sums.add(Tile(0, ROWS, 0, 1), "q", whole)
    sums.join(arrived, None)
    assert not sums.waiting
    for tensor in arrived.tensors:
        tensor.fill_(torch.nan)  # the next message
    count = torch.tensor([4.0, 3.0]).view(2, 1, 1, 1)
    if make is plain:
        torch.testing.assert_close(sums.tensors[0], whole[0] * count)
    else:
        torch.testing.assert_close(sums.tensors[0], whole[0])
        torch.testing.assert_close(sums.tensors[1], whole[1] + count.view(2, 1, 1).log())


def test_what_another_rank_sent_is_copied_out_of_its_buffer() -> None:
    own, arrived = own_accumulators(1), arrived_with(1.0)
    own.parts[0].join(arrived, None)
    arrived.tensors[0].fill_(torch.nan)  # the next message
    assert bool((own.finished(False)[0] == 1).all())


@pytest.mark.parametrize("tiles", [[(0, 3)], [(0, 3), (3, ROWS)], []])
def test_sums_with_room_read_as_nothing_where_nothing_was_added(tiles: list[tuple[int, int]]) -> None:
    sums = Accumulator(SUM, Blanks())
    for start, stop in tiles:
        sums.add(Tile(start, stop, 0, 1), "q", [torch.ones(2, stop - start, 3, 4)])
    sums.settle()
    covered = [float(any(start <= row < stop for start, stop in tiles)) for row in range(ROWS)]
    assert sums.tensors[0][1, :, 2, 3].tolist() == covered


@pytest.mark.parametrize("parts", [1, 3])
def test_sums_that_are_sent_stay_where_they_are(parts: int) -> None:
    """In a leased buffer; and parts of own sums stay in the whole."""
    given = torch.ones(2, ROWS, 3 // parts, 4)
    leased = Accumulator(SUM, Blanks((2, ROWS, 3 // parts, 4)))
    place = leased.tensors[0].data_ptr()
    leased.add(Tile(0, ROWS, 0, 1), "q", [given])
    assert leased.tensors[0].data_ptr() == place
    own = own_accumulators(1, parts)
    for sums in own.parts:
        sums.add(Tile(0, ROWS, 0, 1), "q", [given])
    assert bool((own.finished(False)[0] == 1).all())
