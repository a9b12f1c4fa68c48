"""Log-probabilities of rollouts that are folded into a prefix tree, for losses of an engine.

DeepSpeed takes the mean of gradients over all ranks, and a rank has the gradients of its own tokens. So gradients of
the values are multiplied by the number of ranks of a ring: the gradient of a loss then belongs to the whole sequence,
and rings are averaged as data-parallel ranks are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from burst_plugin.activations import Head
from burst_plugin.batch import SequenceShard
from burst_plugin.checks import shown
from burst_plugin.deepspeed.engine_session import Session
from burst_plugin.trajectories import Edges
from burst_plugin.trajectories import edge_log_probs as edge_log_probs_of_hidden

if TYPE_CHECKING:
    from burst_plugin.huggingface.rollouts import RolloutLogProbs

_CHUNK = 1024  # rows of logits that are read at a time


def rollout_log_probs(
    session: Session, rollouts: Iterable[Sequence[int] | Tensor], options: dict[str, Any]
) -> RolloutLogProbs:
    """Return the log-probabilities of rollouts, with gradients as an engine needs them; collective.

    Args:
        session: the session of the engine, whose model runs on the folded rollouts.
        rollouts: token ids, [T] each, without padding.
        options: the keyword arguments of `burst_plugin.huggingface.rollout_log_probs`.

    Raises ValueError if the engine no longer exists.
    """
    from burst_plugin.huggingface.rollouts import rollout_log_probs as of_model

    engine = session.engine()
    if engine is None:
        raise ValueError("the engine no longer exists; call deepspeed.initialize again")
    if session.cp.ranks == 1 and session.hooks is not None:  # as long as the model has a loss of its own
        session.hooks.check_takes_shards(engine.module)
    with session.computing_edges():
        values = of_model(engine, rollouts, session.cp, **options)
    if options.get("own"):  # the gradient is that of all ranks' losses already
        return values
    log_probs, entropies = ([with_gradient_of_ring(x, session) for x in each] for each in values[:2])
    in_ring = values._replace(log_probs=log_probs, entropies=entropies)
    in_ring.router_loss = None if values.router_loss is None else with_gradient_of_ring(values.router_loss, session)
    return in_ring


def edge_log_probs(session: Session, logits: Tensor, edges: Edges, shard: SequenceShard) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each edge of a prefix tree, and the entropy at it, each [E]; collective.

    An edge leads from a token to a next token. Its entropy is that of the distribution that the next token is drawn
    from. Gradients are such that an engine, which averages them over ranks, ends with the mean over rings.

    Args:
        session: the session of the engine that trains the model.
        logits: [1, S_local, V].
        edges: the edges of the tree, from `burst_plugin.trajectories.fold`.
        shard: the shard that the logits belong to; ValueError if its batch was cut without a tree.
    """
    if not isinstance(shard, SequenceShard) or shard.mask is None or not shard.mask.trees:
        raise ValueError(f'got {shown(shard)}; give the entry "burst" of a batch that was cut with a tree')
    of_logits = Head(lambda rows: rows, chunk=_CHUNK, parameters=[])
    values = edge_log_probs_of_hidden(logits, of_logits, edges, shard.cp, tokens=shard.tokens)
    return with_gradient_of_ring(values[0], session), with_gradient_of_ring(values[1], session)


def with_gradient_of_ring(x: Tensor, session: Session) -> Tensor:
    """Return `x`, its gradient multiplied by the number of ranks of a ring; by a hook, which leaves -inf as it is."""
    if not x.requires_grad:
        return x
    found, ranks = x.clone(), session.cp.ranks
    found.register_hook(lambda grad: grad * ranks)  # type: ignore[no-untyped-call]
    return found
