"""The cross entropy of logits, to compare with a loss that a model computes in code of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_TOKENS_AT_ONCE = 1024
_IGNORED = -100  # PyTorch's `ignore_index`
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}  # between a model's loss and that of its logits
LOW_PRECISION_TOLERANCE = 1e-2  # for losses of other types
_ROUTER_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")  # of a model, or of its configuration


def summed_loss(logits: Tensor, labels: Tensor) -> float:
    """Return the sum of the cross entropy of logits [T, V] over labels [T]; labels of -100 are left out.

    It is computed 1024 tokens at a time in float32, since logits of a long sequence fill a GPU.
    """
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    for piece, targets in zip(*(torch.split(x, _TOKENS_AT_ONCE) for x in (logits, labels)), strict=True):
        total += torch.nn.functional.cross_entropy(piece.float(), targets, reduction="sum")
    return float(total)


def are_classes(labels: Tensor, logits: Tensor) -> bool:
    """Return whether all labels, whole numbers, are classes of logits [..., V]; labels of -100 are left out."""
    of_tokens = labels[labels != _IGNORED]
    return not of_tokens.numel() or -1 < int(of_tokens.amin()) <= int(of_tokens.amax()) < logits.shape[-1]


def tolerance_of(loss: Tensor, logits: Tensor) -> float:
    """Return the relative difference allowed between a model's loss and the cross entropy of its logits.

    It is 1e-4 for a loss in float32 or float64, also of logits in 16 bits, and 1e-2 in other types. A loss of logits
    in 16 bits whose value 16 bits can hold counts as one of these.
    """
    is_rounded = logits.dtype not in _TOLERANCE and bool(loss.detach() == loss.detach().to(logits.dtype))
    return LOW_PRECISION_TOLERANCE if is_rounded else _TOLERANCE.get(loss.dtype, LOW_PRECISION_TOLERANCE)


def router_loss_in(model: torch.nn.Module, outputs: Any) -> Tensor | None:
    """Return the router loss of experts in `outputs`, times the coefficient that weighs it in the model's loss.

    The coefficient is read from `model` or its configuration; for a fused head, which returns log-probabilities, it
    is `router_aux_loss_coef` of the text's configuration, which trainers change. None if `outputs` have no
    `aux_loss`, or no coefficient is found.
    """
    aux_loss = getattr(outputs, "aux_loss", None)
    if not isinstance(aux_loss, Tensor):
        return None
    is_fused = hasattr(outputs, "log_probs")
    for module in model.modules():  # of which the first one mostly has it
        config = getattr(module, "config", None)
        owners: list[Any] = [module, config, getattr(config, "text_config", None)]
        names = _ROUTER_COEFFICIENTS[:1] if is_fused else _ROUTER_COEFFICIENTS
        if is_fused:  # the model's own copy is older
            text_of = getattr(config, "get_text_config", None)  # not of an engine's configuration
            owners = [] if text_of is None else [text_of()]
        for owner in owners:
            for name in names:
                coefficient = getattr(owner, name, None)
                if isinstance(coefficient, int | float):
                    return coefficient * aux_loss
    return None
