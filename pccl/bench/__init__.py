"""`pccl bench`: how fast pccl is on this machine, beside a ruler that is measured in the same run.

Theory of operation. A coordinator starts a master and W worker processes and talks to them in JSON lines over
their standard streams. Workers take turns, iteration by iteration, between the collective and a raw ring (`raw_ring`)
over sockets of its own, so that whatever else the machine does falls on both alike. All ranks leave a barrier
before each timed part. The time of an iteration is that of its slowest rank, because that is what a training step
waits for; a row gives the median and the 95th percentile over iterations.

Bandwidths are those of nccl-tests: algorithm bandwidth is bytes / time, bus bandwidth is that times 2(W-1)/W, the
share of the bytes that must cross each rank's link.

With `--master` this process is one peer instead, of a run that other hosts' `pccl bench` join (`hosts`).

`kill` measures something else: what the loss of a peer costs those who stay.
"""
