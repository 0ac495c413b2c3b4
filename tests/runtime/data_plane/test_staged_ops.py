"""Ops in pieces over an engine that only takes note: what the rest of pccl hears, in whatever order the pieces go."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pccl.protocol.peer import SubmitOp
from pccl.protocol.topology import MESH_PEERS_MAX
from pccl.runtime.data_plane import pieces
from pccl.runtime.data_plane.engine import Verdict
from pccl.runtime.data_plane.events import (
    EngineEvent,
    LinkDown,
    OpCompleted,
    OpDetached,
    OpDone,
    OpEnded,
    OpFrozen,
    OpMismatch,
    OpRefused,
)
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec
from pccl.runtime.data_plane.pieces import FIRST_PIECE_OP, PIECE_SHIFT
from pccl.runtime.data_plane.staged_ops import StagedOps
from pccl.types import DataType, ReduceOp

OP = 7
EPOCH = 3
TAG = 5
PIECE = 64
"""Bytes and elements of a piece."""
PIECES = 3


class Engine:
    """Notes what it is asked for, and reports what the test says."""

    def __init__(self) -> None:
        self.event_fds: list[int] = []
        self.is_closed = False
        self.submitted: dict[int, tuple[SubmitOp, OpSpec]] = {}
        self.ended: dict[int, Verdict] = {}
        self.frozen: list[int] = []
        self.frozen_epochs: list[int] = []
        self.detached: dict[int, Buffers | None] = {}
        self.forgotten: list[tuple[int, int, range]] = []
        self.coming: list[EngineEvent] = []

    def check(self, launch: SubmitOp, spec: OpSpec) -> None:
        assert spec.source is not None

    def submit(self, launch: SubmitOp, spec: OpSpec) -> None:
        assert spec.source is None
        assert launch.op not in self.submitted
        self.submitted[launch.op] = launch, spec

    def end(self, op: int, verdict: Verdict) -> None:
        assert op in self.submitted
        assert op not in self.ended
        self.ended[op] = verdict

    def freeze(self, epoch: int) -> None:
        self.frozen_epochs.append(epoch)

    def freeze_op(self, op: int) -> None:
        self.frozen.append(op)

    def forget_ops(self, epoch: int, tag: int, uses: range) -> None:
        self.forgotten.append((epoch, tag, uses))

    def detach(self, op: int, private: Buffers | None) -> bool:
        self.detached[op] = private
        return op in self.submitted

    def events(self) -> list[EngineEvent]:
        coming, self.coming = self.coming, []
        return coming

    def close(self) -> None:
        self.is_closed = True

    def forget_after_fork(self) -> None:
        self.is_closed = True

    def pieces_of(self, tag: int = TAG) -> dict[int, int]:
        """Each piece of the op that was submitted, by its number in the sequence's upper bits, from 0."""
        found = {}
        for number, (launch, _) in self.submitted.items():
            upper = launch.sequence >> PIECE_SHIFT
            if number >= FIRST_PIECE_OP and upper and launch.tag == tag:
                found[upper - 1] = number
        return found

    def markers(self) -> list[int]:
        return [
            number
            for number, (launch, _) in self.submitted.items()
            if number >= FIRST_PIECE_OP and not launch.sequence >> PIECE_SHIFT
        ]


class Source:
    """Arrays that come piece by piece, when the test says so."""

    def __init__(self, piece_count: int = PIECES) -> None:
        self.piece_count = piece_count
        self.is_undivided = False
        self.is_abandoned = False
        self.ready: Callable[[int, Buffers], None] = lambda place, buffers: None
        self.failed: Callable[[BaseException], None] = lambda error: None
        self.released: list[Callable[[], None]] = []

    def undivide(self) -> None:
        self.is_undivided, self.piece_count = True, 1

    def begin(self, ready: Callable[[int, Buffers], None], failed: Callable[[BaseException], None]) -> None:
        self.ready, self.failed = ready, failed

    def come(self, *places: int) -> None:
        for place in places:
            self.ready(place, Buffers(1000 + place, 2000 + place, PIECE, None))

    def abandon(self) -> None:
        self.is_abandoned = True

    def release(self, released: Callable[[], None]) -> None:
        self.released.append(released)

    def deliver(self) -> None:
        raise AssertionError("the caller's business")


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", PIECE)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def ops(engine: Engine) -> Iterator[StagedOps]:
    ops = StagedOps(engine)
    yield ops
    ops.close()


def launch(op: int = OP, tag: int = TAG, epoch: int = EPOCH) -> SubmitOp:
    return SubmitOp(op, epoch, tag, 1, 0, 2, (0, 1), True, True, (1, 2))


def spec(source: Source | None = None, count: int = PIECES * PIECE) -> OpSpec:
    return OpSpec(TAG, DataType.UINT8, ReduceOp.SUM, None, Buffers(1 << 20, 1 << 21, count, None), source=source)


def staged(ops: StagedOps) -> Source:
    """An op in pieces, of which none has come yet."""
    source = Source()
    ops.submit(launch(), spec(source))
    return source


def heard(ops: StagedOps, engine: Engine, *coming: EngineEvent) -> list[EngineEvent]:
    engine.coming += coming
    return ops.events()


def test_pieces_are_one_op(ops: StagedOps, engine: Engine) -> None:
    source = staged(ops)
    source.come(2, 0)
    assert heard(ops, engine) == []
    assert sorted(engine.pieces_of()) == [0, 2]
    first, last = engine.pieces_of()[0], engine.pieces_of()[2]
    assert heard(ops, engine, OpDone(first, 10, 20), OpDone(last, 1, 2), OpCompleted(last)) == []
    source.come(1)
    ops.events()
    middle = engine.pieces_of()[1]
    assert heard(ops, engine, OpDone(middle, 100, 200)) == [OpDone(OP, 111, 222)]
    assert heard(ops, engine, OpCompleted(first)) == []
    assert heard(ops, engine, OpCompleted(middle)) == [OpCompleted(OP)]
    ops.end(OP, Verdict.COMMIT)
    assert {engine.ended[piece] for piece in (first, middle, last)} == {Verdict.COMMIT}
    ended = [OpEnded(piece, 0, 0) for piece in (last, first, middle)]
    assert heard(ops, engine, *ended[:2]) == []
    assert heard(ops, engine, ended[2]) == [OpEnded(OP, 111, 222)]


def test_an_abort_takes_no_further_pieces(ops: StagedOps, engine: Engine) -> None:
    source = staged(ops)
    source.come(0)
    ops.events()
    ops.end(OP, Verdict.ABORT)
    assert source.is_abandoned
    source.come(1)
    assert heard(ops, engine) == []
    assert list(engine.pieces_of()) == [0]
    (marker,) = engine.markers()
    assert engine.ended[marker] is Verdict.ABORT
    assert heard(ops, engine, OpEnded(engine.pieces_of()[0], 0, 0)) == [OpEnded(OP, 0, 0)]
    assert heard(ops, engine, OpEnded(marker, 0, 0)) == []


def test_an_abort_before_the_first_piece_ends_at_once(ops: StagedOps, engine: Engine) -> None:
    staged(ops)
    ops.end(OP, Verdict.ABORT)
    assert heard(ops, engine) == [OpEnded(OP, 0, 0)]


def test_a_frozen_op_takes_no_further_pieces(ops: StagedOps, engine: Engine) -> None:
    source = staged(ops)
    source.come(0, 1)
    ops.events()
    ops.freeze_op(OP)
    source.come(2)
    first, second = engine.pieces_of()[0], engine.pieces_of()[1]
    assert sorted(engine.frozen) == sorted([first, second])
    assert heard(ops, engine, OpFrozen(first)) == []
    assert heard(ops, engine, OpFrozen(second)) == [OpFrozen(OP)]
    assert len(engine.pieces_of()) == 2


def test_a_frozen_epoch_takes_no_further_pieces(ops: StagedOps, engine: Engine) -> None:
    source = staged(ops)
    ops.freeze(EPOCH)
    source.come(0)
    assert heard(ops, engine) == []
    assert engine.pieces_of() == {}
    (marker,) = engine.markers()
    assert engine.ended[marker] is Verdict.ABORT, "markers end with their epoch"


def test_a_source_that_fails_refuses_the_op(ops: StagedOps, engine: Engine) -> None:
    source = staged(ops)
    source.come(0)
    ops.events()
    source.failed(RuntimeError("made up by a test"))
    assert heard(ops, engine) == []
    (piece,) = engine.pieces_of().values()
    assert engine.ended[piece] is Verdict.ABORT
    refused = OpRefused(OP, "RuntimeError: made up by a test")
    assert heard(ops, engine, OpEnded(piece, 0, 0)) == [refused]


def test_the_first_mismatch_of_a_piece_is_told(ops: StagedOps, engine: Engine) -> None:
    source = staged(ops)
    source.come(0, 1)
    ops.events()
    first, second = engine.pieces_of()[0], engine.pieces_of()[1]
    (told,) = heard(ops, engine, OpMismatch(second, 9, "mine", "theirs"), OpMismatch(first, 9, "mine", "theirs"))
    assert told == OpMismatch(OP, 9, "mine, as piece 2 of 3", "theirs")


def test_a_whole_op_that_meets_a_marker_goes_on_in_pieces(ops: StagedOps, engine: Engine) -> None:
    ops.submit(launch(), spec())
    assert list(engine.submitted) == [OP]
    marked = OpMismatch(OP, 9, "mine", "theirs", their_piece_bytes=PIECE)
    assert heard(ops, engine, marked) == []
    assert engine.ended == {OP: Verdict.ABORT}
    assert heard(ops, engine, OpEnded(OP, 5, 5)) == [], "it has only been taken back"
    ops.events()
    assert sorted(engine.pieces_of()) == [0, 1, 2]
    assert engine.markers() == [], "the other peer has sent one"
    for place, piece in engine.pieces_of().items():
        buffers = engine.submitted[piece][1].buffers
        assert isinstance(buffers, Buffers)
        assert (buffers.send, buffers.count) == ((1 << 20) + place * PIECE, PIECE)
    ops.submit(launch(OP + 1, TAG + 1), spec())
    ops.events()
    assert OP + 1 not in engine.submitted, "later ops in that epoch are divided from the beginning"
    assert len(engine.markers()) == 1
    ops.submit(launch(OP + 2, TAG + 2, EPOCH + 1), spec())
    assert OP + 2 in engine.submitted, "in the next epoch nobody may have a source"


@pytest.mark.parametrize("their_piece_bytes", [0, 2 * PIECE])
def test_a_whole_op_that_cannot_be_divided_is_a_mismatch(
    ops: StagedOps, engine: Engine, their_piece_bytes: int
) -> None:
    ops.submit(launch(), spec())
    (told,) = heard(ops, engine, OpMismatch(OP, 9, "mine", "theirs", their_piece_bytes=their_piece_bytes))
    assert isinstance(told, OpMismatch)
    assert told.theirs == (f"an op in pieces of {2 * PIECE} bytes" if their_piece_bytes else "theirs")
    assert engine.ended == {}


@pytest.mark.parametrize("world", [4, MESH_PEERS_MAX, MESH_PEERS_MAX + 1])
def test_a_source_is_whole_where_two_of_the_peers_lack_a_link(ops: StagedOps, engine: Engine, world: int) -> None:
    source = Source()
    links = tuple(range(world))
    ops.submit(SubmitOp(OP, EPOCH, TAG, 1, 0, world, links, is_meshed=False, is_mutual=False), spec(source))
    assert source.is_undivided == (world <= MESH_PEERS_MAX), "a larger group has no mesh to begin with"
    source.come(0)
    ops.events()
    assert len(engine.pieces_of()) == (0 if source.is_undivided else 1)
    assert len(engine.markers()) == 1, "the op by its own name, or its marker"


def test_a_verdict_on_an_op_that_is_taken_back_ends_it(ops: StagedOps, engine: Engine) -> None:
    ops.submit(launch(), spec())
    heard(ops, engine, OpMismatch(OP, 9, "mine", "theirs", their_piece_bytes=PIECE))
    ops.end(OP, Verdict.ABORT)
    assert heard(ops, engine, OpEnded(OP, 5, 5)) == [OpEnded(OP, 5, 5)]
    assert engine.pieces_of() == {}


def test_an_op_that_is_frozen_while_it_is_taken_back_goes_on_frozen(ops: StagedOps, engine: Engine) -> None:
    ops.submit(launch(), spec())
    heard(ops, engine, OpMismatch(OP, 9, "mine", "theirs", their_piece_bytes=PIECE))
    ops.freeze_op(OP)
    assert heard(ops, engine) == [OpFrozen(OP)]
    assert heard(ops, engine, OpEnded(OP, 5, 5)) == []
    assert heard(ops, engine) == []
    assert engine.frozen == []
    assert engine.pieces_of() == {}
    ops.end(OP, Verdict.ABORT)
    assert heard(ops, engine) == [OpEnded(OP, 0, 0)]


def test_a_detached_op_is_so_when_its_source_has_read_it(ops: StagedOps, engine: Engine) -> None:
    source = staged(ops)
    ops.detach_from(OP)
    assert heard(ops, engine) == []
    (released,) = source.released
    released()
    assert heard(ops, engine) == [OpDetached(OP)]


def test_an_unknown_op_is_detached_at_once(ops: StagedOps, engine: Engine) -> None:
    ops.detach_from(99)
    assert heard(ops, engine) == [OpDetached(99, is_known=False)]


def divided(ops: StagedOps, engine: Engine) -> dict[int, int]:
    """Have an op in memory go on in pieces, and return them by their places."""
    ops.submit(launch(), spec())
    heard(ops, engine, OpMismatch(OP, 9, "mine", "theirs", their_piece_bytes=PIECE), OpEnded(OP, 5, 5))
    ops.events()
    return engine.pieces_of()


@pytest.mark.parametrize("is_known", [True, False])
def test_an_op_is_as_known_as_its_pieces_when_it_is_detached(ops: StagedOps, engine: Engine, is_known: bool) -> None:
    first, second, last = divided(ops, engine).values()
    ops.detach_from(OP)
    assert heard(ops, engine, OpDetached(last), OpDetached(first, is_known)) == []
    assert heard(ops, engine, OpDetached(second)) == [OpDetached(OP, is_known)]


def test_an_op_of_which_a_piece_is_over_is_not_known_as_a_whole(ops: StagedOps, engine: Engine) -> None:
    first, second, last = divided(ops, engine).values()
    heard(ops, engine, OpEnded(second, 0, 0))
    ops.detach_from(OP)
    assert heard(ops, engine, OpDetached(last), OpDetached(first)) == [OpDetached(OP, is_known=False)]


def test_what_is_no_op_passes(ops: StagedOps, engine: Engine) -> None:
    staged(ops)
    assert heard(ops, engine, LinkDown(1, "cut")) == [LinkDown(1, "cut")]
    ops.forget_ops(EPOCH, TAG, range(1, 3))
    assert engine.forgotten == [(EPOCH, TAG, range(1, 3))]


def test_closing_abandons_all_sources(ops: StagedOps, engine: Engine) -> None:
    source = staged(ops)
    ops.close()
    assert engine.is_closed
    assert source.is_abandoned
