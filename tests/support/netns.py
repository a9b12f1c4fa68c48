"""A cluster on one machine: nodes and ranks as Linux network namespaces with shaped links.

With a NIC per rank, as in most GPU clusters, each rank is a namespace (here 2 nodes of 2 ranks, `eth` the wire):

    rank 0   rank 1        rank 2   rank 3
    nic nvl  nvl nic       nic nvl  nvl nic
     |   +-n0-+   |         |   +-n1-+   |         nvl  one bridge per node, shaped only if that is asked for
     +------------+-- eth --+------------+         nic  shaped in both directions, one bridge for all

With a NIC per node each node is a namespace; its ranks share one shaped `nic` and reach each other over loopback.
With latency each `nic` ends in a bridge of its own, and `eth` is a process that delays every frame (`delay_bridge`).

Every rank is addressed by its `nic`; which device a packet takes is decided by the route alone, so gloo needs to
know one interface only. The namespaces are built inside one private network and mount namespace (and, without root, a
user namespace), and held by nothing but this process's open files: they vanish with it, however it ends.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support import delay_bridge
from tests.support.processes import launch, values
from tests.support.ranks import join_gloo, launcher_environment

TOOLS = ("unshare", "mount", "ip", "tc")
BUILD_S = 60.0
BUCKET_BYTES = 128 << 10  # what a shaped NIC lets through at once: room for two of the largest packets
_BURST = f"burst {BUCKET_BYTES} limit 64mb"  # tbf's bucket and its queue
# InfiniBand and NVLink send at once and lose nothing: windows are open from the start, and no algorithm probes for
# a rate. Without it ranks would be measured under whatever the host has for the internet.
_UNPROBED = "congctl reno initcwnd 2000 initrwnd 2000"

_PRELUDE = """
set -e
run=$(readlink -f /var/run)
mount -t tmpfs tmpfs $run
mkdir $run/netns
"""

_PROBE = (
    _PRELUDE
    + """
ip netns add probe
ip link add eth type bridge
ip link add port type veth peer name nic netns probe
ip link set port master eth
tc qdisc replace dev port root tbf rate 100mbit burst 128kb limit 4mb
"""
)


@dataclass
class EmulatedCluster:
    """`nodes` × `ranks_per_node` ranks; as a context manager it builds the namespaces and removes them.

    Rank r is local rank r % ranks_per_node of node r // ranks_per_node.

    Args:
        rate_mbit: what each `nic` carries per direction, in 10⁶ bit/s; None leaves it unshaped.
        nic: "rank" if each rank has a NIC of its own, "node" if the ranks of a node share one.
        latency_ms: delay of what one `nic` sends to another, milliseconds.
        intra_mbit: what each `nvl` carries per direction; None leaves it unshaped.
        node_mbit: what each `nic` of single nodes carries instead of `rate_mbit`, by node.

    Raises:
        ValueError: for impossible sizes, rates, latencies or kinds of NIC.
        RuntimeError: on entering, if the namespaces cannot be built; see `unavailable`.
    """

    nodes: int
    ranks_per_node: int
    rate_mbit: float | None = None
    nic: str = "rank"
    latency_ms: float = 0.0
    intra_mbit: float | None = None
    node_mbit: Mapping[int, float] = field(default_factory=dict)
    _files: dict[str, int] = field(default_factory=dict, init=False)  # open files by what they hold
    _bridge: int | None = field(default=None, init=False)  # the process that delays frames

    def __post_init__(self) -> None:
        for name, size in (("nodes", self.nodes), ("ranks_per_node", self.ranks_per_node)):
            if not 1 <= size <= 250:
                raise ValueError(f"{name} is {size}; expected 1 .. 250")
        for name, rate, device in (("rate_mbit", self.rate_mbit, "nic"), ("intra_mbit", self.intra_mbit, "nvl")):
            if rate is not None and not rate > 0:
                raise ValueError(f"{name} is {rate}; expected more than 0, or None for an unshaped {device}")
        for node, rate in self.node_mbit.items():
            if not (0 <= node < self.nodes and rate > 0):
                raise ValueError(f"node_mbit is {self.node_mbit}; expected nodes below {self.nodes}, rates above 0")
        if self.intra_mbit is not None and self.nic == "node":
            raise ValueError(
                f'intra_mbit is {self.intra_mbit} with nic "node", whose ranks have no nvl; expected None'
            )
        if self.nic not in ("rank", "node"):
            raise ValueError(f'nic is {self.nic!r}; expected "rank" or "node"')
        if not 0 <= self.latency_ms < float("inf"):
            raise ValueError(f"latency_ms is {self.latency_ms}; expected 0 or more")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    @staticmethod
    def unavailable(latency_ms: float = 0.0) -> str | None:
        """Return why no cluster with such a latency can be built here, or None if one can."""
        return _unavailable() or (_no_delay_bridge() if latency_ms else None)

    def __enter__(self) -> EmulatedCluster:
        reason = self.unavailable(self.latency_ms)
        if reason is not None:
            raise RuntimeError(f"no cluster can be emulated here: {reason}")
        if self._files:
            raise RuntimeError("this cluster is already built; expected to be entered once")
        try:
            self._build()
            if self.latency_ms:
                taps = [f"tap{number}" for number in range(len(self._hosts))]
                enter = partial(self._enter, "switch")
                self._bridge, self._files["bridge"] = delay_bridge.start(taps, self.latency_ms / 1e3, enter)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Run `fn(rank, *args)` in a process per rank, in its namespace and joined on gloo; return their values.

        See `launch`; the process group's time-out is half of `timeout_s`. The environment is that of a launcher such
        as torchrun. May be called again; only the devices' byte counters carry over.

        Raises:
            RankError: with the traceback, or the manner of death, of every rank that failed.
        """
        if not self._files:
            raise RuntimeError("the cluster is not built; expected: with EmulatedCluster(...) as cluster")

        def enter(rank: int, directory: Path) -> None:
            self._enter(self._host(rank))
            os.environ.update(launcher_environment(rank, self.world_size, self.ranks_per_node))
            join_gloo(rank, self.world_size, directory, "nic", timeout_s / 2)

        return values(launch(fn, self.world_size, args, enter, timeout_s=timeout_s))

    def _host(self, rank: int) -> str:
        """Return the name of a rank's namespace."""
        return f"rank{rank}" if self.nic == "rank" else f"node{rank // self.ranks_per_node}"

    @property
    def _hosts(self) -> list[str]:
        """Names of all namespaces with a `nic`, in the order of their numbers."""
        return list(dict.fromkeys(map(self._host, range(self.world_size))))

    def _build(self) -> None:
        """Build the namespaces from a process inside their parent namespace, open them, and end that process."""
        flags = _unshare_flags()
        assert flags is not None  # or `unavailable` had said so
        builder = subprocess.Popen(
            ["unshare", *flags, "sh", "-c", self._script()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with builder:
            try:
                assert builder.stdout is not None
                runtime = builder.stdout.readline().strip()
                if runtime:
                    self._open(Path(f"/proc/{builder.pid}"), runtime, user="-U" in flags)
                _, said = builder.communicate(timeout=BUILD_S)
            finally:
                builder.kill()
        if not runtime:
            raise RuntimeError(f"building {self.nodes}x{self.ranks_per_node} namespaces failed:\n{said.strip()}")

    def _open(self, process: Path, runtime: str, *, user: bool) -> None:
        self._files["switch"] = os.open(process / "ns/net", os.O_RDONLY)
        if user:
            self._files["user"] = os.open(process / "ns/user", os.O_RDONLY)
        for host in self._hosts:
            self._files[host] = os.open(f"{process}/root{runtime}/netns/{host}", os.O_RDONLY)

    def _enter(self, host: str) -> None:
        """Move this process into a namespace."""
        for name in ("user", host):
            if name in self._files:
                _setns(self._files[name])

    def _close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])
        if self._bridge is not None:
            os.waitpid(self._bridge, 0)
            self._bridge = None

    def _script(self) -> str:
        """Return the shell script that builds all namespaces, prints their folder and waits for its input to end."""
        lines = [_PRELUDE, *([] if self.latency_ms else _batch("ip", _bridge("eth")))]
        for node in range(self.nodes):
            if self.nic == "node":
                lines += self._shaped_host(f"node{node}", node, f"10.77.255.{node + 1}", [])
                continue
            lines += _batch("ip", _bridge(f"n{node}"))
            for local in range(self.ranks_per_node):
                rank = node * self.ranks_per_node + local
                address = f"10.77.{node}.{local + 1}"
                within = [*_up("nvl"), f"route add 10.77.{node}.0/24 dev nvl src {address} {_UNPROBED}"]
                lines += self._shaped_host(f"rank{rank}", rank, address, within, f"n{node}")
        return "\n".join([*lines, "echo $run", "exec cat"])

    def _shaped_host(
        self, host: str, number: int, address: str, routes: list[str], node_bridge: str | None = None
    ) -> Iterator[str]:
        """Yield the lines that add one namespace with its `nic` and, given a bridge of its node, its `nvl`."""
        yield f"ip netns add {host}"
        bridge = f"eth{number}" if self.latency_ms else "eth"
        if self.latency_ms:
            yield from _batch("ip", [*_bridge(bridge), *_tap(f"tap{number}", bridge)])
        yield from _batch("ip", _cable("nic", number, host, bridge))
        if node_bridge is not None:
            yield from _batch("ip", _cable("nvl", number, host, node_bridge))
        between = [
            f"route change 10.77.0.0/16 dev nic src {address} {_UNPROBED}",
            f"route change local {address} dev lo table local proto kernel src {address} {_UNPROBED}",
        ]
        own = ["link set lo up", *_up("nic"), f"addr add {address}/16 dev nic", *between, *routes]
        yield from _batch(f"ip -n {host}", own)
        node = number if self.nic == "node" else number // self.ranks_per_node
        nic_mbit = self.node_mbit.get(node, self.rate_mbit)
        for device, rate_mbit in (("nic", nic_mbit), ("nvl", self.intra_mbit)):
            if rate_mbit is not None:
                shape = f"root tbf rate {rate_mbit * 1e6:.0f}bit {_BURST}"
                yield f"tc -n {host} qdisc replace dev {device} {shape}"
                yield f"tc qdisc replace dev {device}{number} {shape}"


def interface_bytes(device: str = "nic") -> tuple[int, int]:
    """Return the (received, sent) bytes of a device of this network namespace since it was made, with all headers."""
    seen = {}
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, counters = line.partition(":")
        fields = counters.split()
        seen[name.strip()] = (int(fields[0]), int(fields[8]))
    if device not in seen:
        raise ValueError(f"there is no device {device!r} here; expected one of {sorted(seen)}")
    return seen[device]


def _batch(command: str, lines: list[str]) -> list[str]:
    return [f"{command} -batch - <<END", *lines, "END"]


def _up(device: str) -> list[str]:
    """Return the lines that bring a device up without an IPv6 address, so that only the ranks send."""
    return [f"link set {device} addrgenmode none", f"link set {device} up"]


def _bridge(name: str) -> list[str]:
    return [f"link add {name} type bridge mcast_snooping 0", *_up(name)]


def _cable(device: str, number: int, host: str, bridge: str) -> list[str]:
    """Return the lines that make `device` in the namespace `host`, its other end `device``number` on a bridge."""
    port = f"{device}{number}"
    return [
        f"link add {port} type veth peer name {device} netns {host}",
        f"link set {port} master {bridge}",
        *_up(port),
    ]


def _tap(name: str, bridge: str) -> list[str]:
    """Return the lines that make a device that a program reads from and writes to, on a bridge."""
    return [f"tuntap add {name} mode tap vnet_hdr", f"link set {name} master {bridge}", *_up(name)]


def _setns(file: int) -> None:
    """Move this process into a namespace (os.setns came with Python 3.12)."""
    if ctypes.CDLL(None, use_errno=True).setns(file, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


@functools.cache
def _unshare_flags() -> tuple[str, ...] | None:
    """Return the flags of `unshare` for a network and a mount namespace, in a user namespace unless we are root."""
    for flags in (("-n", "-m"), ("-U", "-r", "-n", "-m")):
        if subprocess.run(["unshare", *flags, "true"], capture_output=True).returncode == 0:
            return flags
    return None


def _no_delay_bridge() -> str | None:
    """Return why there can be no latency, or None if there can."""
    try:
        os.close(os.open(delay_bridge.DEVICE, os.O_RDWR))
    except OSError as error:
        return f"{delay_bridge.DEVICE} cannot be opened, for latency: {error.strerror}"
    return None


@functools.cache
def _unavailable() -> str | None:
    if sys.platform != "linux":
        return f"network namespaces need Linux; this is {sys.platform}"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"missing commands: {', '.join(missing)} (of the packages iproute2 and util-linux)"
    flags = _unshare_flags()
    if flags is None:
        return "the kernel allows neither `unshare -nm` nor, with a user namespace, `unshare -Urnm`"
    probe = subprocess.run(["unshare", *flags, "sh", "-c", _PROBE], capture_output=True, text=True)
    if probe.returncode != 0:
        return f"namespaces, veth, bridge or tbf do not work: {probe.stderr.strip() or probe.returncode}"
    return None
