"""`python -m tests.wan [LAB] -- COMMAND`: runs something on every host of a WAN lab. Needs root.

    sudo python -m tests.wan --hosts 4 --delay-ms 25 --rate-mbit 200 --loss 0.1% -- bench --sizes 16MiB
    sudo python -m tests.wan --hosts 2 --delay-ms 50 --rate-mbit 1000 -- probe 64MiB
    sudo python -m tests.wan --hosts 5 --delay-ms 25 --rate-mbit 100 --site 4:1000/1000 -- sync --megabytes 200
    sudo python -m tests.wan --hosts 3 --delay-ms 25 -- python examples/churn.py

`bench ...` runs `pccl bench --master MASTER --peers HOSTS ...` on every host and prints the report of host 0.
`probe SIZE` sends that many bytes from host 0 to host 1 over one plain TCP connection, several times. In `sync` the
last host fetches shared state from all others; every host prints the bytes it moved. Any other command is run on every
host, with PCCL_MASTER and PCCL_HOST (the host's number) set.

The master is a process of its own on host 0: host 0's peer reaches it without delay, all others over the lab's links.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from pccl.tools.bench.plan import format_bytes, parse_bytes
from pccl.tools.harness import module_command
from tests.wan import probe
from tests.wan.lab import Host, Lab, Link, Path, Site, unavailable

TRANSFERS = 10
MASTER_PORT = 48148


def main() -> int:
    lab_words, separator, command = _split(sys.argv[1:])
    parser = _parser()
    options = parser.parse_args(lab_words)
    if not separator or not command:
        parser.error("a command must follow after --")
    if reason := unavailable():
        print(reason, file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, _terminate)
    try:
        with _lab(options) as lab:
            for host in lab.hosts:
                if options.congestion_control is not None:
                    host.set_congestion_control(options.congestion_control)
                for setting in options.sysctl:
                    host.set_sysctl(*setting)
            if command[0] == "probe":
                status = _probe(lab, command[1:])
            else:
                with _master(lab) as address:
                    status = _run_everywhere(lab, address, command)
            if options.stats:
                print(lab.stats(), file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return status


def _split(words: list[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in words:
        return words, False, []
    at = words.index("--")
    return words[:at], True, words[at + 1 :]


def _terminate(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.wan",
        usage="%(prog)s [options] -- (bench ... | probe SIZE | sync ... | COMMAND ...)",
        description=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="(default: 2)")
    parser.add_argument("--delay-ms", type=float, default=25.0, help="one way, between any two (default: 25)")
    parser.add_argument("--rate-mbit", type=float, help="of each host's uplink and downlink (default: unlimited)")
    parser.add_argument("--loss", type=_probability, default=0.0, help="per packet, such as 0.1%% (default: none)")
    parser.add_argument(
        "--queue-ms", type=float, help="longest queue of a link, at its rate (default: one round trip, at least 10)"
    )
    parser.add_argument(
        "--site",
        type=_site,
        action="append",
        default=[],
        metavar="HOST:UP/DOWN",
        help="rates in Mbit/s of one host, such as 3:20/100; may be repeated",
    )
    parser.add_argument(
        "--path",
        type=_path,
        action="append",
        default=[],
        metavar="FROM-TO:MS[/MBIT]",
        help="one-way delay, and rate, from one host to another, such as 0-1:80/50; may be repeated",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the losses (default: 0)")
    parser.add_argument("--mtu", type=int, default=1500, metavar="BYTES", help="(default: 1500)")
    parser.add_argument(
        "--sysctl",
        type=_setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="on every host, such as net.ipv4.tcp_slow_start_after_idle=0; may be repeated",
    )
    parser.add_argument("--congestion-control", metavar="NAME", help="of every host (default: the machine's)")
    parser.add_argument("--stats", action="store_true", help="print afterwards what the network carried and dropped")
    return parser


def _lab(options: argparse.Namespace) -> Lab:
    return Lab(
        options.hosts,
        Link(options.delay_ms, options.rate_mbit, options.loss, options.queue_ms),
        sites=dict(options.site),
        paths=dict(options.path),
        mtu_bytes=options.mtu,
        seed=options.seed,
    )


@contextmanager
def _master(lab: Lab) -> Iterator[str]:
    """A master on host 0."""
    host = lab.hosts[0]
    command = module_command(
        "pccl", "master", "--found", "--state", "none", "--listen", f"{host.address}:{MASTER_PORT}"
    )
    process = host.popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        if not process.stdout.readline():
            raise OSError("the master has not started")
        yield f"{host.address}:{MASTER_PORT}"
        process.terminate()
        process.wait()


def _run_everywhere(lab: Lab, master: str, command: list[str]) -> int:
    """The first exit code, or signal, that is not zero; it ends the others too."""
    processes = [_start(host, master, *_here(host, lab, master, command)) for host in lab.hosts]
    ended = threading.Semaphore(0)
    for process in processes:
        threading.Thread(target=_wait, args=(process, ended.release), daemon=True).start()
    for _ in processes:
        ended.acquire()
        for host, process in zip(lab.hosts, processes, strict=True):
            if process.returncode:
                print(f"host {host.number} ended with {process.returncode}", file=sys.stderr)
                return abs(process.returncode)
    return 0


def _here(host: Host, lab: Lab, master: str, command: list[str]) -> tuple[list[str], int | None]:
    """A host's command, and the file that it prints to."""
    if command[0] == "sync":
        return module_command("tests.wan.sync", "--hosts", str(len(lab.hosts)), *command[1:]), None
    if command[0] != "bench":
        return command, None
    command = module_command("pccl", *command, "--master", master, "--peers", str(len(lab.hosts)))
    # All hosts have the same figures; one report is enough.
    return (command, None) if host.number == 0 else ([*command, "--json", os.devnull], subprocess.DEVNULL)


def _start(host: Host, master: str, command: list[str], stdout: int | None) -> subprocess.Popen[Any]:
    environment = {**os.environ, "PCCL_MASTER": master, "PCCL_HOST": str(host.number)}
    return host.popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=stdout)


def _wait(process: subprocess.Popen[Any], then: Callable[[], None]) -> None:
    process.wait()
    then()


def _probe(lab: Lab, arguments: list[str]) -> int:
    count = parse_bytes(*arguments)
    near, far = probe.connected(lab.hosts[0], lab.hosts[1])
    with near, far:
        congestion_control = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
        round_trip_ms = 1e3 * min(probe.round_trip_s(near, far) for _ in range(TRANSFERS))
        print(f"{congestion_control}, round trip {round_trip_ms:.2f} ms")
        transfers = [probe.transfer(near, far, count) for _ in range(TRANSFERS)]
        rest_s = [one.seconds for one in transfers[1:]]
        print(
            f"{format_bytes(count)}: first {transfers[0].seconds:.3f} s, then median {statistics.median(rest_s):.3f} s"
            f" ({count * 8 / statistics.median(rest_s) / 1e6:.0f} Mbit/s), from {min(rest_s):.3f} to {max(rest_s):.3f}"
        )
    return 0


def _probability(text: str) -> float:
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a probability")
    return value


def _site(text: str) -> tuple[int, Site]:
    host, _, rates = text.partition(":")
    up, _, down = rates.partition("/")
    return int(host), Site(float(up), float(down or up))


def _path(text: str) -> tuple[tuple[int, int], Path]:
    pair, _, values = text.partition(":")
    sender, _, receiver = pair.partition("-")
    delay_ms, _, rate_mbit = values.partition("/")
    return (int(sender), int(receiver)), Path(float(delay_ms), rate_mbit=float(rate_mbit) if rate_mbit else None)


def _setting(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE")
    return name, value


if __name__ == "__main__":
    sys.exit(main())
