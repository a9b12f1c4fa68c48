"""Published systems by their names, as options: `Strategy.preset("usp")`.

A new one is an entry of `PRESETS`. It sets the seven options that decide which data goes where, so that none of them
is left to be chosen, and more only if the system needs them. docs/systems.md is made from the entries and from counts
for each entry.

Sources are in the entries. Where a preset differs from its paper, the entry says so in `differs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from burst_plugin.checks import check_one_of
from burst_plugin.strategy.validation import ALL_RANKS, OF_NODE, PLACEMENTS
from burst_plugin.topology import Groups

_HEAD_FIRST, _CONTEXT_FIRST = PLACEMENTS
RING = {
    "schedule": "flat_ring",
    "forward": "kv",
    "backward": "kv",
    "ulysses_degree": 1,
    "ulysses_placement": _HEAD_FIRST,
    "mesh_degree": 1,
}
_HEADS = "{} divide the query heads, and divide the key/value heads or are a multiple of them"
_NO_BIAS = "no bias, since queries move"


class Preset(NamedTuple):
    """One published system.

    title: its name in the field.
    arxiv: the number of its paper.
    what: a description of the preset here.
    options: the fields of `Strategy` that it sets.
    choose: when to choose it.
    differs: how it differs from the paper; "" if ranks send and compute as in the paper.
    limits: on heads, ranks and biases; "" if there are none. No preset limits lengths.
    """

    title: str
    arxiv: str
    what: str
    options: Mapping[str, Any]
    choose: str
    differs: str = ""
    limits: str = ""


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "burst": Preset(
            title="BurstAttention",
            arxiv="2403.09347",
            what="two-level ring; keys and values move forward, queries with their gradients backward",
            options={**RING, "layout": "zigzag", "schedule": "two_level_ring", "backward": "q"},
            differs="tokens are balanced in zigzag, as in BurstEngine (2509.19836)",
            limits=_NO_BIAS,
            choose="as many key/value heads as query heads, several nodes",
        ),
        "ring": Preset(
            title="RingAttention",
            arxiv="2310.01889",
            what="one ring over all ranks; keys and values move, with their gradients backward",
            options={**RING, "layout": "contiguous"},
            choose="no mask, one node; a causal mask leaves the first ranks idle",
        ),
        "zigzag_ring": Preset(
            title="zigzag ring attention",
            arxiv="2310.01889",
            what="`ring`, with two chunks of tokens per rank, one from either end",
            options={**RING, "layout": "zigzag"},
            differs="tokens are cut as in Llama 3 (2407.21783, section 3.3.2); the paper has contiguous ones",
            choose="a causal mask, one node, few key/value heads",
        ),
        "striped": Preset(
            title="Striped Attention",
            arxiv="2311.09431",
            what="`ring`, with every n-th token on a rank",
            options={**RING, "layout": "striped"},
            choose="a causal mask; packed documents of any length",
        ),
        "double_ring": Preset(
            title="Double-Ring-Attention",
            arxiv="2406.18485",
            what="a ring in each node and one of nodes around it; keys and values move",
            options={**RING, "layout": "zigzag", "schedule": "two_level_ring"},
            differs="inner rings are as large as a node; the paper tries other sizes",
            choose="several nodes, few key/value heads",
        ),
        "ulysses": Preset(
            title="Ulysses",
            arxiv="2309.14509",
            what="all ranks exchange heads; no ring is left",
            options={**RING, "layout": "contiguous", "ulysses_degree": ALL_RANKS},
            limits=_HEADS.format("all ranks together"),
            choose="one node with fast links, many heads, masks that leave ranks unequal work",
        ),
        "usp": Preset(
            title="USP",
            arxiv="2405.07719",
            what="the ranks of a node exchange heads, and a ring goes from node to node",
            options={**RING, "layout": "zigzag", "ulysses_degree": OF_NODE},
            differs="the paper leaves `ulysses_degree` open",
            limits=_HEADS.format("the ranks of a node"),
            choose="several nodes, heads enough for the ranks of a node",
        ),
        "loongtrain": Preset(
            title="LoongTrain's 2D-Attention, head-first",
            arxiv="2406.18485",
            what="pairs of ranks in a node exchange heads, and a two-level ring goes around the pairs",
            options={**RING, "layout": "zigzag", "schedule": "two_level_ring", "ulysses_degree": 2},
            differs="the paper leaves `ulysses_degree` open",
            limits="an even number of ranks per node, of query heads, and of key/value heads unless there is one",
            choose="several nodes, heads for some ranks of a node but not for all",
        ),
        "loongtrain_context_first": Preset(
            title="LoongTrain's 2D-Attention, context-first",
            arxiv="2406.18485",
            what=(
                "pairs of ranks as far apart as can be exchange heads, between nodes if there are several, and rings "
                "go around neighbours"
            ),
            options={
                **RING,
                "layout": "zigzag",
                "schedule": "two_level_ring",
                "ulysses_degree": 2,
                "ulysses_placement": _CONTEXT_FIRST,
            },
            differs="the paper leaves `ulysses_degree` open",
            limits=(
                "an even number of nodes, or of ranks in the only one; an even number of query heads, and of "
                "key/value heads unless there is one"
            ),
            choose="two nodes, about as many key/value heads as query heads; the exchange is not hidden",
        ),
        "mesh": Preset(
            title="Mesh-Attention",
            arxiv="2512.20968",
            what="pairs of ranks gather each other's queries, and a ring of keys and values goes around the pairs",
            options={**RING, "layout": "zigzag", "mesh_degree": 2},
            differs=(
                "groups are pairs; `mesh_degree` sets others, and least is sent near the square root of the number "
                "of ranks. What a group sends is not hidden"
            ),
            limits="an even number of ranks, of one node or of each",
            choose="long rings, too few heads to exchange",
        ),
        "all_gather": Preset(
            title="Llama 3's context parallelism",
            arxiv="2407.21783",
            what=(
                "every rank gets keys and values straight from their owners, from another node over a counterpart; "
                "gradients are reduced the same way back"
            ),
            options={**RING, "layout": "zigzag", "schedule": "direct"},
            differs=(
                "the paper gathers all keys and values, then computes; here each block comes while a rank works on "
                "the one before, so that no rank holds all keys. The bytes are equal"
            ),
            choose="nodes in which any two ranks have a link; masks that need few keys",
        ),
        "tasp": Preset(
            title="TASP",
            arxiv="2509.26541",
            what="`zigzag_ring`, with blocks in four parts, whose rings share no link",
            options={**RING, "layout": "zigzag", "schedule": "tasp", "parts": 4},
            differs=(
                "there are four parts, of the heads; the paper has one for each of a node's `ranks - 1` rings. "
                "`parts` sets other numbers, which must divide the key/value heads"
            ),
            limits="a number of key/value heads that 4 divides",
            choose="nodes in which any two ranks have a link of their own",
        ),
        "dist_flash": Preset(
            title="DistFlashAttn",
            arxiv="2310.03294",
            what=(
                "keys and values go half way around, and queries to the ranks beyond; checkpoints keep outputs of "
                "attention"
            ),
            options={
                **RING,
                "layout": "contiguous",
                "schedule": "direct",
                "forward": "both",
                "backward": "both",
                "keep_attention": "all",
            },
            differs=(
                "blocks of another node come over a counterpart; in the paper, straight from their owners. Between "
                "two ranks only keys and values move"
            ),
            limits=_NO_BIAS,
            choose="a causal mask on consecutive tokens, which leaves half of the visits, evenly shared",
        ),
        "ring_self_attention": Preset(
            title="Ring Self-Attention",
            arxiv="2105.13120",
            what="`ring`, with attention in plain PyTorch",
            options={**RING, "layout": "contiguous", "kernel": "reference"},
            differs=(
                "the paper sends keys, then values, and holds the scores of a rank's queries with all keys; here "
                "both are sent at once, and a rank holds the scores with one block"
            ),
            limits="scores of two blocks must fit",
            choose="to check results, not for speed",
        ),
        "pass_kv": Preset(
            title="pass-KV",
            arxiv="2411.01783",
            what="one ring over all ranks; keys and values move",
            options={**RING, "layout": "zigzag"},
            differs="the paper, on inference, has no backward passes; here they move keys and values",
            choose="few key/value heads, or as many queries as keys",
        ),
        "pass_q": Preset(
            title="pass-Q",
            arxiv="2411.01783",
            what="one ring over all ranks; queries move",
            options={**RING, "layout": "zigzag", "forward": "q", "backward": "q"},
            differs=(
                "partial outputs follow the queries a step behind; in the paper they return at the end. The paper, "
                "on inference, has no backward passes; here they move queries"
            ),
            limits=_NO_BIAS,
            choose="few queries for many keys",
        ),
    }
)


def with_preset(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by name, with the options of "preset" in its place; options that are given win.

    Raises ValueError for a name that no preset has.
    """
    own_options = dict(options)
    if "preset" not in own_options:
        return own_options
    name = own_options.pop("preset")
    check_one_of("preset", name, PRESETS)
    return {**PRESETS[name].options, **own_options}


def check_groups(groups: Groups) -> None:
    """Raise ValueError if no ring can be made of such groups; the message lists presets without groups."""
    try:
        _ = groups.ring_topology
    except ValueError as error:
        raise ValueError(f"{error}; or a preset without groups: {presets_without_groups()}") from None


def presets_with(**options: Any) -> str:
    """Return, for a message, the names of the presets that set options to these values or leave them open."""
    return ", ".join(
        name
        for name, preset in PRESETS.items()
        if all(preset.options.get(option, value) == value for option, value in options.items())
    )


def presets_without_groups() -> str:
    """Return, for a message, the names of the presets that suit any number of ranks, heads and tokens."""
    return presets_with(ulysses_degree=1, mesh_degree=1, parts=1)
