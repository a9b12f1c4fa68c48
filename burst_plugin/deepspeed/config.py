"""The "burst_attention" block of a DeepSpeed configuration, strictly parsed; and the options that clash with it."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from burst_plugin.checks import did_you_mean
from burst_plugin.frameworks.options import Rule, broken_rules, off
from burst_plugin.strategy import AUTO, Strategy

BLOCK = "burst_attention"
TOKEN_MEAN, MEAN_OF_RANKS = "token_mean", "mean_of_ranks"
_LOSSES = (TOKEN_MEAN, MEAN_OF_RANKS, AUTO)
_OWN_KEYS = ("enabled", "context_parallel_size", "loss", "profile", "seq_length")
_OTHER_BLOCKS = ("sparse_attention",)  # of DeepSpeed, with a similar name


class RepeatedKeyError(ValueError):
    """The error for a configuration that has a key twice in one block, so that one value would be taken silently."""


def loads(text: str) -> Any:
    """Parse a DeepSpeed configuration in JSON; comments and trailing commas are allowed if hjson is installed.

    DeepSpeed, which parses configurations with hjson, allows them, too.

    Raises RepeatedKeyError for a key that comes twice in one block, ValueError for a text that is not JSON.
    """
    if importlib.util.find_spec("hjson") is None:
        return json.loads(text, object_pairs_hook=_once)
    import hjson

    return hjson.loads(text, object_pairs_hook=_once)


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    repeated = [f'"{key}"' for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if repeated:
        raise RepeatedKeyError(
            f"the DeepSpeed configuration has {', '.join(repeated)} more than once in one block; leave one of each"
        )
    return dict(pairs)


@dataclass(frozen=True)
class Block:
    """The block "burst_attention" of a DeepSpeed configuration, parsed.

    enabled: whether burst attention is on.
    context_parallel_size: the number of ranks that share a sequence; "auto" takes the size of an `mpu` or
        Accelerate's `sp_size`, else all ranks.
    strategy: the options of attention, from all other keys. With `preset`, the name of a published system, its
        options, which others override. With `profile`, the path of a file that `burst check` wrote, the strategy is
        planned around these keys, for sequences of `seq_length` tokens.
    loss: "token_mean", one mean over the tokens of all rings, "mean_of_ranks", each ring's own mean, or "auto", which
        `loss_of` resolves.
    """

    enabled: bool
    context_parallel_size: int | str
    strategy: Strategy
    loss: str = AUTO

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Block | None:
        """Parse the block "burst_attention" of a DeepSpeed configuration; return None if there is no such block.

        Raises ValueError for keys and values that are not valid, naming the nearest valid key.
        """
        if BLOCK not in config:
            return None
        block = config[BLOCK]
        if not isinstance(block, Mapping):
            raise ValueError(f'"{BLOCK}": got {block!r}, expected a block such as {{"enabled": true}}')
        valid = (*_OWN_KEYS, "preset", *(field.name for field in fields(Strategy)))
        unknown = [f'"{key}"{_nearest(key, valid)}' for key in block if key not in valid]
        if unknown:
            raise ValueError(f'"{BLOCK}": unknown key {", ".join(unknown)}; valid keys: {", ".join(valid)}')
        enabled = block.get("enabled", True)
        if not isinstance(enabled, bool):
            raise ValueError(f'"{BLOCK}": enabled={enabled!r} is not valid; use true or false')
        size = block.get("context_parallel_size", AUTO)
        if size != AUTO and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(
                f'"{BLOCK}": context_parallel_size={size!r} is not valid; use a positive number or "auto"'
            )
        loss = block.get("loss", AUTO)
        if loss not in _LOSSES:
            raise ValueError(f'"{BLOCK}": loss={loss!r} is not valid; use one of: {", ".join(_LOSSES)}')
        try:
            options = {key: value for key, value in block.items() if key not in _OWN_KEYS}
            sizes = {"seq": block["seq_length"]} if "seq_length" in block else {}
            if "profile" in block:
                strategy: Strategy = Strategy.from_profile(block["profile"], model=sizes, **options)
            elif sizes:
                raise ValueError(
                    f"seq_length={sizes['seq']!r} has no effect without a profile: add "
                    '"profile", or leave seq_length out'
                )
            else:
                strategy = Strategy.of(None, **options)
        except ValueError as error:
            raise ValueError(f'"{BLOCK}": {_in_json(str(error))}') from error
        return cls(enabled, size, strategy, loss)

    def loss_of(self, size: int) -> str:
        """Return "token_mean" or "mean_of_ranks": which mean the losses of rings of `size` ranks become.

        "token_mean" is one mean over the tokens of all rings, "mean_of_ranks" each ring's own mean. If `loss` is
        "auto", it is the first on rings of several ranks. On rings of one rank it is the second, which is what
        DeepSpeed does with data-parallel ranks, so that nothing changes.
        """
        return (TOKEN_MEAN if size > 1 else MEAN_OF_RANKS) if self.loss == AUTO else self.loss

    def size(self, world: int, others: Iterable[int] = ()) -> int:
        """Return the context-parallel size for a job of `world` ranks.

        `others` are sizes that an `mpu` or Accelerate asks for. "auto" takes that size, or else `world`.

        Raises ValueError if the sizes contradict each other, or do not divide `world`.
        """
        others = set(others)
        sizes = others if self.context_parallel_size == AUTO else {int(self.context_parallel_size), *others}
        if len(sizes) > 1:
            raise ValueError(
                f'"{BLOCK}": context_parallel_size={self.context_parallel_size} contradicts {sorted(others)}, which '
                'an mpu or sp_size of ParallelismConfig sets; write the same number, or "auto"'
            )
        size = next(iter(sizes), world)
        if world % size:
            raise ValueError(
                f'"{BLOCK}": context_parallel_size={size} does not divide the {world} ranks; take a divisor, '
                f"or start a multiple of {size} ranks"
            )
        return size


def near_misses(config: Mapping[str, Any]) -> list[str]:
    """Return the dotted paths of keys that look like misspelt or misplaced "burst_attention" blocks.

    [] if the block is at the top level, where it belongs. DeepSpeed ignores keys that it does not know.
    """
    return [] if BLOCK in config else list(_similar(config, ""))


def _similar(config: Mapping[str, Any], outer: str) -> Iterator[str]:
    for key, value in config.items():
        name = str(key).lower().replace("-", "_")
        if key not in _OTHER_BLOCKS and (name.startswith("burst") or get_close_matches(name, [BLOCK], 1, 0.75)):
            yield f"{outer}{key}"
        elif isinstance(value, Mapping):
            yield from _similar(value, f"{outer}{key}.")


def why_off(config: Mapping[str, Any]) -> str:
    """Return a sentence that says why burst attention is off in a configuration, and what to write instead.

    There is no block "burst_attention", or only one by another name or in another place, or it has "enabled": false.
    """
    if BLOCK in config:
        return f'"{BLOCK}" in the DeepSpeed configuration has "enabled": false; write true'
    similar = "".join(f', only "{key}"' for key in near_misses(config))
    return (
        f'the DeepSpeed configuration has no block "{BLOCK}" at its top level{similar}; write '
        f'"{BLOCK}": {{"enabled": true}} there'
    )


def warn_of_near_misses(config: Mapping[str, Any]) -> None:
    """Warn of each key that looks like a misspelt or misplaced block "burst_attention", so that it stays off."""
    for key in near_misses(config):
        warnings.warn(
            f'the DeepSpeed configuration has "{key}", but no "{BLOCK}" at its top level, so burst attention stays '
            f'off: to switch it on, write "{BLOCK}" at the top level',
            stacklevel=4,
        )


def _nearest(key: object, valid: tuple[str, ...]) -> str:
    return did_you_mean(str(key).lower().replace("-", "_"), valid, 0.5, '"')


def _in_json(text: str) -> str:
    """Return an error of `Strategy` with values as JSON has them."""
    return text.replace("True or False", "true or false").replace("or math.inf for no such line", "such as 60")


def _one_at_most(value: Any) -> bool:
    try:
        return int(value) <= 1  # DeepSpeed also takes "2"
    except (TypeError, ValueError):
        return False


# Options of DeepSpeed by their path in the configuration.
REFUSED: Mapping[str, Rule] = MappingProxyType(
    {
        "gradient_allreduce_op": Rule(
            lambda op: str(op).lower() != "sum", 'use "average": losses are scaled for gradients that are averaged'
        ),
        "data_parallel_size": Rule(_one_at_most, "it makes a mesh; leave it out, it follows from the ranks"),
        "tensor_parallel.autotp_size": Rule(_one_at_most, "tensor parallelism has not been tried; leave it out"),
        "expert_parallel.enabled": Rule(off, "expert parallelism has not been tried; switch it off"),
        "compile.passes": Rule(
            lambda passes: isinstance(passes, list | tuple) and "autosp" not in passes,
            'give a list of names without "autosp": one of the two is enough',
        ),
        "hybrid_engine.enabled": Rule(off, "it replaces attention layers; switch it off"),
        "zero_optimization.zero_quantized_gradients": Rule(
            off, "gradients of any type would be read as float16 there; switch it off"
        ),
        "data_efficiency.data_sampling.curriculum_learning.enabled": Rule(
            off, "its sampler asks for data-parallel groups that rings do not have; switch it off"
        ),
        "data_efficiency.data_sampling.dynamic_batching.enabled": Rule(
            off, "its sampler asks for data-parallel groups that rings do not have; switch it off"
        ),
        "compile.deepcompile": Rule(off, "it asks for data-parallel groups that rings do not have; switch it off"),
        "checkpoint.writer": Rule(lambda writer: writer is None, "it has not been tried; leave it out"),
        "zero_optimization.mics_shard_size": Rule(_one_at_most, "MiCS has not been tried; use ZeRO 3 or hpZ"),
        "data_efficiency.data_routing.random_ltd.enabled": Rule(off, "it drops tokens inside layers; switch it off"),
    }
)


def conflicts(config: Mapping[str, Any], size: int) -> list[str]:
    """Return why options of a DeepSpeed configuration clash with rings of `size` ranks, a text for each option."""
    values = {path: value for path in REFUSED if (value := _at(config, path)) is not None}
    reasons = [
        f"{path}={value!r} does not go together with {BLOCK}: {instead}"
        for path, value, instead in broken_rules(REFUSED, values)
    ]
    blocks = dict.fromkeys(path.split(".")[0] for path in REFUSED if "." in path)
    for name in blocks:
        if not isinstance(config.get(name), Mapping | bool | None):  # zero_optimization may be true
            reasons.append(f"{name}={config[name]!r} is not valid; expected a block, {{...}}")
    ulysses = config.get("sequence_parallel_size")
    if ulysses not in (None, 1, size):
        reasons.append(
            f"sequence_parallel_size={ulysses!r} (Ulysses) contradicts context_parallel_size={size} of {BLOCK}: "
            "leave it out"
        )
    if ulysses is not None and config.get("data_parallel_size") == 1:
        reasons.append(
            "data_parallel_size=1 beside sequence_parallel_size makes a mesh, which does not go together with "
            f"{BLOCK}: leave both out"
        )
    return reasons


def _at(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at keys joined by dots; None if there is none."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
