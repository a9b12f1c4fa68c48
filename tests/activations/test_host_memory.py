"""What checkpoints keep, in host memory: the same gradients, and what is copied there and back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from burst_plugin import Strategy
from burst_plugin.activations import host_memory, pages
from burst_plugin.activations.host_memory import HostMemory, Parked
from burst_plugin.activations.kept_attention import follow_torch
from tests.activations.test_kept_attention import NON_REENTRANT, REENTRANT, Layers, Wrapped, _plain, _worst
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_tensors_are_worth_it() -> Iterator[None]:
    with mock.patch.object(host_memory, "LEAST_BYTES", 1):
        yield


def _step(rank: int, options: dict[str, Any], wrapped: Wrapped) -> Any:
    """Return the error of gradients, the bytes copied to the host and back, and those of an input and of outputs."""
    layers = Layers(Strategy(offload=True, **options))
    layers.forward(_plain).backward()
    expected = layers.grads()
    layers.sent_bytes()
    loss = layers.forward(wrapped)
    loss.backward()
    memory = host_memory.host_memory(CPU)
    assert memory is not None
    out = layers.x.nbytes
    assert len(memory.pool.free) == memory.pool.made, "though the loss is still there"
    del loss
    lse = layers.x.shape[1] * 4 * 8  # heads, float64
    return _worst(layers.grads(), expected), memory.parked_bytes, memory.fetched_bytes, out, out + lse


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("changed", [0, 1])
def test_inputs_that_change_before_the_backward_pass_are_found(reentrant: bool, changed: int) -> None:
    """Of the process's own checkpoints, too: an input that is copied may change, another one, as here, may not."""
    follow_torch()
    owner = torch.nn.Identity()
    host_memory.offload_while_alive(owner)
    with mock.patch.object(host_memory, "LEAST_BYTES", 1 << 20):
        inputs = torch.randn(8, 4, requires_grad=True), torch.ones(8, 4)
        out = checkpoint(lambda x, mask: (x.sin() * mask).cos(), *inputs, use_reentrant=reentrant)
        inputs[changed].detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified in place"):
            out.sum().backward()


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
        with mock.patch.dict(host_memory.BY_DEVICE, {CPU: memory}):
            REENTRANT(layer, x * 2).sum().backward()
        found.append(memory.parked_bytes)
        owner = None  # type: ignore[assignment]
        gc.collect()
    assert found == [x.nbytes, 0]
    assert host_memory.host_memory(CPU) is None


def test_nothing_is_held_beside_the_copy() -> None:
    assert HostMemory(CPU).park(torch.ones(3)).source is None


@pytest.mark.parametrize("wrapped", [REENTRANT, NON_REENTRANT], ids=["reentrant", "not reentrant"])
def test_inputs_of_checkpoints_are_gone_once_they_are_copied(wrapped: Wrapped) -> None:
    """Autograd keeps the hooks of what it saved until the backward pass, and with them whatever these refer to."""
    follow_torch()
    owner = _Owner()
    host_memory.offload_while_alive(owner)
    x, storages = torch.ones(2, 4, requires_grad=True) * 2, []
    with mock.patch.dict(host_memory.BY_DEVICE, {CPU: HostMemory(CPU)}):
        for _ in range(4):
            storages.append(StorageWeakRef(x.untyped_storage()))
            x = wrapped(torch.nn.Linear(4, 4), x)
        assert [storage.expired() for storage in storages] == [True] * 4
        x.sum().backward()


class _Owner:
    pass


# -------------------------------------------------------------------------------- the order of copies on a GPU


class _Stream:
    """Notes what a stream is asked to do; copies happen when something waits for them, as late as they may."""

    done = 0

    def __init__(self, is_behind: bool = False) -> None:
        self.is_behind = is_behind
        self.log: list[str] = []
        self.copies: list[Callable[[], None]] = []
        self.waits: list[_Event] = []

    def wait_stream(self, other: Any) -> None:
        self.log.append("wait for layers")

    def run(self, count: int) -> None:
        while self.done < count:
            self.copies[self.done]()
            self.done += 1

    def record_event(self) -> _Event:
        return _Event(self, len(self.copies))

    def wait_event(self, event: _Event) -> None:
        self.waits.append(event)
        if not self.is_behind:
            self.catch_up()

    def catch_up(self) -> None:
        """Wait for all events so far. A stream that is behind does so when it is told to, as GPUs follow the host."""
        while self.waits:
            event = self.waits.pop(0)
            event.stream.run(event.count)


class _Event:
    def __init__(self, stream: _Stream, count: int) -> None:
        self.stream, self.count = stream, count


class _Gpu:
    """Host memory whose copies run as late as events allow, on a stream beside that of the layers."""

    def __init__(self) -> None:
        self.memory, self.copying, self.layers = HostMemory(CPU), _Stream(), _Stream()
        self.memory.stream = self.copying


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> _Gpu:
    """Return a GPU that is not there. New memory is full of NaN; a tensor of three floats takes two pages."""
    made, copy_, inside = _Gpu(), Tensor.copy_, []

    class On:
        def __init__(self, stream: _Stream) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            inside.append(self.stream)

        def __exit__(self, *exception: object) -> None:
            inside.pop()

    def late(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if inside:
            inside[-1].copies.append(lambda: copy_(self, source))
            return self
        return copy_(self, source)

    monkeypatch.setattr(torch.cuda, "stream", On)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.layers)
    monkeypatch.setattr(Tensor, "copy_", late)
    monkeypatch.setattr(pages, "PAGE_BYTES", 8)
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *sizes, **rest: empty(*sizes, **rest).fill_(255))
    monkeypatch.setattr(torch, "empty_like", lambda x, **rest: empty_like(x, **rest).fill_(torch.nan))
    return made


COPIES = 2  # of such a tensor, one for each page


def _three(value: float) -> Tensor:
    return torch.full((3,), float(value))


def test_copies_are_waited_for_before_values_are_used(gpu: _Gpu) -> None:
    memory = gpu.memory
    tensors = [_three(n) for n in range(5)]
    parked = [memory.park(x) for x in tensors]
    for n in reversed(range(5)):
        assert torch.equal(memory.fetch(parked[n]), _three(n))


def test_the_tensor_before_is_on_its_way_while_a_layer_works(gpu: _Gpu) -> None:
    memory = gpu.memory
    parked = [memory.park(_three(n)) for n in range(3)]
    memory.fetch(parked[2])
    assert parked[1].returning is not None
    assert parked[0].returning is None
    issued = len(gpu.copying.copies)
    memory.fetch(parked[1])
    assert len(gpu.copying.copies) == issued + COPIES, "its own copy was issued before; that of the one before is new"


def test_a_tensor_that_was_fetched_is_not_copied_again(gpu: _Gpu) -> None:
    """As the input of a layer, which is needed before what attention gave in it, and was parked before."""
    memory = gpu.memory
    before, used, _ = parked = [memory.park(_three(n)) for n in range(3)]
    memory.fetch(used)
    issued = len(gpu.copying.copies)
    memory.fetch(parked[2])
    assert used.returning is None
    assert before.returning is not None
    assert len(gpu.copying.copies) == issued + COPIES, "its own; that of the one before is under way"


def test_a_tensor_that_has_not_left_is_not_copied_beside_itself(gpu: _Gpu) -> None:
    """As the inputs of the last layers, when the backward pass begins."""
    memory = gpu.memory
    first, last = [memory.park(_three(n)) for n in range(2)]
    source, issued = first.source, len(gpu.copying.copies)
    memory.fetch(last)
    assert len(gpu.copying.copies) == issued + COPIES, "its own"
    assert memory.fetch(first) is source
    assert len(gpu.copying.copies) == issued + COPIES
    assert torch.equal(memory.fetch(first), _three(0)), "once more, from the host"


def test_few_tensors_are_held_because_they_are_copied(gpu: _Gpu) -> None:
    memory = gpu.memory
    parked = [memory.park(torch.ones(3)) for _ in range(6)]
    assert [each.source is not None for each in parked] == [False] * 4 + [True] * 2


def test_an_input_that_changes_while_it_is_copied_is_found(gpu: _Gpu) -> None:
    memory = gpu.memory
    x = torch.ones(3)
    parked = memory.park(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified in place while it was copied to the host"):
        memory.fetch(parked)


def test_pages_are_not_written_while_they_are_still_to_be_read(gpu: _Gpu) -> None:
    """The host is ahead: a tensor has been fetched and is gone, but the copy of it has not begun."""
    gpu.layers.is_behind = True
    fetched = []
    for n in range(4):
        parked = gpu.memory.park(_three(n))
        fetched.append(gpu.memory.fetch(parked))
        del parked
    assert gpu.memory.pool.made == COPIES, "the pages of the first are used again"
    assert all(x.isnan().all() for x in fetched)
    gpu.layers.catch_up()
    assert [x.tolist() for x in fetched] == [_three(n).tolist() for n in range(4)]


def test_pages_are_kept_until_a_tensor_has_left_the_gpu(gpu: _Gpu) -> None:
    """Also if nothing asks for it any more, as in evaluation."""
    gpu.layers.is_behind = True
    for n in range(6):
        gpu.memory.park(_three(n))
    assert gpu.memory.pool.made == COPIES * host_memory.MOST_IN_FLIGHT
    last = gpu.memory.latest and gpu.memory.latest()
    assert last is not None
    assert torch.equal(_caught_up(gpu, last), _three(5))


def _caught_up(gpu: _Gpu, parked: Parked) -> Tensor:
    fetched = gpu.memory.fetch(parked)
    gpu.layers.catch_up()
    return fetched


def test_a_tensor_on_its_way_back_stays_until_it_is_there(gpu: _Gpu) -> None:
    """Also if its graph is thrown away: else other tensors would get its memory, and the copy would come later."""
    parked = [gpu.memory.park(_three(n)) for n in range(2 + host_memory.MOST_IN_FLIGHT)]
    for _ in range(1 + host_memory.MOST_IN_FLIGHT):
        gpu.memory.fetch(parked.pop())
    assert parked[0].returning is not None
    coming = weakref.ref(parked[0].returning[0])
    parked.clear()
    left = len(gpu.copying.copies) - gpu.copying.done
    gpu.copying.copies[gpu.copying.done :] = [lambda: None] * left  # which hold it as well
    assert left == COPIES
    assert coming() is not None
    gpu.memory.park(_three(9))
    assert gpu.copying.done == len(gpu.copying.copies) - COPIES, "it was waited for"
    assert coming() is None
