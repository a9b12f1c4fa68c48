"""Steps of tiny models that also take images, audio or video: on a ring, and on one rank with eager attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from burst_plugin import ContextParallel
from burst_plugin.batch import IGNORED_LABEL, shard_batch
from burst_plugin.huggingface import prepare
from tests.support.deepspeed_run import Batch, worst
from tests.support.ranks import run_ranks
from tests.support.ring_steps import grads_of, over_ranks, step
from tests.support.wrappers import tiny_wrapper


@dataclass(frozen=True)
class Result:
    """The loss of a whole batch, and gradients."""

    loss: float
    grads: dict[str, torch.Tensor]


def check_on_ring(
    batches: Mapping[str, Batch],
    ranks: int,
    documents: Sequence[int] = (),
    has_checkpoints: bool = False,
    **options: Any,
) -> None:
    """Compare losses and gradients on a ring with those on one rank without it, for the batch of each family.

    documents: lengths of the documents of packed batches. options: the ring's.
    """
    found = run_ranks(_on_ring, ranks, batches, has_checkpoints, options, timeout_s=240.0)[0]
    for family, batch in batches.items():
        truth = on_one_rank(family, batch, documents)
        assert truth.grads, family
        assert abs(found[family].loss - truth.loss) <= 1e-5 * abs(truth.loss), family
        error, parameter = worst(found[family].grads, truth.grads)
        assert error <= 1e-5, (family, parameter, error)


def _on_ring(
    rank: int, batches: Mapping[str, Batch], has_checkpoints: bool, options: dict[str, Any]
) -> dict[str, Result]:
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=dist.get_world_size(), **options)
    found = {}
    for family, batch in batches.items():
        model = prepare(tiny_wrapper(family))
        if has_checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        local = shard_batch(batch, cp)
        loss = model(
            **local, labels=local["shift_labels"], num_items_in_batch=local["burst"].valid_tokens, use_cache=False
        ).loss
        total, grads = over_ranks(*step(model, loss))
        found[family] = Result(total, {name: grad for name, grad in grads.items() if bool(grad.any())})
    return found


def on_one_rank(family: str, batch: Batch, documents: Sequence[int] = ()) -> Result:
    """Of packed documents one by one, since not every model of transformers keeps those apart."""
    model, batch = tiny_wrapper(family), dict(batch)
    count = int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())
    starts = [0, batch["labels"].shape[1]]
    if documents:
        del batch["position_ids"]
        starts = [0, *torch.tensor(documents).cumsum(0).tolist()]
    total = 0.0
    for begin, end in pairwise(starts):
        part = {name: x[:, begin:end] for name, x in batch.items()}
        if end - begin > 1:
            loss = model(**part, num_items_in_batch=count, use_cache=False).loss
            loss.backward()
            total += float(loss.detach())
    return Result(total, {name: grad for name, grad in grads_of(model).items() if bool(grad.any())})
