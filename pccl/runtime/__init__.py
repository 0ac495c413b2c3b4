"""The trio runtime: it drives the `pccl.protocol` machines over real sockets and owns the engine.

Folders in dependency order. Each imports only folders above it in this list, and `master` and `session` do not import
each other:

    extension       the C library, loaded and checked in one place
    threads         the trio thread behind the blocking API, its helpers and watchdogs, and what forked children do
    network         addresses, dialing, TLS, framing, handshakes, heartbeats, and link measurements
    data_plane      ops, the engine that runs them, and the fast path for small ops
    state           comparison of the shared state, and its transfer from donors to a newcomer
    master          runs a master
    session         runs a peer

Where to look:

    a connection is accepted      network/accepting, then session/links or master/server
    an op is launched             session/ops; data_plane/fast_path for small ops
    an op reaches the engine      session/ops, data_plane/engine
    a lost peer is noticed        network/heartbeat in the master (master/server reports it to the machine);
                                  session/ops in a peer whose link to it breaks
    a lost master is noticed      session/control, which searches for another one
    a link is made                session/links and network/links
    a newcomer gets the state     session/state_sync, state/transfer
"""
