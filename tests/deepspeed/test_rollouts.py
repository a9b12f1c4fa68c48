"""Rollouts folded for DeepSpeed's engines: losses and gradients are those of independent sequences, and of rings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import burst_plugin.deepspeed as burst
from burst_plugin.deepspeed import rollouts as package
from burst_plugin.trajectories import fold, unfold
from tests.support.deepspeed_run import VOCAB, Result, Run, build, gradients, start, stop, worst
from tests.support.families import families
from tests.support.ranks import last_lines, run_ranks
from tests.support.rollouts import grpo_loss

pytestmark = pytest.mark.deepspeed

GRADS = 1e-5  # relative
FAMILIES = ("llama", "qwen3", "gemma3", "gpt_oss")


def _text(length: int, seed: int) -> Tensor:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def _group(seed: int) -> list[Tensor]:
    """Rollouts of two prompts; two of the answers begin alike."""
    prompt, other, half = _text(13, seed), _text(6, seed + 1), _text(4, seed + 2)
    answers = [_text(length, seed + 3 + length) for length in (7, 3, 9, 5, 8)]
    first = [
        torch.cat([prompt, answers[0]]),
        torch.cat([prompt, half, answers[1]]),
        torch.cat([prompt, half, answers[2]]),
    ]
    return [*first, torch.cat([other, answers[3]]), torch.cat([other, answers[4]])]


GROUPS = [_group(0), _group(100)]  # of two rings


@dataclass(frozen=True)
class Case:
    """family, ZeRO stage, ranks of a ring. how: in chunks, from logits of a loader's batch, or each rank its own."""

    family: str = "llama"
    stage: int = 0
    cp: int = 2
    how: str = "chunks"

    def run(self) -> Run:
        return Run(model=families()[self.family], stage=self.stage, cp=self.cp, config={"gradient_clipping": 0.0})


def _loss(log_probs: Sequence[Tensor], entropies: Sequence[Tensor]) -> Tensor:
    return grpo_loss([x + 2.2 for x in log_probs], entropies)  # of a vocabulary that is so much larger


_known: dict[Any, Result] = {}


def _alone(family: str, rings: int, shares: int = 1) -> Result:
    """The mean over rings of the losses of rollouts as sequences of their own, and its gradient, on one rank.

    With `shares` each has so many losses, of as many groups of rollouts.
    """
    key = family, rings, shares
    if key not in _known:
        model, losses = build(Run(model=families()[family])), []
        for group in GROUPS[:rings]:
            for share in range(shares):
                log_probs, entropies = [], []
                for ids in group[share::shares]:
                    of_all = model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
                    log_probs.append(of_all.gather(1, ids[1:, None])[:, 0])
                    entropies.append(-(of_all.exp() * of_all).sum(-1))
                losses.append(_loss(log_probs, entropies))
        (sum(losses) / len(losses)).backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        _known[key] = Result([float(loss.detach()) for loss in losses], grads, {})
    return _known[key]


def _one(rank: int, case: Case) -> Result:
    engine = start(case.run(), 1)
    group = GROUPS[rank // case.cp]
    if case.how == "logits":
        ids, _, tree, edges = fold(group)
        (local,) = burst.sharded_loader([{"input_ids": ids, "tree": tree, "edges": edges}])
        edges = local.pop("edges")
        values = burst.edge_log_probs(engine(**local, use_cache=False).logits, edges, local["burst"])
        log_probs, entropies = (unfold(each, edges) for each in values)
    elif case.how == "own":
        mine = group[rank % case.cp :: case.cp]
        log_probs, entropies, _ = burst.rollout_log_probs(mine, own=True, chunk=5)
    else:
        engine.eval()
        with torch.no_grad():  # as those of an older policy
            before = burst.rollout_log_probs(group, engine, chunk=3).log_probs
        engine.train()
        log_probs, entropies, computed = burst.rollout_log_probs(group, engine, chunk=5)
        assert computed < sum(map(len, group))
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(before, log_probs, strict=True))
    loss = _loss(log_probs, entropies)
    engine.backward(loss)
    found = Result([float(loss.detach())], gradients(engine), {})
    engine.step()
    stop(engine)
    return found


def _several(rank: int, cases: Sequence[Case], plant: Callable[[], Any] | None = None) -> list[Result]:
    if plant is not None:
        plant()
    return [_one(rank, case) for case in cases]


def _check(ranks: int, cases: Sequence[Case]) -> None:
    for rank, results in enumerate(run_ranks(_several, ranks, cases, timeout_s=120.0)):
        for case, found in zip(cases, results, strict=True):
            shares = case.cp if case.how == "own" else 1
            truth = _alone(case.family, ranks // case.cp, shares)
            right = truth.losses[rank // case.cp * shares + rank % case.cp * (shares > 1)]
            assert found.losses == [pytest.approx(right, rel=1e-5)], (rank, case)
            error, name = worst(found.grads, truth.grads)
            assert error <= GRADS, (rank, case, name)


def test_families_under_every_zero_stage_on_two_ranks() -> None:
    cases = [Case(family, stage) for family, stage in product(FAMILIES, range(4))]
    _check(2, [*cases, Case(how="logits"), Case(how="logits", stage=3), Case(how="own", stage=2)])


def test_a_log_probability_of_minus_infinity_stays_one_and_others_have_their_gradient() -> None:
    session: Any = mock.Mock(cp=mock.Mock(ranks=4))
    x = torch.tensor([-torch.inf, -1.0], requires_grad=True)
    found = package.with_gradient_of_ring(x, session)
    assert found.tolist() == [-torch.inf, -1.0]
    assert torch.autograd.grad(found[1], x)[0].tolist() == [0.0, 4.0]


def test_four_ranks_and_two_rings() -> None:
    _check(4, [Case(cp=4, stage=stage) for stage in range(4)] + [Case(stage=3), Case("gemma3", 1), Case(how="own")])


def test_rings_of_one() -> None:
    _check(1, [Case(cp=1), Case(cp=1, how="logits")])


def _no_times_ranks() -> None:
    mock.patch.object(package, "with_gradient_of_ring", lambda x, session: x).start()


def _no_windows() -> None:
    from burst_plugin.sequence.prefix_tree import PrefixNode

    mock.patch.object(PrefixNode, "shift", 0).start()


@pytest.mark.parametrize(("plant", "case"), [(_no_times_ranks, Case()), (_no_windows, Case("gemma3"))])
def test_it_would_be_found(plant: Callable[[], Any], case: Case) -> None:
    (found,), _ = run_ranks(_several, 2, [case], plant)
    assert worst(found.grads, _alone(case.family, 1).grads)[0] > 0.01


def _wrong(rank: int, how: str) -> None:
    engine = start(Case().run(), 1)
    ids, _, tree, edges = fold(GROUPS[0])
    whole = {"input_ids": ids, "tree": tree}
    if how == "whole":
        engine(**whole)
    local = burst.shard_batch(whole)
    if how == "labels":
        engine(**local, shift_labels=local["input_ids"])
    if how == "shard":
        burst.edge_log_probs(engine(**local).logits, edges, burst.shard_batch({"input_ids": ids})["burst"])
    burst.rollout_log_probs(GROUPS[rank])


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("whole", "pass what shard_batch"),
        ("labels", "got labels with a tree, in which a token has several next ones"),
        ("shard", 'give the entry "burst" of a batch that was cut with a tree'),
        ("apart", "all ranks of a context-parallel group take the same batch"),
    ],
)
def test_what_does_not_fit_ends_on_every_rank(how: str, text: str) -> None:
    for line in last_lines(_wrong, 2, how):
        assert line.startswith("ValueError: "), line
        assert text in line
