"""Trials: with all else well, a few things happen of which it is known exactly what must come of them.

After a random schedule little more can be asked than that everybody agrees, and goes on in the end. So when faults have
stopped, and the run is whole again, a trial of a kind drawn by chance follows. Its world is known, so promises can be
held to the letter:

    nobody to whom nothing happens is told to start over, or put out of the run
    whoever is lost is named, and nobody else is
    what all take part in succeeds, though its master has died in the middle of it
    who waits for a master is led within the time that the documents give

Each trial leaves the run whole.
"""

from __future__ import annotations

import random
from copy import copy

from tests.simulation.master_host import Memory
from tests.simulation.trials.absence import MajorityGone, NotHeard, NoWitness
from tests.simulation.trials.answers import AnsweredViews, AnswerToTheDead, KeptRing
from tests.simulation.trials.base import Trial
from tests.simulation.trials.chain import Chain
from tests.simulation.trials.forged import ForgedMaster, ForgedReport, ForgedResume
from tests.simulation.trials.founders import Founders, LeftStandby, LostFounder, OtherVersion
from tests.simulation.trials.founding import Heirs, LedElsewhere, Newcomers, NewDisk, OneIsBack, TooFew, Unseated
from tests.simulation.trials.interruptions import Departures, Few, Outage, Standstill
from tests.simulation.trials.membership import (
    AbsentNewcomer,
    BrokenConnections,
    Deaths,
    LastHeartbeat,
    NoHeartbeats,
    SilentMixture,
    SilentNewcomer,
    SilentNewcomers,
    Sites,
    Strangers,
)
from tests.simulation.trials.ops import (
    CancelledSync,
    GivenUp,
    HalfFetched,
    HeardOfNoEnd,
    LateReport,
    LostWord,
    NeverCalled,
    PromisedForNobody,
    TwoQuestions,
)
from tests.simulation.trials.ousted import Ousted
from tests.simulation.trials.probation import Probation
from tests.simulation.trials.records import LeftOutFirst, OldDisk, SlowHeirs
from tests.simulation.trials.renewal import Renewal
from tests.simulation.trials.rivals import Deserted, Farewell, Straggler, TakenApart
from tests.simulation.trials.slow_voters import SlowVoters
from tests.simulation.trials.sound_links import FailedOnce, NoNeighbours, OrderlyEnd, SoundLink
from tests.simulation.trials.split_vote import SplitVote
from tests.simulation.trials.succession import Succession
from tests.simulation.trials.successors import Elders, LastOfAll, NeededAgain, OneByOne, OneLink, ResetTogether
from tests.simulation.trials.torn import TornView
from tests.simulation.trials.torn_calls import DoubtedInVain, GivenUpInSync, LateFetch, NotYetAccepted, Tie, UnheardEnd
from tests.simulation.trials.verdicts import TornVerdicts
from tests.simulation.trials.votes import (
    CommitUnderVote,
    GivenUpTwice,
    LaterAbort,
    LeftOut,
    OldQuestion,
    PromisedBeforeLaunch,
    StoppedAgain,
)
from tests.simulation.trials.weak_links import DeadDialer, HopelessLink, MissingLink, WeakLink
from tests.simulation.trials.witnesses import BroughtUp, HalfHeard, SlowWitness
from tests.simulation.world import World

__all__ = [
    "ANY",
    "CHAINS",
    "CLOSE",
    "LATER",
    "MEMBERSHIP",
    "OUTLIVING",
    "RECORDED",
    "RIVALS",
    "SUCCESSORS",
    "WITNESSES",
    "Trial",
    "play_trial",
]

OUTLIVING: tuple[type[Trial], ...] = (
    Succession,
    Standstill,
    Outage,
    Few,
    Departures,
    Newcomers,
    Heirs,
    TornView,
    Ousted,
    OtherVersion,
    SplitVote,
)
"""Trials of runs that outlive their masters."""
MEMBERSHIP: tuple[type[Trial], ...] = (
    BrokenConnections,
    BrokenConnections,
    Deaths,
    Deaths,
    NoHeartbeats,
    SilentNewcomer,
    SilentNewcomers,
    AbsentNewcomer,
    Sites,
    Strangers,
    Strangers,
    Probation,
    Renewal,
)
"""Trials of any run."""
MEMBERSHIP_SHARE = 0.6
"""The probability that one of these follows in a run that outlives its masters."""
LATER: tuple[type[Trial], ...] = (
    MissingLink,
    MissingLink,
    WeakLink,
    HopelessLink,
    GivenUp,
    TwoQuestions,
    PromisedForNobody,
    LateReport,
    LostWord,
    CancelledSync,
    SilentMixture,
    LastHeartbeat,
    DeadDialer,
    HalfFetched,
    HeardOfNoEnd,
)
"""Trials of links and ops, for any run."""
LATER_SHARE = 0.6
"""The probability that one of these follows in the end."""
CHAINS: tuple[type[Trial], ...] = (Chain, Chain, TornVerdicts, SlowVoters)
"""Trials in which masters die one after the other."""
CHAINS_SHARE = 0.4
"""The probability that one of these follows in a run that outlives its masters."""

ANY: tuple[type[Trial], ...] = (ForgedMaster, ForgedReport, ForgedResume, NeverCalled)
"""Trials of any run, in which somebody does what nobody should."""
ANY_SHARE = 0.3
"""The probability that one of these follows."""
WITNESSES: tuple[type[Trial], ...] = (SlowWitness, HalfHeard, BroughtUp, Unseated)
"""Trials of any run that outlives its masters."""
WITNESSES_SHARE = 0.3
"""The probability that one of these follows."""
RECORDED: tuple[type[Trial], ...] = (OldDisk, LeftOutFirst, LeftOutFirst, SlowHeirs, OneIsBack, Unseated, Unseated)
"""Trials of runs with one master, which has a record on its disk."""
RIVALS: tuple[type[Trial], ...] = (Straggler, Deserted, Farewell, TakenApart)
"""Trials of runs that several masters may lead."""
KIND_SHARE = 0.6
"""The probability that one follows of those for which the masters are of the kind."""
CLOSE: tuple[type[Trial], ...] = (
    CommitUnderVote,
    CommitUnderVote,
    PromisedBeforeLaunch,
    LeftOut,
    LaterAbort,
    StoppedAgain,
    GivenUpTwice,
    OldQuestion,
    AnsweredViews,
    AnswerToTheDead,
    KeptRing,
    UnheardEnd,
    NotYetAccepted,
    GivenUpInSync,
    LateFetch,
    DoubtedInVain,
    Tie,
    SoundLink,
    FailedOnce,
    OrderlyEnd,
    NoNeighbours,
)
"""Trials, for any run, of things that come close upon each other: in other orders nothing comes of them."""
CLOSE_SHARE = 0.8
"""The probability that one of these follows in the end."""

SUCCESSORS: tuple[type[Trial], ...] = (
    *(Elders, NeededAgain, OneByOne, OneLink, ResetTogether),
    *(LedElsewhere, NewDisk, TooFew, TooFew, LeftStandby, LastOfAll),
)
"""Trials, for any run, of what a new master knows and newcomers ask, and of what peers report."""
SUCCESSORS_SHARE = 0.6
"""The probability that one of these follows in the end."""

ABSENCE: tuple[type[Trial], ...] = (NotHeard, NoWitness, MajorityGone)
"""Trials, for any run, of peers that have lost their connection to the master for a moment."""
ABSENCE_SHARE = 0.2
"""The probability that one of these follows in the end."""


def play_trial(world: World, rng: random.Random, slack: float, groups: int) -> None:
    """Play one trial in a run that is whole. The slowest clock may take `slack` seconds for one of its own."""
    seed = copy(rng).random()
    chance = random.Random(f"members {seed}")  # whatever the trials before draw
    trials = OUTLIVING if world.masters else ()
    if trials and world.options.founders > 1:
        trials = (*trials, Founders)
    if trials:
        trial = rng.choices(trials, [2 if trial is Succession else 1 for trial in trials])[0](world, rng, slack, groups)
        if trial.gather():
            trial.play()
    if world.real is None and (not world.masters or chance.random() < MEMBERSHIP_SHARE):
        trial = chance.choice(MEMBERSHIP)(world, chance, slack, groups)
        if world.accepted and trial.gather():
            trial.play()
    chance = random.Random(f"later {seed}")
    if world.real is None and chance.random() < LATER_SHARE and world.accepted:
        trial = chance.choice(LATER)(world, chance, slack, groups)
        if trial.gather():
            trial.play()
    chance = random.Random(f"chains {seed}")
    if world.masters and chance.random() < CHAINS_SHARE and world.accepted:
        trial = chance.choice(CHAINS)(world, chance, slack, groups)
        if trial.gather():
            trial.play()
    for name, share, kinds in (
        ("any", ANY_SHARE, ANY),
        ("witnesses", WITNESSES_SHARE, WITNESSES if world.masters else ()),
        ("kind", KIND_SHARE, _of_kind(world)),
        ("close", CLOSE_SHARE, CLOSE),
        ("successors", SUCCESSORS_SHARE, SUCCESSORS),
        ("absence", ABSENCE_SHARE, ABSENCE),
    ):
        chance = random.Random(f"{name} {seed}")
        if kinds and world.real is None and chance.random() < share and world.accepted:
            trial = chance.choice(kinds)(world, chance, slack, groups)
            if trial.gather():
                trial.play()


def _of_kind(world: World) -> tuple[type[Trial], ...]:
    """Return the trials for which the masters of a world are of the kind."""
    if not world.masters:
        return ()
    if world.addresses > 1:
        return (*RIVALS, LostFounder, LostFounder) if world.options.founders > 1 else RIVALS
    return RECORDED if world.memory is Memory.DISK else ()
