"""ms-swift's trainers on the rings of DeepSpeed's adapter.

Its `Seq2SeqTrainer`, for pretraining and fine-tuning, runs with the loss of its model, as Trainer does. Its other
trainers compute losses of their own from whole sequences, and are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import Trainer

from burst_plugin.activations.loss_check import router_loss_in
from burst_plugin.batch import SHARD_KEY
from burst_plugin.deepspeed.adapter import Adapter
from burst_plugin.deepspeed.config import BLOCK
from burst_plugin.frameworks.wrapping import wrap

_SUPPORTED = "Seq2SeqTrainer"
_MARK = "_burst_plugin_loss"  # of a class whose `compute_loss` is replaced
_OF_ITS_OWN = (
    "compute_loss_func",
    "text_position_ids",
    "channel",
    "loss_scale",
)  # entries of batches beside a model's
_REFUSED = {
    "enable_dft_loss": "a loss that is not the model's",
    "enable_channel_loss": "a loss for each channel",
    "predict_with_generate": "generation in evaluation",
}


def follow_swift_trainer(adapter: Adapter, trainer: Any, size: int) -> bool:
    """Set up a trainer of ms-swift for rings of `size` ranks; return False for a trainer of anything else.

    The model's loss is the trainer's, of logits for all tokens of a rank. `token_acc` is not logged: it would need
    whole logits, which loss_chunk and memory="auto" do without.

    Raises ValueError for other trainers of ms-swift, and for options under which it computes another loss.
    """
    kinds = [kind for kind in type(trainer).__mro__ if kind.__module__.split(".")[0] == "swift"]
    if not kinds:
        return False
    owner: Any = next((kind for kind in kinds if "compute_loss" in vars(kind)), None)
    if owner is None or owner.__name__ != _SUPPORTED:
        raise ValueError(
            f"{kinds[0].__name__} of ms-swift with sp_size={size} is not supported with {BLOCK}: it computes a loss "
            f"of its own from whole sequences, but a rank of a ring has its shard only; use {_SUPPORTED} (swift pt, "
            "swift sft), a trainer of TRL, or leave sp_size and the block out"
        )
    _check_options(trainer)
    trainer.args.use_logits_to_keep = False  # it counts by labels, which are shifted already
    if _MARK not in vars(owner):
        wrap(owner, "compute_loss", partial(_loss_of_model, adapter))
        setattr(owner, _MARK, True)
    return True


def _check_options(trainer: Any) -> None:
    """Raise ValueError for options of ms-swift that change the loss or cut batches again, and for models with images.

    ms-swift puts images in place of their tokens in a hook of its own, before the model's; there they would meet a
    shard of the tokens.
    """
    asked = [f"{name}=True is {what}" for name, what in _REFUSED.items() if getattr(trainer.args, name, False)]
    if trainer.template.sequence_parallel_size > 1:
        asked.append(f"sequence_parallel_size={trainer.template.sequence_parallel_size} is ms-swift's own cut")
    if getattr(trainer.args, "metric_for_best_model", None) in ("token_acc", "eval_token_acc"):
        asked.append("metric_for_best_model=token_acc asks for a number that is not logged on a ring")
    if trainer.template.model_meta.is_multimodal:
        asked.append(f"model_type={trainer.template.model_meta.model_type} is a model with images, sound or video")
    if asked:
        raise ValueError(f"ms-swift's {asked[0]}, which is not supported with {BLOCK}; use Trainer, or leave it out")


def _loss_of_model(
    adapter: Adapter,
    original: Callable[..., Any],
    trainer: Any,
    model: Any,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    """Replace `Seq2SeqTrainer.compute_loss` of ms-swift on a ring: return the loss of the model, as Trainer does."""
    session = adapter.sessions.get(trainer.model_wrapped)
    if session is None or session.cp.ranks == 1:
        return original(trainer, model, inputs, return_outputs, num_items_in_batch)
    if inputs.get("loss_scale") is not None:
        raise ValueError(
            f"--loss_scale of ms-swift weights tokens here, which is not supported with {BLOCK}; leave --loss_scale "
            "out, or give one of weights 0 and 1 with --is_binary_loss_scale true"
        )
    local = {name: value for name, value in inputs.items() if name not in _OF_ITS_OWN}
    loss, outputs = Trainer.compute_loss(trainer, model, local, True, num_items_in_batch)
    added = router_loss_in(model, outputs)
    if added is not None and num_items_in_batch is not None:  # of a step, over whose labels ms-swift takes the mean
        weight = local[SHARD_KEY].valid_tokens / (session.cp.ranks * float(num_items_in_batch))
        loss = loss + session.of_whole_batch(added * (weight - 1), True)
    return (loss, outputs) if return_outputs else loss
