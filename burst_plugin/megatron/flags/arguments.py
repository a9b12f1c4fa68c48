"""The `--burst-*` flags of Megatron's argument parser, and the arguments that it has read."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from burst_plugin.frameworks.options import Rule, broken_rules, flag_keywords
from burst_plugin.strategy import Strategy
from burst_plugin.strategy.presets import PRESETS, with_preset

RESETS, PACKS = "reset_attention_mask", "dataloader_inter_document_masking"  # they keep documents apart
_PROFILE, _PRESET, _GIVEN = "burst_profile", "burst_preset", "burst_flags_given"

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
# Arguments whose flags have another name, or that programs set without a flag.
_UNLIKE: Mapping[str, str] = MappingProxyType(
    {
        "cpu_offloading": "--cpu-offloading-num-layers",
        "fp4": "--fp4-format {}",
        "fp8": "--fp8-format {}",
        "gtp_weight_remat_size": "--tensor-parallel-num-weight-shards",  # their number over that of ranks
        "use_inference_optimized_layers": "--transformer-impl inference_optimized",
        "variable_seq_lengths": "variable_seq_lengths={}",
        "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank {}",
    }
)
_OPTIONS = tuple(option for option in fields(Strategy) if option.name not in _WITHOUT_FLAG)


def written(option: str) -> str:
    """Return in Markdown how Megatron's users set an option of `Strategy`: its flag, or what takes the flag's place.

    option: the name of a field of `Strategy`. A dash is returned for options that users of Megatron cannot set.
    """
    if option in _WITHOUT_FLAG:
        return _WITHOUT_FLAG[option]
    flag = f"`{flag_of(_dest(option))}`"
    return f"`{_OVERRIDDEN_BY[option]}`, else {flag}" if option in _OVERRIDDEN_BY else flag


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add an argument group with all `--burst-*` flags of `Strategy`'s options to `parser`, and return the parser.

    Raises argparse.ArgumentError if the flags were added already.
    """
    group = parser.add_argument_group(
        "burst attention",
        "used by layers whose --cp-comm-type is burst (burst_plugin); `burst plan` estimates what suits a cluster",
    )
    for option in _OPTIONS:
        keywords = flag_keywords(option)
        keywords["action"] = _Switch if "action" in keywords else _Value
        if option.name in _OVERRIDDEN_BY:
            keywords["help"] = f"unless {_OVERRIDDEN_BY[option.name]} is given: {keywords['help']}"
        group.add_argument(flag_of(_dest(option.name)), **keywords)
    text = "a published system by its name, as options, over which other flags go (docs/systems.md)"
    group.add_argument(flag_of(_PRESET), choices=list(PRESETS), help=text)
    text = (
        "what `burst check` wrote here: the ring is planned by it for the shapes of the model, around options whose "
        "flags are given"
    )
    group.add_argument(flag_of(_PROFILE), metavar="FILE", help=text)
    return parser


class _Noted(argparse.Action):
    """Notes among the arguments that a flag was given, which its value does not show if that is the default."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, _GIVEN, (*getattr(namespace, _GIVEN, ()), self.dest))
        super().__call__(parser, namespace, values, option_string)


class _Value(_Noted, argparse._StoreAction):
    """A flag with a value."""


class _Switch(_Noted, argparse.BooleanOptionalAction):
    """A flag without a value."""


def resets_attention_mask() -> bool:
    """Return whether the ring keeps documents apart by end-of-document tokens, as `--reset-attention-mask` asks.

    False for a context-parallel size of 1, and where no layer has burst attention.
    """
    args = parsed_arguments()
    return bool(getattr(args, RESETS, False)) and args.context_parallel_size > 1 and burst_is_possible()


def cuts_documents_as_one() -> bool:
    """Return whether Megatron cuts packed documents over ranks as if they were one sequence.

    It does with `--dataloader-inter-document-masking`, but not with `--sft` at the same time.
    """
    args = parsed_arguments()
    return bool(getattr(args, PACKS, False)) and not getattr(args, "sft", False)


def burst_is_possible() -> bool:
    """Return whether `--cp-comm-type` names burst for any layer; True if Megatron's parser did not run."""
    args = parsed_arguments()
    return args is None or "burst" in (getattr(args, "cp_comm_type", None) or ())


def burst_is_requested() -> bool:
    """Return whether Megatron's parser ran, and `--cp-comm-type` names burst for any layer."""
    return parsed_arguments() is not None and burst_is_possible()


def flag_of(name: str, value: Any = True) -> str:
    """Return a flag as it is written on the command line, such as "--burst-layout striped".

    Args:
        name: of the attribute among parsed arguments, such as "burst_layout".
        value: written after the flag, the items of a list one by one; True for the flag alone.
    """
    if name in _UNLIKE:
        return _UNLIKE[name].format(value)
    shown = " ".join(map(str, value)) if isinstance(value, list) else getattr(value, "name", value)
    return "--" + name.replace("_", "-") + ("" if value is True else f" {shown}")


def option_of(name: str, value: Any = None) -> str:
    """Return a field of TransformerConfig as its user writes it: "--flag value", or else "name=value".

    It is a flag where Megatron's parser ran and has it. name: of the field. value: None for the flag or the name
    alone.
    """
    if hasattr(parsed_arguments(), name):
        return flag_of(name, True if value is None else value)
    return name if value is None else f"{name}={value!r}"


def in_flags(text: str) -> str:
    """Return an error of `Strategy` with flags in place of options: "--burst-parts 1 2 3" for "parts=(1, 2, 3)".

    Options that `--burst-preset` has set, and no flag of their own, are followed by the preset.
    """
    args = parsed_arguments()
    preset: Any = getattr(args, _PRESET, None)
    of_preset = PRESETS[preset].options.keys() - _options_of(args).keys() if preset in PRESETS else ()

    def flag(match: re.Match[str]) -> str:
        name, value = match.groups()
        if value is None:  # names of one word are also words of the text
            return flag_of(_dest(name)) if "_" in name else match[0]
        source = f" (set by {flag_of(_PRESET, preset)})" if name in of_preset else ""
        return flag_of(_dest(name), value.strip("()'").replace(",", "")) + source

    names = "|".join(option.name for option in _OPTIONS)
    return re.sub(rf"\b({names})\b(?:=(\([^)]*\)|'[^']*'|[^\s;,]+))?", flag, text)


def unsupported(rules: Mapping[str, Rule], options: Any) -> list[str]:
    """Return a sentence for each option that breaks its rule: the option with its value, and what to write instead.

    Args:
        rules: by the name of an option.
        options: a TransformerConfig or Megatron's parsed arguments; options that it lacks break no rule.
    """
    return [
        f"{option_of(name, value)} is not supported: {instead}"
        for name, value, instead in broken_rules(rules, options)
    ]


def _dest(option: str) -> str:
    """Return the name of an option of `Strategy` among the parsed arguments."""
    return f"burst_{option}"


def options_that_are_set(args: Any) -> list[str]:
    """Return the names of burst arguments, such as "burst_layout", whose values in `args` are not their defaults."""
    defaults = vars(add_arguments(argparse.ArgumentParser()).parse_args([]))
    return [name for name, default in defaults.items() if getattr(args, name, default) != default]


def parsed_arguments() -> Any:
    """Return the arguments that Megatron's parser has read; None if it did not run."""
    global_vars: Any = sys.modules.get("megatron.training.global_vars")
    return getattr(global_vars, "_GLOBAL_ARGS", None)


def parsed_layout() -> str:
    """Return the layout that Megatron's parsed arguments ask for, or else the default layout of `Strategy`."""
    return written_layout(parsed_arguments()) or Strategy.layout


def written_layout(args: Any) -> str | None:
    """Return the layout that `--burst-layout` or `--burst-preset` asks for in parsed arguments, or else None."""
    layout: str | None = with_preset(_options_of(args)).get("layout")
    return layout


def parsed_strategy() -> Strategy | None:
    """Return the strategy that Megatron's parsed `--burst-*` flags ask for, with `--burst-profile` if given.

    None if Megatron's parser did not run, or had no such flags. A file for `--yaml-cfg` may have some of them alone.
    """
    args = parsed_arguments()
    if not any(hasattr(args, name) for name in (*(_dest(option.name) for option in _OPTIONS), _PRESET, _PROFILE)):
        return None
    profile = getattr(args, _PROFILE, None)
    if profile is None:
        return strategy_of(args)
    return Strategy.from_profile(profile, model=_attention_sizes(args), **_options_of(args))


def strategy_of(args: Any) -> Strategy:
    """Return the strategy that the `--burst-*` flags among parsed arguments ask for, without `--burst-profile`."""
    return Strategy.of(None, **_options_of(args))


def _options_of(args: Any) -> dict[str, Any]:
    """Return the options of `Strategy`, and the preset, whose flags were given, or whose values are no defaults."""
    noted = getattr(args, _GIVEN, ())
    options = {}
    for option in _OPTIONS:
        value = _without_list(getattr(args, _dest(option.name), option.default))
        if value is False and isinstance(option.default, str):
            value = "off"  # which YAML reads as False
        if _dest(option.name) in noted or value != option.default:
            options[option.name] = value
    preset = getattr(args, _PRESET, None)
    return options if preset is None else {**options, "preset": preset}


def _attention_sizes(args: Any) -> dict[str, int]:
    """Return the attention of one rank, as far as the arguments say it; see `Strategy.from_profile`.

    Keys and values of latent attention differ in head dim; with their mean, bytes and work are the same.
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
