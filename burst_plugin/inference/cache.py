"""`KVCache`: keys and values of a batch, spread over a ring, turn by turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from burst_plugin.checks import check_one_of, shown, whole_number, whole_numbers
from burst_plugin.comm.differences import TensorValues
from burst_plugin.context import ContextParallel
from burst_plugin.inference.attending import (
    Asked,
    CachedExtras,
    LayerCall,
    attend_in_tree,
    attend_on_ring,
    check_layer,
)
from burst_plugin.inference.gathering import TreeMerge, gathered
from burst_plugin.inference.layer import LayerCache, checked_windows
from burst_plugin.inference.turn import Turn, are_few
from burst_plugin.inference.turn_rows import TurnRows
from burst_plugin.ring.agreement import prepared_together
from burst_plugin.ring.graph_breaks import between_graphs
from burst_plugin.scores import Scores
from burst_plugin.sequence.masks import Causal, Mask
from burst_plugin.strategy import AUTO
from burst_plugin.types import SIDES

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing since 3.11

_NO_TURN = "no turn has begun: call KVCache.begin with the numbers of new tokens first"
_LENGTHS = "give the number of new tokens of each batch row"


class KVCache:
    """Keys and values of all layers for a batch of sequences, divided between the ranks of a ring.

        cache = KVCache(cp, layers=2)
        turn = cache.begin([1000, 700])               # new tokens per batch row, equal on every rank
        hidden = model.embed(turn.take(ids))          # this rank's tokens; rotary embeddings: turn.positions
        out = cache.attend(0, q, k, v)                # in every layer, once per turn

    Position p of a sequence is held by rank p % ranks, so that ranks are even within one token per row in every
    state; the layout of `Strategy` is not used. Where a turn brings many tokens, ranks share the computing: queries
    attend on the ring, by pass-KV or pass-Q, whichever sends fewer bytes (arXiv 2411.01783). Where it brings few,
    every rank computes all of them and attends to its own share, and the results are merged in a tree (Tree
    Attention, arXiv 2408.04093): they are equal to the bit on every rank, and so are sampled tokens.

    Sequences grow by `begin` and `attend`, and are cut off by `truncate`; `fork` copies rows. There are no gradients.

    Args:
        cp: the context-parallel group. All its ranks call everything but `truncate`, `fork` and properties together.
        layers: the number of layers; 0 for the lengths of rows alone.
        windows: for each layer how many tokens before itself a token attends to, the `left` of `SlidingWindow`, or
            None for all; None if all layers attend to all. Keys that no window needs are dropped soon. Windows of
            a `PrefixTree` count logical positions: give the tree in every turn, so that the ends of nodes which later
            tokens may continue are kept.
        rewind: how many tokens `truncate` can cut off where there are windows, and how many tokens before its end a
            tree's node can be continued; more tokens are kept for it.
        reserve: tokens of each row, over all ranks, that memory is taken for from the start; it grows beyond. Tokens
            that rows share (`fork`) count once.
        offload: whether keys and values wait in host memory; each layer's are copied to the device while the layer
            before is at work, and freed there afterwards.
        forward: the side that moves where ranks share the computing, `"q"` or `"kv"`; "auto": the side with
            fewer bytes. `Strategy.forward` is for training.

    Raises:
        ValueError: for an argument that is not valid.
    """

    def __init__(
        self,
        cp: ContextParallel,
        layers: int,
        *,
        windows: Sequence[int | None] | None = None,
        rewind: int = 0,
        reserve: int = 0,
        offload: bool = False,
        forward: str = AUTO,
    ) -> None:
        if not isinstance(cp, ContextParallel):
            raise ValueError(f"cp is {shown(cp)}, not a ContextParallel; make one with ContextParallel(group)")
        self.cp, self._ranks = cp, cp.ranks
        count = whole_number("KVCache(layers={})", layers, "use the number of layers")
        self._windows = checked_windows(windows, count)
        self._rewind = whole_number("KVCache(rewind={})", rewind, "use a number of tokens")
        self._reserve = whole_number("KVCache(reserve={})", reserve, "use a number of tokens per row")
        self._offload = bool(offload)
        check_one_of("forward", forward, (*SIDES, AUTO))
        self._forward = forward
        self._merge = TreeMerge(cp)
        self._ring_bytes: Counter[str] = Counter()
        self._turn: Turn | None = None
        self._turns = 0
        self._attended: frozenset[int] = frozenset()
        self._history = 0  # digest of what ranks did to this cache without each other
        self._lengths: tuple[int, ...] = ()
        self._layers: list[LayerCache] = []

    def __copy__(self) -> KVCache:
        """Return a cache with copies of all rows, which goes on by itself: `fork()`, for every rank to call."""
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        """Return a cache with copies of all rows, which goes on by itself: `fork()`, for every rank to call."""
        return self.fork()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a KVCache cannot be saved or sent to another process, since its ring cannot: keep the tokens, and "
            "compute their keys and values again where they are needed"
        )

    # ------------------------------------------------------------------------------------------------ what is there

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the number of tokens of each row, new tokens of a turn included; () before the first turn."""
        return self._lengths

    @property
    def bytes(self) -> int:
        """Return the bytes of the keys and values that this rank holds."""
        return sum(layer.nbytes for layer in self._layers)

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes that this rank has allocated for keys and values, with room for more tokens."""
        return sum(layer.allocated_bytes for layer in self._layers)

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Return the bytes that this rank has sent for attention, `{"intra": n, "inter": m}`.

        Merging sends the bytes of `decode_bytes`. Bytes on the ring are part of `ContextParallel.traffic`, too.
        """
        total = self._merge.sent_bytes + self._ring_bytes
        return {link: total[link] for link in ("intra", "inter")}

    # ------------------------------------------------------------------------------------------------------- turns

    @between_graphs
    def begin(self, lengths: Sequence[int], *, ids: Tensor | None = None, replicated: bool | None = None) -> Turn:
        """Begin a turn: new tokens of each batch row, which follow the row's cached tokens; collective.

        Args:
            lengths: the number of new tokens of each batch row, 0 for rows without any; equal on every rank.
            ids: the ids of the new tokens, integers of any shape; if given, ranks compare them, so that a rank that
                has sampled another token is found.
            replicated: whether every rank computes all new tokens, or each rank its own; None: every rank computes
                all if no row has more than twice as many as there are ranks.

        Returns:
            The turn, which knows this rank's tokens and their positions.

        Raises:
            ValueError: on every rank, if lengths are not valid, a layer did not attend in the turn before, or ranks
                are at different places or differ in anything.
        """

        def prepared() -> Turn:
            new = self._checked_lengths(lengths)
            all_compute = are_few(max(new), self._ranks) if replicated is None else bool(replicated)
            starts = self._lengths or (0,) * len(new)
            stops = tuple(start + n for start, n in zip(starts, new, strict=True))
            return Turn(self._turns, starts, stops, self.cp.rank, self._ranks, all_compute or self._ranks == 1)

        def agree(turn: Turn | None, problem: str) -> None:
            compared: dict[str, object] = {}
            if turn is not None:
                compared = {
                    **turn.compared,
                    "windows of layers": self._windows,
                    "rewind": self._rewind,
                    "forward": self._forward,
                    "truncated and forked": f"{self._history:x}",
                    **({} if ids is None else {"ids": TensorValues(ids.flatten())}),
                }
            self.cp.agree(compared, problem, of=f"turn {self._turns} of a cache")

        turn, _ = prepared_together(prepared, agree)
        if not self._lengths:
            place, rows = (self.cp.rank, self._ranks), len(turn.starts)
            options = (self._rewind, self._reserve, self._offload)
            self._layers = [LayerCache.empty(place, rows, left, *options) for left in self._windows]
        self._turn, self._lengths, self._attended = turn, turn.stops, frozenset()
        self._turns += 1
        return turn

    @between_graphs
    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask = Causal(),
        scores: Scores = Scores(),
        **extras: Unpack[CachedExtras],
    ) -> Tensor:
        """Append this rank's new tokens to a layer, and attend to all that is cached and new; collective.

        Args:
            layer: the layer's number, from 0 on; each layer attends once per turn.
            q: [B, n, Hq, D], float64, float32, bfloat16 or float16, n = `Turn.size`. Rows with fewer tokens are
                padded at their ends with anything.
            k: [B, n, Hkv, D]; Hq must be a multiple of Hkv.
            v: [B, n, Hkv, Dv].
            mask: a mask in positions of a whole sequence, or `PerRow` with one for each row. The layer's window
                restricts it further.
            scores: scale and softcap.
            extras: `sink` [Hq], a logit per head that takes part in every softmax and has no value, see
                `burst_attention`; `selection`, int32 or int64 [B, n, keys per query] or
                [B, G, n, keys per query] for G groups of heads, the keys that each query
                attends to, positions in its row, -1 for none, as `sparse.select_cached` returns them, not in layers
                with a window.

        Returns:
            out [B, n, Hq, Dv] in the type of q; 0 for padding.

        Raises:
            ValueError: for arguments that do not fit, on every rank where ranks compare this call (see
                `Strategy.check`). The layer is then as it was before.
            RuntimeError: gradients would be lost; RingError: a rank was lost.
        """
        appended = partial(self._appended, Asked(layer, q, k, v, mask, scores, **extras).without_gradient())
        tag = f"turn {self._turns - 1}", f"layer {layer}"
        before, attended = [layer_cache.store.state for layer_cache in self._layers], self._attended
        try:
            with torch.no_grad():
                if self._turn is not None and not self._turn.replicated:
                    out, sent = attend_on_ring(self.cp, appended, tag, self._forward)
                    self._ring_bytes += sent
                else:
                    out = attend_in_tree(self.cp, appended, tag, self._merge)
        except BaseException:
            for layer_cache, state in zip(self._layers, before, strict=True):
                layer_cache.store.undo(state)
            self._attended = attended
            raise
        assert self._turn is not None
        self._layers[layer].trim(mask, self._turn)
        self._layers[layer].release()
        return out

    @between_graphs
    def hold(self, layer: int, values: Tensor, *, mask: Mask = Causal()) -> TurnRows:
        """Append values of this rank's new tokens to a layer that does not attend; not collective.

        The values go along with the tokens' keys and values: they are cut off and forked, and wait in host memory.
        Keys of an indexer are such values, see `sparse.select_cached`.

        Args:
            layer: the layer's number; it has no window, and each layer holds or attends once per turn.
            values: [B, n, D], floating point, n = `Turn.size`.
            mask: which values of its row a new token may use, in positions of a whole row.

        Returns:
            The rows of the layer, whose `stored` are this rank's values so far, [B or 1, tokens, 1, D], and nothing.

        Raises:
            ValueError: for values that do not fit, or no turn has begun. The layer is then as it was before.
        """
        if self._turn is None:
            raise ValueError(_NO_TURN)
        number = check_layer(layer, len(self._layers), self._attended)
        kept, size = self._layers[number], (len(self._turn.starts), self._turn.size)
        kept.check_selects(number)
        if not isinstance(values, Tensor) or values.dim() != 3 or values.shape[:2] != size:
            expected = f"[{size[0]}, {size[1]}, D]"
            raise ValueError(f"layer {number} got {shown(values)}, but holds values {expected} of a turn's tokens")
        k = values.unsqueeze(2)
        v = k[..., :0]
        kept.store.check_like(k, v)
        rows = TurnRows(self._turn, kept, mask)
        rows.append(k, v)
        self._attended |= {number}
        return rows

    @between_graphs
    def truncate(self, lengths: Sequence[int]) -> None:
        """Drop all but the first `lengths` tokens of each row, in all layers, on this rank; not collective.

        All ranks have to pass equal lengths. A turn that was left half way ends; of its tokens, which some layers do
        not have, none is kept. Raises ValueError for lengths beyond the lengths of rows, or where a window has
        dropped keys that the next token needs, see `rewind`.
        """
        kept = whole_numbers("truncate(lengths={})", lengths, "give the number of tokens to keep of each row")
        is_half_way = self._turn is not None and len(self._attended) < len(self._layers)
        most = self._turn.starts if self._turn is not None and is_half_way else self._lengths
        if len(kept) != len(most) or any(not 0 <= n <= m for n, m in zip(kept, most, strict=False)):
            before = ", before the turn that was left half way" if is_half_way else ""
            raise ValueError(
                f"truncate(lengths={shown(kept)}) does not fit rows of {shown(most)} tokens{before}; give one number "
                "per row, up to its length"
            )
        for number, layer in enumerate(self._layers):
            layer.check_truncation(number, kept)
        for layer in self._layers:
            layer.truncate(kept)
        self._turn, self._lengths = None, kept
        self._note(1, kept)

    @between_graphs
    def fork(self, rows: Sequence[int] | None = None, *, shared: bool = False) -> KVCache:
        """Return a new cache with copies of some batch rows of this one; not collective.

        It serves several answers to one prefix, or beams. All ranks have to choose equal rows.

        Args:
            rows: the numbers of the rows to copy, each as often as it is listed; None for all.
            shared: whether one row, listed several times, has its tokens stored once, and read once for all rows of a
                turn that all ranks compute (RelayAttention, arXiv 2402.14808). Layers with windows copy it in any
                case.

        Raises:
            ValueError: for rows that are not there, in the middle of a turn, or with `shared` for several different
                rows, or for a cache whose rows share tokens already.
        """
        self._check_complete()
        count = len(self._lengths)
        chosen = range(count) if rows is None else whole_numbers("fork(rows={})", rows, "give numbers of rows")
        if not all(0 <= row < count for row in chosen):
            raise ValueError(f"fork(rows={shown(rows)}) is not valid; rows are numbered from 0 to {count - 1}")
        new = KVCache.__new__(KVCache)
        vars(new).update(vars(self))
        new._merge, new._ring_bytes, new._turn = TreeMerge(self.cp), Counter(), None
        new._lengths = tuple(self._lengths[row] for row in chosen)
        if shared and (len(set(chosen)) != 1 or any(layer.shared for layer in self._layers)):
            raise ValueError(
                f"fork(rows={shown(rows)}, shared=True) is not valid; list a single row, and of a cache whose rows "
                "share nothing yet"
            )
        new._layers = [
            layer.sharing(chosen, new._lengths[0]) if shared else layer.selected(chosen) for layer in self._layers
        ]
        new._note(2, chosen)
        return new

    @between_graphs
    def gather(self, x: Tensor, *, last: bool = False) -> Tensor:
        """Return values of this turn's tokens on all ranks, put together into whole rows on every rank; collective.

        Args:
            x: [B, n, ...], values of this rank's tokens, n = `Turn.size`.
            last: whether to return the last new token of each row only, which the next token is sampled from.

        Returns:
            [B, T, ...], T being the number of new tokens of the longest row, rows padded with zeros. With `last` it
            is [B, ...], 0 for rows without new tokens. Equal to the bit on every rank.

        Raises:
            ValueError: on every rank, if any rank has another shape than expected, or no turn has begun.
        """
        return gathered(self.cp, self._turn, x, last)

    @between_graphs
    def finish(self) -> None:
        """Declare that this rank begins no further turn for now; collective.

        A rank that stops while others begin a turn gets an error here, and the others get one in `begin`: no rank
        waits for ever. Raises ValueError on every rank if any rank calls something else, or has a layer that did not
        attend.
        """

        def agree(_: object, problem: str) -> None:
            self.cp.agree({"tokens": self._lengths}, problem, of="the end of the turns of a cache")

        prepared_together(self._check_complete, agree)

    # -------------------------------------------------------------------------------------------------------- checks

    def _appended(self, asked: Asked) -> LayerCall:
        """Return the call with its new tokens appended to the layer. Raise ValueError for what does not fit."""
        if self._turn is None:
            raise ValueError(_NO_TURN)
        number = check_layer(asked.layer, len(self._layers), self._attended)
        layer = self._layers[number]
        checked = asked.checked(self._turn, layer.store)
        if checked.selection is not None:
            layer.check_selects(number)
        rows = TurnRows(self._turn, layer, layer.masked(checked.mask))
        layer.check_reach(number, rows.mask, self._turn)
        rows.append(checked.k, checked.v)
        self._attended |= {number}
        self._layers[(number + 1) % len(self._layers)].fetch()
        return LayerCall(rows, checked)

    def _checked_lengths(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of new tokens. Raise ValueError for invalid ones, or in the middle of a turn."""
        self._check_complete()
        new = whole_numbers("begin(lengths={})", lengths, _LENGTHS)
        if not new or min(new) < 0 or not any(new):
            raise ValueError(f"begin(lengths={shown(new)}) is not valid; {_LENGTHS}, at least one of them above 0")
        if len(new) != len(self._lengths or new):
            raise ValueError(
                f"begin(lengths={shown(new)}) does not fit the {len(self._lengths)} rows that are cached; {_LENGTHS}"
            )
        return new

    def _check_complete(self) -> bool:
        """Return True. Raise ValueError if a layer did not attend in the turn that has begun."""
        missing = sorted(set(range(len(self._layers))) - self._attended) if self._turn is not None else []
        if missing:
            raise ValueError(
                f"layers {', '.join(map(str, missing))} did not attend in turn {self._turns - 1}; call attend once "
                "per turn in every layer, or truncate to end the turn"
            )
        return True

    def _note(self, kind: int, values: Sequence[int]) -> None:
        """Remember what this rank did without the others; they compare it in the next turn."""
        self._history = hash((self._history, kind, *values))
