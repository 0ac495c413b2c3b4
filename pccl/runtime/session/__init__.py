"""Runs a peer: drives the protocol machine with the master's messages, the engine's events and the user's calls.

session     composes the parts, and runs them from Hello to the end
driver      turns: the one way to the machine; also the session's options, tasks and failure
ops         ops: launched, cancelled and released by any thread, submitted to the engine, ended
links       links that this peer makes, connections that it accepts, measurements
control     the control connection, the heartbeats, and the search for another master
state_sync  group calls, and this peer's part in sync_shared_state
recorder    the flight recorder, its dumps, and its parts for the master
reports     counters, reports to the master, and warnings of long waits
"""
