"""How the actors of a Ray collective group find each other: from Ray's key-value store to a connected communicator.

1. Rank 0 starts a master in its process and writes its address and a token into the store, under the group's name.
   Rank 1 starts a standby and adds its address: the group outlives the actor that has the master. A group of one needs
   neither.
2. Rank 0 connects once both addresses are there, which founds the run, and says so in the store. Then the others
   connect, and those that are in admit them until all are.
3. What the store says may be of an earlier group of that name, whose actors are gone. Nobody answers at its addresses
   then. Rank 0 starts anew where that is so, and the others read again.
4. If a master answers that leads members, the group lives: an actor that was started again joins it as a newcomer, and
   waits until the members call `admit`.
5. Everybody tells everybody its rank by an all_gather, after a founding and after each admission.
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
"""Seconds within which all actors of a group must have come; Ray may have to start them first."""
POLL_S = 0.05
ANSWER_S = 2.0
"""Seconds within which a master that lives answers."""
LEAVE_S = 5.0
ATTEMPTS = 5
"""How often a master is dialled that has started already, or is gone."""


@dataclass(frozen=True)
class Record:
    """What the store says of a group."""

    masters: list[str]
    token: str
    is_founded: bool = False
    """Whether rank 0 is in the run."""
    is_complete: bool = False
    """Whether all have been in the run: whoever comes now was started again."""

    @property
    def address(self) -> str:
        return ",".join(self.masters)

    def leads(self) -> int | None:
        """Return how many members the group has, or None if none of its masters answers."""
        try:
            status = run_status(self.address, token=self.token, timeout=ANSWER_S)
        except PCCLError:
            return None
        return len(status.members)


class Rendezvous:
    """One actor's way into a group, and what it keeps of it: a communicator, and a master if it hosts one."""

    def __init__(self, name: str, rank: int, world_size: int) -> None:
        """Return when the actor is in the group.

        Raises:
            PCCLError: TIMEOUT if not all actors have come in time; other errors as of `Communicator.connect`.
        """
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
        """Return when all are in the run."""
        if self._rank == 0:
            self._write(replace(record, is_founded=True))
        size = self.communicator.wait_for_peers(self._world_size, timeout=self._left_s)
        if size < self._world_size:
            text = f"group {self._name!r} has gone on with {size} of its {self._world_size} actors"
            raise PCCLError(Result.INVALID_USAGE, "init_collective_group", text)
        if self._rank == 0:
            self._write(replace(record, is_founded=True, is_complete=True))

    def leave(self) -> None:
        """Leave the group, and forget it if this actor had its master."""
        with suppress(PCCLError):
            self.communicator.close(timeout=LEAVE_S)
        record = self._read()
        if self._rank == 0 and record is not None and record.token == self.token:
            internal_kv._internal_kv_del(self._key)
        self._stop_master()

    def _found(self) -> Record:
        """Return the record of a group that lives, or of a new one when its standby is there."""
        record = self._read()
        if record is not None and record.leads():
            return record
        token = secrets.token_urlsafe(32)
        self._write(Record([self._serve(token)], token))
        while (record := self._read()) is None or len(record.masters) < 2 or record.token != token:
            self._pause("rank 1 has not come")
        return record

    def _awaited(self) -> Record:
        """Return the record of a group whose masters answer."""
        while True:
            record = self._read()
            if record is None or record.leads() is None:
                self._pause("rank 0 has not come")
            elif record.is_founded:
                return record
            elif self._rank == 1 and self._master is None and len(record.masters) == 1:
                self._write(replace(record, masters=[*record.masters, self._serve(record.token, record.address)]))
            else:
                self._pause("rank 0 has not founded the group")

    def _serve(self, token: str, standby_of: str = "") -> str:
        """Start a master for the group's founders, or a standby. Return its address."""
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
        """Wait before the store is read again. TIMEOUT."""
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
