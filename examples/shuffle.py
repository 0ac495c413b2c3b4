"""A random exchange of samples between all peers:

    pccl launch -n 4 examples/shuffle.py

Each peer assigns its samples to random peers. A first `all_to_all` exchanges the number of samples for each peer, and a
second one exchanges the samples, in parts of these lengths.
"""

import os

import numpy as np

from pccl import Communicator, ReduceOp

SAMPLES = 1000

with Communicator() as communicator:
    world_size = communicator.wait_for_peers(int(os.environ["PCCL_LAUNCH_COUNT"]))
    rank = communicator.membership.rank
    random = np.random.default_rng(rank)
    samples = np.full((SAMPLES, 3), rank, np.float32)

    owners = random.integers(0, world_size, SAMPLES)
    dealt = samples[np.argsort(owners, kind="stable")]
    send_counts = np.bincount(owners, minlength=world_size)
    recv_counts = communicator.all_to_all(send_counts).array.tolist()
    mine = communicator.all_to_all(dealt, send_counts=send_counts.tolist(), recv_counts=recv_counts).array

    print(f"rank {rank} has {len(mine)} samples: {recv_counts} of each rank")
    assert np.array_equal(mine[:, 0], np.repeat(np.arange(world_size), recv_counts))
    count = communicator.reduce(np.array(len(mine)), op=ReduceOp.SUM, root=0).array
    assert rank != 0 or count == world_size * SAMPLES
