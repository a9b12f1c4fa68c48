"""BurstAttention in Hugging Face transformers: `attn_implementation="burst"`, Trainer and Accelerate.

With DeepSpeed, `burst_plugin.deepspeed.install()` does all of it. Without, in a loop of your own:

    burst_plugin.huggingface.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="burst")
    out = model(**burst_plugin.shard_batch(batch, cp))  # logits of this rank's tokens

Importing this package imports no transformers; `register()` does.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from burst_plugin.deepspeed.adapter import Adapter

__all__ = ["install", "register"]


def register() -> str:
    """Make `attn_implementation="burst"` known to transformers; harmless when repeated. Says what was done.

    Raises ImportError if transformers is not installed.
    """
    from burst_plugin.huggingface.attention import register_attention

    return register_attention()


def install(adapter: Adapter) -> list[str]:
    """`register()`, and what Trainer and Accelerate need in order to run on a DeepSpeed adapter's rings."""
    lines = [register()]
    if importlib.util.find_spec("accelerate") is not None:
        from burst_plugin.huggingface.trainer import install_trainer

        lines += install_trainer(adapter)
    return lines
