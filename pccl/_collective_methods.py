"""The methods of both communicators for the collectives besides all_reduce; `pccl._collectives` turns calls into ops.

The methods of `Collectives` wait, so each communicator does it in its own way (see `pccl._communicator_methods`):
`CollectiveInfoT` is a `CollectiveInfo` in `Communicator` and a coroutine of it in `AsyncCommunicator`. Those of
`LaunchedCollectives` do not wait, and are plain functions in both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from pccl import _collectives, _exchanges
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

    def reduce_async(
        self,
        send: Array,
        recv: Array | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        root: int,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
    ) -> AsyncCollectiveHandle:
        """Launch `reduce` and return at once."""
        call = _collectives.reduce(send, recv, op, root, tag, algorithm, step)
        return self._launch_collective(call, "reduce_async")

    def all_to_all_async(
        self,
        send: Movable,
        recv: Movable | None = None,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        tag: int = 0,
        step: int | None = None,
    ) -> AsyncCollectiveHandle:
        """Launch `all_to_all` and return at once."""
        call = _exchanges.all_to_all(send, recv, send_counts, recv_counts, tag, step)
        return self._launch_collective(call, "all_to_all_async")

    def gather_async(
        self, send: Movable, recv: Movable | None = None, *, root: int, tag: int = 0, step: int | None = None
    ) -> AsyncCollectiveHandle:
        """Launch `gather` and return at once."""
        return self._launch_collective(_exchanges.gather(send, recv, root, tag, step), "gather_async")

    def scatter_async(
        self, send: Movable | None, recv: Movable, *, root: int, tag: int = 0, step: int | None = None
    ) -> AsyncCollectiveHandle:
        """Launch `scatter` and return at once."""
        return self._launch_collective(_exchanges.scatter(send, recv, root, tag, step), "scatter_async")

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

    def reduce(
        self,
        send: Array,
        recv: Array | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        root: int,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfoT:
        """Reduce `send` over the peer group, and give the result to rank `root` alone.

        The result has the same bits as that of an all_reduce with the same `algorithm`.

        Args:
            send: An array of the same dtype and shape on all peers; a dtype that `all_reduce` takes. Other peers'
                than the root's stay as they are.
            recv: Where the root's result goes: `send` itself, or an array of as many elements. Other peers' are not
                used. If the root leaves it out, the result is in a new array of the shape of `send`.
            root: A rank in the group as the caller sees it, as in `broadcast`.

        Returns:
            A `CollectiveInfo`: `array` is the result at the root, and None on other peers.

        Raises:
            PCCLError: as `broadcast`.
        """
        call = _collectives.reduce(send, recv, op, root, tag, algorithm, step)
        return self._collective(call, timeout, "reduce")

    def all_to_all(
        self,
        send: Movable,
        recv: Movable | None = None,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        tag: int = 0,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfoT:
        """Give every peer a part of `send`, and get one from each: part r of the result is what rank r had for this
        rank.

        Parts are rows, entries of the first dimension, in the order of ranks. Without counts they are all of one size.

        Args:
            send: An array of at least one dimension; its dtype and its other dimensions are the same on all peers.
                Without counts the first one has to be divisible by world_size in the world in which the op starts.
            recv: Where the result goes, in any shape with as many elements. It must not overlap `send`. If it is left
                out, the result is in a new array of as many rows as come.
            send_counts: The rows for each rank, world_size numbers that add up to the rows of `send`.
            recv_counts: The rows from each rank. Every one has to be what that rank gives to this one.

        Returns:
            A `CollectiveInfo`: `array` is the result, and `membership` tells which peer had which rank.

        Raises:
            PCCLError: as `all_reduce`; INVALID_ARGUMENT on all peers if `recv` or the counts do not fit the world in
                which the op starts, or if a peer takes another number of rows from one than that one gives it.
        """
        call = _exchanges.all_to_all(send, recv, send_counts, recv_counts, tag, step)
        return self._collective(call, timeout, "all_to_all")

    def gather(
        self,
        send: Movable,
        recv: Movable | None = None,
        *,
        root: int,
        tag: int = 0,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfoT:
        """Give rank `root` the `send` of all peers: row r of its result is that of rank r.

        Args:
            send: An array of the same dtype and shape on all peers. The root's may be the part of `recv` where it
                belongs, and costs no copy then.
            recv: Where the root's result goes, in any shape, as in `all_gather`; other peers' are not used. If the root
                leaves it out, the result is in a new array of shape (world_size, *send.shape).
            root: A rank in the group as the caller sees it, as in `broadcast`.

        Returns:
            A `CollectiveInfo`: `array` is the result at the root, and None on other peers.

        Raises:
            PCCLError: as `broadcast`.
        """
        return self._collective(_exchanges.gather(send, recv, root, tag, step), timeout, "gather")

    def scatter(
        self,
        send: Movable | None,
        recv: Movable,
        *,
        root: int,
        tag: int = 0,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfoT:
        """Give every peer its rank's part of rank `root`'s `send`.

        Args:
            send: The root's array, in any shape with world_size times as many elements as `recv` in the world in which
                the op starts (otherwise it fails on all peers with INVALID_ARGUMENT). Other peers' are not used and
                may be None.
            recv: Where this rank's part goes, of the same dtype and shape on all peers. The root's may be its part of
                `send`, and costs no copy then.
            root: A rank in the group as the caller sees it, as in `broadcast`.

        Returns:
            A `CollectiveInfo`: `array` is `recv`.

        Raises:
            PCCLError: as `broadcast`.
        """
        return self._collective(_exchanges.scatter(send, recv, root, tag, step), timeout, "scatter")

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
