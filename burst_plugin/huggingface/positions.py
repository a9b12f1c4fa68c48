"""Positions that models of transformers count by themselves: for shards as they are in the whole batch.

    who counts, and how                            what is done on shards
    OPT, without padding                           it is given `SequenceShard.counted`
    RoBERTa and the like, ids other than padding   it is given a count of the ids of all ranks
    decoders like BART's, that take no positions   the shard's positions are looked up in their table
    Bloom's ALiBi, without padding                 nothing; padding between tokens is refused

Any other way to count is refused by name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burst_plugin.batch import SequenceShard
from burst_plugin.frameworks.wrapping import by_name
from burst_plugin.huggingface.mask_recipes import given_positions
from burst_plugin.huggingface.text_only import text_modules
from burst_plugin.sequence.mask import Both
from burst_plugin.sequence.masks import Keys, Mask, PerRow

_BY_PADDING = re.compile(r"OPTLearnedPositionalEmbedding")
_FROM_ZERO = re.compile(r"BioGptLearnedPositionalEmbedding")  # its model gives it positions that count padding, too
_BY_IDS = re.compile(r"(Roberta|RobertaPreLayerNorm|XLMRoberta(XL)?|Camembert|Data2VecText|Xmod)Embeddings")
_TABLES = re.compile(
    r"((|M|PL)Bart|Blenderbot(Small)?|BigBirdPegasus|Marian|Pegasus|Whisper)(Learned|Sinusoidal)?PositionalEmbedding"
)
_BY_ALIBI = re.compile(r"BloomAttention")
_NO_POSITIONS = re.compile(r"(Bloom|Mpt)Attention")  # but for distances, which attention knows
_ANEW = re.compile(r"CsmDepthDecoderModel")  # counts every forward's tokens from 0, whatever positions it is given
_EXAMINED = "_burst_plugin_counts"  # of a model: which of its modules counts positions, and how


def counts_unknown(pretrained: PreTrainedModel) -> bool:
    """Return whether a model counts positions in a way that is not known, so that it cannot run on shards."""
    kinds = {type(module) for module in text_modules(pretrained)}
    if any(map(_counts_otherwise, kinds)):
        return True
    takes_positions = "position_ids" in inspect.signature(type(pretrained).forward).parameters
    return not takes_positions and not any(_is_one(kind, _TABLES) or _is_one(kind, _NO_POSITIONS) for kind in kinds)


def _counts_otherwise(kind: type[torch.nn.Module]) -> bool:
    """Return whether modules of a kind count positions in a way that is not known."""
    if _is_one(kind, _ANEW):
        return True
    parameters = inspect.signature(kind.forward).parameters
    if any(hasattr(kind, f"create_position_ids_from_input{of}") for of in ("_ids", "s_embeds")):
        return not _is_one(kind, _BY_IDS) or "position_ids" not in parameters
    if "attention_mask" not in parameters or not kind.__name__.endswith("PositionalEmbedding"):
        return False
    return "position_ids" not in parameters or not (_is_one(kind, _BY_PADDING) or _is_one(kind, _FROM_ZERO))


def _is_one(kind: type, names: re.Pattern[str]) -> bool:
    return any(names.fullmatch(each.__name__) for each in kind.__mro__)


def watch_positions(pretrained: PreTrainedModel) -> None:
    """Note how a model counts positions, for `with_positions`, and add hooks to its tables of positions.

    Repeated calls change nothing. Hooked tables return the embeddings of a shard's positions, not of a count from 0.
    """
    modules: dict[re.Pattern[str], torch.nn.Module] = {}
    for module in text_modules(pretrained):
        for names in (_BY_PADDING, _BY_IDS, _TABLES, _BY_ALIBI, _NO_POSITIONS):
            if _is_one(type(module), names):
                modules[names] = module
        if _is_one(type(module), _TABLES) and _look_up not in module._forward_hooks.values():
            module.register_forward_hook(_look_up, prepend=True)  # before ZeRO-3 lets go of the table
    counts = {names.pattern: getattr(module, "padding_idx", None) for names, module in modules.items()}
    setattr(pretrained, _EXAMINED, counts)


def problem_with_cache(model: PreTrainedModel) -> str:
    """Return why a model cannot run with a `RingCache`, which counts positions from 0; an empty string if it can."""
    counts = getattr(model, _EXAMINED, {})
    if _NO_POSITIONS.pattern in counts:
        return "its ALiBi is not supported there; use a model with positions"
    if _BY_IDS.pattern in counts or _TABLES.pattern in counts:
        return "it counts positions by itself, and not from 0 on without padding, as a cache does; use another model"
    return ""


def with_positions(
    model: PreTrainedModel, shard: SequenceShard | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the keyword arguments of a forward, with positions as the model would count them in the whole batch.

    Models that take `position_ids` as they are, whole batches (`shard` None), and batches that came with positions
    are left as they are. args, kwargs: the arguments of the forward, for this rank's tokens.

    Collective for models that count ids. Raises ValueError on every rank for padding or prefix trees that a model
    would count otherwise.
    """
    counts = getattr(model, _EXAMINED, None)
    if not counts or shard is None or shard.as_given:
        return kwargs
    if _BY_ALIBI.pattern in counts and _is_torn(shard.mask):
        raise ValueError(
            f"attention_mask has padding between the tokens of a row, which the ALiBi of {type(model).__name__} does "
            "not count: pad rows on the left or on the right"
        )
    if _BY_IDS.pattern in counts and shard.mask is not None and shard.mask.trees:
        raise ValueError(
            f"{type(model).__name__} counts positions by ids that are no padding, but positions of a tree count "
            "from 0 along each path; leave the tree out"
        )
    if shard.counted is None:  # the batch has positions of its own
        return kwargs
    if _BY_PADDING.pattern in counts:
        return {**kwargs, "position_ids": shard.counted}
    if _BY_IDS.pattern in counts:
        arguments = by_name(model.forward, args, kwargs)
        return {**kwargs, "position_ids": _count_ids(shard, arguments, counts[_BY_IDS.pattern])}
    return kwargs


def _count_ids(shard: SequenceShard, arguments: Mapping[str, Any], padding: int) -> Tensor:
    """Return the positions of this rank's tokens, [B, S_local]; tokens with the id `padding` do not count."""
    if "input_ids" not in arguments:
        positions: Tensor = arguments["position_ids"]
        return positions + padding + 1
    real = shard.unshard(arguments["input_ids"] != padding)
    counted = torch.nn.functional.pad(real.cumsum(1) * real, (0, shard.tokens.length - shard.length))
    return shard.cp.shard(counted + padding, 1, shard.tokens)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _look_up(table: Any, args: tuple[Any, ...], embeddings: Tensor) -> Tensor:
    """Return the embeddings of a shard's positions, in place of positions that a decoder has counted for itself."""
    positions = given_positions()
    if positions is None:
        return embeddings
    return torch.nn.functional.embedding(positions + getattr(table, "offset", 0), table.weight, table.padding_idx)


def _is_torn(mask: Mask | None) -> bool:
    """Return whether there is padding between the tokens of a row."""
    if isinstance(mask, Both):
        return _is_torn(mask.one) or _is_torn(mask.other)
    if isinstance(mask, PerRow):
        return any(map(_is_torn, mask.masks))
    return isinstance(mask, Keys) and len(mask.spans) > 1
