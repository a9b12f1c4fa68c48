"""TRL's GRPOTrainer and RLOOTrainer with folded rollouts train as without them."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("trl", reason="trl is not installed")

from transformers import Qwen3MoeConfig
from trl import GRPOTrainer

from burst_plugin import ContextParallel
from burst_plugin.huggingface import fold_rollouts
from tests.support.grpo_run import Outcome, make_trainer, save_model, train
from tests.support.ranks import last_lines, run_ranks

pytestmark = [
    pytest.mark.huggingface,
    pytest.mark.skipif(
        tuple(map(int, version("trl").split(".")[:2])) < (1, 16),
        reason=f"fold_rollouts knows TRL 1.16, and refuses {version('trl')} by name",
    ),
]

# A reference model, generations used twice so that there are older log-probabilities, and a temperature.
OPTIONS = {"beta": 0.04, "num_iterations": 2, "temperature": 0.7}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(Path(tmp_path_factory.mktemp("model")))


def trained(directory: str, ranks: int, ring: int = 0, **options: Any) -> list[Outcome]:
    """Train on `ranks`, and fold over rings of `ring`; 0: as TRL does."""

    def on_rank(rank: int) -> Outcome:
        groups = [dist.new_group(list(range(first, first + ring))) for first in range(0, ranks, ring)] if ring else []
        return train(directory, ranks, ContextParallel(groups[rank // ring]) if ring else None, **options)

    return run_ranks(on_rank, ranks, timeout_s=120.0)


def check(found: Outcome, truth: Outcome, *, grads: bool = True) -> None:
    assert found.losses == pytest.approx(truth.losses, abs=1e-5)
    assert len(found.losses) == 3
    assert found.entropies == pytest.approx(truth.entropies, rel=1e-5)
    pairs = [(found.weights, truth.weights), *([(found.grads, truth.grads)] if grads else [])]
    for mine, right in pairs:
        assert mine.keys() == right.keys()
        for name, x in right.items():
            assert float((mine[name] - x).norm()) <= 1e-5 * float(x.norm()) + 1e-8, name


@pytest.fixture(scope="module")
def on_one_rank(directory: str) -> Outcome:
    (truth,) = trained(directory, 1, **OPTIONS)
    assert all(x.any() for name, x in truth.grads.items() if "k_proj.bias" not in name)
    return truth


@pytest.mark.parametrize(("ranks", "ring"), [(2, 2), (4, 4), (4, 2)])
def test_over_rings_as_on_one_rank_without(directory: str, on_one_rank: Outcome, ranks: int, ring: int) -> None:
    """In the last case rings are data-parallel to each other."""
    for found in trained(directory, ranks, ring, **OPTIONS):
        check(found, on_one_rank)


@pytest.mark.parametrize("options", [{"entropy_coef": 0.05, "loss_type": "bnpo"}, {"generates": True}])
def test_over_a_ring_as_on_as_many_ranks(directory: str, options: dict[str, Any]) -> None:
    """Means over each rank's tokens, and completions that the model draws, depend on the number of ranks."""
    found, truth = trained(directory, 2, 2, **options)[1], trained(directory, 2, **options)[1]
    check(found, truth)
    assert found.eval_loss == pytest.approx(truth.eval_loss, abs=1e-5)


def test_rloo_over_a_ring_as_on_one_rank_without(directory: str) -> None:
    (truth,) = trained(directory, 1, **OPTIONS, leaves_one_out=True)
    for found in trained(directory, 2, 2, **OPTIONS, leaves_one_out=True):
        check(found, truth)
        assert found.eval_loss == pytest.approx(truth.eval_loss, abs=1e-5)


def test_router_losses_of_experts(tmp_path: Path) -> None:
    """TRL adds them by default, each rank's of its own completions."""
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.5}
    directory = save_model(tmp_path, Qwen3MoeConfig, **fields, head_dim=8, experts_implementation="eager")
    found, truth = trained(directory, 2, 2, **OPTIONS)[1], trained(directory, 2, **OPTIONS)[1]
    check(found, truth)
    assert found.eval_loss == pytest.approx(truth.eval_loss, abs=1e-5)
    assert truth.losses[0] > 0.4, "the router's loss is the most of it"


def test_with_zero_3(directory: str, on_one_rank: Outcome) -> None:
    batch = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"), "auto")
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {**batch, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    check(trained(directory, 2, 2, **OPTIONS, deepspeed=config)[0], on_one_rank, grads=False)


class _Other(GRPOTrainer):
    """As in another release."""

    def _get_per_token_logps_and_entropies(self, model: Any, inputs: Any) -> Any:
        return None


def _refused(rank: int, directory: str, kind: str) -> None:
    ranks = dist.get_world_size()
    trainer: Any = make_trainer(directory, ranks)
    cp = ContextParallel(dist.group.WORLD)
    if kind == "another trainer":
        trainer = SimpleNamespace()
    if kind == "another release":
        trainer.__class__ = _Other
    if kind == "router" and rank:
        trainer.aux_loss_enabled = True
    if kind == "liger":
        trainer.args.use_liger_kernel = True
    if kind == "float32 head":
        trainer.args.cast_lm_head_to_fp32 = True
        trainer.accelerator.state._mixed_precision = "bf16"
    if kind == "split":
        trainer.accelerator.state.parallelism_config = SimpleNamespace(sp_size=2)
    if kind == "block":
        config = {"burst_attention": {"enabled": True}}
        state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=config))
        trainer.accelerator = SimpleNamespace(state=state)
    if kind == "a state":
        trainer.model._is_stateful = True
        trainer.model.scan = torch.nn.ModuleList([torch.nn.Conv1d(2, 2, 3)])
    fold_rollouts(trainer, cp)
    ids = torch.full((2, 6), 5)
    mask = torch.ones_like(ids)
    if kind == "no prompt" and rank:
        mask[1, :3] = 0
    images = {"pixel_values": ids} if kind == "images" and rank else {}
    trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 3, **images)


@pytest.mark.parametrize(
    ("kind", "ranks", "text"),
    [
        ("another trainer", 1, "is for TRL's GRPOTrainer and RLOOTrainer, got SimpleNamespace"),
        ("another release", 1, r"_Other of TRL .* has _get_per_token_logps_and_entropies\(model, inputs\), which"),
        ("router", 2, "rank 1: output_router_logits is set, but its code has no load_balancing_loss_func"),
        ("liger", 1, "use_liger_kernel changes models after they are examined"),
        ("float32 head", 1, "cast_lm_head_to_fp32 has no effect under autocast"),
        ("split", 1, "leave sp_size=2 of ParallelismConfig out"),
        ("block", 1, "the burst_attention block of DeepSpeed's config cuts batches itself"),
        ("a state", 1, "carries a state along the sequence"),
        ("no prompt", 2, "rank 1: a prompt has no token that could predict"),
        ("images", 2, "rank 1: fold_rollouts does not support pixel_values"),
    ],
)
def test_what_is_refused_is_named_on_every_rank(directory: str, kind: str, ranks: int, text: str) -> None:
    for line in last_lines(_refused, ranks, directory, kind):
        assert line.startswith("ValueError: "), line
        assert re.search(text, line), line
