"""One peer of a stress run: `python -m pccl.stress.worker JSON`, started by the supervisor.

Theory of operation. A step is

    admit    are_peers_pending and, if so, update_topology; or update_topology in every step (`Plan.asks`)
    sync     sync_shared_state, in every step
    reduce   the ops of `values.ops_of_step`, which follow from the revision, and where there are threads for them
             (`Plan.threads`) the chains of `values.chains_of_step` at the same time
    apply    the state becomes a function of itself and of the results' digests; revision += 1

*Retrying*, in one of three ways that mix freely: all_reduce_multiple_with_retry; by hand over handles, waited for in
the order of tags and launched again as soon as one was aborted; or several threads with blocking calls. What makes
them mix is that each peer has the lowest tag that is not committed in flight. An op that one peer gave up because of a
timeout (`Plan.timeouts`) is aborted on all, and is retried in the same way. In a chain the threads of a peer take turns
on one tag, one op after the other, and each op is either waited for in its call or launched and then waited for.

*Errors.* Whatever error a call raises, what it was given must be as it was and is never touched again. So the arrays
are looked at, filled with a mark that is looked for much later, and others are made for the next attempt.

*Not knowing.* A signal (`Plan.interrupts`) raises KeyboardInterrupt where the main thread is in a call. Where a handle
was waited for, it is waited for again. A result that is there is taken. Otherwise the op may have been committed by the
others, as when the library itself says that its outcome is unknown: the peer leaves its session and comes back as a
newcomer. So it does when another call was interrupted.

*Lineage.* Revisions start again at 0 when all who held a state are gone, so a state also carries whose initial state it
grew from, and reports name it by (lineage, revision). Whoever comes back from an eviction, or holds a state that a
failed sync left half overwritten, starts a lineage of its own: what it has may differ from what others made of the same
revision. A peer that is left alone in the middle of a step ends the step with what was committed.

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
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from types import FrameType
from typing import NoReturn, TypeVar

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
    SharedStateSyncStrategy,
    TensorInfo,
)
from pccl.launcher import say_line
from pccl.stress.commands import commands
from pccl.stress.cutting import cut_one
from pccl.stress.deafness import LISTENING_HOST, Ears
from pccl.stress.messages import (
    At,
    BeDeaf,
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
from pccl.stress.values import TAGS, Array, Op, WrongResultError, chains_of_step, ops_of_step

T = TypeVar("T")

LANES = 3
"""Threads that reduce at once."""
OPTIMIZE_EVERY = 16
"""Revisions between two calls of optimize_topology."""
SYNC_FAILURES_MAX = 20
CUT_CHANCE = 0.02
CUT_S_MAX = 0.05
"""How long after the ops were launched."""
REST_CHANCE = 0.05
REST_S_MAX = 0.3
ALONE_S = 0.02
IMPATIENT_CHANCE = 0.004
IMPATIENT_S_MAX = 0.005
"""An op with so short a timeout is often given up, which aborts it on all peers."""
LEFT_OUT = (Result.MASTER_CONNECTION_FAILED, Result.RANK_CONNECTION_FAILED)
"""The peer was evicted, refused, or has lost the master. It connects again."""
RETRIED = (Result.RANK_CONNECTION_LOST, Result.TIMEOUT)
LINEAGES_PER_PEER = 1 << 20
MARK = 0xA5
MARKED_KEPT = 200
"""Arrays that are looked at again later, so many at most."""
BLOCKS_CHANCE = 0.5


class BrokenPromiseError(Exception):
    """The library did what it must not do."""


class LeftSessionError(Exception):
    """This peer cannot know how a call of its own has ended, and has closed its communicator."""

    def __init__(self, why: str, is_state_spoiled: bool = False) -> None:
        super().__init__(why)
        self.is_state_spoiled = is_state_spoiled


class Marked:
    """Arrays that the library has given back with an error, and must not touch any more."""

    def __init__(self) -> None:
        self._kept: deque[tuple[str, Array]] = deque()

    def add(self, what: str, *arrays: Array) -> None:
        for array in arrays:
            array.view(np.uint8)[:] = MARK
            self._kept.append((what, array))
        while len(self._kept) > MARKED_KEPT:
            self._check(*self._kept.popleft())

    def check(self) -> None:
        for what, array in list(self._kept):
            self._check(what, array)

    @staticmethod
    def _check(what: str, array: Array) -> None:
        touched = np.flatnonzero(array.view(np.uint8) != MARK)
        if len(touched):
            raise BrokenPromiseError(
                f"{what} had failed, and later {len(touched)} bytes of its arrays were written, the first is number "
                f"{touched[0]}"
            )


class Buffers:
    """What one op sends and receives."""

    def __init__(self, op: Op, step: int, slot: int, in_place: bool, marked: Marked) -> None:
        self.op = op
        self.step = step
        """The state's revision: an op of another step must not go together with this one."""
        self.aborts = 0
        self._slot = slot
        self._in_place = in_place
        self._marked = marked
        self._original = op.contribution(slot)
        self._make()

    def _make(self) -> None:
        self.send = self._original.copy()
        self.recv = self.send if self._in_place else np.empty_like(self.send)

    def take_back(self) -> None:
        """After an error: checks that all is as it was, and goes on with other arrays."""
        self.check_untouched()
        self._marked.add(str(self.op), self.send, *(() if self._in_place else (self.recv,)))
        self._make()

    def descriptor(self) -> ReduceOpDescriptor:
        op = self.op
        quantization = op.quantization or QuantizationOptions(algorithm=QuantizationAlgorithm.NONE)
        descriptor = ReduceDescriptor(op.count, op.op, op.tag, None, quantization, op.algorithm, self.step)
        return ReduceOpDescriptor.from_numpy(self.send, self.recv, descriptor)

    def check_untouched(self) -> None:
        """After an error."""
        if self.send.tobytes() != self._original.tobytes():
            wrong = np.flatnonzero(self.send != self._original)
            raise BrokenPromiseError(
                f"{self.op} failed and its input was not restored: {len(wrong)} elements differ, the first is "
                f"number {wrong[:1].tolist()}"
            )

    @property
    def is_committed(self) -> bool:
        """Of an op whose end was not told: a result is no input. Never if it is not in place."""
        return self.send.tobytes() != self._original.tobytes()

    def outcome(self, slot: int, world_size: int) -> Outcome:
        """Reads the result. BrokenPromiseError if it is none."""
        try:
            participants = sorted(self.op.participants(self.recv))
        except WrongResultError as error:
            raise BrokenPromiseError(f"a wrong result: {error}") from None
        if self.send is not self.recv and self.send.tobytes() != self._original.tobytes():
            raise BrokenPromiseError(f"{self.op} was committed and its separate input was changed")
        if slot not in participants:
            raise BrokenPromiseError(f"{self.op} was committed without this peer's own part, over slots {participants}")
        digest = blake3.blake3(self.recv.tobytes()).hexdigest(8)
        return Outcome(self.op.number, participants, world_size, digest, self.aborts)


class State:
    """The tensors that are synced."""

    def __init__(self, peer: int, state_bytes: int) -> None:
        self._peer = peer
        self._lineages = 0
        self._lineage = np.zeros(1, np.int64)
        self._digests = np.zeros(TAGS, np.uint64)
        self._weights = np.zeros(max(1024, state_bytes // 4), np.float32)
        self._loose = np.full(1000, peer, np.float32)
        tensors = [
            TensorInfo.from_numpy(self._lineage, "lineage"),
            TensorInfo.from_numpy(self._digests, "digests"),
            TensorInfo.from_numpy(self._weights, "weights"),
            TensorInfo.from_numpy(self._loose, "loose", allow_content_inequality=True),
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
            place = outcome.number % TAGS
            self._digests[place] ^= np.uint64(int(outcome.digest, 16))
            start = int(self._digests[place] % np.uint64(len(self._weights)))
            self._weights[start : start + 1000] += np.float32(len(outcome.participants))
        self.shared.revision += 1


class Chain:
    """Ops on one tag, one after the other, each by the next of some threads."""

    def __init__(self, buffers: list[Buffers], threads: int, attempt: Callable[[Buffers], Outcome | None]) -> None:
        self.buffers = buffers
        self._attempt = attempt
        self._turns = [threading.Semaphore(int(which == 0)) for which in range(threads)]
        self._is_over = False
        self._outcomes: list[Outcome] = []
        self._errors: list[Exception] = []
        self._threads = [threading.Thread(target=self._run, args=(which,), daemon=True) for which in range(threads)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def _run(self, which: int) -> None:
        try:
            for number in range(which, len(self.buffers), len(self._turns)):
                self._turns[which].acquire()
                if self._is_over:
                    return
                outcome = self._attempt(self.buffers[number])
                if outcome is None:
                    break
                self._outcomes.append(outcome)
                self._turns[(which + 1) % len(self._turns)].release()
            else:
                return
        except Exception as error:
            self._errors.append(error)
        self._is_over = True
        for turn in self._turns:
            turn.release()

    def errors(self) -> list[Exception]:
        """Waits for the threads, whose calls end by themselves."""
        for thread in self._threads:
            thread.join()
        return self._errors

    def outcomes(self) -> list[Outcome]:
        """Of all ops, or of those before this peer was left alone."""
        if errors := self.errors():
            raise worst(errors)
        return self._outcomes


def worst(errors: list[Exception]) -> Exception:
    """A broken promise before an error that is one's own choice before one of the library's."""
    kinds = (LeftSessionError, PCCLError)
    return min(errors, key=lambda error: sum(isinstance(error, kind) * (at + 1) for at, kind in enumerate(kinds)))


class Worker:
    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._plan = options.plan
        self._random = Random(f"{options.plan.seed} peer {options.peer}")
        self._state = State(options.peer, options.plan.state_bytes)
        self._leave = threading.Event()
        self._ears = Ears(options.place) if options.place is not None else None
        self._session = 0
        self._is_newcomer = True
        self._say_lock = threading.Lock()
        self._marked = Marked()
        self._may_be_interrupted = False
        """The main thread is in a call of the library."""
        self._has_left = False
        """The session, because nobody can know how a call has ended."""
        self._retry_by = self._random.choice((self._by_library, self._by_hand, self._by_threads))
        self._comm = self._communicator()
        threading.Thread(target=self._hear, name="commands", daemon=True).start()

    def run(self) -> None:
        while not self._leave.is_set():
            self._session += 1
            self._is_newcomer = True
            self._has_left = False
            try:
                self._run_session()
            except LeftSessionError as error:
                self._say(SessionOver(str(error), is_own=True))
                self._state.begin_lineage(error.is_state_spoiled)
                self._comm = self._communicator()
            except PCCLError as error:
                if error.result not in LEFT_OUT:
                    raise
                self._say(SessionOver(str(error)))
                self._state.begin_lineage(is_spoiled=False)
                if self._random.random() < 0.5:
                    self._comm.close()
                    self._comm = self._communicator()
        self._at("leaving")
        self._comm.close()
        self._marked.check()
        self._say(Left(self._state.shared.revision))

    # Words.

    def _hear(self) -> None:
        for command in commands():
            match command:
                case Leave():
                    self._leave.set()
                case BeDeaf(others):
                    assert self._ears is not None
                    self._ears.be_deaf_to(others)

    def _say(self, message: Message) -> None:
        with self._say_lock:
            say_line(msgspec.json.encode(message))

    def _at(self, doing: Doing) -> None:
        self._say(At(doing, self._state.shared.revision))

    def report(self, what: str) -> None:
        """Something that must not be."""
        self._say(Trouble(what))

    # Interrupts.

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGINT."""
        if self._may_be_interrupted:
            self._may_be_interrupted = False
            raise KeyboardInterrupt

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Around calls of the library."""
        if self._plan.interrupts is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        try:
            self._may_be_interrupted = True
            yield
        finally:
            self._may_be_interrupted = False

    def _leave_session(self, why: str, is_state_spoiled: bool = False) -> NoReturn:
        """From any thread; calls in others fail then."""
        self._has_left = True
        self._comm.close()
        raise LeftSessionError(why, is_state_spoiled)

    def _joint(self, call: Callable[[], T], name: str, spoils: bool = False) -> T:
        """A call other than a reduce. `spoils`: the state, if it is interrupted."""
        try:
            with self._interruptible():
                return call()
        except KeyboardInterrupt:
            self._leave_session(f"interrupted in {name}", is_state_spoiled=spoils)

    # A session.

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
        self._joint(self._comm.connect, "connect")
        self._say(Joined(self._session, self._comm.world_size))
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
            if not self._joint(self._comm.are_peers_pending, "are_peers_pending"):
                return
        self._at("updating")
        self._joint(self._comm.update_topology, "update_topology")

    def _step(self) -> None:
        start_s = time.monotonic()
        self._marked.check()
        self._sync()
        state = self._state
        lineage, revision = state.lineage, state.shared.revision
        self._rest()
        if self._plan.groups == 1 and revision % OPTIMIZE_EVERY == OPTIMIZE_EVERY - 1:
            self._at("optimizing")
            self._joint(self._comm.optimize_topology, "optimize_topology")
        if self._comm.world_size < 2:
            self._at("resting")
            time.sleep(ALONE_S)
            self._say(Stepped(lineage, revision, [], False, True, 0, time.monotonic() - start_s))
            return
        ops = ops_of_step(self._plan.seed, self._options.group, revision, self._plan.reduce_bytes_max)
        by_library = self._retry_by == self._by_library
        buffers = [self._buffers(op, by_library or self._random.random() < 0.5) for op in ops]
        self._at("reducing")
        if self._leave.is_set() and self._random.random() < 0.5:
            self._leave_reducing(buffers)
            return
        if self._plan.cut and self._random.random() < CUT_CHANCE:
            threading.Timer(self._random.random() * CUT_S_MAX, self._cut).start()
        chains = self._chains(revision)
        buffers += [each for chain in chains for each in chain.buffers]
        outcomes = self._reduce(buffers[: len(ops)], chains)
        outcomes.sort(key=lambda outcome: outcome.number)
        state.advance(outcomes)
        is_whole = len(outcomes) == len(buffers)
        if not is_whole and self._comm.world_size > 1:
            raise BrokenPromiseError(f"TOO_FEW_PEERS in a world of {self._comm.world_size}")
        retries = sum(each.aborts for each in buffers)
        self._say(Stepped(lineage, revision, outcomes, is_whole, False, retries, time.monotonic() - start_s))

    def _buffers(self, op: Op, in_place: bool) -> Buffers:
        return Buffers(op, self._state.shared.revision, self._options.slot, in_place, self._marked)

    def _chains(self, revision: int) -> list[Chain]:
        if not self._plan.threads:
            return []
        ops = chains_of_step(self._plan.seed, self._options.group, revision)

        def attempt(buffers: Buffers) -> Outcome | None:
            return self._until_committed(buffers, blocks=self._random.random() < BLOCKS_CHANCE)

        return [
            Chain([self._buffers(op, self._random.random() < 0.5) for op in chain], self._plan.threads, attempt)
            for chain in ops
        ]

    def _reduce(self, todo: list[Buffers], chains: list[Chain]) -> list[Outcome]:
        """The outcomes of those that were committed: of all, unless this peer is left alone."""
        for chain in chains:
            chain.start()
        try:
            outcomes = self._retry_by(todo)
            for chain in chains:
                outcomes += chain.outcomes()
            return outcomes
        except (LeftSessionError, PCCLError) as error:
            if isinstance(error, PCCLError) and error.result not in LEFT_OUT:
                raise
            raise worst([error, *(each for chain in chains for each in chain.errors())]) from None

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
                info = self._joint(
                    partial(self._comm.sync_shared_state, shared, strategy), "sync_shared_state", spoils=True
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

    # Reducing.

    def _launch(self, buffers: Buffers) -> AsyncReduceHandle:
        op = buffers.op
        return self._comm.all_reduce_async(
            buffers.send,
            buffers.recv,
            op=op.op,
            tag=op.tag,
            quantization_options=op.quantization,
            algorithm=op.algorithm,
            step=buffers.step,
        )

    def _by_hand(self, todo: list[Buffers]) -> list[Outcome]:
        launched = {each.op.tag: each for each in todo}
        order = list(todo)
        self._random.shuffle(order)
        handles = {each.op.tag: self._launched(each) for each in order}
        outcomes = []
        for tag in sorted(launched):
            outcome = self._follow(launched[tag], handles[tag])
            if outcome is not None:
                outcomes.append(outcome)
        return outcomes

    def _launched(self, buffers: Buffers) -> AsyncReduceHandle | None:
        """None if this peer is left alone."""
        try:
            with self._interruptible():
                return self._launch(buffers)
        except KeyboardInterrupt:
            self._leave_session("interrupted in all_reduce_async")
        except PCCLError as error:
            if not self._goes_on_after(error, buffers):
                return None
            raise

    def _follow(self, buffers: Buffers, handle: AsyncReduceHandle | None) -> Outcome | None:
        """Waits for an op, and launches it again where it was aborted. None if this peer is left alone."""
        while handle is not None:
            try:
                with self._interruptible():
                    info = handle.result()
            except KeyboardInterrupt:
                continue
            except PCCLError as error:
                if not self._goes_on_after(error, buffers):
                    return None
                handle = self._launched(buffers)
            else:
                return buffers.outcome(self._options.slot, info.world_size)
        return None

    def _goes_on_after(self, error: PCCLError, buffers: Buffers) -> bool:
        """What to do after an op has failed: try it again, or, False, nothing, for this peer is alone. Else raises."""
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
        outcomes: list[Outcome] = []
        errors: list[Exception] = []

        def lane(mine: list[Buffers]) -> None:
            try:
                for buffers in mine:
                    outcome = self._until_committed(buffers, blocks=True)
                    if outcome is not None:
                        outcomes.append(outcome)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=lane, args=(todo[index::LANES],)) for index in range(1, LANES)]
        for thread in threads:
            thread.start()
        lane(todo[::LANES])  # the main thread's, which can be interrupted
        for thread in threads:
            thread.join()
        if errors:
            raise worst(errors)
        return outcomes

    def _until_committed(self, buffers: Buffers, blocks: bool) -> Outcome | None:
        """None if this peer is left alone."""
        if not blocks:
            return self._follow(buffers, self._launched(buffers))
        op = buffers.op
        while True:
            is_impatient = self._plan.timeouts and self._random.random() < IMPATIENT_CHANCE
            timeout_s = self._random.uniform(0, IMPATIENT_S_MAX) if is_impatient else None
            try:
                with self._interruptible():
                    info = self._comm.all_reduce(
                        buffers.send,
                        buffers.recv,
                        op=op.op,
                        tag=op.tag,
                        quantization_options=op.quantization,
                        algorithm=op.algorithm,
                        step=buffers.step,
                        timeout=timeout_s,
                    )
            except KeyboardInterrupt:
                if buffers.is_committed:
                    return buffers.outcome(self._options.slot, 0)
                buffers.take_back()
                self._leave_session("interrupted in all_reduce")
            except PCCLError as error:
                if not self._goes_on_after(error, buffers):
                    return None
            else:
                return buffers.outcome(self._options.slot, info.world_size)

    def _by_library(self, todo: list[Buffers]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        while todo:
            descriptors = [each.descriptor() for each in todo]
            self._random.shuffle(descriptors)
            world_size = 0
            why_left, is_over = "", False
            is_impatient = self._plan.timeouts and self._random.random() < IMPATIENT_CHANCE
            try:
                with self._interruptible():
                    info = self._comm.all_reduce_multiple_with_retry(
                        descriptors,
                        max_in_flight=self._random.choice((1, 4, len(todo))),
                        timeout=self._random.uniform(0, IMPATIENT_S_MAX) if is_impatient else None,
                    )
                committed, left, world_size = todo, [], info.world_size
            except (PCCLError, KeyboardInterrupt) as error:
                if isinstance(error, KeyboardInterrupt):
                    why_left = "interrupted in all_reduce_multiple_with_retry"
                elif error.result is Result.OUTCOME_UNKNOWN or self._has_left:
                    why_left = str(error)
                elif error.result is Result.TOO_FEW_PEERS:
                    is_over = True
                elif error.result is not Result.TIMEOUT:
                    raise
                # Those that were committed before stay so.
                committed = [each for each in todo if each.is_committed]
                left = [each for each in todo if each not in committed]
            for each in left:
                each.aborts += not is_over
                each.take_back()
            found = [each.outcome(self._options.slot, 0) for each in committed]
            smallest = min((len(outcome.participants) for outcome in found), default=0)
            if world_size not in (0, smallest):
                raise BrokenPromiseError(f"a smallest world of {world_size}, but {smallest} took part: {found}")
            outcomes += found
            if why_left and left:
                self._leave_session(why_left)
            todo = [] if is_over else left
        return outcomes

    def _leave_reducing(self, todo: list[Buffers]) -> None:
        """Closes the communicator with some of the step's ops in flight."""
        handles = []
        for each in todo[: self._random.randint(1, len(todo))]:
            try:
                handles.append(self._launch(each))
            except PCCLError as error:
                if error.result is not Result.TOO_FEW_PEERS:
                    raise
                break  # the others have left already
        self._at("leaving")
        self._comm.close()
        for handle, buffers in zip(handles, todo, strict=False):
            _, status, info = handle.wait()
            if info is not None:
                buffers.outcome(self._options.slot, info.world_size)
                continue
            buffers.take_back()
            if status not in (Result.NOT_INITIALIZED, Result.TOO_FEW_PEERS, Result.OUTCOME_UNKNOWN, *RETRIED):
                handle.result()


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
