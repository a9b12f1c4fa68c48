"""The time of layers that carry a state along the sequence: of kernels, and of sending states or heads.

    spent = recurrent_seconds(mixer, setting, cluster)       # of one layer and micro-batch, part by part

Messages and hops come from the schedule that a run takes (`recurrent.scan_schedule`). Where heads are computed in
parts, the messages of one part travel while others are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from burst_plugin.planning.cluster import Cluster
from burst_plugin.recurrent.heads import can_hide, can_share, parts_of_heads
from burst_plugin.recurrent.pieces import START, Pieces, cut_into_pieces
from burst_plugin.recurrent.scan_schedule import WHOLE, Move, scan_schedule
from burst_plugin.ring.routes import RouteTable
from burst_plugin.sequence.layout import Tokens
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Link, Topology
from burst_plugin.training.mixers import BF16, FP32, TokenMixer
from burst_plugin.training.setting import Setting
from burst_plugin.types import DIRECTIONS, Direction

KERNELS, MESSAGES = "recurrent layers, kernels", "recurrent layers, states or heads sent"
BACKWARD = 2.2
"""Times its forward pass that a kernel's backward pass takes: flash-linear-attention's of the gated delta net."""
_TOKENS = 16  # of a rank, enough for two pieces as of any sequence

Hop = dict[tuple[int, int], float]
"""Bytes by (sending rank, receiving rank) of messages that are under way at one time."""


class _Placed(NamedTuple):
    """The pieces of a sequence on ranks in zigzag, and the moves of a scan over them, round by round."""

    pieces: Pieces
    rounds: Sequence[Sequence[Move]]


@lru_cache(maxsize=256)
def _placed(topology: Topology, ulysses: int, shares: int) -> _Placed:
    tokens = Tokens(_TOKENS * topology.ranks)
    strategy = Strategy(ulysses_degree=ulysses, ranks_per_node=topology.ranks_per_node)
    pieces = cut_into_pieces(RouteTable(topology, strategy).shards(tokens), 1, tokens.length, None)
    schedule = scan_schedule(pieces, topology.ranks_per_node, shares)
    return _Placed(pieces, [step.moves for step in schedule.rounds if step.moves])


def hops(mixer: TokenMixer, setting: Setting, direction: Direction) -> list[Hop]:
    """Return the messages of one pass of a recurrent layer: for each hop, bytes by (sender, receiver).

    Ranks are context-parallel; the bytes are one tensor-parallel rank's, of a micro-batch. [] for one
    context-parallel rank. Hops follow each other: the last tokens before a piece for the convolution, then states or
    heads.
    """
    if setting.context == 1:
        return []
    shares = setting.topology.ranks_per_node
    if mixer.by_heads:
        shares = max(1, min(shares, mixer.tensors[0][1] // setting.tensor // _parts(mixer, setting)))
    placed = _placed(setting.topology, setting.ulysses, shares)
    all_hops = _halo(mixer, setting, placed.pieces)
    if not mixer.state:
        return all_hops
    if setting.recurrent == "heads" and mixer.by_heads:
        return all_hops + _exchanges(mixer, setting, direction)
    for moves in placed.rounds:
        hop: Hop = {}
        for move in moves:
            is_transition = move.value.kind == "transition"
            if is_transition and direction == "backward":  # which ranks have kept
                continue
            numbers = (mixer.transition if is_transition else mixer.state) / setting.tensor
            numbers /= 1 if move.value.share == WHOLE else shares
            ends = (move.src, move.dst) if direction == "forward" else (move.dst, move.src)
            hop[ends] = hop.get(ends, 0.0) + FP32 * numbers * setting.micro_batch
        all_hops += [hop] if hop else []
    return all_hops


def _parts(mixer: TokenMixer, setting: Setting) -> int:
    """Return into how many parts a layer's heads are cut, so that other parts hide the messages of one."""
    tokens, heads = setting.tokens_at_once / setting.context, [n // setting.tensor for _, n, *_ in mixer.tensors]
    if not mixer.by_heads:
        return 1
    if setting.recurrent == "heads":
        return parts_of_heads(setting.context, [max(1, n) for n in heads], tokens)
    return 2 if can_hide(tokens) and can_share(2, heads) else 1


def _halo(mixer: TokenMixer, setting: Setting, pieces: Pieces) -> list[Hop]:
    """Return the hop of the tokens before each piece, which a convolution looks back at; gradients return, too."""
    hop: Hop = {}
    for piece in pieces.every:
        if piece.before != START and (source := pieces.every[piece.before].rank) != piece.rank:
            numbers = mixer.conv / setting.tensor * setting.micro_batch
            hop[source, piece.rank] = hop.get((source, piece.rank), 0.0) + BF16 * numbers
    return [hop] if mixer.conv and hop else []


def _exchanges(mixer: TokenMixer, setting: Setting, direction: Direction) -> list[Hop]:
    """Return the two hops of an exchange of heads: the kernel's inputs go towards heads, and its outputs back."""
    ranks, tokens = setting.context, setting.tokens_at_once / setting.context
    of_peers = [
        max(1.0, heads / setting.tensor / ranks) * numbers * nbytes for _, heads, numbers, nbytes in mixer.tensors
    ]
    into, back = tokens * sum(of_peers), tokens * of_peers[0]
    both = (into, back) if direction == "forward" else (back, into)
    peers = [(src, dst) for src in range(ranks) for dst in range(ranks) if src != dst]
    return [dict.fromkeys(peers, nbytes) for nbytes in both]


def can_exchange_heads(mixers: Sequence[TokenMixer], context: int, tensor: int) -> bool:
    """Return whether `context` ranks can share the heads of every mixer that allows it (`by_heads`).

    `tensor` tensor-parallel ranks share the heads first. False for one context-parallel rank, and if no mixer allows
    it.
    """
    by_heads = [mixer for mixer in mixers if mixer.by_heads]
    heads = [[count // tensor for _, count, *_ in mixer.tensors] for mixer in by_heads]
    return bool(by_heads) and context > 1 and all(can_share(context, each) for each in heads)


def _hop_seconds(hop: Hop, topology: Topology, cluster: Cluster) -> float:
    """Return the time of a hop: the longest that a rank sends or receives over a link."""
    spent: dict[tuple[int, str, Link], float] = {}
    for (src, dst), nbytes in hop.items():
        link = topology.link(src, dst)
        for end in ((src, "sends", link), (dst, "receives", link)):
            spent[end] = spent.get(end, 0.0) + nbytes / cluster.links.bytes_per_s(link)
    return cluster.hop_s + max(spent.values())


@lru_cache(maxsize=4096)
def _pass_seconds(
    mixer: TokenMixer, setting: Setting, cluster: Cluster, direction: Direction, kernel_s: float
) -> float:
    """Return the seconds that messages of one pass of a recurrent layer take beside `kernel_s` seconds of kernels."""
    spent = [_hop_seconds(hop, setting.topology, cluster) for hop in hops(mixer, setting, direction)]
    if not mixer.state or setting.context == 1:
        return sum(spent)
    halo_s = sum(spent[: bool(mixer.conv)])
    parts = _parts(mixer, setting)
    hidden_share = (parts - 1) / parts  # of messages, and behind this share of the kernels
    if mixer.by_heads and setting.recurrent == "heads":  # two exchanges, one before and one after the kernels
        return halo_s + sum(each - hidden_share * min(each, kernel_s) for each in spent[-2:])
    sent_s = sum(spent) - halo_s
    return halo_s + sent_s - hidden_share * min(sent_s, kernel_s)


def recurrent_seconds(mixer: TokenMixer, setting: Setting, cluster: Cluster) -> dict[str, float]:
    """Return the seconds of one layer and micro-batch in both passes: {kernels: s, states or heads sent: s}.

    The keys are `KERNELS` and `MESSAGES`. Where layers are computed again the forward pass counts twice. States that
    are sent are kept with outputs of attention (`Setting.keep`), and then sent only once.
    """
    again = setting.recompute == "full"
    by_states = setting.context > 1 and not (setting.recurrent == "heads" and mixer.by_heads)
    on_ring, back = mixer.on_ring, mixer.on_ring_backward
    on_ring, back = (on_ring, BACKWARD * on_ring if back is None else back) if by_states else (0.0, 0.0)
    share = setting.tensor * setting.context
    per_operation_s = setting.tokens_at_once / share / (cluster.peak_flops * cluster.recurrent_share)
    kernels_s = {
        "forward": (mixer.flops + on_ring) * per_operation_s,
        "backward": (BACKWARD * mixer.flops + back) * per_operation_s,
    }
    sends_again = again and not (setting.keep and by_states)
    # What the passes send depends on few fields of a setting.
    plain = Setting(
        tokens=setting.tokens,
        code=setting.code,
        tensor=setting.tensor,
        context=setting.context,
        inner=setting.inner,
        batch=setting.micro_batch,
        micro_batch=setting.micro_batch,
        ulysses=setting.ulysses,
        recurrent=setting.recurrent,
    )
    sent_s = {each: _pass_seconds(mixer, plain, cluster, each, kernels_s[each]) for each in DIRECTIONS}
    return {
        KERNELS: (1 + again) * kernels_s["forward"] + kernels_s["backward"],
        MESSAGES: sent_s["forward"] * (1 + sends_again) + sent_s["backward"],
    }


def sent_bytes(mixer: TokenMixer, setting: Setting, direction: Direction) -> list[float]:
    """Return the bytes that each context-parallel rank sends in one pass of a recurrent layer, by rank."""
    sent = [0.0] * setting.context
    for (src, _), nbytes in chain.from_iterable(hop.items() for hop in hops(mixer, setting, direction)):
        sent[src] += nbytes
    return sent
