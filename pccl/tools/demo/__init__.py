"""`pccl demo` trains a model across processes that die and join, on one machine.

A supervisor starts a master and N peers as processes. Every peer trains the same byte-level language model on its own
shard of text with DiLoCo and reports its progress as JSON lines. During the run, the supervisor kills one peer in the
middle of an all-reduce and starts a new one. At the end, it judges the library from the reports alone.

A worker's random numbers derive from (seed, peer, outer step), and the kill and the join happen at fixed points in the
loop, so two runs with the same options differ only in the order of floating-point additions in a reduce.
"""
