"""A step of Megatron models, with their shape, cuts, options and batches drawn at once, against one rank.

With tensor parallelism it is compared with Megatron's step on tensor-parallel ranks alone, as some of Megatron's
gradients depend on them. `BURST_SOAK=300 bash tests/run.sh tests/megatron/test_drawn_models.py` draws that many.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from burst_plugin import Strategy
from tests.megatron.test_model_parity import DEEPSEEK
from tests.megatron.test_recurrent import DELTA_RUN, RUN, _alone, _packed
from tests.megatron.test_sparse_attention import RUN as SPARSE_RUN
from tests.support.core_attentions import WrittenOut
from tests.support.megatron_gpt import (
    GptRun,
    StepResult,
    cut_batch,
    loss_of,
    one_step,
    packed_forward_step,
    random_tokens,
)
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

SOAK = int(os.environ.get("BURST_SOAK", "0"))
RANKS = 4
BOUND = 1e-4  # relative; of a gradient, with a ten-thousandth of the largest one

MLA = {name: value for name, value in DEEPSEEK.config.items() if "moe" not in name}
KINDS: dict[str, GptRun] = {
    "dense": GptRun(core=WrittenOut),
    "latent": GptRun(core=WrittenOut, groups=8, config=MLA),
    "windows": GptRun(core=WrittenOut, config={"window_size": (5, 0), "window_attn_skip_freq": 2}),
    "sinks": GptRun(core=WrittenOut, config={"softmax_type": "learnable"}),
    "hybrid": RUN,
    "delta": DELTA_RUN,
    "sparse": SPARSE_RUN,
}
STATEFUL = ("hybrid", "delta")  # of which Megatron needs packages of CUDA to keep documents apart
OPTIONS: dict[str, tuple[float, list[Any]]] = {  # how often each is set, and to what
    "layout": (0.5, ["striped", "contiguous", "auto", "zigzag"]),
    "forward": (0.2, ["q", "kv"]),
    "backward": (0.3, ["q", "kv"]),
    "keep_attention": (0.4, ["all", 0.5, "none"]),
    "loss_chunk": (0.3, [8, 5]),
    "offload": (0.1, [True]),
    "recurrent": (0.4, ["state", "heads"]),
}


@dataclass(frozen=True)
class Case:
    """One model on `tp` ranks and on all of them; documents as (starts, ends without padding), or None."""

    kind: str
    few: GptRun
    many: GptRun
    documents: tuple[tuple[int, ...], tuple[int, ...]] | None
    is_masked: bool
    microbatches: int

    def __str__(self) -> str:
        changed = _changed(self.many, GptRun()) | {"strategy": _changed(self.many.strategy, Strategy())}
        return f"{self.kind}: {changed}, documents={self.documents}, masked={self.is_masked}, {self.microbatches}"


def _changed(values: Any, plain: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from those of `plain`."""
    return {name: value for name, value in vars(values).items() if value != getattr(plain, name)}


def draw(seed: int) -> Case:
    """Return a case of kind number `seed`, counted round and round."""
    choice, kind = random.Random(seed), list(KINDS)[seed % len(KINDS)]
    tp, pp, cp = choice.choice([(1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 2)])
    tp, pp = (1 if kind == "sinks" else tp), (1 if kind in ("delta", "sparse") else pp)  # one rank has all sinks
    is_dense, run = kind in ("dense", "latent", "windows"), KINDS[kind]
    has_experts = is_dense and choice.random() < 0.4
    few = replace(
        run,
        cp_comm_type="burst",  # on one rank too, where it means nothing, for the repairs of Megatron
        seq_length=choice.choice([32, 48, 64]),
        microbatch_size=choice.choice([1, 2]),
        tp=tp,
        sequence_parallel=tp > 1 and (has_experts or kind in STATEFUL or choice.random() < 0.6),
        per_token_loss=choice.random() < 0.5,
        tied=pp == 1 and choice.random() < 0.3,
    )
    config, documents = dict(run.config), None
    if choice.random() < 0.35 and kind != "sparse":
        few, documents = replace(few, microbatch_size=1), _documents(few.seq_length, choice)
    if has_experts:
        config |= _experts(choice, few, tp * pp * cp == RANKS)
    many = replace(
        few,
        pp=pp,
        cp=cp,
        recompute=choice.choice(["none", "none", "full" if kind == "sparse" else "selective", "full"]),
        core=None,
    )
    if has_experts and tp == 1 and pp == 1:
        many = replace(many, ep=choice.choice([1, 2]))
    many = replace(many, distributed_optimizer=many.ep == 1 and choice.random() < 0.25)
    if kind in ("dense", "latent") and pp == tp == 1 and many.recompute != "full" and choice.random() < 0.3:
        config["mtp_num_layers"] = choice.choice([1, 2])
    if cp == 4 and choice.random() < 0.5:
        many = replace(many, hierarchical=(2, 2))
    options = {key: choice.choice(values) for key, (share, values) in OPTIONS.items() if choice.random() < share}
    if kind == "sparse":
        options.update(forward="kv", backward="kv")  # a selection has rows for the queries of one rank
    if tp * cp == 4:
        options.pop("recurrent", None)  # so many ranks cannot share these heads
    many = replace(many, config=config, strategy=Strategy(**options))
    few = replace(few, config=config)
    if documents is not None and kind in STATEFUL:
        few = replace(few, tp=1, sequence_parallel=False)
    microbatches = choice.choice([2, 3] if pp > 1 else [1, 2])
    return Case(kind, few, many, documents, choice.random() < 0.5, microbatches)


def _documents(length: int, choice: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cut `length` tokens into two or three documents of multiples of 8 or 16, each with up to 7 of padding."""
    cuts = sorted(choice.sample(range(16, length, 16), choice.choice([1, 2]) if length > 32 else 1))
    starts, ends = (0, *cuts, length), [0]
    for start, stop in pairwise(starts):
        ends.append(ends[-1] + choice.randint(stop - start - 7, stop - start))
    return starts, tuple(ends)


def _experts(choice: random.Random, few: GptRun, has_one_replica: bool) -> dict[str, Any]:
    """Return fields for experts. The balancing loss of all replicas depends on how many there are.

    On tensor-parallel ranks alone Megatron scales balancing losses per token wrongly.
    """
    balance = ["none"] if few.tp > 1 and few.per_token_loss else ["none", "aux_loss", "seq_aux_loss"]
    return {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 32,
        "moe_token_dispatcher_type": choice.choice(["allgather", "alltoall"]),
        "moe_router_load_balancing_type": choice.choice(
            [*balance, "global_aux_loss"] if has_one_replica and few.tp == 1 else balance
        ),
        "moe_aux_loss_coeff": 0.1,
        "moe_z_loss_coeff": choice.choice([None, 0.1]) if few.tp == 1 else None,
        "moe_shared_expert_intermediate_size": choice.choice([None, 32]),
    }


def _masked(data: Iterator[dict[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of whose tokens about every third has no part in the loss."""
    for batch in data:
        batch["loss_mask"] = (batch["labels"] % 3 > 0).float()
        yield batch


def _forward_step(case: Case, is_few: bool, data: Any, model: Any) -> Any:
    if case.documents is not None:
        starts, real = case.documents
        if is_few and case.kind in STATEFUL:
            return _alone(data, model, starts=starts, real=real)
        step = _packed if case.kind == "hybrid" else packed_forward_step
        return step(data, model, starts=starts, real=real)
    batch = cut_batch(next(_masked(data) if case.is_masked else data))
    mask = {} if case.kind == "hybrid" else {"loss_mask": batch["loss_mask"]}
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], **mask)
    return output, partial(loss_of, batch["loss_mask"])


def _step(rank: int, case: Case, is_few: bool) -> StepResult:
    run = case.few if is_few else case.many
    return one_step(run, random_tokens(run, case.microbatches), partial(_forward_step, case, is_few))


def _errors(found: StepResult, truth: StepResult) -> Iterator[str]:
    if not abs(found.loss - truth.loss) <= 1e-5 * max(1, abs(truth.loss)):
        yield f"loss {found.loss:.7g} instead of {truth.loss:.7g}"
    if found.grads.keys() != truth.grads.keys():
        yield f"other parameters: {found.grads.keys() ^ truth.grads.keys()}"
        return
    largest = max(x.norm() for x in truth.grads.values())
    for name, grad in truth.grads.items():
        error = (found.grads[name] - grad).norm() / (grad.norm() + 1e-4 * largest)
        if not error <= BOUND:
            yield f"{name} is {error:.1e} off"


@pytest.mark.timeout(300 + 10 * SOAK)
def test_every_models_step_is_exact_whatever_is_asked_for() -> None:
    first = random.SystemRandom().randrange(10**6) if SOAK else 0
    wrong = []
    for seed in range(first, first + (SOAK or 2 * len(KINDS))):
        case = draw(seed)
        truths = run_ranks(_step, case.few.tp, case, True)
        for rank, found in enumerate(run_ranks(_step, RANKS, case, False)):
            wrong += [
                f"seed {seed}: {case}: rank {rank}: {text}" for text in _errors(found, truths[rank % len(truths)])
            ]
    assert not wrong, "\n".join(wrong)
