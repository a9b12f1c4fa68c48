"""What `install()` changes in DeepSpeed: `initialize`; `zero.Init`, which makes a configuration of its own; and an
engine's `step` and `destroy`. For transformers' Trainer see `burst_plugin.deepspeed.trainer`."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import utils as runtime_utils
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.zero import partition_parameters
from deepspeed.utils import groups, set_z3_leaf_module

from burst_plugin.activations.deferred_logits import LazyLogits
from burst_plugin.activations.kept_attention import follow_checkpoint_class, follow_checkpoint_function
from burst_plugin.context import ContextParallel
from burst_plugin.deepspeed.arguments import (
    agree_on_block,
    find_configuration,
    is_transformers,
    read_configuration,
    requested_beside,
    strategy_for,
)
from burst_plugin.deepspeed.config import BLOCK, Block, warn_of_near_misses
from burst_plugin.deepspeed.cpu import leave_out_shared_memory
from burst_plugin.deepspeed.engine_session import Session
from burst_plugin.deepspeed.groups import RequestedSize, Unit, make_groups
from burst_plugin.deepspeed.loaders import ShardedLoader
from burst_plugin.deepspeed.losses import OwnLosses
from burst_plugin.deepspeed.model_hooks import ModelHooks
from burst_plugin.deepspeed.whole_outputs import classifier_in, score_layer
from burst_plugin.frameworks.wrapping import announce, remove_forward_hooks, wrap
from burst_plugin.huggingface.auto_memory import HeldStates, choose_chunks, note_states
from burst_plugin.huggingface.chunked_modules import chunk_modules, restore_modules

_MARK = "_burst_plugin_adapter"
_TESTED = ("0.18", "0.19")
_STEPS = "gradient_accumulation_steps"
_BATCH_KEYS = ("train_batch_size", _STEPS, "sequence_parallel_size")


class Adapter:
    """An installed adapter: the session of every engine, and a report of the changes that it made."""

    def __init__(self) -> None:
        self.sessions: weakref.WeakKeyDictionary[Any, Session] = weakref.WeakKeyDictionary()
        self.watched: weakref.WeakKeyDictionary[torch.nn.Module, Session] = weakref.WeakKeyDictionary()
        self.latest: Session | None = None
        self.gathering: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # models of losses of whole sequences
        self.waiting: list[ShardedLoader] = []  # for the engine that is made next
        self.report: list[str] = []

    def session(self, engine: Any = None) -> Session:
        """Return the session of an engine, or the only one. Raise ValueError if there is none, or more than one."""
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
        """Let a session cut the batches of `model`, before its engine is made."""
        cp = session.cp
        if is_transformers(model):
            choose_chunks(cp, model)
        for module in chunk_modules(model, cp.strategy, is_chosen="mlp_chunk" in cp.chosen):
            # So that ZeRO-3 gathers the parameters of a module once, rather than for every chunk. A norm has its own
            # parameters only; and gradients of leaves are reduced once the input's is there, perhaps before they are.
            set_z3_leaf_module(module, any(True for _ in module.children()))
        called = model
        if is_transformers(model):
            from burst_plugin.huggingface.image_groups import layer_mask
            from burst_plugin.huggingface.media.absent import note_replicas
            from burst_plugin.huggingface.models import module_taking_batches, use_burst

            classifier = classifier_in(model) if session.cp.ranks > 1 else None
            part = model if classifier is None else classifier.base_model
            called = module_taking_batches(part)
            session.whole_batches, session.layer_mask = True, layer_mask(called)
            session.gathers = session.gathers or classifier is not None
            if session.cp.strategy.loss_chunk:
                _gather_heads_whole(called)
        elif session.cp.strategy.loss_chunk:
            raise ValueError(
                f'"{BLOCK}": loss_chunk={session.cp.strategy.loss_chunk} is for models of transformers, and '
                f"{type(model).__name__} is not one: leave it out, and call "
                "burst_plugin.activations.linear_cross_entropy in the model"
            )
        session.hooks = ModelHooks(session, called, model)
        if session.whole_batches:  # hooks of these models come after those that cut batches
            use_burst(part)
            note_replicas(model, session.replicas)
            if classifier is not None:
                session.hooks.gather_scores(score_layer(classifier))
        self.watched[model] = session

    def release(self, model: Any) -> None:
        """Remove the hooks of earlier engines from `model` and its parts, and let its modules run in one piece.

        So are hooks that a deep copy has of the model that it was made of, of which no session knows.
        """
        if not isinstance(model, torch.nn.Module):
            return
        for module in restore_modules(model):
            set_z3_leaf_module(module, False)
        for module in model.modules():
            session = self.watched.pop(module, None)
            if session is not None:
                session.detach()
            remove_forward_hooks(module, (ModelHooks.__module__, OwnLosses.__module__))

    def __str__(self) -> str:
        return "burst_plugin in DeepSpeed:\n" + "\n".join(f"  - {line}" for line in self.report)


def installed() -> Adapter | None:
    """Return the adapter, if `install()` has run."""
    return getattr(deepspeed.initialize, _MARK, None)


def install_adapter() -> Adapter:
    """Install the adapter once, and return it; see `burst_plugin.deepspeed.install`."""
    earlier = installed()
    if earlier is not None:
        return earlier
    adapter = Adapter()
    setattr(wrap(deepspeed, "initialize", partial(_initialize, adapter)), _MARK, adapter)
    wrap(deepspeed.DeepSpeedEngine, "destroy", partial(_forget, adapter))
    wrap(deepspeed.DeepSpeedEngine, "step", partial(_step, adapter))
    adapter.report.append(f'deepspeed.initialize reads the block "{BLOCK}"')
    follow_checkpoint_class(checkpointing.CheckpointFunction)
    follow_checkpoint_function(checkpointing, "non_reentrant_checkpoint")
    wrap(partition_parameters.Init, "__init__", partial(_zero_init, adapter))
    hooks = getattr(runtime_utils, "OutputBackwardHookManager", None)  # of later releases
    if hooks is not None:
        wrap(hooks, "_traverse_and_register_hooks", _hook_lazy_logits)
    adapter.report.append("deepspeed.zero.Init leaves batch sizes to deepspeed.initialize")
    if importlib.util.find_spec("transformers") is not None:
        from burst_plugin import huggingface

        adapter.report.append(huggingface.register())
    if get_accelerator().device_name() == "cpu":
        adapter.report.append(leave_out_shared_memory())
    warn_if_untested("deepspeed", _TESTED)
    return adapter


def warn_if_untested(package: str, tested: tuple[str, str]) -> None:
    """Warn of a version outside `tested`, the oldest and the newest minor version that were tested."""
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
    """Initialize an engine as `deepspeed.initialize` does, with rings if the configuration asks for them."""
    arguments = inspect.signature(original).bind(*args, **kwargs).arguments
    config = find_configuration(arguments)
    if config is None or BLOCK not in config:
        warn_of_near_misses(config or {})
        return _without_rings(adapter, original, *args, **kwargs)
    deepspeed.init_distributed(
        dist_backend=get_accelerator().communication_backend_name(),
        distributed_port=arguments.get("distributed_port", deepspeed.constants.TORCH_DISTRIBUTED_DEFAULT_PORT),
        dist_init_required=arguments.get("dist_init_required"),
    )
    _use_own_device(arguments.get("args"))
    arguments["mpu"] = requested_beside(arguments.get("mpu"), config)
    block, size = agree_on_block(config, arguments)
    if not block.enabled:
        return _without_rings(adapter, original, *args, **kwargs)
    mpu = asked = arguments["mpu"]
    if isinstance(mpu, RequestedSize):
        mpu, config = None, _without_accelerates_batch(config)
    made = make_groups(size, mpu)
    cp = ContextParallel(made.context, strategy=strategy_for(block, arguments["model"]))
    cp.connect()
    session = Session(cp, made.world, block.loss_of(size))
    is_trained = arguments.get("model_parameters") is not None or arguments.get("optimizer") is not None
    is_reference = getattr(asked, "is_beside", False) and not is_trained
    session.gathers = size > 1 and (arguments["model"] in adapter.gathering or is_reference)
    note_states(cp, _states(config, is_trained))
    adapter.release(arguments["model"])
    adapter.attach(session, arguments["model"])
    waiting, adapter.waiting = adapter.waiting, []
    engine = _run(original, arguments, config, Unit(made))
    adapter.sessions[engine[0]] = adapter.latest = session
    session.engine = weakref.ref(engine[0])
    for loader in waiting:
        loader.bind(session)
    announce(cp)
    return engine


def _hook_lazy_logits(original: Callable[..., None], hooks: Any, outputs: Any, first: list[Any]) -> None:
    """Wrap the search for outputs whose gradient begins a backward pass, which takes tensors with a `grad_fn` alone.

    Lazy logits, of a loss in chunks, have none, so that a loss made of them would begin no backward pass: DeepSpeed
    would neither reset sums of gradients nor know the last micro-batch of a step.
    """
    if not isinstance(outputs, LazyLogits):
        original(hooks, outputs, first)
    elif outputs.requires_grad:
        handle = outputs.register_hook(hooks._make_backward_hook(outputs))  # type: ignore[no-untyped-call]
        hooks.hook_handles.append(handle)


def _states(config: Mapping[str, Any], is_trained: bool) -> HeldStates:
    """Return where the states of a model trained by a configuration are held, as ZeRO shares them out."""
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    offload = zero.get("offload_optimizer")
    on_host = isinstance(offload, Mapping) and offload.get("device", "none") != "none"
    stage = zero.get("stage", 0)
    return HeldStates(stage if isinstance(stage, int) else 0, on_host, are_there=is_trained, are_wide=True)


def _gather_heads_whole(model: torch.nn.Module) -> None:
    """Have ZeRO-3 gather a head of several modules, such as LoRA's, at once: not part by part for every chunk."""
    modules: list[Any] = [*model.modules()]
    for module in modules:
        head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
        if isinstance(head, torch.nn.Module) and any(True for _ in head.children()):
            set_z3_leaf_module(head, True)


def _without_accelerates_batch(config: dict[str, Any]) -> dict[str, Any]:
    """Return Accelerate's configuration without the `train_batch_size` that it worked out, if the rest is there.

    Accelerate multiplies by the data-parallel sizes of `ParallelismConfig`, which are 1 by default; for a model that
    it does not prepare that is the batch of all ranks. DeepSpeed works out the batch size of all rings.
    """
    micro, steps, batch = (
        config.get(name) for name in ("train_micro_batch_size_per_gpu", _STEPS, "train_batch_size")
    )
    if not isinstance(micro, int) or not isinstance(steps, int):
        return config
    worked_out = (micro * steps, micro * steps * dist.get_world_size())
    return {name: value for name, value in config.items() if name != "train_batch_size" or batch not in worked_out}


def _use_own_device(args: Any) -> None:
    """Make this rank's device the current one, since ranks exchange tensors there; the engine does so only later."""
    local_rank = getattr(args, "device_rank", os.environ.get("LOCAL_RANK"))
    if local_rank is not None and int(local_rank) >= 0:
        get_accelerator().set_device(int(local_rank))


def _without_rings(adapter: Adapter, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call DeepSpeed's own `initialize`, without what an engine with rings has left: hooks and groups."""
    adapter.release(inspect.signature(original).bind(*args, **kwargs).arguments.get("model"))
    earlier, groups.mpu = groups.mpu, None if isinstance(groups.mpu, Unit) else groups.mpu
    try:
        return original(*args, **kwargs)
    finally:
        groups.mpu = groups.mpu or earlier  # unless it brought one of its own


def _step(adapter: Adapter, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Check that the ranks of the ring are in step before `DeepSpeedEngine.step`."""
    session = adapter.sessions.get(engine)
    if session is not None:
        session.meet_at_step()
    return original(engine, *args, **kwargs)


def _forget(adapter: Adapter, original: Callable[..., Any], engine: Any) -> None:
    """End the session of an engine before `DeepSpeedEngine.destroy`."""
    session = adapter.sessions.pop(engine, None)
    try:
        if session is not None:
            session.detach()
            if adapter.latest is session:
                adapter.latest = next(reversed([*adapter.sessions.values()]), None)
            session.cp.release()  # its groups are not destroyed, since ranks may end one by one
    finally:
        original(engine)


def _run(original: Callable[..., Any], arguments: Mapping[str, Any], config: dict[str, Any], unit: Unit) -> Any:
    """Call DeepSpeed's own `initialize` with our `mpu`, and with gradients reduced in float32 by default."""
    arguments = {name: value for name, value in arguments.items() if name not in ("config_params", "mesh_param")}
    if getattr(arguments.get("args"), "deepspeed_config", None) is not None:
        arguments["args"] = copy.copy(arguments["args"])
        arguments["args"].deepspeed_config = None
    arguments["config"] = {"communication_data_type": "fp32", **config}
    arguments["mpu"] = unit
    result = original(**arguments)
    result[0].dp_world_size = unit.get_data_parallel_world_size()  # None would make set_train_batch_size fail
    return result


def _zero_init(adapter: Adapter, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a `deepspeed.zero.Init` whose check of batch sizes, which knows no `mpu`, does not fail for rings."""
    arguments = inspect.signature(original).bind(*args, **kwargs).arguments
    name = "config" if arguments.get("config") is not None else "config_dict_or_path"
    config = read_configuration(arguments.get(name))
    block = Block.of(config) if config is not None else None
    if config is None or block is None or not block.enabled or arguments.get("mpu") is not None:
        return original(*args, **kwargs)
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    block.size(world)  # raises ValueError, as `initialize` would, but before the model is made
    # It needs only ZeRO's settings; batch sizes that count rings would not pass its check.
    config = {key: value for key, value in config.items() if key not in _BATCH_KEYS}
    return original(**{**arguments, name: {**config, "train_micro_batch_size_per_gpu": 1}})
