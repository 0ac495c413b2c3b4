"""`pccl bench`: measures how fast pccl is on this machine, beside rulers that are measured in the same run.

Theory of operation. A coordinator (`peers`) starts a master and W worker processes and talks to them in JSON lines over
their standard streams. Workers take turns, iteration by iteration, between the collective, a raw ring (`raw_ring`) over
sockets of its own and, if asked for, torch's Gloo (`gloo`), all on the same arrays (`case`), so that whatever else the
machine does falls on all alike. All ranks leave a barrier before each timed part and enter one after it, so that while
it lasts no process of the benchmark computes anything else. The time of an iteration is that of its slowest rank,
because that is what a training step waits for; a row (`measure`) gives the median and the 95th percentile over
iterations.

Bandwidths are those of nccl-tests: algorithm bandwidth is bytes / time, bus bandwidth is that times 2(W-1)/W, the
share of the bytes that must cross each rank's link.

Rulers work in place and unquantized, also where pccl does not: the sum is what they are asked for, not the means.

With `--master` this process is one peer instead, of a run that other hosts' `pccl bench` join (`hosts`).

`kill` measures something else: what the loss of a peer costs those who stay.
"""
