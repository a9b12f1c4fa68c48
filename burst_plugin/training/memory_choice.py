"""What `memory="auto"` chooses: sizes of chunks, and how much of attention is kept while layers are computed again.

    step = NextStep(model=shape, setting=setting, cluster=cluster, free=free_bytes)
    kept_options(step)                                 # {"keep_attention": "all"}
    step.needed(**kept_options(step))                  # bytes

Chunks are large enough for the full speed of a matrix product. Attention is kept as far as the planner's model of the
run leaves room for it. Nothing moves to the host by itself: hosts have room, or not, whatever a plan says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from burst_plugin.planning.cluster import Cluster
from burst_plugin.strategy.validation import kept_share
from burst_plugin.training.memory import memory
from burst_plugin.training.model_shape import ModelShape
from burst_plugin.training.setting import Setting

_LEAST_ROWS, _MOST_ROWS = 512, 4096  # of a chunk
_BYTES_PER_LOGIT = 8  # of a chunk, with its gradient
_SHARE_OF_LOGITS = 1 / 64  # of a GPU's memory, for the logits of a chunk
_STATES = ("weights", "gradients", "optimizer")  # of a plan, which knows neither frozen weights nor the moment
_SURE_SHARE = 0.1  # of the free memory, that is there for attention whatever else a step needs
_IN_ORDER: tuple[dict[str, Any], ...] = (
    {"keep_attention": "all"},
    {"keep_attention": 0.5},
    {"keep_attention": "none"},
)


def loss_chunk(vocabulary: int, gpu_bytes: float | None) -> int:
    """Return the tokens per chunk of the head and the loss; `gpu_bytes` is the memory of a GPU, None on CPUs."""
    rows = _LEAST_ROWS
    while gpu_bytes is not None and rows < _MOST_ROWS:
        if 2 * rows * vocabulary * _BYTES_PER_LOGIT > gpu_bytes * _SHARE_OF_LOGITS:
            break
        rows *= 2
    return rows


def mlp_chunk(hidden: int, gpu_bytes: float | None) -> int:
    """Return the tokens per chunk of MLPs; `gpu_bytes` is the memory of a GPU, None on CPUs."""
    return max(hidden, _LEAST_ROWS if gpu_bytes is None else _MOST_ROWS)


@dataclass(frozen=True, kw_only=True)
class NextStep:
    """A step that is about to be trained: the run as the planner knows it, and the bytes that are free for it.

    states: the bytes of weights, gradients and the optimizer's states that have no memory yet.
    """

    model: ModelShape
    setting: Setting
    cluster: Cluster
    free: float
    states: float = 0.0

    def needed(self, keep_attention: str | float = "none") -> float:
        """Return the bytes that a step needs beyond what is allocated now, with this value of `keep_attention`."""
        setting = replace(self.setting, keep=kept_share(keep_attention))
        parts: Mapping[str, float] = memory(self.model, setting, self.cluster).gpu
        return self.states + sum(nbytes for part, nbytes in parts.items() if part not in _STATES)


def kept_options(step: NextStep) -> dict[str, Any]:
    """Return the fastest options with which a step fits in memory; if none does, the ones that need the least."""
    return dict(next((options for options in _IN_ORDER if step.needed(**options) <= step.free), _IN_ORDER[-1]))


def kept_options_of_unknown(kept_bytes: float, free: float) -> dict[str, Any]:
    """Return the options for a model that the planner does not know, whose attention takes `kept_bytes`."""
    return {"keep_attention": "all" if kept_bytes <= _SURE_SHARE * free else "none"}


def rank_of(options: Mapping[str, Any]) -> int:
    """Return the place of options in the order of their cost, for ranks to agree on the dearest; see `options_at`."""
    return _IN_ORDER.index({**options})


def options_at(rank: int) -> dict[str, Any]:
    """Return the options at a place in the order of their cost; see `rank_of`."""
    return dict(_IN_ORDER[rank])
