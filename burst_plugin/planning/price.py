"""The price of one schedule on described links: simulated, or for a large cluster extrapolated from a smaller one."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from burst_plugin.planning.links import Links, Load
from burst_plugin.planning.simulator import seconds_by_link, simulate
from burst_plugin.schedule.rings import sample
from burst_plugin.schedule.schedule import Schedule
from burst_plugin.topology import Link, Topology

__all__ = ["Price", "price", "price_by_name"]

_SMALLEST = 8  # nodes of a cluster that stands for a larger one: enough for two in a row to do the same


@dataclass(frozen=True, order=True)
class Price:
    """Seconds until the last rank is done; the most work of any rank; by link, how long the busiest NIC is busy."""

    time_s: float
    compute_s: float
    link_s: dict[Link, float] = field(default_factory=dict, compare=False)

    @property
    def bound_s(self) -> float:
        """Return the seconds that no order of the same work and messages beats; no schedule beats `least_seconds`."""
        return max(self.compute_s, *self.link_s.values())


def price(schedule: Schedule, load: Load, links: Links) -> Price:
    """Return the price of `schedule` for this load on these links."""
    return _price_of_run(schedule, load, links, simulate(schedule, load, links).time_s)


def _price_of_run(schedule: Schedule, load: Load, links: Links, time_s: float) -> Price:
    most = max(sum(load.work(schedule, rank)) for rank in range(len(schedule.visits)))
    return Price(time_s, most * load.visit_s, seconds_by_link(schedule, load, links))


def price_by_name(name: str, topology: Topology, parts: int, load: Load, links: Links) -> Price:
    """Return the price of a schedule by name, every rank requiring every block, to 1e-9 that of `price`.

    Ranks that do the same are simulated once, and of large clusters only a part: once ranks of a smaller one, with
    nodes of the same size, repeat a period (`simulator.Period`), each further period adds the same time.
    """

    def drawn(nodes: int) -> Schedule:
        return _sample(name, Topology(nodes, topology.ranks_per_node), load.reduce_bytes > 0, parts)

    nodes = _SMALLEST
    while nodes < topology.nodes:
        time_s, period = simulate(drawn(nodes), load, links)
        if period is None:
            nodes *= 2
            continue
        rest = (topology.nodes - nodes) % period.nodes
        if rest:  # so that whole periods are left to add
            nodes += rest
            time_s = simulate(drawn(nodes), load, links).time_s
        before = _price_of_run(drawn(nodes), load, links, time_s)
        after = _price_of_run(drawn(nodes + period.nodes), load, links, time_s + period.seconds)
        return _continued(before, after, (topology.nodes - nodes) // period.nodes)
    return price(drawn(topology.nodes), load, links)


@lru_cache(maxsize=32)
def _sample(name: str, topology: Topology, reduces: bool, parts: int) -> Schedule:
    return sample(name, topology, reduces).in_parts(parts)


def _continued(before: Price, after: Price, times: int) -> Price:
    """Return the price after so many steps like that from `before` to `after`."""

    def value(first: float, second: float) -> float:
        return first + times * (second - first)

    return Price(
        value(before.time_s, after.time_s),
        value(before.compute_s, after.compute_s),
        {link: value(before.link_s[link], after.link_s[link]) for link in Link},
    )
