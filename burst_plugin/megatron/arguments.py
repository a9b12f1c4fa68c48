"""The `--burst-*` flags of Megatron's argument parser, and what its own flags ask for."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from burst_plugin.frameworks.options import flag_keywords
from burst_plugin.frameworks.rules import Rule, broken_rules, off, one_of
from burst_plugin.megatron.config import NOT_DYNAMIC, REFUSED
from burst_plugin.megatron.releases import Version, parse_version
from burst_plugin.strategy import Strategy

__all__ = [
    "REFUSED_FLAGS",
    "add_arguments",
    "burst_is_possible",
    "flag_problems",
    "mend_help",
    "parsed_arguments",
    "parsed_layout",
    "parsed_strategy",
    "refuse_flags",
    "warn_of_quantizers",
    "written",
]

_PACKS_SINCE = (0, 18, 0)
_PACK = "pack them in a forward_step of your own: PackedSeqParams, cut by burst_plugin.megatron.packed_indices"

# Flags that are not in TransformerConfig and ask for attention that is not supported.
REFUSED_FLAGS: Mapping[str, Rule] = MappingProxyType(
    {
        "reset_attention_mask": Rule(
            off,
            f"documents would attend to each other, and do so without it; to keep them apart {_PACK}",
        ),
        "sft": Rule(
            lambda given: not given or _version_at_hand() >= _PACKS_SINCE,
            "before 0.18 the script does not tell layers where documents begin in the way that they need; update, or "
            f"{_PACK}",
        ),
        "dataloader_inter_document_masking": Rule(
            off,
            f"it cuts documents over ranks in another way than their rotary embedding; drop it, or {_PACK}",
        ),
        "perform_rl_step": Rule(off, "before 0.20 it gives all ranks whole sequences, and later it is not tested"),
        "fake_process_group": Rule(off, "ranks cannot meet in it; see `burst plan`"),
        "dynamic_context_parallel": Rule(off, NOT_DYNAMIC),
        "use_legacy_models": Rule(off, "legacy models have no core attention; drop it"),
        "flash_attention_version": Rule(one_of(None), "kernels are chosen by --burst-kernel; drop it"),
    }
)


_PROFILE = "burst_profile"
_LONG = 16384  # tokens; from there on a mask of all pairs takes gigabytes

# Every option of `Strategy` is a flag, --burst-..., except these; with what takes its place.
_WITHOUT_FLAG: Mapping[str, str] = MappingProxyType(
    {
        "head_chunk": "–",  # its fused projection writes gradients to buffers that a part of its rows does not have
        "forward": "–",  # keys and values move, which is nearly always best
        "deterministic": "PyTorch's switch, set by `--deterministic-mode`",
        "late_after": "–",
    }
)
_OVERRIDDEN_BY = MappingProxyType({"ranks_per_node": "--hierarchical-context-parallel-sizes"})
_OPTIONS = tuple(option for option in fields(Strategy) if option.name not in _WITHOUT_FLAG)


def written(option: str) -> str:
    """Return how Megatron's users write an option of `Strategy`, in Markdown."""
    if option in _WITHOUT_FLAG:
        return _WITHOUT_FLAG[option]
    flag = f"`{_flag(_dest(option))}`"
    return f"`{_OVERRIDDEN_BY[option]}`, else {flag}" if option in _OVERRIDDEN_BY else flag


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add one group of flags. Raise argparse.ArgumentError if they have been added already."""
    group = parser.add_argument_group(
        "burst attention",
        "used by layers whose --cp-comm-type is burst (burst_plugin); `burst plan` estimates what suits a cluster",
    )
    for option in _OPTIONS:
        keywords = flag_keywords(option)
        if option.name in _OVERRIDDEN_BY:
            keywords["help"] = f"unless {_OVERRIDDEN_BY[option.name]} is given: {keywords['help']}"
        group.add_argument(_flag(_dest(option.name)), **keywords)
    text = (
        "what `burst check` wrote here: the ring is planned by it for the shapes of the model, around options whose "
        "flags have other values than usual"
    )
    group.add_argument(_flag(_PROFILE), metavar="FILE", help=text)
    return parser


def mend_help(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Make `--help` work again where a help text has a bare percent sign, as in Megatron-LM 0.18.2."""
    for action in parser._actions:
        try:
            str(action.help) % {**vars(action), "prog": parser.prog}
        except (KeyError, TypeError, ValueError):
            action.help = str(action.help).replace("%", "%%")
    return parser


def flag_problems() -> list[str]:
    """Return what in Megatron's parsed arguments, but not in TransformerConfig, asks for unsupported attention."""
    return _problems(parsed_arguments(), REFUSED_FLAGS)


def refuse_flags() -> None:
    """Stop at start-up if Megatron's parsed arguments ask for something that burst attention cannot do.

    Raises:
        ValueError: naming every such flag with its value, and what to write instead.
    """
    args = parsed_arguments()
    if args is None:
        return
    reasons: list[str] = []
    if not burst_is_possible():
        reasons = [f"{_flag(name)} needs --cp-comm-type burst: add that, or drop it" for name in _set_options(args)]
        if args.context_parallel_size > 1:
            _warn(
                f"--context-parallel-size {args.context_parallel_size} without --cp-comm-type burst: Megatron's own "
                "context parallelism runs, not burst attention"
            )
    elif args.context_parallel_size > 1 or _brings_groups(args):
        reasons = _problems(args, {**REFUSED, **REFUSED_FLAGS})
        if getattr(args, "sft", False) and getattr(args, "hybrid_context_parallel", False):
            reasons.append(
                "--sft with --hybrid-context-parallel is not supported: the script packs such microbatches, and "
                "rotates them in another way; drop one of them"
            )
        kinds = sorted(set(args.cp_comm_type))
        if parsed_layout() != Strategy.layout and kinds != ["burst"]:
            reasons.append(
                f"{_flag(_dest('layout'), parsed_layout())} needs --cp-comm-type burst in all layers, got "
                f"{' '.join(kinds)}: Megatron's own context parallelism takes batches to be cut in zigzag"
            )
        _warn_of_square_masks(args)
        _warn_of_unequal_ranks(args)
    if reasons:
        raise ValueError("burst attention cannot run with these flags:" + "".join(f"\n  {line}" for line in reasons))


def warn_of_quantizers() -> None:
    """Warn of ModelOpt: it quantizes queries, keys and values only in Transformer Engine's attention."""
    if getattr(parsed_arguments(), "modelopt_enabled", False):
        _warn(
            "ModelOpt is in use: if queries, keys or values of this model are quantized (--export-kv-cache-quant), "
            "burst attention trains and saves it without that; other layers are not affected"
        )


def _warn(text: str) -> None:
    """Warn once for all ranks, since their flags are the same."""
    if getattr(parsed_arguments(), "rank", 0) == 0:
        warnings.warn(text, stacklevel=3)


def _brings_groups(args: Any) -> bool:
    """Return whether microbatches are spread over groups of their own."""
    return any(getattr(args, name, False) for name in ("hybrid_context_parallel", "dynamic_context_parallel"))


def _warn_of_square_masks(args: Any) -> None:
    """Warn of the loader's masks [S, S], which only repeat "causal": while made, each exists twice in float32."""
    tokens = getattr(args, "seq_length", None) or 0
    if getattr(args, "create_attention_mask_in_dataloader", False) and tokens >= _LONG:
        _warn(
            f"the data loader makes an attention mask of {tokens} x {tokens}, {8 * tokens**2 / 2**30:.0f} GiB per "
            "loader process while it does; add --no-create-attention-mask-in-dataloader"
        )


def _warn_of_unequal_ranks(args: Any) -> None:
    """Warn of losses in which ranks have unequal numbers of tokens, and the same weight."""
    flags = [_flag(name) for name in ("eod_mask_loss", "sft") if getattr(args, name, False)]
    if flags and not getattr(args, "calculate_per_token_loss", True):
        _warn(
            f"{flags[0]} leaves ranks unequal numbers of tokens in the loss, and Megatron takes the mean of the "
            "ranks' means; add --calculate-per-token-loss for the mean over all tokens"
        )


def burst_is_possible() -> bool:
    """Return whether any layer may be on a ring. True if Megatron's parser did not run: it is not known then."""
    args = parsed_arguments()
    return args is None or "burst" in (getattr(args, "cp_comm_type", None) or ())


def burst_is_requested() -> bool:
    """Return whether Megatron's parsed arguments ask for burst attention."""
    return parsed_arguments() is not None and burst_is_possible()


def _problems(args: Any, rules: Mapping[str, Rule]) -> list[str]:
    values = {name: getattr(args, name) for name in rules if hasattr(args, name)}
    return [
        f"{_flag(name, value)} is not supported: {instead}" for name, value, instead in broken_rules(rules, values)
    ]


def _flag(name: str, value: Any = True) -> str:
    """Return a flag as it is written on the command line."""
    shown = "" if value is True else f" {getattr(value, 'name', value)}"
    return "--" + name.replace("_", "-") + shown


def _dest(option: str) -> str:
    """Return the name of an option of `Strategy` among the parsed arguments."""
    return f"burst_{option}"


def _set_options(args: Any) -> list[str]:
    """Return the names of --burst-* flags that were given other values than their defaults."""
    defaults = vars(add_arguments(argparse.ArgumentParser()).parse_args([]))
    return [name for name, default in defaults.items() if getattr(args, name, default) != default]


def _version_at_hand() -> Version:
    """Return the version of the Megatron-core that has read the arguments."""
    return parse_version(sys.modules["megatron.core"].__version__)


def parsed_arguments() -> Any:
    """Return what Megatron's parser found; None if it did not run."""
    global_vars: Any = sys.modules.get("megatron.training.global_vars")
    return getattr(global_vars, "_GLOBAL_ARGS", None)


def parsed_layout() -> str:
    """Return the layout that Megatron's parsed arguments ask for, or the usual one."""
    return str(getattr(parsed_arguments(), _dest("layout"), Strategy.layout))


def parsed_strategy() -> Strategy | None:
    """Return the strategy that Megatron's parsed arguments ask for; None if its parser did not run."""
    args = parsed_arguments()
    if args is None or not hasattr(args, _dest(_OPTIONS[0].name)):
        return None
    given = {option.name: _without_list(getattr(args, _dest(option.name))) for option in _OPTIONS}
    profile = getattr(args, _PROFILE, None)
    if profile is None:
        return Strategy(**given)
    usual = {option.name: option.default for option in _OPTIONS}
    given = {name: x for name, x in given.items() if x != usual[name]}
    return Strategy.from_profile(profile, model=_attention_sizes(args), **given)


def _attention_sizes(args: Any) -> dict[str, int]:
    """Return the attention of one rank, as far as the arguments say it; see `Strategy.from_profile`.

    Keys and values of latent attention differ in head dim, of which the mean has the same bytes and work.
    """
    heads = getattr(args, "num_attention_heads", None)
    if heads is None:
        return {}
    tensor = args.tensor_model_parallel_size
    is_latent = getattr(args, "multi_latent_attention", False)
    groups = args.num_query_groups if args.group_query_attention and not is_latent else heads
    head_dim = args.kv_channels or args.hidden_size // heads
    if is_latent:
        head_dim = (args.qk_head_dim + args.qk_pos_emb_head_dim + args.v_head_dim) // 2
    sizes = {"q_heads": heads // tensor, "kv_heads": max(1, groups // tensor), "head_dim": head_dim}
    return sizes if args.seq_length is None else {**sizes, "seq": args.seq_length}


def _without_list(value: Any) -> Any:
    """Return the only item of a list of one, a tuple for a longer list, and any other value unchanged."""
    if not isinstance(value, list):
        return value
    return value[0] if len(value) == 1 else tuple(value)
