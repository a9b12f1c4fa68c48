"""What a plan says about memory of models with other mixers than attention, against what a step holds.

The models have no values, and kernels are stand-ins that save and return what flash-linear-attention's, mamba-ssm's
and causal-conv1d's do; what kernels allocate and free inside is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from burst_plugin import Strategy, Topology, VirtualRing, recurrent
from burst_plugin.planning.cluster import Cluster
from burst_plugin.training import mixers
from burst_plugin.training.layer_memory import saved_by_layer
from burst_plugin.training.memory import memory
from burst_plugin.training.model_shape import ModelShape, model_shape
from burst_plugin.training.setting import Setting
from tests.support.measured_step import activation_bytes, measured_code

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.huggingface

_SIZES = {"vocab_size": 256, "hidden_size": 512, "intermediate_size": 1536, "tie_word_embeddings": False}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
_DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_MAMBA2 = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 2}
_KIMI = {
    "linear_head_dim": 64,
    "linear_num_heads": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "pad_token_id": None,
    "eos_token_id": None,
    "bos_token_id": None,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**_SIZES, **_HEADS, **_DELTA, "num_hidden_layers": 8},
    "olmo_hybrid": {**_SIZES, **_HEADS, **_DELTA, "num_hidden_layers": 8, "pad_token_id": None, "eos_token_id": None},
    "nemotron_h": {
        **_SIZES,
        **_HEADS,
        "mamba_num_heads": 16,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
        "n_groups": 2,
        "layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba", "mlp"] * 2,
    },
    "bamba": {
        **_SIZES,
        **_HEADS,
        **_MAMBA2,
        "num_hidden_layers": 6,
        "attn_layer_indices": [2],
        "attn_rotary_emb": 32,
    },
    "falcon_h1": {**_SIZES, **_HEADS, **_MAMBA2, "num_hidden_layers": 4, "mamba_d_ssm": 1024},
    "qwen3_5_text with narrow MLPs": {
        **_SIZES,
        **_HEADS,
        **_DELTA,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "linear_num_value_heads": 16,
    },
    "bamba with narrow MLPs": {
        **_SIZES,
        **_HEADS,
        **_MAMBA2,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "attn_layer_indices": [0],
        "attn_rotary_emb": 32,
    },
    "kimi_linear": {
        **_SIZES,
        **_KIMI,
        "num_hidden_layers": 8,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense"] * 8,
    },
    "kimi_linear with narrow MLPs": {
        **_SIZES,
        **_KIMI,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", *["linear_attention"] * 3],
        "mlp_layer_types": ["dense"] * 4,
    },
    "mamba2": {
        **_SIZES,
        "num_hidden_layers": 6,
        "num_heads": 16,
        "head_dim": 64,
        "state_size": 64,
        "n_groups": 2,
    },
    "lfm2": {
        **_SIZES,
        **_HEADS,
        "num_hidden_layers": 6,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "conv", "full_attention"] * 2,
    },
}
TINY: dict[str, Any] = {
    "name": "tiny",
    "layers": 1,
    "hidden": 64,
    "ffn": 0,
    "heads": 1,
    "kv_heads": 1,
    "head_dim": 64,
}
TINY |= {"vocab": 8, "attends": False}
WAITS = ("inputs of layers", "attention, kept", "at work")


def saving(*extra: tuple[Any, ...]) -> Any:
    """A function that saves what it is given and `extra` tensors, and returns one like its first argument."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *xs: Tensor) -> Tensor:
            more = [xs[0].new_empty(shape, dtype=dtype) for shape, dtype in extra]
            out = torch.empty_like(xs[0], memory_format=torch.contiguous_format)
            ctx.save_for_backward(*(x.contiguous() for x in xs), *more)
            ctx.count = len(xs)
            return out

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            return tuple(torch.empty_like(x) for x in ctx.saved_tensors[: ctx.count])

    return Kernel.apply


def convolution(x: Tensor, weight: Tensor, bias: Any = None, **_: Any) -> Tensor:
    out: Tensor = saving()(x)  # channels last, as they come
    return out


def delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, None]:
    within = ((*value.shape[:3], 64), value.dtype)
    return saving(within)(value, query, key, g, beta), None


def channel_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    within = ((*value.shape[:3], 64), value.dtype)
    return saving(within, within)(value, query, key, g, beta), None


def state_space(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **_: Any) -> Tensor:
    out: Tensor = saving((dt.shape, torch.float32))(x, dt, B, C)
    return out


@contextmanager
def kernels(kind: str) -> Iterator[None]:
    """Put the stand-ins in place of PyTorch's functions."""
    module = sys.modules[
        type(transformers.AutoConfig.for_model(kind)).__module__.replace("configuration", "modeling")
    ]
    found = {
        "causal_conv1d_fn": convolution,
        "torch_chunk_gated_delta_rule": delta_rule,
        "chunk_kimi_delta_attention": channel_delta_rule,
        "mamba2_chunk_scan": state_space,
    }
    present = {name: stand_in for name, stand_in in found.items() if hasattr(module, name)}
    with mock.patch.multiple(module, **present):
        yield


def shape_of(kind: str, directory: Path, **changes: Any) -> tuple[ModelShape, Any]:
    config = transformers.AutoConfig.for_model(kind.split()[0], **{**CONFIGS[kind], **changes})
    (directory / "config.json").write_text(config.to_json_string(use_diff=False))
    return model_shape(str(directory)), config


def measured(shape: ModelShape, config: Any, setting: Setting) -> float:
    """The bytes that a step makes, at most."""
    with torch.device("meta"):
        transformers.AutoModelForCausalLM.from_config(config)  # imports the family's module
    with kernels(config.model_type):
        return activation_bytes(shape, setting, config=config).peak


class _Saving(torch.autograd.Function):
    """A delta rule's kernel that returns the states which leave pieces, and normalizes queries and keys itself."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        within = v.new_empty((*v.shape[:3], 64))
        ctx.save_for_backward(q.clone(), k.clone(), v.contiguous(), g, beta, within)
        return torch.empty_like(v), torch.zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])


@pytest.mark.parametrize("ranks", [8, 16])
def test_a_ring_keeps_what_the_plan_says(ranks: int) -> None:
    """With a kernel for pairs that runs on wider values, and states of spans.

    The plan is for the fullest rank, what is measured an average: of few ranks more pieces need no pair.
    """
    mixer = mixers.delta_rule(hidden=64, keys=(4, 64), values=(8, 64), width=4)
    tokens = 512 * ranks
    mixed = torch.randn(1, tokens, 1024).to(torch.bfloat16).requires_grad_()
    q, k, v = (x.unflatten(-1, (-1, 64)) for x in torch.split(mixed * 1, [256, 256, 512], -1))
    g, beta = (torch.rand(1, tokens, 8).to(dtype).requires_grad_() for dtype in (torch.float32, torch.bfloat16))
    kept, found = {}, []

    def pack(x: Tensor) -> Tensor:
        found.append(x)  # so that no other tensor has its place
        kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    ring = VirtualRing(Topology(1, ranks), Strategy(recurrent="state", layout="zigzag"))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        recurrent.gated_delta_rule(
            q, k, v, -g, beta, recurrent.Placement(ring), kernel=lambda *xs: _Saving.apply(*xs[:5])
        )
    measured_bytes = sum(kept.values()) / ranks
    setting = Setting(tokens=tokens, context=ranks, inner=ranks, code=measured_code())
    saved = saved_by_layer(ModelShape(**TINY, mixer=mixer), setting, whole_mlp=False)
    of_states = saved["states of pieces"]
    of_kernel = tokens / ranks * (2 * 1024 + 8 * (4 + 2) + 8 * 64 * 2)  # q, k and v; gates; products within chunks
    expected = of_kernel + of_states
    print(f"{ranks} ranks: {expected / measured_bytes:.4f}")
    assert expected == pytest.approx(measured_bytes, rel=0.12)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "kimi_linear"])
def test_inputs_of_kernels_are_of_the_types_that_the_plan_counts(kind: str, tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}
    shape, config = shape_of(kind, tmp_path, **layers, **({"mlp_layer_types": ["dense"]} if "kimi" in kind else {}))
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    name = "chunk_kimi_delta_attention" if "kimi" in kind else "torch_chunk_gated_delta_rule"
    with mock.patch.object(sys.modules[type(model).__module__], name, side_effect=delta_rule) as kernel:
        model(torch.zeros(1, 8, dtype=torch.long, device="cpu"), use_cache=False)
    q, k, v = kernel.call_args.args
    inputs = {"q": q, "k": k, "v": v, "g": kernel.call_args.kwargs["g"], "beta": kernel.call_args.kwargs["beta"]}
    assert shape.mixer is not None
    counted = {name: nbytes for name, _, _, nbytes in shape.mixer.tensors}
    assert counted == {name: x.element_size() for name, x in inputs.items()}


def said(shape: ModelShape, setting: Setting) -> tuple[float, str]:
    found = memory(shape, setting, Cluster())
    return sum(found.gpu[name] for name in WAITS), found.fullest


@pytest.mark.parametrize("plain_norms", [True, False])
@pytest.mark.parametrize("recompute", ["full", "none"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_step_takes_what_the_plan_says(kind: str, recompute: str, plain_norms: bool, tmp_path: Path) -> None:
    shape, config = shape_of(kind, tmp_path)
    code = replace(measured_code(), plain_norms=plain_norms)
    setting = Setting(tokens=4096, code=code, recompute=recompute)
    expected, moment = said(shape, setting)
    peak = measured(shape, config, setting)
    print(f"{kind} {recompute} plain {plain_norms}: {expected / peak:.4f} {moment}")
    assert expected == pytest.approx(peak, rel=0.05)
