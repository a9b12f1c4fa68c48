"""What a module held when it ran, for those who run it again in a backward pass and must find it the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ModuleState"]

# Attributes that change what a module computes; the last four are those of layers of PEFT, and of others like it.
_ATTRIBUTES = ("training", "merged", "merged_adapters", "disable_adapters", "active_adapters")


@dataclass(frozen=True)
class ModuleState:
    """The parameters of a module and the attributes that say how it and those within it compute."""

    module: torch.nn.Module
    parameters: Mapping[str, Tensor]
    attributes: dict[str, object]

    @classmethod
    def of(cls, module: torch.nn.Module, parameters: Iterable[Tensor]) -> ModuleState:
        """Return that of `module`, as far as its parameters are among `parameters`: others are not run in chunks."""
        listed = {id(each) for each in parameters}
        held = {name: each for name, each in module.named_parameters() if id(each) in listed}
        return cls(module, held, _attributes(module))

    def check(self) -> None:
        """Raise RuntimeError if the module holds another parameter, or computes in another way, than it did."""
        replaced = [name for name, each in self.parameters.items() if _found(self.module, name) is not each]
        found = _attributes(self.module)
        changed = [
            f"{name}={found.get(name)!r}, which was {self.attributes.get(name)!r} in the forward pass"
            for name in (self.attributes | found)
            if found.get(name) != self.attributes.get(name)
        ]
        if not replaced and not changed:
            return
        what = f"another parameter {replaced[0]} than in the forward pass" if replaced else changed[0]
        raise RuntimeError(
            f"{type(self.module).__name__} runs in chunks, and again in the backward pass, but has {what}; run "
            "backward before that changes, and within torch.func.functional_call"
        )


def _found(module: torch.nn.Module, name: str) -> object:
    """Return what code of a module finds under the full name of a parameter; under FSDP that may be a view."""
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _attributes(module: torch.nn.Module) -> dict[str, object]:
    """Return the attributes of a module and of those within it, by their full names."""
    found: dict[str, object] = {}
    for path, each in module.named_modules():
        for name in _ATTRIBUTES:
            value = getattr(each, name, None)
            if isinstance(value, (bool, str, list)):  # in other modules it may be a method
                found[f"{path}.{name}" if path else name] = [*value] if isinstance(value, list) else value
    return found
