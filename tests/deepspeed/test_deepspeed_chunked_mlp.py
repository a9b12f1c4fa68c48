"""MLPs and norms in chunks of tokens under DeepSpeed, against plain PyTorch on one rank with whole ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero import partition_parameters
from deepspeed.utils import z3_leaf_module

import burst_plugin.deepspeed as burst
from tests.support.deepspeed_run import (
    Result,
    Run,
    build,
    configuration,
    draw,
    llama,
    reference,
    start,
    stop,
    train,
    worst,
)
from tests.support.families import families
from tests.support.ranks import last_lines, run_ranks

pytestmark = pytest.mark.deepspeed

CHUNK = 5  # of the 32 tokens of a rank, in two rows: the last chunk is shorter
BATCHES = draw(4)
# Parameters of models as small as these would never be partitioned.
PARTITIONED = {"stage3_param_persistence_threshold": 0}
CONFIG = {"gradient_clipping": 0.5, "zero_optimization": PARTITIONED}
STEPS = Run(accumulation=2, steps=2, block={"mlp_chunk": CHUNK}, config=CONFIG)


def _several(rank: int, runs: Sequence[Run]) -> list[Result]:
    return [train(run, BATCHES) for run in runs]


def check(runs: Sequence[Run]) -> None:
    truths = [reference(replace(run, checkpointing=False), BATCHES) for run in runs]
    for found in run_ranks(_several, 2, runs, timeout_s=120.0):
        for run, result, truth in zip(runs, found, truths, strict=True):
            about = f"{run.stage=} {run.checkpointing=}"
            assert result.losses == pytest.approx(truth.losses, rel=1e-6), about
            for mine, whole, bound in ((result.grads, truth.grads, 1e-5), (result.changes, truth.changes, 2e-5)):
                error, name = worst(mine, whole)
                assert error <= bound, (about, name, error)


def test_every_zero_stage_equals_whole_modules_on_one_rank() -> None:
    """Recomputation by both kinds of checkpoints: reentrant ones at stage 3."""
    check([replace(STEPS, stage=stage, checkpointing=redo) for stage in range(4) for redo in (False, True)])


def _lora_on(targets: list[str], model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


def _freeze(model: Any) -> None:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)


def test_lora_inside_mlps_and_frozen_layers() -> None:
    """Also where the input of the first layer's MLP needs no gradient, of which ZeRO-3 would hear nothing."""
    lora = partial(_lora_on, ["q_proj", "up_proj", "down_proj"])
    check([replace(STEPS, prepare=prepare, stage=stage) for prepare in (lora, _freeze) for stage in (0, 2, 3)])
    check([replace(STEPS, prepare=partial(_lora_on, ["up_proj"]), stage=stage) for stage in (2, 3)])


ALL = {"mlp_chunk": CHUNK, "head_chunk": 2, "keep_attention": "all"}


@pytest.mark.slow
def test_heads_in_chunks_as_well() -> None:
    chosen = replace(STEPS, block={"head_chunk": 2})
    check([replace(chosen, stage=stage, checkpointing=redo) for stage in range(4) for redo in (False, True)])
    check([replace(STEPS, block=ALL | {"offload": stage > 1}, stage=stage, checkpointing=True) for stage in range(4)])
    prepared = (partial(_lora_on, ["q_proj", "v_proj", "o_proj", "up_proj"]), _freeze)
    check([replace(STEPS, block=ALL, prepare=each, stage=stage) for each in prepared for stage in (0, 2, 3)])


# --------------------------------------------------------------------------------------------- what is done, and when


def _watched(rank: int, run: Run) -> dict[str, Any]:
    """One step; the rows that MLPs computed at once, and how often the parameters of modules were given up again."""
    engine, rows, released = start(run, 2), [], Counter[str]()
    mlps = [layer.mlp for layer in engine.module.model.layers]
    names = {p.ds_id: name for name, p in engine.module.named_parameters() if hasattr(p, "ds_id")}
    for mlp in mlps:
        mlp.gate_proj.register_forward_hook(lambda module, args, out: rows.append(out.shape[-2]))
    original = partition_parameters.free_param

    def counted(param: Any) -> None:
        released[names[param.ds_id]] += 1
        original(param)

    with mock.patch.object(partition_parameters, "free_param", counted):
        for batch in BATCHES[:3]:
            released.clear()
            rows.clear()
            engine.backward(engine(**batch, use_cache=False).loss)
            engine.step()
    leaves = [z3_leaf_module(mlp) for mlp in mlps]
    norms = [module for name, module in engine.module.named_modules() if name.endswith("norm")]
    leaves_of_norms, cut = [z3_leaf_module(norm) for norm in norms], ["forward" in vars(norm) for norm in norms]
    stop(engine)
    return {
        "rows": rows,
        "released": dict(released),
        "leaves": leaves,
        "leaves of norms": leaves_of_norms,
        "norms cut": cut,
    }


def test_parameters_are_gathered_once_per_pass() -> None:
    """In two layers each MLP runs 7 chunks of a rank's 32 tokens, twice."""
    run = replace(STEPS, stage=3, accumulation=1, config={**CONFIG, "gradient_clipping": 0.0})
    whole = run_ranks(_watched, 2, replace(run, block={}), timeout_s=120.0)
    for found, without in zip(run_ranks(_watched, 2, run, timeout_s=120.0), whole, strict=True):
        assert sorted(found["rows"]) == [2] * 4 + [CHUNK] * 24
        for kind, tensors in ((".mlp.", 6), ("norm", 5)):
            of_kind = {name: count for name, count in found["released"].items() if kind in name}
            assert of_kind == {name: count for name, count in without["released"].items() if kind in name}
            assert len(of_kind) == tensors
            assert max(of_kind.values()) <= 3  # forward, backward, step
        assert found["leaves"] == [True, True]
        assert found["leaves of norms"] == [False] * 5
        assert (found["norms cut"], without["norms cut"]) == ([True] * 5, [False] * 5)
        assert without["leaves"] == [False, False]


def _engines(rank: int) -> list[tuple[bool, bool, bool]]:
    """One model in engines with the option, without, with it, and without the block; whether modules are cut."""
    burst.install()
    model, found = build(STEPS), []
    chunked, whole = configuration(STEPS, 2), configuration(replace(STEPS, block={}), 2)
    plain = {name: value for name, value in whole.items() if name != "burst_attention"}
    for config in (chunked, whole, chunked, plain):
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config
        )
        mlp, norm = model.model.layers[0].mlp, model.model.norm
        found.append(("forward" in vars(mlp), z3_leaf_module(mlp), "forward" in vars(norm)))
        stop(engine)
    return found


def test_another_engine_without_the_option_has_whole_modules() -> None:
    assert run_ranks(_engines, 2) == [[(True,) * 3, (False,) * 3] * 2] * 2


def _error_of_start(rank: int, run: Run) -> None:
    start(run, 2)


def test_models_whose_mlps_cannot_be_cut_are_refused() -> None:
    moe = families()["qwen2_moe"]
    for line in last_lines(_error_of_start, 2, replace(STEPS, model=moe)):
        assert "Qwen2MoeForCausalLM has experts (Qwen2MoeSparseMoeBlock), which mlp_chunk does not cut" in line


def _renamed(model: Any) -> None:
    for layer in model.model.layers:
        layer.other = layer._modules.pop("mlp")


def test_a_model_without_mlps_of_known_names_is_refused() -> None:
    for line in last_lines(_error_of_start, 2, replace(STEPS, prepare=_renamed)):
        assert "LlamaForCausalLM has no MLPs that mlp_chunk can cut into chunks of tokens: none is a module" in line


def test_a_value_that_is_no_number_is_refused() -> None:
    for line in last_lines(_error_of_start, 2, replace(STEPS, block={"mlp_chunk": -3})):
        assert '"burst_attention": mlp_chunk=-3 is not valid; use a number of tokens, or 0 for all at once' in line


@pytest.mark.parametrize("kind", [".mlp.", "norm"])
def test_low_precision_is_as_exact_as_whole_modules(kind: str) -> None:
    """An SGD step in bf16, all parameters of MLPs or norms as one, against float32; with two tokens at a time."""
    config = {"gradient_clipping": 0.0, "bf16": {"enabled": True}, "zero_optimization": PARTITIONED}
    runs = [Run(stage=stage, block=block, config=config) for stage in (1, 3) for block in ({}, {"mlp_chunk": 2})]
    truth = reference(Run(model=llama()), BATCHES).changes
    errors = [_total(each.changes, truth, kind) for each in run_ranks(_several, 2, runs, timeout_s=120.0)[0]]
    for whole, chunked in (errors[:2], errors[2:]):
        assert 1e-5 < chunked <= 1.2 * whole < 0.05, errors


def _total(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor], kind: str) -> float:
    error = sum(float((found[name] - truth[name]).square().sum()) for name in truth if kind in name)
    return (error / sum(float(x.square().sum()) for name, x in truth.items() if kind in name)) ** 0.5
