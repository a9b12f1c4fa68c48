"""The rings of Megatron's context-parallel groups, and values read from the tensors of their batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from burst_plugin.context import ContextParallel
from burst_plugin.megatron.batches.documents import MicrobatchDocuments, Rows, check_length, mask_of_rows
from burst_plugin.megatron.batches.packed import by_document
from burst_plugin.megatron.flags.arguments import (
    burst_is_requested,
    cuts_documents_as_one,
    parsed_arguments,
    parsed_layout,
    parsed_strategy,
    resets_attention_mask,
)
from burst_plugin.megatron.identity import Identity
from burst_plugin.megatron.layers.masks import check_same
from burst_plugin.megatron.memory.chosen_options import with_chosen
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.masks import Causal, Mask
from burst_plugin.sequence.prefix_tree import PrefixTree
from burst_plugin.strategy import AUTO, Strategy

if TYPE_CHECKING:
    from burst_plugin.inference import Turn

_T = TypeVar("_T")
_KNOWN = 64  # packed batches, of all that a pipeline has in flight


def group_of(pg_collection: Any) -> dist.ProcessGroup:
    """Return the context-parallel group of a ProcessGroupCollection; Megatron's global one if there is none."""
    group: dist.ProcessGroup = getattr(pg_collection, "cp", None) or parallel_state.get_context_parallel_group()
    return group


@dataclass
class Looks:
    """What has been seen of the batches of a model, of which the ranks of a ring look at some for how they were cut.

    has_begun: whether there was a batch.
    calls: how many batches there were that the layout of the ring may cut in another way than zigzag.
    next_call: the number of the next of them that is looked at.
    alike: how the layout and zigzag spread the latest batch whose tokens they spread alike.
    """

    has_begun: bool = False
    calls: int = 0
    next_call: float = 1
    alike: tuple[Tokens, Tokens] | None = None


class Registry:
    """The rings of this process: one `ContextParallel` per context-parallel group, shared by all layers.

    strategy: the options that `install()` got, or None. A copy, such as Megatron makes of module specs, is the same
    object.

    tensor_cache: values read from masks and packed sequences.
    identity: this rank's place in its training, for tags of calls.
    documents: where the documents of microbatches begin.
    cuts_batches: whether a batch has been cut by this package, as its layout says, since groups were made.
    knows_of_whole_logits: whether a model had all its logits at a time, where `memory="auto"` chose chunks of them.
    turn: the new tokens of inference while a model computes them, else None.
    tree: the prefix tree while a model computes its rollouts, else None.
    """

    def __init__(self, strategy: Strategy | None) -> None:
        self.strategy = strategy
        self.tensor_cache = TensorCache(lambda: self.identity.calls)
        self.identity = Identity()
        self.documents = MicrobatchDocuments()
        self.cuts_batches = self.knows_of_whole_logits = False
        self.turn: Turn | None = None  # of inference, while a model computes it
        self.tree: PrefixTree | None = None  # of the rollouts that a model computes
        self._contexts: dict[dist.ProcessGroup | None, ContextParallel] = {}
        self._of_microbatches: set[dist.ProcessGroup | None] = set()
        self._compared: Counter[tuple[ContextParallel, Hashable]] = Counter()
        self._chosen: dict[tuple[Rows | PrefixTree, int], Tokens] = {}  # the latest
        self._looks: WeakKeyDictionary[Any, Looks] = WeakKeyDictionary()  # by model

    def __deepcopy__(self, memo: dict[int, Any]) -> Registry:
        return self

    def given(self) -> Strategy:
        """Return the options that the user gave, to `install()` or else to Megatron's parser; else the defaults."""
        return self.strategy or parsed_strategy() or Strategy()

    def asked(self) -> Strategy:
        """Return the options of the run: the given ones, and the ones that `memory="auto"` has chosen."""
        return with_chosen(self.given(), parsed_arguments()) if burst_is_requested() else self.given()

    @property
    def layout(self) -> str:
        """Return the option `layout`, the name of how ranks hold sequences; it is looked up for every batch."""
        return parsed_layout() if self.strategy is None else self.strategy.layout

    @property
    def layout_of_sequences(self) -> str:
        """Return the layout of batches without packed documents: the option, but zigzag in place of "auto"."""
        return "zigzag" if self.layout == AUTO else self.layout

    def packed_tokens(self, offsets: tuple[int, ...], ranks: int) -> Tokens:
        """Return how ranks hold the tokens of packed documents, by the option `layout`.

        Args:
            offsets: where documents begin, 0 first, and the number of tokens last.
            ranks: of the context-parallel group.

        Raises:
            ValueError: for lengths that the layout cannot cut, or that ranks cannot share evenly; with "auto" also if
                there is no ring of so many ranks yet.
        """
        if ranks == 1 or (self.layout == "zigzag" and not cuts_documents_as_one()):
            return by_document(offsets, ranks)
        if offsets[-1] % ranks:
            raise ValueError(
                f"packed documents of {offsets[-1]} tokens are not a multiple of context_parallel_size={ranks}: pad "
                "the last one, and pass cu_seqlens_padded besides cu_seqlens"
            )
        return self._tokens_of((offsets,), ranks)

    def tokens_of_batch(self, length: int, ranks: int) -> Tokens:
        """Return how ranks hold the tokens of sequences of `length` in the batch of the microbatch in progress.

        With layout "auto" and --reset-attention-mask it depends on the documents of this microbatch, and may wait
        until the rank that reads the batch has published them. Raises ValueError for documents that do not end at
        `length`.
        """
        if self.layout != AUTO or not resets_attention_mask():
            return Tokens(length, layout=self.layout_of_sequences)
        return self._tokens_of(check_length(self.documents.of(self.identity), length), ranks)

    def tokens_of_tree(self, tree: PrefixTree, cp: ContextParallel) -> Tokens:
        """Return how ranks of the ring `cp` hold the tokens of a prefix tree, by the option `layout`.

        With "auto" they share the work of the tree's attention evenly.
        """
        if self.layout != AUTO:
            return Tokens(tree.length, layout=self.layout)
        return self._kept((tree, cp.ranks), lambda: cp.tokens(tree.length, Causal() & tree, alike=True))

    @contextmanager
    def computing(self, tree: PrefixTree) -> Iterator[None]:
        """Set `tree` of the registry in this context, while a model computes the rollouts of that prefix tree."""
        self.tree, self.identity.computes_edges = tree, True
        try:
            yield
        finally:
            self.tree = None

    def _tokens_of(self, rows: Rows, ranks: int) -> Tokens:
        """Return which tokens ranks hold of sequences with documents at `rows`, cut as one by the option `layout`."""
        length = rows[0][-1]
        if self.layout != AUTO:
            return Tokens(length, layout=self.layout)

        def choose() -> Tokens:
            cp = next((cp for cp in self._contexts.values() if cp.ranks == ranks), None)
            if cp is None:
                raise ValueError(
                    f"layout='auto' assigns packed documents to the {ranks} ranks of a ring, and there is none yet; "
                    "cut batches after initialize_model_parallel()"
                )
            return cp.tokens(length, Causal() & mask_of_rows(rows), alike=True)

        return self._kept((rows, ranks), choose)

    def _kept(self, key: tuple[Rows | PrefixTree, int], choose: Callable[[], Tokens]) -> Tokens:
        """Return the tokens that `choose()` gives for `key`; the latest are kept."""
        if key not in self._chosen:
            tokens = choose()
            if len(self._chosen) >= _KNOWN:
                self._chosen.pop(next(iter(self._chosen)))
            self._chosen[key] = tokens
        return self._chosen[key]

    def contexts(self) -> list[ContextParallel]:
        """Return all rings in use, also rings of one rank and rings of groups that microbatches have brought."""
        return list(self._contexts.values())

    def rings(self) -> list[ContextParallel]:
        """Return the rings of several ranks that last as long as Megatron's groups, in one order on all their ranks.

        Rings of groups that microbatches have brought are left out.
        """
        return [cp for group, cp in self._contexts.items() if cp.ranks > 1 and group not in self._of_microbatches]

    def clear(self) -> None:
        """Forget all groups, which Megatron has destroyed, and release their rings; forget microbatches, too."""
        for cp in self.contexts():
            with suppress(RuntimeError):  # in the middle of a pass that failed
                cp.release()
        self._contexts.clear()
        self._of_microbatches.clear()
        self._compared.clear()
        self._chosen.clear()
        self._looks.clear()
        self.cuts_batches = False
        self.identity = Identity()
        self.documents = MicrobatchDocuments()

    def context(self, config: Any, pg_collection: Any, packed_seq_params: Any = None) -> ContextParallel:
        """Return the ring of a layer's group or of a microbatch's own, made on first use, which is then collective.

        Args:
            config: the TransformerConfig of the layer.
            pg_collection: the layer's ProcessGroupCollection; None for Megatron's global groups.
            packed_seq_params: may bring a group for one microbatch, `cp_group`, with hybrid context parallelism.

        Raises:
            ValueError: packed_seq_params has a `local_cp_size` other than 1 without a group.
        """
        group = getattr(packed_seq_params, "cp_group", None)
        size = getattr(packed_seq_params, "local_cp_size", None)
        if group is None and size is not None and int(size) != 1:
            raise ValueError(f"packed_seq_params has local_cp_size={int(size)} without a cp_group; give both")
        if group is not None or size is not None:
            if group not in self._contexts:
                self.add(group, None, part=True)
            return self._contexts[group]
        group, hierarchy = group_of(pg_collection), None
        if group not in self._contexts:
            if config.hierarchical_context_parallel_sizes:
                hierarchy = getattr(pg_collection, "hcp", None)
                if not hierarchy and group is parallel_state.get_context_parallel_group(check_initialized=False):
                    hierarchy = parallel_state.get_hierarchical_context_parallel_groups()
                sizes = config.hierarchical_context_parallel_sizes
                hierarchy = hierarchy or (sizes if prod(sizes) == group.size() else None)
            self.add(group, hierarchy)
        return self._contexts[group]

    def ring_of(self, model: Any) -> ContextParallel:
        """Return the ring of a model, wrapped or not; it is made on first use, which is then collective."""
        return self.context(get_model_config(model), getattr(unwrap_model(model), "pg_collection", None))

    def add(self, group: dist.ProcessGroup | None, hierarchy: Any, *, part: bool = False) -> None:
        """Make the ring of a group, or of this rank alone if None, and keep it; collective.

        Args:
            group: the context-parallel group.
            hierarchy: Megatron's list of hierarchical groups or their sizes, innermost first; None to go by the
                option `ranks_per_node`.
            part: whether it is a microbatch's own group, which may be smaller than a node.
        """
        strategy = replace(self.asked(), layout=self.layout_of_sequences)
        size = 1 if group is None else group.size()
        if part and isinstance(strategy.ranks_per_node, int):
            strategy = replace(strategy, ranks_per_node=min(size, strategy.ranks_per_node))
        cp = ContextParallel(group, hierarchy=[1] if group is None else hierarchy, strategy=strategy)
        cp.connect()
        listed = parallel_state._global_process_group_list
        if listed is not None:  # for --distributed-timeout-seconds-after-init
            listed += cp.created_groups
        self._contexts[group] = cp
        if part:
            self._of_microbatches.add(group)

    def looks_of(self, model: Any) -> Looks:
        """Return what has been seen of the batches of a model since its groups were made; it may be changed."""
        return self._looks.setdefault(model, Looks())

    def check_mask(self, cp: ContextParallel, attention_mask: Tensor, mask: Mask, layer: int) -> None:
        """Raise ValueError on every rank of the ring `cp` if a mask tensor masks more or less than `mask` does.

        Megatron passes a mask tensor that is merely causal along with the mask type; one that says more must not be
        ignored. Each tensor is checked once. On GPUs, where checking stalls the host, only the masks of calls 1, 2,
        4, 8, ... are, unless the strategy says check="always". A check is collective.

        Args:
            attention_mask: [B or 1, 1, S/CP, S], True where masked.
            layer: the id of the layer that asks.
        """
        is_due = self.is_due(cp, mask, cheap=False)
        if not attention_mask.is_cuda or cp.strategy.check == "always":
            self.tensor_cache.get(attention_mask, mask, lambda: check_same(cp, attention_mask, mask), layer)
        elif is_due:
            # Not by the cache: this is collective, so it has to be the same calls on every rank.
            check_same(cp, attention_mask, mask)

    def is_due(self, cp: ContextParallel, of: Hashable, *, cheap: bool) -> bool:
        """Count an occasion for ranks of the ring `cp` to compare something; return whether they do so now.

        Args:
            of: names what is compared; occasions are counted for each.
            cheap: whether comparing does not stall the host.
        """
        self._compared[cp, of] += 1
        return cp.strategy.check_is_due(self._compared[cp, of], cheap)


class TensorCache:
    """Values read from tensors, kept until the memory is freed or written to, or the microbatch ends.

    Reading a tensor of a GPU stalls the host, so each is read once for all layers.

    Views of the same memory, such as the detached tensors of recomputation, are the same tensor here. PyTorch's
    version counter misses writes by collectives and NumPy. So a value also expires when `clock()` returns something
    new, as it does when a model is called, or when a layer asks that has asked before: programs with one buffer for
    all microbatches may then have written the next microbatch into it.
    """

    def __init__(self, clock: Callable[[], Hashable] = lambda: None) -> None:
        self._clock = clock
        self._known: Any = WeakIdKeyDictionary()  # by storage

    @property
    def count(self) -> int:
        """Return how many memories of tensors have values that are kept."""
        return len(self._known)

    def get(self, tensor: Tensor, question: Hashable, read: Callable[[], _T], layer: int | None = None) -> _T:
        """Return the value that `read()` got from `tensor` for `question`; it is read again once it has expired.

        Args:
            question: tells apart several values of one tensor.
            read: returns the value; called if none is kept.
            layer: the id of the layer that asks now, whose second question expires the value; None for a caller that
                may ask any number of times.
        """
        version = None if tensor.is_inference() else (tensor._version, self._clock())
        place = (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        answers: dict[Hashable, Any] = self._known.setdefault(tensor.untyped_storage(), {})
        key = (question, place)
        known = answers.get(key)
        if known is None or version is None or known[0] != version or layer in known[1]:
            answers[key] = (version, set(), read())
        _, layers, value = answers[key]
        if layer is not None:
            layers.add(layer)
        return value  # type: ignore[no-any-return]
