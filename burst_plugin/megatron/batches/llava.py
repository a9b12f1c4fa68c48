"""LLaVA-like models of Megatron: ranks share images, and text and images are cut together, by the ring's layout.

    images [tiles, 3, H, W]     each tile is encoded by one rank; its rows go to the ranks that hold their tokens
    embeddings [B, S, hidden]   put together on every rank, with zeros where others hold the tokens; then cut

Megatron has every rank encode all tiles, cuts in zigzag, and requires Transformer Engine's attention by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from megatron.core import tensor_parallel
from torch import Tensor
from torch.nn.functional import pad

from burst_plugin.context import ContextParallel
from burst_plugin.frameworks.wrapping import bind, wrap
from burst_plugin.megatron.batches.packed import is_packed, layout_of
from burst_plugin.megatron.flags.config import asks_for_burst, is_hybrid, kinds_of, spreads_sequences
from burst_plugin.megatron.registry import Registry
from burst_plugin.sequence.layout import Tokens, positions
from burst_plugin.towers.rows import to_holders
from burst_plugin.towers.sharing import shared_out

_IGNORED = -100  # Megatron's label for tokens that predict nothing
_OF_UNLIKE_TILES = ("imgs_sizes", "vision_packed_seq_params")  # arguments of later releases


class _TileShares(NamedTuple):
    """A forward on this rank. shares: by rank, which tiles it encodes; None where every rank encodes all."""

    packed_seq_params: Any
    shares: list[list[int]] | None


def hook_llava(registry: Registry) -> str:
    """Have Megatron's `LLaVAModel` share images between the ranks of a ring, and cut sequences by its layout.

    Building Megatron's `MimoModel` for a ring raises ValueError from now on, and vision towers stay off the ring.
    registry: the rings. Returns a line for the report of `install()`.
    """
    towers = _imported("megatron.core.models.common.vision_module.vision_module")
    if towers is not None:
        wrap(towers.VisionModule, "__init__", _build_tower)
    mimo = _imported("megatron.core.models.mimo.model.base")
    if mimo is not None:
        wrap(mimo.MimoModel, "__init__", _refuse_mimo)
    module = _imported("megatron.core.models.multimodal.llava_model")
    if module is None:
        return "Megatron's LLaVAModel cannot be imported here"
    hooks = _LlavaHooks(registry)
    wrap(module.LLaVAModel, "__init__", partial(_build, module))
    wrap(module.LLaVAModel, "forward", hooks.forward)
    wrap(module.LLaVAModel, "_preprocess_data", hooks.put_together)
    wrap(module.LLaVAModel, "_process_embedding_token_parallel", hooks.cut)
    return "LLaVA-like models share images between the ranks of the ring, and are cut by its layout"


def _imported(name: str) -> ModuleType | None:
    with warnings.catch_warnings():  # about Apex, in place of which there are PyTorch's norms
        warnings.simplefilter("ignore")
        try:
            return import_module(name)
        except ImportError:
            return None


def _build_tower(original: Callable[..., None], tower: Any, *args: Any, **kwargs: Any) -> None:
    """Build a vision tower, off the ring also where its configuration is a copy of the language model's."""
    config = bind(original, tower, *args, **kwargs).arguments["config"]
    if not spreads_sequences(config) and "burst" in kinds_of(config.cp_comm_type):
        config.cp_comm_type = None
    original(tower, *args, **kwargs)


def _build(module: ModuleType, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Build a `LLaVAModel`, whose language model may have any core attention that the ring replaces.

    Raises ValueError for a tower that would take images for shards, and for language models of transformers.
    """
    arguments = bind(original, *args, **kwargs).arguments
    config, spec = arguments["language_transformer_config"], arguments["language_transformer_layer_spec"]
    if not asks_for_burst(config):
        original(*args, **kwargs)
        return
    if is_hybrid(config):
        raise ValueError(
            "hybrid_context_parallel is not supported by LLaVAModel on a ring; use context_parallel_size"
        )
    if str(getattr(config, "language_model_type", "")).startswith("hf://"):
        raise ValueError(
            f"language_model_type={config.language_model_type!r} is not on the ring, which is for Megatron's own "
            "layers; use a language model of Megatron"
        )
    for name in ("vision_transformer_config", "vision_projection_config"):
        if arguments[name].context_parallel_size > 1:
            raise ValueError(
                f"{name}.context_parallel_size={arguments[name].context_parallel_size}: a tower has whole images, "
                "which ranks share; set it to 1, as examples/multimodal does"
            )
    attention = getattr(getattr(spec, "submodules", None), "self_attention", None)
    core = getattr(getattr(attention, "submodules", None), "core_attention", None)
    # Megatron's assertions on Transformer Engine concern its context parallelism, which does not run.
    fits = {"HAVE_TE": True, "TEDotProductAttention": core, "is_te_min_version": lambda *_, **__: True}
    before = {name: getattr(module, name, None) for name in fits}
    vars(module).update(fits)
    try:
        original(*args, **kwargs)
    finally:
        vars(module).update(before)


def _refuse_mimo(original: Callable[..., None], model: Any, mimo_config: Any, *args: Any, **kwargs: Any) -> None:
    """Build a `MimoModel`, or raise ValueError where its language model is on a ring.

    In 0.16 it does not cut sequences, so that every rank would take all of them for its part.
    """
    params = getattr(getattr(mimo_config, "language_model_spec", None), "params", None) or {}
    config = params.get("config")
    if config is not None and asks_for_burst(config):
        raise ValueError(
            "MimoModel is not supported with cp_comm_type='burst': how it cuts text and images together has not been "
            "tried; use LLaVAModel, or context_parallel_size=1"
        )
    original(model, mimo_config, *args, **kwargs)


class _LlavaHooks:
    """Methods in place of `LLaVAModel`'s, for models on the ring."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._call = _TileShares(None, None)

    def _ring(self, model: Any) -> ContextParallel | None:
        """Return the ring of a model; None if it has none, or of one rank."""
        if not asks_for_burst(model.config) or model.context_parallel_lm == 1:
            return None
        return self._registry.context(model.config, model.pg_collection)

    def forward(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a model on this rank's tiles; on one of them, which is left out again, if it has none."""
        cp, call = self._ring(model), bind(original, model, *args, **kwargs)
        if cp is None:
            return original(model, *args, **kwargs)
        arguments, shares = call.arguments, None
        if can_share_tiles(model, arguments):
            images = arguments["images"]
            shares = shared_out([1.0] * len(images), cp.ranks)
            if arguments.get("num_image_tiles") is None:
                arguments["num_image_tiles"] = torch.ones(len(images), dtype=torch.int, device=images.device)
            arguments["images"] = images[shares[cp.rank] or [0]]
        self._call = _TileShares(arguments.get("packed_seq_params"), shares)
        try:
            return original(*call.args, **call.kwargs)
        finally:
            self._call = _TileShares(None, None)

    def put_together(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Put rows of images among rows of text, [B, S, hidden]; zeros in place of rows that other ranks hold."""
        cp, shares = self._ring(model), self._call.shares
        if cp is None or shares is None:
            return original(model, *args, **kwargs)
        call = bind(original, model, *args, **kwargs)
        x, text = call.arguments["image_embeddings"], call.arguments["language_embeddings"]
        rows, tiles, width = len(x), sum(map(len, shares)), x.shape[-1]

        def placed(images: Tensor, words: Tensor) -> Any:
            call.arguments.update(image_embeddings=images, language_embeddings=words)
            return original(*call.args, **call.kwargs)

        # Megatron puts numbers of rows in their places, from 1 on, to see who holds which.
        numbers = torch.arange(1, 1 + tiles * rows, dtype=torch.float64, device=x.device).view(tiles, rows, 1)
        words = torch.zeros((*text.shape[:2], 1), dtype=torch.float64, device=text.device)
        at = placed(numbers.transpose(0, 1), words)[0][..., 0].long().cpu() - 1
        tokens, at = self._tokens(cp, model, at, -1, _offsets_in(at.shape[1], self._call.packed_seq_params))
        held = [_of_images(at[:, positions(shard).cpu()]) for shard in cp.rank_state.route_table.shards(tokens)]
        needed_rows, encoded, holders = _numbered(shares, held, tiles, rows)
        own_rows = x.transpose(0, 1).reshape(-1, width)
        moved = to_holders(cp, own_rows[needed_rows[cp.rank].to(x.device)], encoded, holders)
        all_rows = x.new_zeros((tiles * rows, width)).index_copy(0, held[cp.rank].to(x.device), moved)
        return placed(all_rows.view(tiles, rows, width).transpose(0, 1), text)

    def cut(
        self,
        original: Any,
        model: Any,
        embeddings: Tensor | None,
        labels: Tensor | None,
        loss_mask: Tensor | None,
        packed_seq_params: Any,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Any]:
        """Cut embeddings [B, S, hidden], and labels and their mask [B, S], by the layout.

        Returns embeddings [S/CP, B, hidden]. Sequences are padded to lengths that ranks and the layout divide.
        """
        cp = self._ring(model)
        if cp is None:
            return original(model, embeddings, labels, loss_mask, packed_seq_params)  # type: ignore[no-any-return]
        self._registry.cuts_batches = True
        shards, offsets = [], _offsets(packed_seq_params)
        for x, filler in ((embeddings, 0), (labels, _IGNORED), (loss_mask, 0)):
            if x is not None:
                tokens, x = self._tokens(cp, model, x, filler, offsets)
                x = layout_of(tokens).shard(x, 1, (cp.rank, cp.ranks), tokens)
            shards.append(x)
        embeddings, labels, loss_mask = shards
        if embeddings is not None:
            embeddings = embeddings.transpose(0, 1).contiguous()
            if model.sequence_parallel_lm:
                embeddings = tensor_parallel.scatter_to_sequence_parallel_region(embeddings)
        return embeddings, labels, loss_mask, packed_seq_params

    def _tokens(
        self, cp: ContextParallel, model: Any, x: Tensor, filler: float, offsets: tuple[int, ...] | None
    ) -> tuple[Tokens, Tensor]:
        """Return which tokens ranks hold of x [B, S, ...], and x, padded with `filler` to a length that they divide.

        offsets: where packed documents begin, and the last one ends. Raises ValueError if they have another length.
        """
        if offsets is not None:
            if len(x) != 1 or offsets[-1] != x.shape[1]:
                raise ValueError(
                    f"packed_seq_params has documents of {offsets[-1]} tokens, but text and images together are "
                    f"{list(x.shape[:2])}; give one row, and offsets that count the tokens of images"
                )
            return self._registry.packed_tokens(offsets, cp.ranks), x
        divisor = 2 * cp.ranks * (model.tensor_model_parallel_size_lm if model.sequence_parallel_lm else 1)
        missing = -x.shape[1] % divisor
        if missing:
            x = pad(x, (*(0, 0) * (x.dim() - 2), 0, missing), value=filler)
        return self._registry.tokens_of_batch(x.shape[1], cp.ranks), x


def _offsets(packed: Any) -> tuple[int, ...] | None:
    """Return where packed documents begin, with their padding, and the last one ends; None without them."""
    if not is_packed(packed):
        return None
    starts = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    return tuple(starts.flatten().tolist())


def _offsets_in(length: int, packed: Any) -> tuple[int, ...] | None:
    """Return the `_offsets` that `cut` will get where a model keeps the first `length` tokens.

    From 0.20 on `LLaVAModel.forward` clamps offsets of documents without padding that go beyond.
    """
    starts = packed.cu_seqlens_q.flatten().tolist() if is_packed(packed) else [0]
    if starts[-1] <= length:
        return _offsets(packed)
    return tuple(sorted({min(start, length) for start in starts}))


def can_share_tiles(model: Any, arguments: dict[str, Any]) -> bool:
    """Return whether ranks can encode some tiles each: with images, all alike, without tags between tiles.

    Experts of a tower balance their load over all tiles, and what a tower draws at random depends on their order.
    """
    images, counts = arguments.get("images"), arguments.get("num_image_tiles")
    if not (model.add_encoder and model.add_decoder and model.pre_process) or model._tile_tags is not None:
        return False
    if any(arguments.get(name) is not None for name in (*_OF_UNLIKE_TILES, "inference_context", "inference_params")):
        return False
    if _draws(model.vision_model) or getattr(getattr(model.vision_model, "config", None), "num_moe_experts", None):
        return False
    return (
        isinstance(images, Tensor) and images.dim() == 4 and len(images) > 0 and (counts is None or len(counts) > 0)
    )


def _draws(tower: torch.nn.Module) -> bool:
    """Return whether a tower draws random numbers: for dropout, or, in RADIO, for the places of its positions."""
    if not tower.training:
        return False
    config = getattr(tower, "config", None)
    dropout = any(getattr(config, name, 0) for name in ("hidden_dropout", "attention_dropout"))
    places = getattr(tower, "has_cpe", False) and not getattr(tower, "force_cpe_eval_mode", False)
    return bool(dropout or places or getattr(tower, "pos_dropout", 0))


def _of_images(at: Tensor) -> Tensor:
    """Return the entries of `at` that are numbers of image rows; tokens of text have -1."""
    return at[at >= 0]


def _numbered(
    shares: Sequence[Sequence[int]], held: Sequence[Tensor], tiles: int, rows: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return by rank which of its rows have a token, their numbers, and the numbers of the rows that it holds.

    Only rows that have a token are numbered; rows lose theirs where Megatron has cut off the sequence.
    """
    number = torch.full((tiles * rows,), -1, device="cpu")
    there = torch.cat([*held]).sort()[0]
    number[there] = torch.arange(len(there), device="cpu")
    by_tile = number.view(tiles, rows)
    of_rank = [by_tile[list(share)].flatten() for share in shares]
    kept = [(each >= 0).nonzero().flatten() for each in of_rank]
    return kept, [each[at] for each, at in zip(of_rank, kept, strict=True)], [number[each] for each in held]
