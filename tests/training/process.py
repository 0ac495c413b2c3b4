"""A training peer as a process of its own: `python -m tests.training.process KIND MASTER NUMBER STOP_FILE`.

Prints a line `revision world digest` after each outer step. All end together once the file is there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from pccl import Communicator, PCCLError, ReduceOp, Result
from pccl.training import AsyncDiLoCo, DiLoCo
from tests.training.data.sampler_peers import SamplerPeer
from tests.training.peers import Kind, Peer

SAMPLERS: dict[str, tuple[Kind, bool]] = {
    "sampler": (DiLoCo, False),
    "sampler fixed": (DiLoCo, True),
    "sampler async": (AsyncDiLoCo, False),
    "sampler async fixed": (AsyncDiLoCo, True),
}
SAMPLES = 401
"""Logs are in the folder of the file that ends the run."""
INNER_S = 0.03
"""The least time that inner steps take, so that there is a middle of them."""
STOP_TAG = 100


def say(peer: Peer, world_size: int) -> None:
    revision = max(peer.digests)
    # In one piece, also where output is unbuffered: a kill must not leave half a line.
    sys.stdout.write(f"{revision} {world_size} {peer.digests[revision]}\n")
    sys.stdout.flush()


def is_agreed(communicator: Communicator, wanted: bool) -> bool:
    """Whether any peer wants it: the same answer on all."""
    while communicator.world_size > 1:
        votes = np.array([wanted], np.uint8)
        try:
            communicator.all_reduce(votes, op=ReduceOp.MAX, tag=STOP_TAG)
            return bool(votes[0])
        except PCCLError as error:
            if error.result not in (Result.RANK_CONNECTION_LOST, Result.TOO_FEW_PEERS):
                raise
    return wanted


def main() -> None:
    kind, master, number, stop_file = sys.argv[1:]
    algorithm, is_fixed = SAMPLERS[kind]
    peer = SamplerPeer(master, int(number), algorithm, Path(stop_file).parent, is_fixed=is_fixed, size=SAMPLES)
    peer.enter(3)
    while True:
        time.sleep(INNER_S)
        step = peer.step()
        say(peer, step.world_size)
        # A newcomer goes on with inner steps, and so must the others.
        if not step.admitted and is_agreed(peer.communicator, Path(stop_file).exists()):
            break
    if isinstance(peer.diloco, AsyncDiLoCo):
        step = peer.diloco.finish()
        peer.digests[step.revision] = peer.diloco.digest()
        say(peer, step.world_size)
    peer.close()


if __name__ == "__main__":
    main()
