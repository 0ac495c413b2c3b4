"""The master's side of the control plane: membership, verdicts and group calls of one run, but no payload.

`machine` drives the other modules. Each owns its data, and reads and writes the shared `RunState` through its public
fields.
"""
