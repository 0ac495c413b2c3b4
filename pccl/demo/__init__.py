"""`pccl demo`: real training across processes that die and join, on one machine, watched live.

Theory of operation. One *supervisor* starts a master and N peers as separate processes. Every peer trains the same
byte-level language model on its own shard of real text with DiLoCo, and reports what it does as JSON lines. While
they train, the supervisor kills one peer in the middle of an all-reduce and starts a new one; at the end it judges
from the reports alone whether the library kept its promises.

    worker      one peer: the loop a user of pccl writes, and nothing else
    corpus      the text: files of the standard library, dealt into shards
    model       the network and its hand-written gradient, in NumPy
    optimizer   AdamW, for the inner steps; the outer optimizer is pccl.training's
    messages    what workers and supervisor tell each other
    plan        the numbers of a run, checked
    conductor   decides whom to kill, start and admit, and makes rows of reports: no I/O, time is an argument
    supervisor  the processes themselves
    report      the facts of a run, the verdict, JSON and the plot
    display     the terminal

What is random in a worker derives from (seed, peer, outer step), the kill and the join happen at fixed points of
the loop (see `worker` and `conductor`), so two runs with equal options differ only by the order in which floats are
added in a reduce.
"""
