"""Whole sequences and shifted ones: values and gradients of one rank, in any layout."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin import Causal, ContextParallel, Documents, Keys, PerRow, PrefixTree, Region, Tokens
from burst_plugin.sequence.mask import Both
from burst_plugin.sequence.masks import Mask, document_starts, key_padding
from tests.support.ranks import run_ranks

LAYOUTS = ("zigzag", "striped", "contiguous")
CASES = 84  # for 1, 2 and 4 ranks, of both kinds: 504
BOUND = 1e-12


class Case(NamedTuple):
    """A whole tensor, the dimension of its tokens, and how it is shifted."""

    x: Tensor
    dim: int
    by: int
    mask: Mask | None
    tokens: Tokens | None
    fill: float

    @classmethod
    def draw(cls, number: int, cp: ContextParallel) -> Case:
        """Draw a case, the same on every rank."""
        rng, generator = random.Random(number), torch.Generator().manual_seed(number)
        length, dim = rng.randint(1, 40), rng.choice([0, 1, 2])
        sizes = [rng.randint(1, 3), 3, 2]
        sizes[dim] = length
        x = torch.randn(sizes, generator=generator, dtype=torch.float64)
        mask = None if dim == 0 else _mask(rng, length, sizes[0])
        tokens: Tokens | None = Tokens(length)
        if rng.random() < 0.3:
            tokens = cp.tokens(length, Causal())
        elif length % (2 * cp.ranks) == 0:
            tokens = None
        return cls(x, dim, rng.choice([-1, 1, -3, 7, 0, -length]), mask, tokens, rng.choice([0, -100]))

    def shifted(self) -> Tensor:
        """Return the whole tensor shifted, by the definition."""
        rows = self.x.movedim(self.dim, 0)
        found = torch.full_like(rows, self.fill)
        for row in range(self.mask.rows if self.mask is not None and self.mask.rows else 1):
            mask = None if self.mask is None else self.mask.of_row(row)
            for target in range(len(rows)):
                source = target - self.by
                if 0 <= source < len(rows) and -1 != _document(mask, source) == _document(mask, target):
                    if self.mask is not None and self.mask.rows:
                        found[target, row] = rows[source, row]
                    else:
                        found[target] = rows[source]
        return found.movedim(0, self.dim)


def _mask(rng: random.Random, length: int, rows: int) -> Mask | None:
    def documents() -> Mask:
        inner = sorted(rng.sample(range(1, length), min(length - 1, rng.randint(0, 4))))
        return Documents((0, *inner, length))

    kind = rng.choice(["none", "one", "rows", "padded", "right", "lengths"])
    if kind == "none":
        return None
    if kind == "padded":
        first = torch.tensor([rng.randrange(length) for _ in range(rows)])
        return Causal() & key_padding(torch.arange(length) >= first.unsqueeze(1))
    if kind == "right":
        last = torch.tensor([rng.randint(1, length) for _ in range(rows)])
        return Causal() & key_padding(torch.arange(length) < last.unsqueeze(1))
    if kind == "lengths":
        bounds = (0, *sorted(rng.sample(range(1, length), min(length - 1, 2))), length)
        return Documents(bounds, tuple(rng.randint(0, stop - start) for start, stop in pairwise(bounds)))
    return PerRow(tuple(documents() for _ in range(rows))) if kind == "rows" else documents() & Causal()


def _document(mask: Mask | None, token: int) -> int:
    """Return where the document of a token starts, -1 for padding."""
    if mask is None:
        return 0
    return (
        max((start for start in document_starts(mask) if start <= token), default=0) if _is_real(mask, token) else -1
    )


def _is_real(mask: Mask, token: int) -> bool:
    if isinstance(mask, Both):
        return _is_real(mask.one, token) and _is_real(mask.other, token)
    if isinstance(mask, Keys):
        return any(start <= token < stop for start, stop in mask.spans)
    if isinstance(mask, Documents) and mask.lengths is not None:
        return any(start <= token < start + n for start, n in zip(mask.cu_seqlens, mask.lengths, strict=False))
    return True


def _worst_errors(rank: int, cases: int) -> dict[str, float]:
    """Return the largest error of values and gradients, of each kind of call."""
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    rings = [ContextParallel(group, layout=layout) for layout in LAYOUTS]
    worst: dict[str, float] = {}
    for number in range(cases):
        cp = rings[number % len(rings)]
        case = Case.draw(number, cp)
        for kind, error in _errors(case, cp):
            worst[kind] = max(worst.get(kind, 0.0), error)
    return worst


def _errors(case: Case, cp: ContextParallel) -> Sequence[tuple[str, float]]:
    def local(x: Tensor) -> Tensor:
        return cp.shard(x, case.dim, case.tokens)

    def apart(found: Tensor, expected: Tensor) -> float:
        return float((found - expected).abs().max()) if expected.numel() else 0.0

    of_ranks = [torch.randn(case.x.shape, generator=torch.manual_seed(rank)).double() for rank in range(cp.ranks)]
    found = []
    for loss, weight, of_all in (("same", of_ranks[0], of_ranks[0]), ("own", of_ranks[cp.rank], sum(of_ranks))):
        x = local(case.x).requires_grad_()
        whole = cp.unshard(x, case.dim, case.tokens, loss=loss)  # type: ignore[arg-type]
        (whole.sin() * weight).sum().backward()
        assert x.grad is not None
        found.append((f"whole, {loss}", apart(whole.detach(), case.x)))
        found.append((f"gradient, {loss}", apart(x.grad, local(case.x.cos() * of_all))))
    x, reference = local(case.x).requires_grad_(), case.x.clone().requires_grad_()
    one = case._replace(x=reference).shifted()
    moved = cp.shift(x, case.by, case.dim, case.tokens, mask=case.mask, fill=case.fill)
    (moved.sin() * local(of_ranks[0])).sum().backward()
    if one.requires_grad:  # not where every value is beyond the end
        (one.sin() * of_ranks[0]).sum().backward()
    assert x.grad is not None
    expected = torch.zeros_like(case.x) if reference.grad is None else reference.grad
    return [*found, ("shifted", apart(moved.detach(), local(one.detach()))), ("back", apart(x.grad, local(expected)))]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tokens_of_other_ranks_come_with_their_gradients(ranks: int) -> None:
    for worst in run_ranks(_worst_errors, ranks, CASES):
        assert len(worst) == 6
        assert all(error < BOUND for error in worst.values()), worst


def _labels(rank: int) -> Any:
    cp = ContextParallel(dist.group.WORLD, layout="striped")
    ids = cp.shard(torch.arange(10, 18).view(1, 8))
    flags = cp.shard(torch.tensor([[True, False] * 4]))
    problems = []
    for call in (
        lambda: cp.unshard(ids, loss="other"),  # type: ignore[arg-type]
        lambda: cp.shift(ids, 1 + rank),
        lambda: cp.shift(ids, 1, mask=PrefixTree((-1, 0), (4, 4))),
    ):
        try:
            call()
        except ValueError as error:
            problems.append(str(error))
    return cp.shift(ids, -1, fill=-100).tolist(), cp.shift(flags, 1).tolist(), problems


DTYPES = (torch.bool, torch.int16, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64)


def _of_dtypes(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the bytes of a whole tensor of each type, and of the tensor shifted by a place, from striped tokens."""
    cp, found = ContextParallel(dist.group.WORLD, layout="striped"), []
    for dtype in DTYPES:
        local = cp.shard(torch.arange(1, 17).view(1, 8, 2).to(dtype))
        moved = cp.shift(local.transpose(0, 2), 1, 1).transpose(0, 2)
        found.append(tuple(cp.unshard(x, loss="same").contiguous().view(torch.uint8) for x in (local, moved)))
    return found


def test_tokens_of_any_type_move() -> None:
    for found in run_ranks(_of_dtypes, 2):
        for dtype, (whole, shifted) in zip(DTYPES, found, strict=True):
            x = torch.arange(1, 17).view(1, 8, 2).to(dtype).view(torch.uint8)
            assert torch.equal(whole, x), dtype
            assert torch.equal(shifted, torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)), dtype


def _mistakes(rank: int) -> list[str]:
    """Return the errors of a shift with a gradient on one rank alone, and of second derivatives."""
    cp = ContextParallel(dist.group.WORLD)
    x = torch.randn(1, 8, 2, dtype=torch.float64, requires_grad=True)
    problems = []

    def second_derivative(moved: torch.Tensor) -> None:
        (grad,) = torch.autograd.grad((moved[:, :8] ** 2 * x**2).sum(), x, create_graph=True)
        (grad**2).sum().backward()

    for call in (
        lambda: cp.shift(x if rank == 0 else x.detach(), 1),
        lambda: second_derivative(cp.shift(x, -1)),
        lambda: second_derivative(cp.unshard(x, loss="own")),
    ):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            problems.append(str(error))
    return problems


def test_gradients_on_some_ranks_and_second_derivatives_are_refused() -> None:
    for problems in run_ranks(_mistakes, 2):
        one_sided, shifted, whole = problems
        assert "has a gradient" in one_sided
        assert "once_differentiable" in shifted
        assert "unshard(loss='own') has no second derivatives" in whole


def test_labels_of_next_tokens_are_ids_shifted() -> None:
    (one, of_flags, problems), (other, _, _) = run_ranks(_labels, 2)
    assert one == [[11, 13, 15, 17]]
    assert other == [[12, 14, 16, -100]]
    assert of_flags == [[False] * 4]
    assert "use 'same' or 'own'" in problems[0]
    assert "by" in problems[1]
    assert "several tokens follow one" in problems[2]


@dataclass(frozen=True)
class Halves(Mask):
    """A user's mask: two documents of equal length."""

    length: int

    @property
    def documents(self) -> tuple[int, ...]:
        """Return the bounds of both documents."""
        return 0, self.length // 2, self.length

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        half = self.length // 2
        return Region(0, half, 0, half, upper=0), Region(half, q_len, half, kv_len, upper=0)


def test_documents_of_a_users_mask_keep_their_labels_to_themselves() -> None:
    cp, ids = ContextParallel(), torch.arange(1, 9).unsqueeze(0)
    assert cp.shift(ids, -1, mask=Halves(8), fill=-100).tolist() == [[2, 3, 4, -100, 6, 7, 8, -100]]
    assert torch.equal(
        cp.shift(ids, -1, mask=Documents((0, 4, 8)), fill=-100), cp.shift(ids, -1, mask=Halves(8), fill=-100)
    )


def test_masks_that_do_not_fit_a_shift_are_refused() -> None:
    cp, ids = ContextParallel(), torch.arange(1, 9).unsqueeze(0)
    with pytest.raises(ValueError, match="5"):
        cp.shift(ids, -1, mask=Documents((0, 3, 5)))
    rows = PerRow((Causal(), Causal()))
    for local, dim in ((torch.zeros(8, 2), 0), (torch.zeros(3, 8), 1)):
        with pytest.raises(ValueError, match="the mask has 2 rows"):
            cp.shift(local, -1, dim, mask=rows)


def _of_unlike_losses(rank: int, what: str) -> str:
    """Return the error of a backward pass in which each rank uses another one of two tensors that were moved."""
    cp = ContextParallel(dist.group.WORLD)
    tensors = [torch.ones(1, 4, 1, requires_grad=True) for _ in range(2)]
    moved = [cp.unshard(x, loss="own") if what == "unshard" else cp.shift(x, -1) for x in tensors]
    try:
        moved[rank].sum().backward()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["unshard", "shift"])
def test_backward_passes_of_unlike_tensors_are_an_error_on_every_rank(what: str) -> None:
    for error in run_ranks(_of_unlike_losses, 2, what):
        assert f"before the backward pass of call 1 ({what})" in error
        assert f"before the backward pass of call 2 ({what})" in error
