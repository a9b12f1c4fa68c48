"""The most that the tensors of a training step take at once: a real model's, without their values.

    code = measured_code()
    setting = Setting(tokens=4096, code=code, recompute="full")
    activation_bytes(shape, setting)                                   # what `training.memory` says beside weights
    activation_bytes(shape, setting, prepare=cut_mlps_into_chunks)     # with a feature switched on

The model is a Llama of transformers with these sizes, or a Qwen3 if queries and keys are normalized, in bfloat16, on
one rank, on PyTorch's device "meta", so that no length is too long. Attention is a stand-in that saves and returns
what a ring of one rank does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from burst_plugin.training.model_shape import ModelShape
from burst_plugin.training.setting import Code, Setting
from tests.support.live_bytes import LiveBytes
from tests.support.meta_kernels import compiled_meta_kernels

Prepare = Callable[[Any, Setting], None]
"""Switches a feature of `setting` on in a model."""
_NAME = "planned_stand_in"
_AUTOCAST = {  # which knows no "meta"
    "is_autocast_enabled": lambda *_: False,
    "autocast": lambda *_, **__: nullcontext(),
}


def measured_code() -> Code:
    """Return what the code of this step keeps: on a CPU results do not wait, and kernels' workspaces are not seen."""
    return replace(Code.of_modules(fused_norms=False), waiting=1, workspace=0)


def _nothing(model: Any, setting: Setting) -> None:
    pass


def activation_bytes(
    shape: ModelShape, setting: Setting, prepare: Prepare = _nothing, *, config: Any = None
) -> LiveBytes:
    """Run a step and return what was alive: all that was made in it, but for gradients that are there before.

    config: the configuration of the model, if it is another one than a Llama or a Qwen 3.
    """
    with torch.device("meta"), mock.patch.multiple(torch, **_AUTOCAST), compiled_meta_kernels():
        model = _model(setting, transformers_config(shape, setting) if config is None else config)
        prepare(model, setting)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        ids = torch.zeros(setting.micro_batch, setting.tokens, dtype=torch.long)
        positions = torch.arange(setting.tokens)[None]
        with LiveBytes(device="meta") as live:
            model(input_ids=ids, labels=ids, position_ids=positions, use_cache=False).loss.backward()
    return live


def transformers_config(shape: ModelShape, setting: Setting, **more: Any) -> Any:
    """Return the configuration of a Llama, or of a Qwen 3 where q and k have norms, with `more` of its arguments."""
    from transformers import LlamaConfig, Qwen3Config

    return (Qwen3Config if shape.qk_norm else LlamaConfig)(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        max_position_embeddings=setting.tokens,
        **more,
    )


def _model(setting: Setting, config: Any) -> Any:
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(_NAME, _attention)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=_NAME).train()
    if not setting.code.plain_norms:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(_norm, module)
    if setting.recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


class _Norm(torch.autograd.Function):
    """A norm that is one kernel, which saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def _norm(module: Any, x: Tensor) -> Any:
    return _Norm.apply(x, getattr(module, "weight", None))  # type: ignore[no-untyped-call]


class _StandIn(torch.autograd.Function):
    """Saves q, k, v, out and lse, and makes delta, dq, dk and dv, as the ring does where it has one rank."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.clone() if x.untyped_storage().nbytes() > x.nbytes else x for x in (q, k, v))
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        q, k, v, _, lse = ctx.saved_tensors
        torch.empty_like(lse)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    out: Any = _StandIn.apply(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))  # type: ignore[no-untyped-call]
    return out, None
