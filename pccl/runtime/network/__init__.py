"""Bytes between processes.

addresses      addresses, listening sockets, and the search for a master
dialing        outgoing connections
accepting      incoming connections, and the limit of unauthenticated ones
log_limiter    the limit of log lines about them
tls            TLS without sockets
handshake      key exchange, authentication, and encrypted sockets
wire           messages over sockets, and the control connection
links          connections between peers, until the engine or a state transfer takes them
probe          the measurement of a link
heartbeat      heartbeats from a thread without Python
system         the operating system, replaceable in simulations
clients        requests to a master from outside its run
"""
