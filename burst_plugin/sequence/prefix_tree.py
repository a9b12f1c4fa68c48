"""Prefix trees: several texts that begin alike, each shared beginning once.

Three rollouts of one prompt, two of which begin alike: nodes in depth-first order, so that what follows a node is one
stretch of tokens, and the mask of a node one region:

    prompt P            tokens     P P P P A B B C C D D D     A: P's child; B, C: children of A; D: P's child
    |- A                positions  0 1 2 3 4 5 6 5 6 4 5 6
    |  |- B             parents    -1 0 1 1 0
    |  `- C             lengths     4 1 2 2 3
    `- D

A token's *logical position* is its place on the path from the root, as if its text were alone. Windows, ALiBi and
dropout go by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.checks import as_listed, whole_numbers
from burst_plugin.sequence.mask import Region, TreeMask

_NO_PARENT = -1


class PrefixNode(NamedTuple):
    """Tokens `start:stop` of a node, from logical position `depth` on; its subtree ends at `end`."""

    start: int
    stop: int
    end: int
    depth: int

    @property
    def shift(self) -> int:
        """Return how much further on tokens are in the sequence than on their path."""
        return self.start - self.depth


@dataclass(frozen=True)
class PrefixTree(TreeMask):
    """Texts that begin alike: a token attends to itself and to what comes before it on its path from the root.

    parents: of every node the number of the node that it continues, -1 or None for a root. Nodes are numbered in
        depth-first order: all that continues a node comes directly after it, before anything else.
    lengths: the number of tokens of every node, 0 or more; together they are the sequence.

    Several roots are packed documents. Combined with others, windows count logical positions; masks that list tokens,
    such as `key_padding`, `Keys` and `Documents`, go by the order of the sequence.

    Raises ValueError for parents that are no tree, or nodes in another order, and, in a call, for lengths that do not
    add up to the sequence.

        PrefixTree(parents=(-1, 0, 0), lengths=(4096, 512, 700))  # a prompt and two answers
    """

    parents: tuple[int, ...]
    lengths: tuple[int, ...]
    looks_ahead = False

    def __post_init__(self) -> None:
        expected = "give the parent of every node, -1 for roots, and its number of tokens, each a list"
        listed = as_listed("PrefixTree(parents={})", self.parents, expected)
        listed = tuple(_NO_PARENT if parent is None else parent for parent in listed)
        object.__setattr__(self, "parents", whole_numbers("PrefixTree(parents={})", listed, expected))
        object.__setattr__(self, "lengths", whole_numbers("PrefixTree(lengths={})", self.lengths, expected))
        if len(self.parents) != len(self.lengths) or not self.parents:
            raise ValueError(
                f"PrefixTree has {len(self.parents)} parents and {len(self.lengths)} lengths; give one of each for "
                "every node, and at least one node"
            )
        if min(self.lengths) < 0:
            at = next(number for number, length in enumerate(self.lengths) if length < 0)
            raise ValueError(f"PrefixTree(lengths=...): node {at} has {self.lengths[at]} tokens; give 0 or more")
        self._check_order()

    def _check_order(self) -> None:
        """Raise ValueError unless every parent comes before its children, and subtrees one after the other."""
        path: list[int] = []
        for node, parent in enumerate(self.parents):
            if not _NO_PARENT <= parent < node:
                why = "does not exist" if not 0 <= parent < len(self.parents) else "comes after it, or is itself"
                raise ValueError(
                    f"PrefixTree(parents=...): the parent of node {node}, {parent}, {why}; parents come before their "
                    "children, and roots have -1"
                )
            while path and path[-1] != parent:
                path.pop()
            if parent != _NO_PARENT and not path:
                raise ValueError(
                    f"PrefixTree(parents=...): node {node} continues node {parent}, but other nodes come between "
                    f"that do not; number nodes depth-first: all that continues node {parent} directly after it"
                )
            path.append(node)

    @property
    def trees(self) -> frozenset[PrefixTree]:
        """Return a set of this tree alone."""
        return frozenset((self,))

    @property
    def length(self) -> int:
        """Return the number of tokens of all nodes."""
        return sum(self.lengths)

    @property
    def documents(self) -> tuple[int, ...]:
        """Return the bounds of the root nodes' trees as `cu_seqlens`: each root begins a document."""
        roots = [node.start for node, parent in zip(self._nodes, self.parents, strict=True) if parent == _NO_PARENT]
        return (*roots, self.length)

    @cached_property
    def _nodes(self) -> tuple[PrefixNode, ...]:
        starts = [0, *accumulate(self.lengths)]
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == _NO_PARENT else depths[parent] + self.lengths[parent])
        ends = starts[1:]
        for node in range(len(ends) - 1, 0, -1):  # children before their parents
            if self.parents[node] != _NO_PARENT:
                ends[self.parents[node]] = max(ends[self.parents[node]], ends[node])
        return tuple(map(PrefixNode, starts, starts[1:], ends, depths))

    def logical(self, positions: Tensor) -> Tensor:
        """Return the logical positions of tokens at `positions` of the sequence, int64, of the same shape."""
        stops = torch.tensor([node.stop for node in self._nodes], device=positions.device)
        shifts = torch.tensor([node.shift for node in self._nodes], device=positions.device)
        return positions - shifts[torch.searchsorted(stops, positions, right=True)]

    def before(self) -> Tensor:
        """Return the position of the token before each one on its path, [S], int64, CPU; -1 for first tokens."""
        previous = torch.arange(-1, self.length - 1, device="cpu")
        last = [_NO_PARENT] * len(self.parents)  # token of each node, or of the nearest before it that has any
        for number, (node, parent) in enumerate(zip(self._nodes, self.parents, strict=True)):
            above = _NO_PARENT if parent == _NO_PARENT else last[parent]
            last[number] = above
            if node.start < node.stop:
                previous[node.start] = above
                last[number] = node.stop - 1
        return previous

    def reached_later(self, reach: int, slack: int) -> int:
        """Return the lowest position that a token appended to the sequence may attend to, within a window.

        reach: how many tokens before itself the window has, by logical positions.
        slack: how many tokens at the end of the sequence may be taken back before that token is appended. It begins a
            root, or continues a node on the path of the last token, or of one of these tokens.
        """
        first = self.length
        for number, node in enumerate(self._nodes):
            if node.end < self.length - slack:
                continue  # other nodes came after it
            logical = max(0, node.depth + node.stop - node.start - reach)
            while node.depth > logical:
                number = self.parents[number]
                node = self._nodes[number]
            first = min(first, logical + node.shift)
        return first

    def padded(self, length: int) -> PrefixTree:
        """Return the tree with tokens up to `length` added, as a root of their own.

        A tree that has this length already is returned as it is.
        """
        more = length - self.length
        return self if more <= 0 else PrefixTree((*self.parents, _NO_PARENT), (*self.lengths, more))

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return one region per node: its tokens as keys of the node's and all continuing queries, causally.

        Raises ValueError unless `q_len` and `kv_len` are both the length of the tree.
        """
        return self.within(self.beside_trees(q_len, kv_len))

    def beside_trees(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return one region of all queries and all keys, for other masks to be combined with.

        Raises ValueError unless `q_len` and `kv_len` are both the length of the tree.
        """
        if q_len != kv_len:
            raise ValueError(
                f"PrefixTree is of one sequence that attends to itself, but there are {q_len} queries and {kv_len} "
                "keys; for cross attention use masks of documents: Documents(..., kv_cu_seqlens=...)"
            )
        if self.length != q_len:
            raise ValueError(
                f"the nodes of PrefixTree add up to {self.length} tokens, but the sequence has {q_len} over all "
                "ranks; give padding at the end a root of its own: tree.padded(length)"
            )
        return (Region(0, q_len, 0, kv_len),)

    def within(self, regions: Sequence[Region]) -> tuple[Region, ...]:
        """Return the parts of other masks' regions that the tree allows.

        Bands of `regions` count logical positions; bands of the result count positions in the sequence.
        """
        inside: list[Region] = []
        for mask_region in regions:
            if mask_region.lower is None and (mask_region.upper is None or mask_region.upper >= 0):
                rectangle = mask_region._replace(upper=None)
                inside += (rectangle.intersect(Region(n.start, n.end, n.start, n.stop, None, 0)) for n in self._nodes)
            else:
                inside += (
                    pair.intersect(mask_region._replace(lower=None, upper=None)) for pair in self._pairs(mask_region)
                )
        return tuple(region for region in inside if not region.is_empty)

    def _pairs(self, band: Region) -> Iterator[Region]:
        """Yield a region for every node and each node on its path that a band of logical positions reaches."""
        for number, node in enumerate(self._nodes):
            yield Region(node.start, node.stop, node.start, node.stop, band.lower, min(0, band.upper or 0))
            ancestor = self.parents[number]
            while ancestor != _NO_PARENT:
                above = self._nodes[ancestor]
                if band.lower is not None and node.depth + band.lower >= above.depth + above.stop - above.start:
                    break
                shift = above.shift - node.shift
                lower, upper = (None if edge is None else edge + shift for edge in (band.lower, band.upper))
                yield Region(node.start, node.stop, above.start, above.stop, lower, upper)
                ancestor = self.parents[ancestor]
