"""Megatron's core attention, computed by the ring."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker, set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide
from torch import Tensor

from burst_plugin.attention import burst_attention
from burst_plugin.context import ContextParallel
from burst_plugin.latents import latent_attention
from burst_plugin.megatron.batches.packed import is_packed
from burst_plugin.megatron.flags.config import is_hybrid, problems, unknown_fields
from burst_plugin.megatron.flags.flag_checks import flag_problems, warn_of_quantizers
from burst_plugin.megatron.layers.call_masks import MaskArguments, MaskReader
from burst_plugin.megatron.registry import Registry, group_of
from burst_plugin.scores import Scores
from burst_plugin.strategy.presets import presets_without_groups

# Arguments of a core attention's constructor. Head dims are read from tensors; cp_comm_type was looked at before.
_KNOWN_OPTIONS = ("attention_dropout", "softmax_scale", "cp_comm_type", "k_channels", "v_channels")


class CoreCall(NamedTuple):
    """The arguments of one attention call on the ring, translated from a call of Megatron's core attention.

    q, k, v: [B, S/CP, heads, dim]. Where latents are sent, `k` holds the latents and `v` the part of keys that heads
        share, both with one head.
    packed: whether Megatron's tensors were packed sequences ("thd"), which have no dimension of B.
    terms: the keyword arguments of `burst_attention`; with a `weight` among them, of `latent_attention`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cp: ContextParallel
    packed: bool
    terms: dict[str, Any]


class BurstCoreAttention(MegatronModule):
    """Attention over the context-parallel group, in place of Megatron's DotProductAttention.

    It is built with the arguments of Megatron's core attention, and `registry`, the rings. It looks up Megatron's
    global groups when it runs, and keeps `pg_collection` only if that holds others, so that it may be given another
    collection, as Megatron-Bridge does to evaluate with other sizes. With softmax_type="learnable" it has the
    parameter `softmax_offset` [heads/TP], like Megatron's own core attention.

    Raises ValueError naming each field of the configuration that cannot be honoured, and what to write instead.
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
        self.registry = registry
        self.pg_collection = pg_collection
        skip = getattr(config, "window_attn_skip_freq", None)
        windowed = is_layer_window_attention(config.window_size, skip, self.layer_number)
        self._check(config, windowed, attention_type)
        self._masks = MaskReader(config.window_size if windowed else None, registry)
        warn_of_quantizers()
        self._refuse_unknown(options, _KNOWN_OPTIONS)
        dropout = options.get("attention_dropout")
        dropout = config.attention_dropout if dropout is None else dropout
        self._scores = Scores(scale=options.get("softmax_scale"), dropout=dropout, seed=0)  # each call draws its own
        self._add_softmax_offset(config)
        self._clips = getattr(config, "qk_clip", False) or getattr(config, "log_max_attention_logit", False)
        self.current_max_attn_logits: Tensor | None = None  # [heads/TP], read and cleared by Megatron's qk-clip
        self.attend: Callable[..., Tensor] | None = None  # KVCache.attend for this layer, in a turn of inference
        self.up_projection: tuple[Any, ...] = ()  # the module whose weight makes keys and values of latents
        if self._pg_collection is not None:  # the script's own; rings of other groups were made with the groups
            registry.context(config, self._pg_collection)  # now, since messages of a pipeline are in flight later

    @property
    def pg_collection(self) -> Any:
        """Return the layer's own ProcessGroupCollection; None if it uses Megatron's global groups."""
        return self._pg_collection

    @pg_collection.setter
    def pg_collection(self, collection: Any) -> None:
        usual = parallel_state.get_context_parallel_group(check_initialized=False)
        self._pg_collection = collection if getattr(collection, "cp", None) is not usual else None

    def _check(self, config: Any, windowed: bool, attention_type: str) -> None:
        reasons = problems(config, windowed, attention_type) + flag_problems()
        strategy = self.registry.asked()
        if config.deterministic_mode and not (strategy.deterministic or torch.are_deterministic_algorithms_enabled()):
            reasons.append(
                "deterministic_mode=True needs torch.use_deterministic_algorithms(True), which its flag sets too, "
                "or install(Strategy(deterministic=True))"
            )
        for name in ("ulysses_degree", "mesh_degree"):
            if (degree := getattr(strategy, name)) != 1 and is_hybrid(config):
                reasons.append(
                    f"{name}={degree} is not supported with hybrid_context_parallel, whose groups have any size: "
                    f"use 1, or one of these presets: {presets_without_groups()}"
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
        """Raise ValueError for arguments that are set and not in `known`: they may change what is computed."""
        unknown = [name for name, value in options.items() if name not in known and value is not None]
        if unknown:
            raise ValueError(
                f"burst attention cannot run layer {self.layer_number}: it was given {', '.join(unknown)}, which it "
                "does not know and would ignore; give this layer another cp_comm_type"
            )

    def _add_softmax_offset(self, config: Any) -> None:
        """Add a parameter with Megatron's name, shape, type and initialisation: checkpoints are interchangeable."""
        self.softmax_offset: Tensor | None = None
        if config.softmax_type != "learnable":
            return
        heads = divide(config.num_attention_heads, self._tp_group().size())
        offset = torch.empty(heads, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.softmax_offset = torch.nn.Parameter(offset)
        # Otherwise gradient norms would count it on the first tensor-parallel rank only, as a replicated parameter.
        set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)
        # Megatron-Bridge knows Megatron's core attentions by name, and this one by these attributes of the module.
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
        """Return attention of q [S/CP, B, H/TP, D] on k and v [Sk/CP, B, groups/TP, D or Dv]: [S/CP, B, H/TP * Dv].

        Packed sequences ("thd") are q [T/CP, H/TP, D], k and v [Tk/CP, groups/TP, D or Dv] -> [T/CP, H/TP * Dv]. The
        result has the dtype of q.

        Args:
            attention_mask: [B or 1, 1 or H, S/CP, Sk], True where masked; for key padding also [B, 1, 1, Sk], or a
                pair of these (for queries, for keys). Padded queries attend to the keys that are not padding.
            attn_mask_type: None for the type that the layer was built with.
            attention_bias: [1 or B, 1 or H/TP, S/CP, Sk], added to the scaled scores.

        Raises:
            ValueError: arguments do not fit together, or ask for something that is not supported.
        """
        self._refuse_unknown(options)
        kind = (attn_mask_type or self.attn_mask_type).name
        if self.attend is not None:
            return self._attend_cached(query, key, value, kind, attention_bias)
        arguments = MaskArguments(kind, attention_mask, attention_bias, packed_seq_params)
        return self._compute(self._read(query, key, value, arguments))

    def _read(self, query: Tensor, key: Tensor, value: Tensor, arguments: MaskArguments) -> CoreCall:
        """Return the tensors and options of an attention call on the ring. Raises ValueError as `forward` does."""
        cp = self.context(arguments.packed_seq_params)
        packed = is_packed(arguments.packed_seq_params)
        if packed:
            self.check_packed_group(cp)
        q, k, v = (x.unsqueeze(0) if packed else x.transpose(0, 1) for x in (query, key, value))
        allowed = self._masks.read(arguments, cp, q, k)
        terms: dict[str, Any] = {
            "mask": allowed.mask,
            "scores": self._scores_now(),
            "sink": self._sink(q),
            "bias": allowed.bias,
            "tokens": allowed.tokens,
            "tag": self._tag(cp, arguments.packed_seq_params),
            "return_max_logits": self._clips,
        }
        if self.up_projection and k.shape[2] == 1:
            terms["weight"] = self.up_projection[0].weight
        return CoreCall(q, k, v, cp, packed, terms)

    def _compute(self, call: CoreCall) -> Tensor:
        """Run an attention call on the ring; return its output in the shape that `forward` returns."""
        q, k, v, cp, packed, terms = call
        attend: Any = latent_attention if "weight" in terms else burst_attention
        out = attend(q, k, v, cp, **terms)
        if isinstance(out, tuple):
            out, largest = out
            known = self.current_max_attn_logits
            self.current_max_attn_logits = largest if known is None else largest.maximum(known)
        joined: Tensor = out.squeeze(0).flatten(1) if packed else out.transpose(0, 1).flatten(2)
        return joined

    def context(self, packed_seq_params: Any = None) -> ContextParallel:
        """Return the ring that a call runs on: of the group in `packed_seq_params`, or else of the layer's group.

        It is made on first use, which is then collective.
        """
        return self.registry.context(self.config, self._pg_collection, packed_seq_params)

    def _attend_cached(self, query: Tensor, key: Tensor, value: Tensor, kind: str, bias: Tensor | None) -> Tensor:
        """Return attention of new tokens [n, B, heads, dim] to these and to cached tokens, [n, B, heads * Dv]."""
        if kind != "causal" or bias is not None:
            got = f"attn_mask_type={kind}" if kind != "causal" else "an attention_bias"
            raise ValueError(f"inference on a ring is for causal attention without a bias, got {got}")
        mask = self._masks.of_type(kind, (len(query), len(key)))
        assert self.attend is not None
        with torch.inference_mode(False), torch.no_grad():  # kept tensors may be written to outside, too
            q, k, v = (x.transpose(0, 1) for x in (query, key, value))
            out = self.attend(q, k, v, mask=mask, scores=self._scores_now(), sink=self._sink(q))
        return out.transpose(0, 1).flatten(2)

    def _tag(self, cp: ContextParallel, packed_seq_params: Any) -> tuple[object, ...]:
        """Return the name of an attention call, which ranks compare to find out whether all are in one call."""
        own_group = is_hybrid(self.config) or getattr(packed_seq_params, "cp_group", None) is not None
        return self.registry.identity.of_call(cp, self, self.layer_number, own_group)

    def check_packed_group(self, cp: ContextParallel) -> None:
        """Raise ValueError for packed sequences on other ranks than the layer's, by which Megatron rotates them."""
        usual = group_of(self.pg_collection)
        if (usual.size(), usual.rank()) != (cp.ranks, cp.rank):
            raise ValueError(
                f"packed_seq_params has a cp_group of {cp.ranks} ranks for packed sequences (thd), which Megatron "
                f"rotates as those of the layer's own group, of {usual.size()}; hybrid_context_parallel needs "
                "qkv_format='sbhd', from a forward_step of your own: a microbatch of one document, cut over cp_group"
            )

    def _sink(self, q: Tensor) -> Tensor | None:
        """Return the logit that takes part in every softmax; None for a vanilla one."""
        if self.config.softmax_type == "off-by-one":
            return q.new_zeros(q.shape[2])
        return self.softmax_offset

    def _scores_now(self) -> Scores:
        """Return the scores with a new seed for dropout in training, and without dropout in evaluation."""
        if not self._scores.dropout:
            return self._scores
        return replace(self._scores, seed=self.draw_seed()) if self.training else replace(self._scores, dropout=0.0)

    def draw_seed(self) -> int:
        """Draw 63 bits from Megatron's generator for tensor-parallel regions.

        All context-parallel ranks draw the same; other tensor-parallel ranks, layers and microbatches draw others.
        Recomputation draws the same again, since Megatron restores the generator before it. The host knows the state
        of a GPU's generator, so it does not wait for the GPU.
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
        """Return the layer's entry for Megatron's distributed checkpoints: `softmax_offset`, cut along its heads.

        Heads are cut over tensor-parallel ranks, and named as Megatron's own core attention names them. Layers
        without this parameter have no entries. Arguments are Megatron's.
        """
        replicas = (metadata or {}).get("dp_cp_group")
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._tp_group(),
            dp_cp_group=replicas or parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
