"""What the figures of `bench attention` say about this project's claims: near the kernel, and behind nobody."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import comb
from statistics import median
from typing import Any

__all__ = ["verdicts"]

Row = Mapping[str, Any]
OURS = "burst"
OVER_KERNEL = 1.05  # times what the kernel takes on one rank, divided by the ranks
CHANCE = 0.05  # a claim fails by what is less likely by chance


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """The claims, by case, each with its figures.

    All call the same kernel, so that rounds differ by more than contenders do: who is faster is told by a sign test,
    the probability that burst is the slower one in so many rounds or more if every round tosses a coin.
    """
    timed = [row for row in rows if "rounds_s" in row]
    for row in (row for row in timed if row["contender"] == OURS):
        over = 1 / row["kernel_share"]
        yield (
            f"{'ok  ' if over <= OVER_KERNEL else 'FAIL'} time / (one rank's kernel"
            f"{'' if row['virtual'] else ' / ranks'}) = {over:.3f}, {_where(row)}"
        )
        for peer in timed:
            if _where(peer) == _where(row) and not peer["contender"].startswith(OURS):
                yield _compared(row, peer)


def _compared(ours: Row, peer: Row) -> str:
    pairs = list(zip(ours["rounds_s"], peer["rounds_s"], strict=True))
    ratio, behind = median(theirs / own for own, theirs in pairs), sum(theirs < own for own, theirs in pairs)
    by_chance = sum(comb(len(pairs), k) for k in range(behind, len(pairs) + 1)) / 2 ** len(pairs)
    return (
        f"{'FAIL' if ratio < 1 and by_chance <= CHANCE else 'ok  '} {peer['contender']} / burst = {ratio:.3f}, "
        f"burst behind in {behind} of {len(pairs)} rounds (by chance: {by_chance:.0%}), {_where(ours)}"
    )


def _where(row: Row) -> str:
    mask = "causal" if row["causal"] else "full"
    return (
        f"{row['ranks']} ranks, {row['seq']} tokens, {row['dtype']}, {mask}, heads {row['q_heads']}/{row['kv_heads']}"
    )
