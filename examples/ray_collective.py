"""Ray actors that reduce with pccl, lose one of them, and continue.

    pip install ray
    python examples/ray_collective.py

The hook registers the backend in all of Ray's workers. The rest is Ray's own collective library: an actor joins a group
with `init_collective_group`, and calls `allreduce`, `broadcast` and so on. Unlike with other backends, when an actor is
killed, the collective fails on all others and leaves their arrays unchanged. The next collective continues among them,
and the actor can be restarted and admitted.
"""

import time
from typing import Any

import numpy as np
import ray
from ray.util import collective

import pccl.ray
from pccl import PCCLError


class Worker:
    """An actor with an array."""

    def __init__(self) -> None:
        self._array = np.ones(4)

    def join(self, world_size: int, rank: int) -> None:
        collective.init_collective_group(world_size, rank, backend="pccl")

    def allreduce(self) -> str:
        try:
            collective.allreduce(self._array)
        except PCCLError as error:
            return f"{error.result.name}, and the array is still {self._array}"
        return f"{self._array} on rank {collective.get_rank()} of {collective.get_collective_group_size()}"

    def admit(self) -> int:
        return pccl.ray.admit()


def main() -> None:
    ray.init(runtime_env={"worker_process_setup_hook": "pccl.ray.register"}, include_dashboard=False)
    actor: Any = ray.remote(Worker).options(num_cpus=0)
    workers = [actor.remote() for _ in range(3)]
    ray.get([worker.join.remote(3, rank) for rank, worker in enumerate(workers)])
    print("all three:", *ray.get([worker.allreduce.remote() for worker in workers]), sep="\n  ", flush=True)

    left, lost = workers[:2], workers[2]
    waiting = [worker.allreduce.remote() for worker in left]
    ray.kill(lost)
    print("one is killed:", *ray.get(waiting), sep="\n  ", flush=True)
    print("the others:", *ray.get([worker.allreduce.remote() for worker in left]), sep="\n  ", flush=True)

    again = actor.remote()
    joined = again.join.remote(3, 2)
    while max(ray.get([worker.admit.remote() for worker in left])) < 3:
        time.sleep(0.1)
    ray.get(joined)
    print("one more:", *ray.get([worker.allreduce.remote() for worker in [*left, again]]), sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
