"""Megatron's static inference on a ring: `StaticInferenceContext` with context parallelism.

Every context-parallel rank gives the model the same new tokens. Of a prompt a rank computes every n-th token, n being
the number of ranks; a few tokens, as in decoding, are computed by every rank. Keys and values stay where they were
computed, in a `KVCache` that goes with the context: Megatron's own buffers, of the whole length in every layer, are not
made. Inside the model there is no inference: layers run as in evaluation, on a rank's tokens, rotated by their
positions, and their core attention asks the cache.

    rank 0  tokens 0 2 4 6   layers   hidden of 0 2 4 6  \\
                                                          all ranks: hidden of 7, logits, the same token sampled
    rank 1  tokens 1 3 5 7   layers   hidden of 1 3 5 7  /
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.inference.model_inference_wrappers.abstract_model_inference_wrapper import (
    AbstractModelInferenceWrapper,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from burst_plugin.context import ContextParallel
from burst_plugin.frameworks.rules import Rule, broken_rules, off, one_of
from burst_plugin.frameworks.wrapping import wrap
from burst_plugin.inference import KVCache, Turn
from burst_plugin.megatron.config import asks_for_burst, is_hybrid
from burst_plugin.megatron.core_attention import BurstCoreAttention
from burst_plugin.megatron.registry import Registry

__all__ = ["caches_of", "follow_inference", "refuse_in_layer", "serve_once"]

_CACHES = "_burst_plugin_caches"  # an attribute of a context: its caches, by the first row of their batch
_SERVER = "megatron.core.inference.text_generation_server.text_generation_server"
_STATIC = "use StaticInferenceContext, which StaticInferenceEngine(legacy=True) takes"
# Arguments of GPTModel.forward that inference needs; any other one has to be None.
_ARGUMENTS = frozenset(
    "self input_ids position_ids attention_mask inference_context inference_params runtime_gather_output".split()  # noqa: SIM905
)

# Fields of TransformerConfig that training may have, and inference may not.
_REFUSED: Mapping[str, Rule] = MappingProxyType(
    {
        "sequence_parallel": Rule(off, "Megatron's static inference has it in experts only; switch it off"),
        "expert_model_parallel_size": Rule(
            lambda size: size in (None, 1), "ranks have unequal numbers of a prompt's tokens; use 1"
        ),
        "moe_expert_capacity_factor": Rule(off, "it drops tokens by how many a rank has; use None"),
        "mtp_num_layers": Rule(off, "tokens are predicted one by one; leave these layers out"),
        "fp8": Rule(off, "its layers want numbers of tokens that divide; use bf16"),
        "fp4": Rule(off, "its layers want numbers of tokens that divide; use bf16"),
        "virtual_pipeline_model_parallel_size": Rule(one_of(None), "Megatron's inference has none; use None"),
    }
)


class _Pass(NamedTuple):
    """A forward pass of a model that is under way. only_last: whether logits are those of the last token."""

    cache: KVCache
    turn: Turn
    only_last: bool


def follow_inference(registry: Registry) -> str:
    """Let GPT models with a `StaticInferenceContext` keep keys and values on the ring; return a line that says so."""
    inference = _Inference(registry)
    wrap(GPTModel, "forward", inference.forward)
    wrap(GPTModel, "_postprocess", inference.postprocess)
    wrap(AbstractModelInferenceWrapper, "_allocate_recv_buffer", inference.receive)
    wrap(StaticInferenceContext, "swap_key_value_dict", _swap)
    before_0_18 = hasattr(DynamicInferenceContext, "from_config")
    wrap(DynamicInferenceContext, "from_config" if before_0_18 else "__init__", _refuse_dynamic)
    return "GPT models with a StaticInferenceContext keep keys and values on the ring"


def caches_of(context: Any) -> list[KVCache]:
    """Return the caches of a `StaticInferenceContext`: one, or one for each microbatch of a pipeline."""
    return list(vars(context).get(_CACHES, {}).values())


def serve_once() -> None:
    """Let Megatron's text generation server run on rank 0 alone, if it has been imported.

    Its script starts one on every rank with the first tensor-parallel shard of the first pipeline stage: with context
    parallelism on several, which would never hear of rank 0's requests.
    """
    module = sys.modules.get(_SERVER)
    if module is None or hasattr(module.MegatronServer.run, "__wrapped__"):
        return

    def run(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if dist.get_rank() == 0:
            original(*args, **kwargs)

    wrap(module.MegatronServer, "run", run)


def refuse_in_layer(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ValueError for a layer that is to keep keys and values itself: it would see those of one rank only."""
    if kwargs.get("inference_context") is not None or kwargs.get("inference_params") is not None:
        raise ValueError(
            f"inference with context_parallel_size={layer.config.context_parallel_size} and cp_comm_type='burst' is "
            "for GPTModel, which gives its layers no inference_context; use context_parallel_size=1 for other models"
        )


class _Inference:
    """Functions in place of Megatron's; see the module."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._pass: _Pass | None = None

    def forward(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `GPTModel.forward` of all new tokens [B, T] on this rank's share of them."""
        given = inspect.signature(original).bind(model, *args, **kwargs)
        context = given.arguments.get("inference_context")
        context = given.arguments.get("inference_params") if context is None else context
        if context is None or not asks_for_burst(model.config):
            return original(model, *args, **kwargs)
        _check(model, context, given.arguments)
        tokens, positions = given.arguments["input_ids"], given.arguments["position_ids"]
        cores = _core_attentions(model)
        cp = self._registry.context(model.config, getattr(model, "pg_collection", None))
        cache = _cache_of(context, cp, len(cores), len(tokens))
        length = tokens.shape[1]
        turn = cache.begin([length] * len(tokens), ids=tokens, replicated=_is_replicated(length, cp.ranks))
        given.arguments.update(
            input_ids=turn.take(tokens),
            position_ids=None if positions is None else turn.take(positions.expand(len(tokens), -1)),
            attention_mask=None,
            inference_context=None,
            inference_params=None,
        )
        only_last = getattr(context, "config", context).materialize_only_last_token_logits
        with self._under_way(_Pass(cache, turn, only_last), cores):
            return original(*given.args, **given.kwargs)

    @contextmanager
    def _under_way(self, now: _Pass, cores: Sequence[BurstCoreAttention]) -> Iterator[None]:
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
        """Do what `GPTModel._postprocess` does, on hidden states [T or 1, B, H] of all ranks."""
        now = self._pass
        if now is None or not model.post_process:
            return original(model, *args, **kwargs)
        given = inspect.signature(original).bind(model, *args, **kwargs)
        hidden = now.cache.gather(given.arguments["hidden_states"].transpose(0, 1), last=now.only_last)
        given.arguments["hidden_states"] = hidden.unsqueeze(0) if now.only_last else hidden.transpose(0, 1)
        return original(*given.args, **given.kwargs)

    def receive(self, original: Callable[..., Tensor], wrapper: Any, batch_size: int, seq_len: int) -> Tensor:
        """Make room for hidden states of the stage before, which sends those of this rank's tokens."""
        model = unwrap_model(wrapper.model)
        if asks_for_burst(model.config):
            cp = self._registry.context(model.config, getattr(model, "pg_collection", None))
            start = wrapper.inference_context.sequence_len_offset
            replicated = _is_replicated(seq_len, cp.ranks)
            seq_len = Turn(0, (start,), (start + seq_len,), cp.rank, cp.ranks, replicated).size
        return original(wrapper, batch_size, seq_len)


def _is_replicated(tokens: int, ranks: int) -> bool:
    """Return whether every rank computes all new tokens of a row: sharing them would not make it any faster."""
    return tokens <= 2 * ranks


def _cache_of(context: Any, cp: ContextParallel, layers: int, rows: int) -> KVCache:
    """Return the cache of these rows, with as many tokens as the context says. Raise ValueError if it has fewer."""
    caches: dict[int, KVCache] = vars(context).setdefault(_CACHES, {})
    first_row, offset = context.batch_size_offset, context.sequence_len_offset
    if offset == 0:
        if first_row == 0:
            caches.clear()
        caches[first_row] = KVCache(cp, layers)
        return caches[first_row]
    cache = caches.get(first_row)
    held = cache.lengths if cache is not None else ()
    if cache is None or len(held) != rows or min(held) < offset:
        raise ValueError(
            f"inference_context has sequence_len_offset={offset} for {rows} batch rows from {first_row} on, but keys "
            f"and values of rows of {list(held)} tokens are kept; begin at 0"
        )
    if min(held) > offset:
        cache.truncate([offset] * rows)
    return cache


def _core_attentions(model: Any) -> list[BurstCoreAttention]:
    """Return the core attention of every layer. Raise ValueError for a layer that is not on the ring."""
    found = []
    for layer in model.decoder.layers:
        core = getattr(layer.self_attention, "core_attention", None)
        if isinstance(core, BurstCoreAttention):
            found.append(core)
        elif not isinstance(layer.self_attention, IdentityOp):
            raise ValueError(
                f"layer {layer.layer_number} is not on the ring, as inference with context_parallel_size="
                f"{model.config.context_parallel_size} needs it: use cp_comm_type='burst' in all layers"
            )
    return found


def _swap(original: Callable[..., None], context: Any, batch_idx: Any) -> None:
    """Do what `StaticInferenceContext.swap_key_value_dict` does: row n becomes a copy of row `batch_idx[n]`."""
    caches: dict[int, KVCache] = vars(context).get(_CACHES, {})
    if not caches:
        original(context, batch_idx)
        return
    rows = [int(row) for row in batch_idx]
    for first_row, cache in caches.items():
        caches[first_row] = cache.fork(rows)


# ------------------------------------------------------------------------------------------------------- refusing


def _refuse_dynamic(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a `DynamicInferenceContext`; raise ValueError for a model on the ring, so that engines go on without."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    config, model = given.get("model_config"), given.get("model")
    config = get_model_config(model) if config is None and model is not None else config
    if config is not None and asks_for_burst(config):
        raise ValueError(
            f"DynamicInferenceContext with context_parallel_size={config.context_parallel_size} and "
            f"cp_comm_type='burst' is not supported: {_STATIC}"
        )
    return original(*args, **kwargs)


def _check(model: Any, context: Any, given: Mapping[str, Any]) -> None:
    """Raise ValueError naming all that inference on a ring cannot honour, each with what to write instead."""
    config = model.config
    reasons = []
    if not isinstance(context, StaticInferenceContext):
        reasons.append(f"{type(context).__name__} is not supported: {_STATIC}")
    if model.training:
        reasons.append("the model is in training mode: call model.eval()")
    values = {name: getattr(config, name) for name in _REFUSED if hasattr(config, name)}
    reasons += [f"{name}={value!r} is not supported: {instead}" for name, value, instead in broken_rules(_REFUSED, values)]
    if is_hybrid(config):
        reasons.append("hybrid_context_parallel is not supported: use context_parallel_size")
    if config.multi_latent_attention and config.apply_rope_fusion:
        reasons.append("apply_rope_fusion with multi-latent attention is not supported: use --no-rope-fusion")
    if model.position_embedding_type == "mrope":
        reasons.append("position_embedding_type='mrope' is not supported: use context_parallel_size=1")
    reasons += [
        f"{name} is not supported: leave it out"
        for name, value in given.items()
        if name not in _ARGUMENTS and value is not None
    ]
    if not reasons:
        reasons = _tokens_that_do_not_fit(context, given)
    if reasons:
        raise ValueError(
            f"inference with context_parallel_size={config.context_parallel_size} and cp_comm_type='burst' cannot go "
            "on: " + "; ".join(reasons)
        )


def _tokens_that_do_not_fit(context: Any, given: Mapping[str, Any]) -> list[str]:
    """Return what does not fit of new tokens: more than the context has room for, or a mask that is not causal."""
    rows, length = given["input_ids"].shape
    start, reasons = context.sequence_len_offset, []
    if start + length > context.max_sequence_length:
        reasons.append(
            f"{start} tokens and {length} new ones are more than max_sequence_length={context.max_sequence_length} of "
            "the inference context: make it larger"
        )
    if context.batch_size_offset + rows > context.max_batch_size:
        reasons.append(
            f"{context.batch_size_offset + rows} batch rows are more than max_batch_size={context.max_batch_size} of "
            "the inference context: make it larger"
        )
    mask = given.get("attention_mask")
    if mask is not None:
        keys = torch.arange(mask.shape[-1], device=mask.device)
        causal = keys > torch.arange(start, start + mask.shape[-2], device=mask.device).unsqueeze(1)
        if not bool((mask.bool() == causal).all()):
            reasons.append(f"attention_mask {list(mask.shape)} is not causal: leave it out, and pad rows at their ends")
    return reasons
