"""Static inference over context-parallel ranks: tokens and logits of one rank, keys and values spread evenly."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from burst_plugin.sequence.turns import held_run
from tests.support.megatron_gpt import GptRun, build, leave
from tests.support.ranks import run_ranks

ONE = GptRun(layers=2, microbatch_size=1, seq_length=96)
CP2 = replace(ONE, cp=2, cp_comm_type="burst")
STEPS, FEW = 52, 6
PROMPTS = ("the quick brown fox jumps", "over the lazy dog, and", "the dog barks")
BYTES_OF_TOKEN = 2 * 4 * 8 * 4  # key and value of one layer: 4 heads of 8 in float32


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

    communication_utils._is_cuda = lambda tensor: None  # which pipelines ask of tensors that they send
    given: tuple[Any, ...] = (model, StaticInferenceContext(rows, length))
    try:
        from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import InferenceWrapperConfig
    except ImportError:  # since 0.18
        pass
    else:
        config = InferenceWrapperConfig(
            hidden_size=ONE.hidden,
            params_dtype=torch.float32,
            inference_batch_times_seqlen_threshold=20,  # above, it is cut into microbatches for a pipeline
            padded_vocab_size=ONE.vocab,
            inference_max_requests=rows,
            inference_max_seq_length=length,
        )
        given = (model, config, given[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        controller = controllers.TextGenerationController(GPTInferenceWrapper(*given), Letters())
        return StaticInferenceEngine(controller, random_seed=5)


def _generated(rank: int, run: GptRun, steps: int = STEPS) -> dict[str, Any]:
    """What the engine says to prompts of unlike lengths, by sampling and greedily, and what is kept in the end."""
    from megatron.core.inference.sampling_params import SamplingParams

    from burst_plugin.megatron.inference import cache_of

    engine = _engine(build(run).module, len(PROMPTS), max(map(len, PROMPTS)) + steps)
    found: dict[str, Any] = {}
    for name, params in {
        "sampled": SamplingParams(num_tokens_to_generate=FEW, top_p=0.9, temperature=1.5),
        "scored": SamplingParams(num_tokens_to_generate=0, return_log_probs=True),
        "greedy": SamplingParams(num_tokens_to_generate=steps, top_k=1, return_log_probs=True),
    }.items():
        results = engine.generate(prompts=list(PROMPTS), sampling_params=params)
        found[name] = [result.generated_tokens.tolist() for result in results]
        found[f"log-probs of {name}"] = [
            torch.tensor([*(result.prompt_log_probs or []), *(result.generated_log_probs or [])])
            for result in results
        ]
    context = engine.controller.inference_wrapped_model.inference_context
    cache = cache_of(context)
    found["kept"] = None if cache is None else (cache.lengths, cache.bytes)
    found["Megatron's"] = len(context.key_value_memory_dict)
    leave()
    return found


@pytest.fixture(scope="module")
def of_one_rank() -> dict[str, Any]:
    (found,) = run_ranks(_generated, 1, ONE)
    assert len({len(tokens) for tokens in found["greedy"]} | {STEPS}) == 1
    assert found["greedy"] != found["sampled"]
    return found


@pytest.mark.parametrize(
    ("run", "steps"),
    [
        (CP2, STEPS),
        (replace(CP2, tp=2), FEW),
        (replace(CP2, pp=2), FEW),
        (replace(CP2, cp=4, hierarchical=(2, 2)), FEW),
    ],
)
def test_the_static_engine_says_what_it_says_on_one_rank(
    run: GptRun, steps: int, of_one_rank: dict[str, Any]
) -> None:
    assert of_one_rank["Megatron's"] == run.layers
    longest = max(map(len, PROMPTS)) + steps - 1  # the last token that is sampled is not computed
    by_rank = run_ranks(_generated, run.cp * run.tp * run.pp, run, steps, timeout_s=150.0)
    for rank, found in enumerate(by_rank):
        for name in ("greedy", "sampled"):
            assert found[name] == [tokens[:steps] for tokens in of_one_rank[name]]
        for name in ("scored", "greedy"):
            for found_row, expected in zip(*(x[f"log-probs of {name}"] for x in (found, of_one_rank)), strict=True):
                torch.testing.assert_close(found_row, expected[: len(found_row)], atol=2e-5, rtol=0)
        held = held_run(rank // run.tp % run.cp, run.cp, 0, longest).length * len(PROMPTS)
        lengths, kept = found["kept"]
        assert lengths == (longest,) * len(PROMPTS)
        assert kept == held * BYTES_OF_TOKEN * run.layers // (run.tp * run.pp)
        assert found["Megatron's"] == 0
