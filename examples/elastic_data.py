"""DiLoCo with an ElasticSampler, which uses each sample of an epoch once despite churn, and an audit that proves it.

    pccl launch -n 2 examples/elastic_data.py
    python -m pccl.tools.audit elastic-data/*.jsonl

Every process prints its pid and the command that adds another peer. Kill some with `kill -9 PID`, and add others: the
audit shows that each epoch used each sample once, including those that a killed peer had drawn.
`examples/elastic_data.py 50` trains for 50 epochs; a second argument is the log folder; use a new one for each run.
"""

import os
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np

from pccl import Communicator
from pccl.training import DiLoCo, ElasticSampler

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
LOGS = Path(sys.argv[2] if len(sys.argv) > 2 else "elastic-data")
SAMPLES, FEATURES, BATCH, INNER_STEPS = 4_000, 64, 20, 10

master = os.environ["PCCL_MASTER"]
print(f"pid {os.getpid()}; PCCL_MASTER={master} python {sys.argv[0]} {EPOCHS} {LOGS} adds a peer")
LOGS.mkdir(exist_ok=True)

# The same data on all peers; the sampler assigns samples to peers.
random = np.random.default_rng(0)
truth = random.standard_normal(FEATURES)
inputs = random.standard_normal((SAMPLES, FEATURES))
targets = inputs @ truth

weights = np.zeros(FEATURES)
sampler = ElasticSampler(SAMPLES, seed=0, batch_size=BATCH, log=LOGS / f"{time.time_ns()}-{os.getpid()}.jsonl")
with Communicator(master) as communicator:
    diloco = DiLoCo(communicator, {"weights": weights}, shared={"sampler": sampler})
    diloco.join(peers_min=2)
    while sampler.epoch < EPOCHS:  # the same on all peers after each outer step
        for batch in islice(sampler.batches(), INNER_STEPS):  # each peer may use any number
            weights -= 0.01 * inputs[batch].T @ (inputs[batch] @ weights - targets[batch]) / BATCH
            time.sleep(0.001)  # simulates the computation of a larger model
        step = diloco.outer_step(weight=sampler.drawn)  # weights each peer by the samples that it used
        if step.revision % 25 == 0:
            loss = np.mean((inputs @ weights - targets) ** 2)
            print(f"step {step.revision}: {step.world_size} peers, epoch {sampler.epoch}, loss {loss:.2e}")

print(f"digest {diloco.digest()} after {diloco.revision} outer steps")
