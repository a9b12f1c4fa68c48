"""Which tensors of diffusers' transformers are cut between the ranks of a ring, and which attention is the ring's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

Cut = tuple[str, int]  # the stream of tokens that a tensor belongs to, and its dimension of tokens


class DiffusionFamily(NamedTuple):
    """An architecture of diffusers: which of its tensors are cut, and which of its attention the ring computes.

    Its tokens are in streams called "image" (or video) and "text". A `Cut` is a stream and the dimension of its
    tokens.

    streams: the streams that attend on the ring, in the order in which attention has them.
    attention: a pattern of `fnmatch` for the names of the modules whose attention the ring computes. Attention among
        text alone and cross attention to text are not among them: there text is whole on every rank.
    arguments: by the name of a module, "" for the model, the cuts of its arguments by their names.
    rope: the cut of the outputs of the module `rope`; None without such a module.
    whole: names of arguments that are for whole images, and are refused on a ring.
    refused: values in the model's configuration, by name, with which it treats some tokens differently; they are
        refused.
    """

    streams: tuple[str, ...]
    attention: str
    arguments: Mapping[str, Mapping[str, Cut]]
    rope: Cut | None = None
    whole: tuple[str, ...] = ()
    refused: Mapping[str, object] = {}


_IMAGE: Mapping[str, Cut] = {"hidden_states": ("image", 1)}
_JOINT: Mapping[str, Cut] = {**_IMAGE, "encoder_hidden_states": ("text", 1)}
_JOINT_IDS: Mapping[str, Cut] = {**_JOINT, "txt_ids": ("text", -2), "img_ids": ("image", -2)}  # perhaps with a batch
_TIMES: Mapping[str, Cut] = {"timestep": ("image", 1)}  # where every token has one

FAMILIES: Mapping[str, DiffusionFamily] = {
    "WanTransformer3DModel": DiffusionFamily(
        streams=("image",),
        attention="blocks.*.attn1",
        arguments={"": _TIMES, "blocks.0": _IMAGE},
        rope=("image", 1),
    ),
    "LTXVideoTransformer3DModel": DiffusionFamily(
        streams=("image",),
        attention="transformer_blocks.*.attn1",
        arguments={"": {**_IMAGE, **_TIMES}},
        rope=("image", 1),
    ),
    "CogVideoXTransformer3DModel": DiffusionFamily(
        streams=("text", "image"),
        attention="transformer_blocks.*.attn1",
        arguments={"": {"image_rotary_emb": ("image", 0)}, "transformer_blocks.0": _JOINT},
    ),
    "FluxTransformer2DModel": DiffusionFamily(
        streams=("text", "image"),
        attention="*transformer_blocks.*.attn",
        arguments={"": _JOINT_IDS},
        whole=("controlnet_block_samples", "controlnet_single_block_samples"),
    ),
    "Flux2Transformer2DModel": DiffusionFamily(
        streams=("text", "image"),
        attention="*transformer_blocks.*.attn",
        arguments={"": _JOINT_IDS},
        whole=("kv_cache", "kv_cache_mode"),
    ),
    "HunyuanVideoTransformer3DModel": DiffusionFamily(
        streams=("image", "text"),
        attention="*transformer_blocks.*.attn",
        arguments={"transformer_blocks.0": _JOINT},
        rope=("image", 0),
        refused={"image_condition_type": "token_replace"},
    ),
}
