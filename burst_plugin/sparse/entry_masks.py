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

_LEAF = 8  # windows whose queries get a region each
_COARSE_LEAF = 1024  # windows that get one region, where a selection sees to the rest


class Stairs(NamedTuple):
    """So many `windows` of one document in consecutive slots.

    end: the last token of the first window. slot: of its entry. stop: where the document ends.
    """

    end: int
    slot: int
    windows: int
    stop: int


@dataclass(frozen=True)
class EntryMask(Mask):
    """Queries of a batch row attend to the entries of their document whose windows are complete.

    rate: tokens of a window.
    exact: if False, some entries of later windows are left in, which a selection does not have.
    """

    rate: int
    stairs: tuple[Stairs, ...]
    exact: bool = True
    looks_ahead = False

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return, for each group of windows, a rectangle for queries after it and smaller ones for queries inside."""
        found = []
        for each in self.stairs:
            after = Region(each.end + self.rate * each.windows, each.stop, each.slot, each.slot + each.windows)
            found += [
                region._replace(q_stop=min(region.q_stop, each.stop)) for region in (*self._inside(each), after)
            ]
        return tuple(region for region in found if not region.is_empty)

    def _inside(self, part: Stairs) -> Iterator[Region]:
        """Yield the regions of `part` for queries from its first window's end to where a further one would end."""
        end, slot, count, _ = part
        if count > (_LEAF if self.exact else _COARSE_LEAF):
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
    """A mask for tokens followed by entries: queries attend to `length` tokens by one mask, to entries by another."""

    length: int
    of_tokens: Mask
    of_entries: EntryMask
    looks_ahead = False

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        """Return the regions of both masks."""
        shift = self.length
        entries = self.of_entries.regions(q_len, kv_len - shift)
        shifted = (each._replace(k_start=each.k_start + shift, k_stop=each.k_stop + shift) for each in entries)
        return (*self.of_tokens.regions(q_len, shift), *shifted)
