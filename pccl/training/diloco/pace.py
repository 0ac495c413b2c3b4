"""The number of inner steps of each peer, by which fast and slow ones come to the outer step at the same time.

Theory of operation. As in DyLU (dynamic local updates; Liu et al. 2024, "Asynchronous Local-SGD Training for Language
Modeling", arXiv:2401.09135) the configured number is that of the fastest peer, and each other one makes as many as fit
the time that the fastest one takes:

    inner_steps of a peer = floor(inner_steps of the fastest * seconds of the fastest / seconds of the peer), at least 1

where `seconds` is what an inner step takes. Each peer measures that from the end of one outer step to the beginning of
the next one, with everything that it does in between, such as evaluating, and halves the weight of what it has measured
before, so that a hiccup passes. The figures travel with the average (`pccl.training.diloco.weighted_average`), so all
peers apply the rule to the same ones. (FedCompass, Li et al. 2024, arXiv:2309.14675, groups clients by speed to the
same end, at a server.)

Who has not measured anything yet, like a newcomer, makes the configured number, and is not counted among the fastest.
A peer so slow that even one inner step takes it longer is waited for.

The unweighted average of pseudo-gradients already counts a peer by what it has done: one that made a fifth of the
steps has moved about a fifth as far. Weighted by steps or tokens, the average is that of the movement of a token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from pccl.training.group.site import Site

UNKNOWN_S = math.inf
"""The `seconds` of a peer that has not measured its inner steps."""


class Pace:
    """One peer's measure of its inner steps, and the number of them that follows."""

    def __init__(self, inner_steps: int, site: Site | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._base = inner_steps
        self._site = site
        self.clock = clock
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what was measured, as a peer that has just joined."""
        self.inner_steps = self._base
        self.seconds = UNKNOWN_S
        self._since_s = self.clock()

    def resume(self) -> None:
        """Inner steps begin."""
        self._since_s = self.clock()

    def pause(self, made: int) -> None:
        """Note that so many inner steps have been made since `resume`."""
        if made < 1:
            return
        seconds = max((self.clock() - self._since_s) / made, 1e-9)
        self.seconds = seconds if math.isinf(self.seconds) else (self.seconds + seconds) / 2

    def adapt(self, seconds: Iterable[float], own: float) -> None:
        """Set the number of inner steps from the seconds that one takes each peer; `own` is this peer's, as all have
        been told."""
        fastest = min(seconds, default=UNKNOWN_S)
        wanted = self._base
        if math.isfinite(own) and math.isfinite(fastest):
            wanted = min(max(math.floor(self._base * (fastest / own)), 1), self._base)
        self.inner_steps = wanted if self._site is None else self._least(wanted)

    def _least(self, wanted: int) -> int:
        """Return the least number that any rank of the site wants: they make their inner steps together."""
        assert self._site is not None
        low, high = 1, self._base
        while low < high:
            middle = (low + high + 1) // 2
            if self._site.agree(wanted >= middle):
                low = middle
            else:
                high = middle - 1
        return low
