"""Rollouts folded into a prefix tree through Megatron's models: losses and gradients of independent sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from burst_plugin import PrefixTree, Strategy
from burst_plugin.trajectories import Folded, fold, unfold
from tests.support.megatron_gpt import (
    GptRun,
    StepResult,
    build,
    forward_backward,
    full_grads,
    leave,
)
from tests.support.ranks import run_ranks
from tests.support.rollouts import grpo_loss

pytestmark = pytest.mark.megatron

PLAIN = GptRun(layers=2, seq_length=64, microbatch_size=1)
WINDOWED = replace(PLAIN, config={"window_size": (9, 0), "window_attn_skip_freq": 2, "softmax_type": "learnable"})
TIED = replace(PLAIN, tied=True)
LEARNED = replace(PLAIN, positions="learned_absolute")
TOLERANCE = 1e-5  # relative, in float32


def _microbatches() -> list[list[Tensor]]:
    """Rollouts of two microbatches: four answers to one prompt, two of them alike at first; and two prompts."""
    generator = torch.Generator().manual_seed(0)

    def text(length: int) -> Tensor:
        return torch.randint(PLAIN.vocab, (length,), generator=generator)

    prompt, half, other = text(14), text(5), text(6)
    first = [torch.cat([prompt, text(9)]), torch.cat([prompt, half, text(7)]), torch.cat([prompt, half, text(4)])]
    second = [torch.cat([prompt[:3], text(8)]), torch.cat([other, text(11)]), torch.cat([other, text(5)]), other]
    return [[*first, torch.cat([prompt, text(3)])], second]


def _alone(rank: int, run: GptRun) -> StepResult:
    """What Megatron gives for each rollout as a sequence of its own, on one rank, from whole logits."""
    model = build(run)
    model.zero_grad_buffer()
    total = torch.zeros(())
    for rollouts in _microbatches():
        log_probs, entropies = [], []
        for ids in rollouts:
            logits = model(ids[None], torch.arange(len(ids))[None], None)[0, :-1].log_softmax(-1)
            log_probs.append(logits.gather(1, ids[1:, None])[:, 0])
            entropies.append(-(logits.exp() * logits).sum(-1))
        total = total + grpo_loss(log_probs, entropies) / len(_microbatches())
    total.backward()
    result = StepResult(float(total.detach()), full_grads(model, run))
    leave()
    return result


def forward_step(data: Iterator[Folded], model: Any, length: int | None = None) -> tuple[Tensor, Any]:
    from burst_plugin.megatron.trees import edge_log_probs

    folded = next(data)
    return edge_log_probs(model, folded, chunk=7, length=length), partial(loss_of, folded)


def loss_of(folded: Folded, output: Tensor) -> tuple[Tensor, Tensor]:
    loss = grpo_loss(*(unfold(each, folded.edges) for each in output))
    return loss, torch.stack([loss.detach(), torch.ones(())])


def _folded(rank: int, runs: list[GptRun], plant: Callable[[], Any] | None = None) -> list[StepResult]:
    """What ranks of `runs` give for folded rollouts, by Megatron's schedule."""
    if plant is not None:
        plant()
    found = []
    for run in runs:
        model = build(run)
        step = partial(forward_step, length=run.seq_length if run.pp > 1 else None)

        def data(tokens: Tensor) -> Iterator[Folded]:
            return map(fold, _microbatches())

        loss = forward_backward(model, run, torch.zeros(2, 1, run.seq_length), step, data)
        found.append(StepResult(loss, full_grads(model, run)))
        leave()
    return found


def _error(found: StepResult, truth: StepResult) -> float:
    """The largest relative error of the loss and of all gradients."""
    assert found.grads.keys() == truth.grads.keys()
    errors = [abs(found.loss - truth.loss) / max(1.0, abs(truth.loss))]
    for name, grad in truth.grads.items():
        size = float(grad.norm())
        assert size > 0, name
        errors.append(float((found.grads[name] - grad).norm()) / size)
    return max(errors)


def _over(run: GptRun, layout: str = "zigzag", **sizes: Any) -> GptRun:
    return replace(run, cp_comm_type="burst", strategy=Strategy(layout=layout), **sizes)


_known: dict[str, StepResult] = {}


def _truth(run: GptRun) -> StepResult:
    if str(run) not in _known:
        (_known[str(run)],) = run_ranks(_alone, 1, run)
    return _known[str(run)]


def _check(one: GptRun, *runs: GptRun) -> None:
    truth = _truth(one)
    for results in run_ranks(_folded, runs[0].cp * runs[0].tp * runs[0].pp, list(runs)):
        for run, result in zip(runs, results, strict=True):
            assert _error(result, truth) < TOLERANCE, run


@pytest.mark.parametrize(("layout", "sizes"), [("auto", [{"cp": 2, "tp": 2}]), ("striped", [])])
def test_rollouts_over_two_nodes_of_two_ranks_are_independent_sequences(
    layout: str, sizes: list[dict[str, int]]
) -> None:
    _check(PLAIN, _over(PLAIN, layout, cp=4, hierarchical=(2, 2)), *(_over(PLAIN, layout, **each) for each in sizes))


def test_windows_and_sinks_and_recomputation() -> None:
    _check(WINDOWED, _over(WINDOWED, cp=2), _over(WINDOWED, cp=2, recompute="full"))


def test_tied_heads_and_sequence_parallelism() -> None:
    """With `loss_chunk` as well, which cuts the losses of other batches."""
    chunked = Strategy(loss_chunk=8)
    _check(TIED, replace(_over(TIED, cp=2, tp=2, sequence_parallel=True), strategy=chunked))


def test_pipelines_and_learned_positions() -> None:
    _check(PLAIN, _over(PLAIN, cp=2, pp=2))
    _check(LEARNED, _over(LEARNED, cp=2))


def _positions_of_the_folded_sequence() -> None:
    mock.patch.object(PrefixTree, "logical", lambda tree, positions: positions).start()


def _no_tree() -> None:
    from burst_plugin.megatron.layers import call_masks

    mock.patch.object(call_masks, "tree_of", lambda given: PrefixTree((-1,), (int(given[0, 1].sum()),))).start()


def _twice_the_loss() -> None:
    """As if every context-parallel rank had the gradient of all tokens."""
    from megatron.core import parallel_state

    original = grpo_loss
    mock.patch.dict(
        loss_of.__globals__,
        {"grpo_loss": lambda *given: original(*given) / parallel_state.get_context_parallel_world_size()},
    ).start()


@pytest.mark.parametrize("plant", [_positions_of_the_folded_sequence, _no_tree, _twice_the_loss])
def test_it_would_be_found(plant: Callable[[], None]) -> None:
    truth = _truth(PLAIN)
    (result,), _ = run_ranks(_folded, 2, [_over(PLAIN, cp=2)], plant)
    assert _error(result, truth) > 0.01


def _counted_loss_of(folded: Folded, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    loss, reported = loss_of(folded, output)
    return loss, torch.ones((), dtype=torch.int), reported


def _counts(rank: int) -> str:
    """The error of this rank if its loss function returns a number of tokens, too."""

    def step(data: Iterator[Folded], model: Any) -> tuple[Tensor, Any]:
        output, loss = forward_step(data, model)
        return output, partial(_counted_loss_of, *loss.args)

    run = _over(PLAIN, cp=2)
    with pytest.raises(ValueError, match="prefix tree") as error:
        forward_backward(build(run), run, torch.zeros(2, 1, 8), step, lambda tokens: map(fold, _microbatches()))
    leave()
    return str(error.value)


def test_a_number_of_tokens_by_which_gradients_would_be_divided_is_refused() -> None:
    for text in run_ranks(_counts, 2):
        assert "returned three values" in text
        assert "return two" in text


def _refused(rank: int) -> dict[str, str]:
    """By what is wrong: the error of this rank."""
    from burst_plugin.megatron.trees import edge_log_probs

    found = {}
    latent = replace(_over(PLAIN, cp=2), config={"multi_latent_attention": True})
    folded, other = map(fold, _microbatches())
    short = folded._replace(tree=PrefixTree((-1,), (7,)))
    wrong: dict[str, tuple[GptRun, Folded, int | None]] = {
        "latent": (latent, folded, None),
        "off the ring": (PLAIN, folded, None),
        "per token": (_over(PLAIN, cp=2, per_token_loss=True), folded, None),
        "apart": (_over(PLAIN, cp=2), other if rank else folded, None),
        "tree": (_over(PLAIN, cp=2), short, None),
        "length": (_over(PLAIN, cp=2), folded, 45),
    }
    for how, (run, given, length) in wrong.items():
        model = build(run)
        with pytest.raises(ValueError, match=r"tree|tokens") as error:
            edge_log_probs(model, given, chunk=8, length=length)
        found[how] = str(error.value)
        leave()
    return found


def test_what_does_not_fit_ends_on_every_rank() -> None:
    texts = {
        "latent": "multi_latent_attention is not supported: it makes its rotary embedding itself",
        "off the ring": 'use cp_comm_type="burst", and 2 or more ranks',
        "per token": "calculate_per_token_loss=True divides by the tokens of all ranks",
        "apart": "tokens=torch.int64",
        "tree": "the nodes of the tree add up to 7 tokens",
        "length": "length=45 is not valid for 42 tokens over 2 context-parallel ranks",
    }
    for found in run_ranks(_refused, 2):
        assert found.keys() == texts.keys()
        for how, text in texts.items():
            assert text in found[how]
