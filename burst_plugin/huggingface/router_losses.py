"""The load-balancing loss of experts, over the tokens of all ranks of a ring.

    loss = experts * sum over experts of (selections of the expert per token * its mean probability)

Both factors are means over the real tokens of all ranks and layers. The loss is their product and so no sum over
tokens: ranks add up counts and probabilities before they multiply. Selections have no gradient.

Models of transformers call a function of their own module for it, `load_balancing_loss_func`, and TRL calls
Mixtral's. A function in its place adds up over the ring during a forward on a shard. Elsewhere it calls the original.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial, wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from burst_plugin.batch import SHARD_KEY, SequenceShard
from burst_plugin.context import ContextParallel
from burst_plugin.huggingface.mask_recipes import forward_in_progress

_FUNCTION = "load_balancing_loss_func"
_OF_TRL = "transformers.models.mixtral.modeling_mixtral"  # whose function TRL calls for models of all families
_AVERAGED = "_burst_plugin_averages_gradients"  # of a model that was prepared so
_TAKEN = "_burst_plugin_router_losses"  # of a model in the context of `RouterLosses`
_MARK = "_burst_plugin_wrapped"
_TOLERANCE = 1e-5


def problem_of_router_loss(pretrained: PreTrainedModel, averages_gradients: bool) -> str:
    """Return why a model's router loss (`output_router_logits`) cannot be computed over a ring; empty if it can.

    averages_gradients: whether gradients are averaged over the ranks of a ring, rather than added.
    """
    off = "leave output_router_logits out, in TRL by router_aux_loss_coef=0.0"
    functions = [getattr(module, _FUNCTION) for module in _modules(pretrained)]
    if not functions:
        return (
            f"output_router_logits is set, but its code has no {_FUNCTION}, the only router loss that is known on a "
            f"ring; {off}"
        )
    if not all(map(_is_known, functions)):
        return f"output_router_logits adds a loss to it that is not the load-balancing loss of Mixtral; {off}"
    if not averages_gradients:
        return (
            "output_router_logits adds a loss that is no sum over tokens, so that its gradient depends on how ranks "
            "combine theirs: if they average them, as DDP, FSDP and ZeRO do, say so by "
            f"burst_plugin.huggingface.prepare(model, averages_gradients=True); otherwise {off}"
        )
    return ""


def check_router_loss(pretrained: PreTrainedModel, kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for a forward on a shard whose router loss cannot be computed over the whole ring.

    kwargs: the keyword arguments of the forward. Without a shard or a router loss nothing is checked.
    """
    shard = kwargs.get(SHARD_KEY)
    if shard is None or shard.as_given or not asks_for_router_loss(pretrained, kwargs):
        return
    is_taken = hasattr(pretrained, _TAKEN)
    problem = problem_of_router_loss(pretrained, is_taken or getattr(pretrained, _AVERAGED, False))
    if not problem and not is_taken and shard.mask is not None and shard.mask.trees:
        problem = (
            "output_router_logits is not supported with a tree, whose tokens count for several rows each; "
            "leave it out"
        )
    if problem:
        raise ValueError(f"{type(pretrained).__name__} cannot run on a ring: {problem}")
    _replace_functions(pretrained)  # also in a process that has unpickled the model, or after others replaced them


def asks_for_router_loss(pretrained: PreTrainedModel, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a forward adds a router loss, by `output_router_logits` in `kwargs` or in the configuration."""
    asked = kwargs.get("output_router_logits")
    configured = getattr(pretrained.config.get_text_config(), "output_router_logits", False)
    return bool(configured if asked is None else asked)


def use_router_losses(pretrained: PreTrainedModel, averages_gradients: bool) -> None:
    """Have a model's load-balancing losses computed over the tokens of all ranks, in its forwards on shards.

    Replaces `load_balancing_loss_func` in the files of the model's classes and, for TRL, in that of Mixtral.

    averages_gradients: whether gradients are averaged over the ranks of a ring, which the losses need.
    """
    setattr(pretrained, _AVERAGED, averages_gradients)
    _replace_functions(pretrained)


def _replace_functions(pretrained: PreTrainedModel) -> None:
    """Replace the functions that a model and TRL call for its router loss, if they are not those of rings already."""
    for module in _modules(pretrained):
        original = getattr(module, _FUNCTION)
        if not hasattr(original, _MARK):
            setattr(module, _FUNCTION, _on_rings(original))
            setattr(getattr(module, _FUNCTION), _MARK, True)


def _modules(pretrained: PreTrainedModel) -> list[ModuleType]:
    """Return the modules of Python with the functions that a model and TRL call for its router loss."""
    owners = (sys.modules[kind.__module__] for kind in type(pretrained).__mro__ if kind.__module__ in sys.modules)
    modules = [module for module in dict.fromkeys(owners) if callable(getattr(module, _FUNCTION, None))]
    return [*modules, import_module(_OF_TRL)] if modules else []


@cache
def _is_known(function: Callable[..., Any]) -> bool:
    """Return whether a function computes the load-balancing loss: it is tried on a few random numbers."""
    drawn = torch.Generator(device="cpu").manual_seed(0)
    draw = partial(torch.rand, generator=drawn, device="cpu", dtype=torch.float32)
    logits = draw(6, 5), draw(6, 5)
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]], device="cpu")
    original = inspect.unwrap(function)
    try:
        for attention_mask, weights in ((None, None), (mask, mask.flatten().float()[None])):
            sums = router_sums(logits, 5, 2, weights)
            expected = _loss(sums, sums, 5)[0]
            if not abs(float(original(logits, 5, 2, attention_mask)) - float(expected)) <= _TOLERANCE:
                return False
    except Exception:  # of any kind: a function of another meaning
        return False
    return True


def _on_rings(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function in place of a `load_balancing_loss_func`."""

    @wraps(original)
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def load_balancing_loss_func(
        gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: Tensor | None = None
    ) -> Any:
        forward = forward_in_progress()
        shard = None if forward is None else forward.shard
        if forward is None or shard is None or shard.as_given or not isinstance(gate_logits, tuple):
            return original(gate_logits, num_experts, top_k, attention_mask)
        if num_experts is None:
            raise ValueError("the load-balancing loss was asked for without the number of experts")
        taken: RouterLosses | None = getattr(forward.model, _TAKEN, None)
        if taken is not None:
            return taken.take(gate_logits, num_experts, top_k, shard)
        weights = None if shard.real is None else shard.real.flatten().float()[None]
        sums = router_sums(gate_logits, num_experts, top_k, weights)
        # Gradients are averaged over ranks, so each rank multiplies its own by the number of ranks.
        return _of_groups(sums, num_experts, shard.cp, shard.cp.ranks)[0]

    return load_balancing_loss_func


class RouterLosses:
    """The router losses of one forward on a shard of a prefix tree, one for each group of rows.

    A group may be the rollouts of one rank, which share tokens. This is a context manager: while it is entered, the
    model adds no router loss to its own; `of_groups` returns the losses after the forward.

    weights: [G, S], how many rows of each group contain each token of the whole sequence.
    """

    def __init__(self, model: PreTrainedModel, weights: Tensor) -> None:
        self._model, self._weights = model, weights
        self._experts = 0
        self._sums: Tensor | None = None

    def __enter__(self) -> RouterLosses:
        setattr(self._model, _TAKEN, self)
        return self

    def __exit__(self, *error: object) -> None:
        delattr(self._model, _TAKEN)

    def take(self, gate_logits: tuple[Tensor, ...], experts: int, top_k: int, shard: SequenceShard) -> Tensor:
        """Store what the losses of groups need of a forward's router logits, and return 0, a scalar tensor.

        The function in place of `load_balancing_loss_func` calls it, and the model adds the 0 to its own loss.

        gate_logits: for each layer [tokens of this rank, experts]. experts: their number. top_k: experts per token.
        """
        padded = torch.nn.functional.pad(self._weights, (0, shard.tokens.length - self._weights.shape[1]))
        weights = shard.cp.shard(padded, 1, shard.tokens).to(gate_logits[0].device)
        self._experts, self._sums = experts, router_sums(gate_logits, experts, top_k, weights)
        return gate_logits[0].new_zeros(())

    def of_groups(self, cp: ContextParallel) -> Tensor:
        """Return the router loss of each group, float32 [G], after the forward; collective.

        Its gradient reaches the router logits of this rank's tokens, so that ranks' gradients are to be added.
        """
        assert self._sums is not None, "the forward computes a router loss"
        return _of_groups(self._sums, self._experts, cp, 1)


def _of_groups(own_sums: Tensor, experts: int, cp: ContextParallel, times: int) -> Tensor:
    """Return the loss of each group of rows [G] from this rank's sums, as `router_sums` returns them; collective.

    The gradient goes to this rank's own probabilities, `times` over.
    """
    total_sums = own_sums.detach().clone()
    if cp.group is not None and cp.ranks > 1:
        with cp.rank_state.alone():
            dist.all_reduce(total_sums, group=cp.group)
    share = _loss(total_sums, own_sums, experts) * times
    return (share + (_loss(total_sums, total_sums, experts) - share.detach())).float()


def _loss(total_sums: Tensor, own_sums: Tensor, experts: int) -> Tensor:
    """Return the share of `own_sums` in the loss of each group [G], whose sums over all ranks are `total_sums`."""
    counts, probabilities, rows = total_sums[:, :experts], own_sums[:, experts:-1], total_sums[:, -1:].clamp(min=1)
    return (experts * counts * probabilities / rows**2).sum(1)


def router_sums(gate_logits: tuple[Tensor, ...], experts: int, top_k: int, weights: Tensor | None) -> Tensor:
    """Return selections and probabilities by expert, and rows, over tokens and layers: [G, 2 * experts + 1], float64.

    weights: how often each token of a layer's logits [N, experts] counts, for each group, [G, N]; None for once.
    """
    total: Tensor | float = 0.0
    for logits in gate_logits:
        scores = torch.softmax(logits.flatten(0, -2), -1)
        selected = torch.zeros_like(scores, dtype=torch.float32).scatter_(1, scores.topk(top_k, -1).indices, 1.0)
        per_token = torch.cat([selected, scores.float(), selected.new_ones(len(selected), 1)], 1)
        with torch.autocast(logits.device.type, enabled=False):  # which would round numbers of tokens to 8 bits
            here = per_token.sum(0, keepdim=True) if weights is None else weights.to(per_token) @ per_token
        total = total + here.double().to(gate_logits[0].device)
    assert isinstance(total, Tensor), "a model with routers has a layer with one"
    return total
