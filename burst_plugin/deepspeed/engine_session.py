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
    """The hooks of a model, as a session needs them; see `model_hooks.ModelHooks`."""

    def remove(self) -> None:
        """Remove the hooks."""

    def check_takes_shards(self, model: torch.nn.Module) -> None:
        """Raise ValueError for a model that runs only on whole batches, as a ring of one rank has them."""


class Session:
    """The ring of one engine, which cuts batches for the engine's model and makes its losses right for whole batches.

    loss: "token_mean", one mean over the tokens of all rings, or "mean_of_ranks", each ring's own mean. DeepSpeed
        averages gradients over rings as over data-parallel ranks.
    engine: a weak reference to the engine, once it exists.
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
        """Return whether losses stay as models compute them: on a ring of one rank, for a mean of ranks' losses."""
        return self.cp.ranks == 1 and self.loss == MEAN_OF_RANKS

    @contextmanager
    def permitted(self) -> Iterator[None]:
        """Let `only_caller`, the one function that may call the model in training, call it in this context."""
        self.is_permitted = True
        try:
            yield
        finally:
            self.is_permitted = False

    @contextmanager
    def leaving_outputs(self) -> Iterator[list[SequenceShard]]:
        """Let the model return outputs of this rank's tokens in this context; yield a list that gets their shards."""
        self.shards = []
        try:
            yield self.shards
        finally:
            self.shards = None

    @contextmanager
    def computing_edges(self) -> Iterator[None]:
        """Let the model return log-probabilities of edges in this context, in place of a loss."""
        self.computes_edges = True
        try:
            yield
        finally:
            self.computes_edges = False

    def detach(self) -> None:
        """Remove the hooks of the model."""
        if self.hooks is not None:
            self.hooks.remove()

    # ------------------------------------------------------------------------------------------------- steps

    def note_step(self) -> None:
        """Tell the ring which step of the engine comes now, for ranks to compare."""
        engine = self.engine()
        if engine is not None:
            self.cp.step(engine.global_steps, engine.micro_steps)

    def meet_at_step(self) -> None:
        """Check that all ranks of the ring are about to take the same step of the engine; collective.

        A rank that left out a backward pass would otherwise wait in a collective of DeepSpeed, while the others wait
        on the ring.
        """
        engine = self.engine()
        if engine is not None:
            self.cp.meet(f"engine.step() of step {engine.global_steps}, microbatch {engine.micro_steps}")

    # ------------------------------------------------------------------------------------------------- batches

    def replicas(self) -> dist.ProcessGroup | None:
        """Return the ranks of all rings, which share gradients; None before there is an engine."""
        engine = self.engine()
        group: dist.ProcessGroup | None = None if engine is None else engine.seq_data_parallel_group
        return group

    def shard_batch(self, batch: Mapping[str, Any], *, pad_token_id: int = 0) -> dict[str, Any]:
        """Return this rank's shard of a batch of whole sequences; see `burst_plugin.batch.shard_batch`."""
        return shard_batch(batch, self.cp, pad_token_id=pad_token_id, layer_mask=self.layer_mask)

    def cut(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's shard of a whole batch for the model; on a ring of one rank it may be the whole batch.

        The batch's `num_items_in_batch`, if it has one, is divided by the number of ranks of the ring.
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
        """Return the number of labels that count in the loss, in these shards' whole batches; collective.

        Labels of all data-parallel ranks count.
        """
        mine = sum(shard.valid_tokens for shard in shards)
        if self.ranks == self.cp.ranks:
            return float(mine)
        return self.sum_over_ranks(float(mine)) / self.cp.ranks

    def gather_logits(self, logits: Tensor, shard: SequenceShard) -> Tensor:
        """Gather logits [B, S_local, V] to [B, S, V] of the whole sequence, without gradient; collective."""
        with torch.no_grad():
            return shard.unshard(logits)

    # ------------------------------------------------------------------------------------------------- losses

    def token_mean_loss(self, logits: Tensor, shift_labels: Tensor, *, valid_tokens: float | None = None) -> Tensor:
        """Return the cross entropy, mean over all labels of all ranks, for `engine.backward`; collective.

        Args:
            logits: [B, S_local, V]; shift_labels: [B, S_local], -100 where there is no label.
            valid_tokens: the number of labels of all ranks to divide by. None: the labels of this micro-batch;
                DeepSpeed then averages over gradient accumulation steps. For one mean over all tokens of a step give
                their number (`valid_tokens(*shards)`), and call `engine.backward(loss, scale_wrt_gas=False)`.

        Returns:
            A scalar with the value of the mean, the same on all ranks. Its gradient is the gradient of this rank's
            part, times the number of ranks, since DeepSpeed averages gradients over them.
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
        """Return the number that the model is to divide the sum of its losses on `shard` by."""
        one_mean = self._is_one_mean(training)
        labels_per_rank = self.valid_tokens(shard) / self.ranks if one_mean else shard.valid_tokens / self.cp.ranks
        return max(labels_per_rank, 1.0 / self.ranks)

    def of_whole_batch(self, loss: Tensor, training: bool) -> Tensor:
        """Return a model's loss with the value for the whole batch, but its own gradient; collective."""
        self.losses_made += 1
        whole = self._with_mean_value(loss, self.world if self._is_one_mean(training) else self.cp.group)
        if training and whole.requires_grad and self.cp.group is not None:
            self._trained_losses += 1
            if self._trained_losses & (self._trained_losses - 1) == 0:
                whole.register_hook(self._check_weight)  # type: ignore[no-untyped-call]
        return whole

    def _check_weight(self, grad: Tensor) -> None:
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
        """Return the mean over all labels of a batch, from `loss`, the mean over this rank's labels; collective.

        `local` is this rank's shard of the batch. A rank without labels counts as 0: the mean over none is NaN.
        """
        share = float((local["shift_labels"] != IGNORED_LABEL).sum()) / max(local[SHARD_KEY].valid_tokens, 1)
        part = loss * (share * self.cp.ranks) if share else torch.zeros_like(loss)
        return self._with_mean_value(part, self.cp.group)

    def mean_over_ring(self, loss: Tensor) -> Tensor:
        """Return the mean over the ring of the losses of one whole batch on its ranks; collective."""
        return self._with_mean_value(loss, self.cp.group)

    def eval_batch(self, engine: Any, batch: Mapping[str, Any]) -> Tensor:
        """Return the mean loss of a batch of whole sequences; see `burst_plugin.deepspeed.eval_batch`."""
        was_training = engine.module.training  # the engine itself is always in training
        engine.eval()
        try:
            with torch.no_grad():
                if self.gathers:  # which cuts batches, and returns the loss of whole ones, by itself
                    whole: Tensor | None = engine(**batch).loss
                    if whole is None:
                        raise ValueError(
                            "the model returned no loss; give it labels, or compute a loss from its outputs"
                        )
                    return whole
                local, before = self.cut(batch), self.losses_made
                loss: Tensor = engine(**local).loss
                is_whole = self.whole_batches and (self.leaves_losses or self.losses_made != before)
                return loss if is_whole else self.mean_by_labels(loss, local)
        finally:
            engine.train(was_training)

    def _is_one_mean(self, training: bool) -> bool:
        """Return whether a loss is one mean over all rings, rather than the mean of this ring."""
        return training and self.loss == TOKEN_MEAN

    def sum_over_ring(self, value: float) -> float:
        """Return the sum over the ranks of this ring; collective."""
        return value if self.cp.group is None else self._sum(value, self.cp.group)

    def sum_over_ranks(self, value: float) -> float:
        """Return the sum over all ranks; collective."""
        return self._sum(value, self.world)

    def _sum(self, value: float, group: Any) -> float:
        total = torch.tensor(value, dtype=torch.float64, device=group_device(group))
        dist.all_reduce(total, group=group)
        return float(total)

    def _with_mean_value(self, local: Tensor, group: Any) -> Tensor:
        """Return `local` with the gradient it has, and the value of its mean over `group`."""
        mean = local.detach().double().to(group_device(self.world))
        if group is not None:
            dist.all_reduce(mean, group=group)
            mean /= dist.get_world_size(group)
        return local + (mean.to(local) - local.detach())
