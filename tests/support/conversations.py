"""Made-up conversations as Megatron's SFT data, with a tokenizer whose tokens are words."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import tokenizers
import transformers

_FEWEST = 5  # tokens: a system message and a question of two each, and an answer


def log_normal_lengths(source: random.Random) -> list[int]:
    """Draw lengths of conversations that fill more than a sample of 128 tokens."""
    lengths: list[int] = []
    while sum(lengths) < 130:
        lengths.append(max(_FEWEST, round(source.lognormvariate(3.2, 0.9))))
    return lengths


def write_conversations(directory: Path, draw: Callable[[random.Random], Sequence[int]], samples: int) -> list[str]:
    """Write samples of the conversations whose lengths `draw` returns; return flags of Megatron's scripts for them.

    Conversations of a sample are told apart by their system messages.
    """
    words = [f"w{number}" for number in range(40)]
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<pad>", "<eos>", *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )
    fast.save_pretrained(directory / "tokenizer")
    source = random.Random(0)

    def said(count: int) -> str:
        return "".join(f"{source.choice(words)} " for _ in range(count))

    lines = []
    for _ in range(samples):
        asked = min(4, (min(lengths := draw(source)) - 1) // 2)
        conversations = [{"system": asked, "user": asked, "assistant": total - 2 * asked} for total in lengths]
        turns = [{"role": role, "content": said(count)} for each in conversations for role, count in each.items()]
        lines.append(json.dumps({"messages": turns}))
    (directory / "data.jsonl").write_text("\n".join(lines))
    return [
        *("--sft", "--tokenizer-type", "SFTTokenizer", "--sft-tokenizer-prompt-format", "identity"),
        *("--tokenizer-model", str(directory / "tokenizer"), "--data-path", str(directory / "data.jsonl")),
        *("--micro-batch-size", "1"),
    ]
