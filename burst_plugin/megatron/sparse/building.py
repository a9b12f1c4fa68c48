"""How Megatron's sparse attention is found in specs, and accepted by TransformerConfig with a ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.spec_utils import ModuleSpec, import_module

from burst_plugin.frameworks.wrapping import wrap
from burst_plugin.megatron.flags.arguments import option_of
from burst_plugin.megatron.flags.config import SPARSE, asks_for_burst, kinds_of


def hook_sparse_config() -> None:
    """Have TransformerConfig accept sparse attention (`experimental_attention_variant="dsa"`) on a ring.

    It wraps `__post_init__`, in which Megatron refuses context parallelism with sparse attention, or since 0.19 any
    kind but "allgather". ValueError is raised where only some layers have cp_comm_type "burst", and for
    apply_rope_fusion.
    """
    wrap(TransformerConfig, "__post_init__", _accepted)


def _accepted(original: Callable[..., None], config: Any) -> None:
    """Run `TransformerConfig.__post_init__`, without its checks of sparse attention where all layers are burst's."""
    if config.experimental_attention_variant != SPARSE or not asks_for_burst(config):
        original(config)
        return
    if config.apply_rope_fusion:
        raise ValueError(
            f"{option_of('apply_rope_fusion', True)} is not supported by sparse attention (dsa): switch it off"
        )
    kinds = config.cp_comm_type
    others = [kind for kind in kinds_of(kinds) if kind != "burst"]
    if others:
        raise ValueError(
            f"{option_of('cp_comm_type', kinds)} is not supported by sparse attention (dsa): use burst in all layers"
        )
    if hasattr(dsa, "dsa_layout"):  # since 0.19 Megatron gathers keys
        name, hidden, asked = "cp_comm_type", "allgather", kinds
    else:
        name, hidden, asked = "experimental_attention_variant", None, SPARSE
    setattr(config, name, hidden)
    try:
        original(config)
    finally:
        setattr(config, name, asked)


def sparse_submodules(core: Any) -> Any:
    """Return the submodules of a core attention's spec, if it is of Megatron's sparse `DSAttention`; else None."""
    if not isinstance(core, ModuleSpec):
        return None
    kind = import_module(core.module) if isinstance(core.module, tuple) else core.module
    return core.submodules if kind is dsa.DSAttention else None
