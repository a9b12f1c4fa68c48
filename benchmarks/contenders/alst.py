"""Arctic Long Sequence Training (ALST, arXiv 2506.13996), put together as DeepSpeed's tutorial and docstrings say.

Ulysses around PyTorch's attention, TiledMLP, TiledFusedLogitsLoss, and Hugging Face's checkpoints, whose inputs may
wait in host memory. TiledFusedLogitsLoss differentiates in its forward pass, so what it tiles is a rank's mean: the
head's gradient would not see a division afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from itertools import islice
from math import ceil
from typing import Any

import torch
import torch.distributed.nn.functional as dist_nn
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def refuse(ranks: int, heads: int, kv_heads: int) -> str | None:
    """Return why Ulysses cannot assign heads to ranks, or None if it can."""
    if heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0):
        return None
    return f"its ranks attend with whole heads: {heads} and {kv_heads} heads do not divide over {ranks} ranks"


def train(
    model: Any, samples: Tensor, config: Mapping[str, Any], chunk: int, offload: bool, step_ended: Callable[[], None]
) -> list[dict[str, float]]:
    """Train on samples [N, S], one a step, all ranks on each; returns the loss and gradient norm of every step.

    chunk: tokens that MLPs, the head and the loss work on at a time.
    """
    import deepspeed
    from deepspeed.runtime.activation_checkpointing.offload_activations import CheckpointHiddenStatesOffload
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, UlyssesSPAttentionHF
    from deepspeed.utils import groups

    deepspeed.comm.init_distributed(auto_mpi_discovery=False, verbose=False)
    ranks, length = deepspeed.comm.get_world_size(), samples.shape[1]
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model, "sdpa", ranks, micro_batch_size=1, seq_length=length, seq_length_is_variable=False
    )
    _tile_mlps(model, chunk)
    model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={**config, "sequence_parallel_size": ranks},
        mpu=mpu,
    )
    group, history = groups._get_sequence_parallel_group(), []
    parked: Any = nullcontext()
    if offload:  # on CPUs, too, where DeepSpeed would leave it out
        parked = CheckpointHiddenStatesOffload(use_streams=engine.device.type == "cuda")
        parked._should_skip = lambda x: False
    for batch in islice(_batches(samples, engine, group), len(samples)):
        labels = batch.pop("shift_labels")
        counted = (labels != -100).sum()

        def of_tile(whole: Any, hidden: Tensor, shift_labels: Tensor, counted: Tensor = counted) -> Tensor:
            logits = whole.lm_head(hidden).float()
            return cross_entropy(logits.flatten(0, -2), shift_labels.flatten(), reduction="sum") / counted

        with parked:
            hidden = engine.module.model(**batch, use_cache=False).last_hidden_state
            weights, tiles = [engine.module.lm_head.weight], ceil(labels.shape[1] / chunk)
            mean = TiledFusedLogitsLoss.apply(of_tile, engine.module, hidden, labels, None, tiles, weights, "sum")
            means, counts = (dist_nn.all_gather(x, group=group) for x in (mean, counted))
            loss = sum(x * count for x, count in zip(means, counts, strict=True)) / sum(counts)
            engine.backward(loss)
        engine.step()
        history.append({"loss": loss.item(), "grad_norm": float(engine.get_global_grad_norm())})
        step_ended()
    return history


def host_memory() -> Iterator[tuple[type, str]]:
    """Yield the class, and the name of its method, that makes host memory; nothing if DeepSpeed is not installed."""
    with suppress(ImportError):
        from deepspeed.runtime.activation_checkpointing import offload_activations

        yield offload_activations._ActivationOffloadEngine, "_empty_cpu_like"


def _batches(samples: Tensor, engine: Any, group: Any) -> Iterator[dict[str, Tensor]]:
    """Return an iterator over a rank's parts of samples, which ranks load by turns."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    rank, ranks = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    positions = torch.arange(samples.shape[1])
    mine = [samples[number % len(samples)] for number in range(rank, ranks * ceil(len(samples) / ranks), ranks)]
    loader = DataLoader([{"input_ids": x, "labels": x, "position_ids": positions} for x in mine], batch_size=1)
    parts = UlyssesSPDataLoaderAdapter(
        loader, sp_rank=rank, sp_group=group, sp_world_size=ranks, device=engine.device
    )
    return ({name: x.to(engine.device) for name, x in part.items()} for part in parts)


def _tile_mlps(model: Any, chunk: int) -> None:
    """Have the MLPs of a Llama work on `chunk` tokens at a time."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    kind = type(model.model.layers[0].mlp)
    whole = kind.forward

    def forward(mlp: Any, x: Tensor) -> Tensor:
        tiled: Tensor = TiledMLP.apply(whole, mlp, x, ceil(x.shape[1] / chunk), list(mlp.parameters()))
        return tiled

    kind.forward = forward
