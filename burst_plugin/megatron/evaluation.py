"""Log-likelihoods of long texts by Megatron's models on a ring, as evaluation harnesses ask for them."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from burst_plugin.comm.differences import TensorValues
from burst_plugin.megatron.adapter import install_adapter
from burst_plugin.megatron.flags.config import problems_of_own_batches


def token_log_probs(model: Any, tokens: Tensor) -> Tensor:
    """Return the log-probability of every token but the first, given the tokens before it; collective.

        log_probs = token_log_probs(model, tokens)  # of a context and its continuation, the same on every rank
        likelihood = log_probs[:, len(context) - 1 :].sum(1)

    One forward pass without gradients, cut over context-parallel ranks by the layout of the ring; the losses of all
    ranks are put together in order. T may be any length: texts are padded at their ends, which no token before sees.
    A rank has the logits of its own tokens, or of a chunk of these with `loss_chunk`.

    Args:
        model: a `GPTModel` or hybrid model, wrapped or not, in evaluation mode.
        tokens: [B, T], int64, T at least 2; the same on all ranks of a model. Texts of unlike lengths are padded at
            their ends with any token; the log-probabilities of this padding mean nothing.

    Returns:
        [B, T - 1], float32 or the type of the model's losses, the same on every rank of the model.

    Raises:
        ValueError: for a model in training mode, pipeline stages, hybrid context parallelism,
            --reset-attention-mask, or tokens of another shape; on every rank, for tokens that differ between ranks.
    """
    config = get_model_config(model)
    reasons = _problems(model, config, tokens)
    if reasons:
        raise ValueError(f"token_log_probs cannot score these tokens: {'; '.join(reasons)}")
    registry = install_adapter(None).registry
    cp = registry.ring_of(model)
    cp.agree({"tokens": TensorValues(tokens.flatten())}, of="texts that are scored")
    count = tokens.shape[1] - 1
    divisor = 2 * cp.ranks * config.tensor_model_parallel_size
    padded = torch.nn.functional.pad(tokens, (0, -count % divisor))
    positions = torch.arange(padded.shape[1] - 1, device=tokens.device).expand(len(tokens), -1)
    layout = registry.tokens_of_batch(padded.shape[1] - 1, cp.ranks)
    ids, labels, positions = (cp.shard(x, 1, layout).contiguous() for x in (padded[:, :-1], padded[:, 1:], positions))
    with torch.no_grad():
        losses = model(ids, positions, None, labels=labels)
        return -cp.unshard(losses, 1, layout)[:, :count]


def _problems(model: Any, config: Any, tokens: Tensor) -> list[str]:
    """Return why a model cannot score these tokens, each with what to do instead."""
    reasons = []
    if tokens.dim() != 2 or tokens.shape[1] < 2:
        reasons.append(f"they are {list(tokens.shape)}; give [batch, at least 2]")
    if unwrap_model(model).training:
        reasons.append("the model is in training mode; call model.eval()")
    if config.pipeline_model_parallel_size > 1:
        reasons.append(
            f"pipeline_model_parallel_size={config.pipeline_model_parallel_size} is not supported; use Megatron's "
            "schedules with forward_only=True"
        )
    return reasons + problems_of_own_batches(config)
