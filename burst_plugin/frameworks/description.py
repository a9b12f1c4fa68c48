"""What a training framework says about itself, for the launcher and for `burst doctor`."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A framework with an adapter: how its scripts are recognised, its report, and how the adapter is installed.

    Its adapter is the package `burst_plugin.<name>`, which has `install()`, `cpu.prepare(directory)`, and for plans
    `planning.space(fused_norms)`, `.files(model, setting)` and `.usage(folder, setting)`.

    name: the Python package of the framework, and of its adapter in burst_plugin; also its option of `burst doctor`.
    title: its name in texts.
    distribution: what to install from PyPI.
    packages: distributions whose versions `burst doctor` prints.
    subject: what `burst doctor --<name>` takes, as a metavar, and the option's help text.
    switch: how burst attention is switched on, for the launcher's help.
    words: each of these in a script or on its command line says that the script uses the framework.
    report: yields what `burst doctor` says about the framework, line by line, given what the option `--<name>` was
        given; raises ValueError if that cannot be read, or asks for something that is refused.
    launcher_variables: environment variables that are all set only by the framework's own launcher.
    launcher_options: options that this launcher puts before a script and that are meant for the script.
    checkout: the repository in whose checkouts a directory `name` lies beside scripts; empty if there is none.
    written: returns how an option of `Strategy` is written for the framework, in Markdown; None if it is a key of the
        option's name.
    """

    name: str
    title: str
    distribution: str
    packages: tuple[str, ...]
    subject: tuple[str, str]
    switch: str
    words: tuple[str, ...]
    report: Callable[[str | None], Iterator[str]]
    launcher_variables: tuple[str, ...] = ()
    launcher_options: tuple[str, ...] = ()
    checkout: str = ""
    written: Callable[[str], str] | None = None

    def is_launching(self) -> bool:
        """Return whether the framework's own launcher has started this process."""
        return bool(self.launcher_variables) and all(name in os.environ for name in self.launcher_variables)

    def has_checkout(self, directory: Path) -> bool:
        """Return whether `directory` holds the scripts of a checkout."""
        return bool(self.checkout) and (directory / self.name).is_dir()

    def is_installed(self) -> bool:
        """Return whether the framework can be imported, without importing it."""
        return importlib.util.find_spec(self.name) is not None

    def is_named_in(self, text: str) -> bool:
        """Return whether a script, or its command line, says that it uses the framework."""
        return any(word in text for word in self.words)

    def install(self) -> object:
        """Install the adapter and return it; its `str()` lists the changes that were made."""
        return self._module().install()

    def prepare_cpu(self, directory: Path) -> None:
        """Get the framework ready to run a script in `directory` on CPUs; before `install`."""
        self._module("cpu").prepare(directory)

    def planning(self) -> Any:
        """Return the module that says what the framework can do, for `burst plan`, and writes plans for it."""
        return self._module("planning")

    def _module(self, name: str = "") -> Any:
        module: ModuleType = importlib.import_module(f"burst_plugin.{self.name}{f'.{name}' if name else ''}")
        return module
