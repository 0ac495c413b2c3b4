"""Completion: how the participants of an op decide that it is committed by themselves, without the master.

The problem is that of atomic commitment: every peer must hear the same end of an op, however peers and masters die
meanwhile. Where all participants of an op have links with each other they can find out by themselves (commit by mutual
completion): a peer whose engine is done with the op tells all other participants (a DONE frame), and whoever is done
and has heard so from all of them commits. That takes one one-way delay more than the result took, and the master hears
nothing. It holds for all ops of a group that is a mesh, and for a point-to-point op anywhere: see `is_mutual`. All
other ops wait for the master's verdict, as `master.op_verdicts` says.

Three facts carry all that follows:

    1  An engine sends DONE only when the result is wholly there. It can neither lose the result nor undo it.
    2  A peer that commits by itself has heard DONE from all participants, so all of them are done.
    3  Only the machine commits, in the order of what it hears, and never an op that it has promised not to commit (an
       abort vote). Where an op was committed past it, on the fast path, that was in a state in which the machine would
       have done the same (`Ops.plain_start`), and it hears so before anything else.

Hence all peers that live on come to the same end, whatever happens:

    4  A peer is lost. A flush has each survivor stop its ops, after which nothing becomes done, and say which open ops
       are done and which it has committed by itself in this epoch. The master commits what any survivor has committed,
       or what all surviving participants are done with, and aborts the rest. If a lost peer had committed an op, all
       survivors are done with it (2), hence it is committed. If nobody had, the verdict is the same for all because it
       is the master's. A survivor that has heard DONE from all participants commits even after it has answered, unless
       it has promised not to: whoever is left has answered that it is done, or will, so the master can only commit. It
       must not wait for that verdict, for the master may leave with the others, once they have committed their last op.
    5  A commit of the master's own (6) may reach a peer before its engine has said that it is done. The survivor names
       it among those that it has committed, so no flush turns it into an abort.
    6  A participant gives an op up: its caller may, or its engine may refuse the op or find that others call something
       else. The engine stops the op first.

       a  If the op is not done then, it never will be. So nobody has committed it or will (2), and the master aborts it
          at once. That is so whenever somebody has not made the call, or was stopped.
       b  If it is done, the others may have committed it. The peer says so and promises not to commit it by itself any
          more. The master asks the other participants for their abort votes: each says whether it has committed the op,
          and otherwise promises the same, also of an op that it has yet to launch. If one has committed it, all are
          done, and the master commits. Otherwise it aborts when all have voted, for by then nobody can commit any more
          (3). If a participant is lost meanwhile, the flush decides (4).
       c  The master calls the same vote before it aborts an op that somebody waits in and others seem never to have
          launched: for all it knows they have, and it is over for them.

    7  The master dies. What a peer has committed by itself is among the verdicts of its recovery report, and counts as
       if a master had sent it. A peer that has promised not to commit an op asks the next master again to give it up.
    8  What has to be remembered of an epoch is bounded. A peer has one op of a tag in flight at a time, so one that has
       committed a use of a tag knows that all earlier uses are decided for all participants. Of each tag the last
       commit and the aborts since suffice.

What the master does not hear of such ops it learns otherwise:

    how much was done       `Report`, every few seconds
    who waits for long      `OpsStalled`; a peer that has said it also says when that op is done, and over (`OpsOver`)
    broken links            the flush that follows tells whether ops were committed since the link was made
    very many tags          a peer that has used them in one epoch starts nothing new once nothing is in flight, and
                            says so (`TagsUsed`): a new epoch begins, as a rule between two ops. Ops of two count at
                            these two only, so one peer may come to the bound alone: then what others have launched
                            is aborted, and their next call meets the op that waits for the new epoch
"""

from __future__ import annotations

from pccl.protocol.point_to_point import ranks_of

TAGS_MAX = 2**16
"""Number of different tags that a group may use in one epoch. Every peer counts the uses of each."""


def is_mutual(tag: int, is_meshed: bool) -> bool:
    """Whether the participants of an op complete it by themselves. `is_meshed`: their group is a mesh. Two peers
    without a link have no point-to-point op, so those that there are always do."""
    return is_meshed or ranks_of(tag) is not None


def is_full(tags: int, is_idle: bool) -> bool:
    """Whether a new epoch is due for the number of tags that were used. It is due sooner where no op is known to be in
    flight, so that as a rule none is aborted by it."""
    return tags > (TAGS_MAX // 2 if is_idle else TAGS_MAX)
