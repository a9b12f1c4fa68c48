"""The measurements of a cluster by `burst check`, as a file: links, the kernel's rates, and the strategy for them.

The file is JSON. Reading it proves that it is whole, of this version, and of the cluster that asks for it.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from burst_plugin.checks import as_number, as_whole, shown
from burst_plugin.topology import Topology

VERSION = 1
_FORMAT = "burst profile"
_AGAIN = "run burst check again"
_MASKS = ("causal", "full")
_OPTIONAL = ("node_rates", "rank_rates", "recurrent")


@dataclass(frozen=True)
class LinkRate:
    """The rate and latency of one kind of link, at which a rank or a NIC sends while it receives as much."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class KernelRate:
    """The FLOP per second of the attention kernel, by pass, on a full tile of `rows` queries and as many keys."""

    rows: int
    forward_flops_per_s: float
    backward_flops_per_s: float


@dataclass(frozen=True)
class Model:
    """The sizes of the attention that a strategy was chosen for.

    q_heads, kv_heads, head_dim: of a layer. seq: tokens of the sequence. mask: "causal" or "full".
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    seq: int
    mask: str

    def of_sizes(self, sizes: Mapping[str, Any]) -> Model:
        """Return the model with other values for the fields that `sizes` names.

        Raises ValueError for other names, sizes below 1, and query heads that are no multiple of the key/value heads.
        """
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
    """What `burst check` has measured of a cluster, and the strategy that it has chosen.

    device: the name of its GPUs, see `device_name`.
    backend: the backend of torch.distributed, such as "nccl".
    intra, inter: the links inside nodes and between them; None where there are none.
    nic: "rank" if each rank has a NIC, "node" if the ranks of a node share one; `inter` is the slowest NIC's rate.
    kernel, dtype, rates: the attention kernel that was timed, on which type, and its rates on the slowest rank,
        smallest tiles first.
    model: the attention that the strategy was chosen for.
    strategy: options of `Strategy` by name.
    why, runner_up: sentences for people, on the best plan and the next one.
    node_rates: bytes per second of the slowest NIC of each node by itself; empty if not measured.
    rank_rates: FLOP per second of the attention kernel forward on each rank; empty if not measured.
    recurrent: FLOP per second of the kernels of layers with a state, both passes together, by kind of layer.
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
    recurrent: Mapping[str, float] = field(default_factory=dict)

    @property
    def topology(self) -> Topology:
        """Return the topology of the measured cluster: its nodes, and the ranks on each."""
        return Topology(self.nodes, self.ranks_per_node)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to `path`, as JSON; readers of the file see the old one or the new one, never a part."""
        target = Path(path)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        partial.write_text(json.dumps(self.as_dict(), indent=2) + "\n")
        partial.replace(target)

    def as_dict(self) -> dict[str, Any]:
        """Return the profile as the dictionary that its file holds, with "format" and "version"; `read` takes it."""
        held = {name: value for name, value in asdict(self).items() if value or name not in _OPTIONAL}
        return {"format": _FORMAT, "version": VERSION, **held}

    @classmethod
    def read(cls, source: str | os.PathLike[str] | Mapping[str, Any] | ClusterProfile) -> ClusterProfile:
        """Return the profile in the file at a path, or in the content of such a file; a profile is returned as it is.

        Raises ValueError for a file that cannot be read, is not a profile, has another version, or is damaged; the
        error names the entry, its value and the expected value.
        """
        if isinstance(source, ClusterProfile):
            return source
        if isinstance(source, Mapping):
            return _parsed("the profile", source)
        try:
            path = Path(source)
            content = json.loads(path.read_text())
        except TypeError:
            raise ValueError(f"profile={shown(source)} is not valid; give the path of a burst-profile.json") from None
        except OSError as error:
            raise ValueError(
                f"the profile {path} cannot be read ({error.strerror}); {_AGAIN.replace(' again', '')} to make one"
            ) from None
        except ValueError as error:  # no text, or no JSON
            raise ValueError(f"the profile {path} is damaged: it is not JSON ({error}); {_AGAIN}") from None
        return _parsed(f"the profile {path}", content)

    def check_cluster(self, topology: Topology | None = None, device: str | None = None) -> None:
        """Raise ValueError if the profile was measured on another topology, or with another `device_name`.

        None for either: it is not compared.
        """
        for here, measured in ((topology, self.topology), (device, self.device)):
            if here is not None and here != measured:
                raise ValueError(
                    f"the profile is of another cluster: it was measured on {measured}, and this is {here}; {_AGAIN} "
                    "here"
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


def _parsed(name: str, content: object) -> ClusterProfile:
    """Return the profile that a file holds; `name` is the profile's in messages. Raise ValueError as `read` does."""
    if not isinstance(content, Mapping) or content.get("format") != _FORMAT:
        raise ValueError(f"{name} is not one that burst check wrote: its format is not {_FORMAT!r}; {_AGAIN}")
    if content.get("version") != VERSION:
        raise ValueError(
            f"{name} has version {shown(content.get('version'))}, and this burst_plugin reads version {VERSION}; "
            f"{_AGAIN}"
        )
    top = _Entries(name, content)
    if unknown := sorted(map(str, set(content) - {*ClusterProfile.__dataclass_fields__, "format", "version"})):
        raise top.damaged(", ".join(unknown), "such an entry", "no such entry")
    nodes, per_node, model = top.whole("nodes"), top.whole("ranks_per_node"), top.inner("model")
    return ClusterProfile(
        nodes=nodes,
        ranks_per_node=per_node,
        device=top.text("device"),
        backend=top.text("backend"),
        intra=_link(top, "intra", per_node > 1),
        inter=_link(top, "inter", nodes > 1),
        nic=top.text("nic", ("rank", "node")),
        kernel=top.text("kernel"),
        dtype=top.text("dtype", ("bfloat16", "float16", "float32", "float64")),
        rates=_kernel_rates(top),
        model=Model(
            q_heads=model.whole("q_heads"),
            kv_heads=model.whole("kv_heads"),
            head_dim=model.whole("head_dim"),
            seq=model.whole("seq"),
            mask=model.text("mask", _MASKS),
        ),
        strategy=top.inner("strategy").values,
        why=top.text("why"),
        runner_up=top.text("runner_up"),
        node_rates=top.numbers("node_rates", nodes),
        rank_rates=top.numbers("rank_rates", nodes * per_node),
        recurrent=top.numbers_by_name("recurrent"),
    )


def _link(top: _Entries, name: str, is_there: bool) -> LinkRate | None:
    if is_there:
        link = top.inner(name)
        return LinkRate(link.number("bytes_per_s"), link.number("latency_s"))
    if top.values.get(name) is not None:
        raise top.damaged(name, shown(top.values[name]), "null, since this cluster has no such link")
    return None


def _kernel_rates(top: _Entries) -> tuple[KernelRate, ...]:
    entries = top.values.get("rates")
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise top.damaged("rates", shown(entries), "a list of rates by tile size")
    rates = []
    for number in range(len(entries)):
        entry = top.inner("rates", number)
        rates.append(
            KernelRate(entry.whole("rows"), entry.number("forward_flops_per_s"), entry.number("backward_flops_per_s"))
        )
    if [rate.rows for rate in rates] != sorted({rate.rows for rate in rates}):
        raise top.damaged("rates", "tiles in another order", "smaller tiles first, each size once")
    return tuple(rates)


class _Entries:
    """The entries of an object in a profile's file, each checked as it is read; `path` is where the object is."""

    def __init__(self, profile: str, values: Mapping[str, Any], path: str = "") -> None:
        self.values = values
        self._profile, self._path = profile, path

    def inner(self, name: str, number: int | None = None) -> _Entries:
        """Return the entries of an object in this one, or of one in a list."""
        value = self.values.get(name)
        if number is not None:
            name, value = f"{name}[{number}]", self.values[name][number]
        if not isinstance(value, Mapping):
            raise self.damaged(name, shown(value), "an object")
        return _Entries(self._profile, value, f"{self._path}{name}.")

    def whole(self, name: str) -> int:
        """Return a whole number, 1 or more."""
        value = as_whole(self.values.get(name))
        if value is None or value < 1:
            raise self.damaged(name, shown(self.values.get(name)), "a whole number, 1 or more")
        return value

    def number(self, name: str) -> float:
        """Return a positive number."""
        value = as_number(self.values.get(name))
        if value is None or not value > 0:
            raise self.damaged(name, shown(self.values.get(name)), "a positive number")
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Return `count` positive numbers, or () where there is no such entry."""
        values = self.values.get(name, ())
        numbers = [as_number(value) for value in values] if isinstance(values, Sequence) else [None]
        if len(numbers) not in (0, count) or not all(number is not None and number > 0 for number in numbers):
            raise self.damaged(name, shown(values), f"a list of {count} positive numbers, or no such entry")
        return tuple(number for number in numbers if number is not None)

    def numbers_by_name(self, name: str) -> dict[str, float]:
        """Return an object of positive numbers, empty where there is no such entry."""
        if name not in self.values:
            return {}
        entries = self.inner(name)
        return {str(key): entries.number(key) for key in entries.values}

    def text(self, name: str, valid: Sequence[str] = ()) -> str:
        """Return the text of an entry, one of the `valid` texts if there are any."""
        value = self.values.get(name)
        if not isinstance(value, str) or (valid and value not in valid):
            raise self.damaged(name, shown(value), f"one of {', '.join(valid)}" if valid else "a text")
        return value

    def damaged(self, name: str, got: str, expected: str) -> ValueError:
        """Return the error about an entry."""
        return ValueError(f"{self._profile} is damaged: {self._path}{name} is {got}, expected {expected}; {_AGAIN}")
