"""A record of all that a function reads in a forward pass, which a backward pass must find unchanged to run it again.

Autograd saves the tensors that an operation needs, and raises an error if they have been modified in place by the
backward pass. A function that runs again reads what its modules hold by then, so parameters (trained or frozen),
buffers, the attributes that say how modules compute, and hooks must still be as they were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

# Attributes that change what a module computes; from `merged` on they belong to layers of PEFT and its like.
_ATTRIBUTES = ("training", "p", "merged", "merged_adapters", "disable_adapters", "active_adapters", "scaling")

_HARMLESS = {f"{__name__.partition('.')[0]}.", "torch.distributed."}


def leave_out_hooks(*packages: str) -> None:
    """Let hooks of packages change between a forward pass and its backward pass, since they change no numbers.

    packages: the beginnings of the names of the modules that define the hooks.
    """
    _HARMLESS.update(packages)


@dataclass(frozen=True)
class Snapshot:
    """A record of all that a function reads in a forward pass, to find out later whether it has changed.

    versions: (description, tensor, number of its modifications in place) for each tensor.
    modules: for each module, the tensors that it holds, the attributes that say how it computes, and hooks.
    """

    versions: tuple[tuple[str, Tensor, int], ...]
    modules: tuple[_ModuleState, ...]

    @classmethod
    def of(
        cls, function: Callable[..., Any], tensors: Iterable[Tensor], module: torch.nn.Module | None = None
    ) -> Snapshot:
        """Take a snapshot of the tensors and attributes that `function` reads, before it runs.

        Args:
            function: a module, or a function whose closure, defaults, globals and object are searched.
            tensors: further tensors that it reads, such as listed parameters. Trained parameters of modules that are
                not among them are left out, since the function does not use them.
            module: the only module whose `forward` the function runs, but not the module's own hooks; by default it
                calls all modules that it refers to.
        """
        modules, referenced = _referenced(function)
        calls, modules = module is None, modules if module is None else [module]
        listed = list(tensors)
        states = tuple(_ModuleState.of(each, {id(x) for x in listed}, calls=calls) for each in modules)
        named = [(f"{state.kind(name)} {name}", x) for state in states for name, x in state.tensors.items()]
        named += [("a tensor", x) for x in (*listed, *referenced)]
        unique = {id(x): (what, x, x._version) for what, x in reversed(named) if not x.is_inference()}
        return cls(tuple(unique.values()), states)

    def check(self) -> None:
        """Raise RuntimeError if a tensor or a module has changed since the snapshot; the message names it."""
        for state in self.modules:
            state.check()
        for description, tensor, version in self.versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"{description} {list(tensor.shape)} of what runs in chunks, and again in the backward pass, was "
                    f"modified in place since the forward pass began: it is at version {tensor._version}, expected "
                    f"version {version}; run backward before the optimizer's step, and before anything else changes "
                    "it. Modules that change their own tensors cannot run in chunks"
                )


def version_of(x: Tensor) -> int:
    """Return the number of times that a tensor was modified in place; 0 for a tensor of inference mode."""
    return 0 if x.is_inference() else x._version


@dataclass(frozen=True)
class _ModuleState:
    """The tensors that a module and those within it hold, by their full names, and all their attributes and hooks.

    calls: whether the module is called, with its own hooks, and not just its `forward`.
    """

    module: torch.nn.Module
    tensors: Mapping[str, Tensor]
    attributes: Mapping[str, object]
    hooks: Mapping[str, list[object]]
    calls: bool

    @classmethod
    def of(cls, module: torch.nn.Module, listed: set[int], *, calls: bool) -> _ModuleState:
        """Return the state of a module, without its trained parameters whose ids are not `listed`."""
        held = {name: x for name, x in _tensors(module).items() if id(x) in listed or not x.requires_grad}
        return cls(module, held, _attributes(module), _hooks(module, calls), calls)

    def kind(self, name: str) -> str:
        """Return "buffer" or "parameter" for the tensor of a name, for an error message."""
        return "buffer" if name in dict(self.module.named_buffers(remove_duplicate=False)) else "parameter"

    def check(self) -> None:
        """Raise RuntimeError if the module holds another tensor, or computes in another way, than it did."""
        attributes, hooks = _attributes(self.module), _hooks(self.module, self.calls)
        changes = [
            f"another {self.kind(name)} {name} than in the forward pass"
            for name, tensor in self.tensors.items()
            if _held(self.module, name) is not tensor
        ]
        changes += [
            f"{name}={attributes.get(name)!r}, which was {self.attributes.get(name)!r} in the forward pass"
            for name in {**self.attributes, **attributes}
            if attributes.get(name) != self.attributes.get(name)
        ]
        changes += [
            f"other hooks on {name or 'itself'} than in the forward pass"
            for name in {**self.hooks, **hooks}
            if hooks.get(name) != self.hooks.get(name)
        ]
        if changes:
            raise RuntimeError(
                f"{type(self.module).__name__} runs in chunks, and again in the backward pass, but has {changes[0]}; "
                "run backward before that changes: within torch.func.functional_call, and while the hooks are "
                "registered; or use no chunks"
            )


def _tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, each under all of its names."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(module.named_buffers(remove_duplicate=False))}


def _held(module: torch.nn.Module, name: str) -> object:
    """Return the object that code finds under the full name of a tensor; FSDP puts views beside the parameters.

    ZeRO-3 would gather a parameter that is looked up by `getattr`.
    """
    *path, last = name.split(".")
    owner: torch.nn.Module | None = module
    for part in path:
        owner = None if owner is None else owner._modules.get(part)
    if owner is None:
        return None
    return vars(owner).get(last, owner._parameters.get(last, owner._buffers.get(last)))


def _attributes(module: torch.nn.Module) -> dict[str, object]:
    """Return the attributes of a module and of those within it, by their full names."""
    attributes: dict[str, object] = {}
    for path, child in module.named_modules():
        for name in _ATTRIBUTES:
            value = getattr(child, name, None)
            if isinstance(value, (bool, int, float, str, list, dict)):  # in other modules it may be a method
                copied = value.copy() if isinstance(value, (list, dict)) else value
                attributes[f"{path}.{name}" if path else name] = copied
    return attributes


def _hooks(module: torch.nn.Module, calls: bool) -> dict[str, list[object]]:
    """Return the hooks around the forward of the modules within a module, by their full names, and its own if called.

    Hooks of this package are left out, and others that `leave_out_hooks` names.
    """
    hooks_by_path: dict[str, list[object]] = {}
    for path, child in module.named_modules():
        hooks = [*child._forward_pre_hooks.values(), *child._forward_hooks.values()] if path or calls else []
        others = [hook for hook in hooks if not _origin(hook).startswith(tuple(_HARMLESS))]
        if others:
            hooks_by_path[path] = others
    return hooks_by_path


def _origin(hook: object) -> str:
    """Return the name of the module that a hook is defined in."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", ""))


def _referenced(function: object) -> tuple[list[torch.nn.Module], list[Tensor]]:
    """Return the modules and tensors that a function refers to."""
    modules: list[torch.nn.Module] = []
    tensors: list[Tensor] = []
    pending, seen = [function], set[int]()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            modules.append(value)
        elif isinstance(value, Tensor):
            tensors.append(value)
        else:
            pending += _parts(value)
    return modules, tensors


def _parts(value: object) -> list[object]:
    """Return the objects that a function, a method, a partial or a collection refers to; none for other objects."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        owner = value.__self__
        return [value.__func__, owner if isinstance(owner, torch.nn.Module) else getattr(owner, "__dict__", None)]
    if isinstance(value, FunctionType):
        names = value.__code__.co_names
        in_globals = (value.__globals__.get(name) for name in names)
        kept = [each for each in in_globals if isinstance(each, (torch.nn.Module, Tensor))]
        return [*kept, value.__defaults__, value.__kwdefaults__, *map(_content, value.__closure__ or ())]
    return []


def _content(cell: CellType) -> object:
    """Return the content of a closure's cell; None if it is not set yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
