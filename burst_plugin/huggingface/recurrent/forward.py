"""Forwards of layers that carry a state: which shard a layer has, also in recomputation, and that it was reached.

    model(**local)  ->  begin()         notes the shard; masks of padding, caches and checkpoints of this forward
        mixer       ->  shard_of(...)   among its keyword arguments, or of the forward in progress
        function    ->  placement(...)  which tokens of which documents this rank has
    loss.backward() ->  the checkpoint's function, with the forward in progress as it was

Families hand their keyword arguments to a few of these layers only, so that both ways are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burst_plugin import recurrent
from burst_plugin.batch import SHARD_KEY, SequenceShard
from burst_plugin.huggingface.mask_recipes import (
    Forward,
    as_in_forward,
    cache_of_forward,
    enter_forward,
    forward_in_progress,
    has_documents,
    leave_forward,
    shard_of_forward,
)
from burst_plugin.huggingface.walks import modules_in

if TYPE_CHECKING:
    from burst_plugin.huggingface.recurrent.states import LayerStates

_ON_SHARD = "_burst_plugin_on_shard"  # of a mixer: whether its last forward had a shard
# Attributes with functions that recompute in backward: of transformers' layers, of PyTorch's `checkpoint_wrapper`.
_CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")


def shard_of(kwargs: Mapping[str, Any]) -> SequenceShard | None:
    """Return the shard that a layer or function is called on; None for a whole batch, which it computes as usual.

    It is found among the keyword arguments, or belongs to the model's forward in progress, or to the turn of its
    `RingCache`. On a ring of one rank, None is returned as well, unless documents are packed: these have states of
    their own on one rank, too.
    """
    shard = kwargs.get(SHARD_KEY)
    if not isinstance(shard, SequenceShard):
        shard = shard_of_forward()
    if shard is None:
        cache = cache_of_forward()
        return None if cache is None else cache.shard
    return None if shard.as_given and not has_documents(shard.mask) else shard


def states_of_turn() -> LayerStates | None:
    """Return the states that recurrent layers read and replace in the turn of a `RingCache`; None elsewhere.

    None also in a turn of one token per row that every rank computes by the code of transformers.
    """
    cache = cache_of_forward()
    return None if cache is None or cache.shard is None else cache.states


def placement(shard: SequenceShard, name: str, initial: Sequence[Tensor] = ()) -> recurrent.Placement:
    """Return the placement of this rank's tokens in documents, for one call to a `burst_plugin.recurrent` function.

    name: a name for the call, equal on all ranks. initial: the states [B, ...] that rows go on from; () for zeros.
    """
    shard.cp.rank_state.state_calls += 1
    return recurrent.Placement(shard.cp, mask=shard.mask, tokens=shard.tokens, tag=name, initial=initial)


def entering(what: str, *states: Tensor | None) -> list[Tensor]:
    """Return the states that a call of a recurrent layer on a shard starts from, without None.

    Raises ValueError, naming the layer or function `what`, if there are any outside of a turn of a `RingCache`: only
    the rank with the first tokens could use them.
    """
    if states_of_turn() is None:
        refuse_state(what, *states)
    return [state for state in states if state is not None]


def refuse_state(what: str, *states: object) -> None:
    """Raise ValueError, naming the layer or function `what`, if any of `states` is not None in a call on a shard."""
    if any(state is not None for state in states):
        raise ValueError(
            f"{what} got a state to go on from with a batch that is cut, whose first tokens are on one rank only: "
            "give whole texts, without a cache of tokens before them"
        )


# --------------------------------------------------------------------------------------------------- of a forward


def mask_of_padding(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the mask of padding for recurrent layers, in place of transformers' `create_recurrent_attention_mask`.

    On a shard it is bool [B, S_local], True for tokens that are no padding, or None without padding. Elsewhere the
    result of `original`, the function that this one replaces, for the same arguments.
    """
    shard = shard_of({})
    return original(*args, **kwargs) if shard is None else padding_of(shard)


def padding_of(shard: SequenceShard) -> Tensor | None:
    """Return which of a shard's tokens are no padding, bool [B, S_local]; None if there is no padding."""
    return None if shard.real is None or bool(shard.real.all()) else shard.real


def begin(model: PreTrainedModel, shard: SequenceShard, kwargs: dict[str, Any], takes_mask: bool) -> dict[str, Any]:
    """Return the keyword arguments of a model's forward on a shard, with `use_cache=False`.

    Also prepares checkpoints of the model, by `carry_into_recomputation`. A cache would go on from this rank's last
    tokens, which are not the text's last tokens.

    Args:
        model: a model with layers that carry a state.
        shard: the shard of the forward.
        kwargs: the keyword arguments of the forward.
        takes_mask: whether layers get the model's `attention_mask` as it is; it is the shard's mask of padding then,
            unless there is one.

    Raises:
        ValueError: the model is in evaluation mode, and would compute the shard in pieces
            (`max_inference_chunksize`).
    """
    if not model.training:
        check_pieces(model, shard)
    carry_into_recomputation(model)
    if takes_mask and kwargs.get("attention_mask") is None:
        kwargs = {**kwargs, "attention_mask": padding_of(shard)}
    return {**kwargs, "use_cache": False}


def check_pieces(model: PreTrainedModel, shard: SequenceShard) -> None:
    """Raise ValueError for a model that would evaluate a shard in pieces, by its `max_inference_chunksize`."""
    chunk = getattr(model.config, "max_inference_chunksize", None)
    if chunk is not None and shard.tokens.length > chunk * shard.cp.ranks:
        raise ValueError(
            f"{type(model).__name__} would evaluate each rank's shard in pieces of max_inference_chunksize={chunk} "
            f"tokens; set it to {shard.tokens.length} in its configuration"
        )


def carry_into_recomputation(model: torch.nn.Module) -> None:
    """Have layers that a checkpoint recomputes in the backward pass find the shard that they had in the forward.

    Wraps the checkpoint functions that the modules of `model` hold, of transformers and of PyTorch's
    `checkpoint_wrapper`; repeated calls change nothing.
    """
    for module in modules_in(model):
        for name in _CHECKPOINTS:
            checkpoint = vars(module).get(name)
            if checkpoint is not None and getattr(checkpoint, "func", None) is not _in_same_forward:
                setattr(module, name, partial(_in_same_forward, checkpoint))


def _in_same_forward(
    checkpoint: Callable[..., Any], function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Hand a checkpoint a function that is always computed in the forward that is in progress now."""
    forward = forward_in_progress()
    return checkpoint(function if forward is None else partial(_compute_in, forward, function), *args, **kwargs)


def _compute_in(forward: Forward, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with as_in_forward(forward):
        return function(*args, **kwargs)


# ----------------------------------------------------------------------------------------------------- of a layer


def watch_mixer(mixer: torch.nn.Module) -> None:
    """Add hooks to a layer that let functions inside it find the shard that it is called with, also in recomputation.

    Repeated calls change nothing. The layer raises ValueError if it is recomputed without the shard that it had.
    """
    if _before not in mixer._forward_pre_hooks.values():
        mixer.register_forward_pre_hook(_before, with_kwargs=True)
        mixer.register_forward_hook(_after, always_call=True)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before(mixer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note the shard that a layer is given outside of a forward, since it may not hand the shard on to its functions.

    Raises ValueError for a layer that is computed again without the shard that it had, as if on a whole batch.
    """
    shard = shard_of(kwargs)
    if torch._C._current_graph_task_id() == -1:
        setattr(mixer, _ON_SHARD, shard is not None)
    elif shard is None and getattr(mixer, _ON_SHARD, False):
        raise ValueError(
            f"{type(mixer).__name__} is computed again in the backward pass without its shard: a checkpoint around "
            "it does not pass on its arguments; use PyTorch's checkpoint_wrapper, or the model's "
            "gradient_checkpointing_enable()"
        )
    if shard is not None and shard_of_forward() is None and states_of_turn() is None:
        enter_forward(mixer, shard, None)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after(mixer: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Note the end of a forward whose begin `_before` has noted, also if the layer failed."""
    leave_forward(mixer)
