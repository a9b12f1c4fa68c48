"""Text to Megatron's data files, one token per byte, and from there to Megatron's GPT dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from quickstart_settings import Settings
from text import documents as all_documents

__all__ = ["ByteTokenizer", "data_prefix", "dataset", "write_data"]

_MOST_BYTES = 4_000_000


class ByteTokenizer:
    """Every byte is a token; two more mark the end of a document and padding."""

    eod = eos = 256
    pad = 257
    vocab_size = 258
    unique_identifiers = {"class": "ByteTokenizer"}  # noqa: RUF012 - Megatron reads it as a plain attribute

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def detokenize(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < self.eod).decode(errors="replace")


def data_prefix(settings: Settings) -> Path:
    """Where the data files are, but for the endings .bin and .idx."""
    return settings.directory / "data" / "text"


def write_data(settings: Settings) -> str:
    """Write the text as Megatron's IndexedDataset; returns what it was made of."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    prefix = data_prefix(settings)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = ByteTokenizer()
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size))
    documents = characters = 0
    for text in all_documents(settings.data):
        tokens = torch.tensor([*tokenizer.tokenize(text), tokenizer.eod], dtype=torch.int16)
        builder.add_document(tokens, [len(tokens)])
        documents += 1
        characters += len(tokens)
        if characters > _MOST_BYTES:
            break
    builder.finalize(f"{prefix}.idx")
    if characters < settings.seq_length + 1:
        raise SystemExit(
            f"The text has {characters:,} bytes, but one sequence needs {settings.seq_length + 1:,}: choose a longer "
            "text with --data, or a smaller --seq-length."
        )
    name = settings.data or "Python's standard library"
    return f"{name}: {documents:,} documents, {characters:,} bytes, one token each"


def dataset(settings: Settings) -> Any:
    """Megatron's GPTDataset with one sequence per step: the same on every rank, which cuts it later."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=settings.seed,
        sequence_length=settings.seq_length,
        blend=([str(data_prefix(settings))], None),
        split="1,0,0",
        path_to_cache=str(settings.directory / "data" / "cache"),
        tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,  # the causal mask is known to the attention
    )
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [settings.steps, 0, 0], lambda: True, config)
    return builder.build()[0]
