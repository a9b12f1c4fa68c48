"""Partial attention of all ranks merged in a tree, first inside nodes, then between them; everywhere the same bits.

    node 0:  0 <-> 1   2 <-> 3        then 0 <-> 2, 1 <-> 3        then every rank with its counterparts,
    node 1:  4 <-> 5   6 <-> 7             4 <-> 6, 5 <-> 7        0 <-> 4, 1 <-> 5, 2 <-> 6, 3 <-> 7

Two ranks that meet send each other their results, and both merge the two in one order: so both have equal results,
and by induction all ranks have. Where the number of ranks n is no power of two, and m is the largest power below n,
ranks beyond m first send their results to the rank m before them, and receive the final result in the end. The bytes
sent depend on the new tokens and on the number of ranks, not on the cached tokens.

Source: Tree Attention, arXiv 2408.04093, which all-reduces (out, lse).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin.comm.buffers import Buffer, Packing
from burst_plugin.comm.transport import Channel, Message, PeerLostError, Transport, lost_peer_error
from burst_plugin.compute.online_softmax import merge_
from burst_plugin.topology import Link, Topology, Traffic

_LOST = "what it sent belongs to another call, or to one with other shapes, types or options"


class Partial(NamedTuple):
    """The result of attention to some of the keys: out [B, T, Hq, Dv] and lse [B, Hq, T], float32 or float64."""

    out: Tensor
    lse: Tensor


class Round(NamedTuple):
    """One rank's part in a round of the tree: it `sends` its result to `peer`, or merges one that it `receives`.

    A rank may do both. If `is_final`, the received result takes the place of the rank's own.
    """

    peer: int
    link: Link
    sends: bool = True
    receives: bool = True
    is_final: bool = False


@cache
def merge_rounds(topology: Topology, rank: int) -> tuple[Round, ...]:
    """Return the rounds, in order, that `rank` takes part in when all ranks' results are merged in a tree."""
    levels = ((Link.INTRA, topology.node_peers(rank)), (Link.INTER, topology.counterparts(rank)))
    return tuple(each for link, ranks in levels for each in _rounds_of_level(ranks, ranks.index(rank), link))


def _rounds_of_level(ranks: Sequence[int], place: int, link: Link) -> list[Round]:
    """Return the rounds of one of `ranks` that merge the results of all of them."""
    most = 1 << (len(ranks).bit_length() - 1)  # the largest power of two
    if place >= most:
        partner = ranks[place - most]
        return [Round(partner, link, receives=False), Round(partner, link, sends=False, is_final=True)]
    swaps = [Round(ranks[place ^ 1 << n], link) for n in range(most.bit_length() - 1)]
    if place + most >= len(ranks):
        return swaps
    partner = ranks[place + most]
    return [Round(partner, link, sends=False), *swaps, Round(partner, link, receives=False)]


def message(shape: Sequence[int], dtype: torch.dtype, labelled: bool) -> Packing:
    """Return the layout in bytes of a message with a rank's out, of `shape` [B, T, Hq, Dv], and its lse.

    Args:
        shape: the shape of out.
        dtype: the type of the queries; the message is in float32, or in float64 for these.
        labelled: whether a label of 16 bytes that identifies the call follows, as on CPUs.
    """
    batch, tokens, heads, _ = shape
    wide = torch.promote_types(dtype, torch.float32)
    return Packing(((tuple(shape), wide), ((batch, heads, tokens), wide)), labelled)


def decode_bytes(
    topology: Topology, rank: int, shape: Sequence[int], dtype: torch.dtype = torch.float32, labelled: bool = True
) -> dict[str, int]:
    """Return the bytes that `rank` sends for one layer of a turn that all ranks compute: `{"intra": n, "inter": m}`.

    Messages of B·T·Hq·(Dv + 1) numbers of float32, for each of two tensors rounded up to 64 bytes. With w ranks per
    node and n nodes, powers of two, a rank sends log2(w) of them inside its node, and log2(n) between nodes.

    Args:
        topology, rank: the topology of the ring, and the rank.
        shape: the shape of the layer's out, [B, T, Hq, Dv].
        dtype: the type of its queries; float64 is merged in float64.
        labelled: whether messages have a label of 16 bytes, as on CPUs.
    """
    sent = dict.fromkeys((link.value for link in Link), 0)
    for part in merge_rounds(topology, rank):
        sent[part.link.value] += message(shape, dtype, labelled).nbytes * part.sends
    return sent


def merge_in_tree(
    transport: Transport, topology: Topology, rank: int, mine: Partial, label: Tensor | None = None
) -> Generator[None, None, Partial]:
    """Merge the partial attention of all ranks in a tree and return the result; all ranks call it together.

    It is a generator that yields where it waits for messages, so that ranks in one process can take turns.

    Args:
        transport: sends and receives the messages of this rank.
        topology, rank: the topology of the ring, and the rank.
        mine: this rank's partial attention.
        label: 16 bytes, uint8, that identify the call in messages between CPUs; None on other devices.

    Returns:
        Attention to the keys of all ranks, equal to the bit on every rank.

    Raises:
        RingError: a rank is lost, or is at another call.
    """
    here = Partial(mine.out.contiguous(), mine.lse.contiguous())
    packing = message(here.out.shape, here.out.dtype, here.out.device.type == "cpu")
    for number, part in enumerate(merge_rounds(topology, rank)):
        sent, arriving = (transport.pool.lease(packing.nbytes, here.out.device) for _ in range(2))
        if part.sends:
            for view, tensor in zip(sent.views(packing), here, strict=True):
                view.copy_(tensor)
            sent.put_label(label)
        try:
            yield from _swap(transport, part, sent, arriving)
            if part.receives and not arriving.has_label(label):
                raise PeerLostError(part.peer, _LOST)
        except PeerLostError as lost:
            raise lost_peer_error(transport, rank, f"round {number} of the merge", lost) from lost
        if part.receives:
            theirs = Partial(*(x.clone() for x in arriving.views(packing)))
            here = theirs if part.is_final else _merged(*((here, theirs) if rank < part.peer else (theirs, here)))
        for buffer in (sent, arriving):
            transport.pool.release(buffer)
    return here


def _swap(transport: Transport, part: Round, sent: Buffer, arriving: Buffer) -> Generator[None, None, None]:
    """Send and receive the messages of a round."""
    channel = Channel(Traffic.REDUCE, part.link)
    sends = [Message(part.peer, channel, sent.data)] if part.sends else []
    recvs = [Message(part.peer, channel, arriving.data)] if part.receives else []
    posted = transport.post(sends, recvs)
    yield
    for pending in posted:
        pending.wait()


def _merged(first: Partial, second: Partial) -> Partial:
    """Return both merged, in this order, in the tensors of the first."""
    merge_(first.out, first.lse, [second])
    return first
