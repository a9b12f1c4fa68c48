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
    """The description of a training framework that has an adapter, for the launcher, `burst doctor` and `burst plan`.

    Its adapter is the package `burst_plugin.<name>`, which has `install()`, `cpu.prepare(directory)`, and for plans
    `planning.space(fused_norms)`, `.files(model, setting)` and `.usage(folder, setting)`.

    name: the Python package of the framework, and of its adapter in burst_plugin; also its option of `burst doctor`.
    title: the framework's name in texts.
    distribution: the package that installs the framework from PyPI.
    packages: distributions whose versions `burst doctor` prints.
    subject: the metavar and the help text of the option `burst doctor --<name>`.
    switch: how a user switches burst attention on, in words for the launcher's help.
    words: any of these words in a script or on its command line says that the script uses the framework.
    report: yields the lines that `burst doctor` prints about the framework. It gets the value of the option
        `--<name>`, or None, and raises ValueError for a value that cannot be read, or asks for something that is
        refused.
    launcher_variables: environment variables that are all set only by the framework's own launcher.
    launcher_options: options that this launcher puts before a script and that are meant for the script.
    checkout: the name of the repository whose scripts lie beside a directory `name`; "" if there is none.
    written: takes the name of an option of `Strategy` and returns how users of the framework write it, in Markdown;
        None if they write it as a key with the option's name.
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
        """Return whether the framework's own launcher has started this process, as environment variables tell."""
        return bool(self.launcher_variables) and all(name in os.environ for name in self.launcher_variables)

    def has_checkout(self, directory: Path) -> bool:
        """Return whether `directory` holds the scripts of a checkout: whether a directory `name` is in it.

        False if the framework has no `checkout`.
        """
        return bool(self.checkout) and (directory / self.name).is_dir()

    def is_installed(self) -> bool:
        """Return whether the framework can be imported, without importing it."""
        return importlib.util.find_spec(self.name) is not None

    def is_named_in(self, text: str) -> bool:
        """Return whether `text`, a script or its command line, has one of `words` and so uses the framework."""
        return any(word in text for word in self.words)

    def install(self) -> object:
        """Install the framework's adapter and return it; its `str()` lists the changes that were made."""
        return self._module().install()

    def prepare_cpu(self, directory: Path) -> None:
        """Prepare the framework for a script that runs in `directory` on CPUs; to be called before `install`."""
        self._module("cpu").prepare(directory)

    def planning(self) -> Any:
        """Return the adapter's module `planning`, which has the choices of `burst plan` and writes its plans."""
        return self._module("planning")

    def _module(self, name: str = "") -> Any:
        module: ModuleType = importlib.import_module(f"burst_plugin.{self.name}{f'.{name}' if name else ''}")
        return module
