"""Run modules of a model in chunks: dense MLPs and norms in chunks of tokens, attention in chunks of heads."""

from __future__ import annotations

import inspect
import re

import torch
from torch import Tensor

from burst_plugin.activations.chunked_mlp import ChunkedForward, chunked_mlp
from burst_plugin.activations.recomputed_chunks import wide_dtype
from burst_plugin.activations.replaced_forward import ReplacedForward, in_place_of, restore_forward
from burst_plugin.activations.snapshot import leave_out_hooks
from burst_plugin.huggingface.adapters import refuse_in_chunks
from burst_plugin.huggingface.chunked_attention import ChunkedAttention, attention_modules
from burst_plugin.huggingface.recurrent import is_mixer
from burst_plugin.huggingface.text_only import named_text_modules, text_modules
from burst_plugin.huggingface.walks import modules_in
from burst_plugin.strategy import Strategy

_MLPS = ("mlp", "feed_forward", "ffn", "ff")  # names of attributes of layers
_EXPERTS = ("experts", "router")  # of attributes of MLPs with experts
# Classes that normalize the last dimension in single operations, as long as they do so in code of transformers, or of
# a model that it loaded. Elsewhere, as in Liger, they are one kernel, which keeps nothing but its input.
_NORMS = re.compile(r"\w*RMSNorm|Cohere\w*LayerNorm")
_PLAIN_CODE = ("transformers", "transformers_modules")
leave_out_hooks("deepspeed.")  # whose profiler has hooks on one rank, and removes them before the backward pass
_CHUNKS = "_burst_plugin_chunks"  # of every module of a model that runs in part in chunks: of tokens, of heads


def chunk_modules(model: torch.nn.Module, strategy: Strategy, *, is_chosen: bool = False) -> list[torch.nn.Module]:
    """Run modules of `model` in the chunks that `strategy` sets, or at once if it sets none; return chunked modules.

    Args:
        model: a model of transformers.
        strategy: every MLP and norm gets at most `mlp_chunk` tokens at a time, every attention module computes
            `head_chunk` query heads at a time; 0 for all at once.
        is_chosen: whether `mlp_chunk` was chosen by `memory="auto"`. Then modules run at once on fewer tokens than
            that, and so do all of a model whose MLPs cannot be cut.

    Raises:
        ValueError: a model with `mlp_chunk` has experts, an MLP that takes more than one tensor, no MLP, or adapters
            that need whole batches, unless `is_chosen`; a model with `head_chunk` has such adapters, or attention
            that cannot be cut by heads.
    """
    of_tokens, of_heads = chunks = strategy.mlp_chunk, strategy.head_chunk
    if getattr(model, _CHUNKS, (0, 0)) == chunks:
        return [module for module in modules_in(model) if _runs_in_chunks(module)]
    mlps = []
    try:
        mlps = _dense_mlps(model) if of_tokens else []  # which raises before anything is changed
    except ValueError:
        if not is_chosen:
            raise
        of_tokens = 0
    if of_heads:
        refuse_in_chunks(model, "head_chunk")
    attention = attention_modules(model, of_heads) if of_heads else []
    restore_modules(model)
    norms = [module for module in text_modules(model) if _is_plain_norm(module)] if of_tokens else []
    for mlp in mlps:
        mlp.forward = ChunkedForward(mlp, of_tokens)
        mlp.forward.few_at_once = is_chosen
    for norm in norms:
        norm.forward = _ChunkedNorm(norm, of_tokens)
        norm.forward.few_at_once = is_chosen
    for module in attention:
        module.forward = ChunkedAttention(module, of_heads)
    for module in model.modules() if any(chunks) else ():
        setattr(module, _CHUNKS, chunks)
    return mlps + norms + attention


def restore_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Give modules of `model` that run in chunks their own `forward` back; return these modules."""
    restored = []
    for module in model.modules():
        if restore_forward(module):
            restored.append(module)
        vars(module).pop(_CHUNKS, None)
    return restored


def _runs_in_chunks(module: torch.nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), ReplacedForward)


def mlps_can_be_cut(model: torch.nn.Module) -> bool:
    """Return whether the MLPs of a model can run in chunks of tokens, so that a chosen `mlp_chunk` has effect."""
    try:
        _dense_mlps(model)
    except ValueError:
        return False
    return True


def _dense_mlps(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the MLPs of layers, each once. Raise ValueError as `chunk_modules` says."""
    refuse_in_chunks(model, "mlp_chunk")
    name = type(model).__name__
    with_experts = {
        type(module).__name__
        for module in text_modules(model)
        if any(child in _EXPERTS for child, _ in module.named_children())
    }
    if with_experts:
        raise ValueError(
            f"{name} has experts ({', '.join(sorted(with_experts))}), which mlp_chunk does not cut into chunks of "
            "tokens; use mlp_chunk=0"
        )
    mlps = {
        id(module): module
        for path, module in named_text_modules(model)
        if path.rpartition(".")[2] in _MLPS and any(True for _ in module.parameters()) and not is_mixer(module)
    }
    others = sorted({type(mlp).__name__ for mlp in mlps.values() if _required_arguments(mlp) != 1})
    if others or not mlps:
        found = f"{', '.join(others)} takes more than its hidden states" if others else f"none is a {_listed()}"
        raise ValueError(
            f"{name} has no MLPs that mlp_chunk can cut into chunks of tokens: {found}; use mlp_chunk=0, or call "
            "burst_plugin.activations.chunked_mlp.chunked_mlp in it"
        )
    return list(mlps.values())


def _listed() -> str:
    return f"module with the name {', '.join(_MLPS[:-1])} or {_MLPS[-1]}"


def _required_arguments(module: torch.nn.Module) -> int:
    """Return how many arguments a module has to be called with."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    arguments = inspect.signature(module.forward).parameters.values()
    return sum(each.kind in kinds and each.default is inspect.Parameter.empty for each in arguments)


def _is_plain_norm(module: torch.nn.Module) -> bool:
    """Return whether a module is a norm in single operations that takes one tensor, and so no gate."""
    written_in = str(getattr(module.forward, "__module__", None))  # also of what has been put in its place
    return (
        _NORMS.fullmatch(type(module).__name__) is not None
        and written_in.partition(".")[0] in _PLAIN_CODE
        and next(module.children(), None) is None
        and len(inspect.signature(module.forward).parameters) == 1
    )


class _ChunkedNorm(ReplacedForward):
    """Takes the place of the `forward` of a norm, also of one of q or k, whose tokens have a row for each head.

    few_at_once: whether a call with no more tokens than a chunk runs as it would without chunks.
    """

    few_at_once = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Run the module's own `forward` in chunks of tokens: of [B, S, H], [B, S, heads, D], or [B, heads, S, D].

        In models [B, heads, S, D] is a view of [B, S, heads, D].
        """
        x = hidden_states
        heads_first = x.dim() == 4 and x.stride(1) < x.stride(2)
        x = x.transpose(1, 2) if heads_first else x
        if self.few_at_once and x.shape[:2].numel() <= self.chunk:
            out: Tensor = self.earlier(hidden_states)
            return out
        wide = {name: each.to(wide_dtype(each.dtype)) for name, each in self.module.named_parameters()}

        def run(piece: Tensor) -> Tensor:
            # Recomputation takes weights in float32, also those of 16 bits: otherwise their gradients would be
            # rounded for each chunk, and not once, which makes errors up to 1.5 times as large.
            with in_place_of(self.module, wide if torch.is_grad_enabled() else {}):
                of_piece: Tensor = self.earlier(piece)
            return of_piece

        out = chunked_mlp(run, x, list(wide.values()), chunk=self.chunk, token_dims=max(1, x.dim() - 2))
        return out.transpose(1, 2) if heads_first else out
