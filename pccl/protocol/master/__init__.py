"""The master's side of the control plane: membership, verdicts and group calls of one run, without payload.

`machine` drives the other modules. Each owns its data, and reads and changes the shared `RunState` through public
fields.
"""
