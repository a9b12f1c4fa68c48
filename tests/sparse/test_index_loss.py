"""The loss that trains an indexer, over ranks: equal to its definition on one rank, with its gradients."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from burst_plugin import ContextParallel
from burst_plugin.sparse import Indexed, Teacher, indexer_loss
from tests.support.ranks import run_ranks

BATCH, LENGTH, HEADS, DIM, LATENT, SHARED = 2, 12, 4, 6, 5, 2
NAMES = ("loss", "index_q", "index_k", "weights")


def _drawn() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    selection = torch.rand(BATCH, LENGTH, LENGTH, generator=generator).argsort(-1)[..., :4]
    selection = torch.where(selection <= torch.arange(LENGTH).view(-1, 1), selection, -1)  # some select nothing
    return {
        "q": draw(BATCH, LENGTH, HEADS, DIM),
        "k": draw(BATCH, LENGTH, 2, DIM),
        "latents": draw(BATCH, LENGTH, 1, LATENT + SHARED),
        "weight": draw(HEADS, DIM - SHARED, LATENT),
        "index_q": draw(BATCH, LENGTH, 3, 8),
        "index_k": draw(BATCH, LENGTH, 8),
        "weights": draw(BATCH, LENGTH, 3),
        "selection": selection.to(torch.int32),
    }


def _defined(latent: bool, listed: bool) -> list[Tensor]:
    """The loss and its gradients, written out."""
    x = _drawn()
    index = [x[name].requires_grad_() for name in NAMES[1:]]
    keys = x["k"].repeat_interleave(2, 2)
    if latent:
        own = torch.einsum("bshc,hdc->bshd", x["latents"][..., :LATENT].expand(-1, -1, HEADS, -1), x["weight"])
        keys = torch.cat([own, x["latents"][..., LATENT:].expand(-1, -1, HEADS, -1)], -1)
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(BATCH, -1, -1)
    if listed:
        allowed = (x["selection"].unsqueeze(-1) == torch.arange(LENGTH)).any(2)
    counts = allowed.any(-1)
    allowed = allowed | ~counts.unsqueeze(-1)
    scores = torch.einsum("bthd,bshd->bhts", x["q"], keys) * 0.7
    target = scores.masked_fill(~allowed.unsqueeze(1), -torch.inf).softmax(-1).mean(1)
    products = torch.einsum("bthd,bsd->bhts", index[0], index[1]).mul(0.3).relu()
    found = torch.einsum("bth,bhts->bts", index[2], products).masked_fill(~allowed, -torch.inf).softmax(-1)
    loss = ((target * ((target + 1e-10).log() - (found + 1e-10).log())).sum(-1) * counts).sum()
    return [loss.detach(), *torch.autograd.grad(loss * 0.5, index)]


def _found(rank: int, numbers: int) -> dict[tuple[bool, bool], list[Tensor]]:
    """The loss of all ranks, and this rank's gradients, for latents or keys, and lists or all keys."""
    cp, whole, found = ContextParallel(dist.group.WORLD), _drawn(), {}
    for latent in (False, True):
        for listed in (False, True):
            x = {name: tensor if name == "weight" else cp.shard(tensor) for name, tensor in whole.items()}
            index = [x[name].requires_grad_() for name in NAMES[1:]]
            teacher = Teacher(x["q"], x["k"], 0.7)
            if latent:
                teacher = Teacher(x["q"], x["latents"], 0.7, x["weight"])
            selection = x["selection"] if listed else None
            with mock.patch("burst_plugin.sparse.index_loss.NUMBERS_AT_ONCE", numbers):
                loss = indexer_loss(teacher, Indexed(*index), cp, scale=0.3, selection=selection)
            grads = torch.autograd.grad(loss * 0.5, index)
            total = loss.detach().clone()
            dist.all_reduce(total)
            found[latent, listed] = [total, *(cp.unshard(grad) for grad in grads)]
    return found


@pytest.mark.parametrize(("ranks", "numbers"), [(1, 1), (2, 400), (4, 10**6)])
def test_loss_and_gradients_are_those_of_the_definition(ranks: int, numbers: int) -> None:
    for result in run_ranks(_found, ranks, numbers):
        for way, found in result.items():
            for name, one, other in zip(NAMES, found, _defined(*way), strict=True):
                assert torch.allclose(one, other, rtol=1e-11, atol=1e-12), (way, name)


def test_autocast_does_not_round_it() -> None:
    def loss_and_gradient(rank: int) -> list[Tensor]:
        cp, x, found = ContextParallel(dist.group.WORLD), {name: each.float() for name, each in _drawn().items()}, []
        for is_cast in (False, True):
            index = [x[name].detach().requires_grad_() for name in NAMES[1:]]
            with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                loss = indexer_loss(Teacher(x["q"], x["k"], 0.7), Indexed(*index), cp, scale=0.3)
            found += [loss.detach(), *torch.autograd.grad(loss, index)]
        return found

    (found,) = run_ranks(loss_and_gradient, 1)
    assert all(torch.equal(*pair) for pair in zip(found[:4], found[4:], strict=True))


def test_an_indexer_that_is_frozen_has_a_loss() -> None:
    def frozen(rank: int) -> Any:
        cp, x = ContextParallel(dist.group.WORLD), _drawn()
        loss = indexer_loss(Teacher(x["q"], x["k"], 0.7), Indexed(*(x[name] for name in NAMES[1:])), cp, scale=0.3)
        return loss.requires_grad, loss

    ((requires_grad, loss),) = run_ranks(frozen, 1)
    assert not requires_grad
    torch.testing.assert_close(loss, _defined(False, False)[0])


def test_a_checkpoint_runs_the_layer_once_more_however_many_tiles_there_are() -> None:
    def runs(rank: int) -> tuple[int, int]:
        cp, x, count = ContextParallel(), _drawn(), 0

        def layer(hidden: Tensor) -> Tensor:
            nonlocal count
            count += 1
            index = [x[name] * hidden for name in NAMES[1:]]
            return indexer_loss(Teacher(x["q"] * hidden, x["k"], 0.7), Indexed(*index), cp, scale=0.3)

        with mock.patch("burst_plugin.sparse.index_loss.NUMBERS_AT_ONCE", 1):
            loss = checkpoint(layer, torch.ones((), dtype=torch.float64, requires_grad=True), use_reentrant=False)
            before = count
            loss.backward()
        return before, count

    assert run_ranks(runs, 1) == [(1, 2)]
