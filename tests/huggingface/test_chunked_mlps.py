"""MLPs of transformers' models in chunks of tokens: which modules these are, and that gradients stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from burst_plugin import ContextParallel, Strategy, shard_batch
from burst_plugin.huggingface import prepare, register
from burst_plugin.huggingface.chunked_mlps import chunk_mlps, restore_mlps
from tests.support.deepspeed_run import Run, build, draw, llama, worst
from tests.support.families import families, hybrids
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.huggingface

FAMILIES = {**families(), **hybrids()}
WITH_EXPERTS = {
    "dbrx": "DbrxFFN",
    "deepseek_v3": "DeepseekV3MoE",
    "gpt_oss": "GptOssMLP",
    "granitemoehybrid": "GraniteMoeHybridMoE",
    "qwen2_moe": "Qwen2MoeSparseMoeBlock",
    "qwen3_next": "Qwen3NextSparseMoeBlock",
}
DENSE = sorted(set(FAMILIES) - set(WITH_EXPERTS))
BATCH = draw(1, rows=2, length=32)[0]


def _model(name: str) -> Any:
    return build(Run(model=FAMILIES[name]))


@pytest.mark.parametrize("name", DENSE)
def test_every_layer_of_a_dense_model_has_its_mlp_in_chunks(name: str) -> None:
    model = _model(name)
    assert len(chunk_mlps(model, 3)) == 2
    assert len(chunk_mlps(model, 3)) == 2, "once more, nothing to do"
    assert {module.forward.chunk for module in chunk_mlps(model, 5)} == {5}
    assert len(restore_mlps(model)) == 2
    assert not any("forward" in vars(module) for module in model.modules())
    assert chunk_mlps(model, 0) == []
    assert len(chunk_mlps(model, 5)) == 2, "as if for the first time"


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_models_with_experts_are_refused_by_name(name: str) -> None:
    model = _model(name)
    with pytest.raises(ValueError, match=rf"has experts \({WITH_EXPERTS[name]}\), which mlp_chunk does not cut"):
        chunk_mlps(model, 3)
    assert not any("forward" in vars(module) for module in model.modules())


class _Residual(torch.nn.Module):
    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.inner = mlp

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) + residual
        return out


def test_mlps_that_take_more_than_one_tensor_are_refused_by_name() -> None:
    model = _model("llama")
    model.model.layers[1].mlp = _Residual(model.model.layers[1].mlp)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no MLPs .*: _Residual takes more than its hidden"):
        chunk_mlps(model, 3)
    assert not any("forward" in vars(module) for module in model.modules())


def _grads(rank: int, names: list[str], chunk: int) -> dict[str, tuple[dict[str, torch.Tensor], int]]:
    """Gradients by model, and the most rows that a linear layer of an MLP computed at once."""
    register()
    cp = ContextParallel(dist.group.WORLD, strategy=Strategy(mlp_chunk=chunk))
    found = {}
    for name in names:
        model, rows = prepare(_model(name)), [0]
        for path, module in model.named_modules():
            if ("mlp." in path or "feed_forward." in path) and isinstance(module, torch.nn.Linear):
                module.register_forward_hook(lambda _, args, out: rows.append(out.shape[:-1].numel()))  # noqa: B023
        local = shard_batch(BATCH, cp)
        labels = local.pop("shift_labels")
        logits = model(**local, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
        found[name] = {each: p.grad for each, p in model.named_parameters()}, max(rows)
    return found


def test_models_on_a_ring_do_what_its_strategy_says() -> None:
    """Without DeepSpeed: the first shard that a model is given brings the option."""
    whole, chunked = (run_ranks(_grads, 2, DENSE, chunk, timeout_s=120.0) for chunk in (0, 5))
    for ours, theirs in zip(chunked, whole, strict=True):
        for name in DENSE:
            assert (ours[name][1], theirs[name][1]) == (5, 32), name
            error, parameter = worst(ours[name][0], theirs[name][0])
            assert error <= 2e-6, (name, parameter, error)


def _compiled(rank: int) -> float:
    register()
    model = prepare(build(Run(model=llama())))
    local = shard_batch(BATCH, ContextParallel(None, mlp_chunk=5))
    labels = local.pop("shift_labels")
    grads = []
    for each in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        logits = each(**local, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return worst(*grads)[0]


def test_under_the_compiler() -> None:
    assert run_ranks(_compiled, 1, timeout_s=120.0)[0] <= 2e-6
