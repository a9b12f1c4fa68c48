"""Outputs of whole sequences from a model that computes shards: for losses of sums over sequences, or of one token.

    ids a b c d, the same on both ranks
    rank 0  a d  ->  model  ->  x y  ->  gathered  ->  x z w y  ->  loss L, times 1/2 in the mean over ranks
    rank 1  b c  ->  model  ->  z w  ->  gathered  ->  x z w y  ->  loss L, times 1/2

Every rank computes the same loss, and takes the gradient of its own tokens, times the number of ranks of the ring,
since DeepSpeed takes the mean of gradients over them.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from burst_plugin.batch import SequenceShard

_PER_TOKEN = (
    "log_probs",
    "entropy",
    "log_sum_sq_probs",
    "mean_logits",
    "is_top1",
    "label_mask",
)  # of TRL's fused head
_WHOLE = ("logits", "last_hidden_state")
_HEADS = re.compile(r"For(Sequence|Token)Classification$")


def gathered(local: Tensor, shard: SequenceShard) -> Tensor:
    """Gather [B, S_local, ...] to [B, S, ...] of the whole sequence, for a loss that every rank computes; collective.

    The gradient on a rank is that of its tokens, times the number of ranks of the ring.
    """
    values = shard.unshard(local, loss="same").contiguous()  # models take views of their logits
    if values.requires_grad:
        values.register_hook(lambda grad: grad * shard.cp.ranks)  # type: ignore[no-untyped-call]
    return values


def gather_outputs(output: MutableMapping[str, Any], shard: SequenceShard) -> None:
    """Replace a model's outputs of this rank's tokens by outputs of whole sequences, in `output` itself; collective.

    These are logits, last hidden states, hidden states of all layers, and the values per token of TRL's fused head,
    [B, S - 1] in the end: all tokens but the first, since it shifts labels by itself. A loss, of this rank's tokens,
    becomes None.

    Raises ValueError if `output` has neither logits nor last hidden states nor values of TRL's head.
    """
    fields = {name: x for name in _PER_TOKEN if isinstance(x := getattr(output, name, None), Tensor)}
    if fields:
        wide = torch.promote_types(fields["log_probs"].dtype, torch.float32)
        whole = gathered(torch.stack([x.to(wide) for x in fields.values()], -1), shard)[:, :-1]
        for (name, x), values in zip(fields.items(), whole.unbind(-1), strict=True):
            output[name] = values.to(x.dtype)
    whole_fields = [name for name in _WHOLE if isinstance(getattr(output, name, None), Tensor)]
    for name in whole_fields:
        output[name] = gathered(output[name], shard)
    gather_hidden_states(output, shard)
    if not fields and not whole_fields:
        raise ValueError(
            f"a model returned {', '.join(output)} of this rank's tokens, and none of {', '.join(_WHOLE)}, which "
            "could be gathered into whole sequences; cut its batches with burst_plugin.deepspeed.shard_batch"
        )
    if getattr(output, "loss", None) is not None:  # of this rank's tokens alone
        output["loss"] = None


def gather_hidden_states(output: MutableMapping[str, Any], shard: SequenceShard) -> None:
    """Replace `output["hidden_states"]`, if there are any, by the hidden states of whole sequences; collective.

    They are a tuple of [B, S_local, H], one for each layer, and become [B, S, H].
    """
    states = getattr(output, "hidden_states", None)
    if isinstance(states, tuple):
        output["hidden_states"] = tuple(gathered(each, shard) for each in states)


def classifier_in(model: torch.nn.Module) -> Any:
    """Return the module in `model` that is a classifier of transformers by scores of each token; None without one.

    Such a classifier of sequences or tokens computes the scores of every token in a layer of its own; a sequence has
    the scores of its last token. Classifiers that pool hidden states first are not found.
    """
    for module in model.modules():
        head = _HEADS.search(type(module).__name__)
        if head is None or not any(base.__module__ == "transformers.modeling_utils" for base in type(module).__mro__):
            continue
        name = "score" if hasattr(module, "score") else "classifier"
        if isinstance(getattr(module, name, None), torch.nn.Module) and (name == "score" or head[1] == "Token"):
            return module
    return None


def score_layer(classifier: Any) -> torch.nn.Module:
    """Return the layer of a classifier, found by `classifier_in`, that computes scores from hidden states."""
    layer: torch.nn.Module = getattr(classifier, "score", None) or classifier.classifier
    return layer
