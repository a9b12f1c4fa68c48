"""What `install()` changes in DeepSpeed: `initialize`, `zero.Init`, which makes a configuration of its own, and an
engine's `destroy`; of transformers' Trainer see `burst_plugin.deepspeed.trainer`."""

from __future__ import annotations

import base64
import copy
import importlib.util
import inspect
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partition_parameters
from deepspeed.utils import groups

from burst_plugin.comm.consistency import fingerprint, prepared_together, raise_if_unlike
from burst_plugin.context import ContextParallel
from burst_plugin.deepspeed.config import (
    BLOCK,
    MEAN_OF_RANKS,
    Block,
    RepeatedKeyError,
    conflicts,
    loads,
    warn_of_near_misses,
)
from burst_plugin.deepspeed.engine_session import Session
from burst_plugin.deepspeed.groups import (
    Unit,
    make_groups,
    mpu_problem,
    sequence_parallel_size,
)
from burst_plugin.deepspeed.loaders import ShardedLoader
from burst_plugin.frameworks.wrapping import announce, wrap
from burst_plugin.strategy import AUTO

__all__ = ["Adapter", "RequestedSize", "install_adapter", "installed"]

_MARK = "_burst_plugin_adapter"
_TESTED = ("0.18", "0.19")
_STEPS = "gradient_accumulation_steps"
_BATCH_KEYS = ("train_batch_size", _STEPS, "sequence_parallel_size")
_TENSOR_PARALLEL = "deepspeed.runtime.tensor_parallel.init_utils"  # keeps what tp_model_init was asked for


class Adapter:
    """An installed adapter: the session of every engine, and a report of what it did."""

    def __init__(self) -> None:
        self.sessions: weakref.WeakKeyDictionary[Any, Session] = weakref.WeakKeyDictionary()
        self.watched: weakref.WeakKeyDictionary[torch.nn.Module, Session] = weakref.WeakKeyDictionary()
        self.latest: Session | None = None
        self.waiting: list[ShardedLoader] = []  # made for the engine to come
        self.report: list[str] = []

    def session(self, engine: Any = None) -> Session:
        """That of an engine, or of the only one. Raises ValueError if there is none, or more than one."""
        if engine is not None:
            session = self.sessions.get(engine)
            if session is None:
                raise ValueError(
                    f'this {type(engine).__name__} runs without burst attention: add "{BLOCK}": {{"enabled": true}} '
                    "to its configuration, and call burst_plugin.deepspeed.install() before deepspeed.initialize"
                )
            return session
        if len(self.sessions) != 1:
            raise ValueError(
                f"got no engine, and {len(self.sessions)} engines run with burst attention; expected one: call "
                f'deepspeed.initialize with "{BLOCK}": {{"enabled": true}}, or pass engine='
            )
        return next(iter(self.sessions.values()))

    def attach(self, session: Session, model: torch.nn.Module) -> None:
        """Let a session cut the batches of `model`, which is that of an engine to be made."""
        is_transformers = _is_transformers(model)
        called = model
        if is_transformers:
            from burst_plugin.huggingface.models import module_taking_batches, use_burst

            called = module_taking_batches(model)
        session.attach(called, whole_batches=is_transformers)
        if is_transformers:  # whose own hooks come after those that cut its batches
            use_burst(model)
        self.watched[model] = session

    def release(self, model: Any) -> None:
        """Leave `model`, and what is in it, alone, if an earlier engine ran it."""
        for module in model.modules() if isinstance(model, torch.nn.Module) else ():
            session = self.watched.pop(module, None)
            if session is not None:
                session.detach()

    def __str__(self) -> str:
        return "burst_plugin in DeepSpeed:\n" + "\n".join(f"  - {line}" for line in self.report)


class RequestedSize:
    """An `mpu` that only asks for a context-parallel size; for Accelerate, which makes one before DeepSpeed runs."""

    def __init__(self, size: int) -> None:
        self.size = size

    def get_sequence_parallel_group(self) -> RequestedSize:
        return self

    def get_sequence_parallel_world_size(self) -> int:
        return self.size

    def get_sequence_parallel_rank(self) -> int:
        return dist.get_rank() % self.size


def installed() -> Adapter | None:
    """The adapter, if `install()` has run."""
    return getattr(deepspeed.initialize, _MARK, None)


def install_adapter() -> Adapter:
    """See `burst_plugin.deepspeed.install`."""
    earlier = installed()
    if earlier is not None:
        return earlier
    adapter = Adapter()
    setattr(wrap(deepspeed, "initialize", partial(_initialize, adapter)), _MARK, adapter)
    wrap(deepspeed.DeepSpeedEngine, "destroy", partial(_forget, adapter))
    wrap(deepspeed.DeepSpeedEngine, "step", partial(_step, adapter))
    adapter.report.append(f'deepspeed.initialize reads the block "{BLOCK}"')
    wrap(partition_parameters.Init, "__init__", partial(_zero_init, adapter))
    adapter.report.append("deepspeed.zero.Init leaves batch sizes to deepspeed.initialize")
    if importlib.util.find_spec("transformers") is not None:
        from burst_plugin import huggingface

        adapter.report.append(huggingface.register())
    warn_if_untested("deepspeed", _TESTED)
    return adapter


def warn_if_untested(package: str, tested: tuple[str, str]) -> None:
    """Warn of a version that the plugin has not been tested with. tested: the oldest and the newest minor version."""
    actual = version(package)
    if not _minor(tested[0]) <= _minor(actual) <= _minor(tested[1]):
        warnings.warn(
            f"{package} {actual} is outside the tested range, {tested[0]} to {tested[1]}: compare gradients with one "
            "rank before you trust it",
            stacklevel=3,
        )


def _minor(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def _initialize(adapter: Adapter, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`deepspeed.initialize`."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    config = _configuration(given)
    if config is None or BLOCK not in config:
        warn_of_near_misses(config or {})
        return _without_rings(adapter, original, *args, **kwargs)
    deepspeed.init_distributed(
        dist_backend=get_accelerator().communication_backend_name(),
        distributed_port=given.get("distributed_port", deepspeed.constants.TORCH_DISTRIBUTED_DEFAULT_PORT),
        dist_init_required=given.get("dist_init_required"),
    )
    _use_own_device(given.get("args"))
    block, size = _agreed(config, given)
    if not block.enabled:
        return _without_rings(adapter, original, *args, **kwargs)
    mpu = given.get("mpu")
    if isinstance(mpu, RequestedSize):
        mpu, config = None, _without_batch_of_one_ring(config)
    made = make_groups(size, mpu)
    cp = ContextParallel(made.context, strategy=block.strategy)
    cp.connect()
    session = Session(cp, made.world, block.loss_of(size))
    adapter.release(given["model"])
    adapter.attach(session, given["model"])
    waiting, adapter.waiting = adapter.waiting, []
    engine = _run(original, given, config, Unit(made))
    adapter.sessions[engine[0]] = adapter.latest = session
    session.engine = weakref.ref(engine[0])
    for loader in waiting:
        loader.bind(session)
    announce(cp)
    return engine


def _without_batch_of_one_ring(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration of Accelerate's without the `train_batch_size` that it works out, if that is of one ring.

    It multiplies by the data-parallel sizes that `ParallelismConfig` was given, which are 1 by default. DeepSpeed
    works out that of all rings.
    """
    micro, steps = (config.get(name) for name in ("train_micro_batch_size_per_gpu", _STEPS))
    if isinstance(micro, int) and isinstance(steps, int) and config.get("train_batch_size") == micro * steps:
        return {name: value for name, value in config.items() if name != "train_batch_size"}
    return config


def _use_own_device(args: Any) -> None:
    """Make this rank's device the current one, on which ranks meet; the engine does the same a little later."""
    local_rank = getattr(args, "device_rank", os.environ.get("LOCAL_RANK"))
    if local_rank is not None and int(local_rank) >= 0:
        get_accelerator().set_device(int(local_rank))


def _without_rings(adapter: Adapter, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """DeepSpeed's own `initialize`, without what is left of an engine with rings: hooks of the model, and groups."""
    adapter.release(inspect.signature(original).bind(*args, **kwargs).arguments.get("model"))
    earlier, groups.mpu = groups.mpu, None if isinstance(groups.mpu, Unit) else groups.mpu
    try:
        return original(*args, **kwargs)
    finally:
        groups.mpu = groups.mpu or earlier  # unless it brought one of its own


def _step(adapter: Adapter, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """`DeepSpeedEngine.step`."""
    session = adapter.sessions.get(engine)
    if session is not None:
        session.meet_at_step()
    return original(engine, *args, **kwargs)


def _forget(adapter: Adapter, original: Callable[..., Any], engine: Any) -> None:
    """`DeepSpeedEngine.destroy`."""
    session = adapter.sessions.pop(engine, None)
    try:
        if session is not None:
            session.detach()
            if adapter.latest is session:
                adapter.latest = next(reversed([*adapter.sessions.values()]), None)
            session.cp.release()  # its groups are not destroyed, since ranks may end one by one
    finally:
        original(engine)


def _run(original: Callable[..., Any], given: Mapping[str, Any], config: dict[str, Any], unit: Unit) -> Any:
    """DeepSpeed's own `initialize`, with our `mpu`, and gradients that are summed up in float32 unless asked else."""
    given = {name: value for name, value in given.items() if name not in ("config_params", "mesh_param")}
    if getattr(given.get("args"), "deepspeed_config", None) is not None:
        given["args"] = copy.copy(given["args"])
        given["args"].deepspeed_config = None
    given["config"] = {"communication_data_type": "fp32", **config}
    given["mpu"] = unit
    result = original(**given)
    result[0].dp_world_size = unit.get_data_parallel_world_size()  # else None, and set_train_batch_size fails
    return result


def _configuration(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration that `initialize` is given, in one of the ways it can be; None if it cannot be read."""
    config = given.get("config")
    if config is None:
        config = given.get("config_params")
    if config is None:
        config = getattr(given.get("args"), "deepspeed_config", None)
    return _loaded(config)


def _loaded(config: Any) -> dict[str, Any] | None:
    """A configuration from a dict, a file, or a base64 text, as DeepSpeed takes them."""
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | os.PathLike):
        return None
    try:
        if os.path.exists(config):
            found = loads(Path(config).read_text())
        else:
            found = loads(base64.urlsafe_b64decode(str(config)).decode())
    except RepeatedKeyError:
        raise  # DeepSpeed would not see it: it is given what was read here
    except (OSError, ValueError):
        return None  # DeepSpeed says what is wrong with it
    return dict(found) if isinstance(found, Mapping) else None


def _agreed(config: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Block, int]:
    """The block, and the context-parallel size. ValueError on every rank if any has a problem, or if they differ."""

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

    def agree(mine: tuple[Block, int] | None, problem: str) -> None:
        said: list[Any] = [None] * dist.get_world_size()
        lines = [] if mine is None else [f"context_parallel_size={mine[1]}", str(mine[0])]
        dist.all_gather_object(said, fingerprint(lines, problem))
        raise_if_unlike(said, f'all ranks must have the same "{BLOCK}" in their configuration: ')

    return prepared_together(prepared, agree)[0]


def _size(block: Block, given: Mapping[str, Any]) -> int:
    """The context-parallel size that the block, Accelerate, or an `mpu` asks for."""
    mpu, others = given.get("mpu"), []
    if isinstance(mpu, RequestedSize):
        others = [mpu.size]
    elif mpu is not None and block.context_parallel_size == AUTO:
        others = [sequence_parallel_size(mpu)]
    return block.size(dist.get_world_size(), others)


def _problems(given: Mapping[str, Any], size: int, loss: str) -> list[str]:
    """What in the model, or in the other arguments of `initialize`, cannot go together with a ring."""
    model, mpu = given["model"], given.get("mpu")
    reasons = [] if isinstance(mpu, RequestedSize) else [text for text in (mpu_problem(mpu, size),) if text]
    if given.get("mesh_param") is not None:
        reasons.append(f"mesh_param={given['mesh_param']!r} does not go together with {BLOCK}: leave it out")
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
    if _is_transformers(model):
        from burst_plugin.huggingface.models import problems

        reasons += problems(model, is_whole=size == 1, is_own_mean=loss == MEAN_OF_RANKS)
    return reasons


def _batch_problems(config: Mapping[str, Any], given: Mapping[str, Any], size: int) -> list[str]:
    """Whether batch sizes count every rank as a data-parallel one."""
    numbers: list[Any] = [config.get(n) for n in ("train_batch_size", "train_micro_batch_size_per_gpu", _STEPS)]
    if size == 1 or isinstance(given.get("mpu"), RequestedSize) or not all(isinstance(n, int) for n in numbers):
        return []
    (batch, micro, steps), world = numbers, dist.get_world_size()
    if batch != micro * steps * world:
        return []
    return [
        f"train_batch_size={batch} is that of {world} data-parallel ranks, but {size} of them share each sequence: "
        f"leave it out, or write {batch // size}. With Trainer or Accelerate, which work it out, set sp_size={size} "
        "of ParallelismConfig"
    ]


def _is_transformers(model: Any) -> bool:
    """Whether a model is one of transformers', perhaps wrapped; without importing transformers."""
    if not isinstance(model, torch.nn.Module):
        return False
    return any(base.__module__ == "transformers.modeling_utils" for m in model.modules() for base in type(m).__mro__)


def _zero_init(adapter: Adapter, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`deepspeed.zero.Init`, whose batch arithmetic knows of no `mpu` yet."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    name = "config" if given.get("config") is not None else "config_dict_or_path"
    config = _loaded(given.get(name))
    block = Block.of(config) if config is not None else None
    if config is None or block is None or not block.enabled or given.get("mpu") is not None:
        return original(*args, **kwargs)
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    block.size(world)  # raises ValueError for what `initialize` would refuse, before the model is made
    # It checks batch sizes without knowing what ranks share; it needs no more than ZeRO's settings.
    config = {key: value for key, value in config.items() if key not in _BATCH_KEYS}
    return original(**{**given, name: {**config, "train_micro_batch_size_per_gpu": 1}})
