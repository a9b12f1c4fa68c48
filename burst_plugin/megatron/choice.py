"""Which core attention a layer of Megatron gets: the ring, or the one in its spec."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec, build_module, import_module

from burst_plugin.megatron.config import is_hybrid, spreads_sequences
from burst_plugin.megatron.core_attention import BurstCoreAttention
from burst_plugin.megatron.registry import Registry

__all__ = ["ChosenCoreAttention"]

_REPLACEABLE = ("DotProductAttention", "TEDotProductAttention")  # they compute what TransformerConfig says


class ChosenCoreAttention:
    """Built in place of a layer's core attention: the ring where `cp_comm_type` is "burst", else the original.

    Multi-latent attention builds its core attention twice, first without a `cp_comm_type`; that one is never used.
    """

    def __new__(cls, *args: Any, original: Any, registry: Registry, **kwargs: Any) -> Any:
        """Return the core attention of one layer."""
        config = kwargs["config"]
        kind = kwargs.get("cp_comm_type")
        if kind is None:
            listed = config.cp_comm_type
            kind = "burst" if isinstance(listed, list) and "burst" in listed else listed
        if spreads_sequences(config) and kind == "burst":
            # Megatron does not tell layers their cp_comm_type with hybrid context parallelism.
            if kwargs.get("cp_comm_type") == "burst" or is_hybrid(config):
                _check_replaceable(original, kwargs.get("layer_number"))
            return BurstCoreAttention(*args, registry=registry, **kwargs)
        return build_module(original, *args, **kwargs)


def _check_replaceable(original: Any, layer_number: int | None) -> None:
    """Raise ValueError for a core attention other than Megatron's usual ones, which may compute something else."""
    kind: Any = original
    options: dict[str, Any] = {}
    if isinstance(original, ModuleSpec):
        kind, options = original.module, dict(original.params or {})
    while isinstance(kind, partial):
        kind, options = kind.func, {**kind.keywords, **options}
    kind = import_module(kind) if isinstance(kind, tuple) else kind
    module, name = kind.__module__, getattr(kind, "__name__", type(kind).__name__)
    usual = module.startswith("megatron.core.") and name in _REPLACEABLE
    if not usual and not getattr(kind, "burst_may_replace", False):
        raise ValueError(
            f"layer {layer_number} has a core attention of its own, {module}.{name}, in whose place burst attention "
            "would compute what TransformerConfig says; give this layer another cp_comm_type or, if that is the "
            f"same, set {name}.burst_may_replace = True"
        )
    if usual and any(value is not None for value in options.values()):
        raise ValueError(
            f"layer {layer_number} gives its core attention options in its spec, {', '.join(sorted(options))}, in "
            "whose place burst attention would take those of TransformerConfig: set them there"
        )
