"""MLPs and norms of transformers' models in chunks of tokens: which these are, and that gradients stay the same."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.models.patchtst.modeling_patchtst import PatchTSTBatchNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.vitdet.modeling_vitdet import VitDetLayerNorm

from burst_plugin import ContextParallel, Strategy, shard_batch
from burst_plugin.huggingface import prepare, register
from burst_plugin.huggingface.chunked_modules import chunk_modules, restore_modules
from tests.support.deepspeed_run import VOCAB, Run, build, draw, llama, worst
from tests.support.families import families, hybrids
from tests.support.largest import LargestTensor
from tests.support.ranks import run_ranks
from tests.support.ring_steps import sum_of_losses

pytestmark = pytest.mark.huggingface

_SHAPE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {
    **families(),
    **hybrids(),
    "cohere": transformers.CohereConfig(**_SHAPE, intermediate_size=48, use_qk_norm=True, pad_token_id=0),
    "gpt_neox": transformers.GPTNeoXConfig(**_SHAPE, intermediate_size=48, pad_token_id=0),
    "olmo2": transformers.Olmo2Config(**_SHAPE, intermediate_size=48, pad_token_id=0),
}
WITH_EXPERTS = {
    "dbrx": "DbrxFFN",
    "deepseek_v3": "DeepseekV3MoE",
    "gpt_oss": "GptOssMLP",
    "granitemoehybrid": "GraniteMoeHybridMoE",
    "qwen2_moe": "Qwen2MoeSparseMoeBlock",
    "qwen3_next": "Qwen3NextSparseMoeBlock",
}
DENSE = sorted(set(FAMILIES) - set(WITH_EXPERTS))
NORMS = {  # in two layers, with the last one; LayerNorm is one kernel
    "llama": {"LlamaRMSNorm": 2 * 2 + 1},
    "mistral": {"MistralRMSNorm": 2 * 2 + 1},
    "phi3": {"Phi3RMSNorm": 2 * 2 + 1},
    "bamba": {"BambaRMSNorm": 2 * 2 + 1},
    "qwen3": {"Qwen3RMSNorm": 2 * 4 + 1},
    "qwen3_5": {"Qwen3_5RMSNorm": 2 * 4 + 1},
    "gemma2": {"Gemma2RMSNorm": 2 * 4 + 1},
    "gemma3": {"Gemma3RMSNorm": 2 * 6 + 1},
    "olmo2": {"Olmo2RMSNorm": 2 * 4 + 1},
    "cohere": {"CohereLayerNorm": 2 * 3 + 1},
}
BATCH = draw(1, rows=2, length=32)[0]


def _model(name: str) -> Any:
    return build(Run(model=FAMILIES[name]))


@pytest.mark.parametrize("name", DENSE)
def test_every_layer_of_a_dense_model_has_its_mlp_and_norms_in_chunks(name: str) -> None:
    model, of_norms = _model(name), NORMS.get(name, {})
    found = Counter(type(module).__name__ for module in chunk_modules(model, Strategy(mlp_chunk=3)))
    count = 2 + sum(of_norms.values())
    assert {each: number for each, number in found.items() if "Norm" in each} == of_norms
    assert found.total() == count
    assert len(chunk_modules(model, Strategy(mlp_chunk=3))) == count, "once more, nothing to do"
    assert {module.forward.chunk for module in chunk_modules(model, Strategy(mlp_chunk=5))} == {5}
    assert len(restore_modules(model)) == count
    assert not any("forward" in vars(module) for module in model.modules())
    assert chunk_modules(model, Strategy(mlp_chunk=0)) == []
    assert len(chunk_modules(model, Strategy(mlp_chunk=5))) == count, "as if for the first time"


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_models_with_experts_are_refused_by_name(name: str) -> None:
    model = _model(name)
    with pytest.raises(ValueError, match=rf"has experts \({WITH_EXPERTS[name]}\), which mlp_chunk does not cut"):
        chunk_modules(model, Strategy(mlp_chunk=3))
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(("kind", "name"), [("XLORA", "X-LoRA"), ("POLY", "Poly")])
def test_adapters_that_weigh_rows_or_tokens_are_refused_by_name(kind: str, name: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = _model("llama")
    model.peft_config = {"default": SimpleNamespace(peft_type=peft.PeftType[kind])}
    for option in ("mlp_chunk", "head_chunk"):
        with pytest.raises(ValueError, match=f"^{option} is not supported with PEFT's {name}, .*; use {option}=0"):
            chunk_modules(model, Strategy(**{option: 2}))
    assert chunk_modules(model, Strategy(mlp_chunk=2), is_chosen=True) == []
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
        chunk_modules(model, Strategy(mlp_chunk=3))
    assert not any("forward" in vars(module) for module in model.modules())


def _fused(self: Any, hidden_states: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(hidden_states, hidden_states.shape[-1:], self.weight)


class _FusedRMSNorm(torch.nn.Module):
    forward = _fused


def test_norms_that_are_one_kernel_or_mix_tokens_or_take_a_gate_are_left_alone() -> None:
    model = _model("llama")
    layer = model.model.layers[0]
    others = [
        Qwen3_5RMSNormGated(32),
        PatchTSTBatchNorm(transformers.PatchTSTConfig(d_model=32)),
        VitDetLayerNorm(32),  # which normalizes the second dimension
        torch.nn.LayerNorm(32),
        torch.nn.RMSNorm(32),
        _FusedRMSNorm(),
    ]
    layer.others = torch.nn.ModuleList(others)
    layer.input_layernorm.forward = MethodType(_fused, layer.input_layernorm)  # as Liger does
    found = chunk_modules(model, Strategy(mlp_chunk=3))
    assert not any(each is other for each in found for other in [*others, layer.input_layernorm])
    assert len(found) == 2 + 4


def _with_inputs(model: Any) -> dict[Any, Tensor]:
    """The norms of a model that chunks are for, and what each gets, as it lies in memory."""
    norms = [each for each in chunk_modules(model, Strategy(mlp_chunk=5)) if "Norm" in type(each).__name__]
    inputs: dict[Any, Tensor] = {}

    def note(norm: Any, args: tuple[Tensor, ...]) -> None:
        inputs[norm] = args[0].detach()

    hooks = [each.register_forward_pre_hook(note) for each in norms]
    model(input_ids=BATCH["input_ids"], use_cache=False)
    for hook in hooks:
        hook.remove()
    assert len(inputs) == len(norms)
    return inputs


def _of_norm(norm: Any, x: Tensor, run: Callable[[Any, Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the gradients of the input and of the weight; the input lies in memory as `x` does."""
    x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x).requires_grad_(True)
    norm.zero_grad()
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    out = run(norm, x)
    out.backward(grad.to(out.dtype))
    assert x.grad is not None
    assert "weight" not in vars(norm), "the module has its parameter again"
    return out.detach(), x.grad, norm.weight.grad.clone()


def _autocast(norm: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return norm(x)  # type: ignore[no-any-return]


RUNS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "at once": lambda norm, x: norm(x),
    "reentrant": lambda norm, x: checkpoint(norm, x, use_reentrant=True),  # type: ignore[no-any-return]
    "checkpoint": lambda norm, x: checkpoint(norm, x, use_reentrant=False),  # type: ignore[no-any-return]
    "autocast": _autocast,
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_in_chunks_have_the_same_bits(name: str) -> None:
    """Outputs and gradients of inputs; those of weights are summed in another order."""
    for norm, x in _with_inputs(_model(name)).items():
        whole = copy.deepcopy(norm)
        restore_modules(whole)
        for about, run in RUNS.items():
            given = x.bfloat16() if run is _autocast else x
            found, expected = _of_norm(norm, given, run), _of_norm(whole, given, run)
            assert torch.equal(found[0], expected[0]), about
            assert found[0].dtype == expected[0].dtype
            assert torch.equal(found[1], expected[1]), about
            assert float((found[2] - expected[2]).norm()) <= 1e-6 * float(expected[2].norm()), about


@pytest.mark.parametrize("name", NORMS)
def test_norms_in_bfloat16_are_as_exact_and_nothing_large_is_in_float32(name: str) -> None:
    """Of a norm of q or k, a token has all of its heads. The truth is what float32 gives, in which norms compute."""
    for norm, x in _with_inputs(build(Run(model=FAMILIES[name]), dtype=torch.bfloat16)).items():
        whole = copy.deepcopy(norm)
        restore_modules(whole)
        truth = _of_norm(copy.deepcopy(whole).float(), x.float(), RUNS["at once"])[2]
        expected = _of_norm(whole, x, RUNS["at once"])
        with LargestTensor(torch.float32) as noted:
            found = _of_norm(norm, x, RUNS["at once"])
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        error, of_whole = (float((each[2].float() - truth).norm()) for each in (found, expected))
        assert error <= 1.2 * of_whole
        assert noted.elements == 5 * x.numel() // BATCH["input_ids"].numel()


def test_norms_keep_nothing_but_their_inputs() -> None:
    for norm, x in _with_inputs(build(Run(model=FAMILIES["gemma3"]), dtype=torch.bfloat16)).items():
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda each: (kept.append(each), each)[1], lambda each: each):  # noqa: B023
            norm(x)
        assert [each.data_ptr() for each in kept] == [x.data_ptr()]


def test_norms_with_frozen_weights() -> None:
    for norm, x in _with_inputs(_model("qwen3")).items():
        whole = copy.deepcopy(norm)
        restore_modules(whole)
        grads = []
        for each in (norm, whole):
            each.weight.requires_grad_(False)
            given = x.detach().requires_grad_(True)
            each(given).square().sum().backward()
            grads.append(given.grad)
            assert each.weight.grad is None
            assert not each(x.detach()).requires_grad
        assert torch.equal(*grads)


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
        sum_of_losses(logits, labels).backward()
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
        sum_of_losses(logits, labels).backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return worst(*grads)[0]


def test_under_the_compiler() -> None:
    assert run_ranks(_compiled, 1, timeout_s=120.0)[0] <= 2e-6
