"""Rollouts folded over a ring: losses, log-probabilities and gradients are those of independent sequences."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin import (
    Causal,
    ContextParallel,
    Full,
    Mask,
    PrefixTree,
    Scores,
    SlidingWindow,
    Strategy,
    Topology,
    VirtualRing,
    burst_attention,
    kernels,
    shard_batch,
)
from burst_plugin.activations import Head
from burst_plugin.assignment.balance import choose_tokens
from burst_plugin.sequence import prefix_tree
from burst_plugin.sequence.layout import Tokens
from burst_plugin.trajectories import Folded, edge_log_probs, fold, unfold
from tests.support.ranks import last_lines, run_ranks
from tests.support.reference import Problem, attention
from tests.support.rollouts import HEADS, Given, TinyModel, alone, draw_rollouts, gradients, grpo_loss, head_of

FORESTS = int(os.environ.get("BURST_SOAK", "0")) or 40
LAYOUTS = ("zigzag", "striped", "contiguous", "auto")
SCORES = (
    Scores(),
    Scores(softcap=2.0),
    Scores(alibi_slopes=(0.1, 0.2, 0.3, 0.4)),
    Scores(dropout=0.3, seed=7),
    Scores(softcap=3.0, alibi_slopes=(0.3,) * HEADS[0], dropout=0.2, seed=1),
)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "warn_once", lambda text: None)  # of slow kernels


def folded(model: TinyModel, batch: Folded, masks: tuple[Mask, Mask], scores: Scores, ring: VirtualRing) -> Given:
    """Return what the model gives for folded rollouts over a ring in one process."""
    ids, position_ids, tree, edges = batch
    table = ring.rank_states[0].route_table
    is_auto = ring.rank_states[0].strategy.layout == "auto"
    tokens = choose_tokens(table, ids.shape[1], tree, False) if is_auto else Tokens(ids.shape[1])

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, layer: int) -> Tensor:
        return ring.attention(q, k, v, mask=masks[layer] & tree, scores=scores, sink=sink, tokens=tokens)[0]

    values = edge_log_probs(model(ids, position_ids, attend), head_of(model), edges)
    log_probs, entropies = (unfold(each, edges) for each in values)
    loss = grpo_loss(log_probs, entropies)
    for rank in range(ring.network.ranks):
        assert ring.traffic(rank) == ring.expected_traffic(rank)
    return Given(loss.detach(), log_probs, entropies, gradients(model, loss))


def draw_case(seed: int) -> tuple[list[Tensor], tuple[Mask, Mask], Scores, VirtualRing]:
    """Return rollouts, the masks of two layers, scores and a ring of 1 to 8 ranks."""
    draw = random.Random(seed)
    topology = Topology(*draw.choice([(1, 1), (1, 2), (1, 3), (2, 2), (1, 5), (3, 2), (7, 1), (2, 4), (1, 8)]))
    degree = draw.choice([1, 1, 2]) if topology.ranks_per_node % 2 == 0 else 1
    options: dict[str, Any] = {"ulysses_degree": degree}
    if degree == 1 and topology.ranks_per_node % 2 == 0:
        options = {"mesh_degree": draw.choice([1, 2])}
    sides = ("kv", "q", "auto") if options.get("mesh_degree", 1) > 1 else ("kv", "q", "both")
    strategy = Strategy(
        layout=draw.choice(LAYOUTS), forward=draw.choice(sides), backward=draw.choice(sides), **options
    )
    masks = draw.choice([(Full(), Full()), (SlidingWindow(draw.randint(0, 6)), Full())])
    return draw_rollouts(seed), masks, draw.choice(SCORES), VirtualRing(topology, strategy, seed=seed)


def test_drawn_forests_are_exact_on_rings_of_up_to_eight_ranks() -> None:
    """Set `BURST_SOAK` for more of them."""
    model = TinyModel()
    for seed in range(FORESTS):
        rollouts, masks, scores, ring = draw_case(seed)
        error = folded(model, fold(rollouts), masks, scores, ring).error(alone(model, rollouts, masks, scores))
        assert error < 1e-12, (seed, error)


def over_a_group(rank: int, rollouts: list[Tensor], masks: tuple[Mask, Mask], scores: Scores, layout: str) -> Given:
    """Return what the model gives on ranks of their own, from a batch that is cut."""
    cp = ContextParallel(dist.group.WORLD, layout=layout)
    model = TinyModel()
    ids, position_ids, tree, edges = fold(rollouts)
    batch = shard_batch({"input_ids": ids, "position_ids": position_ids, "tree": tree}, cp)
    shard = batch["burst"]

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, layer: int) -> Tensor:
        mask = masks[layer] & shard.mask
        return burst_attention(q, k, v, cp, mask=mask, scores=scores, sink=sink, tokens=shard.tokens)

    hidden = model(batch["input_ids"], batch["position_ids"], attend)
    values = edge_log_probs(hidden, head_of(model), edges, cp, tokens=shard.tokens)
    log_probs, entropies = (unfold(each, edges) for each in values)
    loss = grpo_loss(log_probs, entropies)
    grads = gradients(model, loss)
    for grad in grads.values():
        dist.all_reduce(grad)
    assert cp.traffic() == cp.expected_traffic()
    return Given(loss.detach(), [x.detach() for x in log_probs], [x.detach() for x in entropies], grads)


@pytest.mark.parametrize(("ranks", "layout"), [(2, "striped"), (4, "auto")])
def test_a_batch_with_a_tree_is_cut_over_ranks_and_exact(ranks: int, layout: str) -> None:
    rollouts, masks, scores = draw_rollouts(5), (SlidingWindow(4), Full()), SCORES[-1]
    assert len(fold(rollouts).tree.lengths) > 3
    truth = alone(TinyModel(), rollouts, masks, scores)
    for given in run_ranks(over_a_group, ranks, rollouts, masks, scores, layout):
        assert given.error(truth) < 1e-12


PROMPT = [1, 2, 3]


def _as_on_the_page(rank: int, rollouts: list[list[int]]) -> tuple[float, Tensor]:
    page = (Path(__file__).parents[2] / "docs" / "prefix_trees.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.S)
    tiny, cp = TinyModel(), ContextParallel(dist.group.WORLD)

    def model(ids: Tensor, position_ids: Tensor, attend: Any) -> Tensor:
        return tiny(ids, position_ids, lambda q, k, v, sink, layer: attend(q, k, v))

    model.head = tiny.head  # type: ignore[attr-defined]
    names: dict[str, Any] = {
        "rollouts": rollouts,
        "cp": cp,
        "model": model,
        "prompt": PROMPT,
        "advantages": [1.0, -2.0],
    }
    exec(example, names)
    names["loss"].backward()
    assert tiny.embedding.weight.grad is not None
    dist.all_reduce(tiny.embedding.weight.grad)
    return float(names["loss"].detach()), tiny.embedding.weight.grad


def test_the_example_of_the_page_is_exact() -> None:
    rollouts, model = [[*PROMPT, 4, 5], [*PROMPT, 6]], TinyModel()
    loss = torch.zeros(())
    for ids, advantage in zip(rollouts, (1.0, -2.0), strict=True):

        def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, layer: int) -> Tensor:
            return attention(Problem(q, k, v, q), Causal(), Scores())

        hidden = model(torch.tensor([ids]), torch.arange(len(ids))[None], attend)
        of_all = model.head(hidden[0, len(PROMPT) - 1 : -1]).log_softmax(-1)  # of the answer's tokens alone
        loss = loss - advantage * of_all.gather(1, torch.tensor(ids[len(PROMPT) :])[:, None]).mean()
    loss.backward()
    for found, grad in run_ranks(_as_on_the_page, 2, rollouts):
        assert found == pytest.approx(float(loss.detach()), abs=1e-12)
        assert torch.allclose(grad, model.embedding.weight.grad, rtol=0, atol=1e-12)


def _unlike(rank: int, kind: str) -> None:
    cp = ContextParallel(dist.group.WORLD)
    ids, _, tree, edges = fold([[1, 2, 3, 4], [1, 2, 5, 6]])
    hidden, width = torch.zeros(1, 4, 8), 8
    if kind == "tree" and rank:
        tree = PrefixTree((-1, 0, 0), (2, 1, 3))
    if kind == "labels":
        shard_batch({"input_ids": ids, "labels": ids, "tree": tree}, cp)
    if kind in ("tree", "length"):
        shard_batch({"input_ids": ids[:, : None if kind == "tree" else 5], "tree": tree}, cp)
    if kind == "edges" and rank:
        edges = fold([[1, 2, 3, 4], [1, 2, 5, 7]]).edges
    if kind == "hidden" and rank:
        hidden = torch.zeros(4, width)
    edge_log_probs(hidden, Head(torch.nn.Linear(width, 9), chunk=4), edges, cp, tokens=Tokens(8))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("tree", "all ranks of a context-parallel group take the same batch"),
        ("length", "the nodes of PrefixTree add up to 6 tokens, but the sequence has 5"),
        ("labels", "labels is given with a tree, in which a token has several next ones"),
        ("edges", "rank 0: checksum of edges=.*rank 1: checksum"),
        ("hidden", r"hidden is Tensor \[4, 8\].*give the hidden states of a folded sequence"),
    ],
)
def test_bad_input_ends_on_every_rank(kind: str, message: str) -> None:
    for line in last_lines(_unlike, 2, kind):
        assert line.startswith("ValueError"), line
        assert re.search(message, line), line


@pytest.mark.parametrize("kind", ["window", "alibi", "dropout"])
def test_positions_in_the_folded_sequence_would_be_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two answers comes directly after the prompt, but not in the folded sequence."""
    model, batch = TinyModel(), fold([[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 8, 9, 1, 2]])
    rollouts = [batch.ids[0, path] for path in batch.edges.paths]
    masks: tuple[Mask, Mask] = (SlidingWindow(2), Full()) if kind == "window" else (Full(), Full())
    slopes = (0.2,) * HEADS[0] if kind == "alibi" else None
    scores = Scores(alibi_slopes=slopes, dropout=0.4 if kind == "dropout" else 0.0, seed=0)
    truth = alone(model, rollouts, masks, scores)
    assert folded(model, batch, masks, scores, VirtualRing(Topology(1, 2))).error(truth) < 1e-12
    if kind == "window":
        monkeypatch.setattr(prefix_tree.PrefixNode, "shift", 0)
    else:
        monkeypatch.setattr(PrefixTree, "logical", lambda self, positions: positions)
    assert folded(model, batch, masks, scores, VirtualRing(Topology(1, 2))).error(truth) > 1e-3


def test_exact_in_fp32() -> None:
    model, rollouts, masks = TinyModel(), draw_rollouts(5), (SlidingWindow(4), Full())
    truth = alone(model, rollouts, masks, SCORES[1])
    ring = VirtualRing(Topology(2, 2), Strategy(backward="q"))
    assert folded(model.float(), fold(rollouts), masks, SCORES[1], ring).error(truth) < 1e-5


def test_log_probabilities_may_come_first_without_training() -> None:
    """As in GRPO, where the old ones come from a pass under `inference_mode`."""
    edges = fold([[1, 2, 3], [1, 2, 4, 5]]).edges
    with torch.inference_mode():
        unfold(torch.zeros(len(edges.tokens)), edges)
    values = torch.zeros(len(edges.tokens), requires_grad=True)
    sum(x.sum() for x in unfold(values, edges)).backward()  # type: ignore[union-attr]
    assert values.grad is not None
    assert values.grad.tolist() == edges.counts.tolist()


def test_losses_on_pages_and_in_docstrings_leave_the_prompt_out() -> None:
    root = Path(__file__).parents[2]
    modules = ("trajectories", "huggingface/rollouts", "deepspeed/__init__", "megatron/trees")
    paths = ("docs/prefix_trees.md", *(f"burst_plugin/{module}.py" for module in modules))
    for path in paths:
        text = (root / path).read_text()
        losses = len(re.findall(r"-sum\(\(a\w* \* x", text))
        assert 0 < losses == text.count("x[len(prompt) - 1 :]"), path
