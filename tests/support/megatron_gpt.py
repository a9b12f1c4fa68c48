"""A tiny Megatron-core GPT whose weights do not depend on how it is parallelised, for parity tests.

Every rank of an initialised gloo process group calls, in this order::

    run = GptRun(cp=4, hierarchical=(2, 2), cp_comm_type="burst")
    result = one_step(run, tokens)          # or: model = build(run); ...; leave()

and gets the same ``StepResult``: the mean loss of all tokens and every parameter's whole gradient, gathered
over tensor- and pipeline-parallel ranks, under names that count layers from the first pipeline stage.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed as dist

from burst_plugin import Strategy
from burst_plugin.megatron import cpu, packed_indices
from tests.support.megatron_hybrid import (
    SequenceParallelNorm,
    delta_model,
    drawn_for_mixer,
    hybrid_model,
    mixer_sections,
)
from tests.support.megatron_sparse import sparse_model

_WEIGHT_STD = 0.1  # larger than usual, so that a wrong token order is plain to see


@dataclass(frozen=True)
class GptRun:
    """A model's shape, how it is cut up, and what is recomputed."""

    layers: int = 4
    hidden: int = 64
    heads: int = 8
    groups: int = 4
    ffn: int = 96
    vocab: int = 128
    seq_length: int = 64
    tp: int = 1
    pp: int = 1
    cp: int = 1
    hierarchical: tuple[int, ...] | None = None
    cp_comm_type: str | None = None
    strategy: Strategy | None = None
    sequence_parallel: bool = False
    recompute: str = "none"
    per_token_loss: bool = False
    microbatch_size: int = 2
    distributed_optimizer: bool = False
    ep: int = 1
    """Expert-parallel ranks; experts come with num_moe_experts in config."""
    config: dict[str, Any] = field(default_factory=dict)
    """More fields of TransformerConfig or, with multi_latent_attention, of MLATransformerConfig."""
    core: Any = None
    """A core attention for every layer, in the place of Megatron's own."""
    tied: bool = False
    """Whether the output layer has the embedding's weight."""
    positions: str = "rope"
    """Megatron's position_embedding_type."""
    pattern: str = ""
    """The layers of a hybrid model, by Megatron's letters; as many as `layers`."""


@dataclass(frozen=True)
class StepResult:
    """One forward and backward: the mean loss, and every parameter's whole gradient in float32 on the CPU."""

    loss: float
    grads: dict[str, torch.Tensor]


def check_close(found: StepResult, truth: StepResult, bound: float = 1e-4, case: Any = None) -> None:
    """Compare losses, to 1e-5, and every parameter's gradient, to `bound` of its norm."""
    assert found.loss == pytest.approx(truth.loss, abs=1e-5), case
    check_grads(found.grads, truth.grads, bound, case)


def check_trained(found: StepResult, truth: StepResult, bound: float = 1e-4, case: Any = None) -> None:
    """Compare losses and gradients, of which none is 0."""
    check_close(found, truth, bound, case)
    assert [name for name, grad in truth.grads.items() if not torch.linalg.vector_norm(grad) > 0] == []


def check_grads(
    found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor], bound: float = 1e-4, case: Any = None
) -> None:
    """Compare the gradient of every parameter, to `bound` of its norm."""
    assert found.keys() == truth.keys(), case
    for name, grad in found.items():
        error = torch.linalg.vector_norm(grad - truth[name])
        assert error <= bound * torch.linalg.vector_norm(truth[name]), (name, float(error), case)


def random_tokens(run: GptRun, microbatches: int = 2, seed: int = 0) -> torch.Tensor:
    """Token ids [microbatches, microbatch_size, seq_length + 1]; the last one of each row is only a label."""
    generator = torch.Generator().manual_seed(seed)
    shape = (microbatches, run.microbatch_size, run.seq_length + 1)
    return torch.randint(run.vocab, shape, generator=generator)


def batches(tokens: torch.Tensor) -> Iterator[dict[str, torch.Tensor]]:
    """Whole microbatches, as Megatron's data loader gives them, not yet cut for context parallelism."""
    positions = torch.arange(tokens.shape[-1] - 1)
    for rows in tokens:
        yield {
            "tokens": rows[:, :-1].contiguous(),
            "labels": rows[:, 1:].contiguous(),
            "loss_mask": torch.ones(rows[:, 1:].shape, dtype=torch.float32),
            "position_ids": positions.expand(rows.shape[0], -1).contiguous(),
        }


def join(run: GptRun) -> None:
    """Set up Megatron's groups for ``run``. With ``cp_comm_type="burst"`` the plugin is installed before."""
    cpu.enable(force=True)  # the test ranks are joined by gloo, on machines with GPUs too
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import multi_latent_attention

    if run.cp_comm_type == "burst":
        from burst_plugin import megatron as burst_megatron

        burst_megatron.install(run.strategy)
    if not isinstance(multi_latent_attention.TELinear, type):  # without Transformer Engine a mock, or None
        multi_latent_attention.TELinear = type("TELinear", (), {})  # type: ignore[misc]
    with suppress(ImportError):  # from 0.17 on
        from megatron.core.extensions import transformer_engine
        from megatron.core.transformer.experimental_attention_variant import absorbed_mla

        absorbed_mla.TELinear = transformer_engine.TELinear
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=run.tp,
        pipeline_model_parallel_size=run.pp,
        context_parallel_size=run.cp,
        hierarchical_context_parallel_sizes=list(run.hierarchical) if run.hierarchical else None,
        expert_model_parallel_size=run.ep,
        virtual_pipeline_model_parallel_size=run.config.get("virtual_pipeline_model_parallel_size"),
    )
    model_parallel_cuda_manual_seed(1234)


def build(run: GptRun, wrap: Callable[[Any, Any], Any] | None = None) -> Any:
    """``join``, and return the model of ``run`` in Megatron's DistributedDataParallel, or as `wrap` wraps it.

    `wrap` takes the configuration and the model.
    """
    join(run)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = transformer_config(run)
    model = _gpt_model(run, config)
    set_weights(model, run)
    if wrap is not None:
        return wrap(config, model)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=run.distributed_optimizer)
    return DistributedDataParallel(config, ddp_config, model)


def leave() -> None:
    """Take Megatron's groups down, so that the same processes can build another model."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def one_step(run: GptRun, tokens: torch.Tensor, step: Any = None) -> StepResult:
    """Build the model of ``run``, run one forward and backward over ``tokens``, take the groups down.

    Args:
        run: shape and cutting; dp follows from the world size.
        tokens: what ``random_tokens`` gives, the same on every rank.
        step: another function than ``forward_step``.
    """
    model = build(run)
    try:
        loss = forward_backward(model, run, tokens, step)
        return StepResult(loss, full_grads(model, run))
    finally:
        leave()


def forward_backward(model: Any, run: GptRun, tokens: torch.Tensor, step: Any = None, data: Any = batches) -> float:
    """One forward and backward by Megatron's schedule, gradients in ``main_grad``. Returns the mean loss.

    ``data`` makes a data iterator of tokens, or None for a rank that reads none.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model.zero_grad_buffer()
    losses = get_forward_backward_func()(
        forward_step_func=step or forward_step,
        data_iterator=data(tokens),
        model=[model],
        num_microbatches=len(tokens),
        seq_length=run.seq_length,
        micro_batch_size=tokens.shape[1],
        forward_only=False,
    )
    total = torch.zeros(2, dtype=torch.float64)
    for loss_and_tokens in losses:  # empty but on the last pipeline stage
        total += loss_and_tokens.to(total)
    # Tensor-parallel ranks hold the same loss; the sum over one tensor-parallel rank of each is wanted.
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        total.zero_()
    dist.all_reduce(total)
    return float(total[0] / total[1])


def forward_step(data: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
    """What Megatron's schedules call for each microbatch: cut a batch by Megatron's zigzag, run the model."""
    batch = cut_batch(next(data))
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss_of, batch["loss_mask"])


def packed_forward_step(
    data: Iterator[dict[str, torch.Tensor]], model: Any, *, starts: tuple[int, ...], real: tuple[int, ...]
) -> tuple[torch.Tensor, Any]:
    """The same of packed documents, which begin at `starts` and have the lengths of `real` without padding."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    batch, lengths = next(data), torch.tensor(real, dtype=torch.int32)
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    for start, length in zip(starts, lengths.diff().tolist(), strict=False):
        batch["loss_mask"][:, start : start + length - 1] = 1  # the last token of a document predicts nothing
    cp = parallel_state.get_context_parallel_group()
    rows = packed_indices(starts, cp.size(), cp.rank())
    tokens, labels, mask, position_ids = (
        batch[name].index_select(1, rows) for name in ("tokens", "labels", "loss_mask", "position_ids")
    )
    offsets = torch.tensor(starts, dtype=torch.int32)
    longest = int(offsets.diff().max())
    params = PackedSeqParams("thd", lengths, lengths, offsets, offsets, longest, longest)
    output = model(tokens, position_ids, None, labels=labels, loss_mask=mask, packed_seq_params=params)
    return output, partial(loss_of, mask)


def cut_batch(batch: dict[str, torch.Tensor], group: dist.ProcessGroup | None = None) -> dict[str, torch.Tensor]:
    """This rank's part of a batch, by Megatron; of all the ranks of context parallelism, or of `group`.

    The group is always given: without one Megatron from 0.18 on takes the whole world, unless it has been repaired.
    """
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    group = group or parallel_state.get_context_parallel_group()
    since_0_18 = {"is_hybrid_cp": False} if "is_hybrid_cp" in signature(get_batch_on_this_cp_rank).parameters else {}
    return get_batch_on_this_cp_rank(batch, cp_group=group, **since_0_18)


def loss_of(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What schedules call on a model's output: (sum to differentiate, tokens, sum and tokens to report)."""
    total = (output.float() * mask).sum()
    count = mask.sum().to(torch.int)
    return total, count, torch.stack([total.detach(), count.to(total.dtype)])


def transformer_config(run: GptRun) -> Any:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if run.config.get("multi_latent_attention") else TransformerConfig
    recompute: dict[str, Any] = {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }[run.recompute]
    options: dict[str, Any] = {
        "num_layers": run.layers,
        "hidden_size": run.hidden,
        "num_attention_heads": run.heads,
        "num_query_groups": run.groups,
        "ffn_hidden_size": run.ffn,
        "tensor_model_parallel_size": run.tp,
        "pipeline_model_parallel_size": run.pp,
        "context_parallel_size": run.cp,
        "expert_model_parallel_size": run.ep,
        "hierarchical_context_parallel_sizes": list(run.hierarchical) if run.hierarchical else None,
        "sequence_parallel": run.sequence_parallel,
        "calculate_per_token_loss": run.per_token_loss,
        "pipeline_dtype": torch.float32,
        "normalization": "RMSNorm",
        "activation_func": torch.nn.functional.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "finalize_model_grads_func": finalize_model_grads,
    }
    if run.cp_comm_type is not None:
        options["cp_comm_type"] = run.cp_comm_type
    found = kind(**{**options, **recompute, **run.config})
    vars(found).update(_YARN if run.positions == "yarn" else {})  # as Megatron's scripts do
    return found


_YARN = {
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 16,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}


def _gpt_model(run: GptRun, config: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    if run.pattern:
        return hybrid_model(run, config)
    if config.experimental_attention_variant == "dsa":
        return sparse_model(run, config)
    if config.experimental_attention_variant:
        return delta_model(run, config)
    spec = _block_spec(run, config)
    return GPTModel(
        config,
        spec,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, False) if config.mtp_num_layers else None,
        vocab_size=run.vocab,
        max_sequence_length=run.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type=run.positions,
        share_embeddings_and_output_weights=run.tied,
    )


def _block_spec(run: GptRun, config: Any) -> Any:
    """Megatron's local spec; for sequence parallelism with a norm of ours, as Megatron refuses torch's."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import transformer_block

    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    if run.core is not None:
        layer.submodules.self_attention.submodules.core_attention = run.core
    if not config.sequence_parallel:
        return layer
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = SequenceParallelNorm
    count = transformer_block.get_num_layers_to_build(config)
    return transformer_block.TransformerBlockSubmodules([layer] * count, SequenceParallelNorm)


# --------------------------------------------------------------------- parameters, whole and cut for one rank


def set_weights(model: Any, run: GptRun) -> None:
    """Give every parameter its slice of a whole tensor that a generator seeded by the name has drawn."""
    from megatron.core import parallel_state

    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for name, param in named_parameters(model):
            shape, dim, sections = _place(model, name, param, run.tp)
            drawn = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            whole = drawn_for_mixer(name, drawn)
            if whole is None:
                whole = drawn * _WEIGHT_STD
                if len(shape) == 1:  # weights of a norm lie around 1, not 0
                    whole += 1.0
            if dim is not None:
                whole = torch.cat([part.chunk(run.tp, dim)[tp_rank] for part in whole.split(sections, dim)], dim)
            param.copy_(whole)


def full_grads(model: Any, run: GptRun) -> dict[str, torch.Tensor]:
    """The ``main_grad`` of every parameter that is trained, joined over tensor- and pipeline-parallel ranks."""
    from megatron.core import parallel_state

    if run.distributed_optimizer:
        _gather_grad_shards(model)
    tp_group = parallel_state.get_tensor_model_parallel_group()
    stage: dict[str, torch.Tensor] = {}
    for name, param in named_parameters(model):
        if not param.requires_grad:
            continue
        grad = param.main_grad.detach().float()
        _, dim, sections = _place(model, name, param, run.tp)
        if dim is not None:
            parts = [torch.empty_like(grad) for _ in range(run.tp)]
            dist.all_gather(parts, grad.contiguous(), group=tp_group)
            cut = [part.split([size // run.tp for size in sections], dim) for part in parts]
            grad = torch.cat([torch.cat(same, dim) for same in zip(*cut, strict=True)], dim)
        stage[name] = grad.cpu().clone()
    if run.tp == run.pp == run.ep == 1 and not run.distributed_optimizer:  # every rank has the whole model
        return stage
    parts_of_model: list[Any] = [None] * dist.get_world_size()  # pipeline stages, and each rank's experts
    dist.all_gather_object(parts_of_model, stage)
    return {name: grad for part in parts_of_model for name, grad in part.items()}


def _gather_grad_shards(model: Any) -> None:
    """With the distributed optimizer every rank has reduced its own part of each gradient bucket; get the rest."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for buffer in model.buffers:
        for bucket in buffer.buckets:
            own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


def named_parameters(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(name, parameter) of a GPTModel or its wrapper, with layers counted over all pipeline stages from 0."""
    while hasattr(model, "module"):
        model = model.module
    for name, param in model.named_parameters():
        found = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
        if found:
            layer = model.decoder.layers[int(found.group(1))].layer_number - 1
            name = f"decoder.layers.{layer}.{found.group(2)}"
        yield re.sub(r"(?<=local_experts\.)\d+", lambda local: _expert(model, int(local.group())), name), param


def _expert(model: Any, local: int) -> str:
    """The number of an expert among those of all ranks."""
    from megatron.core import parallel_state

    own = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    return str(parallel_state.get_expert_model_parallel_rank() * own + local)


def _place(model: Any, name: str, param: torch.nn.Parameter, tp: int) -> tuple[list[int], int | None, list[int]]:
    """The shape of a whole parameter; the dim that is cut, if one is; and its parts, each of which ranks share."""
    while hasattr(model, "module"):
        model = model.module
    shape, sections = list(param.shape), mixer_sections(name, model.config)
    dim = 0 if sections else param.partition_dim if getattr(param, "tensor_model_parallel", False) else None
    if dim is None:
        return shape, dim, []
    shape[dim] *= tp
    if sections is None:  # a gated MLP's first weight is [gate; up], and each rank holds a part of both
        sections = [shape[0] // 2] * 2 if name.endswith("linear_fc1.weight") else [shape[dim]]
    return shape, dim, sections
