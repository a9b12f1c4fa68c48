"""Static inference over context-parallel ranks: tokens and logits of one rank, keys and values spread evenly."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from burst_plugin import Strategy
from burst_plugin.inference.turn import held_run
from tests.support.core_attentions import WrittenOut
from tests.support.megatron_gpt import GptRun, build, leave, random_tokens
from tests.support.ranks import last_lines, run_ranks

pytestmark = pytest.mark.megatron

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


# -------------------------------------------------------------------------------------- other models, several turns

# On the ring on two ranks; on one the plugin changes nothing but faults of Megatron's.
OTHER = replace(ONE, seq_length=41, microbatch_size=2, cp_comm_type="burst")
MODELS = {
    "gpt-oss, interleaved": replace(
        OTHER,
        config={
            "window_size": (9, 0),
            "window_attn_skip_freq": 2,
            "softmax_type": "learnable",
            "softmax_scale": 0.5,
            "rotary_interleaved": True,
        },
    ),
    "learned positions, one head of keys": replace(OTHER, positions="learned_absolute", groups=1, tied=True),
    "YaRN": replace(OTHER, positions="yarn"),
    "experts, latent": replace(
        OTHER,
        groups=8,
        core=WrittenOut,
        config={
            "multi_latent_attention": True,
            "kv_lora_rank": 16,
            "qk_head_dim": 8,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": 8,
            "num_moe_experts": 4,
            "moe_ffn_hidden_size": 32,
            "moe_token_dispatcher_type": "alltoall",
        },
    ),
}
# From which position, to which: shared by the ranks, or not; cut off, and told again.
TURNS = ((0, 21), (21, 22), (22, 26), (26, 39), (39, 40), (17, 30), (30, 31), (0, 2), (2, 41))


def _run(model: Any, tokens: torch.Tensor, start: int = 0, context: Any = None) -> torch.Tensor:
    """Return the logits of `tokens`, the first of which is at position `start`."""
    positions = torch.arange(start, start + tokens.shape[1]).expand(len(tokens), -1)
    out: torch.Tensor = model(tokens, positions, None, inference_context=context, runtime_gather_output=True)
    return out


def _logits_of_turns(rank: int, runs: dict[str, GptRun]) -> dict[str, list[torch.Tensor]]:
    """The logits of all tokens of every turn; without context parallelism those of a sequence at once, cut."""
    from megatron.core.inference.contexts import StaticInferenceContext

    found: dict[str, list[torch.Tensor]] = {}
    for name, run in runs.items():
        model = build(run).module.eval()
        tokens = random_tokens(run, 1)[0][:, :-1]
        context = StaticInferenceContext(len(tokens), run.seq_length)
        getattr(context, "config", context).materialize_only_last_token_logits = False
        with torch.no_grad():
            if run.cp == 1:
                whole = _run(model, tokens)
                found[name] = [whole[:, start:stop] for start, stop in TURNS]
            else:
                found[name] = []
                for start, stop in TURNS:
                    context.sequence_len_offset = start
                    found[name].append(_run(model, tokens[:, start:stop], start, context))
        leave()
    return found


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        (None, tuple(MODELS)),
        (
            Strategy(layout="striped", forward="q", mlp_chunk=3, loss_chunk=8, ulysses_degree=2),
            ("gpt-oss, interleaved",),
        ),
    ],
)
def test_turns_of_other_models_are_exact(strategy: Strategy | None, names: tuple[str, ...]) -> None:
    models = {name: MODELS[name] for name in names}
    (expected,) = run_ranks(_logits_of_turns, 1, models)
    runs = {name: replace(run, cp=2, core=None, strategy=strategy) for name, run in models.items()}
    for found in run_ranks(_logits_of_turns, 2, runs, timeout_s=120.0):
        for name in names:
            for turn, (logits, one) in enumerate(zip(found[name], expected[name], strict=True)):
                error = float((logits - one).abs().max())
                assert error < 2e-5, f"{name}, turn {turn}: {error}"


# ------------------------------------------------------------------------------------- refused, and ranks apart


def _refusals(rank: int) -> dict[str, str]:
    """What each of some calls of a model raises."""
    from megatron.core.inference.contexts import DynamicInferenceContext, StaticInferenceContext

    model = build(replace(CP2, pp=1)).module.eval()
    tokens = torch.zeros(2, 12, dtype=torch.int64)

    def static(**changes: Any) -> Any:
        context = StaticInferenceContext(2, 16)
        vars(context).update(changes)
        return context

    def call(context: Any, tokens: torch.Tensor = tokens, mask: Any = None, **more: Any) -> Callable[[], Any]:
        positions = torch.zeros_like(tokens)
        return lambda: model(tokens, positions, mask, inference_context=context, runtime_gather_output=True, **more)

    def configured(**changes: Any) -> Callable[[], Any]:
        def run() -> None:
            before = {name: getattr(model.config, name) for name in changes}
            vars(model.config).update(changes)
            try:
                call(static())()
            finally:
                vars(model.config).update(before)

        return run

    causal = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)
    dynamic = object.__new__(DynamicInferenceContext)
    calls = {
        "dynamic": call(dynamic),
        "training": lambda: [model.train(), call(static())()],
        "labels": lambda: [model.eval(), call(static(), labels=tokens)()],
        "too long": call(static(sequence_len_offset=5)),
        "too many": call(static(), torch.zeros(3, 4, dtype=torch.int64)),
        "nothing kept": call(static(sequence_len_offset=3)),
        "a part of the rows": call(static(batch_size_offset=1), tokens[:1]),
        "mask": call(static(), mask=~causal),
        "experts over ranks": configured(expert_model_parallel_size=2),
        "sequence parallel": configured(sequence_parallel=True),
        "token prediction": configured(mtp_num_layers=1),
        "fp8": configured(fp8="hybrid"),
        "layer": lambda: model.decoder.layers[0](torch.zeros(6, 2, 64), None, inference_context=static()),
        "dynamic context": lambda: (
            DynamicInferenceContext.from_config(None, model, 2)
            if hasattr(DynamicInferenceContext, "from_config")
            else DynamicInferenceContext(model.config, None)
        ),
    }
    found = {}
    for name, each in calls.items():
        try:
            each()
            found[name] = "nothing was raised"
        except ValueError as error:
            found[name] = str(error)
    assert call(static(), mask=causal)().shape == (2, 1, ONE.vocab)  # what was refused leaves nothing behind
    leave()
    return found


def test_what_inference_cannot_honour_is_refused_by_name() -> None:
    expected = {
        "dynamic": "DynamicInferenceContext is not supported: use StaticInferenceContext",
        "training": "the model is in training mode: call model.eval()",
        "labels": "labels is not supported: leave it out",
        "too long": "5 tokens and 12 new ones are more than max_sequence_length=16",
        "too many": "3 batch rows are more than max_batch_size=2",
        "nothing kept": "sequence_len_offset=3 for 2 batch rows, but keys and values of rows of [] tokens are kept",
        "a part of the rows": "batch_size_offset=1 is not supported: give the model all rows at once",
        "mask": "attention_mask [1, 1, 12, 12] is not causal",
        "experts over ranks": "expert_model_parallel_size=2 is not supported",
        "sequence parallel": "sequence_parallel=True is not supported",
        "token prediction": "mtp_num_layers=1 is not supported",
        "fp8": "fp8='hybrid' is not supported",
        "layer": "is for GPTModel, which gives its layers no inference_context",
        "dynamic context": "DynamicInferenceContext with context_parallel_size=2 and cp_comm_type='burst' is not",
    }
    for found in run_ranks(_refusals, 2):
        assert found.keys() == expected.keys()
        for name, text in expected.items():
            assert text in found[name], name


def _apart(rank: int, how: str) -> None:
    from megatron.core.inference.contexts import StaticInferenceContext

    model = build(CP2).module.eval()
    context, tokens = StaticInferenceContext(1, 40), torch.zeros(1, 12, dtype=torch.int64)
    for step in range(3):
        odd = rank == 1 and step == 1
        if odd and how == "a new batch":
            context.reset()
        _run(model, tokens + (odd and how == "a token"), context.sequence_len_offset, context)
        context.increment_sequence_len_offset(tokens.shape[1])
        tokens = tokens[:, :1]


@pytest.mark.parametrize(("how", "text"), [("a token", "ids="), ("a new batch", "turn 0 of a cache")])
def test_ranks_that_go_apart_end_with_an_error(how: str, text: str) -> None:
    for line in last_lines(_apart, 2, how, timeout_s=40.0):
        assert line.startswith("ValueError: ")
        assert text in line


def test_the_server_runs_on_rank_0_and_finds_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    from burst_plugin.megatron.inference import static_context

    served: list[int] = []
    server = type("MegatronServer", (), {"run": lambda self, url, port: served.append(port)})
    args = SimpleNamespace(inference_max_seq_length=7)
    monkeypatch.setattr(static_context, "parsed_arguments", lambda: args)
    static_context.patch_server()  # of a script without a server
    assert not hasattr(args, "inference_max_sequence_length")
    module = "megatron.core.inference.text_generation_server.text_generation_server"
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(MegatronServer=server))  # type: ignore[misc]
    for rank in range(2):
        monkeypatch.setattr(static_context.dist, "get_rank", lambda rank=rank: rank)
        static_context.patch_server()
        server().run("0.0.0.0", port=rank)
    assert served == [0]
    assert args.inference_max_sequence_length == 7
