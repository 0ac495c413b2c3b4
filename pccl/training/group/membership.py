"""Membership in a training loop: joining, and admitting newcomers.

Admission happens between two steps, when no op is in flight. If newcomers are waiting, all peers see this and call
`update_topology`. Newcomers return from `connect`, the others from `update_topology`; then all take the same steps:

1. The *configuration check* gathers a row from each peer: whether it is under way (already training), how many peers
   it needs to start, and a digest of its options (if digests differ, also the options). A newcomer whose options
   differ fails and leaves. If no peer is under way and options differ, all fail.
2. If some peer is under way, or enough peers are present, all synchronize the shared state and train. Otherwise they
   wait for more.

A row also has the revision and the *history* of the peer's state: a random number that a new run draws, and that its
checkpoints keep. A newcomer that is ahead of the run leaves unless it may adopt older state (`Row.adopts`).

A step whose peer was evicted, or lost its master, ends with `rejoin`, which connects the same communicator and joins
as a newcomer.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from pccl import (
    Communicator,
    PCCLError,
    QuantizationOptions,
    Result,
    SharedState,
    SharedStateSyncStrategy,
)
from pccl._integers import as_int
from pccl._waiting import LoopWait, where_to_look
from pccl.training.group.relaunch import gather_among_all, own_number
from pccl.training.group.site import Site

POLL_INTERVAL_S = 0.05
REJOIN_S = 300.0
"""How long a peer tries to rejoin without a limit of the user: as long as `connect` searches for a master."""
LOST = (Result.MASTER_CONNECTION_FAILED, Result.RANK_CONNECTION_FAILED)
"""Results of calls after the master was lost or this peer was evicted; the communicator can then connect again."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Admission:
    """The cost of an admission. Bytes are the state's payload."""

    world_size: int
    tx_bytes: int
    rx_bytes: int


class Churn(TypedDict, total=False):
    """Keyword arguments of the training classes for peers that come and go."""

    rejoin: bool | float
    """Whether a step reconnects after an eviction or the loss of the master. True: the step connects as
    `Communicator.connect` does, takes the run's state and returns a report with `rejoined`. A number limits this time
    in seconds. False, and always with a site: the step raises PCCLError."""
    hold_below: int
    """The number of peers that training needs: after a step with fewer, and in `join`, wait until they are present."""
    on_older_run: Literal["refuse", "adopt"]
    """What `join` does if the run is at an older revision than this peer: raise PCCLError, or take the older state."""


_joined: weakref.WeakKeyDictionary[Communicator, tuple[weakref.ref[Membership], int]] = weakref.WeakKeyDictionary()
"""The training object that has joined on each communicator, and its peer number."""


def alike(quantization: QuantizationOptions | None) -> QuantizationOptions | None:
    """Return the options that must be equal on all peers. Raises TypeError for another type."""
    if quantization is not None and not isinstance(quantization, QuantizationOptions):
        raise TypeError(f"quantization must be QuantizationOptions or None, not {quantization!r}")
    if quantization is not None:
        quantization = replace(quantization, stochastic=False, seed=0)  # these may differ between peers
    return quantization


def fingerprint(quantization: QuantizationOptions | None, *what: object) -> str:
    """Return a short digest of the options that must be equal on all peers. Raises TypeError like `alike`."""
    return hashlib.sha256(repr((alike(quantization), *what)).encode()).hexdigest()[:12]


class Membership:
    """One peer's membership in a run that shares `state`. All methods except `retire` and `part` are group calls."""

    def __init__(
        self,
        communicator: Communicator,
        state: SharedState,
        options: Mapping[str, object] | None = None,
        before_sync: Callable[[], None] | None = None,
        site: Site | None = None,
        joint: Any = None,
        churn: Churn | None = None,
    ) -> None:
        """`options` are compared by `repr`. `before_sync` is called on all peers before they synchronize the state.
        `site` is this peer's site, if any. Admissions check and align `joint`, a `ReplicatedState`."""
        rejoin, hold_below, on_older_run = checked(**(churn or {}))
        self._rejoin_s = 0.0 if site is not None else rejoin
        self.hold_below = hold_below
        self._adopts = ADOPT if on_older_run == "adopt" else REFUSE
        self._communicator = communicator
        self._state = state
        self._options = described({**(options or {}), **({"hold_below": hold_below} if hold_below > 1 else {})})
        self._before_sync = before_sync
        self._site = site
        self._joint = joint
        self.came_late = False
        """Whether others were under way when this peer joined."""
        self.is_under_way = False
        """Whether this peer has joined a run that trains."""
        self._was_interrupted = False
        self._is_outcome_unknown = False
        self._has_parted = False

    def join(self, peers_min: int = 1) -> Admission:
        """Join the run, right after `Communicator.connect`. Return when `peers_min` peers are present, or
        immediately if others already train; all then have the same state. If this peer is evicted meanwhile, or loses
        the master, it connects again, as in `rejoin`.

        Raises PCCLError INVALID_USAGE if an object has already joined on this communicator. Other errors close the
        communicator so that the other peers can continue.
        """
        if self.is_under_way:
            raise PCCLError(Result.INVALID_USAGE, "join", "this peer has already joined")
        self._require_only_one()
        peers_min, end_s = as_int("peers_min", peers_min), math.inf
        try:
            while True:
                try:
                    return self._enter(peers_min, self._adopts)
                except PCCLError as error:
                    end_s = min(end_s, self._rejoins_until())
                    if not self.may_rejoin(error) or time.monotonic() >= end_s:
                        raise
                    logger.warning("join: connecting again: %s", error.message)
                    self._connect_again(end_s)
        except BaseException:
            self._communicator.close()
            raise

    def _enter(self, peers_min: int, adopts: int) -> Admission:
        """Join the run. `adopts` is that of `Row`."""
        peers_min = max(peers_min, self.hold_below)
        if self._site is not None:
            self._site.check(self._communicator)
        with self._named("join"):
            with LoopWait("join", logger) as waiting:
                while (world_size := self._check_with_site(peers_min, adopts)) is None:
                    while not self._communicator.are_peers_pending():
                        self._look(waiting, peers_min)
                    self._communicator.update_topology()
            admission = self._synchronize(world_size)
        self.is_under_way = True
        _joined[self._communicator] = weakref.ref(self), own_number(self._communicator)
        part = weakref.WeakMethod(self.part)
        self._communicator._before_leaving["training"] = lambda: (part() or bool)()
        return self.hold("join", admission.world_size, admission) or admission

    def _look(self, waiting: LoopWait, peers_min: int) -> None:
        address, present = self._communicator._inner.address, self._communicator.world_size
        waiting.look(f"more peers: {present} of {peers_min} are present", where_to_look(address))
        time.sleep(POLL_INTERVAL_S)

    def hold(self, func_name: str, world_size: int, admission: Admission | None = None) -> Admission | None:
        """Admit newcomers until `hold_below` peers are present. `world_size` is the same on all peers.

        Return the total of `admission` and the admissions here, if any.
        """
        with self._named(func_name), LoopWait(func_name, logger) as waiting:
            while world_size < self.hold_below:
                if not self._communicator.are_peers_pending():
                    self._look(waiting, self.hold_below)
                    continue
                more, former = self.admit(), admission or Admission(0, 0, 0)
                world_size = more.world_size
                tx_bytes, rx_bytes = former.tx_bytes + more.tx_bytes, former.rx_bytes + more.rx_bytes
                admission = Admission(world_size, tx_bytes, rx_bytes)
        return admission

    def may_rejoin(self, error: Exception) -> bool:
        """Return whether a step should rejoin the run after this error."""
        return isinstance(error, PCCLError) and error.result in LOST and self._rejoin_s > 0

    def rejoin(
        self, func_name: str, lost: PCCLError, drop: Callable[[], None], enter: Callable[[Admission], None]
    ) -> Admission:
        """Connect again after `lost` and join as a newcomer. `drop` discards what belongs to the lost session, and
        `enter` continues from the run's state.

        Raises PCCLError after closing the communicator.
        """
        began_s, before, end_s = time.monotonic(), self.revision, self._rejoins_until()
        try:
            while True:
                try:
                    self.retire()
                    self.is_under_way = False
                    self._connect_again(end_s)
                    drop()  # after the lost session has ended, since its engine uses the arrays until then
                    admission = self._enter(1, ADOPT_OWN)
                    enter(admission)
                    break
                except PCCLError as error:
                    if error.result not in LOST or time.monotonic() >= end_s:
                        raise
                    time.sleep(POLL_INTERVAL_S)
        except BaseException as error:
            self._communicator.close()
            if not isinstance(error, PCCLError):
                raise
            text = f"{lost.message}; it could not rejoin within {time.monotonic() - began_s:.1f} s: {error}"
            raise PCCLError(lost.result, func_name, text) from error
        logger.warning(
            "%s: this peer has rejoined after %.1f s (%s); its work since revision %d is lost, and it continues at "
            "revision %d (world size %d)",
            *(func_name, time.monotonic() - began_s, lost.message, before, self.revision, admission.world_size),
        )
        return admission

    def _rejoins_until(self) -> float:
        return time.monotonic() + (REJOIN_S if self._rejoin_s == math.inf else self._rejoin_s)

    def _connect_again(self, end_s: float) -> None:
        if self._rejoin_s == math.inf:
            self._communicator.connect()
        else:
            self._communicator.connect(timeout=max(0.0, end_s - time.monotonic()))

    def part(self) -> None:
        """Compare the state after the last step, once, when this peer's run ends normally. Raises DivergenceError."""
        has_parted, self._has_parted = self._has_parted, True
        if has_parted or self._joint is None or self._was_interrupted or self._is_outcome_unknown:
            return
        if self.is_in_run:
            self._joint.part(self._state.revision)

    def report(self, **figures: float) -> None:
        self._communicator.report(**figures)

    def retire(self) -> None:
        """Allow another object to join on the communicator. Call no other method afterwards."""
        if _joined.get(self._communicator, (None, 0))[0] == weakref.ref(self):
            del _joined[self._communicator]

    def _require_only_one(self) -> None:
        reference, number = _joined.get(self._communicator, (None, 0))
        former = reference() if reference is not None else None
        if former is None or number != own_number(self._communicator):
            return
        text = (
            f"a {shown(former._options)} has joined on this communicator, and newcomers can be synchronized "
            "for one object only: close() that one first if it is done; otherwise, put everything that is trained into "
            "one module, such as a ModuleDict, with one optimizer, and other parts of the run into shared="
        )
        raise PCCLError(Result.INVALID_USAGE, "join", text)

    def require_step(self, func_name: str) -> None:
        """Raise PCCLError INVALID_USAGE if `join` has not been called or a step's outcome is unknown to this peer."""
        if not self.is_under_way:
            raise PCCLError(Result.INVALID_USAGE, func_name, "call join first")
        if self._was_interrupted or self._is_outcome_unknown:
            what = "was interrupted" if self._was_interrupted else "has an unknown outcome"
            what = f"an earlier call {what}, and other peers may have continued: close the communicator and join again"
            raise PCCLError(Result.INVALID_USAGE, func_name, what)

    @contextmanager
    def step(self, func_name: str) -> Iterator[None]:
        """Guard a group call, and record whether it was interrupted. Raises PCCLError like `require_step`."""
        self.require_step(func_name)
        self._was_interrupted = True
        try:
            with self._named(func_name):
                yield
        except Exception as error:  # not an interrupt: the error's text explains what to do
            self._was_interrupted = False
            self._is_outcome_unknown = isinstance(error, PCCLError) and error.result is Result.OUTCOME_UNKNOWN
            raise
        self._was_interrupted = False

    @contextmanager
    def _named(self, func_name: str) -> Iterator[None]:
        """Name a call of the program in warnings and errors of the group calls that it makes."""
        holder = self._communicator._inner
        holder.caller, before = func_name, holder.caller
        try:
            yield
        except PCCLError as error:
            error.func_name = func_name
            error.args = (error.result, func_name, error.message)
            raise
        finally:
            holder.caller = before

    @property
    def is_in_run(self) -> bool:
        """Whether this peer has joined, and has neither left nor been evicted."""
        if not self.is_under_way:
            return False
        try:
            return self._communicator.world_size > 0
        except PCCLError:
            return False

    @property
    def revision(self) -> int:
        """The revision of the shared state."""
        return self._state.revision

    def are_peers_pending(self) -> bool:
        """Return whether newcomers are waiting. All peers get the same answer if no op is in flight."""
        return self._communicator.are_peers_pending()

    def admit(self) -> Admission:
        """Admit newcomers and synchronize their state. No op may be in flight. Raises DivergenceError before that."""
        if self._joint is not None:
            self._joint.check(self._state.revision)
        self._communicator.update_topology()
        world_size = self._check_configuration(1, REFUSE)
        assert world_size is not None, "this peer is under way"
        return self._synchronize(world_size)

    def _check_with_site(self, peers_min: int, adopts: int) -> int | None:
        world_size = self._check_configuration(peers_min, adopts)
        if self._site is not None and not self._site.agree(world_size is not None):
            return None
        return world_size

    def _check_configuration(self, peers_min: int, adopts: int) -> int | None:
        """Return the world size, or None if too few peers are present. Raises PCCLError INVALID_ARGUMENT."""
        history = self._joint.history if self._joint is not None else 0
        number = own_number(self._communicator)
        own = Row(number, self.is_under_way, peers_min, self._options, self.revision, history, adopts)
        while True:
            rows = self._rows(own)
            different = unlike(rows, own)
            if not different:
                break
            others_stay = any(row.is_under_way for row in rows)
            if not others_stay or own.peer in different:
                raise PCCLError(Result.INVALID_ARGUMENT, "join", "; ".join(different.values()))
            logger.warning("newcomers leave: %s", "; ".join(different.values()))
        is_under_way = any(row.is_under_way for row in rows)
        self.came_late = is_under_way and not self.is_under_way
        if self._joint is not None:
            self._joint.history = common_history(rows)
        return len(rows) if is_under_way or len(rows) >= max(row.peers_min for row in rows) else None

    def _rows(self, own: Row) -> list[Row]:
        # Use launched ops because an interrupt of their waiter does not abort them for the other peers.
        heads, _ = gather_among_all(self._communicator, head_bytes(own), TAG)
        texts = dict.fromkeys(heads, own.options)
        if any(head[-16:].tobytes() != digest_of(own) for head in heads.values()):
            found, _ = gather_among_all(self._communicator, text_bytes(own), TAG)
            texts = {peer: text_of(text) for peer, text in found.items()}
        return sorted((row_of(heads[peer], text) for peer, text in texts.items()), key=lambda row: row.peer)

    def _synchronize(self, world_size: int) -> Admission:
        before = self._state.revision
        admission = self._admission(world_size)
        if self._joint is not None:
            is_new = self.came_late
            is_source = self.is_under_way or (not is_new and admission.rx_bytes == 0 and self._state.revision == before)
            self._joint.after_admission(
                self._state.revision, world_size=admission.world_size, is_source=is_source, is_new=is_new
            )
        return admission

    def _admission(self, world_size: int) -> Admission:
        if world_size < 2:
            return Admission(1, 0, 0)
        if self._before_sync is not None:
            self._before_sync()
        # If some peers are under way, newcomers have no vote on the state.
        strategies = SharedStateSyncStrategy
        strategy = strategies.RECEIVE_ONLY if self.came_late else strategies.ENFORCE_POPULAR
        while True:
            try:
                info = self._communicator.sync_shared_state(self._state, strategy)
                break
            except PCCLError as error:
                # A newcomer could not be synchronized. It leaves, because `join` does so on any failure.
                recoverable = (Result.INVALID_ARGUMENT, Result.NO_SHARED_STATE_AVAILABLE)
                if not self.is_under_way or error.result not in recoverable:
                    raise
                if self._communicator.world_size < 2:
                    return Admission(1, 0, 0)
                logger.warning("cannot synchronize the state, trying again: %s", error)
        if self.is_under_way and info.rx_bytes > 0:
            logger.error("this peer's state differed from the others' and was replaced: %d bytes", info.rx_bytes)
        return Admission(world_size, info.tx_bytes, info.rx_bytes)


# The configuration check. Options are text, one line each: the name and the `repr`. Long values are cut with a digest.

TAG = 2**63 - 1
TEXT_BYTES = 4096
VALUE_CHARACTERS = 64
REFUSE, ADOPT_OWN, ADOPT = range(3)
"""Which older state a newcomer takes: none, that of its own history, any."""


@dataclass(frozen=True, slots=True)
class Row:
    """The row of one peer."""

    peer: int
    is_under_way: bool
    peers_min: int
    options: str
    revision: int = 0
    history: int = 0
    """Random, and equal in all peers and checkpoints of one run; 0 if unknown (older versions of pccl)."""
    adopts: int = REFUSE


def checked(rejoin: bool | float = True, hold_below: int = 1, on_older_run: str = "refuse") -> tuple[float, int, str]:
    """Return the values of `Churn`, with `rejoin` in seconds. Raises ValueError, TypeError."""
    if isinstance(rejoin, bool):
        rejoin = math.inf if rejoin else 0.0
    elif not isinstance(rejoin, int | float) or not rejoin >= 0:
        raise ValueError(f"rejoin {rejoin!r}: must be True, False or a number of seconds")
    if on_older_run not in ("refuse", "adopt"):
        raise ValueError(f'on_older_run {on_older_run!r}: must be "refuse" or "adopt"')
    return float(rejoin), as_int("hold_below", hold_below, 1), on_older_run


def described(options: Mapping[str, object]) -> str:
    """Return the text that peers compare."""
    lines = (f"{name}={_cut(_line(value))}" for name, value in options.items())
    return _cut("\n".join(lines), TEXT_BYTES // 4)


def shown(options: str) -> str:
    """Return options formatted for messages: the class, followed by the rest in parentheses."""
    first, *rest = options.split("\n")
    return f"{first.removeprefix('class=') or 'training object'} ({', '.join(rest)})"


def digest_of(row: Row) -> bytes:
    return hashlib.sha256(row.options.encode()).digest()[:16]


def head_bytes(row: Row) -> NDArray[np.uint8]:
    """Return the numbers of a row and the digest of its options, which are sent only if they differ."""
    numbers = [row.peer, row.is_under_way, row.peers_min, row.revision, row.history, row.adopts]
    return np.frombuffer(np.array(numbers, "<i8").tobytes() + digest_of(row), np.uint8)


def text_bytes(row: Row) -> NDArray[np.uint8]:
    """Return the encoded options, with the same size for all rows."""
    return np.frombuffer(row.options.encode().ljust(TEXT_BYTES, b"\0"), np.uint8)


def text_of(data: NDArray[np.uint8]) -> str:
    return data.tobytes().rstrip(b"\0").decode()


def row_of(head: NDArray[np.uint8], options: str) -> Row:
    """Return the row that `head_bytes` encoded."""
    peer, is_under_way, peers_min, *rest = np.frombuffer(head[:-16].tobytes(), "<i8").tolist()
    return Row(peer, bool(is_under_way), peers_min, options, *rest)


def unlike(rows: Sequence[Row], own: Row) -> dict[int, str]:
    """Return the differences between the options of each deviating peer and those of most peers (of peers under way, if
    any), and the newcomers that refuse the run's older state."""
    seniors = [row for row in rows if row.is_under_way] or rows
    right = Counter(row.options for row in seniors).most_common(1)[0][0]
    like = next(row for row in seniors if row.options == right)
    found = {
        row.peer: f"{_named(row, own)} {_difference(row.options, right, _named(like, own))}"
        for row in rows
        if row.options != right
    }
    run = _leading(rows)
    for row in rows:
        if (
            run.history
            and run.revision < row.revision
            and row.adopts < (ADOPT_OWN if row.history == run.history else ADOPT)
        ):
            found.setdefault(
                row.peer,
                f"{_named(row, own)} has revision {row.revision}, but the run of {_named(run, own)} is at revision "
                f"{run.revision}, and joining would drop the newer state: start the run from the newest checkpoint, or "
                f'pass on_older_run="adopt" to continue from revision {run.revision}',
            )
    return found


def _leading(rows: Sequence[Row]) -> Row:
    """Return the row of a peer whose state all peers take: one under way, or else the newest and most common."""
    seniors = [row for row in rows if row.is_under_way]
    counts = Counter((row.revision, row.history) for row in rows)
    return max(seniors or rows, key=lambda row: (row.revision, counts[row.revision, row.history], -row.peer))


def common_history(rows: Sequence[Row]) -> int:
    """Return the history of the run after an admission. It is a new one if a newcomer discards newer state of the same
    history, because its checkpoints then no longer belong to the run."""
    run = _leading(rows)
    ahead = (row for row in rows if row.revision > run.revision and row.history == run.history)
    if not any(row.adopts == ADOPT for row in ahead):
        return run.history
    return int(hashlib.sha256(f"{run.history} {run.revision}".encode()).hexdigest()[:15], 16)


def _named(row: Row, own: Row) -> str:
    return "this peer" if row.peer == own.peer else f"peer {row.peer}"


def _difference(options: str, right: str, other: str) -> str:
    mine, theirs = (dict(line.partition("=")[::2] for line in text.split("\n")) for text in (options, right))
    names = [name for name in {**theirs, **mine} if mine.get(name) != theirs.get(name)]
    have = ", ".join(f"{name}={mine[name]}" if name in mine else f"no {name}" for name in names)
    instead = ", ".join(f"{name}={theirs[name]}" if name in theirs else f"no {name}" for name in names)
    advice = "give the same on all peers, or, to different programs, different run names (PCCL_RUN)"
    return f"has {have}, but {other} has {instead}: {advice}"


def _line(value: object) -> str:
    return (value if isinstance(value, str) else repr(value)).replace("\n", " ")


def _cut(text: str, characters: int = VALUE_CHARACTERS) -> str:
    if len(text) <= characters:
        return text
    return f"{text[: characters - 14]}... {hashlib.sha256(text.encode()).hexdigest()[:10]}"
