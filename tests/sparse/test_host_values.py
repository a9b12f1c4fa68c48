"""Selections never wait for a device: nothing that the host does depends on numbers that are there.

Tensors of the device "meta" have no numbers. An operator that would bring some to the host raises, or one whose
result would have a shape that depends on them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from burst_plugin import Causal, Documents, PerRow, Topology, VirtualRing
from burst_plugin.sparse import index_scores, keys_of_pools, pool, select_blocks, select_keys, select_pools

META = torch.device("meta")
LENGTHS = (480, 1440)  # on two ranks 1 and 3 chunks of queries


class _HostTensors(TorchDispatchMode):
    """Counts operators that take tensors of the host to those of the device: each has to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        kinds = {x.device.type for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)}
        self.count += len(kinds) > 1
        return out


def _calls(length: int) -> dict[str, Callable[[], Tensor]]:
    """Calls of the package's functions on two ranks, on tensors without numbers."""
    ring = VirtualRing(Topology(1, 2))
    mask = PerRow((Causal() & Documents((0, 17, length // 3, length)), Causal()))
    shapes = (2, length, 4, 16), (2, length, 16), (2, length, 4), (2, length, 5)
    q, k, weights, starts = (torch.empty(shape, device=META) for shape in shapes)
    return {
        "keys": partial(select_keys, q, k, weights, 300, ring, mask=mask),
        "blocks": partial(select_blocks, q, k, 4, 5, ring, mask=mask),
        "pools": partial(select_pools, q, k, weights, 4, 5, ring, mask=mask),
        "keys of pools": partial(pool, lambda x: x.mean(1), k, 4, ring, mask=mask),
        "positions": partial(keys_of_pools, starts.to(torch.int32), 4, ring, mask=mask),
    }


@pytest.mark.parametrize("name", ["keys", "blocks", "pools", "keys of pools", "positions"])
def test_no_step_of_a_call_needs_numbers_of_the_device(name: str) -> None:
    counts = []
    with (
        mock.patch.object(index_scores, "warn_unless_alike"),  # which looks at numbers once for all calls
        mock.patch.dict(index_scores.SHAPES, {"meta": index_scores.SHAPES["cpu"]}),
        mock.patch("torch.is_autocast_enabled", return_value=False),  # which knows no such device
    ):
        for length in LENGTHS:
            call = _calls(length)[name]
            assert call().device == META
            with _HostTensors() as host, mock.patch("torch.tensor", wraps=torch.tensor) as of_lists:
                call()
            counts.append(host.count + of_lists.call_count)
    assert counts[0] == counts[1] <= 8, counts
