"""TRL's trainers that read logits of whole sequences: a rank reads its own, and numbers per token are gathered.

ORPOTrainer and CPOTrainer make log-probabilities and means of logits, GKDTrainer divergences from a teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from burst_plugin.batch import IGNORED_LABEL, SequenceShard, shifted
from burst_plugin.deepspeed.adapter import Adapter
from burst_plugin.deepspeed.whole_outputs import gathered
from burst_plugin.frameworks.wrapping import wrap

_ROWS_AT_ONCE = 1024  # of logits, in float32


def read_own_logits(adapter: Adapter, kind: type) -> None:
    """Patch `kind`, a trainer's class, to compute its loss from the logits of a rank's tokens alone.

    It replaces `concatenated_forward` of ORPOTrainer and CPOTrainer and `compute_loss` of GKDTrainer, also where
    `kind` is derived from one of them; other classes stay as they are.
    """
    for owner in kind.__mro__:
        name, around = _READERS.get(owner.__name__, ("", None))
        method = vars(owner).get(name)
        if around is not None and method is not None and not hasattr(method, "__wrapped__"):
            wrap(owner, name, partial(around, adapter))


def _concatenated_forward(
    adapter: Adapter,
    original: Callable[..., Any],
    trainer: Any,
    model: Any,
    batch: Mapping[str, Any],
    *,
    is_orpo: bool,
) -> tuple[Tensor, ...]:
    """Replace `concatenated_forward` of ORPOTrainer and CPOTrainer; logits [B, S, 1] in it are means of logits."""
    session = adapter.sessions.get(trainer.model_wrapped)  # `model` is without its engine in evaluation
    if session is None or not session.gathers:
        return tuple(original(trainer, model, batch))
    joined = trainer.concatenated_inputs(
        batch,
        is_encoder_decoder=False,
        padding_value=trainer.padding_value if is_orpo else trainer.pad_token_id,
        device=trainer.accelerator.device,
    )
    ids, mask = joined["concatenated_input_ids"], joined["concatenated_attention_mask"]
    asked = {"output_router_logits": True} if trainer.aux_loss_enabled else {}
    with session.leaving_outputs() as shards:
        outputs = model(ids, attention_mask=mask, use_cache=False, **asked)
    log_probs, mean_logits = _of_next_tokens(outputs.logits, ids, shards[-1]).unbind(-1)
    chosen = len(batch["chosen_labels"])
    answers = joined["concatenated_labels"][:, 1:] != IGNORED_LABEL
    sums = (log_probs[:, :-1] * answers).sum(-1)
    if is_orpo or trainer.loss_type in ("ipo", "simpo"):
        sums = sums / answers.sum(-1)
    scored = mask[:chosen, 1:] == 1 if is_orpo else answers[:chosen]
    nll = -(log_probs[:chosen, :-1] * scored).sum() / scored.sum()
    if not is_orpo and trainer.cpo_alpha == 0:
        nll = torch.zeros_like(nll)
    read = mean_logits[:, :-1] if is_orpo else mean_logits
    values = (sums[:chosen], sums[chosen:], read[:chosen].unsqueeze(-1), read[chosen:].unsqueeze(-1), nll)
    return (*values, outputs.aux_loss) if trainer.aux_loss_enabled else values


def _of_next_tokens(logits: Tensor, ids: Tensor, shard: SequenceShard) -> Tensor:
    """Return log-probabilities of next tokens and means of logits, [B, S, 2], of logits [B, S_local, V]; collective.

    The last token of a row has no next token, and gets the log-probability of an arbitrary one.
    """
    targets = _cut(ids.roll(-1, 1), shard, 0)
    flat, labels_of_all, parts = logits.flatten(0, 1), targets.flatten(), []
    for start in range(0, len(flat), _ROWS_AT_ONCE):
        rows, labels = (x[start : start + _ROWS_AT_ONCE] for x in (flat, labels_of_all))
        log_probs = -torch.nn.functional.cross_entropy(rows.float(), labels, reduction="none")
        parts.append(torch.stack([log_probs, rows.detach().mean(-1).to(log_probs)], -1))
    return gathered(torch.cat(parts).view(*targets.shape, 2), shard)


def _distillation_loss(
    adapter: Adapter,
    original: Callable[..., Any],
    trainer: Any,
    model: Any,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    """Replace `GKDTrainer.compute_loss`: a rank has the divergences of its tokens, and the loss is their sum."""
    session, teacher = (adapter.sessions.get(engine) for engine in (trainer.model_wrapped, trainer.teacher_model))
    if session is None or teacher is None or not session.gathers:
        return original(trainer, model, inputs, return_outputs, num_items_in_batch)
    batch = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    with session.leaving_outputs() as shards:
        outputs = model(**batch, use_cache=False)
    trainer.teacher_model.eval()
    with torch.no_grad(), teacher.leaving_outputs():
        of_teacher = trainer.teacher_model(**batch, use_cache=False).logits
    targets = shifted(inputs["labels"])
    count = (targets != IGNORED_LABEL).sum().clamp_min(1) if num_items_in_batch is None else num_items_in_batch
    total = trainer.generalized_jsd_loss(
        student_logits=outputs.logits,
        teacher_logits=of_teacher,
        labels=_cut(targets, shards[-1], IGNORED_LABEL),
        beta=trainer.beta,
        reduction="sum",
    )
    loss = session.mean_over_ring(total / count * session.cp.ranks)
    if return_outputs:
        outputs["logits"] = gathered(outputs.logits.detach(), shards[-1])
    return (loss, outputs) if return_outputs else loss


def _cut(x: Tensor, shard: SequenceShard, fill: int) -> Tensor:
    """Return this rank's part of integers [B, S], filled up to the length that ranks share evenly."""
    padded = torch.nn.functional.pad(x, (0, shard.tokens.length - x.shape[1]), value=fill)
    return shard.cp.shard(padded, 1, shard.tokens)


_READERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "ORPOTrainer": ("concatenated_forward", partial(_concatenated_forward, is_orpo=True)),
    "CPOTrainer": ("concatenated_forward", partial(_concatenated_forward, is_orpo=False)),
    "GKDTrainer": ("compute_loss", _distillation_loss),
}
