"""TRL's trainers on the rings of DeepSpeed's adapter: which trainers run, how losses are made, how tokens count.

SFTTrainer takes the loss of its model, which is computed from shards. Other trainers compute their loss from values
of whole sequences: their loader leaves batches whole, their model cuts them and returns values of whole sequences
(`whole_outputs`), and all ranks of a ring compute the same loss.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import GenerationConfig

from burst_plugin.batch import SHARD_KEY
from burst_plugin.deepspeed.adapter import Adapter
from burst_plugin.deepspeed.config import BLOCK
from burst_plugin.deepspeed.engine_session import Session
from burst_plugin.deepspeed.loaders import exchanged
from burst_plugin.deepspeed.trl_logits import read_own_logits

_OF_SHARDS = "SFTTrainer"
_OF_WHOLE = ("DPOTrainer", "KTOTrainer", "RewardTrainer", "TPOTrainer", "ORPOTrainer", "CPOTrainer", "GKDTrainer")


def follow_trainer(adapter: Adapter, trainer: Any, size: int) -> None:
    """Set up a trainer, and its model, for rings of `size` ranks by the kind of its loss.

    Models of TRL's trainers with losses of whole sequences are to return outputs of whole sequences. SFTTrainer and
    transformers' Trainer go on from the model's loss, and stay as they are. Warns on rank 0 if TRL's `max_length` is
    left at its default.

    Raises ValueError for other trainers of TRL, whose losses are not known on rings.
    """
    owner = _owner_of_loss(type(trainer))
    if owner:
        _warn_of_cut_texts(trainer.args)
    if owner in ("", _OF_SHARDS):
        adapter.gathering.discard(trainer.model)  # which an earlier trainer may have had
        return
    if owner not in _OF_WHOLE:
        raise ValueError(
            f"{owner} with sp_size={size} is not supported with {BLOCK}: it computes a loss of its own from logits "
            f"of whole sequences, but a rank of a ring has the logits of its shard only; use {_OF_SHARDS}, "
            f"{', '.join(_OF_WHOLE)} or Trainer, or leave sp_size and the block out"
        )
    adapter.gathering.add(trainer.model)
    read_own_logits(adapter, type(trainer))
    for name, around in (
        ("compute_ref_log_probs", partial(_reference_in_turns, adapter)),
        ("generate_on_policy_outputs", partial(_generate_alike, adapter, trainer)),
        ("training_step", partial(_choose_alike, adapter, trainer)),
    ):
        if hasattr(trainer, name) and (name != "training_step" or hasattr(trainer, "generate_on_policy_outputs")):
            setattr(trainer, name, partial(around, getattr(trainer, name)))


def _warn_of_cut_texts(args: Any) -> None:
    """Warn on rank 0 if texts are cut to the `max_length` that TRL has by default, which is short for a ring."""
    by_name = {field.name: field.default for field in dataclasses.fields(args)}
    length = getattr(args, "max_length", None)
    if isinstance(length, int) and length == by_name.get("max_length") and not args.process_index:
        warnings.warn(
            f"{type(args).__name__}(max_length={length}) is TRL's default: each text is cut to {length:,} tokens "
            "before ranks share it; set max_length to the tokens of your longest text, or to None",
            stacklevel=3,
        )


def _owner_of_loss(kind: type) -> str:
    """Return the name of the class of TRL that defines a trainer's loss; "" if transformers' Trainer defines it."""
    owners = (owner for owner in kind.__mro__ if is_of_trl(owner))
    with_own = (owner.__name__ for owner in owners if {"compute_loss", "training_step"} & vars(owner).keys())
    return next(with_own, "")


def is_of_trl(owner: type) -> bool:
    """Return whether a class is defined in the package trl."""
    return owner.__module__.split(".")[0] == "trl"


def _reference_in_turns(adapter: Adapter, original: Callable[..., Any], model: Any, inputs: Mapping[str, Any]) -> Any:
    """Replace `compute_ref_log_probs`: the ring works on the batches of its ranks in turn."""
    session = adapter.sessions.get(model)
    if session is None or session.cp.group is None:
        return original(model, inputs)
    return [original(model, batch) for batch in exchanged(inputs, session.cp)][session.cp.rank]


def _choose_alike(adapter: Adapter, trainer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace `training_step`, which draws whether to generate: the ranks of a ring draw as its first rank does."""
    session = adapter.sessions.get(trainer.model_wrapped)
    if session is None or session.cp.group is None:
        return original(*args, **kwargs)
    own_state = random.getstate()
    random.setstate(_of_first_rank(session, own_state))
    try:
        return original(*args, **kwargs)
    finally:
        if session.cp.rank:
            random.setstate(own_state)


def _generate_alike(adapter: Adapter, trainer: Any, original: Callable[..., Any], *args: Any) -> Any:
    """Replace `generate_on_policy_outputs`: all ranks of a ring get the tokens that its first rank draws."""
    session = adapter.sessions.get(trainer.model_wrapped)
    if session is None or session.cp.group is None:
        return original(*args)
    seed = int(torch.randint(2**31, (), device="cpu"))
    args = tuple(_with_cache(each) for each in args)  # without one the ring would cut what is generated
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        torch.manual_seed(_of_first_rank(session, seed))
        outputs = original(*args)
    return _of_first_rank(session, [x.cpu() for x in outputs], outputs[0].device)


def _with_cache(argument: Any) -> Any:
    """Return a generation's configuration with a cache of keys and values, anything else as it is."""
    if not isinstance(argument, GenerationConfig) or argument.use_cache:
        return argument
    argument = copy.deepcopy(argument)
    argument.use_cache = True
    return argument


def _of_first_rank(session: Session, value: Any, device: torch.device | None = None) -> Any:
    """Broadcast `value` from the ring's first rank; return it, tensors on `device` if given. Collective."""
    values = [value]
    with session.cp.rank_state.alone():
        dist.broadcast_object_list(values, group=session.cp.group, group_src=0)
    return values[0] if device is None else [x.to(device) for x in values[0]]


# ----------------------------------------------------------------------------------------------------------- counting


def count_once(session: Session, trainer: Any, batches: list[Any]) -> None:
    """Have TRL's count of trained tokens count each token once, not on each rank of a ring, and no padding of shards.

    It changes the trainer, or the attention masks of `batches`, the shards of a step.
    """
    if session.cp.ranks == 1 or not hasattr(trainer, "_total_train_tokens"):
        return
    if session.gathers:
        trainer._tp_size = trainer.accelerator.parallelism_config.tp_size * session.cp.ranks
        return
    for batch in batches:
        if SHARD_KEY in batch:
            real = batch[SHARD_KEY].real
            ids = batch["input_ids"]
            batch["attention_mask"] = ids.new_ones(ids.shape) if real is None else real.to(ids.dtype)


def count_input_tokens(session: Session | None, original: Callable[..., Any], trainer: Any, inputs: Any) -> None:
    """Replace `Trainer._track_num_input_tokens`: count the tokens of a batch once, not on each rank of the ring.

    `session` is None for a trainer without burst attention; `original`, the replaced method, then counts alone.
    """
    if session is None or session.cp.ranks == 1 or trainer.args.include_num_input_tokens_seen == "no":
        original(trainer, inputs)
        return
    shard = inputs.get(SHARD_KEY)
    if shard is not None and "input_ids" in shard.whole:
        ids = shard.whole["input_ids"]
        mask = ids.new_ones(ids.shape) if shard.real is None else shard.unshard(shard.real)
        inputs = {"input_ids": ids, "attention_mask": mask}
    before = trainer.state.num_input_tokens_seen
    original(trainer, inputs)
    added = trainer.state.num_input_tokens_seen - before
    trainer.state.num_input_tokens_seen = before + added // session.cp.ranks
