"""Log-likelihoods of texts over context-parallel ranks, judged by the logits of one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from burst_plugin import Strategy
from tests.support.megatron_gpt import GptRun, build, leave, random_tokens
from tests.support.ranks import last_lines, run_ranks

pytestmark = pytest.mark.megatron

ONE = GptRun(layers=2, seq_length=44)  # and one token more: 45, 44 of which are scored


def _logits(rank: int) -> torch.Tensor:
    """Log-probabilities from whole logits of one rank, in float64."""
    model = build(ONE).module.eval()
    tokens = random_tokens(ONE, 1)[0]
    positions = torch.arange(ONE.seq_length).expand(len(tokens), -1)
    with torch.no_grad():
        logits = model(tokens[:, :-1], positions, None).double().log_softmax(-1)
    leave()
    return logits.gather(2, tokens[:, 1:, None]).squeeze(2)


def _scores(rank: int, run: GptRun) -> torch.Tensor:
    from burst_plugin.megatron.evaluation import token_log_probs

    model = build(run).eval()
    found = token_log_probs(model, random_tokens(run, 1)[0])
    leave()
    return found


@pytest.mark.parametrize(
    "run",
    [
        replace(ONE, cp=2, cp_comm_type="burst"),
        replace(ONE, cp=2, tp=2, cp_comm_type="burst", strategy=Strategy(layout="striped", loss_chunk=8)),
    ],
)
def test_log_likelihoods_of_a_text_are_those_of_one_rank(run: GptRun) -> None:
    (expected,) = run_ranks(_logits, 1)
    for found in run_ranks(_scores, run.cp * run.tp, run):
        assert found.shape == expected.shape
        assert float((found - expected).abs().max()) < 2e-5


def _refused(rank: int, how: str) -> None:
    from burst_plugin.megatron.evaluation import token_log_probs

    run = replace(ONE, cp=2, cp_comm_type="burst")
    model, tokens = build(run).train(how == "training"), random_tokens(run, 1)[0]
    if how == "apart" and rank == 1:
        tokens[0, 3] += 1
    token_log_probs(model, tokens[:, :1] if how == "short" else tokens)


@pytest.mark.parametrize(
    ("how", "text"), [("training", "call model.eval()"), ("short", "at least 2"), ("apart", "tokens=torch.int64")]
)
def test_what_cannot_be_scored_is_refused(how: str, text: str) -> None:
    for line in last_lines(_refused, 2, how):
        assert line.startswith("ValueError: ")
        assert text in line
