"""The memory and time of towers that encode images: on the rank of a ring that encodes most of them.

A *unit* is an image, or whatever else a tower encodes by itself, such as a tile. One rank encodes it; its features go
to the ranks that hold their tokens. Tensors are counted for transformers' towers in 16 bits;
tests/planning/test_towers.py holds them to measured ones.
"""

from __future__ import annotations

from burst_plugin.planning.cluster import Cluster
from burst_plugin.training.mixers import BF16, FP32
from burst_plugin.training.setting import Setting
from burst_plugin.training.tower_families import Media

ENCODING, SENDING = "tower of images", "rows of features, sent"
TOWER = "tower, backward"
_BACKWARD = 2.5  # times the operations of a forward pass of attention


def busiest_units(media: Media, setting: Setting) -> int:
    """Return how many units, images or tiles, of a micro-batch are encoded by the rank that encodes the most."""
    return -(-media.units * setting.micro_batch // setting.context)


def imbalance(media: Media, setting: Setting) -> float:
    """Return the tower's work on the busiest rank over the mean of all ranks; 1 is even."""
    return busiest_units(media, setting) * setting.context / (media.units * setting.micro_batch)


def sent_rows_bytes(media: Media, setting: Setting) -> float:
    """Return the bytes of features that a rank sends to the holders of their tokens, on average, in one pass.

    Tokens are assumed to be anywhere: of n ranks, one n-th of the rows stays where it is.
    """
    rows = media.tokens * setting.micro_batch / setting.context
    return BF16 * rows * media.tower.width * (setting.context - 1) / setting.context


def pixel_bytes(media: Media, setting: Setting) -> float:
    """Return the bytes of a micro-batch's pixels, in float32; every rank has all of them."""
    return float(FP32 * media.units * media.patches * media.tower.pixels * setting.micro_batch)


def saved_by_layer(media: Media, units: int) -> float:
    """Return the bytes that one layer of the tower keeps of `units` units for its backward pass, input included."""
    tower = media.tower
    rows, wide = tower.kept
    return float(BF16 * units * (media.patches + tower.others) * (rows * tower.hidden + wide * tower.ffn))


def kept_by_layers(media: Media, setting: Setting) -> float:
    """Return the bytes that all layers of the tower keep for the backward pass, on the rank that encodes the most.

    Projectors of layers before the last are included. With full recomputation layers keep inputs only; 0 if frozen.
    """
    if media.frozen:
        return 0.0
    units, tower = busiest_units(media, setting), media.tower
    of_projectors = BF16 * units * media.rows * tower.row_kept[1]
    inputs = float(BF16 * units * (media.patches + tower.others) * tower.hidden)
    return of_projectors + tower.layers * (inputs if setting.recompute == "full" else saved_by_layer(media, units))


def kept_bytes(media: Media, setting: Setting) -> float:
    """Return the bytes that the tower and its projector keep while the language model runs, on the fullest rank."""
    of_projector = BF16 * busiest_units(media, setting) * media.rows * media.tower.row_kept[0]
    return kept_by_layers(media, setting) + (0.0 if media.frozen else of_projector)


def at_work(media: Media, setting: Setting) -> dict[str, float]:
    """Return the bytes of tensors in the backward pass of one layer of the tower, by name; {} if it is frozen.

    Tensors that layers keep (`kept_by_layers`) come on top.
    """
    if media.frozen:
        return {}
    units, tower = busiest_units(media, setting), media.tower
    row = float(BF16 * units * (media.patches + tower.others))
    moment = {
        "gradient of the layer's output": row * tower.hidden,
        "gradients inside the layer": row * max(2 * tower.ffn, 4 * tower.hidden),
    }
    if setting.recompute == "full":
        moment["layer, made again"] = saved_by_layer(media, units) + row * tower.hidden  # and its output
    return moment


def flops(media: Media) -> tuple[float, float]:
    """Return the forward FLOPs of one unit: (products with weights, attention within the unit)."""
    tower, patches = media.tower, media.patches
    tokens = patches + tower.others
    linear = tokens * tower.layers * tower.layer_weights + patches * tower.patch_weights
    seen = (tower.layers - tower.windowed) * tokens + tower.windowed * min(tower.window, tokens)
    return 2.0 * (linear + media.rows * tower.row_weights), 4.0 * tokens * tower.hidden * seen


def tower_seconds(media: Media, setting: Setting, cluster: Cluster) -> dict[str, float]:
    """Return the seconds of one micro-batch's images: {encoding on the busiest rank: s, sending features: s}.

    The keys are `ENCODING` and `SENDING`. Frozen towers have no backward pass, and nothing is sent back to them.
    """
    linear, attention = flops(media)
    again = setting.recompute == "full"
    linear_times, attention_times = (1.0, 1.0) if media.frozen else (3.0 + again, 1 + again + _BACKWARD)
    linear_s = linear_times * linear / (cluster.peak_flops * cluster.matmul_share)
    attention_s = attention_times * attention / (cluster.peak_flops * cluster.attention_share)
    rate = cluster.inter_bytes_per_s if setting.context > setting.inner else cluster.intra_bytes_per_s
    passes = 1 if media.frozen else 2
    return {
        ENCODING: busiest_units(media, setting) * (linear_s + attention_s),
        SENDING: passes * imbalance(media, setting) * sent_rows_bytes(media, setting) / rate,
    }
