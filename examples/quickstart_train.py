"""What every rank of the quickstart does: build Megatron's model, data and optimizer, train, and report.

The three lines that make it use burst attention are marked with (burst). It can also be started by hand::

    torchrun --standalone --nproc-per-node 4 examples/quickstart_train.py quickstart-out/settings.json burst
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from quickstart_data import ByteTokenizer, data_prefix, dataset, write_data
from quickstart_settings import Settings

_TIMEOUT = timedelta(minutes=3)


def main(settings: Settings, name: str) -> None:
    """One rank of the run `name`: "burst" spreads each sequence over all ranks, "reference" over none."""
    rank = join(settings)
    try:
        record = train(settings, name)
        (settings.directory / f"{name}-rank{rank}.json").write_text(json.dumps(record))
        dist.barrier()
    except BaseException as error:
        failure = {"rank": rank, "at": time.time(), "error": f"{type(error).__name__}: {error}"}
        (settings.directory / f"{name}-failure{rank}.json").write_text(json.dumps(failure))
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort an orderly exit


def join(settings: Settings) -> int:
    """Join the ranks that the launcher has started; returns this one's number."""
    warnings.filterwarnings("ignore")
    if settings.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", timeout=_TIMEOUT)
    else:
        from burst_plugin.megatron import cpu

        cpu.enable()
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    return dist.get_rank()


def train(settings: Settings, name: str) -> dict[str, Any]:
    """Train, and return what the report needs from this rank."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    is_hybrid = bool(settings.pattern)  # then CPUs need the plugin's layers for the run on one rank, too
    adapter = use_burst(settings) if name == "burst" or is_hybrid else None  # (burst)
    model = build_model(settings, name)
    bf16 = settings.device == "cuda"
    options = OptimizerConfig(
        optimizer="adam",
        lr=settings.learning_rate,
        weight_decay=0.1,
        clip_grad=1.0,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
    )
    optimizer = get_megatron_optimizer(options, [model])
    record: dict[str, Any] = {"losses": [], "grad_norms": [], "steps_s": []}
    record.update(weights=fingerprint(model), parameters=sum(p.numel() for p in model.parameters()))
    if dist.get_rank() == 0 and not data_prefix(settings).with_suffix(".idx").exists():
        tell(settings, name, data=write_data(settings))
    dist.barrier()
    batches = iter(torch.utils.data.DataLoader(dataset(settings), batch_size=1, shuffle=False))
    for step in range(settings.steps):
        started = time.perf_counter()
        loss, grad_norm = train_step(settings, model, optimizer, batches)
        step_s = time.perf_counter() - started
        for key, value in (("losses", loss), ("grad_norms", grad_norm), ("steps_s", step_s)):
            record[key].append(value)
        tell(settings, name, step=step + 1, loss=loss, step_s=step_s)
    if name == "burst":
        record.update(look_at(adapter.contexts()[0], model, settings))
    return record


def use_burst(settings: Settings) -> Any:
    """Make "burst" known to Megatron as a kind of context parallelism."""
    import burst_plugin
    import burst_plugin.megatron

    # On one machine all ranks would count as one node; on a cluster, leave ranks_per_node out.
    strategy = burst_plugin.Strategy(backward=settings.backward, ranks_per_node=settings.ranks_per_node)
    return burst_plugin.megatron.install(strategy)  # (burst)


def build_model(settings: Settings, name: str) -> Any:
    """A GPT or a hybrid model with RoPE, RMSNorm, SwiGLU and grouped-query attention, all of it Megatron's."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module

    levels = [settings.ranks_per_node, settings.nodes]
    two_level = name == "burst" and min(levels) > 1
    parallel_state.initialize_model_parallel(
        context_parallel_size=context_parallel_size(name),
        hierarchical_context_parallel_sizes=levels if two_level else None,
    )
    model_parallel_cuda_manual_seed(settings.seed)
    config = transformer_config(settings, name)
    if two_level:
        config.hierarchical_context_parallel_sizes = levels
    kind, spec, options = hybrid(settings) if settings.pattern else gpt()
    model = kind(
        config,
        spec,
        vocab_size=-(-ByteTokenizer.vocab_size // 8) * 8,
        max_sequence_length=settings.seq_length,
        position_embedding_type="rope",
        **options,
    ).cuda()
    if config.bf16:
        model = Float16Module(config, model)
    return DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)


def gpt() -> tuple[Any, Any, dict[str, Any]]:
    """The class of a GPT, the spec of its layers, and no further options."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return GPTModel, get_gpt_layer_local_spec(normalization="RMSNorm"), {}


def hybrid(settings: Settings) -> tuple[Any, Any, dict[str, Any]]:
    """The same of a model with layers of several kinds, whose names depend on the release."""
    try:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as spec
        from megatron.core.models.hybrid.hybrid_model import HybridModel as Model
    except ImportError:  # until 0.17
        from megatron.core.models.mamba import MambaModel as Model
        from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec as spec
    names = ("hybrid_layer_pattern", "hybrid_override_pattern")  # since 0.17, and before
    name = next(name for name in names if name in signature(Model.__init__).parameters)
    return Model, spec, {name: settings.pattern}


def context_parallel_size(name: str) -> int:
    """How many ranks share a sequence."""
    return dist.get_world_size() if name == "burst" else 1


def transformer_config(settings: Settings, name: str) -> Any:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer import TransformerConfig

    bf16 = settings.device == "cuda"
    return TransformerConfig(
        num_layers=settings.layers,
        hidden_size=settings.hidden,
        num_attention_heads=settings.heads,
        num_query_groups=settings.kv_heads,
        ffn_hidden_size=-(-settings.hidden * 8 // 3 // 16) * 16,
        context_parallel_size=context_parallel_size(name),
        cp_comm_type="burst" if name == "burst" else "p2p",  # (burst)
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        mamba_head_dim=settings.hidden // settings.heads,
        mamba_num_groups=settings.kv_heads,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )


def train_step(
    settings: Settings, model: Any, optimizer: Any, batches: Iterator[Any], microbatches: int = 1
) -> tuple[float, float]:
    """Forward, backward and update by Megatron's schedule; returns the loss and the norm of the gradient."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=[model],
        num_microbatches=microbatches,
        seq_length=settings.seq_length,
        micro_batch_size=1,
        forward_only=False,
    )
    _, grad_norm, _ = optimizer.step()
    totals = torch.stack(losses).sum(0)
    dist.all_reduce(totals)
    return float(totals[0] / totals[1]), float(grad_norm)


def forward_step(batches: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
    """One sequence: Megatron cuts it, and this rank's part goes through the model."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    batch = {key: value.cuda(non_blocking=True) for key, value in next(batches).items()}
    since_0_18 = {"is_hybrid_cp": False} if "is_hybrid_cp" in signature(get_batch_on_this_cp_rank).parameters else {}
    group = parallel_state.get_context_parallel_group()
    part = get_batch_on_this_cp_rank(batch, cp_group=group, **since_0_18)
    losses = model(part["tokens"], part["position_ids"], None, labels=part["labels"])
    return losses, partial(loss_of_part, part["loss_mask"])


def loss_of_part(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum over this rank's tokens and their number, which Megatron divides; and both, to be shown."""
    total, count = (losses.float() * mask).sum(), mask.sum().int()
    return total, count, torch.stack([total.detach(), count.float()])


# ------------------------------------------------------------------------------------------------ for the report


def fingerprint(model: Any) -> str:
    """The same for the same weights."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def look_at(ring: Any, model: Any, settings: Settings) -> dict[str, Any]:
    """What the ring did: bytes sent in training, and the timeline of one attention, forward and backward."""
    sent, expected = ring.traffic(), ring.expected_traffic()
    attention = model
    while hasattr(attention, "module"):
        attention = attention.module
    layers = [getattr(layer, "self_attention", None) for layer in attention.decoder.layers]
    attention = next(layer.core_attention for layer in layers if hasattr(layer, "core_attention"))
    head_dim = settings.hidden // settings.heads
    dtype = next(model.parameters()).dtype
    local = settings.seq_length // settings.ranks
    q, k, v = (
        torch.randn(local, 1, heads, head_dim, device="cuda", dtype=dtype, requires_grad=True)
        for heads in (settings.heads, settings.kv_heads, settings.kv_heads)
    )
    traces = []
    for _ in range(8):  # the report takes the quickest: other programs may have been in the way
        dist.barrier()
        torch.cuda.synchronize()
        with ring.profile() as profile:
            attention(q, k, v, None).sum().backward()
            torch.cuda.synchronize()
        traces.append([event._asdict() for event in profile.events])
    described = {key: str(value) for key, value in ring.describe().items()}
    return {"sent": sent, "expected": expected, "describe": described, "traces": traces}


def tell(settings: Settings, name: str, **news: Any) -> None:
    """Rank 0 tells the launcher how far the training is."""
    if dist.get_rank() == 0:
        with open(settings.directory / f"{name}-progress.jsonl", "a") as file:
            file.write(json.dumps(news) + "\n")


if __name__ == "__main__":
    main(Settings.load(Path(sys.argv[1])), sys.argv[2])
