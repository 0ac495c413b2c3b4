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
"""
