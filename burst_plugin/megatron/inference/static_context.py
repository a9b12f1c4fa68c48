"""Megatron's static inference on a ring: `StaticInferenceContext` with context parallelism.

Every context-parallel rank gives the model the same new tokens. Of a prompt a rank computes every n-th token, n being
the number of ranks; a few tokens, as in decoding, are computed by every rank. Keys and values stay where they were
computed, in a `KVCache` that goes with the context; Megatron's own buffers, of the whole length in every layer, are
not made. Inside the model there is no inference: layers run as in evaluation, on a rank's tokens, rotated by their
positions, and their core attention asks the cache.

    rank 0  tokens 0 2 4 6   layers   hidden of 0 2 4 6  \\
                                                          all ranks: hidden of 7, logits, the same token sampled
    rank 1  tokens 1 3 5 7   layers   hidden of 1 3 5 7  /
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.inference.model_inference_wrappers.abstract_model_inference_wrapper import (
    AbstractModelInferenceWrapper,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import unwrap_model
from torch import Tensor

from burst_plugin.context import ContextParallel
from burst_plugin.frameworks.wrapping import bind, wrap
from burst_plugin.inference import KVCache, Turn, are_few
from burst_plugin.megatron.batches.documents import hybrid_model
from burst_plugin.megatron.flags.arguments import parsed_arguments
from burst_plugin.megatron.flags.config import asks_for_burst
from burst_plugin.megatron.inference.checks import (
    check_inference,
    core_attentions,
    refuse_dynamic,
    refuse_hybrid,
)
from burst_plugin.megatron.layers.core_attention import BurstCoreAttention
from burst_plugin.megatron.registry import Registry

_CACHE = "_burst_plugin_cache"  # an attribute of a context
_IN_MICROBATCHES = "forward_pass_with_pipeline_parallel_large_input_batch"  # of a wrapper, until 0.17
_SERVER = "megatron.core.inference.text_generation_server.text_generation_server"


class _Pass(NamedTuple):
    """A forward pass of a model in progress. only_last: whether it returns logits of the last token only."""

    cache: KVCache
    turn: Turn
    only_last: bool


def hook_inference(registry: Registry) -> str:
    """Have GPT models with a `StaticInferenceContext` keep keys and values on the ring, in a `KVCache`.

    It wraps `GPTModel.forward` and functions of Megatron's inference around it. Dynamic contexts and hybrid models
    are refused on the ring by a ValueError. registry: the rings. Returns a line for the report of `install()`.
    """
    hooks = _InferenceHooks(registry)
    wrap(GPTModel, "forward", hooks.forward)
    wrap(GPTModel, "_postprocess", hooks.postprocess)
    wrap(hybrid_model(), "forward", refuse_hybrid)
    wrap(AbstractModelInferenceWrapper, "_allocate_recv_buffer", hooks.receive)
    if hasattr(AbstractModelInferenceWrapper, _IN_MICROBATCHES):
        wrap(AbstractModelInferenceWrapper, _IN_MICROBATCHES, _in_one_batch)
    wrap(StaticInferenceContext, "swap_key_value_dict", _swap)
    before_0_18 = hasattr(DynamicInferenceContext, "from_config")
    wrap(DynamicInferenceContext, "from_config" if before_0_18 else "__init__", refuse_dynamic)
    return "GPT models with a StaticInferenceContext keep keys and values on the ring"


def cache_of(context: Any) -> KVCache | None:
    """Return the `KVCache` with the keys and values that a `StaticInferenceContext` has on the ring.

    None before the first forward pass of a model with this context.
    """
    return getattr(context, _CACHE, None)


def patch_server() -> None:
    """Patch Megatron's text generation server for context parallelism, if its script has imported it.

    It has to be called after flags are parsed. The script starts a server on every rank with the first
    tensor-parallel shard of the first pipeline stage: with context parallelism on several, which would never hear of
    rank 0's requests. Here rank 0 alone has one. And from 0.17 on the script looks up --inference-max-seq-length by a
    name that no flag has; here the name exists.
    """
    module, args = sys.modules.get(_SERVER), parsed_arguments()
    if module is None or hasattr(module.MegatronServer.run, "__wrapped__"):
        return

    def run(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if dist.get_rank() == 0:
            original(*args, **kwargs)

    wrap(module.MegatronServer, "run", run)
    if hasattr(args, "inference_max_seq_length"):
        vars(args).setdefault("inference_max_sequence_length", args.inference_max_seq_length)


class _InferenceHooks:
    """Functions in place of Megatron's; see the module."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._pass: _Pass | None = None

    def forward(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `GPTModel.forward` of all new tokens [B, T] on this rank's share of them."""
        call = bind(original, model, *args, **kwargs)
        context = call.arguments.get("inference_context")
        context = call.arguments.get("inference_params") if context is None else context
        if context is None or not asks_for_burst(model.config):
            return original(model, *args, **kwargs)
        check_inference(model, context, call.arguments)
        tokens, positions = call.arguments["input_ids"], call.arguments["position_ids"]
        cores = core_attentions(model)
        cp = self._registry.ring_of(model)
        cache = _cache_at(context, cp, len(cores), len(tokens))
        length = tokens.shape[1]
        turn = cache.begin([length] * len(tokens), ids=tokens)
        call.arguments.update(
            input_ids=turn.take(tokens),
            position_ids=None if positions is None else turn.take(positions.expand(len(tokens), -1)),
            attention_mask=None,
            inference_context=None,
            inference_params=None,
        )
        only_last = getattr(context, "config", context).materialize_only_last_token_logits
        with self._in_flight(_Pass(cache, turn, only_last), cores):
            return original(*call.args, **call.kwargs)

    @contextmanager
    def _in_flight(self, now: _Pass, cores: Sequence[BurstCoreAttention]) -> Iterator[None]:
        """Let core attention and rotary embedding follow the turn inside this context."""
        self._pass, self._registry.turn = now, now.turn
        for number, core in enumerate(cores):
            core.attend = partial(now.cache.attend, number)
        try:
            yield
        finally:
            self._pass = self._registry.turn = None
            for core in cores:
                core.attend = None

    def postprocess(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `GPTModel._postprocess` on hidden states [T or 1, B, H] of all ranks."""
        now = self._pass
        if now is None or not model.post_process:
            return original(model, *args, **kwargs)
        call = bind(original, model, *args, **kwargs)
        hidden = now.cache.gather(call.arguments["hidden_states"].transpose(0, 1), last=now.only_last)
        call.arguments["hidden_states"] = hidden.unsqueeze(0) if now.only_last else hidden.transpose(0, 1)
        return original(*call.args, **call.kwargs)

    def receive(self, original: Callable[..., Tensor], wrapper: Any, batch_size: int, seq_len: int) -> Tensor:
        """Make room for the hidden states of this rank's tokens, which the stage before sends."""
        model = unwrap_model(wrapper.model)
        if asks_for_burst(model.config):
            cp = self._registry.ring_of(model)
            start = wrapper.inference_context.sequence_len_offset
            turn = Turn(0, (start,), (start + seq_len,), cp.rank, cp.ranks, are_few(seq_len, cp.ranks))
            seq_len = turn.size
        return original(wrapper, batch_size, seq_len)


def _cache_at(context: Any, cp: ContextParallel, layers: int, rows: int) -> KVCache:
    """Return a context's cache, with as many tokens as the context counts. Raise ValueError if it has fewer."""
    cache, offset = cache_of(context), context.sequence_len_offset
    if offset == 0:
        cache = KVCache(cp, layers)
        setattr(context, _CACHE, cache)
        return cache
    held = cache.lengths if cache is not None else ()
    if cache is None or len(held) != rows or min(held) < offset:
        raise ValueError(
            f"inference_context has sequence_len_offset={offset} for {rows} batch rows, but keys and values of "
            f"rows of {list(held)} tokens are kept; begin at 0"
        )
    if min(held) > offset:
        cache.truncate([offset] * rows)
    return cache


def _in_one_batch(original: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a batch through a pipeline: as a whole if it is on the ring, where a turn is one of all rows."""
    if asks_for_burst(unwrap_model(wrapper.model).config):
        original = type(wrapper).forward_pass_with_pipeline_parallel_small_input_batch
    return original(wrapper, *args, **kwargs)


def _swap(original: Callable[..., None], context: Any, batch_idx: Any) -> None:
    """Make row n a copy of row `batch_idx[n]`, as `StaticInferenceContext.swap_key_value_dict` does."""
    cache = cache_of(context)
    if cache is None:
        original(context, batch_idx)
    else:
        setattr(context, _CACHE, cache.fork([int(row) for row in batch_idx]))
