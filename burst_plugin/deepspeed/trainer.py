"""Trainer and Accelerate on the rings of DeepSpeed's adapter, where they would use DeepSpeed's Ulysses.

With `ParallelismConfig(sp_size=..., sp_backend="deepspeed")` Accelerate asks DeepSpeed's Ulysses for an `mpu` and for
a data loader. If the configuration has the block "burst_attention", it gets an `mpu` and a loader of this package.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups

from burst_plugin.activations.loss_check import router_loss_in
from burst_plugin.batch import SHARD_KEY
from burst_plugin.deepspeed.adapter import Adapter, warn_if_untested
from burst_plugin.deepspeed.config import BLOCK, MEAN_OF_RANKS, TOKEN_MEAN, Block, near_misses, why_off
from burst_plugin.deepspeed.engine_session import Session
from burst_plugin.deepspeed.evaluation_turns import predict_in_turns
from burst_plugin.deepspeed.groups import RequestedSize, Unit
from burst_plugin.deepspeed.loaders import ShardedLoader, exchanged
from burst_plugin.deepspeed.swift_trainers import follow_swift_trainer
from burst_plugin.deepspeed.trl_trainers import (
    count_input_tokens,
    count_once,
    follow_trainer,
    is_of_trl,
)
from burst_plugin.frameworks.wrapping import bind, wrap

_TESTED = ("5.20", "5.24")
_OLDEST = "5.8"  # in which Trainer reduces Ulysses' losses in a function


def install_trainer(adapter: Adapter) -> list[str]:
    """Patch Accelerate and Trainer to run on the rings of `adapter`; return the changes, a line of text for each."""
    import accelerate
    from accelerate.state import PartialState
    from accelerate.utils import DeepSpeedPlugin
    from deepspeed.runtime.sequence_parallel import ulysses_sp
    from transformers import trainer

    warn_if_untested("transformers", _TESTED)
    wrap(PartialState, "__init__", _count_processes)
    wrap(DeepSpeedPlugin, "fill_match", leave_block_alone)
    ulysses = ulysses_sp.UlyssesSPAttentionHF
    if not hasattr(trainer, "deepspeed_sp_compute_loss"):
        wrap(ulysses, "register_with_transformers", _refuse_earlier_trainer)
        return [f"transformers {version('transformers')}: Trainer is not patched; rings need {_OLDEST} or newer"]
    wrap(ulysses, "register_with_transformers", requested_size)
    wrap(ulysses_sp, "UlyssesSPDataLoaderAdapter", partial(_loader, adapter))
    wrap(trainer.Trainer, "__init__", partial(_init_trainer, adapter))
    wrap(trainer.Trainer, "train", partial(_train, adapter))
    wrap(trainer.Trainer, "get_batch_samples", partial(_count_tokens, adapter))
    if hasattr(trainer.Trainer, "_track_num_input_tokens"):  # a function of its own in later releases
        wrap(trainer.Trainer, "_track_num_input_tokens", partial(_count_input_tokens, adapter))
    wrap(trainer.Trainer, "floating_point_ops", partial(_count_flops, adapter))
    wrap(trainer.Trainer, "compute_loss", partial(_note_model_loss, adapter))
    wrap(trainer.Trainer, "prediction_step", partial(_predict, adapter))
    wrap(trainer.Trainer, "evaluation_loop", partial(_evaluate, adapter))
    wrap(trainer, "deepspeed_sp_compute_loss", partial(_compute_loss, adapter))
    for module in (trainer, accelerate, accelerate.data_loader, accelerate.accelerator):
        wrap(module, "skip_first_batches", _skip_first_batches)
    return [
        f'accelerate: sp_size of ParallelismConfig makes rings, if the configuration has "{BLOCK}"',
        "transformers.Trainer: the loss is the mean over all tokens of a step; evaluation runs on the ring",
        "TRL: losses of whole sequences are computed from log-probabilities of all ranks",
    ]


def _of(adapter: Adapter, trainer: Any) -> Session | None:
    """Return the session of a trainer's engine; None if it runs without burst attention."""
    return adapter.sessions.get(trainer.model_wrapped)


# -------------------------------------------------------------------------------------------------------- Accelerate


def requested_size(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace `UlyssesSPAttentionHF.register_with_transformers`: return the `mpu` that Accelerate gives DeepSpeed.

    Raises ValueError for what Ulysses refuses where the block is off, and says why there are no rings.
    """
    if _block_is_enabled():
        return RequestedSize(int(kwargs["sequence_parallel_size"]))
    config = _deepspeed_config()
    if config is None:
        return original(*args, **kwargs)
    off = f"sp_size of ParallelismConfig makes DeepSpeed's Ulysses, not rings, since {why_off(config)}"
    if BLOCK not in config:
        warnings.warn(off, stacklevel=3)
    try:
        return original(*args, **kwargs)
    except ValueError as error:
        raise ValueError(f"{off}. Ulysses refuses: {error}") from error


def _refuse_earlier_trainer(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse the block with a Trainer that cannot be given the loss of a ring."""
    if _block_is_enabled():
        raise ValueError(
            f'"{BLOCK}" with sp_size needs transformers {_OLDEST} or newer, got {version("transformers")}: update it'
        )
    return original(*args, **kwargs)


def _block_is_enabled() -> bool:
    """Return whether Accelerate's DeepSpeed configuration asks for rings."""
    block = Block.of(_deepspeed_config() or {})
    return block is not None and block.enabled


def _deepspeed_config() -> Mapping[str, Any] | None:
    """Return Accelerate's DeepSpeed configuration; None where a script uses DeepSpeed without Accelerate."""
    from accelerate.state import AcceleratorState

    plugin = getattr(AcceleratorState(), "deepspeed_plugin", None) if AcceleratorState._shared_state else None
    return None if plugin is None else plugin.deepspeed_config


def _loader(
    adapter: Adapter, original: Callable[..., Any], dl: Any, sp_rank: Any, sp_group: Any, **kwargs: Any
) -> Any:
    """Replace `UlyssesSPDataLoaderAdapter`, for samplers that count all ranks, as Accelerate's do."""
    if isinstance(sp_group, RequestedSize):  # the engine is made later
        adapter.waiting.append(ShardedLoader(dl, None, exchange=True))
        return adapter.waiting[-1]
    if isinstance(groups.mpu, Unit):  # of the engine made last
        return ShardedLoader(dl, adapter.latest, exchange=True)
    return original(dl, sp_rank, sp_group, **kwargs)


def _count_processes(original: Callable[..., Any], state: Any, *args: Any, **kwargs: Any) -> None:
    """Correct `PartialState`: with DeepSpeed on CPUs it counts one process, so that ranks read the same samples."""
    original(state, *args, **kwargs)
    if state.backend is None and dist.is_initialized() and state.num_processes != dist.get_world_size():
        state.num_processes, state.process_index = dist.get_world_size(), dist.get_rank()


def leave_block_alone(original: Callable[..., Any], plugin: Any, ds_key_long: str, *args: Any, **kwargs: Any) -> None:
    """Replace `DeepSpeedPlugin.fill_match`, which would fill in "auto" in the block, also in one by another name."""
    blocks = (BLOCK, *near_misses(plugin.hf_ds_config.config))
    if not any(ds_key_long.startswith(f"{name}.") for name in blocks):
        original(plugin, ds_key_long, *args, **kwargs)


# ----------------------------------------------------------------------------------------------------------- Trainer


def _init_trainer(adapter: Adapter, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap `Trainer.__init__`, which assumes that no model divides its loss by a count with sequence parallelism.

    On a ring models do, so that Trainer leaves a loss, and additions to it, unchanged, as it does without a ring.
    """
    original(trainer, *args, **kwargs)
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    if parallelism is None or not parallelism.sp_enabled or not _block_is_enabled():
        return
    if not follow_swift_trainer(adapter, trainer, parallelism.sp_size):
        follow_trainer(adapter, trainer, parallelism.sp_size)
    takes_count = getattr(trainer.model, "accepts_loss_kwargs", None)
    if takes_count is None:
        parameters = inspect.signature(trainer.model.forward).parameters.values()
        takes_count = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    trainer.model_accepts_loss_kwargs = takes_count
    _warn_of_other_rows(trainer.args, parallelism.sp_size)


def _warn_of_other_rows(args: Any, size: int) -> None:
    """Warn on rank 0 if several rings of `size` ranks train the rows of an epoch in another order than one rank."""
    rings, steps = dist.get_world_size() // size, args.gradient_accumulation_steps
    if rings > 1 and steps % size and not args.process_index:
        warnings.warn(
            f"gradient_accumulation_steps={steps} is not a multiple of sp_size={size}, and a ring takes the batches "
            f"of its ranks in turn: with {rings} rings a step has other rows than on one rank, and resuming with "
            "another number of rings skips rows that were not trained; use a multiple, if that matters",
            stacklevel=3,
        )


def _train(adapter: Adapter, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap `Trainer.train`, after which a loop of one's own may call the model."""
    try:
        return original(trainer, *args, **kwargs)
    finally:
        session = _of(adapter, trainer)
        if session is not None:
            session.only_caller = ""


def _count_tokens(adapter: Adapter, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap `Trainer.get_batch_samples`: give the batches of one step this rank's share of the labels of the step.

    Returns the batches and the share, which `Trainer.compute_loss` gets as `num_items_in_batch`: a sum over a rank's
    tokens, divided by it, is the mean over the labels of the step once DeepSpeed has taken the mean over ranks.
    """
    batches, items = original(trainer, *args, **kwargs)
    session = _of(adapter, trainer)
    if session is None:
        return batches, items
    check_mean(session, trainer, items)
    if session.cp.ranks > 1:
        _check_options(trainer)
    count_once(session, trainer, batches)
    if not batches or not all(SHARD_KEY in batch for batch in batches):
        return batches, items
    session.batches_of_step = len(batches)
    session.only_caller = f"{type(trainer).__name__}.compute_loss"
    labels = session.valid_tokens(*(batch[SHARD_KEY] for batch in batches))
    share = max(labels, 1.0) / session.ranks  # DeepSpeed takes the mean over ranks
    # Trainer leaves the loss of a model that takes a count, and what is added to that loss, as it is. From other
    # losses it takes the mean over batches, which is undone here for the model's own.
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if scaled is None:
        scaled = trainer.model_accepts_loss_kwargs
    for batch in batches:
        batch["num_items_in_batch"] = share if scaled else share / len(batches)
    return batches, torch.tensor(share, dtype=torch.float64, device=trainer.args.device)


def _count_input_tokens(adapter: Adapter, original: Callable[..., Any], trainer: Any, inputs: Any) -> None:
    """Wrap `Trainer._track_num_input_tokens`."""
    count_input_tokens(_of(adapter, trainer), original, trainer, inputs)


def _count_flops(adapter: Adapter, original: Callable[..., Any], trainer: Any, inputs: Any) -> Any:
    """Wrap `Trainer.floating_point_ops`, which Trainer adds up over ranks: each has its share of a whole batch."""
    session = _of(adapter, trainer)
    if session is None or session.cp.ranks == 1:
        return original(trainer, inputs)
    whole = inputs[SHARD_KEY].whole if SHARD_KEY in inputs else inputs
    return original(trainer, whole if "input_ids" in whole else inputs) // session.cp.ranks


def check_mean(session: Session, trainer: Any, items: Any) -> None:
    """Raise ValueError for a mean that Trainer does not compute: it divides by the tokens of a step itself."""
    rings = session.ranks // session.cp.ranks
    if session.cp.ranks > 1 and session.loss == MEAN_OF_RANKS:
        raise ValueError(
            f'"loss": "{MEAN_OF_RANKS}" of {BLOCK} is not supported with Trainer, whose loss on rings is the mean '
            "over all tokens of a step; leave it out"
        )
    if getattr(getattr(trainer, "args", None), "average_tokens_across_devices", True):
        return
    if session.cp.ranks > 1 and rings > 1:
        raise ValueError(
            f"average_tokens_across_devices=False of TrainingArguments is not supported on {rings} rings of {BLOCK}, "
            "whose loss is one mean over all tokens of a step; leave it out"
        )
    if session.cp.ranks == 1 and session.loss == TOKEN_MEAN and items is not None:
        raise ValueError(
            f'"loss": "{TOKEN_MEAN}" of {BLOCK} needs average_tokens_across_devices=True of TrainingArguments, got '
            f'False, with which every rank has its own mean; set it, or write "loss": "{MEAN_OF_RANKS}"'
        )


def _check_options(trainer: Any) -> None:
    """Raise ValueError for options of a Trainer that would train wrongly on a ring, or hang."""
    _check_loss_is_the_models(trainer)
    if getattr(getattr(trainer, "accelerator", None), "split_batches", False):
        raise ValueError(
            f"split_batches=True of accelerator_config is not supported with {BLOCK}: every rank would get a part of "
            "a batch, and the ring would take the parts in turn, in smaller steps; leave it out"
        )
    if getattr(getattr(trainer, "args", None), "auto_find_batch_size", False):
        raise ValueError(
            f"auto_find_batch_size is not supported with {BLOCK}: a rank that runs out of memory in the middle of a "
            "ring cannot try again while the others wait for it; set per_device_train_batch_size"
        )
    if getattr(trainer, "neftune_noise_alpha", None) is not None:
        raise ValueError(
            f"neftune_noise_alpha={trainer.neftune_noise_alpha} is not supported with {BLOCK}: its noise is scaled "
            "by the length of a rank's shard; leave it out"
        )


def _check_loss_is_the_models(trainer: Any) -> None:
    """Raise ValueError for a loss other than the model's own."""
    for name in ("label_smoother", "compute_loss_func"):
        if getattr(trainer, name, None) is not None:
            raise ValueError(
                f"Trainer's {name} is not supported with {BLOCK}, which uses the model's own loss; leave {name} out"
            )


def _compute_loss(
    adapter: Adapter,
    original: Callable[..., Any],
    accelerator: Any,
    model: torch.nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool,
    pc: Any,
) -> Any:
    """Replace `deepspeed_sp_compute_loss`, which Trainer calls for the loss in training."""
    if model not in adapter.sessions:
        return original(accelerator, model, inputs, return_outputs, pc)
    session = adapter.sessions[model]
    with session.permitted():
        outputs = model(**inputs)
    if outputs.loss is None:
        raise ValueError(
            f"{type(model).__name__} computed no loss: the batch has no labels, only {', '.join(inputs)}"
        )
    if inputs.get("fused_lm_head"):
        outputs.loss = _with_mean_router_loss(session, model, outputs)
    # The gradient of an output itself is divided by the accumulation steps in DeepSpeed 0.19 with ZeRO 0, in spite of
    # scale_wrt_gas=False: its hook on outputs comes before the one by which `engine.backward` tells it not to.
    loss = outputs.loss.clone()
    return (loss, outputs) if return_outputs else loss


def _with_mean_router_loss(session: Session, model: torch.nn.Module, outputs: Any) -> torch.Tensor:
    """Return the loss of a batch of SFTTrainer, which takes the mean of router losses over the batches of a step.

    It does so where it is not told of sequence parallelism. Trainer itself takes their sum, also without a ring.
    """
    loss: torch.Tensor = outputs.loss
    added = router_loss_in(model, outputs)
    if added is None or session.batches_of_step == 1:
        return loss
    return loss + session.of_whole_batch(added * (1 / session.batches_of_step - 1), True)


def _note_model_loss(adapter: Adapter, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap `Trainer.compute_loss`: note that the trainer uses the loss of its model, a mean over the whole batch."""
    session = _of(adapter, trainer)
    if session is None:
        return original(trainer, *args, **kwargs)
    session.took_model_loss = True
    result = original(trainer, *args, **kwargs)
    count = bind(original, trainer, *args, **kwargs).arguments.get("num_items_in_batch")
    if not session.gathers or count is None or not trainer.model_accepts_loss_kwargs:
        return result
    if not trainer.args.average_tokens_across_devices:
        return result
    # Trainer takes the loss of any model for a sum over all ranks' labels, divided by their number, and adds it up
    # over the batches of a step and over ranks; so it does with the mean of a classifier. In training it has left
    # that out here, for sequence parallelism, and in evaluation it has counted the ranks of a ring.
    times = session.ranks // session.cp.ranks if trainer.model.training else 1 / session.ranks
    return (result[0] * times, result[1]) if isinstance(result, tuple) else result * times


def _evaluate(adapter: Adapter, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap `prediction_step` of trainers that have their own, before `Trainer.evaluation_loop`."""
    for owner in type(trainer).__mro__:
        around = _predict if is_of_trl(owner) else _generate if owner.__name__ == "Seq2SeqTrainer" else None
        step = vars(owner).get("prediction_step")
        if around is not None and step is not None and not hasattr(step, "__wrapped__"):
            wrap(owner, "prediction_step", partial(around, adapter))
    return original(trainer, *args, **kwargs)


def _predict(
    adapter: Adapter,
    original: Callable[..., Any],
    trainer: Any,
    model: torch.nn.Module,
    inputs: Mapping[str, Any],
    prediction_loss_only: bool,
    ignore_keys: Any = None,
) -> Any:
    """Replace `prediction_step` of Trainer and SFTTrainer: the ring works on the batches of its ranks in turn."""
    session = _of(adapter, trainer)
    if session is not None and session.takes_turns:  # one step of a trainer has called another
        return original(trainer, model, inputs, prediction_loss_only, ignore_keys)
    if session is not None and session.gathers and session.cp.group is not None:
        _check_loss_is_the_models(trainer)

        def of_whole(batch: Mapping[str, Any]) -> Any:
            return original(trainer, model, batch, prediction_loss_only, ignore_keys)

        return predict_in_turns(session, of_whole, trainer, inputs)
    if session is None or session.cp.group is None or "input_ids" not in inputs:
        return original(trainer, model, inputs, prediction_loss_only, ignore_keys)
    _check_loss_is_the_models(trainer)
    step = partial(_predict_shards, trainer, session, model, prediction_loss_only, ignore_keys)
    loss, logits, labels = predict_in_turns(session, step, trainer, inputs)
    if logits is None and trainer.compute_metrics is not None and not prediction_loss_only:
        raise ValueError(
            "compute_metrics is not supported with a loss that is computed without logits: leave it out, or use "
            "another loss, such as loss_type='nll' of SFTTrainer"
        )
    return loss, logits, None if prediction_loss_only else labels


@torch.no_grad()
def _predict_shards(
    trainer: Any,
    session: Session,
    model: torch.nn.Module,
    prediction_loss_only: bool,
    ignore_keys: Any,
    batch: Mapping[str, Any],
) -> tuple[Any, Any, Any]:
    """Return the loss of a whole batch, its logits, from this rank's shard, and its labels; collective."""
    batch = trainer._prepare_inputs(batch)
    local = session.shard_batch(batch)
    loss: Any = None
    outputs: Any = None
    if "shift_labels" not in local:
        outputs = model(**local)
    else:
        session.took_model_loss = False
        result = trainer.compute_loss(model, local, return_outputs=not prediction_loss_only)
        loss, outputs = (result, None) if prediction_loss_only else result
        has_labels = local[SHARD_KEY].valid_tokens > 0
        if session.took_model_loss and not has_labels:
            loss = torch.full_like(loss, math.nan)  # the mean of no labels, which Trainer leaves out
        elif session.took_model_loss or not has_labels:
            loss = session.mean_over_ring(loss)
        else:  # a loss of the trainer's own, such as SFTTrainer's
            loss = session.mean_by_labels(loss, local)
    local_logits = None if prediction_loss_only else outputs.logits  # None if a loss is computed without them
    if local_logits is None:
        return loss, None, batch.get("labels")
    _check_outputs(trainer, outputs, ignore_keys)
    return loss, session.gather_logits(local_logits, local[SHARD_KEY]), batch.get("labels")


def _check_outputs(trainer: Any, outputs: Mapping[str, Any], ignore_keys: Any) -> None:
    """Raise ValueError for outputs beside logits that Trainer would return with them: they are of a rank's tokens."""
    if any(is_of_trl(owner) and "prediction_step" in vars(owner) for owner in type(trainer).__mro__):
        return  # which returns logits alone
    if ignore_keys is None:
        ignore_keys = getattr(getattr(trainer.model, "config", None), "keys_to_ignore_at_inference", ["cache"])
    others = [name for name in outputs if name not in (*ignore_keys, "loss", "logits")]
    if others:
        raise ValueError(
            f"predictions of Trainer on a ring are logits alone, but the model returns {', '.join(others)} as well, "
            f"and predictions would be a tuple without a ring: pass ignore_keys={[*ignore_keys, *others]} to "
            "predict() or evaluate(), ignore_keys_for_eval to train(), or have the model leave them out"
        )


def _generate(
    adapter: Adapter,
    original: Callable[..., Any],
    trainer: Any,
    model: torch.nn.Module,
    inputs: Mapping[str, Any],
    prediction_loss_only: bool,
    ignore_keys: Any = None,
    **options: Any,
) -> Any:
    """Replace `prediction_step` of Seq2SeqTrainer: the ring generates for the batches of its ranks in turn."""
    session, step = _of(adapter, trainer), partial(original, trainer, model)
    on_ring = session is not None and session.cp.group is not None and "input_ids" in inputs
    if session is None or not on_ring or prediction_loss_only or not trainer.args.predict_with_generate:
        return step(inputs, prediction_loss_only, ignore_keys, **options)
    from burst_plugin.huggingface.generation import ring_for_generation

    loss, labels = None, inputs.get("labels")
    if labels is not None:
        loss = _predict(adapter, original, trainer, model, inputs, True)[0]
    unlabelled = {name: x for name, x in inputs.items() if name != "labels"}
    with ring_for_generation(session.cp):
        outputs = [step(batch, False, ignore_keys, **options)[1] for batch in exchanged(unlabelled, session.cp)]
    return loss, outputs[session.cp.rank], labels


def _skip_first_batches(original: Callable[..., Any], dataloader: Any, num_batches: int = 0) -> Any:
    """Replace `skip_first_batches`, which resumes a run in the middle of an epoch."""
    if isinstance(dataloader, ShardedLoader):
        return dataloader.skip_first(num_batches, original)
    return original(dataloader, num_batches)
