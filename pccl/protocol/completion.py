"""Completion: how the participants of an op agree on its end by themselves, without the master.

Every peer must hear the same end of an op, however peers and masters die meanwhile. Where all participants of an op
have links with each other, they can find out by themselves (commit by mutual completion): a peer whose engine is done
with it tells all other participants (a DONE frame), and whoever is done and has heard so from all of them commits. That
is one one-way delay more than the result took, and the master hears nothing. It is so in a group that is a mesh, and of
a point-to-point op anywhere; see `is_mutual`. All others wait for the master's verdict as `master` says.

Three facts carry all that follows:

    1  An engine says DONE only when the result is wholly there; it can neither lose it nor become undone.
    2  Who commits by itself has heard DONE from all participants, so all of them are done.
    3  The machine alone commits, in the order of what it hears: never once it has promised not to (an abort vote).
       Where an op was committed past it, in a state in which it would have done the same (`Ops.plain_start`), it hears
       so before anything else.

Hence all who live on agree, whatever happens:

    4  A peer is lost. A flush has each survivor stop (after that nothing becomes done, and the machine commits nothing
       by itself), and say which open ops are done, and which it has committed by itself in this epoch. The master
       commits what any survivor has committed, or what all surviving participants are done with, and aborts the rest.
       If a peer that is lost had committed, all survivors are done (2), hence it is committed. If nobody had, the
       verdict is the same for all since it is the master's.
    5  A commit of the master's own (6) may be here before the engine is heard to be done. The survivor names it among
       those that it has committed, so no flush turns it.
    6  A participant gives up. Its caller may, or its engine may refuse the op or find others calling something else.
       The engine stops the op first. If it is not done then, it never will be; so nobody has committed or will (2), and
       the master aborts at once: that is so whenever somebody has not made the call, or is stopped. If it is done, the
       others may have committed. The peer says so and promises to commit no more by itself; the master asks the other
       participants for their abort votes: each says whether it has committed and otherwise promises the same, also of
       an op that it has yet to launch. If one has, all are done, and the master commits, else it aborts when all have
       voted: by then nobody can commit any more (3). Should one be lost meanwhile, the flush decides (4). The master
       does this, too, before it aborts what somebody waits in and others seem never to have launched: for all it knows
       they have, and it is over for them.
    7  The master dies. What a peer has committed by itself is among the verdicts of its recovery report, and counts as
       if a master had told it. Whoever has promised not to commit says to the next master again that it wants the op to
       be given up.
    8  What is said of an epoch is bounded. A peer has one op of a tag in flight at a time, so who has committed a use
       of a tag knows that all earlier ones are decided for all participants: of each tag the last commit suffices, and
       the aborts since.

What the master does not hear of it is told otherwise:

    how much was done       `Report`, every few seconds
    who waits for long      `OpsStalled`; whoever has said it also says when that op is done, and over (`OpsOver`)
    broken links            `LinkLost` says whether ops were committed since the link was made
    very many tags          whoever has used them in one epoch starts nothing new once nothing is in flight, and says so
                            (`TagsUsed`): a new epoch begins, as a rule between two ops
"""

from __future__ import annotations

from pccl.protocol.point_to_point import ranks_of

TAGS_MAX = 2**16
"""Different tags that a group may use in one epoch. Every peer counts the uses of each."""


def is_mutual(tag: int, is_meshed: bool) -> bool:
    """Whether the participants of an op end it by themselves; `is_meshed`: their group is a mesh. Two who have no link
    have no op of two."""
    return is_meshed or ranks_of(tag) is not None


def is_full(tags: int, is_idle: bool) -> bool:
    """Whether a new epoch is due for the number of tags used; sooner where no op is known to be in flight, so that as a
    rule none is aborted by it."""
    return tags > (TAGS_MAX // 2 if is_idle else TAGS_MAX)
