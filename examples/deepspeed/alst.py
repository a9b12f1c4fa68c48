"""Trains the same Llama by what DeepSpeed itself has for long sequences, ALST (arXiv 2506.13996), to compare.

    torchrun --nproc-per-node 8 examples/deepspeed/alst.py --config examples/deepspeed/ds_config_long.json

Ulysses around PyTorch's attention, TiledMLP, TiledFusedLogitsLoss, and Hugging Face's checkpoints, whose inputs may
wait in host memory, put together as DeepSpeed's tutorial and docstrings say. TiledFusedLogitsLoss gives the head its
gradient in the forward pass. What is done to the loss afterwards does not reach that gradient, neither a division by
tokens nor accumulation; so each tile's loss is divided here, and every sequence is a step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed.nn.functional as dist_nn
from data import samples, train_tokenizer
from deepspeed.runtime.activation_checkpointing.offload_activations import CheckpointHiddenStatesOffload
from deepspeed.runtime.sequence_parallel.ulysses_sp import (
    TiledFusedLogitsLoss,
    TiledMLP,
    UlyssesSPAttentionHF,
    UlyssesSPDataLoaderAdapter,
)
from deepspeed.utils import groups
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler
from train import build_model, parse, save
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP

_IGNORED = -100


def main() -> None:
    options = parse()
    config = json.loads(Path(options.config).read_text())
    tokenizer = train_tokenizer(options.vocabulary, options.data)
    sequences = [x["input_ids"] for x in samples(tokenizer, options.seq_length, options.steps, options.data)]
    history = train(build_model(options), sequences, config)
    save(history, options.out, torch.distributed.get_rank())


def train(
    model: LlamaForCausalLM,
    sequences: Sequence[Tensor],
    config: Mapping[str, Any],
    step_ended: Callable[[], None] = lambda: None,
) -> list[dict[str, float]]:
    """Train on a sequence [S] a step, which all ranks share; return the loss and gradient norm of every step.

    The block "burst_attention" of the configuration says how long chunks are, and whether to offload.
    """
    config, block = dict(config), config["burst_attention"]
    del config["burst_attention"]
    deepspeed.comm.init_distributed(auto_mpi_discovery=False, verbose=False)
    ranks = deepspeed.comm.get_world_size()
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model, "sdpa", ranks, micro_batch_size=1, seq_length=len(sequences[0]), seq_length_is_variable=False
    )
    tile_mlps(block["mlp_chunk"])
    model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={**config, "gradient_accumulation_steps": 1, "sequence_parallel_size": ranks},
        mpu=mpu,
    )
    parked: Any = nullcontext()
    if block["offload"]:
        parked = Offload(use_streams=engine.device.type == "cuda")
    history = []
    for batch in islice(batches(sequences, engine), len(sequences)):
        with parked:
            loss = loss_of(engine.module, batch, block["loss_chunk"])
            engine.backward(loss)
        engine.step()
        history.append({"loss": loss.item(), "grad_norm": float(engine.get_global_grad_norm())})
        step_ended()
    return history


class Offload(CheckpointHiddenStatesOffload):
    """DeepSpeed's own, which knows inputs by their id; under ZeRO-3 it gets other objects, and does nothing.

    On CPUs it copies as well, where DeepSpeed would leave that out, for measurements.
    """

    def mark(self, tensor: Tensor) -> None:
        self._allowed[tensor.data_ptr()] = self._allowed.get(tensor.data_ptr(), 0) + 1

    def _consume_mark(self, tensor: Tensor) -> bool:
        marks = self._allowed.pop(tensor.data_ptr(), 0)
        if marks > 1:
            self._allowed[tensor.data_ptr()] = marks - 1
        return marks > 0

    def _should_skip(self, tensor: Tensor) -> bool:
        return self._num_bytes(tensor) < self.min_offload_bytes


def tile_mlps(chunk: int) -> None:
    """Have the MLPs of all Llamas work on `chunk` tokens at a time."""
    whole = LlamaMLP.forward

    def forward(mlp: LlamaMLP, x: Tensor) -> Tensor:
        return TiledMLP.apply(whole, mlp, x, ceil(x.shape[1] / chunk), list(mlp.parameters()))

    LlamaMLP.forward = forward


def batches(sequences: Sequence[Tensor], engine: Any) -> Iterator[dict[str, Tensor]]:
    """Return this rank's parts of all sequences, in the order of DeepSpeed's own loader; ranks load them in turn."""
    group, positions = groups._get_sequence_parallel_group(), torch.arange(len(sequences[0]))
    rank, ranks = groups._get_sequence_parallel_rank(), groups._get_sequence_parallel_world_size()
    order = list(DistributedSampler(sequences, num_replicas=1, rank=0))
    order += order[: -len(order) % ranks]  # for the last turn, of which no more is used
    data = [
        {"input_ids": sequences[i], "labels": sequences[i], "position_ids": positions} for i in order[rank::ranks]
    ]
    parts = UlyssesSPDataLoaderAdapter(
        DataLoader(data, batch_size=1), sp_rank=rank, sp_group=group, sp_world_size=ranks, device=engine.device
    )
    return ({name: x.to(engine.device) for name, x in part.items()} for part in parts)


def loss_of(model: LlamaForCausalLM, batch: dict[str, Tensor], chunk: int) -> Tensor:
    """Return the loss of a whole sequence, the mean over the labels of all ranks."""
    labels = batch.pop("shift_labels")
    counted = (labels != _IGNORED).sum()

    def of_tile(model: LlamaForCausalLM, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = model.lm_head(hidden).float()
        return cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum") / counted

    hidden = model.model(**batch, use_cache=False).last_hidden_state
    tiles, weights = ceil(labels.shape[1] / chunk), [model.lm_head.weight]
    mean = TiledFusedLogitsLoss.apply(of_tile, model, hidden, labels, None, tiles, weights, "sum")
    group = groups._get_sequence_parallel_group()
    means, counts = (dist_nn.all_gather(x, group=group) for x in (mean, counted))
    return sum(x * count for x, count in zip(means, counts, strict=True)) / sum(counts)


if __name__ == "__main__":
    main()
