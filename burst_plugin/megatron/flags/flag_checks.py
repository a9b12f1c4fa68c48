"""Flags of Megatron's own that a ring cannot follow: refused at start-up, with what to write instead."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from burst_plugin.frameworks.options import Rule, off
from burst_plugin.megatron.flags.arguments import (
    PACKS,
    RESETS,
    burst_is_possible,
    flag_of,
    in_flags,
    options_that_are_set,
    parsed_arguments,
    parsed_layout,
    parsed_strategy,
    unsupported,
)
from burst_plugin.megatron.flags.config import (
    REFUSED,
    REFUSED_LATER,
    brings_groups,
    is_hybrid,
    kinds_of,
    misspelt_kind,
    problems_of_changing_groups,
    spreads_sequences,
)
from burst_plugin.megatron.releases import parse_version
from burst_plugin.strategy import Strategy

_PACK = "pack them in a forward_step of your own: PackedSeqParams, cut by burst_plugin.megatron.packed_indices"

# Flags that are not in TransformerConfig and ask for attention that is not supported.
REFUSED_FLAGS: Mapping[str, Rule] = MappingProxyType(
    {
        "sft": Rule(
            lambda value: not value or parse_version(sys.modules["megatron.core"].__version__) >= (0, 18, 0),
            "before 0.18 the script does not tell layers where documents begin in the way that they need; update, or "
            f"{_PACK}",
        ),
        "perform_rl_step": Rule(
            off,
            "releases until 0.19 give all ranks whole sequences, and later ones cut rollouts by themselves, for "
            "Transformer Engine's attention; use --context-parallel-size 1, or from 0.20 on --cp-comm-type p2p",
        ),
        "fake_process_group": Rule(off, "ranks cannot meet in it; see `burst plan`"),
        "use_legacy_models": Rule(off, "legacy models have no core attention; drop it"),
    }
)

_LONG = 16384  # tokens; from there on a mask of all pairs takes gigabytes


def flag_problems() -> list[str]:
    """Return a sentence for each parsed flag that is no field of TransformerConfig and that a ring cannot follow.

    It names the flag, and what to write instead.
    """
    return unsupported(REFUSED_FLAGS, parsed_arguments())


def refuse_flags() -> None:
    """Stop at start-up if Megatron's parsed arguments ask for something that burst attention cannot do.

    It warns of flags that run, but cost speed or memory or leave burst attention out. With `--reset-attention-mask`
    it switches off masks of the data loader. Nothing happens if Megatron's parser did not run.

    Raises:
        ValueError: naming every such flag with its value, and what to write instead.
    """
    args = parsed_arguments()
    if args is None:
        return
    reasons = _lost_flags(args)
    if misspelt := misspelt_kind(getattr(args, "cp_comm_type", None)):
        reasons += [f"--cp-comm-type {misspelt} is not known: write --cp-comm-type burst"]
    elif not burst_is_possible():
        flags = map(flag_of, options_that_are_set(args))
        reasons += [f"{flag} needs --cp-comm-type burst: add that, or drop it" for flag in flags]
        if args.context_parallel_size > 1:
            _warn(
                f"--context-parallel-size {args.context_parallel_size} with {flag_of('cp_comm_type', _kinds(args))}: "
                "Megatron's own context parallelism runs, which needs Transformer Engine, and not burst attention; "
                "write --cp-comm-type burst for that"
            )
    elif spreads_sequences(args):
        reasons += unsupported({**REFUSED, **REFUSED_LATER, **REFUSED_FLAGS}, args)
        if is_hybrid(args):
            reasons += problems_of_changing_groups(args)
        if getattr(args, "sft", False) and is_hybrid(args):
            reasons.append(
                "--sft with --hybrid-context-parallel runs on one ring, which needs --cp-comm-type burst in all "
                "layers, a --seq-length that twice the number of ranks divides, and flags on the command line rather "
                "than in --yaml-cfg; or drop one of them"
            )
        kinds = _kinds(args)
        if parsed_layout() != Strategy.layout and kinds != ["burst"]:
            reasons.append(
                f"{flag_of('burst_layout', parsed_layout())} needs --cp-comm-type burst in all layers, got "
                f"{' '.join(kinds)}: Megatron's own context parallelism takes batches to be cut in zigzag"
            )
        reasons += [*_document_problems(args, kinds), *_strategy_problems()]
        _warn_of_square_masks(args)
        _warn_of_experts_by_rank(args)
        _warn_of_turns_by_rank(args)
    else:  # on one rank losses and MLPs come in chunks, too
        reasons += _strategy_problems()
    if reasons:
        raise ValueError("burst attention cannot run with these flags:" + "".join(f"\n  {line}" for line in reasons))


def _lost_flags(args: Any) -> list[str]:
    """Return a sentence for each burst flag on the command line of which a file of arguments has taken the place."""
    if not getattr(args, "yaml_cfg", None):
        return []
    flags = [word.split("=")[0] for word in sys.argv[1:] if word.startswith(("--burst-", "--no-burst-"))]
    return [
        f"{flag} is lost with --yaml-cfg {args.yaml_cfg}, from which Megatron takes all arguments: write "
        f"{flag.removeprefix('--').removeprefix('no-').replace('-', '_')} as a key of that file"
        for flag in flags
    ]


def _document_problems(args: Any, kinds: Sequence[str]) -> list[str]:
    """Return why ranks cannot keep documents apart as these arguments ask for.

    Data loaders are told to make no masks [S, S], since layers get none: see `batches/documents.py`.
    """
    flags = [name for name in (RESETS, PACKS) if getattr(args, name, False)]
    if not flags:
        return []
    reasons = []
    if kinds != ["burst"]:
        reasons.append(
            f"{flag_of(flags[0])} needs --cp-comm-type burst in all layers, got {' '.join(kinds)}: Megatron's own "
            "context parallelism would let documents attend to each other"
        )
    if brings_groups(args):
        reasons.append(
            f"{flag_of(flags[0])} is not supported with --hybrid-context-parallel: use --context-parallel-size alone"
        )
    if RESETS in flags:
        args.create_attention_mask_in_dataloader = False
    if parsed_layout() == Strategy.layout:
        _warn(
            f"{flag_of(flags[0])}: sequences are cut in zigzag, whatever documents they hold; --burst-layout auto "
            "gives all ranks the same work, and sends less"
        )
    return reasons


def _strategy_problems() -> list[str]:
    """Return why the values of `--burst-*` flags are not valid, if they are not."""
    try:
        parsed_strategy()
    except ValueError as error:
        return [in_flags(str(error))]
    return []


def warn_of_quantizers() -> None:
    """Warn if ModelOpt is in use: burst attention leaves queries, keys and values unquantized."""
    if getattr(parsed_arguments(), "modelopt_enabled", False):
        _warn(
            "ModelOpt is in use: if queries, keys or values of this model are quantized (--export-kv-cache-quant), "
            "burst attention trains and saves it without that; other layers are not affected"
        )


def _warn(text: str) -> None:
    """Warn once for all ranks, since their flags are the same."""
    if getattr(parsed_arguments(), "rank", 0) == 0:
        warnings.warn(text, stacklevel=3)


def _kinds(args: Any) -> list[str]:
    """Return the kinds of context parallelism of all layers, each once; `--yaml-cfg` may give one without a list."""
    return sorted(set(kinds_of(args.cp_comm_type or "p2p")))


def _warn_of_square_masks(args: Any) -> None:
    """Warn of the loader's masks [S, S], which only repeat "causal": while made, each exists twice in float32."""
    tokens = getattr(args, "seq_length", None) or 0
    if getattr(args, "create_attention_mask_in_dataloader", False) and tokens >= _LONG:
        _warn(
            f"the data loader makes an attention mask of {tokens} x {tokens}, {8 * tokens**2 / 2**30:.0f} GiB per "
            "loader process while it does; add --no-create-attention-mask-in-dataloader"
        )


def _warn_of_experts_by_rank(args: Any) -> None:
    """Warn of options by which the experts of a token depend on the other tokens of its rank."""
    capacity = getattr(args, "moe_expert_capacity_factor", None)
    balancing = getattr(args, "moe_router_load_balancing_type", None)
    names = ["moe_expert_capacity_factor"] if capacity is not None and capacity >= 0 else []  # below 0 it is off
    if "sinkhorn" in ([balancing] if isinstance(balancing, str) else balancing or []):
        names.append("moe_router_load_balancing_type")
    if names and getattr(args, "num_experts", None):
        flags = " and ".join(flag_of(name, getattr(args, name)) for name in names)
        _warn(
            f"{flags}: each context-parallel rank routes its own tokens by itself, as in Megatron's own context "
            "parallelism, so that losses depend on --context-parallel-size"
        )


def _warn_of_turns_by_rank(args: Any) -> None:
    """Warn of a loss that weighs the turns of a conversation by their lengths: a rank sees parts of them."""
    if getattr(args, "use_loss_scaling", False):
        _warn(
            "--use-loss-scaling: each context-parallel rank weighs the parts of a conversation's turns that it holds "
            "as if they were turns, as in Megatron's own context parallelism, so that losses depend on "
            "--context-parallel-size; drop the flag, or use --context-parallel-size 1"
        )
