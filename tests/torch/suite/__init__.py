"""torch's own tests of a process-group backend, run on pccl: `python -m tests.torch.suite`.

Theory of operation. torch's wheel ships the tests that its CPU and GPU backends are judged by
(`torch.testing._internal.distributed.distributed_test`). Each one is run by several processes, one a rank. Decorators
name the backends a test is for. `source` loads that module with our name added wherever Gloo or MPI is named; nothing
else of it is changed, and on Gloo, which is the baseline, it is loaded as it is.

`case` derives the test case that starts the ranks. By default they are forked from a process that has torch imported
already, because most tests take less time than that import; `--start spawn` starts them afresh, as torch does.

`worker` is a process that runs the tests it is told to, one after the other. `__main__` starts some of them, hands out
the names, ends a worker that outlives a test's time (the test has failed then), and prints the table. A test that is
skipped with four ranks, since it wants more of them, is run again with eight.

`skips` has a reason for each test that does not run on pccl. A test that is skipped and not listed there has failed,
and so has one that is listed and runs.
"""
