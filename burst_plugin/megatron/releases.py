"""The releases of Megatron that were tested, and the version of a source tree. Imports no Megatron."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

Version = tuple[int, int, int]

_PACKAGE_INFO = Path("megatron", "core", "package_info.py")


@dataclass(frozen=True)
class Release:
    """A release of Megatron-LM that burst_plugin was tested with.

    tag: the tag of the release in Megatron-LM's repository, or "main" for the commit of August 2026.
    versions: of its megatron.core as (major, minor, patch), in the repository and on PyPI; the tag core_v0.19.0 has
        0.19.1.
    """

    tag: str
    versions: tuple[Version, ...]


RELEASES = (
    Release("core_v0.16.1", ((0, 16, 1),)),
    Release("core_v0.17.1", ((0, 17, 1),)),
    Release("core_v0.18.2", ((0, 18, 2),)),
    Release("core_v0.19.0", ((0, 19, 0), (0, 19, 1), (0, 19, 2))),
    Release("main", ((0, 20, 0),)),
)


def parse_version(text: str) -> Version:
    """Return (major, minor, patch) of a version such as "0.16.1" or "0.17.0rc0". Raise ValueError for other text."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"got the version {text!r}, expected three numbers such as 0.16.1")
    major, minor, patch = map(int, match.groups())
    return major, minor, patch


def tree_version(tree: Path) -> Version:
    """Return the version of megatron.core in a Megatron-LM checkout, from its package_info.py.

    Raises ValueError if `tree` is not a checkout.
    """
    path = tree / _PACKAGE_INFO
    if not path.is_file():
        raise ValueError(f"got {tree}, expected the root of a Megatron-LM checkout: it has no {_PACKAGE_INFO}")
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", path.read_text(), re.MULTILINE))
    if len(numbers) != 3:
        raise ValueError(f"{path} does not set MAJOR, MINOR and PATCH to numbers")
    return int(numbers["MAJOR"]), int(numbers["MINOR"]), int(numbers["PATCH"])


def target_version() -> Version:
    """Return the version of the Megatron to write flags for, as (major, minor, patch), without importing it.

    It is the version of a checkout in the current directory, else of the installed megatron-core, else of the oldest
    tested release, whose flags later releases have as well.
    """
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        spec = None
    trees = [Path.cwd(), *([Path(spec.origin).parents[2]] if spec is not None and spec.origin else [])]
    versions = [tree_version(tree) for tree in trees if (tree / _PACKAGE_INFO).is_file()]
    return versions[0] if versions else RELEASES[0].versions[0]


def about(version: Version) -> str:
    """Return a line of text that says whether this version of Megatron, (major, minor, patch), was tested."""
    name = ".".join(map(str, version))
    tags = [release.tag for release in RELEASES if version in release.versions]
    if tags:
        return f"Megatron {name}: tested ({tags[0]})"
    tried = ", ".join(release.tag for release in RELEASES)
    return f"Megatron {name}: not tested; tested are {tried}"
