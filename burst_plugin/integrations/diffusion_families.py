"""Which tensors of diffusers' transformers are cut between the ranks of a ring, and which attention is the ring's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

Cut = tuple[str, int]  # the stream of tokens that a tensor belongs to, and its dimension of tokens


class DiffusionFamily(NamedTuple):
    """One architecture of diffusers, with streams of tokens called "image" (or video) and "text".

    streams: the streams that attend on the ring, in the order of attention.
    attention: the modules whose attention is the ring's, a pattern of `fnmatch`. Attention among text alone and cross
        attention to text are not: there text is whole on every rank.
    arguments: by the name of a module, the arguments of it that are cut.
    rope: how the outputs of the module `rope` are cut, if there is one.
    whole: arguments for whole images, which have to be left out.
    refused: values of its configuration by which it treats some tokens differently.
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
