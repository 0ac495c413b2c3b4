"""The methods of both communicators for the collectives besides all_reduce; `pccl._collectives` turns calls into ops.

The methods of `Collectives` wait, so each communicator does it in its own way (see `pccl._communicator_methods`):
`CollectiveInfoT` is a `CollectiveInfo` in `Communicator` and a coroutine of it in `AsyncCommunicator`. Those of
`LaunchedCollectives` do not wait, and are plain functions in both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from pccl import _collectives
from pccl._arrays import Array, Movable
from pccl._collectives import AsyncCollectiveHandle, CallOf
from pccl._timeouts import DEFAULT, Timeout
from pccl.types import ReduceAlgorithm, ReduceOp

CollectiveInfoT = TypeVar("CollectiveInfoT")


class LaunchedCollectives(ABC):
    """Methods that launch a collective and return at once, as `all_reduce_async` does.

    Leave the arrays alone until the handle's `wait` returns. Arguments and errors are those of the method without
    `_async`. A peer that is alone in the group gets TOO_FEW_PEERS from the call, and not from the handle.
    """

    @abstractmethod
    def _launch_collective(self, call: CallOf, func_name: str) -> AsyncCollectiveHandle:
        """Launch a call for the method `func_name`."""

    def all_gather_async(
        self,
        send: Movable,
        recv: Movable | None = None,
        *,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
    ) -> AsyncCollectiveHandle:
        """Launch `all_gather` and return at once."""
        return self._launch_collective(_collectives.all_gather(send, recv, tag, algorithm, step), "all_gather_async")

    def reduce_scatter_async(
        self,
        send: Array,
        recv: Array | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
    ) -> AsyncCollectiveHandle:
        """Launch `reduce_scatter` and return at once."""
        call = _collectives.reduce_scatter(send, recv, op, tag, algorithm, step)
        return self._launch_collective(call, "reduce_scatter_async")

    def broadcast_async(
        self,
        array: Movable,
        *,
        root: int,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
    ) -> AsyncCollectiveHandle:
        """Launch `broadcast` and return at once."""
        return self._launch_collective(_collectives.broadcast(array, root, tag, algorithm, step), "broadcast_async")

    def send_async(self, array: Movable, *, to: int, tag: int = 0, step: int | None = None) -> AsyncCollectiveHandle:
        """Launch `send` and return at once."""
        return self._launch_collective(_collectives.send(array, to, tag, step), "send_async")

    def recv_async(self, array: Movable, *, from_: int, tag: int = 0, step: int | None = None) -> AsyncCollectiveHandle:
        """Launch `recv` and return at once."""
        return self._launch_collective(_collectives.recv(array, from_, tag, step), "recv_async")

    def barrier_async(self, *, tag: int = 0, step: int | None = None) -> AsyncCollectiveHandle:
        """Launch `barrier` and return at once."""
        return self._launch_collective(_collectives.barrier(tag, step), "barrier_async")


class Collectives(LaunchedCollectives, Generic[CollectiveInfoT]):
    """The collectives besides all_reduce. All of them keep what `all_reduce` promises:

    - A collective succeeds on all peers that stay, or on none. On failure the arrays that were given are as they were,
      but for one that is given for the result alone: that is undefined.
    - Ops of several peers meet by `tag`, all with the same `step` or with none.
    - Errors and timeouts are the same, with TOO_FEW_PEERS for a peer that is alone in the group. Peers whose calls with
      one tag differ all get INVALID_USAGE (if they called different collectives) or INVALID_ARGUMENT (if they gave
      different arguments), and the text shows both.

    Arrays are contiguous NumPy arrays, torch tensors or `jax.Array`s; a result for one of the latter comes in a new
    one, `array` of what is returned. Where nothing is reduced they may be of any dtype whose elements are plain memory,
    also bool, complex and structured ones, or they may be bytes, a bytearray or a memoryview of bytes. Tensors on CUDA
    devices go through host memory, as in `all_reduce` but whole; peers with CPU tensors can take part. A result that is
    not given an array comes in a new one of the same library, dtype and device as `send`.

    `op`, `tag`, `algorithm`, `step` and `timeout` are those of `all_reduce`, unless a method says otherwise.
    """

    @abstractmethod
    def _collective(self, call: CallOf, timeout: Timeout, func_name: str) -> CollectiveInfoT:
        """Run a call for the method `func_name`."""

    def all_gather(
        self,
        send: Movable,
        recv: Movable | None = None,
        *,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfoT:
        """Give every peer the `send` of all: row r of the result is that of rank r.

        Args:
            send: An array of the same dtype and shape on all peers. It may be the part of `recv` where it belongs, and
                costs no copy then.
            recv: Where the result goes, in any shape. The op fails on all peers with INVALID_ARGUMENT if it does not
                have world_size times as many elements as `send` in the world in which the op starts. If it is left
                out, the result is in a new array of shape (world_size, *send.shape).

        Returns:
            A `CollectiveInfo`: `array` is the result, and `membership` tells which peer had which rank.
        """
        return self._collective(_collectives.all_gather(send, recv, tag, algorithm, step), timeout, "all_gather")

    def reduce_scatter(
        self,
        send: Array,
        recv: Array | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfoT:
        """Reduce `send` over the peer group, and give every peer its rank's part of the result.

        The part has the same bits as in the result of an all_reduce with the same `algorithm`. The parts are those of
        `numpy.array_split` of the flat array, so that any size will do in any world: the first ones are one element
        longer if it cannot be divided evenly.

        Args:
            send: An array of the same dtype and shape on all peers; a dtype that `all_reduce` takes.
            recv: Where this rank's part goes, in any shape with so many elements. It must not overlap `send`. If it is
                left out, the part is in a new flat array.

        Returns:
            A `CollectiveInfo`: `array` is this rank's part, and `membership` tells which peer had which rank.
        """
        call = _collectives.reduce_scatter(send, recv, op, tag, algorithm, step)
        return self._collective(call, timeout, "reduce_scatter")

    def broadcast(
        self,
        array: Movable,
        *,
        root: int,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfoT:
        """Give every peer the contents of rank `root`'s array, in place.

        On failure the array is as it was, even if it had been overwritten in part.

        Args:
            array: An array of the same dtype and shape on all peers.
            root: A rank in the group as the caller sees it (`membership`). Ranks change when peers come and go; the
                number of a peer does not, and its rank is `membership.peers.index(number)`. Peers that see
                different groups may mean different peers by one rank: then the op fails for all of them.

        Raises:
            PCCLError: as `all_reduce`; RANK_CONNECTION_LOST also if the root has left by the time the op starts;
                INVALID_ARGUMENT on all peers if there is no such rank.
        """
        return self._collective(_collectives.broadcast(array, root, tag, algorithm, step), timeout, "broadcast")

    def send(
        self, array: Movable, *, to: int, tag: int = 0, step: int | None = None, timeout: Timeout = DEFAULT
    ) -> CollectiveInfoT:
        """Send `array` to rank `to`, and return once that peer has received it.

        Only the two peers take part; the others of the group make no such call. So it waits for ever if two peers send
        to each other before they receive: use `send_async` for one.

        Args:
            array: Its dtype and shape are those of the receiver's array.
            to: A rank in the group as the caller sees it (`membership`).
            tag: A number in [0, 2**35). Each pair of peers has tags of its own in each direction, and sends of one tag
                meet recvs in order.

        Raises:
            PCCLError: as `all_reduce`; RANK_CONNECTION_LOST if the receiver, or another peer meanwhile, was lost before
                it was done (if the receiver was lost just as it was done, the send succeeds); INVALID_ARGUMENT on both
                peers if their arrays differ in dtype or shape; INVALID_USAGE if the two peers have no link: in a group
                that is no mesh only neighbours of the ring have one.
        """
        return self._collective(_collectives.send(array, to, tag, step), timeout, "send")

    def recv(
        self, array: Movable, *, from_: int, tag: int = 0, step: int | None = None, timeout: Timeout = DEFAULT
    ) -> CollectiveInfoT:
        """Receive into `array` what rank `from_` sends. See `send`. On failure the array is undefined."""
        return self._collective(_collectives.recv(array, from_, tag, step), timeout, "recv")

    def barrier(self, *, tag: int = 0, step: int | None = None, timeout: Timeout = DEFAULT) -> CollectiveInfoT:
        """Return once all peers of the group have called it."""
        return self._collective(_collectives.barrier(tag, step), timeout, "barrier")
