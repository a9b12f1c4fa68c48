"""What one call of core attention may attend to, by its mask type, its mask tensor, and its packed sequences."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from burst_plugin.context import ContextParallel
from burst_plugin.megatron.batches.documents import are_bounds, check_length, mask_of_rows, rows_of
from burst_plugin.megatron.batches.packed import is_packed, packed_documents
from burst_plugin.megatron.flags.arguments import resets_attention_mask
from burst_plugin.megatron.layers import masks
from burst_plugin.megatron.layers.masks import is_tree, tree_of
from burst_plugin.megatron.registry import Registry
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.masks import Mask


class MaskArguments(NamedTuple):
    """The arguments of a call of Megatron's core attention besides query, key and value.

    kind: the name of its AttnMaskType, such as "causal". The other fields are Megatron's arguments of these names.
    """

    kind: str
    attention_mask: Any
    attention_bias: Tensor | None
    packed_seq_params: Any


class CallMask(NamedTuple):
    """What the tokens of one call of core attention attend to, and which tokens ranks hold.

    mask: what positions of the whole sequence attend to. bias: added to the scaled scores, or None. tokens: how ranks
    hold the tokens (of queries, of keys); None where they hold them by the layout of the ring.
    """

    mask: Mask
    bias: Tensor | None
    tokens: tuple[Tokens, Tokens] | None


class MaskReader:
    """Turns the mask arguments of one layer's calls into masks; tensors are read once for all layers.

    window: Megatron's `window_size` (left, right) if the layer has one, else None.
    registry: the rings, whose `tensor_cache` keeps what was read.
    """

    def __init__(self, window: tuple[int, int] | None, registry: Registry) -> None:
        self._window = window
        self._registry = registry

    def read(self, arguments: MaskArguments, cp: ContextParallel, q: Tensor, k: Tensor) -> CallMask:
        """Return the mask, bias and tokens of a call on the ring `cp`, with q [B, S/CP, ...] and k [B, Sk/CP, ...].

        It may be collective, to compare a mask tensor over ranks. Raises ValueError, naming what was got, for
        arguments that do not fit together or that the ring does not support.
        """
        kind, attention_mask, attention_bias, packed_seq_params = arguments
        lengths = (q.shape[1], k.shape[1])
        mask = self.of_type(kind, lengths)
        if is_packed(packed_seq_params):
            documents, tokens = self._documents(arguments, cp, lengths)
            return CallMask(documents & mask, attention_bias, tokens)
        if are_bounds(attention_mask):
            return self._with_bounds(kind, cp, mask, attention_mask, lengths)
        if is_tree(attention_mask):
            return self._with_tree(kind, cp, mask, attention_mask)
        if resets_attention_mask():
            raise ValueError(
                "this model does not hand on where documents begin, which --reset-attention-mask needs; drop the flag"
            )
        if attention_mask is not None and kind == "arbitrary":
            bias = masks.with_masked(attention_bias, attention_mask, (lengths[0], lengths[1] * cp.ranks), q.dtype)
            return CallMask(mask, bias, None)
        if attention_mask is not None:
            return CallMask(self._with_attention_mask(kind, cp, mask, attention_mask), attention_bias, None)
        if kind == "arbitrary" or (kind.startswith("padding") and not self._are_whole(packed_seq_params, cp, k)):
            got = "neither" if packed_seq_params is None else "some in format sbhd that leave room for padding"
            raise ValueError(f"attn_mask_type={kind} needs an attention_mask, or packed_seq_params; got {got}")
        return CallMask(mask, attention_bias, None)

    def of_type(self, kind: str, lengths: tuple[int, int]) -> Mask:
        """Return the mask that a mask type allows within the layer's window.

        Args:
            kind: the name of Megatron's AttnMaskType.
            lengths: tokens of queries and of keys.

        Raises:
            ValueError: for an unknown type, or a window where there are not as many queries as keys.
        """
        if kind not in masks.BY_TYPE:
            raise ValueError(
                f"attn_mask_type={kind} is not supported; burst attention has: {', '.join(masks.BY_TYPE)}"
            )
        mask = masks.BY_TYPE[kind]
        if self._window is None:
            return mask
        if lengths[0] != lengths[1]:
            raise ValueError(
                f"window_size={self._window} needs as many queries as keys; set it to None, or leave this layer out "
                "by window_attn_skip_freq"
            )
        return masks.windowed(mask, self._window)

    def _documents(
        self, arguments: MaskArguments, cp: ContextParallel, lengths: tuple[int, int]
    ) -> tuple[Mask, tuple[Tokens, Tokens]]:
        """Return the documents of packed sequences, and the tokens of queries and keys."""
        kind, attention_mask = arguments.kind, arguments.attention_mask
        if attention_mask is not None or kind in ("arbitrary", "causal_bottom_right"):
            got = f"attn_mask_type={kind}" if attention_mask is None else "an attention_mask"
            raise ValueError(
                f"packed sequences have causal, no_mask, padding or padding_causal attention by cu_seqlens; got {got}"
            )

        in_this_call: dict[object, tuple[int, ...]] = {}  # queries and keys mostly have the same offsets

        def read(tensor: Tensor) -> tuple[int, ...]:
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if key not in in_this_call:
                in_this_call[key] = self._numbers(tensor)
            return in_this_call[key]

        assign = self._registry.packed_tokens
        tokens, documents = packed_documents(arguments.packed_seq_params, cp.ranks, lengths, read, assign)
        return documents, tokens

    def _with_bounds(
        self, kind: str, cp: ContextParallel, mask: Mask, bounds: Tensor, lengths: tuple[int, int]
    ) -> CallMask:
        """Return `mask` inside the documents of every batch row, given where they begin, [B, N]."""
        if kind != "causal" or lengths[0] != lengths[1]:
            raise ValueError(f"bounds of documents are for causal self-attention, got attn_mask_type={kind}")
        registry, length = self._registry, lengths[0] * cp.ranks
        rows = registry.tensor_cache.get(bounds, "rows", lambda: check_length(rows_of(bounds), length), id(self))
        with registry.documents.recomputing(rows):
            tokens = registry.tokens_of_batch(length, cp.ranks)
        return CallMask(mask & mask_of_rows(rows), None, (tokens, tokens))

    def _with_tree(self, kind: str, cp: ContextParallel, mask: Mask, attention_mask: Tensor) -> CallMask:
        """Return `mask` on the paths of a prefix tree, [1, 2, nodes]."""
        if kind != "causal":
            raise ValueError(f"prefix trees are for causal self-attention, got attn_mask_type={kind}")
        tree = self._registry.tensor_cache.get(attention_mask, "tree", lambda: tree_of(attention_mask), id(self))
        tokens = self._registry.tokens_of_tree(tree, cp)
        return CallMask(mask & tree, None, (tokens, tokens))

    def _numbers(self, tensor: Tensor) -> tuple[int, ...]:
        return self._registry.tensor_cache.get(tensor, "numbers", lambda: tuple(tensor.flatten().tolist()), id(self))

    def _are_whole(self, packed_seq_params: Any, cp: ContextParallel, k: Tensor) -> bool:
        """Return whether batch rows have no padding by their offsets in format sbhd, such as LLaVA's."""
        offsets = getattr(packed_seq_params, "cu_seqlens_kv", None)
        if offsets is None:
            return False
        rows, length = k.shape[0], k.shape[1] * cp.ranks
        return self._numbers(offsets) == tuple(row * length for row in range(rows + 1))

    def _with_attention_mask(self, kind: str, cp: ContextParallel, mask: Mask, attention_mask: Any) -> Mask:
        """Return `mask` without the padded keys of a mask tensor, which must say no more than the mask type does."""
        if isinstance(attention_mask, (tuple, list)):
            attention_mask = attention_mask[-1]
        plain, registry = masks.BY_TYPE[kind], self._registry
        if kind in ("padding", "padding_causal"):
            return mask & registry.tensor_cache.get(
                attention_mask, ("keys", plain), lambda: masks.read_key_padding(cp, attention_mask, plain), id(self)
            )
        registry.check_mask(cp, attention_mask, plain, id(self))
        return mask
