"""What Megatron-LM's scripts make of flags that describe a model, where there is only megatron-core.

Most of these flags are made by Megatron out of the fields of TransformerConfig, with the metadata that the fields
bring along, and so are they here. The others are written out. Where there is a checkout, a test compares all of this
with the scripts' own parser.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import typing
from typing import Any

import torch


def parse(words: list[str]) -> tuple[dict[str, Any], argparse.Namespace]:
    """Return the fields of TransformerConfig that `words` set, and all that they set.

    Raises SystemExit for a flag that is not known.
    """
    from megatron.core.transformer import TransformerConfig

    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, allow_abbrev=False)
    names = _add_fields(parser, TransformerConfig)
    for flag, kind in _VALUES.items():
        parser.add_argument(flag, type=kind)
    for flag in _SWITCHES:
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--no-bias-gelu-fusion", action="store_false", dest="bias_gelu_fusion")
    parser.add_argument(
        "--no-yarn-correction-range-round-to-int", action="store_false", dest="yarn_correction_range_round_to_int"
    )
    args = parser.parse_args(words)
    fields = {name: value for name, value in vars(args).items() if name in names}
    fields |= {name: value for name, value in vars(args).items() if name in _FIELDS}
    if "num_experts" in args:
        fields["num_moe_experts"] = args.num_experts
    biases = fields.get("add_bias_linear", True)
    fields["bias_activation_fusion"] = "swiglu" in args or (biases and "bias_gelu_fusion" not in args)
    if "swiglu" in args:
        fields |= {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True}
    if "quick_geglu" in args:
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        fields |= {"activation_func": quick_gelu, "gated_linear_unit": True}
    return fields, args


def _pattern(text: str) -> int | list[int]:
    """Evaluate "([1]*3+[0])" with nothing but lists of numbers, + and *."""
    if text.isdigit():
        return int(text)
    allowed = (ast.Expression, ast.BinOp, ast.Add, ast.Mult, ast.List, ast.Constant, ast.Load)
    assert all(isinstance(node, allowed) for node in ast.walk(ast.parse(text, mode="eval")))
    value: list[int] = eval(text)
    return value


def _pair(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


# Fields of TransformerConfig whose flags the scripts write out.
_FIELDS = ("window_size", "window_attn_skip_freq", "num_query_groups")
_VALUES: dict[str, Any] = {
    "--vocab-size": int,
    "--window-size": _pair,
    "--window-attn-skip-freq": _pattern,
    "--position-embedding-type": str,
    "--rotary-base": int,
    "--rotary-scaling-factor": float,
    "--mscale": float,
    "--mscale-all-dim": float,
    "--yarn-original-max-position-embeddings": int,
    "--yarn-beta-fast": float,
    "--yarn-beta-slow": float,
    "--num-experts": int,
}
_SWITCHES = (
    "--group-query-attention",
    "--use-rope-scaling",
    "--swiglu",
    "--quick-geglu",
    "--untie-embeddings-and-output-weights",
    "--yarn-correction-range-round-to-int",
)
_WRITTEN_OUT = {*_VALUES, *_SWITCHES}


def _add_fields(parser: argparse.ArgumentParser, config: Any) -> set[str]:
    """Add a flag for each field that has one of its own kind; return the names of these fields."""
    hints, added = typing.get_type_hints(config), set()
    for field in dataclasses.fields(config):
        meta = field.metadata.get("argparse_meta", {})
        kind = hints[field.name]
        if typing.get_origin(kind) is typing.Literal:
            kind = type(typing.get_args(kind)[0])
        inner = [part for part in typing.get_args(kind) if part is not type(None)]
        kind = meta.get("type", inner[0] if len(inner) == 1 else kind)
        flags = meta.get("arg_names", ["--" + field.name.replace("_", "-")])
        if _WRITTEN_OUT & set(flags) or kind not in (int, float, str, bool):
            continue
        if kind is bool:
            action = "store_false" if field.default else "store_true"
            if field.default and "arg_names" not in meta:
                flags = ["--no-" + field.name.replace("_", "-")]
            parser.add_argument(*flags, action=action, dest=field.name)
        else:
            parser.add_argument(*flags, type=kind, dest=field.name)
        added.add(field.name)
    return added
