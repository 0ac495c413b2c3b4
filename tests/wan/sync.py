"""`python -m tests.wan ... -- sync`, on one host: the last host fetches shared state that all others hold.

Prints a line of JSON: this host's number, what it sent and received, the seconds of its sync_shared_state call, and a
digest of the tensors after it. The joiner's call begins once every donor waits in its own, so that it times the
transfer and not the wait for company, nor how donors that hash their states share this machine's cores with it.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import numpy as np
from blake3 import blake3

from pccl import Communicator, ReduceOp, SharedState
from pccl.status import run_status

TENSORS = 8
REVISION = 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="sync")
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--megabytes", type=int, default=200, help="of shared state (default: 200)")
    options = parser.parse_args()
    host = int(os.environ["PCCL_HOST"])
    is_joiner = host == options.hosts - 1
    count = options.megabytes * 1_000_000 // TENSORS
    random = np.random.default_rng(0)
    arrays = {
        f"tensor {i}": np.zeros(count, np.uint8) if is_joiner else random.integers(0, 256, count, np.uint8)
        for i in range(TENSORS)
    }
    state = SharedState.from_numpy(arrays)
    state.revision = 0 if is_joiner else REVISION
    with Communicator(os.environ["PCCL_MASTER"]) as peer:
        peer.wait_for_peers(options.hosts)
        peer.all_reduce(np.zeros(1, np.float32), op=ReduceOp.SUM)
        while is_joiner and _waiting() < options.hosts - 1:
            time.sleep(0.05)
        start_s = time.perf_counter()
        info = peer.sync_shared_state(state)
        seconds = time.perf_counter() - start_s
        digest = blake3()
        for array in arrays.values():
            digest.update(array)
        found = {
            "host": host,
            "tx_bytes": info.tx_bytes,
            "rx_bytes": info.rx_bytes,
            "seconds": round(seconds, 3),
            "mbit_per_s": round(info.rx_bytes * 8e-6 / seconds, 1),
            "digest": digest.hexdigest(),
        }
        os.write(1, (json.dumps(found) + "\n").encode())
        peer.all_reduce(np.zeros(1, np.float32), op=ReduceOp.SUM)


def _waiting() -> int:
    """Return the number of peers that wait in sync_shared_state."""
    members = run_status(os.environ["PCCL_MASTER"]).members
    return sum(member.waiting is not None and member.waiting.call == "sync_shared_state" for member in members)


if __name__ == "__main__":
    main()
