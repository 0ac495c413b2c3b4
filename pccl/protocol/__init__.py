"""The control plane without I/O: messages, and the two machines that exchange them.

`master.Master` and `peer.Peer` are plain state machines. Events and the time come in as arguments, effects go out as
values; neither touches a socket, a clock, a thread or a random generator. `pccl.runtime` drives them over TCP, tests
drive them in memory.

Reading order: `messages` (what is said), `codec` (how it looks on the wire), `master` and the parts it is made of
(`topology`, `ledger`, `state_election`), then `peer`, and `completion` (how peers complete an op without the master).
What follows the death of a master is in `failover`, and in `recovery_report` and `recovery`, which make the next one.
"""
