"""Floating-point operations: of training a Transformer, and what a device could do at most."""

from __future__ import annotations

import re
import time

import torch

# bfloat16 with float32 sums, without sparsity, from NVIDIA's data sheets; the first whose words the GPU's name has.
_PEAK_FLOPS_PER_S = (
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("GH200", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
)


def train_flops_per_token(*, parameters: int, layers: int, width: int, seq: int) -> float:
    """What forward and backward of one token take, recomputation left out, as MFU counts it.

    6 per parameter, and 12 · layers · width · seq for the scores and their use, of which a causal mask needs half:
    PaLM (arXiv 2204.02311), appendix B, there without the half.

    Args:
        parameters: of the matrices that multiply: all but the table of input embeddings.
        width: query heads × head dim.
        seq: tokens of the whole sequence, over however many ranks.
    """
    return 6 * parameters + 6 * layers * width * seq


def gpu_peak_flops_per_s(name: str) -> float | None:
    """The most that a GPU of this name does in bfloat16; None if it is not in the table."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    return next((peak for known, peak in _PEAK_FLOPS_PER_S if set(known.lower().split()) <= words), None)


def cpu_peak_flops_per_s(size: int = 1024, seconds: float = 0.4) -> float:
    """What a float32 matrix product reaches with this process's threads: the best of those made in `seconds`."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    torch.mm(a, b)  # the first one also sets the library up, which may take longer than all that follow
    quickest_s, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        started = time.perf_counter()
        torch.mm(a, b)
        quickest_s = min(quickest_s, time.perf_counter() - started)
    return 2 * size**3 / quickest_s
