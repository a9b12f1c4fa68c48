"""The pieces of a batch that a process holds, and its tokens in batches of pieces, as kernels take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_plugin.recurrent.halo import HaloPlan, halo_plan
from burst_plugin.recurrent.heads import HeadPlan
from burst_plugin.recurrent.passes import Passes
from burst_plugin.recurrent.pieces import START, Pieces
from burst_plugin.recurrent.scan_schedule import ScanSchedule, scan_schedule
from burst_plugin.sequence.layout import Tokens, positions
from burst_plugin.sequence.mask import Mask

_LEAST_FILLED = 0.75  # the share of tokens in a batch of pieces; the rest pads pieces to one length
_SLACK = 8  # tokens of padding that are always accepted


class Group(NamedTuple):
    """A batch of pieces of this process that a kernel computes in one call: tensors are [pieces, length, ...].

    Shorter pieces are padded at their ends to the length of the longest. Where the pieces are of one length and lie
    one after another in tensors [T, ...] of all tokens, `start` is set and nothing needs copying; else `rows`.

    pieces: the numbers of the pieces, counted from 0 among the pieces of this process.
    lengths: the number of tokens of each piece, without padding.
    start: the row of [T, ...] at which the first piece begins; None if `rows` is set.
    rows: the row of [T, ...] of each token, int64 [pieces, length], 0 for padding; None if `start` is set.
    is_padding: which of `rows` are padding, bool [pieces, length]; None if none is.
    places, counts: `pieces` and `lengths` as int64 tensors on the device.
    """

    pieces: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int | None
    rows: Tensor | None
    is_padding: Tensor | None
    places: Tensor
    counts: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Return (number of pieces, padded length in tokens)."""
        return len(self.pieces), max(self.lengths)

    def take(self, x: Tensor) -> Tensor:
        """Select the tokens of these pieces from x [T, ...], which has all tokens of this process.

        Returns [pieces, length, ...], padded with zeros.
        """
        if self.start is not None:
            count, length = self.shape
            return x.narrow(0, self.start, count * length).view(*self.shape, *x.shape[1:])
        taken = x[self.rows]
        if self.is_padding is None:
            return taken
        return taken.masked_fill(self.is_padding.view(*self.shape, *(1,) * (x.dim() - 1)), 0)

    def without_padding(self, x: Tensor) -> Tensor:
        """Return x [pieces, length, ...] with padding set to zeros."""
        if self.is_padding is None:
            return x
        return x.masked_fill(self.is_padding.view(*self.shape, *(1,) * (x.dim() - 2)), 0)

    def of_pieces(self, x: Tensor) -> Tensor:
        """Select the entries of these pieces from x [pieces, ...], which has all pieces of this process."""
        return x.index_select(0, self.places)


@dataclass(frozen=True, eq=False)
class HeldPieces:
    """The pieces of a batch of sequences, and which of them the ranks of this process hold.

    Its methods work with the tokens of this process as rows [T, ...], piece after piece.

    passes: run programs on the ranks of this process.
    pieces: all pieces of the batch, on all ranks.
    tokens: the sequence that all ranks hold together.
    mask: the documents of the batch; None if each batch row is one document.
    rows: the number of batch rows.
    whole_rows: of a virtual ring, the place of each of the T rows in whole sequences [B * S]; else None.
    known: results of the methods below, kept for later calls.
    """

    passes: Passes
    pieces: Pieces
    tokens: Tokens
    mask: Mask | None
    rows: int
    whole_rows: Tensor | None  # of a virtual ring: where its ranks' tokens, in order, are in whole sequences
    known: dict[object, Any] = field(default_factory=dict)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers of this process's pieces among all pieces of the batch, in the order of its tokens."""
        return tuple(number for state in self.passes.states for number in self.pieces.of_rank(state.rank))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Return the row of [T, ...] at which each piece of this process begins, and T last."""
        return tuple(accumulate((self.pieces.every[n].length for n in self.numbers), initial=0))

    @cached_property
    def counts(self) -> list[int]:
        """Return the number of token rows of each rank of this process."""
        return [
            sum(self.pieces.every[number].length for number in self.pieces.of_rank(state.rank))
            for state in self.passes.states
        ]

    def flat(self, x: Tensor) -> Tensor:
        """Return the tokens of x [B, S, ...] as rows [T, ...], piece after piece."""
        flat = x.flatten(0, 1)
        return flat if self.whole_rows is None else flat[self._kept("whole", x.device, lambda: self.whole_rows)]

    def unflat(self, rows: Tensor) -> Tensor:
        """Undo `flat`: return [B, S, ...] from rows [T, ...], piece after piece."""
        if self.whole_rows is not None:
            whole = self.whole_rows
            rows = rows[self._kept("back", rows.device, lambda: torch.argsort(whole))]
        return rows.view(self.rows, len(rows) // self.rows, *rows.shape[1:])

    def in_rank_order(self, x: Tensor) -> Tensor:
        """Undo `from_rank_order`: on a virtual ring, put x [B, S, ...] into the order of ranks; else return x."""
        if self.whole_rows is None:
            return x
        return x[:, self._kept("order", x.device, lambda: self._order().to(x.device))]

    def from_rank_order(self, x: Tensor) -> Tensor:
        """Put x [B, S, ...] of a virtual ring from the order of ranks into the sequence's; else return x.

        In the order of ranks one rank's tokens come after another's.
        """
        if self.whole_rows is None:
            return x
        return x[:, self._kept("from order", x.device, lambda: torch.argsort(self._order()).to(x.device))]

    def _order(self) -> Tensor:
        states = self.passes.states
        return torch.cat([positions(runs) for runs in states[0].route_table.shards(self.tokens)])

    def schedule(self, finals: bool, heads: int = 1) -> ScanSchedule:
        """Return the schedule of a scan, which brings to each piece the state that enters it.

        finals: whether the scan also brings the states after the last tokens of all batch rows to all ranks.
        heads: the number of heads, or of other rows of a state, that ranks of a node can share.
        """
        per_node = self.passes.states[0].topology.ranks_per_node
        shares = max(1, min(per_node, heads))
        schedule: ScanSchedule = self._kept(
            "scan", (finals, shares), lambda: scan_schedule(self.pieces, per_node, shares, finals)
        )
        return schedule

    @cached_property
    def exchanges(self) -> bool:
        """Return whether a state enters any piece of any rank, so that a scan has anything to do."""
        return any(self.schedule(False).is_entered)

    @property
    def average_tokens(self) -> float:
        """Return how many tokens ranks hold, on average over ranks."""
        return self.rows * self.tokens.length / self.passes.states[0].topology.ranks

    def head_plans(self, device: torch.device) -> list[HeadPlan]:
        """Return, for each rank of this process, its plan for an exchange of heads, with tensors on `device`."""
        plans: list[HeadPlan] = self._kept("heads", device, lambda: self._head_plans(device))
        return plans

    def _head_plans(self, device: torch.device) -> list[HeadPlan]:
        states = self.passes.states
        rows = [positions(runs).to(device) for runs in states[0].route_table.shards(self.tokens)]
        return [HeadPlan(state, rows, self.rows) for state in states]

    def is_entered(self, device: torch.device) -> Tensor:
        """Return which pieces of this process a state enters, bool [pieces]: False where a document begins."""
        entered = self.schedule(False).is_entered
        flags: Tensor = self._kept(
            "entered",
            device,
            lambda: torch.tensor([entered[n] for n in self.numbers], dtype=torch.bool, device=device),
        )
        return flags

    def groups(self, wanted: Sequence[int], device: torch.device) -> list[Group]:
        """Return the pieces of this process with the numbers `wanted` in groups, each for one call of a kernel.

        Pieces of a group are of about equal lengths. Without pieces there are no groups.

        wanted: counted from 0 among the pieces of this process.
        device: of the groups' tensors.
        """
        wanted = tuple(wanted)
        if not wanted:
            return []
        found: list[Group] = self._kept(wanted, device, lambda: self._grouped(wanted, device))
        return found

    def _grouped(self, wanted: tuple[int, ...], device: torch.device) -> list[Group]:
        lengths = {n: self.offsets[n + 1] - self.offsets[n] for n in wanted}
        alike = len(set(lengths.values())) == 1
        if alike and list(wanted) == list(range(wanted[0], wanted[-1] + 1)):
            return [self._group(wanted, lengths, device)]
        groups: list[list[int]] = []
        for number in sorted(wanted, key=lambda n: (-lengths[n], n)):
            most = lengths[groups[-1][0]] if groups else 0
            if groups and lengths[number] >= _LEAST_FILLED * most - _SLACK:
                groups[-1].append(number)
            else:
                groups.append([number])
        return [self._group(tuple(sorted(group)), lengths, device) for group in groups]

    def _group(self, group: tuple[int, ...], lengths: Mapping[int, int], device: torch.device) -> Group:
        of_group = tuple(lengths[n] for n in group)
        places, counts = (torch.tensor(each, device=device) for each in (group, of_group))
        follows = all(self.offsets[n] + lengths[n] == self.offsets[after] for n, after in pairwise(group))
        if follows and len(set(of_group)) == 1:
            return Group(group, of_group, self.offsets[group[0]], None, None, places, counts)
        steps = torch.arange(max(of_group), device="cpu")
        starts = torch.tensor([self.offsets[n] for n in group], device="cpu").unsqueeze(1)
        is_padding = steps >= torch.tensor(of_group, device="cpu").unsqueeze(1)
        rows = (starts + steps).masked_fill(is_padding, 0)
        padding = is_padding.to(device) if bool(is_padding.any()) else None
        return Group(group, of_group, None, rows.to(device), padding, places, counts)

    def joined(self, groups: Sequence[Group], outs: Sequence[Tensor]) -> Tensor:
        """Put the outputs of groups, each [pieces, length, ...], into rows [T, ...] of all tokens, without padding.

        groups: together they have each piece of this process once.
        outs: the output of each group.
        """
        if len(groups) == 1 and groups[0].start is not None:
            return outs[0].flatten(0, 1)
        key = tuple(group.pieces for group in groups)
        back = self._kept(key, outs[0].device, lambda: self._back(groups).to(outs[0].device))
        return torch.cat([out.flatten(0, 1) for out in outs])[back]

    def _back(self, groups: Sequence[Group]) -> Tensor:
        """Return the place of each row among the outputs of groups, one group after another."""
        back = torch.empty(self.offsets[-1], dtype=torch.int64, device="cpu")
        at = 0
        for group in groups:
            length = max(group.lengths)
            for place, (number, count) in enumerate(zip(group.pieces, group.lengths, strict=True)):
                first = at + place * length
                start = self.offsets[number]
                back[start : start + count] = torch.arange(first, first + count, device="cpu")
            at += len(group.pieces) * length
        return back

    def halo_plans(self, width: int, device: torch.device) -> list[HaloPlan]:
        """Return, for each rank of this process, a plan for fetching the `width` tokens before each of its pieces."""
        description = f"a halo of {width} tokens"
        plans: list[HaloPlan] = self._kept(
            width, device, lambda: [halo_plan(s, self.pieces, width, description, device) for s in self.passes.states]
        )
        return plans

    def starts(self, device: torch.device) -> Tensor:
        """Return which tokens of this process begin a document, bool [T], piece after piece."""
        starts = torch.zeros(self.offsets[-1], dtype=torch.bool, device=device)
        starts[[self.offsets[n] for n, number in enumerate(self.numbers) if self._begins(number)]] = True
        return starts

    def _begins(self, number: int) -> bool:
        return self.pieces.every[number].before == START

    def with_halos(self, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return indices that put the halo of each piece, the `width` tokens before it, in front of the piece.

        Returns two int64 tensors. The first picks rows from the halos of all pieces [pieces * width] followed by all
        tokens [T]: for each piece its halo, then its tokens. The second [T] says where the tokens are among the
        picked rows.
        """
        rows: tuple[Tensor, Tensor] = self._kept(
            "with halos", (width, device), lambda: self._with_halos(width, device)
        )
        return rows

    def _with_halos(self, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        rows, keep, halos, at = [], [], len(self.numbers) * width, 0
        for n, number in enumerate(self.numbers):
            length, start = self.pieces.every[number].length, halos + self.offsets[n]
            rows += [torch.arange(n * width, (n + 1) * width, device="cpu")]
            rows += [torch.arange(start, start + length, device="cpu")]
            keep.append(torch.arange(at + width, at + width + length, device="cpu"))
            at += width + length
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        return torch.cat(rows or [nothing]).to(device), torch.cat(keep or [nothing]).to(device)

    def most_with_halos(self, width: int) -> int:
        """Return the most tokens that any rank has, with the `width` tokens before each of its pieces."""

        def with_halos(rank: int) -> int:
            return sum(self.pieces.every[number].length + width for number in self.pieces.of_rank(rank))

        most: int = self._kept("most", width, lambda: max(map(with_halos, range(self.pieces.ranks))))
        return most

    def _kept(self, key: object, variant: object, make: Callable[[], Any]) -> Any:
        value = self.known.get((key, variant))
        if value is None:
            with torch.inference_mode(False):  # tensors that are made inside of it cannot be saved outside
                value = self.known[key, variant] = make()
        return value
