"""Losses of experts' routers over ranks that hold unequal numbers of valid tokens: against one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_layer import TransformerLayer

from burst_plugin import Strategy
from burst_plugin.megatron import packed_indices
from tests.support.megatron_gpt import (
    GptRun,
    build,
    cut_batch,
    forward_backward,
    full_grads,
    leave,
    loss_of,
    random_tokens,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron

Grads = dict[str, torch.Tensor]
Batches = Iterator[dict[str, torch.Tensor]]

BALANCE = ["aux_loss", "seq_aux_loss", "global_aux_loss"]
ONE_RANK = GptRun(
    layers=2,
    seq_length=24,
    cp_comm_type="burst",  # for its repairs
    config={
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 32,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": BALANCE,
        "moe_aux_loss_coeff": [0.1, 0.2, 0.3],
        "moe_z_loss_coeff": 0.1,
    },
)
# Coefficients of BALANCE, and of the z loss.
KINDS: dict[str, tuple[list[float], float | None]] = {
    "aux_loss": ([0.1, 0, 0], None),
    "seq_aux_loss": ([0, 0.1, 0], None),
    "global_aux_loss": ([0, 0, 0.1], None),
    "z_loss": ([0, 0, 0], 0.1),
    "all": ([0.1, 0.2, 0.3], 0.1),
}
# Valid tokens of the two rows of two microbatches. Of a few tokens, some ranks have none in every layout. With little
# padding, some ranks have none of it, and then pass no mask.
LENGTHS = {"no_mask": None, "padded": ((9, 7), (20, 13)), "few": ((3, 1), (2, 3)), "little": ((24, 20), (18, 24))}
TOGETHER = [("all", padding) for padding in LENGTHS]
IN_A_REPLICA = "little, in one of the data-parallel replicas"
CASES = [*TOGETHER, *((kind, "padded") for kind in KINDS if kind != "all")]


def _padded(padding: str) -> Callable[[Batches, Any], tuple[torch.Tensor, Any]]:
    """Return a forward step on rows that end in padding, whose main loss of 0 counts valid tokens."""
    chosen = LENGTHS[padding.split(",")[0]]
    if padding == IN_A_REPLICA and parallel_state.get_data_parallel_rank() > 0:
        chosen = ((24, 24), (24, 24))
    lengths = iter(chosen or ())

    def step(data: Batches, model: Any) -> tuple[torch.Tensor, Any]:
        batch = next(data)
        if chosen is not None:
            batch["padding_mask"] = batch["position_ids"] >= torch.tensor(next(lengths))[:, None]
            batch["loss_mask"] *= ~batch["padding_mask"]
        batch = cut_batch(batch)
        mask = batch.get("padding_mask")
        spread = parallel_state.get_context_parallel_world_size() > 1
        if spread and padding.startswith("little") and not mask.any():
            mask = None
        output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], padding_mask=mask)

        def nothing(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            total, count, reported = loss_of(batch["loss_mask"], output)
            return 0 * total, count, reported

        return output, nothing

    return step


def _tracked_z_loss() -> torch.Tensor:
    """Return the z losses by layer that Megatron has added up to print them, for this pipeline stage."""
    if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker"):
        entry = moe_utils.get_moe_layer_wise_logging_tracker().get("z_loss")
        return torch.zeros(1) if entry is None else entry["values"]
    from megatron.core.transformer.moe import moe_logging  # from 0.18 on

    entry = moe_logging.get_moe_metrics_tracker().metrics.get("z_loss")
    return torch.zeros(1) if entry is None else entry.values


def _gradients(rank: int, run: GptRun, cases: Sequence[tuple[str, str]]) -> dict[str, Grads]:
    """Return the gradients of routers' losses alone, and the z losses that are printed, by what they count."""
    found = {}
    for per_token in (False, True):
        made = replace(run, per_token_loss=per_token)
        model = build(made)
        routers = [module for module in model.modules() if hasattr(module, "reset_global_aux_loss_tracker")]
        for kind, padding in cases:
            for router in routers:
                router.config.moe_aux_loss_coeff, router.config.moe_z_loss_coeff = KINDS[kind]
                router.reset_global_aux_loss_tracker()
            _tracked_z_loss().zero_()
            forward_backward(model, made, random_tokens(made), _padded(padding))
            printed = _tracked_z_loss().clone()
            dist.all_reduce(printed, group=parallel_state.get_pipeline_model_parallel_group())
            name = f"{kind}, {padding}, {'per token' if per_token else 'mean'}"
            found[name] = {**full_grads(model, made), "z loss": printed}
        leave()
    return found


@functools.cache
def _on_one_rank() -> dict[str, Grads]:
    (found,) = run_ranks(_gradients, 1, ONE_RANK, CASES)
    return found


def _error(grads: Grads, expected: Grads) -> float:
    """Return the largest error of a gradient or of the z losses, relative to its norm."""
    assert grads.keys() == expected.keys()
    errors = []
    for name, grad in grads.items():
        norm = torch.linalg.vector_norm(expected[name])
        error = torch.linalg.vector_norm(grad - expected[name])
        errors.append(float(error / norm) if norm else float(error))
    return max(errors)


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("cp", [2, 4])
def test_losses_of_routers_weigh_valid_tokens_alike(cp: int, layout: str) -> None:
    """All at once, and in one layout each by itself."""
    run = replace(ONE_RANK, cp=cp, strategy=Strategy(layout=layout))
    check_equal(run_ranks(_gradients, cp, run, CASES if layout == "zigzag" else TOGETHER))


@pytest.mark.parametrize(
    "sizes",
    [{"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"ep": 2}, {"recompute": "full"}],
    ids=["tp2", "pp2", "ep2", "recomputed"],
)
def test_so_do_they_with_other_parallelism(sizes: dict[str, Any]) -> None:
    run = replace(ONE_RANK, cp=2, **sizes)
    check_equal(run_ranks(_gradients, 2 * run.tp * run.pp, run, TOGETHER))


def test_so_do_they_with_data_parallelism() -> None:
    cases = [("global_aux_loss", "no_mask"), ("global_aux_loss", "little"), ("global_aux_loss", IN_A_REPLICA)]
    (expected, _) = run_ranks(_gradients, 2, ONE_RANK, cases)
    check_equal(run_ranks(_gradients, 4, replace(ONE_RANK, cp=2), cases), expected)


def check_equal(results: list[dict[str, Grads]], truth: dict[str, Grads] | None = None) -> None:
    truth = truth or _on_one_rank()
    errors = {case: max(_error(rank[case], truth[case]) for rank in results) for case in results[0]}
    assert max(errors.values()) < 1e-6, errors


# ---------------------------------------------------------------------------------------- samples of packed sequences

SAMPLE = 24  # tokens
DOCUMENTS = [(0, 8, 24, 40, 48), (0, 24, 32, 40, 48)]  # of two samples, where they begin, by microbatch
SEQUENCES = replace(
    ONE_RANK,
    layers=1,
    config={**ONE_RANK.config, "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1},
)


def _balancing_samples(rank: int, run: GptRun) -> torch.Tensor:
    """Return the gradient of a router's losses, of two microbatches, summed over ranks."""
    if not hasattr(TransformerLayer, "_maybe_unflatten_for_moe"):  # until 0.18 it computes one loss for all samples
        TransformerLayer._maybe_unflatten_for_moe = lambda *args: args[1:]
    model = build(run)
    model.zero_grad_buffer()
    (layer,) = model.module.decoder.layers
    layer.is_moe_layer = True
    outputs = []
    for seed, offsets in enumerate(DOCUMENTS):
        hidden, mask = torch.randn(offsets[-1], 1, run.hidden, generator=torch.Generator().manual_seed(seed)), None
        if run.cp == 1:
            hidden = hidden.view(-1, SAMPLE, run.hidden).transpose(0, 1)
        else:
            params = PackedSeqParams("thd", *[torch.tensor(offsets, dtype=torch.int32)] * 4, SAMPLE, SAMPLE)
            params.tokens_per_sample = SAMPLE
            hidden = hidden[packed_indices(offsets, run.cp, rank)]
            hidden, mask, _ = layer._maybe_unflatten_for_moe(hidden, None, params)
        outputs.append(layer.mlp(hidden.contiguous().requires_grad_(), padding_mask=mask)[0])
    for output in outputs:
        output.backward(torch.zeros_like(output))
    grad: torch.Tensor = layer.mlp.router.weight.main_grad
    dist.all_reduce(grad)
    return grad


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [("zigzag", {}), ("striped", {}), ("contiguous", {}), ("auto", {}), ("auto", {"recompute_modules": ["moe"]})],
)
def test_packed_samples_are_balanced_one_by_one(layout: str, recompute: dict[str, Any]) -> None:
    """Also when experts are recomputed, after another microbatch's documents."""
    (expected,) = run_ranks(_balancing_samples, 1, SEQUENCES)
    config = {**SEQUENCES.config, **recompute, **({"recompute_granularity": "selective"} if recompute else {})}
    for grad in run_ranks(
        _balancing_samples, 2, replace(SEQUENCES, cp=2, config=config, strategy=Strategy(layout=layout))
    ):
        assert torch.linalg.vector_norm(grad - expected) < 1e-6 * torch.linalg.vector_norm(expected)
