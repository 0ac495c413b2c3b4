"""The ops of a simulated run: how callers launch them and give them up, and what machines have engines do with them."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.peer import effects as ps
from pccl.types import Result
from tests.simulation.engine import Engines
from tests.simulation.node import Node
from tests.simulation.peers import Peers
from tests.simulation.scene import Scene

FAST_PATH_SHARE = 0.7
"""The probability that an op takes the fast path where it may."""
IMPATIENCE = 0.3
"""The probability that its caller may leave the fast path before time passes."""
REAL_IMPATIENCE = 0.05
"""The same with engines that ship, where an op takes many more deliveries."""


class Ops:
    def __init__(self, scene: Scene, peers: Peers, engines: Engines) -> None:
        self._scene = scene
        self._peers = peers
        self._engines = engines
        engines.on_completed(self._complete)
        peers.on(ps.SubmitOp, self._submit)
        peers.on(ps.FreezeOps, lambda node, effect: engines.freeze(node, effect.epoch))
        peers.on(ps.FreezeOp, lambda node, effect: engines.freeze_op(node, effect.op))
        peers.on(ps.ForgetUnlaunched, self._forget_unmade)
        peers.on(ps.EndOp, self._end)
        peers.on(ps.ForgetOp, self._forget)

    def launch(self, node: Node, tag: int, arguments: str, is_refused: bool, pair: tuple[Node, bool] | None) -> int:
        op = node.next()
        node.launched[op] = tag, arguments
        if pair is not None:
            node.pairs[op] = pair[0].number, pair[1]
        node.buffers[op] = frozenset(((node.name, op),))
        if is_refused:
            node.refuses.add(op)
        suits_fast_path = not is_refused and (pair is None or self._peers.is_real)
        if suits_fast_path and self._takes_fast_path():
            submission = node.fast_path.submission(node.machine, op, tag, node.pairs.get(op))
            if submission is not None:
                self._engines.submit(node, submission)
                assert self._scene.rng is not None
                if self._scene.rng.random() < (REAL_IMPATIENCE if self._peers.is_real else IMPATIENCE):
                    self._scene.events.later(node, lambda: self._lose_patience(node, op))
                return op
        self._peers.hear_all(node)
        shared_tag = node.tag_of(op)
        if shared_tag is not None:
            node.fast_path.uses.pop(shared_tag, None)
        node.machine.launch(op, tag, self._scene.clock(node), node.pairs.get(op))
        self._peers.settle(node)
        return op

    def _lose_patience(self, node: Node, op: int) -> None:
        """Have no peer wait for an op on the fast path any more. A peer that has to close the path for that has the
        machine hear of all ops, as in `Peers.take_over`."""
        was_open = node.fast_path.start is not None
        node.reports.extend(node.fast_path.hand_over(op))
        if was_open and node.fast_path.start is None:
            self._peers.hear_all(node)
            self._peers.settle(node)

    def cancel(self, node: Node, op: int) -> None:
        node.reports.extend(node.fast_path.hand_over(op))
        self._peers.hear_all(node)
        if op not in node.keys and op not in node.results:
            node.cancelled_queued.add(op)
        node.machine.cancel(op, Result.TIMEOUT, "its time has passed")
        self._peers.settle(node)

    def give_up(self, node: Node, op: int) -> None:
        """Cancel an op whose caller does not wait for the verdict: the engine stops it without being told by the
        machine, unless the verdict is known and the engine is about to give the arrays back."""
        self.cancel(node, op)
        if node.is_frozen or not node.is_alive:
            return  # it was stopped within that
        node.given_up_ops.add(op)
        if not node.machine.expedite(op):
            self._engines.detach(node, op)
        self._peers.settle(node)

    def _takes_fast_path(self) -> bool:
        rng = self._scene.rng
        return self._peers.has_fast_path and rng is not None and rng.random() < FAST_PATH_SHARE

    def _complete(self, node: Node, effect: ps.SubmitOp) -> None:
        """Give a caller on the fast path its result."""
        checks = self._scene.checks
        checks.commit(node, node.keys[effect.op])
        checks.op_result(node, ps.OpResult(effect.op, Result.SUCCESS, "", len(effect.ring), 10, 20), None)

    # What machines decide.

    def _submit(self, node: Node, effect: ps.SubmitOp) -> None:
        assert node.in_call not in m.Kind.EXCLUSIVE
        self._engines.submit(node, effect)

    def _forget_unmade(self, node: Node, effect: ps.ForgetUnlaunched) -> None:
        for use in effect.uses:
            key = node.group, effect.epoch, effect.tag, use
            assert key not in node.submitted
        self._engines.forget(node, effect)

    def _end(self, node: Node, effect: ps.EndOp) -> None:
        if effect.commit:
            self._scene.checks.commit(node, node.keys[effect.op])
        self._engines.end(node, effect.op, effect.commit)

    def _forget(self, node: Node, effect: ps.ForgetOp) -> None:
        self._scene.checks.commit(node, node.keys[effect.op])
        self._engines.end(node, effect.op, commit=True, quietly=True)
