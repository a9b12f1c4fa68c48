"""Adapters of PEFT: which kinds a model has, and which of them cannot run on a ring, or in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from burst_plugin.huggingface.walks import modules_in

_AROUND_HOOKS = {"ADALORA": "AdaLoRA", "ADAPTION_PROMPT": "LLaMA-Adapter"}  # call forward, not the model itself
_BY_ROW = {"POLY": "Poly", "XLORA": "X-LoRA"}  # weigh their parts for each row or token of the whole batch
_LAYERS = "peft.tuners."  # and then the kind, of modules of Python that define adapter layers
_DROPS_PARTS = {  # kinds of adapters that leave parts out at random, once per module, by options
    "LOHA": ("module_dropout", "rank_dropout"),
    "LOKR": ("module_dropout", "rank_dropout"),
    "OFT": ("module_dropout",),
    "BOFT": ("boft_dropout",),
}
_CHECKED = "_burst_plugin_adapters"  # of a model: its adapters that were found to run on a ring


def is_peft(module: torch.nn.Module) -> bool:
    """Return whether a module is a model of PEFT, or one into which PEFT has put adapters."""
    return isinstance(getattr(module, "peft_config", None), dict)


def adapter_kinds(model: torch.nn.Module) -> set[str]:
    """Return the kinds of the adapters in a model, the values of PEFT's `PeftType`, such as "LORA".

    LLaMA-Adapter leaves no configuration in the model, only its layers.
    """
    of_layers = {module.removeprefix(_LAYERS).partition(".")[0].upper() for module in _python_modules(model)}
    return of_layers | {_kind(config) for config in _configs(model)}


def _kind(config: Any) -> str:
    return str(getattr(getattr(config, "peft_type", None), "value", ""))


def problems_of_peft(model: torch.nn.Module) -> list[str]:
    """Return the reasons why a model's adapters cannot run on a ring: they add, look for or average tokens."""
    configs = [*_configs(model)]
    reasons = []
    if any(getattr(config, "is_prompt_learning", False) for config in configs):
        reasons.append("PEFT prompt learning puts tokens before each rank's shard; use LoRA")
    if any(getattr(config, "alora_invocation_tokens", None) for config in configs):
        reasons.append("PEFT's aLoRA looks for its invocation tokens in each rank's shard; use plain LoRA")
    kinds = adapter_kinds(model)
    reasons += [
        f"PEFT's {name} calls the model's forward past the hooks that a ring needs; use LoRA"
        for kind, name in _AROUND_HOOKS.items()
        if kind in kinds
    ]
    if "LILY" in kinds:
        reasons.append("PEFT's Lily weighs its experts by the mean over the tokens of each rank's shard; use LoRA")
    if any(getattr(getattr(config, "velora_config", None), "init_type", "random") != "random" for config in configs):
        reasons.append(
            "PEFT's VeLoRA projects on the mean over the tokens of each rank's shard; use init_type='random'"
        )
    return reasons + _problems_of_dropout(configs)


def _problems_of_dropout(configs: Sequence[Any]) -> list[str]:
    """Return the reasons why ranks would run other parts of adapters for tokens of one sequence."""
    return [
        f"PEFT's {name}={getattr(config, name)} of {type(config).__name__} leaves out whole parts of an adapter at "
        f"random, and on every rank others; use {name}=0.0"
        for config in configs
        for name in _DROPS_PARTS.get(_kind(config), ())
        if getattr(config, name, 0.0)
    ]


def check_adapters(model: torch.nn.Module) -> None:
    """Raise ValueError if a model has adapters that cannot run on a ring: some may be added after it was prepared.

    They are examined only if they are others than in the forward before.
    """
    adapters = _python_modules(model), list(_configs(model))
    if adapters == getattr(model, _CHECKED, (set(), [])):
        return
    reasons = problems_of_peft(model)
    if reasons:
        raise ValueError(f"{type(model).__name__} has adapters that cannot run on a ring: {'; '.join(reasons)}")
    setattr(model, _CHECKED, adapters)


def refuse_in_chunks(model: torch.nn.Module, option: str) -> None:
    """Raise ValueError if a model has adapters that need whole batches, and cannot run again in the backward pass.

    option: the name of the option that runs modules in chunks, for the message.
    """
    names = sorted(name for kind, name in _BY_ROW.items() if kind in adapter_kinds(model))
    if names:
        raise ValueError(
            f"{option} is not supported with PEFT's {' and '.join(names)}, which hands its layers weights for whole "
            f"batches, by hooks of the forward pass alone; use {option}=0, or LoRA"
        )


def _configs(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the configurations of all adapters in a model."""
    for module in modules_in(model):
        # A module takes ten times as long to say that it has no such attribute.
        if ("peft_config" in vars(module) or hasattr(type(module), "peft_config")) and is_peft(module):
            configs: Any = module.peft_config
            yield from configs.values()


def _python_modules(model: torch.nn.Module) -> set[str]:
    """Return the names of PEFT's modules of Python that have the classes of a model's adapter layers."""
    return {name for name in {type(module).__module__ for module in modules_in(model)} if name.startswith(_LAYERS)}
