"""How the ranks of a ring compare the calls that they are about to make, before data moves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from burst_plugin.comm.call_identity import CallId, call_name
from burst_plugin.comm.consistency import ConsistencyCheck, Constants
from burst_plugin.comm.process_groups import refuse_torchcomms
from burst_plugin.ring.rank_state import RankState
from burst_plugin.strategy import Strategy

if TYPE_CHECKING:
    from burst_plugin.profiling.recorder import Profile

T = TypeVar("T")
Agreed = TypeVar("Agreed")


def consistency_check(
    group: dist.ProcessGroup | None, rank: int, global_ranks: Sequence[int], strategy: Strategy
) -> ConsistencyCheck | None:
    """Return a `ConsistencyCheck` for the ranks of `group` to compare their calls; None for no group, a single rank.

    Raises ValueError for an option `check` that the group does not support, or if torch makes groups by TorchComms.

    rank: this rank's number in the group. global_ranks: the global rank of each rank of the group.
    """
    if group is None:
        return None
    refuse_torchcomms()
    consistency = ConsistencyCheck(group, rank, global_ranks)
    if consistency.is_on_cpu and strategy.check == "sparse":
        raise ValueError(
            "check='sparse' is for GPUs: gloo, which moves what CPUs hold, ends a process that gets more bytes "
            "than it expects, so that ranks compare every call there; use check='auto'"
        )
    return consistency


class Agreement:
    """The comparisons of one rank with the other ranks of its ring, before they communicate.

    rank_state: the rank's state, whose options and order of passes are compared, too.
    consistency: exchanges what ranks compare; None for a single rank, for which nothing is compared.
    """

    def __init__(self, rank_state: RankState, consistency: ConsistencyCheck | None) -> None:
        self.rank_state, self.consistency = rank_state, consistency
        self._comparison_count = self._attention_count = self._meetings = 0
        self._process = os.getpid()

    def agree(self, signature: Mapping[str, object], problem: str = "", of: str = "a batch") -> int:
        """Compare what all ranks are about to do; return the number of this comparison on this rank; collective.

        Args:
            signature: values by name, which must be equal on all ranks.
            problem: why this rank cannot go on; "" if it can.
            of: what is compared, for the message of an error.

        Raises ValueError on every rank if any has a problem, or if ranks differ.
        """
        number = self._next_comparison()
        self.compare(f"comparison {number}, of {of}", signature, problem)
        return number

    def of_first_rank(self, text: str) -> str:
        """Return the `text` of rank 0 on every rank; collective."""
        if self.consistency is None:
            return text
        with self.rank_state.alone():
            return self.consistency.exchange(text, "the exchange of seeds")[0]

    def meet(self, at: str) -> None:
        """Check that all ranks are at one place of the program, as often as calls are compared; collective.

        `Strategy.check` says how often that is.

        at: the place, such as an action that is about to begin. Raises ValueError on every rank if one is elsewhere.
        """
        self._meetings += 1
        if self.consistency is not None and self._is_due(self.consistency, self._meetings):
            self.rank_state.check_open()
            self.compare(at, {})

    def name_of_next_call(self, tag: object) -> str:
        """Return the name of the next attention call, from the training step and the caller's `tag`; not collective.

        A tag may be on a GPU, and reading it waits: so it is left out where ranks will not compare the call.
        """
        step, consistency = self.rank_state.training_step, self.consistency
        if tag is None or consistency is None:
            return step
        reads = consistency.is_on_cpu or self._is_due(consistency, self._attention_count + 1)
        return call_name(step, tag) if reads else step

    def before_forward(
        self, signature: Callable[[], Mapping[str, object]], problem: str = "", name: str = ""
    ) -> CallId:
        """Return the identity of the attention call that is about to begin, compared with all ranks if it is due.

        `Strategy.check` says which calls ranks compare; these are collective here. At other calls only this rank
        knows of its problem, and the other ranks may be sending already: so the ring ends.

        Args:
            signature: returns the values that must be equal, by name; called only where ranks compare.
            problem: why this rank cannot make the call; "" if it can.
            name: the name of the call, from `name_of_next_call`.

        Raises ValueError for a problem of this rank and, where ranks compare, of any rank, or if ranks differ.
        """
        self._attention_count += 1
        consistency = self.consistency
        due = consistency is None or self._is_due(consistency, self._attention_count)
        call = CallId(self._next_comparison(), name, due)
        if due:
            if problem or consistency is not None:
                self.compare(f"the forward pass of {call}", signature(), problem)
            return call
        if problem:
            ended = "; ranks did not compare this call, so that the ring has ended (see Strategy.check)"
            refusal = ValueError(problem + ended)
            self.rank_state.give_up(refusal)
            raise refusal
        return call

    def before_backward(self, call: CallId) -> None:
        """Check that all ranks are about to run the backward pass of `call`, if they compared it; collective.

        A rank that left one out would meet them with its next call instead.
        """
        if call.is_compared and self.consistency is not None:
            self.rank_state.check_open()
            self.compare(f"the backward pass of {call}", {})

    def compare(self, at: str, signature: Mapping[str, object], problem: str = "") -> None:
        """Check that all ranks are at one place of the program, with equal values; collective.

        Args:
            at: the place: the action that is about to begin.
            signature: values by name, which must be equal on all ranks.
            problem: why this rank cannot go on; "" if it can.

        Raises ValueError on every rank if any has a problem, is at another place, or differs.
        """
        state, consistency = self.rank_state, self.consistency
        if consistency is None:  # a single rank
            if problem:
                raise ValueError(problem)
            return
        order = f"{state.passes_digest:x}"  # backward passes may come in another one
        compared = {"ring": consistency.ring_name(state.ring_id), "order of passes so far": order, **signature}
        state.progress.where = ("before", at)
        noted = nullcontext() if state.profile is None else _noted(consistency, state.profile)
        with state.alone(), noted:
            try:
                consistency.compare(at, compared, problem, self._options)
            except (RuntimeError, ValueError):  # an abort causes these, too, by data that did not arrive
                state.check_not_aborted()
                raise

    @cached_property
    def _options(self) -> Constants:
        """Return the topology and the options that the ring was made with."""
        return Constants({"topology": self.rank_state.topology, **self.rank_state.strategy.compared})

    def _is_due(self, consistency: ConsistencyCheck, number: int) -> bool:
        """Return whether ranks compare at occasion `number`, counted from 1 on."""
        return self.rank_state.strategy.check_is_due(number, consistency.is_on_cpu)

    def _next_comparison(self) -> int:
        self.rank_state.check_open()
        if self.consistency is not None and os.getpid() != self._process:
            raise RuntimeError(
                "this ContextParallel belongs to the process that made it, and a data loader's worker is another: "
                "cut batches in the training loop, with shard_batch or burst_plugin.deepspeed.sharded_loader"
            )
        self._comparison_count += 1
        return self._comparison_count


def prepared_together(prepare: Callable[[], T], agree: Callable[[T | None, str], Agreed]) -> tuple[T, Agreed]:
    """Return this rank's result of `prepare`, once all ranks have one, and the result of `agree`; collective.

    Args:
        prepare: called on this rank alone; may raise.
        agree: collective, called with the result of `prepare` and "", or with None and the problem; raises ValueError
            on every rank if any has a problem.

    Raises:
        ValueError: raised by `agree`; on a rank with a problem its cause is the error that `prepare` raised.
    """
    prepared, problem, cause = None, "", None
    try:
        prepared = prepare()
    except Exception as error:  # of any kind: the other ranks must know of it
        problem, cause = error_text(error), error
    try:
        agreed = agree(prepared, problem)
    except ValueError as error:
        raise error from cause or error.__cause__
    assert prepared is not None, "agree raises if any rank has a problem"
    return prepared, agreed


def error_text(error: BaseException) -> str:
    """Return the text that tells other ranks of an error: a ValueError's message, else the error's repr."""
    return str(error) if isinstance(error, ValueError) and str(error) else repr(error)


@contextmanager
def _noted(consistency: ConsistencyCheck, profile: Profile) -> Iterator[None]:
    """Note a comparison, and the ranks that it waits for, in the profile."""
    log = profile.begin_pass("comparison", torch.device("cpu"))
    before, consistency.watched = consistency.watched, log.watched
    try:
        with log.timed("move"):
            yield
    finally:
        consistency.watched = before
