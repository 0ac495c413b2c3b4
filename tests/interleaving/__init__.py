"""Interleavings: the threads of pccl that ship, under a scheduler that may preempt them at every hand-over.

Theory of operation. What goes wrong between threads goes wrong in few of very many orders, which a machine that is not
busy in just that way never shows. So here the order is chosen: real threads run the real code one at a time, and at
each point where another could come first a seeded chooser decides which thread goes on. No choice is left to chance,
so a seed plays the same schedule each time, and a deadlock is seen at once.

    scheduler   threads with batons, virtual time, deadlocks; Ctrl-C at any point of a thread
    choosers    the next thread: a random walk, or priorities that change a few times (PCT)
    tracing     hand-overs between lines, or wherever the interpreter looks for other threads and signals
    primitives  stand-ins for locks, threads, queues and clocks, as pccl's modules use them
    native      stand-ins for the C library's engines: one more thread each, in the terms of pccl_native.h
    world       communicators over these, with a real master's machine and trio in the portal's thread
    scenario    what callers do, and what each of them must find
    turns, endings, scenarios    scenarios, and the list of them
    faults      known faults, taken out mends among them, that schedules have to find
    schedule    what a seed stands for
    campaign    many schedules, and how soon the known faults are found

What is not here: the network's side of a session (dialing, handshakes, a lost master), and the C library's own threads,
which ThreadSanitizer and the tests of `native/tests` examine.
"""
