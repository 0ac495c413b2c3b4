"""The engine that ships, in the simulation: real frames, kernels and memory instead of the engine that pretends.

`native/simulation` builds the C engine with threads, clock, poller and sockets of its own, all under the simulation's
command; the Python above it is what ships, too: `Engine` and `OpRequest` are loaded here once more, on top of
that library instead of the extension.

    library    builds and loads it
    ops        what an op is, the same on all peers, by its key; its inputs, and its result as numpy computes it
    arrays     what callers lend to ops, and what must have become of it when they have it back
    fast_path  callers on the fast path, as threads of the simulation
    peer       one node's engine: what it reports, in the words of the simulation
    links      connections as pairs of sockets
    engines    the engines of all nodes, in the place of `tests.simulation.engine.Engines`

What is under way on a connection is bytes. Any number of them may be carried at a time, an engine may get any part of
its work done in a turn, and a connection may die at any byte.
"""
