"""One layer of a cache on one rank: the keys and values of positions that it holds and that are still needed."""

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
    """The keys and values of one layer that a rank holds: every `ranks`-th position of each row from `first_keys` on.

    rank, ranks: this rank, and the size of the ring.
    left: how many tokens before itself a token attends to, the layer's window; None for all. Keys that no later token
        attends to are dropped, a quarter of the window at once, since the other keys are moved then.
    rewind: how many tokens at the ends of rows can be cut off again although there is a window.
    store: the keys and values of each row.
    first_keys: by row, the position of the first key that any rank still holds.
    shortest: by row, the least length that it can be cut to; keys that shorter rows need have been dropped.
    shared: the number of tokens before `first_keys` that all rows share.
    shared_store: the keys and values of these tokens, stored once; None without them.
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
        """Return a layer without any tokens.

        Args:
            place: (this rank, the size of the ring).
            rows: the number of batch rows.
            left: how many tokens before itself a token attends to; None for all.
            rewind: how many tokens at the ends of rows can be cut off again although there is a window.
            reserve: the number of tokens of each row, over all ranks, that there is room for from the start.
            offload: whether keys and values are kept in host memory.
        """
        make = HostRowStore if offload else RowStore
        if left is not None:
            reserve = min(reserve, left + rewind + _loose(left))
        return cls(*place, left, rewind, make(rows, -(-reserve // place[1])), (0,) * rows, (0,) * rows)

    def fetch(self) -> None:
        """Start to copy keys and values that are in host memory to the device; nothing to do for others."""
        for store in self.stores:
            store.fetch()

    def release(self) -> None:
        """Free the copies on the device that `fetch` has made of keys and values in host memory."""
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
        """Raise ValueError if `mask`, within the window, lets the turn's new tokens attend to keys that were dropped.

        Only masks with prefix trees can do so: in their order a token can be far from its neighbour on its path.
        `layer` is the layer's number, for the error.
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

    def check_selects(self, layer: int) -> None:
        """Raise ValueError for a layer whose tokens cannot select among all keys of their rows, one number each.

        `layer` is the layer's number, for the error.
        """
        if self.left is not None or self.shared:
            kind = "rows that share tokens" if self.shared else f"a window of {self.left}"
            raise ValueError(
                f"layer {layer} has {kind}, in which keys cannot be selected; fork without shared=True, and make the "
                "cache with windows=None for this layer"
            )

    def trim(self, mask: Mask, turn: Turn) -> None:
        """Drop the keys and values that no token after this turn can attend to, as the window tells.

        `mask` is the mask of the turn, which has just attended. Windows count tokens of the row or, where the mask
        has a prefix tree, logical positions, from the end of any node that a later token may continue.
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
        """Raise ValueError if rows cannot be cut to these lengths.

        That is so where the window of the next token has lost keys, or where a row would lose tokens that rows share.
        `layer` is the layer's number, for the error.
        """
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
        """Drop all but the first `lengths` tokens of each row; lengths are counted over all ranks."""
        self.first_keys = tuple(map(min, self.first_keys, lengths))
        self.shortest = tuple(map(min, self.shortest, lengths))
        held = [self._held(first, length) for first, length in zip(self.first_keys, lengths, strict=True)]
        self.store.keep([(0, min(n, most)) for n, most in zip(held, self.store.lengths, strict=True)])

    def selected(self, rows: Sequence[int]) -> LayerCache:
        """Return a layer with copies of some batch rows; a row may be listed several times."""
        firsts, shortest = ([bounds[row] for row in rows] for bounds in (self.first_keys, self.shortest))
        return replace(self, store=self.store.selected(rows), first_keys=tuple(firsts), shortest=tuple(shortest))

    def sharing(self, rows: Sequence[int], length: int) -> LayerCache:
        """Return a layer with `len(rows)` copies of one batch row, stored once unless the layer has a window.

        `rows` lists that row's number several times; `length` is the row's length, counted over all ranks.
        """
        if self.left is not None or not length:
            return self.selected(rows)
        shared, own = self.store.split(rows[0], len(rows))
        firsts, shortest = (length,) * len(rows), (0,) * len(rows)
        return replace(self, store=own, first_keys=firsts, shortest=shortest, shared=length, shared_store=shared)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the stored keys and values on this rank."""
        return sum(store.nbytes for store in self.stores)

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes that this rank has allocated for keys and values, with room for more tokens."""
        return sum(store.allocated_bytes for store in self.stores)

    def _held(self, start: int, stop: int) -> int:
        """Return how many of the positions `start:stop` this rank holds."""
        return held_run(self.rank, self.ranks, start, stop).length


def _loose(left: int) -> int:
    """Return how many tokens that are not needed may stay before they are dropped."""
    return max(_LEAST_LOOSE, left // 4)


def checked_windows(windows: Sequence[int | None] | None, layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer, how many tokens before itself a token attends to; None for all.

    `windows` None is None for each layer. Raises ValueError for windows that are not valid, or not one for each of
    `layers` layers.
    """
    expected = f"give for each of {layers} layers a number of tokens, or None for all"
    listed = (None,) * layers if windows is None else as_listed("KVCache(windows={})", windows, expected)
    if len(listed) != layers:
        raise ValueError(f"KVCache(windows={shown(windows)}) is not valid; {expected}")
    return tuple(None if each is None else whole_number("a window of {}", each, expected) for each in listed)
