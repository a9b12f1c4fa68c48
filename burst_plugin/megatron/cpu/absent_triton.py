"""A stand-in for triton, for imports of Megatron's that fail without it; PyTorch for CPUs comes without triton."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def triton_or_stand_in() -> Iterator[None]:
    """Let triton and triton.language be imported in this context, even where triton is not installed.

    Their stand-ins have every name, and are removed from `sys.modules` at the end of the context.
    """
    if sys.modules.get("triton") is not None or importlib.util.find_spec("triton") is not None:
        yield
        return
    stand_ins = {name: _Anything(name) for name in ("triton", "triton.language")}
    vars(stand_ins["triton"])["language"] = stand_ins["triton.language"]
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


class _Anything(types.ModuleType):
    """A module that has every name; its decorators return what they decorate."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _decorate


def _decorate(*args: Any, **kwargs: Any) -> Callable[..., Any] | Any:
    return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _decorate
