"""The changes to a score between `q . k` and the softmax, and to a probability after it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from burst_plugin.checks import as_listed, number, whole_number

_NUMBERS = {
    "scale": "use a positive factor, or None",
    "softcap": "use a positive number, or None for none",
    "dropout": "use a share from 0 to below 1",
}
_SLOPES = "give a list of finite numbers, one per query head, or None"


@dataclass(frozen=True)
class Scores:
    """The options of attention scores and probabilities: scale, softcap, ALiBi and dropout.

        score = softcap(scale * q . k) + alibi + bias        probability = dropout(softmax(score))

    scale: factor on q . k; None is 1 / sqrt(head dim).
    softcap: `softcap * tanh(score / softcap)`, as in Gemma 2 (arXiv 2408.00118, section 2); None for none.
    alibi_slopes: one per query head: `-slope * |query position - key position|` is added (arXiv 2108.12409).
    dropout: the share of probabilities set to 0, the others being scaled up. The choice depends on `seed`, the batch
        row, the head and the two positions only: it is equal for any number of ranks, and in recomputation. Batch
        rows and heads are counted on each rank, so data- and tensor-parallel ranks need seeds of their own.
    seed: required with dropout; another one for each layer and step.

    Raises ValueError naming the field that is out of range.
    """

    scale: float | None = None
    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    dropout: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("scale", "softcap", "alibi_slopes", "dropout"):
            value = getattr(self, name)
            if getattr(value, "requires_grad", False):
                raise ValueError(f"Scores({name}=...) gets no gradient; multiply q by it, or pass a number")
            if name in _NUMBERS and (value is not None or name == "dropout"):
                object.__setattr__(self, name, number(f"Scores({name}={{}})", value, _NUMBERS[name]))
        for name in ("scale", "softcap"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"Scores({name}={value}) is not valid; {_NUMBERS[name]}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"Scores(dropout={self.dropout}) is not valid; {_NUMBERS['dropout']}")
        if self.seed is None and self.dropout:
            raise ValueError(
                f"Scores(dropout={self.dropout}) has no seed, so that all layers and steps would leave out the same "
                "probabilities; give another one to each, such as Scores(..., seed=step * layers + layer)"
            )
        if self.seed is not None:  # never set here: `replace(scores, dropout=...)` would take it for the caller's
            object.__setattr__(self, "seed", whole_number("Scores(seed={})", self.seed, "use an integer", None))
        if self.alibi_slopes is not None:
            listed = as_listed("Scores(alibi_slopes={})", self.alibi_slopes, _SLOPES)
            slopes = tuple(number("Scores(alibi_slopes=...) with a slope of {}", slope, _SLOPES) for slope in listed)
            object.__setattr__(self, "alibi_slopes", slopes)

    def resolved(self, qk_dim: int, q_heads: int) -> Scores:
        """Return the scores with a scale of 1 / sqrt(`qk_dim`) where it is None.

        Raises ValueError if there are slopes, and not one for each of `q_heads` query heads.
        """
        if self.alibi_slopes is not None and len(self.alibi_slopes) != q_heads:
            raise ValueError(
                f"got {len(self.alibi_slopes)} alibi_slopes for {q_heads} query heads; give one per head"
            )
        return self if self.scale is not None else replace(self, scale=1.0 / math.sqrt(qk_dim))

    def of_heads(self, heads: slice) -> Scores:
        """Return the scores for some of the query heads, with the slopes of these heads only."""
        return self if self.alibi_slopes is None else replace(self, alibi_slopes=self.alibi_slopes[heads])

    @property
    def needs_positions(self) -> bool:
        """Return whether kernels have to know the positions of tokens: with ALiBi slopes, and with dropout."""
        return self.alibi_slopes is not None or self.dropout > 0
