"""Documents of pretraining batches (`--reset-attention-mask`), on their way from the data loader to every layer.

A sample of Megatron's `GPTDataset` holds several documents, each with an end-of-document token last. Megatron
keeps them apart by masks [S, S]. Here a sample has bounds instead: where documents begin, filled up with S.

    tokens    the cat <eod> a dog barks <eod> he
    bounds    0 3 7 8 8 8 8 8 8

1. `GPTDataset` adds bounds to a sample, in the loader's worker.
2. A rank that reads a batch keeps its bounds. Other tensor ranks and pipeline stages, which read none, get them
   through the store: from host to host, so that no GPU waits.
3. `GPTModel`, or a hybrid model, takes them as its `attention_mask`, int32 [B, N] on the CPU. Megatron hands it to
   every layer, and again to layers that it recomputes.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets import gpt_dataset
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import Tensor

from burst_plugin.frameworks.wrapping import bind, wrap
from burst_plugin.megatron.flags.arguments import resets_attention_mask
from burst_plugin.megatron.identity import Identity
from burst_plugin.sequence.layout import check_cu_seqlens, check_total
from burst_plugin.sequence.masks import Documents, Mask, PerRow

Rows = tuple[tuple[int, ...], ...]  # where the documents of every batch row begin, and the last one ends

_KEY = "burst_documents"  # of a sample, and of a batch


class MicrobatchDocuments:
    """Where the documents of microbatches begin, kept by (number of the forward-backward pass, number in the pass).

    A rank that reads batches fills it by `keep`. Other tensor ranks and pipeline stages read the job's store.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Rows] = {}
        self._published: list[tuple[int, str]] = []  # pass and key
        self._recomputed: Rows | None = None
        self._awaiting: tuple[int, int] | None = None  # the microbatch that was read, until a model runs it

    @cached_property
    def _store(self) -> Any:
        """Return the job's store over a connection of its own: while this waits for a key, others may need theirs."""
        shared: Any = dist.distributed_c10d._get_default_store()
        return shared.clone()

    def keep(self, identity: Identity, bounds: Tensor) -> None:
        """Note where the documents of the microbatch in progress begin, and publish it for ranks that read no batch.

        Args:
            identity: knows which microbatch is in progress.
            bounds: int32 [B, S + 1], where documents begin in each row, filled up with S.

        Raises:
            ValueError: a second batch with other documents is read before a model has run the first; or no schedule
                of Megatron is running.
        """
        microbatch, rows = _microbatch_in_progress(identity), rows_of(bounds)
        if self._awaiting == microbatch and self._known[microbatch] != rows:
            raise ValueError(
                "a forward_step has read two batches before it ran a model, and --reset-attention-mask with burst "
                "attention would give the first the documents of the second; read a batch, run the model on it, and "
                "read the next one then"
            )
        self._awaiting = microbatch
        self._known = {known: rows for known, rows in self._known.items() if known[0] == microbatch[0]}
        self._known[microbatch] = rows
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        is_first = parallel_state.get_pipeline_model_parallel_rank() == 0
        if is_first and stages * parallel_state.get_tensor_model_parallel_world_size() > 1:
            # A backward pass waits for all stages. Evaluation does not: later stages may be many passes behind.
            while self._published and self._published[0][0] < identity.last_trained:
                self._store.delete_key(self._published.pop(0)[1])
            self._published.append((microbatch[0], _key(microbatch)))
            self._store.set(_key(microbatch), json.dumps(rows))

    def of(self, identity: Identity) -> Rows:
        """Return the bounds of each batch row's documents, of the recomputed layer or else the current microbatch.

        A row's bounds are where its documents begin, 0 first, and its length last. For a layer that is being
        recomputed they are the `rows` of `recomputing`. A rank that reads no batches waits here until the rank that
        reads them has published the bounds. `identity` knows which microbatch is in progress. Raises ValueError if no
        schedule of Megatron is running.
        """
        if self._recomputed is not None:
            return self._recomputed
        microbatch = _microbatch_in_progress(identity)
        if microbatch not in self._known:
            published = self._store.get(_key(microbatch))
            self._known = {known: rows for known, rows in self._known.items() if known[0] == microbatch[0]}
            self._known[microbatch] = tuple(map(tuple, json.loads(published)))
        return self._known[microbatch]

    def run(self, identity: Identity) -> Rows:
        """Return the bounds of each batch row's documents for a model that begins to run the microbatch.

        From then on `keep` accepts the next batch. `identity` knows which microbatch is in progress.
        """
        self._awaiting = None
        return self.of(identity)

    @contextmanager
    def recomputing(self, rows: Rows | None) -> Iterator[None]:
        """Make `of` return `rows` in this context, where a backward pass recomputes a layer; None changes nothing."""
        before = self._recomputed
        self._recomputed = before if rows is None else rows
        try:
            yield
        finally:
            self._recomputed = before


def _microbatch_in_progress(identity: Identity) -> tuple[int, int]:
    if identity.microbatch_id is None:
        raise ValueError(
            "--reset-attention-mask with burst attention is for models that Megatron's schedules run "
            "(get_forward_backward_func); drop the flag, or run this model by one of them"
        )
    return identity.microbatch_id


def _key(microbatch: tuple[int, int]) -> str:
    """Return the key in the store, which is shared by ranks that train on the same part of a batch."""
    place = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return f"burst_plugin/documents/{place}/{microbatch[0]}/{microbatch[1]}"


def are_bounds(attention_mask: Any) -> bool:
    """Return whether an attention mask is bounds of documents, int32 [B, N], rather than a mask of Megatron's."""
    return isinstance(attention_mask, Tensor) and attention_mask.dim() == 2 and attention_mask.dtype == torch.int32


def rows_of(bounds: Tensor) -> Rows:
    """Return the bounds of each batch row's documents as ints: 0 first, the row's length last, each bound once.

    bounds: int32 [B, N], each row filled up with its length. Raises ValueError for a row that does not begin with 0,
    or that decreases.
    """
    rows = (torch.unique_consecutive(row).tolist() for row in bounds.cpu())
    return tuple(check_cu_seqlens(row, "bounds of documents {}") for row in rows)


def check_length(rows: Rows, length: int) -> Rows:
    """Return `rows`, the bounds of each batch row's documents; raise ValueError unless each ends at `length`."""
    for row in rows:
        check_total(row, length)
    return rows


def mask_of_rows(rows: Rows) -> Mask:
    """Return the mask that keeps the documents of every batch row apart, and is full inside each of them.

    rows: the bounds of the documents of each batch row, 0 first and the row's length last.
    """
    masks = tuple(map(Documents, rows))
    return masks[0] if len(set(rows)) == 1 else PerRow(masks)


# ------------------------------------------------------------------------------------------------------- installing


def hook_documents(registry: Any) -> str:
    """Have `--reset-attention-mask` give layers the bounds of documents, in place of masks [S, S].

    It wraps Megatron's `GPTDataset`, `forward_step`, language models and multi-latent attention. registry: the rings,
    whose `documents` keep the bounds. Returns a line for the report of `install()`.
    """
    _add_to_samples()
    wrap(schedules, "forward_step", partial(_keep_what_is_read, registry))
    for kind in (GPTModel, hybrid_model()):
        wrap(kind, "forward", partial(_hand_on, registry))
    for kind in (MultiLatentAttention, *_absorbed_attention()):
        wrap(kind, "forward", partial(_follow_recomputation, registry))
    return "--reset-attention-mask: layers get where documents begin, in place of a mask of all pairs"


def hook_skipped_steps() -> None:
    """Have Megatron's scripts not cut the batches of `--iterations-to-skip`, which no model runs.

    They are read outside of schedules, where no documents decide how ranks hold them; and from 0.18 on they still
    have their bounds, which cannot be cut. Nothing happens if `megatron.training` is not imported.
    """
    training: Any = sys.modules.get("megatron.training.training")
    if training is None:
        return

    def skip(original: Any, *args: Any, **kwargs: Any) -> Any:
        if not resets_attention_mask():
            return original(*args, **kwargs)
        cut = training.get_batch_on_this_cp_rank
        training.get_batch_on_this_cp_rank = lambda batch, *args, **kwargs: batch
        try:
            return original(*args, **kwargs)
        finally:
            training.get_batch_on_this_cp_rank = cut

    wrap(training, "dummy_train_step", skip)


def _absorbed_attention() -> list[Any]:
    """Return Megatron's class of multi-latent attention for sparse layers, with a forward of its own from 0.19 on."""
    try:
        from megatron.core.transformer.experimental_attention_variant import absorbed_mla
    except ImportError:
        return []
    kind: Any = absorbed_mla.AbsorbedMLASelfAttention
    return [kind] if "forward" in vars(kind) else []


def hybrid_model() -> Any:
    """Return Megatron's class of models with layers of several kinds: `HybridModel`, or `MambaModel` until 0.17."""
    try:
        from megatron.core.models.hybrid.hybrid_model import HybridModel
    except ImportError:
        from megatron.core.models.mamba import MambaModel

        return MambaModel
    return HybridModel


def _add_to_samples() -> None:
    """Add bounds [S + 1] to the samples of `GPTDataset`, from the tokens that Megatron makes its masks of."""
    latest = threading.local()

    def make_masks(original: Any, *args: Any, **kwargs: Any) -> Any:
        if not resets_attention_mask():
            return original(*args, **kwargs)
        arguments = bind(original, *args, **kwargs).arguments
        tokens = arguments["data"]
        ends = (tokens == arguments["eod_token"]).nonzero().flatten() + 1
        latest.bounds = torch.full((len(tokens) + 1,), len(tokens), dtype=torch.int32)
        latest.bounds[0] = 0
        latest.bounds[1 : len(ends) + 1] = ends
        return original(*args, **kwargs)

    def sample(original: Any, dataset: Any, idx: int | None) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = original(dataset, idx)
        if dataset.config.reset_attention_mask and resets_attention_mask():
            tensors[_KEY] = latest.bounds
        return tensors

    wrap(gpt_dataset, "_get_ltor_masks_and_position_ids", make_masks)
    wrap(gpt_dataset.GPTDataset, "__getitem__", sample)


class BatchReading:
    """The batches of a data iterator; `keep` gets the bounds of documents of each."""

    def __init__(self, batches: Iterator[dict[str, Any]], keep: Callable[[Tensor], None]) -> None:
        self._batches = batches
        self._keep = keep

    def __iter__(self) -> BatchReading:
        return self

    def __next__(self) -> dict[str, Any]:
        batch = dict(next(self._batches))  # Megatron keeps what it reads, to run a step again
        if _KEY not in batch:
            raise ValueError(
                "--reset-attention-mask with burst attention is for batches of Megatron's GPTDataset, and this one "
                "does not say where documents begin: drop the flag, and pack documents in a forward_step of your own "
                "(PackedSeqParams, cut by burst_plugin.megatron.packed_indices)"
            )
        self._keep(batch.pop(_KEY))
        return batch


def _keep_what_is_read(registry: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a forward step, and keep the bounds of the batch that it reads."""
    if not resets_attention_mask():
        return original(*args, **kwargs)
    call = bind(original, *args, **kwargs)
    batches = call.arguments.get("data_iterator")
    if batches is not None:
        call.arguments["data_iterator"] = BatchReading(batches, partial(registry.documents.keep, registry.identity))
    return original(*call.args, **call.kwargs)


def _hand_on(registry: Any, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a language model with the bounds of this microbatch as its attention mask; a prompt is one document."""
    if not resets_attention_mask() or registry.turn is not None:
        return original(model, *args, **kwargs)
    call = bind(original, model, *args, **kwargs)
    if call.arguments.get("packed_seq_params") is None:
        rows = registry.documents.run(registry.identity)
        longest = max(map(len, rows))
        filled = [[*row, *[row[-1]] * (longest - len(row))] for row in rows]
        call.arguments["attention_mask"] = torch.tensor(filled, dtype=torch.int32, device="cpu")
    return original(*call.args, **call.kwargs)


def _follow_recomputation(registry: Any, original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Run multi-latent attention, which makes its rotary embedding itself, by the documents that it is given."""
    if not resets_attention_mask():
        return original(layer, *args, **kwargs)
    attention_mask = bind(original, layer, *args, **kwargs).arguments["attention_mask"]
    with registry.documents.recomputing(rows_of(attention_mask) if are_bounds(attention_mask) else None):
        return original(layer, *args, **kwargs)
