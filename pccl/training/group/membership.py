"""Membership in a training loop: joining, admitting newcomers, and averaging through losses.

Theory of operation. Three kinds of moments:

*Averaging.* A loss aborts the op on all survivors alike and leaves the vector as it was, so they launch it again among
whoever is left; so they do where one of them gave it up. An average over whoever is left is an average; alone, it is
one's own vector.

*Admission* happens between two outer steps, when nothing is in flight. All peers poll `are_peers_pending`, which
answers the same on all; if somebody waits, all call `update_topology`. Whoever has been admitted comes out of `connect`
where the others come out of `update_topology`, and from there all do the same:

*The roll call* is a gathering of what each peer is: whether it is under way, with how many peers to start, and its
options, as a text (`pccl.training.group.configuration`). It has a tag that no option changes, so peers that cannot train
together meet all the same. Where nobody is under way they all fail, with who has what; else whoever differs from those
who are fails and leaves, and the others call the roll again. If somebody is under way, or enough are there, all
synchronize the state and train. (It carries no step: revisions are alike only after that.) Else they wait for more.
Such decisions must not be taken on `world_size`: peers may notice a loss one call apart, and a joint call must be made
by all. Of a committed op all peers know the same world. Nothing is synchronized before the start, because a group
sticks to the revision it has once agreed on, and the peer with the newest checkpoint may be the last to arrive.

*One training object at a time joins on a communicator.* A newcomer is let in at the end of one object's step, where
others have work on its way and are elsewhere in their loops: it would begin at another place than they go on from.

A newcomer whose state cannot be brought up, such as one with another model, fails and leaves; the others repeat the
call without it.

*Interrupts* (Ctrl-C) leave ops to the others: an op that is only waited for is not aborted, and whoever closes its
communicator then is a loss like any. But who was interrupted in the middle of a step does not know how far the others
have come, and must not go on as if nothing had been: `step` refuses. The same holds for who is told that the outcome
of an op is unknown: the others may have updated what this peer has not. Both connect anew and join, and so get the
others' state.
"""

from __future__ import annotations

import hashlib
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from pccl import (
    Communicator,
    PCCLError,
    QuantizationOptions,
    Result,
    SharedState,
    SharedStateSyncStrategy,
)
from pccl._integers import as_int
from pccl._waiting import LoopWait, warning_to, where_to_look
from pccl.training.group import configuration
from pccl.training.group.configuration import Row
from pccl.training.group.relaunch import gather_among_all, own_number
from pccl.training.group.site import Site

POLL_INTERVAL_S = 0.05

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Admission:
    """The cost of an admission. Bytes are payload of the state."""

    world_size: int
    tx_bytes: int
    rx_bytes: int


_joined: weakref.WeakKeyDictionary[Communicator, tuple[weakref.ref[Membership], int]] = weakref.WeakKeyDictionary()
"""The training object that has joined on each communicator, and as which peer."""


def alike(quantization: QuantizationOptions | None) -> QuantizationOptions | None:
    """Return what peers must have alike of these options. TypeError: they are of another type."""
    if quantization is not None and not isinstance(quantization, QuantizationOptions):
        raise TypeError(f"quantization must be QuantizationOptions or None, not {quantization!r}")
    if quantization is not None:
        quantization = replace(quantization, stochastic=False, seed=0)  # each peer's own affair
    return quantization


def fingerprint(quantization: QuantizationOptions | None, *what: object) -> str:
    """A short name for what all peers of a run must have alike. As part of a tensor's name in the shared state it has
    newcomers refused who have it otherwise, before they spoil an op. TypeError as `alike`."""
    return hashlib.sha256(repr((alike(quantization), *what)).encode()).hexdigest()[:12]


class AdmittedState(Protocol):
    """The state beside the shared state that has to be in order where peers are let in."""

    def before_admission(self, revision: int) -> None:
        """Check the state, on all peers that are under way, before somebody is let in."""

    def after_admission(self, revision: int, *, world_size: int, is_source: bool, is_new: bool) -> None:
        """Bring the state in order, on all peers, once they have the same shared state. `is_source`: this peer's own is
        what all have; `is_new`: others had been under way, and this peer had not."""

    def part(self, revision: int) -> None:
        """End this peer's run in order. Not joint: others may train on, or not come to it."""


class Membership:
    """One peer's part in the coming and going, for the shared state `state`.

    All methods but `retire` are joint: all peers of the group call them.
    """

    def __init__(
        self,
        communicator: Communicator,
        state: SharedState,
        options: Mapping[str, object] | None = None,
        before_sync: Callable[[], None] | None = None,
        site: Site | None = None,
        joint: AdmittedState | None = None,
    ) -> None:
        """`options` are what all peers must have alike, as their `repr`.

        `before_sync` is called, on all peers, when newcomers are in and about to be brought up. `site` where this
        peer is a rank of one. `joint` is told of admissions."""
        self._communicator = communicator
        self._state = state
        self._options = configuration.described(options or {})
        self._before_sync = before_sync
        self._site = site
        self._joint = joint
        self._are_others_under_way = False
        self.is_under_way = False
        """Whether this peer has joined a run that trains."""
        self._was_interrupted = False
        self._is_outcome_unknown = False
        self._has_parted = False

    def join(self, peers_min: int = 1) -> Admission:
        """Join the run: call it once, right after `Communicator.connect`. Returns when `peers_min` peers are there (the
        largest such number among them counts), or at once where others train already, with everybody's state the same.

        PCCLError INVALID_USAGE: this object has joined already, or another one on the same communicator. Other
        PCCLErrors, of which INVALID_ARGUMENT where others have other options, and ValueError; the communicator is
        closed then, so that the others can go on."""
        if self.is_under_way:
            raise PCCLError(Result.INVALID_USAGE, "join", "this peer has joined already")
        self._require_only_one()
        try:
            peers_min = as_int("peers_min", peers_min)
            if self._site is not None:
                self._site.check(self._communicator)
            with LoopWait("join", warning_to(logger)) as waiting:
                while (world_size := self._check_with_site(peers_min)) is None:
                    while not self._communicator.are_peers_pending():
                        address, present = self._communicator.address, self._communicator.world_size
                        waiting.look(f"more peers: {present} of {peers_min} are there", where_to_look(address))
                        time.sleep(POLL_INTERVAL_S)
                    self._communicator.update_topology()
            admission = self._synchronize(world_size)
        except BaseException:
            self._communicator.close()
            raise
        self.is_under_way = True
        _joined[self._communicator] = weakref.ref(self), own_number(self._communicator)
        part = weakref.WeakMethod(self.part)
        self._communicator.before_leaving("training", lambda: (part() or bool)())
        return admission

    def part(self) -> None:
        """The run ends here in order, the communicator still being there: compares what the last step has left. Once;
        does nothing after an interrupt. DivergenceError. Not joint."""
        has_parted, self._has_parted = self._has_parted, True
        if has_parted or self._joint is None or self._was_interrupted or self._is_outcome_unknown:
            return
        try:
            self._communicator.world_size  # noqa: B018
        except PCCLError:
            return  # it has left, or was evicted
        self._joint.part(self._state.revision)

    def retire(self) -> None:
        """Makes room for another object on the communicator. Nothing else is called after it."""
        if _joined.get(self._communicator, (None, 0))[0] == weakref.ref(self):
            del _joined[self._communicator]

    def _require_only_one(self) -> None:
        reference, number = _joined.get(self._communicator, (None, 0))
        former = reference() if reference is not None else None
        if former is None or number != own_number(self._communicator):
            return
        text = (
            f"on this communicator a {configuration.shown(former._options)} has joined, and newcomers could be brought up "
            "for one of the two alone: close() that one before, if it is done; else put all that is trained into one "
            "module, such as a ModuleDict, with one optimizer that has param_groups, and what else is part of the run "
            "into shared="
        )
        raise PCCLError(Result.INVALID_USAGE, "join", text)

    def require_step(self, func_name: str) -> None:
        """PCCLError INVALID_USAGE: `join` has not been called, or how a step has ended is not known here."""
        what = ""
        if not self.is_under_way:
            what = "call join before"
        elif self._was_interrupted:
            what = "a former call was interrupted and the others have gone on: close the communicator, and join anew"
        elif self._is_outcome_unknown:
            what = (
                "the outcome of a former call is unknown here, so the others may have gone on: close the communicator, "
            )
            what += "and join anew"
        if what:
            raise PCCLError(Result.INVALID_USAGE, func_name, what)

    @contextmanager
    def step(self, func_name: str) -> Iterator[None]:
        """Surround what all peers do alike. PCCLError as `require_step`."""
        self.require_step(func_name)
        self._was_interrupted = True
        try:
            yield
        except Exception as error:  # all but interrupts: whoever raises it says what is to be done
            self._was_interrupted = False
            self._is_outcome_unknown = isinstance(error, PCCLError) and error.result is Result.OUTCOME_UNKNOWN
            raise
        self._was_interrupted = False

    @property
    def revision(self) -> int:
        """The revision of the shared state."""
        return self._state.revision

    @property
    def came_late(self) -> bool:
        """Whether others were under way when this peer joined."""
        return self._are_others_under_way

    def are_peers_pending(self) -> bool:
        """Whether newcomers wait; the same on all peers, if they call it with nothing in flight."""
        return self._communicator.are_peers_pending()

    def admit(self) -> Admission:
        """Lets in whoever waits and brings them up. No op may be in flight. DivergenceError, before that."""
        if self._joint is not None:
            self._joint.before_admission(self._state.revision)
        self._communicator.update_topology()
        world_size = self._check_configuration(1)
        assert world_size is not None, "this peer is under way"
        return self._synchronize(world_size)

    def _check_with_site(self, peers_min: int) -> int | None:
        """Call the roll among all ranks of the site too: too early for one of them is too early for all. Otherwise as
        `_check_configuration`."""
        world_size = self._check_configuration(peers_min)
        if self._site is not None and not self._site.agree(world_size is not None):
            return None
        return world_size

    def _check_configuration(self, peers_min: int) -> int | None:
        """The world's size, or None if it is too early to start. PCCLError INVALID_ARGUMENT: see the module."""
        own = Row(own_number(self._communicator), self.is_under_way, peers_min, self._options)
        while True:
            rows = self._rows(own)
            different = configuration.unlike(rows, own)
            if not different:
                break
            others_stay = any(row.is_under_way for row in rows)
            if not others_stay or own.peer in different:
                raise PCCLError(Result.INVALID_ARGUMENT, "join", "; ".join(different.values()))
            logger.warning("newcomers leave that have other options: %s", "; ".join(different.values()))
        is_under_way = any(row.is_under_way for row in rows)
        self._are_others_under_way = is_under_way and not self.is_under_way
        return len(rows) if is_under_way or len(rows) >= max(row.peers_min for row in rows) else None

    def _rows(self, own: Row) -> list[Row]:
        """Gather the rows of all peers, in the order in which they were accepted."""
        # A launched op: an interrupt does not abort it for the others.
        rows, _ = gather_among_all(self._communicator, configuration.row_bytes(own), configuration.TAG)
        return sorted((configuration.row_of(row) for row in rows.values()), key=lambda row: row.peer)

    def _synchronize(self, world_size: int) -> Admission:
        before = self._state.revision
        admission = self._admission(world_size)
        if self._joint is not None:
            is_new = self._are_others_under_way
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
        # Where some are under way, newcomers have no vote on what the state is.
        strategies = SharedStateSyncStrategy
        strategy = strategies.RECEIVE_ONLY if self._are_others_under_way else strategies.ENFORCE_POPULAR
        while True:
            try:
                info = self._communicator.sync_shared_state(self._state, strategy)
                break
            except PCCLError as error:
                # A newcomer cannot be brought up. It leaves, as `join` does on any failure.
                recoverable = (Result.INVALID_ARGUMENT, Result.NO_SHARED_STATE_AVAILABLE)
                if not self.is_under_way or error.result not in recoverable:
                    raise
                if self._communicator.world_size < 2:
                    return Admission(1, 0, 0)
                logger.warning("the state could not be synchronized, trying again: %s", error)
        if self.is_under_way and info.rx_bytes > 0:
            logger.error("this peer's state differed from the others' and was replaced: %d bytes", info.rx_bytes)
        return Admission(world_size, info.tx_bytes, info.rx_bytes)
