"""The parts of a lab. One-way delays, decimal megabits, rates of IP packets (TCP carries 3.5 % less)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MTU_BYTES = 1500
NETWORK, NETWORK_BITS = "198.18.0.0", 24
"""The network of a lab's hosts, from a range that is set aside for measurements."""
DEVICE = "wan0"
"""The name of every host's interface towards the others."""
QUEUE_MS_MIN = 10.0


@dataclass(frozen=True)
class Link:
    """The path between any two hosts, unless a `Site` or a `Path` says otherwise.

    Each host has an uplink and a downlink of `rate_mbit` each (None: unlimited), shared by all it talks to, as a
    site has. Each is followed by a drop-tail queue of `queue_ms` at that rate; by default that is one round trip,
    the bandwidth-delay product, and at least 10 ms. `loss` is the probability that a packet is lost, each by itself, in
    either direction: acknowledgements too.
    """

    delay_ms: float = 0.0
    rate_mbit: float | None = None
    loss: float = 0.0
    queue_ms: float | None = None


@dataclass(frozen=True)
class Site:
    """The differences of one host; None: as the link."""

    up_mbit: float | None = None
    down_mbit: float | None = None


@dataclass(frozen=True)
class Path:
    """The differences for packets from one host to another; None: as the link. `rate_mbit` comes on top of the uplink's
    and the downlink's. The share `reordered` of the packets comes `held_ms` later than the rest, which only the relay
    does."""

    delay_ms: float | None = None
    loss: float | None = None
    rate_mbit: float | None = None
    reordered: float = 0.0
    held_ms: float = 0.0


@dataclass(frozen=True)
class Shape:
    hosts: int
    link: Link
    sites: Mapping[int, Site] = field(default_factory=dict)
    paths: Mapping[tuple[int, int], Path] = field(default_factory=dict)
    mtu_bytes: int = MTU_BYTES
    seed: int = 0

    def __post_init__(self) -> None:
        known = range(self.hosts)
        if not all(host in known for host in self.sites) or not all({*pair} <= {*known} for pair in self.paths):
            raise ValueError(f"a site or a path names a host that is not among the {self.hosts}")

    def up_mbit(self, host: int) -> float | None:
        site = self.sites.get(host, Site())
        return self.link.rate_mbit if site.up_mbit is None else site.up_mbit

    def down_mbit(self, host: int) -> float | None:
        site = self.sites.get(host, Site())
        return self.link.rate_mbit if site.down_mbit is None else site.down_mbit

    def path(self, sender: int, receiver: int) -> Path:
        """Return it with only the rate left open, whose None is unlimited."""
        path = self.paths.get((sender, receiver), Path())
        return Path(
            delay_ms=self.link.delay_ms if path.delay_ms is None else path.delay_ms,
            loss=self.link.loss if path.loss is None else path.loss,
            rate_mbit=path.rate_mbit,
            reordered=path.reordered,
            held_ms=path.held_ms,
        )

    @property
    def queue_ms(self) -> float:
        if self.link.queue_ms is not None:
            return self.link.queue_ms
        delays_ms = [self.link.delay_ms, *(path.delay_ms or 0.0 for path in self.paths.values())]
        return max(QUEUE_MS_MIN, 2 * max(delays_ms))

    def queue_bytes(self, rate_mbit: float) -> int:
        """Return the bytes that a queue holds: at least two packets, as a shorter one could not keep a link busy."""
        return max(2 * self.mtu_bytes, round(rate_mbit * 1e6 / 8 * self.queue_ms / 1e3))

    def seed_of(self, sender: int, receiver: int) -> int:
        return (self.seed * self.hosts + sender) * self.hosts + receiver
