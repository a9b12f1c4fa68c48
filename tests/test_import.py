"""Importing the package: no framework, no look at the environment, next to no time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PROBE = """
import os, sys
import torch
before = set(sys.modules)
class Watch(dict):
    pass
read = []
environ = type(os.environ)
original = environ.__getitem__
environ.__getitem__ = lambda self, key: (read.append(key), original(self, key))[1]
import burst_plugin, burst_plugin.megatron
for name in burst_plugin.__all__:
    getattr(burst_plugin, name)
import burst_plugin.megatron.cpu
environ.__getitem__ = original
frameworks = {"megatron", "deepspeed", "transformers", "accelerate", "flash_attn", "triton", "matplotlib", "rich"}
print(sorted({name.split(".")[0] for name in set(sys.modules) - before} & frameworks), read)
"""


def test_import_loads_no_framework_and_reads_no_environment() -> None:
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"


@pytest.mark.alone
def test_import_takes_less_than_a_twenty_fifth_of_torchs_own() -> None:
    """With compiled bytecode at hand, as after the first import. That is 40 ms where torch takes a second.

    What runs a ring is loaded at its first use, and takes no more than that again.
    Garbage is not collected meanwhile: going through all that torch has imported takes 0.1 s, in whichever import.
    """
    code = (
        "import gc; gc.disable(); from time import process_time as now; a = now(); import torch; b = now(); "
        "import burst_plugin; c = now(); burst_plugin.burst_attention, burst_plugin.ContextParallel; d = now(); "
        "print((c - b) / (b - a), (d - c) / (b - a))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def once() -> list[float]:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return [float(share) for share in done.stdout.split()]

    assert any(max(once()) < 0.04 for _ in range(5)), "five times in a row"
