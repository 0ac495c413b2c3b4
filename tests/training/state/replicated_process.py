"""A peer of `tests.training.state.replicated_peers` as a process.

    python -m tests.training.state.replicated_process KIND MASTER NUMBER STOP [END_S]

Prints a line `revision epoch world digest` after each step, where the scheduler counts epochs. All end together once
the file STOP is there. With END_S it kills itself that many seconds after it has been let in, as it joins.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import torch

from tests.training.process import is_agreed
from tests.training.state.replicated_peers import ReplicatedPeer


def say(peer: ReplicatedPeer, world_size: int) -> None:
    state, digest = max(peer.digests.items())
    sys.stdout.write(f"{state[0]} {state[1]} {world_size} {digest}\n")
    sys.stdout.flush()


def main() -> None:
    kind, master, number, stop_file, *end_s = sys.argv[1:]
    torch.set_num_threads(1)
    peer = ReplicatedPeer(torch, master, int(number), kind)
    if end_s:
        peer.communicator.connect()
        threading.Timer(float(end_s[0]), lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        peer.training.join(3)
    else:
        peer.enter(3)
    while True:
        step = peer.step()
        say(peer, step.world_size)
        # A newcomer goes on with a step, and so must the others.
        if not step.admitted and is_agreed(peer.communicator, Path(stop_file).exists()):
            break
    peer.close()


if __name__ == "__main__":
    main()
