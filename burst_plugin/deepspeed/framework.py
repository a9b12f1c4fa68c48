"""What DeepSpeed says about itself, for the launcher and `burst doctor`. Imports no DeepSpeed."""

from __future__ import annotations

from burst_plugin.deepspeed.config import BLOCK
from burst_plugin.frameworks.framework import Framework

__all__ = ["FRAMEWORK"]

FRAMEWORK = Framework(
    name="deepspeed",
    title="DeepSpeed",
    distribution="deepspeed",
    packages=("deepspeed", "transformers", "accelerate", "trl"),
    subject=("FILE", f'a DeepSpeed configuration, to look at its block "{BLOCK}" and what clashes with it'),
    switch=f'the block "{BLOCK}" in the configuration (DeepSpeed)',
    words=("deepspeed",),
    launcher_variables=("CROSS_SIZE", "LOCAL_SIZE"),
    launcher_options=("--local_rank",),
)
