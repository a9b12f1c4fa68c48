"""Features of images, video and audio: encoded once on the ring, and brought to the ranks that hold their tokens.

    model(**local)              pixels of the whole batch, ids of this rank's tokens
      get_image_features(...)   this rank's share of the images; then the rows of its own tokens come from all ranks
      masked_scatter            as many rows as this rank has placeholders

Every rank runs its tower once per call, also one that has nothing to encode, since ZeRO-3 and FSDP gather parameters.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burst_plugin.batch import SHARD_KEY, SequenceShard
from burst_plugin.context import ContextParallel
from burst_plugin.frameworks.wrapping import by_name, wrap
from burst_plugin.huggingface.mask_recipes import Forward, as_in_forward, shard_of_forward
from burst_plugin.huggingface.media.units import Units, units_of
from burst_plugin.sequence.layout import positions
from burst_plugin.towers.rows import counts_of_all, to_holders
from burst_plugin.towers.sharing import shared_out

MODALITIES = ("image", "video", "audio")
_MARK = "_burst_plugin_shares_towers"
# Towers in which frames do not attend to each other, and whose positions do not count them.
_BY_FRAME = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "glm4v",
    "glm4v_moe",
    "glm46v",
)
_OF_TEXT = frozenset({SHARD_KEY, "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})


def use_media(pretrained: PreTrainedModel) -> None:
    """Have the towers of a model share their work between ranks in forwards on shards."""
    for module in pretrained.modules():
        for modality in modalities_of(module):
            kind, name = type(module), f"get_{modality}_features"
            if not hasattr(getattr(kind, name), _MARK):
                around = _sharing(modality)
                setattr(wrap(kind, name, around), _MARK, True)


def modalities_of(module: torch.nn.Module) -> list[str]:
    """Return what a module encodes in its own forward, and puts in the places of tokens."""
    forward: Any = inspect.unwrap(type(module).forward)
    names = forward.__code__.co_names if inspect.isfunction(forward) else ()
    return [m for m in MODALITIES if f"get_{m}_features" in names and hasattr(module, "get_placeholder_mask")]


def by_frame(module: PreTrainedModel) -> bool:
    """Return whether the tower of a model treats each frame of a video alone."""
    return module.config.model_type in _BY_FRAME


def takes_media(pretrained: PreTrainedModel) -> bool:
    """Return whether a model has parts that encode images, video or audio on a ring."""
    return any(map(modalities_of, pretrained.modules()))


def _sharing(modality: str) -> Callable[..., Any]:
    """Return what is done in place of a model's own method, on shards."""

    def get_features(original: Callable[..., Any], module: PreTrainedModel, /, *args: Any, **kwargs: Any) -> Any:
        shard = shard_of_forward()
        if shard is None or shard.as_given:
            return original(module, *args, **kwargs)
        given = by_name(original, (module, *args), kwargs)
        given = {name: value for name, value in given.items() if name not in _OF_TEXT and value is not module}
        if given.get("return_dict") is False:
            raise ValueError(f"get_{modality}_features(return_dict=False) is not supported with a batch that is cut")
        return _shared(lambda **mine: original(module, **mine), module, modality, given, shard)

    switched_off: Callable[..., Any] = torch.compiler.disable(get_features)  # type: ignore[no-untyped-call]
    return switched_off


def _shared(
    encode: Callable[..., Any],
    module: PreTrainedModel,
    modality: str,
    given: dict[str, Any],
    shard: SequenceShard,
) -> Any:
    """Return what `encode` returns, with the rows of this rank's tokens.

    What can be wrong with a batch is wrong on every rank, since all have it whole: errors need no agreement.
    """
    cp, units = shard.cp, units_of(next(iter(given)), given, by_frame(module))
    shares = shared_out(units.work(_width(module, modality)), cp.ranks)
    mine = shares[cp.rank] if shard.whole else []  # without images what is given stands in for those of other rings
    with as_in_forward(Forward(module, None, None, None)):  # a tower has whole images
        rows = _OutputRows.of(encode(**units.take(mine or [units.smallest])))
    x = torch.cat(rows.tensors, 1)[: None if mine else 0]
    if not shard.whole:
        return rows.put(x)
    placeholders = _placeholders(module, modality, shard)
    encoded, held = _numbers(cp, shares, rows.counts(units, mine) if mine else [], placeholders, shard, x.device)
    count, tokens = sum(map(len, encoded)), int(placeholders.sum())
    if count != tokens:
        raise ValueError(
            f"the batch has {tokens} tokens of {modality}s, but {type(module).__name__} makes {count} features of "
            f"the {modality}s; give what its processor returns for these texts"
        )
    return rows.put(to_holders(cp, x, encoded, held, f"{modality} features"))


def _width(module: PreTrainedModel, modality: str) -> int:
    """Return the width of the tower, on which it depends how much attention of its work is."""
    config = getattr(module.config, "audio_config" if modality == "audio" else "vision_config", None)
    return int(getattr(config, "hidden_size", None) or getattr(config, "embed_dim", None) or 1024)


def _placeholders(module: PreTrainedModel, modality: str, shard: SequenceShard) -> Tensor:
    """Return which tokens of the whole batch features take the place of, bool [B, S] on the CPU."""
    ids = shard.whole.get("input_ids")
    if ids is None:
        raise ValueError("a batch with images is cut by its input_ids; give these in place of inputs_embeds")
    tokens = (getattr(module.config, f"{modality}_token_{name}", None) for name in ("id", "index"))
    token = next((each for each in tokens if each is not None), None)
    if token is None:
        raise ValueError(
            f"{type(module).__name__}'s configuration has no {modality}_token_id, whose places are images"
        )
    found: Tensor = ids == token
    return torch.nn.functional.pad(found.cpu(), (0, shard.tokens.length - found.shape[1]))


def _numbers(
    cp: ContextParallel,
    shares: Sequence[Sequence[int]],
    counts: Sequence[int],
    placeholders: Tensor,
    shard: SequenceShard,
    device: torch.device,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the rows that each rank has encoded, and those whose tokens it holds; collective."""
    of_units = dict[int, int]()
    for share, found in zip(shares, counts_of_all(cp, counts, [len(each) for each in shares], device), strict=True):
        of_units |= zip(share, found, strict=True)
    starts, at = {}, 0
    for number in sorted(of_units):
        starts[number], at = at, at + of_units[number]
    nothing = torch.empty(0, dtype=torch.int64, device="cpu")
    encoded = [
        torch.cat([torch.arange(starts[n], starts[n] + of_units[n], device="cpu") for n in share] or [nothing])
        for share in shares
    ]
    numbers = (placeholders.flatten().cumsum(0) - 1).view(placeholders.shape)
    held = []
    for runs in cp.rank_state.route_table.shards(shard.tokens):
        at_rank = positions(runs).cpu()
        held.append(numbers[:, at_rank][placeholders[:, at_rank]])
    return encoded, held


class _OutputRows(NamedTuple):
    """The features of an output, as rows. tensors: each [rows, D], first those that tokens take the place of."""

    out: Any
    tensors: list[Tensor]
    parts: list[int]  # the number of rows of each image, if the output tells images apart

    @classmethod
    def of(cls, out: Any) -> _OutputRows:
        """Return the rows of what a model's method returns."""
        features: Any = out if isinstance(out, Tensor | list | tuple) else out.pooler_output
        deep = getattr(out, "deepstack_features", None) or []
        layers = [torch.cat([*each]) if isinstance(each, list | tuple) else each.flatten(0, -2) for each in deep]
        if isinstance(features, list | tuple):
            parts = [each.flatten(0, -2) for each in features]
            return cls(out, [torch.cat(parts), *layers], list(map(len, parts)))
        rows = features.flatten(0, -2)
        return cls(out, [rows, *layers], [len(rows) // len(features)] * len(features) if features.dim() > 2 else [])

    def counts(self, units: Units, numbers: Sequence[int]) -> list[int]:
        """Return how many rows there are for each unit."""
        if len(self.parts) == len(numbers):
            return self.parts
        patches = [units.patches[n] for n in numbers]
        rows, total = len(self.tensors[0]), sum(patches)
        return [rows * each // total for each in patches]

    def put(self, moved: Tensor) -> Any:
        """Return the output with other rows, in the form that it had."""
        rows, *layers = torch.split_with_sizes(moved, [x.shape[1] for x in self.tensors], 1)
        features: Any = self.out if isinstance(self.out, Tensor | list | tuple) else self.out.pooler_output
        if isinstance(features, list | tuple):
            features = type(features)([rows])
        else:
            features = rows.unsqueeze(0) if features.dim() > 2 else rows
        if isinstance(self.out, Tensor | list | tuple):
            return features
        out = copy.copy(self.out)
        out.pooler_output = features
        if layers:
            deep = self.out.deepstack_features
            out.deepstack_features = [
                [x] if isinstance(each, list | tuple) else x for x, each in zip(layers, deep, strict=True)
            ]
        return out
