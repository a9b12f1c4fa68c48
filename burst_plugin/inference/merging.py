"""The tree of `inference.tree` over the process group of a ring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin.comm.call_identity import CallId
from burst_plugin.comm.torch_distributed import DistributedTransport
from burst_plugin.comm.transport import Channel
from burst_plugin.context import ContextParallel
from burst_plugin.inference.tree import Partial, merge_in_tree
from burst_plugin.ring.executor import lockstep
from burst_plugin.topology import Link, Traffic

_TAG = 20241  # of these messages, beside those of comparisons and of others on the same group


class TreeMerge:
    """Merges what each rank of `cp` has computed. Messages go over the group that the ring was given.

    They are few and small, and nothing is computed meanwhile, so that they need no communicators of their own.
    """

    def __init__(self, cp: ContextParallel) -> None:
        self._cp = cp
        groups = {} if cp.group is None else {Channel(Traffic.REDUCE, link): cp.group for link in Link}
        global_ranks = [0] if cp.group is None else dist.get_process_group_ranks(cp.group)
        self._transport = DistributedTransport(groups, global_ranks, tag=_TAG)

    @property
    def sent_bytes(self) -> Counter[str]:
        """Return the bytes sent so far, by the name of the link."""
        return Counter({channel.link.value: n for channel, n in self._transport.sent_bytes.items()})

    def run(self, compute: Callable[[], Partial], which: CallId, signature: Mapping[str, object]) -> Partial:
        """Return what `compute` returns on all ranks, merged; collective. Raise RingError for a lost rank."""
        state = self._cp.rank_state
        device = signature["device"]
        assert isinstance(device, torch.device)
        self._cp.connect(())  # ranks meet, so that they can tell each other what went wrong
        self._transport.board = state.transport.board
        with state.one_pass("forward", which, device):
            log = None if state.profile is None else state.profile.begin_pass("merge", device)
            transport = self._transport if log is None else log.watch(self._transport)
            label = self._label(which, signature, device)
            with nullcontext() if log is None else log.timed("kernel"):
                mine = compute()
            return lockstep([merge_in_tree(transport, state.topology, state.rank, mine, label)])[0]

    def _label(self, which: CallId, signature: Mapping[str, object], device: torch.device) -> Tensor | None:
        """Return what messages carry on CPUs: which call it is, and what it computes."""
        if device.type != "cpu":
            return None
        text = repr((self._cp.rank_state.ring_id, signature))
        digest = blake2b(text.encode(), digest_size=8).digest()
        return torch.frombuffer(bytearray(which.label("forward", digest)), dtype=torch.uint8)
