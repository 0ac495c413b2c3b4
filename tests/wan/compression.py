"""`python -m tests.wan ... -- python -m tests.wan.compression`: DiLoCo's outer steps, by what they send.

    sudo python -m tests.wan --hosts 4 --delay-ms 25 --rate-mbit 20 --congestion-control cubic --
        python -m tests.wan.compression --rate-mbit 20

Every host trains a model of NumPy arrays with DiLoCo, without inner steps: before each outer step, its parameters move
by random numbers. Host 0 prints a line of JSON for each compression: the seconds of an outer step (the median without
the first), the megabytes that a peer sends in it with frame headers, and the seconds that the uplink needs for those.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import numpy as np

from pccl import Communicator
from pccl.training import DiLoCo
from pccl.training.compression import Compressor, TopK
from pccl.training.group.relaunch import CompressionWord

COMPRESSIONS: dict[str, CompressionWord | Compressor | None] = {
    "float32": None,
    "8bit": "8bit",
    "4bit": "4bit",
    "2bit": "2bit",
    "1bit": "1bit",
    "topk": TopK(1 / 16),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="compression", description=__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate-mbit", type=float, required=True, help="the lab's")
    parser.add_argument("--parameters", type=int, default=12_500_000, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="outer steps (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=COMPRESSIONS, default=list(COMPRESSIONS))
    options = parser.parse_args()
    with Communicator(os.environ["PCCL_MASTER"]) as communicator:
        for number, name in enumerate(options.only):
            model = {"weights": np.zeros(options.parameters, np.float32)}
            random = np.random.default_rng([number, int(os.environ["PCCL_HOST"])])
            movement = random.standard_normal(options.parameters, np.float32)
            diloco = DiLoCo(communicator, model, compression=COMPRESSIONS[name], tag=10 * number)
            diloco.join(options.hosts)
            seconds, sent = [], []
            for _ in range(options.steps):
                model["weights"] += movement
                before = communicator.stats["tx_wire_bytes"]
                start_s = time.perf_counter()
                diloco.outer_step()
                seconds.append(time.perf_counter() - start_s)
                sent.append(communicator.stats["tx_wire_bytes"] - before)
            diloco.close()
            wire_s = statistics.median(sent[1:]) * 8e-6 / options.rate_mbit
            step_s = statistics.median(seconds[1:])
            found = {
                "compression": name,
                "step_s": round(step_s, 3),
                "all_s": [round(each, 3) for each in seconds],
                "sent_mb": round(statistics.median(sent[1:]) / 1e6, 3),
                "wire_s": round(wire_s, 3),
                "ratio": round(step_s / wire_s, 2),
            }
            if os.environ["PCCL_HOST"] == "0":
                os.write(1, (json.dumps(found) + "\n").encode())


if __name__ == "__main__":
    main()
