"""The test case that runs `distributed_test` in several processes, as torch's own `test_distributed_spawn.py` does.

It is imported by the process that runs the tests, and again by each rank where these are not forked. What it needs is
in the environment: BACKEND, WORLD_SIZE, and SUITE_START, the start method of ranks.
"""

import multiprocessing
import os
from typing import Any

os.environ.setdefault("INIT_METHOD", "file:///set/by/each/test")

import torch
from torch.testing._internal import common_distributed

from tests.torch.suite import source

BACKEND = os.environ["BACKEND"]
if BACKEND == "pccl":
    import pccl.torch  # noqa: F401  (registers the backend)

distributed_test = source.load(BACKEND)
common_distributed.TIMEOUT_OVERRIDE.clear()  # the runner's bound holds for all tests

END_S = 5  # for a rank that was told to end


class SuiteCase(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
    """torch's tests of a backend; unlike torch's own case it asks for the exit status of every rank, not of rank 0."""

    def setUp(self) -> None:
        super().setUp()
        distributed_test.INIT_METHOD = os.environ["INIT_METHOD"]  # a forked rank does not import the module again
        self._start_processes(multiprocessing.get_context(os.environ["SUITE_START"]).Process)

    def tearDown(self) -> None:
        ranks = self.processes
        super().tearDown()
        for rank in ranks:
            rank.join(END_S)
            if rank.is_alive():
                rank.kill()
                rank.join()

    def _check_return_codes(self, *given: Any) -> None:
        super()._check_return_codes(*given)
        codes = [rank.exitcode for rank in self.processes]
        if given[0] not in self.skip_return_code_checks and len(set(codes)) > 1:
            raise RuntimeError(f"the ranks exited with {codes}")


torch.set_num_threads(1)
