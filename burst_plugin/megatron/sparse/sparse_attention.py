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

from burst_plugin.megatron.flags.arguments import option_of
from burst_plugin.megatron.layers.call_masks import MaskArguments
from burst_plugin.megatron.layers.core_attention import BurstCoreAttention, CoreCall
from burst_plugin.megatron.sparse.indexer import index_inputs
from burst_plugin.sequence.masks import Causal
from burst_plugin.sparse import Indexed, Teacher, indexer_loss, select_keys


class BurstSparseAttention(BurstCoreAttention):
    """Sparse attention over the context-parallel group, in place of Megatron's DSAttention.

    Its `indexer` is Megatron's own module, with Megatron's names in checkpoints. Raises ValueError naming each field
    of the configuration that Megatron's sparse attention does not have, and what to write instead.
    """

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
        value: Tensor,
        attention_mask: Any = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **options: Any,
    ) -> Tensor:
        """Return sparse attention of q on k and v [S/CP, B, heads, dim], [S/CP, B, heads * Dv].

        Megatron gives hidden states `x` [S/CP, B, hidden] and compressed queries `qr` [S/CP, B, rank] in `options`,
        under sequence parallelism those of this tensor-parallel rank's part of S/CP.

        Raises:
            ValueError: arguments do not fit together, or ask for something that is not supported.
        """
        x, qr = options.pop("x", None), options.pop("qr", None)
        self._refuse_unknown({**options, "attention_bias": attention_bias})
        kind = attn_mask_type or self.attn_mask_type
        self._check_call(kind, packed_seq_params, x)
        call = self._read(query, key, value, MaskArguments(kind.name, attention_mask, None, packed_seq_params))
        given = index_inputs(self.indexer, x.detach(), qr.detach())
        call.terms["selection"] = self._selected(given, call)
        out = self._compute(call)
        if not self.training or not torch.is_grad_enabled():
            return out
        trained: Tensor = dsa.DSAIndexerLossAutoScaler.apply(out, self._loss(given, call))
        return trained

    def _check_call(self, kind: AttnMaskType, packed_seq_params: Any, x: Tensor | None) -> None:
        if self.attend is not None:
            raise ValueError("inference on a ring keeps no keys of indexers: generate with context_parallel_size=1")
        if packed_seq_params is not None:
            raise ValueError(
                "packed sequences (thd) are not supported by the sparse attention of this release of Megatron; use "
                "batches of whole sequences"
            )
        if kind != AttnMaskType.causal:
            raise ValueError(f"sparse attention is causal, got attn_mask_type={kind.name}")
        if x is None:
            raise ValueError(
                "recompute_modules has core_attn, whose checkpoint does not give sparse attention its hidden states "
                'in this release of Megatron; take it out, or use recompute_granularity="full"'
            )

    def _selected(self, given: Indexed, call: CoreCall) -> Tensor:
        """Return the keys that each query of this rank selects, int32 [B, S/CP, top k]."""
        indexer, tokens = self.indexer, call.terms["tokens"]
        assert given.weights is not None, "an indexer has weights"
        return select_keys(
            given.q,
            given.k,
            given.weights,
            indexer.index_topk,
            call.cp,
            mask=call.terms["mask"],
            tokens=None if tokens is None else tokens[0],
            scale=indexer.softmax_scale,
            tag=(*call.terms["tag"], "indexer"),
        )

    def _loss(self, given: Indexed, call: CoreCall) -> Tensor:
        """Return the indexer's loss, such that what Megatron makes of all ranks' is its mean over their tokens.

        Without a coefficient it is 0, with gradients of 0, which Megatron's distributed optimizer waits for.
        """
        config, coefficient, tokens = self.config, self.config.dsa_indexer_loss_coeff, call.terms["tokens"]
        assert given.weights is not None, "an indexer has weights"
        if not coefficient:
            nothing: Tensor = (given.q.sum() + given.k.sum() + given.weights.sum()) * 0.0
            return nothing
        if not config.dsa_indexer_use_sparse_loss and call.terms["mask"] != Causal():
            raise ValueError(
                "an indexer's loss over all keys is for causal attention in one document, not for "
                f"{call.terms['mask']}: use {option_of('dsa_indexer_use_sparse_loss')}, the loss over selected keys"
            )
        total = indexer_loss(
            self._teacher(call),
            given,
            call.cp,
            scale=self.indexer.softmax_scale,
            selection=call.terms["selection"] if config.dsa_indexer_use_sparse_loss else None,
            tokens=None if tokens is None else tokens[0],
        )
        batch, held = call.q.shape[:2]
        loss: Tensor = total * (coefficient / (batch * held))  # ranks hold equally many tokens
        dsa.DSAIndexerLossLoggingHelper.save_loss_to_tracker(
            loss, self.layer_number, config.num_layers, avg_group=call.cp.group
        )
        # Gradients of ranks are averaged, but added up where each token's loss counts by itself.
        return loss / call.cp.ranks if config.calculate_per_token_loss else loss

    def _teacher(self, call: CoreCall) -> Teacher:
        """Return what attends, for the indexer's loss."""
        q, k, weight = call.q.detach(), call.k.detach(), None
        scale = q.shape[-1] ** -0.5 if self._scores.scale is None else self._scores.scale
        if self.up_projection and k.shape[2] == 1:
            shared = call.v.shape[-1]
            by_head = self.up_projection[0].weight.detach().unflatten(0, (q.shape[2], -1))
            weight = by_head[:, : q.shape[-1] - shared]
            k = torch.cat([k, call.v.detach()], -1)
        group = self._tp_group()
        over_heads = None if group.size() == 1 else partial(dist.all_reduce, group=group)
        return Teacher(q, k, scale, weight, over_heads)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the indexer's parameters as Megatron's DSAttention does."""
        return MegatronModule.sharded_state_dict(self, *args, **kwargs)


def problems(config: Any) -> list[str]:
    """Return what a TransformerConfig has that Megatron's own sparse attention ignores, and what to write instead."""
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
    if config.softmax_type != "vanilla":
        softmax = option_of("softmax_type", config.softmax_type)
        reasons.append(f"{softmax} is not supported by sparse attention (dsa): use vanilla")
    return reasons
