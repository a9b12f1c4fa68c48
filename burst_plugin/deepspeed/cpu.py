"""DeepSpeed on CPUs with gloo, to try things out."""

from __future__ import annotations

import os
from pathlib import Path


def enable() -> list[str]:
    """Let DeepSpeed run on CPUs with gloo alone; before it is imported. Return a line for each change."""
    os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")  # Accelerate would use GPUs anyway
    return ["environment: DS_ACCELERATOR=cpu, no visible GPUs", leave_out_shared_memory()]


def leave_out_shared_memory() -> str:
    """Keep DeepSpeed from compiling its shared-memory collectives for CPUs. Return a line that says so.

    They are compiled when the first process group is made, on all ranks at once. That takes minutes, may abort, and
    waits forever for the lock of a process that was killed meanwhile.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return "deepspeed: no shared-memory collectives, so that nothing is compiled"


def prepare(directory: Path) -> list[str]:
    """Get ready for a script in `directory`; return a line for each change that was made."""
    return enable()
