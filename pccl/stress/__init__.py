"""`pccl stress`: real processes that reduce and sync without end while they are killed, frozen, cut off and joined.

Theory of operation. One *supervisor* starts a master, its standbys and peers as separate processes and disturbs them at
random, from a seed. Every peer runs the loop that a user of pccl writes: update_topology, sync_shared_state, ten
reduces in flight at once, a step of the state. What is reduced in a step follows from the state's revision alone, so
all peers agree on it, and each peer's part is made such that the result tells who took part (`values`). Peers report
what became of each call as JSON lines; a *checker* holds the reports of all peers against each other and against the
library's promises:

- every committed result is the exact reduction over some set of peers, the same set and the same bytes on all of them;
- nobody who took part in a committed op heard another verdict, and an aborted op left its input as it was;
- after a sync all peers hold the same bytes; revisions only grow; who was in the last sync needs nothing in the next;
- calls fail in the documented ways only, and none lasts longer than a bound;
- who was neither frozen nor cut off keeps its place, as long as a majority is left for a master to go on with; and if
  nothing else happens when a master dies, steps go on within a peer timeout and a second of a new master listening.

    supervisor     one run: disturbs, hears and judges
        processes     starts the processes, hears them, keeps their logs
        seats         the addresses of masters, and the processes there
        peer          what is known of a peer
        network       tells processes whose packets to drop
        hangs         who hangs, and where everybody stands
        events        the log of what was done
    worker         one peer
        calls         its communicator, and calls that a signal interrupts
        reducing      ops, retried until they are committed
        chain         ops that several threads make in turn
        buffers       the arrays of an op, looked at again after errors
        state         the shared state and its lineage
        cutting       connections that break between two living peers
        packet_filter packets of some others, dropped in the kernel
        sockets       those of a process
    master         a master that can drop packets
    commands       what the supervisor tells a worker or a master
    messages       what peers report, and what they are told
    values         what is reduced, and what a result says
    errors         what ends a step of a peer before its end

No I/O, with time and randomness as arguments:

    plan           the numbers of a run, checked
    checker        the promises
    churn          whom to disturb when
    masters        when to kill one, what comes back, and what may be expected of the run then
    partitions     whom to cut off from whom when, and who may lose its place by it
    interrupts     whom to send SIGINT when

What is shown:

    report         what happened, as a table and as JSON
    display        the terminal

The disturbances are repeatable by the seed only in kind and order: when they hit is up to the machine.
"""
