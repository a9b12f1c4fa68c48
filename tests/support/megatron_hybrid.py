"""Megatron's hybrid models, GPT models with gated delta nets, and how tensor-parallel ranks share their mixers."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def hybrid_model(run: Any, config: Any) -> Any:
    """A `MambaModel`, or since 0.18 a `HybridModel`, with the layers of `run.pattern` (a `GptRun`)."""
    from megatron.core import parallel_state

    from burst_plugin.megatron.batches.documents import hybrid_model as kind_of_model
    from burst_plugin.megatron.cpu.local_layers import use_local_layers

    use_local_layers()
    kind, name = kind_of_model(), "hybrid_layer_pattern"  # since 0.17
    if name not in inspect.signature(kind.__init__).parameters:
        name = "hybrid_override_pattern"
    return kind(
        config,
        stack_spec(),
        run.vocab,
        run.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type=run.positions,
        share_embeddings_and_output_weights=run.tied,
        **{name: run.pattern},
    )


def stack_spec() -> Any:
    """Megatron's spec of a stack of layers."""
    try:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    except ImportError:
        from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec

        return mamba_stack_spec
    return hybrid_stack_spec


def delta_model(run: Any, config: Any) -> Any:
    """A `GPTModel` with a gated delta net in every other layer."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    mlp = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    attention, delta = _attention_layer(), _delta_layer()
    for layer in (delta, attention):
        layer.submodules.pre_mlp_layernorm = SequenceParallelNorm
        layer.submodules.mlp, layer.submodules.mlp_bda = mlp, get_bias_dropout_add
    spec = TransformerBlockSubmodules([delta, attention], SequenceParallelNorm)
    return GPTModel(config, spec, run.vocab, run.seq_length, position_embedding_type="rope")


def _delta_layer() -> Any:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    layer = _attention_layer()
    inner = GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=SequenceParallelNorm, out_proj=RowParallelLinear
    )
    layer.submodules.self_attention = ModuleSpec(GatedDeltaNet, submodules=inner)
    return layer


def _attention_layer() -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    inner = SelfAttentionSubmodules(ColumnParallelLinear, DotProductAttention, RowParallelLinear)
    attention = ModuleSpec(SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=inner)
    layer = TransformerLayerSubmodules(
        input_layernorm=SequenceParallelNorm, self_attention=attention, self_attn_bda=get_bias_dropout_add
    )
    return ModuleSpec(TransformerLayer, submodules=layer)


class SequenceParallelNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight gradient Megatron sums over tensor-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


def mixer_sections(name: str, config: Any) -> list[int] | None:
    """The sizes of what a parameter of a mixer has along dim 0, each of which tensor-parallel ranks share.

    None for parameters that are whole, or are cut as those of other layers.
    """
    if any(part in name for part in ("out_proj", "out_norm", "layer_norm")):
        return None
    if ".self_attention." in name and any(part in name for part in ("in_proj", "conv1d", "A_log", "dt_bias")):
        keys, values = (
            getattr(config, f"linear_num_{kind}_heads") * getattr(config, f"linear_{kind}_head_dim")
            for kind in ("key", "value")
        )
        gates = [config.linear_num_value_heads]
        if "in_proj" in name:
            return [keys, keys, values, values, *gates * 2]
        return [keys, keys, values] if "conv1d" in name else gates
    if ".mixer." not in name:
        return None
    inner = config.mamba_num_heads * config.mamba_head_dim
    states = [config.mamba_num_groups * config.mamba_state_dim] * 2
    if "in_proj" in name:
        return [inner, inner, *states, config.mamba_num_heads]
    if "conv1d" in name:
        return [inner, *states]
    return [inner if "norm" in name else config.mamba_num_heads]


def drawn_for_mixer(name: str, drawn: torch.Tensor) -> torch.Tensor | None:
    """A parameter of a mixer, of normally distributed numbers; None for others.

    States last for some tokens, and neither gates nor convolutions are mild.
    """
    last = name.rpartition(".")[2]
    if last == "A_log":
        return drawn - 2
    if last in ("dt_bias", "D"):
        return drawn
    return drawn / 2 if "conv1d" in name else None
