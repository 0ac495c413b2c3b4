"""One peer of a stress run: `python -m pccl.tools.stress.worker JSON`. A step is

    admit    are_peers_pending and, if so, update_topology
    sync     sync_shared_state, in every step
    reduce   the ops of `values.ops_of_step`
    apply    compute the new state from the old one and the results; revision += 1

Some peers retry aborted ops with all_reduce_multiple_with_retry, some with handles, and some with several threads
(`Plan.threads`). These can be mixed because each peer keeps its lowest uncommitted tag in flight. A peer that is left
alone ends the step with the ops that were committed.

A SIGINT (`Plan.interrupts`) raises KeyboardInterrupt in a call of the main thread. An interrupted wait for a handle is
repeated. After any other interrupted call, or OUTCOME_UNKNOWN, the op may have been committed on the other peers, so
the peer leaves its session and rejoins as a newcomer.

After an error, an op's arrays are compared with their input, filled with a mark that is checked much later, and
replaced for the next attempt.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from random import Random
from types import FrameType
from typing import Any, NoReturn, TypeVar

import blake3
import msgspec
import numpy as np

from pccl import (
    AsyncReduceHandle,
    Communicator,
    PCCLError,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceOpDescriptor,
    Result,
    SharedState,
    TensorInfo,
)
from pccl.tools import harness
from pccl.tools.stress.plan import (
    At,
    Cut,
    Doing,
    Joined,
    Leave,
    Left,
    Message,
    Outcome,
    SessionOver,
    Stepped,
    Synced,
    SyncFailed,
    Trouble,
    WorkerOptions,
)
from pccl.tools.stress.values import TAGS, Array, Op, WrongResultError, ops_of_step

OPTIMIZE_EVERY = 16
SYNC_FAILURES_MAX = 20
CUT_CHANCE = 0.02
CUT_S_MAX = 0.05
"""The maximum time between the launch of the ops and the cut."""
REST_CHANCE = 0.05
REST_S_MAX = 0.3
ALONE_S = 0.02
CONNECT_ATTEMPTS = 5
IMPATIENT_CHANCE = 0.004
IMPATIENT_S_MAX = 0.005
"""The maximum timeout of an impatient op. It often aborts the op on all peers."""
MARK = 0xA5
MARKED_KEPT = 200
LINEAGES_PER_PEER = 1 << 20
RETRIED = (Result.RANK_CONNECTION_LOST, Result.TIMEOUT)
RECONNECTS = (Result.MASTER_CONNECTION_FAILED, Result.RANK_CONNECTION_FAILED)
"""The peer was evicted or refused, or has lost the master."""

T = TypeVar("T")


class BrokenPromiseError(Exception):
    """The library has violated a guarantee."""


class LeftSessionError(Exception):
    """The outcome of one of this peer's calls is unknown, so it has closed its communicator."""

    def __init__(self, why: str, is_state_spoiled: bool = False) -> None:
        super().__init__(why)
        self.is_state_spoiled = is_state_spoiled


class Marked:
    """Arrays that the library has returned with an error and must no longer touch."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, Array]] = []

    def add(self, what: str, *arrays: Array) -> None:
        for array in arrays:
            array.view(np.uint8)[:] = MARK
            self._kept.append((what, array))
        if len(self._kept) > MARKED_KEPT:
            self.check()
            self._kept.clear()

    def check(self) -> None:
        for what, array in self._kept:
            touched = np.flatnonzero(array.view(np.uint8) != MARK)
            if len(touched):
                raise BrokenPromiseError(
                    f"{what} had failed, but {len(touched)} bytes of its arrays were written later"
                )


class Buffers:
    def __init__(self, op: Op, step: int, slot: int, in_place: bool, marked: Marked) -> None:
        self.op = op
        self.aborts = 0
        self._step = step
        self._slot = slot
        self._in_place = in_place
        self._marked = marked
        self._original = op.contribution(slot)
        self._make()

    def _make(self) -> None:
        self._send = self._original.copy()
        self._recv = self._send if self._in_place else np.empty_like(self._send)

    @property
    def _is_untouched(self) -> bool:
        return self._send.tobytes() == self._original.tobytes()

    @property
    def is_committed(self) -> bool:
        """Whether an in-place op was committed although its call failed. A result never equals an input."""
        return not self._is_untouched

    def take_back(self) -> None:
        """Check the arrays after an error and replace them."""
        if not self._is_untouched:
            wrong = np.flatnonzero(self._send != self._original)
            raise BrokenPromiseError(f"{self.op} failed, but {len(wrong)} elements of its input were not restored")
        self._marked.add(str(self.op), self._send, *(() if self._in_place else (self._recv,)))
        self._make()

    def reduce(self, communicator: Communicator, timeout_s: float | None) -> int:
        return communicator.all_reduce(self._send, self._recv, timeout=timeout_s, **self._options).world_size

    def launch(self, communicator: Communicator) -> AsyncReduceHandle:
        return communicator.all_reduce_async(self._send, self._recv, **self._options)

    @property
    def _options(self) -> dict[str, Any]:
        op = self.op
        options = {"op": op.op, "tag": op.tag, "quantization": op.quantization, "algorithm": op.algorithm}
        return {**options, "step": self._step}

    def descriptor(self) -> ReduceOpDescriptor:
        op = self.op
        quantization = op.quantization or QuantizationOptions(algorithm=QuantizationAlgorithm.NONE)
        descriptor = ReduceDescriptor(op.count, op.op, op.tag, None, quantization, op.algorithm, self._step)
        return ReduceOpDescriptor.from_numpy(self._send, self._recv, descriptor)

    def outcome(self, world_size: int) -> Outcome:
        try:
            participants = sorted(self.op.participants(self._recv))
        except WrongResultError as error:
            raise BrokenPromiseError(f"a wrong result: {error}") from None
        if not self._in_place and not self._is_untouched:
            raise BrokenPromiseError(f"{self.op} was committed, but its separate input was changed")
        if self._slot not in participants:
            raise BrokenPromiseError(f"{self.op} was committed over slots {participants}, which lack this peer's")
        digest = blake3.blake3(self._recv.tobytes()).hexdigest(8)
        return Outcome(self.op.tag, participants, world_size, digest, self.aborts)


class State:
    """The shared state. Its lineage names the initial state that it began with, because revisions restart at 0 once no
    peer holds a state. A peer begins a new lineage after an eviction, and after a failed sync that has overwritten part
    of its state."""

    def __init__(self, peer: int, state_bytes: int) -> None:
        self._peer = peer
        self._lineages = 0
        self._lineage = np.zeros(1, np.int64)
        self._digests = np.zeros(TAGS, np.uint64)
        self._weights = np.zeros(max(1024, state_bytes // 4), np.float32)
        loose = np.full(1000, peer, np.float32)
        tensors = [
            TensorInfo.from_numpy(self._lineage, "lineage"),
            TensorInfo.from_numpy(self._digests, "digests"),
            TensorInfo.from_numpy(self._weights, "weights"),
            TensorInfo.from_numpy(loose, "loose", allow_content_inequality=True),
        ]
        self.shared = SharedState(tensors)
        self.begin_lineage(is_spoiled=True)

    @property
    def lineage(self) -> int:
        return int(self._lineage[0])

    def begin_lineage(self, is_spoiled: bool) -> None:
        self._lineage[0] = self._peer * LINEAGES_PER_PEER + self._lineages
        self._lineages += 1
        if is_spoiled:
            self._digests[:] = 0
            self._weights[:] = 0
            self.shared.revision = 0

    def digest(self) -> str:
        hasher = blake3.blake3()
        for array in (self._lineage, self._digests, self._weights):
            hasher.update(array.tobytes())
        return hasher.hexdigest(16)

    def advance(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            place = outcome.tag
            self._digests[place] ^= np.uint64(int(outcome.digest, 16))
            start = int(self._digests[place] % np.uint64(len(self._weights)))
            self._weights[start : start + 1000] += np.float32(len(outcome.participants))
        self.shared.revision += 1


def own_sockets() -> Iterator[socket.socket]:
    """Yield duplicates of this process's TCP sockets, each closed after its turn."""
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    for name in os.listdir(folder):
        with suppress(OSError):  # closed in the meantime
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
                        yield sock


def cut_one(random: Random, masters: str) -> bool:
    """Shut down one of this process's connections to other peers. Return False if there is none."""
    addresses = set(masters.split(","))
    connected = []
    for sock in own_sockets():
        with suppress(OSError):  # not connected
            if "{}:{}".format(*sock.getpeername()[:2]) not in addresses:
                connected.append(sock.dup())
    if connected:
        with suppress(OSError):
            random.choice(connected).shutdown(socket.SHUT_RDWR)
    for sock in connected:
        sock.close()
    return bool(connected)


class Worker:
    """One peer. It connects, steps, reports, and reconnects after an eviction, until it is asked to leave.

    Choices that may differ between peers use this peer's generator; choices that must agree depend on the revision.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._plan = options.plan
        self._random = Random(f"{options.plan.seed} peer {options.peer}")
        self._state = State(options.peer, options.plan.state_bytes)
        self._leave = threading.Event()
        self._session = 0
        self._send_lock = threading.Lock()
        self._marked = Marked()
        self._may_be_interrupted = False
        self._has_left = False
        """This session was left after a call with an unknown outcome."""
        self._communicator = self._new_communicator()
        threaded = [self._by_threads] * 2 if options.plan.threads else []
        self._reduce_all = self._random.choice([self._by_library, self._by_hand, *threaded])
        threading.Thread(target=self._obey, name="commands", daemon=True).start()

    def run(self) -> None:
        while not self._leave.is_set():
            self._session += 1
            self._has_left = False
            try:
                self._run_session()
            except LeftSessionError as error:
                self._send(SessionOver(str(error), is_own=True))
                self._state.begin_lineage(error.is_state_spoiled)
                self._communicator = self._new_communicator()
            except PCCLError as error:
                if error.result not in RECONNECTS:
                    raise
                self._send(SessionOver(str(error)))
                self._state.begin_lineage(is_spoiled=False)
                if self._random.random() < 0.5:
                    self._communicator.close()
                    self._communicator = self._new_communicator()
        self._at("leaving")
        self._communicator.close()
        self._marked.check()
        self._send(Left())

    def _obey(self) -> None:
        for _ in harness.received(Leave):
            self._leave.set()

    def report(self, what: str) -> None:
        self._send(Trouble(what))

    def _send(self, message: Message) -> None:
        with self._send_lock:
            harness.send(message)

    def _at(self, doing: Doing) -> None:
        self._send(At(doing, self._state.shared.revision))

    # Calls, sessions and interrupts

    def _new_communicator(self) -> Communicator:
        options = self._options
        # A run ends if its master and most of its peers are killed together, which must not look like a hang.
        return Communicator(
            *(options.masters, options.group, self._random.choice((0, 1, 2, 3))),
            name=f"peer {options.peer}",
            master_timeout=self._plan.hang_s / 2,
        )

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT: interrupt the call of the main thread, if there is one."""
        if self._may_be_interrupted:
            self._may_be_interrupted = False
            raise KeyboardInterrupt

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Surround a call to the library. This affects only the main thread."""
        if self._plan.interrupts is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        try:
            self._may_be_interrupted = True
            yield
        finally:
            self._may_be_interrupted = False

    def _leave_session(self, why: str, is_state_spoiled: bool = False) -> NoReturn:
        """Close the communicator, so that the calls of other threads fail."""
        self._has_left = True
        self._communicator.close()
        raise LeftSessionError(why, is_state_spoiled)

    def _group_call(self, call: Callable[[], T], name: str, spoils: bool = False) -> T:
        """Make a call other than a reduce. If `spoils`, an interrupt may leave the state half overwritten."""
        try:
            with self._interruptible():
                return call()
        except KeyboardInterrupt:
            self._leave_session(f"interrupted in {name}", is_state_spoiled=spoils)

    def _run_session(self) -> None:
        self._at("connecting")
        self._group_call(partial(self._communicator.connect, CONNECT_ATTEMPTS), "connect")
        self._send(Joined(self._session))
        # A newcomer may continue as if update_topology had returned, like the others, or start at the top of the loop.
        enters_at_sync = self._random.random() < 0.5
        while not self._leave.is_set():
            if not enters_at_sync:
                self._admit()
            enters_at_sync = False
            self._step()

    def _admit(self) -> None:
        self._at("asking")
        if not self._group_call(self._communicator.are_peers_pending, "are_peers_pending"):
            return
        self._at("updating")
        self._group_call(self._communicator.update_topology, "update_topology")

    def _sync(self) -> None:
        state, shared = self._state, self._state.shared
        for _ in range(SYNC_FAILURES_MAX):
            self._at("syncing")
            offered = state.lineage, shared.revision
            sync = partial(self._communicator.sync_shared_state, shared)
            try:
                info = self._group_call(sync, "sync_shared_state", spoils=True)
            except PCCLError as error:
                if error.result is not Result.NO_SHARED_STATE_AVAILABLE:
                    raise
                is_spoiled = "overwritten here" in error.message
                self._send(SyncFailed(str(error), is_spoiled))
                if is_spoiled:
                    state.begin_lineage(is_spoiled=True)
                continue
            self._send(Synced(state.lineage, shared.revision, state.digest(), *offered, info.rx_bytes))
            return
        raise BrokenPromiseError(f"{SYNC_FAILURES_MAX} consecutive syncs have failed")

    # A step

    def _step(self) -> None:
        start_s = time.monotonic()
        self._marked.check()
        self._sync()
        plan, random, state = self._plan, self._random, self._state
        lineage, revision = state.lineage, state.shared.revision
        if random.random() < REST_CHANCE:
            self._at("resting")
            time.sleep(random.uniform(0, REST_S_MAX))
        if plan.groups == 1 and revision % OPTIMIZE_EVERY == OPTIMIZE_EVERY - 1:
            self._at("optimizing")
            self._group_call(self._communicator.optimize_topology, "optimize_topology")
        if self._communicator.world_size < 2:
            self._at("resting")
            time.sleep(ALONE_S)
            self._send(Stepped(lineage, revision, [], False, True, 0, time.monotonic() - start_s))
            return
        ops = ops_of_step(plan.seed, self._options.group, revision, plan.reduce_bytes_max)
        # all_reduce_multiple_with_retry does not report which ops were committed, but in-place arrays show it.
        in_place = self._reduce_all == self._by_library
        slot = self._options.slot
        buffers = [Buffers(op, revision, slot, in_place or random.random() < 0.5, self._marked) for op in ops]
        self._at("reducing")
        if plan.cut and random.random() < CUT_CHANCE:
            threading.Timer(random.random() * CUT_S_MAX, self._cut).start()
        outcomes = self._reduce_all(buffers)
        outcomes.sort(key=lambda outcome: outcome.tag)
        state.advance(outcomes)
        is_whole = len(outcomes) == len(buffers)
        if not is_whole and self._communicator.world_size > 1:
            raise BrokenPromiseError(f"TOO_FEW_PEERS in a world of {self._communicator.world_size}")
        retries = sum(each.aborts for each in buffers)
        self._send(Stepped(lineage, revision, outcomes, is_whole, False, retries, time.monotonic() - start_s))

    def _cut(self) -> None:
        if cut_one(self._random, self._options.masters):
            self._send(Cut())

    # Reduces. Each function returns the committed ops, which are all ops unless this peer is left alone.

    def _by_hand(self, todo: list[Buffers]) -> list[Outcome]:
        order = list(todo)
        self._random.shuffle(order)
        handles = {each.op.tag: self._launched(each) for each in order}
        outcomes = [self._followed(each, handles[each.op.tag]) for each in sorted(todo, key=lambda each: each.op.tag)]
        return [outcome for outcome in outcomes if outcome is not None]

    def _launched(self, buffers: Buffers) -> AsyncReduceHandle | None:
        """Launch an op. Return None if this peer is left alone."""
        try:
            with self._interruptible():
                return buffers.launch(self._communicator)
        except KeyboardInterrupt:
            self._leave_session("interrupted in all_reduce_async")
        except PCCLError as error:
            if not self._continues_after(error, buffers):
                return None
            raise

    def _followed(self, buffers: Buffers, handle: AsyncReduceHandle | None) -> Outcome | None:
        """Wait for an op, relaunching it after each abort. Return None if this peer is left alone."""
        while handle is not None:
            try:
                with self._interruptible():
                    info = handle.result()
            except KeyboardInterrupt:
                continue
            except PCCLError as error:
                if not self._continues_after(error, buffers):
                    return None
                handle = self._launched(buffers)
            else:
                return buffers.outcome(info.world_size)
        return None

    def _continues_after(self, error: PCCLError, buffers: Buffers) -> bool:
        """Return True to retry an op after an error, or False if this peer is alone. Raise any other error."""
        buffers.take_back()
        if error.result is Result.TOO_FEW_PEERS:
            return False
        if self._has_left:
            raise LeftSessionError("another thread has left the session") from None
        if error.result is Result.OUTCOME_UNKNOWN:
            self._leave_session(str(error))
        if error.result not in RETRIED:
            raise error
        buffers.aborts += 1
        return True

    def _by_threads(self, todo: list[Buffers]) -> list[Outcome]:
        with ThreadPoolExecutor(self._plan.threads) as pool:
            futures = [pool.submit(self._until_committed, each) for each in sorted(todo, key=lambda each: each.op.tag)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:  # prefer a violated guarantee to a left session, and that to an error from the library
            raise min(errors, key=lambda error: (isinstance(error, PCCLError), isinstance(error, LeftSessionError)))
        return [outcome for future in futures if (outcome := future.result()) is not None]

    def _until_committed(self, buffers: Buffers) -> Outcome | None:
        """Reduce until the op is committed, or return None if this peer is left alone. Not for the main thread."""
        if self._random.random() < 0.5:
            return self._followed(buffers, self._launched(buffers))
        while True:
            try:
                return buffers.outcome(buffers.reduce(self._communicator, self._timeout_s()))
            except PCCLError as error:
                if not self._continues_after(error, buffers):
                    return None

    def _timeout_s(self) -> float | None:
        is_impatient = self._plan.timeouts and self._random.random() < IMPATIENT_CHANCE
        return self._random.uniform(0, IMPATIENT_S_MAX) if is_impatient else None

    def _by_library(self, todo: list[Buffers]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        while todo:
            descriptors = [each.descriptor() for each in todo]
            self._random.shuffle(descriptors)
            world_size, why_left, is_alone = 0, "", False
            try:
                with self._interruptible():
                    info = self._communicator.all_reduce_multiple_with_retry(
                        descriptors,
                        max_in_flight=self._random.choice((1, 4, len(todo))),
                        timeout=self._timeout_s(),
                    )
                committed, left, world_size = todo, [], info.world_size
            except (PCCLError, KeyboardInterrupt) as error:
                if isinstance(error, KeyboardInterrupt):
                    why_left = "interrupted in all_reduce_multiple_with_retry"
                elif error.result is Result.OUTCOME_UNKNOWN:
                    why_left = str(error)
                elif error.result is Result.TOO_FEW_PEERS:
                    is_alone = True
                elif error.result is not Result.TIMEOUT:
                    raise
                committed = [each for each in todo if each.is_committed]
                left = [each for each in todo if each not in committed]
            for each in left:
                each.aborts += not is_alone
                each.take_back()
            found = [each.outcome(0) for each in committed]
            smallest = min((len(outcome.participants) for outcome in found), default=0)
            if world_size not in (0, smallest):
                raise BrokenPromiseError(f"a smallest world of {world_size}, but {smallest} took part: {found}")
            outcomes += found
            if why_left and left:
                self._leave_session(why_left)
            todo = [] if is_alone else left
        return outcomes


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = Worker(msgspec.json.decode(sys.argv[1], type=WorkerOptions))
    signal.signal(signal.SIGINT, worker.interrupt)
    try:
        worker.run()
    except Exception as error:
        is_found = isinstance(error, BrokenPromiseError)
        worker.report(str(error) if is_found else f"an unexpected error:\n{traceback.format_exc()}")
        sys.exit(1)
    finally:
        # At exit, the interpreter resets handled signals to their defaults, but not ignored ones.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
