"""Log-likelihoods of texts over a ring, as `lm_eval` asks for them, without whole logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burst_plugin.activations import Head
from burst_plugin.activations.recomputed_chunks import wide_dtype
from burst_plugin.batch import IGNORED_LABEL, SHARD_KEY, shard_batch
from burst_plugin.checks import shown, whole_numbers
from burst_plugin.context import ContextParallel
from burst_plugin.huggingface.attention import EXAMINED
from burst_plugin.huggingface.chunked_loss import ChunkedLoss, restore_head, take_head
from burst_plugin.huggingface.ring_cache import tell


class LogLikelihood(NamedTuple):
    """The log-likelihoods of the ends of texts; every rank has all of them.

    total: [B], float64, the sum of the log-probabilities of the tokens that are scored.
    is_greedy: [B], bool, whether every scored token of the text is the most likely one.
    of_tokens: [B, S], float32 or float64, the log-probability of each token; 0 for tokens that are not scored.
    is_scored: [B, S], bool, which tokens are scored: those after the given beginning, without padding.
    """

    total: Tensor
    is_greedy: Tensor
    of_tokens: Tensor
    is_scored: Tensor


@torch.no_grad()
def log_likelihood(
    model: torch.nn.Module,
    input_ids: Tensor,
    cp: ContextParallel,
    *,
    context: int | Sequence[int] = 1,
    attention_mask: Tensor | None = None,
    chunk: int = 1024,
) -> LogLikelihood:
    """Return the log-likelihood of each text's end, given its beginning, without whole logits; collective.

    Each rank computes its share of the tokens, and logits of `chunk` scored tokens at a time.

    Args:
        model: a causal language model of transformers, after `prepare`, in evaluation mode.
        input_ids: [B, S], whole texts, the same on every rank.
        cp: the context-parallel group.
        context: how many tokens at the beginning of each row are given and not scored, at least 1; one number, or one
            for each row.
        attention_mask: [B, S], 0 for padding, which does not count; None for no padding.
        chunk: logits of so many tokens exist at a time.

    Returns:
        A `LogLikelihood` of all texts, on every rank.

    Raises:
        ValueError: on every rank, for arguments or a model that are not as described, or if ranks differ.

    Example:
        result = log_likelihood(model, torch.cat([question, answer], 1), cp, context=question.shape[1])
        result.total, result.is_greedy  # what lm_eval's `loglikelihood` returns
    """
    try:
        pretrained = next((each for each in model.modules() if isinstance(each, PreTrainedModel)), None)
        if pretrained is None or model.training or not hasattr(pretrained, EXAMINED):
            instead = "model.eval()" if model.training else "burst_plugin.huggingface.prepare(model)"
            raise ValueError(f"log_likelihood is for models on the ring in evaluation mode; call {instead}")
        is_scored = _scored(input_ids, attention_mask, context)
        scores = _Scores(pretrained, chunk)
    except Exception as error:  # of any kind: the other ranks must know of it
        tell(cp, error)
        raise
    labels = input_ids.masked_fill(~is_scored, IGNORED_LABEL)
    batch = {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}
    if attention_mask is not None and not bool(attention_mask[:, 0].all()):  # padded on the left
        batch["position_ids"] = ((attention_mask != 0).cumsum(1) - 1).clamp(min=0)
    take_head(pretrained, scores)
    try:
        local = shard_batch({name: x for name, x in batch.items() if x is not None}, cp)
        model(**local, labels=local["shift_labels"], use_cache=False)
    finally:
        restore_head(pretrained)  # if ranks have other texts, and the model did not begin
    assert scores.found is not None
    values = local[SHARD_KEY].unshard(scores.found)  # of the next token
    log_probs, misses = torch.nn.functional.pad(values[:, :-1], (0, 0, 1, 0)).unbind(-1)
    return LogLikelihood(log_probs.double().sum(1), misses.sum(1) == 0, log_probs, is_scored)


def _scored(ids: Tensor, mask: Tensor | None, context: int | Sequence[int]) -> Tensor:
    """Return which tokens are scored, [B, S]. Raise ValueError for arguments that do not fit."""
    if ids.dim() != 2 or (mask is not None and mask.shape != ids.shape):
        raise ValueError(
            f"log_likelihood takes input_ids [B, S], and attention_mask of that shape, got {list(ids.shape)} and "
            f"{'none' if mask is None else list(mask.shape)}"
        )
    expected = "give the number of tokens that are not scored, at least 1, or a list with one for each row"
    numbers = [context] * len(ids) if isinstance(context, int) else context
    contexts = whole_numbers("context={}", numbers, expected)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    lengths = real.sum(1).tolist()
    if len(contexts) != len(ids) or any(not 1 <= n < length for n, length in zip(contexts, lengths, strict=False)):
        raise ValueError(
            f"context={shown(context)} does not fit rows of {shown(lengths)} tokens; {expected}, less than its length"
        )
    return real & (real.cumsum(1) > torch.tensor(contexts, device=ids.device).unsqueeze(1))


class _Scores(ChunkedLoss):
    """Takes the place of a loss. found: log-probabilities of labels, and 1 for labels that are not the likeliest."""

    found: Tensor | None = None

    def loss_of(self, hidden: Tensor, head: Head, labels: Tensor, ignore_index: int, count: Tensor | float) -> Tensor:
        """Return the negative log-probability of all labels."""
        counted = labels != ignore_index
        rows, targets = hidden[counted], labels[counted]
        values = hidden.new_zeros(*labels.shape, 2, dtype=wide_dtype(hidden.dtype))
        parts = [values.new_zeros(0, 2)]
        for part in head.chunks(len(rows)):
            logits = head.logits(rows[part]).to(values.dtype)
            index = targets[part].unsqueeze(1)
            of_target = logits.gather(1, index)[:, 0]
            is_missed = (logits.argmax(1) != targets[part]).to(values.dtype)
            parts.append(torch.stack([of_target - logits.logsumexp(1), is_missed], 1))
        values[counted] = torch.cat(parts)
        self.found = values
        return -values[..., 0].sum() / count
