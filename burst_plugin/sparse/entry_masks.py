"""Which entries of windows queries attend to: the entries of complete windows of their document.

Windows of 4 tokens, entries below; queries 3 ... 6 attend to entry 0, from 7 on to entry 1 as well:

    queries   0 1 2 3 4 5 6 7 8 9 a b
    entry 0         . x x x x x x x x x
    entry 1                 . x x x x x
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from burst_plugin.sequence.mask import Mask, Region

LEAF = 8  # windows whose queries get a region each
_COARSE_LEAF = 1024  # windows that get one region, where a selection sees to the rest


class Stairs(NamedTuple):
    """A group of consecutive windows of one document whose entries have consecutive slots.

    end: the position of the first window's last token.
    slot: the slot of the first window's entry.
    windows: how many windows there are.
    stop: the position at which the document ends.
    """

    end: int
    slot: int
    windows: int
    stop: int


@dataclass(frozen=True)
class EntryMask(Mask):
    """The mask of a batch row's queries on entries: they attend to entries of complete windows of their document.

    The keys of this mask are slots of entries.

    rate: the number of tokens of a window.
    stairs: the windows of the batch row, in groups.
    exact: if False, queries may also attend to some entries of windows that are not complete, for fewer regions; only
        for calls with a selection, which leaves these entries out.
    """

    rate: int
    stairs: tuple[Stairs, ...]
    exact: bool = True
    looks_ahead = False

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return, for each group of windows, a region for queries after it and smaller ones for queries inside.

        `q_len` and `kv_len` are ignored.
        """
        regions = []
        for stair in self.stairs:
            after = Region(stair.end + self.rate * stair.windows, stair.stop, stair.slot, stair.slot + stair.windows)
            regions += [
                region._replace(q_stop=min(region.q_stop, stair.stop)) for region in (*self._inside(stair), after)
            ]
        return tuple(region for region in regions if not region.is_empty)

    def _inside(self, part: Stairs) -> Iterator[Region]:
        """Yield the regions of `part` for queries from its first window's end to where a further one would end."""
        end, slot, count, _ = part
        if count > (LEAF if self.exact else _COARSE_LEAF):
            half = count // 2
            later = part._replace(end=end + self.rate * half, slot=slot + half, windows=count - half)
            yield from self._inside(part._replace(windows=half))
            yield from self._inside(later)
            yield Region(later.end, end + self.rate * count, slot, later.slot)
        elif self.exact:
            for number in range(count):
                first = end + self.rate * number
                yield Region(first, first + self.rate, slot, slot + number + 1)
        else:
            yield Region(end, end + self.rate * count, slot, slot + count)


@dataclass(frozen=True)
class TokensAndEntries(Mask):
    """The mask of queries on tokens followed by entries: one mask for keys below `length`, another for entries.

    of_tokens: for queries on the first `length` keys, the tokens. of_entries: for queries on the keys after them.
    """

    length: int
    of_tokens: Mask
    of_entries: EntryMask
    looks_ahead = False

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return the regions of the mask of tokens, and of the mask of entries moved behind the tokens."""
        shift = self.length
        entries = self.of_entries.regions(q_len, kv_len - shift)
        shifted = (entry._replace(k_start=entry.k_start + shift, k_stop=entry.k_stop + shift) for entry in entries)
        return (*self.of_tokens.regions(q_len, shift), *shifted)
