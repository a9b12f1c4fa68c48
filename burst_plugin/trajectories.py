"""Rollouts that begin alike, such as those of GRPO, computed as one sequence: log-probabilities of their tokens.

    ids, position_ids, tree, edges = fold(rollouts)
    batch = shard_batch({"input_ids": ids, "tree": tree}, cp)
    ...                                                              a model, with mask=tree
    log_probs, entropy = edge_log_probs(hidden, head, edges, cp, tokens=batch["burst"].tokens)
    for log_prob in unfold(log_probs, edges): ...                    [T - 1] of each rollout

How rollouts are folded is in `sequence.folding`, the mask in `sequence.prefix_tree`.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from burst_plugin.activations.chunked_loss import Head, token_log_probs
from burst_plugin.checks import shown
from burst_plugin.context import ContextParallel
from burst_plugin.ring.agreement import prepared_together
from burst_plugin.ring.graph_breaks import between_graphs
from burst_plugin.ring.request import as_tokens
from burst_plugin.sequence.folding import Edges, Folded, fold, unfold
from burst_plugin.sequence.layout import Tokens, positions

__all__ = ["Edges", "Folded", "edge_log_probs", "fold", "unfold"]


@between_graphs
def edge_log_probs(
    hidden: Tensor, head: Head, edges: Edges, cp: ContextParallel | None = None, *, tokens: Tokens | None = None
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of every edge, and the entropy of the distribution that its token was drawn from.

    At most `head.chunk` rows of logits exist at a time. Every rank gets those of all edges, and computes those of its
    own tokens: the gradient that a rank computes is that of its share, as if all computed the same loss once, so that
    those of parameters are added up over ranks.

    Args:
        hidden: [1, S, H], the hidden states before the head, of a folded sequence or of this rank's tokens of it.
        head: the head, see `burst_plugin.activations.Head`.
        edges: those of the whole sequence, the same on all ranks.
        cp: the context-parallel group; collective then. Each rank has the head compute as many rows as any other.
        tokens: the sequence that `hidden` is taken from, `batch["burst"].tokens`; padding may follow it. By default
            every rank holds equally many tokens, in the group's layout.

    Returns:
        Two tensors [E], float32, or float64 if `hidden` is; with `unfold` they are those of the rollouts.

    Raises:
        ValueError: for what does not fit together, on every rank.

    Example:
        log_probs, entropy = edge_log_probs(hidden, Head(model.lm_head, chunk=1024), edges)
        loss = -sum((advantage * x.exp()).mean() for advantage, x in zip(advantages, unfold(log_probs, edges)))
    """
    if cp is None or cp.ranks == 1:
        _check(hidden, edges)
        _check_length(edges, hidden.shape[1])
        queries, targets = (x.to(hidden.device) for x in (edges.queries, edges.tokens))
        return token_log_probs(hidden[0][queries], head, targets)

    def agree(share: _Share | None, problem: str) -> int:
        compared = {} if share is None else {"checksum of edges": share.checksum, "hidden states": hidden.dtype}
        return cp.agree(compared, problem, "log-probabilities of edges")

    share, _ = prepared_together(partial(_share, hidden, edges, cp, tokens), agree)
    # Ranks with fewer edges have the head compute some more: a sharded one is gathered by all ranks alike.
    missing = share.most - len(share.own)
    mine, targets = pad(hidden[0][share.rows], (0, 0, 0, missing)), pad(share.targets, (0, missing))
    found = torch.stack(token_log_probs(mine, head, targets), 1)
    by_rank = Tokens(share.most * cp.ranks, holders=tuple(range(cp.ranks)))  # those of one rank after the other
    gathered = cp.unshard(found.detach(), 0, by_rank)[share.places]
    whole = gathered.index_put((share.own,), found[: len(share.own)])
    return whole[:, 0], whole[:, 1]


class _Share(NamedTuple):
    """What a rank has to compute.

    own: its edges, [N], by their numbers.
    rows, targets: [N], their rows of its hidden states, and their tokens.
    most: how many edges any rank has, at least 1.
    places: [E], where each edge is among `most` rows of one rank after the other.
    checksum: of all edges.
    """

    own: Tensor
    rows: Tensor
    targets: Tensor
    most: int
    places: Tensor
    checksum: int


def _share(hidden: Tensor, edges: Edges, cp: ContextParallel, tokens: Tokens | None) -> _Share:
    """Return what this rank has to compute. Raise ValueError for what does not fit together."""
    _check(hidden, edges)
    tokens = Tokens(max(1, hidden.shape[1] * cp.ranks)) if tokens is None else as_tokens(tokens)
    _check_length(edges, tokens.length)
    owners, rows = _holders(cp, tokens, hidden.device)
    held = int((owners == cp.rank).sum())
    if held != hidden.shape[1]:
        raise ValueError(
            f"rank {cp.rank} holds {held} of {tokens.length} tokens, but hidden {list(hidden.shape)} has "
            f"{hidden.shape[1]}; pass the tokens= of its shard"
        )
    queries, targets = (x.to(hidden.device) for x in (edges.queries, edges.tokens))
    owners, rows = owners[queries], rows[queries]
    of_ranks = [(owners == rank).nonzero()[:, 0] for rank in range(cp.ranks)]
    most = max(1, *map(len, of_ranks))
    places = torch.empty_like(rows)
    for rank, some in enumerate(of_ranks):
        places[some] = torch.arange(len(some), device=hidden.device) + rank * most
    own = of_ranks[cp.rank]
    weights = torch.arange(1, len(owners) + 1, device=hidden.device) % 65521
    checksum = int((weights * (targets + 31 * queries)).sum())
    return _Share(own, rows[own], targets[own], most, places, checksum)


def _holders(cp: ContextParallel, tokens: Tokens, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return of every token the rank that holds it, and its row there, [S] each."""
    owners, rows = (torch.empty(tokens.length, dtype=torch.int64, device=device) for _ in range(2))
    for rank, runs in enumerate(cp.rank_state.route_table.shards(tokens)):
        held = positions(runs, device)
        owners[held] = rank
        rows[held] = torch.arange(len(held), device=device)
    return owners, rows


def _check(hidden: Tensor, edges: Edges) -> None:
    """Raise ValueError for other things than hidden states of one sequence, and edges."""
    if not isinstance(edges, Edges):
        raise ValueError(f"edges={shown(edges)} is not valid; give those that fold returned")
    if not isinstance(hidden, Tensor) or hidden.dim() != 3 or len(hidden) != 1:
        raise ValueError(f"hidden is {shown(hidden)}; give the hidden states of a folded sequence, [1, S, H]")


def _check_length(edges: Edges, length: int) -> None:
    """Raise ValueError for edges beyond a sequence."""
    if len(edges.queries) and int(edges.queries.max()) >= length:
        raise ValueError(
            f"edges go up to token {int(edges.queries.max())}, but the sequence has {length} tokens; pass the edges "
            "and the tokens= of one batch"
        )
