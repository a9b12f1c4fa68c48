"""TRL's GRPOTrainer and RLOOTrainer on a ring: rollouts of all ranks are folded before the model computes them.

Folded rollouts are one sequence, in which beginnings that rollouts share occur once. Ranks of a ring stay
data-parallel ranks to TRL and Accelerate: each has prompts, completions, advantages and a loss of its own, and
gradients are averaged over all of them. Log-probabilities of completions are computed by the ring, for the rollouts
of all its ranks at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burst_plugin.checks import shown
from burst_plugin.context import ContextParallel
from burst_plugin.huggingface.models import prepare_model
from burst_plugin.huggingface.rollouts import rollout_log_probs
from burst_plugin.huggingface.router_losses import problem_of_router_loss
from burst_plugin.ring.agreement import prepared_together

Trainer = TypeVar("Trainer")

_METHOD = "_get_per_token_logps_and_entropies"
# The parameters in TRL 1.16, except for images, which are refused in a call.
_PARAMETERS = (
    "model",
    "input_ids",
    "attention_mask",
    "logits_to_keep",
    "batch_size",
    "compute_entropy",
    "compute_aux_loss",
)
_FIELDS = ("model", "ref_model", "temperature", "accelerator", "aux_loss_enabled", "args")


def fold_rollouts(trainer: Trainer, cp: ContextParallel) -> Trainer:
    """Have TRL's GRPOTrainer or RLOOTrainer compute its log-probabilities over the ranks of `cp`; collective.

    The ranks' rollouts are folded: put together as one sequence, in which beginnings that rollouts share are computed
    once, and which the ranks share. Everything else stays as it is: ranks draw prompts, generate, reward and average
    gradients as data-parallel ones. So losses and gradients are equal to TRL's on as many ranks.

    Args:
        trainer: a GRPOTrainer or RLOOTrainer, or one of a class derived from them, before `train()`. Its model and
            its reference model are prepared.
        cp: the ring of ranks that compute together: all of Accelerate's ranks, or one of several rings of equal size
            into which these are divided.

    Returns:
        The same trainer.

    Raises:
        ValueError: on every rank, for another trainer, another release of TRL whose trainer computes otherwise,
            models that cannot run on a ring, and options that are not supported, each by name.

    Example:
        trainer = fold_rollouts(GRPOTrainer(model, reward_funcs=reward, args=args, train_dataset=prompts), cp)
        trainer.train()
    """
    if not isinstance(cp, ContextParallel):
        raise ValueError(f"cp is {shown(cp)}, not a ContextParallel; make one of the process group once, and pass it")

    def agree(temperature: float | None, problem: str) -> None:
        cp.agree({} if temperature is None else {"temperature": temperature}, problem, "a trainer")

    prepared_together(partial(_prepared, trainer, cp), agree)
    setattr(trainer, _METHOD, MethodType(_FoldedLogProbs(cp), trainer))
    return trainer


def _prepared(trainer: Any, cp: ContextParallel) -> float:
    """Put a trainer's models on the ring and return its temperature. Raise ValueError if that cannot be."""
    problem = _problem(trainer, cp)
    if problem:
        raise ValueError(problem)
    for model in (trainer.model, trainer.ref_model):
        if model is not None:
            prepare_model(model, averages_gradients=True)
    return float(trainer.temperature)


def _problem(trainer: Any, cp: ContextParallel) -> str:
    """Return why a trainer's rollouts cannot be folded; empty if they can."""
    trl: Any = import_module("trl")
    if not isinstance(trainer, trl.GRPOTrainer | trl.RLOOTrainer):
        return (
            f"fold_rollouts is for TRL's GRPOTrainer and RLOOTrainer, got {type(trainer).__name__}; use "
            "rollout_log_probs for others"
        )
    method = getattr(trainer, _METHOD, None)
    parameters = tuple(inspect.signature(method).parameters) if callable(method) else ()
    missing = [name for name in _FIELDS if not hasattr(trainer, name)]
    if parameters[: len(_PARAMETERS)] != _PARAMETERS or missing:
        lacks = f"has no {', '.join(missing)}" if missing else f"has {_METHOD}({', '.join(parameters) or 'absent'})"
        return (
            f"{type(trainer).__name__} of TRL {trl.__version__} {lacks}, which fold_rollouts does not know; use TRL "
            "1.16, or fold in a loop of your own with rollout_log_probs"
        )
    models = [module for module in trainer.model.modules() if isinstance(module, PreTrainedModel)]
    if trainer.aux_loss_enabled and (unknown := problem_of_router_loss(models[0], True)):
        return unknown
    if getattr(trainer.args, "use_liger_kernel", False):
        return "use_liger_kernel changes models after they are examined; set it to False"
    accelerator = trainer.accelerator
    if getattr(trainer.args, "cast_lm_head_to_fp32", False) and accelerator.mixed_precision not in (None, "no"):
        return "cast_lm_head_to_fp32 has no effect under autocast, in which the folded head runs; leave it out"
    if getattr(trainer, "is_fsdp_enabled", False):
        return "fold_rollouts does not support FSDP, which gathers parameters on its own; use DDP or DeepSpeed"
    engine = getattr(getattr(accelerator.state, "deepspeed_plugin", None), "deepspeed_config", None) or {}
    if engine.get("burst_attention", {}).get("enabled"):
        return "the burst_attention block of DeepSpeed's config cuts batches itself; leave it out, cp is the ring"
    sizes = getattr(accelerator, "parallelism_config", None)
    split = [f"{name}={getattr(sizes, name)}" for name in ("cp_size", "sp_size", "tp_size") if _is_split(sizes, name)]
    if split:
        return f"each rank of a ring draws its own prompts here; leave {', '.join(split)} of ParallelismConfig out"
    if accelerator.num_processes % cp.ranks:
        return (
            f"{accelerator.num_processes} ranks of Accelerate cannot be divided into rings of {cp.ranks}; "
            f"start a multiple of {cp.ranks} ranks"
        )
    return ""


def _is_split(sizes: Any, name: str) -> bool:
    return int(getattr(sizes, name, 1) or 1) > 1


class _FoldedLogProbs:
    """Takes the place of `_get_per_token_logps_and_entropies` of a trainer."""

    def __init__(self, cp: ContextParallel) -> None:
        self._cp = cp

    def __call__(
        self,
        trainer: Any,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return log-probabilities and entropies of the last tokens, [B, `logits_to_keep`]; 0 where masked.

        Also returns the router loss of this rank's rows. `batch_size` rows of each rank are folded at a time,
        by default all. Collective.
        """
        argument_names = [name for name, value in others.items() if value is not None]
        size = batch_size or max(1, len(input_ids))
        parts, routers = [], []
        for start in range(0, len(input_ids), size):
            rows = slice(start, start + size)
            ids, mask = input_ids[rows], attention_mask[rows].bool()
            with trainer.accelerator.autocast():
                values = rollout_log_probs(
                    model,
                    _texts(ids, mask, logits_to_keep, argument_names),
                    self._cp,
                    own=True,
                    temperature=trainer.temperature,
                    router_loss=compute_aux_loss,
                )
            routers.append(values.router_loss)
            parts.append(tuple(_padded(each, mask)[:, -logits_to_keep:] for each in values[:2]))
        log_probs, entropies = (torch.cat(each) for each in zip(*parts, strict=True))
        aux_loss = torch.stack(routers).mean() if compute_aux_loss else None  # type: ignore[arg-type]
        return log_probs, entropies if compute_entropy else None, aux_loss


def _texts(ids: Tensor, mask: Tensor, completion: int, argument_names: list[str]) -> Iterator[Tensor]:
    """Yield the texts of a padded batch. Raises ValueError for another kind of batch; all ranks then hear of it."""
    if argument_names:
        raise ValueError(f"fold_rollouts does not support {', '.join(argument_names)}; train on texts alone")
    if not bool(mask[:, :-completion].any(1).all()):
        raise ValueError("a prompt has no token that could predict the first of its completion; begin it with one")
    yield from (row[real] for row, real in zip(ids, mask, strict=True))


def _padded(values: list[Tensor], mask: Tensor) -> Tensor:
    """Return values of texts, [T - 1] each, where their tokens are, [B, S]; 0 for padding and first tokens."""
    follows = mask & (mask.cumsum(1) > 1)
    return values[0].new_zeros(mask.shape).masked_scatter(follows, torch.cat(values))
