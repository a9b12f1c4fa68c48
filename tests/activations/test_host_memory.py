"""What checkpoints keep, in host memory: the same gradients, and what is copied there and back."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from burst_plugin import Strategy
from burst_plugin.activations import host_memory
from burst_plugin.activations.host_memory import HostMemory
from burst_plugin.activations.kept_attention import follow_torch
from tests.activations.test_kept_attention import NON_REENTRANT, REENTRANT, Layers, Wrapped, _plain, _worst
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_tensors_are_worth_it() -> Iterator[None]:
    with mock.patch.object(host_memory, "_LEAST_BYTES", 1):
        yield


def _step(rank: int, options: dict[str, Any], wrapped: Wrapped) -> Any:
    """Return the error of gradients, the bytes copied to the host and back, and those of an input and of outputs."""
    layers = Layers(Strategy(offload=True, **options))
    layers.forward(_plain).backward()
    expected = layers.grads()
    layers.sent_bytes()
    layers.forward(wrapped).backward()
    memory = host_memory.host_memory(CPU)
    assert memory is not None
    out = layers.x.nbytes
    lse = layers.x.shape[1] * 4 * 8  # heads, float64
    return _worst(layers.grads(), expected), memory.parked_bytes, memory.fetched_bytes, out, out + lse


@pytest.mark.parametrize("wrapped", [REENTRANT, NON_REENTRANT], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("kept", ["none", "all"])
def test_inputs_and_outputs_wait_on_the_host(kept: str, wrapped: Wrapped) -> None:
    """Of two layers. Each has its own weights among its inputs, which stay where they are."""
    for error, parked, fetched, of_input, of_outputs in run_ranks(_step, 2, {"keep_attention": kept}, wrapped):
        assert error == 0.0
        assert parked == fetched == 2 * (of_input + (of_outputs if kept == "all" else 0))


def test_a_share_of_attention_waits_on_the_host() -> None:
    options = {"keep_attention": 0.5, "layout": "striped"}
    for error, parked, _, of_input, of_outputs in run_ranks(_step, 2, options, NON_REENTRANT):
        assert error < 1e-13
        assert parked == 2 * of_input + of_outputs


def test_it_ends_with_the_ring_that_asked_for_it() -> None:
    layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    follow_torch()
    owner = _Owner()
    host_memory.offload_while_alive(owner)
    found = []
    for _ in range(2):
        memory = HostMemory(CPU)
        with mock.patch.dict(host_memory._BY_DEVICE, {CPU: memory}):
            REENTRANT(layer, x * 2).sum().backward()
        found.append(memory.parked_bytes)
        owner = None  # type: ignore[assignment]
        gc.collect()
    assert found == [x.nbytes, 0]
    assert host_memory.host_memory(CPU) is None


def test_nothing_is_held_beside_the_copy() -> None:
    assert HostMemory(CPU).park(torch.ones(3))._source is None


class _Owner:
    pass


# -------------------------------------------------------------------------------- the order of copies on a GPU


class _Stream:
    """Notes what a stream is asked to do; copies happen when something waits for them, as late as they may."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.copies: list[Callable[[], None]] = []

    def wait_stream(self, other: Any) -> None:
        self.log.append("wait for layers")

    def record_event(self) -> _Event:
        return _Event(self, len(self.copies))

    def wait_event(self, event: _Event) -> None:
        event.stream.run(event.count)


class _Event:
    def __init__(self, stream: _Stream, count: int) -> None:
        self.stream, self.count = stream, count


class _CopyStream(_Stream):
    done = 0

    def run(self, count: int) -> None:
        while self.done < count:
            self.copies[self.done]()
            self.done += 1


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> tuple[HostMemory, _CopyStream]:
    """Host memory whose copies run as late as events allow."""
    memory, stream, layers = HostMemory(CPU), _CopyStream([]), _Stream([])
    memory._stream = stream
    copy_, inside = Tensor.copy_, []

    class On:
        def __init__(self, on: Any) -> None:
            pass

        def __enter__(self) -> None:
            inside.append(1)

        def __exit__(self, *exception: object) -> None:
            inside.pop()

    def late(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if inside:
            stream.copies.append(lambda: copy_(self, source))
            return self
        return copy_(self, source)

    monkeypatch.setattr(torch.cuda, "stream", On)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: layers)
    monkeypatch.setattr(Tensor, "copy_", late)
    empty_like = torch.empty_like
    monkeypatch.setattr(
        torch, "empty_like", lambda x, pin_memory=False, **rest: empty_like(x, **rest).fill_(torch.nan)
    )
    return memory, stream


def test_copies_are_waited_for_before_values_are_used(late_copies: tuple[HostMemory, _CopyStream]) -> None:
    memory, _ = late_copies
    tensors = [torch.full((3,), float(n)) for n in range(5)]
    parked = [memory.park(x) for x in tensors]
    for n in reversed(range(5)):
        assert torch.equal(memory.fetch(parked[n]), torch.full((3,), float(n)))


def test_the_tensor_before_is_on_its_way_while_a_layer_works(late_copies: tuple[HostMemory, _CopyStream]) -> None:
    memory, stream = late_copies
    parked = [memory.park(torch.full((3,), float(n))) for n in range(3)]
    memory.fetch(parked[2])
    assert parked[1].returning is not None
    assert parked[0].returning is None
    issued = len(stream.copies)
    memory.fetch(parked[1])
    assert len(stream.copies) == issued + 1, "its own copy was issued before; that of the one before is new"


def test_a_tensor_that_was_fetched_is_not_copied_again(late_copies: tuple[HostMemory, _CopyStream]) -> None:
    """As the input of a layer, which is needed before what attention gave in it, and was parked before."""
    memory, stream = late_copies
    before, used, _ = parked = [memory.park(torch.full((3,), float(n))) for n in range(3)]
    memory.fetch(used)
    issued = len(stream.copies)
    memory.fetch(parked[2])
    assert used.returning is None
    assert before.returning is not None
    assert len(stream.copies) == issued + 1, "its own; that of the one before is under way"


def test_few_tensors_are_held_because_they_are_copied(late_copies: tuple[HostMemory, _CopyStream]) -> None:
    memory, _ = late_copies
    parked = [memory.park(torch.ones(3)) for _ in range(6)]
    assert [each._source is not None for each in parked] == [False] * 4 + [True] * 2


def test_an_input_that_changes_while_it_is_copied_is_found(late_copies: tuple[HostMemory, _CopyStream]) -> None:
    memory, _ = late_copies
    x = torch.ones(3)
    parked = memory.park(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified in place while it was copied to the host"):
        memory.fetch(parked)
