"""Known runs: the fence of this process, and the last views of runs that it does not lead, as peers have told of them.

Peers of one run come to a master in any order and may leave again, so what it may conclude must not depend on who
happens to be here:

    1  A peer that a view in force has left out must not go on from an earlier one, even when those who told of that
       view are gone again. So the newest view in force that was told of is remembered for each run.
    2  Where nobody can have led a run since this process wrote its fence, the fence counts instead: see `fence`.
    3  Peers that know several masters stay at each for a moment only. Whether any of them was ever accepted is judged
       by all that have come one after the other (`unaccepted_since`).
    4  A peer that the fence's run has left out is put out, and peers of other runs are sent away while that run may
       come.
"""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.fence import Fence, FencedView
from pccl.protocol.gathering import Gathering
from pccl.types import Result

RUNS_HEARD_OF_MAX = 16
"""Number of runs whose last views are remembered."""
BREAK_TIMEOUTS = 3.0
"""Number of peer timeouts within which peers that go from master to master are back at each."""


class KnownRuns:
    """The fence of this process and the last views of other runs."""

    def __init__(self, fence: Fence | None) -> None:
        self.fence = fence
        """The record of the run that this process, or one before it with the same state, has led last."""
        self._heard_of: dict[str, FencedView] = {}
        """The newest view in force of each run that a peer has told of here."""
        self._unaccepted: dict[str, tuple[float, float]] = {}
        """Runs whose peers have told of no view in force: the times when one came first, and last."""

    def fence_of(self, gathering: Gathering) -> Fence | None:
        """Return the fence of a gathering's run. None: somebody else may have led that run since, for all that is known
        here."""
        fence = self.fence
        if fence is None or fence.run != gathering.run or gathering.has_rivals or gathering.term_heard > fence.term:
            return None
        return fence

    def is_fenced(self, gathering: Gathering) -> bool:
        """Whether nobody has led the gathering's run since the fence was written."""
        return gathering.fence is not None and gathering.fence is self.fence

    def bound(self, gathering: Gathering) -> None:
        """Tell a gathering what is known of its run's last view besides the word of those who are here."""
        heard_of = self._heard_of.get(gathering.run)
        gathering.fence = self.fence_of(gathering)
        if gathering.fence is None and heard_of is not None and not gathering.has_rivals:
            gathering.fence = Fence(gathering.run, b"", 0, heard_of)

    def unaccepted_since(self, run: str, now: float, peer_timeout_s: float) -> float:
        """Note that a peer of this run has come. Return the time since which its peers have, with short breaks at most,
        and none told of a view in force."""
        since, last = self._unaccepted.pop(run, (now, now))
        if now >= last + BREAK_TIMEOUTS * peer_timeout_s:
            since = now
        self._unaccepted[run] = since, now
        for oldest in list(self._unaccepted)[:-RUNS_HEARD_OF_MAX]:
            del self._unaccepted[oldest]
        return since

    def note_view(self, gathering: Gathering, installed: m.InstalledView) -> None:
        """Remember a view in force that a peer has told of (rule 1)."""
        self._unaccepted.pop(gathering.run, None)
        before = self._heard_of.get(gathering.run)
        if before is not None and before.view >= installed.view:
            return
        self._heard_of.pop(gathering.run, None)
        self._heard_of[gathering.run] = FencedView(installed.view, gathering.here.views.of(installed).peers)
        for oldest in list(self._heard_of)[:-RUNS_HEARD_OF_MAX]:
            del self._heard_of[oldest]
        self.bound(gathering)

    def forget(self, run: str) -> None:
        """Forget what was heard of a run: this process leads it."""
        self._heard_of.pop(run, None)
        self._unaccepted.pop(run, None)

    def refusal(self, message: m.Resume, is_waiting: bool) -> m.FromMaster | None:
        """Return what a peer is told that is known not to be in the run that this master waits for; None: it may be in
        it. `is_waiting`: nobody may found another run yet."""
        fence = self.fence
        if fence is None or message.masters > 1:
            return None
        if message.run != fence.run:
            if fence.is_over or not is_waiting:
                return None
            text = f"it waits for {fence}, and not for run {message.run!r}"
            return m.Elsewhere(text) if message.is_accepted else m.StartOver(text)
        views = [fence.installed, *fence.prepared] if fence.installed is not None else fence.prepared
        if message.term > fence.term or any(message.peer in view.peers for view in views if view is not None):
            return None
        if not message.is_accepted:
            return m.StartOver("the run has gone on without the view that was to accept it")
        how = "has ended" if fence.is_over else "has gone on"
        text = f"evicted: run {message.run!r} {how} without peer {message.peer}; connect again"
        return m.Goodbye(Result.MASTER_CONNECTION_FAILED, text, fence.secret)
