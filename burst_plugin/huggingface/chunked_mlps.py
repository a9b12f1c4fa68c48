"""Which modules of a model are its dense MLPs; they run in chunks of tokens, or at once again."""

from __future__ import annotations

import inspect

import torch

from burst_plugin.activations.chunked_mlp import ChunkedForward, restore_forward

__all__ = ["chunk_mlps", "restore_mlps"]

_NAMES = ("mlp", "feed_forward", "ffn", "ff")  # of attributes of layers
_EXPERTS = ("experts", "router")  # of attributes of MLPs with experts
_CHUNK = "_burst_plugin_mlp_chunk"  # of every module of a model whose MLPs run in chunks


def chunk_mlps(model: torch.nn.Module, chunk: int) -> list[torch.nn.Module]:
    """Run every MLP of `model` on at most `chunk` tokens at a time, or at once if 0; return those that do.

    Raises ValueError for a model with experts, with an MLP that takes more than one tensor, or without any MLP.
    """
    if getattr(model, _CHUNK, 0) == chunk:
        return [module for module in model.modules() if _runs_in_chunks(module)]
    mlps = _dense_mlps(model) if chunk else []  # which raises before anything is changed
    restore_mlps(model)
    for mlp in mlps:
        mlp.forward = ChunkedForward(mlp, chunk)
    for module in model.modules() if chunk else ():
        setattr(module, _CHUNK, chunk)
    return mlps


def restore_mlps(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Let the MLPs of `model` run at once again; return those that did not."""
    restored = []
    for module in model.modules():
        if restore_forward(module):
            restored.append(module)
        vars(module).pop(_CHUNK, None)
    return restored


def _runs_in_chunks(module: torch.nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), ChunkedForward)


def _dense_mlps(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the MLPs of layers, each once. Raise ValueError as `chunk_mlps` says."""
    name = type(model).__name__
    with_experts = {
        type(module).__name__
        for module in model.modules()
        if any(child in _EXPERTS for child, _ in module.named_children())
    }
    if with_experts:
        raise ValueError(
            f"{name} has experts ({', '.join(sorted(with_experts))}), which mlp_chunk does not cut into chunks of "
            "tokens; use mlp_chunk=0"
        )
    mlps = {
        id(module): module
        for path, module in model.named_modules()
        if path.rpartition(".")[2] in _NAMES and any(True for _ in module.parameters())
    }
    others = sorted({type(mlp).__name__ for mlp in mlps.values() if not _takes_one_tensor(mlp)})
    if others or not mlps:
        found = f"{', '.join(others)} takes more than its hidden states" if others else f"none is a {_listed()}"
        raise ValueError(
            f"{name} has no MLPs that mlp_chunk can cut into chunks of tokens: {found}; use mlp_chunk=0, or call "
            "burst_plugin.activations.chunked_mlp.chunked_mlp in it"
        )
    return list(mlps.values())


def _listed() -> str:
    return f"module with the name {', '.join(_NAMES[:-1])} or {_NAMES[-1]}"


def _takes_one_tensor(mlp: torch.nn.Module) -> bool:
    """Return whether a module is called with one argument."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [
        each
        for each in inspect.signature(mlp.forward).parameters.values()
        if each.kind in kinds and each.default is inspect.Parameter.empty
    ]
    return len(required) == 1
