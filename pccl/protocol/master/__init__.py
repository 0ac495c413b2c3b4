"""The master's side of the control plane: membership, verdicts and group calls of one run, without payload.

    machine         the state machine that drives the parts below, and the run's status
    run_state       effects, options, members, groups with their undecided ops, numbering and waits
    views           the right to lead, links that a group lacks, and the stages of a view change
    verdicts        commits, aborts, abort votes, flushes
    group_calls     completion of group calls, deadlocked calls, and sync_shared_state
    ring            optimize_topology
    admission       Hello, refusals, sites, and delays after an eviction
    liveness        heartbeats and lost peers
    link_failures   links that broke or cannot be made
    statistics      totals, traffic and throughput

A part owns its data. It reads and changes the shared `RunState` through public fields, and evicts through a function
that it is given.
"""
