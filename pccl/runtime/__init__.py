"""Drives the machines of `pccl.protocol` over real sockets with trio, and owns the engine.

Folders, from the ground up; each imports only those above it in this list, and `master` and `session` do not know each
other:

    extension       the C library, loaded and checked in one place
    threads         the trio thread behind the blocking API, its helpers and watchdogs, and what forked children do
    network         addresses, dialing, TLS, framing, handshakes, heartbeats, measuring: bytes between processes
    data_plane      the engine: ops, arrays on their way through it, and the fast path of small ops
    state           shared state: what is compared, and how it moves from donors to a newcomer
    master          runs a master
    session         runs a peer

Where to look:

    a connection is accepted      network/accepting, then session/links or master/server
    an op is launched             session/ops; data_plane/fast_path for small ones whose caller waits
    an op reaches the engine      session/ops, data_plane/engine
    a lost peer is noticed        network/heartbeat for the master (master/server judges with the machine);
                                  session/ops for a peer whose link breaks
    a lost master is noticed      session/control, which looks for another one
    a link is made                session/links and network/links
    a newcomer gets the state     session/state_sync, state/transfer
"""
