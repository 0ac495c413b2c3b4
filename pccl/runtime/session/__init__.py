"""Runs a peer: drives the protocol machine with the master's messages, the engine's events and the user's calls.

`peer_session` composes the parts and says what each of them is for. `options`, `lifetime`, `driver`, `op_table` and
`reports` are what they share.
"""
