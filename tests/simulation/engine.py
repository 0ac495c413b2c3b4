"""The engines of all nodes, pretended: ops that travel in frames over the links, with sets of contributors for bytes.

A buffer holds the set of those whose numbers are summed up in it, each named by node and op; in the beginning that is
its owner alone. An op is in place, so partial sums overwrite what the caller gave, and an abort has to put it back. A
frame carries a buffer's value:

    ring      the owner's value goes once round and becomes the sum, the sum goes round once more
    direct    everybody sends the owner its value, the owner sends everybody the sum; this takes no word back

An op of two is one of a group of two: either's value has to get to the other.

A peer that is done with an op that its participants end by themselves tells each of them, in a frame, too, and has the
machine know when all have.

The owner is another rank in every use of a tag. What arrives before its op is submitted is kept. A frame is lost with
its link; one that two ends describe differently is a mismatch and carries no value.

What the machine commands is carried out later and in order, as by a thread: until then an op goes on and writes. Who
writes to a buffer that its caller has back is found at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pccl.protocol.completion import ranks_of
from pccl.protocol.peer import effects as ps
from pccl.types import Result
from tests.simulation.connections import Wire
from tests.simulation.node import Key, Node, Value

Later = Callable[[Node, Callable[[], None], Node | None, bool], None]
"""Something that happens to a node at its own time, caused by another, which may need an answer."""


@dataclass(frozen=True)
class Frame:
    key: Key
    arguments: str
    is_sum: bool
    value: Value
    done: str = ""
    """The node that says with it that it is done."""


class Engines:
    def __init__(
        self,
        later: Later,
        node_of: Callable[[int], Node],
        pick: Callable[[list[Wire]], Wire],
    ) -> None:
        self.held_back: set[str] = set()
        """Nodes in whose engine no op becomes done."""
        self._later = later
        self._node_of = node_of
        self._pick = pick
        self._complete_on_fast_path: Callable[[Node, ps.SubmitOp], None] | None = None
        self._stalled: list[Callable[[], None]] = []

    def on_completed(self, complete: Callable[[Node, ps.SubmitOp], None]) -> None:
        """Have `complete` called when all are done with an op that still runs on a fast path."""
        self._complete_on_fast_path = complete

    # What the machine commands.

    def submit(self, node: Node, effect: ps.SubmitOp) -> None:
        view = node.view
        assert effect.epoch == view.epoch
        assert _ring(node, effect)[effect.rank] == node.number
        assert effect.world_size == len(_ring(node, effect))
        assert effect.is_meshed == view.is_meshed
        key = node.next_use(effect.op)
        assert key == (node.group, effect.epoch, effect.tag, effect.sequence)
        node.keys[effect.op] = key
        if effect.op in node.refuses:
            node.machine.op_refused(effect.op, Result.INVALID_ARGUMENT, "the engine refuses")
            return
        node.submitted[key] = effect
        for other in self._participants(node, effect):
            theirs = other.submitted.get(key, effect)
            chosen_by = (effect.direct_limit, effect.is_local), (theirs.direct_limit, theirs.is_local)
            assert chosen_by[0] == chosen_by[1], f"{node} and {other} choose algorithms by {chosen_by}"
        self._announce(node, key)
        owner = self._owner(effect)
        if effect.rank == owner and not _goes_direct(effect):
            self._send(node, effect, effect.rank + 1, False)
        elif effect.rank != owner and _goes_direct(effect):
            self._send(node, effect, owner, False)
        for frame in node.parked.pop(key, ()):
            self.arrive(node, frame)

    def forget(self, node: Node, effect: ps.ForgetUnlaunched) -> None:
        for use in effect.uses:
            node.parked.pop((node.group, effect.epoch, effect.tag, use), None)

    def freeze(self, node: Node, epoch: int) -> None:
        node.commands.append(lambda: self._freeze(node, epoch))

    def end(self, node: Node, op: int, commit: bool, quietly: bool = False) -> None:
        node.commands.append(lambda: self._end(node, op, commit, quietly))

    def freeze_op(self, node: Node, op: int) -> None:
        node.commands.append(lambda: self._freeze_op(node, op))

    def detach(self, node: Node, op: int) -> None:
        node.commands.append(lambda: self._detach(node, op))

    def _detach(self, node: Node, op: int) -> None:
        key = node.keys.get(op)
        if key is not None and key in node.submitted:
            node.stopped.add(key)

    def _freeze_op(self, node: Node, op: int) -> None:
        key = node.keys[op]
        if key in node.submitted:
            node.stopped.add(key)
            node.reports.append(("stopped", op))

    def _freeze(self, node: Node, epoch: int) -> None:
        assert not node.fast_path.running
        node.frozen.add(epoch)
        node.reports.append(("frozen", epoch))

    def _end(self, node: Node, op: int, commit: bool, quietly: bool) -> None:
        if op in node.refuses:
            return  # the verdict was on its way already; an engine ignores ops that it does not have
        key = node.keys[op]
        del node.submitted[key]
        node.done_by.pop(key, None)
        if not commit:
            self._write(node, op, _own(node, op))
        if not quietly:
            node.reports.append(("ended", op))

    # Frames.

    def _send(self, node: Node, effect: ps.SubmitOp, rank: int, is_sum: bool) -> None:
        frame = Frame(node.keys[effect.op], node.launched[effect.op][1], is_sum, node.buffers[effect.op])
        self._send_frame(node, effect, rank, frame, is_announced=not _goes_direct(effect))

    def _send_frame(self, node: Node, effect: ps.SubmitOp, rank: int, frame: Frame, is_announced: bool) -> None:
        rank %= effect.world_size
        link = node.links.get(effect.links[rank])
        if link is None or not link.wires:
            return  # it has just been lost, and a flush must follow
        wire = self._pick(link.wires)
        other = wire.other(node)
        assert other.number == _ring(node, effect)[rank]
        self._later(other, lambda: self._receive(wire, other, frame), node, is_announced)

    def _receive(self, wire: Wire, node: Node, frame: Frame) -> None:
        link = node.links.get(wire.ends.get(node.name, 0))
        if link is None or wire not in link.wires:
            # What a lost connection carried, or one that its dialer has not taken over yet, goes over the others.
            sender = wire.other(node)
            theirs = sender.links.get(wire.ends[sender.name])
            others = theirs.wires if theirs is not None else []
            carrier = next((each for each in others if node.name in each.ends), None)
            if carrier is None and others:
                others[0].waiting.append(partial(self._receive, others[0], node, frame))
                return
            link = node.links.get(carrier.ends[node.name]) if carrier is not None else None
        if link is not None:
            self.arrive(node, frame)

    def arrive(self, node: Node, frame: Frame) -> None:
        key = frame.key
        effect = node.submitted.get(key)
        if frame.done:
            assert effect is not None or key in node.keys.values(), (
                f"{node} hears that {key} is done and has no such op"
            )
            if effect is not None and (key in node.held or not self._is_stopped(node, key)):
                self._note_done(node, effect, frame.done)
            return
        if effect is None:
            node.parked.setdefault(key, []).append(frame)
            return
        if self._is_stopped(node, key) or node.launched[effect.op][1] != frame.arguments:
            return
        assert key not in node.finished, f"{node} hears of {key} after its last byte"
        op, following, owner = effect.op, (effect.rank + 1) % effect.world_size, self._owner(effect)
        if frame.is_sum:
            self._complete(node, effect, frame.value)
            if not _goes_direct(effect) and (following + 1) % effect.world_size != owner:
                self._send(node, effect, following, True)
        elif _goes_direct(effect):
            self._complete(node, effect, node.buffers[op] | frame.value, effect.world_size)
            if len(node.buffers[op]) == effect.world_size:
                for rank in range(effect.world_size):
                    if rank != effect.rank:
                        self._send(node, effect, rank, True)
        elif following == owner:
            self._complete(node, effect, _own(node, op) | frame.value)
            self._send(node, effect, following, True)
        else:
            self._write(node, op, _own(node, op) | frame.value)
            self._send(node, effect, following, False)

    def _complete(self, node: Node, effect: ps.SubmitOp, value: Value, size: int = 0) -> None:
        """The last result byte arrives, if the value is of `size`."""
        self._write(node, effect.op, value)
        if len(value) < size:
            return
        key = node.keys[effect.op]
        node.finished.add(key)
        if node.name in self.held_back:
            self._stalled.append(lambda: self._report_done(node, key))
        else:
            self._report_done(node, key)

    def _report_done(self, node: Node, key: Key) -> None:
        if key not in node.submitted or self._is_stopped(node, key):
            return
        effect = node.submitted[key]
        node.held.add(key)
        if effect.op in node.fast_path.running:
            node.fast_path.running[effect.op] = True
        else:
            node.reports.append(("done", effect.op))
        if effect.is_mutual:
            for rank in range(effect.world_size):
                if rank != effect.rank:
                    self._send_frame(node, effect, rank, Frame(key, "", False, frozenset(), node.name), False)
            self._note_done(node, effect, node.name)

    def _note_done(self, node: Node, effect: ps.SubmitOp, name: str) -> None:
        assert effect.is_mutual
        done_by = node.done_by.setdefault(node.keys[effect.op], set())
        assert name not in done_by
        done_by.add(name)
        if len(done_by) < effect.world_size:
            return
        if node.fast_path.running.pop(effect.op, False):
            self._end(node, effect.op, commit=True, quietly=True)
            node.reports.append(("ran", effect.op))
            assert self._complete_on_fast_path is not None
            self._complete_on_fast_path(node, effect)
        else:
            node.reports.append(("agreed", effect.op))

    def _is_stopped(self, node: Node, key: Key) -> bool:
        return key[1] in node.frozen or key in node.stopped

    def _write(self, node: Node, op: int, value: Value) -> None:
        assert op not in node.results or node.buffers[op] == value, f"{node} writes to op {op}, which its caller has"
        node.buffers[op] = value

    def release(self) -> None:
        """Lets what was held back become done."""
        self.held_back.clear()
        stalled, self._stalled = self._stalled, []
        for action in stalled:
            action()

    def _owner(self, effect: ps.SubmitOp) -> int:
        return effect.sequence % effect.world_size

    # Descriptions.

    def _announce(self, node: Node, key: Key) -> None:
        """Neighbours in the ring compare what they were called with."""
        ring = self._participants(node, node.submitted[key])
        at = ring.index(node)
        for a, b in ((ring[at - 1], node), (node, ring[(at + 1) % len(ring)])):
            if key in a.submitted and key in b.submitted and _differ(a, b, key):
                self._later(a, lambda a=a: self._find_mismatch(a, key), b, False)  # type: ignore[misc]

    def _participants(self, node: Node, effect: ps.SubmitOp) -> list[Node]:
        return [self._node_of(peer) for peer in _ring(node, effect)]

    def _find_mismatch(self, node: Node, key: Key) -> None:
        effect = node.submitted.get(key)
        if effect is not None and not self._is_stopped(node, key):
            node.reports.extend([*node.fast_path.hand_over(effect.op), ("mismatch", effect.op)])


def _ring(node: Node, effect: ps.SubmitOp) -> tuple[int, ...]:
    """Return the peers that take part, by rank."""
    ranks = ranks_of(effect.tag)
    return node.view.ring if ranks is None else tuple(node.view.ring[rank] for rank in ranks)


def _goes_direct(effect: ps.SubmitOp) -> bool:
    """Whether the op goes direct, as small ops do. Some tags stand for large ones."""
    return effect.is_meshed and effect.tag % 3 != 0


def _own(node: Node, op: int) -> Value:
    return frozenset(((node.name, op),))


def _differ(a: Node, b: Node, key: Key) -> bool:
    return a.launched[a.submitted[key].op][1] != b.launched[b.submitted[key].op][1]
