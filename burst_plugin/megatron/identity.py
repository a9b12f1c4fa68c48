"""Which call of attention this is, as Megatron can tell: iteration, forward step, microbatch, layer, batch.

It has to be equal on ranks that do the same, and unlike as soon as one of them has skipped something; nothing else.
So it does no harm that layers that are recomputed in a backward pass see the microbatch of the latest forward step:
they do so on all ranks of a ring.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import utils
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

from burst_plugin.context import ContextParallel
from burst_plugin.frameworks.wrapping import wrap
from burst_plugin.megatron.arguments import parsed_arguments

__all__ = ["Identity", "follow_schedules"]

_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)
# Get the whole batch on every context-parallel rank: until 0.17 the first one, later what it leaves the cutting to.
_CUT_BATCH = (
    "get_pretrain_batch_on_this_cp_rank",
    "_get_batch_on_this_cp_rank_per_sequence_balancing",
    "get_sft_batch_on_this_cp_rank",
    "_get_batch_on_this_cp_rank_per_document_balancing",
)
_INTEGERS = ("tokens", "labels", "position_ids")  # of a batch; masks may be as large as the sequence squared


class Identity:
    """What this rank knows of where it is; see the module."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Count from 0 again: the groups, and with them the models and rings so far, are gone."""
        self.passes = 0  # of `forward_backward_func`
        self.batch: _Checksum | None = None  # cut last
        self._forward_steps = 0
        self._microbatch: int | None = None
        self._layers = 0
        self._calls: dict[int, int] = {}  # of a layer, since the forward step began

    def new_layer(self) -> int:
        """Return the number of a core attention that is being built, in the order of construction.

        Layer numbers are not unique: those of multi-token prediction, and of a decoder beside an encoder, begin at 1
        again.
        """
        self._layers += 1
        return self._layers

    def begin_forward_step(self, microbatch: int) -> None:
        """Note that a forward step of `microbatch` begins."""
        self._forward_steps += 1
        self._microbatch = microbatch
        self._calls.clear()

    def of_call(self, layer_number: int, layer: int, has_own_group: bool) -> tuple[object, ...]:
        """Return the tag of a call of core attention number `layer`, in a layer of that number.

        Where microbatches have groups of their own, these take unlike numbers of them, so that nothing but the layer
        is sure to be the same on the ranks of one.
        """
        where = f"layer {layer_number}" if layer == layer_number else f"layer {layer_number} (core attention {layer})"
        if has_own_group:
            return (where,)
        calls = self._calls[layer] = self._calls.get(layer, 0) + 1
        iteration = getattr(parsed_arguments(), "curr_iteration", None)
        return (
            None if iteration is None else f"iteration {iteration}",
            f"forward step {self._forward_steps}" if self._forward_steps else None,
            None if self._microbatch is None else f"microbatch {self._microbatch}",
            where,
            None if calls == 1 else f"call {calls} of it",
            self.batch,
        )


class _Checksum:
    """A number that two different batches hardly share; only printing it reads it, which stalls the host on GPUs."""

    def __init__(self, batch: dict[str, Any]) -> None:
        self._sum: Tensor | int = 0
        for x in (batch.get(name) for name in _INTEGERS):
            if isinstance(x, Tensor) and not x.is_floating_point():
                weights = torch.arange(1, x.numel() + 1, device=x.device)
                self._sum = 31 * self._sum + (x.flatten().long() * weights).sum()  # wraps around

    def __str__(self) -> str:
        return f"batch {int(self._sum) % 2**32:08x}"


def follow_schedules(rings: Callable[[], Sequence[ContextParallel]], identity: Identity) -> str:
    """Have Megatron's schedules, and what cuts its batches, tell `identity` where this rank is; say what was done.

    The ranks of each of `rings` also compare notes at the end of a forward-backward pass, where one that left out a
    backward pass would go on to other collectives.
    """

    def begin(original: Any, model: Any, microbatch_id: int, *args: Any, **kwargs: Any) -> Any:
        identity.begin_forward_step(microbatch_id)
        return original(model, microbatch_id, *args, **kwargs)

    def run(original: Any, *args: Any, **kwargs: Any) -> Any:
        identity.passes += 1
        result = original(*args, **kwargs)
        for cp in rings():
            cp.meet(f"the end of forward-backward pass {identity.passes}")
        return result

    def cut(original: Any, batch: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if rings():
            identity.batch = _Checksum(batch)
        return original(batch, *args, **kwargs)

    wrap(schedules, "set_current_microbatch", begin)
    for name in _SCHEDULES:
        wrap(schedules, name, run)
    outer, inner = "get_batch_on_this_cp_rank", [name for name in _CUT_BATCH if hasattr(utils, name)]
    for name in inner or [outer]:
        original = getattr(utils, name)
        wrapped = wrap(utils, name, cut)
        for module in map(sys.modules.get, ("megatron.training.utils", "megatron.training.training")):
            if getattr(module, name, None) is original:  # imported by name before the plugin was installed
                setattr(module, name, wrapped)
    return "attention calls know their iteration, forward step, microbatch, layer and batch, which ranks compare"
