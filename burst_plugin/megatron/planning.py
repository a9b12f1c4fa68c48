"""What `burst plan` has to know of Megatron: what its code keeps, what can be chosen, and how a plan is written."""

from __future__ import annotations

from collections.abc import Mapping

from burst_plugin.megatron.flags import plan_flags
from burst_plugin.megatron.flags.model_flags import model_flags
from burst_plugin.megatron.flags.plan_flags import check_model, unpriced
from burst_plugin.megatron.releases import target_version
from burst_plugin.planning.model_shape import ModelShape
from burst_plugin.planning.run_options import strategy_options
from burst_plugin.planning.setting import RECOMPUTE, Code, Setting
from burst_plugin.planning.training_plan import Space

__all__ = ["check_expressible", "check_model", "files", "setting_of", "space", "unpriced", "usage"]

_FILE = "megatron_flags.txt"
_RECOMPUTE = {
    "none": "",
    "mlp": "--recompute-granularity selective --recompute-modules {mlp}",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


def space(fused_norms: bool) -> Space:
    """Return what Megatron can do, with Transformer Engine's layers: norms and activations are one kernel each."""
    code = Code(plain_norms=False, mlp_kept=3, logit_bytes=10, sums_weights=False)
    return Space(code=code, zeros=(1,), tensor=True, pipeline=True, recompute=RECOMPUTE, divides=True)


def check_expressible(model: ModelShape) -> None:
    """Raise ValueError if no flags of the Megatron at hand, or of the oldest tested, say what `model` computes."""
    model_flags(model, 1, target_version())


def files(model: ModelShape, setting: Setting) -> Mapping[str, str]:
    """Return the flags of a plan, as a file of lines, without data, tokenizer, learning rate and checkpoints."""
    options = strategy_options(model, setting)
    lines = [
        *model_flags(model, setting.tensor, target_version()),
        f"--seq-length {setting.tokens} --max-position-embeddings {setting.tokens}",
        f"--micro-batch-size {setting.micro_batch} --global-batch-size {setting.batch}",
        *_parallel(setting),
        _RECOMPUTE[setting.recompute].format(mlp="moe" if model.experts else "mlp"),
        "--bf16 --transformer-impl transformer_engine --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather --hidden-dropout 0 --no-create-attention-mask-in-dataloader",
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
    return plan_flags.setting_of(text, gpus, per_node, space(True).code)


def usage(folder: str, setting: Setting) -> str:
    """Return how the files are used."""
    version = ".".join(map(str, target_version()))
    command = "python -m burst_plugin.run --framework megatron pretrain_gpt.py"
    return f"{command} $(cat {folder}/{_FILE}) ... (Megatron {version})"


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
