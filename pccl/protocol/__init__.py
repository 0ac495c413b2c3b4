"""The control plane without I/O: messages, and the two machines that exchange them.

`master.machine.Master` and `peer.Peer` are state machines: events and the time are arguments, effects are results.
`pccl.runtime` drives them over TCP, tests drive them in memory.

Reading order: `messages`, `codec`, `master`, `peer`, `completion` (how peers complete an op without the master), and
`failover` (the next master).
"""
