"""The delays, rates, losses and cuts of a lab, and its cleanup.

Bounds that follow from the lab's arithmetic are tight; those that a busy machine can miss are wide.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path as PathOfFile

import pytest

from tests.support.cluster import until
from tests.wan import probe
from tests.wan.conftest import is_over
from tests.wan.lab import Host, Lab, Link, Path, Site, unavailable

ROOT = PathOfFile(__file__).resolve().parents[2]
TIMEOUT_S = 60.0
BUSY_MACHINE_S = 0.01
TRIALS_MAX = 6
"""The number of attempts at what a busy machine may make too slow."""
END = b"end"


@contextmanager
def _connected(dialing: Host, listening: Host) -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = probe.connected(dialing, listening)
    with near, far:
        yield near, far


class Datagrams:
    """A way from one host to another that keeps order, as all paths of a lab do."""

    def __init__(self, sender: Host, receiver: Host) -> None:
        with receiver.entered():
            self._in = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._in.bind((receiver.address, 0))
        with sender.entered():
            self._out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._out.connect(self._in.getsockname())

    def __enter__(self) -> Datagrams:
        return self

    def __exit__(self, *_: object) -> None:
        self._in.close()
        self._out.close()

    def send(self, text: bytes) -> None:
        self._out.send(text)

    def receive(self, timeout_s: float = TIMEOUT_S) -> bytes:
        self._in.settimeout(timeout_s)
        return self._in.recv(2048)

    def arrived(self) -> list[bytes]:
        """All that came of what was sent: when a later one is there, no earlier one can follow."""
        found: list[bytes] = []
        while END not in found:
            self.send(END)  # may be lost itself
            try:
                while END not in found:
                    found.append(self.receive(0.2))
            except TimeoutError:
                continue
        return found[:-1]

    def one_way_s(self) -> float:
        start_s = time.perf_counter()
        self.send(b"?")
        self.receive()
        return time.perf_counter() - start_s


def _faster_than(mbit_per_s: float, near: socket.socket, far: socket.socket, count: int) -> probe.Transfer:
    trials = [probe.transfer(near, far, count)]
    while trials[-1].mbit_per_s <= mbit_per_s:
        assert len(trials) < TRIALS_MAX, trials
        trials.append(probe.transfer(near, far, count))
    return trials[-1]


def test_round_trips_and_rates() -> None:
    with Lab(2, Link(delay_ms=10, rate_mbit=80)) as lab, _connected(*lab.hosts) as (near, far):
        round_trips_s = [probe.round_trip_s(near, far) for _ in range(20)]
        assert 0.02 <= min(round_trips_s) < 0.02 + BUSY_MACHINE_S
        one = _faster_than(55, near, far, 2 << 20)
        # TCP carries 1448 in 1500 bytes; the round trip counts too, so less than that is left.
        assert one.seconds >= 0.02 + one.bytes * 8 / 80e6


def test_uplink_is_shared() -> None:
    """An uplink is shared by everybody a host sends to; so is a downlink."""
    with Lab(3, Link(delay_ms=1, rate_mbit=40)) as lab:
        for ways in (((0, 1), (0, 2)), ((1, 0), (2, 0))):
            with (
                _connected(*(lab.hosts[number] for number in ways[0])) as one,
                _connected(*(lab.hosts[number] for number in ways[1])) as two,
            ):
                other = threading.Thread(target=probe.transfer, args=(*two, 512 << 10))
                start_s = time.perf_counter()
                other.start()
                probe.transfer(*one, 512 << 10)
                other.join()
                assert time.perf_counter() - start_s >= (1 << 20) * 8 / 40e6


def test_asymmetric() -> None:
    """Paths differ in delay, sites in rate."""
    paths = {(0, 1): Path(delay_ms=30), (1, 0): Path(delay_ms=5)}
    with Lab(2, Link(rate_mbit=100), sites={0: Site(up_mbit=20)}, paths=paths) as lab:
        for ends, delay_s in ((lab.hosts, 0.03), (lab.hosts[::-1], 0.005)):
            with Datagrams(*ends) as way:
                one_way_s = min(way.one_way_s() for _ in range(10))
                assert delay_s <= one_way_s < delay_s + BUSY_MACHINE_S
        with _connected(*lab.hosts) as (near, far):
            assert max(probe.transfer(near, far, 256 << 10).mbit_per_s for _ in range(2)) < 20
            _faster_than(25, far, near, 1 << 20)


def _lost(seed: int) -> list[int]:
    """Which of many datagrams."""
    with Lab(2, Link(delay_ms=1, loss=0.05), seed=seed) as lab, Datagrams(*lab.hosts) as way:
        arrived: list[bytes] = []
        numbers = range(2000)
        for first in numbers[::100]:  # not more at once than a socket holds
            for number in range(first, first + 100):
                way.send(b"%d" % number)
            arrived += way.arrived()
        return sorted({*numbers} - {int(text) for text in arrived})


def test_losses() -> None:
    lost = _lost(seed=1)
    # 100 are expected, with a standard deviation of 10.
    assert 50 <= len(lost) <= 150


def test_losses_of_seed() -> None:
    # How many end marks travel in between depends on the timing, and they draw too: only the first batch is compared.
    one, same, other = ([number for number in _lost(seed) if number < 100] for seed in (1, 1, 2))
    assert one == same != other


def test_reordering() -> None:
    sent = [b"%d" % number for number in range(100)]
    with Lab(2, Link(delay_ms=1)) as lab:
        one, other = lab.hosts
        with Datagrams(one, other) as way:
            lab.reshape(one, other, Path(reordered=0.3, held_ms=20))
            for text in sent:
                way.send(text)
            arrived = [way.receive() for _ in sent]
            assert sorted(arrived) == sorted(sent)
            assert arrived != sent
            lab.reshape(one, other)
            for text in sent:
                way.send(text)
            assert [way.receive() for _ in sent] == sent


def test_bytes_survive_reordering() -> None:
    payload = random.Random(0).randbytes(1 << 20)
    way = {(0, 1): Path(reordered=0.05, held_ms=5)}
    with Lab(2, Link(delay_ms=2), paths=way) as lab, _connected(*lab.hosts) as (near, far):
        sender = threading.Thread(target=near.sendall, args=(payload,))
        sender.start()
        received = bytearray()
        while len(received) < len(payload):
            received += far.recv(1 << 20)
        sender.join()
    assert received == payload


def test_block_is_one_way() -> None:
    with Lab(2, Link(delay_ms=1)) as lab:
        one, other = lab.hosts
        with Datagrams(one, other) as way, Datagrams(other, one) as way_back:
            lab.block(one, other)
            way.send(b"vanishes")
            way_back.send(b"arrives")
            assert way_back.receive() == b"arrives"
            lab.block(one, other, yes=False)
            way.send(b"arrives")
            assert way.receive() == b"arrives"


def test_host_comes_back() -> None:
    with (
        Lab(3, Link(delay_ms=1)) as lab,
        _connected(lab.hosts[0], lab.hosts[2]) as (near, far),
        _connected(lab.hosts[0], lab.hosts[1]) as others,
    ):
        lab.hosts[2].down()
        near.sendall(b"late")
        probe.round_trip_s(*others)
        far.settimeout(0.05)
        with pytest.raises(TimeoutError):
            far.recv(4)
        lab.hosts[2].up()
        far.settimeout(TIMEOUT_S)
        assert far.recv(4) == b"late"  # TCP has tried again


def test_sysctl_of_one_host() -> None:
    name, file = "net.ipv4.tcp_slow_start_after_idle", "/proc/sys/net/ipv4/tcp_slow_start_after_idle"
    with Lab(2, Link()) as lab:
        for host in lab.hosts:
            host.set_sysctl(name, str(host.number))
        assert [host.run("cat", file).strip() for host in lab.hosts] == ["0", "1"]


def test_congestion_control() -> None:
    """It is set at the end that dials and at the end that accepts."""
    with Lab(2, Link()) as lab:
        for host in lab.hosts:
            host.set_congestion_control("reno")
        with _connected(*lab.hosts) as ends:
            for end in ends:
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"reno"


def test_cleanup_after_error() -> None:
    lab = Lab(2, Link())

    def use_it() -> None:
        with lab:
            script = "trap '' TERM INT HUP; echo; while :; do :; done"
            stubborn = lab.hosts[1].popen(["sh", "-c", script], stdout=subprocess.PIPE)
            assert stubborn.stdout is not None
            with stubborn.stdout as stdout:
                stdout.readline()
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use_it()
    assert [process.returncode for process in lab.hosts[1].processes] == [-signal.SIGKILL]
    assert not any(os.path.exists(host.namespace.path) for host in lab.hosts)


def test_cleanup_after_sigkill() -> None:
    code = """if True:
        from tests.wan.lab import Lab, Link
        with Lab(2, Link()) as lab:
            child = lab.hosts[1].popen(["sleep", "1000"])
            print(child.pid, *(host.namespace.pid for host in lab.hosts), flush=True)
            child.wait()
    """
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as owner:
        assert owner.stdout is not None
        pids = [int(text) for text in owner.stdout.readline().split()]
        assert len(pids) == 3
        owner.kill()
    for pid in pids:
        until(partial(is_over, pid), f"process {pid} ends with its lab")


@pytest.mark.parametrize(("sites", "paths"), [({2: Site()}, {}), ({}, {(0, 2): Path()})])
def test_unknown_hosts(sites: dict[int, Site], paths: dict[tuple[int, int], Path]) -> None:
    with pytest.raises(ValueError, match="not among the 2"):
        Lab(2, Link(), sites=sites, paths=paths)


def test_reason_without_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        assert unavailable() == "a WAN lab needs root"
    monkeypatch.setenv("PATH", "")
    assert unavailable() == "a WAN lab needs ip, unshare, nsenter (packages iproute2 and util-linux)"
