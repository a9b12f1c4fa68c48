"""Static inference over context-parallel ranks: the tokens and logits of one rank, and keys and values spread evenly."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.megatron_gpt import GptRun, build, leave
from tests.support.ranks import run_ranks

ONE = GptRun(layers=2, microbatch_size=1, seq_length=96)
CP2 = replace(ONE, cp=2, cp_comm_type="burst")
PROMPT, STEPS = 21, 55


class Letters:
    """A tokenizer whose tokens are the characters of a text."""

    bos, eod, vocab_size = None, ONE.vocab - 1, ONE.vocab

    def tokenize(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def detokenize(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))


def _engine(model: Any, rows: int, length: int) -> Any:
    """Return Megatron's static engine of a model, with a context for as many rows and tokens."""
    from megatron.core.inference import communication_utils
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.inference.engines import StaticInferenceEngine
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
    from megatron.core.inference.text_generation_controllers import text_generation_controller as controllers

    communication_utils._is_cuda = lambda tensor: None
    context = StaticInferenceContext(rows, length)
    wrapper: Any
    try:
        from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import InferenceWrapperConfig
    except ImportError:  # since 0.18
        wrapper = GPTInferenceWrapper(model, context)
    else:
        config = InferenceWrapperConfig(
            hidden_size=ONE.hidden,
            params_dtype=torch.float32,
            inference_batch_times_seqlen_threshold=30,
            padded_vocab_size=ONE.vocab,
            inference_max_requests=rows,
            inference_max_seq_length=length,
        )
        wrapper = GPTInferenceWrapper(model, config, context)
    return StaticInferenceEngine(controllers.TextGenerationController(wrapper, Letters()), random_seed=5)


def _generated(rank: int, run: GptRun) -> dict[str, Any]:
    """What the engine generates for prompts of unlike lengths, greedily and by sampling, and what is kept."""
    from megatron.core.inference.sampling_params import SamplingParams

    from burst_plugin.megatron.inference import caches_of

    model = build(run).module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = _engine(model, 3, PROMPT + STEPS + 9)
    prompts = ["the quick brown fox jumps", "over the lazy dog and", "the fence"]
    found: dict[str, Any] = {}
    for name, options in {
        "greedy": {"top_k": 1, "return_log_probs": True},
        "sampled": {"top_k": 0, "top_p": 0.9, "temperature": 1.5},
    }.items():
        params = SamplingParams(num_tokens_to_generate=STEPS, **options)
        results = engine.generate(prompts=prompts, sampling_params=params)
        found[name] = [result.generated_tokens.tolist() for result in results]
        found[name + " probs"] = torch.tensor(
            [x for result in results for x in (*(result.prompt_log_probs or []), *(result.generated_log_probs or []))]
        )
    context = engine.controller.inference_wrapped_model.inference_context
    caches = caches_of(context)
    found["bytes"] = sum(cache.bytes for cache in caches)
    found["Megatron's"] = len(context.key_value_memory_dict)
    leave()
    return found

@pytest.mark.parametrize("run", [CP2, replace(CP2, tp=2), replace(CP2, pp=2), replace(CP2, cp=4)], ids=["cp2", "tp", "pp", "cp4"])
def test_y(run):
    one = run_ranks(_generated, 1, ONE)[0]
    print(one)
    for found in run_ranks(_generated, run.cp*run.tp*run.pp, run):
        print((found["greedy probs"]-one["greedy probs"]).abs().max(), found["greedy"]==one["greedy"], found["sampled"]==one["sampled"], found["bytes"], found["Megatron's"])
