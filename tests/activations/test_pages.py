"""Pages of host memory: every tensor comes back as it was, and pages of those that are gone are used again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from burst_plugin.activations import host_memory, pages
from burst_plugin.activations.host_memory import HostMemory
from burst_plugin.activations.kept_attention import follow_torch
from burst_plugin.activations.pages import Pages, whole_pages
from tests.activations.test_kept_attention import NON_REENTRANT, REENTRANT, Wrapped

CPU = torch.device("cpu")
PAGE = 64


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_BYTES", PAGE)
    monkeypatch.setattr(host_memory, "LEAST_BYTES", 1)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostMemory]:
    """Where checkpoints of this process park what they keep."""
    made, owner = HostMemory(CPU), Pages(is_pinned=False)
    follow_torch()
    monkeypatch.setitem(host_memory.BY_DEVICE, CPU, made)
    host_memory.offload_while_alive(owner)
    yield made
    del owner


def _free(memory: HostMemory) -> int:
    return len(memory.pool.free)


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


TENSORS = {
    "smaller than a page": _drawn(3),
    "a page": _drawn(16),
    "a page and a byte": torch.arange(PAGE + 1, dtype=torch.uint8),
    "many pages": _drawn(7, 5, 11),
    "sequence first": _drawn(5, 3, 16).transpose(0, 1),
    "all dimensions turned around": _drawn(2, 5, 3, 8).permute(3, 1, 0, 2),
    "a part of another": _drawn(6, 40)[2:4],
    "every other": _drawn(6, 40)[:, ::2],
    "expanded": _drawn(5, 1).expand(5, 33),
    "of 16 bits": _drawn(9, 9).bfloat16(),
    "complex": torch.view_as_complex(_drawn(9, 2)),
    "bool": _drawn(99) > 0,
    "one number": torch.tensor(1.5, dtype=torch.float64),
    "none": _drawn(0, 4),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_as_it_was(name: str) -> None:
    x, memory = TENSORS[name], HostMemory(CPU)
    parked = memory.park(x)
    assert len(parked.pages) == -(-x.nbytes // PAGE)
    back = memory.fetch(parked)
    assert torch.equal(back, x)
    assert (back.dtype, back.stride()) == (x.dtype, torch.empty_like(x).stride())
    assert back.untyped_storage().nbytes() == x.nbytes
    assert memory.parked_bytes == memory.fetched_bytes == x.nbytes


def test_bytes_of_whole_pages() -> None:
    assert [whole_pages(n) for n in (0, 1, PAGE, PAGE + 0.5, 10 * PAGE)] == [0, PAGE, PAGE, 2 * PAGE, 10 * PAGE]


def test_pages_are_powers_of_two_as_is_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert pages.PAGE_BYTES.bit_count() == 1


def test_pages_of_what_is_gone_are_used_again() -> None:
    memory = HostMemory(CPU)
    for n in (3, 20, 40):
        parked = memory.park(_drawn(n))
        assert _free(memory) == 0
        del parked
        assert _free(memory) == memory.pool.made
    assert memory.pool.made == 3, "as many as the largest takes"


class _Layers:
    """Two layers in checkpoints, on 100 numbers each: 7 pages of inputs per layer."""

    def __init__(self, wrapped: Wrapped) -> None:
        self.wrapped, self.weights = wrapped, [torch.nn.Parameter(_drawn(10, 10)) for _ in range(2)]
        self.x = _drawn(10, 10).requires_grad_()

    def forward(self) -> Tensor:
        x = self.x * 1
        for weight in self.weights:
            x = self.wrapped(lambda x, weight: (x @ weight).sin(), x, weight)
        return x.square().sum()

    def grads(self) -> list[Tensor]:
        """Take the gradients so far."""
        grads = [leaf.grad for leaf in (self.x, *self.weights) if leaf.grad is not None]
        for leaf in (self.x, *self.weights):
            leaf.grad = None
        return grads


BOTH = pytest.mark.parametrize("wrapped", [REENTRANT, NON_REENTRANT], ids=["reentrant", "not reentrant"])


@BOTH
def test_steps_take_the_same_pages(memory: HostMemory, wrapped: Wrapped) -> None:
    """Also while the loss of the step before is still there, as in most loops."""
    layers = _Layers(wrapped)
    for _ in range(3):
        loss = layers.forward()
        assert _free(memory) == 0
        loss.backward()
        assert memory.pool.made == _free(memory) == 14


@BOTH
def test_a_graph_that_is_kept_keeps_its_pages(memory: HostMemory, wrapped: Wrapped) -> None:
    layers = _Layers(wrapped)
    loss = layers.forward()
    loss.backward(retain_graph=True)
    expected = layers.grads()
    assert _free(memory) == 0
    other = memory.park(torch.full((200,), torch.nan))  # which would get pages that were given back
    loss.backward()
    assert all(map(torch.equal, layers.grads(), expected))
    del other
    assert memory.pool.made == _free(memory) == 14 + 13


@BOTH
def test_a_graph_that_is_thrown_away_gives_its_pages_back(memory: HostMemory, wrapped: Wrapped) -> None:
    layers = _Layers(wrapped)
    loss = layers.forward()
    del loss
    assert memory.pool.made == _free(memory) == 14


def test_a_backward_pass_that_fails_gives_its_pages_back(memory: HostMemory) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            raise ArithmeticError

    layers = _Layers(NON_REENTRANT)
    layers.weights.insert(1, layers.weights[0])
    first, layers.x = layers.x, Failing.apply(layers.x)
    with pytest.raises(ArithmeticError):
        layers.forward().backward()
    layers.x = first
    assert memory.pool.made == _free(memory) == 21


def test_a_host_without_room_is_refused_before_pages_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all ranks, which make theirs at the same time; what there is already is not asked for again."""
    memory = HostMemory(CPU)
    parked = memory.park(_drawn(16))
    del parked
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(pages, "available_bytes", lambda: 8 * PAGE)
    memory.park(_drawn(48))
    with pytest.raises(MemoryError, match="offload needs at least"):
        memory.park(_drawn(96))
    assert memory.pool.made == _free(memory) == 3
    monkeypatch.setattr(pages, "available_bytes", lambda: None)
    memory.park(_drawn(96))
