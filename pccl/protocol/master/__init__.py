"""The master's side of the control plane: membership, verdicts and joint calls of one run, without payload.

`machine` holds the state machine and its theory of operation. It is put together from parts that can be tested alone:

    effects         what the machine asks the runtime to carry out
    options         settings of a master
    run_state       members, groups and numbering of the run, and what is about to be said
    leadership      whether this master may lead on: quorum views, the record
    admission       Hello, refusals, sites, trials of newcomers that were evicted before
    liveness        heartbeats, absence, and who is taken for dead
    link_failures   links that broke or cannot be made, and who is evicted for them
    op_verdicts     commits, aborts, abort votes, flushes and renewal of epochs
    view_stages     flush, prepare and install: how one view follows another
    waits           who waits in which joint call, and how such calls end
    joint_calls     when a joint call is complete, and which can never be
    state_sync      sync_shared_state
    ring_change     optimize_topology

A part owns what it keeps. It reads and changes the shared `RunState` only through public fields, and asks for an
eviction through a function that it is given.
"""
