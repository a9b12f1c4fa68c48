"""The arguments of `deepspeed.initialize`: finding the configuration, and refusing what clashes with rings."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from burst_plugin.comm.consistency import fingerprint, raise_if_unlike
from burst_plugin.deepspeed.config import BLOCK, MEAN_OF_RANKS, Block, RepeatedKeyError, conflicts, loads
from burst_plugin.deepspeed.groups import RequestedSize, mpu_problem, sequence_parallel_size
from burst_plugin.deepspeed.whole_outputs import classifier_in
from burst_plugin.ring.agreement import prepared_together
from burst_plugin.strategy import AUTO, MeasuredStrategy, Strategy

_TENSOR_PARALLEL = "deepspeed.runtime.tensor_parallel.init_utils"  # keeps what tp_model_init was asked for


def find_configuration(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the configuration among the arguments of `deepspeed.initialize` as a dict; None if it cannot be read.

    `given` are the arguments by name. The configuration is `config`, or else `config_params`, or else
    `args.deepspeed_config`, in any form that `read_configuration` takes.
    """
    config = given.get("config")
    if config is None:
        config = given.get("config_params")
    if config is None:
        config = getattr(given.get("args"), "deepspeed_config", None)
    return read_configuration(config)


def read_configuration(config: Any) -> dict[str, Any] | None:
    """Return a DeepSpeed configuration as a dict, from a mapping, the path of a file, or base64 text in JSON.

    None for anything else, and for files and texts that cannot be read. Raises RepeatedKeyError for a key that comes
    twice in one block.
    """
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | os.PathLike):
        return None
    try:
        if os.path.exists(config):
            content = loads(Path(config).read_text())
        else:
            content = loads(base64.urlsafe_b64decode(str(config)).decode())
    except RepeatedKeyError:
        raise  # DeepSpeed would not notice, since it gets what was read here
    except (OSError, ValueError):
        return None  # DeepSpeed reports what is wrong with it
    return dict(content) if isinstance(content, Mapping) else None


def requested_beside(mpu: Any, config: Mapping[str, Any]) -> Any:
    """Return `mpu`, or, if it is None, Accelerate's `sp_size` as a `RequestedSize`, for a second engine.

    TRL makes such an engine for a reference model beside Accelerate's engine, without the `mpu` that Accelerate
    passes. Returns None if Accelerate has no `sp_size`, or the block in `config` asks for another context-parallel
    size.
    """
    accelerate = sys.modules.get("accelerate.state")
    if mpu is not None or accelerate is None:
        return mpu
    parallelism = accelerate.AcceleratorState._shared_state.get("parallelism_config")
    if parallelism is None or not parallelism.sp_enabled:
        return None
    block = config.get(BLOCK)
    asked = block.get("context_parallel_size", AUTO) if isinstance(block, Mapping) else AUTO
    if asked not in (AUTO, parallelism.sp_size):
        return None
    return RequestedSize(parallelism.sp_size, is_beside=True)


def agree_on_block(config: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Block, int]:
    """Return the block "burst_attention" and the context-parallel size, 0 if the block is disabled; collective.

    All ranks of the job compare their blocks and sizes.

    Args:
        config: the DeepSpeed configuration, which has the block.
        given: the arguments of `deepspeed.initialize` by name; `model` and `mpu` are looked at among them.

    Raises:
        ValueError: on every rank, if the configuration or the arguments of any rank clash with rings, such as
            Ulysses, tensor parallelism or a PipelineModule do, or if blocks or sizes differ between ranks.
    """

    def prepared() -> tuple[Block, int]:
        block = Block.of(config)
        assert block is not None, "the block is there"
        if not block.enabled:
            return block, 0
        size = _size(block, given)
        problems = (
            conflicts(config, size)
            + _problems(given, size, block.loss_of(size))
            + _batch_problems(config, given, size)
        )
        if problems:
            raise ValueError("; ".join(problems))
        return block, size

    def agree(own_values: tuple[Block, int] | None, problem: str) -> None:
        said: list[Any] = [None] * dist.get_world_size()
        lines = [] if own_values is None else [f"context_parallel_size={own_values[1]}", str(own_values[0])]
        dist.all_gather_object(said, fingerprint(lines, problem))
        raise_if_unlike(said, f'all ranks must have the same "{BLOCK}" in their configuration: ')

    return prepared_together(prepared, agree)[0]


def _size(block: Block, arguments: Mapping[str, Any]) -> int:
    """Return the context-parallel size that the block, Accelerate, or an `mpu` asks for."""
    mpu, others = arguments.get("mpu"), []
    if isinstance(mpu, RequestedSize):
        others = [mpu.size]
    elif mpu is not None and block.context_parallel_size == AUTO:
        others = [sequence_parallel_size(mpu)]
    return block.size(dist.get_world_size(), others)


def _problems(arguments: Mapping[str, Any], size: int, loss: str) -> list[str]:
    """Return the reasons why the model, or other arguments of `initialize`, cannot be used with a ring."""
    model, mpu = arguments["model"], arguments.get("mpu")
    reasons = [] if isinstance(mpu, RequestedSize) else [text for text in (mpu_problem(mpu, size),) if text]
    if arguments.get("mesh_param") is not None:
        reasons.append(f"mesh_param={arguments['mesh_param']!r} does not go together with {BLOCK}: leave it out")
    recorded = getattr(sys.modules.get(_TENSOR_PARALLEL), "_TP_MODEL_INIT_ARGS", None) or {}
    if recorded.get("tp_size", 1) > 1 or getattr(model, "ds_autotp_parsed", False):
        reasons.append(f"tensor parallelism (deepspeed.tp_model_init) has not been tried with {BLOCK}: leave it out")
    if isinstance(model, deepspeed.PipelineModule):
        reasons.append(f"a PipelineModule does not go together with {BLOCK}: use a plain model with ZeRO")
    kinds = {type(module).__name__ for module in model.modules()} if isinstance(model, torch.nn.Module) else set()
    for kind in ("MoE", "MOELayer"):
        if kind in kinds:
            reasons.append(f"DeepSpeed's {kind} layers have not been tried with {BLOCK}: use the model's own experts")
    for kind in ("DistributedAttention", "UlyssesSPAttention", "UlyssesSPViTAttention", "FPDT_Attention"):
        if kind in kinds:
            reasons.append(
                f"the model has {kind} layers (Ulysses), which do not go together with {BLOCK}: take them out"
            )
    if is_transformers(model):
        from burst_plugin.huggingface.models import problems

        apart = classifier_in(model) if size > 1 else None
        reasons += problems(model, is_whole=size == 1, is_own_mean=loss == MEAN_OF_RANKS, apart=apart)
    return reasons


def _batch_problems(config: Mapping[str, Any], arguments: Mapping[str, Any], size: int) -> list[str]:
    """Return a reason against batch sizes that count every rank as a data-parallel one; [] for other sizes."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    numbers: list[Any] = [config.get(name) for name in names]
    if size == 1 or isinstance(arguments.get("mpu"), RequestedSize) or not all(isinstance(n, int) for n in numbers):
        return []
    (batch, micro, steps), world = numbers, dist.get_world_size()
    if batch != micro * steps * world:
        return []
    return [
        f"train_batch_size={batch} counts {world} data-parallel ranks, but {size} of them share each sequence: with "
        f'Trainer or Accelerate set ParallelismConfig(sp_size={size}, sp_backend="deepspeed"), also for a reference '
        f"model; else leave train_batch_size out, or write {batch // size}"
    ]


def strategy_for(block: Block, model: Any) -> Strategy:
    """Return the `Strategy` of a block; one that is planned from a profile gets the attention heads of `model`.

    Their numbers and dim are read from the configuration of a model of transformers; other models leave it as it is.
    """
    strategy = block.strategy
    if not isinstance(strategy, MeasuredStrategy) or not is_transformers(model):
        return strategy
    config = next(m.config for m in model.modules() if hasattr(getattr(m, "config", None), "get_text_config"))
    text = config.get_text_config()
    by_layer = set(getattr(text, "per_layer_attributes", None) or ())  # transformers gives no value for all layers
    is_unlike = bool(by_layer & {"num_attention_heads", "num_key_value_heads", "head_dim"})
    heads = None if is_unlike else getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int):  # of a model with other layers than attention, or with unlike ones
        return strategy
    sizes = {
        "q_heads": heads,
        "kv_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
    }
    return replace(strategy, model=strategy.model.of_sizes(sizes))


def is_transformers(model: Any) -> bool:
    """Return whether a model is, or contains, a `PreTrainedModel` of transformers, without importing transformers."""
    if not isinstance(model, torch.nn.Module):
        return False
    return any(base.__module__ == "transformers.modeling_utils" for m in model.modules() for base in type(m).__mro__)
