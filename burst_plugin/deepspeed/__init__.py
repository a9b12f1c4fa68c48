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
    """Return the session of an engine, or of the only one. Raise ValueError if there is none."""
    from burst_plugin.deepspeed.adapter import installed

    adapter = installed()
    if adapter is None:
        raise ValueError("burst_plugin.deepspeed.install() has not been called; call it before deepspeed.initialize")
    return adapter.session(engine)


def context(engine: Any = None) -> ContextParallel:
    """Return the ring of an engine, for `burst_plugin.burst_attention` in models of your own."""
    return session(engine).cp


def shard_batch(batch: Mapping[str, Any], engine: Any = None, *, pad_token_id: int = 0) -> dict[str, Any]:
    """Return this rank's shard of a batch of whole sequences; see `burst_plugin.batch.shard_batch`.

    In training, models of transformers do so themselves with whole batches.
    """
    return session(engine).shard_batch(batch, pad_token_id=pad_token_id)


def sharded_loader(
    loader: Iterable[Any], engine: Any = None, *, exchange: bool = False, pad_token_id: int = 0
) -> ShardedLoader:
    """Return a data loader that cuts its batches for this rank; see `ShardedLoader`."""
    from burst_plugin.deepspeed.loaders import ShardedLoader

    return ShardedLoader(loader, session(engine), exchange=exchange, pad_token_id=pad_token_id)


def valid_tokens(*shards: SequenceShard, engine: Any = None) -> float:
    """Return the number of labels that count in the loss of these batches, of all data-parallel ranks; collective."""
    return session(engine).valid_tokens(*shards)


def token_mean_loss(
    logits: Tensor, shift_labels: Tensor, engine: Any = None, *, valid_tokens: float | None = None
) -> Tensor:
    """Return the cross entropy, mean over all labels of all ranks; see `Session.token_mean_loss`."""
    return session(engine).token_mean_loss(logits, shift_labels, valid_tokens=valid_tokens)


def gather_logits(logits: Tensor, shard: SequenceShard, engine: Any = None) -> Tensor:
    """Gather logits [B, S_local, V] to [B, S, V] of the whole sequence, without gradient; collective."""
    return session(engine).gather_logits(logits, shard)


def rollout_log_probs(
    rollouts: Iterable[Sequence[int] | Tensor], engine: Any = None, **options: Any
) -> RolloutLogProbs:
    """Return the log-probabilities of rollouts; beginnings that rollouts share are computed once; collective.

    The engine runs its model, one of transformers, on the folded rollouts; logits are there for a chunk of tokens.

    Args:
        rollouts: token ids, [T] each, prompt and answer without padding; the same on all ranks of a ring, unless
            `own=True`: then each rank has its own, and computes its own loss of them.
        options: `own`, `temperature`, `chunk` and `router_loss`, see `burst_plugin.huggingface.rollout_log_probs`.

    Returns:
        See `burst_plugin.huggingface.RolloutLogProbs`. Their gradient is such that `engine.backward(loss)` ends with
        the mean over rings of the gradients of their losses, or, with `own=True`, over all ranks.

    Example:
        log_probs, entropies, _ = burst_plugin.deepspeed.rollout_log_probs(rollouts)
        engine.backward(-sum((advantage * x).mean() for advantage, x in zip(advantages, log_probs)))
    """
    from burst_plugin.deepspeed.rollouts import rollout_log_probs

    return rollout_log_probs(session(engine), rollouts, options)


def edge_log_probs(logits: Tensor, edges: Edges, shard: SequenceShard, engine: Any = None) -> tuple[Tensor, Tensor]:
    """Return the log-probability of every edge, and the entropy of its distribution, from logits; collective.

    Args:
        logits: [1, S_local, V], what a model returned for a batch that was cut with a tree, and without labels.
        edges: what `burst_plugin.trajectories.fold` returned for it.
        shard: the entry "burst" of the batch.

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

    `batch` has to be the same on all ranks of a ring. The engine's mode is restored afterwards.
    """
    return session(engine).eval_batch(engine, batch)
