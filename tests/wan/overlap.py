"""`python -m tests.wan ... -- python -m tests.wan.overlap`: what outer steps take, next to the computing in them.

    sudo python -m tests.wan --hosts 4 --delay-ms 25 --rate-mbit 50 -- python -m tests.wan.overlap

Every host trains NumPy arrays with DiLoCo and then with its asynchronous form, whole and in fragments. The inner steps
are a wait and one pass over the parameters, since two cores cannot compute for four peers at once. Host 0 prints a line
of JSON: seconds of computing and of all fragments' turns (medians without the first two), ratios, and time of waiting.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from pccl import Communicator
from pccl.training import AsyncDiLoCo, DiLoCo

WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(prog="overlap", description=__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--parameters", type=int, default=4_000_000, help="(default: %(default)s)")
    parser.add_argument("--inner-s", type=float, default=4.4, help="the wait (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="outer steps (default: %(default)s)")
    parser.add_argument("--fragments", type=int, default=2, help="(default: %(default)s)")
    options = parser.parse_args()
    runs: list[tuple[str, Callable[..., DiLoCo | AsyncDiLoCo], int]] = [
        ("DiLoCo", DiLoCo, 1),
        ("AsyncDiLoCo", AsyncDiLoCo, 1),
        ("fragments", partial(AsyncDiLoCo, fragments=options.fragments), options.fragments),
    ]
    found: dict[str, float] = {}
    with Communicator(os.environ["PCCL_MASTER"]) as communicator:
        for number, (name, kind, fragments) in enumerate(runs):
            model = {"weights": np.zeros(options.parameters, np.float32)}
            diloco = kind(communicator, model, tag=10 * number)
            diloco.join(options.hosts)
            compute_s, step_s, waited_s = [], [], []
            for _ in range(options.steps):
                start_s = time.perf_counter()
                computed_s = stood_s = 0.0
                for _ in range(fragments):
                    begin_s = time.perf_counter()
                    time.sleep(options.inner_s / fragments)  # the inner steps
                    model["weights"] += 1
                    computed_s += time.perf_counter() - begin_s
                    stood_s += diloco.outer_step().waited_s
                step_s.append(time.perf_counter() - start_s)
                compute_s.append(computed_s)
                waited_s.append(stood_s)
            if isinstance(diloco, AsyncDiLoCo):
                diloco.finish()
            diloco.close()
            found[f"{name} compute_s"] = statistics.median(compute_s[WARM_UP:])
            found[f"{name} step_s"] = statistics.median(step_s[WARM_UP:])
            found[f"{name} waited_s"] = statistics.median(waited_s[WARM_UP:])
            found[f"{name} ratio"] = found[f"{name} step_s"] / found[f"{name} compute_s"]
    if os.environ["PCCL_HOST"] == "0":
        os.write(1, (json.dumps({name: round(value, 3) for name, value in found.items()}) + "\n").encode())


if __name__ == "__main__":
    main()
