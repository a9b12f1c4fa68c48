"""Evaluation by Trainer and TRL on a ring: batches of its ranks in turn, the last one without rows that do not count.

    5 rows, 2 ranks, batches of 2    rank 0   rank 1
    first batch of all ranks         0 1      2 3     turns 0 and 1
    last batch                       4 0      1 2     turn 0 with row 4, no turn 1: Accelerate begins anew to fill up

TRL takes means of what it gathers from ranks, and Trainer the first rows; neither knows that ranks share a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from burst_plugin.batch import IGNORED_LABEL
from burst_plugin.deepspeed.engine_session import Session
from burst_plugin.deepspeed.loaders import exchanged
from burst_plugin.deepspeed.trl_trainers import is_of_trl
from burst_plugin.huggingface.media.rows import is_of_media, media_of_rows


def predict_in_turns(session: Session, step: Callable[[Any], Any], trainer: Any, inputs: Mapping[str, Any]) -> Any:
    """Evaluate batches of all ranks of a ring one after another; return the result for this rank's batch; collective.

    Turns in which no ring has a row that counts are left out; ranks with such a batch get the result of turn 0, which
    Trainer does not use.

    Args:
        session: the session of the trainer's engine.
        step: evaluates one whole batch on the ring, and returns tensors, in tuples or alone.
        trainer: the trainer that evaluates.
        inputs: this rank's batch, of whole sequences.
    """
    state = trainer.accelerator.gradient_state
    last = _last_batch(state, session)
    batches = exchanged(inputs, session.cp)
    if last is not None:
        batches = batches[: last.turns(session)]
        of_trl = any(map(is_of_trl, type(trainer).__mro__))
        batches = [last.real_part(trainer.model, each, turn, session, of_trl) for turn, each in enumerate(batches)]
    kept = {session.cp.rank} if last is None else {0, session.cp.rank}
    results = {}
    session.takes_turns = True
    try:
        with _not_at_its_end(state):
            for turn, batch in enumerate(batches):
                result = step(batch)
                if turn in kept:
                    results[turn] = result
    finally:
        session.takes_turns = False
    if last is None:
        return results[session.cp.rank]
    rows_of_all = last.per_rank if session.gathers and not of_trl else 0
    fill = partial(_filled_up, rows=rows_of_all)
    return tree_map(fill, results.get(session.cp.rank, results[0]), results[0])


@dataclass(frozen=True)
class _LastBatch:
    """The last batch of all ranks together: its first `real` rows count, of `per_rank` on each rank."""

    real: int
    per_rank: int

    def turns(self, session: Session) -> int:
        """Return how many turns have rows that count: on the first ring, and so perhaps on others."""
        return min(session.cp.ranks, -(-self.real // self.per_rank))

    def real_part(
        self, model: torch.nn.Module, batch: Mapping[str, Any], turn: int, session: Session, of_trl: bool
    ) -> Mapping[str, Any]:
        """Return the batch of a turn without the rows that do not count, or without their labels.

        TRL gathers whole outputs from all rings within a step, so that these keep as many rows as the first ring
        does. Of shards, several rings keep all rows, and mask labels.
        """
        has_rings = session.ranks > session.cp.ranks
        count = min(self.per_rank, self.real - turn * self.per_rank)
        before = (dist.get_rank() - session.cp.rank + turn) * self.per_rank
        if session.gathers and not of_trl:  # a batch without any row that counts is left out by Trainer
            count = max(0, min(self.per_rank, self.real - before)) or self.per_rank
            return first_rows(model, batch, count, self.per_rank)
        if session.gathers:
            part = first_rows(model, batch, count, self.per_rank)
            may_differ = count < self.per_rank and has_rings
            if may_differ and session.sum_over_ranks(float(part is batch)):  # some ring cannot leave rows out
                return batch
            return part
        if not has_rings:  # of rows without labels, routers would still count the tokens
            batch = first_rows(model, batch, count, self.per_rank)
        labels = batch.get("labels")
        if labels is None or before + len(labels) <= self.real:
            return batch
        counts = torch.arange(len(labels), device=labels.device) < self.real - before
        return {**batch, "labels": labels.masked_fill(~counts[:, None], IGNORED_LABEL)}


def _last_batch(state: Any, session: Session) -> _LastBatch | None:
    """Return the last batch of Accelerate's loader; None before it, if all its rows count, or if that is unknown."""
    if not state.end_of_dataloader or state.remainder <= 0:
        return None
    per_rank = getattr(state.active_dataloader, "total_batch_size", 0) // session.ranks
    return _LastBatch(state.remainder, per_rank) if per_rank else None


def first_rows(model: torch.nn.Module, batch: Mapping[str, Any], count: int, rows: int) -> Mapping[str, Any]:
    """Return the first `count` of `rows` samples of a batch; a sample may have several sequences.

    Preferences have the chosen answers of all samples first, then the rejected ones. A batch is returned as it is if
    it has tensors of other sizes, positions of several axes (mRoPE), or media that cannot be assigned to rows.
    """
    lengths = {len(x) for name, x in batch.items() if name.endswith("input_ids")} | {rows}
    by_row = {name: x for name, x in batch.items() if not is_of_media(name)}
    tensors = [x for x in by_row.values() if isinstance(x, Tensor) and x.dim()]
    if count == rows or any(len(x) not in lengths for x in tensors) or any(length % rows for length in lengths):
        return batch
    positions = batch.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() > 2:
        return batch
    media: dict[str, Any] | None = {}
    if any(x is not None for name, x in batch.items() if name not in by_row):
        media = media_of_rows(model, batch, [n for n in range(max(lengths)) if n % rows < count])
    if media is None:
        return batch

    def first(x: Any) -> Any:
        if isinstance(x, Tensor) and x.dim():
            return x.reshape(-1, rows, *x.shape[1:])[:, :count].flatten(0, 1)
        return x[:count] if isinstance(x, list) and len(x) == rows else x

    return {name: first(x) for name, x in by_row.items()} | media


def _filled_up(x: Any, first: Any, rows: int) -> Any:
    """Repeat the last row of a result up to the size of turn 0's, or to `rows`: Accelerate gathers equal sizes."""
    if not isinstance(x, Tensor) or not x.dim():
        return x
    missing = max(rows, len(first)) - len(x)
    return x if missing <= 0 else torch.cat([x, x[-1:].expand(missing, *x.shape[1:])])


@contextmanager
def _not_at_its_end(state: Any) -> Iterator[None]:
    """Hide the end of the loader, at which TRL leaves out all but some of the rows that it gathers from ranks."""
    loader = state.active_dataloader
    if not getattr(loader, "end_of_dataloader", False):
        yield
        return
    loader.end_of_dataloader = False
    try:
        yield
    finally:
        loader.end_of_dataloader = True
