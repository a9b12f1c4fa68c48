"""What happens to a score between `q . k` and the softmax, and to a probability after it."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace

__all__ = ["Scores"]


@dataclass(frozen=True)
class Scores:
    """score = softcap(scale * q . k) + alibi + bias; probability = dropout(softmax(score)).

    scale: factor on q . k; None is 1 / sqrt(head dim).
    softcap: `softcap * tanh(score / softcap)`, as in Gemma 2 (arXiv 2408.00118, section 2).
    alibi_slopes: one per query head: `-slope * |query position - key position|` is added (arXiv 2108.12409).
    dropout: the share of probabilities set to 0, the others being scaled up. Which ones depends on `seed`, the batch
        row, the head and the two positions alone: the same for any number of ranks, and in recomputation. Batch rows
        and heads are counted on each rank, so data- and tensor-parallel ranks need seeds of their own.

    Raises ValueError naming what is out of range.
    """

    scale: float | None = None
    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    dropout: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("scale", "softcap", "alibi_slopes", "dropout"):
            value = getattr(self, name)
            if getattr(value, "requires_grad", False):
                raise ValueError(f"Scores({name}=...) gets no gradient; multiply q by it, or pass a number")
            if value is not None and name != "alibi_slopes":
                object.__setattr__(self, name, float(value))
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise ValueError(f"Scores(scale={self.scale}) is not valid; use a positive factor, or None")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"Scores(softcap={self.softcap}) is not valid; use a positive number, or None for none")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"Scores(dropout={self.dropout}) is not valid; use a share from 0 to below 1")
        try:
            object.__setattr__(self, "seed", operator.index(self.seed))
        except TypeError:
            raise ValueError(f"Scores(seed={self.seed!r}) is not valid; use an integer") from None
        if self.alibi_slopes is not None:
            object.__setattr__(self, "alibi_slopes", tuple(float(slope) for slope in self.alibi_slopes))

    def resolved(self, qk_dim: int, q_heads: int) -> Scores:
        """With the scale filled in; ValueError if the slopes are not one per query head."""
        if self.alibi_slopes is not None and len(self.alibi_slopes) != q_heads:
            raise ValueError(
                f"got {len(self.alibi_slopes)} alibi_slopes for {q_heads} query heads; give one per head"
            )
        return self if self.scale is not None else replace(self, scale=1.0 / math.sqrt(qk_dim))

    def of_heads(self, heads: slice) -> Scores:
        """The scores of some of the query heads."""
        return self if self.alibi_slopes is None else replace(self, alibi_slopes=self.alibi_slopes[heads])

    @property
    def needs_positions(self) -> bool:
        """Whether a kernel has to know which tokens it works on."""
        return self.alibi_slopes is not None or self.dropout > 0
