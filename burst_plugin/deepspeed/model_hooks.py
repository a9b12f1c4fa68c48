"""The hooks around a model's forward: they cut whole batches, and make a rank's loss the loss of the whole batch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from burst_plugin.activations.deferred_logits import LazyLogits
from burst_plugin.activations.loss_check import router_loss_in, summed_loss, tolerance_of
from burst_plugin.batch import IGNORED_LABEL, SHARD_KEY, SequenceShard, check_shard, shifted
from burst_plugin.deepspeed.engine_session import Session
from burst_plugin.deepspeed.losses import (
    OwnLosses,
    check_form_of_loss,
    for_reading_only,
    refuse_backward,
)
from burst_plugin.deepspeed.whole_outputs import gather_hidden_states, gather_outputs, gathered
from burst_plugin.frameworks.wrapping import by_name
from burst_plugin.ring.rank_state import RankState


class ModelHooks:
    """The hooks on the forward of a session's model: they cut whole batches, and scale the loss for the whole batch.

    They raise ValueError for a forward in training, or of a shard, that does not use the ring.

    around: the module that DeepSpeed calls: `model` itself, or a module of the user's that contains it.
    """

    def __init__(self, session: Session, model: torch.nn.Module, around: torch.nn.Module) -> None:
        self._session = session
        self._cuts_batch = False  # whether the batch of this forward came whole
        self._gathering: SequenceShard | None = None  # of this forward, if its outputs are to be gathered
        self._is_body = False  # whether a layer after the model takes its outputs
        self._calls_before = 0  # of attention, when the model's forward began
        self._checked_losses = 0  # of forwards in training
        self._has_warned = False
        self._shard_problems: list[str] | None = None  # of the model with sharded batches, once it gets one
        before, after = (torch.compiler.disable(hook) for hook in (self._before, self._after))  # type: ignore[no-untyped-call]
        self._handles: list[Any] = [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(after, with_kwargs=True),
        ]
        if not session.gathers and (around is not model or not session.whole_batches):
            self._handles.append(OwnLosses(session, around))

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()

    def gather_scores(self, layer: torch.nn.Module) -> None:
        """Have `layer`, a classifier's head, return the scores of all ranks' tokens, [B, S, L], by a hook.

        `layer` runs after the model, on hidden states of this rank's tokens, and computes [B, S_local, L].
        """

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def after(layer: torch.nn.Module, args: tuple[Any, ...], scores: Tensor) -> Tensor:
            shard, self._gathering = self._gathering, None
            return scores if shard is None else gathered(scores, shard)

        self._is_body = True
        self._handles.append(layer.register_forward_hook(after))

    # ------------------------------------------------------------------------------------------------- before

    def _before(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        session = self._session
        trains = model.training and torch.is_grad_enabled()
        if session.only_caller and not session.is_permitted and trains:
            raise ValueError(
                f"{session.only_caller} calls the model itself, but labels are shifted already and every rank has "
                "its shard of them: call super().compute_loss(...), and use the loss that it returns"
            )
        session.note_step()
        self._calls_before = self._ring_of(kwargs).all_calls
        self._cuts_batch, self._gathering = False, None
        if not session.whole_batches:
            return None
        check_shard(kwargs)
        if SHARD_KEY in kwargs:
            kwargs = by_name(model.forward, args, kwargs)
            if self._is_body and not kwargs[SHARD_KEY].as_given:
                raise ValueError(
                    f"{type(model).__name__} in a classifier got a batch that was cut, and each rank would classify "
                    "its own tokens: pass whole batches, without shard_batch"
                )
            if not kwargs[SHARD_KEY].as_given:
                kwargs.pop("attention_mask", None)  # by which TRL counts tokens; the shard has the mask
            self._check_count(kwargs)
            self._check_tree(kwargs)
            if session.cp.ranks == 1 and not kwargs[SHARD_KEY].as_given:
                self.check_takes_shards(model)
        elif session.gathers and not _has_cache(kwargs):
            kwargs = session.cut(by_name(model.forward, args, kwargs))
            self._gathering = kwargs[SHARD_KEY]
        elif trains:
            kwargs = self._cut(model, args, kwargs)
        else:
            return None  # whole sequences on this rank alone: evaluation, generation
        return (), self._with_arguments_of_loss(model, kwargs)

    def _cut(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's shard of a whole batch."""
        kwargs = by_name(model.forward, args, kwargs)
        if self._session.cp.ranks > 1 and kwargs.get("labels") is None and kwargs.get("shift_labels") is None:
            raise ValueError(
                f"{type(model).__name__} got a batch without labels in training: a loss on this rank's part of it "
                "would not be scaled to the whole batch. Give labels; or cut the batch with "
                "burst_plugin.deepspeed.shard_batch, and compute a loss on a rank's tokens, as token_mean_loss does"
            )
        self._cuts_batch = self._session.cp.ranks > 1
        return self._session.cut(kwargs)

    def _with_arguments_of_loss(self, model: torch.nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments with all that a model's loss needs on a ring."""
        kwargs = dict(kwargs)
        if "shift_labels" in kwargs:
            kwargs.setdefault("labels", kwargs["shift_labels"])  # without labels models compute no loss
        if self._session.leaves_losses or self._session.computes_edges:
            return kwargs
        in_training = model.training and self._gathering is None
        if kwargs.get("num_items_in_batch") is None and kwargs.get("labels") is not None:
            kwargs["num_items_in_batch"] = self._session.divisor(kwargs[SHARD_KEY], in_training)
        return kwargs

    def _check_tree(self, kwargs: Mapping[str, Any]) -> None:
        """Raise ValueError for labels beside a prefix tree: a loss made of them would take the tree for one text."""
        mask = getattr(kwargs[SHARD_KEY], "mask", None)
        if mask is None or not mask.trees or self._session.computes_edges:
            return
        if kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None:
            raise ValueError(
                "got labels with a tree, in which a token has several next ones: leave them out, and compute a loss "
                "of burst_plugin.deepspeed.rollout_log_probs(rollouts), or of edge_log_probs(logits, edges, shard)"
            )

    def check_takes_shards(self, model: torch.nn.Module) -> None:
        """Raise ValueError, with the reasons, if `model`, which has got a shard, can run on whole batches only.

        Such models are allowed on rings of one rank, where each rank has whole batches.
        """
        if self._shard_problems is None:
            from burst_plugin.huggingface.models import problems

            self._shard_problems = problems(model)
        if self._shard_problems:
            reasons = "; ".join(self._shard_problems)
            raise ValueError(f"got a batch that was cut: {reasons}. On a ring of one rank give it whole batches")

    def _check_count(self, kwargs: Mapping[str, Any]) -> None:
        """Raise ValueError for a number of tokens in a batch that is cut already, unless our Trainer put it there."""
        counted = kwargs.get("num_items_in_batch") is not None and torch.is_grad_enabled()
        if counted and self._session.cp.ranks > 1 and not self._session.is_permitted:
            raise ValueError(
                "num_items_in_batch came with a batch that is cut already, and whether it counts the tokens of all "
                "ranks cannot be determined: leave it out, for the mean over this batch, or leave labels out and use "
                "burst_plugin.deepspeed.token_mean_loss(logits, shift_labels, valid_tokens=...)"
            )

    def _ring_of(self, kwargs: Mapping[str, Any]) -> RankState:
        """Return the ring of the batch: another engine's, if that engine has cut it."""
        shard, cp = kwargs.get(SHARD_KEY), self._session.cp
        if not isinstance(shard, SequenceShard):
            return cp.rank_state
        if shard.cp.ranks != cp.ranks:
            raise ValueError(
                f"got shards of a ring of {shard.cp.ranks} ranks in an engine with rings of {cp.ranks}, whose losses "
                "are scaled for these; give both engines the same context_parallel_size"
            )
        return shard.cp.rank_state

    # ------------------------------------------------------------------------------------------------- after

    def _after(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        session = self._session
        is_sharded = SHARD_KEY in kwargs
        if self._gathering is not None:
            self._check_attended(model, kwargs)
            if self._is_body:  # whose last hidden states the layer after it takes
                gather_hidden_states(output, self._gathering)
            else:
                shard, self._gathering = self._gathering, None
                if session.shards is None:
                    gather_outputs(output, shard)
                else:
                    session.shards.append(shard)
            return output
        if session.whole_batches and not session.leaves_losses and not session.computes_edges:
            if is_sharded and kwargs.get("labels") is not None:
                check_form_of_loss(type(model).__name__, output)
            if not is_sharded and torch.is_grad_enabled():
                read = (getattr(output, "loss", None), getattr(output, "logits", None))
                refuse_backward(*(output if isinstance(output, tuple) else read))
        self._check_attended(model, kwargs)
        if not session.whole_batches:
            return None
        if self._cuts_batch and torch.is_grad_enabled() and isinstance(output, Mapping):
            for name in [name for name in output if name != "loss"]:
                output[name] = for_reading_only(output[name])  # type: ignore[index]
        loss = getattr(output, "loss", None)
        if not is_sharded or session.leaves_losses or session.computes_edges:
            return None
        if not isinstance(loss, Tensor) or loss.dim():
            return None
        if model.training:
            self._check_loss(model, output, kwargs)
        output["loss"] = session.of_whole_batch(loss, model.training)
        if not model.training:
            refuse_backward(output["loss"])
        return output

    def _check_attended(self, model: torch.nn.Module, kwargs: Mapping[str, Any]) -> None:
        """Raise ValueError if a forward that had to use the ring has not."""
        is_sharded = SHARD_KEY in kwargs
        if is_sharded and getattr(kwargs[SHARD_KEY], "as_given", False):  # this rank has all of its tokens
            return
        expected = is_sharded or (model.training and torch.is_grad_enabled())
        if expected and self._ring_of(kwargs).all_calls == self._calls_before:
            raise ValueError(
                f"burst_attention is enabled, but {type(model).__name__} has computed a forward without it, so that "
                'ranks attended to their own tokens only: use attn_implementation="burst" (transformers), or call '
                "burst_plugin.burst_attention(q, k, v, burst_plugin.deepspeed.context()) in the model's attention"
            )

    def _check_loss(self, model: torch.nn.Module, output: Any, kwargs: Mapping[str, Any]) -> None:
        """Raise ValueError on every rank if the model's own loss is not the mean over `shift_labels`.

        It looks at forwards 1, 2, 4, 8, ...; collective. Models in TRL return log probabilities of labels for logits.
        """
        self._checked_losses += 1
        if self._checked_losses & (self._checked_losses - 1):
            return
        logits, labels = getattr(output, "logits", None), kwargs.get("shift_labels")
        self.check_labels(labels, kwargs[SHARD_KEY])
        if isinstance(logits, LazyLogits):  # of a loss in chunks, which is this package's own
            self._session.cp.agree({"loss": "checked"})  # as ranks do on which something has read logits before
            return
        if labels is None and kwargs[SHARD_KEY].as_given and kwargs.get("labels") is not None:
            labels = shifted(kwargs["labels"])
        read = logits
        if logits is None:
            read = getattr(output, "log_probs", None)
        if labels is None or read is None or read.shape[:2] != labels.shape:
            self._warn_of_unchecked_loss()
            return
        with torch.no_grad():
            if logits is None:
                expected = -read[labels != IGNORED_LABEL].sum()
            else:
                expected = summed_loss(logits.flatten(0, 1), labels.flatten())
            expected = expected / float(kwargs["num_items_in_batch"])
        of_router = router_loss_in(model, output)
        got = float(output.loss.detach()) - (0.0 if of_router is None else float(of_router.detach()))
        problem = ""
        if abs(got - expected) > tolerance_of(output.loss, read) * max(abs(expected), 1.0):
            problem = (
                f"the model's own loss is {got:.6g}, expected {expected:.6g}, the mean over shift_labels: it does "
                "not honour shift_labels and num_items_in_batch, or adds to them; leave labels out of the batch, and "
                "use burst_plugin.deepspeed.token_mean_loss(logits, shift_labels)"
            )
        self._session.cp.agree({"loss": "checked"}, problem)

    def check_labels(self, labels: Any, shard: SequenceShard) -> None:
        """Raise ValueError on every rank if the ring has not as many labels as when the batch was cut; collective.

        The loss is divided by the number that was counted then.
        """
        if not isinstance(labels, Tensor) or shard.as_given:
            return
        count = self._session.sum_over_ring(float((labels != IGNORED_LABEL).sum()))
        if count != shard.valid_tokens:
            raise ValueError(
                f"shift_labels of all ranks have {count:.0f} labels, but the batch was cut with {shard.valid_tokens}"
                ", by which its loss is divided: change labels before burst_plugin.deepspeed.shard_batch, not after"
            )

    def _warn_of_unchecked_loss(self) -> None:
        """Warn once of a loss that nothing can be compared with."""
        if not self._has_warned:
            warnings.warn(
                "the model returns a loss without logits of all tokens, so it cannot be checked: make sure that it "
                "honours shift_labels and num_items_in_batch, or leave labels out of the batch and use "
                "burst_plugin.deepspeed.token_mean_loss(logits, shift_labels)",
                stacklevel=3,
            )
        self._has_warned = True


def _has_cache(kwargs: Mapping[str, Any]) -> bool:
    """Return whether a forward has a cache, or makes one, as in generation."""
    return bool(kwargs.get("use_cache")) or any(kwargs.get(name) is not None for name in ("cache", "past_key_values"))
