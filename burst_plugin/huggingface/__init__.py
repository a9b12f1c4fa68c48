"""BurstAttention in Hugging Face transformers: `attn_implementation="burst"`.

With DeepSpeed, `burst_plugin.deepspeed.install()` does all of it, for Trainer and Accelerate as well. Without:

    model = burst_plugin.huggingface.prepare(AutoModelForCausalLM.from_pretrained(name))
    local = burst_plugin.shard_batch(batch, cp)
    labels = local.pop("shift_labels")
    logits = model(**local).logits  # of this rank's tokens, like labels: a loss has to be summed over ranks

Importing this package imports no transformers; `prepare()` and `register()` do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

__all__ = ["prepare", "register"]

Model = TypeVar("Model", bound="torch.nn.Module")


def prepare(model: Model) -> Model:
    """Put `model`, perhaps wrapped, on the ring: it trains on sharded batches, and may evaluate on whole ones.

    Add adapters (PEFT) before, so that they are examined as well.

    Returns:
        The same model.

    Raises:
        ValueError: something in it cannot be computed on shards of its sequences, such as layers in which tokens meet
            other than by attention, positions that are counted, or losses; each with a reason and a way out.
        ImportError: transformers is not installed.
    """
    from burst_plugin.huggingface.models import prepare_model

    prepare_model(model)
    return model


def register() -> str:
    """Make `attn_implementation="burst"` known to transformers, for models that are loaded with it.

    `prepare` does this, too; repeated calls change nothing. Returns a line that says what was done. Raises
    ImportError if transformers is not installed.
    """
    from burst_plugin.huggingface.attention import register_attention

    return register_attention()
