"""The section "right": kernels alone, what only GPUs show, then the ring."""

from __future__ import annotations

from collections.abc import Iterator

from burst_plugin.check.findings import Finding
from burst_plugin.check.right_gpu import check_far_offsets
from burst_plugin.check.right_kernels import check_kernels
from burst_plugin.check.right_ring import check_rings
from burst_plugin.check.settings import Settings
from burst_plugin.check.world import World

__all__ = ["right"]


def right(world: World, settings: Settings) -> Iterator[Finding]:
    """Yield what is right and what is wrong, the same on every rank; collective."""
    yield from check_kernels(world, settings)
    yield from check_far_offsets(world, settings)
    yield from check_rings(world, settings)
