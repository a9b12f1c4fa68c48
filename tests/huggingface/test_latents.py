"""Models with multi-head latent attention: latents travel, and every gradient is that of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from burst_plugin import ContextParallel
from burst_plugin.batch import IGNORED_LABEL, shard_batch
from burst_plugin.huggingface import prepare, register
from tests.support.deepspeed_run import Run, build, draw, worst
from tests.support.families import mla_families
from tests.support.ranks import run_ranks
from tests.support.ring_steps import shifted, sum_of_losses

pytestmark = [
    pytest.mark.huggingface,
    pytest.mark.skipif(
        not hasattr(transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention, "expand_kv"),
        reason="layers of this release of transformers make keys and values without a method for it",
    ),
]

PLAIN = draw(1, rows=2, length=32)[0]
PADDED = {**PLAIN, "attention_mask": torch.ones(2, 32, dtype=torch.int64)}
PADDED["attention_mask"][1, :9] = 0
PADDED["labels"] = PLAIN["labels"].clone()
PADDED["labels"][1, :10] = IGNORED_LABEL  # that of the first real token too, which padding would predict
# By name: the batch, options of the ring, what is done to the model; whether latents are sent.
CASES: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], str, bool]] = {
    "plain": (PLAIN, {}, "", True),
    "left-padded": (PADDED, {"layout": "contiguous"}, "", True),
    "checkpoints": (PLAIN, {}, "checkpoints", True),
    "attention kept": (PLAIN, {"keep_attention": 0.5, "offload": True}, "checkpoints", True),
    "lora": (PLAIN, {}, "lora", True),
    "lora with dropout": (PLAIN, {}, "dropout", False),
    "heads exchanged": (PLAIN, {"ulysses_degree": 2}, "", False),
    "expanded": (PLAIN, {"latents": "expand"}, "", False),
}


def _model(name: str, change: str) -> Any:
    model = build(Run(model=mla_families()[name], checkpointing=change == "checkpoints"))
    if change in ("lora", "dropout"):
        peft = pytest.importorskip("peft", reason="peft is not installed")
        dropout = 0.5 if change == "dropout" else 0.0
        torch.manual_seed(3)
        targets = ["kv_b_proj", "q_b_proj"]
        options = peft.LoraConfig(r=2, target_modules=targets, lora_dropout=dropout, init_lora_weights=False)
        model = peft.get_peft_model(model, options)
    return model.train()


def _gradients(model: Any, batch: dict[str, torch.Tensor], labels: torch.Tensor) -> dict[str, torch.Tensor]:
    sum_of_losses(model(**batch, use_cache=False).logits, labels).backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}


def _on_ring(rank: int, names: list[str], cases: list[str]) -> dict[tuple[str, str], tuple[dict[str, Any], int]]:
    register()
    found = {}
    for case in cases:
        batch, options, change, _ = CASES[case]
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=2, **options)
        for name in names:
            model = prepare(_model(name, change))
            local = shard_batch(batch, cp)
            cp.reset_traffic()
            grads = _gradients(model, local, local.pop("shift_labels"))
            for grad in grads.values():
                dist.all_reduce(grad)
            sent = sum(n for link in cp.traffic().values() for n in link.values())
            found[name, case] = (grads, sent)
    return found


def _check(names: list[str], cases: list[str], ranks: int) -> None:
    found = run_ranks(_on_ring, ranks, names, cases, timeout_s=60.0)[0]
    for (name, case), (grads, _) in found.items():
        batch, _, change, _ = CASES[case]
        if change == "dropout":  # which draws otherwise on every rank
            continue
        inputs = {key: x for key, x in batch.items() if key != "labels"}
        truth = _gradients(_model(name, change), inputs, shifted(batch["labels"]))
        error, parameter = worst(grads, truth)
        assert error <= 1e-5, (name, case, parameter, error)
    for name in names:
        whole = found[name, "expanded"][1]
        for case in cases:
            sends = CASES[case][3]
            assert (found[name, case][1] < 0.6 * whole) == sends or case == "heads exchanged", (name, case)


def test_each_way_of_training() -> None:
    _check(["deepseek_v2"], list(CASES), 2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_families(ranks: int) -> None:
    _check(list(mla_families()), ["plain", "checkpoints", "expanded"], ranks)
