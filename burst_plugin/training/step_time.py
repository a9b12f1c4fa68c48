"""The time of a training step, part by part: the time to compute, and the time of transfers that nothing hides.

Rates come from the `Cluster`. Attention and its ring are priced by simulating the schedule that would run
(`planning.price`); all else is operations or bytes over a rate, as the comments say.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from burst_plugin.compute.shapes import Shapes
from burst_plugin.planning.cluster import Cluster
from burst_plugin.planning.price import Price, pairs_in_window, pass_price, work_seconds
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Topology
from burst_plugin.training.latent_families import IndexerSizes
from burst_plugin.training.layer_memory import BF16, FP32, Widths, ring_shapes
from burst_plugin.training.model_shape import ModelShape
from burst_plugin.training.recurrent_time import MESSAGES, recurrent_seconds
from burst_plugin.training.setting import Setting, latents_sent
from burst_plugin.training.tower_costs import tower_seconds

_ATTENTION = ("attention, forward", "attention, forward again", "attention, backward")
_SCORES = "attention, scores of indexers"
_EXPANDED = "attention, keys and values made of latents on every rank"
_ADAM_BYTES = 28  # of host memory per parameter: reads weight, gradient and two moments, writes all but the gradient


def step_seconds(model: ModelShape, setting: Setting, cluster: Cluster) -> dict[str, float]:
    """Return the seconds of an optimizer step of `model` in `setting` on `cluster`, by the name of each part.

    Parts follow each other, so that the step takes their sum. A tower of images is at work before and after the
    language model, and hides nothing.
    """
    layers = model.layers / setting.pipeline
    linear_s = sum(_linear_layers(kind, setting, cluster) * kind.layers for kind in model.by_kind)
    scattered_s = sum(_tensor_parallel(kind, setting, cluster) * kind.layers for kind in model.by_kind)
    micro = {
        "linear layers": linear_s / setting.pipeline,
        "head and loss": _head(model, setting, cluster) / setting.pipeline,
        **(_attention(model, setting, cluster) if model.attends else {}),
        **_recurrent(model, setting, cluster),
        "tensor parallelism": scattered_s / setting.pipeline,
    }
    layer_s = sum(micro.values()) - micro["head and loss"]
    micro["offload, not hidden"] = max(0.0, _offload(model, setting, cluster) * layers - layer_s)
    hiding_s = layer_s - micro.get(MESSAGES, 0.0)  # which take the same links
    micro["weights gathered, not hidden"] = max(0.0, _gathered_weights(model, setting, cluster) - hiding_s)
    if model.media is not None:
        micro |= tower_seconds(model.media, setting, cluster)
    spent = {name: seconds * setting.microbatches for name, seconds in micro.items()}
    spent["pipeline bubble"] = (setting.pipeline - 1) * sum(micro.values())
    # Gradients are reduced behind the backward pass of the last micro-batch, about two thirds of its time.
    reduced_s = _data_parallel(model, setting, cluster) - sum(micro.values()) * 2 / 3
    spent["gradients and weights, not hidden"] = max(0.0, reduced_s)
    spent["optimizer"] = _optimizer(model, setting, cluster)
    return spent


def tokens_per_second(setting: Setting, seconds: float) -> float:
    """Return the tokens per second that each GPU trains if a step takes `seconds`."""
    return setting.batch * setting.tokens / seconds / setting.gpus


def bound_by(seconds: dict[str, float]) -> str:
    """Return text that names the part of a step that takes most time, and its share: "attention, 61 % of the time".

    `seconds` are the parts of `step_seconds`; parts of one kind, such as attention's passes, are added up.
    """
    groups = {
        "attention": ("attention",),
        "linear layers": ("linear", "head"),
        "recurrent layers": ("recurrent",),
        "the tower of images": ("tower", "rows"),
    }
    by_group = {
        group: sum(part_s for name, part_s in seconds.items() if name.startswith(prefixes))
        for group, prefixes in groups.items()
    }
    grouped = tuple(prefix for prefixes in groups.values() for prefix in prefixes)
    by_group |= {name: x for name, x in seconds.items() if not name.startswith(grouped)}
    most = max(by_group, key=by_group.__getitem__)
    return f"{most}, {100 * by_group[most] / sum(by_group.values()):.0f} % of the time"


def _attention(model: ModelShape, setting: Setting, cluster: Cluster) -> dict[str, float]:
    """Return the seconds of the attention of a stage's layers: of computing by pass, and of waiting for its data.

    Windows as long as the sequence are plain causal attention.
    """
    strategy = Strategy(ulysses_degree=setting.ulysses, parts=setting.parts, ranks_per_node=setting.inner)
    names = (*_ATTENTION, _EXPANDED, "ring and exchange of heads, not hidden")
    spent = dict.fromkeys(names, 0.0)
    of_kinds = [(kind, *part) for kind in model.attending for part in kind.layers_by_window]
    for kind, window, layers in of_kinds:
        shapes = ring_shapes(kind, replace(setting, ulysses=1))
        expansion_s = _expansion_seconds(kind, setting, cluster)
        within = window if window is not None and window < setting.tokens else None
        share = _selected_share(kind, setting)
        forward, backward = _priced(strategy, setting.topology, shapes, cluster, within, share, expansion_s)
        again = setting.again_share(within)
        expanded_s = [each * setting.ring_size for each in expansion_s]
        forward_s, backward_s = forward.compute_s - expanded_s[0], backward.compute_s - expanded_s[1]
        computed_s = forward_s, again * forward_s, backward_s, expanded_s[0] * (1 + (again > 0)) + expanded_s[1]
        waited_s = (forward.time_s - forward.compute_s) * (1 + again) + backward.time_s - backward.compute_s
        for name, seconds in zip(names, (*computed_s, max(0.0, waited_s)), strict=True):
            spent[name] += seconds * layers * setting.head_chunks / setting.pipeline
        if kind.indexer is not None and kind.indexer.scores:
            scores_s = _scores_seconds(kind.indexer, setting, cluster) * (1 + (again > 0))
            spent[_SCORES] = spent.get(_SCORES, 0.0) + scores_s * layers / setting.pipeline
    return spent if spent[_EXPANDED] else {name: seconds for name, seconds in spent.items() if name != _EXPANDED}


def _selected_share(model: ModelShape, setting: Setting) -> float:
    """Return the share of causal attention's pairs of queries and keys that is left where queries select keys."""
    if model.indexer is None:
        return 1.0
    return pairs_in_window(setting.tokens, model.indexer.top_k) / pairs_in_window(setting.tokens, setting.tokens)


def _scores_seconds(indexer: IndexerSizes, setting: Setting, cluster: Cluster) -> float:
    """Return the seconds of the scores of one layer's indexer, of every query on all keys up to it."""
    pairs = setting.micro_batch * pairs_in_window(setting.tokens, setting.tokens)
    flops = 2 * pairs * indexer.heads * indexer.dim / (setting.context * setting.tensor)
    return flops / (cluster.peak_flops * cluster.attention_share)


def _expansion_seconds(model: ModelShape, setting: Setting, cluster: Cluster) -> tuple[float, float]:
    """Return the seconds that a block's latents take to become keys and values, forward, and in the backward pass.

    In zigzag a tile with other ranks' tokens has half of its keys in every other step.
    """
    latent = latents_sent(model, setting)
    if latent is None:
        return 0.0, 0.0
    tokens = setting.micro_batch * setting.local_tokens
    once_s = (
        2 * latent.up_weights(model.heads) / setting.tensor * tokens / (cluster.peak_flops * cluster.matmul_share)
    )
    with_gradients = 1 - (setting.ring_size - 1) / (4 * setting.ring_size)
    return once_s, once_s * (1 + 2 * with_gradients)


def _recurrent(model: ModelShape, setting: Setting, cluster: Cluster) -> dict[str, float]:
    """Return the seconds of a stage's layers with a state, of kernels and of sending."""
    spent: dict[str, float] = {}
    for mixer, layers in model.mixers:
        for name, seconds in recurrent_seconds(mixer, setting, cluster).items():
            spent[name] = spent.get(name, 0.0) + seconds * layers / setting.pipeline
    return spent


@lru_cache(maxsize=4096)
def _priced(
    strategy: Strategy,
    topology: Topology,
    shapes: Shapes,
    cluster: Cluster,
    window: int | None,
    share: float,
    more_s: tuple[float, float],
) -> tuple[Price, Price]:
    """Return the prices of both passes of one layer's attention, of one chunk of its heads.

    share: the share of pairs of queries and keys that is computed, of those that the mask leaves.
    more_s: seconds that every ring step takes beside its kernel, forward and backward.
    """
    rate = cluster.peak_flops * cluster.attention_share
    of_kernels = work_seconds(shapes, rate, causal=window is None)
    forward_s, backward_s = (share * kernel_s + other_s for kernel_s, other_s in zip(of_kernels, more_s, strict=True))
    return (
        pass_price(strategy, "forward", topology, shapes, forward_s, cluster.links, window=window),
        pass_price(strategy, "backward", topology, shapes, backward_s, cluster.links, window=window),
    )


def _matmul_seconds(flops: float, setting: Setting, cluster: Cluster) -> float:
    """Return the time of work that tensor- and context-parallel ranks share."""
    share = setting.tensor * setting.context
    return flops / share / (cluster.peak_flops * cluster.matmul_share)


def _linear_layers(model: ModelShape, setting: Setting, cluster: Cluster) -> float:
    """Return the seconds of one layer: 2 operations per token and weight forward, 4 backward, 2 if run again."""
    full, chunked = setting.recompute == "full", setting.mlp_chunk > 0
    mlp_again = full + chunked + (setting.recompute == "mlp" and not chunked)
    if full and chunked and not setting.code.chunks_again:
        mlp_again = 1
    mlp = 2 * setting.tokens_at_once * model.active_mlp_parameters
    mixer = 0 if model.mixer is None else model.mixer.weights
    latent = latents_sent(model, setting) if model.attends else None
    on_ring = 0 if latent is None else latent.up_weights(model.heads)
    projections = 2 * setting.tokens_at_once * (model.attention_parameters - on_ring + mixer)
    of_chunks = 0.0
    if setting.head_chunks > 1 and model.attends:  # projected once more, but not back
        projected = 2 * setting.tokens_at_once * model.attention_parameters
        of_chunks = projected - 2 * setting.tokens_at_once * model.hidden * model.heads * model.value_dim
    return _matmul_seconds((3 + mlp_again) * mlp + (3 + full) * projections + of_chunks, setting, cluster)


def _head(model: ModelShape, setting: Setting, cluster: Cluster) -> float:
    """Return the seconds of the head, a linear layer too; its forward pass may run twice in chunks."""
    forward = 2 * setting.tokens_at_once * model.embedding_parameters
    return _matmul_seconds((3 + (setting.loss_chunk > 0 and setting.code.chunks_again)) * forward, setting, cluster)


def _tensor_parallel(model: ModelShape, setting: Setting, cluster: Cluster) -> float:
    """Return the seconds of a layer's gathers and scatters of hidden states.

    Of attention, or what mixes tokens in its place, they are 2 forward, 3 backward, and 2 more where it runs again;
    of an MLP as many, and 2 if it runs again by itself.
    """
    if setting.tensor == 1:
        return 0.0
    others = (setting.tensor - 1) / setting.tensor
    mlp_again = bool(model.ffn) and (setting.mlp_chunk > 0 or setting.recompute == "mlp")
    each_s = Widths(model, setting).gathered * others / cluster.intra_bytes_per_s
    parts = (model.attends or model.mixer is not None) + bool(model.ffn)
    return (parts * (5 + 2 * (setting.recompute == "full")) + 2 * mlp_again) * each_s


def _offload(model: ModelShape, setting: Setting, cluster: Cluster) -> float:
    """Return the seconds that a layer's input, and kept outputs of attention, take to the host and back."""
    if not setting.offload:
        return 0.0
    kept = sum(Widths(kind, setting).kept_attention * kind.layers for kind in model.attending) / model.layers
    kept *= setting.kept_share if setting.keep else 0.0
    return 2 * (Widths(model, setting).stream + kept) / cluster.pcie_bytes_per_s


def _bytes_per_s(setting: Setting, cluster: Cluster) -> float:
    """Return the rate at which data- and context-parallel ranks exchange gradients and weights."""
    return cluster.inter_bytes_per_s if setting.gpus > cluster.gpus_per_node else cluster.intra_bytes_per_s


def _gathered_weights(model: ModelShape, setting: Setting, cluster: Cluster) -> float:
    """Return the seconds per micro-batch to gather sharded weights twice, and scatter gradients, all in 16 bits."""
    if setting.zero != 3:
        return 0.0
    ranks = setting.context * setting.data
    return (
        BF16
        * (2 * model.parameters + model.trained_parameters)
        * (ranks - 1)
        / ranks
        / _bytes_per_s(setting, cluster)
    )


def _data_parallel(model: ModelShape, setting: Setting, cluster: Cluster) -> float:
    """Return the seconds per step to reduce and scatter gradients in float32, and gather weights in bf16.

    For sharded weights see `_gathered_weights`.
    """
    if setting.zero == 3:
        return 0.0
    ranks = setting.context * setting.data
    own = model.trained_parameters / (setting.tensor * setting.pipeline)
    return own * (FP32 + BF16) * (ranks - 1) / ranks / _bytes_per_s(setting, cluster)


def _optimizer(model: ModelShape, setting: Setting, cluster: Cluster) -> float:
    """Return the seconds of a step on the host.

    Gradients come and weights go over PCIe; Adam runs at the rate of the host's memory.
    """
    if not setting.offload_optimizer:
        return 0.0
    own_parameters = model.trained_parameters / setting.gpus  # all are cut over all GPUs, one way or another
    on_host = own_parameters * _ADAM_BYTES * min(cluster.gpus_per_node, setting.gpus) / cluster.host_bytes_per_s
    return on_host + own_parameters * (FP32 + BF16) / cluster.pcie_bytes_per_s
