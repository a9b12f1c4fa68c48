"""What `burst plan` has to know of Megatron: what its code keeps, what can be chosen, and how a plan is written."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping

from burst_plugin.planning.model_shape import ModelShape
from burst_plugin.planning.run_options import strategy_options
from burst_plugin.planning.setting import RECOMPUTE, Code, Setting
from burst_plugin.planning.training_plan import Space
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Topology

__all__ = ["files", "setting_of", "space", "usage"]

_FILE = "megatron_flags.txt"
_RECOMPUTE = {
    "none": "",
    "mlp": "--recompute-granularity selective --recompute-modules mlp",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


def space(fused_norms: bool) -> Space:
    """Return what Megatron can do, with Transformer Engine's layers: norms and activations are one kernel each."""
    code = Code(plain_norms=False, mlp_kept=3, logit_bytes=10, sums_weights=False)
    return Space(code=code, zeros=(1,), tensor=True, pipeline=True, recompute=RECOMPUTE, divides=True)


def files(model: ModelShape, setting: Setting) -> Mapping[str, str]:
    """Return the flags of a plan, as a file of lines, without data, tokenizer, learning rate and checkpoints."""
    options = strategy_options(model, setting)
    lines = [
        *_model(model),
        f"--seq-length {setting.tokens} --max-position-embeddings {setting.tokens} --position-embedding-type rope",
        f"--micro-batch-size 1 --global-batch-size {setting.batch}",
        *_parallel(setting),
        _RECOMPUTE[setting.recompute],
        "--bf16 --transformer-impl transformer_engine --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather --attention-dropout 0 --hidden-dropout 0 --no-create-attention-mask-in-dataloader",
        "--cp-comm-type burst",
        *(f"--burst-{name.replace('_', '-')}{_value(value)}" for name, value in options.items()),
    ]
    if setting.offload_optimizer:
        lines.append(
            "--optimizer-cpu-offload --optimizer-offload-fraction 1.0 --use-precision-aware-optimizer "
            "--overlap-cpu-optimizer-d2h-h2d"
        )
    return {_FILE: "".join(f"{line}\n" for line in lines if line)}


def setting_of(text: str, gpus: int, per_node: int) -> Setting:
    """Return the setting that a command line, or a file of flags, asks for; raise ValueError if it cannot be run."""
    words = shlex.split(text, comments=True)

    def value(flag: str, default: str = "1", place: int = 1) -> str:
        places = [n for n, word in enumerate(words) if word == flag]
        if places and places[-1] + place >= len(words):
            raise ValueError(f"{flag} has no value; give flags as the script takes them")
        return words[places[-1] + place] if places else default

    tensor, context = int(value("--tensor-model-parallel-size")), int(value("--context-parallel-size"))
    pipeline = int(value("--pipeline-model-parallel-size"))
    if gpus % (tensor * context * pipeline):
        raise ValueError(
            f"{tensor} x {context} x {pipeline} (TP x CP x PP) does not divide {gpus} GPUs; give --gpus a multiple"
        )
    inner = int(value("--hierarchical-context-parallel-sizes", str(min(context, max(1, per_node // tensor)))))
    granularity = value("--recompute-granularity", "none")
    return Setting(
        tokens=int(value("--seq-length", "0")),
        code=space(True).code,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        data=gpus // (tensor * context * pipeline),
        inner=inner,
        batch=int(value("--global-batch-size")),
        recompute="mlp" if granularity == "selective" else granularity,
        keep=Strategy(keep_attention=_share(value("--burst-keep-attention", "none"))).kept_share,
        loss_chunk=int(value("--burst-loss-chunk", "0")),
        mlp_chunk=int(value("--burst-mlp-chunk", "0")),
        offload="--burst-offload" in words,
        offload_optimizer="--optimizer-cpu-offload" in words,
        ulysses=_ulysses_degree(value, Topology(-(-context // inner), inner)),
        parts=int(value("--burst-parts")),
    )


def _ulysses_degree(value: Callable[[str, str], str], topology: Topology) -> int:
    """Return the degree that the flags ask for, itself or by a preset; other options of it change no memory."""
    degree, preset = value("--burst-ulysses-degree", ""), value("--burst-preset", "")
    options: dict[str, object] = {"preset": preset} if preset else {}
    if degree:
        options["ulysses_degree"] = int(degree) if degree.isdigit() else degree
    return Strategy.of(None, **options).on(topology).degree


def _share(text: str) -> float | str:
    return float(text) if text[:1].isdigit() else text


def usage(folder: str) -> str:
    """Return how the files are used."""
    return f"python -m burst_plugin.run --framework megatron pretrain_gpt.py $(cat {folder}/{_FILE}) ..."


def _model(model: ModelShape) -> list[str]:
    lines = [
        f"--num-layers {model.layers} --hidden-size {model.hidden} --ffn-hidden-size {model.ffn} "
        f"--num-attention-heads {model.heads} --kv-channels {model.head_dim} --vocab-size {model.vocab}",
        "--normalization RMSNorm --swiglu --disable-bias-linear",
    ]
    if model.kv_heads != model.heads:
        lines.append(f"--group-query-attention --num-query-groups {model.kv_heads}")
    if model.qk_norm:
        lines.append("--qk-layernorm")
    if not model.tied:
        lines.append("--untie-embeddings-and-output-weights")
    if model.experts:
        lines.append(
            f"--num-experts {model.experts} --moe-router-topk {model.active} --moe-ffn-hidden-size {model.ffn}"
        )
        if model.shared_ffn:
            lines.append(f"--moe-shared-expert-intermediate-size {model.shared_ffn}")
    return lines


def _parallel(setting: Setting) -> list[str]:
    sizes = [f"--context-parallel-size {setting.context}"]
    if setting.tensor > 1:
        sizes.append(f"--tensor-model-parallel-size {setting.tensor} --sequence-parallel")
    if setting.pipeline > 1:
        sizes.append(f"--pipeline-model-parallel-size {setting.pipeline}")
    if 1 < setting.inner < setting.context:  # ranks in a node, then nodes
        sizes.append(f"--hierarchical-context-parallel-sizes {setting.inner} {setting.context // setting.inner}")
    return [" ".join(sizes)]


def _value(value: object) -> str:
    return "" if value is True else f" {value}"
