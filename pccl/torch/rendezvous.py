"""Rendezvous by handles: how the processes that one reconfigure names find each other, without a store.

A handle names a process group object and the port at which it listens, from its first handle to its end. All who
reconfigure with one uuid and the same handles in the same order meet at the first of them, the *host* of the new world:

    join       each of the others dials the host, and says the uuid, a digest of the handles, and who it is
    stand by   once all are there the host starts a master, and asks the next ranks for a standby each
    go         all are told where the masters are
    refuse     or why there is no new world

1. Nobody waits for a process that has died: where nobody listens, dialing fails at once, and the host looks whether
   those who have not come are alive. A host that dies closes its connections. Everybody waits for `timeout_s` at most,
   and the error names those who have not come.
2. Whoever joins before the host has called is kept until it does. If the host is in another call that needs this
   process, that call fails at once: it is waiting for somebody who has gone on.
3. A uuid is used once, whether it succeeds or not: a latecomer of a failed attempt can then never be taken for somebody
   of the next one, and is told why that one failed.
4. Handles hold 64 random bits each. So the digest shows that its sender was given them all, and the secret of the new
   run is told to nobody else.

This module knows neither torch nor masters: the caller says how a master or a standby is started.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote, unquote

import msgspec

from pccl.runtime.network import addresses

LINE_BYTES_MAX = 2**16
BACKLOG = 1024
LOOK_S = 0.5
"""Seconds between two looks at those who have not come, and for one."""
STANDBYS = 2
"""Number of standbys, so that the loss of the host is decided as any other."""
_HANDLE = re.compile(r"pccl:([0-9a-f]{16}):(\d{1,5}):([^:]+):([^:]*)")


class RendezvousError(RuntimeError):
    """There is no new world. The text says why."""


class Handle(NamedTuple):
    """A process group object, and where it can be reached."""

    id: str
    """16 random hexadecimal digits."""
    host: str
    port: int
    name: str
    """What people call the process: its host and process number."""

    def __str__(self) -> str:
        return f"pccl:{self.id}:{self.port}:{quote(self.host, safe='')}:{quote(self.name, safe='')}"

    @classmethod
    def parse(cls, text: str) -> Handle:
        """Return the handle that was made into this text. RendezvousError if there is none."""
        found = _HANDLE.fullmatch(text)
        if found is None:
            raise RendezvousError(
                f"{text!r} is no handle of a pccl process group; take what get_reconfigure_handle says"
            )
        return cls(found[1], unquote(found[3]), int(found[2]), unquote(found[4]))


class _Line(msgspec.Struct, tag=True, frozen=True):
    """A message: one line of JSON."""


class Join(_Line, frozen=True):
    uuid: int
    digest: str
    id: str


class StandBy(_Line, frozen=True):
    master: str
    token: str


class Standing(_Line, frozen=True):
    address: str


class Go(_Line, frozen=True):
    masters: str
    token: str


class Refuse(_Line, frozen=True):
    reason: str


_Any = Join | StandBy | Standing | Go | Refuse
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[_Any] = msgspec.json.Decoder(_Any)


@dataclass(frozen=True)
class Masters:
    """How the host and the standbys start their masters. Each returns the "host:port" that others dial."""

    found: Callable[[int, str], str]
    """Start the master of a run that so many peers found, with this token."""
    stand_by: Callable[[str, str], str]
    """Start a standby of the master at this address, with this token."""


class Invitation(NamedTuple):
    """Where the new world meets."""

    masters: str
    """The addresses of its masters, with commas between."""
    token: str


def ordered(handles: Sequence[str] | set[str] | frozenset[str]) -> list[str]:
    """Return handles in the order of their ranks: a list as it is, a set sorted. RendezvousError."""
    found = list(handles) if isinstance(handles, list | tuple) else sorted(handles)
    if not found:
        raise RendezvousError("reconfigure needs at least one handle: that of this process")
    twice = {handle for handle in found if found.count(handle) > 1}
    if twice:
        named = ", ".join(Handle.parse(handle).name for handle in sorted(twice))
        raise RendezvousError(f"reconfigure was given the handles of {named} more than once; handles must be unique")
    return found


def digest_of(uuid: int, handles: Sequence[str]) -> str:
    return hashlib.sha256("\n".join([str(uuid), *handles]).encode()).hexdigest()


class Endpoint:
    """The place at which one process group object can be found. Thread-safe, but for one call of `meet` at a time.

    A thread of its own hears those who come: so whoever comes too late for an attempt is told why it failed, also while
    this process is busy with something else.
    """

    def __init__(self, host: str, name: str) -> None:
        """`host` is where others dial this process. OSError."""
        self._listener = addresses.listen("", 0, backlog=BACKLOG)
        port: int = self._listener.getsockname()[1]
        self.handle = Handle(secrets.token_hex(8), host, port, name)
        self._changed = threading.Condition()
        """Guards all that follows."""
        self._ends: dict[int, str] = {}
        """The uuids that were used, with what latecomers are told."""
        self._party: _Party | None = None
        """Those who have joined the present call."""
        self._early: list[_Guest] = []
        """Those who have joined for a uuid that this process has not called with yet."""
        self._guests: set[_Guest] = set()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="pccl rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Be found no more."""
        self._wake.close()
        self._thread.join()

    def require(self, uuid: int, handles: Sequence[str]) -> None:
        """Raise RendezvousError unless this process can reconfigure with these."""
        if str(self.handle) not in handles:
            raise RendezvousError(
                f"the handle of this process ({self.handle.name}) is not among the {len(handles)} that reconfigure was "
                f"given: a process that shall not be in the new world does not call it"
            )
        with self._changed:
            if uuid in self._ends:
                raise RendezvousError(_used(uuid))

    def use(self, uuid: int) -> None:
        """Note that a uuid is used."""
        with self._changed:
            self._ends[uuid] = _used(uuid)

    def meet(self, uuid: int, handles: Sequence[str], timeout_s: float, masters: Masters) -> Invitation:
        """Meet those whose `handles` these are: more than one, and this process among them.

        Raises:
            RendezvousError: as of `require`; or there is no new world, for any of them.
        """
        self.require(uuid, handles)
        self.use(uuid)
        end_s = time.monotonic() + timeout_s
        known = [Handle.parse(handle) for handle in handles]
        join = Join(uuid, digest_of(uuid, handles), self.handle.id)
        if handles[0] != str(self.handle):
            with self._changed:
                self._end(uuid, f"{self.handle.name} was given handles of which it is not the first")
            return _visit(join, known[0], end_s, timeout_s, masters)
        party = _Party(join, known)
        try:
            invitation = self._host(party, len(known), end_s, timeout_s, masters)
        except BaseException as error:
            with self._changed:
                self._party = None
                reason = str(error) or type(error).__name__
                self._end(uuid, f"{self.handle.name}, the first of the handles, says: {reason}")
            raise
        with self._changed:
            self._party = None
            self._ends[uuid] = _used(uuid)
        return invitation

    # The host.

    def _host(self, party: _Party, size: int, end_s: float, timeout_s: float, masters: Masters) -> Invitation:
        with self._changed:
            self._party = party
            early, self._early = self._early, []
            for guest in early:
                self._joins(guest)
        threading.Thread(target=self._look_for, args=(party,), name="pccl rendezvous look", daemon=True).start()
        self._wait(party, lambda: party.is_complete, end_s, timeout_s)
        token = secrets.token_hex(16)
        master = masters.found(size, token)
        standing_by = party.first(STANDBYS)
        for guest in standing_by:
            guest.send(StandBy(master, token))
        self._wait(party, lambda: len(party.standbys) == len(standing_by), end_s, timeout_s)
        go = Go(",".join([master, *(party.standbys[guest] for guest in standing_by)]), token)
        with self._changed:
            for guest in party.here.values():
                guest.send(go)
        return Invitation(go.masters, token)

    def _wait(self, party: _Party, is_done: Callable[[], bool], end_s: float, timeout_s: float) -> None:
        """Wait for those who come. RendezvousError."""
        with self._changed:
            while not (party.failure or is_done()):
                if not self._changed.wait(max(0.0, end_s - time.monotonic())):
                    party.fails(f"timed out after {timeout_s:g} s: {party.who_is_missing()}")
            if party.failure:
                raise RendezvousError(party.failure)

    def _look_for(self, party: _Party) -> None:
        """Look again and again whether those who have not come are alive. Nobody listens at the port of one that is
        not."""
        while True:
            with self._changed:
                missing = party.missing
                if self._party is not party or not missing:
                    return
            for handle in missing.values():
                try:
                    socket.create_connection((handle.host, handle.port), LOOK_S).close()
                except ConnectionRefusedError:
                    with self._changed:
                        party.fails(f"{handle.name} cannot be reached at {addresses.join(handle.host, handle.port)}")
                        self._changed.notify_all()
                    return
                except OSError:
                    continue  # it may be there, and reach this process
            with self._changed:
                self._changed.wait_for(lambda: self._party is not party or not party.missing, LOOK_S)

    def _end(self, uuid: int, reason: str) -> None:
        """Tell all who have come for a uuid, and those who will, why there is no world."""
        self._ends[uuid] = reason
        for guest in [guest for guest in self._guests if guest.join is not None and guest.join.uuid == uuid]:
            guest.send(Refuse(reason))
        self._early = [guest for guest in self._early if guest.join is not None and guest.join.uuid != uuid]

    # The thread.

    def _listen(self) -> None:
        with self._listener, self._woken, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        for guest in self._guests:
                            guest.close()
                        return
                    if key.data is None:
                        self._accept(selector)
                    else:
                        self._hear(selector, key.data)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with suppress(OSError):
            sock, _ = self._listener.accept()
            if len(self._guests) >= BACKLOG:
                sock.close()
                return
            guest = _Guest(sock)
            self._guests.add(guest)
            selector.register(sock, selectors.EVENT_READ, guest)

    def _hear(self, selector: selectors.BaseSelector, guest: _Guest) -> None:
        lines = guest.hear()
        with self._changed:
            if lines is None:
                selector.unregister(guest.sock)
                guest.close()
                self._guests.discard(guest)
                if guest in self._early:
                    self._early.remove(guest)
                if self._party is not None:
                    self._party.left(guest)
            for line in lines or ():
                if isinstance(line, Join) and guest.join is None:
                    guest.join = line
                    self._joins(guest)
                elif isinstance(line, Standing) and self._party is not None:
                    self._party.standbys[guest] = line.address
            self._changed.notify_all()

    def _joins(self, guest: _Guest) -> None:
        """Take in a guest that has said Join."""
        assert guest.join is not None
        party, uuid = self._party, guest.join.uuid
        if party is not None and uuid == party.uuid:
            party.joins(guest)
        elif uuid in self._ends:
            guest.send(Refuse(self._ends[uuid]))
        else:
            self._early.append(guest)
            if party is not None:
                party.has_gone_on(guest.join)


def _used(uuid: int) -> str:
    return f"the uuid {uuid} was already used; give each reconfigure a new one"


class _Guest:
    """A connection of somebody who joins, at either end."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.join: Join | None = None
        self._received = b""

    def hear(self) -> list[_Any] | None:
        """Return what has been said, or None if nothing more will be. TimeoutError, where the socket has a timeout."""
        try:
            some = self.sock.recv(LINE_BYTES_MAX)
        except TimeoutError:
            raise
        except OSError:
            return None
        *lines, self._received = (self._received + some).split(b"\n")
        if not some or len(self._received) > LINE_BYTES_MAX:
            return None
        try:
            return [_decoder.decode(line) for line in lines]
        except msgspec.DecodeError:
            return None  # somebody else, who tries ports

    def send(self, line: _Any) -> None:
        """Say something. That it does not arrive is noticed by `hear`."""
        with suppress(OSError):
            self.sock.sendall(_encoder.encode(line) + b"\n")

    def close(self) -> None:
        self.sock.close()


class _Party:
    """Those who have joined the host in one call of it. Guarded by its endpoint."""

    def __init__(self, join: Join, known: list[Handle]) -> None:
        self.uuid = join.uuid
        self.failure = ""
        """The reason why there will be no new world."""
        self.here: dict[str, _Guest] = {}
        """Those who are to be in the new world and have joined, by id."""
        self.standbys: dict[_Guest, str] = {}
        """The addresses of their standbys."""
        self._digest = join.digest
        self._others = {handle.id: handle for handle in known[1:]}

    @property
    def is_complete(self) -> bool:
        return len(self.here) == len(self._others)

    def first(self, count: int) -> list[_Guest]:
        """Return the first of those who are here, by rank; nobody where a standby would have no majority."""
        return [self.here[each] for each in list(self._others)[:count]] if len(self._others) > 1 else []

    @property
    def missing(self) -> dict[int, Handle]:
        """Those who have not joined, by rank."""
        return {rank: each for rank, each in enumerate(self._others.values(), 1) if each.id not in self.here}

    def fails(self, reason: str) -> None:
        """Give the new world up. The first reason stays."""
        self.failure = self.failure or reason

    def who_is_missing(self) -> str:
        missing = [f"rank {rank} ({handle.name})" for rank, handle in self.missing.items()]
        if not missing:
            return "not all standbys have been started"
        return f"{', '.join(missing)} of {len(self._others) + 1} did not call reconfigure with uuid {self.uuid}"

    def joins(self, guest: _Guest) -> None:
        """Take in a guest that has come for this call."""
        assert guest.join is not None
        handle = self._others.get(guest.join.id)
        if handle is None:
            guest.send(Refuse("this process is not among the handles that the first of them was given"))
            return
        self.here[handle.id] = guest
        if guest.join.digest != self._digest:
            what = "was given other handles than the first of them, or in another order, for uuid"
            self.fails(f"{handle.name} {what} {self.uuid}")

    def has_gone_on(self, join: Join) -> None:
        """Hear that somebody has come for another call."""
        handle = self._others.get(join.id)
        if handle is not None:
            self.fails(f"{handle.name} does not come: it has gone on to uuid {join.uuid}")

    def left(self, guest: _Guest) -> None:
        """Hear that a guest is gone."""
        if guest.join is None or self.here.get(guest.join.id) is not guest:
            return
        if self.is_complete:
            name = self._others[guest.join.id].name
            self.fails(f"{name} was lost while the new world was made")
        del self.here[guest.join.id]


# Those who join.


def _visit(join: Join, host: Handle, end_s: float, timeout_s: float, masters: Masters) -> Invitation:
    """Join the host, and return where the new world meets."""
    where = f"{host.name} at {addresses.join(host.host, host.port)}, the first of the handles,"
    try:
        sock = socket.create_connection((host.host, host.port), max(0.001, end_s - time.monotonic()))
    except TimeoutError:
        raise RendezvousError(f"timed out after {timeout_s:g} s: no answer from {where} came") from None
    except OSError as error:
        raise RendezvousError(f"{where} cannot be reached: {error.strerror or error}; is that process alive?") from None
    with sock:
        guest = _Guest(sock)
        guest.send(join)
        while True:
            sock.settimeout(max(0.001, end_s - time.monotonic()))
            try:
                lines = guest.hear()
            except TimeoutError:
                raise RendezvousError(
                    f"timed out after {timeout_s:g} s: {where} did not say that all have called reconfigure with uuid "
                    f"{join.uuid}"
                ) from None
            if lines is None:
                raise RendezvousError(f"{where} was lost while the new world was made")
            for line in lines:
                if isinstance(line, Go):
                    return Invitation(line.masters, line.token)
                if isinstance(line, Refuse):
                    raise RendezvousError(line.reason)
                if isinstance(line, StandBy):
                    guest.send(Standing(masters.stand_by(line.master, line.token)))
