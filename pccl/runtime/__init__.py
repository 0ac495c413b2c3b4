"""Drives the machines of `pccl.protocol` over real sockets with trio, and owns the engine.

`addresses` and `wire` are the ground; `master_server` runs a master; `peer_session` runs a peer with its `engine`,
`links` and `state_transfer`; `portal` lets ordinary threads call into all that, and `gate` lets small ops past it.
"""
