"""`pccl stress`: processes that reduce and sync without end under random faults, and a checker of every promise.

A supervisor starts a master, its standbys and peers as processes, and disturbs them at random from a seed. Every peer
runs a user's loop: update_topology, sync_shared_state, ten reduces in flight, a step of the state. The ops of a step
follow from the state's revision, and the result of an op reveals its participants (`values`). Peers report the result
of each call as JSON lines. The checker compares the reports of all peers:

- every committed result is the exact reduction over a set of peers, with the same set and bytes on all of them;
- all participants of a committed op got the verdict commit, and an aborted op left its input unchanged;
- after a sync all peers hold the same bytes, and a peer of the last sync receives no bytes in the next;
- calls fail only in documented ways, and none lasts longer than a bound;
- a peer that was not frozen keeps its place, unless there are standbys, a partition, or a master was killed just now.

The seed repeats the kind and order of faults; their moments depend on the machine.
"""
