"""DeepSpeed on CPUs with gloo, to try things out."""

from __future__ import annotations

import os
from pathlib import Path


def enable() -> list[str]:
    """Let DeepSpeed run on CPUs with gloo alone; before it is imported. Return a line for each change.

    DeepSpeed's shared-memory collectives are left out: they are compiled when the first process group is made, on all
    ranks at once, which takes minutes and may abort.
    """
    os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")  # Accelerate would use GPUs anyway
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return [
        "environment: DS_ACCELERATOR=cpu, no visible GPUs",
        "deepspeed: no shared-memory collectives, so that nothing is compiled",
    ]


def prepare(directory: Path) -> list[str]:
    """Get ready for a script in `directory`; return a line for each change that was made."""
    return enable()
