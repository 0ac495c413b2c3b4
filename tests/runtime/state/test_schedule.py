"""Schedules of a state transfer, driven by hand: no sockets, and time is a number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.runtime.state import tensor_blocks
from pccl.runtime.state.transfer import REQUESTS_FIRST, REQUESTS_MAX, RESCUE_S, Block, DonorStream, Schedule, blocks_of

SIZE = 1000


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_blocks, "BLOCK_BYTES", SIZE)


def schedule_of(count: int, streams: int = 1) -> tuple[Schedule, list[DonorStream]]:
    schedule = Schedule(blocks_of(0, count * SIZE, range(count)), count)
    entered = [DonorStream() for _ in range(streams)]
    for stream in entered:
        schedule.enter(stream)
    return schedule, entered


def draw_all(schedule: Schedule, stream: DonorStream, now: float) -> list[Block]:
    drawn = []
    while (block := schedule.draw(stream, now)) is not None:
        drawn.append(block)
    return drawn


def deliver(schedule: Schedule, stream: DonorStream, now: float) -> Block:
    """The first block of the stream comes as a whole."""
    block = stream.queue[0]
    stream.moved(block.size, now)
    if not block.is_done:
        schedule.finish(block)
    schedule.delivered(stream)
    return block


def run(schedule: Schedule, speeds: dict[DonorStream, float], now: float = 0.0) -> tuple[float, dict[DonorStream, int]]:
    """Let streams deliver so many bytes a second, until everything has landed: when that is, and how many blocks each
    has landed."""
    landed = dict.fromkeys(speeds, 0)
    credit = dict.fromkeys(speeds, 0.0)
    step_s = 0.01
    while not schedule.is_done:
        now += step_s
        for stream, speed in speeds.items():
            draw_all(schedule, stream, now)
            credit[stream] = credit[stream] + speed * step_s if stream.queue else 0.0
            stream.silent_s += step_s if stream.queue else 0.0
            while stream.queue and credit[stream] >= SIZE and not schedule.is_done:
                credit[stream] -= SIZE
                landed[stream] += not stream.queue[0].is_done
                deliver(schedule, stream, now)
                draw_all(schedule, stream, now)
    return now, landed


def test_last_block_is_shorter() -> None:
    blocks = list(blocks_of(3, 2500, range(3)))
    assert [(block.tensor, block.number, block.size) for block in blocks] == [(3, 0, 1000), (3, 1, 1000), (3, 2, 500)]


def test_requests_fill_long_fast_path() -> None:
    schedule, (stream,) = schedule_of(1000)
    now, latency_s, speed = 0.0, 1.0, 40 * SIZE
    draw_all(schedule, stream, now)
    now += latency_s
    for _ in range(200):
        deliver(schedule, stream, now)
        draw_all(schedule, stream, now)
        now += SIZE / speed
    assert stream.to_come_bytes >= speed * 2 * latency_s
    assert len(stream.queue) <= REQUESTS_MAX


def test_streams_end_together() -> None:
    schedule, (fast, slow) = schedule_of(1000, 2)
    end_s, landed = run(schedule, {fast: 90 * SIZE, slow: 10 * SIZE})
    assert landed[fast] + landed[slow] == 1000
    assert 850 <= landed[fast] <= 950
    assert end_s <= 10.0 * 1.1, "ten seconds' work for both together"


def test_silent_stream_does_not_delay_end() -> None:
    schedule, (fast, silent) = schedule_of(10, 2)
    assert draw_all(schedule, silent, 0.0)
    end_s, landed = run(schedule, {fast: 100 * SIZE, silent: 0.0})
    assert end_s < 2.0
    assert landed == {fast: 10, silent: 0}


def test_no_needless_second_request() -> None:
    schedule, (busy, idle) = schedule_of(REQUESTS_FIRST, 2)
    draw_all(schedule, busy, 0.0)
    busy.silent_s = RESCUE_S / 2
    assert draw_all(schedule, idle, 0.1) == []
    busy.silent_s = RESCUE_S * 2
    assert len(draw_all(schedule, idle, 1.0)) == 1, "one at a time"


def test_blocks_of_ended_stream_are_returned() -> None:
    schedule, (first, second) = schedule_of(REQUESTS_FIRST, 2)
    draw_all(schedule, first, 0.0)
    assert draw_all(schedule, second, 0.0) == []
    assert schedule.leave(first)
    assert len(draw_all(schedule, second, 0.0)) == REQUESTS_FIRST
    assert not schedule.is_done


def test_block_of_two_streams_is_not_returned() -> None:
    schedule, (first, second) = schedule_of(1, 2)
    draw_all(schedule, first, 0.0)
    first.silent_s = 10.0
    draw_all(schedule, second, 10.0)
    assert not schedule.leave(first)
    deliver(schedule, second, 11.0)
    assert schedule.is_done


ACTIONS = st.sampled_from(["draw", "deliver", "wait", "end", "enter"])


@given(st.integers(0, 30), st.lists(st.tuples(ACTIONS, st.integers(0, 5))))
def test_every_block_is_fetched(count: int, actions: list[tuple[str, int]]) -> None:
    """Streams draw, deliver, fall silent, end and come, in any order; whoever stays can land all the rest."""
    schedule, streams = schedule_of(count, 2)
    now = 0.0
    for action, which in actions:
        now += 0.3
        stream = streams[which % len(streams)]
        if action == "draw":
            schedule.draw(stream, now)
        elif action == "deliver" and stream.queue:
            deliver(schedule, stream, now)
        elif action == "wait" and stream.queue:
            stream.silent_s += 1.0
        elif action == "end" and len(streams) > 1:
            streams.remove(stream)
            schedule.leave(stream)
        elif action == "enter":
            streams.append(DonorStream())
            schedule.enter(streams[-1])
    keeper, *others = streams
    for stream in others:
        schedule.leave(stream)
    while keeper.queue or draw_all(schedule, keeper, now):
        now += 0.1
        deliver(schedule, keeper, now)
    assert schedule.is_done
