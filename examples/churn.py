"""A training loop that survives the loss of peers: kill any process at any time, and start new ones while it runs.

    pccl launch -n 4 examples/churn.py

Every process prints its pid and the command that adds another peer. Kill some with `kill -9 PID`, and add others. At
the end, all remaining peers print the same digest of their weights. `examples/churn.py 1000` runs for 1000 steps.

The loop has three steps:
- admit_peers admits newcomers and then synchronizes the state, so newcomers start from the others' weights;
- a reduction that loses a peer fails on all survivors and leaves the gradient unchanged, so they repeat the step;
- the update depends on the reduced gradient only, so the weights stay bit-identical.
"""

import hashlib
import os
import sys
import time

import numpy as np

from pccl import Communicator, PCCLError, ReduceOp, SharedState

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 400
FEATURES = 4096
BATCH = 64
LEARNING_RATE = 0.3 / FEATURES

master = os.environ["PCCL_MASTER"]
print(f"pid {os.getpid()}; PCCL_MASTER={master} python {sys.argv[0]} {STEPS} adds a peer")

# All peers learn the same function, each from its own samples.
truth = np.random.default_rng(0).standard_normal(FEATURES).astype(np.float32)
samples = np.random.default_rng(os.getpid())
weights = np.zeros(FEATURES, np.float32)
state = SharedState.from_numpy({"weights": weights})


def gradient_of_own_batch() -> tuple[np.ndarray, float]:
    inputs = samples.standard_normal((BATCH, FEATURES)).astype(np.float32)
    errors = inputs @ (weights - truth)
    time.sleep(0.02)  # simulates the computation of a larger model
    return inputs.T @ errors / BATCH, float(np.mean(errors**2))


with Communicator(master) as communicator:
    while state.revision < STEPS:
        communicator.admit_peers(state)
        if communicator.world_size < 2:
            time.sleep(0.02)
            continue
        gradient, loss = gradient_of_own_batch()
        try:
            info = communicator.all_reduce(gradient, op=ReduceOp.AVG)
        except PCCLError as error:
            print(f"step {state.revision}: {error.result.name}, repeating it")
            continue
        weights -= LEARNING_RATE * gradient
        state.revision += 1
        if state.revision % 20 == 0:
            print(f"step {state.revision}: {info.world_size} peers, loss {loss:.4f}")

print(f"digest {hashlib.sha256(weights.tobytes()).hexdigest()[:16]} after {state.revision} steps")
