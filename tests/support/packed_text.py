"""Real text as Megatron's data files: documents of log-normal lengths, each with an end-of-document token last."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch


def write_packed_text(directory: Path, mean: int, eod: int, tokens: int = 40_000, seed: int = 0) -> Path:
    """Write Python's own standard library in documents of `mean` tokens; return what the files are called.

    It is ASCII, one token per byte; `eod` ends documents.
    """
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    source, prefix, written = random.Random(seed), directory / "text", 0
    text = b"".join(path.read_bytes() for path in sorted(Path(random.__file__).parent.glob("[a-d]*.py")))
    text = bytes(byte for byte in text if byte < 128)
    assert len(text) > tokens, f"the standard library of {sys.executable} is not there as text"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(eod + 1))
    while written < tokens:
        length = max(1, round(mean * source.lognormvariate(-0.5, 1.0)))
        document = torch.tensor([*text[written : written + length], eod], dtype=torch.int16)
        builder.add_document(document, [len(document)])
        written += len(document)
    builder.finalize(f"{prefix}.idx")
    return prefix
