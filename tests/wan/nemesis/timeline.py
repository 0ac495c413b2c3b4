"""What happened, as text and as a picture: a lane for each host, faults as bars, ops as ticks, violations marked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

from tests.wan.nemesis.checker import COMMITTED, Violation
from tests.wan.nemesis.history import Event
from tests.wan.nemesis.progress import Span, World

AROUND_S = 15.0
"""The time before and after a violation that the text names."""
LINES_MAX = 400
WIDTH, LEFT, LANE, ROW, TOP = 1600.0, 150.0, 26.0, 12.0, 60.0
COLOURS = {"cut": "#c0392b", "freeze": "#2980b9", "clock": "#8e44ad", "disk": "#7f8c8d", "kill": "#2c3e50"}
OTHER_COLOUR = "#d35400"
TELLING = {"joined", "left", "unsynced", "crash", "lineage", "leaving", "start", "alone", "unsaved"}


def text(world: World, histories: Mapping[str, Sequence[Event]], violations: Sequence[Violation]) -> str:
    """The faults and the peers' reports around the first violation, a line each; committed ops are counted."""
    at_s = violations[0].at_s if violations else world.end_s
    lines: list[tuple[float, str]] = []
    for span in world.spans:
        lines.append((span.begin_s, f"--- {span.label}"))
        lines.append((span.end_s, f"--- over: {span.label}"))
    for life in world.lives:
        what = "master" if life.is_master else "peer"
        lines += [(life.begin_s, f"--- {what} {life.name} starts"), (life.end_s, f"--- {what} {life.name} has ended")]
    for violation in violations:
        lines.append((violation.at_s, f"!!! {violation}"))
    for peer, events in histories.items():
        lines += _told(peer, events)
    near = sorted(each for each in lines if abs(each[0] - at_s) <= AROUND_S or each[1].startswith(("---", "!!!")))
    shown = near if len(near) <= LINES_MAX else [*near[: LINES_MAX // 2], (0, "..."), *near[-LINES_MAX // 2 :]]
    return "\n".join(f"{at - world.begin_s:9.3f} {line}" if at else line for at, line in shown)


def _told(peer: str, events: Sequence[Event]) -> Iterator[tuple[float, str]]:
    committed, since_s, last_s = 0, 0.0, 0.0
    for event in events:
        what = event.what
        if event.kind == "end" and what["verdict"] == COMMITTED:
            since_s = since_s if committed else event.at_s
            last_s, committed = event.at_s, committed + 1
            continue
        if event.kind == "end":
            line = f"op {what['op']} of step {what['step']}: {what['verdict']}: {what.get('text', '')[:160]}"
        elif event.kind in TELLING:
            said = " ".join(f"{key}={value}" for key, value in what.items())
            line = f"{event.kind} {said[:200]}"
        else:
            continue
        if committed:
            yield since_s, f"peer {peer}: {committed} ops committed, until {last_s - since_s:.2f} s later"
            committed = 0
        yield event.at_s, f"peer {peer}: {line}"
    if committed:
        yield since_s, f"peer {peer}: {committed} ops committed, until {last_s - since_s:.2f} s later"


def svg(
    title: str, world: World, histories: Mapping[str, Sequence[Event]], violations: Sequence[Violation], hosts: int
) -> str:
    """The whole run as a picture that any browser shows."""
    begin_s = min([world.begin_s, *(life.begin_s for life in world.lives)])
    end_s = max([world.end_s, *(life.end_s for life in world.lives), *(each.at_s for each in violations)])
    scale = (WIDTH - LEFT - 20) / max(1e-9, end_s - begin_s)

    def x(at_s: float) -> float:
        return round(LEFT + (min(max(at_s, begin_s), end_s) - begin_s) * scale, 1)

    rows = {host: _rows([span for span in world.spans if host in span.hosts]) for host in range(hosts)}
    tops, y = {}, TOP
    for host in range(hosts):
        tops[host] = y
        y += LANE + ROW * (1 + max(rows[host].values(), default=0))
    height = y + 20 + 14 * min(len(violations), 20)
    parts = [_begin(title, height), *_axis(begin_s, end_s, world.begin_s, x, y)]
    masters = {life.host for life in world.lives if life.is_master}
    for host in range(hosts):
        top = tops[host]
        name = f"{'master' if host in masters else 'peer'} on {host}"
        parts.append(f'<text x="8" y="{top + 14}">{name}</text>')
        for life in world.lives:
            if life.host == host:
                width = max(1.0, x(life.end_s) - x(life.begin_s))
                box = f'x="{x(life.begin_s)}" y="{top}" width="{width:.1f}" height="{LANE - 8}"'
                parts.append(f'<rect {box} fill="#ecf0f1" stroke="#bdc3c7"><title>{escape(life.name)}</title></rect>')
        for index, span in enumerate(each for each in world.spans if host in each.hosts):
            width = max(2.0, x(span.end_s) - x(span.begin_s))
            box = f'x="{x(span.begin_s)}" y="{top + LANE - 6 + ROW * rows[host][index]}" width="{width:.1f}"'
            colour = COLOURS.get(span.label.partition(" ")[0], OTHER_COLOUR)
            label = f"{span.label}, {span.end_s - span.begin_s:.1f} s"
            parts.append(f'<rect {box} height="{ROW - 3}" fill="{colour}"><title>{escape(label)}</title></rect>')
    for peer, events in histories.items():
        parts += _ticks(events, tops[int(peer.partition(".")[0])], x)
    for number, violation in enumerate(violations[:20]):
        place = x(violation.at_s)
        parts.append(f'<line x1="{place}" y1="{TOP - 12}" x2="{place}" y2="{y}" stroke="#e74c3c" stroke-width="2"/>')
        parts.append(f'<text x="{place + 3}" y="{TOP - 4}" fill="#e74c3c">{number + 1}</text>')
        words = escape(f"{number + 1}. {violation}".splitlines()[0][:240])
        parts.append(f'<text x="8" y="{y + 16 + 14 * number}" fill="#e74c3c">{words}</text>')
    return "\n".join([*parts, "</svg>"])


def _begin(title: str, height: float) -> str:
    size = f'width="{WIDTH:.0f}" height="{height:.0f}" viewBox="0 0 {WIDTH:.0f} {height:.0f}"'
    style = 'font-family="sans-serif" font-size="11"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n<rect width="100%" height="100%" fill="white"/>'
    return f'{head}\n<text x="8" y="18" font-size="14">{escape(title)}</text>'


def _axis(begin_s: float, end_s: float, zero_s: float, x: Callable[[float], float], bottom: float) -> Iterator[str]:
    every_s = next(each for each in (1, 2, 5, 10, 20, 60, 300, 1200, 10**9) if (end_s - begin_s) / each <= 40)
    number = int((begin_s - zero_s) // every_s) + 1
    while zero_s + number * every_s < end_s:
        place = x(zero_s + number * every_s)
        yield f'<line x1="{place}" y1="{TOP - 12}" x2="{place}" y2="{bottom}" stroke="#f0f0f0"/>'
        yield f'<text x="{place}" y="{TOP - 18}" fill="#7f8c8d">{number * every_s} s</text>'
        number += 1


def _rows(spans: Sequence[Span]) -> dict[int, int]:
    """The row of each span, so that those that overlap do not hide each other."""
    rows: dict[int, int] = {}
    ends: list[float] = []
    order = sorted(range(len(spans)), key=lambda index: spans[index].begin_s)
    for index in order:
        span = spans[index]
        free = next((row for row, end_s in enumerate(ends) if end_s <= span.begin_s), None)
        if free is None:
            free = len(ends)
            ends.append(0.0)
        ends[free] = span.end_s
        rows[index] = free
    return rows


def _ticks(events: Sequence[Event], top: float, x: Callable[[float], float]) -> Iterator[str]:
    """Steps in green and aborts in orange, at most one of a kind to a pixel; joins and ends of sessions as letters."""
    drawn: set[tuple[str, int]] = set()
    for event in events:
        colour = ""
        if event.kind in ("state", "trained"):
            colour = "#27ae60"
        elif event.kind == "end" and event.what["verdict"] != COMMITTED:
            colour = "#e67e22"
        place = x(event.at_s)
        if colour and (colour, int(place)) not in drawn:
            drawn.add((colour, int(place)))
            yield f'<line x1="{place}" y1="{top + 2}" x2="{place}" y2="{top + LANE - 10}" stroke="{colour}"/>'
        if event.kind in ("joined", "left", "crash"):
            letter = {"joined": "J", "left": "L", "crash": "X"}[event.kind]
            said = escape(str(event.what.get("text", event.what.get("number", ""))))
            yield f'<text x="{place}" y="{top + 13}" font-weight="bold">{letter}<title>{said}</title></text>'
