"""Features of images, video and audio: encoded once on the ring, and sent to the ranks that hold their tokens.

    model(**local)              pixels of the whole batch, ids of this rank's tokens
      get_image_features(...)   this rank's share of the images; then the rows of its own tokens come from all ranks
      masked_scatter            as many rows as this rank has placeholders

Every rank runs its tower once per call, also one that has nothing to encode, since ZeRO-3 and FSDP gather parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burst_plugin.batch import SHARD_KEY, SequenceShard
from burst_plugin.context import ContextParallel
from burst_plugin.frameworks.wrapping import by_name, wrap
from burst_plugin.huggingface.mask_recipes import Forward, as_in_forward, shard_of_forward
from burst_plugin.huggingface.media.absent import stands_in
from burst_plugin.huggingface.media.families import by_frame, by_row, check_examined, modalities_of, token_of
from burst_plugin.huggingface.media.units import Units, units_of
from burst_plugin.huggingface.walks import modules_in
from burst_plugin.sequence.layout import positions
from burst_plugin.towers.rows import counts_of_all, to_holders
from burst_plugin.towers.sharing import shared_out

_MARK = "_burst_plugin_shares_towers"
_OF_TEXT = frozenset({SHARD_KEY, "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})


def use_media(pretrained: PreTrainedModel) -> None:
    """Have the ranks of a ring share the encoding of images, video and audio in a model's forwards on shards.

    Replaces the methods `get_<modality>_features` of the model's classes; repeated calls change nothing.
    """
    for module in pretrained.modules():
        for modality in modalities_of(module):
            kind, name = type(module), f"get_{modality}_features"
            if not hasattr(getattr(kind, name), _MARK):
                around = _sharing(modality)
                setattr(wrap(kind, name, around), _MARK, True)


def takes_media(pretrained: PreTrainedModel) -> bool:
    """Return whether a model has modules that put features of images, video or audio in places of tokens."""
    return any(map(modalities_of, modules_in(pretrained)))


def _sharing(modality: str) -> Callable[..., Any]:
    """Return the replacement of a model's method `get_<modality>_features`, which shares a shard's images."""

    def get_features(original: Callable[..., Any], module: PreTrainedModel, /, *args: Any, **kwargs: Any) -> Any:
        shard = shard_of_forward()
        if shard is None or shard.as_given:
            return original(module, *args, **kwargs)
        check_examined(module, modality)
        arguments = by_name(original, (module, *args), kwargs)
        arguments = {name: value for name, value in arguments.items() if name not in _OF_TEXT and value is not module}
        if arguments.get("return_dict") is False:
            raise ValueError(f"get_{modality}_features(return_dict=False) is not supported with a batch that is cut")
        return _shared(lambda **inputs: original(module, **inputs), module, modality, arguments, shard)

    switched_off: Callable[..., Any] = torch.compiler.disable(get_features)  # type: ignore[no-untyped-call]
    return switched_off


def _shared(
    encode: Callable[..., Any],
    module: PreTrainedModel,
    modality: str,
    arguments: dict[str, Any],
    shard: SequenceShard,
) -> Any:
    """Return the output of `encode` with the rows of this rank's tokens.

    A fault of the batch is found on every rank, since all have it whole. A tower may fail on some ranks.
    """
    cp, units = shard.cp, units_of(next(iter(arguments)), arguments, by_frame(module), by_row(module, modality))
    shares = shared_out(units.work(_width(module, modality)), cp.ranks)
    is_absent = stands_in(module, modality)
    numbers = [] if is_absent else shares[cp.rank]

    def encoded_rows() -> tuple[OutputRows, Tensor]:
        with as_in_forward(Forward(module, None, None, None)):  # a tower has whole images
            rows = OutputRows.of(encode(**units.take(numbers or [units.smallest])))
        return rows, torch.cat(rows.tensors, 1)[: None if numbers else 0]

    if is_absent:
        rows, x = encoded_rows()
        return rows.put(x)
    placeholders = _placeholders(module, modality, shard)

    def counted_rows() -> tuple[tuple[OutputRows, Tensor], Tensor]:
        rows, x = encoded_rows()
        counts = rows.counts(units, numbers, _runs(placeholders)) if numbers else []
        return (rows, x), torch.tensor([*counts], dtype=torch.int64, device=x.device)

    (rows, x), counts = counts_of_all(cp, counted_rows, [len(share) for share in shares])
    encoded, held = numbers_of_rows(cp, shares, counts, placeholders, shard)
    count, tokens = sum(map(len, encoded)), int(placeholders.sum())
    if count != tokens:
        raise ValueError(
            f"the batch has {tokens} tokens of {modality}s, but {type(module).__name__} makes {count} features of "
            f"the {modality}s; give what its processor returns for these texts"
        )
    return rows.put(to_holders(cp, x, encoded, held, f"{modality} features"))


def _width(module: PreTrainedModel, modality: str) -> int:
    """Return the width of the tower, which decides the share of attention in its work."""
    config = getattr(module.config, "audio_config" if modality == "audio" else "vision_config", None)
    return int(getattr(config, "hidden_size", None) or getattr(config, "embed_dim", None) or 1024)


def _placeholders(module: PreTrainedModel, modality: str, shard: SequenceShard) -> Tensor:
    """Return which tokens of the whole batch are placeholders of features, bool [B, S] on the CPU."""
    ids = shard.whole.get("input_ids")
    if ids is None:
        raise ValueError("a batch with images is cut by its input_ids; give these in place of inputs_embeds")
    found: Tensor = ids == token_of(module, modality)
    return torch.nn.functional.pad(found.cpu(), (0, shard.tokens.length - found.shape[1]))


def _runs(placeholders: Tensor) -> list[int]:
    """Return the lengths of runs of placeholder tokens in bool [B, S], row by row."""
    padded = torch.nn.functional.pad(placeholders, (1, 1)).int().diff(dim=1)
    starts, ends = (padded == 1).nonzero(), (padded == -1).nonzero()
    lengths: list[int] = (ends - starts)[:, 1].tolist()
    return lengths


def numbers_of_rows(
    cp: ContextParallel,
    shares: Sequence[Sequence[int]],
    counts: Sequence[Sequence[int]],
    placeholders: Tensor,
    shard: SequenceShard,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return for each rank the rows that it has encoded, and the rows whose tokens it holds.

    shares: for each rank the numbers of its images; counts: how many rows these have, -1 if that cannot be told.
    """
    of_units = dict[int, int]()
    for share, rows in zip(shares, counts, strict=True):
        of_units |= zip(share, rows, strict=True)
    if min(of_units.values(), default=0) < 0:
        raise ValueError(
            "it cannot be told which features belong to which of several images, videos or clips, neither by the "
            "features nor by their tokens: put a token of text between two of them"
        )
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


def _field(out: Any) -> str:
    """Return the field of an output that has the features."""
    return "last_hidden_state" if getattr(out, "pooler_output", None) is None else "pooler_output"


class OutputRows(NamedTuple):
    """The features in the output of a method `get_<modality>_features`, as rows that can be moved between ranks.

    out: the output itself: a tensor, a list of tensors, or an output object of transformers.
    tensors: each [rows, D]. The first takes the places of tokens, others are added in layers (deepstack features); if
        the output has features for layers alone, all of them are.
    parts: the number of rows of each image, video or clip, if the output tells them apart; else empty.
    """

    out: Any
    tensors: list[Tensor]
    parts: list[int]  # the number of rows of each image, if the output tells images apart

    @classmethod
    def of(cls, out: Any) -> OutputRows:
        """Return the features of `out`, the output of a model's method `get_<modality>_features`, as rows."""
        features: Any = out if isinstance(out, Tensor | list | tuple) else getattr(out, _field(out))
        deep = [
            layer[1] if _is_numbered(layer) else layer for layer in getattr(out, "deepstack_features", None) or []
        ]
        layers = [torch.cat([*layer]) if isinstance(layer, list | tuple) else layer.flatten(0, -2) for layer in deep]
        if features is None:  # all features are for layers
            return cls(out, layers, list(map(len, deep[0])))
        if isinstance(features, list | tuple):
            parts = [image.flatten(0, -2) for image in features]
            return cls(out, [torch.cat(parts), *layers], list(map(len, parts)))
        rows = features.flatten(0, -2)
        return cls(out, [rows, *layers], [len(rows) // len(features)] * len(features) if features.dim() > 2 else [])

    def counts(self, units: Units, numbers: Sequence[int], runs: Sequence[int]) -> list[int]:
        """Return how many rows of features each encoded unit has, such as an image; all -1 if that cannot be told.

        units: all units of the batch. numbers: which of them this output has the features of.
        runs: the lengths of all runs of consecutive placeholder tokens in the whole batch; if there are as many as
            units, a run is taken to have the features of one unit.
        """
        rows = len(self.tensors[0])
        if len(self.parts) == len(numbers):
            return self.parts
        if len(numbers) == 1:
            return [rows]
        patches = [units.patches[n] for n in numbers]
        if units.in_proportion and not any(rows * each % sum(patches) for each in patches):
            return [rows * each // sum(patches) for each in patches]
        told = [runs[n] for n in numbers] if len(runs) == len(units.patches) else []
        return told if sum(told) == rows else [-1] * len(numbers)

    def put(self, moved: Tensor) -> Any:
        """Return the output in its original form, with `moved` in place of its rows of features.

        moved: [rows, sum of D], the columns of all `tensors` side by side; of any number of rows.
        """
        rows = list(torch.split_with_sizes(moved, [x.shape[1] for x in self.tensors], 1))
        is_output = not isinstance(self.out, Tensor | list | tuple)
        old: Any = getattr(self.out, _field(self.out)) if is_output else self.out
        features = None if old is None else _like(old, rows.pop(0))
        if not is_output:
            return features
        out = copy.copy(self.out)
        for field in ("pooler_output", "last_hidden_state"):
            if getattr(out, field, None) is old:
                setattr(out, field, features)
        if rows:
            deep = self.out.deepstack_features
            out.deepstack_features = [_like(each, x) for x, each in zip(rows, deep, strict=True)]
        return out


def _is_numbered(features: Any) -> bool:
    """Return whether features come with the number of the layer that they are for."""
    return isinstance(features, tuple) and isinstance(features[0], int)


def _like(features: Any, rows: Tensor) -> Any:
    """Return rows in the form that features have."""
    if _is_numbered(features):
        return features[0], _like(features[1], rows)
    if isinstance(features, list | tuple):
        return type(features)([rows])
    return rows.unsqueeze(0) if features.dim() > 2 else rows
