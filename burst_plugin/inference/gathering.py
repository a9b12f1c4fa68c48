"""Values and partial attention of a turn's tokens, gathered or merged from all ranks onto every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin.checks import shown
from burst_plugin.comm.call_identity import CallId
from burst_plugin.comm.torch_distributed import DistributedTransport
from burst_plugin.comm.transport import Channel
from burst_plugin.context import ContextParallel
from burst_plugin.inference.tree import Partial, merge_in_tree
from burst_plugin.inference.turn import Turn
from burst_plugin.moved_tokens import as_sent
from burst_plugin.ring.agreement import prepared_together
from burst_plugin.ring.executor import lockstep
from burst_plugin.topology import Link, Traffic


def gathered(cp: ContextParallel, turn: Turn | None, x: Tensor, last: bool) -> Tensor:
    """Return `x` of all ranks put together into whole rows on every rank, as `KVCache.gather` does; collective.

    Args:
        cp: the ring.
        turn: the turn whose tokens are gathered; None if none has begun, which raises ValueError on every rank.
        x: [B, size, ...], values of this rank's tokens.
        last: whether to return the last new token of each row only.

    Returns:
        [B, T, ...], rows padded with zeros, or with `last` [B, ...], 0 for rows without new tokens.
    """

    def prepared() -> Turn:
        if turn is None:
            raise ValueError("no turn has begun whose tokens could be gathered; call KVCache.begin first")
        if not isinstance(x, Tensor) or x.shape[:2] != (len(turn.starts), turn.size):
            expected = f"[{len(turn.starts)}, {turn.size}, ...]"
            raise ValueError(f"gather got {shown(x)}, but this rank's tokens of the turn are {expected}")
        return turn

    def agree(now: Turn | None, problem: str) -> None:
        compared = {"last": bool(last), "sizes": x.shape[2:], "dtype": x.dtype}
        cp.agree({} if now is None else compared, problem, of="tokens that are gathered")

    now, _ = prepared_together(prepared, agree)
    if now.replicated:
        return _last(x, now.counts) if last else _without_padding(x, now)
    if last:
        last_of_ranks = of_ranks(cp, _last(x, now.counts))
        return torch.stack([last_of_ranks[(stop - 1) % now.ranks][row] for row, stop in enumerate(now.stops)])
    return _whole(cp, now, x)


def gathered_ends(cp: ContextParallel, turn: Turn, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the last tokens of each row of a turn on every rank; collective where ranks share the turn's tokens.

    Args:
        cp: the ring.
        turn: the turn.
        x: [B, size, ...], values of this rank's tokens.
        counts: how many of its new tokens to return, for each row.

    Returns:
        [B, max(counts), ...], rows padded with zeros at their ends.
    """
    starts = tuple(stop - count for stop, count in zip(turn.stops, counts, strict=True))
    ends = replace(turn, starts=starts, known={})
    own_ends = x.new_zeros(len(x), ends.size, *x.shape[2:])
    for row, (stop, count) in enumerate(zip(turn.counts, ends.counts, strict=True)):
        own_ends[row, :count] = x[row, stop - count : stop]
    return own_ends if ends.replicated else gathered(cp, ends, own_ends, last=False)


def _whole(cp: ContextParallel, turn: Turn, x: Tensor) -> Tensor:
    """Return all new tokens, gathered from the ranks that share them."""
    slices_of_ranks = [turn.own_of(rank) for rank in range(turn.ranks)]
    most = max(max(turn.counts_of(rank)) for rank in range(turn.ranks))
    padded = x.new_zeros(len(x), most, *x.shape[2:])
    padded[:, : x.shape[1]] = x
    result = x.new_zeros(len(x), max(turn.lengths), *x.shape[2:])
    for theirs, slices in zip(of_ranks(cp, padded), slices_of_ranks, strict=True):
        for row, selection in enumerate(slices):
            count = len(range(selection.start, selection.stop, selection.step))
            result[row, selection] = theirs[row, :count]
    return result


def of_ranks(cp: ContextParallel, x: Tensor) -> list[Tensor]:
    """Gather a tensor that has one shape on all ranks; return every rank's tensor, in rank order; collective."""
    tensors = [torch.empty_like(x) for _ in range(cp.ranks)]
    dist.all_gather([as_sent(each) for each in tensors], as_sent(x.contiguous()), group=cp.group)
    return tensors


def _last(x: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Return the last of this rank's tokens of each row, [B, ...]; 0 for rows without any."""
    pairs = zip(x, counts, strict=True)
    return torch.stack([row[count - 1] if count else row.new_zeros(row.shape[1:]) for row, count in pairs])


def _without_padding(x: Tensor, turn: Turn) -> Tensor:
    valid = turn.valid.to(x.device).view(*turn.valid.shape, *[1] * (x.dim() - 2))
    return x.where(valid, 0)


_TAG = 20241  # of these messages, beside comparisons and other messages on the same group


class TreeMerge:
    """Merges the partial attention that each rank of `cp` has computed, by messages over the group of the ring.

    The messages are few and small, and nothing is computed meanwhile, so that they need no communicators of their
    own.
    """

    def __init__(self, cp: ContextParallel) -> None:
        self._cp = cp
        groups = {} if cp.group is None else {Channel(Traffic.REDUCE, link): cp.group for link in Link}
        global_ranks = [0] if cp.group is None else dist.get_process_group_ranks(cp.group)
        self._transport = DistributedTransport(groups, global_ranks, tag=_TAG)

    @property
    def sent_bytes(self) -> Counter[str]:
        """Return the bytes that this rank has sent so far, under the names of links, "intra" and "inter"."""
        return Counter({channel.link.value: n for channel, n in self._transport.sent_bytes.items()})

    def run(self, compute: Callable[[], Partial], which: CallId, signature: Mapping[str, object]) -> Partial:
        """Compute this rank's partial attention and merge it with all other ranks'; return the result; collective.

        Args:
            compute: returns this rank's partial attention.
            which: the identity of the call, for errors and for labels of messages.
            signature: the values by name that must be equal on every rank, and the tensors' torch.device under
                "device".

        Raises RingError for a rank that is lost, or that is at another call.
        """
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
                own_result = compute()
            return lockstep([merge_in_tree(transport, state.topology, state.rank, own_result, label)])[0]

    def _label(self, which: CallId, signature: Mapping[str, object], device: torch.device) -> Tensor | None:
        """Return the label of messages on CPUs, made of call and signature; None on other devices."""
        if device.type != "cpu":
            return None
        text = repr((self._cp.rank_state.ring_id, signature))
        digest = blake2b(text.encode(), digest_size=8).digest()
        return torch.frombuffer(bytearray(which.label("forward", digest)), dtype=torch.uint8)
