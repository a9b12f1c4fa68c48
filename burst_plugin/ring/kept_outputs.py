"""Outputs of the ring, kept for a checkpoint that computes a call again, so that the ring need not run again."""

from __future__ import annotations

from math import ceil
from typing import Any, Protocol

import torch
from torch import Tensor

from burst_plugin.compute.varlen import token_dim
from burst_plugin.kernels.varlen import sent
from burst_plugin.ring.plan import Plan
from burst_plugin.ring.request import Outputs

_NOTHING = Outputs(torch.empty(0, device="cpu"), None)


class Host(Protocol):
    """The interface of host memory that holds tensors for later; see `activations.host_memory`."""

    def park(self, x: Tensor) -> Any:
        """Start to copy a tensor to the host; return what `fetch` takes."""
        ...

    def fetch(self, parked: Any) -> Tensor:
        """Return the parked tensor on its device again; `parked` is what `park` returned."""
        ...


class KeptOutputs:
    """The outputs of one attention call in a checkpoint, kept from the first run for the run that computes it again.

    It is empty until the first run.

    share: the share of the sequence, from 0 to 1, whose outputs are kept: of the queries at the end.
    host: keeps them in host memory; None for the device.
    rest: the plan of the queries before these, which the ring works on again; None if there are none.
    also: another object, which keeps the outputs of the next run of the call, too; None for none.
    """

    def __init__(self, share: float, host: Host | None = None) -> None:
        self.share, self._host = share, host
        self._parked: tuple[Any, Any] | None = None  # lse and out on the host, not in `_kept`
        self.rest: Plan | None = None
        self.also: KeptOutputs | None = None
        self._plan: Plan | None = None  # of the first run
        self._kept = _NOTHING
        self._version = 0

    @property
    def is_filled(self) -> bool:
        """Return whether the call has had its first run, whose outputs are kept."""
        return self._plan is not None

    def first_kept(self, plan: Plan) -> int:
        """Return the first position of the sequence whose output is kept; outputs of all later ones are kept, too."""
        length = plan.attending.q.length
        return length - round(self.share * length)

    def check(self, plan: Plan) -> None:
        """Raise ValueError unless `plan`, of the second run, is for the same call as the first run's.

        It is also raised if the kept out was modified in place since then.
        """
        assert self._plan is not None
        first, again = self._plan.signature, plan.signature
        differing = [name for name in first if first[name] != again[name]]
        if differing:
            raise ValueError(
                f"a checkpoint computes another attention call again than it kept: {', '.join(differing)} differ. "
                "Layers must make the same calls in the same order each time; or use keep_attention='none'"
            )
        if self._kept.out._version != self._version:
            raise ValueError(
                "what attention returned was modified in place inside a checkpoint, and cannot be used again: let "
                "the layer make a new tensor, or use keep_attention='none'"
            )

    def missing(self, plan: Plan) -> Plan | None:
        """Return the plan of the queries to compute: `plan` in a first run, then `rest`; None if there are none."""
        return self.rest if self.is_filled else plan

    def completed(self, plan: Plan, computed: Outputs | None) -> Outputs:
        """Return the outputs of all queries: `computed`, and kept ones for the other queries.

        A first run keeps outputs here.

        plan: the plan of the whole call. computed: the outputs of the queries that `missing` named; None if all were
            kept.
        """
        if self.is_filled:
            outputs = self._with_kept(computed)
        else:
            assert computed is not None, "a first run computes all"
            outputs = computed
            if self.share:
                self._keep(plan, outputs)
        if self.also is not None:
            self.also._keep(plan, outputs)
            self.also = None
        return outputs

    def release(self) -> tuple[Tensor, Tensor]:
        """Return the kept out and lse, which must not be on the host, and drop them here."""
        out, lse = self._kept.out, _lse(self._kept)
        self._kept = self._kept._replace(out=torch.empty(0, device="cpu"), lse=None)
        return out, lse

    def restore(self, out: Tensor, lse: Tensor) -> None:
        """Take back out and lse, which `release` returned."""
        self._kept = self._kept._replace(out=out, lse=lse)
        self._version = out._version

    def _keep(self, plan: Plan, outputs: Outputs) -> None:
        """Keep outputs as they are, or copies of the rows at the end of the sequence."""
        first = self.first_kept(plan)
        if first > 0:
            late = _rows_from(first, plan)
            outputs = outputs._replace(out=outputs.out[:, late], lse=_lse(outputs)[:, :, late])
        self._plan = plan
        if self._host is None:
            self._kept = _aliased(outputs)
        else:  # in the reverse order of `_outputs`, as host memory expects
            self._parked = self._host.park(_lse(outputs)), self._host.park(outputs.out)
            self._kept = self._kept._replace(max_logits=outputs.max_logits)
        self._version = self._kept.out._version

    def _outputs(self) -> Outputs:
        """Return the kept outputs, in new tensors."""
        if self._host is None or self._parked is None:
            return _aliased(self._kept)
        lse, out = self._parked
        return Outputs(self._host.fetch(out), self._host.fetch(lse), self._kept.max_logits)

    def _with_kept(self, outputs: Outputs | None) -> Outputs:
        """Return the kept outputs, and `outputs` for queries that have none."""
        kept = self._outputs()
        if outputs is None:
            return kept
        assert self._plan is not None
        late = _rows_from(self.first_kept(self._plan), self._plan)
        for whole, part in ((outputs.out, kept.out), (_lse(outputs), _lse(kept))):
            whole.index_copy_(token_dim(whole), late, part)
        return outputs._replace(max_logits=kept.max_logits)


def _rows_from(first: int, plan: Plan) -> Tensor:
    """Return which of this rank's query rows are at position `first` or later, without waiting for the device."""
    ranges, offset = [torch.empty(0, dtype=torch.int64, device="cpu")], 0
    for run in plan.q_runs:
        before = min(max(0, ceil((first - run.start) / run.stride)), run.length)
        ranges.append(torch.arange(offset + before, offset + run.length, device="cpu"))
        offset += run.length
    return sent(torch.cat(ranges), plan.device)


def _lse(outputs: Outputs) -> Tensor:
    assert outputs.lse is not None, "the ring always gives it"
    return outputs.lse


def _aliased(outputs: Outputs) -> Outputs:
    """Return the outputs as detached tensors: autograd marks tensors that it gets as results of a node."""
    return Outputs(*(None if x is None else x.detach() for x in outputs))  # type: ignore[arg-type]
