"""The quickstart's text, a tokenizer trained on it on the spot, and samples of one length."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parents[1]))
from text import documents

__all__ = ["samples", "train_tokenizer"]

_END = "<|end|>"
_TRAINED_ON = 40  # documents


def train_tokenizer(vocabulary: int, path: str | None = None) -> Tokenizer:
    """A byte-level BPE tokenizer; the same on every rank, as the text is."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(islice(documents(path), _TRAINED_ON), trainer)
    return tokenizer


def samples(tokenizer: Tokenizer, length: int, count: int, path: str | None = None) -> list[dict[str, torch.Tensor]]:
    """`count` samples of `length` tokens, cut from the text one after the other."""
    tokens: list[int] = []
    end = tokenizer.token_to_id(_END)
    for document in documents(path):
        tokens += [*tokenizer.encode(document).ids, end]
        if len(tokens) >= length * count:
            break
    if len(tokens) < length * count:
        raise SystemExit(
            f"the text has {len(tokens):,} tokens, but {length * count:,} are needed: take a longer --data"
        )
    rows = torch.tensor(tokens[: length * count]).view(count, length)
    return [{"input_ids": row, "labels": row} for row in rows]
