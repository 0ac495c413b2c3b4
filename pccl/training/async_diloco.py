"""Asynchronous DiLoCo: the network works while the inner steps go on, and updates come one outer step late.

Theory of operation. At the end of outer step t each peer has a pseudo-gradient g(t). Instead of waiting for its average
it launches the all-reduce and goes on with the inner steps of t + 1; the average is applied at their end:

    inner steps   | t        | t + 1    | t + 2    |
    all-reduce    |          | g(t)     | g(t + 1) |
    outer update             |          ^ with the average of g(t)

*What is shared* is as in DiLoCo: outer parameters and momentum, advanced by averages alone, so the same bytes on every
peer at every revision. The average on its way is the group's and not a peer's; it is in no state that could be sent.

*Where inner steps start.* The outer parameters lack g(t) when the inner steps of t + 1 start. Starting from them all
the same makes two trainings that take turns in ignoring each other, and with the outer momentum they diverge. Each peer
instead looks ahead (compare the eager updates of Kale et al. 2025, arXiv:2502.12996): it starts from the outer
parameters, moved on by the momentum of the past, which is common, and by its own g(t) as it is, so that the inner
optimizer goes on from where it was. Other factors of g(t), also those with which the outer optimizer will apply it, do
worse. This is a place to start from and nothing else: pseudo-gradients are measured from there, and what is applied to
the outer state are the true averages.

*Coming and going.* A loss aborts the average on all survivors alike; they launch it again when they come to wait for
it. Membership can only grow while nothing is in flight. So where newcomers wait, all drain: they apply the average that
is due, make the next one at once and apply that, admit, synchronize, and go on with nothing on its way. The newcomer
thus starts from a state that holds every result it had no part in, and everybody's next launch is the first that it is
in. Such an outer step is a synchronous one.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from pccl import Communicator, QuantizationOptions
from pccl.training.checkpoint import Stateful
from pccl.training.loop import OuterLoop, OuterStep
from pccl.training.membership import NO_UPDATE, Admission, Average, Averaged
from pccl.training.outer import OuterNesterov
from pccl.training.site import Site


class AsyncDiLoCo(OuterLoop):
    """See the module for what it does and `OuterLoop` for its arguments.

    After an outer step an average may be in flight; it needs nothing from Python. `finish` ends a run.
    """

    def __init__(
        self,
        communicator: Communicator,
        model: Any,
        inner: Stateful | None = None,
        *,
        outer: OuterNesterov | None = None,
        quantization: QuantizationOptions | None = None,
        tag: int = 0,
        site: Site | None = None,
    ) -> None:
        super().__init__(communicator, model, inner, outer=outer, quantization=quantization, tag=tag, site=site)
        self._flight: Average | None = None
        self._flying = np.empty_like(self._gradient)
        """The vector of the average in flight, which is to be left alone; `_gradient` is free."""
        self._start = np.empty_like(self._gradient)
        """Where this peer's inner steps began."""

    @property
    def outer_steps(self) -> int:
        return self.revision + (self._flight is not None)

    def outer_step(self) -> OuterStep:
        """Applies the average that was launched a call ago, launches that of what the model moved by since then, and
        puts into the model where to go on from. Lets newcomers in. A joint call; blocks only as long as other peers or
        the network are slower than this peer's inner steps.

        PCCLError: the master is lost, or this peer was evicted; see `reconnect`.
        """
        self._replica.difference(self._start, self._gradient)
        started_s = time.monotonic()
        # In this order: who has to launch an aborted average again must not wait in a joint call meanwhile.
        done = [self._land()]
        admits = self._membership.are_peers_pending()
        if admits:
            self._launch()
            done.append(self._land())
            admission: Admission | None = self._membership.admit()
            waited_s = time.monotonic() - started_s
            self._begin()
        else:
            admission = None
            waited_s = time.monotonic() - started_s
            self._outer.look_ahead(self._parameters, self._momentum, self._gradient, self._start)
            self._replica.write(self._start)
            self._launch()
        return self._report(done, admission, waited_s)

    def finish(self) -> OuterStep:
        """Applies the average in flight, if there is one, and puts the outer parameters into the model: call it on all
        peers after the last outer step."""
        started_s = time.monotonic()
        done = [self._land()]
        waited_s = time.monotonic() - started_s
        self._begin()
        return self._report(done, None, waited_s)

    def reconnect(self, communicator: Communicator, peers_min: int = 1) -> Admission:
        self._flight = None
        return super().reconnect(communicator, peers_min)

    def _begin(self) -> None:
        np.copyto(self._start, self._parameters)
        super()._begin()

    def _launch(self) -> None:
        """The average of `_gradient`."""
        assert self._flight is None
        self._gradient, self._flying = self._flying, self._gradient
        self._flight = Average(self._communicator, self._flying, self._tag, self._quantization)

    def _land(self) -> Averaged:
        """Waits for the average in flight and applies it."""
        if self._flight is None:
            return NO_UPDATE
        averaged = self._flight.wait()
        self._flight = None
        self._update(self._flying)
        return averaged
