"""Log-likelihoods of texts on a ring, against those of whole logits on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from burst_plugin import ContextParallel
from burst_plugin.huggingface import LogLikelihood, log_likelihood, prepare
from tests.support.deepspeed_run import VOCAB, Run, build
from tests.support.families import families
from tests.support.ranks import last_lines, run_ranks

pytestmark = pytest.mark.huggingface

IDS = torch.randint(1, VOCAB, (3, 41), generator=torch.Generator().manual_seed(4))
ON_LEFT = torch.tensor([[0] * 9 + [1] * 32, [1] * 41, [0] * 2 + [1] * 39])
CASES: dict[str, dict[str, Any]] = {
    "all but the first": {},
    "ends": {"context": [30, 40, 3], "chunk": 7},
    "padded on the left": {"attention_mask": ON_LEFT, "context": 5, "chunk": 4},
    "padded on the right": {"attention_mask": ON_LEFT.flip(1), "context": [1, 9, 2]},
}


def told(cp: ContextParallel) -> dict[str, LogLikelihood]:
    model = prepare(build(Run(model=families()["gemma2"]))).eval()  # with capped logits
    ids = IDS.clone()
    with torch.no_grad():
        ids[1, -1] = model(ids[1:2, :-1]).logits[0, -1].argmax()  # which is the most likely one
    return {name: log_likelihood(model, ids, cp, **options) for name, options in CASES.items()}


@pytest.mark.parametrize("ranks", [1, 4])
def test_log_likelihoods_are_those_of_whole_logits_on_one_rank(ranks: int) -> None:
    def on_rank(rank: int) -> dict[str, LogLikelihood]:
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=2) if ranks > 1 else ContextParallel()
        return told(cp)

    model, by_rank = build(Run(model=families()["gemma2"])).eval(), run_ranks(on_rank, ranks)
    for name, options in CASES.items():
        mask = options.get("attention_mask", torch.ones_like(IDS))
        context = torch.tensor(options.get("context", 1)).expand(3)
        for row, real in enumerate(mask.bool()):
            ids = IDS[row][real].unsqueeze(0)
            with torch.no_grad():
                if row == 1 and real.all():
                    ids[0, -1] = model(ids[:, :-1]).logits[0, -1].argmax()
                logits = model(ids).logits[0, :-1].double().log_softmax(-1)
            each = logits.gather(1, ids[0, 1:, None])[:, 0][context[row] - 1 :]
            is_greedy = bool((logits.argmax(1) == ids[0, 1:])[context[row] - 1 :].all())
            for found in by_rank:
                scored = found[name].of_tokens[row][found[name].is_scored[row]]
                torch.testing.assert_close(scored.double(), each, rtol=2e-5, atol=2e-5, msg=name)
                assert float(found[name].total[row]) == pytest.approx(float(each.sum()), rel=2e-5), name
                assert torch.equal(found[name].total, by_rank[0][name].total), name
                assert bool(found[name].is_greedy[row]) == is_greedy, name
                assert not found[name].of_tokens[row][~found[name].is_scored[row]].any(), name
    assert by_rank[0]["ends"].is_greedy.tolist() == [False, True, False]


def test_padding_on_the_left_takes_no_positions() -> None:
    """GPT-2 adds an embedding of each position."""
    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    torch.manual_seed(0)
    model = prepare(transformers.GPT2LMHeadModel(config)).eval()
    padded = log_likelihood(model, IDS, ContextParallel(), attention_mask=ON_LEFT)
    for row, real in enumerate(ON_LEFT.bool()):
        alone = log_likelihood(model, IDS[row][real].unsqueeze(0), ContextParallel())
        assert float(padded.total[row]) == pytest.approx(float(alone.total[0]), rel=1e-6)


def _refused(rank: int, how: str) -> None:
    cp = ContextParallel(dist.group.WORLD, ranks_per_node=2)
    model = build(Run(model=families()["gemma2"])).eval()
    if how != "not prepared":
        prepare(model)
    odd = rank == 1
    ids = IDS + odd if how == "other ids" else IDS
    context = 41 if how == "all is context" and odd else 1
    head = model.lm_head
    try:
        log_likelihood(model.train(how == "trains" and odd), ids, cp, context=context)
    finally:
        assert model.lm_head is head


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("not prepared", "call burst_plugin.huggingface.prepare(model)"),
        ("trains", "rank 1: log_likelihood is for models on the ring in evaluation mode; call model.eval()"),
        ("all is context", "rank 1: context=41 does not fit rows of [41, 41, 41] tokens"),
        ("other ids", "rank 1: "),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(how: str, text: str) -> None:
    for line in last_lines(_refused, 2, how):
        assert line.startswith("ValueError: ")
        assert text in line
