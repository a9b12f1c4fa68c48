"""BurstAttention in DeepSpeed: `install()`, and one block in the configuration.

    burst_plugin.deepspeed.install()
    engine, *_ = deepspeed.initialize(model=model, config={..., "burst_attention": {"enabled": True, ...}})

Importing this package imports no DeepSpeed; `install()` does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from burst_plugin.batch import SequenceShard
from burst_plugin.context import ContextParallel

if TYPE_CHECKING:
    from burst_plugin.deepspeed.adapter import Adapter
    from burst_plugin.deepspeed.engine_session import Session
    from burst_plugin.deepspeed.loaders import ShardedLoader

__all__ = [
    "context",
    "eval_batch",
    "gather_logits",
    "install",
    "session",
    "shard_batch",
    "sharded_loader",
    "token_mean_loss",
    "valid_tokens",
]


def install() -> Adapter:
    """Make the block "burst_attention" known to DeepSpeed, and to transformers and Accelerate if they are installed.

    Once per process, before `deepspeed.initialize` (and before `from deepspeed import initialize`); harmless when
    repeated.

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
    """The session of an engine, or of the only one. Raises ValueError if there is none."""
    from burst_plugin.deepspeed.adapter import installed

    adapter = installed()
    if adapter is None:
        raise ValueError("burst_plugin.deepspeed.install() has not been called; call it before deepspeed.initialize")
    return adapter.session(engine)


def context(engine: Any = None) -> ContextParallel:
    """The ring, for `burst_plugin.burst_attention` in models of your own."""
    return session(engine).cp


def shard_batch(batch: Mapping[str, Any], engine: Any = None, *, pad_token_id: int = 0) -> dict[str, Any]:
    """This rank's shard of a batch of whole sequences; see `burst_plugin.batch.shard_batch`.

    Models of transformers do it themselves, in training, with whole batches that they are given.
    """
    return session(engine).shard_batch(batch, pad_token_id=pad_token_id)


def sharded_loader(
    loader: Iterable[Any], engine: Any = None, *, exchange: bool = False, pad_token_id: int = 0
) -> ShardedLoader:
    """A data loader whose batches are cut for this rank; see `ShardedLoader`."""
    from burst_plugin.deepspeed.loaders import ShardedLoader

    return ShardedLoader(loader, session(engine), exchange=exchange, pad_token_id=pad_token_id)


def valid_tokens(*shards: SequenceShard, engine: Any = None) -> float:
    """Labels that take part in the loss in these whole batches, over all data-parallel ranks; collective."""
    return session(engine).valid_tokens(*shards)


def token_mean_loss(
    logits: Tensor, shift_labels: Tensor, engine: Any = None, *, valid_tokens: float | None = None
) -> Tensor:
    """Cross entropy, mean over all tokens with a label on all ranks; see `Session.token_mean_loss`."""
    return session(engine).token_mean_loss(logits, shift_labels, valid_tokens=valid_tokens)


def gather_logits(logits: Tensor, shard: SequenceShard, engine: Any = None) -> Tensor:
    """Logits [B, S, V] of the whole sequence from local ones [B, S_local, V]; collective, without gradient."""
    return session(engine).gather_logits(logits, shard)


def eval_batch(batch: Mapping[str, Any], engine: Any) -> Tensor:
    """The mean loss of a batch of whole sequences with labels, computed on the ring without gradient; collective.

    The engine's mode is as before afterwards. `batch` is the same on all ranks of a ring.
    """
    return session(engine).eval_batch(engine, batch)
