"""DiLoCo (Douillard et al. 2023, arXiv:2311.08105): many local steps, then one average.

Theory of operation. All peers start an outer step from the same outer parameters. Each takes some *inner* steps on its
own data with an optimizer of its own (the paper: 500 of AdamW; fewer work as well). What its parameters moved by is its
pseudo-gradient; the peers average theirs, and each applies the mean to the outer parameters with the same outer
optimizer, the same bytes in and out. So the network is used once in an outer step instead of once in a step.

    with Communicator(os.environ["PCCL_MASTER"]) as communicator:
        diloco = DiLoCo(communicator, model, optimizer)
        diloco.join(peers_min=4)
        while diloco.revision < 100:
            for batch in batches(50):
                train(model, optimizer, batch)
            print(diloco.outer_step())

Peers may come and go at any time. Who is lost in the middle of an average is left out of it; who is left alone goes on
alone, as an average of one. Newcomers are let in at the end of an outer step and take part in the next from its first
inner step. How many inner steps to make is each peer's own affair: slower ones may make fewer, and
`DiLoCo(..., inner_steps=50, steps="by speed")` tells each, as `diloco.inner_steps`, how many fit the common time.
"""

from __future__ import annotations

import time

from _pccl_torch import outside_graphs
from pccl._integers import as_int
from pccl.training.diloco.outer_loop import OuterLoop, OuterStep
from pccl.training.group.membership import NO_UPDATE
from pccl.training.group.weights import checked_weight


@outside_graphs
class DiLoCo(OuterLoop):
    """DiLoCo (Douillard et al. 2023, arXiv:2311.08105): peers train alone for some steps, then average what these
    moved.

    The pseudo-gradient of a peer is `outer - local`, where it started minus where its inner steps have led; the mean
    over peers goes into SGD with Nesterov momentum (`OuterNesterov`), as in the paper's algorithm 1. Arguments are
    those of `OuterLoop`. Between calls the model is the user's, to be trained by any optimizer. Not thread-safe."""

    def outer_step(self, *, weight: float | None = None, inner_steps: int | None = None) -> OuterStep:
        """Average what the peers' models moved by since the last call, update the outer state, let newcomers in, and
        put the outer parameters into the model. A joint call; blocks until all other peers have come to it.

        `weight`, a number of at least 0, is what this peer counts by in the average, such as tokens or samples
        (`pccl.training.diloco.weighted_average`): the mean is `sum(weight * pseudo-gradient) / sum(weight)`. All peers
        give one, or none does. `inner_steps` is how many this peer has made, if not as many as the property
        `inner_steps` said.

        ValueError: the weight is negative, not finite or no number, or `inner_steps` is no number of steps;
        `outer_step` can be called again. PCCLError: the master is lost, or this peer was evicted, see `reconnect`;
        INVALID_USAGE: `join` was not called, or a former call was interrupted: `reconnect`, too. DivergenceError: peers
        differ in what they must have in common."""
        weight = checked_weight(weight)
        made = self.inner_steps if inner_steps is None else as_int("inner_steps", inner_steps, 0)
        self._pace.pause(made)
        with self._membership.step("DiLoCo.outer_step"):
            gradient = self._gradient
            self._replica.difference(self._parameters, gradient)
            started_s = time.monotonic()
            self._contract.begin(self.revision)
            self._contract.followers.claim(self._communicator)
            average = self._launch_average(gradient, weight)
            self._contract.launch_buffers(self.revision)
            averaged = self._wait_for(average)
            of_buffers = self._contract.land()
            waited_s = time.monotonic() - started_s
            self._contract.followers.commit(averaged.peers)
            self._update(gradient)
            started_s = time.monotonic()
            admission = self._membership.admit() if self._membership.are_peers_pending() else None
            waited_s += time.monotonic() - started_s
            self._begin()
            self._contract.end(self.revision)
        self._pace.resume()
        return self._report([of_buffers, averaged], admission, waited_s)

    def finish(self) -> OuterStep:
        """Compares what all peers have in common, and puts the outer parameters into the model: call it on all peers
        after the last outer step. Inner steps since that are left out. DivergenceError, PCCLError as `outer_step`."""
        with self._membership.step("DiLoCo.finish"):
            started_s = time.monotonic()
            self._contract.followers.discard()
            self._begin()
            self._contract.check(self.revision)
            waited_s = time.monotonic() - started_s
        return self._report([NO_UPDATE], None, waited_s)
