"""The loss of Megatron's language models in chunks of tokens: `--burst-loss-chunk`.

While a model computes its loss, a stand-in takes the place of its output layer. `compute_language_model_loss` gets
what the stand-in returns: hidden states. So do the heads of multi-token prediction, which use the same two. Hidden
states are gathered once over sequence-parallel ranks, and their gradient is reduced once over tensor-parallel ones,
however many chunks there are; a chunk's sums over the vocabulary take two collectives of some numbers per token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import multi_token_prediction
from torch import Tensor

from burst_plugin.activations import Head, linear_cross_entropy
from burst_plugin.activations.deferred_logits import DeferredLogits
from burst_plugin.activations.recomputed_chunks import linear
from burst_plugin.batch import IGNORED_LABEL
from burst_plugin.frameworks.rules import Rule, broken_rules, off
from burst_plugin.frameworks.wrapping import wrap
from burst_plugin.megatron.registry import Registry

__all__ = ["ChunkedLoss", "follow_losses", "output_layer_problems", "with_loss"]

_ACCEPTED = "_compute_mtp_acceptance_counts"  # since core 0.19
_REFUSED = {  # fields of TransformerConfig that need whole logits, or take part in the output layer's gradient
    "cross_entropy_loss_fusion": Rule(off, "it computes the loss of whole logits; drop --cross-entropy-loss-fusion"),
    "defer_embedding_wgrad_compute": Rule(
        off, "it keeps the inputs of whole logits; drop --defer-embedding-wgrad-compute"
    ),
    "config_logger_dir": Rule(off, "it saves whole logits; drop --config-logger-dir"),
}


def follow_losses(registry: Registry) -> str:
    """Have models compute their losses in chunks where the options say so; return a line that says it."""
    wrap(GPTModel, "__init__", partial(_check_model, registry))
    wrap(GPTModel, "_postprocess", partial(_with_chunks, registry))
    wrap(LanguageModule, "__init__", partial(_refuse_others, registry))
    if hasattr(multi_token_prediction, _ACCEPTED):
        wrap(multi_token_prediction, _ACCEPTED, partial(_count_accepted, registry))
    return "GPT models compute their losses in chunks of tokens, if loss_chunk says so"


def _refuse_others(registry: Registry, original: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
    """Build a language model; raise ValueError if its loss is not computed in chunks although that is asked for."""
    chunk = registry.asked().loss_chunk
    if chunk and not isinstance(model, GPTModel):
        raise ValueError(
            f"--burst-loss-chunk {chunk} is not supported with {type(model).__name__}: it is for GPT models; drop it"
        )
    original(model, *args, **kwargs)


def _check_model(registry: Registry, original: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
    """Build a model, and raise ValueError with all that keeps its loss from being computed in chunks."""
    original(model, *args, **kwargs)
    chunk = registry.asked().loss_chunk
    reasons = output_layer_problems(model) if chunk else []
    if reasons:
        raise ValueError(
            f"--burst-loss-chunk {chunk} cannot cut the loss of {type(model).__name__}:"
            + "".join(f"\n  {line}" for line in reasons)
        )


def output_layer_problems(model: Any) -> list[str]:
    """Return what keeps the loss of a model from being computed in chunks, each with what to write instead."""
    values = {name: getattr(model.config, name) for name in _REFUSED if hasattr(model.config, name)}
    reasons = [f"{name}={value!r}: {instead}" for name, value, instead in broken_rules(_REFUSED, values)]
    if not model.post_process:
        return reasons
    layer = model.output_layer
    is_megatrons = isinstance(layer, ColumnParallelLinear) and type(layer).__module__.startswith("megatron.core.")
    if not is_megatrons:  # newer releases have a subclass, which is no different without a fused loss
        reasons.append(
            f"its output layer is a {type(layer).__name__}, of which the weight alone would be used: use Megatron's "
            "ColumnParallelLinear"
        )
    elif layer.gather_output and layer.tp_group.size() > 1:
        reasons.append("parallel_output=False: it gathers logits over the vocabulary; use True")
    return reasons


def _with_chunks(registry: Registry, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what computes a model's loss, in chunks if the options say so and there are labels."""
    chunk = registry.asked().loss_chunk
    if not chunk or not model.post_process or isinstance(model.output_layer, _StandIn):
        return original(model, *args, **kwargs)
    if inspect.signature(original).bind(model, *args, **kwargs).arguments.get("labels") is None:
        return original(model, *args, **kwargs)
    loss = ChunkedLoss(model.output_layer, chunk)
    with with_loss(model, loss, f"--burst-loss-chunk {chunk} is not supported with {type(model).__name__}: it"):
        result = original(model, *args, **kwargs)
    if not loss.calls:
        raise ValueError(
            f"--burst-loss-chunk {chunk} is not supported with {type(model).__name__}, which does not compute its "
            "loss by compute_language_model_loss of its output layer's logits; drop it"
        )
    return result


def _count_accepted(
    registry: Registry,
    original: Any,
    logits: Any,
    labels: Tensor,
    mask: Tensor,
    layer: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Do what counts for the log how many predicted tokens are right, with logits of a chunk at a time."""
    if not isinstance(logits, DeferredLogits):
        found: tuple[Tensor, Tensor] = original(logits, labels, mask, layer, *args, **kwargs)
        return found
    with torch.no_grad():
        hidden, head = ChunkedLoss(layer._layer, registry.asked().loss_chunk).before_logits(logits)
        hidden = hidden.flatten(0, 1)
        labels, mask = (x.transpose(0, 1).reshape(1, -1) for x in (labels, mask))
        counts = [
            original(head.logits(hidden[rows])[:, None], labels[:, rows], mask[:, rows], layer, *args, **kwargs)
            for rows in head.chunks(len(hidden))
        ]
    right, total = (torch.stack(each).sum() for each in zip(*counts, strict=True))
    return right, total


@contextmanager
def with_loss(model: Any, loss: ChunkedLoss, refusal: str) -> Iterator[None]:
    """Put a stand-in in the place of a model's output layer, and the loss function that goes with it.

    Errors of a model that does more with its logits begin with `refusal`.
    """
    layer = model.output_layer
    model._modules["output_layer"] = _StandIn(layer, refusal)
    model.compute_language_model_loss = loss
    try:
        yield
    finally:
        del model.compute_language_model_loss
        model._modules["output_layer"] = layer


class _StandIn(torch.nn.Module):
    """An output layer that hands hidden states on, with the weight that it was given; else like the layer."""

    def __init__(self, layer: torch.nn.Module, refusal: str) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer  # of the model, and not once more here
        self.refusal = refusal

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None, **more: Any
    ) -> tuple[DeferredLogits, None]:
        asked = [name for name, value in {"runtime_gather_output": runtime_gather_output, **more}.items() if value]
        if asked:
            raise ValueError(f"{self.refusal} asks its output layer for {', '.join(asked)}; drop it")
        return DeferredLogits(hidden, self.refusal, self._layer.weight if weight is None else weight), None


class ChunkedLoss:
    """`compute_language_model_loss` of hidden states. calls: how often it was called."""

    def __init__(self, layer: Any, chunk: int) -> None:
        self.layer, self.chunk, self.calls = layer, chunk, 0

    def __call__(self, labels: Tensor, logits: DeferredLogits) -> Tensor:
        """Return losses [B, S] of labels [B, S]. Labels below 0 do not count, as where a mask says so in Megatron."""
        hidden, head = self.before_logits(logits)
        labels = labels.transpose(0, 1)
        losses = linear_cross_entropy(hidden, head, labels.masked_fill(labels < 0, IGNORED_LABEL))
        return losses.transpose(0, 1).contiguous()

    def before_logits(self, logits: DeferredLogits) -> tuple[Tensor, Head]:
        """Return the hidden states [S, B, H] of all tokens, and the head that makes logits of them."""
        self.calls += 1
        layer, weight = self.layer, logits.weight
        assert weight is not None
        bias = None if layer.skip_bias_add else layer.bias
        head = Head(
            logits.after(lambda rows: linear(rows, weight, bias)),
            chunk=self.chunk,
            group=layer.tp_group if layer.tp_group.size() > 1 else None,
            parameters=[each for each in (weight, bias) if each is not None],
        )
        return self._whole(logits.hidden), head

    def _whole(self, hidden: Tensor) -> Tensor:
        """Return hidden states of all tokens; their gradient is summed up over the shares of the vocabulary."""
        layer = self.layer
        if layer.tp_group.size() == 1:
            return hidden
        if layer.sequence_parallel:
            whole: Tensor = gather_from_sequence_parallel_region(hidden, group=layer.tp_group)
        else:
            whole = copy_to_tensor_model_parallel_region(hidden, group=layer.tp_group)
        return whole
