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

_STEADY = 12  # nodes of the smallest cluster that stands for a larger one
_PERIOD = 12  # nodes after which ranks repeat themselves: a multiple of 1, 2, 3, 4 and 6, after which they do


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
    """Return the price of `schedule`, or of a sample that stands for it, for this load on these links."""
    most = max(sum(load.work(schedule, rank)) for rank in range(len(schedule.visits)))
    return Price(simulate(schedule, load, links), most * load.visit_s, seconds_by_link(schedule, load, links))


def price_by_name(name: str, topology: Topology, parts: int, load: Load, links: Links) -> Price:
    """Return the price of a schedule by name, every rank requiring every block.

    Ranks that do the same are simulated once. Of a large cluster two smaller ones are simulated, with nodes of the
    same size: in the middle of a schedule ranks repeat themselves after a few nodes, so that as many more nodes again
    add the same time.
    """

    def of_nodes(nodes: int) -> Price:
        drawn = _sample(name, Topology(nodes, topology.ranks_per_node), load.reduce_bytes > 0, parts)
        return price(drawn, load, links)

    few = _STEADY + topology.nodes % _PERIOD
    if topology.nodes <= few + _PERIOD:
        return of_nodes(topology.nodes)
    before, after, times = of_nodes(few), of_nodes(few + _PERIOD), (topology.nodes - few) / _PERIOD

    def continued(first: float, second: float) -> float:
        return first + times * (second - first)

    return Price(
        continued(before.time_s, after.time_s),
        continued(before.compute_s, after.compute_s),
        {link: continued(before.link_s[link], after.link_s[link]) for link in Link},
    )


@lru_cache(maxsize=32)
def _sample(name: str, topology: Topology, reduces: bool, parts: int) -> Schedule:
    return sample(name, topology, reduces).in_parts(parts)
