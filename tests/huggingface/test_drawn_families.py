"""A step of every family, with options and batches drawn at once: loss and gradients of one rank without the plugin.

`BURST_SOAK=1000 bash tests/run.sh tests/huggingface/test_drawn_families.py` draws that many steps, on
four ranks, too.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from burst_plugin import ContextParallel
from burst_plugin.batch import IGNORED_LABEL, shard_batch
from burst_plugin.huggingface import prepare
from tests.support import families, hybrids, inkling, sparse_families
from tests.support.deepspeed_run import VOCAB, Batch
from tests.support.ranks import run_ranks
from tests.support.ring_steps import grads_of, shifted

pytestmark = [pytest.mark.huggingface, pytest.mark.slow]

SOAK = int(os.environ.get("BURST_SOAK", "0"))
MOST_REFUSED = 0.25  # of the steps, so that it stays training that is drawn
BOUND, LOSS_BOUND = 2e-4, 2e-5  # relative; of a gradient, with a thousandth of the largest one

GROUPS: list[tuple[dict[str, Any], Callable[[Any], Any]]] = [
    (families.families(), hybrids.build),
    (families.mla_families(), hybrids.build),
    (families.counting(), hybrids.build),
    (families.old_attention(), hybrids.build),
    (hybrids.hybrids(), hybrids.build),
    (sparse_families.sparse_families(), sparse_families.build),
    (inkling.FAMILIES, hybrids.build),
]
FAMILIES = [(name, config, build) for group, build in GROUPS for name, config in group.items()]
COUNT_POSITIONS = list(families.counting())
BY_ROW = [*hybrids.hybrids(), *sparse_families.sparse_families()]  # whose padding is no padding on one rank
FAILS_WITH_REENTRANT = "mistral_large4"  # of transformers, on one rank, too

OPTIONS: dict[str, tuple[float, list[Any]]] = {  # how often each is set, and to what
    "layout": (0.6, ["zigzag", "contiguous", "striped", "auto"]),
    "ulysses_degree": (0.15, [2, "all"]),
    "recurrent": (0.5, ["state", "heads"]),
    "latents": (0.2, ["send", "expand"]),
    "keep_attention": (0.6, ["all", 0.5, "none"]),
    "mlp_chunk": (0.08, [3, 8]),
    "head_chunk": (0.06, [2]),
    "forward": (0.2, ["q", "kv"]),
    "backward": (0.3, ["q", "kv"]),
    "mesh_degree": (0.04, [2]),
    "offload": (0.1, [True]),
    "parts": (0.08, [2]),
    "ranks_per_node": (0.3, [1, 2]),
    "loss_chunk": (0.3, [5, 16]),
}


@dataclass
class Step:
    """What is drawn: a family, options of the ring, checkpoints of the model, and a batch.

    texts: batches for one rank, whose losses add up to the loss of the whole batch.
    """

    name: str
    config: Any
    build: Callable[[Any], Any]
    options: dict[str, Any]
    is_reentrant: bool | None  # None without checkpoints
    batch: Batch = field(default_factory=dict)
    texts: list[Batch] = field(default_factory=list)

    def __str__(self) -> str:
        names = ", ".join(self.batch)
        shape = tuple(self.batch["input_ids"].shape)
        return f"{self.name}, {self.options}, reentrant={self.is_reentrant}, {names} {shape}"


def draw(seed: int) -> Step:
    """Return a step of family number `seed`, counted round and round."""
    choice, (name, config, build) = random.Random(seed), FAMILIES[seed % len(FAMILIES)]
    options = {key: choice.choice(values) for key, (share, values) in OPTIONS.items() if choice.random() < share}
    is_reentrant = choice.choice([None, None, False, name != FAILS_WITH_REENTRANT])
    step = Step(name, config, build, options, is_reentrant)
    generator = torch.Generator().manual_seed(seed)
    kind = choice.choice([_plain, _plain, _packed, _packed, _padded])
    lengths, rows = [choice.choice([1, 2, 3, 5, 8, 13, 16, 21, 30]) for _ in range(choice.randrange(2, 7))], 1
    if kind is not _packed:
        lengths, rows = [choice.choice([8, 16, 32, 40, 64, choice.randrange(6, 60)])], choice.choice([1, 2, 3])
    ids = torch.randint(1, VOCAB - 4, (rows, sum(lengths)), generator=generator)
    is_ignored = torch.rand(ids.shape, generator=generator) < choice.choice([0, 0.3])
    step.batch = {"input_ids": ids, "labels": ids.masked_fill(is_ignored, IGNORED_LABEL)}
    kind(step, lengths, choice)
    return step


def _plain(step: Step, lengths: list[int], choice: random.Random) -> None:
    step.texts = [dict(step.batch)]


def _packed(step: Step, lengths: list[int], choice: random.Random) -> None:
    """Make documents of `lengths` of the row; one rank has each by itself."""
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    step.batch |= {
        "labels": step.batch["labels"].masked_fill(positions == 0, IGNORED_LABEL),
        "position_ids": positions,
    }
    needs_positions = step.name in COUNT_POSITIONS
    for parts in zip(*(x.split(lengths, 1) for x in step.batch.values()), strict=True):
        text = dict(zip(step.batch, parts, strict=True))
        step.texts.append(text if needs_positions else {name: text[name] for name in ("input_ids", "labels")})


def _padded(step: Step, lengths: list[int], choice: random.Random) -> None:
    """Pad each row at the left or right."""
    ids = step.batch["input_ids"]
    mask, side = torch.ones_like(ids), choice.choice(["left", "right", "both"])
    for number, row in enumerate(mask):
        padding = choice.randrange(0, lengths[0] - 2)
        is_left = side == "left" or (side == "both" and number % 2 == 1)
        row[: padding if is_left else 0] = 0
        row[lengths[0] - (0 if is_left else padding) :] = 0
    follows_none = (mask == 0) | (mask.roll(1, 1) == 0)
    step.batch["labels"] = step.batch["labels"].masked_fill(follows_none, IGNORED_LABEL)
    step.batch |= {"input_ids": ids * mask, "attention_mask": mask}
    if step.name not in BY_ROW:
        step.texts = [dict(step.batch)]
        return
    for number, row in enumerate(mask.bool()):
        step.texts.append({name: step.batch[name][number : number + 1, row] for name in ("input_ids", "labels")})


def _loss(model: Any, inputs: Batch, labels: torch.Tensor) -> torch.Tensor:
    logits = model(**inputs, use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


def _on_ring(step: Step) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return this rank's loss and gradients. Raises ValueError if the ring refuses the step."""
    with closing(ContextParallel(dist.group.WORLD, **step.options)) as cp:
        model = prepare(step.build(deepcopy(step.config)))
        if step.is_reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": step.is_reentrant})
        local = shard_batch(step.batch, cp)
        loss = _loss(model, local, local.pop("shift_labels"))
        loss.backward()
        return loss.detach(), grads_of(model)


def _on_one_rank(step: Step) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of all texts."""
    model, total = step.build(deepcopy(step.config)), torch.zeros(())
    for text in step.texts:
        loss = _loss(model, {name: x for name, x in text.items() if name != "labels"}, shifted(text["labels"]))
        loss.backward()
        total += loss.detach()
    return total, grads_of(model)


def _errors(step: Step, loss: torch.Tensor, grads: dict[str, torch.Tensor]) -> Iterator[str]:
    """Yield what is wrong with the sums over ranks."""
    expected, truths = _on_one_rank(step)
    if not abs(loss - expected) <= LOSS_BOUND * max(abs(expected), torch.tensor(1.0)):
        yield f"loss {loss:.7g} instead of {expected:.7g}"
    largest = max(x.norm() for x in truths.values())
    for name, truth in truths.items():
        error = (grads[name] - truth).norm() / (truth.norm() + 1e-3 * largest)
        if not error <= BOUND:
            yield f"{name} is {error:.1e} off"


def _compare(rank: int, seeds: range) -> tuple[list[str], list[str]]:
    """Return what was wrong, and what was refused. Each rank has a share of the steps to compute without a ring."""
    wrong, refused = [], []
    ranks = dist.get_world_size()
    for number, seed in enumerate(seeds):
        step, problem, results = draw(seed), "", None
        try:
            results = _on_ring(step)
        except ValueError as error:
            problem = str(error)
        problems: list[str] = [""] * ranks
        dist.all_gather_object(problems, problem)
        if len(set(problems)) > 1:
            wrong.append(f"seed {seed}: {step}: ranks disagree: {problems}")
        elif results is None:
            refused.append(f"seed {seed}: {step}: {problem}")
        else:
            loss, grads = results
            for x in (loss, *grads.values()):
                dist.all_reduce(x)
            if number % ranks == rank:
                wrong += [f"seed {seed}: {step}: {text}" for text in _errors(step, loss, grads)]
    return wrong, refused


@pytest.mark.timeout(300 + 2 * SOAK)
@pytest.mark.parametrize("ranks", [2, 4] if SOAK else [2])
def test_every_familys_step_is_exact_whatever_is_asked_for(ranks: int) -> None:
    first = random.SystemRandom().randrange(10**6) if SOAK else 0
    seeds = range(first, first + (SOAK or len(FAMILIES)))
    found = run_ranks(_compare, ranks, seeds, timeout_s=200.0 + 2 * SOAK)
    wrong = [text for texts, _ in found for text in texts]
    assert not wrong, "\n".join(wrong)
    assert len(found[0][1]) <= MOST_REFUSED * len(seeds), "\n".join(found[0][1])
