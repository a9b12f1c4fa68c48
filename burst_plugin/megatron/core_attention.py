"""Megatron's core attention, computed by the ring."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker, set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, import_module
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide
from torch import Tensor

from burst_plugin.attention import burst_attention
from burst_plugin.context import ContextParallel
from burst_plugin.megatron import masks
from burst_plugin.megatron.arguments import flag_problems, parsed_strategy, warn_of_quantizers
from burst_plugin.megatron.config import is_hybrid, problems, spreads_sequences, unknown_fields
from burst_plugin.megatron.packed import check_known, packed_documents
from burst_plugin.megatron.registry import Registry
from burst_plugin.scores import Scores
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.masks import Mask
from burst_plugin.strategy import Strategy

__all__ = ["BurstCoreAttention", "ChosenCoreAttention"]

# What a core attention is built with; head dims are those of the tensors, the kind was looked at before.
_KNOWN_OPTIONS = ("attention_dropout", "softmax_scale", "cp_comm_type", "k_channels", "v_channels")


_REPLACEABLE = ("DotProductAttention", "TEDotProductAttention")  # which compute what TransformerConfig says


class ChosenCoreAttention:
    """Built in place of a layer's core attention: the ring where `cp_comm_type` is "burst", else the original.

    Multi-latent attention builds its core attention twice, first without a `cp_comm_type`; that one is never used.
    """

    def __new__(cls, *args: Any, original: Any, registry: Registry, **kwargs: Any) -> Any:
        """The core attention of one layer."""
        config = kwargs["config"]
        kind = kwargs.get("cp_comm_type")
        if kind is None:
            listed = config.cp_comm_type
            kind = "burst" if isinstance(listed, list) and "burst" in listed else listed
        if spreads_sequences(config) and kind == "burst":
            if kwargs.get("cp_comm_type") == "burst" or is_hybrid(config):  # which Megatron tells layers nothing of
                _check_replaceable(original, kwargs.get("layer_number"))
            return BurstCoreAttention(*args, registry=registry, **kwargs)
        return build_module(original, *args, **kwargs)


def _check_replaceable(original: Any, layer_number: int | None) -> None:
    """Raise ValueError for a core attention that is not Megatron's usual one: what it does besides is not known."""
    kind: Any = original
    options: dict[str, Any] = {}
    if isinstance(original, ModuleSpec):
        kind, options = original.module, dict(original.params or {})
    while isinstance(kind, partial):
        kind, options = kind.func, {**kind.keywords, **options}
    kind = import_module(kind) if isinstance(kind, tuple) else kind
    module, name = kind.__module__, getattr(kind, "__name__", type(kind).__name__)
    usual = module.startswith("megatron.core.") and name in _REPLACEABLE
    if not usual and not getattr(kind, "burst_may_replace", False):
        raise ValueError(
            f"layer {layer_number} has a core attention of its own, {module}.{name}, in whose place burst attention "
            "would compute what TransformerConfig says; give this layer another cp_comm_type or, if that is the "
            f"same, set {name}.burst_may_replace = True"
        )
    if usual and any(value is not None for value in options.values()):
        raise ValueError(
            f"layer {layer_number} gives its core attention options in its spec, {', '.join(sorted(options))}, in "
            "whose place burst attention would take those of TransformerConfig: set them there"
        )


class BurstCoreAttention(MegatronModule):
    """Attention over the context-parallel group, in the place of Megatron's DotProductAttention.

    Looks up Megatron's global groups when it runs, and keeps `pg_collection` only if that holds others: so it may be
    given another collection, as Megatron-Bridge does to evaluate with other sizes. With
    softmax_type="learnable" it has the parameter `softmax_offset` [heads/TP], as Megatron's has. Raises ValueError
    naming each field of the configuration that cannot be honoured, and what to write instead.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *,
        registry: Registry,
        pg_collection: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self._registry = registry
        self.pg_collection = pg_collection
        skip = getattr(config, "window_attn_skip_freq", None)
        self._windowed = is_layer_window_attention(config.window_size, skip, self.layer_number)
        self._check(config, attention_type)
        warn_of_quantizers()
        self._refuse_unknown(options, _KNOWN_OPTIONS)
        dropout = options.get("attention_dropout")
        dropout = config.attention_dropout if dropout is None else dropout
        self._scores = Scores(scale=options.get("softmax_scale"), dropout=dropout)
        self._add_softmax_offset(config)
        self._clips = getattr(config, "qk_clip", False) or getattr(config, "log_max_attention_logit", False)
        self.current_max_attn_logits: Tensor | None = None  # [heads/TP], read and cleared by Megatron's qk-clip

    @property
    def pg_collection(self) -> Any:
        """Megatron's ProcessGroupCollection; None for the global groups."""
        return self._pg_collection

    @pg_collection.setter
    def pg_collection(self, given: Any) -> None:
        usual = parallel_state.get_context_parallel_group(check_initialized=False)
        self._pg_collection = given if getattr(given, "cp", None) is not usual else None

    def _check(self, config: Any, attention_type: str) -> None:
        reasons = problems(config, self._windowed, attention_type) + flag_problems()
        strategy = self._registry.strategy or parsed_strategy() or Strategy()
        if config.deterministic_mode and not (strategy.deterministic or torch.are_deterministic_algorithms_enabled()):
            reasons.append(
                "deterministic_mode=True needs torch.use_deterministic_algorithms(True), which its flag sets too, "
                "or install(Strategy(deterministic=True))"
            )
        if strategy.ulysses_degree > 1 and is_hybrid(config):
            reasons.append(
                f"ulysses_degree={strategy.ulysses_degree} is not supported with hybrid_context_parallel, whose "
                "groups have any size: use 1"
            )
        if reasons:
            raise ValueError(f"burst attention cannot run layer {self.layer_number}: " + "; ".join(reasons))
        for name in unknown_fields(config):
            warnings.warn(
                f"burst_plugin does not know Megatron's option {name}={getattr(config, name)!r}; if it changes "
                "attention, burst attention ignores it",
                stacklevel=2,
            )

    def _refuse_unknown(self, options: Mapping[str, Any], known: Collection[str] = ()) -> None:
        """Raise ValueError for what Megatron hands on besides what it always does, and may mean."""
        unknown = [name for name, value in options.items() if name not in known and value is not None]
        if unknown:
            raise ValueError(
                f"burst attention cannot run layer {self.layer_number}: it was given {', '.join(unknown)}, which it "
                "does not know and would ignore; give this layer another cp_comm_type"
            )

    def _add_softmax_offset(self, config: Any) -> None:
        """A parameter of Megatron's name, shape, type and initialisation, so that checkpoints are interchangeable."""
        self.softmax_offset: Tensor | None = None
        if config.softmax_type != "learnable":
            return
        heads = divide(config.num_attention_heads, self._tp_group().size())
        offset = torch.empty(heads, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.softmax_offset = torch.nn.Parameter(offset)
        # Else Megatron would take it for a copy on all tensor-parallel ranks but the first, in gradient norms.
        set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)
        # The same of the module, for Megatron-Bridge, which knows Megatron's core attentions by name.
        self.tensor_model_parallel, self.partition_dim = True, 0
        if config.perform_initialization:
            config.init_method(self.softmax_offset)

    def _tp_group(self) -> Any:
        return getattr(self._pg_collection, "tp", None) or parallel_state.get_tensor_model_parallel_group()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **options: Any,
    ) -> Tensor:
        """q [S/CP, B, H/TP, D], k and v [Sk/CP, B, groups/TP, D or Dv] -> [S/CP, B, H/TP * Dv], in the type of q.

        With packed sequences ("thd") q [T/CP, H/TP, D], and k and v alike -> [T/CP, H/TP * Dv].

        Args:
            attention_mask: [B or 1, 1 or H, S/CP, Sk], True where masked; for key padding also [B, 1, 1, Sk], or a
                pair (for queries, for keys) of such. Padded queries attend to the keys that are real.
            attention_bias: [1 or B, 1 or H/TP, S/CP, Sk], added to the scaled scores.

        Raises ValueError for what does not fit together, naming what was got.
        """
        self._refuse_unknown(options)
        kind = (attn_mask_type or self.attn_mask_type).name
        cp = self._registry.context(self.config, self._pg_collection, packed_seq_params)
        packed = _is_packed(packed_seq_params)
        q, k, v = (x.unsqueeze(0) if packed else x.transpose(0, 1) for x in (query, key, value))
        mask, tokens = self._mask(kind, q.shape[1] == k.shape[1]), None
        if packed:
            self._check_packed_group(cp)
            documents, tokens = self._documents(kind, cp, packed_seq_params, attention_mask, (q.shape[1], k.shape[1]))
            mask = documents & mask
        elif attention_mask is not None and kind == "arbitrary":
            attention_bias = masks.with_masked(
                attention_bias, attention_mask, (q.shape[1], k.shape[1] * cp.ranks), q.dtype
            )
        elif attention_mask is not None:
            mask = self._with_attention_mask(kind, cp, mask, attention_mask)
        elif kind == "arbitrary" or (kind.startswith("padding") and not self._are_whole(packed_seq_params, cp, key)):
            got = "neither" if packed_seq_params is None else "some in format sbhd that leave room for padding"
            raise ValueError(f"attn_mask_type={kind} needs an attention_mask, or packed_seq_params; got {got}")
        out = burst_attention(
            q,
            k,
            v,
            cp,
            mask=mask,
            scores=self._scores_now(),
            sink=self._sink(q),
            bias=attention_bias,
            tokens=tokens,
            tag=self._registry.identity.of_call(
                cp,
                self,
                self.layer_number,
                is_hybrid(self.config) or getattr(packed_seq_params, "cp_group", None) is not None,
            ),
            return_max_logits=self._clips,
        )
        if isinstance(out, tuple):
            out, largest = out
            known = self.current_max_attn_logits
            self.current_max_attn_logits = largest if known is None else largest.maximum(known)
        return out.squeeze(0).flatten(1) if packed else out.transpose(0, 1).flatten(2)

    def _check_packed_group(self, cp: ContextParallel) -> None:
        """Raise ValueError for packed sequences on other ranks than the layer's, rotated as on these."""
        usual = getattr(self._pg_collection, "cp", None) or parallel_state.get_context_parallel_group()
        if (usual.size(), usual.rank()) != (cp.ranks, cp.rank):
            raise ValueError(
                f"packed_seq_params has a cp_group of {cp.ranks} ranks for packed sequences (thd), which Megatron "
                f"rotates as those of the layer's own group, of {usual.size()}; hybrid_context_parallel needs "
                "qkv_format='sbhd', from a forward_step of your own: a microbatch of one document, cut over cp_group"
            )

    def _mask(self, kind: str, square: bool) -> Mask:
        """What mask type and window ask for."""
        if kind not in masks.BY_TYPE:
            raise ValueError(
                f"attn_mask_type={kind} is not supported; burst attention has: {', '.join(masks.BY_TYPE)}"
            )
        mask = masks.BY_TYPE[kind]
        if not self._windowed:
            return mask
        if not square:
            raise ValueError(
                f"window_size={self.config.window_size} needs as many queries as keys; set it to None, or leave this "
                "layer out by window_attn_skip_freq"
            )
        return masks.windowed(mask, self.config.window_size)

    def _documents(
        self,
        kind: str,
        cp: ContextParallel,
        packed_seq_params: Any,
        attention_mask: Any,
        lengths: tuple[int, int],
    ) -> tuple[Mask, tuple[Tokens, Tokens]]:
        """The documents of packed sequences, and how they are dealt out; nothing of it is read twice."""
        if attention_mask is not None or kind in ("arbitrary", "causal_bottom_right"):
            got = f"attn_mask_type={kind}" if attention_mask is None else "an attention_mask"
            raise ValueError(
                f"packed sequences have causal, no_mask, padding or padding_causal attention by cu_seqlens; got {got}"
            )

        here: dict[int, tuple[int, ...]] = {}  # read in this call: queries and keys mostly have the same offsets

        def read(tensor: Tensor) -> tuple[int, ...]:
            if id(tensor) not in here:
                seen = self._registry.tensor_cache
                here[id(tensor)] = seen.get(tensor, "numbers", lambda: tuple(tensor.flatten().tolist()), id(self))
            return here[id(tensor)]

        tokens, documents = packed_documents(packed_seq_params, cp.ranks, lengths, read)
        return documents, tokens

    def _are_whole(self, packed_seq_params: Any, cp: ContextParallel, key: Tensor) -> bool:
        """Whether batch rows, described by offsets in format sbhd as LLaVA's are, have no padding."""
        offsets = getattr(packed_seq_params, "cu_seqlens_kv", None)
        if offsets is None:
            return False
        numbers = self._registry.tensor_cache.get(
            offsets, "numbers", lambda: tuple(offsets.flatten().tolist()), id(self)
        )
        return numbers == tuple(row * key.shape[0] * cp.ranks for row in range(key.shape[1] + 1))

    def _with_attention_mask(self, kind: str, cp: ContextParallel, mask: Mask, attention_mask: Any) -> Mask:
        """`mask` without the padded keys of a mask tensor, which may not say more than the mask type does."""
        if isinstance(attention_mask, (tuple, list)):
            attention_mask = attention_mask[-1]
        plain, registry = masks.BY_TYPE[kind], self._registry
        if kind in ("padding", "padding_causal"):
            return mask & registry.tensor_cache.get(
                attention_mask, ("keys", plain), lambda: masks.read_key_padding(cp, attention_mask, plain), id(self)
            )
        registry.check_mask(cp, attention_mask, plain, id(self))
        return mask

    def _sink(self, q: Tensor) -> Tensor | None:
        """The logit that takes part in every softmax; None for a vanilla one."""
        if self.config.softmax_type == "off-by-one":
            return q.new_zeros(q.shape[2])
        return self.softmax_offset

    def _scores_now(self) -> Scores:
        """Scores with a new seed for dropout, or without dropout where there is no training."""
        if not self._scores.dropout:
            return self._scores
        return replace(self._scores, seed=self._draw_seed()) if self.training else replace(self._scores, dropout=0.0)

    def _draw_seed(self) -> int:
        """63 bits from Megatron's generator for tensor-parallel regions, which then moves on.

        Context-parallel ranks draw the same, other tensor-parallel ranks, layers and microbatches others, and
        recomputation, before which Megatron restores the generator, the same again. The host knows the state of a
        GPU's generator, so nothing has to be waited for.
        """
        # Under sequence parallelism the whole layer runs inside the fork already.
        with nullcontext() if self.config.sequence_parallel else get_cuda_rng_tracker().fork():
            state = torch.cuda.get_rng_state()
            torch.empty(1, device=torch.cuda.current_device()).uniform_()
        digest = blake2b(state.numpy().tobytes(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """`softmax_offset` cut along its heads over tensor-parallel ranks, as Megatron's."""
        replicas = (metadata or {}).get("dp_cp_group")
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._tp_group(),
            dp_cp_group=replicas or parallel_state.get_data_parallel_group(with_context_parallel=True),
        )


def _is_packed(packed_seq_params: Any) -> bool:
    """Whether tensors are packed. ValueError for a format that is neither thd nor sbhd (hybrid parallelism's)."""
    if packed_seq_params is None:
        return False
    check_known(packed_seq_params)
    if packed_seq_params.qkv_format not in ("thd", "sbhd"):
        raise ValueError(
            f"packed_seq_params.qkv_format={packed_seq_params.qkv_format!r} is not supported; use 'thd', or 'sbhd'"
        )
    return bool(packed_seq_params.qkv_format == "thd")
