"""`--burst-memory auto`: what Megatron's arguments say about a run, and the memory options that follow.

Megatron knows all before it builds its model, the length of sequences too. Where layers are computed again as a whole
(`--recompute-granularity full`), the loss comes in chunks, and attention is kept as far as the planner's model of the
run leaves room for it. Without recomputation attention is kept anyway, and nothing changes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from burst_plugin.activations.kept_attention import attention_can_be_kept
from burst_plugin.frameworks.options import Rule, broken_rules, off
from burst_plugin.megatron.cpu.redirection import is_enabled
from burst_plugin.megatron.flags.arguments import flag_of
from burst_plugin.megatron.planning import space
from burst_plugin.planning.cluster import Cluster
from burst_plugin.strategy import AUTO, Strategy
from burst_plugin.training.layer_memory import BF16, FP32
from burst_plugin.training.memory import GIB, memory
from burst_plugin.training.memory_choice import STATES, NextStep, loss_chunk, share_that_fits
from burst_plugin.training.model_shape import ModelShape
from burst_plugin.training.setting import Setting

_NEEDED = (  # arguments without which nothing is known
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "padded_vocab_size"),
    *("seq_length", "micro_batch_size", "tensor_model_parallel_size", "context_parallel_size"),
    *("pipeline_model_parallel_size", "world_size"),
)
_UNKNOWN = (  # arguments with which the planner's model of the memory is not right
    *("multi_latent_attention", "is_hybrid_model", "hybrid_layer_pattern", "hybrid_override_pattern", "num_experts"),
    *("experimental_attention_variant", "use_megatron_fsdp", "use_torch_fsdp2", "use_precision_aware_optimizer"),
    *("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout", "mtp_num_layers"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    "defer_embedding_wgrad_compute",  # which keeps the gradients of many microbatches' logits
    "variable_seq_lengths",  # with which seq_length does not say how long sequences are
)
# Fields of TransformerConfig, and flags, that need whole logits, or take part in the output layer's gradient.
WHOLE_LOGITS: Mapping[str, Rule] = MappingProxyType(
    {
        "cross_entropy_loss_fusion": Rule(
            off, "it computes the loss of whole logits; drop --cross-entropy-loss-fusion"
        ),
        "defer_embedding_wgrad_compute": Rule(
            off, "it keeps the inputs of whole logits; drop --defer-embedding-wgrad-compute"
        ),
        "config_logger_dir": Rule(off, "it saves whole logits; drop --config-logger-dir"),
    }
)
_SHARDS = "tensor_parallel_num_weight_shards"  # since 0.19; as many as tensor-parallel ranks, or more
_SIZES = (
    *_NEEDED,
    *_UNKNOWN,
    _SHARDS,
    *WHOLE_LOGITS,
    *("num_query_groups", "global_batch_size", "swiglu", "untie_embeddings_and_output_weights"),
    *("optimizer_cpu_offload", "use_distributed_optimizer", "num_distributed_optimizer_instances"),
    *("bf16", "fp16", "fp8", "fp4", "sequence_parallel"),
    *("recompute_method", "recompute_num_layers"),
)
_REFERENCE_BYTES = 80 * GIB  # of a GPU, for chunks, which are alike on unlike GPUs


def with_chosen(strategy: Strategy, args: Any) -> Strategy:
    """Return `strategy` with `loss_chunk` and `keep_attention` chosen to fit the run, if its `memory` is "auto".

    Options that are given stay as they are. Nothing changes unless layers are recomputed as a whole
    (`--recompute-granularity full`).

    args: Megatron's parsed arguments, which describe the run; None if its parser did not run.
    """
    if strategy.memory != AUTO or getattr(args, "recompute_granularity", None) != "full":
        return strategy
    on_gpu = torch.cuda.is_available() and not is_enabled()  # on CPUs Megatron is told that there is a GPU
    gpu_bytes = torch.cuda.get_device_properties().total_memory if on_gpu else None
    return _chosen(strategy, tuple(_sizes(args).items()), gpu_bytes)


def _sizes(args: Any) -> dict[str, Any]:
    """Return the sizes of a run from Megatron's arguments, by name, as values that can be hashed; None if missing."""
    found = ((name, getattr(args, name, None)) for name in _SIZES)
    return {name: str(value) if isinstance(value, list) else value for name, value in found}


@functools.lru_cache(maxsize=8)
def _chosen(strategy: Strategy, values: tuple[tuple[str, Any], ...], gpu_bytes: float | None) -> Strategy:
    sizes, options = dict(values), dict[str, Any]()
    vocabulary, tokens = sizes["padded_vocab_size"], _local_tokens(sizes)
    if not strategy.loss_chunk and vocabulary and tokens and not _that_keep_logits_whole(sizes):
        of_rank = -(-vocabulary // sizes["tensor_model_parallel_size"])
        chunk = loss_chunk(of_rank, None if gpu_bytes is None else _REFERENCE_BYTES)
        options["loss_chunk"] = chunk if chunk < tokens else 0
    if not strategy.kept_share and not strategy.offload and attention_can_be_kept():
        step = _step(sizes, replace(strategy, **options), gpu_bytes)
        if gpu_bytes is None:
            options["keep_attention"] = "all"
        elif step is not None:
            options["keep_attention"] = share_that_fits(step)
    return replace(strategy, **options)


def _local_tokens(sizes: dict[str, Any]) -> int:
    """Return how many tokens of a microbatch a context-parallel rank has; 0 if that is not known."""
    if not sizes["seq_length"] or not sizes["micro_batch_size"]:
        return 0
    return int(sizes["seq_length"] * sizes["micro_batch_size"] // sizes["context_parallel_size"])


def _step(sizes: dict[str, Any], strategy: Strategy, gpu_bytes: float | None) -> NextStep | None:
    """Return a step of the run; None for a model that the planner does not know, and where no GPU is."""
    if gpu_bytes is None or not all(sizes[name] for name in _NEEDED) or _uncounted(sizes):
        return None
    tensor, context = sizes["tensor_model_parallel_size"], sizes["context_parallel_size"]
    pipeline = sizes["pipeline_model_parallel_size"]
    data = max(1, sizes["world_size"] // (tensor * context * pipeline))
    model = ModelShape(
        name="Megatron's",
        layers=sizes["num_layers"],
        hidden=sizes["hidden_size"],
        ffn=sizes["ffn_hidden_size"],
        heads=sizes["num_attention_heads"],
        kv_heads=sizes["num_query_groups"] or sizes["num_attention_heads"],
        head_dim=sizes["kv_channels"],
        vocab=sizes["padded_vocab_size"],
        tied=not sizes["untie_embeddings_and_output_weights"],
        matrices=3 if sizes["swiglu"] else 2,
    )
    setting = Setting(
        tokens=sizes["seq_length"],
        code=space(fused_norms=True).code,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        data=data,
        inner=min(context, max(1, torch.cuda.device_count() // tensor)),
        batch=sizes["global_batch_size"] or sizes["micro_batch_size"] * data,
        micro_batch=sizes["micro_batch_size"],
        recompute="full",
        loss_chunk=strategy.loss_chunk,
        mlp_chunk=strategy.mlp_chunk,
        offload_optimizer=bool(sizes["optimizer_cpu_offload"]),
    )
    cluster = Cluster(gpu_gib=gpu_bytes / GIB)
    parts = memory(model, setting, cluster).gpu
    item_bytes = BF16 if sizes["bf16"] or sizes["fp16"] else FP32
    missing = sum(parts[name] for name in STATES) + parts["weights"] * (item_bytes / BF16 - 1)
    # The ranks of an instance share the optimizer's states; without such sharing each rank has all of them.
    shared = sizes["use_distributed_optimizer"]
    copies = (sizes["num_distributed_optimizer_instances"] or 1) if shared else context * data
    missing += parts["optimizer"] * (copies - 1)
    if sizes["fp8"] or sizes["fp4"]:
        missing += parts["weights"]  # of which linear layers have copies of a byte each, by rows and by columns
    return NextStep(
        model=model, setting=setting, cluster=cluster, free=gpu_bytes, states=missing, item_bytes=item_bytes
    )


def _uncounted(sizes: dict[str, Any]) -> list[str]:
    """Return the flags of a run for which the planner's model of its memory is not right."""
    flags = [flag_of(name, sizes[name]) for name in _UNKNOWN if sizes[name]]
    flags += _of_shards(sizes)
    tensor, pipeline = sizes["tensor_model_parallel_size"] or 1, sizes["pipeline_model_parallel_size"] or 1
    if tensor > 1 and not sizes["sequence_parallel"]:
        flags.append(f"--tensor-model-parallel-size {tensor} without --sequence-parallel")
    method, at_once = sizes["recompute_method"], sizes["recompute_num_layers"] or 1
    is_whole = at_once * pipeline >= (sizes["num_layers"] or 0) if method == "block" else at_once == 1
    if not is_whole:
        flags.append(f"--recompute-method {method} --recompute-num-layers {at_once}")
    return flags


def _that_keep_logits_whole(sizes: dict[str, Any]) -> list[str]:
    """Return the flags of a run with which its loss cannot be computed in chunks."""
    return [flag_of(name, value) for name, value, _ in broken_rules(WHOLE_LOGITS, sizes)] + _of_shards(sizes)


def _of_shards(sizes: dict[str, Any]) -> list[str]:
    """Return the flag of a run whose weights are cut into more shards than there are tensor-parallel ranks."""
    shards, tensor = sizes[_SHARDS] or 1, sizes["tensor_model_parallel_size"] or 1
    return [flag_of(_SHARDS, shards)] if shards > tensor else []


def in_words(given: Strategy, asked: Strategy, args: Any) -> str:
    """Return text for the user on the memory options that were chosen: which, why, and how to change them.

    It names flags with which logits stay whole, and flags with which attention is not kept, since its memory is not
    known then. It is "" if nothing was to be chosen.

    Args:
        given: the options before the choice.
        asked: the options after it.
        args: Megatron's parsed arguments; None if its parser did not run.
    """
    said = []
    if asked.loss_chunk != given.loss_chunk:
        said.append(f"loss in chunks of {asked.loss_chunk:,} tokens")
    if asked.kept_share != given.kept_share:
        said.append(f"attention is not computed again: keep_attention={asked.keep_attention!r}")
    chooses = given.memory == AUTO and getattr(args, "recompute_granularity", None) == "full"
    if chooses and not asked.loss_chunk and (flags := _that_keep_logits_whole(_sizes(args))):
        said.append(f"logits stay whole, since the loss is not cut into chunks with {', '.join(flags)}")
    is_open = chooses and not asked.kept_share and not given.offload
    if is_open and (flags := _uncounted(_sizes(args))):
        said.append(f"attention is computed again, since its memory is not counted with {', '.join(flags)}")
    if not said:
        return ""
    return (
        f'burst_plugin: memory "auto", since layers are computed again: {"; ".join(said)}. To change it: '
        "--burst-memory off, or --burst-loss-chunk, --burst-keep-attention"
    )
