"""Races on GPUs that are not there: every access to memory has to be ordered after those that it depends on.

Each rank of a ring has a GPU of its own, with a compute stream and those that are made for it. A stream has a vector
clock: how far into every stream it is known to be. Events carry clocks, and waiting for one merges them. So an order
that holds by chance on some machine does not count, only one that events make. Memory is looked at as a whole: two
accesses to different parts of one allocation are taken for accesses to the same.

`recorded_gpu` tells of what happens. The method is that of PyTorch's CUDA sanitizer, `torch.cuda._sanitizer`, which
needs a GPU, and does not check when memory is given back.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import burst_plugin
from burst_plugin.ring.kept_outputs import KeptOutputs
from burst_plugin.ring.plan import Plan

T = TypeVar("T")
_PACKAGE = str(Path(burst_plugin.__file__).parent)
_OWN = {str(Path(__file__).with_name(f"{name}.py")) for name in ("races", "recorded_gpu", "fake_gpu")}
_TESTS = str(Path(__file__).parent.parent)


class RaceError(AssertionError):
    """Two accesses to the same memory, at least one of which writes or frees, and nothing that orders them."""


class Stream:
    """A stream: `clock` says how many accesses of every stream are before the next one of this."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Counter[Stream] = Counter()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.clock = self.clock.copy()
        return event

    def wait_event(self, event: Event) -> None:
        self.clock |= event.clock

    def wait_stream(self, stream: Stream) -> None:
        self.clock |= stream.clock


class Event:
    """Waiting for an event that was not recorded waits for nothing, as in CUDA."""

    def __init__(self, **_: object) -> None:
        self.clock: Counter[Stream] = Counter()

    def record(self, stream: Stream) -> None:
        stream.record_event(self)


class _Access(NamedTuple):
    stream: Stream
    tick: int
    what: str
    place: str
    moment: str

    def is_before(self, clock: Mapping[Stream, int]) -> bool:
        return self.tick <= clock[self.stream]

    def __str__(self) -> str:
        return f"{self.what} at {self.place}{self.moment and ' '}{self.moment}, on {self.stream.name}"


@dataclass
class _Memory:
    """An allocation: where it was made, and the accesses that the next one may have to follow."""

    storage: StorageWeakRef
    home: Stream
    made: str
    nbytes: int
    write: _Access | None = None
    reads: dict[Stream, _Access] = field(default_factory=dict)  # since that write, the last one of each stream
    # What the allocator waits for before it gives it away again: streams, and what was before them then.
    waited_for: dict[Stream, Counter[Stream]] = field(default_factory=dict)

    def before_reading(self) -> list[_Access]:
        return [] if self.write is None else [self.write]

    def is_waited_for(self, access: _Access) -> bool:
        return access.stream in self.waited_for or any(map(access.is_before, self.waited_for.values()))

    def before_writing(self) -> list[_Access]:
        return [*self.before_reading(), *self.reads.values()]


class Gpus:
    """The GPUs of all ranks of this process, and what happened on them.

    accesses, accessed_bytes: how many reads and writes were checked, by the name of the stream.
    slept: how often the host had a stream sleep, by its name.
    frees: how many allocations were checked when they were given back, of those that several streams had used.
    thread: of the host; each has compute streams of its own. "" is the one that trains.
    kept outputs: what a forward pass is given of earlier runs, by rank.
    """

    def __init__(self) -> None:
        self.accesses: Counter[str] = Counter()
        self.accessed_bytes: Counter[str] = Counter()
        self.slept: Counter[str] = Counter()
        self.frees = 0
        self.thread = ""
        self.kept_of_ranks: dict[int, KeptOutputs] = {}
        self._streams: dict[tuple[int | None, str], Stream] = {}
        self._rank: int | None = None
        self._inside: list[Stream] = []
        self._made = 0
        self._moment: Callable[[], str] = str
        self._memory: dict[int, _Memory] = {}
        self._lent: dict[int, _Memory] = {}  # what streams have used that it was not made on

    def current_stream(self, *_: object) -> Stream:
        """Return what `torch.cuda.current_stream` returns: the compute stream of this rank and thread, or another."""
        if self._inside:
            return self._inside[-1]
        whose = "the caller" if self._rank is None else f"rank {self._rank}"
        name = f"the compute stream of {whose}{self.thread and f' in {self.thread}'}"
        return self._streams.setdefault((self._rank, self.thread), Stream(name))

    def new_stream(self, *_: object, **__: object) -> Stream:
        """Return what `torch.cuda.Stream` returns."""
        self._made += 1
        return Stream(f"side stream {self._made}, made at {_place()}")

    @contextmanager
    def rank(self, rank: int) -> Iterator[None]:
        """Be on the GPU of that rank."""
        before, self._rank = self._rank, rank
        try:
            yield
        finally:
            self._rank = before

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Do what `torch.cuda.stream` does."""
        self._inside.append(stream)
        try:
            yield
        finally:
            self._inside.pop()

    def launch(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Check the accesses of a kernel, or of a copy, on the current stream. Raise RaceError."""
        self.check_frees()
        stream = self.current_stream()
        tick = stream.clock[stream] = stream.clock[stream] + 1
        here = _Access(stream, tick, what, _place(), self._moment())
        for x in reads:
            memory = self._of(x)
            self._check(memory, memory.before_reading(), here, f"read by {here}", stream)
            memory.reads[stream] = here
            self._note_use(x, memory, stream)
        for x in writes:
            memory = self._of(x)
            self._check(memory, memory.before_writing(), here, f"written by {here}", stream)
            memory.write, memory.reads = here, {}
            self._note_use(x, memory, stream)
        for x in (*reads, *writes):
            self.accesses[stream.name] += 1
            self.accessed_bytes[stream.name] += x.nbytes

    def sleep(self, cycles: int) -> None:
        """Do what `torch.cuda._sleep` does."""
        self.slept[self.current_stream().name] += 1

    def check_frees(self) -> None:
        """Check memory that is gone: what its stream does next may allocate it again. Raise RaceError."""
        for key in [key for key, memory in self._lent.items() if memory.storage.expired()]:
            memory = self._lent.pop(key)
            self.frees += 1
            others = [access for access in memory.before_writing() if not memory.is_waited_for(access)]
            self._check(memory, others, None, "given back to it", memory.home)

    def record_stream(self, x: Tensor, stream: Stream) -> None:
        """Do what `torch.Tensor.record_stream` does."""
        self._of(x).waited_for[stream] = stream.clock.copy()

    def _check(
        self, memory: _Memory, before: Sequence[_Access], here: _Access | None, what: str, stream: Stream
    ) -> None:
        for access in before:
            if access is not here and not access.is_before(stream.clock):
                did = "written" if access is memory.write else "read"
                raise RaceError(
                    f"{memory.nbytes} bytes, made at {memory.made} for {memory.home.name}, were {did} by {access}; "
                    f"they are {what}, and nothing orders this after that"
                )

    def _note_use(self, x: Tensor, memory: _Memory, stream: Stream) -> None:
        if stream is not memory.home:
            self._lent[x.untyped_storage()._cdata] = memory

    def _of(self, x: Tensor) -> _Memory:
        storage = x.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None:  # a weak reference keeps another storage from having the same number
            home = self.current_stream()
            memory = _Memory(StorageWeakRef(storage), home, _place(), storage.nbytes())
            self._memory[storage._cdata] = memory
        return memory

    def allocate(self, x: Tensor) -> None:
        """Note memory that is new on the current stream, on which something else may have had it until now."""
        self.check_frees()
        memory, stream = self._of(x), self.current_stream()
        tick = stream.clock[stream] = stream.clock[stream] + 1
        memory.write = _Access(stream, tick, "what had them before, until they were allocated", _place(), "")

    def follow(self, program: Callable[..., Generator[None, None, T]]) -> Callable[..., Generator[None, None, T]]:
        """Return a rank's program, of which every step runs on the GPU of that rank."""

        def followed(plan: Plan, which: object, *rest: Any) -> Generator[None, None, T]:
            state = plan.rank_state
            if state.rank in self.kept_of_ranks and len(rest) == 1:  # the inputs of a forward pass
                rest = rest[0], self.kept_of_ranks[state.rank]
            steps = program(plan, which, *rest)
            while True:
                self._moment = state.progress.__str__
                try:
                    with self.rank(state.rank):
                        next(steps)
                except StopIteration as stop:
                    return stop.value  # type: ignore[no-any-return]
                finally:
                    self._moment = str
                yield

        return followed


def _place() -> str:
    """Return the line of the package that is at work, the innermost; where there is none, that of the tests."""
    frame, outside = sys._getframe(1), None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE):
            return f"{name[len(_PACKAGE) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}"
        if outside is None and name.startswith(_TESTS) and name not in _OWN:
            outside = f"{name[len(_TESTS) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return outside or "?"
