"""The network in user space: builds and drives `relay.c`, which says how it works.

The program holds a TUN device in every host's namespace and disappears with its standard input, so no device is left
behind. It is compiled with `cc` when first needed, kept in memory, and a file only until it runs.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.wan.namespace import Namespace
from tests.wan.shape import DEVICE, NETWORK_BITS, Shape
from tests.wan.shape import Path as Way

SOURCE = Path(__file__).with_name("relay.c")
TUN_QUEUE_PACKETS = 10_000
"""The host's own queue in front of the relay, which must never be the one that drops."""


@functools.cache
def program() -> bytes:
    with tempfile.TemporaryDirectory(prefix="pccl-wan-") as directory:
        built = Path(directory, "relay")
        subprocess.run(["cc", "-O2", "-std=gnu11", "-Wall", "-Wextra", "-o", built, SOURCE], check=True)
        return built.read_bytes()


def _started(process_group: int) -> subprocess.Popen[str]:
    with tempfile.TemporaryDirectory(prefix="pccl-wan-") as directory:
        file = Path(directory, "relay")
        file.write_bytes(program())
        file.chmod(0o700)
        pipe = subprocess.PIPE
        return subprocess.Popen([file], stdin=pipe, stdout=pipe, text=True, process_group=process_group)


def unavailable() -> str | None:
    """Why there can be no relay here; None if there can."""
    if not Path("/dev/net/tun").exists():
        return "/dev/net/tun is missing"
    if shutil.which("cc") is None:
        return "a C compiler is needed to build the relay with"
    return None


class Relay:
    """Commands are answered, so what they say holds when they return."""

    def __init__(self, shape: Shape, namespaces: list[Namespace], addresses: list[str], process_group: int) -> None:
        self._shape = shape
        self._process = _started(process_group)
        try:
            for host, (namespace, address) in enumerate(zip(namespaces, addresses, strict=True)):
                self._attach(shape, host, namespace, address)
            for sender in range(shape.hosts):
                for receiver in range(shape.hosts):
                    self.reshape(sender, receiver, shape.path(sender, receiver))
        except BaseException:
            self.close()
            raise

    def _attach(self, shape: Shape, host: int, namespace: Namespace, address: str) -> None:
        self._command(f"host {namespace.path}")
        self._command(f"address {host} {address}")
        self._command(f"uplink {host} {_rate(shape, shape.up_mbit(host))}")
        self._command(f"downlink {host} {_rate(shape, shape.down_mbit(host))}")
        link = ("ip", "link", "set", DEVICE)
        namespace.run(*link, "mtu", str(shape.mtu_bytes), "txqueuelen", str(TUN_QUEUE_PACKETS), "up")
        namespace.run("ip", "address", "add", f"{address}/{NETWORK_BITS}", "dev", DEVICE)

    def block(self, sender: int, receiver: int, yes: bool) -> None:
        self._command(f"block {sender} {receiver} {yes:d}")

    def limit(self, sender: int, receiver: int, bytes_max: int) -> None:
        self._command(f"limit {sender} {receiver} {bytes_max}")

    def reshape(self, sender: int, receiver: int, path: Way) -> None:
        assert path.delay_ms is not None
        self._command(
            f"path {sender} {receiver} {path.delay_ms * 1e3} {path.loss}"
            f" {_rate(self._shape, path.rate_mbit)} {self._shape.seed_of(sender, receiver)}"
        )
        self._command(f"reorder {sender} {receiver} {path.reordered} {path.held_ms * 1e3}")

    def stats(self) -> dict[str, Any]:
        """Return what was carried and dropped, and how many deliveries were more than a millisecond late."""
        found: dict[str, Any] = json.loads(self._command("stats"))
        return found

    def _command(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        verdict, _, text = self._process.stdout.readline().strip().partition(" ")
        if verdict != "ok":
            raise OSError(f"relay: {line}: {text or 'it has ended'}")
        return text

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        self._process.wait()


def _rate(shape: Shape, rate_mbit: float | None) -> str:
    """Bits per second and bytes of queue; unlimited is written as 0."""
    return "0 0" if rate_mbit is None else f"{rate_mbit * 1e6} {shape.queue_bytes(rate_mbit)}"
