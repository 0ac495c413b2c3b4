"""One peer of a stress run: `python -m pccl.stress.worker JSON`, started by the supervisor.

Theory of operation. A step is

    admit    are_peers_pending and, if so, update_topology; or update_topology in every step (`Plan.asks`)
    sync     sync_shared_state, in every step
    reduce   the ops of `values.ops_of_step`, which follow from the revision, and where there are threads for them
             (`Plan.threads`) the chains of `values.chains_of_step` at the same time
    apply    the state becomes a function of itself and of the results' digests; revision += 1

`reducing` retries what was aborted, `calls` says what an interrupt leads to, `state` which lineage a state belongs to.
A peer that is left alone in the middle of a step ends the step with what was committed.

Choices that peers may make differently (how to retry, in place or not, when to rest) come from a generator of this
peer's own; choices that must be the same come from the revision.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
import traceback
from functools import partial
from random import Random

import msgspec

from pccl import Communicator, PCCLError, Result, SharedStateSyncStrategy
from pccl.launcher import say_line
from pccl.stress.buffers import Marked
from pccl.stress.calls import LEFT_OUT, Calls
from pccl.stress.commands import commands
from pccl.stress.cutting import cut_one
from pccl.stress.errors import BrokenPromiseError, LeftSessionError
from pccl.stress.messages import (
    At,
    Cut,
    Doing,
    DropFrom,
    Joined,
    Leave,
    Left,
    Message,
    SessionOver,
    Stepped,
    Synced,
    SyncFailed,
    Trouble,
    WorkerOptions,
)
from pccl.stress.packet_filter import LISTENING_HOST, PacketFilter
from pccl.stress.reducing import Reducer
from pccl.stress.state import State
from pccl.stress.values import ops_of_step

OPTIMIZE_EVERY = 16
"""Revisions between two calls of optimize_topology."""
SYNC_FAILURES_MAX = 20
CUT_CHANCE = 0.02
CUT_S_MAX = 0.05
"""The longest time between the launch of the ops and the cut."""
REST_CHANCE = 0.05
REST_S_MAX = 0.3
ALONE_S = 0.02
CONNECT_ATTEMPTS = 5
"""How often a peer looks for a master before it says that there is none."""


class Worker:
    """One peer: it connects, steps, reports, and connects again after an eviction, until it is told to leave."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._plan = options.plan
        self._random = Random(f"{options.plan.seed} peer {options.peer}")
        self._state = State(options.peer, options.plan.state_bytes)
        self._leave = threading.Event()
        self._filter = PacketFilter(options.place) if options.place is not None else None
        self._session = 0
        self._is_newcomer = True
        self._say_lock = threading.Lock()
        self._marked = Marked()
        self._calls = Calls(self._communicator, options.plan.interrupts is not None)
        self._reducer = Reducer(options, self._random, self._calls, self._marked)
        self.interrupt = self._calls.interrupt
        """The handler of SIGINT."""
        threading.Thread(target=self._hear, name="commands", daemon=True).start()

    def run(self) -> None:
        while not self._leave.is_set():
            self._session += 1
            self._is_newcomer = True
            self._calls.begin_session()
            try:
                self._run_session()
            except LeftSessionError as error:
                self._say(SessionOver(str(error), is_own=True))
                self._state.begin_lineage(error.is_state_spoiled)
                self._calls.renew()
            except PCCLError as error:
                if error.result not in LEFT_OUT:
                    raise
                self._say(SessionOver(str(error)))
                self._state.begin_lineage(is_spoiled=False)
                if self._random.random() < 0.5:
                    self._calls.communicator.close()
                    self._calls.renew()
        self._at("leaving")
        self._calls.communicator.close()
        self._marked.check()
        self._say(Left(self._state.shared.revision))

    def _hear(self) -> None:
        for command in commands():
            match command:
                case Leave():
                    self._leave.set()
                case DropFrom(senders):
                    assert self._filter is not None
                    self._filter.drop_from(senders)

    def _say(self, message: Message) -> None:
        with self._say_lock:
            say_line(msgspec.json.encode(message))

    def _at(self, doing: Doing) -> None:
        self._say(At(doing, self._state.shared.revision))

    def report(self, what: str) -> None:
        """Report something that must not be."""
        self._say(Trouble(what))

    def _communicator(self) -> Communicator:
        options = self._options
        connections = self._random.choice((0, 1, 2, 3))
        name = f"peer {options.peer}"
        listen = f"{LISTENING_HOST}:{options.place.port if options.place is not None else 0}"
        # A run whose master was killed together with most of its peers ends, which must not look like a hang.
        patience_s = self._plan.hang_s / 2
        return Communicator(
            options.masters, options.group, connections, name=name, listen=listen, master_timeout=patience_s
        )

    def _run_session(self) -> None:
        self._at("connecting")
        self._calls.joint(partial(self._calls.communicator.connect, CONNECT_ATTEMPTS), "connect")
        self._say(Joined(self._session, self._calls.communicator.world_size))
        # A newcomer may go on where the others come out of update_topology, or enter the loop at its top.
        enters_at_sync = not self._plan.asks or self._random.random() < 0.5
        while not self._leave.is_set():
            if not enters_at_sync:
                self._admit()
            enters_at_sync = False
            self._step()

    def _admit(self) -> None:
        if self._plan.asks:
            self._at("asking")
            if not self._calls.joint(self._calls.communicator.are_peers_pending, "are_peers_pending"):
                return
        self._at("updating")
        self._calls.joint(self._calls.communicator.update_topology, "update_topology")

    def _step(self) -> None:
        start_s = time.monotonic()
        self._marked.check()
        self._sync()
        state = self._state
        lineage, revision = state.lineage, state.shared.revision
        self._rest()
        if self._plan.groups == 1 and revision % OPTIMIZE_EVERY == OPTIMIZE_EVERY - 1:
            self._at("optimizing")
            self._calls.joint(self._calls.communicator.optimize_topology, "optimize_topology")
        if self._calls.communicator.world_size < 2:
            self._at("resting")
            time.sleep(ALONE_S)
            self._say(Stepped(lineage, revision, [], False, True, 0, time.monotonic() - start_s))
            return
        ops = ops_of_step(self._plan.seed, self._options.group, revision, self._plan.reduce_bytes_max)
        in_place = self._reducer.is_in_place
        buffers = [self._reducer.buffers(op, revision, in_place or self._random.random() < 0.5) for op in ops]
        self._at("reducing")
        if self._leave.is_set() and self._random.random() < 0.5:
            self._reducer.leave_reducing(buffers, lambda: self._at("leaving"))
            return
        if self._plan.cut and self._random.random() < CUT_CHANCE:
            threading.Timer(self._random.random() * CUT_S_MAX, self._cut).start()
        chains = self._reducer.chains(revision)
        buffers += [each for chain in chains for each in chain.buffers]
        outcomes = self._reducer.reduce(buffers[: len(ops)], chains)
        outcomes.sort(key=lambda outcome: outcome.number)
        state.advance(outcomes)
        is_whole = len(outcomes) == len(buffers)
        if not is_whole and self._calls.communicator.world_size > 1:
            raise BrokenPromiseError(f"TOO_FEW_PEERS in a world of {self._calls.communicator.world_size}")
        retries = sum(each.aborts for each in buffers)
        self._say(Stepped(lineage, revision, outcomes, is_whole, False, retries, time.monotonic() - start_s))

    def _cut(self) -> None:
        if cut_one(self._random, self._options.masters):
            self._say(Cut())

    def _rest(self) -> None:
        if self._random.random() < REST_CHANCE:
            self._at("resting")
            time.sleep(self._random.uniform(0, REST_S_MAX))

    def _sync(self) -> None:
        state, shared = self._state, self._state.shared
        strategy = SharedStateSyncStrategy.ENFORCE_POPULAR
        # An incumbent that does not vote may be overwritten by whoever does, which is as documented.
        if self._is_newcomer and self._random.random() < 0.2:
            strategy = SharedStateSyncStrategy.RECEIVE_ONLY
        for _ in range(SYNC_FAILURES_MAX):
            self._at("syncing")
            offered = state.lineage, shared.revision
            try:
                info = self._calls.joint(
                    partial(self._calls.communicator.sync_shared_state, shared, strategy),
                    "sync_shared_state",
                    spoils=True,
                )
            except PCCLError as error:
                if error.result is not Result.NO_SHARED_STATE_AVAILABLE:
                    raise
                is_spoiled = "overwritten here" in error.message
                self._say(SyncFailed(str(error), is_spoiled))
                if is_spoiled:
                    state.begin_lineage(is_spoiled=True)
                strategy = SharedStateSyncStrategy.ENFORCE_POPULAR
                continue
            self._is_newcomer = False
            self._say(Synced(state.lineage, shared.revision, state.digest(), *offered, info.rx_bytes))
            return
        raise BrokenPromiseError(f"{SYNC_FAILURES_MAX} syncs in a row have failed")


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    # A Ctrl-C at the terminal is for the supervisor.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = Worker(msgspec.json.decode(sys.argv[1], type=WorkerOptions))
    signal.signal(signal.SIGINT, worker.interrupt)
    try:
        worker.run()
    except BrokenPromiseError as error:
        worker.report(str(error))
        sys.exit(1)
    except Exception:
        worker.report(f"an unexpected error:\n{traceback.format_exc()}")
        sys.exit(1)
    finally:
        # An interpreter that ends puts the default back for every signal that has a handler, but for none ignored.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
