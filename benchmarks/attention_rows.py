"""The rows of `bench attention`: what its rounds found, as rates and shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from statistics import median
from typing import Any

from benchmarks.attention_ranks import SILENT, Measured
from benchmarks.attention_rounds import KERNEL, KERNEL_ALONE
from benchmarks.contenders import Case

__all__ = ["WRONG", "Found", "attention_flops", "is_of", "line"]

WRONG = 0.05  # relative, from which on no rounding explains it: bfloat16 gives up to 0.02


def attention_flops(case: Case) -> dict[str, float]:
    """Of all ranks: 4 per query head, head dim and pair of query and key forward, 2.5 times that backward.

    Two matrix products forward and five backward; flash-attention's way of counting (arXiv 2307.08691, section 4.1),
    but for the exact number of pairs.
    """
    tokens = case.ranks * case.seq
    pairs = tokens * (tokens + 1) // 2 if case.causal else tokens * tokens
    forward = 4.0 * case.batch * case.q_heads * case.head_dim * pairs
    return {"forward": forward, "backward": 2.5 * forward, "both": 3.5 * forward}


@dataclass(frozen=True)
class Found:
    """What all processes measured of a case; in a virtual ring there is one."""

    case: Case
    every: Sequence[Measured]
    virtual: bool

    def row(self, contender: str, configurations: Sequence[str]) -> dict[str, Any]:
        """The best configuration of a contender; without any, what names the case only."""
        named = _named(self.case, contender)
        if not configurations:
            return named
        best = next(name for name in configurations if name in self.every[0].times)  # the others have left
        error = max(
            (measured.errors[best] for measured in self.every), key=lambda x: (isnan(x), x)
        )  # NaN is the worst
        if not error <= WRONG:
            return named | {"refused": f"what it computed is wrong: relative error {error:.1e}", "wrong": True}
        return named | self._times(best) | self._exposed(best) | self._peaks(best) | {"configuration": best}

    def _times(self, name: str) -> dict[str, Any]:
        """Times, rates, and the share of the kernel's rate round by round."""
        times, flops = self.every[0].times, attention_flops(self.case)
        mine, kernel = times[name], times[KERNEL]
        parts = 1 if self.virtual else self.case.ranks
        shares = [k / parts / m for k, m in zip(kernel.both_s, mine.both_s, strict=True)]
        return {
            **mine.fields(),
            "virtual": self.virtual,
            "rounds": len(mine.both_s),
            "rounds_s": mine.both_s,  # in the order of all contenders' rounds
            "kernel": self.every[0].kernel,
            "kernel_s": median(kernel.both_s),
            "kernel_alone_s": median(times.get(KERNEL_ALONE, kernel).both_s),
            **_spread("kernel_share", shares),
            "flops_per_s": flops["both"] / median(mine.both_s),
            "forward_flops_per_s": flops["forward"] / median(mine.forward_s),
            "backward_flops_per_s": flops["backward"] / median(mine.backward_s),
        }

    def _exposed(self, name: str) -> dict[str, Any]:
        """What transfers add to the time, round by round; only rings of this project can do without."""
        times = self.every[0].times
        if name + SILENT not in times:
            return {"exposed_s": None}
        pairs = zip(times[name].both_s, times[name + SILENT].both_s, strict=True)
        return _spread("exposed_s", [loud - silent for loud, silent in pairs])

    def _peaks(self, name: str) -> dict[str, Any]:
        """The most of any process."""
        peaks = [peak for peak in (measured.peaks[name] for measured in self.every) if peak is not None]
        return {
            "peak_bytes": max(peaks) if len(peaks) == len(self.every) else None,
            "error": max(measured.errors[name] for measured in self.every),
        }


def _spread(name: str, numbers: Sequence[float]) -> dict[str, float]:
    return {name: median(numbers), f"{name}_min": min(numbers), f"{name}_max": max(numbers)}


def is_of(case: Case, row: Mapping[str, Any]) -> bool:
    """Whether a row of a result is of this case."""
    return _named(case, row["contender"]).items() <= row.items()


def _named(case: Case, contender: str) -> dict[str, Any]:
    return {
        "ranks": case.ranks,
        "ranks_per_node": case.ranks_per_node,
        "seq": case.ranks * case.seq,
        "q_heads": case.q_heads,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "dtype": str(case.dtype).removeprefix("torch."),
        "causal": case.causal,
        "contender": contender,
    }


def line(row: dict[str, Any]) -> str:
    what = f"{row['seq']:>7} tokens {row['dtype']:<8} {row['ranks']} ranks  {row['contender']:<20}"
    for reason in ("absent", "refused"):
        if row.get(reason):
            return f"{what} {reason}: {row[reason]}"
    exposed = "" if row["exposed_s"] is None else f", {row['exposed_s'] * 1e3:.1f} ms exposed"
    peak = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 1e6:.0f} MB"
    return (
        f"{what} {row['both_s'] * 1e3:8.1f} ms ({row['forward_s'] * 1e3:.1f} + {row['backward_s'] * 1e3:.1f}), "
        f"{row['flops_per_s'] / 1e9:.0f} GFLOP/s, {row['kernel_share']:.3f} of {row['kernel']} "
        f"({row['kernel_share_min']:.3f} .. {row['kernel_share_max']:.3f}){exposed}{peak}, error {row['error']:.1e}"
    )
