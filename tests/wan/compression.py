"""`python -m tests.wan ... -- python -m tests.wan.compression`: DiLoCo's outer steps, by what they send.

    sudo python -m tests.wan --hosts 4 --delay-ms 25 --rate-mbit 20 -- python -m tests.wan.compression --rate-mbit 20

Four hosts train a NumPy array of 50 MB, which moves by random numbers instead of inner steps. Host 0 prints the seconds
of each outer step and, before them, their median without the first; the MB that a peer sends in one, and their seconds.
"""

import argparse
import os
import statistics
import time
from typing import Any

import numpy as np

from pccl import Communicator
from pccl.training import DiLoCo
from pccl.training.compression import TopK

COMPRESSIONS: dict[str, Any] = {f"{bits}bit": f"{bits}bit" for bits in (8, 4, 2, 1)} | {"topk": TopK(), "float32": None}
parser = argparse.ArgumentParser(prog="compression")
parser.add_argument("--rate-mbit", type=float, required=True, help="the lab's")
parser.add_argument("--steps", type=int, default=4, help="outer steps (default: %(default)s)")
parser.add_argument("--only", nargs="+", choices=COMPRESSIONS, default=list(COMPRESSIONS))
options = parser.parse_args()
movement = np.random.default_rng().standard_normal(12_500_000, np.float32)
with Communicator(os.environ["PCCL_MASTER"]) as communicator:
    for name in options.only:
        model = {"weights": np.zeros_like(movement)}
        diloco = DiLoCo(communicator, model, compression=COMPRESSIONS[name])
        diloco.join(4)
        all_s, before = [], communicator.stats["tx_wire_bytes"]
        for _ in range(options.steps):
            model["weights"] += movement
            start_s = time.perf_counter()
            diloco.outer_step()
            all_s.append(round(time.perf_counter() - start_s, 3))
        sent_mb = (communicator.stats["tx_wire_bytes"] - before) / options.steps / 1e6
        diloco.close()
        step_s, wire_s = statistics.median(all_s[1:]), 8 * sent_mb / options.rate_mbit
        if os.environ["PCCL_HOST"] == "0":
            print(f"{name}: {step_s:.2f} s {all_s}, {sent_mb:.3f} MB, {wire_s:.2f} s", flush=True)
