"""What `memory="auto"` chooses: sizes of chunks, and how much of attention is kept while layers are computed again.

    step = NextStep(model=shape, setting=setting, cluster=cluster, free=free_bytes)
    share_that_fits(step)                              # "all", 0.5 or "none"
    step.needed(share_that_fits(step))                 # bytes

Chunks are large enough for the full speed of a matrix product. Attention is kept as far as the planner's model of the
run leaves room for it. Nothing is moved to the host, since no plan knows whether hosts have room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from burst_plugin.planning.cluster import Cluster
from burst_plugin.strategy.validation import kept_share
from burst_plugin.training.layer_memory import BF16
from burst_plugin.training.memory import MARGIN, NCCL, memory
from burst_plugin.training.model_shape import ModelShape
from burst_plugin.training.setting import Setting

LEAST_ROWS, _MOST_ROWS = 512, 4096  # of a chunk
_BYTES_PER_LOGIT = 8  # of a chunk, with its gradient
_SHARE_OF_LOGITS = 1 / 64  # of a GPU's memory, for the logits of a chunk
STATES = ("weights", "gradients", "optimizer")  # of a plan, which knows neither frozen weights nor the moment
_SURE_SHARE = 0.1  # of the free memory, that is there for attention whatever else a step needs
SHARES: tuple[str | float, ...] = ("all", 0.5, "none")
"""Values of `keep_attention` to choose among, the fastest first."""


def loss_chunk(vocabulary: int, gpu_bytes: float | None) -> int:
    """Return how many tokens at a time the head and the loss should take, a power of 2 from 512 to 4,096.

    vocabulary: the number of logits per token. gpu_bytes: the memory of a GPU; None on CPUs, which gives 512.
    """
    rows = LEAST_ROWS
    while gpu_bytes is not None and rows < _MOST_ROWS:
        if 2 * rows * vocabulary * _BYTES_PER_LOGIT > gpu_bytes * _SHARE_OF_LOGITS:
            break
        rows *= 2
    return rows


def mlp_chunk(hidden: int, gpu_bytes: float | None) -> int:
    """Return how many tokens at a time MLPs should take: the larger of `hidden` and 4,096 (on CPUs, 512).

    hidden: the hidden size. gpu_bytes: the memory of a GPU; None on CPUs.
    """
    return max(hidden, LEAST_ROWS if gpu_bytes is None else _MOST_ROWS)


@dataclass(frozen=True, kw_only=True)
class NextStep:
    """A training step that is about to be run: the run as the planner knows it, and the bytes that are `free` for it.

    states: the bytes of weights, gradients and the optimizer's states that have no memory yet.
    item_bytes: the bytes of one number in activations, which the planner counts in 16 bits.
    """

    model: ModelShape
    setting: Setting
    cluster: Cluster
    free: float
    states: float = 0.0
    item_bytes: int = BF16

    def needed(self, keep_attention: str | float = "none") -> float:
        """Return the bytes that a step with this value of `Strategy.keep_attention` needs beyond allocated ones."""
        setting = replace(self.setting, keep=kept_share(keep_attention))
        parts: Mapping[str, float] = memory(self.model, setting, self.cluster).gpu
        activations = sum(nbytes for part, nbytes in parts.items() if part not in (*STATES, NCCL, MARGIN))
        return self.states + parts[NCCL] + parts[MARGIN] + activations * self.item_bytes / BF16


def share_that_fits(step: NextStep) -> str | float:
    """Return the fastest value of `keep_attention`, "all", 0.5 or "none", that lets a step fit in free memory.

    It is "none" if no value does.
    """
    return next((share for share in SHARES if step.needed(share) <= step.free), SHARES[-1])


def share_of_unknown(kept_bytes: float, free: float) -> str | float:
    """Return a value of `keep_attention` for a model that the planner cannot read.

    It is "all" if `kept_bytes`, the outputs of attention of all layers, take at most a tenth of `free` bytes, else
    "none".
    """
    return SHARES[0] if kept_bytes <= _SURE_SHARE * free else SHARES[-1]
