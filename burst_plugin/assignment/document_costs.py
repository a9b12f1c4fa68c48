"""What an assignment of causal documents costs each rank, in closed form: no tensor of all tokens, no schedule.

A document of 8 tokens, of which rank 0 holds `aaa` and rank 1 `bbb`:

    a b b b . . a a      rank 1 requires the first 4 keys, 1 of rank 0; rank 0 requires all 8, 3 of rank 1

So of every document a rank requires the keys up to its last query there, and a node those up to the last of its
ranks. They are sent as by the schedule `direct`: to another node once, and there on by the owner's counterpart.
Where no two ranks of a node require the same block of another it does without counterparts; here they always count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from burst_plugin.sequence.layout import Run, positions
from burst_plugin.sequence.mask import Region
from burst_plugin.sequence.masks import Mask
from burst_plugin.topology import Topology


def causal_documents(mask: Mask, length: int) -> list[tuple[int, int]] | None:
    """Return (start, stop) of each document in a sequence of `length` tokens, if the mask is causal in documents.

    Tokens outside all documents are padding. None for other masks, for a mask that allows nothing, and if batch rows
    have different masks.
    """
    rows = {mask.of_row(row) for row in range(mask.rows or 1)}
    if len(rows) > 1:
        return None
    regions = rows.pop().regions(length, length)
    ranges = [(region.q_start, region.q_stop) for region in regions]
    causal = tuple(Region(start, stop, start, stop, None, 0) for start, stop in ranges)
    return sorted(ranges) if regions and regions == causal else None


@dataclass(frozen=True)
class DocumentCosts:
    """The costs of an assignment of causal documents: what each rank of a ring computes, visits and sends.

    topology: the nodes and ranks of the ring.
    runs: the tokens that each rank of the ring holds.
    documents: (start, stop) of each document, in ascending order.
    """

    topology: Topology
    runs: Sequence[Sequence[Run]]
    documents: Sequence[tuple[int, int]]

    @cached_property
    def _stretches(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Stretches of documents at ranks, each [stretches]: rank, number of the document, start and stop in it."""
        held = sorted((start, rank) for rank, runs in enumerate(self.runs) for run in runs for start in _starts(run))
        starts, ranks = torch.tensor(held, dtype=torch.int64, device="cpu").view(-1, 2).T.contiguous()
        begins, ends = torch.tensor(self.documents, dtype=torch.int64, device="cpu").view(-1, 2).T.contiguous()
        cuts = torch.unique(torch.cat((starts, begins, ends)))
        start, stop = cuts[:-1], cuts[1:]
        document = torch.searchsorted(begins, start, right=True) - 1
        inside = (document >= 0) & (start < ends[document])  # -1 is the last
        start, stop, document = start[inside], stop[inside], document[inside]
        rank = ranks[torch.searchsorted(starts, start, right=True) - 1]
        return rank, document, start - begins[document], stop - begins[document]

    def work(self) -> Tensor:
        """Return how many (query, key) pairs each rank has, int64 [2, ranks]: of its queries, then of its keys."""
        rank, document, start, stop = self._stretches
        lengths = torch.tensor([stop - start for start, stop in self.documents], dtype=torch.int64, device="cpu")
        before = (start + stop - 1) * (stop - start) // 2  # positions in the document, added up
        pairs = torch.stack((before + stop - start, lengths[document] * (stop - start) - before))
        return torch.zeros(2, self.topology.ranks, dtype=torch.int64, device="cpu").index_add_(1, rank, pairs)

    @cached_property
    def _last(self) -> Tensor:
        """Return how many keys of every document each rank requires, [ranks, documents]."""
        rank, document, _, stop = self._stretches
        count = len(self.documents)
        flat = torch.zeros(self.topology.ranks * count, dtype=torch.int64, device="cpu")
        return flat.scatter_reduce_(0, rank * count + document, stop, "amax").view(-1, count)

    def rows_visited(self) -> Tensor:
        """Return how many keys the queries of each rank attend to, its own and other ranks', int64 [ranks]."""
        return self._last.sum(1)

    def most_rows_moved(self) -> tuple[int, int]:
        """Return the most keys that any rank sends, or receives, in a pass: (between nodes, inside a node)."""
        owner, document, start, stop = self._stretches
        nodes, width, ranks = self.topology.nodes, self.topology.ranks_per_node, self.topology.ranks
        required = (self._last[:, document].minimum(stop) - start).clamp_(min=0)  # by rank, of each stretch
        by_rank = required.new_zeros(ranks, ranks).index_add_(1, owner, required)  # of each owner's block
        of_node = required.view(nodes, width, -1).amax(1)
        by_node = required.new_zeros(nodes, ranks).index_add_(1, owner, of_node).view(nodes, nodes, width)
        by_node.diagonal().zero_()  # of another node's blocks, by the place of their owners there
        crossing = (by_node.sum(0), by_node.sum(1))  # out of owners; into their counterparts
        by_place = by_rank.view(nodes, width, nodes, width)  # node and place of the rank, then of the owner
        inside = by_place.diagonal(dim1=0, dim2=2).clone()  # [place of the rank, of the owner, node]
        inside.diagonal().zero_()
        passed = (by_place > 0) * by_node.unsqueeze(1)  # on from counterparts, which are at the place of the owner
        passed = passed.sum(2)  # node, place of the rank, place of the counterpart
        passed.diagonal(dim1=1, dim2=2).zero_()
        out, into = inside.sum(0).T + passed.sum(1), inside.sum(1).T + passed.sum(2)
        return int(torch.stack(crossing).max()), int(torch.stack((out, into)).max())


def _starts(run: Run) -> Sequence[int]:
    """Return where a run begins; each of its tokens if these are not side by side."""
    return (run.start,) if run.stride == 1 else positions((run,)).tolist()
