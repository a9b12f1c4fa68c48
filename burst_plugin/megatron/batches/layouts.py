"""Batches, rotary embeddings and rolled tensors cut by the ring's layout, where Megatron itself cuts in zigzag.

With 8 tokens over 2 ranks, and `layout="striped"`, rank 0 gets the parts of all tensors that belong to tokens
0 2 4 6, and rank 1 the parts that belong to tokens 1 3 5 7. With `layout="zigzag"` Megatron's own code runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, utils
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding, RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import multi_token_prediction
from torch import Tensor

from burst_plugin.frameworks.wrapping import bind, wrap, wrap_everywhere
from burst_plugin.megatron.batches.documents import hybrid_model
from burst_plugin.megatron.batches.packed import assign_by, by_document, layout_of
from burst_plugin.megatron.flags.arguments import PACKS, cuts_documents_as_one, flag_of, resets_attention_mask
from burst_plugin.megatron.flags.config import asks_for_burst, brings_groups
from burst_plugin.megatron.registry import Looks, Registry
from burst_plugin.megatron.repairs.batches import WANT_TE, cut_packed, functions_that_cut
from burst_plugin.moved_tokens import shifted
from burst_plugin.sequence.layout import Tokens, positions
from burst_plugin.strategy import AUTO

MEGATRONS_OWN = "zigzag"
# Entries of a batch without one value per token.
_NOT_BY_TOKEN = frozenset({"cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group"})
_CUT_BY = (
    "cut it by megatron.core.utils.get_batch_on_this_cp_rank, packed documents by burst_plugin.megatron."
    "packed_indices, which follow the layout"
)
_FEWEST = 4  # tokens of a rank: fewer may look like another cut
_ROLLS_LOCALLY = "_packed_seq_params_for_local_hsm_roll"  # since 0.20


def hook_layouts(registry: Registry) -> str:
    """Have Megatron cut batches, rotary embeddings and labels of token prediction by the ring's layout.

    It wraps the functions of Megatron that cut, rotate and roll tensors, and `packed_indices` follows the layout,
    too. registry: the rings, whose `layout` is looked up for every batch. Returns a line for the report of
    `install()`.
    """
    hooks = LayoutHooks(registry)
    for name in functions_that_cut():
        wrap_everywhere(utils, name, hooks.packed_batch if name in WANT_TE else hooks.batch)
    wrap_everywhere(rope_utils, "get_pos_emb_on_this_cp_rank", hooks.rotary_embedding)
    wrap_everywhere(rope_utils, "apply_rotary_pos_emb", hooks.rotate)
    for kind in (RotaryEmbedding, YarnRotaryEmbedding, MultimodalRotaryEmbedding):
        kept = kind.forward
        replaced = wrap(kind, "forward", hooks.kept_rotary_embedding)
        if hasattr(kept, "cache_clear"):
            vars(replaced)["cache_clear"] = kept.cache_clear
    wrap(YarnRotaryEmbedding, "get_cached_cos_sin", hooks.fused_tables)
    wrap(GPTModel, "_preprocess", hooks.look_at_batch)
    wrap(hybrid_model(), "forward", hooks.look_at_batch)
    wrap_everywhere(multi_token_prediction, "roll_tensor", hooks.roll)
    if hasattr(multi_token_prediction, _ROLLS_LOCALLY):
        wrap(multi_token_prediction, _ROLLS_LOCALLY, hooks.local_documents)
    assign_by(hooks.assign)
    return "batches, rotary embedding and labels of token prediction are cut by the layout of the ring"


class LayoutHooks:
    """Functions in place of Megatron's, which cut over its groups in zigzag: these cut as `registry` says."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def _apply_to(self, group: Any) -> bool:
        return group is not None and group.size() > 1 and self._registry.layout != MEGATRONS_OWN

    def _apply_to_packed(self, group: Any) -> bool:
        """Return whether packed documents are cut in another way than Megatron's kernels rotate them."""
        return self._apply_to(group) or (group is not None and group.size() > 1 and cuts_documents_as_one())

    def _documents_decide(self) -> bool:
        """Return whether ranks hold other tokens of every microbatch, by the documents of its sequences."""
        return self._registry.layout == AUTO and resets_attention_mask()

    def _tokens_of_batch(self, offsets: tuple[int, ...] | None, length: int, group: dist.ProcessGroup) -> Tokens:
        if offsets is None:
            return self._registry.tokens_of_batch(length, group.size())
        return self._registry.packed_tokens(offsets, group.size())

    def batch(self, original: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Cut entries [B, S, ...] of a batch of whole sequences, and its attention_mask [B, 1, S, S] by the queries.

        Positions of mRoPE, [3, B, S], stay whole: its rotary embedding is made of them, and then cut.

        Raises ValueError for a length that ranks cannot share evenly, as pipelines and rotary embedding need it.
        """
        arguments = bind(original, *args, **kwargs).arguments
        batch, group = arguments["batch"], _group(arguments)
        axes = batch.get("position_ids")
        if isinstance(axes, Tensor) and axes.dim() == 3:
            batch["position_ids"] = None
            return {**self.batch(original, *args, **kwargs), "position_ids": axes}
        if not self._apply_to(group):
            return original(*args, **kwargs)  # type: ignore[no-any-return]
        self._registry.cuts_batches = True
        packed = batch.get("cu_seqlens")
        offsets = None if packed is None else tuple(packed.flatten().tolist())
        for name, x in batch.items():
            dim = 2 if name == "attention_mask" else 1
            if not isinstance(x, Tensor) or x.dim() <= dim or name in _NOT_BY_TOKEN:
                continue
            tokens = self._tokens_of_batch(offsets, x.shape[dim], group)
            divisor = layout_of(tokens).chunks_per_rank * group.size()
            if tokens.length % divisor:
                raise ValueError(
                    f"{name} {list(x.shape)} has {tokens.length} tokens, expected a multiple of {divisor} with "
                    f"context_parallel_size={group.size()} and layout={tokens.layout!r}; pad the sequence"
                )
            batch[name] = _cut(x, dim, tokens, group)
        return batch  # type: ignore[no-any-return]

    def packed_batch(self, original: Any, batch: dict[str, Any], cp_group: Any = None) -> dict[str, Any]:
        """Cut a batch of packed documents, as Megatron does by Transformer Engine from 0.18 on."""
        cp_group = _group({"cp_group": cp_group})
        return (cut_packed if self._apply_to(cp_group) else original)(batch, cp_group)

    def assign(self, offsets: tuple[int, ...], ranks: int) -> Tokens:
        """Return how ranks hold the tokens of packed documents that are about to be cut."""
        self._registry.cuts_batches = True
        return self._registry.packed_tokens(offsets, ranks)

    def rotary_embedding(self, original: Any, pos_emb: Tensor, seq_dim: int, cp_group: Any = None) -> Tensor:
        """Cut the rotary embedding of a whole sequence along `seq_dim`."""
        if not self._apply_to(cp_group):
            return original(pos_emb, seq_dim, cp_group)  # type: ignore[no-any-return]
        if self._documents_decide():  # Megatron keeps what this returns, for all microbatches
            return pos_emb
        tokens = self._registry.tokens_of_batch(pos_emb.shape[seq_dim], cp_group.size())
        return _cut(pos_emb, seq_dim, tokens, cp_group)

    def kept_rotary_embedding(self, original: Any, embedding: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the rotary embedding of a whole sequence, cut by documents; Megatron keeps the latest embedding.

        At inference it is the embedding of the new tokens, whose positions all rows of a batch share; with a prefix
        tree, the embedding of the logical positions of this rank's tokens.
        """
        registry, turn = self._registry, self._registry.turn
        arguments = bind(original, embedding, *args, **kwargs).arguments
        group: Any = arguments.get("cp_group") or getattr(embedding, "cp_group", None)
        if turn is not None:
            start, stop = turn.starts[0], turn.stops[0]
            tables = original(embedding, stop - start, start, True)  # as for packed documents: not cut
            return _on_table(tables, lambda table: table[turn.index[0].to(table.device)])
        if registry.tree is not None:
            cp = next(cp for cp in registry.contexts() if cp.group is group)
            rows = registry.tree.logical(cp.positions(registry.tokens_of_tree(registry.tree, cp)))
            tables = original(embedding, int(rows.max()) + 1, 0, True)
            return _on_table(tables, lambda table: table[rows.to(table.device)])
        tables = original(embedding, *args, **kwargs)
        is_of_batch = self._documents_decide() and registry.identity.microbatch_id is not None  # YaRN's first is not
        if not is_of_batch or arguments.get("packed_seq") or not self._apply_to(group):
            return tables
        return _on_table(
            tables, lambda table: _cut(table, 0, registry.tokens_of_batch(len(table), group.size()), group)
        )

    def rotate(
        self,
        original: Any,
        t: Tensor,
        freqs: Tensor,
        config: Any,
        cu_seqlens: Tensor | None = None,
        mscale: float = 1.0,
        cp_group: Any = None,
        **options: Any,
    ) -> Tensor:
        """Rotate queries or keys; in packed documents, [T/CP, H, D], by their positions in their documents."""
        group = _group({"cp_group": cp_group})
        if cu_seqlens is None or not self._apply_to_packed(group):
            return original(t, freqs, config, cu_seqlens, mscale, cp_group, **options)  # type: ignore[no-any-return]
        rows = self._positions(cu_seqlens, t.shape[0] * group.size(), group)
        freqs = freqs[rows.clamp(max=freqs.shape[0] - 1)]  # padding may be longer than any document
        rotated: Tensor = original(t.unsqueeze(1), freqs, config, None, mscale, cp_group, **options)
        return rotated.squeeze(1)

    def _positions(self, cu_seqlens: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
        """Return the positions of this rank's tokens in the documents of a packed sequence of `length`.

        They are looked up for every layer, and computed once where that reads a tensor.
        """

        def compute() -> Tensor:
            return _in_documents(self._documents(cu_seqlens, length, group), cu_seqlens, group)

        if self._registry.layout != AUTO:
            return compute()
        return self._registry.tensor_cache.get(cu_seqlens, ("positions", group.size(), group.rank()), compute)

    def _documents(self, cu_seqlens: Tensor, length: int, group: dist.ProcessGroup) -> Tokens:
        """Return which tokens of a packed sequence ranks hold; core attention refuses offsets that do not fit it."""
        plain = Tokens(length, layout=self._registry.layout_of_sequences)
        if self._registry.layout != AUTO:
            return plain
        offsets = tuple(cu_seqlens.flatten().tolist())
        return self._registry.packed_tokens(offsets, group.size()) if offsets[-1] == length else plain

    def look_at_batch(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `GPTModel._preprocess`, or a hybrid model, and count the call.

        Raises ValueError if the model's first batch was not cut, or contiguously for another layout, and for the
        first batch whose positions tell that it was cut in zigzag for another layout; on all ranks of the group.
        """
        arguments = bind(original, model, *args, **kwargs).arguments
        held, group = arguments.get("position_ids"), _group(arguments)
        self._registry.identity.model_calls += 1
        if self._registry.turn is not None or self._registry.tree is not None:
            return original(model, *args, **kwargs)
        is_by_layout = asks_for_burst(model.config) and not brings_groups(model.config) and self._apply_to(group)
        if is_by_layout and model.pre_process and not self._registry.cuts_batches:
            self._refuse_untold(arguments)
        if group is not None and group.size() > 1 and isinstance(held, Tensor) and held.dim() == 2:
            packed, looks = arguments.get("packed_seq_params"), self._registry.looks_of(model)
            is_first, looks.has_begun = not looks.has_begun, True
            if is_first and packed is None and asks_for_burst(model.config):
                _refuse_uncut(arguments.get("input_ids"), held[0].tolist(), self._registry.layout, group)
            if is_by_layout:
                self._refuse_zigzag(looks, arguments, group)
        return original(model, *args, **kwargs)

    def _refuse_untold(self, arguments: Mapping[str, Any]) -> None:
        """Raise ValueError for a batch that other code has cut, if its positions do not tell how.

        Rotary embedding needs none, so that programs that cut in zigzag by themselves often give none, or whole ones.
        """
        held, ids = arguments.get("position_ids"), arguments.get("input_ids")
        by_documents = arguments.get("packed_seq_params") is not None or resets_attention_mask()
        if not by_documents and self._registry.layout_of_sequences == MEGATRONS_OWN:
            return
        if held is None:
            said = "position_ids=None"
        elif ids is not None and held.dim() == 2 and held.shape[1] != ids.shape[1]:
            said = f"position_ids {list(held.shape)} are not those of input_ids {list(ids.shape)}, which"
        else:
            return
        raise ValueError(
            f"layout={self._registry.layout!r} is not supported with a batch that other code has cut, perhaps in "
            f"zigzag: {said} does not tell; {_CUT_BY}, or pass position_ids of this rank's tokens; models that cut "
            "embeddings by themselves need --burst-layout zigzag (layout='zigzag')"
        )

    def _refuse_zigzag(self, looks: Looks, arguments: Mapping[str, Any], group: dist.ProcessGroup) -> None:
        """Raise ValueError on all ranks if one has positions [B, S/CP] of zigzag, which are not of the layout.

        Collective where a batch is looked at. None is after a batch that tells that it was cut by the layout, and
        fewer and fewer are after batches whose positions tell nothing, as those of padding.
        """
        looks.calls += 1
        if looks.calls < looks.next_call:
            return
        held, packed = arguments["position_ids"][0], arguments.get("packed_seq_params")
        fits = self._fits(looks, held, packed, group)
        if fits is None:
            return
        told = torch.tensor(fits, dtype=torch.int32, device=_device_of(arguments))
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
        is_of_zigzag, is_of_layout = told.tolist()
        if is_of_zigzag:
            raise ValueError(
                f"this batch has been cut in zigzag, but layout={self._registry.layout!r}: {_CUT_BY}; or use "
                "--burst-layout zigzag"
            )
        looks.next_call = math.inf if is_of_layout else 2 * looks.calls

    def _fits(self, looks: Looks, held: Tensor, packed: Any, group: dist.ProcessGroup) -> tuple[bool, bool] | None:
        """Return whether positions [S/CP] are of this rank in zigzag alone, and whether in the layout alone.

        None where all ranks hold the same tokens in both: that tells nothing, and a GPU is not waited for.
        """
        length, is_packed = len(held) * group.size(), packed is not None and packed.qkv_format == "thd"
        starts = _starts(packed) if is_packed else torch.tensor([0, length], device="cpu")
        offsets = tuple(starts.flatten().tolist())
        if offsets[-1] != length or any(start % (2 * group.size()) for start in offsets):
            return False, False
        if is_packed:
            ours = self._documents(starts, length, group)
        else:
            ours = self._registry.tokens_of_batch(length, group.size())
        zigzag = by_document(offsets, group.size())
        if looks.alike == (ours, zigzag) or _are_alike(ours, zigzag, group.size()):  # with "auto" one document is
            looks.alike = ours, zigzag
            return None

        def fit(tokens: Tokens) -> bool:
            """Return whether `tokens` have these positions, in the whole sequence or in their documents."""
            sequence = torch.tensor([0, length], device="cpu")
            return any(held.tolist() == _in_documents(tokens, ends, group).tolist() for ends in (sequence, starts))

        is_of_zigzag, is_of_layout = fit(zigzag), fit(ours)
        return is_of_zigzag and not is_of_layout, is_of_layout and not is_of_zigzag

    def fused_tables(self, original: Any, embedding: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the tables of multi-latent attention's fused rotary embedding.

        Raises ValueError for packed documents, whose positions the fused kernels take to be in zigzag.
        """
        arguments = bind(original, embedding, *args, **kwargs).arguments
        group = _group(arguments) or embedding.cp_group
        if self._apply_to_packed(group) if arguments.get("packed_seq") else self._documents_decide():
            raise ValueError(
                f"apply_rope_fusion=True of multi-latent attention is not supported with packed documents in "
                f"layout={self._registry.layout!r}: its kernels rotate them in zigzag; use --no-rope-fusion"
            )
        return original(embedding, *args, **kwargs)

    def roll(self, original: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Roll a tensor that is cut over a group as if it were whole; return this rank's rolled part, and its sum.

        Collective, with gradient, which Megatron's own does not send to the rank that a row came from.
        """
        call = bind(original, *args, **kwargs)
        call.apply_defaults()
        local, shifts, dim, group = (call.arguments[name] for name in ("tensor", "shifts", "dims", "cp_group"))
        packed = call.arguments["packed_seq_params"]
        if local is None or group is None or group.size() == 1:
            return original(*args, **kwargs)  # type: ignore[no-any-return]
        cuts_otherwise = self._apply_to(group) if packed is None else self._apply_to_packed(group)
        if not cuts_otherwise and not (local.requires_grad and torch.is_grad_enabled()):
            return original(*args, **kwargs)  # type: ignore[no-any-return]
        if shifts != -1:
            raise ValueError(f"shifts={shifts} is not supported over context-parallel ranks; roll by -1")
        length, ends = local.shape[dim] * group.size(), None
        if packed is None:
            tokens = self._registry.tokens_of_batch(length, group.size())
        else:
            starts = _starts(packed).flatten()
            ends = starts[1:]
            if cuts_otherwise:
                tokens = self._documents(starts, length, group)
            else:
                tokens = by_document(tuple(starts.tolist()), group.size())
        rank, ranks = group.rank(), group.size()
        shards = [layout_of(tokens).runs(other, ranks, tokens) for other in range(ranks)]
        rolled = shifted(local, -1, dim, shards, (rank, group))
        if ends is not None:
            held = positions(shards[rank], ends.device)
            is_last = torch.isin(held + 1, ends)
            sizes = [1] * local.dim()
            sizes[dim] = -1
            rolled = rolled.masked_fill(is_last.view(sizes), 0)
        return rolled, rolled.sum() if call.arguments.get("return_sum", True) else None

    def local_documents(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Return where documents begin in a rank's own tokens, inside which Megatron rolls mixed hidden states.

        It does so with sequence parallelism, and for padded documents. Raises ValueError if documents are not cut in
        zigzag, each on its own, as Megatron takes them to be.
        """
        group = bind(original, *args, **kwargs).arguments["cp_group"]
        if self._apply_to_packed(group):
            cut = f"layout={self._registry.layout!r}" if self._apply_to(group) else flag_of(PACKS)
            raise ValueError(
                f"mtp_hsm=True on packed documents is not supported with {cut} where sequence_parallel=True, or "
                "where documents are padded: Megatron takes each to be cut in zigzag on its own; drop --mtp-hsm, or "
                "--sequence-parallel and the padding"
            )
        return original(*args, **kwargs)


def _on_table(tables: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to a rotary embedding, which Megatron may return together with a scale."""
    if not isinstance(tables, tuple):
        return function(tables)
    table, *others = tables
    return (function(table), *others)


def _group(arguments: Any) -> Any:
    """Return the group among Megatron's arguments, or else its context-parallel group, which it takes then."""
    return arguments.get("cp_group") or parallel_state.get_context_parallel_group(check_initialized=False)


def _device_of(arguments: Mapping[str, Any]) -> torch.device:
    """Return where a model computes; positions, of which many models need none, may be elsewhere."""
    inputs = map(arguments.get, ("decoder_input", "input_ids", "position_ids"))
    device: torch.device = next(x for x in inputs if x is not None).device
    return device


def _are_alike(tokens: Tokens, others: Tokens, ranks: int) -> bool:
    """Return whether every rank holds the same of the tokens of a sequence in two ways to spread them."""
    return all(
        torch.equal(*(positions(layout_of(each).runs(rank, ranks, each), "cpu") for each in (tokens, others)))
        for rank in range(ranks)
    )


def _starts(packed: Any) -> Tensor:
    """Return where packed documents begin, and the last one ends."""
    padded: Tensor | None = packed.cu_seqlens_q_padded
    return packed.cu_seqlens_q if padded is None else padded


def _refuse_uncut(tokens: Tensor | None, held: list[int], layout: str, group: dist.ProcessGroup) -> None:
    """Raise ValueError if all ranks have the same tokens, or rank 1 the positions of consecutive ones; collective.

    In zigzag and striped the first token of rank 1 is in the first half of as many consecutive tokens as it holds.
    Tokens that are all alike tell nothing, and neither do positions from 0 on, of which many models need none.
    """
    if layout not in (MEGATRONS_OWN, "striped") or tokens is None or len(held) < _FEWEST:
        return
    weights = torch.arange(tokens.numel(), device=tokens.device) % 8191 + 1
    digest = (tokens.flatten().long() * weights).sum()
    is_consecutive = group.rank() == 1 and held == [*range(len(held), 2 * len(held))]
    bounds = torch.stack([digest, -digest, torch.full_like(digest, is_consecutive)])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    most, least, any_consecutive = bounds.tolist()
    cut = "in forward_step cut it by megatron.core.utils.get_batch_on_this_cp_rank"
    if any_consecutive:
        raise ValueError(
            f"this batch has been cut into consecutive tokens, but layout={layout!r}: {cut}, which follows the "
            "layout; or use --burst-layout contiguous"
        )
    if most == -least and bool((tokens != tokens.flatten()[0]).any()):
        raise ValueError(
            f"this batch has not been cut for context_parallel_size={group.size()}: all ranks have the same "
            f"{len(held)} tokens, which the ring takes for parts of {len(held) * group.size()}; {cut}"
        )


def _cut(x: Tensor, dim: int, tokens: Tokens, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's tokens of a whole sequence `x`, along `dim`."""
    return layout_of(tokens).shard(x, dim, (group.rank(), group.size()), tokens)


def _in_documents(tokens: Tokens, cu_seqlens: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the positions of this rank's tokens in their documents, without reading `cu_seqlens`."""
    held = positions(layout_of(tokens).runs(group.rank(), group.size(), tokens), cu_seqlens.device)
    starts = cu_seqlens.flatten().long()
    return held - starts[torch.searchsorted(starts, held, right=True) - 1]
