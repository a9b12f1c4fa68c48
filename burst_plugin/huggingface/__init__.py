"""BurstAttention in Hugging Face transformers: `attn_implementation="burst"`.

With DeepSpeed, `burst_plugin.deepspeed.install()` does all of the following, for Trainer and Accelerate as well.
Without DeepSpeed:

    model = burst_plugin.huggingface.prepare(AutoModelForCausalLM.from_pretrained(name))
    local = burst_plugin.shard_batch(batch, cp)
    labels = local.pop("shift_labels")
    logits = model(**local).logits  # of this rank's tokens, like labels: a loss has to be summed over ranks

To generate on the ring, on every rank with the same whole tokens:

    ids = model.eval().generate(**inputs, past_key_values=burst_plugin.huggingface.RingCache(cp))

Importing this package imports no transformers; `prepare()` and `register()` do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

    from burst_plugin.huggingface.generation import ring_for_generation
    from burst_plugin.huggingface.grpo import fold_rollouts
    from burst_plugin.huggingface.image_groups import layer_mask
    from burst_plugin.huggingface.likelihood import LogLikelihood, log_likelihood
    from burst_plugin.huggingface.ring_cache import RingCache
    from burst_plugin.huggingface.rollouts import RolloutLogProbs, rollout_log_probs

__all__ = [
    "LogLikelihood",
    "RingCache",
    "RolloutLogProbs",
    "fold_rollouts",
    "layer_mask",
    "log_likelihood",
    "prepare",
    "register",
    "ring_for_generation",
    "rollout_log_probs",
]

Model = TypeVar("Model", bound="torch.nn.Module")


def prepare(model: Model, *, averages_gradients: bool = False) -> Model:
    """Put `model`, perhaps wrapped, on the ring: it trains on sharded batches, and may evaluate on whole ones.

    The ring is that of each batch, by `shard_batch(batch, cp)`. Add adapters (PEFT) before, so that they are examined
    as well.

    Args:
        model: a model of transformers, perhaps wrapped.
        averages_gradients: whether the training loop averages gradients over the ranks of the ring, as DDP, FSDP and
            ZeRO do. Router losses of experts (`output_router_logits=True`) need it: they are no sums over tokens.

    Returns:
        The same model.

    Raises:
        ValueError: something in it cannot be computed on shards of its sequences, such as layers in which tokens meet
            other than by attention, a way of counting positions, or a loss; each with a reason and a way out.
        ImportError: transformers is not installed.
    """
    from burst_plugin.huggingface.models import prepare_model

    prepare_model(model, averages_gradients)
    return model


def register() -> str:
    """Make `attn_implementation="burst"` known to transformers, for models that are loaded with it.

    `prepare` does this, too; repeated calls change nothing. Returns a line that says what was done. Raises
    ImportError if transformers is not installed.
    """
    from burst_plugin.huggingface.attention import register_attention

    return register_attention()


_ELSEWHERE = {  # what imports transformers, once it is asked for
    "LogLikelihood": "likelihood",
    "RingCache": "ring_cache",
    "RolloutLogProbs": "rollouts",
    "fold_rollouts": "grpo",
    "layer_mask": "image_groups",
    "log_likelihood": "likelihood",
    "ring_for_generation": "generation",
    "rollout_log_probs": "rollouts",
}


def __getattr__(name: str) -> Any:
    """Import one of the package's names when it is first asked for."""
    if name in _ELSEWHERE:
        return getattr(import_module(f"{__name__}.{_ELSEWHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
