"""The rendezvous of a Ray collective group through Ray's key-value store.

1. Rank 0 starts a master in its process and writes its address and a token under the group's name. Rank 1 starts a
   standby and adds its address, so the group outlives the actor with the master.
2. Rank 0 connects once both addresses are there, which begins the run, and notes it in the store. Then the others
   connect, and connected ones admit them.
3. A record may be of an earlier group of that name, with masters that do not answer. Rank 0 then writes a new record;
   the others read again.
4. If a master answers and leads members, the group is alive: a restarted actor joins it as a newcomer and waits until
   the members call `admit`.
5. Members exchange their ranks by an all_gather at the beginning and after each admission.
"""

from __future__ import annotations

import json
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray
from ray.experimental import internal_kv

from pccl import Communicator, MasterNode, PCCLError, Result
from pccl.status import run_status

TIMEOUT_S = 180.0
"""The time for all actors of a group to connect; Ray may have to start them first."""
POLL_S = 0.05
ANSWER_S = 2.0
"""The time for a living master to answer."""
LEAVE_S = 5.0
ATTEMPTS = 5


@dataclass(frozen=True)
class Record:
    """The record of a group in the store."""

    masters: list[str]
    token: str
    is_founded: bool = False
    """Rank 0 is in the run."""
    is_complete: bool = False
    """All actors have been in the run: a newcomer was restarted."""

    @property
    def address(self) -> str:
        return ",".join(self.masters)

    def leads(self) -> int | None:
        """Return the number of members, or None if no master answers."""
        try:
            status = run_status(self.address, token=self.token, timeout=ANSWER_S)
        except PCCLError:
            return None
        return len(status.members)


class Rendezvous:
    """An actor's communicator in a group, and its master if it hosts one."""

    def __init__(self, name: str, rank: int, world_size: int) -> None:
        """Return when the actor is in the group, or raise PCCLError: TIMEOUT, or as `Communicator.connect`."""
        self._name = name
        self._rank = rank
        self._world_size = world_size
        self._deadline_s = time.monotonic() + TIMEOUT_S
        self._master: MasterNode | None = None
        try:
            record = self._found() if rank == 0 else self._awaited()
            self.token = record.token
            self.communicator = Communicator(
                record.address, token=record.token, place=rank, name=f"rank {rank} of {name}"
            )
            self.communicator.connect(ATTEMPTS, timeout=self._left_s)
            if not record.is_complete:
                self._gather(record)
        except BaseException:
            self._stop_master()
            raise

    @property
    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    def _gather(self, record: Record) -> None:
        """Return when all actors are in the run."""
        if self._rank == 0:
            self._write(replace(record, is_founded=True))
        size = self.communicator.wait_for_peers(self._world_size, timeout=self._left_s)
        if size < self._world_size:
            text = f"group {self._name!r} continues with {size} of its {self._world_size} actors"
            raise PCCLError(Result.INVALID_USAGE, "init_collective_group", text)
        if self._rank == 0:
            self._write(replace(record, is_founded=True, is_complete=True))

    def leave(self) -> None:
        """Leave the group, and delete its record if this actor had the master."""
        with suppress(PCCLError):
            self.communicator.close(timeout=LEAVE_S)
        record = self._read()
        if self._rank == 0 and record is not None and record.token == self.token:
            internal_kv._internal_kv_del(self._key)
        self._stop_master()

    def _found(self) -> Record:
        """Return the record of a living group, or of a new one once its standby is there."""
        record = self._read()
        if record is not None and record.leads():
            return record
        token = secrets.token_urlsafe(32)
        self._write(Record([self._serve(token)], token))
        while (record := self._read()) is None or len(record.masters) < 2 or record.token != token:
            self._pause("rank 1 is missing")
        return record

    def _awaited(self) -> Record:
        """Return the record of a group with a master that answers."""
        while True:
            record = self._read()
            if record is None or record.leads() is None:
                self._pause("rank 0 is missing")
            elif record.is_founded:
                return record
            elif self._rank == 1 and self._master is None and len(record.masters) == 1:
                self._write(replace(record, masters=[*record.masters, self._serve(record.token, record.address)]))
            else:
                self._pause("rank 0 has not begun the run")

    def _serve(self, token: str, standby_of: str = "") -> str:
        """Start a master or a standby, and return its address."""
        host = ray.util.get_node_ip_address()
        listen = f"[{host}]:0" if ":" in host else f"{host}:0"
        self._master = MasterNode(listen, token=token, standby_of=standby_of, daemon=True)
        self._master.run()
        return self._master.address

    def _stop_master(self) -> None:
        if self._master is not None:
            self._master.interrupt()
            self._master = None

    def _pause(self, what: str) -> None:
        """Wait before the next read of the store."""
        if time.monotonic() > self._deadline_s:
            text = f"rank {self._rank} of group {self._name!r} has waited for {TIMEOUT_S:g} s: {what}"
            raise PCCLError(Result.TIMEOUT, "init_collective_group", text)
        time.sleep(POLL_S)

    @property
    def _key(self) -> str:
        return f"pccl/collective/{self._name}"

    def _read(self) -> Record | None:
        found: Any = internal_kv._internal_kv_get(self._key)
        return None if found is None else Record(**json.loads(found))

    def _write(self, record: Record) -> None:
        internal_kv._internal_kv_put(self._key, json.dumps(asdict(record)))
