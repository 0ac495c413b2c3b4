"""The other end of `harness.Worker`: a process with a communicator that does what it is told, one command a line.

Commands and answers are JSON objects on stdin and stdout. A command names a method of `Member` and its arguments; the
process says "begun", carries it out in its main thread, and answers with the value, or with what was raised.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import itertools
import json
import os
import signal
import ssl
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest import mock

import numpy as np

from pccl import (
    Attribute,
    CollectiveInfo,
    Communicator,
    MasterNode,
    PCCLError,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    SharedState,
    SharedStateSyncStrategy,
    TensorInfo,
    communicator,
    handle,
)
from pccl.runtime.state import tensor_blocks

VERDICT_WAIT_S = 0.3
"""Seconds a caller that gives up waits for a verdict; the default is longer."""


def say(**message: Any) -> None:
    # One write, so that a thread or a forked child never cuts a line in two.
    os.write(1, (json.dumps(message) + "\n").encode())


@contextlib.contextmanager
def stopped_after(blocks: int) -> Iterator[None]:
    """Stop the process (SIGSTOP) after this number of received blocks of shared state; never with 0."""
    landed = itertools.count(1)

    def commit(_: tensor_blocks.InPlace) -> None:
        if next(landed) == blocks:
            os.kill(os.getpid(), signal.SIGSTOP)

    with mock.patch.object(tensor_blocks.InPlace, "commit", commit):
        yield


def _is_exchanged(kind: str, rank: int, found: Any, given: list[np.ndarray[Any, Any]]) -> bool:
    """Whether a rank has found what it should of what all ranks gave."""
    if kind == "all_to_all":
        return np.array_equal(found, np.concatenate([np.split(each, len(given))[rank] for each in given]))
    if kind == "scatter":
        return np.array_equal(found, np.split(given[0], len(given))[rank])
    if rank != 0:
        return found is None
    return np.array_equal(found, given if kind == "gather" else np.sum(given, axis=0))


class Member:
    """The commands. Arrays live here under a name."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}
        self.states: dict[str, SharedState] = {}
        self.handles: dict[int, Any] = {}
        self.digests: dict[int, int] = {}
        self.node: MasterNode | None = None
        self.peer: Communicator | None = None

    @property
    def _peer(self) -> Communicator:
        assert self.peer is not None
        return self.peer

    # Life.

    def connect(self, master: str, attempts: int = 5, timeout: float | None = None, **options: Any) -> None:
        self.peer = Communicator(master, **options)
        self.peer.connect(attempts, timeout=timeout)

    def gather(self, world: int) -> None:
        """Call update_topology until the run has this number of peers."""
        while self._peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < world:
            self._peer.update_topology()

    def world(self) -> int:
        return self._peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE)

    def has_master(self) -> bool:
        session = self._peer._inner._session
        return session is not None and session._machine.is_led

    def stats(self) -> int:
        return self._peer.stats["ops_open"]

    def close(self) -> None:
        self._peer.close()

    def forget(self) -> None:
        """Lets the communicator be garbage-collected, as part of a cycle."""
        cycle: list[Any] = [self.peer]
        cycle.append(cycle)
        self.peer = None
        del cycle
        gc.collect()

    # Group calls.

    def are_peers_pending(self, timeout: float | None = None) -> bool:
        return self._peer.are_peers_pending(timeout=timeout)

    def update_topology(self, timeout: float | None = None) -> None:
        self._peer.update_topology(timeout=timeout)

    def optimize_topology(self, timeout: float | None = None) -> None:
        self._peer.optimize_topology(timeout=timeout)

    def state(self, name: str, arrays: list[str], revision: int = 0, loose: tuple[str, ...] = ()) -> None:
        infos = [
            TensorInfo.from_numpy(self.arrays[array], array, allow_content_inequality=array in loose)
            for array in arrays
        ]
        self.states[name] = SharedState(infos)
        self.states[name].revision = revision

    def sync(self, name: str, strategy: str = "enforce_popular", stop_after: int = 0) -> list[int]:
        """Bytes sent, bytes received, revision. With `stop_after` the process stops itself (SIGSTOP) after
        this number of received blocks."""
        with stopped_after(stop_after):
            info = self._peer.sync_shared_state(self.states[name], SharedStateSyncStrategy(strategy))
        return [info.tx_bytes, info.rx_bytes, self.states[name].revision]

    # Arrays and reduces.

    def array(
        self, name: str, count: int, value: float = 0.0, seed: int | None = None, file: str | None = None
    ) -> None:
        """float32; random with a seed; in a file that others can watch if one is given."""
        array = np.memmap(file, np.float32, "w+", shape=(count,)) if file else np.empty(count, np.float32)
        array[:] = value if seed is None else np.random.default_rng(seed).normal(0, 1, count)
        self.arrays[name] = array

    def digest(self, name: str) -> int:
        return zlib.crc32(self.arrays[name].data)

    def all_reduce(
        self, name: str, into: str | None = None, op: str = "SUM", tag: int = 0, timeout: float | None = None
    ) -> int:
        """The world size of the result."""
        recv = self.arrays[into] if into else None
        return self._peer.all_reduce(self.arrays[name], recv, op=ReduceOp[op], tag=tag, timeout=timeout).world_size

    def give_up(self, how: str, name: str, value: float, tag: int = 0, timeout: float = 0.3) -> list[Any]:
        """Makes a call that raises, or is interrupted: what it raised, and whether the array was as before right then.
        It is full of `value` from then on, as if its caller used it for something else."""
        array = self.arrays[name]
        before = array.tobytes()
        communicator.CANCEL_GRACE_S = handle.CANCEL_GRACE_S = VERDICT_WAIT_S
        try:
            self._GIVE_UP[how](self, array, tag, timeout)
            raised = ""
        except PCCLError as error:
            raised = error.result.name
        except BaseException as error:
            raised = type(error).__name__
        is_kept = array.tobytes() == before
        array[:] = value
        return [raised, is_kept]

    def _call(self, array: np.ndarray[Any, Any], tag: int, timeout: float) -> None:
        self._peer.all_reduce(array, op=ReduceOp.SUM, tag=tag, timeout=timeout)

    def _cancel(self, array: np.ndarray[Any, Any], tag: int, timeout: float) -> None:
        launched = self._peer.all_reduce_async(array, op=ReduceOp.SUM, tag=tag)
        assert not launched.wait(timeout)[0]
        launched.cancel()

    def _many(self, array: np.ndarray[Any, Any], tag: int, timeout: float) -> None:
        descriptors = [
            ReduceOpDescriptor.from_numpy(part, part, ReduceDescriptor(part.size, ReduceOp.SUM, tag + number))
            for number, part in enumerate(np.split(array, 4))
        ]
        self._peer.all_reduce_multiple_with_retry(descriptors, timeout=timeout)

    _GIVE_UP: ClassVar[dict[str, Any]] = {
        "call": _call,
        "interrupt": _call,
        "cancel": _cancel,
        "many": _many,
    }

    def is_full_of(self, name: str, value: float) -> bool:
        return bool((self.arrays[name] == value).all())

    def launch(self, name: str, tag: int) -> None:
        self.handles[tag] = self._peer.all_reduce_async(self.arrays[name], op=ReduceOp.SUM, tag=tag)

    def wait(self, tag: int) -> str:
        return str(self.handles[tag].wait()[1].name)

    def result(self, tag: int) -> int:
        """Wait as `wait` does; a failure is an error."""
        return self.handles[tag].result().world_size

    def all_reduce_multiple(self, names: list[str], max_in_flight: int = 4) -> int:
        """Under the tags 0, 1 and so on; returns the smallest world size."""
        descriptors = [
            ReduceOpDescriptor.from_numpy(x, x, ReduceDescriptor(x.size, ReduceOp.SUM, tag))
            for tag, x in enumerate(self.arrays[name] for name in names)
        ]
        return self._peer.all_reduce_multiple_with_retry(descriptors, max_in_flight=max_in_flight).world_size

    def reduce_loop(self, count: int, seed: int, tail: int, rest_in: int | None = None) -> None:
        """Reduces in place again and again, each iteration until it succeeds, and says what came of each attempt. Ends
        when peers were lost and `tail` more reduces have succeeded. In iteration `rest_in` the main thread sleeps
        instead of launching the reduce, while what the others may need of the one before still gets to them."""
        before = self.world()
        iteration = 0
        while tail:
            say(iteration=iteration)
            if iteration == rest_in:
                threading.Event().wait()
            x = np.random.default_rng([seed, iteration]).normal(0, 1, count).astype(np.float32)
            kept = x.copy()
            try:
                world = self._peer.all_reduce(x, op=ReduceOp.SUM).world_size
                say(iteration=iteration, verdict="SUCCESS", world=world, digest=zlib.crc32(x.data))
                tail -= world < before
                iteration += 1
            except PCCLError as error:
                is_restored = x.tobytes() == kept.tobytes()
                say(iteration=iteration, verdict=error.result.name, restored=is_restored, world=self.world())

    def exchange_loop(self, kind: str, count: int, tail: int) -> None:
        """Call an exchange or a reduce repeatedly, as `reduce_loop` does, and report whether the result, or the
        restored input, is right. The root is rank 0."""
        before = self.world()
        number = self._peer.membership.peers[self._peer.membership.rank]
        iteration = 0
        while tail:
            say(iteration=iteration)
            x = np.arange(count) + 1000 * number + iteration
            try:
                info = self._exchange(kind, x)
                world = info.world_size
                given = [np.arange(count) + 1000 * peer + iteration for peer in info.membership.peers]
                is_right = _is_exchanged(kind, info.rank, info.array, given)
                say(iteration=iteration, verdict="SUCCESS", world=world, is_right=is_right)
                tail -= world < before
                iteration += 1
            except PCCLError as error:
                is_restored = np.array_equal(x, np.arange(count) + 1000 * number + iteration)
                say(iteration=iteration, verdict=error.result.name, is_right=is_restored, world=self.world())

    def _exchange(self, kind: str, x: np.ndarray[Any, Any]) -> CollectiveInfo:
        if kind == "all_to_all":
            return self._peer.all_to_all(x)
        if kind == "gather":
            return self._peer.gather(x, root=0)
        if kind == "scatter":
            is_root = self._peer.membership.rank == 0
            return self._peer.scatter(x if is_root else None, np.empty(x.size // self.world(), x.dtype), root=0)
        return self._peer.reduce(x, root=0)

    def reduce_many(self, count: int, seed: int, iterations: int) -> list[list[Any]]:
        """Make this number of reduces and report when each begins. Return verdict, world and sum of each."""
        ends: list[list[Any]] = []
        x, y = np.empty(count, np.float32), np.empty(count, np.float32)
        for iteration in range(iterations):
            say(iteration=iteration)
            x[:] = seed + iteration
            try:
                info = self._peer.all_reduce(x, y, op=ReduceOp.SUM)
            except PCCLError as error:
                ends.append([error.result.name, 0, 0.0])
            else:
                ends.append(["SUCCESS", info.world_size, float(y[0] if (y == y[0]).all() else -1)])
        return ends

    def launch_many(self, tags: list[int], count: int, seed: int) -> None:
        """Launches in-place reduces under these tags, from three threads at once."""

        def launch(mine: list[int]) -> None:
            for tag in mine:
                name = f"tag {tag}"
                self.arrays[name] = np.random.default_rng([seed, tag]).normal(0, 1, count).astype(np.float32)
                self.digests[tag] = self.digest(name)
                self.launch(name, tag)

        threads = [threading.Thread(target=launch, args=(tags[thread::3],)) for thread in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def verdicts(self) -> dict[int, list[Any]]:
        """Return the status of each tag that was launched, and the digest of its result or whether its input is
        back."""
        found: dict[int, list[Any]] = {}
        for tag in sorted(self.digests):
            status, digest = self.wait(tag), self.digest(f"tag {tag}")
            found[tag] = [status, digest if status == "SUCCESS" else digest == self.digests[tag]]
        return found

    def usual_loop(self, master: str, busiest: int, tail: int) -> list[int]:
        """A training script: connects and loops as usual. It says whenever the world has changed, and ends `tail`
        revisions after the world was as large as `busiest` and then shrank. Returns the state's digest and revision."""
        self.connect(master)
        x = np.full(5000, os.getpid(), np.float32)
        state = SharedState.from_numpy({"x": x})
        largest = last_world = 0
        while tail:
            if self._peer.are_peers_pending():
                self._peer.update_topology()
            world = self._peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE)
            if world < 2:
                time.sleep(0.001)
                continue
            self._peer.sync_shared_state(state)
            if world != last_world:
                say(revision=state.revision, world=world)
            last_world, largest = world, max(largest, world)
            tail -= largest == busiest > world
            step = x + state.revision
            while world > 1:
                try:
                    self._peer.all_reduce(step, op=ReduceOp.AVG)
                    break
                except PCCLError as error:
                    say(lost=error.result.name)
                    world = self._peer.get_attribute(Attribute.LOCAL_WORLD_SIZE)
            if world < 2:
                continue
            x -= np.float32(0.01) * step
            state.revision += 1
        return [zlib.crc32(x.data), state.revision]

    # The process itself.

    def listen(
        self,
        peer_timeout: float | None = None,
        address: str = "127.0.0.1:0",
        standby_of: str = "",
        certificate: str = "",
        founders: int = 1,
    ) -> str:
        """Runs a master, which speaks TLS if it has a certificate."""
        context = None
        if certificate:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(certificate)
        self.node = MasterNode(
            address, peer_timeout=peer_timeout, standby_of=standby_of, ssl_context=context, founders=founders
        )
        self.node.run()
        return self.node.address

    def interrupt_master(self) -> None:
        assert self.node is not None
        self.node.interrupt()

    def wait_for_master(self) -> None:
        assert self.node is not None
        self.node.wait()

    def hold_python(self, seconds: int) -> None:
        """Hold the GIL."""
        ctypes.PyDLL(None).sleep(seconds)

    def on_terminate(self, how: str) -> None:
        """Choose what a SIGTERM does from now on."""

        def handle(*_: object) -> None:
            if how == "exit":
                sys.exit(3)
            elif how == "end":
                os._exit(4)
            elif how == "close":
                self._peer.close()
            else:
                raise ZeroDivisionError

        signal.signal(signal.SIGTERM, handle)

    def background(self, command: str, **arguments: Any) -> None:
        """Carries out a command in another thread. Its answer comes when it comes, marked with its name."""
        threading.Thread(
            target=carry_out, args=(self, command, arguments, {"background": command}), daemon=True
        ).start()

    def fork(self, commands: list[dict[str, Any]], then: str) -> int:
        """Forks a child that carries out commands, answers marked "child", and then returns from `main`, or sleeps.

        Returns the child's process id.
        """
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        for command in commands:
            carry_out(self, command.pop("do"), command, {"child": True})
        if then == "sleep":
            signal.pause()
        raise EOFError

    def join_child(self, pid: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def carry_out(member: Member, name: str, arguments: dict[str, Any], mark: dict[str, Any]) -> None:
    start_s = time.monotonic()
    try:
        if not mark:
            say(begun=name)
        outcome = {"value": getattr(member, name)(**arguments)}
    except PCCLError as error:
        outcome = {"error": error.result.name, "text": str(error)}
    except (KeyboardInterrupt, ZeroDivisionError) as error:
        outcome = {"error": type(error).__name__, "text": ""}
    say(**outcome, seconds=time.monotonic() - start_s, **mark)


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    member = Member()
    with contextlib.suppress(EOFError):
        for line in sys.stdin:
            command = json.loads(line)
            carry_out(member, command.pop("do"), command, {})


if __name__ == "__main__":
    main()
