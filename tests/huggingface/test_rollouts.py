"""Rollouts folded for models of transformers: log-probabilities and gradients are those of independent sequences."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from burst_plugin import ContextParallel, shard_batch
from burst_plugin.huggingface import prepare, rollout_log_probs
from burst_plugin.trajectories import fold
from tests.support.deepspeed_run import VOCAB, Run, build, worst
from tests.support.families import families
from tests.support.ranks import last_lines, run_ranks
from tests.support.ring_steps import grads_of

pytestmark = pytest.mark.huggingface

DRAW = torch.Generator().manual_seed(3)
PROMPTS = [torch.randint(1, VOCAB, (length,), generator=DRAW) for length in (13, 6)]
ROLLOUTS = [
    torch.cat([PROMPTS[which], torch.randint(1, VOCAB, (length,), generator=DRAW)])
    for which, length in ((0, 7), (1, 3), (0, 11), (0, 2), (1, 9))
]
ROLLOUTS[2][13:16] = ROLLOUTS[0][13:16]  # two answers that begin alike
SHARES = (slice(0, 2), slice(2, 5))  # those of two ranks

Values = list[Tensor]


def a_loss(log_probs: Values, entropies: Values, first: int = 0) -> Tensor:
    """Return a loss in which every rollout has a weight of its own; `first` is the number of the first."""
    pairs = enumerate(zip(log_probs, entropies, strict=True), 1 + first)
    return sum(((-1) ** n * n * x.exp().mean() - 0.1 * y.sum() for n, (x, y) in pairs), torch.zeros(()))


def alone(
    name: str, rollouts: Values, temperature: float, dtype: torch.dtype
) -> tuple[Values, Values, dict[str, Tensor]]:
    """Return log-probabilities, entropies and gradients of rollouts that are sequences of their own."""
    model = build(Run(model=families()[name]), dtype=dtype)
    log_probs, entropies = [], []
    for ids in rollouts:
        of_all = (model(ids[None], use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
        log_probs.append(of_all.gather(1, ids[1:, None])[:, 0])
        entropies.append(-(of_all.exp() * of_all).sum(-1))
    a_loss(log_probs, entropies).backward()
    return log_probs, entropies, grads_of(model)


def _folded(
    rank: int, names: list[str], temperature: float, dtype: torch.dtype, own: bool
) -> dict[str, tuple[Values, Values, dict[str, Tensor]]]:
    cp, found = ContextParallel(dist.group.WORLD, loss_chunk=4, layout="auto" if own else "striped"), {}
    for name in names:
        model = prepare(build(Run(model=families()[name]), dtype=dtype))
        mine = ROLLOUTS[SHARES[rank]] if own else ROLLOUTS
        values = rollout_log_probs(model, mine, cp, own=own, temperature=temperature, chunk=5)
        first = SHARES[rank].start if own else 0
        a_loss(values.log_probs, values.entropies, first).backward()
        grads = grads_of(model)
        for grad in grads.values():
            dist.all_reduce(grad)
        log_probs, entropies = ([x.detach() for x in each] for each in values[:2])
        found[name] = (log_probs, entropies, grads)
    return found


def check(names: list[str], own: bool) -> None:
    """Compare rollouts folded over two ranks with those that are alone; with `own` each rank has some of them."""
    by_rank = run_ranks(_folded, 2, names, 1.3, torch.float32, own, timeout_s=120.0)
    for name in names:
        truth = alone(name, ROLLOUTS, 1.3, torch.float32)
        for rank, found in enumerate(by_rank):
            for which in range(2):
                right = truth[which][SHARES[rank]] if own else truth[which]
                for mine, each in zip(found[name][which], right, strict=True):
                    torch.testing.assert_close(mine, each.detach(), rtol=2e-5, atol=2e-5, msg=name)
            error, parameter = worst(found[name][2], truth[2])
            assert error < 1e-5, (name, parameter, error)


def test_rollouts_that_all_ranks_give() -> None:
    check(["llama", "gemma2"], own=False)  # the latter with a window and capped logits


def test_rollouts_of_which_each_rank_has_some() -> None:
    check(["gpt_oss", "nemotron"], own=True)  # the former with sinks; the latter hands on nothing but its mask


@pytest.mark.slow
def test_all_families() -> None:
    check(list(families()), own=False)
    check(list(families()), own=True)


def _refused(rank: int, kind: str) -> None:
    cp, odd = ContextParallel(dist.group.WORLD), rank == 1
    ids, _, tree, _ = fold(ROLLOUTS)
    if kind == "both ways":
        shape = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
        config = transformers.ModernBertConfig(**shape, intermediate_size=48, pad_token_id=0, reference_compile=False)
        encoder = transformers.ModernBertModel(config)
        prepare(encoder)(**shard_batch({"input_ids": ids, "tree": tree}, cp))
    model = build(Run(model=families()["llama"]))
    if kind != "not prepared" or not odd:
        prepare(model)
    if kind == "whole":
        model.eval()(input_ids=ids, tree=tree)
    rollouts = [[1, 2, -100]] if kind == "no ids" and odd else ROLLOUTS[: 3 + (kind == "unlike" and odd)]
    head = model.lm_head
    try:
        temperature = 0.0 if kind == "temperature" and odd else 1.0
        rollout_log_probs(model, rollouts, cp, own=kind == "no ids", temperature=temperature)
    finally:
        assert model.lm_head is head


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("both ways", "ModernBertAttention attends to later tokens too"),
        (
            "not prepared",
            "rank 1: rollout_log_probs is for models on the ring; call burst_plugin",
        ),
        ("whole", "got a tree with a whole batch, which a model computes as one text"),
        ("no ids", "rank 1: rollout 0 has -100 among its token ids"),
        ("unlike", "all ranks of a context-parallel group take the same batch"),
        ("temperature", "rank 1: temperature=0.0 is not valid; use a positive number"),
    ],
)
def test_what_is_refused_is_named_on_every_rank(kind: str, text: str) -> None:
    for line in last_lines(_refused, 2, kind):
        assert line.startswith("ValueError: "), line
        assert text in line
