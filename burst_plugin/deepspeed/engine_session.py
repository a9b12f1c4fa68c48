"""One engine with burst attention: its ring, its batches and its losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin.batch import IGNORED_LABEL, SHARD_KEY, LayerMask, SequenceShard, as_given, shard_batch
from burst_plugin.comm.process_groups import group_device
from burst_plugin.context import ContextParallel
from burst_plugin.deepspeed.config import MEAN_OF_RANKS, TOKEN_MEAN


class AttachedHooks(Protocol):
    """The hooks on a session's model, as `Session` calls them; `model_hooks.ModelHooks` implements this protocol."""

    def remove(self) -> None:
        """Remove the hooks from the model."""

    def check_takes_shards(self, model: torch.nn.Module) -> None:
        """Raise ValueError if `model`, which has got a shard, can run on whole batches only.

        Such models are allowed on rings of one rank, where each rank has whole batches.
        """


class Session:
    """The ring of one engine, which cuts batches for the engine's model and makes its losses right for whole batches.

    cp: the ring.
    world: the process group of all ranks of all rings.
    loss: "token_mean", one mean over the tokens of all rings, or "mean_of_ranks", each ring's own mean. DeepSpeed
        averages gradients over rings as over data-parallel ranks.
    engine: returns the engine when called; None before it exists and once it is gone.
    hooks: the hooks of the model, once it is attached.
    whole_batches: whether the model takes whole batches as keyword arguments, which are cut in its forward.
    layer_mask: the argument `layer_mask` of `shard_batch` for the model.
    only_caller: the name of the only function that may call the model in training; empty if any may. See `permitted`.
    """

    def __init__(self, cp: ContextParallel, world: Any, loss: str) -> None:
        self.cp = cp
        self.world = world
        self.loss = loss
        self.engine: Callable[[], Any] = lambda: None
        self.hooks: AttachedHooks | None = None
        self.whole_batches = False
        self.layer_mask: LayerMask | None = None
        self.only_caller = ""
        self.is_permitted = False  # while `only_caller` calls the model
        self.took_model_loss = False  # whether Trainer's compute_loss has taken the model's loss of a whole batch
        self.batches_of_step = 1  # that Trainer accumulates gradients of
        self.losses_made = 0  # of whole batches, by token_mean_loss and from the losses of shards
        self.gathers = (
            False  # whether the model returns values of whole sequences, for a loss that each rank computes
        )
        self.shards: list[SequenceShard] | None = None  # of outputs that are left as they are
        self.takes_turns = False  # while a trainer evaluates the batches of the ring's ranks
        self.computes_edges = False  # whether the model returns log-probabilities of edges as its loss
        self._trained_losses = 0  # of which numbers 1, 2, 4, 8, ... are checked in their backward pass

    @property
    def ranks(self) -> int:
        """Return the number of all ranks: context-parallel times data-parallel ones."""
        return dist.get_world_size(self.world)

    @property
    def leaves_losses(self) -> bool:
        """Return whether losses stay as the model computes them: on a ring of one rank with loss="mean_of_ranks"."""
        return self.cp.ranks == 1 and self.loss == MEAN_OF_RANKS

    @contextmanager
    def permitted(self) -> Iterator[None]:
        """Allow calls of the model in training within this context, if `only_caller` names the only permitted caller.

        Trainer's `compute_loss` runs in it. Elsewhere a forward of the model in training raises ValueError.
        """
        self.is_permitted = True
        try:
            yield
        finally:
            self.is_permitted = False

    @contextmanager
    def leaving_outputs(self) -> Iterator[list[SequenceShard]]:
        """Have the model return outputs of this rank's tokens within this context, not gathered into whole sequences.

        It matters for models whose batches are cut and whose outputs are gathered (`gathers`). Yields a list, to
        which each forward appends the `SequenceShard` of its batch.
        """
        self.shards = []
        try:
            yield self.shards
        finally:
            self.shards = None

    @contextmanager
    def computing_edges(self) -> Iterator[None]:
        """Let forwards within this context return log-probabilities of a prefix tree's edges in place of a loss.

        The hooks of the model then neither scale nor check a loss.
        """
        self.computes_edges = True
        try:
            yield
        finally:
            self.computes_edges = False

    def detach(self) -> None:
        """Remove the hooks of the model, if there are any."""
        if self.hooks is not None:
            self.hooks.remove()

    # ------------------------------------------------------------------------------------------------- steps

    def note_step(self) -> None:
        """Tell the ring the numbers of the engine's present step and micro-step, for ranks to compare later."""
        engine = self.engine()
        if engine is not None:
            self.cp.step(engine.global_steps, engine.micro_steps)

    def meet_at_step(self) -> None:
        """Raise ValueError unless all ranks of the ring now call `engine.step()` for the same step; collective.

        A rank that left out a backward pass would otherwise wait in a collective of DeepSpeed, while the others wait
        on the ring.
        """
        engine = self.engine()
        if engine is not None:
            self.cp.meet(f"engine.step() of step {engine.global_steps}, microbatch {engine.micro_steps}")

    # ------------------------------------------------------------------------------------------------- batches

    def replicas(self) -> dist.ProcessGroup | None:
        """Return the process group over which the engine reduces gradients, all ranks; None without an engine."""
        engine = self.engine()
        group: dist.ProcessGroup | None = None if engine is None else engine.seq_data_parallel_group
        return group

    def shard_batch(self, batch: Mapping[str, Any], *, pad_token_id: int = 0) -> dict[str, Any]:
        """Return this rank's shard of a batch of whole sequences, a dict of tensors [B, S_local, ...]; collective.

        `batch` has tensors [B, S, ...] by name, equal on all ranks of the ring; `burst_plugin.batch.shard_batch`
        lists them. `pad_token_id` fills up sequences whose length ranks cannot share evenly.
        """
        return shard_batch(batch, self.cp, pad_token_id=pad_token_id, layer_mask=self.layer_mask)

    def cut(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Cut the keyword arguments of a whole batch for this rank's call of the model; collective.

        Returns this rank's shard or, on a ring of one rank for a model that takes whole batches, the whole batch with
        its `SequenceShard` under "burst". `num_items_in_batch`, if the batch has one, is divided by the ranks of the
        ring.
        """
        if self.leaves_losses and self.whole_batches:  # labels of any kind are left to the model
            rest = {name: x for name, x in batch.items() if name not in ("labels", "shift_labels")}
            return {**batch, SHARD_KEY: as_given(rest, self.cp)[SHARD_KEY]}
        if self.cp.ranks == 1 and self.whole_batches:
            return as_given(batch, self.cp)
        local = self.shard_batch(batch)
        if local.get("num_items_in_batch") is not None:
            local["num_items_in_batch"] = local["num_items_in_batch"] / self.cp.ranks
        return local

    def valid_tokens(self, *shards: SequenceShard) -> float:
        """Return the number of labels in these shards' whole batches that count in the loss; collective.

        Labels of all rings are counted.
        """
        count = sum(shard.valid_tokens for shard in shards)
        if self.ranks == self.cp.ranks:
            return float(count)
        return self.sum_over_ranks(float(count)) / self.cp.ranks

    def gather_logits(self, logits: Tensor, shard: SequenceShard) -> Tensor:
        """Gather logits [B, S_local, V] to [B, S, V] of the whole sequence, without gradient; collective.

        `shard` is the entry "burst" of the batch that the logits belong to.
        """
        with torch.no_grad():
            return shard.unshard(logits)

    # ------------------------------------------------------------------------------------------------- losses

    def token_mean_loss(self, logits: Tensor, shift_labels: Tensor, *, valid_tokens: float | None = None) -> Tensor:
        """Return the mean cross entropy over all labels of all ranks, a scalar for `engine.backward`; collective.

        Args:
            logits: [B, S_local, V].
            shift_labels: [B, S_local], the label of each of this rank's tokens; -100 where there is none.
            valid_tokens: the number of labels of all ranks to divide by. None: the labels of this micro-batch;
                DeepSpeed then averages over gradient accumulation steps. For one mean over all tokens of a step give
                their number (`valid_tokens(*shards)`), and call `engine.backward(loss, scale_wrt_gas=False)`.

        Returns:
            The mean, equal on all ranks. Its gradient is the gradient of this rank's part, times the number of ranks,
            since DeepSpeed averages gradients over them.

        Raises ValueError if `logits` is None, as with `loss_chunk`.
        """
        if logits is None:
            raise ValueError(
                f"got no logits: with loss_chunk={self.cp.strategy.loss_chunk} the model computes its loss without "
                "them; use that loss, or leave labels and shift_labels out of the batch to get logits"
            )
        self.losses_made += 1
        local = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, -2), shift_labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )
        if valid_tokens is None:
            valid_tokens = self.sum_over_ranks(float((shift_labels != IGNORED_LABEL).sum()))
        return self._with_mean_value(local * (self.ranks / max(valid_tokens, 1.0)), self.world)

    def divisor(self, shard: SequenceShard, training: bool) -> float:
        """Return the divisor of the model's summed loss on `shard`, to be passed as `num_items_in_batch`.

        In training with loss="token_mean" it is the labels of all rings over all ranks, else the labels of this ring
        over its ranks, so that the mean of ranks' results is the mean over labels. Collective in the first case.
        """
        one_mean = self._is_one_mean(training)
        labels_per_rank = self.valid_tokens(shard) / self.ranks if one_mean else shard.valid_tokens / self.cp.ranks
        return max(labels_per_rank, 1.0 / self.ranks)

    def of_whole_batch(self, loss: Tensor, training: bool) -> Tensor:
        """Return a model's loss on a shard with the value for the whole batch, but its own gradient; collective.

        The value is the mean of ranks' losses: of all rings in training with loss="token_mean", else of this ring.
        From time to time the backward pass checks that ranks of a ring give the loss equal weights.
        """
        self.losses_made += 1
        mean_loss = self._with_mean_value(loss, self.world if self._is_one_mean(training) else self.cp.group)
        if training and mean_loss.requires_grad and self.cp.group is not None:
            self._trained_losses += 1
            if self._trained_losses & (self._trained_losses - 1) == 0:
                mean_loss.register_hook(self.check_weight)  # type: ignore[no-untyped-call]
        return mean_loss

    def check_weight(self, grad: Tensor) -> None:
        """Raise ValueError on every rank if ranks have put unlike weights on the loss of a batch; collective.

        Loops for DeepSpeed's Ulysses do: there a loss is that of a rank's tokens, and is weighed by their number.
        """
        group, engine = self.cp.group, self.engine()
        assert group is not None, "there is a ring"
        if engine is not None:  # else a rank without a backward pass would meet them in another collective
            self.cp.meet(
                f"the backward pass of the loss of step {engine.global_steps}, microbatch {engine.micro_steps}"
            )
        bounds = torch.stack([grad.detach(), -grad.detach()]).double().to(group_device(group))
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
        most, least = float(bounds[0]), -float(bounds[1])
        if most - least > 1e-3 * max(abs(most), abs(least)):
            raise ValueError(
                "the ranks of a context-parallel group give the loss of one batch different weights, from "
                f"{least:.4g} to {most:.4g}: the loss that the model returns is the loss of the whole batch already, "
                "on every rank. Remove code that adds up losses, such as the all_gather over sequence-parallel ranks "
                "in loops for DeepSpeed's Ulysses (ALST)"
            )

    def mean_by_labels(self, loss: Tensor, local: Mapping[str, Any]) -> Tensor:
        """Return the mean loss over all labels of a batch, from each rank's mean over its labels; collective.

        `loss` is this rank's mean, and `local` its shard of the batch. A rank without labels counts as 0: its mean is
        NaN.
        """
        share = float((local["shift_labels"] != IGNORED_LABEL).sum()) / max(local[SHARD_KEY].valid_tokens, 1)
        part = loss * (share * self.cp.ranks) if share else torch.zeros_like(loss)
        return self._with_mean_value(part, self.cp.group)

    def mean_over_ring(self, loss: Tensor) -> Tensor:
        """Return a rank's loss with the value of the mean of the ring's losses, but its own gradient; collective."""
        return self._with_mean_value(loss, self.cp.group)

    def eval_batch(self, engine: Any, batch: Mapping[str, Any]) -> Tensor:
        """Return the mean loss of a batch of whole sequences on the ring, without gradient; collective.

        `batch` is a dict of tensors [B, S, ...] with labels, equal on all ranks of the ring. The model runs in
        evaluation mode, and all its modules are set back to their modes afterwards.
        """
        was_training = engine.module.training  # the engine itself is always in training
        modes = [(module, module.training) for module in engine.module.modules()]
        engine.eval()
        try:
            with torch.no_grad():
                if self.gathers:  # which cuts batches, and returns the loss of whole ones, by itself
                    whole_loss: Tensor | None = engine(**batch).loss
                    if whole_loss is None:
                        raise ValueError(
                            "the model returned no loss; give it labels, or compute a loss from its outputs"
                        )
                    return whole_loss
                local, before = self.cut(batch), self.losses_made
                loss: Tensor = engine(**local).loss
                is_whole = self.whole_batches and (self.leaves_losses or self.losses_made != before)
                return loss if is_whole else self.mean_by_labels(loss, local)
        finally:
            engine.train(was_training)
            for module, mode in modes:
                module.training = mode

    def _is_one_mean(self, training: bool) -> bool:
        """Return whether a loss is one mean over all rings, rather than the mean of this ring."""
        return training and self.loss == TOKEN_MEAN

    def sum_over_ring(self, value: float) -> float:
        """Return the sum of a number over the ranks of this ring; collective."""
        return value if self.cp.group is None else self._sum(value, self.cp.group)

    def sum_over_ranks(self, value: float) -> float:
        """Return the sum of a number over all ranks of all rings; collective."""
        return self._sum(value, self.world)

    def _sum(self, value: float, group: Any) -> float:
        total = torch.tensor(value, dtype=torch.float64, device=group_device(group))
        dist.all_reduce(total, group=group)
        return float(total)

    def _with_mean_value(self, local: Tensor, group: Any) -> Tensor:
        """Return `local` with its own gradient, and the value of its mean over `group`."""
        mean = local.detach().double().to(group_device(self.world))
        if group is not None:
            dist.all_reduce(mean, group=group)
            mean /= dist.get_world_size(group)
        return local + (mean.to(local) - local.detach())
