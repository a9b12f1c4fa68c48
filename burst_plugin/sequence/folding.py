"""Rollouts folded into a prefix tree, and values of a folded sequence as those of the rollouts.

    rollouts    7 7 3 4      folded    7 7 3 4 9 5 5      7 7 is a node, with two children, 3 4 9 and 5 5
                7 7 3 4 9
                7 7 5 5      edges     7>7 7>3 3>4 4>9 7>5 5>5

An *edge* leads from a token to one that comes next: a token at a branch has several. What a model says of the next
token, a log-probability or a loss, belongs to an edge, and to all rollouts that take it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.checks import shown, unreadable, whole_numbers
from burst_plugin.sequence.prefix_tree import PrefixTree

__all__ = ["Edges", "Folded", "fold", "unfold"]

_EXPECTED = "give each rollout as a list or a tensor of one dimension of token ids, prompt and answer without padding"


@dataclass(frozen=True, eq=False)
class Edges:
    """What predicts what in a folded sequence, E edges in the order of the tokens that they lead to.

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
        return self._arrivals[torch.cat([path[1:] for path in self.paths])]


class Folded(NamedTuple):
    """Rollouts as one sequence: ids and position_ids [1, S], int64, the mask, and what predicts what."""

    ids: Tensor
    position_ids: Tensor
    tree: PrefixTree
    edges: Edges


class _Node:
    """Tokens that belong together while rollouts are added, and what continues them, by its first token."""

    __slots__ = ("children", "start", "tokens")

    def __init__(self, tokens: Tensor, children: dict[int, _Node]) -> None:
        self.tokens, self.children, self.start = tokens, children, 0

    def split(self, length: int) -> None:
        """Leave `length` tokens here, and put the others in the only child."""
        rest = _Node(self.tokens[length:], self.children)
        self.tokens, self.children = self.tokens[:length], {int(rest.tokens[0]): rest}


def fold(rollouts: Iterable[Sequence[int] | Tensor]) -> Folded:
    """Return rollouts as one sequence in which every common beginning is there once.

    Beginnings are found token by token, whichever rollouts share them. Branches are in the order of the first rollout
    that takes them; a rollout that is all of another's beginning adds nothing but its path.

    Args:
        rollouts: token ids of any number of rollouts, each [T] of at least 1, without padding.

    Returns:
        See `Folded`; tensors are on the device of the first rollout, or the CPU.

    Raises:
        ValueError: for no rollouts, empty ones, and what are no token ids.

    Example:
        ids, position_ids, tree, edges = fold([[7, 7, 3, 4], [7, 7, 5, 5]])
        tree  # PrefixTree(parents=(-1, 0, 0), lengths=(2, 2, 2))
    """
    listed = _listed(rollouts)
    device = next((x.device for x in listed if isinstance(x, Tensor)), torch.device("cpu"))
    texts = [_text(number, x) for number, x in enumerate(listed)]
    root = _Node(texts[0][:0], {})
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
    positions = tree.logical(torch.arange(len(ids), device="cpu"))
    return Folded(ids[None].to(device), positions[None].to(device), tree, edges)


def unfold(values: Tensor, edges: Edges) -> list[Tensor]:
    """Return values of edges [E, ...] as those of the rollouts, one tensor [T - 1, ...] for each.

    Entry t of a rollout is that of its token t + 1, which token t predicts. An edge that several rollouts share gets
    the sum of their gradients. Raises ValueError for another number of values.

    Example:
        log_probs = unfold(edge_values, edges)
        padded = torch.nn.utils.rnn.pad_sequence(log_probs, batch_first=True)  # [rollouts, longest - 1]
    """
    if not isinstance(values, Tensor) or values.dim() < 1 or len(values) != len(edges.queries):
        raise ValueError(f"unfold takes a value for each of {len(edges.queries)} edges, got {shown(values)}")
    return list(torch.split(values[edges._index], [len(path) - 1 for path in edges.paths]))


def _listed(rollouts: object) -> list[object]:
    """Return the rollouts one by one. Raise ValueError if there are none."""
    if not isinstance(rollouts, Iterable) or isinstance(rollouts, (str, bytes, dict)):
        raise ValueError(f"rollouts={shown(rollouts)} is not valid; {_EXPECTED}")
    listed = list(rollouts)
    if not listed:
        raise ValueError(f"there are no rollouts to fold; {_EXPECTED}")
    return listed


def _text(number: int, rollout: object) -> Tensor:
    """Return the token ids of a rollout on the CPU, [T], int64. Raise ValueError for what has none."""
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


def _add(root: _Node, text: Tensor) -> None:
    """Add a rollout to the tree: follow what is there already, and branch off where it differs."""
    node, place = root, 0
    while place < len(text):
        child = node.children.get(int(text[place]))
        if child is None and node is not root and not node.children:  # a rollout that ended here goes on
            node.tokens = torch.cat([node.tokens, text[place:]])
            return
        if child is None:
            node.children[int(text[place])] = _Node(text[place:], {})
            return
        common = _common(child.tokens, text[place:])
        place += common
        if common < len(child.tokens) and place < len(text):
            child.split(common)
        node = child


def _common(one: Tensor, other: Tensor) -> int:
    """Return how many tokens both have in common from the beginning."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.to(torch.uint8).argmax()) if bool(differs.any()) else length


def _in_order(root: _Node) -> tuple[list[int], list[_Node]]:
    """Return the parents of all nodes, and the nodes, depth-first, and note where each starts."""
    parents: list[int] = []
    nodes: list[_Node] = []
    start, left = 0, [(-1, child) for child in reversed(root.children.values())]
    while left:
        parent, node = left.pop()
        node.start = start
        start += len(node.tokens)
        left += [(len(nodes), child) for child in reversed(node.children.values())]
        parents.append(parent)
        nodes.append(node)
    return parents, nodes


def _path(root: _Node, text: Tensor) -> Tensor:
    """Return the places of a rollout's tokens in the folded sequence, [T]."""
    node, place, found = root, 0, []
    while place < len(text):
        node = node.children[int(text[place])]
        length = min(len(node.tokens), len(text) - place)
        found.append(torch.arange(node.start, node.start + length, device="cpu"))
        place += length
    return torch.cat(found)
