"""One engine with burst attention: its ring, and what its training loop needs of it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from burst_plugin.batch import IGNORED_LABEL, SHARD_KEY, SequenceShard, as_given, check_shard, shard_batch, shifted
from burst_plugin.comm.process_groups import group_device
from burst_plugin.context import ContextParallel
from burst_plugin.deepspeed.config import MEAN_OF_RANKS, TOKEN_MEAN
from burst_plugin.ring.rank_state import RankState

__all__ = ["Session"]

_LOSS_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}  # between a model's loss and that of its logits
_LOW_PRECISION_TOLERANCE = 1e-2  # for logits of other types
_TOKENS_AT_ONCE = 1024


class Session:
    """The ring of one engine, and the hooks by which its model's batches are cut and its losses made whole.

    `loss`: "token_mean", one mean over the tokens of all rings, or "mean_of_ranks", each ring's own mean. Gradients
    are averaged over rings by DeepSpeed, as over data-parallel ranks.
    `whole_batches`: whether the model takes whole batches as keyword arguments, to be cut in its forward.
    `only_caller`: who may call the model in training, if not everybody may; see `permitted`.
    """

    def __init__(self, cp: ContextParallel, world: Any, loss: str) -> None:
        self.cp = cp
        self.world = world
        self.engine: Callable[[], Any] = lambda: None  # a weak reference, once there is one
        self.loss = loss
        self.whole_batches = False
        self.only_caller = ""
        self._permitted = False
        self._cut_now = False  # whether the batch of this forward came whole
        self._calls_before = 0  # of attention, when the model's forward began
        self._losses = 0  # of forwards in training
        self._warned = False
        self._shard_problems: list[str] | None = None  # of the model with batches that were cut, once it gets one
        self._hooks: list[RemovableHandle] = []

    @property
    def ranks(self) -> int:
        """All ranks: context-parallel times data-parallel ones."""
        return dist.get_world_size(self.world)

    @property
    def leaves_losses(self) -> bool:
        """Whether losses stay as models compute them: on a ring of one rank, which has a mean of its own."""
        return self.cp.ranks == 1 and self.loss == MEAN_OF_RANKS

    # ------------------------------------------------------------------------------------------------- batches

    def shard_batch(self, batch: Mapping[str, Any], *, pad_token_id: int = 0) -> dict[str, Any]:
        """See `burst_plugin.batch.shard_batch`."""
        return shard_batch(batch, self.cp, pad_token_id=pad_token_id)

    def _cut(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The shard of a whole batch; a number of tokens that comes with it becomes this rank's share of it."""
        if self.leaves_losses and self.whole_batches:  # whatever labels are of: they are nobody else's business
            rest = {name: x for name, x in batch.items() if name not in ("labels", "shift_labels")}
            return {**batch, SHARD_KEY: as_given(rest, self.cp)[SHARD_KEY]}
        if self.cp.ranks == 1 and self.whole_batches:
            return as_given(batch, self.cp)
        local = self.shard_batch(batch)
        if local.get("num_items_in_batch") is not None:
            local["num_items_in_batch"] = local["num_items_in_batch"] / self.cp.ranks
        return local

    def valid_tokens(self, *shards: SequenceShard) -> float:
        """Labels that take part in the loss in these shards' whole batches, over all data-parallel ranks.

        Collective over all ranks.
        """
        mine = sum(shard.valid_tokens for shard in shards)
        if self.ranks == self.cp.ranks:
            return float(mine)
        return self._sum(float(mine)) / self.cp.ranks

    def gather_logits(self, logits: Tensor, shard: SequenceShard) -> Tensor:
        """Logits [B, S, V] of the whole sequence from local ones [B, S_local, V]; collective, without gradient."""
        with torch.no_grad():
            return shard.unshard(logits)

    # ------------------------------------------------------------------------------------------------- losses

    def token_mean_loss(self, logits: Tensor, shift_labels: Tensor, *, valid_tokens: float | None = None) -> Tensor:
        """Cross entropy, mean over all tokens with a label on all ranks, for `engine.backward`; collective.

        Args:
            logits: [B, S_local, V]; shift_labels: [B, S_local], -100 where there is no label.
            valid_tokens: labels to divide by, of all ranks. None: those of this micro-batch; DeepSpeed then averages
                over gradient accumulation steps. For one mean over all of a step's tokens give their number
                (`valid_tokens(*shards)`), and call `engine.backward(loss, scale_wrt_gas=False)`.

        Returns:
            A scalar with the value of the mean, the same on all ranks. Its gradient is that of this rank's part,
            times the number of ranks, since DeepSpeed averages gradients over them.
        """
        local = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, -2), shift_labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )
        if valid_tokens is None:
            valid_tokens = self._sum(float((shift_labels != IGNORED_LABEL).sum()))
        return self._whole_value(local * (self.ranks / max(valid_tokens, 1.0)), self.world)

    def mean_by_labels(self, loss: Tensor, local: Mapping[str, Any]) -> Tensor:
        """The mean over all labels of a batch from each rank's over those of its shard; of one of all, just that."""
        share = float((local["shift_labels"] != IGNORED_LABEL).sum()) / max(local[SHARD_KEY].valid_tokens, 1)
        return self._whole_value(loss * (share * self.cp.ranks), self.cp.group)

    def eval_batch(self, engine: Any, batch: Mapping[str, Any]) -> Tensor:
        """See `burst_plugin.deepspeed.eval_batch`."""
        was_training = engine.module.training  # the engine itself is always in training
        engine.eval()
        try:
            with torch.no_grad():
                local = self._cut(batch)
                loss: Tensor = engine(**local).loss
                return loss if self.whole_batches else self.mean_by_labels(loss, local)
        finally:
            engine.train(was_training)

    def _sum(self, value: float) -> float:
        """Over all ranks."""
        total = torch.tensor(value, dtype=torch.float64, device=group_device(self.world))
        dist.all_reduce(total, group=self.world)
        return float(total)

    def _whole_value(self, local: Tensor, group: Any) -> Tensor:
        """`local` with the gradient it has, and the value of its mean over `group`."""
        mean = local.detach().double().to(group_device(self.world))
        if group is not None:
            dist.all_reduce(mean, group=group)
            mean /= dist.get_world_size(group)
        return local + (mean.to(local) - local.detach())

    # ------------------------------------------------------------------------------------------------- hooks

    @contextmanager
    def permitted(self) -> Iterator[None]:
        """Around a call of the model by `only_caller`."""
        self._permitted = True
        try:
            yield
        finally:
            self._permitted = False

    def attach(self, model: torch.nn.Module, *, whole_batches: bool) -> None:
        """Watch the forwards of `model`: cut whole batches, and refuse those that bypass the ring."""
        self.whole_batches = whole_batches
        before, after = (torch.compiler.disable(hook) for hook in (self._before, self._after))  # type: ignore[no-untyped-call]
        self._hooks = [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(after, with_kwargs=True),
        ]

    def detach(self) -> None:
        """Leave the model alone again."""
        for hook in self._hooks:
            hook.remove()

    def _before(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.only_caller and not self._permitted and model.training and torch.is_grad_enabled():
            raise ValueError(
                f"{self.only_caller} calls the model itself, but labels are shifted already and every rank has its "
                "shard of them: call super().compute_loss(...), and go on from the loss that it returns"
            )
        self._note_step()
        self._calls_before = self._ring_of(kwargs).calls_made
        self._cut_now = False
        if not self.whole_batches:
            return None
        check_shard(kwargs)
        if SHARD_KEY in kwargs:
            self._check_count(kwargs)
            if self.cp.ranks == 1 and not kwargs[SHARD_KEY].as_given:
                self._check_takes_shards(model)
        else:
            if not (model.training and torch.is_grad_enabled()):
                return None  # whole sequences on this rank alone: evaluation, generation
            kwargs = _by_name(model, args, kwargs)
            if self.cp.ranks > 1 and kwargs.get("labels") is None and kwargs.get("shift_labels") is None:
                raise ValueError(
                    f"{type(model).__name__} got a batch without labels in training: it would be cut, and a loss on "
                    "what this rank has of it be made whole by nobody. Give labels; or cut it with "
                    "burst_plugin.deepspeed.shard_batch, and compute a loss on a rank's tokens, as token_mean_loss"
                )
            kwargs = self._cut(kwargs)
            self._cut_now = self.cp.ranks > 1
        kwargs = dict(kwargs)
        if "shift_labels" in kwargs:
            kwargs.setdefault("labels", kwargs["shift_labels"])  # else models compute no loss
        if self.leaves_losses:
            return (), kwargs
        if kwargs.get("output_router_logits"):
            raise ValueError(
                "output_router_logits adds a loss that is not a sum over tokens; take it out of the batch"
            )
        if kwargs.get("num_items_in_batch") is None and kwargs.get("labels") is not None:
            shard = kwargs[SHARD_KEY]
            one_mean = model.training and self.loss == TOKEN_MEAN
            over = self.valid_tokens(shard) / self.ranks if one_mean else shard.valid_tokens / self.cp.ranks
            kwargs["num_items_in_batch"] = max(over, 1.0 / self.ranks)
        return (), kwargs

    def _note_step(self) -> None:
        """Tell the ring which step of the engine comes now, for ranks to compare."""
        engine = self.engine()
        if engine is not None:
            self.cp.step(engine.global_steps, engine.micro_steps)

    def meet_at_step(self) -> None:
        """Compare with the other ranks of the ring that all are about to take a step of the engine; collective.

        One that left out a backward pass would wait in a collective of DeepSpeed's for ranks that wait on the ring.
        """
        engine = self.engine()
        if engine is not None:
            self.cp.meet(f"engine.step() of step {engine.global_steps}, microbatch {engine.micro_steps}")

    def _check_takes_shards(self, model: torch.nn.Module) -> None:
        """Raise ValueError for a model that runs on this ring only because a ring of one rank has whole batches."""
        if self._shard_problems is None:
            from burst_plugin.huggingface.models import problems

            self._shard_problems = problems(model)
        if self._shard_problems:
            reasons = "; ".join(self._shard_problems)
            raise ValueError(f"got a batch that was cut: {reasons}. On a ring of one rank give it whole batches")

    def _check_count(self, kwargs: Mapping[str, Any]) -> None:
        """Raise ValueError for a number of tokens with a batch that was cut before, unless it is from our Trainer."""
        counted = kwargs.get("num_items_in_batch") is not None and torch.is_grad_enabled()
        if counted and self.cp.ranks > 1 and not self._permitted:
            raise ValueError(
                "num_items_in_batch came with a batch that is cut already, and whether it counts the tokens of all "
                "ranks cannot be told: leave it out, for the mean over this batch, or leave labels out and use "
                "burst_plugin.deepspeed.token_mean_loss(logits, shift_labels, valid_tokens=...)"
            )

    def _ring_of(self, kwargs: Mapping[str, Any]) -> RankState:
        """The ring of the batch: another engine's, if that has cut it."""
        shard = kwargs.get(SHARD_KEY)
        if not isinstance(shard, SequenceShard):
            return self.cp.rank_state
        if shard.cp.ranks != self.cp.ranks:
            raise ValueError(
                f"got shards of a ring of {shard.cp.ranks} ranks in an engine with rings of {self.cp.ranks}, whose "
                "losses are scaled for these; give both engines the same context_parallel_size"
            )
        return shard.cp.rank_state

    def _after(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        sharded = SHARD_KEY in kwargs
        if self.whole_batches and sharded and kwargs.get("labels") is not None and not self.leaves_losses:
            _check_form_of_loss(type(model).__name__, output)
        if self.whole_batches and not sharded and torch.is_grad_enabled() and not self.leaves_losses:
            looked_at = (getattr(output, "loss", None), getattr(output, "logits", None))
            _refuse_backward(*(output if isinstance(output, tuple) else looked_at))
        alone = sharded and getattr(kwargs[SHARD_KEY], "as_given", False)  # and nobody else has any of its tokens
        expected = not alone and (sharded or (model.training and torch.is_grad_enabled()))
        if expected and self._ring_of(kwargs).calls_made == self._calls_before:
            raise ValueError(
                f"burst_attention is enabled, but {type(model).__name__} has computed a forward without it, so that "
                'ranks attended to their own tokens only: use attn_implementation="burst" (transformers), or call '
                "burst_plugin.burst_attention(q, k, v, burst_plugin.deepspeed.context()) in the model's attention"
            )
        if self._cut_now and torch.is_grad_enabled() and isinstance(output, Mapping):
            for name in [name for name in output if name != "loss"]:
                output[name] = _to_look_at(output[name])  # type: ignore[index]
        loss = getattr(output, "loss", None)
        if not sharded or not self.whole_batches or not isinstance(loss, Tensor) or loss.dim() or self.leaves_losses:
            return None
        if model.training:
            self._check_loss(output, kwargs)
        one_mean = model.training and self.loss == TOKEN_MEAN
        output["loss"] = self._whole_value(loss, self.world if one_mean else self.cp.group)
        if not model.training:
            _refuse_backward(output["loss"])
        return output

    def _check_loss(self, output: Any, kwargs: dict[str, Any]) -> None:
        """At forwards 1, 2, 4, ...: whether the model's own loss is the mean over `shift_labels`."""
        self._losses += 1
        if self._losses & (self._losses - 1):
            return
        logits, labels = getattr(output, "logits", None), kwargs.get("shift_labels")
        if labels is None and kwargs[SHARD_KEY].as_given and kwargs.get("labels") is not None:
            labels = shifted(kwargs["labels"])
        if labels is None or logits is None or logits.shape[:2] != labels.shape:
            if not self._warned:
                warnings.warn(
                    "the model returns a loss without logits of all tokens, so that nothing can be compared with it: "
                    "make sure that it honours shift_labels and num_items_in_batch, or leave labels out of the batch "
                    "and use burst_plugin.deepspeed.token_mean_loss(logits, shift_labels)",
                    stacklevel=2,
                )
            self._warned = True
            return
        with torch.no_grad():
            expected = _summed_loss(logits.flatten(0, 1), labels.flatten()) / float(kwargs["num_items_in_batch"])
        got = float(output.loss.detach())
        problem, tolerance = "", _LOSS_TOLERANCE.get(logits.dtype, _LOW_PRECISION_TOLERANCE)
        if abs(got - expected) > tolerance * max(abs(expected), 1.0):
            problem = (
                f"the model's own loss is {got:.6g}, expected {expected:.6g}, the mean over shift_labels: it does "
                "not honour shift_labels and num_items_in_batch, or adds to them; leave labels out of the batch, and "
                "use burst_plugin.deepspeed.token_mean_loss(logits, shift_labels)"
            )
        self.cp.agree({"loss": "checked"}, problem)


def _check_form_of_loss(name: str, output: Any) -> None:
    """Raise ValueError for losses that cannot be told, and made whole, in what a model returns."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    form = ""
    if isinstance(output, tuple):
        form = "a tuple"
    elif loss is not None and getattr(output, "loss", None) is None:
        form = f"a {type(output).__name__}"
    elif isinstance(loss, Tensor) and loss.dim():
        form = f"losses of shape {list(loss.shape)}"
    if form:
        raise ValueError(
            f"{name} returns {form}, in which the loss of this rank's tokens cannot be told and made whole: have it "
            "return a ModelOutput with a scalar loss (in transformers: leave out return_dict=False)"
        )


class _ToLookAt(torch.autograd.Function):
    """The same tensor, of which nobody may ask for a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ValueError(
            "a loss was computed from what a model returned for a batch that was cut in its forward: that is of this "
            "rank's tokens, and only the model's own loss is made whole. Cut the batch before, with "
            "burst_plugin.deepspeed.shard_batch, and compute the loss on a rank's tokens, as token_mean_loss"
        )


def _to_look_at(x: Any) -> Any:
    """Logits and hidden states of this rank's tokens, which their user takes for those of all."""
    if isinstance(x, tuple | list):
        return type(x)(map(_to_look_at, x)) if type(x) in (tuple, list) else x
    return _ToLookAt.apply(x) if isinstance(x, Tensor) and x.requires_grad else x  # type: ignore[no-untyped-call]


def _refuse_backward(*outputs: Any) -> None:
    """For what a model in evaluation returned, which is to be looked at only.

    Of a whole batch every rank has computed all; the loss of a shard is made that of one ring, not of all of them.
    """

    def refuse(grad: Tensor) -> None:
        raise ValueError(
            "backward pass of a model in evaluation, whose batches are not cut and whose losses are not those of all "
            "ranks. Train it in training mode (engine.train()), with dropout set to 0 if that is the point of it"
        )

    for x in outputs:
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(refuse)  # type: ignore[no-untyped-call]


def _summed_loss(logits: Tensor, labels: Tensor) -> float:
    """Cross entropy of logits [T, V], summed; some tokens at a time, since logits of a long sequence fill a GPU."""
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    for start in range(0, len(labels), _TOKENS_AT_ONCE):
        some, their = (x[start : start + _TOKENS_AT_ONCE] for x in (logits, labels))
        total += torch.nn.functional.cross_entropy(some.float(), their, ignore_index=IGNORED_LABEL, reduction="sum")
    return float(total)


def _by_name(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a forward by their names, without those that are None."""
    signature = inspect.signature(model.forward)
    given = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return {name: value for name, value in given.items() if value is not None}
