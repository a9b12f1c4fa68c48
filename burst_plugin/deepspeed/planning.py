"""DeepSpeed for `burst plan`: what models of transformers keep in memory, and how a plan is written to files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burst_plugin.deepspeed.config import BLOCK
from burst_plugin.training.memory import BUCKET
from burst_plugin.training.model_shape import ModelShape
from burst_plugin.training.setting import Code, Setting, strategy_options
from burst_plugin.training.training_plan import Space

_CONFIG, _ARGUMENTS = "ds_config.json", "trainer_arguments.json"


def space(fused_norms: bool) -> Space:
    """Return the `Space` of settings that `burst plan` may choose for models of transformers in DeepSpeed.

    `fused_norms`: whether norms are one kernel each, as with Liger; otherwise they are single operations of PyTorch.
    """
    return Space(
        code=Code.of_modules(fused_norms),
        zeros=(1, 3),
        tensor=False,
        pipeline=False,
        recompute=("none", "full"),
        divides=False,
        head_chunks=True,
        media=True,
    )


def files(model: ModelShape, setting: Setting) -> Mapping[str, str]:
    """Return the files that carry out a plan, texts in JSON by name.

    "ds_config.json" is DeepSpeed's configuration, "trainer_arguments.json" keyword arguments of `TrainingArguments`.
    """
    return {_CONFIG: _text(_config(model, setting)), _ARGUMENTS: _text(_arguments(setting))}


def usage(folder: str | Path, setting: Setting) -> str:
    """Return a text that shows the lines of a training script which read the files of a plan from `folder`."""
    arguments, config = Path(folder, _ARGUMENTS), Path(folder, _CONFIG)
    imports, rings, releases = "", "", ""
    if setting.zero == 1 and not setting.offload_optimizer:
        releases = (
            "DeepSpeed before 0.19.8 keeps gradients in 16 bits as well: 2 bytes per parameter more than planned.\n\n"
        )
    if setting.context > 1:
        imports = "from accelerate import ParallelismConfig\n"
        rings = f'    parallelism_config=ParallelismConfig(sp_size={setting.context}, sp_backend="deepspeed"),\n'
    return (
        f"{releases}In the script, which torchrun starts on every GPU:\n\n"
        "import json\n\n"
        f"import burst_plugin.deepspeed\n{imports}from transformers import TrainingArguments\n\n"
        "burst_plugin.deepspeed.install()\n"
        "arguments = TrainingArguments(\n"
        f"    **json.load(open({str(arguments)!r})),\n"
        f"    deepspeed={str(config)!r},\n"
        f"{rings})"
    )


def _config(model: ModelShape, setting: Setting) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": setting.zero,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": BUCKET,
    }
    if setting.zero == 3:
        zero |= {
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_max_live_parameters": 4 * BUCKET,
            "stage3_max_reuse_distance": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    if setting.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    bf16 = {"enabled": True}
    if setting.zero == 1 and not setting.offload_optimizer:  # else 16-bit gradients stay beside those in float32
        bf16["immediate_grad_update"] = True
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": setting.microbatches,
        "bf16": bf16,
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
        BLOCK: {
            "enabled": True,
            "context_parallel_size": setting.context,
            "memory": "off",  # all is chosen here
            **strategy_options(model, setting),
        },
    }


def _arguments(setting: Setting) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "bf16": True,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": setting.microbatches,
        "max_grad_norm": 1.0,
        "gradient_checkpointing": setting.recompute == "full",
    }
    if arguments["gradient_checkpointing"]:
        arguments["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if not setting.code.plain_norms:  # only norms: all else is done in chunks, or by the ring
        others = ("rope", "swiglu", "cross_entropy", "fused_linear_cross_entropy")
        arguments["use_liger_kernel"] = True
        arguments["liger_kernel_config"] = {"rms_norm": True} | dict.fromkeys(others, False)
    return arguments


def _text(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"
