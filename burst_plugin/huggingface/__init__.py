"""BurstAttention in Hugging Face transformers: `attn_implementation="burst"`.

With DeepSpeed, `burst_plugin.deepspeed.install()` does all of it, for Trainer and Accelerate as well. Without:

    model = burst_plugin.huggingface.prepare(AutoModelForCausalLM.from_pretrained(name))
    local = burst_plugin.shard_batch(batch, cp)
    labels = local.pop("shift_labels")
    logits = model(**local).logits  # of this rank's tokens, as labels are: a loss has to be summed over ranks

Importing this package imports no transformers; `prepare()` and `register()` do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

__all__ = ["prepare", "register"]

Model = TypeVar("Model", bound="torch.nn.Module")


def prepare(model: Model) -> Model:
    """`model`, perhaps wrapped, on the ring: it trains on batches that were sharded, and may evaluate on whole ones.

    Adapters (PEFT) come first, so that they are looked at, too.

    Raises:
        ValueError: if something in it cannot be computed on shards of its sequences, each with a reason and a way
            out: layers in which tokens meet other than by attention, positions that are counted, losses.
        ImportError: if transformers is not installed.
    """
    from burst_plugin.huggingface.models import prepare_model

    prepare_model(model)
    return model


def register() -> str:
    """Make `attn_implementation="burst"` known to transformers, for models that are loaded with it.

    Harmless when repeated. `prepare` does it, too. Says what was done. Raises ImportError without transformers.
    """
    from burst_plugin.huggingface.attention import register_attention

    return register_attention()
