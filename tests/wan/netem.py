"""The network by the kernel's own `tc netem`, where there is one.

Theory of operation. All links meet in a namespace of their own, the core. Of host h:

    wan0 === p<h> - bridge b<h> - u<h> === c<h> - bridge core - ... the c of the other hosts

(`===` is a veth pair.) What h sends leaves by u<h>, where a token bucket is its uplink. What it is sent leaves by
c<h>, whose HTB class is its downlink; below that, a netem for each sender delays and loses. The shaping lies in the
core, not in the host, so that a host's TCP sees a router's queue and not its own card's.

Without random losses, TCP's trains of packets (GSO) stay whole, as in the relay. netem would lose a
train at a time, so with loss the hosts cut trains themselves, which costs them several times the CPU. netem's losses
are not seeded here, and what a block finds under way is still delivered.
"""

from __future__ import annotations

import functools
import json
from contextlib import suppress
from typing import Any

from tests.wan.namespace import Namespace
from tests.wan.shape import DEVICE, NETWORK_BITS, Path, Shape

UNLIMITED_MBIT = 100_000.0
BURST_MS = 2.0
"""The depth of the token buckets, at their rates: a few trains as TCP paces them."""
HELD_PACKETS_MAX = 1_000_000
"""The most packets that a netem without a rate holds."""
# Everything that is asked of the kernel below.
PROBE = (
    "ip link add v0 type veth peer name v1",
    "ip link add b0 type bridge",
    "tc qdisc add dev v0 root handle 1: htb",
    "tc class add dev v0 parent 1: classid 1:1 htb rate 1mbit",
    "tc qdisc add dev v0 parent 1:1 netem delay 1ms loss 1%",
    "tc filter add dev v0 parent 1: protocol ip u32 match ip src 198.18.0.1 flowid 1:1",
    "tc qdisc add dev v1 root tbf rate 1mbit burst 4kb limit 4kb",
)


@functools.cache
def unavailable() -> str | None:
    """Why there can be no netem here; None if there can."""
    try:
        namespace = Namespace()
    except OSError as error:
        return str(error)
    try:
        for line in PROBE:
            namespace.run(*line.split())
    except OSError as error:
        return str(error)
    finally:
        namespace.close()
    return None


class Netem:
    def __init__(self, shape: Shape, namespaces: list[Namespace], addresses: list[str], process_group: int) -> None:
        self._shape = shape
        self._core = Namespace(process_group)
        try:
            self._run("ip link add core type bridge")
            self._run("ip link set core up")
            for host, (namespace, address) in enumerate(zip(namespaces, addresses, strict=True)):
                self._attach(host, namespace, address)
            for receiver in range(shape.hosts):
                self._join(receiver, addresses)
        except BaseException:
            self.close()
            raise

    def _run(self, line: str) -> str:
        return self._core.run(*line.split())

    def _attach(self, host: int, namespace: Namespace, address: str) -> None:
        self._run(f"ip link add p{host} type veth peer name e{host}")
        self._run(f"ip link set e{host} netns {namespace.pid}")
        self._run(f"ip link add u{host} type veth peer name c{host}")
        self._run(f"ip link add b{host} type bridge")
        for device, bridge in (("p", f"b{host}"), ("u", f"b{host}"), ("c", "core")):
            self._run(f"ip link set {device}{host} mtu {self._shape.mtu_bytes} master {bridge} up")
        self._run(f"ip link set b{host} up")
        rate_mbit = self._shape.up_mbit(host)
        if rate_mbit is not None:
            burst_bytes = self._burst_bytes(rate_mbit)
            # The queue comes on top of the bucket.
            limit_bytes = self._shape.queue_bytes(rate_mbit) + burst_bytes
            self._run(f"tc qdisc add dev u{host} root tbf rate {rate_mbit}mbit burst {burst_bytes} limit {limit_bytes}")
        trains = "" if self._is_lossless() else "gso_max_segs 1"
        inside = f"ip link set e{host} name {DEVICE} mtu {self._shape.mtu_bytes} {trains} up"
        namespace.run(*inside.split())
        namespace.run("ip", "address", "add", f"{address}/{NETWORK_BITS}", "dev", DEVICE)

    def _burst_bytes(self, rate_mbit: float) -> int:
        return max(3 * self._shape.mtu_bytes, round(rate_mbit * 1e6 / 8 * BURST_MS / 1e3))

    def _is_lossless(self) -> bool:
        everybody = range(self._shape.hosts)
        return not any(self._shape.path(sender, receiver).loss for sender in everybody for receiver in everybody)

    def _join(self, receiver: int, addresses: list[str]) -> None:
        """The downlink of a host, and the paths that lead to it."""
        device = f"c{receiver}"
        down_mbit = self._shape.down_mbit(receiver) or UNLIMITED_MBIT
        burst_bytes = self._burst_bytes(down_mbit)
        rate = f"ceil {down_mbit}mbit burst {burst_bytes} cburst {burst_bytes} quantum {self._shape.mtu_bytes * 10}"
        self._run(f"tc qdisc add dev {device} root handle 1: htb")
        self._run(f"tc class add dev {device} parent 1: classid 1:1 htb rate {down_mbit}mbit {rate}")
        for sender, address in enumerate(addresses):
            if sender == receiver:
                continue
            own = f"1:{_minor(sender)}"
            share_mbit = down_mbit / (self._shape.hosts - 1)
            self._run(f"tc class add dev {device} parent 1:1 classid {own} htb rate {share_mbit}mbit {rate}")
            self._run(f"tc qdisc add {self._netem(sender, receiver, None)}")
            match = f"u32 match ip src {address}/32"
            self._run(f"tc filter add dev {device} parent 1: protocol ip {match} flowid {own}")

    def _netem(self, sender: int, receiver: int, loss: float | None) -> str:
        path = self._shape.path(sender, receiver)
        assert path.delay_ms is not None
        assert path.loss is not None
        rate_mbit = min(path.rate_mbit or UNLIMITED_MBIT, self._shape.down_mbit(receiver) or UNLIMITED_MBIT)
        packets = HELD_PACKETS_MAX
        if rate_mbit < UNLIMITED_MBIT:
            held_bytes = self._shape.queue_bytes(rate_mbit) + rate_mbit * 1e6 / 8 * path.delay_ms / 1e3
            packets = max(2, round(held_bytes / self._shape.mtu_bytes))
        # fmt: off
        words = [
            "dev", f"c{receiver}", "parent", f"1:{_minor(sender)}", "handle", f"{_minor(sender)}:", "netem",
            "delay", f"{path.delay_ms * 1e3:.0f}us", "loss", f"{100 * (path.loss if loss is None else loss)}%",
            "limit", str(packets),
        ]
        # fmt: on
        return " ".join(words + ([] if path.rate_mbit is None else ["rate", f"{path.rate_mbit}mbit"]))

    def block(self, sender: int, receiver: int, yes: bool) -> None:
        self._run(f"tc qdisc change {self._netem(sender, receiver, 1.0 if yes else None)}")

    def limit(self, sender: int, receiver: int, bytes_max: int) -> None:
        raise OSError("netem knows no packets by their size; use the relay")

    def reshape(self, sender: int, receiver: int, path: Path) -> None:
        raise OSError("netem keeps its paths as they were made; use the relay")

    def stats(self) -> dict[str, Any]:
        """Return what each queue has carried and dropped: tbf is an uplink, a netem a path, and an HTB a downlink."""
        keys = ("dev", "kind", "handle", "packets", "bytes", "drops")
        queues = json.loads(self._run("tc -s -j qdisc show"))
        return {"queues": [{key: one[key] for key in keys} for one in queues if one["kind"] in ("tbf", "netem", "htb")]}

    def close(self) -> None:
        with suppress(OSError):
            self._core.close()


def _minor(sender: int) -> int:
    return 10 + sender
