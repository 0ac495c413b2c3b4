"""torch's own tests of a process-group backend, run on pccl: `python -m tests.torch.suite`.

torch's wheel contains the tests of its backends (`torch.testing._internal.distributed.distributed_test`). Several
processes run each test, one per rank, and decorators name the backends of a test. `source` loads that module with
pccl's name added to Gloo's or MPI's. On Gloo, the baseline, the module is unchanged.

`case` derives the test case that starts the ranks. By default they are forked from a process with torch imported,
because most tests take less time than that import; `--start spawn` starts new processes, as torch does.

`worker` is a process that runs tests. `__main__` starts workers, assigns tests, kills a worker that exceeds a test's
time (the test has failed then), and prints the table. A test that needs more than four ranks runs with eight.

`skips` has a reason for each test that does not run on pccl. An unlisted skip is a failure, and so is a listed test
that runs.
"""
