"""The MLPs of Megatron's layers in chunks of tokens.

Megatron has `mlp_chunks_for_training` since 0.18, which cuts the forward pass alone: what the chunks keep for the
backward pass is together as large as before.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from burst_plugin.activations.chunked_mlp import chunked_mlp
from burst_plugin.activations.replaced_forward import ReplacedForward
from burst_plugin.frameworks.options import Rule, broken_rules, off
from burst_plugin.megatron.flags.arguments import option_of
from burst_plugin.strategy import Strategy

_REFUSED = {
    "num_moe_experts": Rule(off, "experts are not cut into chunks"),
    "fp8": Rule(off, "chunks would not be computed again in FP8"),
    "fp4": Rule(off, "chunks would not be computed again in FP4"),
    "delay_wgrad_compute": Rule(off, "it expects one computation of each weight's gradient"),
    "tp_comm_overlap": Rule(off, "its buffers have the size of all tokens"),
    "overlap_moe_expert_parallel_comm": Rule(off, "it takes layers apart"),
    "gtp_weight_remat_size": Rule(lambda shards: shards <= 1, "each chunk would gather shards of weights by itself"),
}


def chunk_mlp(layer: Any, strategy: Strategy) -> None:
    """Have the MLP of a new `TransformerLayer` run in chunks of `strategy.mlp_chunk` tokens, unless that is 0.

    It replaces the forward of `layer.mlp`. Raises ValueError, with all reasons, for an MLP that cannot run in chunks.
    """
    asked = strategy.mlp_chunk
    if not asked or isinstance(layer.mlp, IdentityOp):
        return
    config = layer.config
    reasons = [f"{option_of(name, value)}: {why}" for name, value, why in broken_rules(_REFUSED, config)]
    if not isinstance(layer.mlp, MLP) or type(layer.mlp).forward is not MLP.forward:
        reasons.append(f"a layer has {type(layer.mlp).__name__} as its MLP: only Megatron's own MLP can be cut")
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    if asked < ranks:
        gathers = option_of("sequence_parallel")
        reasons.append(f"{gathers} gathers a token of each of {ranks} ranks at least: use {ranks} or more")
    if reasons:
        raise ValueError(f"mlp_chunk={asked} (--burst-mlp-chunk) is not possible here: {'; '.join(reasons)}")
    layer.mlp.forward = _ChunkedMLP(layer.mlp, asked // ranks)


class _ChunkedMLP(ReplacedForward):
    """Takes the place of `MLP.forward`, which returns an output, and a bias that is yet to be added to it."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, hidden_states: Tensor, per_token_scale: Any = None, **kwargs: Any) -> tuple[Tensor, Any]:
        """Run `MLP.forward` in chunks. It does not use other arguments, such as a padding mask."""
        if per_token_scale is not None:
            raise ValueError("mlp_chunk is not for MLPs with per_token_scale, such as experts; use 0")
        bias: Any = None

        def run(piece: Tensor) -> Tensor:
            nonlocal bias
            out: Tensor
            out, bias = self.earlier(piece)
            return out

        trained = list(self.module.parameters())
        out = chunked_mlp(run, hidden_states, trained, chunk=self.chunk, adds_itself=_adds_itself, module=self.module)
        if bias is not None and not any(bias is each for each in trained):
            raise ValueError(
                f"mlp_chunk={self.chunk}: linear_fc2 returned a bias that is not its parameter, and would get no "
                "gradient; use --disable-bias-linear (add_bias_linear=False), or mlp_chunk=0"
            )
        return out, bias


def _adds_itself(parameter: Tensor) -> bool:
    """Return whether the kernel of gradient_accumulation_fusion has added a weight's gradient to its main_grad.

    Raises ValueError where the sum over chunks would be wrong, or not as exact as that over all tokens.
    """
    if not getattr(parameter, "grad_added_to_main_grad", False):
        return False
    if hasattr(parameter, "__fsdp_param__"):
        raise ValueError(
            "mlp_chunk does not go together with gradient_accumulation_fusion and Megatron-FSDP, which keeps the "
            "gradient of the last chunk; use --no-gradient-accumulation-fusion"
        )
    main_grad: Any = getattr(parameter, "main_grad", None)
    if main_grad is not None and main_grad.dtype != torch.float32:
        raise ValueError(
            f"mlp_chunk with gradient_accumulation_fusion would sum chunks in {main_grad.dtype}; use "
            "--accumulate-allreduce-grads-in-fp32, or --no-gradient-accumulation-fusion"
        )
    return True
