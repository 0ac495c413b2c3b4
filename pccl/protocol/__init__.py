"""The sans-I/O control plane: the messages, and the two state machines that exchange them.

`master.machine.Master` and `peer.machine.Peer` take events and the time as arguments and return effects.
`pccl.runtime` drives them over TCP; tests drive them in memory.

Reading order: `messages`, `codec`, `master`, `peer`, `completion` (how peers complete an op without the master), and
`failover` (the next master).
"""
