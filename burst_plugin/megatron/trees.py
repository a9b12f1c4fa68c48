"""Rollouts that begin alike, folded into a prefix tree, run through Megatron's language models on a ring.

    def forward_step(data_iterator, model):
        folded, advantages = next(data_iterator)          burst_plugin.trajectories.fold(rollouts)
        return edge_log_probs(model, folded, chunk=1024), partial(loss_of, folded, advantages)

The tree takes the place of a model's attention mask, [1, 2, nodes] of parents and lengths, which Megatron hands to
every layer, and again to layers that it recomputes. While a model runs, its rotary embedding has the logical
positions of a rank's tokens, and its output layer computes log-probabilities of edges, in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from burst_plugin.checks import shown, whole_number
from burst_plugin.comm.differences import TensorValues
from burst_plugin.context import ContextParallel
from burst_plugin.megatron.adapter import install_adapter
from burst_plugin.megatron.batches.documents import hybrid_model
from burst_plugin.megatron.flags.config import problems_of_own_batches
from burst_plugin.megatron.layers.core_attention import BurstCoreAttention
from burst_plugin.megatron.layers.masks import as_attention_mask
from burst_plugin.megatron.memory.output_layer import LanguageModelLoss, output_layer_problems, with_loss
from burst_plugin.megatron.recurrent.mixers import is_on_ring
from burst_plugin.ring.agreement import prepared_together
from burst_plugin.sequence.layout import even_length
from burst_plugin.sequence.prefix_tree import PrefixTree
from burst_plugin.trajectories import Edges, Folded
from burst_plugin.trajectories import edge_log_probs as edge_log_probs_of_hidden

_OF = "rollouts of a prefix tree"
_POSITIONS = ("rope", "learned_absolute", "none")


def edge_log_probs(
    model: Any, folded: Folded, *, chunk: int, length: int | None = None, pad_token_id: int = 0
) -> Tensor:
    """Run a model on this rank's share of folded rollouts, inside a `forward_step` of your own; collective.

    Every stage and rank of a model calls it with the same rollouts. All context-parallel ranks compute the same loss,
    from all edges. Your loss function returns two values, this loss and what to report: Megatron then adds up
    gradients over context-parallel ranks, and each rank has the gradients of its own tokens.

    Args:
        model: a `GPTModel` or hybrid model whose layers are on a ring, wrapped or not.
        folded: the rollouts, as `burst_plugin.trajectories.fold` returns them.
        chunk: rows of logits at a time.
        length: the number of tokens to pad the sequence to; pipeline stages that pass on tensors of one shape need
            the `seq_length` of the schedule. None pads to the least length that all ranks can share equally.
        pad_token_id: the token to pad with.

    Returns:
        On the last pipeline stage [2, E], float32, log-probabilities and entropies of all E edges (predictions from
        one token of the tree to a next), for `unfold`; on other stages the tensor that they pass on.

    Raises:
        ValueError: for models and rollouts that do not fit, on every rank of a ring.

    Example:
        def loss_of(folded, prompt, advantages, output):
            log_probs = unfold(output[0], folded.edges)
            loss = -sum((a * x[len(prompt) - 1 :]).mean() for a, x in zip(advantages, log_probs))
            return loss, {"loss": loss.detach()}
    """
    config, bare = get_model_config(model), unwrap_model(model)
    reasons = _problems(bare, config)
    if reasons:
        raise ValueError(f"{type(bare).__name__} cannot run on a prefix tree: {'; '.join(reasons)}")
    registry = install_adapter(None).registry
    cp = registry.ring_of(bare)

    def agree(read: tuple[Tensor, PrefixTree] | None, problem: str) -> int:
        compared = {} if read is None else {"tokens": TensorValues(read[0].flatten()), "tree": hash(read[1])}
        return cp.agree(compared, problem, of=_OF)

    divisor = config.tensor_model_parallel_size if config.sequence_parallel else 1
    (ids, tree), _ = prepared_together(partial(_read, folded, cp.ranks, divisor, length, pad_token_id), agree)
    tokens = registry.tokens_of_tree(tree, cp)
    positions = tree.logical(torch.arange(tree.length))[None].to(ids.device)
    own_ids, own_positions = (cp.shard(x, 1, tokens).contiguous() for x in (ids, positions))
    with registry.computing(tree), _edges_as_loss(bare, chunk, folded.edges, cp, tokens):
        output: Tensor = model(own_ids, own_positions, as_attention_mask(tree), labels=own_ids)
    return output


@contextmanager
def _edges_as_loss(model: Any, chunk: int, edges: Edges, cp: ContextParallel, tokens: Any) -> Iterator[None]:
    """Have the last stage of a model return log-probabilities and entropies of edges in place of its losses."""
    if not model.post_process:
        yield
        return
    loss = _EdgeLosses(model.output_layer, whole_number("chunk={}", chunk, "use a number of tokens", least=1))
    loss.edges, loss.cp, loss.tokens = edges, cp, tokens
    with with_loss(model, loss, f"a prefix tree is not supported with {type(model).__name__}: it"):
        yield


class _EdgeLosses(LanguageModelLoss):
    """`compute_language_model_loss` that returns log-probabilities and entropies of edges, [2, E]."""

    edges: Edges
    cp: ContextParallel
    tokens: Any

    def __call__(self, labels: Tensor, logits: Any) -> Tensor:
        hidden, head = self.before_logits(logits)
        return torch.stack(
            edge_log_probs_of_hidden(hidden.transpose(0, 1), head, self.edges, self.cp, tokens=self.tokens)
        )


def _read(
    folded: Folded, ranks: int, divisor: int, length: int | None, pad_token_id: int
) -> tuple[Tensor, PrefixTree]:
    """Return ids [1, S] and their tree with padding. Raise ValueError for what does not fit."""
    if not isinstance(folded, Folded):
        raise ValueError(f"got {shown(folded)}; give what burst_plugin.trajectories.fold returned")
    ids, tree = folded.ids, folded.tree
    if not isinstance(ids, Tensor) or ids.shape != (1, tree.length):
        raise ValueError(f"ids are {shown(ids)}, but the nodes of the tree add up to {tree.length} tokens")
    fits = even_length(tree.length, ranks * divisor)
    if length is None:
        length = fits
    if length < tree.length or even_length(length, ranks * divisor) != length:
        raise ValueError(
            f"length={shown(length)} is not valid for {tree.length} tokens over {ranks} context-parallel ranks; give "
            f"a multiple of {even_length(1, ranks * divisor)}, at least {fits}"
        )
    padded = torch.nn.functional.pad(ids, (0, length - tree.length), value=pad_token_id)
    return padded, tree.padded(length)


def _follows_trees(layer: Any) -> bool:
    """Return whether a layer mixes tokens on a ring, by attention or a state, or not at all."""
    mixer = getattr(layer, "mixer", None) or getattr(layer, "self_attention", None)
    core = getattr(mixer, "core_attention", None)
    return isinstance(mixer, IdentityOp) or isinstance(core, BurstCoreAttention) or is_on_ring(mixer)


def _problems(model: Any, config: Any) -> list[str]:
    """Return the reasons why a model cannot run on a prefix tree, each with what to write instead."""
    if not isinstance(model, (GPTModel, hybrid_model())):
        return ["its layers may mix other tokens than those of a rollout; use a GPTModel or a hybrid model"]
    reasons = output_layer_problems(model)
    if not all(map(_follows_trees, model.decoder.layers)):
        reasons.append('not all of its layers are on a ring: use cp_comm_type="burst", and 2 or more ranks')
    kind = getattr(model, "position_embedding_type", None)
    if kind not in _POSITIONS:
        reasons.append(f"position_embedding_type={kind!r} is not supported; use one of {', '.join(_POSITIONS)}")
    if getattr(config, "multi_latent_attention", False):
        reasons.append(
            "multi_latent_attention is not supported: it makes its rotary embedding itself, by the order of tokens"
        )
    if getattr(config, "mtp_num_layers", None):
        reasons.append("multi-token prediction goes by the order of tokens; set mtp_num_layers=None")
    if getattr(config, "calculate_per_token_loss", False):
        reasons.append(
            "calculate_per_token_loss=True divides by the tokens of all ranks, each of which has the loss of all "
            "edges: set it to False, and have loss functions return two values"
        )
    return reasons + problems_of_own_batches(config)
