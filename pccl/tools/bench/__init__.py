"""`pccl bench`: measures pccl's speed on this machine, together with other implementations in the same run.

A coordinator (`local`) starts a master and a process for each peer (`peer`). The contenders take turns, iteration by
iteration, on the same arrays (`cases`): pccl, a raw ring over plain sockets (`raw_ring`) and, on request, torch's Gloo
(`gloo`). All ranks pass a barrier before and after each timed part, so that other load affects all contenders equally.
The time of an iteration is that of its slowest rank; a row (`report`) gives the median and the 95th percentile over
iterations.

Bandwidths are defined as in nccl-tests: algorithm bandwidth is bytes / time; an all-reduce's bus bandwidth is this
times 2(W-1)/W, the share of the bytes that crosses each rank's link. Raw ring and Gloo work in place and unquantized.
"""
