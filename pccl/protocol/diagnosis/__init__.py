"""Diagnosis: who makes a run slow or has it stuck, from what peers report of their ops and links anyway.

A collective waits for whoever comes last and for the slowest way, so a fault at one place is seen everywhere. What it
looks like differs from place to place, and that tells where it is:

    evidence    what each peer has reported, in rounds that can be compared
    lateness    whom the others wait for in rounds of ops
    symptoms    what a kind of fault looks like: from evidence to suspects
    findings    suspects that are named, from when until when

    1  Time in ops tells who is late. All peers of a group end an op together. So a peer that launches late spends less
       time in ops than the others, and the difference is the time for which they wait for it.
    2  Time under way tells which way is slow. What is on its way to be acknowledged keeps a direction of a link busy;
       all others rest while the ops wait for the slow one.
    3  Causes come before effects. A process that does not answer, or a path that carries nothing, stops all ops: only
       these are named then.
    4  A finding needs a difference, not a level: to the next peer, or the next direction. What slows all alike, such as
       a machine that they share, names nobody. How large it has to be is said in `symptoms`.
    5  A finding needs rounds in a row, and more of them where things vary by themselves. A pause is one round, however
       long: a checkpoint, a compilation or somebody who joins makes nobody slow. An op that nobody can end names
       whoever has not called it, but only after a while.
    6  All may wait, each in an op that others have not called. Then most of them are taken to be right.
    7  Rounds of ops tell how things are as long as there are ops: a few times as long as they took, for outer steps
       are minutes apart. When ops have ceased nobody is waited for, so nobody is slow.

Everything here is pure: moments are arguments, and what was decided is returned.
"""

from pccl.protocol.diagnosis.diagnosis import Diagnosis, GroupScene, Scene
from pccl.protocol.diagnosis.findings import Change, Suspect

__all__ = ["Change", "Diagnosis", "GroupScene", "Scene", "Suspect"]
