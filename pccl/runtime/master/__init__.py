"""Runs a master.

server          one run on one listening socket: connections, authentication, heartbeats, timers
durable_state   the state directory, and effects in order with the record on disk first
requests        answers to `pccl status`, `pccl trace` and `pccl doctor`
ring_search     the best ring for the known link metrics
standby_watch   the other masters, as a standby sees them
"""
