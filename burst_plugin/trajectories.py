"""Rollouts with common beginnings, as in GRPO, computed as one sequence: log-probabilities of their tokens.

    ids, position_ids, tree, edges = fold(rollouts)
    batch = shard_batch({"input_ids": ids, "tree": tree}, cp)
    ...                                                              a model, with mask=tree
    log_probs, entropy = edge_log_probs(hidden, head, edges, cp, tokens=batch["burst"].tokens)
    for log_prob in unfold(log_probs, edges): ...                    [T - 1] of each rollout

    rollouts    7 7 3 4      folded    7 7 3 4 9 5 5      7 7 is a node, with two children, 3 4 9 and 5 5
                7 7 3 4 9
                7 7 5 5      edges     7>7 7>3 3>4 4>9 7>5 5>5

An *edge* leads from a token to one that comes next: a token at a branch has several. What a model says of the next
token, a log-probability or a loss, belongs to an edge, and to all rollouts that take it. The mask is in
`sequence.prefix_tree`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from burst_plugin.activations.chunked_loss import Head, token_log_probs
from burst_plugin.checks import shown, unreadable, whole_numbers
from burst_plugin.context import ContextParallel
from burst_plugin.ring.agreement import prepared_together
from burst_plugin.ring.graph_breaks import between_graphs
from burst_plugin.ring.request import as_tokens
from burst_plugin.sequence.layout import Tokens, positions
from burst_plugin.sequence.prefix_tree import PrefixTree

_EXPECTED = "give each rollout as a list or a tensor of one dimension of token ids, prompt and answer without padding"


@dataclass(frozen=True, eq=False)
class Edges:
    """The predictions in a folded sequence: E edges from token to token, in the order of the tokens predicted.

    queries: [E], int64, the place in the folded sequence of the token that predicts.
    tokens: [E], int64, the id of the token that comes next.
    counts: [E], int64, the number of rollouts that take the edge.
    paths: for every rollout [T], int64, the places of its tokens: `ids[0, paths[r]]` is rollout r, and
        `hidden[0, paths[r]]` are its hidden states.
    """

    queries: Tensor
    tokens: Tensor
    counts: Tensor
    paths: tuple[Tensor, ...]
    _arrivals: Tensor = field(repr=False)  # [S]: of each token, the edge that leads to it

    @cached_property
    def _index(self) -> Tensor:
        """Return the edges of one rollout after the other."""
        with torch.inference_mode(False):  # training may use it afterwards
            return self._arrivals[torch.cat([path[1:] for path in self.paths])]


class Folded(NamedTuple):
    """Rollouts folded into one sequence: `ids` and `position_ids` [1, S], int64, the mask `tree`, and the `edges`."""

    ids: Tensor
    position_ids: Tensor
    tree: PrefixTree
    edges: Edges


def fold(rollouts: Iterable[Sequence[int] | Tensor]) -> Folded:
    """Return rollouts as one sequence that holds every common beginning once.

    Beginnings are found token by token, whichever rollouts share them. Branches are in the order of the first rollout
    that takes them; a rollout that is all of another's beginning adds nothing but its path.

    Args:
        rollouts: token ids of any number of rollouts, each [T] of at least 1, without padding.

    Returns:
        See `Folded`; tensors are on the device of the first rollout, or the CPU.

    Raises:
        ValueError: for no rollouts, for empty rollouts, and for values that are no token ids.

    Example:
        ids, position_ids, tree, edges = fold([[7, 7, 3, 4], [7, 7, 5, 5]])
        tree  # PrefixTree(parents=(-1, 0, 0), lengths=(2, 2, 2))
    """
    listed = _listed(rollouts)
    device = next((x.device for x in listed if isinstance(x, Tensor)), torch.device("cpu"))
    texts = [_text(number, x) for number, x in enumerate(listed)]
    root = _Branch(texts[0][:0], {})
    for text in texts:
        _add(root, text)
    parents, nodes = _in_order(root)
    tree = PrefixTree(tuple(parents), tuple(len(node.tokens) for node in nodes))
    ids = torch.cat([node.tokens for node in nodes])
    paths = [_path(root, text) for text in texts]
    before, counts = tree.before(), torch.bincount(torch.cat(paths), minlength=len(ids))
    follows = before >= 0
    arrivals = follows.cumsum(0) - 1
    edges = Edges(
        queries=before[follows].to(device),
        tokens=ids[follows].to(device),
        counts=counts[follows].to(device),
        paths=tuple(path.to(device) for path in paths),
        _arrivals=arrivals.to(device),
    )
    logical = tree.logical(torch.arange(len(ids), device="cpu"))
    return Folded(ids[None].to(device), logical[None].to(device), tree, edges)


def unfold(values: Tensor, edges: Edges) -> list[Tensor]:
    """Return values of edges [E, ...] as values of the rollouts, one tensor [T - 1, ...] for each.

    Entry t of a rollout belongs to its token t + 1, which token t predicts. An edge that several rollouts share gets
    the sum of their gradients. Raises ValueError for another number of values.

    Example:
        log_probs = unfold(edge_values, edges)
        padded = torch.nn.utils.rnn.pad_sequence(log_probs, batch_first=True)  # [rollouts, longest - 1]
    """
    if not isinstance(values, Tensor) or values.dim() < 1 or len(values) != len(edges.queries):
        raise ValueError(f"unfold takes a value for each of {len(edges.queries)} edges, got {shown(values)}")
    return list(torch.split(values[edges._index], [len(path) - 1 for path in edges.paths]))


@between_graphs
def edge_log_probs(
    hidden: Tensor, head: Head, edges: Edges, cp: ContextParallel | None = None, *, tokens: Tokens | None = None
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of every edge, and the entropy of the distribution that its token was drawn from.

    At most `head.chunk` rows of logits exist at a time. Every rank gets the results of all edges, and computes
    the results of its own tokens. A rank's gradients come from its share, as if all ranks computed one loss together:
    so gradients of parameters are added up over ranks.

    Args:
        hidden: [1, S, H], the hidden states before the head, of a folded sequence or of this rank's tokens of it.
        head: the head, see `burst_plugin.activations.Head`.
        edges: the edges of the whole sequence, equal on all ranks.
        cp: the context-parallel group; collective then. Each rank has the head compute as many rows as any other.
        tokens: the sequence that `hidden` is taken from, `batch["burst"].tokens`; padding may follow it. By default
            every rank holds equally many tokens, in the group's layout.

    Returns:
        Two tensors [E], float32, or float64 if `hidden` is; `unfold` cuts them into the values of each rollout.

    Raises:
        ValueError: for arguments that do not fit together, on every rank.

    Example:
        log_probs, entropy = edge_log_probs(hidden, Head(model.lm_head, chunk=1024), edges)
        answers = [x[len(prompt) - 1 :] for x in unfold(log_probs, edges)]
        loss = -sum((advantage * x.exp()).mean() for advantage, x in zip(advantages, answers))
    """
    if cp is None or cp.ranks == 1:
        _check(hidden, edges)
        _check_length(edges, hidden.shape[1])
        queries, targets = (x.to(hidden.device) for x in (edges.queries, edges.tokens))
        return token_log_probs(hidden[0][queries], head, targets)

    def agree(share: _OwnEdges | None, problem: str) -> int:
        compared = {} if share is None else {"checksum of edges": share.checksum, "hidden states": hidden.dtype}
        return cp.agree(compared, problem, "log-probabilities of edges")

    share, _ = prepared_together(partial(_share, hidden, edges, cp, tokens), agree)
    # Ranks with fewer edges have the head compute some more: a sharded one is gathered by all ranks alike.
    missing = share.most - len(share.own)
    rows, targets = pad(hidden[0][share.rows], (0, 0, 0, missing)), pad(share.targets, (0, missing))
    local = torch.stack(token_log_probs(rows, head, targets), 1)
    by_rank = Tokens(share.most * cp.ranks, holders=tuple(range(cp.ranks)))  # the edges of one rank after the other
    gathered = cp.unshard(local.detach(), 0, by_rank)[share.places]
    log_probs, entropy = gathered.index_put((share.own,), local[: len(share.own)]).unbind(1)
    return log_probs, entropy


class _Branch:
    """Tokens that belong together while rollouts are added, and their continuations by first token."""

    __slots__ = ("children", "start", "tokens")

    def __init__(self, tokens: Tensor, children: dict[int, _Branch]) -> None:
        self.tokens, self.children, self.start = tokens, children, 0

    def split(self, length: int) -> None:
        """Leave `length` tokens here, and put the others in the only child."""
        rest = _Branch(self.tokens[length:], self.children)
        self.tokens, self.children = self.tokens[:length], {int(rest.tokens[0]): rest}


def _listed(rollouts: object) -> list[object]:
    """Return the rollouts one by one. Raise ValueError if there are none."""
    if not isinstance(rollouts, Iterable) or isinstance(rollouts, (str, bytes, dict)):
        raise ValueError(f"rollouts={shown(rollouts)} is not valid; {_EXPECTED}")
    listed = list(rollouts)
    if not listed:
        raise ValueError(f"there are no rollouts to fold; {_EXPECTED}")
    return listed


def _text(number: int, rollout: object) -> Tensor:
    """Return the token ids of a rollout on the CPU, [T], int64. Raise ValueError for anything without ids."""
    name = f"rollout {number}"
    if isinstance(rollout, Tensor):
        if unreadable(rollout):
            raise ValueError(f"{name} is a tensor {unreadable(rollout)}")
        if rollout.dim() != 1 or rollout.is_floating_point() or rollout.dtype is torch.bool or rollout.is_complex():
            raise ValueError(f"{name} is {shown(rollout)}; {_EXPECTED}")
        text = rollout.detach().to("cpu", torch.int64)
    else:
        text = torch.tensor(whole_numbers(f"{name}, {{}},", rollout, _EXPECTED), dtype=torch.int64, device="cpu")
    if not len(text):
        raise ValueError(f"{name} has no token; {_EXPECTED}")
    if int(text.min()) < 0:
        raise ValueError(f"{name} has {int(text.min())} among its token ids; {_EXPECTED}")
    return text


def _add(root: _Branch, text: Tensor) -> None:
    """Add a rollout to the tree: follow the branches that it shares, and branch off where it differs."""
    node, place = root, 0
    while place < len(text):
        child = node.children.get(int(text[place]))
        if child is None and node is not root and not node.children:  # a rollout that ended here goes on
            node.tokens = torch.cat([node.tokens, text[place:]])
            return
        if child is None:
            node.children[int(text[place])] = _Branch(text[place:], {})
            return
        common = _common(child.tokens, text[place:])
        place += common
        if common < len(child.tokens) and place < len(text):
            child.split(common)
        node = child


def _common(first: Tensor, second: Tensor) -> int:
    """Return the number of tokens that both texts have in common from the beginning."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.to(torch.uint8).argmax()) if bool(differs.any()) else length


def _in_order(root: _Branch) -> tuple[list[int], list[_Branch]]:
    """Return the parents of all nodes, and the nodes, depth-first, and note where each starts."""
    parents: list[int] = []
    nodes: list[_Branch] = []
    start, left = 0, [(-1, child) for child in reversed(root.children.values())]
    while left:
        parent, node = left.pop()
        node.start = start
        start += len(node.tokens)
        left += [(len(nodes), child) for child in reversed(node.children.values())]
        parents.append(parent)
        nodes.append(node)
    return parents, nodes


def _path(root: _Branch, text: Tensor) -> Tensor:
    """Return the places of a rollout's tokens in the folded sequence, [T]."""
    node, place, stretches = root, 0, []
    while place < len(text):
        node = node.children[int(text[place])]
        length = min(len(node.tokens), len(text) - place)
        stretches.append(torch.arange(node.start, node.start + length, device="cpu"))
        place += length
    return torch.cat(stretches)


class _OwnEdges(NamedTuple):
    """The edges that a rank has to compute.

    own: the numbers of these edges, [N].
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


def _share(hidden: Tensor, edges: Edges, cp: ContextParallel, tokens: Tokens | None) -> _OwnEdges:
    """Return the edges that this rank has to compute. Raise ValueError for arguments that do not fit together."""
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
    own_edges = of_ranks[cp.rank]
    weights = torch.arange(1, len(owners) + 1, device=hidden.device) % 65521
    checksum = int((weights * (targets + 31 * queries)).sum())
    return _OwnEdges(own_edges, rows[own_edges], targets[own_edges], most, places, checksum)


def _holders(cp: ContextParallel, tokens: Tokens, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return, for every token, the rank that holds it and its row there, [S] each."""
    owners, rows = (torch.empty(tokens.length, dtype=torch.int64, device=device) for _ in range(2))
    for rank, runs in enumerate(cp.rank_state.route_table.shards(tokens)):
        held = positions(runs, device)
        owners[held] = rank
        rows[held] = torch.arange(len(held), device=device)
    return owners, rows


def _check(hidden: Tensor, edges: Edges) -> None:
    """Raise ValueError unless `hidden` are hidden states of one sequence, and `edges` are `Edges`."""
    if not isinstance(edges, Edges):
        raise ValueError(f"edges={shown(edges)} is not valid; give the edges that fold returned")
    if not isinstance(hidden, Tensor) or hidden.dim() != 3 or len(hidden) != 1:
        raise ValueError(f"hidden is {shown(hidden)}; give the hidden states of a folded sequence, [1, S, H]")


def _check_length(edges: Edges, length: int) -> None:
    """Raise ValueError for edges beyond a sequence."""
    if len(edges.queries) and int(edges.queries.max()) >= length:
        raise ValueError(
            f"edges go up to token {int(edges.queries.max())}, but the sequence has {length} tokens; pass the edges "
            "and the tokens= of one batch"
        )
