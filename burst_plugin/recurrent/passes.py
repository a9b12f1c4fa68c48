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
from burst_plugin.ring.autograd import check_derivative, completed
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
    """Runs a pass of a recurrent layer on the ranks of this process: one rank, or all ranks of a virtual ring.

    What a rank does in a pass is its program, a generator that yields while messages are under way, and returns the
    rank's results when it ends.

    states: the `RankState` of each rank of this process.
    """

    states: Sequence[RankState]

    @abstractmethod
    def agree(self, prepare: Callable[[], T], signature: Callable[[T], Mapping[str, object]], tag: object) -> Any:
        """Run `prepare`, have ranks compare the call, and return (the result of `prepare`, the `CallId`); collective.

        Args:
            prepare: checks the arguments on this process, and returns what the call needs.
            signature: returns, from the result of `prepare`, the values by name that have to be equal on all ranks.
            tag: the caller's name for the call, equal on every rank; None for none.

        Raises:
            ValueError: on every rank, if `prepare` raises it on any, or if ranks differ in their signatures.
        """

    @abstractmethod
    def run(self, direction: Direction, call: CallId, programs: Sequence[Program], device: torch.device) -> list[Any]:
        """Run a program for each rank of this process to its end; return the results of the programs.

        Args:
            direction, call: which pass of which call it is.
            programs: one for each of `states`.
            device: of the tensors that programs work on.
        """

    def start(
        self,
        direction: Direction,
        call: CallId,
        programs: Sequence[Program],
        inputs: Sequence[Tensor],
        beside: bool,
    ) -> Results:
        """Start a program for each rank of this process; return a function that waits for their results.

        The function returns the results of the programs, in the order of `states`. No other pass of these ranks may
        run before it has been called.

        Args:
            direction, call: which pass of which call it is.
            programs: one for each of `states`.
            inputs: all tensors that programs read; they run on the device of the first one.
            beside: whether programs may run while this thread does something else, on a stream or a thread of their
                own; if False, or on a virtual ring, they have ended when this returns.
        """
        results = self.run(direction, call, programs, inputs[0].device)
        return lambda: results


class OfOneRank(Passes):
    """Runs passes of a process that is one rank of a context-parallel group."""

    def __init__(self, cp: ContextParallel) -> None:
        self.cp, self.states = cp, [cp.rank_state]
        self._beside: dict[str, Any] = cp.plans.setdefault(OfOneRank, {})  # a stream, or a thread

    def agree(self, prepare: Callable[[], T], signature: Callable[[T], Mapping[str, object]], tag: object) -> Any:
        """Run `prepare`, compare the call with all ranks, and connect with them; see `Passes.agree`.

        Returns (the result of `prepare`, the `CallId`); collective.
        """
        agreement = self.cp.agreement

        def named() -> tuple[T, str]:
            return prepare(), agreement.name_of_next_call(tag)

        def agreed(prepared: tuple[T, str] | None, problem: str) -> CallId:
            if prepared is None:
                return agreement.before_forward(dict, problem)
            result, name = prepared
            return agreement.before_forward(lambda: signature(result), problem, name)

        (result, _), call = prepared_together(named, agreed)
        connect(self.cp)
        return result, call

    def run(self, direction: Direction, call: CallId, programs: Sequence[Program], device: torch.device) -> list[Any]:
        """Run this rank's program to its end, and return its result in a list of one.

        Before a backward pass ranks check that all of them are about to run the backward pass of `call`; if not, all
        raise ValueError. `programs` holds one program, see `Passes`.
        """
        (state,), (program,) = self.states, programs
        if direction == "backward":
            check_derivative()
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
        """Start this rank's program; return a function that waits for it and returns its result in a list of one.

        With `beside` the program runs on a CUDA stream of its own, or on CPUs in a thread of its own; without, it has
        ended when this returns. Before a backward pass ranks check that all of them are about to run the backward
        pass of `call`; if not, all raise ValueError.
        """
        if not beside:
            return super().start(direction, call, programs, inputs, beside)
        (state,), (program,), device = self.states, programs, inputs[0].device
        if direction == "backward":
            check_derivative()
            self.cp.agreement.before_backward(call)
        with ExitStack() as stack:  # a program that fails at once ends the pass, and other ranks are told
            stack.enter_context(state.one_pass(direction, call, device))
            wait = self._on_stream(program, inputs) if device.type == "cuda" else self._in_thread(program)
            ends = stack.pop_all()

        def results() -> list[Any]:
            with ends:
                return [wait()]

        return results

    def _on_stream(self, program: Program, inputs: Sequence[Tensor]) -> Callable[[], Any]:
        """Run a program on a stream beside the current one, which waits for it where its result is needed.

        Until then `inputs` are held, so that the current stream does not use their memory for anything else.
        """
        device = inputs[0].device
        if "stream" not in self._beside:
            self._beside["stream"] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._beside["stream"]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            result = completed(program)
            done = stream.record_event()

        def wait(held: Sequence[Tensor] = inputs) -> Any:
            current = torch.cuda.current_stream(device)
            current.wait_event(done)
            for x in tree_leaves(result):
                x.record_stream(current)
            return result

        return wait

    def _in_thread(self, program: Program) -> Callable[[], Any]:
        """Run a program in a thread beside this one, without gradients and in this thread's inference mode."""
        if "thread" not in self._beside:
            self._beside["thread"] = ThreadPoolExecutor(1, "burst-scan")
        inference = torch.is_inference_mode_enabled()

        def run() -> Any:
            with torch.inference_mode(inference), torch.no_grad():
                return completed(program)

        return self._beside["thread"].submit(run).result  # type: ignore[no-any-return]


class OfVirtualRing(Passes):
    """Runs passes of a virtual ring, whose ranks take turns step by step in one process."""

    def __init__(self, ring: VirtualRing) -> None:
        self.states = ring.rank_states
        self._numbers = ring

    def agree(self, prepare: Callable[[], T], signature: Callable[[T], Mapping[str, object]], tag: object) -> Any:
        """Return (the result of `prepare`, the `CallId`); with one process there is nothing to compare."""
        return prepare(), self._numbers.next_call()

    def run(self, direction: Direction, call: CallId, programs: Sequence[Program], device: torch.device) -> list[Any]:
        """Run the programs of all ranks to their ends, a step of each in turn; return their results by rank."""
        if direction == "backward":
            check_derivative()
        with ExitStack() as passes:
            for state in self.states:
                passes.enter_context(state.one_pass(direction, call, device))
            return lockstep(programs)
