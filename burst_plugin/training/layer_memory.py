"""The memory of a rank's tensors while one layer, or the head, is at work: at each moment that may be the fullest.

A moment is a table from names of tensors to bytes, without the tensors that exist all the time. With

    row     [tokens, hidden] in 16 bits, outside attention: cut by context and tensor parallelism
    q, kv   [tokens, heads, head_dim] of queries, or of keys and values together, in 16 bits, inside attention
    out     [tokens, heads, value_dim] in 16 bits, as large as q but for latent attention

a layer's backward pass needs tensors that its forward pass saved. Each is there until the part of the backward pass
that reads it is over, so that moments are named by these parts, such as "MLP, backward".
tests/planning/test_memory.py compares peaks with measured ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from burst_plugin.compute.accumulators import LARGEST_WAITING
from burst_plugin.compute.shapes import Shapes
from burst_plugin.ring.choices import choose_moving_side
from burst_plugin.strategy import Strategy
from burst_plugin.training.latent_families import IndexerSizes, LatentSizes
from burst_plugin.training.mixers import TokenMixer
from burst_plugin.training.model_shape import ModelShape
from burst_plugin.training.setting import Setting, latents_sent

BF16, FP32 = 2, 4
HEAD = "head and loss"
_OWN_INPUT = "embedding of the layer, gated"
_OF_MLP = ("inside the MLP", "normalized input of the MLP", "norm after the MLP", _OWN_INPUT)
_LISTED = 4  # bytes of a selected key's position
_PIECES = 2  # of a sequence on a rank, in zigzag
_ROTATED = "rotated back, or gradients of the projections' input"
_GRADIENTS = "dq, dk and dv"
_STRATEGY = Strategy()
Moment = dict[str, float]


class Widths:
    """The bytes of one rank's tensors in one layer of `model` in `setting`, for one micro-batch.

    tokens, outside, inside: how many tokens the rank has in attention, in other parts of the layer, and, as if with
        all heads, in a mixer.
    row, stream, gathered: [tokens, hidden] outside attention, between layers, and gathered from tensor-parallel
        ranks.
    q, kv, kv_inside, out, lse: of attention; `kv_inside` after an exchange of heads.
    mlp: one tensor [tokens, ffn]. routed: the tokens that go to experts, once for each. weighted: their results,
        times routing weights.
    """

    def __init__(self, model: ModelShape, setting: Setting) -> None:
        tokens, tensor = setting.micro_batch * setting.local_tokens, setting.tensor
        self.tokens = tokens  # of a micro-batch
        self.outside = tokens / tensor  # tokens outside attention, which tensor-parallel ranks share
        self.row = BF16 * model.hidden * self.outside
        self.stream = self.row * (2 if model.wide_stream else 1)  # hidden states between layers
        self.gathered = BF16 * model.hidden * tokens if tensor > 1 else 0.0  # a row of all tensor-parallel ranks
        self.q = BF16 * model.heads / tensor * model.head_dim * tokens
        self.out = BF16 * model.heads / tensor * model.value_dim * tokens
        of_key_head = BF16 * (model.head_dim + model.value_dim) * tokens
        self.kv = max(1.0, model.kv_heads / tensor) * of_key_head
        heads_of_group = max(setting.ulysses, model.kv_heads / tensor)  # several ranks may need the same key heads
        self.kv_inside = heads_of_group * of_key_head  # where heads are exchanged
        self.lse = FP32 * model.heads / tensor * tokens
        self.mlp = BF16 * model.mlp_width / tensor * tokens  # one tensor [tokens, ffn]
        self.inside = tokens / tensor  # tokens of a mixer, as if it had them with all its heads
        self.routed = BF16 * model.hidden * model.active * self.outside  # tokens, once for each expert that sees them
        self.weighted = self.routed * (1 if model.routed_in_16_bits else FP32 / BF16)

    @property
    def kept_attention(self) -> float:
        """Return the bytes of one layer's outputs of attention, out and lse."""
        return self.out + self.lse


def chunk_of_heads(model: ModelShape, setting: Setting) -> tuple[ModelShape, Setting]:
    """Return (a model with the heads of one chunk only, a setting like `setting` with `head_chunks=1`)."""
    chunks = setting.head_chunks
    if chunks == 1:
        return model, setting
    of_heads = replace(model, heads=model.heads // chunks, kv_heads=model.kv_heads // chunks)
    return of_heads, replace(setting, head_chunks=1)


def ring_shapes(model: ModelShape, setting: Setting) -> Shapes:
    """Return the shapes of one rank's block on the ring, after an exchange of heads, for one chunk of heads."""
    model, setting = chunk_of_heads(model, setting)
    tokens, tensor, degree = setting.local_tokens, setting.tensor, setting.ulysses
    heads, kv_heads = model.heads // tensor, max(1, model.kv_heads // tensor)
    latent, dims = latents_sent(model, setting), (model.head_dim, model.value_dim)
    sent = None if latent is None else latent.sent
    shapes = Shapes(setting.micro_batch, tokens, tokens, heads, kv_heads, *dims, torch.bfloat16, sent)
    return shapes.of_ulysses_group(degree)._replace(q_len=degree * tokens, kv_len=degree * tokens)


def saved_by_layer(model: ModelShape, setting: Setting, whole_mlp: bool) -> Moment:
    """Return the bytes of tensors that a layer's forward pass saves for its backward pass, beside the layer's input.

    whole_mlp: whether tensors inside the MLP are saved as well, since it is neither in chunks nor computed again.
    """
    w, plain = Widths(model, setting), setting.copying_norms
    of_norm = w.row * (norm_copies(model) if plain else 1)  # with one kernel a norm saves its input
    before, after = model.norms != "after", model.norms != "before"
    mixes = model.attends or model.mixer is not None
    saved: Moment = {}
    if mixes:
        saved["normalized input"] = w.row if before or plain else 0.0  # else the layer's input
        if plain and before:
            saved["norm before attention, copies"] = of_norm
        if after:
            saved["norm after attention"] = of_norm
    if model.attends:
        saved |= _saved_by_attention(model, setting, w)
    if model.mixer is not None:
        saved |= _saved_by_mixer(model.mixer, setting, w)
    if not model.ffn:
        return saved
    saved["normalized input of the MLP"] = w.row
    if before:  # with one kernel, or in chunks, a norm saves the sum of the layer's input and attention
        saved["norm before the MLP"] = of_norm if plain else w.row * mixes
    if after:
        saved["norm after the MLP"] = of_norm
    if whole_mlp:
        saved["inside the MLP"] = w.mlp * _mlp_kept(model, setting) + 2 * w.routed
        if model.mlp_norms:  # and their results, or only what goes to the experts
            saved["inside the MLP"] += model.mlp_norms * of_norm + w.row * (model.mlp_norms if plain else 1)
    if model.input_width:  # its gate before and after the activation, their product, and a norm
        saved[_OWN_INPUT] = w.row + 3 * BF16 * model.input_width * w.outside + of_norm
    return saved


def _mlp_kept(model: ModelShape, setting: Setting) -> int:
    """Return how many tensors as wide as the MLP it keeps: without a gate, neither the gate nor the product."""
    is_plain = setting.code.mlp_kept > 3
    more = model.activation_kept if is_plain else 0
    return setting.code.mlp_kept + more - (2 if is_plain else 1) * (model.matrices == 2)


def _saved_by_attention(model: ModelShape, setting: Setting, w: Widths) -> Moment:
    saved = _saved_of_heads(model, setting, w) if setting.head_chunks == 1 else {}
    saved["out and lse"] = w.kept_attention
    if setting.ulysses > 1 or setting.head_chunks > 1:
        saved["out before heads are exchanged"] = w.out
    if model.indexer is not None:
        saved["selected keys"] = _LISTED * w.tokens * min(model.indexer.top_k, setting.tokens)
    if model.query_gate:  # its sigmoid and the product; one kernel's norm keeps both halves of what is projected
        saved["gate of queries"] = w.q * (2 if setting.copying_norms else 3)
    return saved


def _saved_by_mixer(mixer: TokenMixer, setting: Setting, w: Widths) -> Moment:
    of_norm = mixer.of_norm[setting.code.plain_mixers]
    saved = {"inside the mixer": w.inside * mixer.saved, "norm and gate of the mixer": w.inside * of_norm}
    if setting.context > 1 and setting.recurrent == "state":
        spans = 2 * setting.micro_batch * _PIECES  # of the tree over pieces, single pieces included
        states = FP32 * (mixer.transition + mixer.state) / setting.tensor * spans
        saved["states of pieces"] = w.inside * mixer.saved_on_ring + states
    return {name: nbytes for name, nbytes in saved.items() if nbytes}


def _saved_of_heads(model: ModelShape, setting: Setting, w: Widths) -> Moment:
    """Return the bytes saved for all heads, or for a chunk's heads, from the projections on."""
    saved = {"q": w.q, "k and v": w.kv_inside if model.kv_matrices else 0.0}
    latent = latents_sent(model, setting)
    if model.latent is not None:
        saved["latents, and before their norms"] = _saved_of_latents(model.latent, model, setting, w)
    if latent is not None:
        del saved["k and v"]
        if setting.code.sums_weights:  # of which a layer makes a copy outside its module
            saved["weight of the up-projection"] = BF16 * latent.up_weights(model.heads) / setting.tensor
    if model.qk_norm:  # before and after the norm, or with copies
        own = w.kv / 2 * (1 + model.value_norm) if model.kv_matrices else 0.0
        saved["norms of q and k"] = (w.q + own) * (norm_copies(model) if setting.copying_norms else 1)
    return saved


def _saved_of_latents(latent: LatentSizes, model: ModelShape, setting: Setting, w: Widths) -> float:
    """Return the bytes saved for latents of queries, keys and values: before and after norms, or with copies."""
    normalized = latent.q_rank + latent.rank
    before = norm_copies(model) * normalized if setting.copying_norms else normalized + latent.shared_dim
    return BF16 * w.outside * (before + normalized + latent.shared_dim)


def norm_copies(model: ModelShape) -> int:
    """Return the copies that a norm keeps, in 16 bits: x in float32, and its product with 1 / rms."""
    return 2 + (2 if model.wide_norms else 1)


def moments(model: ModelShape, setting: Setting) -> dict[str, Moment]:
    """Return the moments of a rank at which memory may be fullest, each as bytes by tensor, by name.

    Names are "head and loss", and parts of a layer's passes, such as "attention, backward". Where layers are not
    alike, each moment is taken from the kind of layer that needs most for it. Kept activations, weights and ring
    buffers come on top.
    """
    peaks: dict[str, Moment] = {HEAD: _head(model, setting, Widths(model, setting))}
    for kind in model.by_kind:
        for name, moment in _of_layer(kind, setting).items():
            if sum(moment.values()) > sum(peaks.get(name, {}).values()):
                peaks[name] = moment
    if not model.attends:
        return peaks
    rotated = {kind.head_dim if kind.latent is None else kind.latent.shared_dim for kind in model.attending}
    angles = 2 * BF16 * sum(rotated) * setting.local_tokens  # once for all sequences
    return {name: moment | {"cos and sin of positions": angles} for name, moment in peaks.items()}


def _of_layer(model: ModelShape, setting: Setting) -> dict[str, Moment]:
    """Return the moments of a layer by name."""
    w = Widths(model, setting)
    of_heads, heads = chunk_of_heads(model, setting)
    saved, freed = saved_by_layer(model, setting, whole_mlp=not setting.mlp_chunk), 0.0
    if setting.recompute == "none":
        freed = sum(saved.values()) - sum(_before_mlp(saved).values())
        saved = {}  # which counts as kept already
    elif setting.recompute == "mlp":
        saved = {name: nbytes for name, nbytes in saved.items() if name == "inside the MLP"}
    if setting.offload:
        saved["inputs of layers, back from the host"] = w.stream + _next_from_host(model, setting)
    by_name = {}
    if model.ffn:
        by_name["MLP, backward"] = (
            _without(saved, ("norm after the MLP", _OWN_INPUT))
            | {"gradient of the layer's output": w.stream}
            | _mlp_backward(model, setting, w)
        )
    before, past = _before_mlp(saved), {"gradient past the MLP": w.stream}
    if model.attends:
        by_name["attention, backward"] = before | past | _attention_backward(of_heads, heads)
        by_name["projections, backward"] = (
            _without(before, ("q", "k and v", "out and lse")) | past | _projections_backward(of_heads, heads)
        )
        if setting.recompute != "full" and setting.head_chunks == 1:  # in place of q, k and v, which count as kept
            by_name["projections, backward"][_GRADIENTS] = 0.0
    if model.mixer is not None:
        by_name |= _mixer_backward(model.mixer, setting, w, before | past, freed)
    if setting.code.plain_norms:
        by_name["norm, backward"] = (
            (_without(saved, _OF_MLP) if model.norms == "before" else saved)  # the last norm is first
            | {"gradient of the layer's output": w.stream}
            | _norm_backward(setting, w)
        )
    if model.attends and (setting.again_share() or setting.recompute == "none"):
        by_name["attention, forward"] = _attention_forward(of_heads, heads)
        if model.indexer is not None and model.indexer.scores:
            by_name["indexer, forward"] = _indexer_forward(model.indexer, model, setting, before | past)
    if model.attends and setting.head_chunks > 1:
        _add_what_chunks_share(by_name, model, setting)
    return by_name


def _mixer_backward(
    mixer: TokenMixer, setting: Setting, w: Widths, before: Moment, freed: float
) -> dict[str, Moment]:
    """Return the moments of a mixer's backward pass, each with the tensors in `before` besides.

    freed: bytes that the MLP has freed by then, and that count as kept.
    """
    work = {"gradients inside the mixer": max(0.0, w.inside * mixer.gradients - freed)}
    if setting.code.workspace:  # of GPUs
        work["workspace of the mixer's kernel"] = w.inside * mixer.workspace
    if setting.context > 1 and setting.recurrent == "heads":  # which leave and arrive
        work["heads of the mixer, exchanged"] = 2 * w.inside * mixer.exchanged
    backward_moments = {"mixer, backward": before | work}
    if setting.code.plain_mixers and mixer.norm_gradients:
        inside = {"gradients inside the mixer's norm": max(0.0, w.inside * mixer.norm_gradients - freed)}
        backward_moments["norm of the mixer, backward"] = before | inside
    return backward_moments


def _add_what_chunks_share(by_name: dict[str, Moment], model: ModelShape, setting: Setting) -> None:
    """Add to the moments of one chunk the tensors of all heads, and the tensors that the chunk computes again."""
    w, (of_heads, heads) = Widths(model, setting), chunk_of_heads(model, setting)
    gradients = {"gradient of out of all heads": w.out, "gradient of the projections' input": FP32 / BF16 * w.row}
    again = _saved_of_heads(of_heads, heads, Widths(of_heads, heads))
    by_name["attention, backward"] |= again | gradients | {"gradient of out": 0.0}  # a part of that of all
    by_name["projections, backward"] |= gradients | {name: x for name, x in again.items() if name.startswith("norms")}
    by_name["projections, backward"][_ROTATED] = 2 * Widths(of_heads, heads).q
    if setting.recompute == "full":
        by_name["projections, backward"]["out and lse"] = w.kept_attention
    if "attention, forward" in by_name:
        by_name["attention, forward"] |= {"out and lse of all heads": w.kept_attention, "out of all heads": w.out}


def _next_from_host(model: ModelShape, setting: Setting) -> float:
    """Return the bytes that come back while a layer is at work: the last tensors that the layer before has parked."""
    w = Widths(*chunk_of_heads(model, setting))
    return setting.kept_share * w.out if setting.keep else w.stream


def _before_mlp(saved: Moment) -> Moment:
    past = ("norm before the MLP", "norm after attention", "out before heads are exchanged")
    return _without(saved, (*_OF_MLP, *past))


def _without(saved: Moment, names: tuple[str, ...]) -> Moment:
    return {name: nbytes for name, nbytes in saved.items() if name not in names}


def _chunk_share(setting: Setting, w: Widths) -> float:
    return min(1.0, setting.mlp_chunk / w.tokens) if setting.mlp_chunk else 1.0


def _norm_backward(setting: Setting, w: Widths) -> Moment:
    """Return the tensors of a norm's backward pass in single operations, besides saved ones: all, or a chunk's."""
    if setting.copying_norms:
        # In float32 d(x / rms), its products with x and 1 / rms, d(x * x) and their sum, while a copy of x is gone
        return {"gradients inside the norm": w.row * (5 * 2 - 1)}
    # In float32 these, x, the result and the gradient of x / rms times weights; in 16 bits x / rms
    return {
        "gradients of the norm's output and input": 2 * w.row,
        "gradients inside the norm": w.row * (8 * 2 + 1) * _chunk_share(setting, w),
    }


def _mlp_backward(model: ModelShape, setting: Setting, w: Widths) -> Moment:
    """Return the tensors of the MLP's backward pass, besides saved ones: all, or a chunk's, computed again."""
    share = _chunk_share(setting, w)
    # Of d(product), d(act(gate)) and d(up) two, the third in place of the product; later two gradients of the input
    inside = 2 * w.mlp if setting.mlp_chunk else max(2 * w.mlp, 2 * w.row)
    if model.plain_activation and setting.code.mlp_kept > 3:
        inside += w.mlp
    if model.experts and setting.code.weighs_results:
        inside = max(inside, _experts_backward(model, setting, w))
    if setting.mlp_chunk:
        inside += _mlp_kept(model, setting) * w.mlp + 2 * (w.gathered or w.row) + 2 * w.routed
    moment = {"gradients inside the MLP": inside * share}
    if setting.mlp_chunk:
        moment["gradient of the MLP's input"] = w.row
    if w.gathered and not setting.mlp_chunk:  # the input, gathered again, and its gradient before it is scattered
        moment["gathered over tensor parallelism"] = 2 * w.gathered
    if setting.code.sums_weights:
        weights = model.mlp_parameters / setting.tensor
        moment["gradients of the MLP's weights"] = weights * (FP32 + BF16) if setting.mlp_chunk else 0.0
    return moment


def _experts_backward(model: ModelShape, setting: Setting, w: Widths) -> float:
    """Return the most bytes of gradients inside experts whose results are multiplied by routing weights.

    Tensors that the forward pass has saved and the backward pass has freed by then are subtracted.
    """
    weights = 0.0
    if setting.zero != 3 and setting.code.sums_weights:  # sharded, gradients of all weights of a layer count already
        weights = BF16 * model.experts * model.hidden * model.ffn / setting.tensor  # gradients of one projection
    of_product = 3 * w.weighted  # of the product, in two orders of tokens, and what routing weights' sum up
    of_down = w.mlp + weights  # and of results of experts, in place of the results
    of_up = (model.matrices - 1) * (w.mlp + weights) - _mlp_kept(model, setting) * w.mlp  # and of tokens
    return max(of_product, of_down, of_up)


def _waiting(setting: Setting, side: float) -> int:
    """Return how many results of tiles wait for others: large ones are added up at once."""
    return setting.code.waiting if side / setting.parts <= LARGEST_WAITING else 1


def _all_wait(setting: Setting, side: float) -> bool:
    """Return whether all results of tiles wait until the end, when they are added up in 16 bits."""
    return setting.parts == 1 and 1 < setting.ring_size <= _waiting(setting, side)


def _results(setting: Setting, side: float) -> float:
    """Return the bytes of results of the side that stays, `side` for each tile: a new one, waiting ones, their sum.

    Up to `waiting` results wait in 16 bits to be added up together. Their sum is in float32.
    """
    steps, waiting = setting.ring_size, _waiting(setting, side)
    if steps == 1:
        return side
    if waiting == 1:
        return side * (1 + 2)
    if _all_wait(setting, side):
        return side * steps
    new = 1 / setting.parts if steps > waiting else 0.0
    return side * (min(steps, waiting) + new + 2)


def _attention_backward(model: ModelShape, setting: Setting) -> Moment:
    """Return tensors of attention's backward pass, besides q, k, v, out and lse."""
    w = Widths(model, setting)
    latent = latents_sent(model, setting)
    if latent is not None:
        return _latents_backward(latent, model, setting, w)
    moving = choose_moving_side(_STRATEGY, "backward", ring_shapes(model, setting))
    stays, moves = (w.q, w.kv_inside) if moving == "kv" else (w.kv_inside, w.q)
    stay, move = ("dq", "dk and dv") if moving == "kv" else ("dk and dv", "dq")
    results = _results(setting, stays)
    of_tile = moves / setting.parts + setting.code.workspace / BF16 * w.q / setting.parts
    # Tensors made once the last tile, and then all waiting results, are gone; the moving side has float32 sums.
    later = moves + stays if _all_wait(setting, stays) else 0.0
    if setting.ulysses > 1:
        later = max(later, moves + w.q + w.kv - (results - stays))
    moment = {
        "gradient of out": w.out,
        "rowsum(out * dout)": w.lse,
        f"{stay} of tiles, waiting and summed up": results,
        f"{move} of a tile and the kernel's workspace, or end results": max(of_tile, later),
    }
    if setting.ring_size > 1:  # which wait for what other ranks add to them
        moment[f"{move} of the own block"] = moves
    if setting.ulysses > 1:
        moment["gradient of out, heads exchanged"] = w.out
    if model.query_gate:
        moment["gradient of the gate"] = w.q
    return moment


def _latents_backward(latent: LatentSizes, model: ModelShape, setting: Setting, w: Widths) -> Moment:
    """Return tensors of attention's backward pass where latents move, besides q, latents, out and lse."""
    results, sent = _results(setting, w.q), FP32 * w.tokens * sum(latent.sent)
    weights = latent.up_weights(model.heads) / setting.tensor
    # The gradients of a tile's keys and values, as they come, and side by side
    projected = BF16 * w.tokens * model.heads / setting.tensor * (latent.own_dim + latent.value_dim)
    of_tile = max(w.kv + projected, w.kv + setting.code.workspace / BF16 * w.q)
    return {
        "gradient of out": w.out,
        "rowsum(out * dout)": w.lse,
        "k and v made of latents, of the own block and another": 2 * _made_of_latents(latent, model, setting, w),
        "dq of tiles, waiting and summed up": results,
        "dk and dv of a tile and the kernel's workspace, or end results": max(
            of_tile, w.q if _all_wait(setting, w.q) else 0.0
        ),
        "gradients of the own block's latents": sent,
        "gradient of the up-projection": FP32 * weights,
    }


def _made_of_latents(latent: LatentSizes, model: ModelShape, setting: Setting, w: Widths) -> float:
    """Return the bytes of a block's keys and values: what the projection gives, which has the values, and keys."""
    return w.kv + BF16 * w.tokens * model.heads / setting.tensor * latent.own_dim


def _attention_forward(model: ModelShape, setting: Setting) -> Moment:
    """Return tensors of a forward pass of attention that runs again: up to attention, and its own."""
    w = Widths(model, setting)
    saved = saved_by_layer(model, setting, whole_mlp=False)
    moment = _without(_before_mlp(saved), ("out and lse",)) if setting.recompute == "full" else {"q": w.q}
    moment["gradient of the layer's output"] = w.stream
    if setting.offload:
        moment["inputs of layers, back from the host"] = 2 * w.stream
    moving = choose_moving_side(_STRATEGY, "forward", ring_shapes(model, setting))
    moment["out and lse of tiles, waiting and summed up"] = (
        _results(setting, w.kept_attention) if moving == "kv" else w.kept_attention
    )
    if _all_wait(setting, w.kept_attention):
        moment["out, in the end"] = w.kept_attention
    if setting.ulysses > 1:
        moment["q, k and v before heads are exchanged, or later out"] = w.q + w.kv
    latent = latents_sent(model, setting)
    if latent is not None:
        made = 2 * _made_of_latents(latent, model, setting, w)
        moment["k and v made of latents, of the own block and another"] = made
    return moment


def _indexer_forward(indexer: IndexerSizes, model: ModelShape, setting: Setting, before: Moment) -> Moment:
    """Return tensors of a selection made again: `before` it, its best keys in 8 bytes, and the list of them."""
    tokens, lists = Widths(model, setting).tokens, 3 * _LISTED * min(indexer.top_k, setting.tokens)
    own = BF16 * (indexer.heads + 1) * indexer.dim + FP32 * indexer.heads
    return before | {"indexer's tensors": tokens * own, "best keys": tokens * lists}


def _projections_backward(model: ModelShape, setting: Setting) -> Moment:
    """Return tensors of the backward pass from dq, dk and dv to the layer's input; q, k, v and out are gone."""
    # Of rotary embedding: products with cos and sin. Of the projections: gradients of their input, one added to the
    # other; with tensor parallelism their input, gathered again, and its gradient before it is scattered.
    w = Widths(model, setting)
    input_gradients = 2 * w.gathered + w.row if w.gathered else 2 * w.row
    latent = latents_sent(model, setting)
    if latent is not None:
        gradients = FP32 * w.tokens * sum(latent.sent) + FP32 * latent.up_weights(model.heads) / setting.tensor
        return {_GRADIENTS: w.q, "gradients of latents": gradients, _ROTATED: max(2 * w.q, input_gradients)}
    return {
        _GRADIENTS: w.q + w.kv,
        _ROTATED: max(2 * w.q, input_gradients),
    }


def _head(model: ModelShape, setting: Setting, w: Widths) -> Moment:
    """Return tensors of the last norm, the head and the loss, forward and backward together."""
    vocab, code = model.vocab / setting.tensor, setting.code
    moment = {
        "last norm": w.row * (norm_copies(model) + 1 if setting.copying_norms else 2)
    }  # copies, or its input; and its output
    if w.gathered:
        moment["gathered over tensor parallelism"] = 2 * w.gathered
    if not setting.loss_chunk:
        moment["logits"] = w.tokens * vocab * code.logit_bytes
        if code.sums_weights:
            moment["gradient of the head"] = model.hidden * vocab * BF16
        return moment
    logits = min(setting.loss_chunk, w.tokens) * vocab
    weights = model.hidden * vocab if code.sums_weights else 0.0
    backward = {"gradient of the normalized": w.row, "gradient of the head": FP32 * weights}
    # In 16 bits, and their gradient in float32 and in 16 bits; when logits are gone, the head's gradient is rounded.
    moment["logits of a chunk"] = max((2 * BF16 + FP32) * logits, BF16 * weights)
    return moment | backward
