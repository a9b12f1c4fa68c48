"""`RingCache`: a `Cache` of transformers whose keys and values are spread over a ring."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from burst_plugin.batch import SequenceShard
from burst_plugin.context import ContextParallel
from burst_plugin.huggingface.image_groups import GroupRule, MarkedTurn
from burst_plugin.huggingface.recurrent.states import XLSTM, LayerStates
from burst_plugin.inference import KVCache, Turn
from burst_plugin.inference.attending import CachedExtras
from burst_plugin.inference.columns import Columns
from burst_plugin.inference.gathering import gathered_ends
from burst_plugin.ring.agreement import error_text
from burst_plugin.scores import Scores
from burst_plugin.sequence.mask import Both
from burst_plugin.sequence.masks import BidirectionalSpans, Mask, PerRow, SlidingWindow

OWN_NAME = "cache_params"  # of Mamba's argument in earlier releases, in which `generate` hands on all tokens so far
CACHES = ("cache", "past_key_values", OWN_NAME)  # the argument, by release
_OPTIONS = frozenset({"reserve", "offload", "forward", "rewind"})
_DRAFT = 128  # tokens that models which assist may draft at once; some of them are cut off


class RingCache(Cache):
    """A cache for a model of transformers, whose keys and values are spread over the ranks of a ring.

        model = burst_plugin.huggingface.prepare(model).eval()
        ids = model.generate(**inputs, past_key_values=burst_plugin.huggingface.RingCache(cp))

    All ranks call `generate`, or the model, with identical whole tokens, and get identical results: prompts are cut
    among the ranks, and each rank computes the tokens that follow one by one. Every rank holds all states of
    recurrent layers. A cache that is given again goes on after the tokens that it holds, as other caches do.

    Args:
        cp: the context-parallel group, all of whose ranks take part.
        options: `reserve`, `offload`, `forward` and `rewind` of `burst_plugin.inference.KVCache`. Layers that have a
            window by the model's configuration keep the tokens of that window, and `rewind` more, which `crop` may
            then cut off.

    Raises:
        ValueError: for an argument that is not valid.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = (False,)  # for masks, which are known by their rules here, and so are windows
    is_linear = (False,)
    is_dummy = (False,)

    def __init__(self, cp: ContextParallel, **options: Any) -> None:
        super().__init__(layers=[])
        unknown = sorted(options.keys() - _OPTIONS)
        if unknown:
            raise ValueError(f"RingCache({unknown[0]}=...) is not known; it takes {', '.join(sorted(_OPTIONS))}")
        KVCache(cp, 1, **options)  # checks them
        self.cp, self._options = cp, options
        self.reset()

    def reset(self) -> None:
        """Forget all tokens; not collective, but every rank has to call it."""
        self._kv: KVCache | None = None
        self._windows: dict[int, int | None] = {}  # of layers that attend, by their numbers in the model
        self._indexed: tuple[int, ...] = ()  # the numbers of layers with an indexer, whose keys are cached, too
        self._set_states(None)
        self.shard: SequenceShard | None = None  # of the turn, for layers that carry a state
        # [B, columns] of the ids so far: which are no padding
        self._seen = torch.ones(0, 0, dtype=torch.bool, device="cpu")
        self._turn: Turn | None = None
        self._new: Tensor | None = None  # the columns of the turn
        self._last, self._is_whole = 0, False  # how many last columns are asked for, and whether they are gathered
        self.marked: MarkedTurn | None = None  # types of the turn's tokens, by which masks are made
        self._in_groups: frozenset[int] = frozenset()  # rows that end in a group, the rest of which must not follow
        self._ending_in_groups = self._in_groups  # after the turn
        self.longest = 0  # position in the forward in progress, of any rank
        self.gets_all_tokens = False  # whether `generate` may hand on tokens that it has
        self.in_forward = False  # whether a forward began and has not ended well
        self._layer: int | None = None  # that has new keys and values, and is about to attend
        self._attended = 0
        self._sent = {"intra": 0, "inter": 0}  # by caches that this one was forked from

    # ------------------------------------------------------------------------------------------------ what is there

    def __len__(self) -> int:
        """Return the number of layers; 0 before the first forward."""
        return max(len(self._windows), len(self.layers))

    def __repr__(self) -> str:
        """Return how many tokens it holds."""
        return f"RingCache(ranks={self.cp.ranks}, lengths={self.lengths})"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the number of tokens of each batch row, without padding; () if the cache is empty."""
        return () if self._kv is None else self._kv.lengths

    @property
    def bytes(self) -> int:
        """Return the bytes of the keys and values, and of the states, that this rank holds."""
        states = 0 if self.states is None else self.states.bytes
        return states + (0 if self._kv is None else self._kv.bytes)

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Return how many bytes this rank has sent for attention, {"intra": in its node, "inter": between nodes}."""
        new = {} if self._kv is None else self._kv.bytes_sent
        return {link: n + new.get(link, 0) for link, n in self._sent.items()}

    @property
    def seen(self) -> Tensor:
        """Return which tokens so far are real, True, and which are padding, bool [B, tokens] on the CPU."""
        return self._seen

    @property
    def turn(self) -> Turn | None:
        """Return the new tokens of the forward in progress and how ranks share them; None between forwards."""
        return self._turn

    @property
    def is_initialized(self) -> bool:
        """Return whether the cache has had a first forward."""
        return self._kv is not None

    @property
    def batch_size(self) -> int:
        """Return the number of batch rows; -1 if the cache is empty."""
        return len(self.lengths) or -1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens so far, with padding, before the forward in progress."""
        return self._seen.shape[1]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1, for no maximum: the cache grows."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys after a forward of `query_length` new tokens, with padding, and an offset of 0.

        transformers asks for it to make masks. No mask of this size is made.
        """
        return self.get_seq_length() + int(query_length), 0

    # ---------------------------------------------------------------------------------------------- during a forward

    def begin_turn(
        self,
        layers: tuple[Mapping[int, int | None], Sequence[int]],
        states: LayerStates | None,
        new: Tensor,
        ids: Tensor,
        last: int,
    ) -> Turn | Columns:
        """Begin the turn of a forward, and return which of its new tokens this rank computes; collective.

        Args:
            layers: for each layer that attends, by its number in the model, how many tokens before itself a token
                attends to, None for all; and the numbers of layers with an indexer of tokens.
            states: the states that a model with recurrent layers begins with, used in the first turn; None for other
                models.
            new: bool [B, n], which of the new tokens are no padding.
            ids: integers, the ids of the new tokens without padding, which ranks compare.
            last: of how many last columns of the forward logits are asked for; 0 for all.

        Returns:
            The `Turn`, or for recurrent layers the `Columns` of a turn of more than one token.
        """
        if self._kv is None:
            self._windows, self._indexed, self._seen = dict(layers[0]), tuple(layers[1]), new[:, :0]
            reaches = [*self._windows.values(), *[None for _ in self._indexed]]
            self._kv = KVCache(self.cp, len(reaches), windows=reaches or None, **self._options)
            self._set_states(states)
        self._turn = self._kv.begin(new.sum(1).tolist(), ids=ids)
        self._new, self._last, self._layer, self._attended, self._is_whole = new, last, None, 0, False
        columns = None if self.states is None else self.states.begin(self.cp, self._turn)
        if columns is None:
            return self._turn
        real = None if bool(columns.valid.all()) else columns.valid.to(ids.device)
        self.shard = SequenceShard(columns.cp, columns.total, columns.tokens, columns.mask, real=real)
        return columns

    def mark(self, marked: MarkedTurn | None, rule: GroupRule | None) -> None:
        """Note the types of the turn's tokens, since tokens such as an image's attend to each other both ways.

        marked: the types; None if no new token is in a group. rule: which types make groups.

        Raises ValueError for a group that comes in two turns: its first tokens have attended without the others.
        """
        before, self.marked = self._in_groups, marked
        runs_of_rows = [] if marked is None or rule is None else marked.token_types[rule.name]
        assert self._turn is not None
        begin, end = set[int](), set[int]()
        for row, runs in enumerate(runs_of_rows):
            groups = [(start, stop) for start, stop, kind in runs if rule is not None and kind in rule.types]
            is_one = rule is not None and rule.is_one and bool(groups)
            begin |= {row} if is_one or (groups and groups[0][0] == self._turn.starts[row]) else set()
            end |= {row} if is_one or (groups and groups[-1][1] == self._turn.stops[row]) else set()
        if before & begin:
            raise ValueError(
                "tokens of an image, which attend to each other both ways, came in two turns: give all tokens of an "
                "image at once, and leave prefill_chunk_size out"
            )
        self._ending_in_groups = frozenset(end) if rule is None or not rule.is_one else before | end

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values unchanged; the attention that follows appends them to the cache.

        transformers calls this in layers. Raises ValueError for a model that is not on the ring, or if a layer before
        did not attend.
        """
        if self._turn is None:
            raise ValueError(
                "a RingCache got keys and values of a model that is not on the ring: call "
                "burst_plugin.huggingface.prepare(model) first"
            )
        if self._layer is not None:
            raise ValueError(
                f"layer {self._layer} stored keys and values in a RingCache, but did not attend to them with "
                'attn_implementation="burst"; a RingCache is for models all of whose layers do'
            )
        self._layer = layer_idx
        return key_states, value_states

    def select(self, layer: int, choose: Callable[[KVCache, int], Tensor]) -> Tensor:
        """Store new keys of a layer's indexer, and return what this rank's new tokens select; collective.

        layer: its number in the model. choose: called with the cache of the ring and the indexer's layer in it, such
            as a part of `sparse.select_cached`.

        Raises ValueError if the layer had no indexer when the cache began.
        """
        if self._kv is None or layer not in self._indexed:
            raise ValueError(f"layer {layer} has an indexer that the RingCache does not know; begin with a new cache")
        return choose(self._kv, len(self._windows) + self._indexed.index(layer))

    def attend(
        self,
        name: str,
        qkv: tuple[Tensor, Tensor, Tensor],
        mask: Mask,
        scores: Scores,
        extras: CachedExtras,
    ) -> Tensor:
        """Return attention [B, n, heads, D] of this rank's new tokens to all cached and new tokens; collective.

        Args:
            name: of the layer's class, for errors. Its keys and values were given to `update` just before.
            qkv: queries, keys and values of this rank's new tokens, [B, n, heads, D] each; keys and values are
                cached.
            mask: the layer's own mask, in positions of a row.
            scores: scale and softcap of scores.
            extras: `sink`, a logit for each head, [heads], that takes part in the softmax without a value, and
                `selection`, the keys that this rank's new tokens have selected, as `select` returns them.

        Raises:
            ValueError: the layer did not call `update`, or its mask reaches further than the window that the cache
                keeps.
        """
        if self._layer is None or self._kv is None:
            raise ValueError(
                f"{name} attends to keys and values that it did not store in the RingCache, perhaps those of "
                "another layer; a RingCache is for models whose layers have keys and values of their own"
            )
        layer, self._layer = self._layer, None
        if layer not in self._windows:
            raise ValueError(f"{name} of layer {layer} attends, but its config has no attention in that layer")
        window, left = self._windows[layer], _reach(mask)
        if window is not None and (left is None or left > window):
            raise ValueError(
                f"{name} of layer {layer} attends by {mask}, but its config says that its window is of {window + 1} "
                "tokens; correct sliding_window or layer_types"
            )
        columns = None if self.states is None else self.states.columns
        q, k, v = qkv if columns is None else columns.to_storage(qkv)
        out = self._kv.attend(list(self._windows).index(layer), q, k, v, mask=mask, scores=scores, **extras)
        self._attended += 1
        return out if columns is None else columns.from_storage(out)

    # The code of transformers keeps states of layers, except for convolutions where ranks share the tokens; MiniMax
    # and xLSTM ask for states in their own ways.

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0, **kwargs: Any
    ) -> Tensor:
        """Return the input of a layer's convolution with earlier tokens in front, and store its last tokens.

        transformers calls this. It is collective where ranks share the tokens of the turn.

        conv_states: [B, C, n], the new tokens of this rank.
        layer_idx, state_idx: the number of the layer, and of the convolution in it.
        conv_kernel_size: how many tokens are stored and, where ranks share the tokens, put in front.
        """
        if self.states is None or self.states.columns is None:
            if conv_kernel_size:
                kwargs["conv_kernel_size"] = conv_kernel_size
            extended: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
            return extended
        return self.states.with_conv_state(conv_states, layer_idx, state_idx, conv_kernel_size)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return the state of linear attention in a layer of MiniMax, whose model calls this; None at first."""
        return None if self.states is None else self.states.own.get(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Store the state of linear attention in a layer of MiniMax, whose model calls this."""
        if self.states is not None:
            self.states.own[layer_idx] = linear_cache

    @property
    def rnn_state(self) -> Any:
        """Return the states of xLSTM's layers, a tuple of tensors for each, which its model reads and overwrites."""
        assert self.states is not None
        return self.states.own[XLSTM]

    def gather(self, hidden: Tensor) -> Tensor:
        """Return the hidden states whose logits are asked for, [B, n, H]; collective where ranks share the tokens.

        hidden: the hidden states that this rank has computed.

        n is the number of columns of the forward, or of its last ones that logits are asked for. Padding has zeros.
        """
        assert self._turn is not None
        assert self._new is not None
        new, self._is_whole = self._new[:, -self._last :], True
        counts = new.sum(1).tolist()
        if self.states is not None and self.states.columns is not None:
            gathered_states = self.states.columns.gather(hidden, last=max(counts))
        else:
            gathered_states = gathered_ends(self.cp, self._turn, hidden, counts)
        return self._in_columns_of_forward(gathered_states, new)

    @staticmethod
    def _in_columns_of_forward(rows: Tensor, new: Tensor) -> Tensor:
        """Return rows of tokens, [B, T, ...], in the columns of the forward, [B, columns, ...]; 0 for padding."""
        if bool(new.all()):
            return rows
        columns = rows.new_zeros(*new.shape, *rows.shape[2:])
        real = torch.arange(rows.shape[1], device="cpu") < new.sum(1, keepdim=True)
        columns[new.to(rows.device)] = rows[real.to(rows.device)]
        return columns

    def end_turn(self) -> bool:
        """End the turn of a forward; return whether all its layers have attended and its hidden states were gathered.

        The tokens of a forward that failed before its layers have all attended are forgotten.
        """
        turn, new, self._turn, self._new, self._layer, self.shard = self._turn, self._new, None, None, None, None
        self.marked = None
        if self.states is not None:
            self.states.end()
        if self._kv is None or turn is None or new is None:
            return False
        # The last layers may be recurrent ones.
        self.in_forward = self._attended < len(self._windows) or (self.states is not None and not self._is_whole)
        if self.in_forward:
            self._undo(turn)
        else:
            self._seen, self._in_groups = torch.cat([self._seen, new], 1), self._ending_in_groups
        return self._is_whole and not self.in_forward

    # ---------------------------------------------------------------------------------------------- between forwards

    def activate_past_recording(self) -> None:
        """Have layers with windows keep more tokens than these need, so that `crop` can cut off rejected drafts.

        transformers calls this before assisted generation. Nothing changes once the cache has had a forward.
        """
        if self._kv is None:
            self._options = {**self._options, "rewind": max(_DRAFT, self._options.get("rewind", 0))}

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of each row, padding included; nothing for 0.

        Raises ValueError for numbers above 0, and for models with recurrent layers.
        """
        if self.states is not None and tokens_to_remove:
            raise ValueError(
                f"crop({tokens_to_remove}) is not possible: the states of recurrent layers cannot go back; keep a "
                "copy.deepcopy(cache) of the earlier state"
            )
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}) is not valid; use -n to forget the last n tokens")
        if self._kv is not None and tokens_to_remove:
            self._seen = self._seen[:, : int(tokens_to_remove)]
            self._kv.truncate(self._seen.sum(1).tolist())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the batch rows, for beam search: the new row `i` goes on from row `beam_idx[i]`, int64 [rows]."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row `repeats` times, the copies side by side: rows a, b become a, a, b, b."""
        self._select([row for row in range(len(self.lengths)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the batch rows with these numbers, in this order; indices is int64 [rows]."""
        self._select(torch.arange(len(self.lengths), device="cpu")[indices.cpu()].tolist())

    def finish(self) -> None:
        """Tell all ranks that no forward of this cache follows for now, so that none waits for one; collective.

        Raises ValueError on every rank if a rank begins a forward instead.
        """
        if self._kv is not None:
            self._kv.finish()

    def __deepcopy__(self, memo: Any) -> RingCache:
        """Return a copy that goes on by itself, for several answers to one prompt; for every rank to call."""
        copy = RingCache(self.cp, **self._options)
        if self._kv is not None:
            copy._kv, copy._windows, copy._seen = self._kv.fork(), self._windows, self._seen.clone()
            copy._in_groups, copy._indexed = self._in_groups, self._indexed
            copy._set_states(None if self.states is None else self.states.fork())
        return copy

    def _undo(self, turn: Turn) -> None:
        """Forget a turn's tokens in all layers; forget everything if a layer's window has dropped earlier tokens."""
        assert self._kv is not None
        try:
            if self.states is not None:
                raise ValueError("states of layers before the one that failed are those after the turn")
            self._kv.truncate(turn.starts)
        except ValueError:
            self._kv, self._seen = None, self._seen[:, :0]

    def _select(self, rows: Sequence[int]) -> None:
        if self._kv is None or list(rows) == list(range(len(self.lengths))):
            return
        self._sent = self.bytes_sent
        self._in_groups = frozenset(number for number, row in enumerate(rows) if row in self._in_groups)
        self._kv, self._seen = self._kv.fork(rows), self._seen[torch.tensor(rows, device="cpu")]
        if self.states is not None:
            self.states.select(rows)

    def _set_states(self, states: LayerStates | None) -> None:
        """Set the states, which transformers finds in `layers`."""
        self.states = states
        self.layers = [] if states is None else states.layers


def _reach(mask: Mask) -> int | None:
    """Return how many tokens before itself a token attends to at most; None if that is not known."""
    if isinstance(mask, SlidingWindow):
        return mask.left
    if isinstance(mask, Both):
        reaches = [reach for part in (mask.one, mask.other) if (reach := _reach(part)) is not None]
        return min(reaches, default=None)
    if isinstance(mask, PerRow):
        reaches = [reach for part in mask.masks if (reach := _reach(part)) is not None]
        return max(reaches) if len(reaches) == len(mask.masks) else None
    if isinstance(mask, BidirectionalSpans) and mask.left is not None and mask.spans:
        ends = mask.spans if mask.groups is None else ((mask.spans[0][0], mask.spans[-1][1]),)
        return max(mask.left, *(stop - start - 1 for start, stop in ends))
    return None


def ring_cache_of(values: Iterable[Any]) -> RingCache | None:
    """Return the `RingCache` among the values of a forward's arguments; None if there is none."""
    return next((value for value in values if isinstance(value, RingCache)), None)


def tell(cp: ContextParallel, error: Exception) -> None:
    """Report an error of this rank to all ranks, and raise it as ValueError; collective.

    The other ranks raise ValueError where they next compare values on the ring `cp`.
    """
    try:
        cp.agree({}, error_text(error), "tokens for a cache")
    except ValueError as told:
        raise told from error
