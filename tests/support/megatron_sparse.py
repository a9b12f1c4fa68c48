"""A GPT model with Megatron's sparse attention (DSA) in all layers, for tests on CPUs."""

from __future__ import annotations

from typing import Any

from tests.support.megatron_hybrid import SequenceParallelNorm


def sparse_model(run: Any, config: Any) -> Any:
    """A `GPTModel` by Megatron's spec of sparse attention; `run` is a `GptRun`."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_dsa_module_spec_for_backend
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    class Backend(LocalSpecProvider):
        """Megatron's local layers, and what stands in for two of Transformer Engine's."""

        def linear(self) -> type:
            return transformer_engine.TELinear

        def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
            return transformer_engine.TENorm

    attention = get_dsa_module_spec_for_backend(config, Backend())
    down = {"linear_q_down_proj": ColumnParallelLinear, "linear_kv_down_proj": ColumnParallelLinear}
    vars(attention.submodules).update(down)  # Megatron compares the others with classes by identity
    layer = TransformerLayerSubmodules(
        input_layernorm=SequenceParallelNorm,
        self_attention=attention,
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=SequenceParallelNorm,
        mlp=ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)),
        mlp_bda=get_bias_dropout_add,
    )
    layers = [ModuleSpec(TransformerLayer, submodules=layer)] * config.num_layers
    spec = TransformerBlockSubmodules(layers, SequenceParallelNorm)
    return GPTModel(config, spec, run.vocab, run.seq_length, position_embedding_type="rope")
