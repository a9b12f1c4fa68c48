"""Mixers (Mamba-2, gated delta net) on the ring: built as for one rank, and told in each call which tokens they have.

Every context-parallel rank has all heads of a mixer. Megatron's own context parallelism has ranks exchange heads in
these layers, and takes batches to be cut in zigzag.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_context_parallel import MambaContextParallel
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.transformer_config import TransformerConfig

from burst_plugin.frameworks.wrapping import bind, wrap
from burst_plugin.megatron.cpu.absent_triton import triton_or_stand_in
from burst_plugin.megatron.flags.config import DELTA_NETS, asks_for_burst, problems
from burst_plugin.megatron.flags.flag_checks import flag_problems
from burst_plugin.megatron.recurrent.calls import MixerOnRing, computing, mask_of_layer, with_mask
from burst_plugin.megatron.recurrent.functions import (
    FUNCTIONS_OF_DELTA_NET,
    ConvolutionOnRing,
    convolve_by_method,
    functions_of_mamba,
    replace_functions,
)
from burst_plugin.megatron.registry import Registry

with triton_or_stand_in():  # its module has kernels for inference
    from megatron.core.ssm.mamba_mixer import MambaMixer

_RING = "_burst_plugin_ring"  # of a mixer: its `MixerOnRing`
_DELTA_NET = sys.modules[GatedDeltaNet.__module__]


class GroupOfOne:
    """A stand-in for a context-parallel group of this rank alone, with the methods that Megatron's mixers call."""

    def size(self) -> int:
        """Return 1, the number of ranks."""
        return 1

    def rank(self) -> int:
        """Return 0, the number of this rank."""
        return 0


def can_take_over(kind: Any) -> bool:
    """Return whether mixers of the class `kind` can run on the ring: `MambaMixer` or `GatedDeltaNet`, no subclass."""
    return kind in (MambaMixer, GatedDeltaNet)


def is_on_ring(mixer: Any) -> bool:
    """Return whether a module is a mixer that was built to carry its state over a ring."""
    return hasattr(mixer, _RING)


def hook_mixers(registry: Registry) -> str:
    """Have Megatron's Mamba-2 and gated delta net mixers be built for the ring, and carry their states over it.

    It wraps constructors and forwards of these mixers, and the functions that they call. registry: the rings. Returns
    a line for the report of `install()`.
    """
    mamba = sys.modules[MambaMixer.__module__]
    replace_functions(mamba, functions_of_mamba(mamba))
    replace_functions(_DELTA_NET, FUNCTIONS_OF_DELTA_NET)
    for kind in (MambaMixer, GatedDeltaNet):
        wrap(kind, "__init__", partial(_build, registry, kind))
        wrap(kind, "forward", _run)
    wrap(MambaLayer, "forward", _run_layer)
    wrap(MambaContextParallel, "conv1d", convolve_by_method)
    return "Mamba-2 and gated delta net carry states over the ring, in any layout"


def allow_delta_nets() -> None:
    """Have TransformerConfig accept gated delta nets on a ring, for any number of heads.

    It wraps the checks in its `__post_init__`, which see context_parallel_size=1 there. Other configurations are
    checked as before.
    """

    def check(original: Callable[[Any], None], config: Any) -> None:
        size = config.context_parallel_size
        is_ours = config.experimental_attention_variant in DELTA_NETS and asks_for_burst(config)
        config.context_parallel_size = 1 if is_ours else size
        try:
            original(config)
        finally:
            config.context_parallel_size = size

    wrap(TransformerConfig, "__post_init__", check)


def _build(
    registry: Registry, kind: Any, original: Callable[..., None], mixer: Any, *args: Any, **kwargs: Any
) -> None:
    """Build a mixer; on the ring with all heads on every context-parallel rank, as on one rank."""
    known = inspect.signature(original).parameters
    usual = {name: value for name, value in kwargs.items() if name != "cp_comm_type" or name in known}
    call = bind(original, mixer, *args, **usual)  # until 0.18 delta nets do not take what layers give attention
    config, number = call.arguments["config"], call.arguments.get("layer_number")
    if type(mixer) is not kind or not asks_for_burst(config):
        original(mixer, *args, **kwargs)
        return
    _check(kind, config, number)
    groups = call.arguments["pg_collection"]
    alone = copy.copy(groups)
    alone.cp = GroupOfOne()
    call.arguments["pg_collection"] = alone
    original(*call.args, **call.kwargs)
    setattr(mixer, _RING, MixerOnRing(registry, config, number, groups))
    if kind is GatedDeltaNet:
        mixer.conv1d.__class__ = ConvolutionOnRing


def _check(kind: type, config: Any, layer_number: int | None) -> None:
    """Raise ValueError naming each field of the configuration that cannot be honoured."""
    reasons = problems(config, False, "self") + flag_problems()
    if kind is GatedDeltaNet and config.deterministic_mode and hasattr(_DELTA_NET, "causal_conv1d"):
        reasons.append("deterministic_mode=True is not supported in gated delta nets of this Megatron: switch it off")
    if reasons:
        raise ValueError(f"{kind.__name__} of layer {layer_number} cannot run on the ring: " + "; ".join(reasons))


def _run(original: Callable[..., Any], mixer: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a mixer; on the ring without the packed sequences, whose documents the ring knows.

    Raises ValueError for inference, for which a rank would lack states.
    """
    ring: MixerOnRing | None = getattr(mixer, _RING, None)
    if ring is None:
        return original(mixer, *args, **kwargs)
    call = bind(original, mixer, *args, **kwargs)
    arguments = call.arguments
    if arguments.get("inference_context") is not None or arguments.get("inference_params") is not None:
        raise ValueError(
            f"inference with context_parallel_size={mixer.config.context_parallel_size} and cp_comm_type='burst' is "
            f"not for {type(mixer).__name__} layers; use context_parallel_size=1"
        )
    mask = arguments["attention_mask"] if "attention_mask" in arguments else mask_of_layer()
    with computing(ring.read(arguments["hidden_states"], mask, arguments.get("packed_seq_params"))):
        if "packed_seq_params" in arguments:
            arguments["packed_seq_params"] = None
        return original(*call.args, **call.kwargs)


def _run_layer(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a `MambaLayer`, and keep the mask that it is given for its mixer."""
    with with_mask(bind(original, layer, *args, **kwargs).arguments.get("attention_mask")):
        return original(layer, *args, **kwargs)
