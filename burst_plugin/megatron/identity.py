"""The identity of an attention call in Megatron: iteration, forward step, microbatch, layer, batch.

Ranks that make one call have to give it one identity, and different identities once a rank has skipped a call. So it
does no harm that layers recomputed in a backward pass see the microbatch of the latest forward step: they do so on
all ranks of a ring.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core import parallel_state, utils
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

from burst_plugin.context import ContextParallel
from burst_plugin.frameworks.wrapping import wrap, wrap_everywhere
from burst_plugin.megatron.flags.arguments import parsed_arguments
from burst_plugin.megatron.repairs.batches import functions_that_cut

_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)
_INTEGERS = ("tokens", "labels", "position_ids")  # of a batch; masks may be as large as the sequence squared


class Identity:
    """Counters of this rank's training, which make the tags of attention calls that the ranks of a ring compare.

    Ranks of one ring may have done different things on other rings, so calls are counted by ring.
    """

    def __init__(self) -> None:
        self.batches: dict[dist.ProcessGroup | None, _Checksum] = {}  # the latest, by the group that holds it
        self.microbatches = 1  # of the schedule in progress
        self.passes = 0  # forward-backward passes, of training and evaluation, which all stages count alike
        self.last_trained = 0  # the latest of them that has ended with its backward pass
        self.forward_steps = 0  # on this rank, of all models
        self.model_calls = 0  # of language models on this rank, which programs without schedules make, too
        self.computes_edges = False  # whether the forward step in progress is of rollouts in a prefix tree
        self._microbatch: int | None = None
        self._rings: WeakKeyDictionary[ContextParallel, _Counts] = WeakKeyDictionary()

    @property
    def microbatch_id(self) -> tuple[int, int] | None:
        """Return the numbers of the pass and the microbatch in progress; None outside of Megatron's schedules.

        A pass is one forward-backward pass, of training or evaluation. All pipeline stages agree on these numbers.
        """
        return None if self._microbatch is None else (self.passes, self._microbatch)

    @property
    def calls(self) -> tuple[int, int]:
        """Return how many forward steps, and how many calls of models, have begun; recomputation does not count."""
        return self.forward_steps, self.model_calls

    def begin_forward_step(self, microbatch: int) -> None:
        """Note that a forward step begins; `microbatch` is the number of the microbatch in the schedule's pass."""
        self.forward_steps += 1
        self._microbatch, self.computes_edges = microbatch, False

    def end_pass(self) -> None:
        """Note that a forward-backward pass has ended: models that run now work on no microbatch of it."""
        self._microbatch = None

    def of_call(self, cp: ContextParallel, layer: object, layer_number: int, own_group: bool) -> tuple[object, ...]:
        """Return the tag of a layer's call on a ring: its iteration, forward step, microbatch, layer and batch.

        All ranks of the ring get equal tags for one call. A part that is not known is None.

        Args:
            cp: the ring.
            layer: the module that is called, a core attention or a mixer.
            layer_number: Megatron's number of its layer.
            own_group: whether the microbatch has brought its own process group. Such groups take different numbers of
                microbatches, so that the tag then has the layer alone.
        """
        if own_group:
            return (f"layer {layer_number}",)
        counts = self._rings.setdefault(cp, _Counts())
        number, calls = counts.of(layer, self.forward_steps)
        iteration = getattr(parsed_arguments(), "curr_iteration", None)
        return (
            None if iteration is None else f"iteration {iteration}",
            f"forward step {counts.forward_steps}" if self.forward_steps else None,
            None if self._microbatch is None else f"microbatch {self._microbatch}",
            f"layer {layer_number}" if number == layer_number else f"layer {layer_number} ({number} on the ring)",
            None if calls == 1 else f"call {calls} of it",
            self.batches.get(cp.group),
        )


class _Counts:
    """Counts of forward steps, layers and calls on one ring."""

    def __init__(self) -> None:
        self.forward_steps = 0
        self._last_step = -1  # of this rank's, of all rings
        self._numbers = count(1)
        self._layers: WeakKeyDictionary[object, int] = WeakKeyDictionary()  # in the order of their first calls
        self._calls: dict[int, int] = {}  # by the number of a layer, since the forward step began

    def of(self, layer: object, step: int) -> tuple[int, int]:
        """Return the number of a layer, and how often it has been called in this forward step.

        Megatron's own layer numbers are not unique: they begin at 1 again in multi-token prediction, and in a decoder
        beside an encoder.
        """
        if step != self._last_step:
            self._last_step, self.forward_steps = step, self.forward_steps + 1
            self._calls.clear()
        if layer not in self._layers:
            self._layers[layer] = next(self._numbers)
        number = self._layers[layer]
        self._calls[number] = self._calls.get(number, 0) + 1
        return number, self._calls[number]


class _Checksum:
    """A checksum of a batch. Only printing it reads it, which stalls the host on GPUs."""

    def __init__(self, batch: dict[str, Any]) -> None:
        self._sum: Tensor | int = 0
        for x in (batch.get(name) for name in _INTEGERS):
            if isinstance(x, Tensor) and not x.is_floating_point():
                weights = torch.arange(1, x.numel() + 1, device=x.device)
                self._sum = 31 * self._sum + (x.flatten().long() * weights).sum()  # wraps around

    def __str__(self) -> str:
        return f"batch {int(self._sum) % 2**32:08x}"


def hook_schedules(registry: Any) -> str:
    """Have Megatron's schedules, and its functions that cut batches, keep the counters of `registry.identity`.

    At the end of a forward-backward pass the ranks of each ring also compare where they are: a rank that left out a
    backward pass would go on to other collectives. registry: the `Registry` of the rings. Returns a line for the
    report of `install()`.
    """

    def begin(original: Any, model: Any, microbatch_id: int, *args: Any, **kwargs: Any) -> Any:
        registry.identity.begin_forward_step(microbatch_id)
        return original(model, microbatch_id, *args, **kwargs)

    def run(original: Any, *args: Any, **kwargs: Any) -> Any:
        before = {cp: cp.rank_state.calls_made for cp in registry.rings()}
        registry.identity.microbatches = kwargs.get("num_microbatches", 1)
        registry.identity.passes += 1
        try:
            result = original(*args, **kwargs)
            for cp in registry.rings():
                if cp.rank_state.calls_made != before.get(cp, 0):  # rings without calls may belong to another model
                    cp.meet("the end of a forward-backward pass")
            if not kwargs.get("forward_only", False):
                registry.identity.last_trained = registry.identity.passes
            return result
        finally:
            registry.identity.end_pass()

    def cut(original: Any, batch: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if registry.rings():
            group = kwargs.get("cp_group", next(iter(args), None))
            if not isinstance(group, dist.ProcessGroup):
                group = parallel_state.get_context_parallel_group(check_initialized=False)
            registry.identity.batches[group] = _Checksum(batch)
        return original(batch, *args, **kwargs)

    wrap(schedules, "set_current_microbatch", begin)
    for name in _SCHEDULES:
        wrap(schedules, name, run)
    for name in functions_that_cut():
        wrap_everywhere(utils, name, cut)
    return "attention calls know their iteration, forward step, microbatch, layer and batch, which ranks compare"
