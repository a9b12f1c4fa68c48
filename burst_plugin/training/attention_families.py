"""Models whose layers all attend, but not alike: with heads of two sizes, or keys and values of other layers.

Rows of `ATTENTION_FAMILIES` have the form of rows of `hybrid_families.HYBRIDS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from burst_plugin.training.hybrid_families import Config, HybridFamily, Layer, Size, dense, layer_kinds


def _gemma4(config: Config, size: Size) -> list[Layer]:
    """Return layers whose heads are larger without a window. The last may take keys and values of other layers."""
    layers, hidden, width = size("num_hidden_layers"), size("hidden_size"), size("intermediate_size")
    first_shared = layers - size("num_kv_shared_layers", default=0)
    own_input = 2 * hidden * size("hidden_size_per_layer_input", default=0)
    layer_sizes: list[Layer] = []
    for layer, kind in enumerate(_gemma4_kinds(config, layers)):
        shares = layer >= first_shared
        of_layer: dict[str, int] = {"qk_norm": True, "value_norm": True, "hands_on": not shares}
        of_layer["kv_matrices"] = 0 if shares else 2
        if kind == "full_attention":
            of_layer |= _global_heads(config, size, layer)
            of_layer["kv_matrices"] = min(of_layer["kv_matrices"], 1 if config.get("attention_k_eq_v") else 2)
        mlp: Layer = dense(width * (2 if shares and config.get("use_double_wide_mlp") else 1))
        if config.get("enable_moe_block"):  # beside the MLP
            experts = size("num_experts")
            mlp = {
                "ffn": size("moe_intermediate_size"),
                "experts": experts,
                "active": size("top_k_experts"),
                "shared_ffn": width,
                "mlp_norms": 3,
                "extra": 4 * hidden + experts,  # of norms, and of the router's scales
            }
        layer_sizes.append({**of_layer, **mlp, "extra": mlp.get("extra", 0) + own_input + hidden * bool(own_input)})
    return layer_sizes


def _gemma4_kinds(config: Config, layers: int) -> list[str]:
    kinds = layer_kinds(config, layers)
    return kinds or ["full_attention" if not (layer + 1) % 6 else "sliding_attention" for layer in range(layers)]


def _global_heads(config: Config, size: Size, layer: int) -> dict[str, int]:
    """Return the sizes of heads without a window, which old files give once, and new ones by layer."""
    by_layer = config.get("per_layer_config")
    if by_layer is not None:
        own = {int(key): sizes for key, sizes in by_layer.items()}.get(layer, {})
        heads, dim = own.get("num_key_value_heads"), own.get("head_dim")
    else:
        heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        dim = config.get("global_head_dim", 512)
    return {"kv_heads": heads or size("num_key_value_heads"), "head_dim": dim or size("head_dim")}


_GEMMA4: Config = MappingProxyType({"head_dim": 256, "num_key_value_heads": 4, "tie_word_embeddings": True})

ATTENTION_FAMILIES: Mapping[str, HybridFamily] = MappingProxyType(
    {
        "gemma4_text": HybridFamily(
            layers=_gemma4,
            windows=True,
            wide_norms=True,
            in_chunks=("mlp",),
            defaults={**_GEMMA4, "hidden_size_per_layer_input": 256},
        ),
        "gemma4_unified_text": HybridFamily(
            layers=_gemma4, windows=True, wide_norms=True, in_chunks=("mlp",), defaults=_GEMMA4
        ),
    }
)
