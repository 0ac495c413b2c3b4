"""Reduces the ops of a step until each is committed, in all the ways in which a program may.

*Retrying*, in one of three ways that mix freely: all_reduce_multiple_with_retry; by hand over handles, waited for in
the order of tags and launched again as soon as one was aborted; or several threads with blocking calls. What makes
them mix is that each peer has the lowest tag that is not committed in flight. An op that one peer gave up because of a
timeout (`Plan.timeouts`) is aborted on all, and is retried in the same way. In a chain the threads of a peer take turns
on one tag, one op after the other, and each op is either waited for in its call or launched and then waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random

from pccl import AsyncReduceHandle, PCCLError, Result
from pccl.stress.buffers import Buffers, Marked
from pccl.stress.calls import LEFT_OUT, Calls
from pccl.stress.chain import Chain
from pccl.stress.errors import BrokenPromiseError, LeftSessionError, worst
from pccl.stress.messages import Outcome, WorkerOptions
from pccl.stress.values import Op, chains_of_step

THREADS = 3
"""Threads that reduce at once."""
IMPATIENT_CHANCE = 0.004
IMPATIENT_S_MAX = 0.005
"""An op with so short a timeout is often given up, which aborts it on all peers."""
RETRIED = (Result.RANK_CONNECTION_LOST, Result.TIMEOUT)
BLOCKS_CHANCE = 0.5


class Reducer:
    """Reduces the ops of one peer, each peer in a way of its own."""

    def __init__(self, options: WorkerOptions, random: Random, calls: Calls, marked: Marked) -> None:
        self._plan = options.plan
        self._slot = options.slot
        self._group = options.group
        self._random = random
        self._calls = calls
        self._marked = marked
        self._retry_by = random.choice((self._by_library, self._by_hand, self._by_threads))

    @property
    def is_in_place(self) -> bool:
        """Whether all ops must be in place, as results of a call that reduces many cannot be told otherwise."""
        return self._retry_by == self._by_library

    def buffers(self, op: Op, revision: int, in_place: bool) -> Buffers:
        return Buffers(op, revision, self._slot, in_place, self._marked)

    def chains(self, revision: int) -> list[Chain]:
        """Return the chains of ops that the threads of this peer make in the step of this revision."""
        if not self._plan.threads:
            return []
        ops = chains_of_step(self._plan.seed, self._group, revision)

        def attempt(buffers: Buffers) -> Outcome | None:
            return self._until_committed(buffers, blocks=self._random.random() < BLOCKS_CHANCE)

        return [
            Chain(
                [self.buffers(op, revision, self._random.random() < 0.5) for op in chain], self._plan.threads, attempt
            )
            for chain in ops
        ]

    def reduce(self, todo: list[Buffers], chains: list[Chain]) -> list[Outcome]:
        """Reduce the ops and the chains, and return the outcomes of what was committed: everything, unless this peer is
        left alone."""
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

    def _launch(self, buffers: Buffers) -> AsyncReduceHandle:
        op = buffers.op
        return self._calls.communicator.all_reduce_async(
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
        """Launch an op, and return its handle; None if this peer is left alone."""
        try:
            with self._calls.interruptible():
                return self._launch(buffers)
        except KeyboardInterrupt:
            self._calls.leave_session("interrupted in all_reduce_async")
        except PCCLError as error:
            if not self._goes_on_after(error, buffers):
                return None
            raise

    def _follow(self, buffers: Buffers, handle: AsyncReduceHandle | None) -> Outcome | None:
        """Waits for an op, and launches it again where it was aborted. None if this peer is left alone."""
        while handle is not None:
            try:
                with self._calls.interruptible():
                    info = handle.result()
            except KeyboardInterrupt:
                continue
            except PCCLError as error:
                if not self._goes_on_after(error, buffers):
                    return None
                handle = self._launched(buffers)
            else:
                return buffers.outcome(self._slot, info.world_size)
        return None

    def _goes_on_after(self, error: PCCLError, buffers: Buffers) -> bool:
        """Decide what follows from the error of an op: True to try again, False where this peer is alone. Any other
        error is raised."""
        buffers.take_back()
        if error.result is Result.TOO_FEW_PEERS:
            return False
        if self._calls.has_left:
            raise LeftSessionError("another thread has left the session") from None
        if error.result is Result.OUTCOME_UNKNOWN:
            self._calls.leave_session(str(error))
        if error.result not in RETRIED:
            raise error
        buffers.aborts += 1
        return True

    def _by_threads(self, todo: list[Buffers]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        errors: list[Exception] = []

        def reduce_all(mine: list[Buffers]) -> None:
            try:
                for buffers in mine:
                    outcome = self._until_committed(buffers, blocks=True)
                    if outcome is not None:
                        outcomes.append(outcome)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=reduce_all, args=(todo[index::THREADS],)) for index in range(1, THREADS)]
        for thread in threads:
            thread.start()
        reduce_all(todo[::THREADS])  # on the main thread, which can be interrupted
        for thread in threads:
            thread.join()
        if errors:
            raise worst(errors)
        return outcomes

    def _until_committed(self, buffers: Buffers, blocks: bool) -> Outcome | None:
        """Reduce until the op is committed, and return the outcome; None if this peer is left alone."""
        if not blocks:
            return self._follow(buffers, self._launched(buffers))
        op = buffers.op
        while True:
            is_impatient = self._plan.timeouts and self._random.random() < IMPATIENT_CHANCE
            timeout_s = self._random.uniform(0, IMPATIENT_S_MAX) if is_impatient else None
            try:
                with self._calls.interruptible():
                    info = self._calls.communicator.all_reduce(
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
                    return buffers.outcome(self._slot, 0)
                buffers.take_back()
                self._calls.leave_session("interrupted in all_reduce")
            except PCCLError as error:
                if not self._goes_on_after(error, buffers):
                    return None
            else:
                return buffers.outcome(self._slot, info.world_size)

    def _by_library(self, todo: list[Buffers]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        while todo:
            descriptors = [each.descriptor() for each in todo]
            self._random.shuffle(descriptors)
            world_size = 0
            why_left, is_over = "", False
            is_impatient = self._plan.timeouts and self._random.random() < IMPATIENT_CHANCE
            try:
                with self._calls.interruptible():
                    info = self._calls.communicator.all_reduce_multiple_with_retry(
                        descriptors,
                        max_in_flight=self._random.choice((1, 4, len(todo))),
                        timeout=self._random.uniform(0, IMPATIENT_S_MAX) if is_impatient else None,
                    )
                committed, left, world_size = todo, [], info.world_size
            except (PCCLError, KeyboardInterrupt) as error:
                if isinstance(error, KeyboardInterrupt):
                    why_left = "interrupted in all_reduce_multiple_with_retry"
                elif error.result is Result.OUTCOME_UNKNOWN or self._calls.has_left:
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
            found = [each.outcome(self._slot, 0) for each in committed]
            smallest = min((len(outcome.participants) for outcome in found), default=0)
            if world_size not in (0, smallest):
                raise BrokenPromiseError(f"a smallest world of {world_size}, but {smallest} took part: {found}")
            outcomes += found
            if why_left and left:
                self._calls.leave_session(why_left)
            todo = [] if is_over else left
        return outcomes

    def leave_reducing(self, todo: list[Buffers], at_leaving: Callable[[], None]) -> None:
        """Close the communicator with some of the step's ops in flight; `at_leaving` is called just before."""
        handles = []
        for each in todo[: self._random.randint(1, len(todo))]:
            try:
                handles.append(self._launch(each))
            except PCCLError as error:
                if error.result is not Result.TOO_FEW_PEERS:
                    raise
                break  # the others have left already
        at_leaving()
        self._calls.communicator.close()
        for handle, buffers in zip(handles, todo, strict=False):
            _, status, info = handle.wait()
            if info is not None:
                buffers.outcome(self._slot, info.world_size)
                continue
            buffers.take_back()
            if status not in (Result.NOT_INITIALIZED, Result.TOO_FEW_PEERS, Result.OUTCOME_UNKNOWN, *RETRIED):
                handle.result()
