"""How a pass of a recurrent layer runs: on the rank of this process, or on all ranks of a virtual ring in turn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import torch

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


class Passes(ABC):
    """What the ranks of this process run."""

    states: Sequence[RankState]

    @abstractmethod
    def agree(self, prepare: Callable[[], T], signature: Callable[[T], Mapping[str, object]], tag: object) -> Any:
        """Return what `prepare` returns, and which call it is; collective.

        Raises ValueError on every rank if it raises on any, or if ranks differ in their `signature`.
        """

    @abstractmethod
    def run(self, direction: Direction, call: CallId, programs: Sequence[Program], device: torch.device) -> list[Any]:
        """Run a program for each rank; return what they return."""


class OfOneRank(Passes):
    """The pass of the rank that this process is."""

    def __init__(self, cp: ContextParallel) -> None:
        self.cp, self.states = cp, [cp.rank_state]

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


class OfVirtualRing(Passes):
    """The passes of all ranks of a virtual ring, a step of each in turn."""

    def __init__(self, ring: VirtualRing) -> None:
        self.states = ring.rank_states
        self._numbers = ring

    def agree(self, prepare: Callable[[], T], signature: Callable[[T], Mapping[str, object]], tag: object) -> Any:
        """Return what `prepare` returns, and the number of the call."""
        return prepare(), self._numbers.next_call()

    def run(self, direction: Direction, call: CallId, programs: Sequence[Program], device: torch.device) -> list[Any]:
        """Run the programs of all ranks in lockstep."""
        if direction == "backward":
            refuse_second_derivatives()
        with ExitStack() as passes:
            for state in self.states:
                passes.enter_context(state.one_pass(direction, call, device))
            return lockstep(programs)
