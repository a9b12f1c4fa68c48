"""Static inference over context-parallel ranks: the tokens and logits of one rank, and keys and values spread evenly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.megatron_gpt import GptRun, build, leave
from tests.support.ranks import run_ranks

ONE = GptRun(layers=2, microbatch_size=1, seq_length=96)
CP2 = replace(ONE, cp=2, cp_comm_type="burst")
PROMPT, STEPS = 21, 55


def prompts(rows: int = 2, length: int = PROMPT) -> torch.Tensor:
    """Return token ids [rows, length]."""
    return torch.randint(ONE.vocab, (rows, length), generator=torch.Generator().manual_seed(1))


def _told(rank: int, run: GptRun, steps: int = STEPS) -> dict[str, Any]:
    """Greedy tokens by hand, the logits of all steps, and what is kept."""
    from megatron.core.inference.contexts import StaticInferenceContext

    from burst_plugin.megatron.inference import caches_of

    model = build(run).module.eval()
    tokens, logits = prompts(), []
    context = StaticInferenceContext(len(tokens), PROMPT + steps)
    start = 0
    with torch.inference_mode():
        for _ in range(steps):
            new = tokens[:, start:]
            positions = torch.arange(start, tokens.shape[1]).expand(len(tokens), -1)
            out = model(new, positions, None, inference_context=context, runtime_gather_output=True)
            start = tokens.shape[1]
            context.increment_sequence_len_offset(new.shape[1])
            logits.append(out[:, -1])
            tokens = torch.cat([tokens, out[:, -1:].argmax(-1)], 1)
    caches = caches_of(context)
    found = {
        "tokens": tokens,
        "logits": torch.stack(logits).clone(),
        "bytes": sum(cache.bytes for cache in caches),
        "Megatron's": len(context.key_value_memory_dict),
    }
    leave()
    return found


def test_x():
    one = run_ranks(_told, 1, ONE)[0]
    for found in run_ranks(_told, 2, CP2):
        print((found["logits"]-one["logits"]).abs().max(), (found["tokens"]==one["tokens"]).all(), found["bytes"], found["Megatron's"], one["Megatron's"])
