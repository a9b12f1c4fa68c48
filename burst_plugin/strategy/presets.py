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
_RING = {
    "schedule": "flat_ring",
    "forward": "kv",
    "backward": "kv",
    "ulysses_degree": 1,
    "ulysses_placement": _HEAD_FIRST,
    "mesh_degree": 1,
}
_HEADS = "{} divide the query heads, and divide the key/value heads or are a multiple of them; any length"
_NO_LIMITS = "any number of heads, any length"
_NO_BIAS = f"{_NO_LIMITS}; no bias, since queries move"


class Preset(NamedTuple):
    """One published system.

    title: its name in the field.
    arxiv: the number of its paper.
    what: a description of the preset here.
    options: the fields of `Strategy` that it sets.
    choose: when to choose it.
    differs: how it differs from the paper; "" if ranks send and compute as in the paper.
    limits: on heads and lengths.
    """

    title: str
    arxiv: str
    what: str
    options: Mapping[str, Any]
    choose: str
    differs: str = ""
    limits: str = _NO_LIMITS


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "burst": Preset(
            title="BurstAttention",
            arxiv="2403.09347",
            what="two-level ring; keys and values move forward, queries with their gradients backward",
            options={**_RING, "layout": "zigzag", "schedule": "two_level_ring", "backward": "q"},
            differs="tokens are balanced in zigzag, as in BurstEngine (2509.19836)",
            limits=_NO_BIAS,
            choose="as many key/value heads as query heads, several nodes",
        ),
        "ring": Preset(
            title="RingAttention",
            arxiv="2310.01889",
            what="one ring over all ranks; keys and values move in both passes, with their gradients backward",
            options={**_RING, "layout": "contiguous"},
            choose="no mask, one node; to compare with: a causal mask leaves the first ranks idle",
        ),
        "zigzag_ring": Preset(
            title="zigzag ring attention",
            arxiv="2310.01889",
            what="`ring`, with two chunks of tokens per rank, one from either end",
            options={**_RING, "layout": "zigzag"},
            differs="the tokens are those of Llama 3 (2407.21783, section 3.3.2); the paper has contiguous ones",
            choose="a causal mask, one node, few key/value heads",
        ),
        "striped": Preset(
            title="Striped Attention",
            arxiv="2311.09431",
            what="`ring`, with every n-th token on a rank",
            options={**_RING, "layout": "striped"},
            choose="a causal mask; packed documents of any length",
        ),
        "double_ring": Preset(
            title="Double-Ring-Attention",
            arxiv="2406.18485",
            what="a ring in each node and one of nodes around it; keys and values move in both passes",
            options={**_RING, "layout": "zigzag", "schedule": "two_level_ring"},
            differs="inner rings are as large as a node; the paper tries other sizes too",
            choose="several nodes, few key/value heads",
        ),
        "ulysses": Preset(
            title="Ulysses",
            arxiv="2309.14509",
            what="all ranks exchange heads, and each computes its own on the whole sequence; no ring is left",
            options={**_RING, "layout": "contiguous", "ulysses_degree": ALL_RANKS},
            limits=_HEADS.format("all ranks together"),
            choose="one node with fast links, many heads, or masks that leave ranks unequal work",
        ),
        "usp": Preset(
            title="USP",
            arxiv="2405.07719",
            what="the ranks of a node exchange heads, and a ring goes from node to node",
            options={**_RING, "layout": "zigzag", "ulysses_degree": OF_NODE},
            differs="the paper leaves both sizes open: `ulysses_degree` has others",
            limits=_HEADS.format("the ranks of a node"),
            choose="several nodes, heads enough for the ranks of a node",
        ),
        "loongtrain": Preset(
            title="LoongTrain's 2D-Attention, head-first",
            arxiv="2406.18485",
            what="pairs of ranks in a node exchange heads, and a two-level ring goes around the pairs",
            options={**_RING, "layout": "zigzag", "schedule": "two_level_ring", "ulysses_degree": 2},
            differs="the paper leaves the sizes open: `ulysses_degree` has others",
            limits=(
                "an even number of ranks per node, of query heads, and of key/value heads unless there is one; any "
                "length"
            ),
            choose="several nodes, heads for some ranks of a node but not for all",
        ),
        "loongtrain_context_first": Preset(
            title="LoongTrain's 2D-Attention, context-first",
            arxiv="2406.18485",
            what=(
                "pairs of ranks as far apart as can be exchange heads, between nodes if there are several, and two "
                "rings go around neighbours, half of the ranks each"
            ),
            options={
                **_RING,
                "layout": "zigzag",
                "schedule": "two_level_ring",
                "ulysses_degree": 2,
                "ulysses_placement": _CONTEXT_FIRST,
            },
            differs="the paper leaves the sizes open: `ulysses_degree` has others",
            limits=(
                "an even number of nodes, or of ranks in the only one; an even number of query heads, and of "
                "key/value heads unless there is one; any length"
            ),
            choose="two nodes, about as many key/value heads as query heads; what crosses between them is not hidden",
        ),
        "mesh": Preset(
            title="Mesh-Attention",
            arxiv="2512.20968",
            what="pairs of ranks gather each other's queries, and a ring of keys and values goes around the pairs",
            options={**_RING, "layout": "zigzag", "mesh_degree": 2},
            differs=(
                "groups are pairs; `mesh_degree` has others, and least is sent near the square root of the number of "
                "ranks. Within a group all is sent before and after the ring, and not hidden"
            ),
            limits=f"an even number of ranks, of one node or of each; {_NO_LIMITS}",
            choose="long rings, too few heads to exchange",
        ),
        "all_gather": Preset(
            title="Llama 3's context parallelism",
            arxiv="2407.21783",
            what=(
                "every rank gets keys and values straight from their owners, over a counterpart in its node where "
                "they come from another; their gradients are reduced the same way back"
            ),
            options={**_RING, "layout": "zigzag", "schedule": "direct"},
            differs=(
                "the paper gathers all of it, then computes; here block by block, each while the one before is "
                "worked on, so that no rank holds all keys. The bytes are the same. `parts` cuts blocks by heads"
            ),
            choose="a node in which any two ranks have a link; masks that need few of the keys",
        ),
        "tasp": Preset(
            title="TASP",
            arxiv="2509.26541",
            what="`zigzag_ring`, with blocks in four parts, which go around rings of their own that share no link",
            options={**_RING, "layout": "zigzag", "schedule": "tasp", "parts": 4},
            differs=(
                "there are four parts, of the heads; the paper has one for each ring, of which there are `ranks - 1` "
                "in a node. `parts` has other numbers, which must divide the key/value heads"
            ),
            limits="a number of key/value heads that 4 divides; any length",
            choose="nodes in which any two ranks have a link of their own, most of which a single ring leaves idle",
        ),
        "dist_flash": Preset(
            title="DistFlashAttn",
            arxiv="2310.03294",
            what=(
                "keys and values go half way around, and queries come to ranks beyond, so that ranks with few keys "
                "before them take over query blocks of the others; checkpoints keep what attention gave"
            ),
            options={
                **_RING,
                "layout": "contiguous",
                "schedule": "direct",
                "forward": "both",
                "backward": "both",
                "keep_attention": "all",
            },
            differs=(
                "blocks of another node come over a counterpart in one's own; the paper has them sent straight from "
                "their owners. Between two ranks only keys and values move"
            ),
            limits=_NO_BIAS,
            choose="a causal mask on consecutive tokens, which leaves half of the visits, evenly shared",
        ),
        "ring_self_attention": Preset(
            title="Ring Self-Attention",
            arxiv="2105.13120",
            what="`ring`, with attention in plain PyTorch",
            options={**_RING, "layout": "contiguous", "kernel": "reference"},
            differs=(
                "the paper sends keys, then values, and holds the scores of a rank's queries with all keys; here "
                "both are sent at once, and scores are held for one block, since partial softmaxes are merged"
            ),
            limits="any number of heads; scores of two blocks must fit",
            choose="to check results, not for speed",
        ),
        "pass_kv": Preset(
            title="pass-KV",
            arxiv="2411.01783",
            what="one ring over all ranks; keys and values move",
            options={**_RING, "layout": "zigzag"},
            differs="the paper is about inference; backward passes, which it does not have, move the same side",
            choose="few key/value heads, or as many queries as keys",
        ),
        "pass_q": Preset(
            title="pass-Q",
            arxiv="2411.01783",
            what="one ring over all ranks; queries move",
            options={**_RING, "layout": "zigzag", "forward": "q", "backward": "q"},
            differs=(
                "partial outputs follow the queries a step behind; in the paper they return all at once, at the end. "
                "The paper is about inference; backward passes, which it does not have, move the same side"
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
    given = dict(options)
    if "preset" not in given:
        return given
    name = given.pop("preset")
    check_one_of("preset", name, PRESETS)
    return {**PRESETS[name].options, **given}


def check_groups(groups: Groups) -> None:
    """Raise ValueError, which lists the presets without groups, if no ring can be made of such groups."""
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
    """Return the names of the presets for any number of ranks, heads and tokens, for a message."""
    return presets_with(ulysses_degree=1, mesh_degree=1, parts=1)
