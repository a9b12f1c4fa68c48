"""What a loss is compared with where a model computes it in code of its own: the cross entropy of its logits."""

from __future__ import annotations

import torch
from torch import Tensor

_TOKENS_AT_ONCE = 1024
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}  # between a model's loss and that of its logits
LOW_PRECISION_TOLERANCE = 1e-2  # for losses of other types


def summed_loss(logits: Tensor, labels: Tensor) -> float:
    """Return the sum of the cross entropy of logits [T, V] over labels [T]; labels of -100 are left out.

    It is computed 1024 tokens at a time in float32, since logits of a long sequence fill a GPU.
    """
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    for piece, targets in zip(*(torch.split(x, _TOKENS_AT_ONCE) for x in (logits, labels)), strict=True):
        total += torch.nn.functional.cross_entropy(piece.float(), targets, reduction="sum")
    return float(total)


def tolerance_of(loss: Tensor) -> float:
    """Return the relative difference allowed between a model's loss and the cross entropy of its logits.

    It is 1e-4 for a loss in float32 or float64, as of logits in 16 bits too, and 1e-2 in other types.
    """
    return _TOLERANCE.get(loss.dtype, LOW_PRECISION_TOLERANCE)
