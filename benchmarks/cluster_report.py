"""What `bench cluster` prints: a table per cluster, and what the figures say about this project's claims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

__all__ = ["table_of", "verdicts"]

Row = Mapping[str, Any]
_PLACE = ("nodes", "ranks_per_node", "rate_mbit", "nic", "latency_ms", "q_heads", "kv_heads", "direction")
OURS, FLAT = "burst", "burst flat ring"
TO_BOUND, TO_MODEL, TWICE, PREDICTED = 1.08, 1.10, 2.0, 2.2


def table_of(title: str, rows: Sequence[Row]) -> Table:
    """One line per case and contender; times in milliseconds, and as multiples of this project's."""
    table = Table(title=title, title_justify="left")
    table.add_column("heads")
    table.add_column("contender", no_wrap=True)
    for name in ("forward", "backward", "both", "x burst", "/ bound", "/ model", "NIC MiB"):
        table.add_column(name, justify="right")
    for key, group in _grouped(rows, ("q_heads", "kv_heads")):
        for contender, found in _grouped(group, ("contender",)):
            why = found[0].get("absent") or found[0].get("refused")
            heads, name = f"{key[0]}/{key[1]}", str(contender[0])
            if why:
                table.add_row(heads, name, "absent" if "absent" in found[0] else "refused", "", "", "", "", "", "")
                continue
            by = {row["direction"]: row for row in found}
            ours = next((r for r in group if r["contender"] == OURS and r.get("direction") == "both"), by["both"])
            times = [f"{1e3 * by[d]['time_s']:.0f}" for d in ("forward", "backward", "both")]
            ratios = [
                f"{by['both']['time_s'] / by['both'][key]:.2f}" if by["both"].get(key) else ""
                for key in ("bound_s", "model_s")
            ]
            cut = [by[d].get("parts", 1) for d in ("forward", "backward")]
            label = by["both"]["configuration"] + (f" ({cut[0]}, {cut[1]} parts)" if max(cut) > 1 else "")
            table.add_row(
                heads,
                label,
                *times,
                f"{by['both']['time_s'] / ours['time_s']:.2f}",
                *ratios,
                f"{by['both']['nic_bytes'] / 2**20:.1f}",
            )
    return table


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """The claims, each with the figures that are worst for it."""
    timed = [row for row in rows if "time_s" in row]
    ours = [row for row in timed if row["contender"] == OURS and "model_s" in row and row["direction"] != "both"]
    ours = [row for row in ours if not row["latency_ms"]]  # of which neither bound nor model knows
    if ours:
        yield _worst("time / bound", ours, "bound_s", TO_BOUND)
        yield _worst("time / model", ours, "model_s", TO_MODEL)
    every = {(*_place(row), row["contender"]): row for row in timed}
    for row in (row for row in timed if row["contender"] == OURS):
        flat = every.get((*_place(row), FLAT))
        predicted = flat["model_s"] / row["model_s"] if flat and "model_s" in flat and "model_s" in row else 0.0
        for (*place, contender), other in every.items():
            if tuple(place) != _place(row) or contender == OURS:
                continue
            ratio = other["time_s"] / row["time_s"]
            if predicted >= PREDICTED and contender in (FLAT, "ring-flash-attn"):
                yield (
                    f"{'ok  ' if ratio >= TWICE else 'FAIL'} {contender} / burst = {ratio:.2f} "
                    f"(model of the flat ring: {predicted:.2f}), {_where(row)}"
                )
            elif ratio < 1 and not contender.startswith(OURS):
                yield f"FAIL {contender} is faster: {ratio:.3f} of burst, {_where(row)}"


def _worst(name: str, rows: Sequence[Row], key: str, limit: float) -> str:
    worst = max(rows, key=lambda row: row["time_s"] / row[key])
    ratio = worst["time_s"] / worst[key]
    above = [row for row in rows if row["time_s"] / row[key] > limit]
    listed = "".join(f"\n       {row['time_s'] / row[key]:.3f} {_where(row)}" for row in above)
    return f"{'FAIL' if above else 'ok  '} {name} <= {limit}: at most {ratio:.3f}, {_where(worst)}{listed}"


def _place(row: Row) -> tuple[Any, ...]:
    return tuple(row[k] for k in _PLACE)


def _where(row: Row) -> str:
    return (
        f"{row['nodes']}x{row['ranks_per_node']}, {row['rate_mbit']:g} mbit, "
        f"heads {row['q_heads']}/{row['kv_heads']}, {row['direction']}"
    )


def _grouped(rows: Sequence[Row], keys: Sequence[str]) -> list[tuple[tuple[Any, ...], list[Row]]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(found.items())
