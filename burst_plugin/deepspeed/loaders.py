"""Data loaders that cut their batches for a rank, and the exchange of batches on a ring."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from burst_plugin.batch import SHARD_KEY
from burst_plugin.context import ContextParallel
from burst_plugin.deepspeed.engine_session import Session


class ShardedLoader:
    """A data loader that yields this rank's shards of the whole batches of another loader, `loader`.

    Batches stay whole for a model that cuts them by itself and returns outputs of whole sequences. Attributes that
    this loader has not, such as `dataset`, are read from `loader`.

    session: the session whose ring shares the batches; None until `bind` sets it.
    exchange: whether every rank of the ring draws batches of its own, as with samplers that count all ranks. The ring
        then works on the batch of rank 0, of rank 1, ..., which multiplies the number of batches by the number of
        ranks. Otherwise all ranks of the ring draw the same batches.
    pad_token_id: the id that fills up sequences whose length ranks cannot share evenly.
    """

    def __init__(
        self, loader: Iterable[Any], session: Session | None, *, exchange: bool = False, pad_token_id: int = 0
    ) -> None:
        self.loader = loader
        self._session = session
        self._exchange = exchange
        self._pad_token_id = pad_token_id
        self._first_drawn = self._first_turn = 0  # of every pass: the batch of `loader`, the turn with it
        self._turns_left = 0
        if exchange and hasattr(loader, "state_dict"):  # Accelerate asks `loader` itself
            loader.state_dict = partial(self._state_dict, loader.state_dict)

    def __len__(self) -> int:
        count = len(self.loader) - self._first_drawn  # type: ignore[arg-type]
        return count * self._turns() - self._first_turn

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in itertools.islice(self._whole(), self._first_turn, None):
            session = self._found()
            yield batch if session.gathers else session.shard_batch(batch, pad_token_id=self._pad_token_id)

    def skip_first(
        self, batches: int, without_first: Callable[[DataLoader[Any], int], Iterable[Any]] | None = None
    ) -> ShardedLoader:
        """Return a loader of the batches of this one but the first `batches`, to resume in the middle of an epoch.

        Ranks exchange none of these but those that they drew together with the first batch that is left.

        without_first: returns a `DataLoader` without so many of its first batches, which it does not read, either.
        """
        drawn, turn = divmod(self._first_turn + batches, self._turns())
        loader = self.loader
        if without_first is not None and isinstance(loader, DataLoader):
            loader, drawn = without_first(loader, drawn), 0
        rest = ShardedLoader(loader, self._session, exchange=self._exchange, pad_token_id=self._pad_token_id)
        rest._first_drawn, rest._first_turn = self._first_drawn + drawn, turn
        return rest

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)  # set_epoch, batch_sampler, dataset, ...

    def bind(self, session: Session) -> None:
        """Set the session whose ring batches are cut for, unless this loader has one already."""
        self._session = self._session or session

    def _found(self) -> Session:
        if self._session is None:
            raise RuntimeError(
                "this data loader has no engine: call accelerator.prepare(model, ...) first; and make a new Trainer "
                "for a second train(), or for train() after evaluate() or predict() with ZeRO-3: Accelerate destroys "
                "the engine that these have made when training begins"
            )
        return self._session

    def _turns(self) -> int:
        """Return how many batches of the ring come from one batch of `loader`."""
        return self._found().cp.ranks if self._exchange else 1

    def _state_dict(self, original: Callable[[], Any]) -> Any:
        """Replace `state_dict` of a stateful loader, which counts the batches that it has drawn."""
        if self._turns_left:
            warnings.warn(
                f"{self._turns_left} rank(s) of the ring have not had their turn with the batches drawn last, which "
                f"are left out on resuming: save after a multiple of {self._found().cp.ranks} batches, or leave "
                "use_stateful_dataloader out",
                stacklevel=3,
            )
        return original()

    def _whole(self) -> Iterator[Any]:
        cp, self._turns_left = self._found().cp, 0
        for number, batch in enumerate(itertools.islice(self.loader, self._first_drawn, None)):
            turns = exchanged(batch, cp) if self._exchange else [batch]
            if number == 0 and len(turns) > 1 and all(_equal(turn, turns[0]) for turn in turns[1:]):
                warnings.warn(
                    f"the {len(turns)} ranks of a context-parallel group drew the same batch, and train on it "
                    f"{len(turns)} times: samplers have to count all ranks, as Trainer's do",
                    stacklevel=3,
                )
            for left, turn in zip(reversed(range(len(turns))), turns, strict=True):
                self._turns_left = left
                # TRL would take all but the rows of one rank out of what it gathers at the end.
                with self._not_at_its_end(left > 0), self._without_remainder():
                    yield turn
        if self._exchange:  # otherwise the others would wait for this rank's next batch
            exchanged(None, cp)
        else:
            cp.agree({"batch": "none, since the data loader has ended"})

    @contextmanager
    def _without_remainder(self) -> Iterator[None]:
        """Hide how many rows of the last batch are real, if ranks take turns: TRL would leave ranks out of logs."""
        hidden = getattr(self.loader, "remainder", 0)
        if hidden <= 0 or not self._exchange:
            yield
            return
        self.loader.remainder = 0  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self.loader.remainder = hidden  # type: ignore[attr-defined]

    @contextmanager
    def _not_at_its_end(self, more: bool) -> Iterator[None]:
        """Hide the end of the loader while there are `more` batches of other ranks: Accelerate steps at the end."""
        if not (more and getattr(self.loader, "end_of_dataloader", False)):
            yield
            return
        self.loader.end_of_dataloader = False  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self.loader.end_of_dataloader = True  # type: ignore[attr-defined]


def exchanged(batch: Any, cp: ContextParallel) -> list[Mapping[str, Any]]:
    """Return the batches of all ranks of `cp`, in rank order, on the device of this rank's batch; collective.

    `batch` is this rank's dict of whole tensors, or None at the end of its data; the result is [] if the data of all
    ranks have ended. Raises ValueError on every rank if only some have ended, or if the batch of any rank is not a
    dict.
    """
    cp.rank_state.check_open()
    if cp.group is None:
        return [] if batch is None else [batch]
    gathered: list[Any] = [None] * cp.ranks
    own_batch: dict[str, Any] | str | None = None if batch is None else type(batch).__name__
    if isinstance(batch, Mapping) and SHARD_KEY in batch:
        own_batch = "a batch that is cut already"
    elif isinstance(batch, Mapping):
        own_batch = {k: x.cpu() if isinstance(x, Tensor) else x for k, x in batch.items()}
    with cp.rank_state.alone():
        dist.all_gather_object(gathered, own_batch, group=cp.group)
    not_dicts = {rank: item for rank, item in enumerate(gathered) if isinstance(item, str)}
    if not_dicts:
        raise ValueError(
            f"a batch has to be a dict of whole tensors by name, but some ranks have other batches: {not_dicts}"
        )
    ended = [rank for rank, item in enumerate(gathered) if item is None]
    if len(ended) == cp.ranks:
        return []
    if ended:
        raise ValueError(
            f"the data loader has ended on ranks {ended} of the {cp.ranks} of a context-parallel group, but not on "
            "the others; give all ranks the same number of batches, or set drop_last=True"
        )
    assert batch is not None, "no rank has ended"
    device = next((x.device for x in batch.values() if isinstance(x, Tensor)), None)
    return [{name: x.to(device) if isinstance(x, Tensor) else x for name, x in item.items()} for item in gathered]


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two batches hold the same tensors."""
    tensors = [{name: x for name, x in batch.items() if isinstance(x, Tensor)} for batch in (one, other)]
    return tensors[0].keys() == tensors[1].keys() and all(
        torch.equal(x, tensors[1][n]) for n, x in tensors[0].items()
    )
