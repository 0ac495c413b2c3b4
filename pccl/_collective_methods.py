"""What both communicators have of the collectives besides all_reduce: their methods, of which `collectives` makes ops.

Those of `Collectives` return what it is made for: the result, or a coroutine that does. The `_async` ones are plain
functions in both communicators.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from pccl import _collectives
from pccl._collectives import AsyncCollectiveHandle, CallOf
from pccl._timeouts import DEFAULT, Timeout
from pccl.types import ReduceAlgorithm, ReduceOp

CollectiveInfoT = TypeVar("CollectiveInfoT")


class LaunchedCollectives(ABC):
    """Each launches a collective and returns at once, as `all_reduce_async` does: leave the arrays alone until the
    handle's `wait` returns. Arguments and errors are those of the method without `_async`; who is alone in the group
    gets TOO_FEW_PEERS at the call."""

    @abstractmethod
    def launch_collective(self, call: CallOf, func_name: str) -> AsyncCollectiveHandle:
        """Of the communicator."""

    def all_gather_async(
        self,
        send: Any,
        recv: Any = None,
        *,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
    ) -> AsyncCollectiveHandle:
        return self.launch_collective(_collectives.all_gather(send, recv, tag, algorithm, step), "all_gather_async")

    def reduce_scatter_async(
        self,
        send: Any,
        recv: Any = None,
        *,
        op: ReduceOp,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
    ) -> AsyncCollectiveHandle:
        call = _collectives.reduce_scatter(send, recv, op, tag, algorithm, step)
        return self.launch_collective(call, "reduce_scatter_async")

    def broadcast_async(
        self, array: Any, *, root: int, tag: int = 0, algorithm: ReduceAlgorithm | None = None, step: int | None = None
    ) -> AsyncCollectiveHandle:
        return self.launch_collective(_collectives.broadcast(array, root, tag, algorithm, step), "broadcast_async")

    def send_async(self, array: Any, *, to: int, tag: int = 0, step: int | None = None) -> AsyncCollectiveHandle:
        return self.launch_collective(_collectives.send(array, to, tag, step), "send_async")

    def recv_async(self, array: Any, *, from_: int, tag: int = 0, step: int | None = None) -> AsyncCollectiveHandle:
        return self.launch_collective(_collectives.recv(array, from_, tag, step), "recv_async")

    def barrier_async(self, *, tag: int = 0, step: int | None = None) -> AsyncCollectiveHandle:
        return self.launch_collective(_collectives.barrier(tag, step), "barrier_async")


class Collectives(LaunchedCollectives, Generic[CollectiveInfoT]):
    """All of them keep what `all_reduce` promises: they succeed on all peers that stay, or on none; on failure what was
    given is as it was, and an array that was given for the result alone is undefined; ops of several peers meet by
    `tag`, all with the same `step` or with none, and their errors and timeouts are the same, with TOO_FEW_PEERS for who
    is alone in the group. Peers whose calls with one tag differ all get INVALID_USAGE (what was called) or
    INVALID_ARGUMENT (with what), and the text shows both.

    Arrays are contiguous NumPy arrays or torch tensors; where nothing is reduced, of any dtype whose elements are
    plain memory, so also of bool, complex or structured ones, or bytes, a bytearray or a memoryview of bytes. Tensors
    on CUDA devices go through host memory, as in `all_reduce` but whole, and results that are not given an array come
    to one on the device of `send`; peers with CPU tensors can take part.
    """

    @abstractmethod
    def _collective(self, call: CallOf, timeout: Timeout, func_name: str) -> CollectiveInfoT:
        """Of the communicator."""

    def all_gather(
        self,
        send: Any,
        recv: Any = None,
        *,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfoT:
        """Gives every peer the `send` of all: row r of the result is that of rank r.

        `send` has the same dtype and shape on all peers. The result is in `recv`, or, if that is left out, in a new
        array of shape (world_size, *send.shape): the `array` of what is returned, whose `membership` tells who the
        ranks were. A `recv` may have any shape; one that has not world_size times as many elements as `send` in the
        world in which the op starts fails it on all peers with INVALID_ARGUMENT. `send` may be the part of `recv` where
        it belongs, and costs no copy then.
        """
        return self._collective(_collectives.all_gather(send, recv, tag, algorithm, step), timeout, "all_gather")

    def reduce_scatter(
        self,
        send: Any,
        recv: Any = None,
        *,
        op: ReduceOp,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfoT:
        """Reduces `send` over the peer group and leaves every peer with its rank's part of the result: the same bits
        that an all_reduce of the same `algorithm` would have there.

        `send` has the same dtype, one that all_reduce takes, and shape on all peers. The parts are those of
        `numpy.array_split` of the flat array, so that any size will do in any world: the first ones are one element
        longer where it cannot be divided evenly. The part is in `recv`, of any shape with so many elements, or, if that
        is left out, in a new flat array: the `array` of what is returned. `recv` must not overlap `send`.
        """
        call = _collectives.reduce_scatter(send, recv, op, tag, algorithm, step)
        return self._collective(call, timeout, "reduce_scatter")

    def broadcast(
        self,
        array: Any,
        *,
        root: int,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfoT:
        """Gives every peer the contents of rank `root`'s array, in place, into one of the same dtype and shape.

        `root` is a rank in the group as the caller sees it (`membership`, which also tells how to name a peer for
        longer: `membership.peers.index(number)`). Peers that see different groups may mean different ones, which then
        fails for all of them. RANK_CONNECTION_LOST also where the root has left by the time the op starts;
        INVALID_ARGUMENT on all peers if there is no such rank. On failure the array is as it was, also where it had
        been overwritten in part.
        """
        return self._collective(_collectives.broadcast(array, root, tag, algorithm, step), timeout, "broadcast")

    def send(
        self, array: Any, *, to: int, tag: int = 0, step: int | None = None, timeout: Timeout = DEFAULT
    ) -> CollectiveInfoT:
        """Sends `array` to rank `to`, and returns once that has received it.

        The two peers alone take part; the others of the group make no such call. So it can wait for ever where two
        peers send to each other before they receive: use `send_async` for one. The pair and the direction have tags of
        their own, in [0, 2**35), in whose order sends meet recvs. Ranks are those of the group as the caller sees it
        (`membership`). In a group that is no mesh only neighbours of the ring can do this (INVALID_USAGE).

        RANK_CONNECTION_LOST: the other peer, or another one meanwhile, was lost before it was done; if the other one
        was lost just as it was done, the send succeeds. INVALID_ARGUMENT on both where their arrays differ in dtype
        or shape.
        """
        return self._collective(_collectives.send(array, to, tag, step), timeout, "send")

    def recv(
        self, array: Any, *, from_: int, tag: int = 0, step: int | None = None, timeout: Timeout = DEFAULT
    ) -> CollectiveInfoT:
        """Receives into `array` what rank `from_` sends; see `send`. On failure the array is undefined."""
        return self._collective(_collectives.recv(array, from_, tag, step), timeout, "recv")

    def barrier(self, *, tag: int = 0, step: int | None = None, timeout: Timeout = DEFAULT) -> CollectiveInfoT:
        """Returns once all peers of the group have called it."""
        return self._collective(_collectives.barrier(tag, step), timeout, "barrier")
