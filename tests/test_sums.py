"""What accumulates on a side of the visits, on its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from burst_plugin.sums import OwnSums, PlainSums, SoftmaxSums, TileSums
from burst_plugin.tiles import Tile

ROWS = 8


def blank(*shape: int) -> Tensor:
    """As torch.empty may be."""
    return torch.full(shape, torch.nan)


def plain() -> PlainSums:
    return PlainSums((blank(2, ROWS, 3, 4), blank(2, ROWS, 3, 4)))


def softmax() -> SoftmaxSums:
    return SoftmaxSums((blank(2, ROWS, 3, 4), blank(2, 3, ROWS)))


def parts_of(sums: TileSums, rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = [(2, rows, 3, 4) if x.dim() == 4 else (2, 3, rows) for x in sums.tensors]
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("rows", [(0, 3), (2, 5), (5, 8), (0, 8)], ids=str)
@pytest.mark.parametrize("batch", [None, (0, 1), (0, 2)], ids=str)
@pytest.mark.parametrize("make", [plain, softmax])
def test_what_nothing_was_added_to_reads_as_nothing(
    make: type[TileSums], batch: tuple[int, int] | None, rows: tuple[int, int]
) -> None:
    sums = make()  # type: ignore[call-arg]
    parts = [part[slice(*batch) if batch else slice(None)] for part in parts_of(sums, rows[1] - rows[0])]
    sums.add(Tile(*rows, 0, 1, batch=batch), "q", parts)
    sums.settle()
    for tensor, part, nothing in zip(sums.tensors, parts, sums.nothing, strict=True):
        expected = torch.full_like(tensor, nothing)
        of_batch = expected[slice(*batch) if batch else slice(None)]
        of_batch.narrow(1 if tensor.dim() == 4 else 2, rows[0], rows[1] - rows[0]).copy_(part)
        torch.testing.assert_close(tensor, expected)


def test_own_sums_take_the_first_contribution_as_it_is() -> None:
    own = OwnSums((blank(2, ROWS, 3, 4), blank(2, ROWS, 3, 4)), 1, lambda part, views: PlainSums(views))
    given = [torch.ones(2, ROWS, 3, 4), torch.ones(2, 3, ROWS, 4).transpose(1, 2)]
    own.parts[0].add(Tile(0, ROWS, 0, 1), "q", given)
    own.parts[0].add(Tile(0, 2, 0, 1), "q", [torch.ones(2, 2, 3, 4)] * 2)
    own.settle()
    first, second = own.tensors
    assert first.data_ptr() == given[0].data_ptr()
    assert second.data_ptr() != given[1].data_ptr(), "strided: nobody else has to be ready for that"
    for tensor in own.tensors:
        assert bool((tensor[:, :2] == 2).all())
        assert bool((tensor[:, 2:] == 1).all())
        assert tensor._base is None


@pytest.mark.parametrize(
    "part",
    [torch.ones(2, ROWS, 3, 4).double(), torch.ones(2, ROWS, 3, 8)[..., :4], torch.ones(3, ROWS, 3, 4)[:2]],
    ids=["wider", "strided", "of more memory"],
)
def test_own_sums_keep_their_tensors_where_the_contribution_is_not_as_good(part: Tensor) -> None:
    own = OwnSums((blank(2, ROWS, 3, 4),), 1, lambda number, views: PlainSums(views))
    own.parts[0].add(Tile(0, ROWS, 0, 1), "q", [part])
    (tensor,) = own.tensors
    assert (tensor.dtype, tensor.untyped_storage().nbytes()) == (torch.float32, tensor.nbytes)
    assert bool((tensor == 1).all())


@pytest.mark.parametrize("parts", [1, 3])
def test_sums_that_are_sent_stay_where_they_are(parts: int) -> None:
    """In a leased buffer; and parts of own sums stay in the whole."""
    given = torch.ones(2, ROWS, 3 // parts, 4)
    leased = PlainSums((blank(2, ROWS, 3 // parts, 4),))
    place = leased.tensors[0].data_ptr()
    leased.add(Tile(0, ROWS, 0, 1), "q", [given])
    assert leased.tensors[0].data_ptr() == place
    own = OwnSums((blank(2, ROWS, 3, 4),), parts, lambda number, views: PlainSums(views))
    for sums in own.parts:
        sums.add(Tile(0, ROWS, 0, 1), "q", [given])
    assert bool((own.tensors[0] == 1).all())
