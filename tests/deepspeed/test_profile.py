"""With a profile the ring is planned for the attention of the model that DeepSpeed is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from burst_plugin import Strategy
from burst_plugin.deepspeed.arguments import strategy_for
from burst_plugin.deepspeed.config import BLOCK, Block
from burst_plugin.profiling.cluster_profile import Model
from burst_plugin.strategy import MeasuredStrategy
from tests.planning.test_choice import PROFILE
from tests.support.sparse_families import build, sparse_families

SIZES = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4}


def block_of(**keys: Any) -> Block:
    block = Block.of({BLOCK: {"profile": PROFILE.as_dict(), **keys}})
    assert block is not None
    return block


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (4, 4, 8)),
        ({"num_key_value_heads": 2}, (4, 2, 8)),
        ({"head_dim": 16, "num_key_value_heads": 1}, (4, 1, 16)),
    ],
)
def test_a_model_of_transformers_says_its_heads(config: dict[str, int], expected: tuple[int, int, int]) -> None:
    model = torch.nn.Sequential(LlamaForCausalLM(LlamaConfig(**{**SIZES, **config})))
    found = strategy_for(block_of(seq_length=4096, backward="q"), model)
    assert isinstance(found, MeasuredStrategy)
    assert found == replace(
        Strategy.from_profile(PROFILE.as_dict(), backward="q"), model=Model(*expected, 4096, "causal")
    )


def _dots3() -> torch.nn.Module:
    """A model of transformers whose layers have unlike numbers of heads, so that no number is true of all."""
    return build(sparse_families()["dots3_note_text"])


OTHERS = [partial(torch.nn.Linear, 2, 2), *([_dots3] if "dots3_note_text" in sparse_families() else [])]


@pytest.mark.parametrize("make", OTHERS)
def test_other_models_are_planned_for_as_burst_check_was_told(make: Callable[[], torch.nn.Module]) -> None:
    found = strategy_for(block_of(), make())
    assert isinstance(found, MeasuredStrategy)
    assert found.model == PROFILE.model
    plain = Block(True, "auto", Strategy())
    assert strategy_for(plain, torch.nn.Linear(2, 2)) is plain.strategy
