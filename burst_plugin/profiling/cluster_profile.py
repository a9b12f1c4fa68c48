"""What `burst check` measured of a cluster, as a file: links, the kernel's rates, and the strategy that suits them.

The file is JSON. Reading it proves that it is whole, of this version, and of the cluster that asks for it.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from burst_plugin.checks import as_number, as_whole, shown
from burst_plugin.topology import Topology

VERSION = 1
_FORMAT = "burst profile"
_AGAIN = "run burst check again"
_MASKS = ("causal", "full")
_OPTIONAL = ("node_rates", "rank_rates")
_Field = TypeVar("_Field")


@dataclass(frozen=True)
class LinkRate:
    """What a rank sends over one kind of link while it receives as much: bytes per second, and seconds of latency."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class KernelRate:
    """FLOP per second of the kernel on a full tile of `rows` queries and as many keys, by pass."""

    rows: int
    forward_flops_per_s: float
    backward_flops_per_s: float


@dataclass(frozen=True)
class Model:
    """The attention that the strategy was chosen for: heads, size of a head, tokens of the sequence, mask."""

    q_heads: int
    kv_heads: int
    head_dim: int
    seq: int
    mask: str

    def of_sizes(self, sizes: Mapping[str, Any]) -> Model:
        """Return the model with some other sizes, by name. Raise ValueError for what is not valid."""
        if not isinstance(sizes, Mapping) or set(sizes) - set(asdict(self)):
            raise ValueError(f"model={shown(sizes)} is not valid; give sizes by name: {', '.join(asdict(self))}")
        numbers = {name: as_whole(x) for name, x in sizes.items() if name != "mask"}
        model = replace(self, **{**sizes, **numbers})
        positive = all(n is not None and n >= 1 for n in numbers.values())
        if not positive or model.q_heads % model.kv_heads or model.mask not in _MASKS:
            raise ValueError(
                f"model={shown(sizes)} is not valid; use whole numbers, 1 or more, kv_heads that divides q_heads (it "
                f"is {model.q_heads}/{model.kv_heads}), and a mask of {', '.join(_MASKS)}"
            )
        return model


@dataclass(frozen=True)
class ClusterProfile:
    """A measured cluster.

    device: its name, see `device_name`. backend: that of torch.distributed, such as "nccl".
    intra, inter: the links inside nodes and between them; None where there are none.
    nic: "rank" if each rank has a NIC, "node" if the ranks of a node share one; `inter` is the rate of a NIC.
    kernel, dtype, rates: the kernel that was timed, on which type, and its rates, smallest tiles first.
    strategy: options of `Strategy` by name. why, runner_up: sentences for people.
    node_rates: bytes per second of the slowest NIC of each node by itself; rank_rates: FLOP per second of the kernel
    forward on each rank; empty where that was not measured. `inter` and `rates` are those of the slowest.
    """

    nodes: int
    ranks_per_node: int
    device: str
    backend: str
    intra: LinkRate | None
    inter: LinkRate | None
    nic: str
    kernel: str
    dtype: str
    rates: tuple[KernelRate, ...]
    model: Model
    strategy: Mapping[str, Any]
    why: str
    runner_up: str
    node_rates: tuple[float, ...] = ()
    rank_rates: tuple[float, ...] = ()

    @property
    def topology(self) -> Topology:
        """Return the nodes and ranks per node."""
        return Topology(self.nodes, self.ranks_per_node)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file; readers see the old one or the new one, never a part."""
        target = Path(path)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        partial.write_text(json.dumps(self.as_dict(), indent=2) + "\n")
        partial.replace(target)

    def as_dict(self) -> dict[str, Any]:
        """Return what the file holds."""
        held = {name: value for name, value in asdict(self).items() if value or name not in _OPTIONAL}
        return {"format": _FORMAT, "version": VERSION, **held}

    @classmethod
    def read(cls, source: str | os.PathLike[str] | Mapping[str, Any] | ClusterProfile) -> ClusterProfile:
        """Return the profile of a path, or of what such a file holds.

        Raises ValueError for a file that cannot be read, is not a profile, has another version, or is damaged; it
        says which entry, what was got and what was expected.
        """
        if isinstance(source, ClusterProfile):
            return source
        if isinstance(source, Mapping):
            return _Reader("the profile", source).profile()
        try:
            path = Path(source)
            found = json.loads(path.read_text())
        except TypeError:
            raise ValueError(f"profile={shown(source)} is not valid; give the path of a burst-profile.json") from None
        except OSError as error:
            raise ValueError(
                f"the profile {path} cannot be read ({error.strerror}); {_AGAIN.replace(' again', '')} to make one"
            ) from None
        except ValueError as error:  # no text, or no JSON
            raise ValueError(f"the profile {path} is damaged: it is not JSON ({error}); {_AGAIN}") from None
        return _Reader(f"the profile {path}", found).profile()

    def check_cluster(self, topology: Topology | None = None, device: str | None = None) -> None:
        """Raise ValueError if the profile is of a cluster of other sizes, or of another device; None is any."""
        if topology is not None and topology != self.topology:
            raise ValueError(
                f"the profile is of another cluster: it was measured on {self.topology}, and this is {topology}; "
                f"{_AGAIN} here"
            )
        if device is not None and device != self.device:
            raise ValueError(
                f"the profile is of another cluster: it was measured on {self.device}, and this is {device}; "
                f"{_AGAIN} here"
            )


def device_name() -> str:
    """Return the name of the current GPU, or of this machine's processor where torch has no GPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class _Reader:
    """Reads entries of a profile, each checked; `name` is that of the profile in messages."""

    def __init__(self, name: str, found: object) -> None:
        self._name = name
        if not isinstance(found, Mapping) or found.get("format") != _FORMAT:
            raise ValueError(f"{name} is not one that burst check wrote: its format is not {_FORMAT!r}; {_AGAIN}")
        if found.get("version") != VERSION:
            raise ValueError(
                f"{name} has version {shown(found.get('version'))}, and this burst_plugin reads version {VERSION}; "
                f"{_AGAIN}"
            )
        self._all = found

    def profile(self) -> ClusterProfile:
        known = {*ClusterProfile.__dataclass_fields__, "format", "version"}
        if unknown := sorted(map(str, set(self._all) - known)):
            raise self._damaged(", ".join(unknown), "such an entry", "no such entry")
        top = self._all
        nodes, per_node = self._whole(top, "nodes"), self._whole(top, "ranks_per_node")
        return ClusterProfile(
            nodes=nodes,
            ranks_per_node=per_node,
            device=self._text(top, "device"),
            backend=self._text(top, "backend"),
            intra=self._link("intra", per_node > 1),
            inter=self._link("inter", nodes > 1),
            nic=self._text(top, "nic", ("rank", "node")),
            kernel=self._text(top, "kernel"),
            dtype=self._text(top, "dtype", ("bfloat16", "float16", "float32", "float64")),
            rates=self._rates(),
            model=self._model(),
            strategy=self._mapping(top, "strategy"),
            why=self._text(top, "why"),
            runner_up=self._text(top, "runner_up"),
            node_rates=self._numbers("node_rates", nodes),
            rank_rates=self._numbers("rank_rates", nodes * per_node),
        )

    def _numbers(self, name: str, count: int) -> tuple[float, ...]:
        found = self._all.get(name, ())
        if not isinstance(found, Sequence) or len(found) not in (0, count):
            raise self._damaged(name, shown(found), f"a list of {count} numbers, or no such entry")
        return tuple(self._number({"": each}, "", f"{name}[{number}]") for number, each in enumerate(found))

    def _link(self, name: str, is_there: bool) -> LinkRate | None:
        if not is_there:
            if self._all.get(name) is not None:
                raise self._damaged(name, shown(self._all[name]), "null, since this cluster has no such link")
            return None
        entry = self._mapping(self._all, name)
        rate, latency = (self._number(entry, each, name) for each in ("bytes_per_s", "latency_s"))
        return LinkRate(rate, latency)

    def _rates(self) -> tuple[KernelRate, ...]:
        found = self._all.get("rates")
        if not isinstance(found, Sequence) or isinstance(found, str) or not found:
            raise self._damaged("rates", shown(found), "a list of rates by tile size")
        rates = []
        for number, each in enumerate(found):
            entry = self._of_type(each, Mapping, f"rates[{number}]", "an object")  # type: ignore[type-abstract]
            where = f"rates[{number}]"
            passes = (self._number(entry, f"{way}_flops_per_s", where) for way in ("forward", "backward"))
            rates.append(KernelRate(self._whole(entry, "rows", where), *passes))
        if [each.rows for each in rates] != sorted({each.rows for each in rates}):
            raise self._damaged("rates", "tiles in another order", "smaller tiles first, each size once")
        return tuple(rates)

    def _model(self) -> Model:
        entry = self._mapping(self._all, "model")
        names = ("q_heads", "kv_heads", "head_dim", "seq")
        q_heads, kv_heads, head_dim, seq = (self._whole(entry, name, "model") for name in names)
        return Model(q_heads, kv_heads, head_dim, seq, self._text(entry, "mask", _MASKS, "model"))

    def _mapping(self, entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        return self._of_type(entry.get(name), Mapping, name, "an object")  # type: ignore[type-abstract]

    def _whole(self, entry: Mapping[str, Any], name: str, inside: str = "") -> int:
        found = as_whole(entry.get(name))
        if found is None or found < 1:
            raise self._damaged(_path(inside, name), shown(entry.get(name)), "a whole number, 1 or more")
        return found

    def _number(self, entry: Mapping[str, Any], name: str, inside: str) -> float:
        found = as_number(entry.get(name))
        if found is None or not found > 0:
            raise self._damaged(_path(inside, name), shown(entry.get(name)), "a positive number")
        return found

    def _text(self, entry: Mapping[str, Any], name: str, valid: Sequence[str] = (), inside: str = "") -> str:
        expected = f"one of {', '.join(valid)}" if valid else "a text"
        found = self._of_type(entry.get(name), str, _path(inside, name), expected)
        if valid and found not in valid:
            raise self._damaged(_path(inside, name), shown(found), expected)
        return found

    def _of_type(self, value: object, kind: type[_Field], path: str, expected: str) -> _Field:
        if not isinstance(value, kind):
            raise self._damaged(path, shown(value), expected)
        return value

    def _damaged(self, path: str, got: str, expected: str) -> ValueError:
        return ValueError(f"{self._name} is damaged: {path} is {got}, expected {expected}; {_AGAIN}")


def _path(inside: str, name: str) -> str:
    return f"{inside}.{name}" if inside and name else inside or name
