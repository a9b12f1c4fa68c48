"""How a pass of a recurrent layer runs: on the rank of this process, or on all ranks of a virtual ring in turn.

A pass may run beside what its thread does next: on GPUs on a stream of its own, on CPUs in a thread of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from burst_plugin.comm.call_identity import CallId
from burst_plugin.recurrent.messages import connect
from burst_plugin.ring.agreement import prepared_together
from burst_plugin.ring.autograd import completed, refuse_second_derivatives
from burst_plugin.ring.executor import lockstep
from burst_plugin.ring.rank_state import RankState
from burst_plugin.types import Direction

if TYPE_CHECKING:
    from burst_plugin.context import ContextParallel
    from burst_plugin.virtual import VirtualRing

T = TypeVar("T")
Program = Generator[None, None, Any]
Results = Callable[[], list[Any]]  # waits for a pass


class Passes(ABC):
    """Runs the programs of this process's ranks: of one rank, or of all ranks of a virtual ring."""

    states: Sequence[RankState]

    @abstractmethod
    def agree(self, prepare: Callable[[], T], signature: Callable[[T], Mapping[str, object]], tag: object) -> Any:
        """Return the result of `prepare` and the identity of the call; collective.

        Raises ValueError on every rank if `prepare` raises on any, or if ranks differ in their `signature`.
        """

    @abstractmethod
    def run(self, direction: Direction, call: CallId, programs: Sequence[Program], device: torch.device) -> list[Any]:
        """Run a program for each rank; return the results of the programs."""

    def start(
        self,
        direction: Direction,
        call: CallId,
        programs: Sequence[Program],
        inputs: Sequence[Tensor],
        beside: bool,
    ) -> Results:
        """Start a program for each rank; return a function that waits for the results of the programs.

        No other pass of these ranks may run before that function has been called.

        inputs: all tensors that programs read; they run on the device of the first one.
        beside: whether programs may run while this thread does something else; if not, they have run at once.
        """
        results = self.run(direction, call, programs, inputs[0].device)
        return lambda: results


class OfOneRank(Passes):
    """The `Passes` of a process that is one rank."""

    def __init__(self, cp: ContextParallel) -> None:
        self.cp, self.states = cp, [cp.rank_state]
        self._beside: dict[str, Any] = cp.plans.setdefault(OfOneRank, {})  # a stream, or a thread

    def agree(self, prepare: Callable[[], T], signature: Callable[[T], Mapping[str, object]], tag: object) -> Any:
        """Compare the call with all ranks; see `Passes.agree`."""
        agreement = self.cp.agreement

        def named() -> tuple[T, str]:
            return prepare(), agreement.name_of_next_call(tag)

        def agreed(prepared: tuple[T, str] | None, problem: str) -> CallId:
            if prepared is None:
                return agreement.before_forward(dict, problem)
            found, name = prepared
            return agreement.before_forward(lambda: signature(found), problem, name)

        (found, _), call = prepared_together(named, agreed)
        connect(self.cp)
        return found, call

    def run(self, direction: Direction, call: CallId, programs: Sequence[Program], device: torch.device) -> list[Any]:
        """Run this rank's program, after ranks have compared a backward pass."""
        (state,), (program,) = self.states, programs
        if direction == "backward":
            refuse_second_derivatives()
            self.cp.agreement.before_backward(call)
        with state.one_pass(direction, call, device):
            return [completed(program)]

    def start(
        self,
        direction: Direction,
        call: CallId,
        programs: Sequence[Program],
        inputs: Sequence[Tensor],
        beside: bool,
    ) -> Results:
        """Start this rank's program, after ranks have compared a backward pass; see `Passes.start`."""
        if not beside:
            return super().start(direction, call, programs, inputs, beside)
        (state,), (program,), device = self.states, programs, inputs[0].device
        if direction == "backward":
            refuse_second_derivatives()
            self.cp.agreement.before_backward(call)
        ends = ExitStack()
        ends.enter_context(state.one_pass(direction, call, device))
        wait = self._on_stream(program, inputs) if device.type == "cuda" else self._in_thread(program)

        def results() -> list[Any]:
            with ends:
                return [wait()]

        return results

    def _on_stream(self, program: Program, inputs: Sequence[Tensor]) -> Callable[[], Any]:
        """Run a program on a stream beside the current one, which waits for it where its result is asked for.

        Until then `inputs` are held, so that their memory is not given to what the current stream does meanwhile.
        """
        device = inputs[0].device
        if "stream" not in self._beside:
            self._beside["stream"] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._beside["stream"]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            found = completed(program)
            done = stream.record_event()

        def wait(held: Sequence[Tensor] = inputs) -> Any:
            current = torch.cuda.current_stream(device)
            current.wait_event(done)
            for x in tree_leaves(found):
                x.record_stream(current)
            return found

        return wait

    def _in_thread(self, program: Program) -> Callable[[], Any]:
        """Run a program in a thread beside this one; neither gradients nor inference mode are the thread's own."""
        if "thread" not in self._beside:
            self._beside["thread"] = ThreadPoolExecutor(1, "burst-scan")
        inference = torch.is_inference_mode_enabled()

        def run() -> Any:
            with torch.inference_mode(inference), torch.no_grad():
                return completed(program)

        return self._beside["thread"].submit(run).result  # type: ignore[no-any-return]


class OfVirtualRing(Passes):
    """The `Passes` of a virtual ring, whose ranks take turns step by step in one process."""

    def __init__(self, ring: VirtualRing) -> None:
        self.states = ring.rank_states
        self._numbers = ring

    def agree(self, prepare: Callable[[], T], signature: Callable[[T], Mapping[str, object]], tag: object) -> Any:
        """Return the result of `prepare` and the number of the call; there is nothing to compare."""
        return prepare(), self._numbers.next_call()

    def run(self, direction: Direction, call: CallId, programs: Sequence[Program], device: torch.device) -> list[Any]:
        """Run the programs of all ranks in lockstep."""
        if direction == "backward":
            refuse_second_derivatives()
        with ExitStack() as passes:
            for state in self.states:
                passes.enter_context(state.one_pass(direction, call, device))
            return lockstep(programs)
