"""What Megatron reports about itself, for the launcher and `burst doctor`. Imports no Megatron."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from burst_plugin.frameworks.description import Framework
from burst_plugin.megatron.flags.arguments import written
from burst_plugin.megatron.releases import about, parse_version, tree_version


def report(tree: str | None) -> Iterator[str]:
    """Yield lines of a report: the release of Megatron, and what `install()` changes, repairs and refuses there.

    It imports Megatron and installs the adapter in this process; if Megatron cannot be imported, a line says so.

    tree: the path of a Megatron-LM checkout to import, instead of an installed megatron-core; None for the latter.
    Raises ValueError if it is not a checkout.
    """
    if tree is not None:
        root = Path(tree).resolve()
        yield about(tree_version(root))
        hooked = "burst_plugin" in (root / "megatron" / "training" / "__init__.py").read_text()
        yield f"{root} {'installs' if hooked else 'does not install'} burst_plugin itself (see patches/)"
        sys.path.insert(0, str(root))
    try:
        if importlib.util.find_spec("megatron.core") is None:
            raise ModuleNotFoundError("no megatron.core; install megatron-core, or give --megatron TREE")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron warns of optional packages
            done = _what_install_does()
    except ImportError as error:
        yield f"cannot be imported here: {error}"
        return
    yield from done
    yield "refused with --cp-comm-type burst where sequences are spread over ranks:"
    yield from refused_options()


def _what_install_does() -> list[str]:
    """Install the adapter; return lines on its changes, and on the repairs that it leaves out."""
    from megatron.core import __file__ as core
    from megatron.core import __version__

    from burst_plugin.megatron import install
    from burst_plugin.megatron.repairs.faults import REPAIRS

    version = parse_version(__version__)
    statuses = {repair.name: repair.status(version) for repair in REPAIRS}  # before they are applied, if they are
    left_out = [f"repair {name}: {status}" for name, status in statuses.items() if status != "applied"]
    return [f"megatron.core in {Path(core).parent}", *install().report, *left_out]


def refused_options() -> Iterator[str]:
    """Yield a line for each option that this release refuses with burst attention: its name, and what to do."""
    from burst_plugin.megatron.flags.config import REFUSED, REFUSED_LATER
    from burst_plugin.megatron.flags.flag_checks import REFUSED_FLAGS

    # Only flags that this release cannot honour; earlier releases have more of them.
    flags = {name: rule for name, rule in REFUSED_FLAGS.items() if not rule.allowed(True)}
    for name, rule in {**REFUSED, **REFUSED_LATER, **flags}.items():
        yield f"  {name}: {rule.instead}"


FRAMEWORK = Framework(
    name="megatron",
    title="Megatron",
    distribution="megatron-core",
    packages=("megatron-core", "transformer-engine", "flash-attn"),
    subject=("TREE", "a Megatron-LM checkout to look at, instead of an installed megatron-core"),
    switch="--cp-comm-type burst (Megatron; `SCRIPT --help` lists the --burst-* flags)",
    words=("megatron", "--cp-comm-type"),
    checkout="Megatron-LM",
    report=report,
    written=written,
)
