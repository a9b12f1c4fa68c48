"""A batch of whole sequences cut into one rank's shard: ids, labels, positions, and the mask that goes with them.

    4 tokens a b c d, over 2 ranks in zigzag; labels are shifted before they are cut, and named `shift_labels`:

                     whole              rank 0     rank 1
    input_ids        a b c d            a d        b c
    position_ids     0 1 2 3            0 3        1 2
    shift_labels     b c d -100         b -100     c d

Labels are shifted over the whole sequence, since the target of a shard's last token may be on another rank.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from burst_plugin.checks import shown, whole_number
from burst_plugin.comm.differences import checksum_of
from burst_plugin.context import ContextParallel
from burst_plugin.ring.agreement import prepared_together
from burst_plugin.ring.graph_breaks import between_graphs
from burst_plugin.sequence.batch_masks import (
    TypeRuns,
    batch_mask,
    check_masks,
    positions_in_text,
    real_tokens,
    type_runs,
    valid_tokens,
)
from burst_plugin.sequence.layout import Tokens, even_length
from burst_plugin.sequence.masks import Causal, Mask
from burst_plugin.sequence.prefix_tree import PrefixTree
from burst_plugin.strategy import AUTO

IGNORED_LABEL = -100  # label of a token that is not part of the loss
# Entries of a batch that say which tokens attend to which; a shard has a mask in their place.
_MASK_KEYS = frozenset(
    {"attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "tree"}
)
SHARD_KEY = "burst"  # the entry of a sharded batch that says what it is a shard of
_UNEVEN = 1.3  # times the mean of the ranks' work, above which a warning is logged
LayerMask = Callable[[Mapping[str, tuple[TypeRuns, ...]]], Mask]
_IDS = ("input_ids", "inputs_embeds")
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
# Prefixes of the names of entries with images, video or audio, which are not cut: ranks share them out.
MEDIA = (
    "aspect_ratio_",
    "audio_",
    "feature_attention_mask",
    "high_res_pixel_",
    "image_",
    "images_",
    "input_features",
    "input_values",
    "num_frames",
    "num_local_patches",
    "patch_",
    "pixel_",
    "second_per_grid",
    "spatial_shapes",
    "target_sizes",
    "tile_",
    "video_",
)
# Names of labels, but not of marks such as "is_label", nor of what belongs to labels, such as "target_mask".
_LABELS = re.compile(r"(?!is_|has_)(.*_)?(label|target)(s|_ids?)?", re.IGNORECASE)
_WHOLE = ("input_ids", "attention_mask", "position_ids", *_TOKEN_TYPES)
_MARK = "_burst_plugin_shard"  # an attribute of ids that were cut
_LOOKS = 10  # batches to look at until one is uneven; each look takes as long as making a new mask's plan
_looked_at: WeakKeyDictionary[ContextParallel, int] = WeakKeyDictionary()  # by ring: batches looked at so far
_LOG = logging.getLogger(__name__)


class _Forwards:
    """The number of forwards that a shard was used in, and the seed of the last one.

    Not a dataclass: FSDP copies dataclasses in every forward.
    """

    def __init__(self) -> None:
        self.made = self.seed = 0


@dataclass(frozen=True, eq=False)
class SequenceShard:
    """The whole batch that the tensors of a shard belong to; passed with them to every attention layer.

    cp: the ranks that hold the sequence between them.
    length: number of tokens of the whole sequence, without padding.
    tokens: the sequence with padding, so that all ranks hold equally many tokens, and the assignment to ranks.
    mask: padding and document bounds, in positions of the whole sequence, beside a layer's own mask; None for
        neither. Padding that makes the length fit is last; layers that are not causal add `Keys(((0, length),))`.
    valid_tokens: number of labels that are part of the loss, in the whole batch.
    seed: the batch's checksum, of which each forward's copy has a seed for dropout, equal on all ranks of `cp`; None
        where it is not known which forward is recomputed.
    name: the name of the batch in errors of ranks that are out of step.
    real: which of this rank's tokens [B, S_local] are no padding; None if all are.
    longest: the largest position of the whole batch; of mRoPE's positions the largest in its three axes.
    token_types: the types of all tokens of the whole batch, by the name that the batch has for them, "token_type_ids"
        or "mm_token_type_ids": for each row its runs of one type, (start, stop, type), without padding.
    counted: the positions of this rank's tokens [B, S_local], counted without padding, where it is -1; None if the
        batch had positions of its own.
    whole: the ids of all tokens, [B, S]; if the batch `has_media`, their masks, types and positions, too.
    as_given: whether the batch, of a ring of one rank, is whole and unchanged: its labels are not shifted.
    """

    cp: ContextParallel
    length: int
    tokens: Tokens
    mask: Mask | None = None
    valid_tokens: int = 0
    seed: int | None = 0
    as_given: bool = False
    name: str = ""
    real: Tensor | None = None
    longest: int = 0
    token_types: Mapping[str, tuple[TypeRuns, ...]] = field(default_factory=dict)
    counted: Tensor | None = None
    has_media: bool = False
    whole: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    _forwards: _Forwards = field(default_factory=_Forwards, repr=False)

    def __str__(self) -> str:
        return self.name

    def of_forward(self) -> SequenceShard:
        """Return the shard for the next forward in training: a copy with a dropout seed of its own.

        Layers that a checkpoint recomputes are given their forward's copy again. A checkpoint around a whole model
        runs it inside the backward pass, for a forward that is not known: with several so far the seed is None.
        """
        if self.seed is None:
            return self
        forwards = self._forwards
        if torch._C._current_graph_task_id() != -1:
            return replace(self, seed=None if forwards.made > 1 else forwards.seed)
        forwards.made, forwards.seed = forwards.made + 1, self.cp.rank_state.draws.next_seed(self.seed)
        return replace(self, seed=forwards.seed)

    def unshard(self, local: Tensor, dim: int = 1, *, loss: Literal["same", "own"] | None = None) -> Tensor:
        """Return the whole tensor [B, length, ...] on every rank, from all ranks' [B, S_local, ...]; collective.

        It has no padding. `dim` is the dimension of tokens; `loss`, needed for gradients, says whether ranks compute
        the "same" loss of it, or each its "own": see `ContextParallel.unshard`.
        """
        return self.cp.unshard(local, dim, self.tokens, loss=loss).narrow(dim, 0, self.length)


@between_graphs
def shard_batch(
    batch: Mapping[str, Any], cp: ContextParallel, *, pad_token_id: int = 0, layer_mask: LayerMask | None = None
) -> dict[str, Any]:
    """Return this rank's shard of `batch`, which is identical on all ranks of `cp`; collective.

    Args:
        batch: tensors [B, S, ...] of whole sequences: `input_ids` (or `inputs_embeds`) and, if there are any,
            `labels` (not shifted) or `shift_labels`, with -100 for none, `position_ids`, a padding mask
            `attention_mask` [B, S], and document bounds as `cu_seq_lens_q` or as positions that start again, or a
            `tree`, a `PrefixTree` or one for each row, which takes the place of labels and bounds. `position_ids` of
            mRoPE are [3, B, S], or [4, B, S] with the positions in the text first, from which documents are read.
            Other tensors [B, S, ...] are cut as well, but not shifted: shift weights of labels before. Numbers,
            strings and tensors of one dimension are passed on.
        pad_token_id: fills up the ids of a sequence that the layout cannot divide equally between ranks. Labels are
            filled with -100: integers [B, S, ...] that have a -100, or whose name ends as "labels", "target" or
            "label_ids" do (but not "is_label"), and floats with both. Others are filled with 0.
        layer_mask: `burst_plugin.huggingface.layer_mask(model)`, for `layout="auto"` to balance work; None: causal.

    Returns:
        The same keys with shards [B, S_local, ...]; `position_ids` in any case; `shift_labels` in place of `labels`,
        which a loss might shift again; a `SequenceShard`, with the mask and the document bounds, under "burst".

    Raises:
        ValueError: on every rank of `cp`, for a batch that cannot be cut, is cut already, or differs between ranks.
    """
    if not isinstance(cp, ContextParallel):
        raise ValueError(f"cp is {shown(cp)}, not a ContextParallel; make one of the process group once, and pass it")
    read, number = prepared_together(partial(_read, batch, cp, pad_token_id), partial(_compare, cp))
    draws = cp.rank_state.draws
    if draws.seed is None:
        draws.seed = int(cp.agreement.of_first_rank(str(torch.initial_seed())))
    tensors, positions = read.tensors, read.tensors["position_ids"]
    types = {name: type_runs(tensors[name]) for name in _TOKEN_TYPES if name in tensors}
    tokens = _tokens(cp, read, Causal() if layer_mask is None else layer_mask(types))
    local = {name: _shard(name, x, cp, tokens, pad_token_id) for name, x in tensors.items()}
    real = None if read.real is None else cp.shard(read.real, 1, tokens)
    names = _WHOLE if read.media else _WHOLE[:1]
    shard = SequenceShard(
        cp,
        length=positions.shape[-1],
        tokens=tokens,
        mask=read.mask,
        valid_tokens=_count_labels(batch, tensors["shift_labels"]) if "shift_labels" in tensors else 0,
        seed=read.checksum,
        name=f"batch {read.checksum:08x} of comparison {number}",
        real=real,
        longest=int((positions[-3:] if positions.dim() == 3 else positions).max()),
        token_types=types,
        counted=_counted(batch, read, local["position_ids"], cp, tokens),
        has_media=read.media,
        whole={name: batch[name] for name in names if isinstance(batch.get(name), Tensor)},
    )
    if cp.ranks > 1:
        for name in _IDS:
            if name in local:
                setattr(local[name], _MARK, True)
    passed_on = {k: v for k, v in batch.items() if k not in tensors and k not in _MASK_KEYS and k != "labels"}
    return {**passed_on, **local, SHARD_KEY: shard}


def as_given(batch: Mapping[str, Any], cp: ContextParallel) -> dict[str, Any]:
    """Return the batch of a ring of one rank unchanged, with its `SequenceShard` for attention added under "burst".

    A model on one rank gets the padding, the document bounds and the positions of the batch, and shifts its labels:
    its own layers may need them, and its outputs have every token of the batch.
    """
    shard: SequenceShard = shard_batch(batch, cp)[SHARD_KEY]
    return {**batch, SHARD_KEY: replace(shard, as_given=True)}


def check_shard(batch: Mapping[str, Any]) -> None:
    """Raise ValueError for parts of a shard that do not fit together, before they are passed to a model.

    Ids that were cut, without the entry that says so, would be taken for a whole sequence; labels of a shard, under
    the name of labels that models shift, would be shifted twice. A tree that was not cut would be ignored.
    """
    if SHARD_KEY not in batch and _ids_are_cut(batch):
        raise ValueError(
            f"got the ids of a shard without its entry {SHARD_KEY!r}, as if they were a whole sequence; pass all "
            "that shard_batch returned, to the model itself, not to its forward: model(**batch)"
        )
    if SHARD_KEY not in batch and batch.get("tree") is not None:
        raise ValueError(
            "got a tree with a whole batch, which a model computes as one text; pass what shard_batch(batch, cp) "
            "returns, or leave the tree out"
        )
    labels, shard = batch.get("labels"), batch.get(SHARD_KEY)
    if shard is None or getattr(shard, "as_given", False):
        return
    if isinstance(labels, Tensor) and labels.dim() == 2 and batch.get("shift_labels") is None:
        raise ValueError(
            "got labels with a shard, which models would shift, but labels of a shard are shifted already; pass them "
            "as shift_labels"
        )


def shifted(labels: Tensor) -> Tensor:
    """Return each token's target, [B, S]: the label of the token after it, `IGNORED_LABEL` for the last one."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)


class _WholeBatch(NamedTuple):
    """A batch of whole sequences as it was read.

    tensors: [B, S, ...] by name, to be cut along the sequence; position_ids of mRoPE are [3, B, S] or [4, B, S].
    padded: the length S with padding, which ranks share equally.
    mask: padding and document bounds; None if there are neither.
    real: which tokens of the padded length, [B, S], are no padding; None if all are.
    checksum: what ranks compare to know that they cut the same batch.
    media: whether there are images, video or audio, which are not cut.
    """

    tensors: dict[str, Tensor]
    padded: int
    mask: Mask | None
    real: Tensor | None
    checksum: int
    media: bool


def _read(batch: Mapping[str, Any], cp: ContextParallel, pad_token_id: int) -> _WholeBatch:
    """Return the content of a batch. Raise ValueError for a batch that is cut already, or cannot be read or cut."""
    if isinstance(batch, Mapping) and (isinstance(batch.get(SHARD_KEY), SequenceShard) or _ids_are_cut(batch)):
        raise ValueError(
            "the batch is cut already, by shard_batch or by a data loader that calls it, as sp_size of "
            "ParallelismConfig makes one: pass it to the model as it is"
        )
    whole_number("pad_token_id={}", pad_token_id, "use the id of the token that fills up sequences, or leave it out")
    tensors = _tensors_to_cut(batch)
    padded = even_length(tensors["position_ids"].shape[-1], cp.ranks)
    trees = _trees(batch, tensors)
    positions = positions_in_text(tensors["position_ids"])
    valid = valid_tokens(batch, positions)
    mask, real = batch_mask(batch, positions, valid, padded, trees), real_tokens(valid, padded)
    media = [value for name, value in batch.items() if _is_media(name, value, positions.shape)]
    compared = [*tensors.values(), batch.get("attention_mask"), batch.get("cu_seq_lens_q"), *tree_leaves(media)]
    checksum = checksum_of([x for x in compared if isinstance(x, Tensor)])
    return _WholeBatch(tensors, padded, mask, real, checksum, bool(media))


def _is_media(name: str, value: object, shape: Sequence[int]) -> bool:
    """Return whether an entry of a batch holds images, video or audio, and not something of every token [B, S]."""
    holds = isinstance(value, Tensor | list | tuple)
    is_input = name.startswith(("pixel_", "input_features", "feature_attention_mask"))
    of_tokens = isinstance(value, Tensor) and value.shape == tuple(shape) and not is_input
    return name.startswith(MEDIA) and holds and not of_tokens


def _ids_are_cut(batch: Mapping[str, Any]) -> bool:
    """Return whether a batch carries ids that were cut."""
    return any(hasattr(batch.get(name), _MARK) for name in _IDS)


def _compare(cp: ContextParallel, read: _WholeBatch | None, problem: str) -> int:
    """Return the number of the comparison in which all ranks turned out to have the same batch; collective."""
    compared = {}
    if read is not None:
        compared["batch"] = f"{list(read.tensors['position_ids'].shape)} with checksum {read.checksum}"
    try:
        return cp.agree(compared, problem)
    except ValueError as error:
        if problem or "batch=" not in str(error):
            raise
        raise ValueError(
            f"{error}; all ranks of a context-parallel group take the same batch and cut it between them: let "
            "the sampler count data-parallel ranks, not all ranks (Trainer, Accelerate: sp_size of "
            "ParallelismConfig, with DeepSpeed; without it do not prepare the loader, and give it "
            "DistributedSampler(data, num_replicas=world // cp, rank=rank // cp))"
        ) from error


def _tokens(cp: ContextParallel, read: _WholeBatch, layers: Mask) -> Tokens:
    """Return how tokens are assigned: by the group's layout or, if that is "auto", to suit the mask of layers."""
    mask = layers if read.mask is None else layers & read.mask
    if cp.strategy.layout == AUTO:
        return cp.tokens(read.padded, mask, alike=True)
    tokens = Tokens(read.padded)
    looks = _looked_at.get(cp, 0)
    if cp.rank == 0 and read.mask is not None and looks < _LOOKS:
        uneven = cp.imbalance(mask, tokens)
        _looked_at[cp] = looks + 1 if uneven <= _UNEVEN else _LOOKS
        if uneven > _UNEVEN:
            _LOG.warning(
                'documents, trees or padding give one rank %.1f times the attention work of the mean; layout="auto" '
                "balances every batch",
                uneven,
            )
    return tokens


def _shard(name: str, x: Tensor, cp: ContextParallel, tokens: Tokens, pad_token_id: int) -> Tensor:
    """Return this rank's shard of one tensor of a batch, padded to the length of `tokens`."""
    dim = x.dim() - 1 if name == "position_ids" else 1  # positions of mRoPE are [3, B, S]
    missing = tokens.length - x.shape[dim]
    if missing:
        if name == "position_ids":  # repeats the last one: a table of learned positions may end there
            tail = x[..., -1:].expand(*x.shape[:-1], missing)
        else:
            other = IGNORED_LABEL if _are_labels(name, x) else 0
            fill = {"shift_labels": IGNORED_LABEL, "input_ids": pad_token_id}.get(name, other)
            tail = x.new_full((x.shape[0], missing, *x.shape[2:]), fill)
        x = torch.cat([x, tail], dim)
    return cp.shard(x, dim, tokens)


def _are_labels(name: str, x: Tensor) -> bool:
    """Return whether an entry of a batch holds labels: by its name, or since it has tokens to ignore; floats by both.

    Floats of such a name may be probabilities, which have no tokens to ignore, and a reward may be -100.
    """
    if x.is_complex() or not x.dtype.is_signed:  # bool is not signed
        return False
    is_named, is_whole = _LABELS.fullmatch(name) is not None, not x.is_floating_point()
    return (is_named and is_whole) or ((is_named or is_whole) and bool((x == IGNORED_LABEL).any()))


def _count_labels(batch: Mapping[str, Any], labels: Tensor) -> int:
    """Return how many of the shifted `labels` are part of the loss; raise ValueError for unknown ones below 0."""
    counts = labels != IGNORED_LABEL
    if labels.is_floating_point() or not labels.dtype.is_signed:
        return int(counts.sum())
    count, others = torch.stack([counts.sum(), (counts & (labels < 0)).sum()]).tolist()  # one wait for a device
    if others:
        name = "labels" if batch.get("shift_labels") is None else "shift_labels"
        raise ValueError(
            f"{name} has {others} values below 0 other than {IGNORED_LABEL}, which would be counted as labels; write "
            f"{name}.masked_fill({name} < 0, {IGNORED_LABEL}), and give the loss ignore_index={IGNORED_LABEL}"
        )
    return int(count)


def _counted(
    batch: Mapping[str, Any], read: _WholeBatch, positions: Tensor, cp: ContextParallel, tokens: Tokens
) -> Tensor | None:
    """Return the positions of this rank's tokens, counted without padding, which is at -1.

    `positions` count padding, too. Returns None for a batch with positions of its own.
    """
    if batch.get("position_ids") is not None or batch.get("tree") is not None:
        return None
    return positions if read.real is None else cp.shard(read.real.cumsum(1) * read.real - 1, 1, tokens)


def _tensors_to_cut(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return all tensors of a batch that are to be cut, with positions, and with labels shifted."""
    if not isinstance(batch, Mapping):
        raise ValueError(f"a batch has to be a dict of tensors by name, got a {type(batch).__name__}")
    ids = batch.get("input_ids", batch.get("inputs_embeds"))
    if not isinstance(ids, Tensor) or ids.dim() < 2 or 0 in ids.shape:
        got = (", ".join(map(str, batch)) or "nothing") if ids is None else _kind(ids)
        raise ValueError(f"a batch needs input_ids, a tensor of shape [batch, tokens], got {got}")
    tensors: dict[str, Tensor] = {}
    for name, value in batch.items():
        if name in _MASK_KEYS or _is_media(name, value, ids.shape[:2]):
            continue
        if not isinstance(value, Tensor) or value.dim() < 2:
            _check_passed_on(name, value)
            continue
        if name == "position_ids":
            _check_positions(value, ids)
        elif value.shape[:2] != ids.shape[:2]:
            instead = "give one for each token, not shifted" if name == "labels" else f"take {name} out of the batch"
            raise ValueError(
                f"{name} of shape {list(value.shape)} cannot be cut along the sequence: the first two dims of a "
                f"batch's tensors have to be {list(ids.shape[:2])}, those of the input; {instead}"
            )
        tensors[name] = value
    for name in ("position_ids", "labels", "shift_labels"):
        if batch.get(name) is not None and name not in tensors:
            raise ValueError(
                f"{name} cannot be cut along the sequence: got {_kind(batch[name])}, expected a tensor of shape "
                f"{list(ids.shape[:2])}, one for each token; give others another name"
            )
    check_masks(batch, ids)
    if "position_ids" not in tensors:
        tensors["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[:2])
    labels = tensors.pop("labels", None)
    if labels is not None:
        if labels.shape != ids.shape[:2]:
            wrong = f"labels of shape {list(labels.shape)} are not one for each token, {list(ids.shape[:2])}"
            raise ValueError(f"{wrong}; give others than those of the next token another name")
        tensors.setdefault("shift_labels", shifted(labels))
    return tensors


def _check_passed_on(name: str, value: object) -> None:
    """Raise ValueError for tensors in a list or dict, as images may be given, which would be passed on whole."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    if any(isinstance(part, Tensor) and part.dim() > 1 for part in parts):
        held = f"{name}, tensors in a {type(value).__name__}"
        raise ValueError(f"{held}, cannot be cut along the sequence; take {name} out of the batch")
    for part in parts:
        _check_passed_on(name, part)


def _check_positions(positions: Tensor, ids: Tensor) -> None:
    """Raise ValueError for positions that leave a token out, or give it more than mRoPE does."""
    shape, rows = list(positions.shape), list(ids.shape[:2])
    if shape == rows or (len(shape) == 3 and shape[0] in (3, 4) and shape[1:] == rows):
        return
    raise ValueError(
        f"position_ids of shape {shape} are not one for each token: give {rows}, expanded to all rows, or those of "
        f"mRoPE, {[3, *rows]}, or {[4, *rows]} with the positions in the text first"
    )


def _kind(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _trees(batch: Mapping[str, Any], tensors: dict[str, Tensor]) -> tuple[PrefixTree, ...]:
    """Return the prefix trees of a batch, one, or one for each row, and put their positions into `tensors`.

    Logical positions identify a tree, so that ranks need not compare anything else of it.
    Raises ValueError for an entry that is no tree of this batch, or for entries that do not go with a tree.
    """
    entry = batch.get("tree")
    if entry is None:
        return ()
    positions = tensors["position_ids"]
    if positions.dim() == 3:
        raise ValueError(
            f"position_ids of shape {list(positions.shape)}, of mRoPE, are given with a tree, whose positions count "
            "along each path; leave the tree out"
        )
    shape = positions.shape
    trees = tuple(entry) if isinstance(entry, list | tuple) else (entry,)
    if not all(isinstance(tree, PrefixTree) for tree in trees) or len(trees) not in (1, shape[0]):
        raise ValueError(f"tree={shown(entry)} is not valid; give a PrefixTree, or a list, one for each batch row")
    for tree in trees:
        tree.beside_trees(shape[1], shape[1])  # raises ValueError if it is of another length
    for name in ("labels", "cu_seq_lens_q"):
        if batch.get(name) is not None:
            why = "a token has several next ones: use edges" if name == "labels" else "roots are documents"
            raise ValueError(f"{name} is given with a tree, in which {why}; leave it out")
    logical = torch.stack([tree.logical(torch.arange(shape[1], device="cpu")) for tree in trees]).expand(shape)
    if batch.get("position_ids") is not None and not torch.equal(positions.cpu().long(), logical):
        raise ValueError("position_ids are not those of the tree, which count along each path; leave them out")
    tensors["position_ids"] = logical.to(positions.device)
    return trees
