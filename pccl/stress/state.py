"""The shared state of a peer in a stress run: what is synced before each step and advanced after it.

*Lineage.* Revisions start again at 0 when all who held a state are gone, so a state also carries whose initial state it
grew from, and reports name it by (lineage, revision). Whoever comes back from an eviction, or holds a state that a
failed sync left half overwritten, starts a lineage of its own: what it has may differ from what others made of the same
revision.
"""

from __future__ import annotations

import blake3
import numpy as np

from pccl import SharedState, TensorInfo
from pccl.stress.messages import Outcome
from pccl.stress.values import TAGS

LINEAGES_PER_PEER = 1 << 20


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
