"""Batches on which models of transformers are compared, and losses and gradients of their steps, on a ring or not."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin.batch import IGNORED_LABEL
from tests.support.deepspeed_run import Batch, draw

Step = tuple[float, dict[str, Tensor]]
"""A loss, and the gradients of a model's parameters by name."""


def packed(*rows: tuple[int, ...], seed: int = 0) -> Batch:
    """Draw documents of these lengths, one row after the other."""
    batch = draw(1, rows=len(rows), length=sum(rows[0]), seed=seed)[0]
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
    return {**batch, "position_ids": positions, "labels": batch["labels"].masked_fill(positions == 0, IGNORED_LABEL)}


def masked(batch: Batch, mask: Tensor) -> Batch:
    """Leave out labels of padding, and of tokens after it, which are predicted from padding."""
    hidden = (mask == 0) | (mask.roll(1, 1) == 0)
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(hidden, IGNORED_LABEL)}


def padding(ids: Tensor) -> Tensor:
    """Return the mask of three rows: one padded on the left, one on the right, one not at all."""
    mask = torch.ones_like(ids)
    mask[0, :7] = mask[1, -11:] = 0
    return mask


def padded() -> Batch:
    """Draw rows padded on the left, on the right, and not at all; of a length that does not divide."""
    batch = draw(1, rows=3, length=27, seed=2)[0]
    mask = padding(batch["input_ids"])
    return masked({**batch, "input_ids": batch["input_ids"] * mask}, mask)


def documents(batch: Batch) -> list[Batch]:
    """Return each document of a packed row by itself, or the whole batch, with its padding."""
    if "position_ids" not in batch:
        return [batch]
    starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), batch["input_ids"].shape[1]]
    return [{name: batch[name][:, a:b] for name in ("input_ids", "labels")} for a, b in pairwise(starts)]


def shifted(labels: Tensor) -> Tensor:
    """Return labels in the places from which they are predicted, as shards of batches have them."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)


def sum_of_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses of all tokens, whose labels are shifted."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def grads_of(model: Any) -> dict[str, Tensor]:
    """Return the gradient of every parameter, zeros where it has none."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def step(model: Any, loss: Tensor) -> Step:
    """Go backward, and return the loss and gradients; the model keeps none."""
    loss.backward()
    grads = grads_of(model)
    model.zero_grad(set_to_none=True)
    return float(loss.detach()), grads


def over_ranks(loss: float, grads: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> Step:
    """Add up a step over the ranks of a group, or all; gradients are returned on the first rank alone."""
    flat = torch.cat([torch.tensor([loss]), *(grad.flatten() for grad in grads.values())])
    dist.all_reduce(flat, group=group)
    parts = flat[1:].split([grad.numel() for grad in grads.values()]) if dist.get_rank(group) == 0 else ()
    return float(flat[0]), {name: part.view_as(grads[name]) for name, part in zip(grads, parts, strict=False)}


def over_texts(steps: Iterable[Step]) -> Step:
    """Add up steps on one rank."""
    total, summed = 0.0, dict[str, Tensor]()
    for loss, grads in steps:
        total, summed = total + loss, {name: grad + summed.get(name, 0) for name, grad in grads.items()}
    return total, summed


def by_module(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join those of a hyper-connection into one: of its one or two scales all but rounding cancels."""
    joined: dict[str, list[Tensor]] = {}
    for name, grad in grads.items():
        owner = name.rpartition(".")[0]
        joined.setdefault(owner if owner.endswith(("_hc", "hc_head")) else name, []).append(grad.flatten())
    return {name: torch.cat(parts) for name, parts in joined.items()}
