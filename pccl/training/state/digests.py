"""Digest comparison: peers compare their states while they train, and find the tensors that differ.

A *snapshot* holds the BLAKE3 digest of each tensor and the canonical bytes of each object that determine the next step.
At the beginning of the next step, each peer launches one all-reduce, the maximum of nine words: the four words of the
snapshot's digest, their complements, and this peer's proposal for the number of steps until the next comparison. The
op lands with that step's averages.

1. Digests are equal if and only if the maximum of all digests is the complement of the maximum of their complements.
2. All peers compare after the same steps, because the next comparison follows from the last one and the maximum of the
   proposals. A proposal keeps the cost below 0.1 % of the time.
3. If digests differ, all peers gather all digests. If the differing peers are lost by then, the others continue.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import blake3
import numpy as np

from pccl import Communicator, PCCLError, ReduceOp, Result
from pccl._integers import as_int
from pccl.training.group.relaunch import Relaunched, average, gather_among_all, own_number, reduce_among_all
from pccl.training.state import codec

COST_SHARE = 5e-4
"""The share of training time for comparisons: half of the documented limit, because measured times vary."""
SMOOTHING = 0.25
INTERVAL_UNMEASURED = 16
INTERVAL_MAX = 2**40
NAMES_SHOWN = 8
THREADED_BYTES = 1 << 20
DIGEST_BYTES = 32

logger = logging.getLogger(__name__)


class DivergenceError(RuntimeError):
    """The state differs between peers. Raised on all peers of the group at the same step."""

    def __init__(self, text: str, revision: int, peers: tuple[int, ...], names: tuple[str, ...]) -> None:
        super().__init__(text)
        self.revision = revision
        """The number of steps after which the states differ."""
        self.peers = peers
        """The numbers of the peers whose state is not the most common one (in a tie, the first peer's)."""
        self.names = names
        """The tensors and objects that differ."""


class Snapshot:
    """The digests of a state between two steps."""

    def __init__(
        self,
        revision: int,
        tensors: Iterable[tuple[str, Any]],
        objects: Mapping[str, bytes],
        digests: Mapping[str, bytes] | None = None,
    ) -> None:
        """`digests` are the digests of further tensors."""
        self.revision = revision
        self.objects = objects
        self.digests = {name: digest_of(tensor) for name, tensor in tensors}
        self.digests |= digests or {}
        self.digests |= {name: blake3.blake3(data).digest() for name, data in objects.items()}

    def digest(self) -> bytes:
        """Return one digest over the revision, all names and all digests."""
        hasher = blake3.blake3(self.revision.to_bytes(8, "little"))
        for name, digest in self.digests.items():
            hasher.update(f"{len(name)} {name}".encode())
            hasher.update(digest)
        return hasher.digest()


def digest_of(tensor: Any) -> bytes:
    """Return the BLAKE3 digest of a NumPy array or torch tensor, over dtype, shape and elements in C order."""
    if not isinstance(tensor, np.ndarray):
        data = codec.bytes_of(tensor, "tensor")
    else:
        data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO if data.size >= THREADED_BYTES else 1)
    hasher.update(f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} ".encode())
    hasher.update(data)
    return hasher.digest()


class Check:
    """One peer's side of the comparison. All methods except `expects`, `note` and `part` are group calls."""

    def __init__(self, communicator: Communicator, tag: int, every: int | None, *, parting_tag: int) -> None:
        """`every`: compare after this many steps, the same on all peers; None compares as often as is cheap."""
        every = None if every is None else as_int("check_every", every, 1)
        self.communicator = communicator
        self._tag = tag
        self._parting_tag = parting_tag
        self._account_tag = tag
        self.every = every
        self._next = 0
        self._gap = 1
        self._snapshot: Snapshot | None = None
        self._op: Relaunched | None = None
        self._is_compared = False
        self._words = np.empty(9, np.uint64)
        self._hash_s = self._launch_s = 0.0
        """Seconds spent on the newest snapshot, and (`_launch_s`) on launching its comparison."""
        self._exchange_s = 0.0
        """The smoothed seconds spent on a comparison in addition to its snapshot."""
        self._since: tuple[float, int] | None = None
        self.failure: DivergenceError | None = None

    def restart(self, communicator: Communicator) -> None:
        """Discard ops in flight on the closed communicator and use a new one."""
        self.communicator = communicator
        self._snapshot = self._op = self.failure = self._since = None
        self._is_compared = False

    def expects(self, revision: int) -> bool:
        """Return whether to take a snapshot of this revision."""
        return revision >= self._next and self.communicator.world_size > 1

    def note(self, make: Callable[[], Snapshot]) -> None:
        """Take the snapshot at the end of a step for which `expects` returned True."""
        started_s = time.monotonic()
        self._snapshot = make()
        self._hash_s = time.monotonic() - started_s

    def launch(self) -> None:
        """Launch the newest snapshot's comparison when a step begins. Raises an earlier DivergenceError again."""
        if self.failure is not None:
            raise self.failure
        if self._snapshot is None or self._op is not None:
            return
        started_s = time.monotonic()
        snapshot = self._snapshot
        self._account_tag = self._tag
        self._fill(snapshot)
        self._op = average(self.communicator, self._words, self._tag, snapshot.revision, op=ReduceOp.MAX)
        self._launch_s = time.monotonic() - started_s

    def _fill(self, snapshot: Snapshot) -> None:
        digest = np.frombuffer(snapshot.digest(), np.uint64)
        self._words[:4], self._words[4:8], self._words[8] = digest, ~digest, self._proposal(snapshot.revision)

    def land(self, *, is_new: bool = False) -> None:
        """Wait for the comparison in flight, before the step changes state. Raises DivergenceError on all peers."""
        if self._op is None:
            return
        assert self._snapshot is not None
        started_s = time.monotonic()
        self._op.wait()
        exchange_s = self._launch_s + time.monotonic() - started_s
        self._exchange_s += (exchange_s - self._exchange_s) * (SMOOTHING if self._exchange_s else 1)
        self._judge(is_new)

    def _judge(self, is_new: bool = False) -> None:
        """Schedule the next comparison, and report a difference."""
        assert self._snapshot is not None
        snapshot, self._snapshot, self._op = self._snapshot, None, None
        self._is_compared = True
        interval = int(self._words[8])
        self._gap = interval if self.every is not None else min(2 * self._gap, interval)
        self._next = snapshot.revision + self._gap
        if not np.array_equal(self._words[:4], ~self._words[4:8]):
            self._account(snapshot, is_new)

    def check(self, make: Callable[[], Snapshot], *, is_new: bool = False) -> None:
        """Compare now, at an admission or the end. A new peer (`is_new`) that differs leaves. Raises like `land`."""
        self.note(make)
        self.launch()
        former_s = self._exchange_s
        self.land(is_new=is_new)
        self._exchange_s = former_s  # waiting for late peers is not part of the cost
        self._gap = 1

    def move_on(self) -> None:
        """Record that the state has changed since the comparison."""
        self._is_compared = False

    @property
    def has_snapshot(self) -> bool:
        """Whether a snapshot has not been compared yet."""
        return self._snapshot is not None

    def part(self, make: Callable[[], Snapshot], limit_s: float) -> None:
        """Compare a new state with peers that also end here, or that begin the next step with a snapshot.

        Raises DivergenceError on all of them, and PCCLError TIMEOUT if a peer does neither within `limit_s`.
        """
        if self.failure is not None or self._op is not None or self.communicator.world_size < 2:
            return
        self._account_tag = self._tag
        if self._snapshot is None:
            if self._is_compared:
                return
            self._snapshot = make()
            self._account_tag = self._parting_tag
        self._fill(self._snapshot)
        end_s = time.monotonic() + limit_s
        while True:
            try:
                self.communicator.all_reduce(
                    self._words,
                    op=ReduceOp.MAX,
                    tag=self._account_tag,
                    step=self._snapshot.revision,
                    timeout=max(end_s - time.monotonic(), 0.1),
                )
            except PCCLError as error:
                if error.result is Result.TOO_FEW_PEERS:
                    return  # the others have left
                if error.result is not Result.RANK_CONNECTION_LOST:
                    raise
            else:
                break
        self._judge()

    def come_soon(self, revision: int) -> None:
        """Schedule the next comparison after an admission."""
        self._snapshot = None
        self._gap = self.every or 1
        self._next = revision + self._gap

    def _proposal(self, revision: int) -> int:
        if self.every is not None:
            return self.every
        now_s = time.monotonic()
        since, self._since = self._since, (now_s, revision)
        if since is None or since[1] >= revision:
            return INTERVAL_UNMEASURED
        step_s = max((now_s - since[0]) / (revision - since[1]), 1e-9)
        return min(max(1, math.ceil((self._hash_s + self._exchange_s) / (COST_SHARE * step_s))), INTERVAL_MAX)

    def _account(self, snapshot: Snapshot, is_new: bool) -> None:
        """Gather all digests, and raise DivergenceError naming the peers and tensors that differ."""
        names = [*snapshot.digests]
        digests = [blake3.blake3(repr(names).encode()).digest(), *snapshot.digests.values()]
        content = np.frombuffer(bytes([is_new]) + b"".join(digests), np.uint8)
        padded = np.zeros(self._largest(content.size, snapshot.revision), np.uint8)
        padded[: content.size] = content
        gathered, _ = gather_among_all(self.communicator, padded, self._account_tag, snapshot.revision)
        states = {peer: row[1:].tobytes() for peer, row in gathered.items()}
        if len(set(states.values())) < 2:
            return  # the differing peers have been lost
        newcomers = {peer for peer, row in gathered.items() if row[0]}
        seniors = [peer for peer in states if peer not in newcomers] or [*states]
        right = Counter(states[peer] for peer in seniors).most_common(1)[0][0]
        wrong = [peer for peer, state in states.items() if state != right]
        found = _differing(names, right, [states[peer] for peer in wrong])
        others = [peer for peer in states if peer not in wrong]
        text = _text(snapshot.revision, own_number(self.communicator), others, wrong, found)
        error = DivergenceError(text, snapshot.revision, tuple(wrong), tuple(found))
        if newcomers >= {*wrong} and len(seniors) < len(states) and not is_new:
            logger.warning("newcomers whose state could not be synchronized leave: %s", error)
            return
        self.failure = error
        raise error

    def _largest(self, size: int, step: int) -> int:
        sizes = np.array([size])
        reduce_among_all(self.communicator, sizes, ReduceOp.MAX, self._account_tag, step)
        return int(sizes[0])


def _differing(names: list[str], right: bytes, wrong: list[bytes]) -> list[str]:
    """Return the names of the differing digests. Each state begins with the digest of its names."""
    places = [slice(first, first + DIGEST_BYTES) for first in range(0, (len(names) + 1) * DIGEST_BYTES, DIGEST_BYTES)]
    if any(state[places[0]] != right[places[0]] for state in wrong):
        return ["the set of tensors and objects"]
    return [
        name
        for name, place in zip(names, places[1:], strict=True)
        if any(state[place] != right[place] for state in wrong)
    ]


def _text(
    revision: int,
    own: int,
    others: list[int],
    wrong: list[int],
    names: list[str],
) -> str:
    def listed(peers: list[int]) -> str:
        noun = "peer" if len(peers) == 1 else "peers"
        return f"{noun} " + ", ".join(f"{peer} (this one)" if peer == own else str(peer) for peer in peers)

    shown = names[:NAMES_SHOWN]
    if len(names) > NAMES_SHOWN:
        shown.append(f"{len(names) - NAMES_SHOWN} more")
    verb = "differs" if len(wrong) == 1 else "differ"
    return (
        f"after {revision} steps the peers' states are not equal: {listed(wrong)} {verb} from {listed(others)} in "
        f"{'; '.join(shown)}. Something changes this on one peer only, such as an optimizer step or learning rate set "
        "outside the training object, or a scheduler that is not in shared= or is stepped a different number of times. "
        "Correct that, stop the peers that are wrong, and let the others continue from their state with a new "
        "communicator: restarted peers then receive that state"
    )
