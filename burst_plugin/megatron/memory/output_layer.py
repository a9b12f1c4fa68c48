"""The loss of Megatron's language models in chunks of tokens: `--burst-loss-chunk`.

While a model computes its loss, its output layer returns hidden states, and `compute_language_model_loss` gets these.
So do the heads of multi-token prediction, which call the same output layer and loss. The output layer is called as a
module, since it is a hook that waits for its weight with `--overlap-param-gather`. Hidden states are gathered once
over sequence-parallel ranks, and their gradient is reduced once over tensor-parallel ones, however many chunks there
are; a chunk's sums over the vocabulary take two collectives of some numbers per token.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    layers,
)
from megatron.core.transformer import multi_token_prediction
from torch import Tensor

from burst_plugin.activations import Head, linear_cross_entropy
from burst_plugin.activations.deferred_logits import DeferredLogits
from burst_plugin.activations.recomputed_chunks import linear
from burst_plugin.batch import IGNORED_LABEL
from burst_plugin.frameworks.options import broken_rules
from burst_plugin.frameworks.wrapping import bind, hooks_of_others, wrap
from burst_plugin.megatron.batches.documents import hybrid_model
from burst_plugin.megatron.flags.arguments import option_of
from burst_plugin.megatron.memory.chosen_options import WHOLE_LOGITS
from burst_plugin.megatron.registry import Registry

_HARMLESS = ("megatron.core.distributed.",)  # hooks that wait for parameters, or gather them
_ACCEPTED = "_compute_mtp_acceptance_counts"  # since core 0.19


def hook_losses(registry: Registry) -> str:
    """Have GPT and hybrid models compute their losses in chunks of `loss_chunk` tokens, where the options say so.

    It wraps their constructors and the methods that compute losses. Models whose loss cannot be cut raise ValueError
    if the option was given by the user. registry: the rings and their options. Returns a line for the report of
    `install()`.
    """
    for kind, computes in ((GPTModel, "_postprocess"), (hybrid_model(), "forward")):
        wrap(kind, "__init__", partial(_check_model, registry))
        wrap(kind, computes, partial(_with_chunks, registry))
    wrap(LanguageModule, "__init__", partial(_refuse_others, registry))
    if hasattr(multi_token_prediction, _ACCEPTED):
        wrap(multi_token_prediction, _ACCEPTED, partial(_count_accepted, registry))
    return "GPT and hybrid models compute their losses in chunks of tokens, if loss_chunk says so"


def _refuse_others(registry: Registry, original: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
    """Build a language model; raise ValueError if its loss is not computed in chunks although that is asked for."""
    chunk = registry.given().loss_chunk
    if chunk and not isinstance(model, (GPTModel, hybrid_model())):
        raise ValueError(
            f"--burst-loss-chunk {chunk} is not supported with {type(model).__name__}: it is for GPT and hybrid "
            "models; drop it"
        )
    original(model, *args, **kwargs)


def _check_model(registry: Registry, original: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
    """Build a model, and raise ValueError with all that keeps its loss from being computed in chunks."""
    original(model, *args, **kwargs)
    _check_chunks(model, registry.given().loss_chunk)


def _check_chunks(model: Any, chunk: int) -> None:
    """Raise ValueError with all that keeps a model's loss from being computed in chunks, if that is asked for."""
    reasons = output_layer_problems(model) if chunk else []
    if reasons:
        lines = [*reasons, "or drop --burst-loss-chunk (loss_chunk=0), for whole logits"]
        raise ValueError(
            f"--burst-loss-chunk {chunk} cannot cut the loss of {type(model).__name__}:"
            + "".join(f"\n  {line}" for line in lines)
        )


def output_layer_problems(model: Any) -> list[str]:
    """Return the reasons why the loss of a model cannot be computed in chunks, each with what to write instead.

    [] if it can be. model: a GPT or hybrid model, without wrappers.
    """
    reasons = [f"{name}={value!r}: {instead}" for name, value, instead in broken_rules(WHOLE_LOGITS, model.config)]
    loss = model.compute_language_model_loss
    function = getattr(loss, "__func__", loss)
    home = str(getattr(function, "__globals__", {}).get("__name__"))
    if function is not LanguageModule.compute_language_model_loss or not home.startswith("megatron.core."):
        name = getattr(loss, "__qualname__", type(loss).__name__)
        reasons.append(
            f"its loss is {name} of {home}, which would not be called: use that of Megatron's LanguageModule"
        )
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
    if getattr(layer, "gtp_remat_size", 1) > 1:  # since 0.19
        reasons.append(
            f"its output layer gathers shards of its weight, and chunks would use one of them alone: drop "
            f"{option_of('tensor_parallel_num_weight_shards')}"
        )
    changes = hooks_of_others(layer, _HARMLESS) + ["a forward of its own"] * ("forward" in vars(layer))
    if changes:
        reasons.append(f"its output layer has what would not get logits ({', '.join(changes)}): remove that")
    return reasons


def _with_chunks(registry: Registry, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `GPTModel._postprocess`, or a hybrid model; with labels its loss is in chunks if the options say so."""
    chunk, is_chosen = registry.asked().loss_chunk, not registry.given().loss_chunk
    if not chunk or isinstance(model.compute_language_model_loss, LanguageModelLoss):
        return original(model, *args, **kwargs)
    has_labels = bind(original, model, *args, **kwargs).arguments.get("labels") is not None
    if model.post_process and not has_labels:
        if is_chosen:
            _warn_of_whole_logits(registry, "it is called without labels")
        return original(model, *args, **kwargs)
    if not is_chosen:
        _check_chunks(model, chunk)  # once more: layers, hooks and functions may have changed since
    if not model.post_process:
        return original(model, *args, **kwargs)
    if is_chosen and (reasons := output_layer_problems(model)):
        _warn_of_whole_logits(registry, reasons[0])
        return original(model, *args, **kwargs)
    loss = LanguageModelLoss(model.output_layer, chunk, model.compute_language_model_loss if is_chosen else None)
    with with_loss(model, loss, f"--burst-loss-chunk {chunk} is not supported with {type(model).__name__}: it"):
        result = original(model, *args, **kwargs)
    if not loss.calls and not is_chosen:
        raise ValueError(
            f"--burst-loss-chunk {chunk} is not supported with {type(model).__name__}, which does not compute its "
            "loss by compute_language_model_loss of its output layer's logits; drop it"
        )
    return result


def _warn_of_whole_logits(registry: Registry, reason: str) -> None:
    """Warn once, on one rank, that a model in training has whole logits, where memory was counted for chunks.

    reason: why, as a sentence about the model.
    """
    if registry.knows_of_whole_logits or not torch.is_grad_enabled():  # without a graph they take little
        return
    registry.knows_of_whole_logits = True
    ranks = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    if any(ranks):
        return
    options = registry.asked()
    warnings.warn(
        f'memory "auto" has counted logits of {options.loss_chunk:,} tokens at a time, with keep_attention='
        f"{options.keep_attention!r}, but the model has those of all its tokens: {reason}; if memory is short, use "
        "--burst-keep-attention none, or --burst-memory off",
        stacklevel=2,
    )


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
    """Count for the log how many predicted tokens are right, with logits of a chunk at a time."""
    if not isinstance(logits, DeferredLogits):
        return original(logits, labels, mask, layer, *args, **kwargs)  # type: ignore[no-any-return]
    with torch.no_grad():
        hidden, head = LanguageModelLoss(layer, registry.asked().loss_chunk).before_logits(logits)
        hidden = hidden.flatten(0, 1)
        labels, mask = (x.transpose(0, 1).reshape(1, -1) for x in (labels, mask))
        counts = [
            original(head.logits(hidden[rows])[:, None], labels[:, rows], mask[:, rows], layer, *args, **kwargs)
            for rows in head.chunks(len(hidden))
        ]
    right, total = (torch.stack(each).sum() for each in zip(*counts, strict=True))
    return right, total


@contextmanager
def with_loss(model: Any, loss: LanguageModelLoss, refusal: str) -> Iterator[None]:
    """Have `model` compute its loss by `loss`, from hidden states that its output layer returns in place of logits.

    Both are undone at the end of the context.

    refusal: the beginning of the ValueError that is raised if the model does anything else that needs logits.
    """
    layer = model.output_layer
    layer.forward = partial(_hidden_states, layer, refusal, loss.of_logits is not None)
    model.compute_language_model_loss = loss
    try:
        yield
    finally:
        del model.compute_language_model_loss
        del layer.forward


def _hidden_states(
    layer: Any,
    refusal: str,
    may_be_whole: bool,
    hidden: Tensor,
    weight: Tensor | None = None,
    **more: Any,
) -> tuple[Any, Any]:
    """Return the input of an output layer, and the weight that is used, in place of logits and no bias."""

    def whole(hidden: Tensor) -> Tensor:
        logits: Tensor = type(layer).forward(layer, hidden, weight)[0]
        return logits

    asked = [name for name, value in more.items() if value]
    if asked and may_be_whole:
        found: tuple[Any, Any] = type(layer).forward(layer, hidden, weight, **more)
        return found
    if asked:
        raise ValueError(f"{refusal} asks its output layer for {', '.join(asked)}; drop it")
    used = layer.weight if weight is None else weight
    return DeferredLogits(hidden, refusal, used, head=whole if may_be_whole else None), None


class LanguageModelLoss:
    """A loss function in chunks, of hidden states, in place of a model's `compute_language_model_loss`.

    Args:
        layer: the model's output layer.
        chunk: rows of logits at a time.
        of_logits: the model's own loss function, for models that may compute whole logits; None if they may not.

    `calls` counts how often it was called with hidden states.
    """

    def __init__(self, layer: Any, chunk: int, of_logits: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        self.layer, self.chunk, self.calls, self.of_logits = layer, chunk, 0, of_logits

    def __call__(self, labels: Tensor, logits: Any) -> Tensor:
        """Return losses [B, S] of labels [B, S]. Labels below 0 do not count, as where a mask says so in Megatron."""
        if isinstance(logits, Tensor) and self.of_logits is not None:
            return self.of_logits(labels, logits)
        hidden, head = self.before_logits(logits)
        labels = labels.transpose(0, 1)
        losses = linear_cross_entropy(hidden, head, labels.masked_fill(labels < 0, IGNORED_LABEL))
        return losses.transpose(0, 1).contiguous()

    def before_logits(self, logits: DeferredLogits) -> tuple[Tensor, Head]:
        """Return the hidden states [S, B, H] of all tokens, and the `Head` that makes logits of a chunk of them.

        Hidden states are gathered over sequence-parallel ranks. logits: what the output layer returned in place of
        logits.
        """
        self.calls += 1
        layer, weight = self.layer, logits.weight
        assert weight is not None
        bias = None if layer.skip_bias_add else layer.bias
        head = Head(
            logits.after(partial(_logits, weight=weight, bias=bias, dtype=getattr(layer, "output_dtype", None))),
            chunk=self.chunk,
            group=layer.tp_group if layer.tp_group.size() > 1 else None,
            parameters=[each for each in (weight, bias) if each is not None],
        )
        return self._of_all_tokens(logits.hidden), head

    def _of_all_tokens(self, hidden: Tensor) -> Tensor:
        """Return hidden states of all tokens; their gradient is summed up over the shares of the vocabulary."""
        layer = self.layer
        if layer.tp_group.size() == 1:
            return hidden
        if layer.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=layer.tp_group)  # type: ignore[no-any-return]
        return copy_to_tensor_model_parallel_region(hidden, group=layer.tp_group)  # type: ignore[no-any-return]


def _logits(rows: Tensor, *, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """Return logits in `dtype` (`--output-logit-dtype`), by the product that Megatron computes whole ones with."""
    if dtype in (None, rows.dtype):
        return linear(rows, weight, bias)
    with torch.no_grad():
        logits: Tensor = layers._linear_forward(rows, weight, bias, dtype)
    if torch.is_grad_enabled():
        logits = _WithGradientOf.apply(linear(rows, weight, bias), logits)  # type: ignore[no-untyped-call]
    return logits


class _WithGradientOf(torch.autograd.Function):
    """Logits that hand their gradient on to logits of the type of hidden states, as Megatron casts it."""

    @staticmethod
    def forward(ctx: Any, rounded: Tensor, logits: Tensor) -> Tensor:
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None  # cast by autograd
