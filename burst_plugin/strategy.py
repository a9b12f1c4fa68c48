"""The options of a run, parsed and validated once; and the choice of which side travels."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

from burst_plugin.checks import as_number, as_whole, shown
from burst_plugin.compute.shapes import Shapes, hop_bytes
from burst_plugin.kernels import KERNELS, Kernel
from burst_plugin.schedule.rings import SCHEDULES, default_schedule_name
from burst_plugin.sequence.layout import LAYOUTS
from burst_plugin.topology import Topology
from burst_plugin.types import DIRECTIONS, SIDES, Direction, Side

__all__ = ["AUTO", "CHECKS", "Strategy", "choose_moving_side"]

AUTO = "auto"
CHECKS = (AUTO, "always", "sparse")


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How attention is distributed. Every field has a default that suits most runs.

    layout: which tokens a rank holds: zigzag (Megatron's own), striped, contiguous; or auto, which
    `ContextParallel.tokens` chooses for a mask.
    schedule: flat_ring, two_level_ring, direct, or auto: two levels where the topology has two, and direct for masks
    that leave so little that it sends less.
    forward, backward: which side travels, q ("pass-Q", arXiv 2411.01783; backward: BurstAttention, 2403.09347) or kv
    ("pass-KV", ring attention, 2310.01889); auto takes the one with fewer bytes per hop.
    kernel: by name; or auto: the fastest that can; or one of your own, an object such as
    `burst_plugin.kernels.Kernel` describes. Ranks compare kernels by name.
    ranks_per_node: a number, or auto: from the hierarchy if one is given, else by asking every rank.
    parts: into how many parts blocks are cut, by heads, that travel one behind the other (`Schedule.in_parts`): where
    links are what everybody waits for, more parts keep them busy; otherwise they only make more and smaller kernel
    calls. Must divide the number of key/value heads of a rank. A number, or a pair: forward and backward. `planner`
    says what it gives.
    ulysses_degree: ranks, consecutive and inside one node if it can be, that exchange heads before and after the ring
    (`ring.ulysses`): the ring then has as many times fewer ranks, with longer blocks of fewer heads, and all of them
    together need no ring at all. Must divide the number of query heads of a rank, and the number of key/value
    heads or be a multiple of it: then several ranks work with the same one.
    check: when ranks compare shapes, types and options before data moves: always; sparse, at calls 1, 2, 4, 8, ...;
    or auto: always on CPUs, where sparse is refused, and sparse on GPUs, where comparing stalls the host. Backward
    passes are compared when their calls were. On CPUs every message carries a label of its call besides.
    deterministic: only kernels that give the same bits twice; so does `torch.use_deterministic_algorithms(True)`. The
    ring itself always does: every sum is taken in the order of the schedule.
    late_after: seconds of waiting for another rank after which a line in the log says who waits for whom. On CPUs; on
    GPUs nobody waits on the host.

    Raises ValueError naming the option, what was got, and what is valid.
    """

    layout: str = "zigzag"
    schedule: str = AUTO
    forward: str = "kv"
    backward: str = AUTO
    kernel: str | Kernel = AUTO
    ranks_per_node: int | str = AUTO
    parts: int | tuple[int, int] = 1
    ulysses_degree: int = 1
    check: str = AUTO
    deterministic: bool = False
    late_after: float = 60.0

    def __post_init__(self) -> None:
        _one_of("layout", self.layout, (*LAYOUTS, AUTO))
        _one_of("schedule", self.schedule, (*SCHEDULES, AUTO))
        _one_of("forward", self.forward, (*SIDES, AUTO))
        _one_of("backward", self.backward, (*SIDES, AUTO))
        if isinstance(self.kernel, type):
            name = self.kernel.__name__
            raise ValueError(f"kernel={name} is a class; pass an object of it, {name}(), or one of the names")
        if not isinstance(self.kernel, Kernel):
            _one_of("kernel", self.kernel, (*KERNELS, AUTO))
        _one_of("check", self.check, CHECKS)
        if not isinstance(self.deterministic, bool):
            raise ValueError(f"deterministic={self.deterministic!r} is not valid; use True or False")
        if (as_number(self.late_after) is None and self.late_after != math.inf) or not self.late_after > 0:
            raise ValueError(
                f"late_after={shown(self.late_after)} is not valid; use a positive number of seconds, or math.inf "
                "for no such line"
            )
        pair = self.parts if isinstance(self.parts, (tuple, list)) else (self.parts, self.parts)
        parts = tuple(n for n in map(_as_positive, pair) if n)
        if not len(parts) == len(pair) == 2:
            raise ValueError(
                f"parts={shown(self.parts)} is not valid; use a positive number, or two: forward and backward"
            )
        object.__setattr__(self, "parts", parts[0] if parts[0] == parts[1] else parts)
        degree, per_node = _as_positive(self.ulysses_degree), _as_positive(self.ranks_per_node)
        if degree is None:
            raise ValueError(f"ulysses_degree={shown(self.ulysses_degree)} is not valid; use a positive number")
        object.__setattr__(self, "ulysses_degree", degree)
        if per_node is not None:
            object.__setattr__(self, "ranks_per_node", per_node)
        elif not isinstance(self.ranks_per_node, str) or self.ranks_per_node != AUTO:
            got = shown(self.ranks_per_node)
            raise ValueError(f"ranks_per_node={got} is not valid; use a positive number or 'auto'")

    @classmethod
    def of(cls, strategy: Strategy | None, **options: Any) -> Strategy:
        """A strategy given whole, or by keywords; ValueError for both at once, or an unknown keyword."""
        if not isinstance(strategy, cls | None):
            raise ValueError(
                f"strategy={shown(strategy)} is not a Strategy; write Strategy(layout=...), or leave strategy= out "
                "and pass the options by name"
            )
        known = [field.name for field in fields(cls)]
        for name in options:
            _one_of("option", name, known)
        if strategy is not None and options:
            raise ValueError(
                f"got strategy= and also {', '.join(sorted(options))}: put these into the Strategy, or leave it out"
            )
        return strategy if strategy is not None else cls(**options)

    def compared(self) -> dict[str, object]:
        """Every option as ranks compare it: kernel objects by their names, without what a rank logs."""
        options = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "late_after"}
        return {**options, "kernel": self.kernel if isinstance(self.kernel, str) else self.kernel.name}

    def check_is_due(self, call: int, cheap: bool) -> bool:
        """Whether ranks compare their calls at this one, counted from 1; `cheap` says that it stalls nothing."""
        if self.check == "always" or (self.check == AUTO and cheap):
            return True
        return call & (call - 1) == 0  # 1, 2, 4, 8, ...

    def parts_of(self, direction: Direction) -> int:
        """Into how many parts blocks are cut in a pass."""
        if isinstance(self.parts, int):
            return self.parts
        return self.parts[DIRECTIONS.index(direction)]

    def schedule_for(self, topology: Topology) -> str:
        """The name of the schedule to run on `topology`."""
        return default_schedule_name(topology) if self.schedule == AUTO else self.schedule


def _as_positive(value: object) -> int | None:
    whole = as_whole(value)
    return whole if whole is not None and whole >= 1 else None


def _one_of(option: str, value: Any, valid: Collection[str]) -> None:
    if not isinstance(value, str) or value not in valid:
        raise ValueError(f"{option}={shown(value)} is not valid; use one of: {', '.join(valid)}")


def choose_moving_side(strategy: Strategy, direction: Direction, shapes: Shapes) -> Side:
    """The side that travels: the one asked for, else the one with fewer bytes per hop (kv if equal)."""
    asked = strategy.forward if direction == "forward" else strategy.backward
    if asked != AUTO:
        return "q" if asked == "q" else "kv"
    return min(reversed(SIDES), key=lambda moving: hop_bytes(shapes, direction, moving))
