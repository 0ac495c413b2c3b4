"""The master's side of the control plane: membership, verdicts and group calls of one run, without payload.

    machine         the state machine that drives the parts below
    effects         what the machine asks the runtime to do
    run_state       options, members, groups, numbering and waits of the run
    views           the right to lead, links that a group lacks, and the stages of a view change
    verdicts        commits, aborts, abort votes, flushes; `ledger` holds undecided ops
    group_calls     completion of group calls, and calls that are deadlocked
    state_sync      sync_shared_state
    ring            optimize_topology
    admission       Hello, refusals, sites, and delays after an eviction
    liveness        heartbeats and lost peers
    link_failures   links that broke or cannot be made
    statistics      totals, traffic and throughput
    snapshot        the run's status

A part owns its data. It reads and changes the shared `RunState` through public fields, and evicts through a function
that it is given.
"""
