"""Losses of experts' routers over context-parallel ranks that hold unequal numbers of valid tokens.

A model that is called with a `padding_mask` leaves padding out of these losses. Of ranks with 2 and 6 valid tokens,
Megatron weighs either mean of the z loss by 1/2; here the weights are 2/8 and 6/8. With `--calculate-per-token-loss`
it multiplies balancing losses by the number of ranks and by a rank's own tokens, but it has counted the tokens of all
ranks, 8. Here it is the ranks' mean, 4.

The balancing loss of sequences (`seq_aux_loss`) is a mean over the samples of a microbatch. Where samples are packed
into one sequence, the layout decides which parts of them a rank holds: see `_RouterLossHooks.find_samples`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.moe import router as routers
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from burst_plugin.frameworks.wrapping import bind, wrap, wrap_everywhere
from burst_plugin.megatron.batches.packed import layout_of
from burst_plugin.megatron.flags.config import weighs_losses
from burst_plugin.megatron.registry import Registry
from burst_plugin.sequence.layout import positions

_UNFLATTENS = "_maybe_unflatten_for_moe"  # from 0.19 on


def hook_router_losses(registry: Registry) -> str:
    """Have Megatron weigh the losses of experts' routers by the valid tokens of all context-parallel ranks.

    It wraps functions of `TopKRouter` and its losses. registry: the rings. Returns a line for the report of
    `install()`.
    """
    weights = _RouterLossHooks(registry)
    wrap(routers.TopKRouter, "routing", weights.route)
    wrap(routers.TopKRouter, "_apply_seq_aux_loss", weights.balance_samples)
    wrap(routers, "z_loss_func", weights.z_loss)
    wrap(routers, "get_tokens_per_expert_and_token_count", weights.count_tokens)
    if hasattr(TransformerLayer, _UNFLATTENS):
        wrap(TransformerLayer, _UNFLATTENS, weights.find_samples)
    return "losses of routers (balance, z) weigh the valid tokens of all context-parallel ranks alike"


class _RouterLossHooks:
    """Functions around Megatron's, for models with rings.

    All ranks count, with a `padding_mask` or without: a script may pass none to a rank without padding.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._router: Any = None  # the one that routes tokens, if its model has rings
        self._is_of: Tensor | None = None  # whether each of these tokens is of each sample, [T, samples]

    def route(self, original: Any, router: Any, *args: Any, **kwargs: Any) -> Any:
        """Route tokens with a mask that may come from `find_samples`; Megatron has transposed it on its way."""
        if not weighs_losses(router.config):
            return original(router, *args, **kwargs)
        call = bind(original, router, *args, **kwargs)
        logits, mask = call.arguments["logits"], call.arguments.get("padding_mask")
        if mask is not None and mask.shape[1] != logits.shape[1]:
            self._is_of = ~mask.flatten(1)
            call.arguments["padding_mask"] = None if mask.dim() == 3 else mask.all(1, keepdim=True)
        self._router = router
        try:
            return original(*call.args, **call.kwargs)
        finally:
            self._router = self._is_of = None

    def z_loss(
        self, original: Any, logits: Tensor, z_loss_coeff: float, padding_mask: Tensor | None = None
    ) -> Tensor:
        """Return the z loss of the valid tokens of all ranks, with the gradient of this rank's share of it.

        Megatron prints the value: until 0.18 of one rank, and from 0.19 on the mean over ranks. With
        `--calculate-per-token-loss` it multiplies the gradient by this rank's valid tokens, so that is not weighed.
        """
        own_mean: Tensor = original(logits, z_loss_coeff, padding_mask=padding_mask)
        if self._router is None:
            return own_mean
        group, own_tokens = self._router.tp_cp_group, torch.full((), len(logits), device=logits.device)
        if padding_mask is not None:
            own_tokens = (~padding_mask).sum()
        sums = torch.stack([own_mean.detach() * own_tokens.double(), own_tokens.double()])
        dist.all_reduce(sums, group=group)
        loss, total = sums[0], sums[1].clamp(min=1)
        share = own_mean
        if not self._router.calculate_per_token_loss:
            share = own_mean * (own_tokens * group.size() / total).to(own_mean.dtype)
        return share + ((loss / total).to(share.dtype) - share).detach()

    def count_tokens(
        self, original: Any, routing_map: Tensor, reduce_group: Any, topk: int, with_padding_mask: bool = False
    ) -> tuple[Tensor, Any, Any]:
        """Return the tokens of every expert on all ranks, the mean of all tokens over ranks, and their sum.

        In `reduce_group` there may be data-parallel ranks, too. With a padding mask Megatron then takes the tokens of
        all ranks for a rank's own, without context parallelism as well; so the mean is over context-parallel ranks.
        """
        by_expert, tokens, total = original(routing_map, reduce_group, topk=topk, with_padding_mask=with_padding_mask)
        if self._router is None:
            return by_expert, tokens, total
        ranks, counted = self._router.tp_cp_group.size(), by_expert.sum() / topk
        if not self._router.config.moe_router_fusion:  # its kernel takes a number, read on the host
            total = counted
        if reduce_group.size() == ranks:
            tokens = counted / ranks
        elif self._router.calculate_per_token_loss:  # else own tokens do not count
            has_mask = torch.full((), int(with_padding_mask), device=by_expert.device)
            dist.all_reduce(has_mask, op=dist.ReduceOp.MAX, group=reduce_group)  # some ranks may have no padding
            tokens = torch.where(has_mask > 0, counted / ranks, tokens)
        return by_expert, tokens, total

    # ------------------------------------------------------------------------------------ samples of packed sequences

    def find_samples(
        self, original: Any, layer: Any, hidden_states: Tensor, padding_mask: Tensor | None, packed_seq_params: Any
    ) -> tuple[Tensor, Tensor | None, int | None]:
        """Leave hidden states [T, 1, H] of several samples as they are, and give the router a mask for each sample.

        Megatron reshapes them into samples, but ranks hold parts of these. The mask is True for padding and for
        tokens of other samples. It takes the place of `padding_mask` [1, T], which the router gets again at
        recomputation: as [samples, T], or as [samples, T, 1] without padding.
        """
        length = getattr(packed_seq_params, "tokens_per_sample", None)
        if length is None or not layer.is_moe_layer or not weighs_losses(layer.config):
            return original(layer, hidden_states, padding_mask, packed_seq_params)  # type: ignore[no-any-return]
        router = layer.mlp.router
        if not router.get_aux_loss_coeff("seq_aux_loss"):  # other losses do not tell samples apart
            return hidden_states, padding_mask, None
        samples, total = self._samples(layer, packed_seq_params, length)
        if total <= length:
            return hidden_states, padding_mask, None
        if layer.config.sequence_parallel:
            samples = samples.chunk(router.tp_group.size())[router.tp_group.rank()]
        numbers = torch.arange(-(-total // length), device=samples.device)
        is_of_other = samples != numbers.unsqueeze(1)
        return hidden_states, is_of_other.unsqueeze(2) if padding_mask is None else is_of_other | padding_mask, None

    def _samples(self, layer: Any, packed_seq_params: Any, length: int) -> tuple[Tensor, int]:
        """Return the numbers of the samples that this rank's tokens belong to, [T], and the tokens of all ranks."""
        padded = packed_seq_params.cu_seqlens_q_padded
        starts = packed_seq_params.cu_seqlens_q if padded is None else padded
        offsets = self._registry.tensor_cache.get(
            starts, "numbers", lambda: tuple(starts.flatten().tolist()), id(layer)
        )
        group = layer.mlp.router.cp_group
        tokens = self._registry.packed_tokens(offsets, group.size())
        rows = positions(layout_of(tokens).runs(group.rank(), group.size(), tokens), starts.device)
        return rows // length, tokens.length

    def balance_samples(self, original: Any, router: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the balancing loss of sequences: of samples in one sequence by the sums of their tokens."""
        if self._is_of is None:
            return original(router, *args, **kwargs)  # type: ignore[no-any-return]
        call = bind(original, router, *args, **kwargs)
        for name in ("scores_for_aux_loss", "routing_map"):
            call.arguments[name] = _sums(call.arguments[name], self._is_of)
        call.arguments.update(seq_length=1, bsz=self._is_of.shape[1], with_padding_mask=True)
        return original(*call.args, **call.kwargs)  # type: ignore[no-any-return]


def _sums(x: Tensor, is_of: Tensor) -> Tensor:
    """Return the sums of rows of `x` [tokens, experts] that are of each sample, [samples, experts]."""
    return torch.stack([(x * rows.unsqueeze(1)).sum(0) for rows in is_of.unbind(1)])


# ------------------------------------------------------------------------------------------ a fault of older releases


def weigh_routers_per_token() -> None:
    """Have `--calculate-per-token-loss` scale router losses by the tensor- times the context-parallel size.

    Megatron multiplies these losses by a rank's own tokens, and divides them by the tokens of all ranks. The repair
    wraps `forward_step_calc_loss`, in which Megatron sets their scale anew in every forward step.
    """

    def set_scale(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        config = bind(original, *args, **kwargs).arguments["config"]
        if config.calculate_per_token_loss and config.num_moe_experts is not None and weighs_losses(config):
            ranks = config.tensor_model_parallel_size * config.context_parallel_size
            MoEAuxLossAutoScaler.set_loss_scale(MoEAuxLossAutoScaler.main_loss_backward_scale * ranks)
        return result

    wrap_everywhere(schedules, "forward_step_calc_loss", set_scale)
