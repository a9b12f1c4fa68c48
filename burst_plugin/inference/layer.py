"""One layer of a cache on one rank: its share of the positions that are still needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from burst_plugin.checks import as_listed, shown, whole_number
from burst_plugin.inference.host_storage import HostRowStore
from burst_plugin.inference.storage import RowStore
from burst_plugin.inference.turn import Turn, held_run, seen
from burst_plugin.sequence.masks import Mask, SlidingWindow

_LEAST_LOOSE = 16  # tokens


@dataclass
class LayerCache:
    """The keys and values of one layer that a rank holds, from `first_keys` on, a position for each row.

    left: how many tokens before itself a token attends to; None for all. Keys that no later token attends to are
        dropped, by a quarter of the window at once, since the rest is moved then.
    rewind: how many tokens can be cut off again.
    shortest: by row, the least length that it can be cut to; keys that shorter rows need have been dropped.
    shared: the number of tokens before `first_keys` that all rows share; `shared_store` has them once.
    """

    rank: int
    ranks: int
    left: int | None
    rewind: int
    store: RowStore
    first_keys: tuple[int, ...]
    shortest: tuple[int, ...]
    shared: int = 0
    shared_store: RowStore | None = None

    @classmethod
    def empty(
        cls,
        place: tuple[int, int],
        rows: int,
        left: int | None = None,
        rewind: int = 0,
        reserve: int = 0,
        offload: bool = False,
    ) -> LayerCache:
        """Return a layer without tokens, for `place`, (rank, ranks), with room for `reserve` tokens of each row."""
        make = HostRowStore if offload else RowStore
        if left is not None:
            reserve = min(reserve, left + rewind + _loose(left))
        return cls(*place, left, rewind, make(rows, -(-reserve // place[1])), (0,) * rows, (0,) * rows)

    def fetch(self) -> None:
        """Start to bring the stored keys and values to the device."""
        for store in self.stores:
            store.fetch()

    def release(self) -> None:
        """Free the memory that `fetch` has taken."""
        for store in self.stores:
            store.release()

    @property
    def stores(self) -> tuple[RowStore, ...]:
        """Return the stores of keys and values: its own, and the store of shared tokens if rows share any."""
        return (self.store,) if self.shared_store is None else (self.store, self.shared_store)

    def masked(self, mask: Mask) -> Mask:
        """Return `mask` restricted to the layer's window, which limits how many tokens back a token attends to."""
        if self.left is None:
            return mask
        return mask & SlidingWindow(self.left, None if mask.looks_ahead else 0)

    def check_reach(self, layer: int, mask: Mask, turn: Turn) -> None:
        """Raise ValueError if `mask`, within the window, lets new tokens attend to keys that have been dropped.

        Only prefix trees may: in their order a token can be far from one that is next to it on its path.
        """
        if self.left is None or not mask.trees:
            return
        for row, first in enumerate(self.first_keys):
            regions = seen(mask, row, (turn.starts[row], turn.stops[row]), (0, first))
            reached = [region.keys_of(region.q_start, region.q_stop - 1) for region in regions]
            gone = [low for low, high in reached if low <= high]
            if gone:
                raise ValueError(
                    f"in row {row} new tokens attend to token {min(gone)} or later ones by their prefix tree, but "
                    f"layer {layer}, with a window of {self.left}, has dropped what comes before token {first}; give "
                    "the tree in every turn from the first one on, continue its nodes only at their ends, or make "
                    "the cache with a larger rewind="
                )

    def trim(self, mask: Mask, turn: Turn) -> None:
        """Drop what no token after this turn, whose mask was `mask`, can attend to.

        Windows count tokens of the row or, where the mask has a prefix tree, logical positions: from the end of any
        node that a later token may continue.
        """
        if self.left is None:
            return
        firsts, shortest = list(self.first_keys), list(self.shortest)
        for row, (start, stop) in enumerate(zip(turn.starts, turn.stops, strict=True)):
            if start == stop:
                continue  # the mask says nothing of it
            reach = self.left + self.rewind
            needed = [
                max(0, stop - reach),
                *(tree.reached_later(reach, self.rewind) for tree in mask.of_row(row).trees),
            ]
            if min(needed) - firsts[row] >= _loose(self.left):
                firsts[row], shortest[row] = min(needed), stop - self.rewind
        dropped = [self._held(*bounds) for bounds in zip(self.first_keys, firsts, strict=True)]
        if any(dropped):
            self.store.keep([*zip(dropped, self.store.lengths, strict=True)])
        self.first_keys, self.shortest = tuple(firsts), tuple(shortest)

    def check_truncation(self, layer: int, lengths: Sequence[int]) -> None:
        """Raise ValueError if, once rows are cut to these lengths, the window of the next token has lost keys."""
        for row, length in enumerate(lengths):
            if 0 < length < self.shortest[row]:
                raise ValueError(
                    f"row {row} cannot be cut to {length} tokens: layer {layer} has a window of {self.left}, and has "
                    f"dropped what comes before token {self.first_keys[row]}; cut off fewer tokens, or make the "
                    "cache with a larger rewind="
                )
            if length < self.shared:
                raise ValueError(
                    f"row {row} cannot be cut to {length} tokens: the first {self.shared} are shared by all rows; "
                    "cut the cache that it was forked from"
                )

    def truncate(self, lengths: Sequence[int]) -> None:
        """Drop all but the first `lengths` tokens of each row."""
        self.first_keys = tuple(map(min, self.first_keys, lengths))
        self.shortest = tuple(map(min, self.shortest, lengths))
        held = [self._held(first, length) for first, length in zip(self.first_keys, lengths, strict=True)]
        self.store.keep([(0, min(n, most)) for n, most in zip(held, self.store.lengths, strict=True)])

    def selected(self, rows: Sequence[int]) -> LayerCache:
        """Return a copy of these rows; a row may be listed several times."""
        firsts, shortest = ([bounds[row] for row in rows] for bounds in (self.first_keys, self.shortest))
        return replace(self, store=self.store.selected(rows), first_keys=tuple(firsts), shortest=tuple(shortest))

    def sharing(self, rows: Sequence[int], length: int) -> LayerCache:
        """Return `len(rows)` copies of one row of this `length`, stored once unless the layer has a window."""
        if self.left is not None or not length:
            return self.selected(rows)
        shared, own = self.store.split(rows[0], len(rows))
        firsts, shortest = (length,) * len(rows), (0,) * len(rows)
        return replace(self, store=own, first_keys=firsts, shortest=shortest, shared=length, shared_store=shared)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the stored keys and values."""
        return sum(store.nbytes for store in self.stores)

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes that are allocated for keys and values, room for more tokens included."""
        return sum(store.allocated_bytes for store in self.stores)

    def _held(self, start: int, stop: int) -> int:
        """Return how many of the positions `start:stop` this rank holds."""
        return held_run(self.rank, self.ranks, start, stop).length


def _loose(left: int) -> int:
    """Return how many tokens may be dropped before they are."""
    return max(_LEAST_LOOSE, left // 4)


def checked_windows(windows: Sequence[int | None] | None, layers: int) -> tuple[int | None, ...]:
    """Return the window of every layer. Raise ValueError for invalid ones, or another number of them."""
    expected = f"give for each of {layers} layers a number of tokens, or None for all"
    listed = (None,) * layers if windows is None else as_listed("KVCache(windows={})", windows, expected)
    if len(listed) != layers:
        raise ValueError(f"KVCache(windows={shown(windows)}) is not valid; {expected}")
    return tuple(None if each is None else whole_number("a window of {}", each, expected) for each in listed)
