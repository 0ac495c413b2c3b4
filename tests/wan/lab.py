"""`Lab`: hosts on one machine, far from each other.

    with Lab(4, Link(delay_ms=25, rate_mbit=200, loss=0.001)) as lab:
        lab.hosts[0].popen(["pccl", "master"])
        ...
        lab.hosts[3].down()                 # its cable is pulled, without notice
        lab.block(lab.hosts[0], lab.hosts[1])   # packets from host 0 to host 1 vanish

Each host is a network namespace with one address, 198.18.0.(n + 1) (a range that is set aside for measurements), and
the kernel's own TCP with the settings of the machine. A relay in user space joins them.

Whatever ends the `with` block ends what runs on the hosts and takes the namespaces and devices away; so does SIGKILL of
this process. Labs have no names, so they do not meet.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from ipaddress import ip_address
from types import TracebackType
from typing import Any

from pccl.tools.harness import Guard
from tests.wan.namespace import Namespace
from tests.wan.relay import Relay
from tests.wan.relay import unavailable as relay_unavailable
from tests.wan.shape import DEVICE, MTU_BYTES, NETWORK, NETWORK_BITS, Link, Path, Shape, Site

__all__ = ["Host", "Lab", "Link", "Path", "Site", "unavailable"]


def unavailable() -> str | None:
    """Why there can be no lab here; None if there can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "a WAN lab needs root"
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"a WAN lab needs {', '.join(missing)} (packages iproute2 and util-linux)"
    try:
        Namespace().close()
    except OSError as error:
        return f"a WAN lab needs network namespaces: {error}"
    if reason := relay_unavailable():
        return f"a WAN lab needs a relay over TUN: {reason}"
    return None


class Host:
    def __init__(self, lab: Lab, number: int, namespace: Namespace, group: int) -> None:
        self.number = number
        self.address = str(ip_address(NETWORK) + number + 1)
        self.namespace = namespace
        self.processes: list[subprocess.Popen[Any]] = []
        self._lab = lab
        self._group = group

    def popen(self, arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """A process on this host, ended at the latest with the lab."""
        process = self.namespace.popen(arguments, process_group=self._group, **options)
        self.processes.append(process)
        return process

    def run(self, *arguments: str) -> str:
        """Standard output of a command that must succeed. OSError with what it said."""
        return self.namespace.run(*arguments)

    def entered(self) -> AbstractContextManager[None]:
        """Inside, this thread, and threads that it starts, make their sockets on this host."""
        return self.namespace.entered()

    def set_sysctl(self, name: str, value: str) -> None:
        """Such as net.ipv4.tcp_slow_start_after_idle."""
        self.run("sh", "-c", 'echo "$1" > /proc/sys/"$(echo "$0" | tr . /)"', name, value)

    def set_congestion_control(self, name: str, is_locked: bool = True) -> None:
        """Set the congestion control of connections made from now on. It is a property of the route: a namespace's
        sysctl refuses what users may not choose. `is_locked`: programs cannot choose another, as where an ordinary
        user may not."""
        route = ("ip", "route", "replace", f"{NETWORK}/{NETWORK_BITS}", "dev", DEVICE, "src", self.address)
        self.run(*route, "congctl", *(["lock"] if is_locked else []), name)

    def down(self) -> None:
        """Everything from and to this host vanishes, what is under way included."""
        self._cut(True)

    def up(self) -> None:
        self._cut(False)

    def _cut(self, yes: bool) -> None:
        for other in self._lab.hosts:
            if other is not self:
                self._lab.block(self, other, yes)
                self._lab.block(other, self, yes)


class Lab:
    """See the module. `sites` and `paths` say what differs from `link`, by host number and by (sender, receiver)."""

    hosts: list[Host]

    def __init__(
        self,
        hosts: int,
        link: Link,
        *,
        sites: Mapping[int, Site] | None = None,
        paths: Mapping[tuple[int, int], Path] | None = None,
        mtu_bytes: int = MTU_BYTES,
        seed: int = 0,
    ) -> None:
        self.shape = Shape(hosts, link, sites or {}, paths or {}, mtu_bytes, seed)
        self.hosts = []
        self._resources = ExitStack()
        self._network: Relay | None = None

    def __enter__(self) -> Lab:
        with ExitStack() as resources:
            resources.callback(self._reap)
            # Leaves first, and kills all that _reap then waits for.
            group = resources.enter_context(Guard()).group
            for number in range(self.shape.hosts):
                self.hosts.append(Host(self, number, Namespace(group), group))
            namespaces = [host.namespace for host in self.hosts]
            addresses = [host.address for host in self.hosts]
            self._network = Relay(self.shape, namespaces, addresses, group)
            self._resources = resources.pop_all()
        return self

    def _reap(self) -> None:
        if self._network is not None:
            self._network.close()
        for host in self.hosts:
            for process in host.processes:
                process.wait()
            host.namespace.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.__exit__(kind, error, trace)

    def block(self, sender: Host, receiver: Host, yes: bool = True) -> None:
        """Packets in that direction vanish, what is under way included, until called with False."""
        assert self._network is not None
        self._network.block(sender.number, receiver.number, yes)

    def limit(self, sender: Host, receiver: Host, bytes_max: int = 0) -> None:
        """Larger packets in that direction vanish without notice; 0: none does."""
        assert self._network is not None
        self._network.limit(sender.number, receiver.number, bytes_max)

    def reshape(self, sender: Host, receiver: Host, path: Path | None = None) -> None:
        """Packets in that direction fare like this from now on; None: as at the beginning. What it leaves open is as at
        the beginning, too."""
        assert self._network is not None
        usual = self.shape.path(sender.number, receiver.number)
        given = path or usual
        changed = replace(
            given,
            delay_ms=usual.delay_ms if given.delay_ms is None else given.delay_ms,
            loss=usual.loss if given.loss is None else given.loss,
            rate_mbit=usual.rate_mbit if given.rate_mbit is None else given.rate_mbit,
        )
        self._network.reshape(sender.number, receiver.number, changed)

    def stats(self) -> dict[str, Any]:
        """Return what the network has carried and dropped."""
        assert self._network is not None
        return self._network.stats()
