"""What `install()` changes in Megatron-core: it applies repairs and wraps functions, once."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core import __version__ as megatron_version
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import CheckpointFunction
from megatron.core.transformer.transformer_layer import TransformerLayer

from burst_plugin.activations.kept_attention import follow_checkpoint_class
from burst_plugin.context import ContextParallel
from burst_plugin.frameworks.options import exit_if_refused
from burst_plugin.frameworks.wrapping import announce, bind, wrap
from burst_plugin.megatron.batches.conversations import hook_conversations
from burst_plugin.megatron.batches.distillation import stamp_logits
from burst_plugin.megatron.batches.documents import hook_documents, hook_skipped_steps
from burst_plugin.megatron.batches.even_microbatches import add_even_microbatches_flag, hook_even_microbatches
from burst_plugin.megatron.batches.layouts import hook_layouts
from burst_plugin.megatron.batches.llava import hook_llava
from burst_plugin.megatron.cpu.redirection import is_enabled
from burst_plugin.megatron.cpu.repairs import CPU_REPAIRS
from burst_plugin.megatron.flags.arguments import add_arguments, burst_is_possible, parsed_arguments
from burst_plugin.megatron.flags.flag_checks import refuse_flags
from burst_plugin.megatron.flags.one_ring import hook_validation
from burst_plugin.megatron.identity import hook_schedules
from burst_plugin.megatron.inference.static_context import hook_inference, patch_server
from burst_plugin.megatron.layers.building import hook_building
from burst_plugin.megatron.memory.chosen_options import in_words
from burst_plugin.megatron.memory.output_layer import hook_losses
from burst_plugin.megatron.recurrent.mixers import hook_mixers
from burst_plugin.megatron.registry import Registry
from burst_plugin.megatron.releases import about, parse_version
from burst_plugin.megatron.repairs.faults import REPAIRS, apply_repairs
from burst_plugin.megatron.repairs.losses import hook_loss_weights
from burst_plugin.megatron.repairs.router_losses import hook_router_losses
from burst_plugin.strategy import AUTO, Strategy

_MARK = "_burst_plugin_adapter"


class MegatronAdapter:
    """What `install()` returns: the rings of this process, and a report of the changes that it made to Megatron-core.

    strategy: the options for all layers; None to take them from Megatron's parsed arguments. `registry`: the rings
    and what they know of batches. `report`: the lines that `str()` lists.
    """

    def __init__(self, strategy: Strategy | None) -> None:
        self.registry = Registry(strategy)
        self.report: list[str] = []

    def contexts(self) -> list[ContextParallel]:
        """Return the `ContextParallel` objects in use, one for each context-parallel group."""
        return self.registry.contexts()

    def __str__(self) -> str:
        return "burst_plugin in Megatron-core:\n" + "\n".join(f"  - {line}" for line in self.report)


def install_adapter(strategy: Strategy | None) -> MegatronAdapter:
    """Repair and wrap Megatron's functions for the ring, once per process, and return the adapter.

    A later call changes nothing and returns the adapter of the first.

    Args:
        strategy: options for all layers; None: the `--burst-*` flags if Megatron's parser ran, else the defaults.

    Raises:
        ValueError: `strategy.head_chunk` is set; or an earlier call had another strategy, and this one is not None.
    """
    if strategy is not None and strategy.head_chunk:
        raise ValueError(
            f"head_chunk={strategy.head_chunk} is for models of transformers; Megatron's layers project all heads at "
            "once: leave it out, or use a larger tensor-model-parallel size"
        )
    installed: MegatronAdapter | None = getattr(TransformerLayer.__init__, _MARK, None)
    if installed is not None:
        if strategy not in (None, installed.registry.strategy):
            raise ValueError(
                f"already installed with {installed.registry.strategy}, got {strategy}; call install() once"
            )
        return installed
    adapter, version = MegatronAdapter(strategy), parse_version(megatron_version)
    registry = adapter.registry
    adapter.report += [about(version), hook_layouts(registry)]  # before repairs, which wrap what this wraps
    adapter.report += apply_repairs(REPAIRS, version)
    if is_enabled():
        adapter.report += apply_repairs(CPU_REPAIRS, version)
    adapter.report += [hook_building(registry), hook_mixers(registry)]
    setattr(TransformerLayer.__init__, _MARK, adapter)
    follow_checkpoint_class(CheckpointFunction)
    wrap(parallel_state, "initialize_model_parallel", partial(make_ring, adapter))
    wrap(parallel_state, "destroy_model_parallel", partial(_forget_rings, adapter))
    adapter.report += [
        "rings are made with Megatron's groups, and forgotten with them",
        hook_schedules(registry),
        hook_documents(registry),
        hook_llava(registry),
        hook_loss_weights(registry),
        hook_router_losses(registry),
        hook_losses(registry),
        hook_inference(registry),  # after what wraps a model's forward, too
        _extend_argument_parser(strategy),
    ]
    return adapter


def _extend_argument_parser(strategy: Strategy | None) -> str:
    """Add flags to the argument parser of Megatron's scripts, if it is there; return a line that says so."""
    if importlib.util.find_spec("megatron.training") is None:  # as in megatron-core from PyPI until 0.16
        return "Megatron's argument parser is not here: options are those of install()"
    try:
        from megatron.training import arguments
    except ImportError as error:  # only scripts need these packages, and will say so themselves
        return f"Megatron's argument parser cannot be imported ({error}): options are those of install()"
    wrap(arguments, "add_megatron_arguments", add_flags)
    if hasattr(arguments, "validate_args"):
        hook_validation(arguments, None if strategy is None else strategy.layout)
    hook_skipped_steps()
    return (
        "Megatron's argument parser knows --burst-backward, --burst-kernel and others; --hybrid-context-parallel of "
        "packed documents becomes one ring"
    )


def make_ring(adapter: MegatronAdapter, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `initialize_model_parallel`, then make the ring, if any, on every rank.

    Flags are checked first, since all training scripts of Megatron begin with this function.
    """
    with exit_if_refused():
        refuse_flags()
        hook_even_microbatches()
    hook_conversations(adapter.registry.layout)
    stamp_logits(adapter.registry)
    patch_server()
    result = original(*args, **kwargs)
    arguments = bind(original, *args, **kwargs).arguments
    adapter.registry.clear()  # in case earlier groups were destroyed in another way
    group = parallel_state.get_context_parallel_group(check_initialized=False)
    if group is not None and group.size() > 1 and burst_is_possible():
        hierarchical = arguments.get("hierarchical_context_parallel_sizes")
        adapter.registry.add(
            group, parallel_state.get_hierarchical_context_parallel_groups() if hierarchical else None
        )
        if adapter.registry.layout == AUTO:
            _check_nodes(adapter.contexts()[-1])
        announce(adapter.contexts()[-1], layout=adapter.registry.layout)
        chosen = in_words(adapter.registry.given(), adapter.registry.asked(), parsed_arguments())
        if chosen and dist.get_rank() == 0:
            print(chosen, flush=True)
    return result


def _check_nodes(ring: ContextParallel) -> None:
    """Raise ValueError if rings of one model lie differently on nodes; collective over its stages and tensor ranks.

    Each ring chooses by its own nodes which tokens ranks hold, and all have to choose the same.
    """
    parts = parallel_state.get_model_parallel_group()
    said: list[Any] = [None] * parts.size()
    dist.all_gather_object(said, str(ring.topology), group=parts)
    if len(set(said)) > 1:
        raise ValueError(
            "layout='auto' goes by the nodes of a ring, and the rings of pipeline stages or tensor-parallel ranks "
            f"differ: {', '.join(dict.fromkeys(said))}; use --burst-ranks-per-node or "
            "--hierarchical-context-parallel-sizes, which hold for all rings, or another --burst-layout, as striped"
        )


def _forget_rings(adapter: MegatronAdapter, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Forget the rings, then run `destroy_model_parallel`."""
    adapter.registry.clear()
    return original(*args, **kwargs)


def add_flags(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `add_megatron_arguments`, and add the flags of this package."""
    return add_even_microbatches_flag(add_arguments(original(*args, **kwargs)))
