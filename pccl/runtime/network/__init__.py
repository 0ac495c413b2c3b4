"""Bytes between processes.

addresses           addresses as people write them, and sockets that listen
dialing             connections to others
accepting           connections of others
unauthenticated     how many connections there may be that have not proved who they are, with
    log_limiter         how much is logged of them
tls                 TLS without sockets
handshake           the first words on every connection, with
    key_exchange        the secret that two sides agree on
wire                messages over sockets, and the control connection
encrypted           sockets that nobody but the other end can read or write
links               connections between peers, until the engine or a state transfer takes them over
probe               how much a link carries
heartbeat           heartbeats, by a thread that needs no Python; tells who falls silent
master_addresses    which master to ask next
conversation        one question to a master, from outside of its run, by
    status_client       for the status of the run
    trace_client        for what its peers have recorded
    check_client        for the way to it and back
"""
