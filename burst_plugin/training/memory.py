"""The memory of a training run, part by part: of the fullest GPU, and of a node's host.

    report = memory(MODELS["llama3_8b"], setting, cluster)
    report.gpu["weights"], report.gpu_bytes, report.fullest            # bytes, bytes, "attention, backward"

Permanent tensors (weights, gradients, optimizer, ring buffers), tensors that wait for the backward pass (inputs of
layers, outputs of attention), and the fullest moment of one layer or the head at work (`layer_memory`) add up to the
peak: when the backward pass begins, all waiting tensors are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

from burst_plugin.activations.pages import whole_pages
from burst_plugin.comm.process_groups import peer_bytes
from burst_plugin.compute.shapes import Shapes, hop_bytes_by_traffic
from burst_plugin.planning.buffer_count import as_many_buffers, most_bytes
from burst_plugin.planning.cluster import Cluster
from burst_plugin.ring.choices import choose_moving_side
from burst_plugin.ring.routes import Attending, PassKey, RouteTable
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.masks import Full, Mask, SlidingWindow
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Link, Topology, Traffic
from burst_plugin.training.layer_memory import (
    BF16,
    FP32,
    HEAD,
    Moment,
    Widths,
    chunk_of_heads,
    moments,
    norm_copies,
    ring_shapes,
    saved_by_layer,
)
from burst_plugin.training.model_shape import ModelShape
from burst_plugin.training.setting import Setting
from burst_plugin.training.tower_costs import TOWER, at_work, kept_by_layers, kept_bytes, pixel_bytes
from burst_plugin.types import DIRECTIONS

GIB = 2**30
NCCL, MARGIN = "NCCL's buffers", "left for CUDA, NCCL and the allocator"  # names of parts
_STRATEGY = Strategy()
_ROWS = 256  # of a block, enough to tell a window's share of it
BUCKET = 50_000_000  # parameters of a bucket in which gradients are reduced, where weights are sharded


def surely_too_large(model: ModelShape, setting: Setting, cluster: Cluster) -> bool:
    """Return whether a setting's weights, optimizer and saved tensors alone exceed the memory of a GPU or a host.

    It is a quick test, and leaves out the tensors at work, ring buffers and others: `memory` counts all.
    """
    if sum(_host(model, setting, cluster).values()) > cluster.host_gib * GIB:
        return True
    waits = (0.0 if setting.offload else sum(_kept(model, setting))) + sum(_of_tower(model, setting).values())
    states = sum(_states(model, setting).values())
    return states + waits + cluster.margin_gib * GIB > cluster.gpu_gib * GIB


@dataclass(frozen=True)
class TrainingMemory:
    """The memory of a training run: bytes by part, on the fullest GPU and on the host of a node.

    fullest: the name of the moment with the most memory at work, such as "attention, backward". at_work: its tensors.

    The last part of `gpu` is the margin that is left free.
    """

    gpu: Moment
    host: Moment
    fullest: str
    at_work: Moment

    @property
    def gpu_bytes(self) -> float:
        """Return the bytes of the fullest GPU: of all parts together, its margin included."""
        return sum(self.gpu.values())

    @property
    def host_bytes(self) -> float:
        """Return the bytes of the host of a node: of all parts together."""
        return sum(self.host.values())


def memory(model: ModelShape, setting: Setting, cluster: Cluster) -> TrainingMemory:
    """Return the memory that training `model` in `setting` takes on a GPU and a host of `cluster`.

    It may be more than they have: see `training_plan.fits`.
    """
    at = moments(model, setting)
    gathered = {name: _gathered_weights(model, setting, name == HEAD) for name in at}
    fullest = max(at, key=lambda name: sum(at[name].values()) + gathered[name])
    hidden, attention = _kept(model, setting)
    gpu = _states(model, setting)
    if setting.zero == 3:
        gpu["weights at work, gradients in buckets"] = gathered[fullest]
    gpu["inputs of layers"] = 0.0 if setting.offload else hidden
    gpu["attention, kept"] = 0.0 if setting.offload else attention
    if model.input_width:
        gpu["embeddings of layers"] = _inputs_of_layers(model, setting)
    shared = _shared_states(model, setting)
    if shared:
        gpu["keys and values that layers share"] = shared
    gpu |= _of_tower(model, setting)
    gpu |= _ring_buffers(model, setting)
    if setting.ulysses > 1:
        gpu["buffers for exchanging heads"] = _exchange_buffers(model, setting)
    gpu[NCCL] = _nccl_bytes(setting)
    gpu["at work"] = sum(at[fullest].values())
    if model.media is not None:  # whose tower comes last, when no tensor of the language model waits any more
        tower = at_work(model.media, setting)
        waiting = gpu["inputs of layers"] + gpu["attention, kept"]
        if sum(tower.values()) > waiting + gpu["at work"]:
            fullest, at = TOWER, {TOWER: tower}
            gpu |= {"inputs of layers": 0.0, "attention, kept": 0.0, "at work": sum(tower.values())}
            gpu["tower, kept"] = kept_by_layers(model.media, setting)
    gpu[MARGIN] = cluster.margin_gib * GIB
    host = _host(model, setting, cluster)
    return TrainingMemory(gpu, host, fullest, at[fullest])


def _of_tower(model: ModelShape, setting: Setting) -> Moment:
    """Return the bytes of pixels, and of what the tower of images keeps on the rank that encodes most."""
    if model.media is None:
        return {}
    return {
        "pixels of all images": pixel_bytes(model.media, setting),
        "tower, kept": kept_bytes(model.media, setting),
    }


def _states(model: ModelShape, setting: Setting) -> Moment:
    """Return bytes of weights in bf16, of gradients and the optimizer's weights and two moments in float32."""
    parameters, trained = (_of_first_stage(x, model, setting) for x in (model.parameters, model.trained_parameters))
    ranks, is_sharded = setting.context * setting.data, setting.zero == 3
    states = {"weights": BF16 * (parameters / ranks if is_sharded else parameters)}
    gradients = FP32 * (trained / ranks if is_sharded else trained)
    on_host = setting.offload_optimizer
    states["gradients"] = 0.0 if on_host and is_sharded else gradients  # sharded ones follow the optimizer
    states["optimizer"] = 0.0 if on_host else 3 * FP32 * trained / ranks
    return states


def _of_first_stage(total: int, model: ModelShape, setting: Setting) -> float:
    """Return how many of `total` parameters a rank of the first pipeline stage has: layers, embedding, a tower."""
    in_layers = sum(kind.layers * kind.layer_parameters for kind in model.by_kind)
    head = 0 if model.tied or setting.pipeline == 1 else model.embedding_parameters
    return (total - in_layers - head + in_layers / setting.pipeline) / setting.tensor


def _gathered_weights(model: ModelShape, setting: Setting, of_head: bool) -> float:
    """Return the bytes of sharded weights gathered for a layer or the head, and of gradients on their way.

    A bucket of the next weights is gathered as well.
    """
    if setting.zero != 3:
        return 0.0
    return 2 * BF16 * ((model.embedding_parameters if of_head else model.layer_parameters) + BUCKET)


def _kept(model: ModelShape, setting: Setting) -> tuple[float, float]:
    """Return the bytes that a rank keeps: (inputs of layers, other tensors: attention's results, or all)."""
    both = [_kept_by_kind(kind, setting) for kind in model.by_kind]
    return sum(inputs for inputs, _ in both), sum(others for _, others in both)


def _inputs_of_layers(model: ModelShape, setting: Setting) -> float:
    """Return the bytes of the layers' own embeddings, of the norm of these, and of gradients."""
    numbers = Widths(model, setting).outside * model.layers * model.input_width
    of_norm = norm_copies(model) if setting.copying_norms else 1
    return BF16 * numbers * (2 + of_norm)  # the inputs that layers take, and their gradients


def _shared_states(model: ModelShape, setting: Setting) -> float:
    """Return the bytes of keys and values that layers of each kind leave to others.

    Where nothing is computed again they count as saved. Where the last layers leave theirs, the tensors that they are
    made of stay as well, from the backward pass of these layers on; where the last layers take keys and values of
    others, few inputs of layers are left by then.
    """
    if setting.recompute == "none":
        return 0.0
    kept, are_taken = 0.0, any(not kind.kv_matrices for kind in model.attending)
    for kind in model.attending:
        if kind.hands_on:
            saved, kv = saved_by_layer(kind, setting, whole_mlp=False), Widths(kind, setting).kv
            made_of = () if are_taken else ("normalized input", "norm before attention, copies")
            kept += kv + sum(nbytes for name, nbytes in saved.items() if name in made_of)
            if not are_taken:
                kept += kv * (norm_copies(kind) if setting.copying_norms else 1)
    return kept


def _kept_by_kind(model: ModelShape, setting: Setting) -> tuple[float, float]:
    w = Widths(model, setting)
    layers = _layers_that_wait(model, setting)
    if setting.recompute == "full":
        kept = w.kept_attention * setting.kept_share if setting.keep and model.attends else 0.0
        return layers * w.stream, layers * kept
    saved = saved_by_layer(model, setting, whole_mlp=setting.recompute == "none" and not setting.mlp_chunk)
    if setting.recompute == "mlp":  # its norm is computed again as well
        saved = {name: nbytes for name, nbytes in saved.items() if name != "normalized input of the MLP"}
    inputs = 0.0 if setting.copying_norms else layers * w.stream  # of which norms keep copies instead
    return inputs, layers * sum(saved.values())


def _layers_that_wait(model: ModelShape, setting: Setting) -> float:
    """Return the layers of a rank, times as many sequences as the first stage of a pipeline works on at once."""
    return model.layers / setting.pipeline * min(setting.pipeline, setting.microbatches)


def _host(model: ModelShape, setting: Setting, cluster: Cluster) -> Moment:
    own_parameters = model.trained_parameters / setting.gpus
    gpus = min(cluster.gpus_per_node, setting.gpus)
    host = {"processes": cluster.process_gib * GIB * gpus}
    if setting.offload:
        stream = Widths(model, setting).stream
        host["inputs of layers"] = whole_pages(stream) * _layers_that_wait(model, setting) * gpus
        if setting.keep:
            share, kept = setting.kept_share / setting.head_chunks, 0.0
            for kind in model.attending:
                w, times = Widths(kind, setting), _layers_that_wait(kind, setting) * gpus * setting.head_chunks
                kept += (whole_pages(share * w.out) + whole_pages(share * w.lse)) * times
            host["attention, kept"] = kept
    if setting.offload_optimizer:  # gradients too, in float32
        host["optimizer and gradients"] = 4 * FP32 * own_parameters * gpus
    return host


def _exchange_buffers(model: ModelShape, setting: Setting) -> float:
    """Return the bytes of messages to and from the others of a Ulysses group: at most q, k and v, or gradients."""
    degree, most = setting.ulysses, 0.0
    for kind in model.attending:
        of_heads, _ = chunk_of_heads(kind, setting)
        w = Widths(of_heads, setting)
        # Where several ranks have a key head, their dk and dv are added up, in float32.
        wide = FP32 / BF16 if of_heads.kv_heads / setting.tensor < degree else 1.0
        most = max(most, w.q + w.kv_inside * wide)
    return 2 * (degree - 1) / degree * most


def _nccl_bytes(setting: Setting) -> float:
    """Return NCCL's memory for peers that messages come from: of the ring, and all others of a Ulysses group."""
    ring, links = setting.topology.of_ulysses_groups(setting.ulysses), []
    if ring.ranks_per_node > 1:
        links.append(Link.INTRA)
    if ring.nodes > 1:
        links.append(Link.INTER)
    exchange = Link.INTRA if setting.ulysses <= setting.inner else Link.INTER
    of_ring = len(Traffic) * sum(peer_bytes(_STRATEGY.max_ctas, link) for link in links)
    return of_ring + (setting.ulysses - 1) * peer_bytes(0, exchange)


def _ring_buffers(model: ModelShape, setting: Setting) -> Moment:
    """Return the bytes of the ring's communication buffers, which both passes and all layers share.

    Layers with a window are sent few rows, and count only where there are no others of their kind.
    """
    return {"ring buffers": max(_buffers_of(kind, setting) for kind in model.attending)} if model.attends else {}


def _buffers_of(model: ModelShape, setting: Setting) -> float:
    """Return the bytes of ring buffers for one kind of layers."""
    shapes = ring_shapes(model, setting)
    ring, token = setting.topology.of_ulysses_groups(setting.ulysses), shapes._replace(q_len=1, kv_len=1)
    count = partial(_bytes_per_row, ring, token, setting.parts)
    if model.windowed == model.attention_layers and model.window < setting.tokens:
        rows = min(shapes.q_len, _ROWS)
        window = -(-model.window * rows // shapes.q_len)  # the window's share of a block, in rows
        return count(SlidingWindow(window - 1, 0), rows) * shapes.q_len
    return count(Full(), 2) * shapes.q_len


@lru_cache(maxsize=4096)
def _bytes_per_row(topology: Topology, shapes: Shapes, parts: int, mask: Mask, rows: int) -> float:
    """Return the most bytes of buffers of any rank, by row: `shapes` have one; under `mask` a block has `rows`."""
    if topology.ranks == 1:
        return 0.0
    small = as_many_buffers(topology)
    strategy, tokens = Strategy(parts=parts), Tokens(rows * small.ranks)
    table = RouteTable(small, strategy)
    needed = []
    for direction in DIRECTIONS:
        moving = choose_moving_side(strategy, direction, shapes)
        operands, results = hop_bytes_by_traffic(shapes, direction, moving)
        schedule = table.schedule(PassKey(Attending(tokens, tokens, mask), moving, results > 0, parts))
        needed.append(most_bytes(schedule, operands / parts, results / parts))
    return max(needed)
