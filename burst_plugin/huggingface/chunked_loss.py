"""The head and the loss of a causal language model in chunks of tokens, for any model that computes them like this:

    hidden = self.model(...)
    logits = self.lm_head(hidden)  # perhaps scaled or capped
    loss = self.loss_function(logits, labels, vocab_size, ...)

For one forward in training a stand-in takes the head's place. It returns an object that notes the steps from
logits to the loss. Then the loss function calls the head itself, once, as a module: so hooks, such as ZeRO-3's,
gather its weight once. In that call the head computes the chunked loss, with the noted steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.utils import ModelOutput

from burst_plugin.activations import Head, linear_cross_entropy
from burst_plugin.activations.deferred_logits import DeferredLogits, LazyLogits
from burst_plugin.activations.recomputed_chunks import linear
from burst_plugin.batch import IGNORED_LABEL, SHARD_KEY, SequenceShard, shifted
from burst_plugin.frameworks.wrapping import hooks_of_others

_STATE = "_burst_plugin_chunked_loss"  # of a model in the middle of a forward
_READ = "_burst_plugin_logits_read"  # of a model whose logits something has read
_GATHERING = ("deepspeed.", "torch.distributed.fsdp.")  # their hooks gather weights, whatever a head returns
_HELD = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")  # what PyTorch saves of a module
_LOSS = "ForCausalLM"
_INSTEAD = "leave loss_chunk out, for whole logits"


def begin_chunked_loss(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> None:
    """Have a forward that is about to begin compute its loss in chunks of tokens.

    It does so if it trains on a shard with labels, and the strategy of the shard's ring has a `loss_chunk`. kwargs:
    the forward's keyword arguments.

    Raises ValueError for labels of a shard without `num_items_in_batch`, whose loss would be the mean over the labels
    of one rank, and for a model that cannot compute its loss in chunks, if the user has set `loss_chunk`.
    """
    shard = kwargs.get(SHARD_KEY)
    if type(getattr(model, _STATE, None)) is ChunkedLoss:  # of a forward that Ctrl-C has interrupted
        restore_head(model)
    if hasattr(model, _STATE):  # the loss of the forward has been chosen
        return
    _check_divisor(model, kwargs)
    if shard is None or not model.training or not torch.is_grad_enabled() or not _takes_chunks(model, shard, kwargs):
        return
    cp = shard.cp
    take_head(model, ChunkedLoss(model, cp.strategy.loss_chunk, needed="loss_chunk" not in cp.chosen, shard=shard))


def chunk_of_logits(model: PreTrainedModel, shard: SequenceShard, kwargs: Mapping[str, Any]) -> int:
    """Return how many tokens of a forward in training have logits at a time; 0 for all tokens.

    kwargs: the keyword arguments of the forward, which is about to begin. Raises ValueError for a model that cannot
    compute its loss in chunks, if the user has set `loss_chunk`.
    """
    state: ChunkedLoss | None = getattr(model, _STATE, None)
    if state is not None:
        return state.chunk
    chunk = shard.cp.strategy.loss_chunk
    # TRL's SFTTrainer computes losses without whole logits; a model without a head computes neither.
    if kwargs.get("fused_lm_head") or model.get_output_embeddings() is None:
        return chunk
    return chunk if _takes_chunks(model, shard, kwargs) else 0


def tokens_of(shard: SequenceShard, batch: Mapping[str, Any]) -> int:
    """Return how many tokens of a sharded batch each rank has, padding included, summed over the batch's rows.

    batch: the keyword arguments of a forward; its `input_ids`, `inputs_embeds` or `position_ids` tell the number of
        rows.
    """
    each = (batch[name] for name in ("input_ids", "inputs_embeds", "position_ids") if batch.get(name) is not None)
    ids: Tensor | None = next(each, None)
    return (1 if ids is None else ids.shape[0]) * -(-shard.tokens.length // shard.cp.ranks)


def is_sharded_by_fsdp(model: torch.nn.Module) -> bool:
    """Return whether FSDP, of either version, has cut parameters of a model, which it gathers unit by unit."""
    return any(isinstance(each, DTensor) or hasattr(each, "_fsdp_flattened") for each in model.parameters())


def _takes_chunks(model: PreTrainedModel, shard: SequenceShard, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a forward in training is to compute its loss in chunks. Raise as `chunk_of_logits` does."""
    chunk, is_chosen = shard.cp.strategy.loss_chunk, "loss_chunk" in shard.cp.chosen
    if not chunk or kwargs.get("labels") is None:
        return False
    if is_chosen and (tokens_of(shard, kwargs) <= chunk or _needs_no_chunks(model, kwargs)):
        return False
    try:
        _head_to_replace(model, chunk)
    except ValueError:
        if not is_chosen:
            raise
        return False
    return True


def _needs_no_chunks(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a loss of whole logits is trained instead, or a model computes none, as in TRL's SFTTrainer."""
    return bool(kwargs.get("fused_lm_head")) or hasattr(model, _READ) or not _can_be_read(model)


def _can_be_read(model: PreTrainedModel) -> bool:
    """Return whether the head can be called after the model's forward: FSDP lets go of weights outside its units."""
    return not is_sharded_by_fsdp(model) or _is_unit(model.get_output_embeddings())


def _is_unit(module: Any) -> bool:
    """Return whether FSDP gathers the weights of a module by itself, whenever it is called."""
    return isinstance(module, FSDPModule | FullyShardedDataParallel)


def _check_divisor(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for labels of a shard without the number of all ranks' labels, or with a rounded one.

    Ranks have unequal numbers of labels, some have none: the mean of the ranks' means is not the batch's mean. FSDP
    casts tensors among a model's arguments, so that a count loses its digits.
    """
    shard, count = kwargs.get(SHARD_KEY), kwargs.get("num_items_in_batch")
    if shard is None or shard.as_given or kwargs.get("labels") is None:
        return
    if isinstance(count, Tensor) and count.is_floating_point() and count.dtype.itemsize < 4:
        raise ValueError(
            f"{type(model).__name__} got num_items_in_batch in {count.dtype}, which cannot count tokens; "
            "FSDP and DeepSpeed's auto_cast cast tensors among arguments: pass a Python number, float(count)"
        )
    if count is None:
        refuse_own_mean(type(model).__name__, shard)


def refuse_own_mean(name: str, shard: SequenceShard) -> None:
    """Raise ValueError for labels of a shard that ranks share, whose number in all ranks a model was not given.

    name: the model's class.
    """
    if shard.cp.ranks > 1 and not shard.as_given:
        raise ValueError(
            f"{name} got labels with a shard, and no num_items_in_batch, so that its loss would be "
            "the mean over this rank's own labels alone; pass num_items_in_batch=tokens, where tokens is "
            f'batch["{SHARD_KEY}"].valid_tokens (with several rings, their sum), or tokens / dist.get_world_size() '
            "if gradients are averaged over ranks, as by DDP and FSDP; or leave labels out, and compute a loss from "
            "logits"
        )


def take_head(model: PreTrainedModel, loss: ChunkedLoss) -> None:
    """Note on a model that its next forward computes `loss`, which has replaced its head, until `restore_head`."""
    setattr(model, _STATE, loss)


def end_chunked_loss(model: PreTrainedModel, output: Any) -> Any:
    """Return the output of a forward, with logits that are computed only when they are read if its loss was chunked.

    The output is returned unchanged if the loss was not to be computed in chunks. Raises ValueError if it was, by the
    user's `loss_chunk`, and the model computed it in another way.
    """
    state: ChunkedLoss | None = getattr(model, _STATE, None)
    if state is None:
        return output
    name, loss = type(model).__name__, output.get("loss") if isinstance(output, ModelOutput) else None
    if state.needed and (loss is None or loss is not state.loss):
        what = "computes no loss" if loss is None else "adds to its loss, or computes it in another way"
        raise ValueError(
            f"loss_chunk={state.chunk} is not supported with {name}: it {what}. The loss has to be what "
            f"`loss_function` returns for the logits, in a ModelOutput; {_INSTEAD}"
        )
    if isinstance(output, tuple):
        return tuple(map(state.readable, output))
    if isinstance(output, ModelOutput):
        return type(output)(**{key: state.readable(x) for key, x in output.items()})
    return output


def restore_head(model: PreTrainedModel) -> None:
    """Give a model its head and loss function back after a forward with a chunked loss, also after a failed one."""
    state: ChunkedLoss | None = model.__dict__.pop(_STATE, None)
    if state is not None:
        state.restore()


class ChunkedLoss:
    """A loss function for one forward of a causal language model, which computes head and loss in chunks of tokens.

    When it is made, it puts a stand-in in place of the model's head, and itself in place of the model's loss
    function; `restore` undoes both.

    Args:
        model: the model.
        chunk: logits of so many tokens exist at a time.
        needed: whether it is an error if the model computes its loss in another way; if not, it may get whole logits.
        shard: the shard of the forward, on whose ring ranks meet when whole logits are read later; None for none.

    Attributes:
        head: the module that `get_output_embeddings()` returns.
        loss: the loss that the last call returned; None before.

    Raises:
        ValueError: the model has no head, a loss of its own, or a head with hooks that would see a loss for logits.
    """

    def __init__(
        self, model: PreTrainedModel, chunk: int, needed: bool = True, shard: SequenceShard | None = None
    ) -> None:
        self.chunk, self.needed, self._shard = chunk, needed, shard
        self.loss: Tensor | None = None
        self._vocabulary = 0  # once the head has computed logits
        self._model = model
        restore_head(model)  # after a forward that Ctrl-C has interrupted
        self.head, owners = _head_to_replace(model, chunk)
        self._owners, self._own_loss = owners, model.__dict__.get("_loss_function")
        stand_in = _StandIn(f"loss_chunk={chunk} is not supported with {type(model).__name__}: it", self)
        for owner, name in owners:
            owner._modules[name] = stand_in
        model._loss_function = self

    def readable(self, logits: Any) -> Any:
        """Return logits of this forward as a tensor that is computed when it is read; return other values unchanged.

        logits: a value of the model's output, which is a `DeferredLogits` if it stands for logits.
        """
        if not isinstance(logits, DeferredLogits):
            return logits
        if logits.made is not None or not self._vocabulary:
            return logits.after(self.head)(logits.hidden) if logits.made is None else logits.made
        whole = partial(self._whole, logits.after(self.head), logits.hidden)
        shape = torch.Size([*logits.hidden.shape[:-1], self._vocabulary])
        return LazyLogits.of(shape, self._dtype, logits.device, whole)

    def _whole(self, to_logits: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Return whole logits, and note that something reads them; collective if ranks share the head's weight."""
        if not self.needed and not hasattr(self._model, _READ):
            setattr(self._model, _READ, True)  # from the next forward on they are whole at once
            print(
                'burst_plugin: memory "auto": something reads outputs.logits, so that they are computed whole from '
                "the next step on",
                flush=True,
            )
        if self._shard is not None and self._is_shared():
            self._shard.cp.meet("reading outputs.logits")
        return to_logits(hidden)

    def _is_shared(self) -> bool:
        """Return whether ranks have a share of the head's weight each, which they gather together."""
        return any(hasattr(each, "ds_id") for each in self.head.parameters()) or _is_unit(self.head)

    def restore(self) -> None:
        """Put the head and the model's own loss function back."""
        for owner, name in self._owners:
            owner._modules[name] = self.head
        del self._model._loss_function
        if self._own_loss is not None:
            self._model._loss_function = self._own_loss

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self,
        logits: DeferredLogits | Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = IGNORED_LABEL,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the loss that transformers' `ForCausalLMLoss` would return."""
        if isinstance(logits, DeferredLogits) and logits.made is not None:
            logits = logits.made
        if isinstance(logits, Tensor):
            if not self.needed:  # the model needs whole logits itself, and makes them next time as well
                setattr(self._model, _READ, True)
            loss: Tensor = LOSS_MAPPING[_LOSS](
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
            )
            return loss
        targets = shifted(labels) if shift_labels is None else shift_labels
        count = (targets != ignore_index).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        self.loss = self._with_head(logits, targets.to(logits.device), ignore_index, count)
        return self.loss

    def _with_head(
        self, logits: DeferredLogits, labels: Tensor, ignore_index: int, count: Tensor | float = 1
    ) -> Tensor:
        """Call the head, which computes the loss of all tokens in place of their logits."""
        head: Any = self.head
        own_forward = head.__dict__.get("forward")
        project = head.forward
        if own_forward is None and type(head).forward is torch.nn.Linear.forward:
            project = lambda rows: linear(rows, head.weight, head.bias)  # noqa: E731

        to_logits = logits.after(project)

        def noted(rows: Tensor) -> Tensor:
            found = to_logits(rows)
            self._vocabulary, self._dtype = found.shape[-1], found.dtype
            return found

        def forward(hidden: Tensor) -> Tensor:
            chunked = Head(noted, chunk=self.chunk, parameters=head.parameters())
            return self.loss_of(hidden, chunked, labels, ignore_index, count)

        head.forward = forward
        try:
            loss: Tensor = head(logits.hidden)
            return loss
        finally:
            del head.forward
            if own_forward is not None:
                head.forward = own_forward

    def loss_of(self, hidden: Tensor, head: Head, labels: Tensor, ignore_index: int, count: Tensor | float) -> Tensor:
        """Return the sum of the cross-entropies of all labels, divided by `count`, a scalar tensor.

        hidden: [B, S_local, H]. head: computes logits from rows of `hidden`, chunk by chunk. count: the number of
            labels in the whole batch, by which losses of all ranks are divided.
        labels: [B, S_local], int64, of the next tokens (shifted already); `ignore_index` for those that do not count.
        """
        return linear_cross_entropy(hidden, head, labels, reduction="sum", divisor=count, ignore_index=ignore_index)


def _head_to_replace(model: PreTrainedModel, chunk: int) -> tuple[Any, list[tuple[torch.nn.Module, str]]]:
    """Return a model's head, and the modules that have it as a child, with its name there.

    Raises ValueError for a model that has no head, a loss of its own, or a head with hooks that want logits.
    """
    refusal = f"loss_chunk={chunk} is not supported with {type(model).__name__}"
    if inspect.unwrap(model.loss_function) is not inspect.unwrap(LOSS_MAPPING[_LOSS]):
        asked = getattr(model.loss_function, "__name__", model.loss_function)
        raise ValueError(f"{refusal}: its loss has been set to {asked}; leave one of the two out")
    head = model.get_output_embeddings()
    owners = [] if head is None else [*_owners(model, head)]
    if not owners:
        raise ValueError(f"{refusal}, which has no head that get_output_embeddings() returns; {_INSTEAD}")
    hooks = hooks_of_others(head, _GATHERING)
    if hooks:
        raise ValueError(
            f"{refusal}: its head has hooks, which would get losses in place of logits ({', '.join(hooks)}); remove "
            f"them, or {_INSTEAD}"
        )
    return head, owners


def _owners(model: torch.nn.Module, head: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """Return the modules that have `head` as a child, and its name there."""
    found = [(model, name) for name, child in model.named_children() if child is head]
    if found:
        return found
    return [(owner, name) for owner in model.modules() for name, child in owner._modules.items() if child is head]


class _StandIn(torch.nn.Module):
    """Takes a head's place: it hands hidden states on. A model that reads the head's weight itself is refused.

    It shares the head's parameters, buffers and parts, which a checkpoint of the model needs even if Ctrl-C, for
    which PyTorch runs no hooks, has left the stand-in there.
    """

    def __init__(self, refusal: str, loss: ChunkedLoss) -> None:
        super().__init__()
        self.refusal, self._loss = refusal, loss
        for name in _HELD:
            setattr(self, name, getattr(loss.head, name))

    def forward(self, hidden: Tensor) -> DeferredLogits:
        head = self._loss.head
        width = getattr(head, "out_features", None)
        return DeferredLogits(hidden, self.refusal, head=None if self._loss.needed else head, width=width)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the head itself."""
        loss = self.__dict__["_loss"]
        if loss.needed and name == "weight":
            raise ValueError(
                f"{self.refusal} reads the weight of its head itself, as the fused losses of Liger and TRL do; leave "
                "one of the two out"
            )
        return getattr(loss.head, name)
