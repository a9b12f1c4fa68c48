"""The hooks of a transformer whose tokens are cut between the ranks of a ring.

Tokens of the image or video are cut where they enter the blocks, with their rotary embedding, and so are tokens of
text where blocks attend to both jointly. Every rank has a chunk of each stream, so that ranks have equal work however
long the streams are. Weights before the cut and behind it see whole tensors; the gradient that comes back through a
cut is this rank's part, so that sums over ranks are right for these, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from burst_plugin.checks import shown
from burst_plugin.context import ContextParallel
from burst_plugin.frameworks.wrapping import by_name
from burst_plugin.integrations.caught_attention import CaughtAttention
from burst_plugin.integrations.diffusion_families import Cut, DiffusionFamily
from burst_plugin.ring.graph_breaks import between_graphs
from burst_plugin.sequence.layout import Tokens

# Hooks of diffusers that change no numbers. Its caches skip blocks, which each rank would decide by itself.
_HARMLESS = ("group_offloading", "lazy_prefetch", "layer_execution_tracker", "layerwise_casting", "peft_autocast")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CutTransformer:
    """The hooks of one transformer that cut its tokens, put its attention on the ring, and gather its output.

    They are registered when this object is made, and are bound methods, so that a deep copy of the model has its own.

    model: a transformer of diffusers, changed in place.
    family: the tensors of it that are cut, and its modules that attend on the ring.
    cp: the ring.
    """

    def __init__(self, model: torch.nn.Module, family: DiffusionFamily, cp: ContextParallel) -> None:
        self.family, self.cp = family, cp
        self._lengths: dict[str, int] = {}
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        for name, cuts in family.arguments.items():
            cut = partial(self._cut_arguments, cuts)
            model.get_submodule(name).register_forward_pre_hook(cut, with_kwargs=True)
        if family.rope is not None:
            model.get_submodule("rope").register_forward_hook(self._cut_rope)
        model.get_submodule("proj_out").register_forward_hook(self._gather)
        for name, module in model.named_modules():
            if fnmatch(name, family.attention):
                CaughtAttention(name, cp, partial(self._tokens, *family.streams)).watch(module)

    @between_graphs
    def _begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check that all ranks get equal inputs, and none for whole tokens; collective."""
        arguments = by_name(model.forward, args, kwargs)
        registries = [module._diffusers_hook for module in model.modules() if hasattr(module, "_diffusers_hook")]
        hooks = {name for registry in registries for name in registry.hooks if not name.startswith(_HARMLESS)}
        problems = [f"the argument {name}" for name in self.family.whole if name in arguments]
        problems += [f"diffusers' hook {name}" for name in sorted(hooks)]
        problems += ["enable_parallelism()"] if model._parallel_config is not None else []
        refusal = f"{type(model).__name__} on a ring has whole tokens nowhere; leave out {', '.join(problems)}"
        fingerprints = {name: tree_map(_fingerprint, value) for name, value in arguments.items()}
        self.cp.agree(fingerprints, refusal if problems else "", of="the inputs of a transformer")
        self._lengths = {}
        checkpoint = model._gradient_checkpointing_func
        if checkpoint is not None and getattr(checkpoint, "func", None) != self._checkpointed:
            model._gradient_checkpointing_func = partial(self._checkpointed, checkpoint)

    def _checkpointed(self, checkpoint: Callable[..., Any], block: Callable[..., Any], *args: Any) -> Any:
        """Run a block in a checkpoint; recomputation uses the lengths of this call."""

        def run(lengths: dict[str, int], *args: Any) -> Any:
            self._lengths = lengths
            return block(*args)

        return checkpoint(partial(run, self._lengths), *args)

    def _cut_arguments(
        self, cuts: Mapping[str, Cut], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = [*inspect.signature(module.forward).parameters][: len(args)]
        positional = (self._cut(cuts.get(name), x) for name, x in zip(names, args, strict=True))
        return tuple(positional), {name: self._cut(cuts.get(name), x) for name, x in kwargs.items()}

    def _cut_rope(self, module: torch.nn.Module, args: object, output: Any) -> Any:
        return self._cut(self.family.rope, output)

    def _gather(self, module: torch.nn.Module, args: object, output: Tensor) -> Tensor:
        return self.cp.unshard(output, 1, self._tokens("image"), loss="same")

    def _cut(self, cut: Cut | None, value: Any) -> Any:
        """Return this rank's tokens of a tensor, or of all in a tuple; the value itself if it is not cut."""
        return value if cut is None else tree_map_only(Tensor, partial(self._cut_tensor, *cut), value)

    def _cut_tensor(self, stream: str, dim: int, x: Tensor) -> Tensor:
        if dim >= x.ndim:  # one timestep for all tokens
            return x
        length = x.shape[dim]
        expected = self._lengths.setdefault(stream, length)
        if length == 1 < expected:  # one for all, too
            return x
        if length != expected:
            raise ValueError(f"a tensor {list(x.shape)} has {length} {stream} tokens, and an earlier one {expected}")
        if length < self.cp.ranks:
            raise ValueError(
                f"{length} {stream} tokens are too few for {self.cp.ranks} ranks; each takes one or more"
            )
        return self.cp.shard(x, dim, self._tokens(stream))

    def _tokens(self, *streams: str) -> Tokens:
        """Return the sequence of some streams one after another, each with a chunk for every rank."""
        ranks, bounds = self.cp.ranks, [0]
        for length in (self._lengths[stream] for stream in streams):
            bounds += [bounds[-1] + (rank + 1) * length // ranks for rank in range(ranks)]
        return Tokens(bounds[-1], holders=(*range(ranks),) * len(streams), bounds=tuple(bounds))


def _fingerprint(value: object) -> object:
    """Return a value to compare between ranks; for a tensor a text with its shape, type and sum of bits."""
    if not isinstance(value, Tensor):
        return value if isinstance(value, int | float | str) else type(value).__name__
    bits = value.detach().contiguous().view(_INTEGERS[value.element_size()])
    return f"{shown(value)} with bits that add up to {int(bits.sum(dtype=torch.int64))}"
