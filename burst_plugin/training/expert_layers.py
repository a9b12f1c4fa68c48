"""Which layers of a model have experts, how many and how wide, by the keys that families use in a config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from burst_plugin.checks import as_whole, shown

# Keys for one size each; a config.json has at most one of them.
COUNT = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ACTIVE = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_k",
    "moe_topk",
    "moe_top_k",
    "top_k_experts",
)
WIDTH = ("moe_intermediate_size", "intermediate_size")
_SHARED_COUNT = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
SHARED_WIDTH = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
    "share_expert_dim",
)
_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
LAYERS = (
    *_FIRST,
    "moe_layer_freq",
    "moe_layer_interval",
    "moe_layer_end_index",
    "decoder_sparse_step",
    "mlp_only_layers",
)
_OF_HYBRIDS = ("expert_layer_period", "expert_layer_offset", "moe_latent_size")
_NO_SIZES = ("num_expert_group", "moe_capacity")
_KNOWN = frozenset((*COUNT, *ACTIVE, *WIDTH, *_SHARED_COUNT, *SHARED_WIDTH, *LAYERS, *_OF_HYBRIDS, *_NO_SIZES))
_OF_EXPERTS = re.compile("expert|moe_")


def experts(size: Callable[..., int]) -> Mapping[str, Any]:
    """Return the fields of `ModelShape` for a layer with experts.

    size: returns the size under the first of some keys that a config.json has; see `model_shape`.
    """
    ffn = size(*WIDTH)
    shared = size(*_SHARED_COUNT, default=0) * ffn or size(*SHARED_WIDTH, default=0)
    return {"ffn": ffn, "experts": size(*COUNT), "active": size(*ACTIVE), "shared_ffn": shared}


def sparse_layers(config: Mapping[str, Any], size: Callable[..., int], layers: int) -> list[bool]:
    """Return for each of `layers` layers whether it has experts. Raise ValueError for a list that does not fit.

    size: as in `experts`.
    """
    kinds: tuple[object, object]
    key, kinds = "mlp_layer_types", ("dense", "sparse")
    if config.get(key) is None and isinstance(config.get("moe_layer_freq"), list):
        key, kinds = "moe_layer_freq", (0, 1)
    listed = config.get(key)
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != layers or any(kind not in kinds for kind in listed):
            expected = " or ".join(map(json.dumps, kinds))
            raise ValueError(f"{key} is {shown(listed)}, expected a list with {expected} for each of {layers} layers")
        return [kind == kinds[1] for kind in listed]
    first = max(size(key, default=0) for key in _FIRST)
    last, dense = config.get("moe_layer_end_index"), config.get("mlp_only_layers") or ()
    last = layers if last in (None, -1) else last
    period = size("moe_layer_freq", default=1) or 1
    step = size("decoder_sparse_step", "moe_layer_interval", default=1) or 1
    return [
        first <= layer <= last and layer % period == 0 and (layer + 1) % step == 0 and layer not in dense
        for layer in range(layers)
    ]


def unread_key(config: Mapping[str, Any]) -> str:
    """Return a key of a config.json, with its value, that counts experts in some way and is not read; else ""."""
    for key, value in config.items():
        counts = value if isinstance(value, list) else [value]
        if _OF_EXPERTS.search(key) and key not in _KNOWN and any(as_whole(count) for count in counts):
            return f"{key}={shown(value)}"
    return ""
