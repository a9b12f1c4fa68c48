"""BurstAttention in DeepSpeed: `install()`, and one block in the configuration.

    burst_plugin.deepspeed.install()
    engine, *_ = deepspeed.initialize(model=model, config={..., "burst_attention": {"enabled": True, ...}})

Importing this package imports no DeepSpeed; `install()` does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from burst_plugin.batch import SequenceShard
from burst_plugin.context import ContextParallel

if TYPE_CHECKING:
    from burst_plugin.deepspeed.adapter import Adapter
    from burst_plugin.deepspeed.engine_session import Session
    from burst_plugin.deepspeed.loaders import ShardedLoader
    from burst_plugin.huggingface.rollouts import RolloutLogProbs
    from burst_plugin.trajectories import Edges

__all__ = [
    "context",
    "edge_log_probs",
    "eval_batch",
    "gather_logits",
    "install",
    "rollout_log_probs",
    "session",
    "shard_batch",
    "sharded_loader",
    "token_mean_loss",
    "valid_tokens",
]


def install() -> Adapter:
    """Make the block "burst_attention" known to DeepSpeed, and to transformers and Accelerate if they are installed.

    Call it once per process, before `deepspeed.initialize` (and before `from deepspeed import initialize`). Repeated
    calls change nothing.

    Returns:
        The adapter; `str(adapter)` says what was done.

    Raises:
        ImportError: deepspeed is not installed.
    """
    from burst_plugin.deepspeed.adapter import install_adapter, installed

    earlier = installed()
    if earlier is not None:
        return earlier
    adapter = install_adapter()
    if all(map(importlib.util.find_spec, ("transformers", "accelerate"))):
        from burst_plugin.deepspeed.trainer import install_trainer

        adapter.report += install_trainer(adapter)
    return adapter


def session(engine: Any = None) -> Session:
    """Return the `Session` of an engine, which cuts its batches and scales its losses; of the only engine if None.

    Raises ValueError for an engine without burst attention, without `install()`, or if `engine` is None and not
    exactly one engine runs with burst attention.
    """
    from burst_plugin.deepspeed.adapter import installed

    adapter = installed()
    if adapter is None:
        raise ValueError("burst_plugin.deepspeed.install() has not been called; call it before deepspeed.initialize")
    return adapter.session(engine)


def context(engine: Any = None) -> ContextParallel:
    """Return an engine's ring as a `ContextParallel`, to call `burst_plugin.burst_attention` in models of your own.

    `engine` may be None if only one engine runs with burst attention.
    """
    return session(engine).cp


def shard_batch(batch: Mapping[str, Any], engine: Any = None, *, pad_token_id: int = 0) -> dict[str, Any]:
    """Return this rank's shard of a batch of whole sequences, a dict of tensors [B, S_local, ...]; collective.

    Models of transformers cut whole batches by themselves in training, and need no call of it.

    Args:
        batch: tensors [B, S, ...] by name, equal on all ranks of a ring: `input_ids`, and perhaps `labels` (not
            shifted), `attention_mask`, `position_ids` and others; all are listed at `burst_plugin.batch.shard_batch`.
        engine: the engine whose ring shares the batch; None for the only one.
        pad_token_id: the id that fills up sequences whose length ranks cannot share evenly.

    Returns:
        The tensors of this rank's tokens, with `shift_labels` in place of `labels`, and a `SequenceShard` under
        "burst".
    """
    return session(engine).shard_batch(batch, pad_token_id=pad_token_id)


def sharded_loader(
    loader: Iterable[Any], engine: Any = None, *, exchange: bool = False, pad_token_id: int = 0
) -> ShardedLoader:
    """Return a data loader that yields this rank's shards of the batches of `loader`, as `shard_batch` makes them.

    Args:
        loader: an iterable of batches, dicts of whole tensors [B, S, ...].
        engine: the engine whose ring shares the batches; None for the only one.
        exchange: whether every rank of the ring draws batches of its own from `loader`: the ring then works on the
            batch of each of its ranks in turn. By default all ranks of the ring draw equal batches.
        pad_token_id: the id that fills up sequences whose length ranks cannot share evenly.
    """
    from burst_plugin.deepspeed.loaders import ShardedLoader

    return ShardedLoader(loader, session(engine), exchange=exchange, pad_token_id=pad_token_id)


def valid_tokens(*shards: SequenceShard, engine: Any = None) -> float:
    """Return the number of labels that count in the loss in these shards' whole batches, over all rings; collective.

    `shards` are the entries "burst" of batches that `shard_batch` cut. The number is the divisor of one mean over all
    tokens of a step: give it to `token_mean_loss`.
    """
    return session(engine).valid_tokens(*shards)


def token_mean_loss(
    logits: Tensor, shift_labels: Tensor, engine: Any = None, *, valid_tokens: float | None = None
) -> Tensor:
    """Return the mean cross entropy over all labels of all ranks, a scalar for `engine.backward`; collective.

    Args:
        logits: [B, S_local, V].
        shift_labels: [B, S_local], the label of each of this rank's tokens; -100 where there is none.
        engine: the engine that trains the model; None for the only one.
        valid_tokens: the number of labels to divide by; None for the labels of this micro-batch on all ranks, so that
            DeepSpeed averages over gradient accumulation steps. For one mean over all tokens of a step give their
            number (`valid_tokens(*shards)`), and call `engine.backward(loss, scale_wrt_gas=False)`.

    Returns:
        The mean, equal on all ranks. Its gradient is scaled for DeepSpeed, which averages gradients over all ranks.
    """
    return session(engine).token_mean_loss(logits, shift_labels, valid_tokens=valid_tokens)


def gather_logits(logits: Tensor, shard: SequenceShard, engine: Any = None) -> Tensor:
    """Gather logits [B, S_local, V] to [B, S, V] of the whole sequence, without gradient; collective.

    shard: the entry "burst" of the batch that the logits belong to.
    engine: the engine that trains the model; None for the only one.
    """
    return session(engine).gather_logits(logits, shard)


def rollout_log_probs(
    rollouts: Iterable[Sequence[int] | Tensor], engine: Any = None, **options: Any
) -> RolloutLogProbs:
    """Return the log-probabilities of the tokens of rollouts; shared beginnings are computed once; collective.

    The engine runs its model, one of transformers, on all rollouts folded into a prefix tree. Logits exist for a
    chunk of tokens at a time.

    Args:
        rollouts: token ids, [T] each, prompt and answer without padding; equal on all ranks of a ring, unless
            `own=True`: then each rank gives rollouts of its own, and computes a loss of its own from their values.
        engine: the engine that trains the model; None for the only one.
        options: `own` (False); `temperature`, by which logits are divided (1.0); `chunk`, the number of tokens whose
            logits exist at a time (1024); `router_loss`, whether to return the load-balancing loss of experts (by
            default as the model's configuration says).

    Returns:
        A `RolloutLogProbs`: a list of log-probabilities, [T - 1] for each rollout; a list of entropies, [T - 1]
        likewise; the number of tokens that were computed; and, beside this tuple, `router_loss`. If a loss is made of
        these values, `engine.backward(loss)` ends with the mean over rings of the gradients, or, with `own=True`,
        over all ranks.

    Example:
        log_probs, entropies, _ = burst_plugin.deepspeed.rollout_log_probs(rollouts)
        answers = [x[len(prompt) - 1 :] for x in log_probs]
        engine.backward(-sum((advantage * x).mean() for advantage, x in zip(advantages, answers)))
    """
    from burst_plugin.deepspeed.rollouts import rollout_log_probs

    return rollout_log_probs(session(engine), rollouts, options)


def edge_log_probs(logits: Tensor, edges: Edges, shard: SequenceShard, engine: Any = None) -> tuple[Tensor, Tensor]:
    """Return the log-probability of every edge of a prefix tree, and the entropy at it, from logits; collective.

    An edge leads from a token to a next token. Its entropy is that of the distribution that the next token is drawn
    from.

    Args:
        logits: [1, S_local, V], returned by a model for a shard of a folded batch with its `tree`, without labels.
        edges: the edges that `burst_plugin.trajectories.fold` returned with that tree.
        shard: the entry "burst" of the batch.
        engine: the engine that trains the model; None for the only one.

    Returns:
        Two tensors [E], float32, of all edges on every rank, for `burst_plugin.trajectories.unfold`. Their gradient
        is such that `engine.backward(loss)` ends with the mean over rings of the gradients of their losses.

    Example:
        local = burst_plugin.deepspeed.shard_batch({"input_ids": ids, "tree": tree})
        log_probs, entropies = edge_log_probs(engine(**local).logits, edges, local["burst"])
    """
    from burst_plugin.deepspeed.rollouts import edge_log_probs

    return edge_log_probs(session(engine), logits, edges, shard)


def eval_batch(batch: Mapping[str, Any], engine: Any) -> Tensor:
    """Return the mean loss of a batch of whole sequences with labels, on the ring and without gradient; collective.

    `batch` is a dict of tensors [B, S, ...], equal on all ranks of a ring. The model runs in evaluation mode, and
    returns to its mode afterwards.
    """
    return session(engine).eval_batch(engine, batch)
