"""A schedule as data: visits and transfers, and what follows from them. Pure Python, without torch.

A *block* is one rank's share of the moving side; that rank is its *owner*. At every step each rank *visits* one
block: it works on that block and its own local side. Operands are sent ahead of the work (*gather*); partial results
follow one step behind and end at the owner (*reduce*).

A block has the number of its owner. Cut into `parts`, by heads, part p of the block of rank r has the number
`r + p * ranks` and takes the way of the whole block, one part behind the other, or ways of their own, all at
once (`Schedule.in_parts`).

A rank's work on its own block may be split: the *tail* is left for the last step, while the final reduce hops bring
partial results from other ranks (`Schedule.with_tail`).

Time: a transfer with `issue=s, due=d` is posted before the work of step s and waited for before the work of step d,
so that it overlaps with steps s .. d-1. What a rank computes at step s can be sent from step s+1 on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise, product

from burst_plugin.schedule.steps import RankSchedule, Required, Step, Transfer
from burst_plugin.topology import Link, Topology, Traffic
from burst_plugin.types import Rows, row_count, union

_NEVER = 1 << 62  # a step after all others


class ScheduleError(ValueError):
    """The error of a schedule that would lose or repeat data, or read it before it arrives."""


@dataclass(frozen=True)
class Schedule:
    """A schedule of one pass: the visits of all ranks to blocks, and the transfers between ranks.

    visits: `visits[rank][step]` is the block that a rank visits at a step, None for no visit.
    gather, reduce: transfers of operands, and of partial results.
    reduces: whether partial results are sent to their owners.
    by_link: whether transfers over both links are under way at the same time and take different numbers of steps, so
        that each link needs communicators of its own.
    phases: the first step of each group of visits that `in_parts` repeats for every part before it goes on to the
        next group: an inner ring, or a single step.
    parts: into how many parts, by heads, blocks are cut.
    tail_share: the share of the work on its own block that every rank leaves for the last step; 0 if there is none.
    ring_of_part: None if all parts take one way. Else a function of the topology and the number of a part, which
        returns the ranks in the order of the ring around which this part goes: with its result `ring`, rank `ring[r]`
        does for this part what rank r does for a whole block. Both are on one node.
    """

    name: str
    topology: Topology
    visits: tuple[tuple[int | None, ...], ...]
    gather: tuple[Transfer, ...]
    reduce: tuple[Transfer, ...]
    reduces: bool = True
    by_link: bool = False
    phases: tuple[int, ...] = (0,)
    parts: int = 1
    tail_share: float = 0.0
    ring_of_part: Callable[[Topology, int], Sequence[int]] | None = None

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the topology."""
        return self.topology.ranks

    def owner(self, block: int) -> int:
        """Return the rank that owns the block with this number, or this part of a block."""
        return block % self.ranks

    def block(self, owner: int, part: int) -> int:
        """Return the number of part `part` of rank `owner`'s block among the blocks of the schedule."""
        return owner + part * self.ranks

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Return all transfers, gather before reduce."""
        return (*self.gather, *self.reduce)

    def hops(self, rank: int) -> dict[Link, dict[Traffic, int]]:
        """Return how many blocks `rank` sends, for each kind of link and of traffic."""
        sent = Counter((t.link, t.traffic) for t in self.transfers if t.src == rank)
        return {link: {traffic: sent[link, traffic] for traffic in Traffic} for link in Link}

    def tail_visits(self, rank: int) -> list[bool]:
        """Return for each step of a rank whether its visit is a tail: another visit of a block visited before."""
        visited: set[int] = set()
        tails = []
        for block in self.visits[rank]:
            tails.append(block in visited)
            if block is not None:
                visited.add(block)
        return tails

    def work(self, rank: int) -> list[float]:
        """Return the work of a rank at each step, as a share of the work on one whole block."""
        shares = []
        for block, is_tail in zip(self.visits[rank], self.tail_visits(rank), strict=True):
            if block is None:
                share = 0.0
            elif self.owner(block) != rank:
                share = 1.0
            else:
                share = self.tail_share if is_tail else 1.0 - self.tail_share
            shares.append(share / self.parts)
        return shares

    def of_rank(self, rank: int) -> RankSchedule:
        """Return the schedule of one rank: its visits, and the transfers that it sends or receives, step by step."""
        own_transfers = [t for t in self.transfers if rank in (t.src, t.dst)]
        visits, tails = list(self.visits[rank]), self.tail_visits(rank)
        count = max([len(visits) + 1, *(t.due + 1 for t in own_transfers)])
        visits += [None] * (count - len(visits))
        tails += [False] * (count - len(tails))
        due: list[list[Transfer]] = [[] for _ in range(count)]
        issue: list[list[Transfer]] = [[] for _ in range(count)]
        for t in own_transfers:
            issue[t.issue].append(t)
            due[t.due].append(t)
        for transfers in issue:  # one order on every rank, by communicator; what is due first goes first
            transfers.sort(key=lambda t: (t.due, t.traffic, t.link))
        drop: list[list[int]] = [[] for _ in range(count)]
        for block, step in self._drop_steps(rank).items():
            drop[step].append(block)
        steps = tuple(
            Step(visits[step], tuple(due[step]), tuple(issue[step]), tuple(drop[step]), tails[step])
            for step in range(count)
        )
        return RankSchedule(self.name, rank, self.ranks, steps, self.by_link, self.tail_share)

    def _drop_steps(self, rank: int) -> dict[int, int]:
        """Return by block the step from which on a rank neither reads nor sends its operands any more."""
        drop_at = {}
        for step, block in enumerate(self.visits[rank]):
            if block is not None and self.owner(block) != rank:
                drop_at[block] = step + 1
        for t in self.gather:
            if t.src == rank and (t.rows is None or self.owner(t.block) != rank):
                drop_at[t.block] = max(drop_at.get(t.block, 0), t.due)
        return drop_at

    def with_tail(self, final_link: Link) -> Schedule:
        """Return the schedule with a last step at which every rank works on the tail of its own block, visited first.

            before       | a   b   c   d              waits  | for d, one hop from its owner
            with a tail  | a/  b   c   d   /a                | for nothing: d is sent meanwhile

        All transfers that are still under way then are waited for that much less. The tail is as long as the final
        reduce hop, over `final_link`, may take: half of the work on the block between nodes, else a quarter. If there
        is one node, or nothing is reduced, the schedule is returned as it is.
        """
        if self.topology.nodes == 1 or not self.reduces:
            return self
        visits = tuple((*visits, visits[0]) for visits in self.visits)
        return replace(self, visits=visits, tail_share=0.5 if final_link is Link.INTER else 0.25)

    def in_parts(self, parts: int) -> Schedule:
        """Return the schedule for blocks cut into `parts`: in every phase all visits of one part precede the next's.

        Two parts, and a phase of two visits (`a'`: the second part of block a):

            steps of the whole    | 0       1       | 2       3       |
            visits                | a       b       | c       d       |
            in two parts          | a   b   a'  b'  | c   d   c'  d'  |

        Steps are shorter by the same factor. What crosses between nodes is sent part by part, so that links are never
        idle where they are the bottleneck, and what arrives last is worked on in 1 / parts of the time.

        Parts that go around rings of their own (`ring_of_part`) are sent all at once instead, since their links are
        different ones: operands when a phase begins, partial results when it has ended. In a ring each rank does what
        the rank in its position does in the schedule of the whole.
        """
        return _in_parts(self, parts)

    def pruned(self, required: Required | None) -> Schedule:
        """Return the schedule without visits that are not required, and without transfers that only they needed.

        required: the rows that each rank works on, by owner: `required[rank]` has the owners whose blocks the rank
            visits. None: the schedule is returned as it is.

        A schedule is cut into parts first: in the rings of its parts different visits and transfers may be left.
        """
        if required is None:
            return self
        visits = tuple(
            tuple(None if block is None or self.owner(block) not in required[rank] else block for block in visits)
            for rank, visits in enumerate(self.visits)
        )
        used_gather, used_reduce = set[int](), set[int]()  # numbers of transfers
        for (rank, owners), part in product(enumerate(required), range(self.parts)):
            for block in (self.block(owner, part) for owner in owners):
                # back along the hops from the owner, and on along the hops to it, as far as hops are not known yet
                number = self._arriving.get((rank, block))
                while number is not None and number not in used_gather:
                    used_gather.add(number)
                    number = self._arriving.get((self.gather[number].src, block))
                number = self._leaving.get((rank, block))
                while number is not None and number not in used_reduce:
                    used_reduce.add(number)
                    number = self._leaving.get((self.reduce[number].dst, block))
        gather = tuple(self.gather[number] for number in sorted(used_gather))
        reduce = tuple(self.reduce[number] for number in sorted(used_reduce))
        return replace(self, visits=visits, gather=gather, reduce=reduce, ring_of_part=None)

    @cached_property
    def _arriving(self) -> dict[tuple[int, int], int]:
        """Return by rank and block the number of the one transfer that brings the rank the block's operands."""
        return {(t.dst, t.block): number for number, t in enumerate(self.gather)}

    @cached_property
    def _leaving(self) -> dict[tuple[int, int], int]:
        """Return by rank and block the number of the one transfer that takes the partial results from the rank."""
        return {(t.src, t.block): number for number, t in enumerate(self.reduce)}

    def most_rows_moved(self, lengths: Sequence[int]) -> tuple[int, int]:
        """Return the most rows that any rank sends, or receives, to gather blocks: (between nodes, inside a node).

        The scarcer link comes first, so that tuples compare by it. `lengths` are the rows of each rank's block.
        """
        moved: Counter[tuple[str, int, Link]] = Counter()
        for t in self.gather:
            rows = lengths[self.owner(t.block)] if t.rows is None else row_count(t.rows)
            moved["out", t.src, t.link] += rows
            moved["in", t.dst, t.link] += rows
        most = dict.fromkeys(Link, 0)
        for (_, _, link), rows in moved.items():
            most[link] = max(most[link], rows)
        return most[Link.INTER], most[Link.INTRA]

    def validate(self, required: Required | None = None) -> Schedule:
        """Return the schedule if it is exact, else raise ScheduleError with the rank, step and block at fault.

        It is exact if every rank visits every block once, or every required one; if operands arrive before they are
        read or sent on; and if every contribution reaches the block's owner once.

        required: the rows that each rank works on, by owner; None if every rank requires every block.
        """
        _validate(self, required)
        return self

    def format(self) -> str:
        """Return the schedule as a grid of text, and below it the most blocks that any rank sends over either link.

        two_level_ring, 2x2 (nodes x ranks per node)
                   step   0   1   2   3   4
        node 0   rank 0  0/ |*2   3 | 1  /0       *    a block that came from another node
                 rank 1  1/ |*3   2 | 0  /1       |    the next block is one of another node than the last
        node 1   rank 2  2/ |*0   1 | 3  /2       0/   a rank's own block, and /0 the tail of the work on it
                 rank 3  3/ |*1   0 | 2  /3       .    no visit
        """
        return _draw(self)


# ---------------------------------------------------------------------------------------------------- blocks in parts


def _in_parts(schedule: Schedule, parts: int) -> Schedule:
    """Return the schedule for blocks cut into `parts`; see `Schedule.in_parts`."""
    if parts == 1:
        return schedule
    visit_steps = len(schedule.visits[0])
    own_rings = schedule.ring_of_part is not None
    rings: list[Sequence[int]] = [range(schedule.ranks)] * parts
    if schedule.ring_of_part is not None:
        rings = [schedule.ring_of_part(schedule.topology, part) for part in range(parts)]
    places = _places(schedule, parts)

    def new_step(step: int, part: int) -> int:
        start, length, offset = places[step]
        return start + part * length + offset

    def moved(t: Transfer, part: int, behind: int) -> Transfer:
        """Return the transfer of one part; partial results, `behind` 1, leave and arrive after a step's work."""
        turn = behind * (parts - 1) if own_rings else part
        issue, due = (new_step(step - behind, turn) + behind for step in (t.issue, t.due))
        ring = rings[part]
        block = schedule.block(ring[t.block], part)
        return t._replace(block=block, src=ring[t.src], dst=ring[t.dst], issue=issue, due=due)

    visits: list[list[int | None]] = [[None] * (parts * visit_steps) for _ in schedule.visits]
    for (rank, whole), (part, ring) in product(enumerate(schedule.visits), enumerate(rings)):
        for step, block in enumerate(whole):
            if block is not None:
                visits[ring[rank]][new_step(step, part)] = schedule.block(ring[block], part)
    return replace(
        schedule,
        parts=parts,
        phases=tuple(new_step(start, 0) for start in schedule.phases),
        visits=tuple(map(tuple, visits)),
        gather=tuple(moved(t, part, 0) for t in schedule.gather for part in range(parts)),
        reduce=tuple(moved(t, part, 1) for t in schedule.reduce for part in range(parts)),
    )


def _places(schedule: Schedule, parts: int) -> list[tuple[int, int, int]]:
    """Return by step: the first step of its phase in parts, the phase's length, the step's place in it."""
    visit_steps = len(schedule.visits[0])
    last = max([visit_steps, *(t.due for t in schedule.transfers)]) + 1
    places = []
    for start, stop in pairwise([*schedule.phases, visit_steps, last + 1]):
        places += [(parts * start, stop - start, step - start) for step in range(start, stop)]
    return places


# ----------------------------------------------------------------------------------------------- is a schedule exact?


def _validate(schedule: Schedule, required: Required | None) -> None:
    """Raise ScheduleError, naming the first rank, step and block at fault, unless the schedule is exact.

    Each rank visits every block, or each that is `required`, once, and its own once more if there is a tail split;
    required rows arrive; links fit the topology; nothing is read or sent before it arrives, and nothing is
    sent to a rank that has it; every contribution to any row reaches its owner once, and is added up with others to
    the same rows.
    """
    _check_visits(schedule, required)
    for kind, transfers in ((Traffic.GATHER, schedule.gather), (Traffic.REDUCE, schedule.reduce)):
        for t in transfers:
            _check_transfer(schedule, t, kind, required)
    if required is not None:
        _check_rows(schedule, required)
    _check_gather(schedule)
    if schedule.reduces:
        _check_reduce(schedule, required)


def _check_visits(schedule: Schedule, required: Required | None) -> None:
    for rank, visits in enumerate(schedule.visits):
        owners = range(schedule.ranks) if required is None else required[rank]
        expected = [schedule.block(owner, part) for part in range(schedule.parts) for owner in owners]
        if schedule.tail_share:
            expected += [block for block in expected if schedule.owner(block) == rank]
        if sorted(block for block in visits if block is not None) != sorted(expected):
            raise ScheduleError(f"{schedule.name}: rank {rank} does not visit every block exactly once: {visits}")


def _check_transfer(schedule: Schedule, t: Transfer, kind: Traffic, required: Required | None) -> None:
    name, topology = schedule.name, schedule.topology
    link = topology.link(t.src, t.dst)
    if t.traffic is not kind or t.src == t.dst or t.issue >= t.due or t.link is not link:
        raise ScheduleError(f"{name}: impossible transfer {t}")
    are_counterparts = topology.local_rank(t.src) == topology.local_rank(t.dst)
    if schedule.by_link and t.link is Link.INTER and not are_counterparts:
        raise ScheduleError(f"{name}: no communicator for {t}: by link, only counterparts have one")
    if t.rows is not None and required is None:
        raise ScheduleError(f"{name}: rows of a block, and nothing says which are required: {t}")


def _check_rows(schedule: Schedule, required: Required) -> None:
    """Check that a block's rows go just where required: to a rank, or to the node of a rank on another node."""
    for t in schedule.gather:
        owner, topology = schedule.owner(t.block), schedule.topology
        is_near = topology.link(owner, t.dst) is Link.INTRA
        ranks = (t.dst,) if is_near else topology.node_peers(t.dst)  # elsewhere what all ranks of the node require
        needed = union([required[rank][owner] for rank in ranks if owner in required[rank]])
        if t.rows is not None and needed != t.rows:
            raise ScheduleError(f"{schedule.name}: not the rows that are required: {t}")


def _check_gather(schedule: Schedule) -> None:
    """Follow the operands of every block from its owner to where they are read."""
    name = schedule.name
    blocks = range(schedule.ranks * schedule.parts)
    held_from = {(schedule.owner(block), block): 0 for block in blocks}  # by rank and block: a step
    for t in sorted(schedule.gather, key=lambda t: (t.issue, t.due)):
        if held_from.get((t.src, t.block), _NEVER) > t.issue:
            raise ScheduleError(f"{name}: rank {t.src} sends block {t.block} before it has it: {t}")
        if (t.dst, t.block) in held_from:
            raise ScheduleError(f"{name}: rank {t.dst} is sent block {t.block} twice: {t}")
        held_from[t.dst, t.block] = t.due
    for rank, visits in enumerate(schedule.visits):
        for step, block in enumerate(visits):
            if block is not None and held_from.get((rank, block), _NEVER) > step:
                raise ScheduleError(f"{name}: rank {rank} visits block {block} at step {step} without it")


def _check_reduce(schedule: Schedule, required: Required | None) -> None:
    """Follow partial results to their owners; a set of contributions is one integer, a bit per visit of a block."""
    name, pieces = schedule.name, _Pieces(schedule, required)
    rows_of = {(t.dst, t.block): t.rows for t in schedule.gather}  # by rank and block, of its operands
    expected: Counter[int] = Counter()  # by piece of a block: all contributions
    added = defaultdict[int, list[tuple[int, int, int]]](list)  # by step: rank, piece, contributions
    leaving = defaultdict[int, list[Transfer]](list)  # by step, after what is added
    for rank, visits in enumerate(schedule.visits):
        for step, (block, is_tail) in enumerate(zip(visits, schedule.tail_visits(rank), strict=True)):
            if block is not None:
                bit = 1 << (rank + is_tail * schedule.ranks)
                for piece in pieces.of(block, rows_of.get((rank, block))):
                    added[step + 1].append((rank, piece, bit))
                    expected[piece] |= bit
    for t in schedule.reduce:
        leaving[t.issue].append(t)
    held: dict[tuple[int, int], int] = {}  # by rank and piece: contributions
    for step in sorted({*added, *leaving, *(t.due for t in schedule.reduce)}):
        for rank, piece, contributions in added[step]:
            if held.get((rank, piece), 0) & contributions:
                block = piece // pieces.most
                raise ScheduleError(
                    f"{name}: a contribution to block {block} is counted twice, rank {rank}, step {step}"
                )
            held[rank, piece] = held.get((rank, piece), 0) | contributions
        for t in leaving[step]:
            if t.dst != schedule.owner(t.block) and t.rows != rows_of.get((t.dst, t.block)):
                raise ScheduleError(f"{name}: rank {t.dst} adds up other rows of block {t.block}: {t}")
            for piece in pieces.of(t.block, t.rows):
                if (t.src, piece) not in held:
                    raise ScheduleError(f"{name}: rank {t.src} has no partial result to send: {t}")
                added[t.due].append((t.dst, piece, held.pop((t.src, piece))))
    for (rank, piece), contributions in held.items():
        block = piece // pieces.most
        if rank != schedule.owner(block) or contributions != expected[piece]:
            raise ScheduleError(f"{name}: the result of block {block} ends incomplete at rank {rank}")


class _Pieces:
    """All blocks in pieces, cut wherever rows of a transfer, or required rows, begin or end.

    A piece is a number, `block * most + number`, where no block has more than `most`.
    """

    def __init__(self, schedule: Schedule, required: Required | None) -> None:
        ends = defaultdict[int, set[int]](set)  # by block
        for t in schedule.transfers:
            if t.rows is not None:
                ends[t.block].update(chain(*t.rows))
        for owner, rows in chain(*(owners.items() for owners in required or ())):
            for block in range(owner, schedule.ranks * schedule.parts, schedule.ranks) if rows else ():
                ends[block].update(chain(*(rows or ())))
        self._starts = {block: sorted(found)[:-1] or [0] for block, found in ends.items()}
        self.most = max(map(len, self._starts.values()), default=1)
        self._known: dict[tuple[int, Rows | None], Sequence[int]] = {}

    def of(self, block: int, rows: Rows | None) -> Sequence[int]:
        """Return the pieces of these rows of a block, None for all."""
        if self.most == 1:
            return (block,)
        if (block, rows) not in self._known:
            self._known[block, rows] = [
                block * self.most + number
                for number, start in enumerate(self._starts.get(block, [0]))
                if rows is None or any(first <= start < stop for first, stop in rows)
            ]
        return self._known[block, rows]


# ------------------------------------------------------------------------------------------------------------ drawing


def _draw(schedule: Schedule) -> str:
    """Return the text of `Schedule.format`."""
    width = len(str(schedule.ranks * schedule.parts - 1))  # digits of a block
    crossed = {(t.dst, t.block) for t in schedule.gather if t.link is Link.INTER}
    steps = "".join(f"  {step:>{width + 1}}" for step in range(len(schedule.visits[0])))
    lines = [f"{schedule.name}, {schedule.topology}", f"{'step':>{14 + width}}{steps}"]
    for rank in range(len(schedule.visits)):
        is_first = schedule.topology.local_rank(rank) == 0
        node = f"node {schedule.topology.node(rank)}" if is_first else ""
        lines.append(f"{node:<9}rank {rank:<{width}}" + _row(schedule, rank, crossed, width))
    for traffic in Traffic:
        sent = Counter((t.src, t.link) for t in schedule.transfers if t.traffic is traffic)
        most = [max((count for (_, link), count in sent.items() if link is of), default=0) for of in Link]
        lines.append(f"{traffic.value}: a rank sends at most {most[0]} blocks intra-node, {most[1]} inter-node")
    return "\n".join(lines)


def _row(schedule: Schedule, rank: int, crossed: set[tuple[int, int]], width: int) -> str:
    """Return the visits of a rank."""
    row, last_node = "", None
    for block, is_tail in zip(schedule.visits[rank], schedule.tail_visits(rank), strict=True):
        node = schedule.topology.node(rank if block is None else schedule.owner(block))
        row += "  " if last_node in (None, node) else " |"
        row += _cell(schedule, rank, block, is_tail, crossed).rjust(width + 1)
        last_node = node
    return row


def _cell(schedule: Schedule, rank: int, block: int | None, is_tail: bool, crossed: set[tuple[int, int]]) -> str:
    if block is None:
        return "."
    if schedule.tail_share and schedule.owner(block) == rank:
        return f"/{block}" if is_tail else f"{block}/"
    return f"*{block}" if (rank, block) in crossed else str(block)
