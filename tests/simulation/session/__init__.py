"""Plays whole runs of communicators and masters in one thread: what ships, from the public calls down to its sockets.

Theory of operation. A seed makes a run. Peers are `AsyncCommunicator`s, masters are `MasterServer`s, with the sessions,
handshakes, elections, group calls, state transfers and staged ops that ship. What is played is what they are given:

    clock         trio's MockClock, which jumps to the next event
    determinism   trio's scheduler, secrets and worker threads draw on the seed, so a seed is a run, event by event
    sockets       sockets whose bytes lie in pipes of the system's
    network       carries them: with latency, in parts, cut anywhere, lost for a while, or one way only
    heartbeats    the heartbeat thread, as tasks
    system        a machine of the run: network, heartbeats and helper threads, as `runtime.network.system` has them
    engine        the engine: arrays of numbers that travel in frames over links
    device        arrays on a device, and the thread that copies them, as a task
    machines      processes of peers and masters that are started and killed
    program       what a caller does, over and over, and what it notes
    checks        what callers may rely on, judged by what they have noted
    schedule      the seed's choice of all of that, and the faults
    founding      the same for runs that several peers found together
    campaign      many schedules, one after the other

`python -m tests.simulation.session --seed 4711 --schedules 1` plays one.
"""
