"""The addresses of a run's masters, and the processes that serve them, one after the other at each."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from pccl import PCCLError
from pccl.launcher import Child, module_command
from pccl.status import RunStatus, run_status
from pccl.stress.masters import PEER_TIMEOUT_S
from pccl.stress.packet_filter import LISTENING_HOST, HeldPort, Place
from pccl.stress.plan import Plan
from pccl.stress.processes import Processes

LEADING = "leading"
MASTER_READY = b"pccl master listening on "
STATUS_S = 2.0


@dataclass
class Seat:
    """An address of a master, and the process that is there."""

    number: int
    address: str
    process: Child
    is_standby: bool = False
    starts: int = 1
    is_listening: bool = False

    def __str__(self) -> str:
        return f"standby {self.number}" if self.number else "the master"

    @property
    def place(self) -> Place:
        return Place("", int(self.address.rpartition(":")[2]))


class Seats:
    """All addresses of masters."""

    def __init__(self, plan: Plan, processes: Processes) -> None:
        self._plan = plan
        self._processes = processes
        self._ports: list[HeldPort] = []
        self.all: list[Seat] = []

    @property
    def addresses(self) -> str:
        """The addresses with commas between, as peers are given them."""
        return ",".join(seat.address for seat in self.all)

    def begin(self) -> Seat:
        """Start the first master, or one more standby of those that are there."""
        number, port = len(self.all), HeldPort()
        self._ports.append(port)
        address = f"{LISTENING_HOST}:{port.number}"
        seat = Seat(number, address, self._master(number, 1, address, self.addresses), number > 0)
        self.all.append(seat)
        return seat

    def replace(self, seat: Seat, is_standby: bool) -> None:
        """Kill the process at this address and start another one there, as a standby of the others or as a master that
        knows nothing of the run."""
        seat.process.popen.kill()
        seat.process.popen.wait()
        self._processes.put_away(seat.process)
        seat.starts += 1
        seat.is_listening = False
        seat.is_standby = is_standby
        standby_of = ",".join(other.address for other in self.all if other is not seat) if is_standby else ""
        seat.process = self._master(seat.number, seat.starts, seat.address, standby_of)

    def _master(self, number: int, starts: int, address: str, standby_of: str) -> Child:
        name = f"standby {number}" if number else "master"
        arguments = ["--listen", address, "--peer-timeout", str(PEER_TIMEOUT_S)]
        state = str(self._processes.logs / f"state-{number}") if self._plan.keeps_state else "none"
        arguments += ["--state", state]
        if standby_of:
            arguments += ["--standby-of", standby_of]
        elif starts == 1:
            arguments.append("--found")
        return self._processes.start(f"{name} {starts}", module_command("pccl.stress.master", *arguments))

    def of(self, process: Child) -> Seat | None:
        """Return the address that this process serves; None if it was killed there."""
        return next((seat for seat in self.all if seat.process is process), None)

    def leading(self) -> list[tuple[Seat, RunStatus]]:
        """Ask all masters, and return those that answer that they lead a run, with how it stands."""
        found = []
        for seat in self.all:
            with suppress(PCCLError):
                status = run_status(seat.address, token=self._processes.token, timeout=STATUS_S)
                if status.role == LEADING:
                    found.append((seat, status))
        return found

    def close(self) -> None:
        for port in self._ports:
            port.close()
