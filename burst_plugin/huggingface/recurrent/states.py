"""The states of a model's recurrent layers in a `RingCache`: all of them on every rank, after every turn.

    a turn of one token     every rank computes it, by the code of transformers, which finds its states here
    a turn of more tokens   ranks compute consecutive tokens of it, `inference.columns`; layers get the states that
                            rows had before the turn from here, and leave those after it

transformers keeps states in layers of its `DynamicCache`, which are here; a few families have states of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from burst_plugin.context import ContextParallel
from burst_plugin.inference import Turn
from burst_plugin.inference.columns import Columns

RWKV = "rwkv"
XLSTM = "xlstm"


class LayerStates:
    """The states of a model's recurrent layers in a `RingCache`, equal on every rank.

    layers: the layers of a `DynamicCache` of transformers, which hold the states of most families.
    takes_single: whether layers compute a turn of one token per row by the code of transformers, all of it on every
        rank. False for RWKV, whose code mixes up batch rows then.
    columns: which new tokens this rank computes in the turn in progress: equally many columns of a table in which all
        rows end together. None if the code of transformers computes all tokens on every rank.
    own: the states of families that do not keep them in `layers`, by name: nested tensors [B, ...].
    """

    def __init__(self, layers: Sequence[Any], takes_single: bool = True) -> None:
        self.layers, self.takes_single = list(layers), takes_single
        self.columns: Columns | None = None
        self.own: dict[Hashable, Any] = {}
        self._scans: Iterator[Tensor] = iter(())
        self._shifts = 0

    def begin(self, cp: ContextParallel, turn: Turn) -> Columns | None:
        """Begin a turn of new tokens, and return which columns of them this rank computes.

        Rows of new tokens end together in the last column, and every rank has equally many columns. Returns None for
        a turn of one token per row that every rank computes by the code of transformers. If `takes_single` is False,
        every rank gets all columns of that turn instead.
        """
        columns, single = None, max(turn.lengths) == 1
        if single and not self.takes_single:
            columns = Columns.of_one_rank(turn)
        elif not single:
            columns = Columns(cp, turn)
        self.columns, self._scans, self._shifts = columns, iter(()), 0
        return columns

    def end(self) -> None:
        """End the turn in progress."""
        self.columns, self._scans = None, iter(())

    def fork(self) -> LayerStates:
        """Return a copy with clones of all states, which later turns change independently."""
        copy = LayerStates(deepcopy(self.layers), self.takes_single)
        copy.own = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, self.own)
        return copy

    @property
    def bytes(self) -> int:
        """Return the number of bytes of all states, which every rank holds."""
        tensors: list[Tensor] = []
        tree_map(lambda x: tensors.append(x) if isinstance(x, Tensor) else None, (self.own, *self._stored()))
        return sum(x.numel() * x.element_size() for x in tensors)

    def with_conv_state(self, x: Tensor, layer: int, state: int, width: int) -> Tensor:
        """Return this rank's columns x [B, C, n] with the `width` tokens before them, [B, C, width + n]; collective.

        Stores each row's last `width` tokens as the new state of the convolution.

        layer, state: the number of the layer, and of the convolution in it.
        """
        assert self.columns is not None
        kept = self.layers[layer]
        before = kept.conv_states[state] if kept.is_conv_states_initialized[state] else None
        extended, last = self.columns.with_tokens_before(
            x.transpose(1, 2), width, None if before is None else before.transpose(1, 2)
        )
        kept.update_conv_state(last.transpose(1, 2).contiguous(), state_idx=state, conv_kernel_size=width)
        entering = kept.recurrent_states[state] if kept.is_recurrent_states_initialized[state] else None
        self._scans = (
            iter(()) if entering is None else iter(entering.unbind(1) if entering.dim() == 4 else [entering])
        )
        return extended.transpose(1, 2)

    def entering_scan(self) -> list[Tensor]:
        """Return a list with the state that a layer's next scan starts from, or [] in the first turn.

        For families whose scans take no state as an argument. After the layer's convolution there is one scan, or one
        for each head, in order.
        """
        return [state.clone() for state in (next(self._scans, None),) if state is not None]

    def with_tokens_before(self, x: Tensor, width: int, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return this rank's columns with `width` earlier tokens in front, and rows' last `width` tokens; collective.

        x: [B, n, ...], this rank's columns. before: the last tokens of rows before the turn, [B, width, ...]; None
            for zeros.
        Returns [B, width + n, ...] and [B, width, ...], the latter equal on every rank.
        """
        assert self.columns is not None
        return self.columns.with_tokens_before(x, width, before)

    # RWKV has five tensors [B, E, layers]: the last token of feed-forward and of attention, and three of averages.
    # Its layers are called in their order, attention before feed-forward.

    def shifted(self, x: Tensor) -> Tensor:
        """Return the token before each of this rank's columns x [B, n, E], for RWKV's layers; collective.

        Called twice for each layer of a turn, for attention and then for feed-forward; stores each row's last token
        for both.
        """
        layer, is_second = divmod(self._shifts, 2)
        self._shifts += 1
        kept = self.own[RWKV][0 if is_second else 1][:, :, layer]
        extended, last = self.with_tokens_before(x, 1, kept.unsqueeze(1))
        kept.copy_(last[:, 0])
        return extended[:, :-1]

    def entering_averages(self) -> list[Tensor]:
        """Return the state before the turn of an RWKV layer's averages of values (WKV).

        It is a list of numerator, denominator and maximum, [B, E] each.
        """
        layer = self._shifts // 2
        return [x[:, :, layer] for x in self.own[RWKV][2:]]

    def keep_averages(self, last: Sequence[Tensor]) -> None:
        """Store the state after the turn of an RWKV layer's averages of values (WKV).

        last: numerator, denominator and maximum, [B, E] each.
        """
        layer = self._shifts // 2
        for kept, x in zip(self.own[RWKV][2:], last, strict=True):
            kept[:, :, layer] = x

    def select(self, rows: Sequence[int]) -> None:
        """Replace the batch rows, for beam search: the new row `i` gets the states of row `rows[i]`."""

        def chosen(x: Any) -> Any:
            return x.index_select(0, torch.tensor(rows, device=x.device)) if isinstance(x, Tensor) else x

        self.own = tree_map(chosen, self.own)
        for states in self._stored():
            states.update(tree_map(chosen, states))

    def _stored(self) -> Iterator[dict[int, Any]]:
        """Yield the states of transformers' layers, by number."""
        for layer in self.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                yield layer.conv_states
                yield layer.recurrent_states


def states_of(config: Any) -> LayerStates:
    """Return the `LayerStates` of a model with recurrent layers, given its configuration, before any token."""
    return LayerStates(DynamicCache(config=config).layers, takes_single=config.model_type != RWKV)


def attending_layers(config: Any) -> list[int]:
    """Return the numbers of the layers that attend, given the configuration of a model with recurrent layers."""
    kinds = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None) or ()
    return [
        number
        for number, layer in enumerate(DynamicCache(config=config).layers)
        if isinstance(layer, CacheLayerMixin) and kinds[number : number + 1] != ["recurrent"]
    ]


# ------------------------------------------------------------------------------------- states in modules, arguments


def own_arguments(states: LayerStates, config: Any, batch: int, like: Tensor) -> dict[str, Any]:
    """Return further keyword arguments for a forward of a family that does not keep its states in a `DynamicCache`.

    In the first turn it also stores states of no tokens in `states.own`.

    config: the configuration of the model. batch: the number of batch rows.
    like: a tensor of the type and on the device of hidden states.
    """
    wide = torch.promote_types(like.dtype, torch.float32)
    if config.model_type == XLSTM and XLSTM not in states.own:
        factors = config.qk_dim_factor, config.v_dim_factor  # as layers have it: the configuration rounds up
        qk_dim, v_dim = (int(config.hidden_size * factor) // config.num_heads for factor in factors)
        shapes = [(batch, config.num_heads, *sizes) for sizes in ((qk_dim, v_dim), (qk_dim,), (1,))]
        states.own[XLSTM] = [
            tuple(like.new_zeros(shape, dtype=wide) for shape in shapes) for _ in range(config.num_hidden_layers)
        ]
    if config.model_type == RWKV and RWKV not in states.own:
        shape = (batch, config.hidden_size, config.num_hidden_layers)
        states.own[RWKV] = [like.new_zeros(shape, dtype=dtype) for dtype in (like.dtype, like.dtype, *[wide] * 3)]
        states.own[RWKV][4] -= 1e30
    # Else these would insist on caches of their own, or return states.
    return {"use_cache": False} if config.model_type in ("minimax", XLSTM, RWKV) else {}


def put_states(states: LayerStates, holders: Iterable[tuple[torch.nn.Module, str]]) -> None:
    """Set the states of layers that look for them in their own modules, before a turn.

    holders: the modules, each with the name of the attribute that it keeps its state in.
    """
    for number, (module, name) in enumerate(holders):
        setattr(module, name, states.own.get(("module", number)))


def take_states(states: LayerStates, holders: Iterable[tuple[torch.nn.Module, str]]) -> None:
    """Move the states of layers from their own modules back to `states`, after a turn; set None in the modules.

    holders: the modules, each with the name of the attribute that it keeps its state in.
    """
    for number, (module, name) in enumerate(holders):
        states.own["module", number] = getattr(module, name)
        setattr(module, name, None)
