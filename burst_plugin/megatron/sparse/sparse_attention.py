"""DeepSeek Sparse Attention (DSA) of Megatron: queries attend to the keys that their indexer selects, of all ranks.

multi-latent attention -> BurstSparseAttention(q, k, v, x=hidden states, qr=compressed queries)
    index_inputs       queries, keys and weights of Megatron's own indexer, of this rank's tokens
    select_keys        index keys go around the ring
    ring attention     latents, or keys and values, go around the ring
    indexer_loss       trains the indexer; attached to the output, as Megatron does
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from burst_plugin.latents import sends_latents
from burst_plugin.megatron.batches.documents import are_bounds, rows_of
from burst_plugin.megatron.batches.packed import is_packed
from burst_plugin.megatron.flags.arguments import option_of
from burst_plugin.megatron.flags.config import SPARSE
from burst_plugin.megatron.layers.call_masks import MaskArguments
from burst_plugin.megatron.layers.core_attention import BurstCoreAttention, CoreCall
from burst_plugin.megatron.sparse.indexer import index_inputs
from burst_plugin.sequence.masks import Causal
from burst_plugin.sparse import Indexed, Teacher, indexer_loss, select_keys

# Arguments of Megatron's layers that the ring does not need: positions, which follow from the layout; and a weight
# that Megatron's layer applies itself.
_OF_MEGATRON = ("position_ids", "up_v_weight")
SINCE_0_19 = hasattr(dsa, "dsa_layout")  # whether this Megatron is 0.19 or newer


class BurstSparseAttention(BurstCoreAttention):
    """Sparse attention over the context-parallel group, in place of Megatron's DSAttention.

    It is built with the arguments of Megatron's core attention, the submodules of DSAttention's spec, and `registry`,
    the rings. Its `indexer` is Megatron's own module, with Megatron's names in checkpoints. Raises ValueError naming
    each field of the configuration that cannot be honoured, and what to write instead.
    """

    requires_dsa_inputs = True  # since 0.19 Megatron's layers ask for it

    def __init__(self, config: Any, *args: Any, submodules: Any, pg_collection: Any = None, **options: Any) -> None:
        super().__init__(config, *args, pg_collection=pg_collection, **options)
        self.indexer = build_module(submodules.indexer, config=config, pg_collection=pg_collection)

    def _check(self, config: Any, windowed: bool, attention_type: str) -> None:
        super()._check(config, windowed, attention_type)
        reasons = problems(config)
        if reasons:
            raise ValueError(f"burst attention cannot run layer {self.layer_number}: " + "; ".join(reasons))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        attention_mask: Any = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **options: Any,
    ) -> Tensor:
        """Return attention of queries to the keys that the indexer selects for them: [S/CP, B, heads * Dv].

        query, key and value are [S/CP, B, heads, dim]. If value is None, queries are in the space of latents, and so
        is the result; key then holds latents and the part of keys that heads share, [S/CP, B, 1, C + R]. Packed
        sequences lack the dimension of B.

        Megatron gives hidden states `x` [S/CP, B, hidden] and compressed queries `qr` [S/CP, B, rank] in `options`;
        under sequence parallelism both hold this tensor-parallel rank's part of S/CP. In training the indexer's loss
        is attached to the result.

        Raises:
            ValueError: arguments do not fit together, or ask for something that is not supported.
        """
        x, qr = options.pop("x", None), options.pop("qr", None)
        for name in _OF_MEGATRON:
            options.pop(name, None)
        self._refuse_unknown({**options, "attention_bias": attention_bias})
        kind = attn_mask_type or self.attn_mask_type
        self._check_call(kind, packed_seq_params, x)
        arguments = MaskArguments(kind.name, attention_mask, None, packed_seq_params)
        call = self._read_any(query, key, value, arguments)
        assert x is not None, "it is checked"
        assert qr is not None, "Megatron gives it with x"
        with self.registry.documents.recomputing(rows_of(attention_mask) if are_bounds(attention_mask) else None):
            indexed = index_inputs(self.indexer, x.detach(), qr.detach(), packed_seq_params)
        call.terms["selection"] = self.selected_keys(indexed, call)
        out = self._compute(call)
        if not self.training or not torch.is_grad_enabled():
            return out
        trained: Tensor = dsa.DSAIndexerLossAutoScaler.apply(out, self._loss(indexed, call))
        return trained

    def _check_call(self, kind: AttnMaskType, packed_seq_params: Any, x: Tensor | None) -> None:
        if self.attend is not None:
            raise ValueError("inference on a ring keeps no keys of indexers: generate with context_parallel_size=1")
        packed = is_packed(packed_seq_params)
        if packed and not SINCE_0_19:
            raise ValueError(
                "packed sequences (thd) are not supported by the sparse attention of this release of Megatron; use "
                "batches of whole sequences, or Megatron-core 0.19"
            )
        if kind != AttnMaskType.causal and not (packed and kind == AttnMaskType.padding_causal):
            raise ValueError(f"sparse attention is causal, got attn_mask_type={kind.name}")
        if x is None:
            raise ValueError(
                "recompute_modules has core_attn, whose checkpoint does not give sparse attention its hidden states "
                'in this release of Megatron; take it out, or use recompute_granularity="full"'
            )

    def _read_any(self, query: Tensor, key: Tensor, value: Tensor | None, arguments: MaskArguments) -> CoreCall:
        """Return the call of the ring for these tensors; if value is None, queries are in the space of latents."""
        if value is not None:
            return self._read(query, key, value, arguments)
        size = self.config.kv_lora_rank
        latents, shared = key[..., :size], key[..., size:]
        if not sends_latents(self.context(arguments.packed_seq_params)):
            return self._read(query, key, latents, arguments)
        call = self._read(query, latents, shared, arguments)
        call.terms["weight"] = None
        return call

    def selected_keys(self, given: Indexed, call: CoreCall) -> Tensor:
        """Return the keys that each query of this rank selects, int32 [B, S/CP, top k]."""
        terms, tokens = call.terms, call.terms["tokens"]
        assert given.weights is not None, "an indexer has weights"
        return select_keys(
            given.q,
            given.k,
            given.weights,
            self.indexer.index_topk,
            call.cp,
            mask=terms["mask"],
            tokens=None if tokens is None else tokens[0],
            scale=1.0,
            tag=(*terms["tag"], "indexer"),
        )

    def _loss(self, indexed: Indexed, call: CoreCall) -> Tensor:
        """Return the indexer's loss, scaled so that Megatron arrives at the mean over the tokens of all ranks.

        Without a coefficient it is 0, with gradients of 0, which Megatron's distributed optimizer waits for.
        """
        config, coefficient = self.config, self.config.dsa_indexer_loss_coeff
        assert indexed.weights is not None, "an indexer has weights"
        if not coefficient:
            nothing: Tensor = (indexed.q.sum() + indexed.k.sum() + indexed.weights.sum()) * 0.0
            return nothing
        terms, tokens = call.terms, call.terms["tokens"]
        is_sparse = config.dsa_indexer_use_sparse_loss
        if not is_sparse and terms["mask"] != Causal():
            raise ValueError(
                "an indexer's loss over all keys is for causal attention in one document, not for "
                f"{terms['mask']}: use {option_of('dsa_indexer_use_sparse_loss')}, the loss over selected keys"
            )
        total = coefficient * indexer_loss(
            self._teacher(call),
            indexed,
            call.cp,
            scale=1.0,
            selection=terms["selection"] if is_sparse else None,
            tokens=None if tokens is None else tokens[0],
        )
        return self._scaled(total, call)

    def _scaled(self, total: Tensor, call: CoreCall) -> Tensor:
        """Log this rank's loss, and return it for Megatron, which scales its gradients and adds them up over ranks.

        Megatron takes the mean of gradients over ranks. With calculate_per_token_loss it adds them up and divides by
        tokens, so that this loss is a sum since 0.19. Without, its schedules multiply the loss by ranks since 0.19.
        """
        config, (group, ranks) = self.config, (call.cp.group, call.cp.ranks)
        by_token = config.calculate_per_token_loss
        log = dsa.DSAIndexerLossLoggingHelper.save_loss_to_tracker
        if by_token and SINCE_0_19:
            log(total, self.layer_number, config.num_layers, reduce_group=group)
            return total
        selection = call.terms["selection"]
        tokens = total.new_tensor(selection.shape[0] * selection.shape[1] * ranks)
        if call.packed:  # without padding
            tokens = (selection >= 0).any(-1).sum().to(total.dtype)
            dist.all_reduce(tokens, group=group)
        mean = total / tokens.clamp(min=1)
        log(mean * ranks, self.layer_number, config.num_layers, avg_group=group)
        scaled = config.experimental_attention_variant == SPARSE or (
            getattr(config, "experimental_attention_variant_loss_scale_func", None) is not None
        )  # not in hybrid models that have such layers by their pattern alone
        return mean if by_token or (SINCE_0_19 and scaled) else mean * ranks

    def _teacher(self, call: CoreCall) -> Teacher:
        """Return the queries and keys whose attention the indexer learns to predict."""
        q, k, weight = call.q.detach(), call.k.detach(), call.terms.get("weight")
        scale = q.shape[-1] ** -0.5 if self._scores.scale is None else self._scores.scale
        if "weight" in call.terms:
            shared = call.v.detach()
            k = torch.cat([k, shared], -1)
            if weight is not None:
                by_head = torch.unflatten(weight.detach(), 0, (q.shape[2], -1))
                weight = by_head[:, : q.shape[-1] - shared.shape[-1]]
        group = self._tp_group()
        over_heads = None if group.size() == 1 else partial(dist.all_reduce, group=group)
        return Teacher(q, k, scale, weight, over_heads)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the indexer's entries for Megatron's distributed checkpoints, named as in Megatron's DSAttention."""
        return MegatronModule.sharded_state_dict(self, *args, **kwargs)


def problems(config: Any) -> list[str]:
    """Return a sentence for each field of a TransformerConfig that sparse attention cannot honour, and a way out."""
    instead = {
        "attention_dropout": "Megatron's own ignores it: write 0",
        "window_size": "leave it out",
        "qk_clip": "switch it off",
        "log_max_attention_logit": "switch it off",
        "hybrid_context_parallel": f"use {option_of('context_parallel_size')}",
    }
    reasons = [
        f"{option_of(name, value)} is not supported by sparse attention (dsa): {remedy}"
        for name, remedy in instead.items()
        if (value := getattr(config, name, None))
    ]
    needed = {
        "softmax_type": "vanilla",
        "dsa_indexer_topk_freq": 1,
        "dsa_indexer_scoring_relu": True,
        "dsa_kernel_backend": "none",
    }
    reasons += [
        f"{option_of(name, value)} is not supported by sparse attention (dsa): use {usual}"
        for name, usual in needed.items()
        if (value := getattr(config, name, usual)) != usual
    ]
    return reasons
