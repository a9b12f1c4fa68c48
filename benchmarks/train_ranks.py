"""What every rank of `bench train` does: train an example on made-up tokens, and measure time and memory."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.memory import PeakMemory, keep_freed_memory
from benchmarks.report.files import ROOT, cpus
from burst_plugin import ContextParallel, Strategy, burst_attention

EXAMPLES = ROOT / "examples"
WARM_UP = 1  # steps that are not timed; the clock starts when they end
# bfloat16 with float32 sums, without sparsity, from NVIDIA's data sheets; the first whose words the GPU's name has.
_PEAK_TFLOPS_PER_S = (
    *(("GB200", 2500), ("B200", 2250), ("GH200", 989), ("H200 NVL", 835), ("H200", 989), ("H100 PCIe", 756)),
    *(("H100 NVL", 835), ("H100", 989), ("H800", 989), ("H20", 148), ("A100", 312), ("A800", 312), ("L40S", 362)),
    *(("L40", 181), ("L4", 121), ("A10G", 70), ("A10", 125), ("RTX 4090", 165), ("RTX 3090", 71)),
)


@dataclass(frozen=True)
class Job:
    """One training of a GPT: `ranks` ranks, of which `context_parallel_size` share a sequence of `seq` tokens."""

    ranks: int
    context_parallel_size: int
    seq: int
    sequences: int  # of a step, on all ranks
    steps: int  # that are timed
    device: str  # "cpu" or "cuda"
    nodes: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int  # of the DeepSpeed example
    measures_memory: bool = False  # instead of time

    @property
    def microbatches(self) -> int:
        """Number of sequences of a step that a rank works on, or takes part in, one after the other."""
        return self.sequences * self.context_parallel_size // self.ranks

    @property
    def tokens_per_step(self) -> int:
        return self.seq * self.sequences

    @property
    def shape(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("layers", "hidden", "heads", "kv_heads")}


class Seen(NamedTuple):
    """What one rank knows of its training."""

    parameters: int  # without the table of input embeddings
    kernel: str
    ring_bytes: int
    losses: tuple[float, ...] = ()


class Trained(NamedTuple):
    """What one rank measured: seconds by step, or memory beyond what it held before, and what its device can do."""

    steps_s: list[float]
    peak_bytes: int
    peak_flops_per_s: float | None
    seen: Seen


@dataclass(frozen=True)
class Example:
    """A training example; `train(job, step_ended)` calls `step_ended` after each of WARM_UP + job.steps steps."""

    name: str
    packages: tuple[str, ...]  # that it needs
    modules: tuple[str, ...]  # that take time to import
    train: Callable[[Job, Callable[[], None]], Seen]
    refuse: Callable[[Job], str | None] = lambda job: None

    def absent(self, job: Job) -> str | None:
        """Return why it cannot train such jobs here, or None if it can."""
        missing = list(self.packages)
        for name in self.packages:
            with contextlib.suppress(ModuleNotFoundError):  # of what it is a part of
                found = importlib.util.find_spec(name)
                if found is not None and found.origin is not None:  # not just a folder, such as that of an example
                    missing.remove(name)
        return f"not installed: {', '.join(missing)}" if missing else self.refuse(job)


def prepare(device: str) -> None:
    """Quiet libraries, find the examples and keep freed memory, before ranks are forked."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ.update(DS_LOG_LEVEL="error", CUDA_DEVICE_MAX_CONNECTIONS="1")
    sys.path += [str(EXAMPLES), str(EXAMPLES / "deepspeed")]
    if device == "cpu":
        os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
        keep_freed_memory()


def run_rank(rank: int, example: Example, job: Job) -> Trained:
    """Train, in a process that has joined its group, and measure."""
    torch.set_num_threads(max(1, len(cpus()) * job.nodes // job.ranks))
    for module in example.modules:
        importlib.import_module(module)
    on_gpu, ends = job.device == "cuda", []

    def step_ended() -> None:
        if on_gpu:
            torch.cuda.synchronize()
        ends.append(time.perf_counter())

    peak = PeakMemory(torch.device(job.device))
    measuring = peak if job.measures_memory else contextlib.nullcontext()
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), measuring:
        seen = example.train(job, step_ended)
    dist.barrier()  # all multiply at once, as they trained
    flops_per_s = None
    if not job.measures_memory:
        flops_per_s = gpu_peak_flops_per_s(torch.cuda.get_device_name()) if on_gpu else cpu_peak_flops_per_s()
    return Trained([stop - start for start, stop in pairwise(ends)], peak.nbytes, flops_per_s, seen)


def gpu_peak_flops_per_s(name: str) -> float | None:
    """Return the most that a GPU of this name does in bfloat16; None if it is not known."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    return next((1e12 * peak for known, peak in _PEAK_TFLOPS_PER_S if set(known.lower().split()) <= words), None)


def cpu_peak_flops_per_s(size: int = 1024, seconds: float = 0.1) -> float:
    """Return what a float32 matrix product reaches with this process's threads: the best of some."""
    a, b, ends = torch.randn(size, size), torch.randn(size, size), [time.perf_counter()]
    while len(ends) < 3 or ends[-1] - ends[1] < seconds:  # the first product also sets the library up
        torch.mm(a, b)
        ends.append(time.perf_counter())
    return 2 * size**3 / min(stop - start for start, stop in pairwise(ends))


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for name, parameter in model.named_parameters() if "embed" not in name)


def _seen(parameters: int, context: Any) -> Seen:
    sent = sum(sum(kinds.values()) for kinds in context.traffic().values())
    return Seen(parameters, context.describe()["kernel"], sent)


def train_megatron(job: Job, step_ended: Callable[[], None], memory: str | None = None) -> Seen:
    """Train the quickstart's model by its step; without context parallelism attention is the same kernel on one rank.

    Megatron's own writes out every score, which would not compare.

    memory: `--burst-memory` beside Megatron's own full recomputation; None for a run without either.
    """
    if job.device == "cpu":
        from burst_plugin.megatron import cpu

        cpu.enable(force=True)
    import quickstart_train as example
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from quickstart_settings import Settings

    sizes = {**job.shape, "ranks": job.ranks, "nodes": job.nodes, "device": job.device, "steps": job.steps}
    texts = dict.fromkeys(("data", "out", "pattern"), "")
    rest = {"learning_rate": 1e-4, "seed": 1, "backward": "auto", "reference": False, **texts}
    settings = Settings(seq_length=job.seq, **sizes, **rest)
    if memory is not None:
        ring = _recomputed(example, job, memory)
    else:
        ring = example.use_burst(settings) if job.context_parallel_size > 1 else None
    model = example.build_model(settings, "reference" if ring is None else "burst")
    alone = _OneRank()
    if ring is None:
        for layer in model.modules():
            if hasattr(layer, "core_attention"):
                layer.core_attention = alone
    bf16 = job.device == "cuda"
    dtype = torch.bfloat16 if bf16 else torch.float32
    options = OptimizerConfig(optimizer="adam", lr=1e-4, clip_grad=1.0, bf16=bf16, params_dtype=dtype)
    optimizer = get_megatron_optimizer(options, [model])
    batches = _batches(job.seq, 256 if memory is None else job.vocabulary)
    losses = []
    for _ in range(WARM_UP + job.steps):
        losses.append(example.train_step(settings, model, optimizer, batches, job.microbatches)[0])
        step_ended()
    seen = _seen(_parameters(model), alone.context if ring is None else ring.contexts()[0])
    return seen._replace(losses=tuple(losses))


def _recomputed(example: Any, job: Job, memory: str) -> Any:
    """Have the quickstart's layers recomputed as a whole, with a larger vocabulary, and install with this memory."""
    import burst_plugin.megatron
    from burst_plugin.megatron.memory.chosen_options import with_chosen

    config = example.transformer_config
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    example.transformer_config = lambda *args: replace(config(*args), **recompute)
    example.ByteTokenizer.vocab_size = job.vocabulary
    arguments = argparse.Namespace(  # that Megatron would have parsed
        **recompute,
        num_layers=job.layers,
        hidden_size=job.hidden,
        ffn_hidden_size=-(-job.hidden * 8 // 3 // 16) * 16,
        num_attention_heads=job.heads,
        num_query_groups=job.kv_heads,
        kv_channels=job.hidden // job.heads,
        padded_vocab_size=job.vocabulary,
        seq_length=job.seq,
        micro_batch_size=1,
        tensor_model_parallel_size=1,
        context_parallel_size=job.context_parallel_size,
        pipeline_model_parallel_size=1,
        world_size=job.ranks,
        swiglu=True,
    )
    strategy = Strategy(memory=memory, ranks_per_node=job.ranks // job.nodes)  # type: ignore[arg-type]
    return burst_plugin.megatron.install(with_chosen(strategy, arguments))


class _OneRank(nn.Module):
    """Megatron's core attention by burst attention's kernel, without a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.context = ContextParallel(hierarchy=[1])

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return causal attention [S, B, H · D] of q, k and v [S, B, H, D]."""
        out = burst_attention(*(x.transpose(0, 1) for x in (query, key, value)), self.context)
        return out.transpose(0, 1).flatten(2)


def _batches(seq: int, vocabulary: int) -> Iterator[dict[str, Tensor]]:
    """Yield batches of one sequence as Megatron's GPT dataset gives them, of tokens drawn at random."""
    generator = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(vocabulary, (1, seq + 1), generator=generator)
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": torch.ones(1, seq)}
        yield batch | {"position_ids": torch.arange(seq).unsqueeze(0)}


def train_deepspeed(
    job: Job, step_ended: Callable[[], None], offload: bool | None = None, default: bool = False
) -> Seen:
    """Train the DeepSpeed example's Llama by its loop, ZeRO-3; without context parallelism as with `--off`.

    offload: whether checkpoints wait in host memory; None for neither checkpoints nor anything that saves memory.
    default: whether the block says no more than that it is enabled.
    """
    import deepspeed

    import burst_plugin.deepspeed

    model, samples, config = _llama(job, offload)
    if default:
        config["burst_attention"] = {}
    example = importlib.import_module("train")
    burst_plugin.deepspeed.install()
    config["burst_attention"]["enabled"] = job.context_parallel_size > 1
    if offload is not None:
        model.gradient_checkpointing_enable()
    parameters, data = _parameters(model), [{"input_ids": row, "labels": row} for row in samples]
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=data, config=config
    )
    history = example.train(engine, noted(loader, job.microbatches, step_ended))
    seen = Seen(parameters, model.config._attn_implementation, 0)
    if job.context_parallel_size > 1:
        seen = _seen(parameters, burst_plugin.deepspeed.context(engine))
    return seen._replace(losses=tuple(step["loss"] for step in history))


def train_alst(job: Job, step_ended: Callable[[], None], offload: bool) -> Seen:
    """Train the same Llama on the same tokens by what DeepSpeed itself has for long sequences."""
    model, samples, config = _llama(job, offload)
    parameters = _parameters(model)
    history = importlib.import_module("alst").train(model, samples, config, step_ended)
    return Seen(parameters, "sdpa", 0, tuple(step["loss"] for step in history))


def _refused_by_alst(job: Job) -> str | None:
    heads, kv_heads, ranks = job.heads, job.kv_heads, job.ranks
    if ranks > 1 and heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0):
        return None
    return f"Ulysses gives ranks whole heads: {heads} and {kv_heads} heads do not divide over {ranks} ranks"


def _llama(job: Job, offload: bool | None) -> tuple[Any, Tensor, dict[str, Any]]:
    """Return the DeepSpeed example's model, random samples, and the configuration, that for long ones unless None."""
    from burst_plugin.deepspeed import cpu

    if job.device == "cpu":
        cpu.enable()
    file = "ds_config.json" if offload is None else "ds_config_long.json"
    config = json.loads((EXAMPLES / "deepspeed" / file).read_text())
    config["gradient_accumulation_steps"] = job.microbatches
    config["burst_attention"] |= {"memory": "off"} if offload is None else {"offload": offload}
    if job.device == "cuda":
        config["bf16"] = {"enabled": True}
    shape = argparse.Namespace(model="llama", vocabulary=job.vocabulary, seq_length=job.seq, **job.shape)
    count, source = (WARM_UP + job.steps) * job.sequences, torch.Generator().manual_seed(1)
    samples = torch.randint(job.vocabulary, (count, job.seq), generator=source)
    return importlib.import_module("train").build_model(shape), samples, config


def noted(loader: Iterable[Any], microbatches: int, step_ended: Callable[[], None]) -> Iterator[Any]:
    """Yield the batches of a loader, and call `step_ended` whenever all of a step have been worked on."""
    for number, batch in enumerate(loader, 1):
        yield batch
        if number % microbatches == 0:
            step_ended()


_MEGATRON = ("megatron.core.models.gpt", "megatron.core.optimizer", "burst_plugin.megatron")
_MUON = "deepspeed.runtime.zero.muon.muon_optimizer"  # engines import it, and it PyTorch's compiler
_DEEPSPEED = ("deepspeed", _MUON, "transformers.trainer", "burst_plugin.deepspeed", "train", "alst")
MEGATRON = Example("Megatron", ("megatron.core",), _MEGATRON, train_megatron)
DEEPSPEED = Example("DeepSpeed", ("deepspeed", "transformers", "tokenizers"), _DEEPSPEED, train_deepspeed)
BURST, BURST_OFFLOAD, ALST, ALST_OFFLOAD = (
    replace(DEEPSPEED, name=name + "-offload" * offload, train=partial(train, offload=offload), refuse=refuse)
    for name, train, refuse in (("burst", train_deepspeed, DEEPSPEED.refuse), ("ALST", train_alst, _refused_by_alst))
    for offload in (False, True)
)
BURST_DEFAULT = replace(BURST, name="burst-default", train=partial(train_deepspeed, offload=False, default=True))
MEGATRON_DEFAULT, MEGATRON_RECOMPUTED = (
    replace(MEGATRON, name=f"Megatron-{name}", train=partial(train_megatron, memory=memory))
    for name, memory in (("default", "auto"), ("recomputed", "off"))
)
SAVING_MEMORY = (
    BURST_DEFAULT,
    BURST,
    ALST,
    BURST_OFFLOAD,
    ALST_OFFLOAD,
    MEGATRON_DEFAULT,
    MEGATRON_RECOMPUTED,
)  # for one long sequence on all ranks alone
EVERY_EXAMPLE = (MEGATRON, DEEPSPEED, *SAVING_MEMORY)
