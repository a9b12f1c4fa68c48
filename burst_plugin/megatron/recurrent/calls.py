"""A call of a mixer: which rank holds which tokens, from the layer that Megatron calls to the functions inside.

    layer(attention_mask, packed_seq_params)
        mixer    ->  `MixerOnRing.read`  the ring, layout and documents of this call
            causal_conv1d_fn, mamba_chunk_scan_combined, ...
                 ->  `call_in_progress`  this call, for `burst_plugin.recurrent`

Each thread has a call of its own, so that layers that are recomputed in a backward pass have theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from torch import Tensor

from burst_plugin import recurrent
from burst_plugin.context import ContextParallel
from burst_plugin.megatron.layers.call_masks import MaskArguments, MaskReader
from burst_plugin.megatron.registry import Registry
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.mask import Mask


class MixerCall(NamedTuple):
    """The call of a mixer, such as Mamba-2, on a ring: what functions inside the mixer have to know of its tokens.

    cp: the ring. mask: causal, inside the documents of the batch. tokens: how ranks hold the tokens; None for the
    layout of the ring. tag: a name for the call that is the same on all ranks.
    """

    cp: ContextParallel
    mask: Mask
    tokens: Tokens | None
    tag: tuple[object, ...]

    def place(self, what: str) -> recurrent.Placement:
        """Return the `Placement` of this rank's tokens for one recurrent operation in the mixer, such as its scan.

        what: the name of the operation, the same on all ranks; it becomes part of the placement's tag.
        """
        self.cp.rank_state.state_calls += 1
        return recurrent.Placement(self.cp, self.mask, self.tokens, (*self.tag, what))


_call: ContextVar[MixerCall | None] = ContextVar("burst_plugin_mixer_call", default=None)
_mask: ContextVar[Any] = ContextVar("burst_plugin_mask_of_layer", default=None)


def call_in_progress() -> MixerCall | None:
    """Return the call of the mixer that is running in this thread; None if it runs on whole sequences."""
    return _call.get()


@contextmanager
def computing(call: MixerCall) -> Iterator[None]:
    """Make `call_in_progress` return `call` in this context, for functions inside a mixer."""
    before = _call.set(call)
    try:
        yield
    finally:
        _call.reset(before)


def mask_of_layer() -> Any:
    """Return the attention mask of the layer around the mixer that is running; Megatron does not pass it to mixers.

    None outside of `with_mask`.
    """
    return _mask.get()


@contextmanager
def with_mask(attention_mask: Any) -> Iterator[None]:
    """Make `mask_of_layer` return `attention_mask` in this context, while a layer runs its mixer."""
    before = _mask.set(attention_mask)
    try:
        yield
    finally:
        _mask.reset(before)


class MixerOnRing:
    """The connection of a mixer that carries a state to its ring, which makes a `MixerCall` of each of its calls.

    Args:
        registry: the rings.
        config: the TransformerConfig of the mixer.
        layer_number: Megatron's number of its layer; None counts as 1.
        groups: the ProcessGroupCollection that Megatron built the mixer with. It is kept only if its context-parallel
            group is not the global one, which is looked up in each call.
    """

    def __init__(self, registry: Registry, config: Any, layer_number: int | None, groups: Any) -> None:
        usual = parallel_state.get_context_parallel_group(check_initialized=False)
        self._registry, self._config, self._number = registry, config, layer_number or 1
        self._groups = groups if getattr(groups, "cp", None) is not usual else None
        self._tp_size = groups.tp.size() if config.sequence_parallel else 1
        self._masks = MaskReader(None, registry)
        if self._groups is not None:
            registry.context(config, self._groups)  # now, since messages of a pipeline are in flight later

    def read(self, hidden_states: Tensor, attention_mask: Any, packed_seq_params: Any) -> MixerCall:
        """Return the `MixerCall` for one call of the mixer on hidden states.

        Of `hidden_states`, [S/CP, B, H], or [S/CP/TP, B, H] in sequence parallelism, it reads the shape alone.
        `attention_mask` and `packed_seq_params` are the mixer's or its layer's, or None; a mask may have to be
        compared over ranks, which is collective. Raises ValueError for masks and packed sequences that do not fit, or
        are not causal.
        """
        registry = self._registry
        cp = registry.context(self._config, self._groups, packed_seq_params)
        shape = (hidden_states.shape[1], hidden_states.shape[0] * self._tp_size)
        tokens = torch.empty(shape, dtype=hidden_states.dtype, device="meta")
        allowed = self._masks.read(
            MaskArguments("causal", attention_mask, None, packed_seq_params), cp, tokens, tokens
        )
        tag = registry.identity.of_call(cp, self, self._number, own_group=False)
        return MixerCall(cp, allowed.mask, None if allowed.tokens is None else allowed.tokens[0], tag)
