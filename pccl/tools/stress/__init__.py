"""`pccl stress`: processes that reduce and sync continuously under random faults, and a checker for every guarantee.

A supervisor starts a master, its standbys and peers as processes, and injects random faults derived from a seed. Every
peer runs a user's loop: update_topology, sync_shared_state, ten reduces in flight, an update of the state. The ops of a
step follow from the state's revision, and an op's result reveals its participants (`values`). Peers report the result
of each call as JSON lines. The checker compares the reports of all peers and verifies that

- every committed result is the exact reduction over a set of peers, with the same set and bytes on all of them;
- all participants of a committed op got the verdict commit, and an aborted op left its input unchanged;
- after a sync all peers hold the same bytes, and a peer that was in the last sync receives no bytes in the next;
- calls fail only in documented ways, and none exceeds a time limit;
- a peer that was not frozen stays in the run, unless there are standbys or a recently killed master.

A seed reproduces the kind and order of the faults; their timing depends on the machine.
"""
